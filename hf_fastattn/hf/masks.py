"""Transformers' mask functions: what a model asks for, and a dense mask where spans do not suffice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, create_masks_for_generate, sdpa_mask


def mask_pattern(
    mask_function: Callable[..., bool],
    config: PreTrainedConfig | None,
    q_length: int,
    local_size: int | None,
    use_vmap: bool,
    causal_skip: bool,
    bidirectional_skip: bool,
) -> tuple[bool, int | None] | None:
    """(causal, window) where Transformers asks for a plain pattern that spans can say, else None.

    Overlays (packed sequences, image blocks, user masks) come with use_vmap or with their skip flag off. One decoded
    token of a compileable cache has the flag off too, and there an overlay adds nothing.
    """
    if use_vmap:
        return None
    if mask_function is bidirectional_mask_function:
        return (False, None) if bidirectional_skip else None
    if bidirectional_skip:  # a window on both sides: no model whose encoder has one is worth a pattern of its own
        return None
    if not (causal_skip or q_length == 1):
        return None
    if mask_function is causal_mask_function:
        return True, None
    # Sliding layers hand their window as local_size; so do chunked ones with their chunk, which is another pattern.
    window = getattr(config, "sliding_window", None)
    if local_size is not None and local_size == window and local_size != getattr(config, "attention_chunk_size", None):
        return True, local_size
    return None


def dense_mask(**arguments: Any) -> torch.Tensor:
    """Transformers' own bool mask (batch, 1, q_len, kv_len), True where attended; arguments as a mask function gets them."""
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(**{**arguments, **skips})  # type: ignore[return-value]  # None only where a skip is allowed


def decode_mask(model: PreTrainedModel, inputs: dict[str, Any]) -> torch.Tensor | dict[str, torch.Tensor] | None:
    """What the model's layers get as mask for these inputs of one step: a tensor, or a dict of them by kind of layer."""
    ids = inputs["input_ids"]
    create: Callable[..., torch.Tensor | dict[str, torch.Tensor] | None]
    create = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    return create(
        config=model.config,
        inputs_embeds=ids.new_empty((*ids.shape, 0), dtype=model.dtype),
        attention_mask=inputs["attention_mask"],
        past_key_values=inputs["past_key_values"],
        position_ids=inputs.get("position_ids"),
        block_sequence_ids=inputs.get("block_sequence_ids"),
        token_type_ids=inputs.get("token_type_ids"),
        mm_token_type_ids=inputs.get("mm_token_type_ids"),
        is_first_iteration=False,
    )
