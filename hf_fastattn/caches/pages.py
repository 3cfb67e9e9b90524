"""Which pages of a pool are free, how many rows use each, and which hold the beginning of a known text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

Key = tuple[int, tuple[int, ...]]  # the page before, or -1, and the ids of a page


class Pages:
    """The pages of one pool. Page 0 is never given out: rows that only fill a batch write to it.

    A page that nobody uses keeps its tokens while no other page is free, and a text that begins with them finds it again. Ids are
    compared, not hashes of them: the key of a page is the page before it and its own ids.
    """

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self.free = list(range(count - 1, 0, -1))
        self.uses = [0] * count
        self.known: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.later: dict[int, set[int]] = {}  # the known pages that follow a page
        self.idle: OrderedDict[int, None] = OrderedDict()  # known pages that nobody uses, longest idle first

    @property
    def in_use(self) -> int:
        """Number of pages that rows use."""
        return self.count - 1 - len(self.free) - len(self.idle)

    @property
    def available(self) -> int:
        return len(self.free) + len(self.idle)

    def needed(self, tokens: int) -> int:
        """Number of pages for so many tokens."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int] | None:
        """So many pages, which the caller uses once; None if fewer are available."""
        if count > self.available:
            return None
        while len(self.free) < count:
            self._forget(next(iter(self.idle)))
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            self.uses[page] = 1
        return taken

    def _forget(self, page: int) -> None:
        """Drop the key of an idle page, and of the pages that follow it: another text may take its number."""
        for later in self.later.pop(page, set()).copy():
            self._forget(later)
        key = self.key_of.pop(page)
        del self.known[key]
        self.later.get(key[0], set()).discard(page)
        if page in self.idle:
            del self.idle[page]
            self.free.append(page)

    def share(self, pages: Sequence[int]) -> None:
        """Use these pages once more."""
        for page in pages:
            self.idle.pop(page, None)
            self.uses[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Use these pages once less."""
        for page in reversed(pages):  # the end of a text is forgotten first
            self.uses[page] -= 1
            if not self.uses[page]:
                if page in self.key_of:
                    self.idle[page] = None
                else:
                    self.free.append(page)

    def _blocks(self, ids: Sequence[int], tokens: int) -> Iterator[tuple[int, ...]]:
        for start in range(0, tokens - self.size + 1, self.size):
            yield tuple(ids[start : start + self.size])

    def match(self, ids: Sequence[int]) -> tuple[list[int], Key | None]:
        """The pages that hold the beginning of a text, of which at least one token is left to read, and the key of the next page;
        None if no whole page is left."""
        found: list[int] = []
        for block in self._blocks(ids, len(ids) - 1):
            key = found[-1] if found else -1, block
            if key not in self.known:
                return found, key
            found.append(self.known[key])
        return found, None

    def publish(self, ids: Sequence[int], pages: Sequence[int], tokens: int) -> None:
        """Let other texts find these pages, of which the first `tokens` tokens are written."""
        before = -1
        for block, page in zip(self._blocks(ids, tokens), pages, strict=False):
            key = before, block
            if key not in self.known:
                self.known[key], self.key_of[page] = page, key
                self.later.setdefault(before, set()).add(page)
            before = self.known[key]

    def forget_all(self) -> None:
        """Find no text again, as after a change of the weights."""
        self.known.clear()
        self.key_of.clear()
        self.later.clear()
        self.free += self.idle
        self.idle.clear()
