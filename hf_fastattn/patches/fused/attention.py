"""Attention of models with code of their own (Bloom, MPT, Falcon) by a backend in its place."""

from __future__ import annotations

from functools import cache, partial

import torch

from ... import hf
from ...attention import masks
from ...attention.function import attention_forward
from ...kernels import reference
from . import subclass


def replace(model: hf.PreTrainedModel, backend: str) -> None:
    """Let the attention of the layers run a backend, if its code is the model's own."""
    if (found := hf.own_attention(model)) is not None:
        for module in model.modules():
            if type(module).__name__ == found.layer:
                subclass.replace(module, _fuse(model.config.model_type, found, backend))


@cache
def _fuse(model_type: str, found: hf.OwnAttention, backend: str) -> subclass.Fuse:
    return partial(_changed, found, backend)


def _changed(found: hf.OwnAttention, backend: str, forward: subclass.Forward) -> subclass.Forward:
    return found.forward(partial(attention_forward, backend), _dense, forward)


def _dense(mask: object, q_len: int, kv_len: int) -> torch.Tensor:
    if isinstance(mask, masks.Mask):
        return masks.dense(mask)
    return reference.visible(q_len, kv_len, torch.device("cpu"), None, True, None)[:, None]
