"""Storages kept between one generate() and the next."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

MAX_IDLE = 4  # storages a pool keeps for calls to come, one per batch size


class Pool:
    """Storages that no cache uses, kept for the next cache of as many rows: same addresses, so graphs over them stay good.

    A storage comes back when its cache is gone, not when generate() returns: who holds the cache owns its buffers.
    make: a storage for so many tokens. around: the cache over a storage.
    """

    def __init__(self, make: Callable, around: Callable):
        self.make, self.around = make, around
        self.idle: list[tuple[int, object]] = []  # (rows, storage), the longest idle first
        self.closed = False
        self.lock = threading.RLock()  # finalizers may run inside any call

    def take(self, rows: int, capacity: int):
        """An empty cache for `rows` rows of `capacity` tokens, in the smallest idle storage that holds them or else a new one."""
        with self.lock:
            alike = [s for r, s in self.idle if r == rows]
            fit = [s for s in alike if s.holds(capacity)]
            storage = min(fit, key=lambda s: s.capacity) if fit else None
            # What does not fit is dropped before more is allocated in its place.
            drop = [storage] if fit else alike
            self.idle = [(r, s) for r, s in self.idle if s not in drop]
        if storage is None:
            storage = self.make(capacity)
            storage.relieve_with(self.clear)
        storage.reset()
        cache = self.around(storage)
        weakref.finalize(cache, self.give_back, storage, rows).atexit = False
        return cache

    def give_back(self, storage, rows: int) -> None:
        with self.lock:
            if not self.closed:
                self.idle.append((storage.rows or rows, storage))
                del self.idle[:-MAX_IDLE]

    def clear(self) -> None:
        with self.lock:
            self.idle.clear()

    def close(self) -> None:
        """Keep nothing any more, neither what is idle nor what caches still use."""
        with self.lock:
            self.closed = True
            self.clear()
