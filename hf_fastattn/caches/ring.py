"""The storage of a rolling cache: the first tokens of each row and a ring of the last tokens, in buffers that never grow.

A layer's buffer is (batch, num_kv_heads, sinks + window, head_dim). Token t of a row, padding not counted, is at

    slot t                              if t < sinks
    slot sinks + (t - sinks) % window   otherwise

so a new token overwrites the token that leaves the window, and no other token moves. The count of each row is only on the
device: rows differ by their padding, and no operation here synchronises with the device.

A single token is written at its slot, and attention reads the buffer in slot order; softmax does not depend on the order.
Several tokens are attended to as [sinks | window, oldest first | new tokens], gathered for each row, and stored afterwards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..attention import step as steps
from ..attention.step import EAGER, Step
from ..kernels.spans import pack_spans
from ..kernels.spec import KV, bytes_per_token
from ..streaming import Settings
from .buffers import UNKNOWN, Buffered, Pair, describe, layout, reallocated, refuse_gradient, selected
from .contract import CHANGE_ROWS, CUT_SHORT, Storage
from .memory import refuse_unless_fits


class Many(NamedTuple):
    """The index tensors for several new tokens of each row.

    gather: int64 (batch, held), the slots of the tokens that the rows hold, oldest first and right-aligned. store: int64 (batch,
    sinks + window), for each slot the index of its next token among those and the new ones.
    """

    gather: torch.Tensor
    store: torch.Tensor


class Ring(Storage):
    """The layers of a rolling cache, with their shared token counts and the slots of new tokens."""

    takes_mask = False  # the counts exclude padding
    layers: list[RollingLayer]
    capacity: int
    version: int
    rows: int | None
    counts: torch.Tensor  # int64 (rows,) on the device, once rows is not None: tokens of each row, without padding
    seen: int  # tokens of the longest row, with padding
    furthest: int  # the most tokens that a row has had: those after `seen` were removed, and have overwritten earlier ones

    def __init__(self, num_layers: int, settings: Settings):
        self.window, self.sinks = settings.window, settings.sinks
        self.capacity = self.window + self.sinks
        self.layers = [RollingLayer(index, self) for index in range(num_layers)]
        self.version, self.rows = 0, None
        self.seen = self.furthest = 0
        self.uniform = True  # no row has padding
        self.checked, self.padded = 0, False  # width of the checked mask, and whether it has zeros
        self.written: int | None = None  # bit mask of the layers that the first forward wrote

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for layer in self.layers:
            layer.belong_to(self)

    @property
    def before(self) -> int:
        """Number of tokens in its layers. `seen` already includes the new tokens when a forward begins."""
        step = steps.over(self)
        if step is not None and step.mode == EAGER and not step.written:
            return self.seen - step.q_len
        return self.seen

    @property
    def used(self) -> bool:
        return steps.mode(self) != EAGER or self.before > 0

    def begin(self, step: Step, rows: int, q_len: int, pads: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Count `q_len` new tokens of each row and return their spans. pads: int64 (batch,), how many of them are padding."""
        self.check()
        if self.rows != rows or self.counts.device != device:
            self._allocate(rows, device)
        self.uniform = self.uniform and pads is None
        if q_len == 1:
            from ..kernels.decode.ring import ring_step

            step.plan, spans = ring_step(self.counts, pads, self.window, self.sinks)  # the slots, int64 (batch,)
        else:
            before = self.counts.clone()
            self.counts.add_(q_len if pads is None else q_len - pads)
            step.plan, spans = self._many(before, pads, q_len)
        step.q_len = q_len
        if step.mode == EAGER:
            self.advance(q_len)
        return spans[:1].expand_as(spans) if self.uniform else spans

    def positions(self, q_len: int) -> torch.Tensor:
        """Positions of the last `q_len` tokens, int64 (batch, q_len); 0 for padding."""
        new = torch.arange(-q_len, 0, device=self.counts.device)
        return (self.counts[:, None] + new).clamp(min=0)

    def _many(self, before: torch.Tensor, pads: torch.Tensor | None, q_len: int) -> tuple[Many, torch.Tensor]:
        sinks, window = self.sinks, self.window
        held = min(self.seen, self.capacity)  # in the longest row
        kept = before.clamp(max=held)
        before, after, first = before[:, None], self.counts[:, None], (held - kept)[:, None]
        dropped = before - kept[:, None]
        index = torch.arange(held, device=before.device) - first
        token = torch.where(index < sinks, index, index + dropped).clamp(min=0)
        gather = torch.where(token < sinks, token, sinks + (token - sinks) % window)
        slot = torch.arange(self.capacity, device=before.device)
        token = torch.where(slot < sinks, slot, after - 1 - (after - 1 - slot) % window)
        place = torch.where(token < sinks, first + token, held + token - before)
        new = held + token - before + (0 if pads is None else pads[:, None])
        # The content of slots that no token has reached yet does not matter.
        store = torch.where(token < before, place, new).clamp(0, held + q_len - 1)
        start = held - kept if pads is None else held - kept + pads
        full = torch.full_like(start, held)
        return Many(gather, store), pack_spans(full, start, full + q_len, dropped[:, 0])

    def _allocate(self, rows: int, device: torch.device) -> None:
        if self.seen:
            raise ValueError(
                f"This cache holds {self.rows} rows on {self.counts.device}, and is given {rows} on {device}. {CHANGE_ROWS}"
            )
        refuse_unless_fits(self.capacity, 8 * rows, device)  # the slots of new tokens, before K and V
        with torch.inference_mode(False):
            self.counts = torch.zeros(rows, dtype=torch.int64, device=device)
        self.rows = rows
        self.version += 1  # also for the counts
        for layer in self.layers:
            layer.clear()

    def select(self, indices: torch.Tensor) -> None:
        if self.rows is None:
            return
        self.version += len(indices) != self.rows
        self.counts, self.rows = selected(self.counts, indices), len(indices)
        for layer in self.layers:
            layer.select(indices)

    def reset(self) -> None:
        self.seen = self.furthest = 0
        self.uniform, self.written, self.cut_short = True, None, False
        self.checked, self.padded = 0, False
        if self.rows is not None:
            self.counts.zero_()

    @property
    def variant(self) -> bool:
        """A uniform batch has a graph of its own."""
        return self.uniform

    def holds(self, tokens: int) -> bool:
        return True

    def sync(self, device: torch.device, tokens: int = 1) -> None:
        """The counts are already on the device. Raises ValueError if an earlier forward was interrupted."""
        self.check()

    def step(self) -> None:
        step = steps.over(self)
        if step is None or step.written != self.written:
            raise RuntimeError("other layers ran than those that read the prompt, and a ring counts one token for all of them")

    def advance(self, tokens: int = 1) -> None:
        self.seen += tokens
        self.furthest = max(self.furthest, self.seen)

    @property
    def can_undo(self) -> bool:
        return self.seen != self.capacity  # the next token drops the first one, and then no other could be removed

    def crop(self, tokens: int) -> None:
        left = self.seen - tokens
        if left <= self.sinks:
            self.furthest = left
        elif self.furthest > self.capacity and self.furthest - left > 1:
            # One may be removed: the window of the next token has no room for the token that it has overwritten.
            raise ValueError(
                f"This cache has overwritten tokens that would be in its window of {self.window} again if {tokens} of "
                f"{self.seen} tokens were removed. Once tokens have been dropped, only the last can be removed, and once after "
                "each new one."
            )
        self.counts.sub_(tokens).clamp_(min=0)
        self.seen, self.checked = left, min(self.checked, left)

    def states(self) -> list[torch.Tensor]:
        return [] if self.rows is None else [self.counts]

    def rewind(self, mark: list[torch.Tensor] | None) -> None:
        super().rewind(mark)
        if mark is not None:
            self.furthest = max(self.furthest, self.seen + 1)  # the step may have written its token


