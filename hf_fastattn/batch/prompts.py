"""Prompts, or parts of them, that one forward reads as one row."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from ..attention import ragged
from ..attention.ragged import Ragged
from ..caches.paged import on_device
from .requests import Row


class Part(NamedTuple):
    """The next `tokens` tokens of a prompt."""

    row: Row
    tokens: int

    @property
    def whole(self) -> bool:
        """Whether they end it."""
        return self.row.done + self.tokens == len(self.row.ids)


class Reading(NamedTuple):
    """What a forward reads. ids, positions: (1, tokens). ended: the parts that end a prompt. kept: indices of their last tokens,
    or of one token if there are none."""

    ids: torch.Tensor
    positions: torch.Tensor
    sees: Ragged
    ended: list[Part]
    kept: torch.Tensor


def reading_of(parts: list[Part], size: int, device: torch.device) -> Reading:
    """How these parts are read as one row. size: of a page. If one follows a cached text, all keys are read from pages."""
    behind = any(part.row.done for part in parts)
    ids: list[int] = []
    positions: list[int] = []
    tables = range(len(parts[0].row.pages))
    pages: list[list[int]] = [[] for _ in tables]
    first: list[int] = []  # for each token, the index of the first key of its text, and of its own key
    own: list[int] = []
    slots: list[int] = []
    ends: list[int] = []
    last: list[int] = []
    for row, count in parts:
        start, stop = row.done, row.done + count
        begins, held = len(pages[0]) * size, -(-stop // size)
        slots += range(begins + start, begins + stop)
        ends += range(begins + stop, begins + held * size)
        shift = begins if behind else len(ids)
        ids += row.ids[start:stop]
        positions += range(start, stop)
        first += [shift] * count
        own += range(shift + start, shift + stop)
        for table in tables:
            pages[table] += [page or -1 for page in row.pages[table][:held]]  # no query sees the tokens of page 0
        last.append(len(ids) - 1)
    # What kernels read is aligned to 16 bytes: another alignment would be another variant of each.
    pages = [each + [-1] * (-len(each) % 4) for each in pages]
    ints = on_device([slots, ids, positions, first, own], device)
    held_pages = on_device(pages, device, torch.int32)[:, None]
    kv_len = len(pages[0]) * size if behind else len(ids)
    build = partial(ragged.of_prompts, ints[3], ints[4], kv_len)
    sees = Ragged((1, len(ids), kv_len), build, held_pages, ints[:1], on_device([ends], device) if behind else None)
    kept = [index for part, index in zip(parts, last, strict=True) if part.whole] or last[-1:]
    return Reading(ints[1][None], ints[2][None], sees, [part for part in parts if part.whole], on_device(kept, device))
