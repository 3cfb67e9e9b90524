"""The methods that patch() replaces on an instance for generate(): their names, and the versions in a model's class.

Also the one class of Transformers that it replaces while such a generate() is in progress: `late_stop_checks`.
"""

from __future__ import annotations

import inspect
import re
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, __version__
from transformers.generation import utils

from .llama import module_of
from .version import number_of

GENERATE = "generate"
PREPARE_CACHE = "_prepare_cache_for_generation"  # adds a cache to the arguments of a call
PREPARE_INPUTS = "prepare_inputs_for_generation"  # returns the arguments of one step
PROCESSORS_OF_CALL = "_get_logits_processor"  # returns those of a call
CALL = "_call_impl"  # what model(...) calls: the hooks and forward()
BATCHES = "init_continuous_batching"  # returns a manager, which its own generate_batch() uses
BATCH = "generate_batch"
COMPILED = "_compiled_call_impl"  # what model(...) calls instead after model.compile()

_LOOPS = (GENERATE, "_sample", "_beam_search", "_assisted_decoding", "_get_candidate_generator")
LOOP = (*_LOOPS, PREPARE_INPUTS, "_update_model_kwargs_for_generation")  # what runs between the steps, and decides their masks
FORWARD = "forward"

CUSTOM_LOOP = "custom_generate"
ASSISTANT = "assistant_model"
PROCESSORS = "logits_processor"
CHUNKS_FROM_START = number_of(__version__) < (5, 21)  # a prompt read in chunks is read as if the cache were empty
_CODE = (CUSTOM_LOOP, PROCESSORS, "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")


def other_code(arguments: dict[str, Any]) -> list[str]:
    """The names of those arguments of generate() with code that is not of Transformers and runs between two steps."""
    found = []
    for name in _CODE:
        value = arguments.get(name)
        each = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        if not all(type(one).__module__.startswith("transformers.") for one in each):
            found.append(name)
    return found


def is_stock(method: Callable[..., Any]) -> bool:
    """Whether a method and its wrappers, which take over its __module__, have only code of Transformers and torch."""
    function: Any = method
    while function is not None:
        function = getattr(function, "__func__", function)
        if module_of(function).partition(".")[0] not in ("transformers", "torch"):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def stock(model: PreTrainedModel, name: str) -> Callable[..., Any]:
    """A method of the model's class, ignoring attributes of the instance."""
    return types.MethodType(getattr(type(model), name), model)


