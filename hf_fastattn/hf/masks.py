"""Transformers' mask functions: the pattern that a model requests, and dense masks for patterns that spans cannot express."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.masking_utils import and_masks, bidirectional_mask_function, causal_mask_function, sdpa_mask

from .caches import CACHE, as_masked, check_window, has_window
from .own_code import counts_without_mask
from .source import modeling_source

Flags = tuple[bool, bool, bool]  # of a mask function: use_vmap, allow_is_causal_skip, allow_is_bidirectional_skip
Runs = tuple[int | None, int | None]  # the window, and the chunk that is counted from the beginning of the row


def mask_pattern(
    mask_function: Callable[..., bool], config: PreTrainedConfig | None, q_length: int, local_size: int | None, flags: Flags
) -> tuple[bool, int | None] | None:
    """(causal, window) if Transformers requests a plain pattern that spans can express, else None.

    Overlays (packed sequences, image blocks, user masks) set use_vmap or clear their skip flag. The flag is also cleared for a
    single decoded token with a compileable cache, for which an overlay has no effect.
    """
    use_vmap, causal_skip, bidirectional_skip = flags
    if use_vmap:
        return None
    if mask_function is bidirectional_mask_function:
        return (False, None) if bidirectional_skip else None
    if bidirectional_skip:
        # Transformers counts the keys on one side, without the query's own.
        return (False, local_size + 1) if local_size is not None and _is_on_both_sides(mask_function) else None
    if mask_function is causal_mask_function:
        return True, None
    if not (causal_skip or q_length == 1):
        return None
    # Sliding layers pass their window as local_size. Chunked layers pass their chunk, which is another pattern.
    window = getattr(config, "sliding_window", None)
    if local_size is not None and local_size == window and local_size != getattr(config, "attention_chunk_size", None):
        if not torch.compiler.is_compiling():  # it cannot trace how the model's source is read
            if not has_window(config):
                return True, None  # which no layer reads (Qwen2-MoE requests it, and its window is 0)
            check_window(window)
        return True, local_size
    return None


_AND = "and_masks.<locals>.and_mask"
_BOTH_SIDES = {_AND, "sliding_window_bidirectional_overlay.<locals>.inner_mask", "bidirectional_mask_function"}

# The parts of a causal mask in which each query sees the end of a run of keys: packed sequences, chunks, a window.
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
_CHUNKS = "chunked_overlay.<locals>.inner_mask"
# Functions that see no more than one of the functions that they consist of.
_NARROWER = {_AND, "remap_positions_for_packed_sequence.<locals>.inner_mask"}
_RUNS = {*_NARROWER, _WINDOW, "causal_mask_function", "packed_sequence_mask_function.<locals>.inner_mask", _CHUNKS}

_AND_CODE = and_masks(causal_mask_function).__code__  # in a compiled graph a nested function has its code, and not its name


def runs_pattern(
    mask_function: Callable[..., bool], config: PreTrainedConfig | None, local_size: int | None, flags: Flags
) -> Runs | None:
    """(window, chunk) if each query sees the keys of its run up to its own (packed sequences, chunks); else None.

    The parts of the mask function decide. In a compiled graph they cannot be read: the function's code and the flags for packed
    sequences decide, and models whose masks may have blocks in which tokens see later ones (images, prefixes) get a dense mask.
    """
    use_vmap, causal_skip, bidirectional_skip = flags
    if use_vmap or bidirectional_skip or getattr(mask_function, "__code__", None) is not _AND_CODE:
        return None
    if torch.compiler.is_compiling():
        if causal_skip or config is None or _may_have_blocks(type(config)):
            return None
        chunked = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
        return None if chunked else local_size, None
    found = _parts(mask_function, _RUNS)
    if "causal_mask_function" not in found:
        return None
    return found[_WINDOW][0] if _WINDOW in found else None, found[_CHUNKS][0] if causal_skip and _CHUNKS in found else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _may_have_blocks(config_class: type) -> bool:
    """Whether the models of a config class combine a causal mask with others, as far as their source says."""
    source = modeling_source(config_class)
    return not source or re.search("block_sequence_ids|blockwise|or_mask_function", source) is not None


def _is_on_both_sides(mask_function: Callable[..., Any]) -> bool:
    """Whether each query sees a window of keys before and after it. In a compiled graph the code of the function decides."""
    if getattr(mask_function, "__code__", None) is not _AND_CODE:
        return False
    return torch.compiler.is_compiling() or _parts(mask_function, _BOTH_SIDES).keys() == _BOTH_SIDES


def _parts(mask_function: Callable[..., Any], known: set[str]) -> dict[str, list[Any]]:
    """The functions that a mask function consists of, by name, and what each of them holds; {} if one is not known."""
    found: dict[str, list[Any]] = {}
    todo: list[Any] = [mask_function]
    while todo:
        function = todo.pop()
        if (held := _held(function, known)) is None:
            return {}
        found[function.__qualname__] = held
        todo += _functions(held)
    return found


def _held(function: Any, known: set[str]) -> list[Any] | None:
    """What a mask function of Transformers holds, if it is one of these, else None."""
    if getattr(function, "__module__", None) != masking_utils.__name__ or function.__qualname__ not in known:
        return None
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _functions(held: list[Any]) -> list[Any]:
    """The functions among what a mask function holds; and_masks() holds a tuple of them."""
    return [x for each in held for x in (each if isinstance(each, tuple) else (each,)) if callable(x)]


def is_causal(mask_function: Callable[..., Any]) -> bool:
    """Whether no query sees a later key, as far as the parts of the mask function say."""
    return mask_function is causal_mask_function or any(map(is_causal, _functions(_held(mask_function, _NARROWER) or [])))


def up_to_query(mask_function: Callable[..., Any]) -> Callable[..., Any]:
    """The mask function without the keys after the query."""
    return and_masks(mask_function, causal_mask_function)


def run_starts(mask_function: Callable[..., Any], batch: int, q_length: int, device: torch.device | str) -> torch.Tensor:
    """The beginnings of the runs of `runs_pattern`, bool (batch, q_length): queries that do not see the previous key."""
    slots = torch.arange(q_length, device=device)
    rows = torch.arange(batch, device=device)[:, None]
    seen = mask_function(rows, rows.new_zeros(1), slots[None], (slots - 1).clamp(min=0)[None])
    return (~seen | (slots == 0)).expand(batch, -1)  # type: ignore[no-any-return]


def dense_mask(**arguments: Any) -> torch.Tensor:
    """Transformers' bool mask (batch, 1, q_len, kv_len), True where attended; arguments: those of a mask function."""
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(**{**arguments, **skips})  # type: ignore[return-value]  # None only if a skip is allowed


