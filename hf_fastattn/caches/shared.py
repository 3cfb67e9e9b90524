"""Cache "static" whose K and V are shared out over ranks by sequence: each rank has some of the slots, with all KV heads.

Slots [rank * n, (rank + 1) * n) of a layer are on one rank, where n is the capacity divided by the number of ranks. Layers with a
sliding window are not shared out: each rank keeps the KV heads that it computes, as without sharing.

A prompt is read by heads: `update()` returns K and V of this rank's heads, after it has received those of earlier tokens from the
other ranks. For a few tokens it returns a `Share`, over which attention merges the results of the ranks.
"""

from __future__ import annotations

import torch

from .. import step as steps
from ..context_parallel import Share, Shares
from ..kernels.decode.append import append
from ..step import EAGER
from .buffers import reallocated
from .contract import FEW
from .layers import Layer, Track
from .static import PreallocatedCache
from .storage import StaticStorage

AT_ONCE = 4096  # tokens of each row whose K and V are exchanged at once
WORD = 32  # a share begins at a multiple of it, with a word of the spans


class SharedTrack(Track):
    """The state of the layers that are shared out. Capacity and counts are those of the whole, except the slot in `counts`."""

    def __init__(self, capacity: int, growable: bool, shares: Shares):
        self.shares = shares
        super().__init__(None, self.aligned(capacity), growable)

    def aligned(self, capacity: int) -> int:
        """The next capacity of which all ranks have equal shares."""
        each = WORD * self.shares.count
        return -(-capacity // each) * each

    @property
    def length(self) -> int:
        """The number of slots of a share."""
        return self.capacity // self.shares.count

    @property
    def first(self) -> int:
        """The first slot of this rank's share."""
        return self.shares.rank * self.length

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "shares": self.shares}

    def grow(self, capacity: int) -> None:
        super().grow(self.aligned(capacity))
        self.stale = True  # the share begins at another slot

    def refuse_unless_fits(self, tokens: int, bytes_per_token: int, device: torch.device, held: int = 0) -> None:
        ranks = self.shares.count
        super().refuse_unless_fits(tokens // ranks, bytes_per_token, device, held // ranks)

    def is_synced(self, device: torch.device, tokens: int) -> bool:
        return super().is_synced(device, tokens) and self.image[1] + tokens <= self.capacity

    def sync(self, device: torch.device, slot: int, seen: int) -> None:
        super().sync(device, slot - self.first, seen)


class SharedLayer(Layer):
    """K and V of one layer: the slots of this rank, (batch, num_kv_heads, capacity / ranks, head_dim) each."""

    track: SharedTrack

    @property
    def slots(self) -> int:
        return self._slots_of(self.track.length)

    def _slots_of(self, length: int) -> int:
        """The number of live slots of this rank's share, if shares have so many slots."""
        return min(max(self.seen - self.track.shares.rank * length, 0), length)

    def reallocate(self, capacity: int) -> None:
        track = self.track
        length = capacity // track.shares.count
        if capacity == track.capacity:
            super().reallocate(length)
            return
        first, count = track.shares.rank * length, self._slots_of(length)
        for name in ("keys", "values"):  # one after the other: each is gathered as a whole
            whole = track.shares.every(getattr(self, name)).permute(1, 2, 0, 3, 4).flatten(2, 3)
            setattr(self, name, reallocated(whole[:, :, first : first + length], count, length, self.device))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        track, shares, q_len = self.track, self.track.shares, key_states.shape[2]
        step = track.step
        if step is not None and step.mode != EAGER:
            self.mark_written(step)
            append(self.keys, self.values, *shares.gather_kv(key_states, value_states), track.counts[:1])
            return self._shares(key_states, value_states, track.capacity)
        self.refuse_gradient(key_states, value_states)
        heads = shares.kv_heads(self.index, key_states.shape[1])
        like = [x[:, :1, :0].expand(-1, heads, -1, -1) for x in (key_states, value_states)]
        self.check(like[0], like[1])
        self.make_room(q_len)
        if not self.is_initialized:
            self.lazy_initialization(like[0], like[1])
        track.stale = True
        seen = self.seen
        if seen and q_len > FEW:
            past = (shares.gather_slots(x)[:, :, :seen] for x in (self.keys, self.values))
            found = [torch.cat([old, new], 2) for old, new in zip(past, (key_states, value_states), strict=True)]
        self._write(key_states, value_states)
        self.seen += q_len
        if not seen:
            return key_states, value_states
        return (found[0], found[1]) if q_len > FEW else self._shares(key_states, value_states, self.seen)

    def _write(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Store the new tokens that are in this rank's share."""
        track = self.track
        for begin in range(0, key_states.shape[2], AT_ONCE):
            some = slice(begin, begin + AT_ONCE)
            parts = track.shares.gather_kv(key_states[:, :, some], value_states[:, :, some])
            slot = self.seen + begin - track.first  # of the first of them
            start, stop = max(slot, 0), min(slot + parts[0].shape[2], track.length)
            for buffer, new in zip((self.keys, self.values), parts, strict=True):
                if start < stop:
                    buffer[:, :, start:stop].copy_(new[:, :, start - slot : stop - slot])

    def _shares(self, key_states: torch.Tensor, value_states: torch.Tensor, kv_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V for attention, as the shares of all ranks."""
        step = self.track.step
        plan = {} if step is None else step.plan
        if plan is None:
            plan = step.plan = {}  # type: ignore[union-attr]  # a step's plan is None
        batch, heads, _, _ = key_states.shape
        shapes = ((batch, heads, kv_len, x.shape[3]) for x in (key_states, value_states))
        keys, values = (
            Share(x, shape, self.track.shares, self.index, plan)
            for x, shape in zip((self.keys, self.values), shapes, strict=True)
        )
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.seen + query_length if self.track.mode == EAGER else self.track.capacity), 0

    def query_offset(self) -> int | torch.Tensor:
        return self.track.counts[1:] if self.track.mode == steps.CAPTURED else self.get_seq_length()


class SharedStorage(StaticStorage):
    """The layers of one cache: shared out are those that keep all tokens."""

    takes_prompts = False  # a captured step merges results, and a prompt is read by heads

    def __init__(self, windows: list[int | None], capacity: int, shares: Shares, growable: bool = True):
        self.shares = shares
        super().__init__(windows, capacity, growable)

    def make_track(self, window: int | None, capacity: int, growable: bool) -> Track:
        return super().make_track(window, capacity, growable) if window else SharedTrack(capacity, growable, self.shares)

    def make_layer(self, index: int, track: Track) -> Layer:
        return SharedLayer(index, track) if isinstance(track, SharedTrack) else super().make_layer(index, track)


class SharedCache(PreallocatedCache):
    """The cache that `patch(kv="sequence")` creates."""

    storage: SharedStorage

    def __init__(self, *args: object, **kwargs: object):
        raise TypeError('A SharedCache belongs to a process group. generate() of a model under patch(kv="sequence") creates it.')