def generation_parameters(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of generate() by their names."""
    return {**by_name(stock(model, GENERATE), args), **kwargs}


def by_name(function: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments by their names; without those that the function does not take."""
    found = inspect.signature(function).parameters.values()
    names = [each.name for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]
    return dict(zip(names, args, strict=False))


def tokens_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of ids of each row in the arguments of a call of generate(), 0 without ids."""
    for ids in (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids")):
        if isinstance(ids, torch.Tensor) and not ids.is_floating_point():
            return ids.shape[-1]
    return 0


def width_of_dropped_mask(config: GenerationConfig) -> int | None:
    """The columns of the mask of ones that a call of generate() has dropped, or None."""
    return getattr(config, "_mask_length", None)


def drafts_from_hidden_states(config: GenerationConfig) -> bool:
    """Whether an assisted generation drafts tokens from the hidden states of all tokens before them."""
    return bool(getattr(config, "use_mtp", None)) or getattr(config, "speculation_type", None) == "dflash"


def overrides_generation(model: PreTrainedModel) -> str | None:
    """The method that chooses the cache, if this model's class overrides it; else None."""
    return None if getattr(type(model), PREPARE_CACHE) is getattr(GenerationMixin, PREPARE_CACHE) else PREPARE_CACHE


def generates_by_another(model: PreTrainedModel) -> str | None:
    """The part of the model whose generate() the model's own generate() calls (BLIP-2), or None."""
    own = getattr(type(model), "generate", None)
    if own is None or own is GenerationMixin.generate:
        return None
    try:
        found = re.search(r"self\.(\w+)\.generate\(", inspect.getsource(inspect.unwrap(own)))
    except (OSError, TypeError):
        return None
    return found and found.group(1)


@cache
def bookkeeping() -> frozenset[str]:
    """Attributes of a model instance that generate() reads but forward() does not."""
    own = {name for name in vars(PreTrainedModel) if name.startswith("_")} | set(vars(GenerationMixin))
    plans = {"_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan"}  # how weights are divided when they are loaded
    hooks = {"_require_grads_hook", "_require_grads_hooks"}  # of enable_input_require_grads(), which itself is compared
    return frozenset(own | plans | hooks | {"generation_config", "all_tied_weights_keys", CALL, BATCHES, BATCH})


def generator_of(device: torch.device) -> torch.Generator:
    """The default random number generator of a device."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


class Ahead(Protocol):
    """What a generate() needs whose loop reads one step late whether it has ended.

    random: the generator from which its steps draw, None if they draw nothing.
    """

    random: torch.Generator | None

    def next_is_ready(self, kept: bool) -> bool:
        """Whether a step may be launched now that may turn out to be one too many. kept: whether the caller has the cache."""


_STOP_CHECK = "DeferredStopCheck"
_OwnStopCheck: Any = getattr(utils, _STOP_CHECK, object)
_When = Callable[[torch.device, object], "Ahead | None"]


class _Late(threading.local):
    when: _When | None = None  # of the innermost generate() in this thread


_late = _Late()
_lock = threading.Lock()
_calls = 0  # in progress, in any thread


def _ahead(device: torch.device, cache: object) -> Ahead | None:
    return None if _late.when is None else _late.when(device, cache)


class StopCheck(_OwnStopCheck):  # type: ignore[misc]
    """Transformers' check whether a text has ended, one step late also where the present generate() allows it."""

    def __init__(self, input_ids: torch.Tensor, max_length: int, cache: Any, cache_is_returned: bool, streamer: Any = None):
        with torch.device("cpu"):  # its copies of the flags, whatever torch's default device
            super().__init__(input_ids, max_length, cache, cache_is_returned, streamer)
        theirs = _OwnStopCheck.is_supported(input_ids.device, cache, cache_is_returned, False)
        self.ahead: Ahead | None = None if theirs else _ahead(input_ids.device, cache)
        self.random = None if self.ahead is None else self.ahead.random
        self.states: deque[torch.Tensor] = deque(maxlen=2)  # of the generator, after each of the last two steps

    @staticmethod
    def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
        theirs: bool = _OwnStopCheck.is_supported(device, cache, cache_is_returned, is_assistant)
        if theirs or is_assistant or (cache_is_returned and cache is not None and not cache.is_croppable):
            return theirs
        return _ahead(device, cache) is not None

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        if self.random is not None:
            self.states.append(self.random.get_state())
        stops: bool = super().__call__(*args, **kwargs)
        if stops or self.ahead is None or self.ahead.next_is_ready(self.cache is not None):
            return stops
        flag, _, copied = self.slots[1]  # of this step
        copied.synchronize()
        return bool(flag)

    def finish(self) -> int:
        undone: int = super().finish()
        if undone and self.random is not None and torch.equal(self.random.get_state(), self.states[1]):
            self.random.set_state(self.states[0])  # unless another thread has drawn from it
        return undone


@contextmanager
def late_stop_checks(when: _When) -> Iterator[None]:
    """The time of a generate() in this thread that reads one step late whether it has ended, if when(device, cache) is not None.

    Its loop then launches a step before the device has finished the last one. Transformers itself does so on MPS alone. The step
    that it runs too many is undone, and here the random numbers of that step too. Transformers' class is replaced until the last
    such generate() of any thread has returned; other calls are not changed.
    """
    global _calls
    before, _late.when = _late.when, when
    with _lock:
        _calls += 1
        if getattr(utils, _STOP_CHECK, None) is _OwnStopCheck:  # a later version may have none, another package its own
            setattr(utils, _STOP_CHECK, StopCheck)
    try:
        yield
    finally:
        _late.when = before
        with _lock:
            _calls -= 1
            if not _calls and getattr(utils, _STOP_CHECK, None) is StopCheck:
                setattr(utils, _STOP_CHECK, _OwnStopCheck)


def with_contiguous_ids(output: Any) -> Any:
    """The result of generate(), whose ids are a slice if a step was undone."""
    ids = getattr(output, "sequences", output)
    if not isinstance(ids, torch.Tensor) or ids.is_contiguous():
        return output
    if ids is output:
        return ids.contiguous()
    output.sequences = ids.contiguous()
    return output
