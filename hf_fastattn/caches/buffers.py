"""Buffers of a layer: layout, size, reallocation, rows, and moving a window within a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import hf, registry
from ..attention.step import Step
from ..hf import CacheLayerMixin
from ..kernels.host import gpu

Pair = tuple[torch.Tensor, torch.Tensor]  # K and V


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


class Part(NamedTuple):
    """A tensor of a storage: rows on axis 0, slots on axis 2. layer: the index of its layer. name: one of the layer's `names`.

    slots: how many of them, from the first on, hold tokens; None for a state, which a step replaces and does not add to.
    """

    tensor: torch.Tensor
    layer: int
    name: str
    slots: int | None


class Buffered(CacheLayerMixin):
    """A layer whose tensors are in buffers, of which decode graphs have the addresses. `names`, `joined` and `split` say what it
    caches of K and V; the default is both.

    buffers: as many as names, (batch, heads, slots, width) each, or none before anything is allocated. keys, values: the live
    tokens, (batch, num_kv_heads, tokens, head_dim), as views of the buffers, so writes in place change the cache; None without
    buffers. Other tensors may be assigned, as to a DynamicLayer.
    """

    is_compileable = False  # with True, generate() would start torch.compile by itself; decode graphs do not read this
    is_croppable = True
    index: int
    names: tuple[str, ...] = ("keys", "values")
    buffers: Any = ()
    keys, values = _live(0), _live(1)

    def joined(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the buffers hold of K and V (batch, num_kv_heads, tokens, head_dim): (batch, heads, tokens, width) each."""
        return keys, values

    def split(self, *held: torch.Tensor) -> Pair:
        """The reverse of joined(): K and V, as views of what the buffers hold."""
        return held[0], held[1]

    @property
    def kv(self) -> Pair:
        """K and V in all slots, as views of the buffers."""
        return self.split(*self.buffers)

    @property
    def slots(self) -> int | None:
        """Number of slots that hold tokens, from the first on; None if the buffers are states."""
        raise NotImplementedError

    @property
    def batch_size(self) -> int | None:
        return self.buffers[0].shape[0] if self.buffers else None

    def finds_kv(self, step: Step | None) -> bool:
        """Whether attention finds `step.kv`: that of a patched model, which is not compiled."""
        config: Any = None if step is None or step.model is None else step.model.config
        return config is not None and not torch.compiler.is_compiling() and config._attn_implementation in registry.names()

    def parts(self) -> list[Part]:
        slots = self.slots
        return [Part(buffer, self.index, name, slots) for name, buffer in zip(self.names, self.buffers, strict=False)]

    def movable(self) -> list[tuple[torch.Tensor, int | None]]:
        """The buffers with their slots, or views of them of another width, as `decode.reorder` permutes their rows."""
        return [(buffer, self.slots) for buffer in self.buffers]

    def clear(self) -> None:
        """Discard the buffers."""
        if self.buffers:
            self.moved()
        self.buffers = []
        super().__init__()  # type: ignore[no-untyped-call]

    def select(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in place if their number does not change."""
        if self.buffers and len(indices) != self.batch_size:
            self.moved()
        for index, buffer in enumerate(self.buffers):
            self.buffers[index] = selected(buffer, indices, self.slots)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.select(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("All layers of this cache are cropped together; call crop() of the cache, not of a layer.")

    def offload(self) -> None:
        raise NotImplementedError("This cache cannot be offloaded; use a DynamicCache with offloading=True.")

    prefetch = offload

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
        if new.dim() != 4 or (*layout(new)[1:], new.device) != (*layout(old)[1:], old.device):
            raise ValueError(
                f"{name} of this layer are (rows, {old.shape[1]}, tokens, {old.shape[3]}) in {old.dtype} on {old.device}; got "
                f"{tuple(new.shape)} in {new.dtype} on {new.device}. Assign such a tensor, or use a DynamicCache."
            )
        refuse_gradient(new)
        self.replace(index, old, new)

    def moved(self) -> None:
        """Called when a buffer was replaced or dropped, and not for the first one: the storage has a new version."""


def devices_of(layers: Sequence[Buffered], device: torch.device, step: Step | None) -> list[torch.device] | None:
    """Where these layers of a model compute, of which the first one does on `device`; None if that is not known, or if their
    buffers differ in size."""
    model = None if step is None else step.model
    if isinstance(model, hf.PreTrainedModel):
        shapes = hf.layer_shapes(model.config)
        if len({shapes[layer.index] for layer in layers if layer.index < len(shapes)}) > 1:
            return None
    if torch.cuda.device_count() <= 1:
        return [device] * len(layers)
    held = hf.layer_devices(model)
    found = [held[layer.index] for layer in layers if layer.index in held]
    return found if len(found) == len(layers) and {each.type for each in found} == {device.type} else None


def refuse_gradient(*states: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(x.requires_grad for x in states):
        raise RuntimeError(
            "This cache is written in place and carries no gradient. Run under torch.no_grad(), or pass use_cache=False."
        )


def layout(states: torch.Tensor) -> tuple[object, ...]:
    return *states.shape[:2], states.shape[3], states.dtype


def describe(keys: torch.Tensor, values: torch.Tensor) -> str:
    kinds = [f"{t.shape[1]} KV heads of {t.shape[3]} in {t.dtype}" for t in (keys, values)]
    return f"{kinds[0] if kinds[0] == kinds[1] else ' and '.join(kinds)} on {keys.device}"


def cast(*states: torch.Tensor) -> Pair:
    """K and V in the dtype in which attention computes them. Raises RuntimeError for those with a gradient."""
    refuse_gradient(*states)
    kind = gpu.autocast_type(states[0].device)
    if torch.is_autocast_enabled(kind):  # attention casts queries so, and a part of the model's operations K or V
        states = tuple(x.to(torch.get_autocast_dtype(kind)) for x in states)
    return states[0], states[1]


def reallocated(old: torch.Tensor, live: int, capacity: int, device: torch.device) -> torch.Tensor:
    """A buffer of `capacity` tokens that begins with the `live` tokens of the old one."""
    # A normal tensor, so that a cache created under inference_mode can be used outside it. Zeros, so that unwritten slots are
    # finite: with a dense mask their weight is 0, and 0 * NaN is NaN.
    with torch.inference_mode(False), torch.no_grad():
        new = torch.zeros((*old.shape[:2], capacity, old.shape[3]), dtype=old.dtype, device=device)
        if live:
            new[:, :, :live].copy_(old[:, :, :live])
    return new


def selected(buffer: torch.Tensor, indices: torch.Tensor, slots: int | None = None) -> torch.Tensor:
    """Rows `indices` of a buffer, in place if their number does not change. slots: see `Part`."""
    live = buffer if slots is None else buffer[:, :, :slots]
    with torch.inference_mode(False):  # a normal tensor, as of reallocated()
        rows = live.index_select(0, indices.to(buffer.device))
        if len(rows) == len(buffer):
            live.copy_(rows)
            return buffer
    return rows if slots is None else reallocated(rows, slots, buffer.shape[2], buffer.device)


def slide(buffer: torch.Tensor, states: torch.Tensor, start: int, old: int, keep: int) -> torch.Tensor:
    """The `old` tokens before slot `start`, then the new ones. The last `keep` of all tokens move to the front of the buffer."""
    kept = min(start, max(old, keep - states.shape[2]))
    tokens = torch.cat([buffer[:, :, start - kept : start], states], 2) if kept else states
    buffer[:, :, :keep].copy_(tokens[:, :, tokens.shape[2] - keep :])
    return tokens[:, :, kept - old :]
