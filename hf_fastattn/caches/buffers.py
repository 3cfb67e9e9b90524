"""Buffers of K and V: layout, size, reallocation, and moving a window within a buffer."""

from __future__ import annotations

from typing import Any

import torch

from ..hf import CacheLayerMixin


def _buffer(name: str) -> Any:
    """A property over the attribute `name` that tells its layer when the tensor is replaced."""

    def get(layer: Buffered) -> Any:
        return getattr(layer, name)

    def put(layer: Buffered, tensor: torch.Tensor | None) -> None:
        old = get(layer)
        setattr(layer, name, tensor)
        if old is not None and old is not tensor:
            layer.moved()

    return property(get, put)


class Buffered(CacheLayerMixin):
    """A layer whose K and V are buffers, of which decode graphs have the addresses. keys, values: None before the first token.

    They may be replaced by other tensors of the same shape, also by the user's code.
    """

    _keys: Any = None
    _values: Any = None
    keys, values = _buffer("_keys"), _buffer("_values")

    def moved(self) -> None:
        """Called when a buffer was replaced or dropped, and not for the first one: the storage has a new version."""


def kind(states: torch.Tensor) -> tuple[object, ...]:
    return *states.shape[:2], states.shape[3], states.dtype


def describe(keys: torch.Tensor, values: torch.Tensor) -> str:
    kinds = [f"{t.shape[1]} KV heads of {t.shape[3]} in {t.dtype}" for t in (keys, values)]
    return f"{kinds[0] if kinds[0] == kinds[1] else ' and '.join(kinds)} on {keys.device}"


def bytes_per_token(keys: torch.Tensor, values: torch.Tensor) -> int:
    return sum(t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in (keys, values))


def reallocated(old: torch.Tensor, live: int, capacity: int, device: torch.device) -> torch.Tensor:
    """A buffer of `capacity` tokens that begins with the `live` tokens of the old one."""
    # A normal tensor, so that a cache created under inference_mode can be used outside it. Zeros, so that unwritten slots are
    # finite: with a dense mask their weight is 0, and 0 * NaN is NaN.
    with torch.inference_mode(False), torch.no_grad():
        new = torch.zeros((*old.shape[:2], capacity, old.shape[3]), dtype=old.dtype, device=device)
        new[:, :, :live].copy_(old[:, :, :live])
    return new


def slide(buffer: torch.Tensor, states: torch.Tensor, start: int, old: int, keep: int) -> torch.Tensor:
    """The `old` tokens before slot `start`, then the new ones. The last `keep` of all tokens move to the front of the buffer."""
    kept = min(start, max(old, keep - states.shape[2]))
    tokens = torch.cat([buffer[:, :, start - kept : start], states], 2) if kept else states
    buffer[:, :, :keep].copy_(tokens[:, :, tokens.shape[2] - keep :])
    return tokens[:, :, kept - old :]
