"""The current step: the state of one forward over one cache, for the layers of the cache and the attention and mask functions.

A patched model begins a step before its forward and ends it afterwards, also if the forward raises (`caches.forward`). A decode
graph begins a step around the code that it captures, and the forward inside inherits its mode. Each thread has its own steps.
Steps nest: a model that runs inside another has its own step. A layer that runs outside the forward of its model, as when
gradient checkpointing recomputes it, has no step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.spec import KV, is_plain

if TYPE_CHECKING:
    from .masks import Mask
    from .ragged import Ragged

# Where tokens are counted: on the host, or on the device while a step is captured for a graph.
EAGER, CAPTURED, CAPTURED_WITH_MASK = "eager", "captured", "captured with a mask"


class Unpackable(Exception):
    """Why a forward cannot read prompts as one row."""


@dataclass(eq=False)
class Packed:
    """Prompts of several rows, read as one row without their padding, and equal ones once.

    rows, width: the shape of the padded prompts. row, slot: of each token that is read, its row and its place in it, int64
    (tokens,). ends: cumulative numbers of tokens of the prompts that are read, from 0, int32. last: the index of the last token
    of each of them, int64 on the CPU. of_row, source: for each row, which of these prompts it has, and the row that is read,
    int64 (rows,); None if each row has its own. holes: whether padding lies between tokens of a row, which a window counts.
    stored, attended: numbers of layers that have stored K and V, and of calls of attention. places: results of place().
    """

    rows: int
    width: int
    row: torch.Tensor
    slot: torch.Tensor
    ends: torch.Tensor
    holes: bool
    last: torch.Tensor
    of_row: torch.Tensor | None = None
    source: torch.Tensor | None = None
    stored: int = 0
    attended: int = 0
    places: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def place(self, device: torch.device, keep: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(row, slot) of each token in a buffer that keeps the last `keep` slots; of the others slot `keep`, which is free."""
        if (device, keep) not in self.places:  # layers of one kind have the same
            slot = self.slot.to(device) - (self.width - keep)
            self.places[device, keep] = self.row.to(device), torch.where(slot < 0, keep, slot)
        return self.places[device, keep]


class Step:
    """One forward over one cache.

    mode: where tokens are counted. q_len: new tokens of each row. mask: the mask that the cache has built for several tokens,
    None if the model's mask is used. asked: whether the model has requested the mask. written: bit mask of the layers that have
    stored the new tokens. plan: further data of the storage for its layers. kv: the KV of the layer written last, if kernels need
    more than the tensors that its update() returned. shown: these tensors, if they are not k and v of `kv`; they hold NaN.
    shown_tokens: how many of their first slots hold tokens. packed: how prompts are read as one row, if they are. ragged: what
    queries see whose rows have lengths of their own. cache: a weak reference to the cache of a model's forward.
    tokens: those of each row in a graph, padding included; 0 outside of one. real: the result of `no_padding`.
    seen: the tokens of each layer before a forward from Python, if its storage can remove the new ones.
    """

    def __init__(self, storage: object, mode: str = EAGER, model: torch.nn.Module | None = None):
        self._storage = weakref.ref(storage)  # a step that was interrupted must not keep it alive
        self._model = None if model is None else weakref.ref(model)
        self.mode = mode
        self.q_len = 0
        self.mask: Mask | None = None
        self.asked = False
        self.written = 0
        self.plan: Any = None
        self.kv: KV | None = None
        self.shown: tuple[torch.Tensor, torch.Tensor] | None = None
        self.shown_tokens = 0
        self.packed: Packed | None = None
        self.ragged: Ragged | None = None
        self.cache: Any = None
        self.tokens = 0
        self.real: torch.Tensor | None = None
        self.seen: list[int] = []

    @property
    def storage(self) -> Any:
        return self._storage()

    @property
    def model(self) -> torch.nn.Module | None:
        return None if self._model is None else self._model()

    def live(self, q_len: int) -> torch.Tensor | None:
        """How many of the q_len tokens of each row are no padding, int64 (1,) on the device; None outside of a graph, and if its
        storage does not tell."""
        count: torch.Tensor | None = self.storage.real_tokens if q_len == self.tokens else None
        return count


class _Thread(threading.local):
    def __init__(self) -> None:
        self.steps: list[Step] = []


_thread = _Thread()


