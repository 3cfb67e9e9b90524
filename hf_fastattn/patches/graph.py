"""The decode graph: one captured CUDA graph per step of generate(), replayed instead of running the model's Python.

generate() requests a function for its decode loop from the model and gets a DecodeStep. It copies the small inputs of the step
into fixed tensors, replays the graph, and returns an output of the model's own type. The first step of a new shape runs
uncaptured on the same tensors, as a rehearsal. The second step is captured, which runs the model's Python once.

A graph is valid for one storage at one address (and one `variant` of it, such as a uniform batch), one set of input shapes and
one fingerprint of the model (survey.py), which is taken once per generate(), before its first step. Weights changed in place take
effect at once.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .. import hf
from ..caches.contract import Storage
from ..caches.pool import references
from ..caches.stored import StoredCache
from .cuda_graph import CudaGraph, Graph
from .entry import Entry, Inputs, grows
from .fingerprint import Fingerprint, Uncapturable
from .survey import survey
from .unread import unread_by

MAX_GRAPHS = 16  # per patched model; the least recently used one is dropped first
MAX_CHANGES = 4  # consecutive calls with a new capture before a warning
T = TypeVar("T")


def why_no_graph(device: torch.device) -> str | None:
    """Why steps on this device cannot be captured."""
    return None if device.type == "cuda" else f"the model is on {device}, and graphs are for CUDA devices"


def new_graph(device: torch.device, shared: dict[str, Any]) -> Graph:
    """An object that records and replays. shared: one dict per patched model."""
    return CudaGraph(device, shared)


class DecodeGraphs:
    """All graphs of one model, over the storages of its caches."""

    def __init__(self) -> None:
        self.entries: weakref.WeakKeyDictionary[Storage, list[Entry]] = weakref.WeakKeyDictionary()
        self.shared: dict[str, Any] = {}
        self.lock = threading.RLock()
        self.clock = itertools.count(1)
        self.captures = self.replays = self.uncaptured = 0
        self.closed = False  # whether the patch is undone
        self.changes = 0  # consecutive calls in which the model had changed
        self.changed: list[str] = []  # the names of the last changes

    def find(self, cache: StoredCache, fingerprint: Fingerprint, inputs: Inputs) -> Entry:
        """The entry for these inputs; a new one if there is none."""
        storage = cache.storage
        entries = [entry for entry in self.entries.get(storage, ()) if entry.version == storage.version]
        self.entries[storage] = entries
        matching = sorted((e for e in entries if e.fits(storage) and e.accepts(inputs)), key=lambda e: -e.used)
        changed: list[str] = []
        for entry in matching:
            differences = entry.fingerprint.differences(fingerprint, entry.unread)
            if not differences:
                self.changes = 0
                break
            changed = changed or differences
        else:
            if changed:
                self.changes, self.changed = self.changes + 1, changed
            everything = [(e, held) for held in self.entries.values() for e in held]
            if len(everything) >= MAX_GRAPHS:
                oldest, held = min(everything, key=lambda pair: pair[0].used)
                held.remove(oldest)
            entry = Entry(cache, fingerprint, inputs)
            entries.append(entry)
        entry.used = next(self.clock)
        return entry

    def clear(self) -> None:
        self.entries.clear()
        self.shared.clear()

    def close(self) -> None:
        """Drop all graphs, and capture no more."""
        self.closed = True
        self.clear()


class DecodeStep:
    """The function that one generate() calls instead of the model. It replays the graph if there is one.

    say: called with the reason why a step runs uncaptured. refused: the reason why no step of this call can be captured, if known
    beforehand. prompt: number of tokens of the prompt, if the mask gives it, else 0. chunked: whether the prompt is read in
    chunks, which also call this.
    """

    def __init__(
        self,
        graphs: DecodeGraphs,
        model: hf.PreTrainedModel,
        say: Callable[[str], None],
        *,
        refused: str | None = None,
        ignore_mask: bool = False,
        prompt: int = 0,
        chunked: bool = False,
    ):
        self.graphs = graphs
        self.model = model
        self.say = say
        self.refused = refused
        self.ignore_mask = ignore_mask
        self.prompt = prompt
        self.chunked = chunked
        self.fingerprint: Fingerprint | None = None
        self.entry: Entry | None = None

    def __call__(self, **given: Any) -> Any:
        cache: Any = given.get("past_key_values")
        ids: Any = given.get("input_ids")
        if (reason := self._why_not(cache, ids)) is not None:
            return self._uncaptured(reason, given)
        if ids.shape[1] != 1 or _tokens(cache) < max(1, self.prompt):
            return self.model(**given)  # a chunk of the prompt
        # Graphs share memory: no other thread may replay one between the copy of the inputs and the copy of the logits.
        with self.graphs.lock:
            if self.graphs.closed:
                return self._uncaptured("the patch was undone during a call", given)
            return self._step(cache, ids, given)

    def _why_not(self, cache: object, ids: torch.Tensor | None) -> str | None:
        """The reason why this step cannot be captured, judged by its arguments, or None."""
        if not isinstance(cache, StoredCache):
            return f"a step is given {'no cache' if cache is None else f'a {type(cache).__name__}'} instead of the patch's"
        if ids is None:
            return "its steps are given inputs_embeds instead of input_ids"
        if self.chunked and (ids.shape[1] != 1 or _tokens(cache) < max(1, self.prompt)):
            return None
        if ids.shape[1] != 1:
            return f"a step has {ids.shape[1]} tokens"
        if _tokens(cache) < max(1, self.prompt):
            return "the forward that read the prompt has left the cache empty (as gradient checkpointing in training mode does)"
        return self.refused

    def _uncaptured(self, reason: str, given: Inputs) -> Any:
        self.say(reason)
        self.graphs.uncaptured += 1
        return self.model(**given)

    def _step(self, cache: StoredCache, ids: torch.Tensor, given: Inputs) -> Any:
        if self.fingerprint is None:
            try:
                self.fingerprint = survey(self.model)
            except Uncapturable as reason:
                self.refused = str(reason)
                return self._uncaptured(self.refused, given)
        storage = cache.storage
        inputs = dict(given)
        mask = inputs.get("attention_mask")
        storage.sync(ids.device)
        if mask is not None and (self.ignore_mask or not storage.takes_mask):
            del inputs["attention_mask"]
        elif grows(mask) and not (storage.keeps_all and mask.shape[1] <= storage.capacity):
            # Only the host knows which columns of the mask are in the buffers. The spans built from them have a fixed size.
            with cache.on_device(with_mask=True):
                inputs["attention_mask"] = hf.decode_mask(self.model, inputs)
        entry = self.entry
        if entry is None or not entry.fits(storage) or not entry.accepts(inputs):
            if entry is not None and (name := entry.grown(inputs)) is not None:
                self.refused = entry.refused = f"its argument {name} grows by one element per step"
                return self._uncaptured(self.refused, given)
            entry = self.entry = self.graphs.find(cache, self.fingerprint, inputs)
            if self.graphs.changes >= MAX_CHANGES:
                names = ", ".join(self.graphs.changed[:3])
                self.say(
                    f"each of the last {MAX_CHANGES} calls was captured again, as values that a step reads had changed ({names})"
                )
        if entry.refused is None:
            entry.copy_in(inputs)
            mark = None if entry.graph is not None else storage.mark()
            try:
                logits = self._run(entry, storage)
            except BaseException as error:
                storage.rewind(mark)  # an interrupted step has also counted on the device
                if not isinstance(error, Uncapturable):
                    raise
                entry.refused = str(error)
            else:
                storage.advance()
                return entry.output(logits, cache)
        self.refused = entry.refused
        return self._uncaptured(self.refused, given)

    def _run(self, entry: Entry, storage: Storage) -> torch.Tensor:
        graphs = self.graphs
        if entry.graph is not None:
            entry.graph.replay()
            graphs.replays += 1
            return entry.logits.clone()  # a clone, because the next step overwrites it
        body = entry.body(self.model, storage)
        if not entry.warm:
            before = survey(self.model)
            with unread_by(self.model, before) as unread:
                outputs = _attempt(new_graph(entry.device, graphs.shared).rehearse, body)
            logits: torch.Tensor | None = outputs.get("logits")
            others = [name for name, value in outputs.items() if name not in ("logits", "past_key_values") and value is not None]
            if others or logits is None:
                raise Uncapturable(f"its output holds {', '.join(others) or 'no logits'}")
            entry.output_type = type(outputs)
            entry.returns_cache = "past_key_values" in outputs
            entry.unread = frozenset(unread)
            entry.warm = True
            if changed := before.differences(survey(self.model), entry.unread):
                # The step has run and must not run again.
                self.refused = entry.refused = f"a step changes values that the next step reads ({', '.join(changed[:3])})"
                self.say(self.refused)
                graphs.uncaptured += 1
            return logits
        graph = new_graph(entry.device, graphs.shared)
        held = references(storage)
        entry.logits = _attempt(graph.capture, body).logits
        holds = references(storage) - held  # a CUDA graph only has addresses; other graphs may hold tensors
        storage.recorded += holds
        entry.graph = graph
        graphs.captures += 1
        return self._run(entry, storage)


def _tokens(cache: StoredCache) -> int:
    """Number of tokens whose K and V are on the device."""
    storage = cache.storage
    return 0 if storage.rows is None else cache.get_seq_length() or storage.seen  # the first layer may not run


def _attempt(run: Callable[[Callable[[], T]], T], body: Callable[[], T]) -> T:
    """Return run(body). After an error the step runs uncaptured, where an error of the caller is raised again."""
    try:
        return run(body)
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        raise Uncapturable(f"{type(error).__name__} while capturing it ({message})") from error
