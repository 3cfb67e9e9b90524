"""The methods of an instance that call the model's own: `generate()`, and what prepares its inputs."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ... import hf
from .calls import Call

if TYPE_CHECKING:
    from .methods import Generation


class _Override:
    """A method of the instance that calls the model's own. name: its name."""

    name: str

    def __init__(self, generation: Generation):
        self.__self__ = generation

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the model's own, which each generate() reads several times."""
        own, known = self.own(), self.__self__.signatures
        function, read = getattr(own, "__func__", None), known.get(self.name)
        if read is None or function is None or read[0] is not function:
            read = known[self.name] = function, inspect.signature(own)
        return read[1]

    def own(self) -> Callable[..., Any]:
        return self.__self__.own(self.name)


class Generate(_Override):
    """The model's own generate(), during which the forwards of this thread may run as graphs."""

    name = hf.GENERATE

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        generation = self.__self__
        arguments = partial(hf.generation_parameters, generation.model, args, kwargs)
        given, began = arguments() if len(args) > 2 else kwargs, time.perf_counter()
        processors = bool(given.get(hf.PROCESSORS))
        stock_loop = all(map(generation.is_stock, hf.LOOP))
        call = Call(given.get(hf.ASSISTANT), hf.other_code(given), stock_loop, processors, hf.tokens_given(args, kwargs))
        with generation.ranks.call(arguments), generation.in_call(call):
            output = hf.with_contiguous_ids(self.own()(*args, **kwargs))
            generation.ranks.generated(output, call.tokens)
            generation.after(call, began)
            return output


class KeptInputs(_Override):
    """The model's own hf.PREPARE_INPUTS, except that a cache which it drops in order to read the text again is emptied and kept.
    (Phi-3 drops it when its frequencies change with the length.) An assisted generation reads no token again that is cached."""

    name = hf.PREPARE_INPUTS

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        calls, cache = self.__self__._thread.calls, hf.cache_in(kwargs)
        if calls and calls[-1].cached and kwargs.get("is_first_iteration"):
            ids = args[0] if args else kwargs["input_ids"]
            kwargs["next_sequence_length"] = ids.shape[1] - calls[-1].cached
        inputs: dict[str, Any] = self.own()(*args, **kwargs)
        if self.__self__.caches.takes(cache) and hf.cache_in(inputs) is None:
            cache.reset()  # type: ignore[no-untyped-call]  # untyped in Transformers
            inputs[hf.CACHE] = cache
        return inputs


class Processors(_Override):
    """The model's own hf.PROCESSORS_OF_CALL, whose result also draws the tokens where the call allows it."""

    name = hf.PROCESSORS_OF_CALL

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        processors, calls = self.own()(*args, **kwargs), self.__self__._thread.calls
        return hf.drawing(processors) if calls and calls[-1].samples else processors
