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
    """How these parts are read as one row. size: of a page. If one follows a cached text, all keys are gathered from pages."""
    behind = any(part.row.done for part in parts)
    ids: list[int] = []
    positions: list[int] = []
    tables = range(len(parts[0].row.pages))
    pages: list[list[int]] = [[] for _ in tables]
    first: list[int] = []  # for each token, the index of the first key of its text, and of its own key
    own: list[int] = []
    keys: list[list[int]] = [[] for _ in tables]
    slots: list[int] = []
    last: list[int] = []
    for row, count in parts:
        start, stop = row.done, row.done + count
        begins = len(slots) if behind else len(ids)
        ids += row.ids[start:stop]
        positions += range(start, stop)
        first += [begins] * count
        own += range(begins + start, begins + stop)
        for table in tables:
            pages[table] += [row.pages[table][place // size] for place in range(start, stop)]
            if behind:
                keys[table] += [row.pages[table][place // size] for place in range(stop)]
        if behind:
            slots += [place % size for place in range(stop)]
        last.append(len(ids) - 1)
    ints = on_device([ids, positions, first, own, *pages], device)
    places = on_device([*keys, slots], device)
    gathered = (places[:-1], places[-1]) if behind else None
    kv_len = len(slots) if behind else len(ids)
    build = partial(ragged.of_prompts, ints[2], ints[3], kv_len)
    sees = Ragged((1, len(ids), kv_len), build, ints[4:], ints[1] % size, gathered)
    kept = [index for part, index in zip(parts, last, strict=True) if part.whole] or last[-1:]
    return Reading(ints[0][None], ints[1][None], sees, [part for part in parts if part.whole], on_device(kept, device))
