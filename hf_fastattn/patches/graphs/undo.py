"""Undoes a step that has failed, or that a graph has replayed for a model which has changed."""

from __future__ import annotations

import torch

from ... import hf
from ...caches.contract import Storage

SMALL = 2**16  # bytes of a tensor that is saved


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


class Written:
    """Which of these tensors, besides K and V, change in place from now on: counters, averages, states of a user's module.

    A step that changes them is not captured: it would change them twice if it is compared with Python or undone.
    """

    def __init__(self, tensors: list[torch.Tensor]):
        self.tensors = [tensor for tensor in tensors if not tensor.is_inference()]  # such tensors do not count their changes
        self.versions = [tensor._version for tensor in self.tensors]
        self.saved = [tensor.detach().clone() if tensor.nbytes <= SMALL else None for tensor in self.tensors]

    def names(self, model: torch.nn.Module) -> list[str]:
        """The names of those that have changed."""
        names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        return list(dict.fromkeys(names.get(id(tensor), "a tensor") for tensor, _ in self._changed()))

    def can_undo(self) -> bool:
        """Whether all that have changed were saved."""
        return all(saved is not None for _, saved in self._changed())

    def undo(self) -> None:
        """Restore those that have changed and were saved."""
        with torch.no_grad():
            for tensor, saved in self._changed():
                if saved is not None:
                    tensor.copy_(saved)

    def _changed(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        each = zip(self.tensors, self.saved, self.versions, strict=True)
        return [(tensor, saved) for tensor, saved, version in each if tensor._version != version]
