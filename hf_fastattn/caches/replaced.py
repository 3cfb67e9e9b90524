"""K and V of a preallocated layer that other code reads and replaces, as it would those of a DynamicLayer.

K and V are assigned one after the other. Between the two assignments a layer has keys and values of different lengths, outside of
its buffers (`pending`); then it copies both to new buffers. A view of the old ones keeps its content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..attention.step import EAGER
from .buffers import UNKNOWN, Buffered

if TYPE_CHECKING:
    from .layers import Track


class Replaceable(Buffered):
    """A layer with K and V that other code may replace. pending: K and V that are not in the buffers; None if they are."""

    track: Track
    index: int
    seen: int
    base: int
    batch_size: int
    pending: tuple[torch.Tensor, torch.Tensor] | None
    device: Any = None  # of the buffers, once there are some

    if TYPE_CHECKING:

        @property
        def slots(self) -> int: ...
        def make_room(self, q_len: int) -> None: ...
        def reallocate(self, capacity: int) -> None: ...

    def shown(self, index: int) -> torch.Tensor | None:
        if self.track.mode != EAGER:
            return UNKNOWN
        both = self.pending or (self._keys, self._values)
        if both[index] is None or self.why_half():
            return both[index]
        count = self.slots  # as in a DynamicCache, those that the next token sees
        return both[index][:, :, count - min(count, self.track.old(self.seen)) : count]

    def replace(self, index: int, old: torch.Tensor, new: torch.Tensor) -> None:
        window, count = self.track.window, new.shape[2]
        if window is not None and count != old.shape[2]:
            raise ValueError(
                f"Layer {self.index} has a sliding window of {window} tokens and counts those that left it, so {old.shape[2]} "
                f"tokens can only be replaced by as many; got {count}. Use a DynamicCache."
            )
        both = [x for x in (self.shown(0), self.shown(1)) if x is not None]
        both[index] = new
        if self._keys is not None:
            self.moved()
        self._keys = self._values = None
        self.is_initialized = False
        self.pending = both[0], both[1]
        storage = None if self.track.storage is None else self.track.storage()
        if storage is not None:
            storage.recorded = 0  # graphs refer to the old buffers
            storage.resized |= window is None and index == 0 and count != self.seen
        if window is not None:
            self.base = self.seen - count
        elif index == 0:
            self.seen, self.base = count, 0
        if self.device is not None and not self.why_half():
            self.make_room(0)
            self.lazy_initialization(*self.pending)

    def why_half(self) -> str | None:
        """Why the layer cannot go on: only its keys or only its values have been replaced."""
        if self.pending is None or self.pending[0].shape[:3:2] == self.pending[1].shape[:3:2]:
            return None
        rows, tokens = zip(*(x.shape[:3:2] for x in self.pending), strict=True)
        return (
            f"Layer {self.index} holds keys of {tokens[0]} tokens in {rows[0]} rows and values of {tokens[1]} tokens in "
            f"{rows[1]} rows: only one of both was replaced. Assign both, or call reset() of the cache."
        )

    def live(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the live slots of K and V, oldest first. Raises ValueError if only one of both was replaced."""
        if reason := self.why_half():
            raise ValueError(reason)
        count = self.slots
        keys, values = self.pending or (self._keys, self._values)
        return keys[:, :, :count], values[:, :, :count]

    def select(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in place if their number does not change."""
        if self.pending is not None:
            keys, values = self.pending
            self.pending = keys[indices.to(keys.device)], values[indices.to(values.device)]
        elif self.is_initialized:
            views = self.live()
            keys, values = (t.index_select(0, indices.to(t.device)) for t in views)
            if len(indices) == self.batch_size:
                views[0].copy_(keys)
                views[1].copy_(values)
            else:
                self._keys, self._values = keys, values
                self.moved()
                self.batch_size = len(indices)
                self.reallocate(self.track.capacity)
