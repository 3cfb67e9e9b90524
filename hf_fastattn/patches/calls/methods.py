"""The methods that a patched model overrides: they give a generate() its cache (caches.py) and run its forwards.

While a generate() is in progress, the instance has a method for calls of the model too, which runs the model's forward or a graph
(`forwards.Forwards`). At other times it has none, so that copies of its attributes (DataParallel) run their own forward.
`hf.generation` has the names of the methods.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ... import hf
from ...caches import forward
from ...streaming import refresh
from ..graphs import graphs, policy
from ..ranks import ranks as several_ranks
from . import chunks
from .after import capture_wanted
from .batches import Batches, Managers
from .caches import CallCaches, covered
from .calls import Call, CallsOfThread, ahead, running
from .forwards import Forwards
from .overrides import Generate, KeptInputs, Processors

METHODS = (hf.GENERATE, hf.PREPARE_CACHE, hf.PREPARE_INPUTS, hf.PROCESSORS_OF_CALL, hf.BATCHES, hf.BATCH)
_MISSING: Any = object()


def copied(model: weakref.ref[hf.PreTrainedModel], memo: dict[int, Any]) -> hf.PreTrainedModel:
    """The copy of a patched model during a deepcopy. Objects that belong to a model can only be copied with it."""
    twin: hf.PreTrainedModel | None = memo.get(id(model()))
    if twin is None:
        raise TypeError("A Patch cannot be copied by itself; copy the model it belongs to.")
    return twin


def not_pickled() -> TypeError:
    return TypeError("A patched model cannot be pickled; call hf_fastattn.unpatch() on it first.")


class Generation:
    """generate() of one patched model: its caches, its decode graphs, and the methods that give both to a call.

    graph: whether steps are captured. fuse: whether tokens are drawn in one launch. reasons: why steps ran uncaptured.
    """

    def __init__(self, model: hf.PreTrainedModel, caches: CallCaches, graph: bool, fuse: bool):
        self._model = weakref.ref(model, graphs.weakly(self.close))  # if it is deleted before its Patch
        self.caches, self.graph, self.fuse = caches, graph, fuse
        self.ranks = several_ranks.of(model)
        self.graphs = graphs.DecodeGraphs(self.ranks)
        self.reasons: list[str] = []
        self.had: dict[str, Any] = {}  # previous attributes of the instance by method name, or _MISSING
        self.signatures: dict[str, tuple[object, inspect.Signature]] = {}  # by method name: a function, and that of its method
        self.lock = threading.Lock()
        self.job_lock, self.in_job = threading.RLock(), False  # one job of a model runs at a time; whether one does
        self.heads: hf.WholeHeads | None = None
        self.auto_chunks = False  # whether prompts that do not fit are read in chunks
        self.calls = 0  # in progress, in any thread
        self._thread = CallsOfThread()

    def close(self) -> None:
        if self.calls:
            self.say("the patch was undone during a call")
        self.graphs.close()
        self.caches.pool.close()
        self.ranks.close()

    @property
    def model(self) -> hf.PreTrainedModel:
        model = self._model()
        if model is None:
            raise ReferenceError(
                "The patched model was deleted: its generate() does not keep it alive, as a method would. Keep a reference to it."
            )
        return model

    def install(self, model: hf.PreTrainedModel) -> None:
        """Set the methods on the instance."""
        first: list[Any] = [Generate(self), self._prepare_cache, KeptInputs(self), Processors(self)]
        ours = [*first, Managers(self), Batches(self)]
        for name, method in zip(METHODS, ours, strict=True):
            self._set(model, name, method)

    def uninstall(self, model: hf.PreTrainedModel) -> None:
        """Remove the methods from the instance, except those that others have replaced since."""
        for name in (*METHODS, hf.CALL):
            self._unset(model, name)

    def _set(self, model: hf.PreTrainedModel, name: str, method: Callable[..., Any]) -> None:
        self.had[name] = vars(model).get(name, _MISSING)
        vars(model)[name] = method

    def _unset(self, model: hf.PreTrainedModel, name: str) -> None:
        had = self.had.get(name, _MISSING)
        if getattr(vars(model).get(name), "__self__", None) is not self:
            return
        if had is _MISSING:
            del vars(model)[name]
        else:
            vars(model)[name] = had

    def own(self, name: str) -> Callable[..., Any]:
        """A method as it was before patch()."""
        had = self.had.get(name, _MISSING)
        own: Callable[..., Any] = hf.stock(self.model, name) if had is _MISSING else had
        return own

    def is_stock(self, name: str) -> bool:
        """Whether a method, apart from patch(), is that of Transformers."""
        now = getattr(self.model, name)
        return hf.is_stock(self.own(name) if getattr(now, "__self__", None) is self else now)

    def __deepcopy__(self, memo: dict[int, Any]) -> Generation:
        self.ranks.check_copy()
        twin = Generation(copied(self._model, memo), replace(self.caches), self.graph, self.fuse)
        memo[id(self)] = twin
        twin.had = dict(self.had)
        twin.graphs.keep, twin.auto_chunks = self.graphs.keep, self.auto_chunks
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        raise not_pickled()

    def say(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
            hf.warn(f"{type(self._model()).__name__}.generate() runs uncaptured: {reason}.")

    # ---- the methods that generate() calls ----

    def _prepare_cache(
        self,
        generation_config: hf.GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: object,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        model, caches = self.model, self.caches
        caches.refit(model)
        forward.abandon(model)
        if forward.streams(model):
            refresh(model)  # before the state that a graph depends on is read
        given: object = model_kwargs.get(hf.CACHE)
        if self.fuse and (calls := self._thread.calls):
            calls[-1].samples = calls[-1].own_loop and hf.needs_only_tokens(model, generation_config, generation_mode)
        assisted = "assisted" in str(getattr(generation_mode, "value", generation_mode))
        asked = self._asked(model, generation_config, given, assisted)
        if given is not None or asked is not None or generation_config.use_cache is False:
            stock = hf.stock(model, hf.PREPARE_CACHE)
            stock(generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        among = self._agree(model, generation_config, given, rows, max_cache_length)
        if caches.takes(given):
            if generation_config.use_cache is False and not assisted:
                raise ValueError(
                    f"use_cache=False reads the whole text again in each step, behind the tokens that {hf.CACHE} holds. Pass "
                    f"use_cache=True (the default of some models is False), or leave out {hf.CACHE}."
                )
            caches.make_ready(given, model, model_kwargs, rows, max_cache_length, among)
        elif given is not None:
            self.say(f"{hf.CACHE} is a {type(given).__name__}, not a {caches.type.__name__}")
        elif asked is not None:
            compiled = generation_config.compile_config is not None
            self.say("compile_config was passed" if compiled else f"cache_implementation={asked!r} was requested")
        elif generation_config.use_cache is False:
            again = "and each step reads the whole text again"
            self.say(f'use_cache=False was requested, {again} (in TRL pass generation_kwargs={{"use_cache": True}})')
        else:
            has_graph = max_cache_length <= policy.NEAREST[-1]
            room = max_cache_length + has_graph  # for the step of a capture after the reply, which is undone
            given = model_kwargs[hf.CACHE] = caches.pool.take(rows, room, among)
        forward.free_for_training(model, caches.pool)
        self.ranks.wrote(model_kwargs.get(hf.CACHE))
        if caches.takes(given):
            seen = given.get_seq_length()
            given.check_call(model_kwargs.get("attention_mask"), seen + max_cache_length, assisted)
            chunks.check(generation_config, seen)
            if self.auto_chunks and not assisted and (calls := self._thread.calls):
                chunks.choose(model, generation_config, model_kwargs, caches, calls[-1], batch_size, rows, max_cache_length)
            if assisted:
                self._continue(seen, generation_config, model_kwargs)
            if self.graph:
                self._begin(model, generation_config, model_kwargs, max_cache_length, assisted)

    def _continue(self, seen: int, generation_config: hf.GenerationConfig, model_kwargs: dict[str, Any]) -> None:
        """Let an assisted generation continue a cache of `seen` tokens, all of which Transformers would read again."""
        calls = self._thread.calls
        if not seen or not calls:
            return
        whole = (covered(model_kwargs, seen) or hf.width_of_dropped_mask(generation_config)) == calls[-1].tokens
        if whole and hf.drafts_from_hidden_states(generation_config):
            raise ValueError(
                f"Drafts from hidden states (use_mtp, speculation_type) need those of the whole text, and {hf.CACHE} holds "
                f"{seen} tokens without them. Leave out {hf.CACHE}."
            )
        if not whole and model_kwargs.get("attention_mask") is not None:
            raise ValueError(
                f"Transformers' assisted generation cuts an attention_mask to the new ids, and {hf.CACHE} holds {seen} "
                "tokens before them. Pass the ids of the whole text."
            )
        calls[-1].cached = seen if whole else 0

    def _asked(self, model: hf.PreTrainedModel, config: hf.GenerationConfig, given: object, assisted: bool) -> str | None:
        """The cache_implementation that this call requests, or None. Assisted decoding has no room in a static cache."""
        asked: str | None = config.cache_implementation
        if asked == model.generation_config.cache_implementation:
            asked = None  # the default of the checkpoint, not a request of this call
        if config.compile_config is not None:
            if self.caches.takes(given):
                raise ValueError(
                    f"compile_config requests Transformers' torch.compile, which cannot trace a {type(given).__name__}; "
                    "pass one of the two, or neither to replay decode graphs."
                )
            if given is None and asked is None and not assisted:
                asked = config.cache_implementation = "static"
        return asked

    def _agree(
        self, model: hf.PreTrainedModel, config: hf.GenerationConfig, given: object, rows: int, tokens: int
    ) -> list[int] | None:
        """Compare this call with that of the other ranks. Returns the idle storages that all of them hold, by serial number."""
        if not self.ranks.several:
            return None
        settings = {
            **several_ranks.facts_of_cache(given),
            "the length of the cache": tokens,
            "rows": rows,
            "attn_implementation": model.config._attn_implementation,
            "graph": self.graph and (self._why_uncaptured(model, config) or hf.why_not_captured(model) or True),
            "config": model.config.get_text_config(decoder=True),
            "model.training": model.training,
        }
        may_wait = any(call.may_wait(model.device) for call in self._thread.calls[-1:])
        fitting, needed = [], 0
        caches = self.caches
        if given is None:
            needed = several_ranks.least_bytes(model, caches.kinds, rows, caches.kept(tokens)) - caches.pool.idle_bytes
        if given is None or caches.is_new(given):
            fitting = caches.pool.fitting(rows, tokens)
        among = self.ranks.agree(config, settings, may_wait, fitting, needed)
        if self.heads is not None and self.graph:
            self.heads.refresh()
        return among

    # ---- forwards ----

    @contextmanager
    def in_call(self, call: Call) -> Iterator[None]:
        """The time of one generate() in this thread."""
        model = self.model
        stacks = self._thread.calls, running.calls
        depths = [*map(len, stacks)]
        with self.lock:
            self.calls += 1
            if self.calls == 1:
                self._set(model, hf.CALL, self._call)
        try:
            for calls in stacks:
                calls.append(call)
            with hf.late_stop_checks(partial(ahead, call)):
                yield
        finally:
            forward.abandon(model)  # before anything reads the counts of its cache
            for calls, depth in zip(stacks, depths, strict=True):
                del calls[depth:]
            with self.lock:
                self.calls -= 1
                if not self.calls:
                    self._unset(model, hf.CALL)

    def after(self, call: Call, began: float) -> None:
        """Capture what the next messages need, unless another thread, or an outer call of this one, would wait for that."""
        if call.forwards is not None and len(running.calls) == 1:
            with self.lock:
                capture_wanted(call.forwards, began, alone=self.calls == 1)

    def _begin(
        self,
        model: hf.PreTrainedModel,
        generation_config: hf.GenerationConfig,
        model_kwargs: dict[str, Any],
        limit: int,
        assisted: bool,
    ) -> None:
        """Let the forwards of the current call run as graphs."""
        calls, refused = self._thread.calls, self._why_uncaptured(model, generation_config)
        if not calls or vars(model).get(hf.COMPILED) is not None:
            self.say(str(refused))
            return
        mask = model_kwargs.get("attention_mask")
        call = calls[-1]
        call.draws = bool(generation_config.do_sample) or model.training
        adds_ones = call.own_loop and self.is_stock(hf.FORWARD)
        unmasked, prompt = None, 0
        if mask is not None and mask.dim() == 2:
            prompt = mask.shape[1]
            # A mask of ones has no effect, and Transformers only adds ones. One check here saves one for every token.
            if adds_ones and bool((mask == 1).all()):
                unmasked = model_kwargs[hf.CACHE].storage
        chunked = generation_config.prefill_chunk_size is not None
        callers = [caller for caller in running.calls[-2:-1] if caller.assistant is model]
        call.forwards = Forwards(
            self.graphs,
            model,
            self.own(hf.CALL),
            self.say,
            refused=refused,
            unmasked=unmasked,
            prompt=prompt,
            chunked=chunked,
            adds_ones=adds_ones,
            stock=call.stock,
            whole=chunked or assisted or bool(callers) or not adds_ones,
            storage=model_kwargs[hf.CACHE].storage,
            outer=callers[0].forwards if callers else None,
            limit=limit,
        )

    def _why_uncaptured(self, model: hf.PreTrainedModel, generation_config: hf.GenerationConfig) -> str | None:
        """The reason why no step of a call can be captured, if it is known before the first one."""
        if not self._thread.calls:
            return "generate() of the class was called, not that of the model"
        if vars(model).get(hf.COMPILED) is not None:
            return "model.compile() was called"
        refused = graphs.why_no_graph(model.device)  # disable_compile concerns torch.compile, not decode graphs
        if generation_config.output_hidden_states or generation_config.output_attentions:
            refused = refused or "hidden states or attentions are requested"
        return refused or graphs.why_not_read(model)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """What model(...) calls. generate() passes arguments by name; a logits processor that runs the model may not."""
        if torch.compiler.is_compiling():  # which traces no bound method that is made on the way
            return getattr(torch.nn.Module, hf.CALL)(self.model, *args, **kwargs)
        calls = self._thread.calls
        if calls:
            self.ranks.count()
        if calls and not args and (forwards := calls[-1].forwards) is not None:
            return forwards(**kwargs)
        return self.own(hf.CALL)(*args, **kwargs)
