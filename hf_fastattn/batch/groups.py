"""Rows whose texts begin with the same pages: a decode step reads these once for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..caches.paged import PagedStorage

Group = tuple[list[int], int]  # rows, and the number of pages with which all of them begin
SAVES = 150_000_000  # bytes of K and V in each layer: some 40 us of a GPU, as a dozen small launches


def worth(pages: Sequence[list[int]], most: int, storage: PagedStorage) -> list[Group]:
    """The groups that a step of `storage.bucket` rows reads once, with their numbers of tokens: those that save the most, or none
    if all of them save less than it costs. pages, most: as in `groups_of`."""
    size, room = storage.pages.size, storage.bucket // 4
    found = [(rows, count * size) for rows, count in groups_of(pages, most)]
    found = sorted(found, key=_saved, reverse=True)[:room]
    return found if sum(map(_saved, found)) * storage.bytes_of_token > SAVES else []


def _saved(group: Group) -> int:
    return (len(group[0]) - 1) * group[1]


def groups_of(pages: Sequence[list[int]], most: int) -> list[Group]:
    """Groups of at least two and at most `most` rows. pages: of each row, in order.

    A group takes the next row while that shares half of the pages that the first two rows share: samples of one prompt are a
    group, and not together with those of another prompt behind the same system prompt.
    """
    order = sorted(range(len(pages)), key=lambda row: pages[row])
    alike = [*(_alike(pages[a], pages[b]) for a, b in itertools.pairwise(order)), 0]
    found: list[Group] = []
    start = 0
    while start < len(order) - 1:
        stop, shared = start + 1, alike[start]
        if shared and alike[stop] <= 2 * shared:  # else the next row shares more with the one behind it
            while stop < len(order) and stop - start < most and 2 * alike[stop - 1] >= alike[start]:
                shared = min(shared, alike[stop - 1])
                stop += 1
        if stop - start > 1:
            found.append((order[start:stop], shared))
        start = stop
    return found


def _alike(a: list[int], b: list[int]) -> int:
    """With how many equal pages two rows begin. Where they have one page, they have those before it."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if a[middle] == b[middle] else (low, middle)
    return low
