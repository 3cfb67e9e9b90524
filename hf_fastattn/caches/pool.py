"""Storages that are kept between calls of generate()."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from operator import attrgetter

import torch

from .contract import Storage
from .stored import StoredCache

MAX_IDLE = 4  # storages that a pool keeps for later calls, one per batch size
KEPT = 256 << 20  # bytes of idle K and V that a training step leaves: freeing them gains less than the next capture costs


class Pool:
    """Unused storages, kept for the next cache of the same batch size. Their addresses do not change, so graphs over them stay
    valid.

    A storage returns to the pool when its cache is deleted, not when generate() returns: a caller that keeps the cache keeps its
    buffers. A storage is not reused while references to one of its layers, K or V remain.
    make: creates a storage for a number of tokens. around: creates a cache over a storage. serial: the number of the last one.
    freed: how often a training step has freed the idle storages.
    """

    def __init__(self, make: Callable[[int], Storage], around: Callable[[Storage], StoredCache], serial: int = 0):
        self.make, self.around, self.serial = make, around, serial
        self.idle: list[tuple[int, Storage]] = []  # (rows, storage), longest idle first
        self.closed = False
        self.freed = 0
        self.lock = threading.RLock()  # finalizers may run inside any call

    def take(self, rows: int, capacity: int, among: list[int] | None = None) -> StoredCache:
        """An empty cache for `rows` rows of `capacity` tokens, over the smallest idle storage that fits or a new storage.

        That has more room if it replaces one (`Storage.ahead`).

        among: serial numbers of the idle storages that may be used; None for all.
        """
        with self.lock:
            storage, capacity = self._find(rows, capacity, among)
        if storage is None:
            storage = self.make(capacity)
            self._number(storage)
        cache = self.around(storage)
        self._return_later(cache, rows)
        return cache

    def lend(self, rows: int, fits: Callable[[Storage], bool]) -> Storage | None:
        """Remove and return an idle storage of `rows` that fits, for a caller that gives it back; other idle ones are dropped."""
        with self.lock:
            found = [entry for entry in self.idle if entry[0] == rows]
            self.idle = [entry for entry in self.idle if entry not in found]
        return next((storage for _, storage in found if fits(storage)), None)

    def give(self, storage: Storage, rows: int) -> None:
        """Keep a storage that is no longer used. rows: by which it is found again; below 0 for those of `lend`."""
        with self.lock:
            if not self.closed:
                self.idle.append((rows, storage))
                del self.idle[:-MAX_IDLE]

    def adopt(self, cache: StoredCache, rows: int, capacity: int, among: list[int] | None = None) -> None:
        """Let an empty cache that the caller has made, and that has allocated nothing, have an idle storage, whose graphs are
        valid. If none fits, its own becomes one of the pool. Arguments as in take()."""
        with self.lock:
            storage, capacity = self._find(rows, capacity, among)
        if storage is None:
            cache.reserve(capacity)
            self._number(cache.storage)
        else:
            cache._adopt(storage)
        self._return_later(cache, rows)

    def _number(self, storage: Storage) -> None:
        storage.serial = self.serial = self.serial + 1
        storage.call_on_low_memory(self.clear)

    def _return_later(self, cache: StoredCache, rows: int) -> None:
        cache.storage.reset()
        weakref.finalize(cache, _return_storage, weakref.ref(self), cache.storage, rows).atexit = False

    def fitting(self, rows: int, capacity: int) -> list[int]:
        """Serial numbers of the idle storages that fit."""
        with self.lock:
            return [
                entry[1].serial for entry in self.idle if entry[0] == rows and entry[1].holds(capacity) and not _is_held(entry)
            ]

    def _find(self, rows: int, capacity: int, among: list[int] | None) -> tuple[Storage | None, int]:
        """(an idle storage that fits, which is removed, or None; the capacity of a new one, which is the same on all ranks)."""
        same_rows = [entry for entry in self.idle if entry[0] == rows]
        fit = [entry for entry in same_rows if entry[1].holds(capacity) and (among is None or entry[1].serial in among)]
        held = [entry for entry in fit if _is_held(entry)]
        chosen = min((entry for entry in fit if entry not in held), key=lambda entry: entry[1].capacity, default=None)
        # Storages that do not fit are dropped before a new one is allocated. One that is still referenced may be free next time.
        drop = [chosen] if chosen else [entry for entry in same_rows if entry not in held[-1:]]
        self.idle = [entry for entry in self.idle if entry not in drop]
        if chosen is None and among is None:
            capacity = max((each.ahead(capacity) for _, each in same_rows if not each.holds(capacity)), default=capacity)
        return None if chosen is None else chosen[1], capacity

    @property
    def idle_bytes(self) -> int:
        """Bytes of K and V in the idle storages."""
        with self.lock:
            return sum(part.tensor.nbytes for _, storage in self.idle for part in storage.memory())

    def clear(self) -> None:
        with self.lock:
            self.idle.clear()

    def free_for_training(self) -> None:
        """Drop the idle storages, and their graphs with them, if they hold more than KEPT bytes."""
        with self.lock:
            if self.idle and self.idle_bytes > KEPT:
                self.clear()
                self.freed += 1

    def close(self) -> None:
        """Drop the idle storages, and no longer accept those that caches still use."""
        with self.lock:
            self.closed = True
            self.clear()


def _return_storage(owner: weakref.ref[Pool], storage: Storage, rows: int) -> None:
    if (pool := owner()) is not None:  # a cache may outlive the pool
        pool.give(storage, storage.rows or rows)


def references(storage: Storage) -> int:
    """Number of references to a storage, its layers, their tensors and the memory of these. Only differences have a meaning."""
    return _count(*_parts((0, storage)))


def _parts(entry: tuple[int, Storage]) -> tuple[list[object], list[torch.Tensor]]:
    return [*entry[1:], *entry[1].layers], [*map(attrgetter("tensor"), entry[1].memory())]


def _count(objects: list[object], tensors: list[torch.Tensor]) -> int:
    # By map(), because a variable of a Python frame counts or not, depending on what evaluates it (torch.compile replaces that).
    memory = [*map(torch.Tensor.untyped_storage, tensors)]
    uses = map(torch._C._storage_Use_Count, map(attrgetter("_cdata"), memory))
    return sum(map(sys.getrefcount, [*objects, *tensors, *memory])) + sum(uses)


def _is_held(entry: tuple[int, Storage]) -> bool:
    """Whether anything but the pool (`entry`) and decode graphs refers to a storage or a part of it."""
    objects, tensors = _parts(entry)
    one, made = [object()], [torch.zeros(1, device="cpu")]  # to which nothing else refers
    alone = len(objects) * _count([*one], []) + len(tensors) * _count([], [*made])
    return _count(objects, tensors) - entry[1].recorded > alone
