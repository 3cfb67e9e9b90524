"""The numbers of tokens of each row that graphs are captured for."""

from __future__ import annotations

import torch

from ..caches.contract import FEW, Storage
from ..caches.stored import StoredCache

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512)


def bucket(ids: torch.Tensor) -> int:
    """The number of tokens of the graph for these ids."""
    return next(size for size in BUCKETS if size >= ids.shape[1])


def several(ids: torch.Tensor) -> tuple[int, ...]:
    """The number of these tokens, as the last argument of a storage's sync() and advance(), which get none for one token."""
    return () if ids.shape[1] == 1 else (ids.shape[1],)


def most_tokens(storage: Storage, rows: int) -> int:
    """The most tokens of each row in a graph over this storage: FEW for any number of rows, more only up to BUCKETS[-1] tokens
    of all rows."""
    if not storage.takes_many:
        return 1
    most = BUCKETS[-1] // max(rows, 1) if storage.takes_prompts else 0
    return max(size for size in BUCKETS if size <= max(FEW, most))


def tokens_in(cache: StoredCache) -> int:
    """Number of tokens whose K and V are on the device."""
    storage = cache.storage
    return 0 if storage.rows is None else cache.get_seq_length() or storage.seen  # the first layer may not run
