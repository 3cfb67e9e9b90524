"""Cache "paged": K and V of every token in pages, for generate(). Rows that begin alike share the pages of their beginning.

The token at position n of a row is in slot n % P of its page n // P, and all rows have as many tokens, of which some may be
padding, as in a PreallocatedCache. A page belongs to the rows whose tables name it. Only a row that has a page alone writes to it:
the last page of rows that part ways is copied, and the pages before it are not. Pages behind a sliding window return.

Beam search permutes rows in each step. The tables are permuted on the device, and the host reads them when a row needs a new page.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .. import hf, registry
from ..attention import step as steps
from ..attention.step import CAPTURED, EAGER, Packed, Step
from ..hf import Kind
from ..kernels.paged import PAGE_SIZES, gather, paged
from ..kernels.spec import KV, bytes_per_token
from . import saved
from .buffers import UNKNOWN, Pair, describe, layout
from .contract import CHANGE_ROWS
from .layers import KEEP, Layer, Track, refuse_unless_fits, round_up
from .paged import cast, on_device, why_not, windows_of
from .pages import Held, Pools
from .preallocated import checked
from .storage import PreallocatedStorage
from .stored import Arguments, ChangeableCache

AT_ONCE = 1 << 15  # tokens of a row in a launch that stores them, whose grid has at most 65,535


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
    def owner(self) -> PageStorage:
        storage: Any = None if self.track.storage is None else self.track.storage()
        assert storage is not None  # its cache is in use
        return storage

    @property
    def batch_size(self) -> int | None:
        return self.owner.rows if self.buffers else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the pages for states of this shape, (any, num_kv_heads, any, head_dim)."""
        self.buffers = []
        self.dtype, self.device = key_states.dtype, key_states.device
        self.resize([key_states[:0, :, :1], value_states[:0, :, :1]])
        paged(*self.buffers, self.owner.tables_of_rows[self.table])  # raises for what kernels do not read
        with torch.inference_mode(False):  # what is shown in place of pages: who computes with it gets NaN
            self.nothing = [x.new_full((1, x.shape[1], 1, x.shape[3]), torch.nan) for x in self.buffers]
        self.is_initialized = True

    def resize(self, held: Sequence[torch.Tensor]) -> None:
        """Make room for all pages of the pool. held: those that there are."""
        count, size = self.owner.pages.each[self.table].count, self.owner.pages.size
        refuse_unless_fits(count, size * bytes_per_token(*(x[:1] for x in held)) if len(held[0]) else 0, self.device)
        with torch.inference_mode(False), torch.no_grad():
            for index, old in enumerate(held):
                new = old.new_zeros(count, old.shape[1], size, old.shape[3])
                new[: len(old)] = old
                self.buffers[index : index + 1] = [new]

    def stored(self, table: torch.Tensor) -> KV:
        return paged(*self.buffers, table)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> Pair:
        from ..kernels.decode.append import append  # with Triton

        track, q_len, storage = self.track, key_states.shape[2], self.owner
        states = cast(key_states, value_states)
        step = track.step
        if step is not None and step.mode != EAGER:
            self.mark_written(step)
            if reason := self.why_other(*states):
                raise RuntimeError(reason)
            kv = self.stored(storage.tables_of_rows[self.table])
            append(kv, *states, track.counts[:1])
            return self._given(kv, step, track.capacity)
        if step is not None and step.packed is not None:
            self.scatter(step.packed, *states)
            return states
        self._begin(len(key_states), q_len, *states)
        first, stop = not self.seen, self.seen + q_len
        kv = self.stored(storage.table(self.table, stop, step))
        for start in range(storage.skipped(self.table) if first else 0, q_len, AT_ONCE):
            some = slice(start, start + AT_ONCE)
            slot = torch.full((1,), self.seen + start, device=self.device)
            append(kv, *(x[:, :, some] for x in states), slot)
        self.seen = stop
        return states if first else self._given(kv, step, stop)

    def _begin(self, rows: int, q_len: int, *states: torch.Tensor, source: list[int] | None = None) -> None:
        """Make the cache ready for tokens of these rows."""
        storage = self.owner
        if self.is_initialized and (reason := self.why_other(*states)) is not None:
            if storage.seen:
                raise ValueError(f"{reason}: it belongs to another model.")
            storage.forget()
        storage.begin(rows, states[0].device)
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
        for pool, x in zip(self.buffers, states, strict=True):
            pool[page.long(), :, packed.slot.to(self.device) % size] = x[0].transpose(0, 1)
        if storage.forks is not None:
            self.copy(storage.forks)
        self.seen = width
        packed.stored += 1

    def copy(self, pages: torch.Tensor) -> None:
        """Copy pages. pages: int64 (copies, tables, 2), the source and the target."""
        source, target = pages[:, self.table].unbind(1)
        for pool in self.buffers:
            pool[target] = pool[source]

    def _is_read(self, step: Step | None) -> bool:
        """Whether attention finds pages: that of a patched model, which is not compiled."""
        config: Any = None if step is None or step.model is None else step.model.config
        return config is not None and not torch.compiler.is_compiling() and config._attn_implementation in registry.names()

    def _given(self, kv: KV, step: Step | None, tokens: int) -> Pair:
        """K and V for attention: in pages if it is of this package, otherwise a copy."""
        if step is not None and self._is_read(step):
            rows, _, kv_len, _, _ = kv.sizes
            keys, values = (x.expand(rows, -1, kv_len, -1) for x in self.nothing)
            step.kv, step.shown = kv, (keys, values)
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
        if self.track.mode == EAGER and self.seen and self._is_read(step):
            size = self.owner.pages.size
            return -(-(self.seen + query_length) // size) * size, 0
        return super().get_mask_sizes(query_length)

    def shown(self, index: int) -> torch.Tensor | None:
        """A copy."""
        if self.track.mode != EAGER:
            return UNKNOWN
        if not self.buffers or not self.seen:
            return None
        return gather(self.stored(self.owner.table(self.table, self.seen, None))).plain()[index][:, :, : self.seen]

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


class PageStorage(PreallocatedStorage):
    """The pools and tables of one cache.

    windows: of each layer; None if it sees all tokens. tokens: of all rows, for which there are pages at first. held: the pages of
    each row. tables_of_rows: the same, int32 (tables, rows, pages), 0 where there is none. room: number of slots that each row
    may write, from the next token on. kept: the tokens behind which pages of windows have returned. expected: the tokens that a
    row will have. permuted: whether the rows of tables are in another order than those of `held`. forks: the copies that share
    all but the last page of a prompt, for `TableLayer.copy`.
    """

    takes_prompts = False  # first tokens attend to K and V as they are computed
    layers: list[TableLayer]

    def __init__(self, windows: Sequence[int | None], tokens: int, size: int, growable: bool):
        self.windows, self.fixed = windows_of(windows), not growable
        self.table_of = [*map(self.windows.index, windows)]
        self.pages = Pools(size, self.windows, [-(-tokens // size) + 1] * len(self.windows))
        self.held: list[Held] = []
        self.tables_of_rows: Any = None
        self.room = self.kept = self.expected = 0
        self.permuted = False
        self.forks: torch.Tensor | None = None
        super().__init__([Kind("full")] * len(windows), max(round_up(1), 4 * size))

    def make_track(self, kind: Kind, capacity: int, growable: bool) -> Track:
        return TableTrack(kind, capacity, growable)

    def make_layer(self, index: int, track: Track) -> Layer:
        if track.storage is None:
            track.storage = weakref.ref(self)
        return TableLayer(index, track, self.table_of[index])

    @property
    def rows(self) -> int | None:
        return len(self.held) or None

    @property
    def windowed(self) -> bool:
        return len(self.windows) > 1

    @property
    def track(self) -> Track:
        return self.tracks[0]

    # ---- rows ----

    def begin(self, rows: int, device: torch.device) -> None:
        """Have tables for so many rows. Raises ValueError if it holds tokens of others."""
        if self.tables_of_rows is not None and self.tables_of_rows.device != device:
            raise ValueError(f"K and V in pages are on one device; got {device} and {self.tables_of_rows.device}. {_OTHER}")
        if self.rows == rows:
            return
        if self.seen:
            raise ValueError(f"This cache holds {self.rows} rows, and it is given {rows}. {CHANGE_ROWS}")
        self.reset()
        self.held = [self.pages.none() for _ in range(rows)]
        self.make_tables(rows, device)

    def make_tables(self, rows: int | None, device: torch.device | None = None) -> None:
        """Replace the tables by those of `rows` rows, whose pages are those held, and of the capacity of the track."""
        old = self.tables_of_rows
        if device is None and old is None:
            return
        self.read_back()
        with torch.inference_mode(False):
            shape = len(self.windows), rows or 0, self.track.capacity // self.pages.size
            self.tables_of_rows = torch.zeros(shape, dtype=torch.int32, device=device or old.device)
        self.track.version += 1
        self.write(0)

    def write(self, first: int) -> None:
        """Write the pages of all rows, from this one on, to the tables."""
        stop = max((len(held[0]) for held in self.held), default=0)
        if first < stop:
            each = [[held[table][first:] for held in self.held] for table in range(len(self.windows))]
            self.tables_of_rows[:, :, first:stop] = on_device(each, self.tables_of_rows.device, torch.int32)

    def read_back(self) -> None:
        """Learn which pages rows have after beam search has permuted them. This synchronises."""
        if not self.permuted:
            return
        self.permuted, count = False, len(self.held[0][0])
        tables = self.tables_of_rows[:, :, :count].tolist()
        firsts = [min(count, pool.first(self.kept)) for pool in self.pages.each]
        old = self.held
        self.held = [
            [[0] * first + table[row][first:] for table, first in zip(tables, firsts, strict=True)] for row in range(len(old))
        ]
        for held in self.held:
            self.pages.share(held)
        for held in old:
            self.pages.drop(held)

    # ---- pages ----

    def table(self, index: int, tokens: int, step: Step | None) -> torch.Tensor:
        """The pages of so many tokens, int32 (rows, pages)."""
        count = -(-tokens // self.pages.size)
        plan = {} if step is None or step.plan is None else step.plan
        if (index, count) not in plan:
            plan[index, count] = self.tables_of_rows[index, :, :count].contiguous()
        if step is not None:
            step.plan = plan
        found: torch.Tensor = plan[index, count]
        return found

    def skipped(self, table: int) -> int:
        """How many of the first tokens have no page."""
        return self.pages.each[table].first(self.kept) * self.pages.size

    def make_ready(self, seen: int, tokens: int, source: list[int] | None = None) -> None:
        """Let each row have pages for `tokens` tokens after `seen`, and alone those to which they are written.

        source: of rows whose first tokens are equal, the row that is read."""
        stop, size = seen + tokens, self.pages.size
        if stop <= self.room:
            return
        if stop > self.track.capacity:
            self.track.grow(-(-round_up(max(stop, self.expected)) // (4 * size)) * 4 * size)  # tables are aligned to 16 bytes
        self.read_back()
        self.kept = max(self.kept, (seen or stop) - KEEP)  # first tokens attend to no page
        count, (full, rest) = -(-stop // size), divmod(seen, size)
        firsts = [min(count, pool.first(self.kept)) for pool in self.pages.each]
        own = range(len(self.held)) if source is None else sorted({*source})
        need = [0] * len(firsts)
        for index, (pool, first) in enumerate(zip(self.pages.each, firsts, strict=True)):
            for row in own:
                pages = self.held[row][index]
                pool.drop(pages[:first])
                pages[:first] = [0] * first
                need[index] += count - len(pages) + (bool(rest) and full < len(pages) and pool.uses[pages[full]] > 1)
            need[index] += (len(self.held) - len(own)) * bool(stop % size)
        self._make_pages(need, count)
        copies = []
        for row in own:
            held = self.held[row]
            pairs = [(0, 0)] * len(firsts)
            for index, (pool, pages) in enumerate(zip(self.pages.each, held, strict=True)):
                if rest and full < len(pages) and pool.uses[pages[full]] > 1:
                    (mine,) = pool.take(1) or ()
                    pairs[index] = pages[full], mine
                    pool.drop([pages[full]])
                    pages[full] = mine
                pages += pool.take(count - len(pages)) or ()
            copies += [pairs] if any(pair[1] for pair in pairs) else []
        self.copy(copies)
        self.forks = None
        if source is not None:
            forked = [(row, self.pages.fork(self.held[source[row]], stop)) for row in range(len(source)) if source[row] != row]
            for row, fork in forked:
                assert fork is not None  # _make_pages has made room
                self.held[row] = fork[0]
            made = [fork[1] for _, fork in forked if fork is not None and fork[1]]
            self.forks = on_device(made, self.tables_of_rows.device) if made else None
        self.room = count * size
        self.write(full)

    def _make_pages(self, need: list[int], count: int) -> None:
        """Have so many free pages in each pool. count: the pages that each row has then."""
        later = max(0, -(-self.expected // self.pages.size) - count)
        for index, (pool, lacks) in enumerate(zip(self.pages.each, need, strict=True)):
            if lacks <= pool.available:
                continue
            if self.fixed:
                raise ValueError(
                    f"This cache has {pool.count - 1} pages of {pool.size} tokens and was made with grow=False; {pool.in_use} are "
                    f"in use, and {lacks} more are needed. Make it with a larger capacity, or leave grow=True."
                )
            # As many as the call can need at most, so that no step moves the pool; else a quarter more.
            more = later if pool.window is None else min(later, pool.needed(pool.window + KEEP) + 1)
            pool.extend(lacks - pool.available + max(more * len(self.held), 0 if later else pool.count // 4))
            for layer in self.layers:
                if layer.table == index and layer.buffers:
                    self.track.version += 1
                    layer.resize([*layer.buffers])

    def copy(self, copies: list[list[tuple[int, int]]]) -> None:
        """Copy pages. copies: the source and the target, for each table."""
        if copies:
            at = on_device(copies, self.tables_of_rows.device)
            for layer in self.layers:
                if layer.buffers:
                    layer.copy(at)

    # ---- what a cache does ----

    def reset(self) -> None:
        super().reset()
        self._drop(0)
        self.kept = self.room = 0

    def forget(self) -> None:
        """Discard the pools of a model whose K and V have another form."""
        self.reset()
        self.held, self.tables_of_rows = [], None
        for layer in self.layers:
            layer.clear()

    def _drop(self, tokens: int) -> None:
        """Use no longer the pages behind so many tokens."""
        self.read_back()
        count = -(-tokens // self.pages.size)
        for held in self.held:
            self.pages.drop([pages[count:] for pages in held])
            for pages in held:
                del pages[count:]
        if self.tables_of_rows is not None:
            self.tables_of_rows[:, :, count:] = 0  # a graph may write behind the last token
        self.room = 0

    def crop(self, tokens: int) -> None:
        super().crop(tokens)
        self._drop(self.seen)

    def reorder(self, index: torch.Tensor) -> None:
        """Permute the tables, and copy the last pages, in place and without the host."""
        seen = self.seen
        if not seen or len(index) != len(self.held):
            self.select(index)
            return
        self.make_ready(seen, 0)  # each row has its last page alone
        at, (full, rest) = index.to(self.tables_of_rows.device), divmod(seen, self.pages.size)
        if rest:
            own = self.tables_of_rows[:, :, full].long()
            for layer in self.layers:
                for pool in layer.buffers:
                    pool[own[layer.table]] = pool[own[layer.table][at]]
        self.tables_of_rows[:, :, :full] = self.tables_of_rows[:, at, :full]
        self.permuted = True

    def select(self, indices: torch.Tensor) -> None:
        seen = self.seen
        if self.rows is None:
            return
        self.read_back()
        at = indices.tolist()
        if seen % self.pages.size:
            self._make_pages([len(at)] * len(self.windows), len(self.held[0][0]))
        old, copies, made = self.held, [], []
        for row in at:
            held, pairs = self.pages.fork(old[row], seen) or (self.pages.none(), [])
            made.append(held)
            copies += [pairs] if pairs else []
        for held in old:
            self.pages.drop(held)
        self.copy(copies)
        self.held = made
        self.room = -(-seen // self.pages.size) * self.pages.size
        if len(made) == len(old):
            self.tables_of_rows.zero_()
            self.write(0)
        else:
            self.make_tables(len(made))


_OTHER = "Use a PreallocatedCache."


class PagedCache(ChangeableCache):
    """K and V of every layer in pages, as `past_key_values` (from Transformers 5.24 on: `cache`) of generate() and of forwards.

    config: the model's configuration, or the model. capacity: number of tokens, of all rows together, for which pages are
    allocated at the first forward, rounded up to whole pages. page_size: tokens of a page, 16, 32, 64, 128 or 256. The pools grow
    between forwards. grow=False raises a ValueError instead. A pool holds (pages, num_kv_heads, page_size, head_dim) of K or V of
    one layer, in the dtype in which attention computes them.

    For patched models: attention of other models gets a copy of K and V in each step, with a warning. Rows whose prompts are
    equal (num_return_sequences, beams) are read once under patch() and share their pages, beam search permutes tables and not
    K and V, and pages behind a sliding window return. As a PreallocatedCache it supports left padding, holes, chunked prefill,
    several turns, crop(), reset(), assistants and deepcopy. A cache has pools of its own: `generate_batch()` shares pages between
    texts. It raises an error for latents (MLA), recurrent states, encoder-decoder models, ALiBi, streaming backends, models on
    several devices or ranks, gradients, and for cropping more of a sliding window than it keeps; it has no save().
    """

    storage: PageStorage

    def __init__(self, config: saved.ModelOrConfig, capacity: int = 1, *, page_size: int = 64, grow: bool = True):
        tokens, own = checked(capacity), saved.config_of(config)
        if page_size not in PAGE_SIZES or isinstance(page_size, bool):
            raise ValueError(f"A page has {', '.join(map(str, PAGE_SIZES[:-1]))} or {PAGE_SIZES[-1]} tokens; got {page_size!r}.")
        kinds = hf.layer_kinds(own)
        reason = why_not(own, kinds) or ("ranks share it" if hf.is_shared(config) else None)
        if reason is not None:
            raise ValueError(f"A PagedCache does not support this model: {reason}. {_OTHER}")
        self._adopt(PageStorage([kind.window for kind in kinds], tokens, page_size, grow))

    def __repr__(self) -> str:
        pages = self.storage.pages
        return f"{type(self).__name__}({self.storage.seen} tokens, {pages.in_use} pages of {pages.size} in use)"

    @property
    def pages_in_use(self) -> int:
        """Number of pages that rows have, of the layers of each window together."""
        self.storage.read_back()
        return self.storage.pages.in_use

    def begin(self, step: Step, model: hf.PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        name = model.config._attn_implementation
        if name in registry.names() and registry.get(name).streaming:
            raise ValueError(f"attn_implementation={name!r} drops tokens, and a PagedCache keeps them. Use a RollingCache.")
        return super().begin(step, model, args, kwargs)

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:  # type: ignore[override]  # a StaticCache's is a tensor
        return self.storage.layers[layer_idx].query_offset()

    def reserve(self, tokens: int) -> None:
        """Expect `tokens` tokens of each row, so that neither tables nor pools grow before that."""
        self.storage.expected = tokens
