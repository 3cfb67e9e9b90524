"""The loop of a job: prompts are read as they find room, rows are decoded one token each, and ended rows make room.

The host reads the tokens of a step while the device computes the next one, so a row that ends by a token runs one step too many,
whose token is dropped. A page that it frees may still be written by that step: later steps write it after that.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import hf
from ..caches.paged import BatchCache, PagedStorage, on_device
from ..caches.pages import Key, Pool
from . import groups
from .pick import Picker
from .prompts import Part, reading_of
from .requests import CHILD, Row

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
KEEP = "logits_to_keep"
_LACKS = "needs {need} pages of {size} tokens, and the pool has {count}. Ask for fewer tokens or more blocks (num_blocks)."


class Flight(NamedTuple):
    """Tokens of a step that the host has not read. event: None on a CPU."""

    rows: list[Row]
    tokens: torch.Tensor
    logprobs: torch.Tensor | None
    event: torch.cuda.Event | None


@dataclass(eq=False)
class Loop:
    """The steps of one job over one storage.

    decode: a forward of one token of each row. read: a forward of prompts. keeps: whether the model takes logits_to_keep.
    most: the most rows. budget: the most tokens of prompts in a step. ends, stops: what ends a text. share: whether texts share
    pages. group: the most rows that read shared pages together. fingerprint: a value that changes with the model. results: of
    finished requests, by id; if on_result is set, it is called with them instead.
    """

    storage: PagedStorage
    picker: Picker
    decode: Callable[..., Any]
    read: Callable[..., Any]
    keeps: bool
    most: int
    budget: int
    ends: frozenset[int]
    stops: hf.StringEnds | None
    share: bool
    group: int
    fingerprint: Callable[[], object]

    def __post_init__(self) -> None:
        self.pages, self.device, self.cache = self.storage.pages, self.storage.tables.device, BatchCache.around(self.storage)
        self.waiting: deque[Row] = deque()
        self.reading: list[Row] = []
        self.rows: list[Row] = []  # those that are decoded, in the order of the table
        self.grouped: list[Row] = []
        self.flights: deque[Flight] = deque()
        self.results: dict[str, hf.GenerationOutput] = {}
        self.cancelled: set[str] = set()
        self.on_result: Callable[[hf.GenerationOutput], object] | None = None
        self.weights = self.fingerprint()
        self.preempted = self.shared = self.steps = 0

    # ---- requests ----

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.reading or self.rows or self.flights)

    def holds(self, row: Row) -> bool:
        """Whether the tables have room for a text."""
        return len(row.prompt) + row.limit <= self.storage.width * self.pages.size

    def cancel(self, request: str) -> None:
        """End a request, and those that continue its prompt, before the next step."""
        self.cancelled.add(request)

    def _finish(self, row: Row, error: str | None = None) -> None:
        row.ended = True
        if self.on_result is None:
            self.results[row.id] = row.result(error)
        else:
            self.on_result(row.result(error))

    def _cancel(self) -> None:
        for row in [*self.waiting, *self.reading, *self.rows]:
            if not row.ended and {row.id, row.id.partition(CHILD)[0]} & self.cancelled:
                rest = [row.twin(index) for index in range(row.copies - 1)]
                for each in (row, *rest):
                    self._finish(each, "The request was cancelled.")
        for row in [*self.waiting, *self.reading]:
            if row.ended:
                self._drop(row)
        self.waiting = deque(row for row in self.waiting if not row.ended)
        self.reading = [row for row in self.reading if not row.ended]
        self.cancelled.clear()

    def _drop(self, row: Row) -> None:
        self.pages.drop(row.pages)
        row.pages, row.done, row.old = [], 0, False

    # ---- one step ----

    def step(self) -> None:
        """Begin a step of the rows and one of prompts, then read the tokens of the steps before.

        Where results are told as they come, rows go on beside prompts. Otherwise prompts come first: the steps that follow serve
        more rows each, and are of fewer sizes. After rows had to wait again for pages, rows go on too: they end and make room."""
        before = len(self.flights)
        if self.cancelled:
            self._cancel()
        self._leave()
        self._cross()
        parts = self._plan()
        if self.rows and not (parts and self.on_result is None and not self.preempted):
            self._decode()
        if parts:
            self._read(parts)
        # With nothing begun there is nothing to wait for but these.
        self._collect(before if len(self.flights) > before else len(self.flights))

    def _fail(self, row: Row, pool: Pool) -> None:
        said = _LACKS.format(need=pool.needed(row.next), size=pool.size, count=pool.count - 1)
        for each in (row, *(row.twin(index) for index in range(row.copies - 1))):
            self._finish(each, f"A text of {len(row.ids)} tokens {said}")

    def _leave(self) -> None:
        """Take rows that have ended, or whose last step has begun, out of the table: the last rows move to their places."""
        gone = [i for i, row in enumerate(self.rows) if row.ended or row.launched >= row.limit]
        if not gone:
            return
        for i in gone:
            self._drop(self.rows[i])
        left = len(self.rows) - len(gone)
        holes = [i for i in gone if i < left]
        movers = [i for i in range(left, len(self.rows)) if i not in set(gone)]
        for hole, mover in zip(holes, movers, strict=True):
            self.rows[hole] = self.rows[mover]
        storage = self.storage
        del self.rows[left:]
        if holes:
            at = on_device([movers, holes], self.device)
            storage.move(at[0], at[1])
            self.picker.move(at[0], at[1])
        storage.clear(left, left + len(gone))

    def _cross(self) -> None:
        """Give a page to each row whose next token begins one. Rows that came last wait again if there is none."""
        size = self.pages.size
        edits: list[tuple[int, int, list[int]]] = []
        i = 0
        while i < len(self.rows):
            row = self.rows[i]
            if row.done % size or row.done // size < len(row.pages[0]):
                i += 1
                continue
            self.pages.leave(row.pages, row.done)
            if not self.pages.grow(row.pages, row.done + 1):
                if self.flights:  # the texts of rows that wait again must be known
                    self._collect(len(self.flights))
                    self._write(edits)
                    edits = []
                    self._leave()
                    i = 0
                else:
                    self._preempt()
                continue
            edits.append((i, row.done // size, [pages[-1] for pages in row.pages]))
            i += 1
        self._write([edit for edit in edits if edit[0] < len(self.rows)])

    def _write(self, edits: list[tuple[int, int, list[int]]]) -> None:
        if edits:
            at = on_device([[row, place, *pages] for row, place, pages in edits], self.device).T
            self.storage.tables[:, at[0], at[1]] = at[2:].to(torch.int32)

    def _preempt(self) -> None:
        """The last row waits for pages, and is read again."""
        row = self.rows.pop()
        place = len(self.rows)
        self.storage.clear(place, place + 1)
        self._drop(row)
        self.preempted += 1
        self.waiting.appendleft(row)

    def _plan(self) -> list[Part]:
        """The prompts, or parts of them, that the next forward reads."""
        left, parts = self.budget, []
        coming: set[Key] = set()  # the next pages of texts that are read now: another text waits to find them
        for row in self.reading:
            count = min(left, len(row.ids) - row.done, self.pages.reach(row.done) - row.done)
            if not count or not self._make_room(row, row.done + count):
                break
            parts.append(Part(row, count))
            left -= count
        for row in self.reading:
            self._note(row, coming)
        room = self.most - len(self.rows) - sum(min(row.copies, self.most) for row in self.reading)
        compared = False  # whether the model has been, in this step
        before = len(self.waiting)
        for row in [*itertools.islice(self.waiting, self.most)]:
            if (pool := self.pages.lacks(row.next)) is not None:
                self.waiting.remove(row)
                self._fail(row, pool)
                continue
            if left <= 0 or room < min(row.copies, self.most):
                break
            pages, key = self.pages.match(row.ids) if self.share else (self.pages.none(), None)
            if key is not None and key in coming:
                continue
            self.pages.share(pages)
            row.pages, row.done = pages, len(pages[0]) * self.pages.size
            count = min(left, len(row.ids) - row.done, self.pages.reach(row.done) - row.done)
            if not self._make_room(row, row.done + count):
                self._drop(row)
                break
            if pages[0] and not compared:
                compared = True
                if self._changed():
                    self._drop(row)
                    return self._plan()
            self.shared += row.done
            self.waiting.remove(row)
            self.reading.append(row)
            row.begun = row.begun if row.begun >= 0 else time.perf_counter()
            parts.append(Part(row, count))
            left -= count
            room -= min(row.copies, self.most)
            if key is not None:
                coming.add(key)
        if not parts and not self.rows and not self.flights:
            if len(self.reading) > 1:
                self._restart()  # prompts that are read in part hold all pages
            elif len(self.waiting) == before and (self.waiting or self.reading):
                raise RuntimeError(f"No text of this generate_batch() can go on; {self.pages.in_use} pages are in use.")
        return parts

    def _changed(self) -> bool:
        """Whether the model has. Then texts that it has read before are not found again."""
        before, self.weights = self.weights, self.fingerprint()
        if before == self.weights:
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Find no text again that has been read so far, in whole or in part."""
        self.pages.forget_all()
        for row in self.reading:
            row.old = True

    def _note(self, row: Row, coming: set[Key]) -> None:
        if self.share and not row.old and (key := self.pages.match(row.ids)[1]) is not None:
            coming.add(key)

    def _restart(self) -> None:
        row = self.reading.pop()
        self._drop(row)
        self.waiting.appendleft(row)

    def _make_room(self, row: Row, tokens: int) -> bool:
        # A row that is decoded goes first: prompts leave it a page for its next tokens.
        return self.pages.grow(row.pages, tokens, sum(not each.done % self.pages.size for each in self.rows))

    # ---- forwards ----

    def _decode(self) -> None:
        storage, rows = self.storage, self.rows
        bucket = next((size for size in BUCKETS if len(rows) <= size <= storage.most_rows), storage.most_rows)
        storage.bucket, storage.prompts = bucket, None
        if self.grouped != rows:
            self.grouped = [*rows]
            storage.share(groups.worth([row.pages[0] for row in rows], self.group, storage), self.group)
        lengths = storage.lengths[:bucket]
        positions = lengths.long()[:, None]
        given = {"input_ids": storage.last[:bucket, None], "position_ids": positions, hf.CACHE: self.cache, "use_cache": True}
        if self.keeps:
            given[KEEP] = 1
        logits = self.decode(**given).logits[: len(rows), -1]
        for row in rows:
            row.done += 1
        tokens, logprobs = self.picker(logits, rows, True)
        self.picker.add(lengths[: len(rows)], tokens)
        for row in rows:
            row.launched += 1
        storage.last[: len(rows)] = tokens
        self.steps += 1
        self._fly([*rows], tokens, logprobs)

    def _read(self, parts: list[Part]) -> None:
        ids, positions, sees, ended, kept = reading_of(parts, self.pages.size, self.device)
        given = {"input_ids": ids, "position_ids": positions, hf.CACHE: self.cache, "use_cache": True}
        if self.keeps:
            given[KEEP] = kept
        self.storage.prompts = sees
        try:
            logits = self.read(**given).logits[0]
        finally:
            self.storage.prompts = None
        for row, count in parts:
            row.done += count
            if self.share and not row.old:
                self.pages.publish(row.ids, row.pages, row.done)
            self.pages.leave(row.pages, row.done)
        if ended:
            self._admit([part.row for part in ended], logits if self.keeps else logits[kept])

    def _admit(self, ended: list[Row], logits: torch.Tensor) -> None:
        """Choose the first token of each text whose prompt has been read, and of the texts that continue it."""
        texts: list[Row] = []
        of: list[int] = []
        copies: list[list[tuple[int, int]]] = []
        later: list[Row] = []
        room = self.most - len(self.rows) - len(ended)
        for index, row in enumerate(ended):
            self.reading.remove(row)
            texts.append(row)
            of.append(index)
            for twin in [row.twin(index) for index in range(row.copies - 1)]:
                fork = self.pages.fork(row.pages, row.done) if room > 0 else None
                if fork is None:  # it is read again, from shared pages
                    later.append(twin)
                    continue
                twin.pages, twin.done = fork[0], row.done
                copies += [fork[1]] if fork[1] else []
                texts.append(twin)
                of.append(index)
                room -= 1
            row.copies = 1
        self.waiting.extendleft(reversed(later))
        if copies:
            self.storage.copy(copies)
        if len(of) > len(ended):
            logits = logits[on_device(of, self.device)]
        tokens, logprobs = self.picker(logits, texts, False)
        self._place(texts, tokens)
        for row in texts:
            row.launched += 1
        self._fly(texts, tokens, logprobs)

    def _place(self, texts: list[Row], tokens: torch.Tensor) -> None:
        """Put texts behind the rows of the table."""
        storage, start = self.storage, len(self.rows)
        width = max(len(row.pages[0]) for row in texts)
        tables = [
            [pages + [0] * (width - len(pages)) for pages in each] for each in zip(*(row.pages for row in texts), strict=True)
        ]
        stop = start + len(texts)
        storage.tables[:, start:stop, :width] = on_device(tables, self.device, torch.int32)
        storage.lengths[start:stop] = on_device([row.done for row in texts], self.device, torch.int32)
        storage.live[start:stop] = 1
        storage.last[start:stop] = tokens
        for index, row in enumerate(texts):
            self.picker.begin(start + index, row.ids, tokens[index])
        self.rows += texts

    # ---- tokens ----

    def _fly(self, rows: list[Row], tokens: torch.Tensor, logprobs: torch.Tensor | None) -> None:
        event = None
        if tokens.is_cuda:
            tokens, logprobs = (None if x is None else x.to("cpu", non_blocking=True) for x in (tokens, logprobs))  # type: ignore[assignment]
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
        self.flights.append(Flight(rows, tokens, logprobs, event))

    def _collect(self, count: int) -> None:
        """Read the tokens of the first steps in flight."""
        for _ in range(count):
            rows, tokens, logprobs, event = self.flights.popleft()
            if event is not None:
                event.synchronize()
            found = itertools.repeat(None) if logprobs is None else logprobs.tolist()
            live = [each for each in zip(rows, tokens.tolist(), found, strict=False) if not each[0].ended]
            for row, token, logprob in live:
                row.take(token, logprob)
            stops = self.stops
            stopped = itertools.repeat(False) if stops is None else stops([row.last(stops.tokens) for row, *_ in live])
            for (row, token, _), stop in zip(live, stopped, strict=False):
                if stop or token in (self.ends if row.ends is None else row.ends) or len(row.new) >= row.limit:
                    self._finish(row)
                elif row.streamed and self.on_result is not None:
                    self.on_result(row.result())
