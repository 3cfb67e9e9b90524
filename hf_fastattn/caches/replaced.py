"""K and V of a preallocated layer that other code reads and replaces, as it would those of a DynamicLayer.

K and V are assigned one after the other. Between the two assignments a layer has keys and values of different lengths, outside of
its buffers (`pending`); then it copies both to new buffers. A view of the old ones keeps its content.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..attention.step import EAGER
from .buffers import UNKNOWN, Buffered, Pair

if TYPE_CHECKING:
    from .layers import Track


class Replaceable(Buffered):
    """A layer with K and V that other code may replace. pending: K and V that are not in the buffers; None if they are."""

    track: Track
    seen: int
    base: int
    pending: Pair | None
    device: Any = None  # of the buffers, once there are some

    if TYPE_CHECKING:

        @property
        def slots(self) -> int: ...
        def make_room(self, q_len: int) -> None: ...
        def reallocate(self, capacity: int) -> None: ...

    def shown(self, index: int) -> torch.Tensor | None:
        if self.track.mode != EAGER:
            return UNKNOWN
        if self.pending is None and not self.buffers:
            return None
        states = (self.pending or self.kv)[index]
        if self.why_half():
            return states
        count = self.slots  # as in a DynamicCache, those that the next token sees
        return states[:, :, count - min(count, self.track.kind.sees(self.seen)) : count]

    def replace(self, index: int, old: torch.Tensor, new: torch.Tensor) -> None:
        window, count = self.track.kind.window, new.shape[2]
        if window is not None and count != old.shape[2]:
            raise ValueError(
                f"Layer {self.index} has a sliding window of {window} tokens and counts those that left it, so {old.shape[2]} "
                f"tokens can only be replaced by as many; got {count}. Use a DynamicCache."
            )
        both = [self.keys, self.values]
        both[index] = new
        if self.buffers:
            self.moved()
        self.buffers, self.is_initialized = [], False
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

    def live(self) -> list[torch.Tensor]:
        """Views of the live slots of what is cached, oldest first. Raises ValueError if only one of K and V was replaced."""
        if reason := self.why_half():
            raise ValueError(reason)
        held = self.buffers if self.pending is None else self.joined(*self.pending)
        return [x[:, :, : self.slots] for x in held]

    def select(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in place if their number does not change."""
        if self.pending is not None:
            keys, values = self.pending
            self.pending = keys[indices.to(keys.device)], values[indices.to(values.device)]
        super().select(indices)