def begin(storage: object, mode: str | None = None, model: torch.nn.Module | None = None) -> Step:
    """Begin a step over `storage`. mode: None for the mode of the enclosing step. model: the model whose forward it is."""
    outer = over(storage)
    # In place: torch.compile drops an assignment to a thread-local object.
    _thread.steps[:] = [each for each in _thread.steps if each.storage is not None]
    step = Step(storage, mode or (EAGER if outer is None else outer.mode), model)
    if outer is not None:
        step.packed, step.tokens = outer.packed, outer.tokens
    _thread.steps.append(step)
    return step


@contextmanager
def reading(storage: object, packed: Packed) -> Iterator[None]:
    """A context in which a forward over `storage` reads prompts as one row."""
    step = begin(storage)
    step.packed = packed
    try:
        yield
    finally:
        end(step)


def end(step: Step) -> None:
    """End `step` and any steps inside it that are still open. The enclosing step inherits its written layers."""
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
    """Where the tokens of this storage are counted at present."""
    step = over(storage)
    return EAGER if step is None else step.mode


def captured() -> bool:
    """Whether the current code is captured for a decode graph, whose launches are known and write no weights."""
    step = innermost()
    return step is not None and step.mode == CAPTURED


def live(q_len: int) -> torch.Tensor | None:
    """`Step.live` of the current step."""
    step = innermost()
    return None if step is None else step.live(q_len)


def no_padding(tokens: int) -> torch.Tensor | None:
    """Which tokens of all rows of a graph are no padding, bool (tokens, 1); None if there is none, or for another number of
    tokens."""
    step = innermost()
    count = None if step is None or step.tokens <= 1 else step.live(step.tokens)
    if step is None or count is None or tokens != step.tokens * (step.storage.rows or 0):
        return None
    if step.real is None:
        step.real = (torch.arange(tokens, device=count.device) % step.tokens < count)[:, None]
    return step.real


def note_later_tokens(config: Any) -> None:
    """Note in the storage of the current step that tokens of a model may see later ones. config: that of the requested mask."""
    step = innermost()
    if step is not None and step.storage is not None and step.model is not None:
        own: Any = step.model.config
        if type(config) in (type(own), type(own.get_text_config(decoder=True))):  # else it is an encoder
            step.storage.looks_ahead = True


def of_model(model: torch.nn.Module) -> Step | None:
    """The innermost step of this model's forward."""
    return next((step for step in reversed(_thread.steps) if step.model is model), None)


def innermost() -> Step | None:
    """The step of the current forward of this thread. An interrupted step stays open until its model runs again."""
    return _thread.steps[-1] if _thread.steps else None


def packed() -> Packed | None:
    """How the current forward reads prompts as one row, if it does."""
    return _thread.steps[-1].packed if _thread.steps else None


def ragged() -> Ragged | None:
    """What queries of the current forward see, if its rows have lengths of their own."""
    return _thread.steps[-1].ragged if _thread.steps else None


def mask_for(sizes: tuple[int, int, int], q_offset: int | torch.Tensor) -> Mask | None:
    """The mask that a cache has built for the current forward, if this is a request for it and no layer has run yet.

    sizes: (batch, q_len, kv_len) of the mask that a model requests. q_offset: the offset of its queries. A cache that builds a
    mask reports all its tokens, the new ones included; a request without it, as that of an encoder, has another offset.
    The configuration does not tell: the forward of a copied model may run the layers of the original.
    """
    step = innermost()
    if step is None or step.mask is None or step.written or step.mask.sizes != sizes:
        return None
    storage = step.storage
    if storage is None or isinstance(q_offset, torch.Tensor) or q_offset != storage.seen:
        return None
    step.asked = True
    return step.mask


def kv_of(k: torch.Tensor, v: torch.Tensor) -> KV:
    """The KV of the layer whose update() has returned these two tensors."""
    for step in reversed(_thread.steps):
        if step.kv is not None:
            own = step.shown or step.kv
            if own[0] is k and own[1] is v:
                return step.kv
    return KV(k, v)


def channels_last(query: torch.Tensor, *kv: torch.Tensor) -> list[torch.Tensor]:
    """Tensors whose last dimension is contiguous, as the kernels read them. (Florence-2 attends to channels, by a transpose.)"""
    found = (query, *kv) if is_plain(kv_of(*kv).form) else (query,)
    return [*(x if x.stride(-1) == 1 else x.contiguous() for x in found), *(query, *kv)[len(found) :]]
