"""The decode graph: one captured CUDA graph per step of generate(), replayed instead of running the model's Python.

generate() asks the model for something to call in its decode loop (`get_compiled_call`), and gets a DecodeStep. It copies the
step's small inputs into tensors that stay, replays, and returns an output of the model's own type. The first step of a new shape
runs uncaptured, as a rehearsal on the same tensors; the second is captured, which takes one pass of the model's Python.

A graph is good for one storage at one address (and one `variant` of it: rows known to be alike, or not), one set of input shapes
and one fingerprint of the model (survey.py), taken once per generate(), before its first step. Weights changed in place are seen
at once.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch

from .. import hf
from ..caches.pool import references
from ..caches.stored import StoredCache
from .fuse import in_decode_graph
from .survey import Fingerprint, Uncapturable, survey, unread_by

MAX_GRAPHS = 16  # per patched model; the least recently used one goes first
MAX_CHANGES = 4  # calls in a row that may capture anew before it is said
_SCALARS = (bool, int, float, str, type(None))


class Graph(Protocol):
    def rehearse(self, body: Callable[[], object]) -> object:
        """Run body() once, as a warm-up; fail where it reads a value on the host, as a capture would but without its damage."""

    def capture(self, body: Callable[[], object]) -> object:
        """Record what body() launches, without running it; return what it returned, whose tensors every replay fills."""

    def replay(self) -> None: ...


class CudaGraph:
    """A torch.cuda.CUDAGraph. One graph of a device runs at a time, so those of a model share a memory pool.

    All captures of a device share one stream: libraries keep a workspace for every stream they ever saw.
    """

    _captured_on: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}
    _replayed_on: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}  # the last of them
    _lock = threading.Lock()
    _rehearsing = threading.RLock()

    def __init__(self, device: torch.device, shared: dict):
        self.device = device
        self.shared = shared
        self.graph = torch.cuda.CUDAGraph()

    def rehearse(self, body):
        # As warnings and not as errors: the mode is the process's, and another thread may sync as it likes.
        heard, me = [], threading.get_ident()
        with self._rehearsing, warnings.catch_warnings():  # two at once would restore one another's state
            show, mode = warnings.showwarning, torch.cuda.get_sync_debug_mode()

            def hear(message, category, filename, lineno, *rest):
                if "called a synchronizing" not in str(message):
                    show(message, category, filename, lineno, *rest)
                elif threading.get_ident() == me:
                    heard.append(f"{filename}:{lineno}")

            warnings.filterwarnings("ignore", "Synchronization debug mode")
            warnings.filterwarnings("always", ".*called a synchronizing")
            warnings.showwarning = hear
            torch.cuda.set_sync_debug_mode("warn")
            drawn = torch.random.get_rng_state(), random.getstate()
            try:
                result = body()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        if heard:
            raise RuntimeError(f"it reads a value on the host, at {heard[0]}")
        if not torch.equal(drawn[0], torch.random.get_rng_state()) or drawn[1] != random.getstate():
            raise RuntimeError("it draws random numbers on the host")
        return result

    def capture(self, body):
        with self._lock, torch.cuda.device(self.device):  # one capture at a time: they share a stream
            stream = self._captured_on.get(self.device)
            if stream is None:
                stream = self._captured_on[self.device] = torch.cuda.Stream(self.device)
            living = self.shared.setdefault("graphs", weakref.WeakSet())
            if "pool" not in self.shared or not living:  # a pool that its last graph has left takes no other
                self.shared["pool"] = torch.cuda.graph_pool_handle()
            pool = self.shared["pool"]
            try:
                # cuBLAS has a workspace for each stream. An older one could be freed under this graph when torch.compile
                # clears the workspaces, so the graph allocates its own in its memory pool.
                torch._C._cuda_clearCublasWorkspaces()
                with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    result = body()
                torch._C._cuda_clearCublasWorkspaces()
                living.add(self)
                return result
            except BaseException:
                del self.shared["pool"], self.shared["graphs"], self._captured_on[self.device]
                # A capture that failed leaves torch's random numbers in capture mode; one that succeeds takes them out of it.
                with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
                    torch.zeros(1, device=self.device)
                raise

    def replay(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        with self._lock:  # two streams must not replay at once
            last = self._replayed_on.get(self.device)
            if last is not None and last != stream:
                stream.wait_stream(last)
            self._replayed_on[self.device] = stream
            self.graph.replay()


def why_no_graph(device: torch.device) -> str | None:
    """Why steps on this device cannot be captured."""
    return None if device.type == "cuda" else f"the model is on {device}, and graphs are for CUDA devices"


def new_graph(device: torch.device, shared: dict) -> Graph:
    """What records and replays; `shared` is one dict per patched model."""
    return CudaGraph(device, shared)


class Entry:
    """One graph, or the way to it: the tensors it reads, and what it was made for."""

    def __init__(self, cache, fingerprint: Fingerprint, inputs: dict):
        storage = cache.storage
        self.around = type(cache).around
        self.takes_mask = storage.takes_mask
        self.storage = weakref.ref(storage)
        self.device = inputs["input_ids"].device
        self.version = storage.version
        self.variant = storage.variant
        self.fingerprint = fingerprint
        self.unread: frozenset[tuple[str, str]] = frozenset()  # attributes of the fingerprint that a step does not read
        self.used = 0
        self.refused: str | None = None
        self.warm = False
        self.graph: Graph | None = None
        self.logits: torch.Tensor | None = None
        self.output_type: type | None = None
        self.returns_cache = True
        self.constants: dict = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.live: torch.Tensor | None = None  # bool (rows, capacity): the mask so far, and False
        self.width = 0  # of the mask so far
        self.masks: dict[str, torch.Tensor] = {}
        self.count = len(inputs)
        for name, value in inputs.items():
            if name == "past_key_values":
                continue
            if name == "attention_mask" and grows(value):
                with torch.inference_mode(False):
                    self.live = torch.zeros(len(value), storage.capacity, dtype=torch.bool, device=value.device)
            elif isinstance(value, torch.Tensor):
                self.tensors[name] = _like(value)
            elif isinstance(value, _SCALARS):
                self.constants[name] = value
            elif (
                name == "attention_mask" and isinstance(value, dict) and all(isinstance(v, torch.Tensor) for v in value.values())
            ):
                self.masks = {kind: _like(mask) for kind, mask in value.items()}
            else:
                self.refused = f"its argument {name} is a {type(value).__name__}"
        if self.constants.get("output_hidden_states") or self.constants.get("output_attentions"):
            self.refused = "hidden states or attentions are asked for"
        if "position_ids" not in self.tensors:
            self.refused = "the model is called without position_ids"

    def fits(self, storage) -> bool:
        """Whether this graph is one over `storage` as it is now."""
        return self.storage() is storage and self.version == storage.version and self.variant == storage.variant

    def accepts(self, inputs: dict) -> bool:
        """Whether inputs have the shapes and constants of this graph."""
        if len(inputs) != self.count:
            return False
        for name, tensor in self.tensors.items():
            value = inputs.get(name)
            if not isinstance(value, torch.Tensor) or value.shape != tensor.shape or value.dtype != tensor.dtype:
                return False
        for name, constant in self.constants.items():
            if inputs.get(name, self) != constant:
                return False
        if self.live is not None:
            return grows(inputs.get("attention_mask"))
        if self.masks:
            masks = inputs.get("attention_mask")
            return isinstance(masks, dict) and all(
                kind in masks and masks[kind].shape == mask.shape for kind, mask in self.masks.items()
            )
        return True

    def grown(self, inputs: dict) -> str | None:
        """The argument that has become one longer since the step before, which was this graph's."""
        for name, tensor in self.tensors.items():
            shape = getattr(inputs.get(name), "shape", ())
            if shape[:-1] == tensor.shape[:-1] and shape[-1:] == (tensor.shape[-1] + 1,):
                return name
        return None

    def copy_in(self, inputs: dict) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(inputs[name])
        for kind, mask in self.masks.items():
            mask.copy_(inputs["attention_mask"][kind])
        if self.live is not None:
            mask = inputs["attention_mask"]
            self.live[:, : mask.shape[1]].copy_(mask)
            if mask.shape[1] < self.width:  # another prompt
                self.live[:, mask.shape[1] :] = False
            self.width = mask.shape[1]

    def body(self, model, storage) -> Callable[[], object]:
        """One step over the tensors that stay: what is run once to warm up, and then captured."""
        static = {**self.constants, **self.tensors}
        if self.masks:
            static["attention_mask"] = self.masks
        if self.live is not None:
            static["attention_mask"] = self.live

        def step():
            cache = self.around(storage)
            with cache.on_device():
                inputs = {**static, "past_key_values": cache}
                if self.takes_mask and "attention_mask" not in static:
                    # Made in the graph from the device's count. Some models count tokens on the host if they get no mask.
                    inputs["attention_mask"] = hf.decode_mask(model, {**inputs, "attention_mask": None})
                with in_decode_graph():
                    outputs = model(**inputs)
                storage.step()
            return outputs

        return step

    def output(self, logits: torch.Tensor, cache):
        return self.output_type(logits=logits, **({"past_key_values": cache} if self.returns_cache else {}))


