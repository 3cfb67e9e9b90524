"""Undoes a step that has failed, or that a graph has replayed for a model which has changed."""

from __future__ import annotations

import pickle
import random
import sys
from typing import Any

import torch

from .. import hf
from ..caches.contract import Storage


class Randoms:
    """The states of the random number generators of the host: Python's, those of torch and NumPy, without that of `device`."""

    def __init__(self, device: torch.device):
        numpy: Any = sys.modules.get("numpy.random")
        self.python = random.getstate()
        self.torch = None if device.type == "cpu" else torch.random.get_rng_state()
        self.numpy = None if numpy is None else numpy.get_state()

    def changed(self, device: torch.device) -> bool:
        """Whether numbers have been drawn since."""
        return pickle.dumps(self._states()) != pickle.dumps(Randoms(device)._states())

    def _states(self) -> tuple[object, ...]:
        return self.python, None if self.torch is None else self.torch.tolist(), self.numpy

    def restore(self) -> None:
        random.setstate(self.python)
        if self.torch is not None:
            torch.random.set_rng_state(self.torch)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


class Mark:
    """The state before a step: the counts of a storage, and the random numbers of a device, which a graph advances, and of the
    host."""

    def __init__(self, storage: Storage, device: torch.device):
        self.generator = hf.generator_of(device)
        self.random = self.generator.get_state()
        self.randoms = Randoms(device)
        self.counts = storage.mark()


def undo(storage: Storage, mark: Mark | None) -> None:
    """Restore the state before a step. mark: None for a replay that was interrupted, whose counts are written anew."""
    storage.rewind(None if mark is None else mark.counts)
    if mark is not None:
        mark.generator.set_state(mark.random)
        mark.randoms.restore()
