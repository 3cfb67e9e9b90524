"""The pages of a paged cache (`paged_cache`): which rows have them, and the tables by which kernels find them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..attention.step import Step
from ..hf import Kind
from .contract import CHANGE_ROWS
from .layers import KEEP, Layer, Track, round_up
from .memory import refuse_unless_fits
from .paged import copy_pages, on_device, windows_of
from .pages import Held, Pools
from .storage import PreallocatedStorage
from .table_layers import TableLayer, TableTrack

OTHER = "Use a PreallocatedCache."


class TableStorage(PreallocatedStorage):
    """The pools and tables of one cache.

    windows: of each layer; None if it sees all tokens. tokens: of all rows, for which there are pages at first. held: the pages
    of each row. tables_of_rows: the same, int32 (tables, rows, pages), 0 where there is none. room: number of slots that each row
    may write, from the next token on. kept: the tokens behind which pages of windows have returned. expected: the tokens that a
    row will have. writes: how often tables were written. permuted: whether their rows are in another order than those of `held`.
    forks: the copies that let rows share all but the last page of a prompt, for `copy_pages`.
    """

    takes_prompts = False  # first tokens attend to K and V as they are computed
    layers: list[TableLayer]

    def __init__(self, windows: Sequence[int | None], tokens: int, size: int, growable: bool):
        self.windows, self.fixed = windows_of(windows), not growable
        self.table_of = [*map(self.windows.index, windows)]
        self.start = -(-tokens // size)
        self.pages = Pools(size, self.windows, [1] * len(self.windows))  # page 0 is no row's
        self.held: list[Held] = []
        self.tables_of_rows: Any = None
        self.room = self.kept = self.expected = self.writes = 0
        self.permuted, self.bytes_of_token = False, 0
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

    def begin(self, rows: int, device: torch.device, bytes_of_token: int) -> None:
        """Have tables for so many rows. bytes_of_token: of a layer. Raises ValueError if it holds tokens of others."""
        self.bytes_of_token = bytes_of_token
        if self.tables_of_rows is not None and self.tables_of_rows.device != device:
            raise ValueError(f"K and V in pages are on one device; got {device} and {self.tables_of_rows.device}. {OTHER}")
        if self.seen:
            if self.rows != rows:
                raise ValueError(f"This cache holds {self.rows} rows, and it is given {rows}. {CHANGE_ROWS}")
            return
        self._drop(0)  # of a first forward that has failed
        self.kept = 0
        if self.rows != rows:
            self.held = [self.pages.none() for _ in range(rows)]
            self.make_tables(rows, device)

    def holds(self, tokens: int) -> bool:
        return super().holds(tokens) and tokens <= self.room  # a page may be lacking, or be shared

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
        self.writes += 1
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
        if (key := (index, count, self.writes)) not in plan:
            plan[key] = self.tables_of_rows[index, :, :count].contiguous()
        if step is not None:
            step.plan = plan
        found: torch.Tensor = plan[key]
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
                    mine = pool.take(1) or [0]
                    pairs[index] = pages[full], mine[0]
                    pool.drop(pages[full : full + 1])
                    pages[full : full + 1] = mine
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
            short = lacks - pool.available
            if self.fixed and index == 0 and (pool.count > 1 or short > self.start):
                there = max(self.start, pool.count - 1)
                raise ValueError(
                    f"This cache has {there} pages of {pool.size} tokens and was made with grow=False; {pool.in_use} are in use, "
                    f"and {lacks} more are needed. Make it with a larger capacity, or leave grow=True."
                )
            # As many as the call can need at most, so that no step moves the pool; else a quarter more.
            more = later if pool.window is None else min(later, pool.needed(pool.window + KEEP) + 1)
            spare = more * len(self.held) if later else pool.count // 4
            if index == 0 and self.fixed:
                spare = 0
            added = max(short + spare, self.start if index == 0 and pool.count == 1 else 0)
            layers = [layer for layer in self.layers if layer.table == index]
            each, device = len(layers) * self.bytes_of_token, self.tables_of_rows.device
            held = sum(part.tensor.nbytes for layer in layers for part in layer.parts())
            refuse_unless_fits((pool.count + added) * pool.size, each, device, held)
            for layer in layers:
                if layer.buffers:
                    self.track.version += 1
                    layer.resize([*layer.buffers], pool.count + added)
            pool.extend(added)  # now every layer has them

    def copy(self, copies: list[list[tuple[int, int]]]) -> None:
        """Copy pages. copies: the source and the target, for each table."""
        if copies:
            copy_pages(self.layers, on_device(copies, self.tables_of_rows.device))

    # ---- what a cache does ----

    def reset(self) -> None:
        if self.cut_short:  # rows may hold pages that are not theirs
            self.pages, self.permuted = Pools(self.pages.size, self.windows, [pool.count for pool in self.pages.each]), False
            self.held = [self.pages.none() for _ in self.held]
        super().reset()
        self._drop(0)
        self.kept = self.room = 0

    def rewind(self, mark: list[torch.Tensor] | None) -> None:
        super().rewind(mark)
        # Masks are those of whole pages, and would not differ for a layer that lacks a token.
        self.cut_short = self.cut_short or (mark is None and len({layer.seen for layer in self.layers}) > 1)

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
        old, copies, made = self.held, [], []
        at = [row % len(old) for row in at]
        if seen % self.pages.size and len(at) > len({*at}):
            self._make_pages([len(at) - len({*at})] * len(self.windows), len(old[0][0]))
        for index, row in enumerate(at):
            if row not in at[:index]:  # its pages become those of the new row
                made.append(old[row])
                continue
            held, pairs = self.pages.fork(old[row], seen) or (self.pages.none(), [])
            made.append(held)
            copies += [pairs] if pairs else []
        for row in {*range(len(old))} - {*at}:
            self.pages.drop(old[row])
        self.copy(copies)
        self.held = made
        self.room = -(-seen // self.pages.size) * self.pages.size
        if len(made) == len(old):
            self.tables_of_rows.zero_()
            self.write(0)
        else:
            self.make_tables(len(made))