class RollingLayer(Buffered):
    """K and V of one layer, (batch, num_kv_heads, sinks + window, head_dim) each."""

    is_sliding = False

    def __init__(self, index: int, ring: Ring):
        self.index = index
        self.belong_to(ring)
        self.clear()

    def moved(self) -> None:
        self.ring.version += 1

    @property
    def slots(self) -> int:
        return min(self.ring.seen, self.ring.capacity)

    def belong_to(self, ring: Ring) -> None:
        self._ring: Callable[[], Ring | None] = weakref.ref(ring)  # weak, because the ring owns this layer

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ring": lambda: None}  # a copied ring sets it on its layers

    @property
    def ring(self) -> Ring:
        ring = self._ring()
        if ring is None:
            raise RuntimeError(
                "The RollingCache of this layer, which counts its tokens, was deleted. Keep a reference to the cache."
            )
        return ring

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.clear()
        ring, states = self.ring, self.joined(key_states, value_states)
        missing = sum(not layer.is_initialized for layer in ring.layers) if torch.cuda.device_count() <= 1 else 1
        refuse_unless_fits(ring.capacity, missing * bytes_per_token(*states), key_states.device)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.buffers = [reallocated(x, 0, ring.capacity, x.device) for x in states]
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> Pair:
        """Store K and V (batch, num_kv_heads, q_len, head_dim); return the K and V to attend to, in the layout of the spans."""
        ring, mine = self.ring, 1 << self.index
        step = steps.over(ring)
        if step is None or step.written & mine or step.q_len != key_states.shape[2]:
            raise RuntimeError(
                "A RollingCache needs the forward pre-hook of a patched model, which counts padding, and one update by each "
                'layer: call the model that hf_fastattn.patch(model, "streaming", ...) was given, and not a part of it.'
            )
        if step.q_len > 1 and not step.asked:
            raise RuntimeError(
                "A RollingCache passes spans through the attention mask, and this model did not ask for a mask. "
                "Use another backend for it."
            )
        if ring.written is not None and not ring.written & mine:
            raise ValueError(CUT_SHORT)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif any(
            (layout(old), old.device) != (layout(new), new.device)
            for old, new in zip(self.kv, (key_states, value_states), strict=True)
        ):
            if step.mode != EAGER or ring.seen != step.q_len:
                described = [describe(*pair) for pair in (self.kv, (key_states, value_states))]
                raise ValueError(f"This cache holds {described[0]}, and it is given {described[1]}: it belongs to another model.")
            self.lazy_initialization(key_states, value_states)  # it was empty, and the model has since been cast or moved
        refuse_gradient(key_states, value_states)
        keys, values = self.kv
        if step.q_len == 1:
            from ..kernels.decode.append import append

            append(KV(keys, values), key_states, value_states, step.plan.to(self.device))
        else:
            keys, values = _extend(keys, key_states, step.plan), _extend(values, value_states, step.plan)
        step.written |= mine
        return keys, values

    def shown(self, index: int) -> torch.Tensor | None:
        """In the order of slots: sinks, then the ring."""
        if not self.buffers:
            return None
        ring = self.ring
        step = steps.over(ring)
        if step is not None and step.mode != EAGER:
            return UNKNOWN
        new = 0 if step is None or step.written >> self.index & 1 else step.q_len
        tokens = min(ring.seen - new, ring.capacity)
        return self.kv[index][:, :, :tokens]

    def replace(self, index: int, old: torch.Tensor, new: torch.Tensor) -> None:
        if new.shape != old.shape:
            raise ValueError(
                "A RollingCache counts its tokens once for all layers, so K and V can only be replaced by as many: "
                f"{tuple(old.shape)}; got {tuple(new.shape)}. Use a PreallocatedCache or a DynamicCache."
            )
        self.buffers[index] = reallocated(new, new.shape[2], self.ring.capacity, new.device)
        self.ring.recorded = 0  # graphs refer to the old buffers
        self.moved()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = self.ring.capacity if query_length == 1 else min(self.ring.before, self.ring.capacity) + query_length
        return held, 0

    def get_seq_length(self) -> int:
        return self.ring.before

    def get_max_length(self) -> int:
        return -1  # no limit

    def reset(self) -> None:
        self.ring.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError("Layers of a rolling cache share their counts; call reorder_cache() of the cache.")


def _extend(buffer: torch.Tensor, states: torch.Tensor, plan: Many) -> torch.Tensor:
    """The tokens in the buffer followed by the new ones, as one tensor. Stores those to keep in the buffer."""
    tokens = torch.cat([_take(buffer, plan.gather), states], 2) if plan.gather.shape[1] else states
    buffer.copy_(_take(tokens, plan.store))
    return tokens


def _take(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Gather `slots` (batch, n), given for each row, from `buffer` (batch, heads, length, head_dim)."""
    slots = slots.to(buffer.device)[:, None, :, None]
    return buffer.gather(2, slots.expand(-1, buffer.shape[1], -1, buffer.shape[3]))
