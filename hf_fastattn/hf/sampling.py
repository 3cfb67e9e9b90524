"""The draw of a token in one launch, where the last logits processors are Transformers' own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process

from .llama import module_of

if TYPE_CHECKING:
    from ..kernels.decode import sample

__all__ = ["Sampling", "drawing", "needs_only_tokens"]

_ORDER = (  # of Transformers, with the names of their parameters and of those in sample.Settings
    (logits_process.TemperatureLogitsWarper, "temperature"),
    (logits_process.TopKLogitsWarper, "top_k"),
    (logits_process.TopPLogitsWarper, "top_p"),
    (logits_process.MinPLogitsWarper, "min_p"),
)


def needs_only_tokens(model: PreTrainedModel, config: GenerationConfig, mode: object) -> bool:
    """Whether a generate() is Transformers' own sampling, and returns no scores."""
    own = getattr(type(model), "_sample", None) is GenerationMixin._sample
    return own and getattr(mode, "value", mode) == "sample" and not (config.return_dict_in_generate and config.output_scores)


def drawing(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Processors that also draw the tokens; the same ones if their class has other code."""
    return Sampling(processors) if type(processors) is LogitsProcessorList else processors


class Sampling(LogitsProcessorList):
    """Logits processors whose last ones, softmax and torch.multinomial run in one launch. It draws the same tokens.

    What it returns is for softmax over the last dimension and then for torch.multinomial of one token alone.
    """

    def __init__(self, processors: Sequence[Any]):
        super().__init__(processors)
        from ..kernels.decode import sample  # with Triton

        self.takes = sample.takes
        self.sampler = sample.Sampler()

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        first, settings = split(self)
        scores = LogitsProcessorList(self[:first])(input_ids, scores, **kwargs)
        last = LogitsProcessorList(self[first:])
        if not self.takes(scores):
            return last(input_ids, scores, **kwargs)
        return Undrawn(lambda: self.sampler(scores, settings), lambda: last(input_ids, scores))


class Undrawn:
    """Scores, and then probabilities, from which nothing but one token of each row is wanted.

    draw() returns these tokens, value() the scores. Other functions of torch than softmax and multinomial get the value.
    """

    def __init__(self, draw: Callable[[], torch.Tensor], value: Callable[[], torch.Tensor], normalised: bool = False):
        self.draw, self.value, self.normalised = draw, value, normalised

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given, named = args[0], {name: value for name, value in (kwargs or {}).items() if value is not None}
        if isinstance(given, cls) and len(args) == 1:
            softmax = func is torch.nn.functional.softmax and not given.normalised
            if softmax and named.pop("dim", None) == -1 and not named.keys() - {"_stacklevel"}:
                value = given.value
                return cls(given.draw, lambda: value().softmax(-1), normalised=True)
            if func is torch.multinomial and given.normalised and named == {"num_samples": 1}:
                return given.draw()
        return func(*(one.value() if isinstance(one, cls) else one for one in args), **(kwargs or {}))


def split(processors: Sequence[Any]) -> tuple[int, sample.Settings]:
    """(the number of the first processors that run as they are, what the others do)."""
    from ..kernels.decode import sample

    first, place, found = len(processors), len(_ORDER), {}
    while first:
        last = processors[first - 1]
        at = next((i for i, (cls, _) in enumerate(_ORDER[:place]) if type(last) is cls), None)
        if (
            at is None
            or module_of(type(last).__call__) != logits_process.__name__
            or getattr(last, "filter_value", -math.inf) != -math.inf
        ):
            break
        name = _ORDER[at][1]
        if name == "top_k" and last.top_k > sample.MOST_K:
            break
        if name in ("top_p", "min_p") and last.min_tokens_to_keep != 1:
            break
        found[name], first, place = getattr(last, name), first - 1, at
    return first, sample.Settings(**found)
