"""The storage of a preallocated cache: its layers and tracks (layers.py), with the interface for pools and decode graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..attention import step as steps
from ..attention.step import EAGER
from ..hf import Kind
from .contract import Storage
from .layers import AHEAD, SLACK, SPARE, Layer, Track
from .memory import free_bytes


class PreallocatedStorage(Storage):
    """The layers and tracks of one cache. The next cache of the same shape reuses the buffers in place."""

    takes_many = takes_prompts = takes_packed = skips_padding = True
    kv_dtype: str | None = None  # of K and V in 8 bits
    layers: list[Any]

    @property
    def most_tokens(self) -> int:  # type: ignore[override]
        """A layer with a window has room for SLACK more than that."""
        return SLACK if any(track.kind.window is not None for track in self.tracks) else 1 << 62

    def __init__(self, kinds: Sequence[Kind], capacity: int, growable: bool = True):
        self.kinds = tuple(kinds)
        tracks = {kind: self.make_track(kind, capacity, growable) for kind in dict.fromkeys(kinds)}
        self.tracks = [*tracks.values()]
        self.layers = [self.make_layer(index, tracks[kind]) for index, kind in enumerate(kinds)]
        self.running: tuple[int, ...] = ()  # indices of the layers that decode graphs write
        self.tables: dict[tuple[int, ...], torch.Tensor] = {}  # addresses of buffers, also as a tensor on their device
        self._own_tracks()

    def make_track(self, kind: Kind, capacity: int, growable: bool) -> Track:
        return Track(kind, capacity, growable)

    def make_layer(self, index: int, track: Track) -> Layer:
        return Layer(index, track)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.tables = {}
        self._own_tracks()

    def _own_tracks(self) -> None:
        for track in self.tracks:
            track.storage = weakref.ref(self)

    @property
    def counted(self) -> list[Layer]:
        """The layers that have K and V, and count tokens."""
        return self.layers

    @property
    def rows(self) -> int | None:
        return next((layer.batch_size for layer in self.counted if layer.is_initialized), None)

    @property
    def seen(self) -> int:
        """Number of tokens in the layers that hold the most."""
        return max(layer.seen for layer in self.counted)

    @property
    def used(self) -> bool:
        return steps.mode(self) != EAGER or self.seen > 0

    @property
    def real_tokens(self) -> torch.Tensor | None:
        return self.tracks[0].live if self.skips_padding and self.tracks else None

    @property
    def version(self) -> int:
        return sum(track.version for track in self.tracks)

    @property
    def capacity(self) -> int:
        return sum(track.capacity for track in self.tracks)

    @property
    def smallest(self) -> int:
        return min((track.capacity for track in self.tracks if track.capacity < track.limit), default=1 << 62)

    @property
    def unused(self) -> int:
        return min((layer.track.capacity - (layer.seen - layer.base) for layer in self.counted), default=0)

    @property
    def keeps_all(self) -> bool:
        return all(track.kind.window is None for track in self.tracks)

    def ahead(self, tokens: int) -> int:
        growing = [part.tensor for layer in self.counted if layer.track.kind.window is None for part in layer.parts()]
        if not growing:
            return tokens
        capacity = growing[0].shape[2]
        each = sum(tensor.nbytes for tensor in growing) // capacity
        return max(tokens, min(AHEAD * capacity, (free_bytes(growing[0].device) or 0) // (SPARE * max(each, 1))))

    def call_on_low_memory(self, free: Callable[[], None]) -> None:
        for track in self.tracks:
            track.on_low_memory = weakref.WeakMethod(free)

    def reset(self) -> None:
        self.resized = self.cut_short = False
        for layer in self.layers:
            layer.reset()

    def reorder(self, index: torch.Tensor) -> None:
        """Permute all buffers in place, those of one shape in one launch: copies of each and back would take more launches and
        twice the traffic."""
        from ..kernels.decode import reorder as kernel

        groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        for buffer, live in self.movable(index, kernel.fits):
            kind = live, buffer.shape, buffer.stride(), buffer.dtype, buffer.device
            groups.setdefault(kind, []).append(buffer)
        old, self.tables = self.tables, {}
        for (live, *_), buffers in groups.items():
            addresses = tuple(buffer.data_ptr() for buffer in buffers)
            table = old.get(addresses)
            table = torch.tensor(addresses, device=buffers[0].device) if table is None else table
            self.tables[addresses] = table
            kernel.reorder(table, buffers[0], live, index.to(buffers[0].device))

    def movable(self, index: torch.Tensor, fits: Callable[[torch.Tensor], bool]) -> list[tuple[torch.Tensor, int]]:
        """The buffers that a kernel permutes, with their live slots, as `Layer.movable`. The rows of others are permuted here."""
        found: list[tuple[torch.Tensor, int]] = []
        for layer in self.counted:
            movable = layer.movable()
            if layer.slots is None or layer.batch_size != len(index) or not all(fits(x) for x, _ in movable):
                layer.select(index)
            else:
                found += [(buffer, live) for buffer, live in movable if live]
        return found

    def select(self, indices: torch.Tensor) -> None:
        for layer in self.counted:
            layer.select(indices)

    def crop(self, tokens: int) -> None:
        for layer in self.counted:
            if reason := layer.why_not_crop(tokens):
                raise ValueError(reason)
        for layer in self.counted:
            layer.seen = max(0, layer.seen - tokens)
            layer.track.stale = True

    @property
    def variant(self) -> tuple[int, ...]:
        """Which layers run."""
        return self.running

    def sync(self, device: torch.device, tokens: int = 1) -> None:
        for track in self.tracks:
            if not track.is_synced(device, tokens):
                break
        else:
            return
        self.check()
        seen = self.seen
        running = [layer for layer in self.counted if layer.seen == seen and layer.is_initialized]
        self.running = tuple(layer.index for layer in running)
        for track in self.tracks:
            mine = [layer for layer in running if layer.track is track]
            track.running = sum(1 << layer.index for layer in mine)
            for layer in mine:
                layer.make_room(tokens)
            # One layer may have moved its window before another.
            base = max((layer.base for layer in mine), default=seen)
            for layer in mine:
                if layer.base < base:
                    layer.move(base)
            track.sync(device, seen - base, seen, tokens)

    def step(self) -> None:
        step = steps.over(self)
        written = 0 if step is None else step.written
        if missed := [index for index in self.running if not written >> index & 1]:
            raise RuntimeError(f"layers {missed} did not run, and a graph counts one token for all its layers")
        for track in self.tracks:
            if track.running:
                track.counts.add_(1)

    def advance(self, tokens: int = 1) -> None:
        layers = self.counted
        for layer in layers if len(self.running) == len(layers) else [self.layers[index] for index in self.running]:
            layer.seen += tokens
        for track in self.tracks:
            if track.running:
                slot, seen = track.image
                track.image = (slot + 1, seen + 1)  # what step() has written
                track.stale |= tokens > 1

    def rewind(self, mark: list[torch.Tensor] | None) -> None:
        """After a failed step the counts on the host are valid, and those on the device are unknown."""
        super().rewind(mark)
        for track in self.tracks:
            track.stale = True

    def interrupt(self, seen: list[int]) -> None:
        super().interrupt(seen)
        for layer, before in zip(self.counted, seen, strict=False):
            if self.cut_short or layer.seen <= before:
                continue
            if before and layer.why_not_crop(layer.seen - before):
                self.cut_short = True
            else:
                layer.seen, layer.base = before, layer.base if before else 0
