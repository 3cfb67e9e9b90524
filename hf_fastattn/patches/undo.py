"""Undoes a step that has failed, or that a graph has replayed for a model which has changed."""

from __future__ import annotations

import torch

from .. import hf
from ..caches.contract import Storage


class Mark:
    """The state before a step: the counts of a storage, and the random numbers of a device, which a graph advances."""

    def __init__(self, storage: Storage, device: torch.device):
        self.generator = hf.generator_of(device)
        self.random = self.generator.get_state()
        self.counts = storage.mark()


def undo(storage: Storage, mark: Mark | None) -> None:
    """Restore the state before a step. mark: None for a replay that was interrupted, whose counts are written anew."""
    storage.rewind(None if mark is None else mark.counts)
    if mark is not None:
        mark.generator.set_state(mark.random)
