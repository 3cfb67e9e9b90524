"""Buffers of K and V: layout, size, reallocation, and moving a window within a buffer."""

from __future__ import annotations

from typing import Any

import torch

from ..hf import CacheLayerMixin


def _live(index: int) -> Any:
    """A property: the live tokens of K (index 0) or V (1)."""
    return property(lambda layer: layer.shown(index), lambda layer, tensor: layer.assigned(index, tensor))


class _Unknown(torch.Tensor):
    """The live tokens in a captured step: only that there are some is known (Mllama asks for numel() > 0)."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.numel:
            raise RuntimeError("K and V of a cache are read or replaced in the step")
        return 1


UNKNOWN = torch.ones(1, device="cpu").as_subclass(_Unknown)


class Buffered(CacheLayerMixin):
    """A layer whose K and V are in buffers, `_keys` and `_values`, of which decode graphs have the addresses.

    keys, values: the live tokens, (batch, num_kv_heads, tokens, head_dim), as views of the buffers, so writes in place change the
    cache; None before anything is allocated. Other tensors may be assigned, as to a DynamicLayer.
    """

    _keys: Any = None
    _values: Any = None
    keys, values = _live(0), _live(1)

    def shown(self, index: int) -> torch.Tensor | None:
        """The value of `keys` (index 0) or `values` (1); in a captured step, where it is unknown, UNKNOWN."""
        raise NotImplementedError

    def replace(self, index: int, old: torch.Tensor, new: torch.Tensor) -> None:
        """Take `new` in place of the live tokens `old`. It has the heads, the width, the dtype and the device of `old`."""
        raise NotImplementedError

    def assigned(self, index: int, new: object) -> None:
        """Called when `keys` (index 0) or `values` (1) are assigned."""
        old = self.shown(index)
        if new is None and old is None:
            return
        name = ("keys", "values")[index]
        if not isinstance(new, torch.Tensor):
            raise TypeError(f"{name} of a layer are a tensor; got {new!r:.100}. To discard tokens, call reset() of the cache.")
        if old is None or not (old.shape[2] or self.get_seq_length()):  # a share of a sequence may have none of its tokens
            raise ValueError(
                f"This layer holds no tokens whose {name} could be replaced. Give it tokens by update(keys, values, layer_idx) "
                "of the cache."
            )
        if new.dim() != 4 or (*kind(new)[1:], new.device) != (*kind(old)[1:], old.device):
            raise ValueError(
                f"{name} of this layer are (rows, {old.shape[1]}, tokens, {old.shape[3]}) in {old.dtype} on {old.device}; got "
                f"{tuple(new.shape)} in {new.dtype} on {new.device}. Assign such a tensor, or use a DynamicCache."
            )
        refuse_gradient(new)
        self.replace(index, old, new)

    def moved(self) -> None:
        """Called when a buffer was replaced or dropped, and not for the first one: the storage has a new version."""


def buffers(layer: CacheLayerMixin) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The tensors in which a layer keeps K and V."""
    return (layer._keys, layer._values) if isinstance(layer, Buffered) else (layer.keys, layer.values)


def refuse_gradient(*states: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in states):
        raise RuntimeError(
            "This cache is written in place and carries no gradient. Run under torch.no_grad(), or pass use_cache=False."
        )


def kind(states: torch.Tensor) -> tuple[object, ...]:
    return *states.shape[:2], states.shape[3], states.dtype


def describe(keys: torch.Tensor, values: torch.Tensor) -> str:
    kinds = [f"{t.shape[1]} KV heads of {t.shape[3]} in {t.dtype}" for t in (keys, values)]
    return f"{kinds[0] if kinds[0] == kinds[1] else ' and '.join(kinds)} on {keys.device}"


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
