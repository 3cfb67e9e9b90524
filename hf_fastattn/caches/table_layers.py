"""The layers of a paged cache (`paged_cache`): pools of pages, which tables share out to rows (`table_storage`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import hf
from ..attention.step import EAGER, Packed, Step
from ..kernels.spec import KV
from .buffers import UNKNOWN, Pair, cast, describe, layout
from .layers import KEEP, Layer, Track
from .paged import copy_pages

if TYPE_CHECKING:
    from .table_storage import TableStorage


class TableTrack(Track):
    """The counts of all layers. capacity: number of tokens for which a table has entries."""

    def grow(self, capacity: int) -> None:
        storage: Any = None if self.storage is None else self.storage()
        self.capacity = capacity
        storage.make_tables(storage.rows)

    def is_synced(self, device: torch.device, tokens: int) -> bool:
        storage: Any = None if self.storage is None else self.storage()
        return super().is_synced(device, tokens) and self.image[0] + tokens <= storage.room


class TableLayer(Layer):
    """K and V of one layer, (pages, num_kv_heads, page size, head_dim) each. table: the index of the table of its pages."""

    def __init__(self, index: int, track: Track, table: int):
        self.table = table
        super().__init__(index, track)

    @property
    def owner(self) -> TableStorage:
        storage: Any = None if self.track.storage is None else self.track.storage()
        assert storage is not None  # its cache is in use
        found: TableStorage = storage
        return found

    @property
    def batch_size(self) -> int | None:
        return self.owner.rows if self.buffers else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the pages for states of this shape, (any, num_kv_heads, any, head_dim)."""
        self.buffers = []
        self.dtype, self.device = key_states.dtype, key_states.device
        self.resize([key_states[:0, :, :1], value_states[:0, :, :1]])
        self.stored(self.owner.tables_of_rows[self.table])  # raises for what kernels do not read
        with torch.inference_mode(False):  # what is shown in place of pages: who computes with it gets NaN
            self.nothing = [x.new_full((1, x.shape[1], 1, x.shape[3]), torch.nan) for x in self.buffers]
        self.is_initialized = True

    def resize(self, held: Sequence[torch.Tensor], count: int | None = None) -> None:
        """Make room for so many pages, by default all of the pool. held: those that there are."""
        count = self.owner.pages.each[self.table].count if count is None else count
        count, size = max(count, len(held[0])), self.owner.pages.size
        with torch.inference_mode(False), torch.no_grad():
            for index, old in enumerate(held):
                new = old.new_zeros(count, old.shape[1], size, old.shape[3])
                new[: len(old)] = old
                self.buffers[index : index + 1] = [new]

    def stored(self, table: torch.Tensor) -> KV:
        from ..kernels.paged import paged  # with Triton

        keys, values = self.buffers
        return paged(keys, values, table)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> Pair:
        track, q_len, storage = self.track, key_states.shape[2], self.owner
        states = cast(key_states, value_states)
        step = track.step
        if step is not None and step.mode != EAGER:
            kv = self.stored(storage.tables_of_rows[self.table])
            self.append(step, kv, *states)
            return self._given(kv, step, track.capacity)
        if step is not None and step.packed is not None:
            self.scatter(step.packed, *states)
            return states
        self._begin(len(key_states), q_len, *states)
        first, stop = not self.seen, self.seen + q_len
        kv = self.stored(storage.table(self.table, stop, step))
        self.append_all(kv, *states, storage.skipped(self.table) if first else 0)
        self.seen = stop
        return states if first else self._given(kv, step, stop)

    def _begin(self, rows: int, q_len: int, *states: torch.Tensor, source: list[int] | None = None) -> None:
        """Make the cache ready for tokens of these rows."""
        storage = self.owner
        if self.is_initialized and (reason := self.why_other(*states)) is not None:
            if storage.seen:
                raise ValueError(f"{reason}: it belongs to another model.")
            storage.forget()
        storage.begin(rows, states[0].device, sum(x.shape[1] * x.shape[3] * x.itemsize for x in states))
        storage.make_ready(self.seen, q_len, source)
        if not self.is_initialized:
            self.lazy_initialization(*states)
        self.track.stale = True

    def why_other(self, *states: torch.Tensor) -> str | None:
        """Why these are not states of the model whose K and V it holds."""
        if self.device == states[0].device and [layout(x)[1:] for x in states] == [layout(x)[1:] for x in self.buffers]:
            return None
        return f"This cache holds {describe(*self.buffers)}, and it is given {describe(*states)}"

    def scatter(self, packed: Packed, *states: torch.Tensor) -> None:
        storage, width = self.owner, packed.width
        self._begin(packed.rows, width, *states, source=None if packed.source is None else packed.source.tolist())
        size = storage.pages.size
        page = storage.tables_of_rows[self.table][packed.row.to(self.device), packed.slot.to(self.device) // size]
        every = storage.tables_of_rows[self.table][:, : -(-width // size)].flatten().long()
        for pool, x in zip(self.buffers, states, strict=True):
            pool[every] = 0  # padding: attention multiplies it by zero
            pool[page.long(), :, packed.slot.to(self.device) % size] = x[0].transpose(0, 1)
        if storage.forks is not None:
            copy_pages([self], storage.forks)
        self.seen = width
        packed.stored += 1

    def _given(self, kv: KV, step: Step | None, tokens: int) -> Pair:
        """K and V for attention: in pages if it is of this package, otherwise a copy."""
        if step is not None and self.finds_kv(step):
            rows, _, kv_len, _, _ = kv.sizes
            keys, values = (x.expand(rows, -1, kv_len, -1) for x in self.nothing)
            step.kv, step.shown, step.shown_tokens = kv, (keys, values), tokens
            return keys, values
        if not torch.compiler.is_compiling():
            hf.warn_once(
                "A PagedCache copies all K and V of a layer from their pages in each step: attention that does not belong to a "
                "patched model reads them. Call hf_fastattn.patch(model), or use a PreallocatedCache."
            )
        keys, values = kv.plain()
        return keys[:, :, :tokens], values[:, :, :tokens]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        step = self.track.step
        if self.track.mode == EAGER and self.seen and self.finds_kv(step):
            size = self.owner.pages.size
            return -(-(self.seen + query_length) // size) * size, 0
        return super().get_mask_sizes(query_length)

    def shown(self, index: int) -> torch.Tensor | None:
        """A copy."""
        if self.track.mode != EAGER:
            return UNKNOWN
        if not self.buffers or not self.seen:
            return None
        return self.stored(self.owner.table(self.table, self.seen, None)).plain()[index][:, :, : self.seen]

    def replace(self, index: int, old: torch.Tensor, new: torch.Tensor) -> None:
        raise ValueError("K and V in pages, which rows may share, cannot be replaced. Use a PreallocatedCache.")

    def make_room(self, q_len: int) -> None:
        self.owner.make_ready(self.seen, q_len)

    def why_not_crop(self, tokens: int) -> str | None:
        left, storage = max(0, self.seen - tokens), self.owner
        if storage.pages.each[self.table].first(storage.kept) <= storage.pages.each[self.table].first(left):
            return None
        window = storage.pages.each[self.table].window
        return (
            f"The pages behind a sliding window of {window} have returned, and after removing {tokens} of {self.seen} tokens it "
            f"would begin in them. Remove at most {KEEP} at a time."
        )