def _tokens(cache) -> int:
    """Tokens whose K and V are on the device."""
    storage = cache.storage
    return 0 if storage.rows is None else cache.get_seq_length() or storage.seen  # the first layer may be one that does not run


def grows(mask) -> bool:
    """Whether this is a mask as generate() makes it, (rows, tokens so far)."""
    return isinstance(mask, torch.Tensor) and mask.dim() == 2


def _like(value: torch.Tensor) -> torch.Tensor:
    # A normal tensor, since the next generate() may run outside the inference mode that this one runs in.
    with torch.inference_mode(False):
        return torch.empty_like(value, memory_format=torch.contiguous_format)


class DecodeGraphs:
    """All graphs of one model, over the storages of its caches."""

    def __init__(self):
        self.entries: weakref.WeakKeyDictionary[object, list[Entry]] = weakref.WeakKeyDictionary()
        self.shared: dict = {}
        self.lock = threading.RLock()
        self.clock = itertools.count(1)
        self.captures = self.replays = self.uncaptured = 0
        self.closed = False  # the patch is undone
        self.changes = 0  # calls in a row that found the model changed
        self.changed: list[str] = []  # and in what, the last time

    def find(self, cache, fingerprint: Fingerprint, inputs: dict) -> Entry:
        """The entry for these inputs, made if there is none."""
        storage = cache.storage
        entries = [entry for entry in self.entries.get(storage, ()) if entry.version == storage.version]
        self.entries[storage] = entries
        alike = sorted((e for e in entries if e.fits(storage) and e.accepts(inputs)), key=lambda e: -e.used)
        changed: list[str] = []
        for entry in alike:
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
        """Drop all graphs and make no more."""
        self.closed = True
        self.clear()


