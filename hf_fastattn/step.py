"""The step under way: what one forward over one cache knows, for that cache's layers and for the attention and mask functions.

A patched model begins a step before its forward and ends it afterwards, also where the forward raises (`caches.forward`). A
decode graph begins one around what it captures, and the forward inside takes over its mode. Each thread has its own steps. They
nest: a model that runs inside another has its own step. A layer that runs outside its model's forward, as when gradient
checkpointing computes it again, finds none.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from .kernels.spec import KV

if TYPE_CHECKING:
    from .masks import Mask

# Who counts tokens: the host, or the device, while a step is captured for a graph.
EAGER, CAPTURED, CAPTURED_WITH_MASK = "eager", "captured", "captured with a mask"


class Step:
    """One forward over one cache.

    mode: who counts. q_len: new tokens of each row. mask: the one that the cache has made for several tokens, None where the
    model's own will do; asked: whether the model has asked for it. written: the layers that have kept the new tokens, a bit for
    each index. plan: what the storage's layers need to know besides. kv: what the last layer to be written shows the kernels
    where that is more than the tensors that its update() returns.
    """

    def __init__(self, storage: object, mode: str = EAGER, model: torch.nn.Module | None = None):
        self._storage = weakref.ref(storage)  # a step that an interrupt left open must not keep it alive
        self._model = None if model is None else weakref.ref(model)
        self.mode = mode
        self.q_len = 0
        self.mask: Mask | None = None
        self.asked = False
        self.written = 0
        self.plan: Any = None
        self.kv: KV | None = None

    @property
    def storage(self) -> Any:
        return self._storage()

    @property
    def model(self) -> torch.nn.Module | None:
        return None if self._model is None else self._model()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.steps: list[Step] = []


_thread = _Thread()


def begin(storage: object, mode: str | None = None, model: torch.nn.Module | None = None) -> Step:
    """A step over `storage`, until end(). mode: that of the step around it where None. model: whose forward it is."""
    outer = over(storage)
    # In place: torch.compile drops an assignment to a thread-local object.
    _thread.steps[:] = [each for each in _thread.steps if each.storage is not None]
    step = Step(storage, mode or (EAGER if outer is None else outer.mode), model)
    _thread.steps.append(step)
    return step


def end(step: Step) -> None:
    """End `step`, and those within it that nobody ended. What its layers have written counts for the step around it."""
    steps = _thread.steps
    del steps[steps.index(step) :]
    if (outer := over(step.storage)) is not None:
        outer.written |= step.written


def over(storage: object | None) -> Step | None:
    """The innermost step over this storage."""
    if storage is not None:
        for step in reversed(_thread.steps):
            if step.storage is storage:
                return step
    return None


def mode(storage: object | None) -> str:
    """Who counts the tokens of this storage now."""
    step = over(storage)
    return EAGER if step is None else step.mode


def captured() -> bool:
    """Whether a decode graph captures what runs now: its launches are known, and none writes weights."""
    step = innermost()
    return step is not None and step.mode == CAPTURED


def of_model(model: torch.nn.Module) -> Step | None:
    """The innermost step of this model's forward."""
    return next((step for step in reversed(_thread.steps) if step.model is model), None)


def innermost() -> Step | None:
    """The step of the forward that runs in this thread; one that was interrupted counts until its model runs again."""
    return _thread.steps[-1] if _thread.steps else None


def mask_for(config: object, sizes: tuple[int, int, int]) -> Mask | None:
    """The mask that a cache has made for the forward under way of the model with this configuration, if no layer has read it yet.

    sizes: (batch, q_len, kv_len) of the mask that the model asks for.
    """
    step = innermost()
    if step is None or step.mask is None or step.written or step.mask.sizes != sizes or step.model is None:
        return None
    if all(vars(module).get("config") is not config for module in step.model.modules()):
        return None
    step.asked = True
    return step.mask


def shown(k: torch.Tensor, v: torch.Tensor) -> KV:
    """What a layer shows a kernel whose update() has returned these two tensors."""
    for step in reversed(_thread.steps):
        if step.kv is not None and step.kv.k is k and step.kv.v is v:
            return step.kv
    return KV(k, v)
