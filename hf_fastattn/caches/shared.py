"""Cache "preallocated" whose K and V are shared out over ranks by sequence: each rank has some of the slots, with all KV heads.

`context_parallel` says which. Layers with a sliding window are not shared out: each rank keeps the KV heads that it computes.

A prompt is read by heads: `update()` returns K and V of this rank's heads, after it has received those of earlier tokens from the
other ranks. For a few tokens it returns a `Share`, over which attention merges the results of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from ..attention.step import EAGER
from ..context_parallel import New, Share, Shares
from ..hf import Kind
from ..kernels.parts import PART
from .buffers import Pair, refuse_gradient
from .contract import FEW
from .layers import Layer, Track
from .preallocated import PreallocatedCache
from .storage import PreallocatedStorage

AT_ONCE = 4096  # tokens of each row whose K and V are exchanged at once


class SharedTrack(Track):
    """The state of the layers that are shared out. Capacity and counts are those of the whole."""

    def __init__(self, capacity: int, growable: bool, shares: Shares):
        self.shares = shares
        super().__init__(Kind("full"), capacity, growable)

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "shares": self.shares}

    def refuse_unless_fits(self, tokens: int, bytes_per_token: int, device: torch.device, held: int = 0) -> None:
        held = held * self.length(self.capacity) // self.capacity
        super().refuse_unless_fits(self.length(tokens), bytes_per_token, device, held)

    def length(self, tokens: int) -> int:
        return self.shares.length(tokens)


class SharedLayer(Layer):
    """K and V of one layer: the slots of this rank, (batch, num_kv_heads, length, head_dim) each."""

    track: SharedTrack

    @property
    def slots(self) -> int:
        return self.track.shares.before(self.seen)

    def reallocate(self, capacity: int) -> None:
        super().reallocate(self.track.length(capacity))

    def replace(self, index: int, old: torch.Tensor, new: torch.Tensor) -> None:
        raise ValueError(
            "K and V that ranks share by sequence cannot be replaced, as each has some of the tokens. Leave out kv_sharding=."
        )

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> Pair:
        track, shares, q_len = self.track, self.track.shares, key_states.shape[2]
        step = track.step
        if step is not None and step.mode != EAGER:
            self.mark_written(step)
            return self._shares(key_states, value_states, track.capacity, New(key_states, value_states, *self.kv))
        refuse_gradient(key_states, value_states)
        heads = shares.kv_heads(self.index, key_states.shape[1])
        like = [x[:, :1, :0].expand(-1, heads, -1, -1) for x in (key_states, value_states)]
        self.prepare(q_len, *like)
        seen = self.seen
        self.seen += q_len
        if seen and q_len <= FEW:
            return self._shares(key_states, value_states, self.seen, New(key_states, value_states, *self.kv))
        if seen:
            past = (shares.gather_slots(x)[:, :, :seen] for x in self.kv)
            found = [torch.cat([old, new], 2) for old, new in zip(past, (key_states, value_states), strict=True)]
        self._write(key_states, value_states, seen)
        return (found[0], found[1]) if seen else (key_states, value_states)

    def _write(self, key_states: torch.Tensor, value_states: torch.Tensor, seen: int) -> None:
        """Store the tokens after `seen` others that are in this rank's share."""
        shares = self.track.shares
        for begin in range(0, key_states.shape[2], AT_ONCE):
            some = slice(begin, begin + AT_ONCE)
            parts = shares.gather_kv(key_states[:, :, some], value_states[:, :, some])
            start, count = seen + begin, parts[0].shape[2]
            tokens = _own(start % (PART * shares.count), count, shares.rank, shares.count, key_states.device)
            for buffer, new in zip(self.kv, parts, strict=True):
                buffer[:, :, shares.before(start) : shares.before(start + count)] = new[:, :, tokens]

    def _shares(self, key_states: torch.Tensor, value_states: torch.Tensor, kv_len: int, new: New) -> Pair:
        """K and V for attention, as the shares of all ranks. new: what attention stores first."""
        step = self.track.step
        plan = {} if step is None else step.plan
        if plan is None:
            plan = step.plan = {}  # type: ignore[union-attr]  # a step's plan is None
        batch, heads, _, _ = key_states.shape
        dims = key_states.shape[3], value_states.shape[3]
        shared = self.track.shares, self.index, plan, new
        keys, values = (Share(x, (batch, heads, kv_len, dim), *shared) for x, dim in zip(self.kv, dims, strict=True))
        return keys, values


@lru_cache(maxsize=64)  # all layers and most parts of a prompt have the same
def _own(start: int, count: int, rank: int, ranks: int, device: torch.device) -> torch.Tensor:
    """Which of the tokens from slot `start` on are in the share of a rank, int64."""
    with torch.inference_mode(False):
        slots = torch.arange(start, start + count)
        return (slots // PART % ranks == rank).nonzero().flatten().to(device)


class SharedStorage(PreallocatedStorage):
    """The layers of one cache: shared out are those that keep all tokens."""

    takes_prompts = takes_packed = skips_padding = False  # a captured step merges results, and a prompt is read by heads

    def __init__(self, kinds: Sequence[Kind], capacity: int, shares: Shares, growable: bool = True):
        self.shares = shares
        super().__init__(kinds, capacity, growable)

    def make_track(self, kind: Kind, capacity: int, growable: bool) -> Track:
        return super().make_track(kind, capacity, growable) if kind.window else SharedTrack(capacity, growable, self.shares)

    def make_layer(self, index: int, track: Track) -> Layer:
        return SharedLayer(index, track) if isinstance(track, SharedTrack) else super().make_layer(index, track)


class SharedCache(PreallocatedCache):
    """The cache that `patch(kv_sharding="sequence")` creates."""

    storage: SharedStorage

    def __init__(self, *args: object, **kwargs: object):
        raise TypeError(
            'A SharedCache belongs to a process group. generate() of a model under patch(kv_sharding="sequence") creates it.'
        )