class DecodeStep:
    """What one generate() calls in place of the model: replays the graph where there is one.

    say: told why steps run uncaptured. refused: why none of this call can be captured, if that is known beforehand. prompt:
    tokens that the prompt has, as far as a mask tells. chunked: whether the prompt is read through this, in chunks.
    """

    def __init__(
        self,
        graphs: DecodeGraphs,
        model,
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

    def __call__(self, **given):
        cache, ids = given.get("past_key_values"), given.get("input_ids")
        if (reason := self._why_not(cache, ids)) is not None:
            return self._uncaptured(reason, given)
        if ids.shape[1] != 1 or _tokens(cache) < max(1, self.prompt):
            return self.model(**given)  # a chunk of the prompt
        # Graphs share memory: between copying inputs in and copying logits out, no other thread may replay one.
        with self.graphs.lock:
            if self.graphs.closed:
                return self._uncaptured("the patch was undone in the middle of a call", given)
            return self._step(cache, ids, given)

    def _why_not(self, cache, ids: torch.Tensor | None) -> str | None:
        """Why this step cannot be captured, as far as its arguments tell."""
        if not isinstance(cache, StoredCache):
            return f"a step is given {'no cache' if cache is None else f'a {type(cache).__name__}'} in place of this patch's"
        if ids is None:
            return "its steps are given inputs_embeds and no input_ids"
        if self.chunked and (ids.shape[1] != 1 or _tokens(cache) < max(1, self.prompt)):
            return None
        if ids.shape[1] != 1:
            return f"a step has {ids.shape[1]} tokens"
        if _tokens(cache) < max(1, self.prompt):
            return "the forward that read the prompt has left the cache empty (as gradient checkpointing in training mode does)"
        return self.refused

    def _uncaptured(self, reason: str, given: dict):
        self.say(reason)
        self.graphs.uncaptured += 1
        return self.model(**given)

    def _step(self, cache, ids: torch.Tensor, given: dict):
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
            # Only the host knows which of its columns are in the buffers; the spans made from it do not grow.
            with cache.on_device(with_mask=True):
                inputs["attention_mask"] = hf.decode_mask(self.model, inputs)
        entry = self.entry
        if entry is None or not entry.fits(storage) or not entry.accepts(inputs):
            if entry is not None and (name := entry.grown(inputs)) is not None:
                self.refused = entry.refused = f"its argument {name} grows by one a step"
                return self._uncaptured(self.refused, given)
            entry = self.entry = self.graphs.find(cache, self.fingerprint, inputs)
            if self.graphs.changes >= MAX_CHANGES:
                names = ", ".join(self.graphs.changed[:3])
                self.say(f"each of the last {MAX_CHANGES} calls was captured anew, as what a step reads changed ({names})")
        if entry.refused is None:
            entry.copy_in(inputs)
            mark = None if entry.graph is not None else storage.mark()
            try:
                logits = self._run(entry, storage)
            except BaseException as error:
                storage.rewind(mark)  # an interrupted step, too, has counted on the device
                if not isinstance(error, Uncapturable):
                    raise
                entry.refused = str(error)
            else:
                storage.advance()
                return entry.output(logits, cache)
        self.refused = entry.refused
        return self._uncaptured(self.refused, given)

    def _run(self, entry: Entry, storage) -> torch.Tensor:
        graphs = self.graphs
        if entry.graph is not None:
            entry.graph.replay()
            graphs.replays += 1
            return entry.logits.clone()  # whoever keeps it must not see the next step's
        body = entry.body(self.model, storage)
        if not entry.warm:
            before = survey(self.model)
            with unread_by(self.model, before) as unread:
                outputs = _attempt(new_graph(entry.device, graphs.shared).rehearse, body)
            others = [name for name, value in outputs.items() if name not in ("logits", "past_key_values") and value is not None]
            if others or outputs.get("logits") is None:
                raise Uncapturable(f"its output holds {', '.join(others) or 'no logits'}")
            entry.output_type = type(outputs)
            entry.returns_cache = "past_key_values" in outputs
            entry.unread = frozenset(unread)
            entry.warm = True
            if changed := before.differences(survey(self.model), entry.unread):
                # The step is done, and must not be done again.
                self.refused = entry.refused = f"a step changes what the next one reads ({', '.join(changed[:3])})"
                self.say(self.refused)
                graphs.uncaptured += 1
            return outputs.logits
        graph = new_graph(entry.device, graphs.shared)
        before = references(storage)
        entry.logits = _attempt(graph.capture, body).logits
        after = references(storage)  # a CUDA graph knows addresses alone, and another may hold tensors
        storage.recorded += after - before
        entry.graph = graph
        graphs.captures += 1
        return self._run(entry, storage)


def _attempt(run: Callable, body: Callable[[], object]):
    """run(body). Any failure means that the step runs uncaptured, where a mistake of the caller's shows itself again."""
    try:
        return run(body)
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        raise Uncapturable(f"{type(error).__name__} while capturing it ({message})") from error
