"""Attention of models with code of their own for it (Bloom, MPT, Falcon) by a backend in its place."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from ... import hf
from ...attention.function import attention_forward
from . import subclass


def replace(model: hf.PreTrainedModel, backend: str) -> None:
    """Let the attention of the layers run a backend, if its code is the model's own."""
    if (found := hf.own_attention(model)) is not None:
        for module in model.modules():
            names = {each.__name__ for each in type(module).__mro__}
            if found.attention in names:
                subclass.replace(module, _fuse(found, backend))
            elif found.layer in names:
                subclass.replace(module, _without_weights)


@cache
def _fuse(found: hf.OwnAttention, backend: str) -> subclass.Fuse:
    return partial(_attention, found, backend)


def _attention(found: hf.OwnAttention, backend: str, forward: subclass.Forward) -> subclass.Forward:
    return found.forward(partial(attention_forward, backend))


def _without_weights(forward: subclass.Forward) -> subclass.Forward:
    def run(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("output_attentions"):
            raise ValueError(
                f"This patched {type(self).__name__} never forms the attention weights that output_attentions=True requests. "
                "Call hf_fastattn.unpatch() on the model to get them."
            )
        return forward(self, *args, **kwargs)

    return run
