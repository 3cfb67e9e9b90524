"""The decode graphs of one model: one captured CUDA graph per step, replayed instead of running the model's Python.

A graph is valid for one storage at one address (and one `variant` of it, such as a uniform batch), one set of input shapes and
one state of the model (state.py), which is read in the first step of a generate(), and in each step if other code runs between
the steps. Weights changed in place take effect at once.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ... import hf, registry
from ...caches.contract import Storage
from ...caches.stored import StoredCache
from . import policy
from .cuda_graph import CudaGraph, Graph
from .entry import Entry, Inputs, Kind, Rehearsal
from .one_rank import OneRank
from .path import Path
from .policy import Cost
from .snapshot import Last
from .state import State

MAX_GRAPHS = 64  # per patched model; the least recently used one is dropped first
MAX_REHEARSALS = 256  # per patched model; the oldest one is dropped first


def why_no_graph(device: torch.device) -> str | None:
    """Why steps of a model on this device cannot be captured."""
    if device.type == "meta":
        return "the model's weights are offloaded, and graphs are for weights that stay on a CUDA device"
    return None if device.type == "cuda" else f"the model is on {device}, and graphs are for CUDA devices"


def why_not_read(model: hf.PreTrainedModel) -> str | None:
    """Why attention cannot run in a graph, where K and V are whole buffers."""
    name = model.config._attn_implementation
    return None if name in registry.names() else f"attn_implementation is {name!r}, which cannot read a length from the device"


def why_none(model: hf.PreTrainedModel) -> str | None:
    """Why no step of this model can be captured, if that is known before one has run."""
    return why_no_graph(model.device) or hf.why_not_captured(model)


def weakly(method: Callable[[], object]) -> Callable[..., None]:
    """A function that calls a method, with any arguments, and does not keep its object alive."""
    own = weakref.WeakMethod(method)

    def call(*_: object) -> None:
        if (found := own()) is not None:
            found()

    return call


def new_graph(device: torch.device, shared: dict[str, Any]) -> Graph:
    """An object that records and replays. shared: one dict per patched model."""
    return CudaGraph(device, shared)


class DecodeGraphs:
    """All graphs of one model, over the storages of its caches.

    keep: whether graphs of steps that run code of the user are kept after their call. runs_own: whether a step has. own: such a
    function of a step that is captured.
    skipped: tokens of prompts that were not read, because they are padding or in a row that equals another. padded: reasons why
    padding was read. unpackable: those that a forward has found, by attn_implementation and training mode.
    """

    def __init__(self, ranks: OneRank | None = None) -> None:
        self.keep = False
        self.runs_own = False
        self.own: str | None = None
        self.ranks = ranks or OneRank()
        self.entries: weakref.WeakKeyDictionary[Storage, list[Entry]] = weakref.WeakKeyDictionary()
        self.rehearsed: dict[Kind, Rehearsal] = {}  # by the shape of an entry, oldest first
        # How many prompts were read, by their sizes of NEAREST.
        self.asked: weakref.WeakKeyDictionary[Storage, dict[int, int]] = weakref.WeakKeyDictionary()
        self.last = Last()
        self.path = Path()
        self.shared: dict[str, Any] = {}
        self.lock = threading.RLock()
        self.clock = itertools.count(1)
        self.seconds = 0.0  # that the last step from Python took which was rehearsed or captured
        self.captures_at_once = True  # whether a step is captured without a rehearsal if one of its kind was rehearsed
        self.late = True  # whether graphs are captured after replies
        self.budget = policy.FIRST  # seconds for that
        self.late_for: dict[int, tuple[int, float]] = {}  # by size, if time was short: runs of its step, seconds before them
        self.everything = False  # whether graphs of all sizes are, however long that takes
        self.captures = self.replays = self.uncaptured = 0
        self.skipped = 0
        self.padded: list[str] = []
        self.unpackable: dict[tuple[object, bool], str] = {}
        self.costs: tuple[object, Cost, int] | None = None  # see `estimate`
        self.closed = False  # whether the patch is undone
        self.changes = 0  # consecutive calls in which the model had changed
        self.changed: list[str] = []  # the names of the last changes
        self.counted: State | None = None  # the model as it was when changes were counted last
        self.ranks.when_broken(weakly(self.clear))

    def estimate(self, model: hf.PreTrainedModel) -> tuple[Cost, int]:
        """(what forwards of the model take, the most tokens of all rows in a graph of prompts), computed once for each device,
        dtype and shape of the embedding, which is empty while other code (ZeRO-3) holds the weights."""
        key = model.device, model.dtype, getattr(getattr(model.get_input_embeddings(), "weight", None), "shape", None)
        if self.costs is None or self.costs[0] != key:
            cost = Cost.of(model)
            self.costs = key, cost, policy.launch_bound(model, cost=cost)
        return self.costs[1:]

    def find(self, cache: StoredCache, state: State, inputs: Inputs, tokens: int, call: object) -> Entry:
        """The entry for these inputs, of a graph of so many tokens; a new one if there is none. call: an object for each call."""
        storage = cache.storage
        entries = [
            entry for entry in self.entries.get(storage, ()) if entry.version == storage.version and self._is_valid(entry, call)
        ]
        self.entries[storage] = entries
        matching = sorted((e for e in entries if e.fits(storage) and e.accepts(inputs, tokens)), key=lambda e: -e.used)
        changed: list[str] = []
        for entry in matching:
            difference = entry.state.differs(state)
            if difference is None:
                break
            if entry.graph is not None:
                changed = changed or [difference]
        else:
            if changed and self.counted is not state:  # once per call
                self.changes, self.changed, self.counted = self.changes + 1, changed, state
            everything = [(e, held) for held in self.entries.values() for e in held]
            if len(everything) >= MAX_GRAPHS:
                oldest, held = min(everything, key=lambda pair: pair[0].used)
                held.remove(oldest)
            entry = Entry(cache, state, inputs, tokens)
            entry.call = call
            entries.append(entry)
            known = self.rehearsed.get(entry.shape)
            if known is not None and known.code == self.path.version and known.state.differs(state) is None:
                entry.rehearsal, entry.code = known, known.code
        entry.used = next(self.clock)
        return entry

    def _is_valid(self, entry: Entry, call: object) -> bool:
        """Whether the code of an entry that has run would run again, and may be of this call."""
        if not entry.warm and entry.refused is None:
            return True
        return entry.code == self.path.version and (entry.own is None or entry.call is call or self.keep)

    def note(self, entry: Entry) -> None:
        """Let the steps of the shape of this one be captured, which has run, over other storages too; not if it ran code of the
        user, which may read anything."""
        if entry.rehearsal is not None and entry.own is None and entry.refused is None:
            self.rehearsed.pop(entry.shape, None)
            self.rehearsed[entry.shape] = entry.rehearsal
            if len(self.rehearsed) > MAX_REHEARSALS:
                del self.rehearsed[next(iter(self.rehearsed))]

    def knows(self, entry: Entry) -> bool:
        """Whether a step of the kind of this one has been rehearsed, on the model as it is."""
        return any(
            known.kind == entry.kind and known.code == self.path.version and known.state.differs(entry.state) is None
            for known in [*self.rehearsed.values()]  # a thread clears it at the end of a process group
        )

    def sizes(self, storage: Storage, rows: int, last: bool, masked: bool) -> set[int]:
        """The numbers of tokens of the graphs that may read such a prompt, if the model has not changed."""
        return {
            entry.tokens
            for entry in self.entries.get(storage, ())
            if entry.graph is not None
            and entry.fits(storage)
            and (entry.tensors["input_ids"].shape[0], entry.last, entry.masked) == (rows, last, masked)
        }

    def longest_rotated(self, storage: Storage) -> int:
        """The longest text for which the graphs over a storage have the same rotary frequencies in each of its steps."""
        limits = [
            table.limit for entry in self.entries.get(storage, ()) for _, tables in entry.rotaries for table in tables.values()
        ]
        return min(limits, default=1 << 62)

    def clear(self) -> None:
        self.entries.clear()
        self.rehearsed.clear()
        self.last.forget()
        self.shared.clear()

    def close(self) -> None:
        """Drop all graphs, and capture no more."""
        self.closed = True
        self.clear()
