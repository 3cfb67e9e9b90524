"""The changes of patch() to one model instance, and their undoing."""

from __future__ import annotations

import copy
import itertools
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import hf, registry
from ..attention.linear import map_of
from ..caches import forward
from ..context_parallel import Shares
from ..report.tables import size
from ..streaming import Settings, examine, forget
from .calls.caches import CallCaches
from .calls.methods import METHODS, Generation, copied, not_pickled
from .configs import OwnConfigs
from .fused import activations, attention, experts, linears, residual, states, subclass, sums
from .fused import norms as fusion
from .graphs import graphs
from .graphs.state import MARK

if TYPE_CHECKING:
    from .ahead import Ahead

ROWS = (1, 2, 4, 8, 16, 32, 64)  # of the calls for which kernels are compiled ahead
LONGEST = 1 << 17  # tokens of all rows in a prompt of these calls
_UNDONE = "This patch is already undone; call hf_fastattn.patch() to patch the model again."


@dataclass(frozen=True)
class Change:
    """One kind of change: what was changed, how many times, and its value before and after."""

    what: str
    count: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what}: {self.before} -> {self.after} ({self.count})"


class Patch:
    """The changes of patch() to one model. Print it to list them; the end of its `with` block, or undo(), undoes them.

    changes: a Change for each kind. captures, replays, uncaptured: numbers of captured graphs, of replayed steps and of steps
    without a graph. graph_bytes: memory reserved for the intermediate results of the graphs. reasons: why steps ran uncaptured;
    each was reported once as a warning. arguments: those of patch(), with defaults that depend on others filled in.
    """

    ahead: Ahead | None = None  # the compilation of its kernels before their first launch
    ahead_of_batches: dict[int, Ahead | None]  # of those of generate_batch(), by the tokens of a page

    def __init__(
        self,
        model: hf.PreTrainedModel,
        backend: str,
        kinds: tuple[hf.Kind, ...] | None,
        graph: bool,
        fuse: bool,
        streaming: Settings | None,
        shares: Shares | None = None,
        peer_memory: bool | None = None,
        keep_graphs: bool = False,
        kv_dtype: str | None = None,
    ):
        """kinds: of the layers, for a cache of the package; None for Transformers' cache.

        shares: how ranks share K and V by sequence. keep_graphs, kv_dtype: see `patch`.
        """
        generation = None
        if kinds is not None:
            linear = map_of(model.config) if registry.get(backend).linear else None
            generation = Generation(model, CallCaches(kinds, streaming, shares, kv_dtype, linear), graph, fuse)
        self._begin(model, backend, graph, generation)
        self._graphs.keep = keep_graphs
        try:
            if shares is not None:
                assert self._generation is not None  # K and V are shared out in caches of the package
                self._generation.heads = hf.WholeHeads(model, shares.copies)
            self._apply(model, fuse, streaming, peer_memory)
            if graph and model.device.type == "cuda":
                self._graphs.estimate(model)  # no first token waits for it
        except BaseException:
            self.undo()
            raise

    def _begin(self, model: hf.PreTrainedModel, backend: str, graph: bool, generation: Generation | None) -> None:
        self._model = weakref.ref(model)
        self.backend = backend
        self.graph = graph
        self.changes: list[Change] = []
        self.arguments: dict[str, object] = {}
        self.ahead_of_batches = {}
        self.undone = False
        self._blocks = 0  # `with` blocks around the running code; the last to end undoes
        self._configs = OwnConfigs()
        self._fused: list[weakref.ref[torch.nn.Module]] = []
        self._generation = generation
        self._why_collectives: str | None = None  # why sums over ranks are not computed by kernels
        self._graphs = graphs.DecodeGraphs() if generation is None else generation.graphs
        self.reasons: list[str] = [] if generation is None else generation.reasons

    def _apply(self, model: hf.PreTrainedModel, fuse: bool, streaming: Settings | None, peer_memory: bool | None) -> None:
        before = model.config._attn_implementation
        vars(model)[MARK] = self  # first: a copy of the model that is made meanwhile can be unpatched
        self._configs.give(model, streaming)
        if streaming is None:
            hf.set_attention(model, self.backend)
        else:
            hf.set_text_attention(model, self.backend)
            examine(model)
        forward.add_hooks(model)
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self.changes.append(Change("attention of layers", layers, before, self.backend))
        if self._generation is not None and self._generation.heads:
            heads = len(self._generation.heads)
            self.changes.append(Change("projections of keys and values", heads, "part of a head", "the rank's KV heads"))
        attention.replace(model, self.backend)
        if fuse:
            self._use_experts(model)
            self._fuse(model)  # also projections of fused routers
        if self._generation is None:
            return
        settings: dict[str, Any] = {"backend": self.backend, "graph": self.graph, "fuse": fuse, "streaming": str(streaming)}
        settings |= {"kv_sharding": "heads" if self._generation.caches.shares is None else "sequence", "peer_memory": peer_memory}
        settings |= {"model": type(model).__name__, "dtype": model.dtype, "config": model.config}
        self._generation.ranks.meet(settings)
        self._generation.install(model)
        self.changes.append(Change("methods of generate()", len(METHODS), type(model).__name__, "this instance's own"))
        if self._generation.ranks.several:
            self.changes.append(Change("generate() on several ranks", 1, "each rank for itself", "ranks compare their calls"))
        if peer_memory is not False and self._generation.ranks.several and self.graph and fuse:
            self._share_memory(model, self._generation, required=peer_memory is True)
        kept = model.generation_config.cache_implementation or "dynamic"
        words = self._generation.caches.in_words()
        self.changes.append(Change("cache of layers", len(self._generation.caches.kinds), kept, words))
        if streaming is not None:
            self.changes.append(Change("forward pre-hook", 1, "none", "passes the padding to the cache"))
        if self.graph and not graphs.why_none(model):
            self.changes.append(Change("decode step", 1, "launched from Python", "one CUDA graph"))

    def _fuse(self, model: hf.PreTrainedModel) -> None:
        found = fusion.find(model)
        if not self.graph:  # linear layers are fused only in decode graphs
            found = found._replace(linears=[])
        fusion.fuse(found)
        mixers, gated = states.fuse(model)
        gelus, sparse = activations.fuse(model), activations.fuse_sparse_gates(model)
        joined, layers = (linears.join(model), residual.join(model)) if self.graph else ([], [])
        every = itertools.chain(*found, mixers, gated, gelus, sparse, joined, layers)
        self._fused += [weakref.ref(module) for module in every]
        for what, modules, before, after in (
            ("RMSNorm and LayerNorm", found.norms, "launched operation by operation", "one launch"),
            ("rotation of queries and keys", found.layers, "launched operation by operation", "one launch"),
            ("product in the MLP", found.mlps, "a third tensor", "in place"),
            ("steps of linear layers, of one token", mixers, "launched operation by operation", "two launches"),
            ("gated norms", gated, "launched operation by operation", "one launch"),
            ("GELU", gelus, "launched operation by operation", "one launch"),
            ("sparse gates of MLPs", sparse, "a quantile from the host in each forward", "a number"),
            ("linear layers, in decode graphs", found.linears, "cuBLAS", "one launch"),
            ("projections of queries, keys and values, in decode graphs", joined, "up to four launches", "one"),
            ("residual connections, in decode graphs", layers, "two launches", "none"),
        ):
            if modules:
                self.changes.append(Change(what, len(modules), before, after))

    def _use_experts(self, model: hf.PreTrainedModel) -> None:
        if found := experts.find(model):
            before = experts.use(found)
            self.changes.append(Change("experts, up to 64 tokens", len(found), before, "one read of each chosen expert"))
        if found := experts.find_routers(model):
            self._fused += [weakref.ref(module) for module in found]
            for module in found:
                subclass.replace(module, experts.router)
            self.changes.append(Change("choice of experts, up to 64 tokens", len(found), "seven launches", "one"))

    def _share_memory(self, model: hf.PreTrainedModel, generation: Generation, required: bool) -> None:
        reason = generation.ranks.connect(model.config.get_text_config(decoder=True).hidden_size, model.dtype)
        if reason is not None and required:
            raise ValueError(f"peer_memory=True is not possible: {reason}. Leave it out; sums are then collectives.")
        if reason is not None:
            self._why_collectives = reason
            return
        if generation.caches.shares is not None:
            generation.caches.shares.peers = sums.peers_of
        found = sums.join(model)
        self._fused += [weakref.ref(module) for module in found]
        ours = "kernels that also add and normalise"
        self.changes.append(Change("sums and columns of all ranks, in decode graphs", len(found), "collectives", ours))

    def read_in_chunks(self) -> None:
        """Let calls read prompts in chunks that do not fit as a whole."""
        assert self._generation is not None  # `check_chunks`
        self._generation.auto_chunks = True
        self.changes.append(Change("prompts that do not fit", 1, "read whole", "read in chunks"))

    def is_of(self, model: hf.PreTrainedModel, arguments: Mapping[str, object]) -> bool:
        """Whether it is in place, with these arguments of patch(). Raises ValueError if it has others."""
        with self._graphs.lock:  # another thread may be undoing it
            if self.undone:
                return False
            had = self.arguments
            if had == arguments:  # set_attn_implementation() may have replaced the backend
                had = {**had, "backend": model.config._attn_implementation}
        if differs := [name for name in arguments if had.get(name) != arguments[name]]:
            ours, theirs = (", ".join(f"{name}={its.get(name)!r}" for name in differs) for its in (arguments, had))
            raise ValueError(
                f"This {type(model).__name__} is already patched: it has {theirs}, and this call asks for {ours}. Call "
                "hf_fastattn.unpatch() on it first."
            )
        return True

    def undo(self) -> None:
        """Undo every change. Raises ValueError if they are already undone."""
        if not self._undo():
            raise ValueError(_UNDONE)

    def _undo(self) -> bool:
        """Undo every change, once. Returns whether that was now."""
        with self._graphs.lock:  # another thread may be running a step, or undo this
            if self.undone:
                return False
            self.undone = True
            for work in (self.ahead, *self.ahead_of_batches.values()):
                if work is not None:
                    work.close()
            model = self._model()
            if self._generation is not None:
                self._generation.close()
            if model is not None:
                self._restore(model)
        return True

    def _restore(self, model: hf.PreTrainedModel) -> None:
        forward.remove_hooks(model)
        forget(model)
        subclass.restore([*(module for ref in self._fused if (module := ref()) is not None), *model.modules()])
        if self._generation is not None:
            if self._generation.heads is not None:
                self._generation.heads.restore()
            self._generation.uninstall(model)
        experts.restore(model)
        self._configs.restore(model)
        vars(model).pop(MARK, None)

    def begin_batches(self, page: int) -> None:
        """Compile what generate_batch() launches with pages of so many tokens, from its first call on."""
        from . import ahead

        model = self._model()
        if model is not None and page not in self.ahead_of_batches:
            self.ahead_of_batches[page] = ahead.begin(model, self.arguments.get("compile") == "lazy", page)

    def warm(
        self, rows: Iterable[int] | None = None, tokens: int = LONGEST, graphs: bool = False, batch: bool | int = False
    ) -> str:
        """Compile the kernels of this model now, in other processes, for calls of so many rows and texts of `tokens` at most.

        graphs: also capture the decode step of each number of rows, and short messages, by two calls of generate(). batch: the
        kernels of generate_batch() instead, see `kernels_of`; its call captures its steps. Returns a sentence with the number of
        kernels and the time. Raises ValueError if the patch is undone, for graphs together with batch, and as `kernels_of`.
        """
        from . import ahead, warm

        model, began = self._model(), time.perf_counter()
        if self.undone or model is None:
            raise ValueError(_UNDONE)
        if graphs and batch:
            raise ValueError(
                "graphs=True captures steps of generate(), and generate_batch() its own in its first calls. Pass one."
            )
        rows = None if rows is None else tuple(rows)
        said = ahead.warm_up(warm.Recipe.of(model, batch=batch), rows, tokens)
        if graphs and self.graph:
            self._graphs.everything = True
            try:
                for count in sorted(2 * (rows or ROWS)):  # the first call allocates, and the second rehearses a message
                    ids = torch.zeros(count, 16, dtype=torch.int64, device=model.device)
                    mask = torch.ones_like(ids)
                    model.generate(ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)  # type: ignore[operator]
            finally:
                self._graphs.everything = False
            said += f" {self.captures} graphs captured, {time.perf_counter() - began:.1f} s in all."
        return said

    def __enter__(self) -> Patch:
        with self._graphs.lock:
            if self.undone:
                raise ValueError(_UNDONE)
            self._blocks += 1
        return self

    def __exit__(self, *error: object) -> None:
        with self._graphs.lock:
            self._blocks -= 1
            if not self._blocks:
                self._undo()

    def __deepcopy__(self, memo: dict[int, Any]) -> Patch:
        model = copied(self._model, memo)
        twin = memo[id(self)] = Patch.__new__(Patch)
        twin._begin(model, self.backend, self.graph, copy.deepcopy(self._generation, memo))
        twin.changes, twin.arguments = list(self.changes), self.arguments
        twin.undone = self.undone
        twin._configs = copy.deepcopy(self._configs, memo)
        twin._fused = [weakref.ref(copy.deepcopy(module, memo)) for ref in self._fused if (module := ref()) is not None]
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        raise not_pickled()

    def __len__(self) -> int:
        return len(self.changes)

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        model = self._model()
        lines = [f"{type(model).__name__ if model is not None else 'A deleted model'}: {len(self)} changes"]
        lines += [f"  {change}" for change in self.changes]
        if self.undone:
            lines[0] += ", undone"
        elif model is not None:
            if (now := model.config._attn_implementation) != self.backend:
                lines.append(f"  set_attn_implementation() has since changed attention: {self.backend} -> {now}")
            if self.graph and (reason := graphs.why_none(model)):
                lines.append(f"  decode graph: off, as {reason}")
            elif self._why_collectives is not None:
                lines.append(f"  sums over ranks: collectives, as {self._why_collectives}")
            if reason := hf.unpacked(model):
                lines.append(f"  linear layers: not replaced, as {reason}")
        reasons = {work.reason: None for work in (self.ahead, *self.ahead_of_batches.values()) if work is not None}
        lines += [f"  kernels: compiled at their first launch, as {reason}" for reason in reasons if reason]
        if self.captures or self.uncaptured:
            memory = f" ({size(self.graph_bytes)})" if self.graph_bytes else ""
            lines.append(
                f"  decode steps: {self.replays} replayed, {self.captures} graphs captured{memory}, {self.uncaptured} uncaptured"
            )
        if self._graphs.skipped:
            lines.append(f"  prompts: {self._graphs.skipped} tokens of padding and of equal rows not read")
        lines += [f"  padding of prompts is read: {reason}" for reason in self._graphs.padded]
        if self._graphs.own is not None:
            lines.append(f"  captured anew in each call, as steps run {self._graphs.own}, which is of no installed package")
        if self.captures and self._generation is not None and (times := self._generation.caches.pool.freed):
            lines.append(f"  captured again, as {times} training steps have freed K and V")
        lines += [f"  ran uncaptured: {reason}" for reason in self.reasons]
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def captures(self) -> int:
        return self._graphs.captures

    @property
    def skipped_tokens(self) -> int:
        """Tokens of prompts that were not read, because they are padding or in a row that equals another."""
        return self._graphs.skipped

    @property
    def replays(self) -> int:
        return self._graphs.replays

    @property
    def graph_bytes(self) -> int:
        shared = self._graphs.shared
        found: int = shared["bytes"] if shared.get("graphs") else 0  # the memory pool ends with its last graph
        return found

    @property
    def uncaptured(self) -> int:
        return self._graphs.uncaptured
