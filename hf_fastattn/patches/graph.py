"""The decode graph: one captured CUDA graph per step of generate(), replayed instead of running the model's Python.

The forwards of a generate() go through a Forwards. It copies the small inputs of a step into fixed tensors, replays the graph,
and returns an output of the model's own type. The first step of a new shape runs uncaptured on the same tensors, as a rehearsal.
The second step is captured, which runs the model's Python once.

A step has one token of each row, or several: speculation, whose candidates are checked in one forward, and a short prompt, or a
message that follows a cached text. Steps of several tokens are padded to one of BUCKETS, so that few graphs serve every number of
tokens.

A graph is valid for one storage at one address (and one `variant` of it, such as a uniform batch), one set of input shapes and
one fingerprint of the model (survey.py), which is taken once per generate(), before its first step. Weights changed in place take
effect at once.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .. import hf
from ..caches.contract import Storage
from ..caches.pool import references
from ..caches.stored import StoredCache
from ..kernels.spans import restarts
from . import verify
from .cuda_graph import CudaGraph, Graph
from .entry import Entry, Inputs, grows, unpaddable
from .fingerprint import Fingerprint, Uncapturable
from .ranks import OneRank
from .survey import survey
from .unread import unread_by

MAX_GRAPHS = 32  # per patched model; the least recently used one is dropped first
MAX_CHANGES = 4  # consecutive calls with a new capture before a warning
# Numbers of tokens of each row that graphs are captured for.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
FEW = 64  # tokens of each row, for any number of rows; more only up to BUCKETS[-1] tokens of all rows


def why_no_graph(device: torch.device) -> str | None:
    """Why steps on this device cannot be captured."""
    return None if device.type == "cuda" else f"the model is on {device}, and graphs are for CUDA devices"


def why_none(model: hf.PreTrainedModel) -> str | None:
    """Why no step of this model can be captured, if that is known before one has run."""
    return why_no_graph(model.device) or hf.why_not_captured(model)


def new_graph(device: torch.device, shared: dict[str, Any]) -> Graph:
    """An object that records and replays. shared: one dict per patched model."""
    return CudaGraph(device, shared)


class DecodeGraphs:
    """All graphs of one model, over the storages of its caches."""

    def __init__(self, ranks: OneRank | None = None) -> None:
        self.ranks = ranks or OneRank()
        self.entries: weakref.WeakKeyDictionary[Storage, list[Entry]] = weakref.WeakKeyDictionary()
        # By the sizes of prompts read so far: whether the next of that size may be a step.
        self.read: weakref.WeakKeyDictionary[Storage, dict[int, bool]] = weakref.WeakKeyDictionary()
        self.shared: dict[str, Any] = {}
        self.lock = threading.RLock()
        self.clock = itertools.count(1)
        self.captures = self.replays = self.uncaptured = 0
        self.closed = False  # whether the patch is undone
        self.changes = 0  # consecutive calls in which the model had changed
        self.changed: list[str] = []  # the names of the last changes
        self.counted: Fingerprint | None = None  # the model as it was when changes were counted last
        self.ranks.before_abort(self._dropper())

    def _dropper(self) -> Callable[[], None]:
        """A function that drops the graphs, and does not keep this object alive."""
        this = weakref.ref(self)

        def drop() -> None:
            if (graphs := this()) is not None:
                graphs.clear()

        return drop

    def find(self, cache: StoredCache, fingerprint: Fingerprint, inputs: Inputs, tokens: int) -> Entry:
        """The entry for these inputs, of a graph of so many tokens; a new one if there is none."""
        storage = cache.storage
        entries = [entry for entry in self.entries.get(storage, ()) if entry.version == storage.version]
        self.entries[storage] = entries
        matching = sorted((e for e in entries if e.fits(storage) and e.accepts(inputs, tokens)), key=lambda e: -e.used)
        changed: list[str] = []
        for entry in matching:
            differences = entry.fingerprint.differences(fingerprint, entry.unread)
            if not differences:
                self.changes = 0
                break
            changed = changed or differences
        else:
            if changed and self.counted is not fingerprint:  # once per call
                self.changes, self.changed, self.counted = self.changes + 1, changed, fingerprint
            everything = [(e, held) for held in self.entries.values() for e in held]
            if len(everything) >= MAX_GRAPHS:
                oldest, held = min(everything, key=lambda pair: pair[0].used)
                held.remove(oldest)
            entry = Entry(cache, fingerprint, inputs, tokens)
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


class Forwards:
    """The forwards of one generate(): each replays a graph if there is one, or runs the model.

    run: the model's forward. say: called with the reason why a step runs uncaptured. refused: the reason why no step of this call
    can be captured, if known beforehand. prompt: number of tokens of the prompt, if the mask gives it, else 0. chunked: whether
    the prompt is read in chunks.
    """

    def __init__(
        self,
        graphs: DecodeGraphs,
        model: hf.PreTrainedModel,
        run: Callable[..., Any],
        say: Callable[[str], None],
        *,
        refused: str | None = None,
        ignore_mask: bool = False,
        prompt: int = 0,
        chunked: bool = False,
    ):
        self.graphs = graphs
        self.model = model
        self.run = run
        self.say = say
        self.refused = refused
        self.ignore_mask = ignore_mask
        self.prompt = prompt
        self.chunked = chunked
        self.begun = False
        self.quiet = False  # whether the current forward may run from Python without a warning
        self.fingerprint: Fingerprint | None = None
        self.entries: dict[int, Entry] = {}  # the last one by number of tokens
        self.settled: set[Entry] = set()  # those whose state the ranks have compared in this call

    def __call__(self, **given: Any) -> Any:
        cache: Any = given.get("past_key_values")
        ids: Any = given.get("input_ids")
        prompt, self.begun = not self.begun or self._reads_prompt(cache, ids), True
        if prompt:
            if not (self._is_short(cache, ids, given) and self._again(cache, ids)):
                return self._forward(given)
        elif (reason := self._why_not(cache, ids)) is not None:
            return self._uncaptured(reason, given)
        self.quiet = prompt and (ids.shape[1] > FEW or not _tokens(cache))  # few launches for each token
        # Graphs share memory: no other thread may replay one between the copy of the inputs and the copy of the logits.
        with self.graphs.lock:
            if self.graphs.closed:
                return self._uncaptured("the patch was undone during a call", given)
            try:
                return self._step(cache, ids, given)
            except Uncapturable as error:
                reason = str(error)
                if self.quiet:
                    if self.fingerprint is not None:  # the reason is the model's code, not its present state
                        self.graphs.read[cache.storage][_bucket(ids)] = False
                    return self._forward(given)
                if not prompt:
                    self.refused = reason
                return self._uncaptured(reason, given)

    def _reads_prompt(self, cache: object, ids: torch.Tensor | None) -> bool:
        """Whether a forward after the first reads the prompt: a chunk of it, or all of it if the model dropped its cache."""
        if ids is None or not isinstance(cache, StoredCache):
            return False
        many, tokens = ids.shape[1] > 1, _tokens(cache)
        return (many or tokens < max(1, self.prompt)) if self.chunked else (many and not tokens)

    def _is_short(self, cache: object, ids: torch.Tensor | None, given: Inputs) -> bool:
        """Whether a forward that reads the prompt can be a step: some hundred tokens of text at most."""
        if self.refused is not None or ids is None or not isinstance(cache, StoredCache):
            return False
        storage, empty = cache.storage, not _tokens(cache)
        if ids.shape[1] > self._most_tokens(storage, len(ids)) or (empty and not self._takes_prompts(storage)):
            return False
        if given.get("attention_mask") is not None and not (self.ignore_mask or storage.takes_mask):
            return False  # it may say that new tokens are padding
        return unpaddable(given) is None and not (empty and self._is_packed(given))

    def _takes_prompts(self, storage: Storage) -> bool:
        """Whether a graph may read more than a short message. Ranks that share a model have only been tested with these."""
        return storage.takes_prompts and not self.graphs.ranks.several

    def _most_tokens(self, storage: Storage, rows: int) -> int:
        """The most tokens of each row in a graph over this storage."""
        if not storage.takes_many:
            return 1
        most = BUCKETS[-1] // rows if self._takes_prompts(storage) else 0
        return max(bucket for bucket in BUCKETS if bucket <= max(FEW, most))

    def _is_packed(self, given: Inputs) -> bool:
        """Whether an unpadded prompt consists of packed sequences, which a graph would not see. This synchronises."""
        positions = given.get("position_ids")
        if not isinstance(positions, torch.Tensor) or not (given.get("attention_mask") is None or self.ignore_mask):
            return False
        return positions.dim() == 2 and bool(restarts(positions).any())

    def _again(self, cache: StoredCache, ids: torch.Tensor) -> bool:
        """Whether a prompt of this size has been read into these buffers: one that comes once is not worth a rehearsal."""
        tokens, read = _bucket(ids), self.graphs.read.setdefault(cache.storage, {})
        before = read.get(tokens, tokens == 1) and cache.storage.rows == len(ids)
        before = before and (tokens == 1 or not cache.storage.looks_ahead)
        read.setdefault(tokens, True)
        return self.graphs.ranks.every(before)

    def _why_not(self, cache: object, ids: torch.Tensor | None) -> str | None:
        """The reason why this step cannot be captured, judged by its arguments, or None."""
        if not isinstance(cache, StoredCache):
            return f"a step is given {'no cache' if cache is None else f'a {type(cache).__name__}'} instead of the patch's"
        if ids is None:
            return "its steps are given inputs_embeds instead of input_ids"
        if _tokens(cache) < max(1, self.prompt):
            return "the forward that read the prompt has left the cache empty (as gradient checkpointing in training mode does)"
        if ids.shape[1] > 1 and not cache.storage.takes_many:
            return f"a step has several tokens, and steps over a {type(cache).__name__} are captured for one"
        if ids.shape[1] > (most := self._most_tokens(cache.storage, len(ids))):
            return f"a step has more than {most} tokens of each row, the most that a graph of {len(ids)} rows has"
        return self.refused

    def _uncaptured(self, reason: str, given: Inputs) -> Any:
        self.say(reason)
        self.graphs.uncaptured += 1
        return self._forward(given)

    def _forward(self, given: Inputs) -> Any:
        """The model's forward, which may change the model."""
        self._forget()
        return self.run(**given)

    def _forget(self) -> None:
        self.fingerprint = None
        self.entries.clear()

    def _step(self, cache: StoredCache, ids: torch.Tensor, given: Inputs) -> Any:
        """One step by a graph. Raises Uncapturable if it has to run without one."""
        storage, inputs, q_len = cache.storage, dict(given), ids.shape[1]
        tokens = _bucket(ids)
        if tokens > 1 and (name := unpaddable(inputs)) is not None:
            raise Uncapturable(f"its argument {name} cannot be padded")
        if tokens > 1 and storage.looks_ahead:
            raise Uncapturable("tokens may see later ones, and those of a graph may be padding")
        storage.sync(ids.device, *(() if tokens == 1 else (q_len,)))
        if self.fingerprint is None:
            self.fingerprint = self._survey()
        self._set_mask(cache, inputs, tokens)
        entry = self._entry(cache, inputs, tokens)
        if entry.graph is None or entry not in self.settled:
            self.graphs.ranks.settle(entry)
            self.settled.add(entry)
        if entry.refused is not None:
            raise Uncapturable(entry.refused)
        entry.copy_in(inputs)
        mark = None if entry.graph is not None else storage.mark()
        try:
            logits = self._run(entry, storage, inputs)
        except BaseException as error:
            storage.rewind(mark)  # an interrupted step has also counted on the device
            if isinstance(error, Uncapturable):
                entry.refused = str(error)
            raise
        storage.advance(*(() if tokens == 1 else (q_len,)))
        return entry.output(logits, cache)

    def _survey(self) -> Fingerprint:
        """The fingerprint of the model. Raises Uncapturable if no graph can be captured on one of the ranks."""
        found, reason = None, None
        try:
            found = survey(self.model)
        except Uncapturable as error:
            reason = str(error)
        reason = self.graphs.ranks.refusal(reason)
        if found is None or reason is not None:
            raise Uncapturable(reason)
        return found

    def _set_mask(self, cache: StoredCache, inputs: Inputs, tokens: int) -> None:
        """Drop a mask that has no effect. Build the masks of the layers if only the host knows which of its columns they hold."""
        storage, mask = cache.storage, inputs.get("attention_mask")
        if mask is not None and (self.ignore_mask or not storage.takes_mask):
            del inputs["attention_mask"]
        elif grows(mask) and not (storage.keeps_all and mask.shape[1] <= storage.capacity):
            # The spans built from the mask have a fixed size.
            ids = inputs["input_ids"]
            padded = ids if tokens == ids.shape[1] else ids[:, :1].expand(-1, tokens)
            with cache.on_device(with_mask=True):
                inputs["attention_mask"] = hf.decode_mask(self.model, {**inputs, "input_ids": padded})

    def _entry(self, cache: StoredCache, inputs: Inputs, tokens: int) -> Entry:
        entry = self.entries.get(tokens)
        if entry is not None and entry.fits(cache.storage) and entry.accepts(inputs, tokens):
            return entry
        if entry is not None and (name := entry.grown(inputs)) is not None:
            entry.refused = f"its argument {name} grows by one element per step"
            return entry
        assert self.fingerprint is not None
        entry = self.entries[tokens] = self.graphs.find(cache, self.fingerprint, inputs, tokens)
        self.settled.discard(entry)
        if self.graphs.changes >= MAX_CHANGES:
            names = ", ".join(self.graphs.changed[:3])
            reason = f"each of the last {MAX_CHANGES} calls was captured again, as values that a step reads had changed"
            self.say(f"{reason} ({names})")
        return entry

    def _run(self, entry: Entry, storage: Storage, inputs: Inputs) -> torch.Tensor:
        """The logits of one step."""
        graphs = self.graphs
        if entry.graph is not None:
            graphs.replays += 1
            return _replay(entry, entry.graph, inputs)
        body = entry.body(self.model, self.run, storage, graphs.ranks.peers)
        if not entry.warm:
            return entry.kept(self._rehearse(entry, body), inputs)
        expected = self._from_python(entry, body, storage, inputs) if verify.needed(self.model) else None
        graph = new_graph(entry.device, graphs.shared)
        held = references(storage)
        entry.logits = graphs.ranks.attempt(graph.capture, body, communicates=False).logits
        holds = references(storage) - held  # a CUDA graph only has addresses; other graphs may hold tensors
        storage.recorded += holds
        logits = _replay(entry, graph, inputs)
        wrong = expected is not None and verify.differs(logits, expected)
        reason = "its graph does not compute what the step computes, as a kernel is launched on another stream" if wrong else None
        if expected is not None and (reason := graphs.ranks.refusal(reason)) is not None:
            raise Uncapturable(reason)
        entry.graph = graph
        graphs.captures += 1
        graphs.replays += 1
        return logits

    def _from_python(self, entry: Entry, body: Callable[[], Any], storage: Storage, inputs: Inputs) -> torch.Tensor:
        """The logits of a step, run from Python and then undone."""
        mark = storage.mark()
        outputs = self.graphs.ranks.attempt(lambda run: run(), body, communicates=True)
        expected = entry.kept(outputs.logits, inputs).clone()
        storage.rewind(mark)
        storage.sync(entry.device, *(() if entry.tokens == 1 else (inputs["input_ids"].shape[1],)))
        return expected

    def _rehearse(self, entry: Entry, body: Callable[[], Any]) -> torch.Tensor:
        """Run the first step of a graph and check that it can be captured. Returns its logits."""
        before = survey(self.model)
        with unread_by(self.model, before) as unread:
            outputs = self.graphs.ranks.attempt(new_graph(entry.device, self.graphs.shared).rehearse, body, communicates=True)
        logits: torch.Tensor | None = outputs.get("logits")
        others = [name for name, value in outputs.items() if name not in ("logits", "past_key_values") and value is not None]
        if others or logits is None:
            raise Uncapturable(f"its output holds {', '.join(others) or 'no logits'}")
        entry.check(logits)
        entry.output_type = type(outputs)
        entry.returns_cache = "past_key_values" in outputs
        entry.unread = frozenset(unread)
        entry.warm = True
        changed = before.differences(survey(self.model), entry.unread)
        reason = f"a step changes values that the next step reads ({', '.join(changed[:3])})" if changed else None
        if (reason := self.graphs.ranks.refusal(reason)) is not None:  # the step has run and must not run again
            entry.refused = reason
            if self.quiet:
                self._forget()
            else:
                self.refused = reason
                self.say(reason)
                self.graphs.uncaptured += 1
        return logits


def _replay(entry: Entry, graph: Graph, inputs: Inputs) -> torch.Tensor:
    graph.replay()
    return entry.kept(entry.logits, inputs).clone()  # a clone, because the next step overwrites it


def _bucket(ids: torch.Tensor) -> int:
    """The number of tokens of the graph for these ids."""
    return next(bucket for bucket in BUCKETS if bucket >= ids.shape[1])


def _tokens(cache: StoredCache) -> int:
    """Number of tokens whose K and V are on the device."""
    storage = cache.storage
    return 0 if storage.rows is None else cache.get_seq_length() or storage.seen  # the first layer may not run