def decode_mask(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor | dict[str, torch.Tensor] | None:
    """The mask of the model's layers for the inputs of one step: a tensor, or a dict of tensors by kind of layer.

    None if a model whose layers need several makes them itself and takes none (PaliGemma over Gemma 2). Of one that counts the
    tokens of a mask (ALiBi) it is that mask, bool (rows, slots).
    """
    ids = inputs["input_ids"]
    if inputs["attention_mask"] is None and counts_without_mask(model.config):
        slots = torch.arange(inputs[CACHE].get_mask_sizes(ids.shape[1], 0)[0], device=ids.device)
        live: torch.Tensor = slots < inputs[CACHE].get_seq_length() + ids.shape[1]
        return live.expand(len(ids), -1)
    create: Callable[..., torch.Tensor | dict[str, torch.Tensor] | None]
    create = getattr(model, "create_masks_for_generate", masking_utils.create_masks_for_generate)
    made = create(
        config=as_masked(model.config),
        inputs_embeds=ids.new_empty((*ids.shape, 0), dtype=model.dtype),
        attention_mask=inputs["attention_mask"],
        **{CACHE: inputs[CACHE]},
        position_ids=inputs.get("position_ids"),
        block_sequence_ids=inputs.get("block_sequence_ids"),
        token_type_ids=inputs.get("token_type_ids"),
        mm_token_type_ids=inputs.get("mm_token_type_ids"),
        is_first_iteration=False,
    )
    config_class: type = type(model.config)
    return None if isinstance(made, dict) and _takes_one(config_class) else made


@cache
def _takes_one(config_class: type) -> bool:
    """Whether the models of a config class make their masks from what they are given, which must not be a dict."""
    source = modeling_source(config_class)
    return "create_causal_mask(" in source and re.search(r"isinstance\(.*\bdict\)", source) is None
