"""Which pages of the pools are free, how many texts use each, and which hold the beginning of a known text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence

from ..kernels.spec import PAGE_SIZES

Key = tuple[int, tuple[int, ...]]  # the page before, or -1, and the ids of a page
Held = list[list[int]]  # the pages of a text in each pool, in order; 0 where no later query sees a page


def check_size(size: int) -> None:
    """Raise ValueError if a page cannot have so many tokens."""
    if size not in PAGE_SIZES:
        *most, last = PAGE_SIZES
        raise ValueError(f"A page has {', '.join(map(str, most))} or {last} tokens; got page_size={size!r}.")


class Pool:
    """The pages of one pool. Page 0 is never given out: rows that only fill a batch write to it.

    A page that nobody uses keeps its tokens while no other page is free, and is found again by its key.
    window: number of tokens that a query sees of the layers that have this pool, itself included; None if it sees all.
    """

    def __init__(self, count: int, size: int, window: int | None = None):
        self.count, self.size, self.window = count, size, window
        self.free = list(range(count - 1, 0, -1))
        self.uses = [0] * count
        self.known: dict[Hashable, int] = {}
        self.key_of: dict[int, Hashable] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()  # known pages that nobody uses, longest idle first

    @property
    def in_use(self) -> int:
        """Number of pages that texts use."""
        return self.count - 1 - len(self.free) - len(self.idle)

    @property
    def available(self) -> int:
        return len(self.free) + len(self.idle)

    def extend(self, more: int) -> None:
        """Add so many pages."""
        self.free[:0] = range(self.count + more - 1, self.count - 1, -1)
        self.uses += [0] * more
        self.count += more

    def needed(self, tokens: int) -> int:
        """The most pages that a text of so many tokens uses at one time, if it is read in small parts."""
        need = -(-tokens // self.size)
        return need if self.window is None else min(need, -(-self.window // self.size) + 1)

    def first(self, tokens: int) -> int:
        """Number of pages, from the first on, that no query after so many tokens sees."""
        return 0 if self.window is None else max(0, tokens - self.window + 1) // self.size

    def take(self, count: int) -> list[int] | None:
        """So many pages, which the caller uses once; None if fewer are available."""
        if count > self.available:
            return None
        while len(self.free) < count:
            self.forget(next(iter(self.idle)))
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            self.uses[page] = 1
        return taken

    def name(self, page: int, key: Hashable) -> None:
        """Let texts find a page by a key that no page has."""
        self.known[key], self.key_of[page] = page, key

    def forget(self, page: int) -> None:
        """Drop the key of a page."""
        del self.known[self.key_of.pop(page)]
        if page in self.idle:
            del self.idle[page]
            self.free.append(page)

    def share(self, pages: Sequence[int]) -> None:
        """Use these pages once more."""
        for page in filter(None, pages):
            self.idle.pop(page, None)
            self.uses[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Use these pages once less."""
        for page in filter(None, reversed(pages)):  # the end of a text is forgotten first
            self.uses[page] -= 1
            if not self.uses[page]:
                if page in self.key_of:
                    self.idle[page] = None
                else:
                    self.free.append(page)

    def forget_all(self) -> None:
        for page in [*self.key_of]:
            self.forget(page)


class Pages(Pool):
    """A pool in which texts have all their pages. Ids are compared, not hashes of them: the key of a page is the page before it
    and its own ids. forgotten: called with each page that has lost its key."""

    def __init__(self, count: int, size: int, forgotten: Callable[[int], object] = lambda _: None):
        super().__init__(count, size)
        self.later: dict[int, set[int]] = {}  # the known pages that follow a page
        self.forgotten = forgotten

    def forget(self, page: int) -> None:
        """Drop the key of a page, and of the pages that follow it: another text may take its number."""
        left = [page]
        while left:
            each = left.pop()
            if each in self.key_of:
                left += self.later.pop(each, ())
                before: int = self.key_of[each][0]  # type: ignore[index]
                self.later.get(before, set()).discard(each)
                super().forget(each)
                self.forgotten(each)

    def _blocks(self, ids: Sequence[int], tokens: int) -> Iterator[tuple[int, ...]]:
        for start in range(0, tokens - self.size + 1, self.size):
            yield tuple(ids[start : start + self.size])

    def match(self, ids: Sequence[int]) -> tuple[list[int], list[Key]]:
        """The pages that hold the beginning of a text, of which at least one token is left to read, with the keys of these pages
        and that of the next page, if there is a whole one."""
        found: list[int] = []
        keys: list[Key] = []
        for block in self._blocks(ids, len(ids) - 1):
            keys.append((found[-1] if found else -1, block))
            if keys[-1] not in self.known:
                break
            found.append(self.known[keys[-1]])
        return found, keys

    def publish(self, ids: Sequence[int], pages: Sequence[int], tokens: int) -> list[int]:
        """Let other texts find these pages, of which the first `tokens` tokens are written. Returns the pages that are found."""
        before, found = -1, []
        for block, page in zip(self._blocks(ids, tokens), pages, strict=False):
            key = before, block
            if key not in self.known:
                self.name(page, key)
                self.later.setdefault(before, set()).add(page)
            before = self.known[key]
            found.append(before)
        return found


