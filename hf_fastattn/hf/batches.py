"""Transformers' continuous batching: its arguments and results, which generate_batch() of a patched model has too."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from .generation import PROCESSORS_OF_CALL
from .longrope import KIND, rope_types

__all__ = [
    "GenerationOutput",
    "RequestStatus",
    "StringEnds",
    "batch_settings",
    "ends_of",
    "longest_embedded",
    "longest_rotated",
    "page_size_of",
    "processors_of",
    "progress",
    "reads_ids",
    "takes_argument",
]

# Whose result depends on the scores alone.
_OF_SCORES = frozenset(
    f"{name}{kind}"
    for name in ("Temperature", "TopK", "TopP", "TopH", "MinP", "Typical", "Epsilon", "Eta", "SuppressTokens", "InfNanRemove")
    for kind in ("LogitsWarper", "LogitsProcessor")
) | {"LogitNormalization"}


def batch_settings(
    model: PreTrainedModel, config: GenerationConfig | None, kwargs: dict[str, Any]
) -> tuple[GenerationConfig, Callable[[int], int], dict[str, Any]]:
    """(the configuration of a call, the most new tokens of a prompt by its length, the arguments that are in neither)."""
    default = kwargs.get("max_length") is None and (config is None or config.max_length is None)
    generates: Any = model
    made, others = generates._prepare_generation_config(copy.deepcopy(config), **kwargs)
    for unset in ("output_attentions", "output_hidden_states", "use_cache"):  # which it adds for the forward
        if others.get(unset) is None or others.get(unset) == getattr(made, unset, None):
            others.pop(unset, None)
    generates._prepare_special_tokens(made, True, device=model.device)

    def limit(prompt: int) -> int:
        if made.max_new_tokens is not None:
            return int(made.max_new_tokens)
        longest = 20 if made.max_length is None else int(made.max_length)
        return longest if default else longest - prompt

    return made, limit, others


def page_size_of(config: ContinuousBatchingConfig) -> int:
    """The number of tokens of a page, whose name has changed."""
    size: int = getattr(config, "page_size", None) or getattr(config, "block_size", None) or 0
    return size


def processors_of(
    model: PreTrainedModel, config: GenerationConfig, prompt: int, limit: int, more: Sequence[Any] | None
) -> list[Any]:
    """The logits processors for a prompt of so many tokens and at most `limit` new ones, with those of the caller."""
    added, config = logits_process.LogitsProcessorList(more or []), copy.copy(config)
    config.max_length = prompt + limit  # as generate() sets both
    config.min_length = config.min_length if config.min_new_tokens is None else prompt + config.min_new_tokens
    found = getattr(model, PROCESSORS_OF_CALL)
    return list(found(config, input_ids_seq_length=prompt, logits_processor=added, device=str(model.device), model_kwargs={}))


def reads_ids(processor: object) -> bool:
    """Whether a logits processor may read the ids of the text."""
    cls = type(processor)
    return not (cls.__module__ == logits_process.__name__ and cls.__name__ in _OF_SCORES)


class StringEnds:
    """Tells which texts end with one of stop_strings. tokens: how many of their last ids it reads."""

    def __init__(self, tokenizer: Any, strings: Any):
        self.criterion = stopping_criteria.StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
        self.tokens: int = self.criterion.maximum_token_len

    def __call__(self, texts: list[list[int]]) -> list[bool]:
        """texts: their last ids. One call of Transformers' code for each number of them takes far less time than one for each."""
        found = [False] * len(texts)
        for length in {len(ids) for ids in texts}:
            some = [index for index, ids in enumerate(texts) if len(ids) == length]
            ends = self.criterion(torch.tensor([texts[index] for index in some], device="cpu"), None).tolist()
            for index, end in zip(some, ends, strict=True):
                found[index] = end
        return found


def longest_rotated(model: PreTrainedModel) -> int | None:
    """The longest text whose parts all have the same rotary frequencies; None if any text has."""
    found = []
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        for layer, kind in rope_types(module).items():
            if kind in (KIND, "dynamic"):
                rope = config.rope_parameters if layer is None else config.rope_parameters[layer]
                found.append(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    return min(found, default=None)


def longest_embedded(model: PreTrainedModel) -> int | None:
    """The number of positions of which the model has a table, learned or computed before; None if it has none. What indexes it
    beyond its end ends the process on a GPU."""
    config: Any = model.config.get_text_config(decoder=True)
    limit: int | None = getattr(config, "max_position_embeddings", None)
    words = model.get_input_embeddings()
    for module in model.modules():
        tables = [buffer for buffer in module._buffers.values() if buffer is not None and buffer.dim() == 2]
        if isinstance(module, torch.nn.Embedding) and module is not words:
            tables.append(module.weight)
        if any(len(table) - getattr(module, "offset", 0) == limit for table in tables):
            return limit
    return None


def ends_of(eos: Any) -> list[int]:
    """The ids of which each ends a text, of an eos_token_id."""
    eos = eos.tolist() if isinstance(eos, torch.Tensor) else eos
    return [] if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]


def takes_argument(model: PreTrainedModel, name: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    return name in inspect.signature(model.forward).parameters


@contextmanager
def progress(requests: int, shown: bool) -> Iterator[Callable[[int], object] | None]:
    """A bar on the terminal, as a function that takes numbers of finished requests; None if it is not shown."""
    if not shown:
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=requests, desc=f"Solving {requests} requests", unit="request") as bar:
        yield bar.update