class Pools:
    """The pools of the layers of a model. windows: None, then the windows of its layers; counts: numbers of pages.

    In the first pool a text has all its pages, and those of the other pools are found by their numbers; if all layers have
    windows, it has no memory. Of a pool with a window a text has the pages that later queries see.
    """

    def __init__(self, size: int, windows: Sequence[int | None], counts: Sequence[int]):
        self.size = size
        self.all = Pages(counts[0], size, self._forget)
        self.windowed = [Pool(count, size, window) for window, count in zip(windows[1:], counts[1:], strict=True)]
        self.each: list[Pool] = [self.all, *self.windowed]

    @property
    def in_use(self) -> int:
        return sum(pool.in_use for pool in self.each)

    def none(self) -> Held:
        """What a text without a page holds."""
        return [[] for _ in self.each]

    def lacks(self, tokens: int) -> Pool | None:
        """A pool that is too small for a text of so many tokens, or None."""
        return next((pool for pool in self.each if pool.needed(tokens) >= pool.count), None)

    def reach(self, tokens: int) -> int:
        """The most tokens that a text of `tokens` tokens can have after the next forward."""
        return min((pool.first(tokens) + pool.count - 1) * self.size for pool in self.each)

    def grow(self, held: Held, tokens: int, spare: int = 0) -> bool:
        """Add pages for a text of so many tokens, if `spare` others are left; else return False."""
        need = -(-tokens // self.size) - len(held[0])
        if need > 0:
            if any(pool.available - need < spare for pool in self.each):
                return False
            for pool, pages in zip(self.each, held, strict=True):
                pages += pool.take(need) or ()
        return True

    def leave(self, held: Held, tokens: int) -> None:
        """Use no longer the pages that no query after so many tokens sees."""
        for pool, pages in zip(self.each, held, strict=False):
            first = pool.first(tokens)
            start = first
            while start and pages[start - 1]:
                start -= 1
            pool.drop(pages[start:first])
            pages[start:first] = [0] * (first - start)

    def drop(self, held: Held) -> None:
        for pool, pages in zip(self.each, held, strict=False):
            pool.drop(pages)

    def match(self, ids: Sequence[int]) -> tuple[Held, Key | None]:
        """The pages that hold the beginning of a text, of which at least one token is left to read, and the key of the next page;
        None if no whole page is left."""
        found, keys = self.all.match(ids)
        count = len(found)
        while not all(
            found[index] in pool.known
            for pool in self.windowed
            for index in range(count - 1, pool.first(count * self.size) - 1, -1)
        ):
            count -= 1
        held = [found[:count]]
        for pool in self.windowed:
            first = pool.first(count * self.size)
            held.append([0] * first + [pool.known[page] for page in found[first:count]])
        return held, keys[count] if count < len(keys) else None

    def share(self, held: Held) -> None:
        for pool, pages in zip(self.each, held, strict=True):
            pool.share(pages)

    def fork(self, held: Held, tokens: int) -> tuple[Held, list[tuple[int, int]]] | None:
        """The pages of a text that continues one of so many tokens, and for each pool the page to copy, and where; None if there
        is none. Whole pages are shared."""
        full, rest = divmod(tokens, self.size)
        if rest and not all(pool.available for pool in self.each):
            return None
        shared = [pages[:full] for pages in held]
        self.share(shared)
        if not rest:
            return shared, []
        copies = [(pages[full], (pool.take(1) or [0])[0]) for pool, pages in zip(self.each, held, strict=True)]
        return [[*pages, page] for pages, (_, page) in zip(shared, copies, strict=True)], copies

    def publish(self, ids: Sequence[int], held: Held, tokens: int) -> None:
        """Let other texts find these pages, of which the first `tokens` tokens are written."""
        found = self.all.publish(ids, held[0], tokens)
        for pool, pages in zip(self.windowed, held[1:], strict=True):
            for key, page in zip(found, pages, strict=False):
                if page and key not in pool.known and page not in pool.key_of:
                    pool.name(page, key)

    def _forget(self, key: int) -> None:
        for pool in self.windowed:
            if key in pool.known:
                pool.forget(pool.known[key])

    def forget_all(self) -> None:
        """Find no text again, as after a change of the weights."""
        self.all.forget_all()
