"""patch(): attention, cache and decode graph of one model, in one call that can be undone."""

from __future__ import annotations

import copy
import inspect
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from .. import hf, registry
from ..caches import PreallocatedCache, RollingCache, forward
from ..caches.layers import round_up
from ..caches.pool import Pool
from ..caches.ring import Ring
from ..caches.storage import StaticStorage
from ..caches.stored import StoredCache
from ..streaming import Settings, examine, forget, refresh
from . import fuse as fusion
from . import graph as graphs
from .preflight import check_model, find_model, which_cache, which_settings, which_windows
from .survey import MARK as _MARK

_METHODS = {
    "_prepare_cache_for_generation": "_prepare_cache",
    "_valid_auto_compile_criteria": "_wants_graph",
    "get_compiled_call": "_compiled_call",
    "prepare_inputs_for_generation": None,  # _KeptInputs
}


@dataclass(frozen=True)
class Change:
    """One thing that patch() changed: what, how often, from what, to what."""

    what: str
    count: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.what}: {self.before} -> {self.after} ({self.count})"


def patch(
    target,
    backend: str = "lean",
    *,
    cache: str | None = "auto",
    graph: bool = True,
    fuse: bool = True,
    window: int | None = None,
    sinks: int | None = None,
    clamp_positions: bool = False,
) -> Patch:
    """Make plain generate() of one model run `backend`, on a cache of ours, with one CUDA graph per decode step.

    target: a model, a text-generation pipeline or a PEFT model. cache: "static" keeps everything, in preallocated buffers;
    "rolling" what "streaming" sees, in constant memory; "auto" is the one that fits the backend; None leaves the choice to
    Transformers. graph=False runs every step uncaptured. fuse=True replaces, on GPUs and with the model's roundings: RMSNorm (one
    launch instead of six), the rotation of queries and keys (one instead of ten), the MLP's product (in place), and, in decode
    graphs of one row in 16 bits, cuBLAS in linear layers. fuse=False replaces none of these.

    window, sinks: for "streaming", the last and the first tokens that every query sees (sinks: 4 where None). clamp_positions:
    for models with learned positions (OPT), gives every token beyond the last position the last position (an approximation).

    Returns a Patch: print it for what changed, use it in a `with` block or call its undo() to take everything back. Only this
    instance changes; a deepcopy of it is patched too, on its own.

    Raises ValueError or TypeError, in a sentence, for a model that cannot run this, and then changes nothing.
    """
    model = find_model(target)
    if _MARK in vars(model):
        raise ValueError(f"This {type(model).__name__} is patched already; call hf_fastattn.unpatch() on it first.")
    chosen = registry.get(backend)
    cache = which_cache(cache, chosen, graph)
    check_model(model, chosen)
    streaming = which_settings(model, chosen, window, sinks, clamp_positions)
    if streaming is not None:
        _check_width(model, chosen, streaming)
    try:
        windows = None if cache is None else which_windows(model)
    except ValueError as error:
        raise ValueError(f"{error}{_remedy(model, chosen, streaming)}") from None
    return Patch(model, backend, windows, graph, fuse, streaming)


def _check_width(model, chosen: registry.Backend, asked: Settings) -> None:
    """Raise ValueError where the model's own windows hide what streaming would show."""
    own = min((w for w in hf.layer_windows(model.config) if w is not None), default=None)
    if own is None or asked.sinks + asked.window <= own:
        return
    says = (
        f"{type(model).__name__} has a sliding window of its own, {own} tokens, and {asked.sinks} sinks and a window of "
        f"{asked.window} would show it more."
    )
    if own <= asked.sinks:
        raise ValueError(f"{says} Use another backend.")
    narrower = replace(asked, window=own - asked.sinks)
    if error := _tried(model, chosen, RollingCache, narrower):
        raise ValueError(f"{says} A narrower one does not run either: {error}")
    raise ValueError(f"{says} Ask for a window of at most {narrower.window}.")


def _remedy(model, chosen: registry.Backend, streaming: Settings | None) -> str:
    """Another way to patch a model that no cache of ours fits; nothing where that fails too."""
    if _tried(model, chosen, None, streaming):
        return ""
    return f" hf_fastattn.patch(model, {chosen.name!r}, cache=None, graph=False) leaves Transformers' own cache in place."


def _tried(model, chosen: registry.Backend, cache_type: type | None, streaming: Settings | None) -> Exception | None:
    """A few tokens read under a patch, which is what a sentence is about to recommend: the error, if there is one."""
    try:
        windows = None if cache_type is None else which_windows(model)
        with warnings.catch_warnings(), torch.no_grad(), Patch(model, chosen.name, windows, False, False, streaming):
            warnings.simplefilter("ignore")
            ids = torch.ones(1, 4, dtype=torch.int64, device=model.device)  # and a mask, as generate() brings one
            cache = cache_type and cache_type(model)
            cache = model(input_ids=ids[:, :3], attention_mask=ids[:, :3], past_key_values=cache).past_key_values
            model(input_ids=ids[:, :1], attention_mask=ids, past_key_values=cache)
    except Exception as error:  # whatever it is, this is no remedy
        return error
    return None


def unpatch(target) -> None:
    """Undo patch() on this model, pipeline or PEFT model. Raises ValueError if it is not patched."""
    model = find_model(target)
    if _MARK not in vars(model):
        raise ValueError(f"This {type(model).__name__} is not patched; there is nothing to undo.")
    vars(model)[_MARK].undo()


class Patch:
    """What patch() did to one model. Print it; leave its `with` block, or call undo(), to take it back.

    changes: a Change for each thing changed. captures, replays, uncaptured: decode steps of each kind so far.
    reasons: why steps ran uncaptured, each said once as a warning when it first happened.
    """

    def __init__(
        self, model, backend: str, windows: list[int | None] | None, graph: bool, fuse: bool, streaming: Settings | None
    ):
        self._begin(model, backend, windows, graph, streaming)
        try:
            self._apply(model, fuse)
        except BaseException:
            self.undo()
            raise

    def _begin(self, model, backend: str, windows: list[int | None] | None, graph: bool, streaming: Settings | None) -> None:
        self._model = weakref.ref(model, self._dropper())
        self.backend = backend
        self.graph = graph
        self._windows = windows
        self._streaming = streaming
        self._pool = self._make_pool()
        self.changes: list[Change] = []
        self.reasons: list[str] = []
        self.undone = False
        self._graphs = graphs.DecodeGraphs()
        self._local = threading.local()
        self._methods: dict[str, object] = {}  # name: what the instance had of its own, or _MARK for nothing
        self._configs: list[tuple] = []  # (weak reference to a module, attribute, its config, our copy)
        self._before: dict[int, tuple] = {}  # id of our copy: its original, itself, its attributes when made
        self._fused: list[weakref.ref] = []

    def _dropper(self) -> Callable:
        """A callback that drops graphs and idle buffers when the model is deleted before this Patch."""
        this = weakref.ref(self)

        def drop(_) -> None:
            if (patch := this()) is not None:
                patch._drop()

        return drop

    def _drop(self) -> None:
        self._graphs.close()
        if self._pool is not None:
            self._pool.close()

    def _make_pool(self) -> Pool | None:
        windows, streaming = self._windows, self._streaming
        if windows is None:
            return None
        if streaming is None:
            return Pool(lambda tokens: StaticStorage(windows, round_up(tokens)), PreallocatedCache.around)
        return Pool(lambda tokens: Ring(len(windows), streaming), RollingCache.around)

    def _refit(self, model) -> None:
        """Make caches for the layers that the model has now: someone may have edited them, or its configuration."""
        windows = hf.layer_windows(model.config)
        streaming = None if self._streaming is None else Settings.of(model.config.get_text_config(decoder=True))
        if streaming is None and self._streaming is None and windows == self._windows[: len(windows)]:
            return  # the first layers alone, as for an early exit, leave those behind them empty
        if (windows, streaming) != (self._windows, self._streaming):
            self._pool.close()
            self._windows, self._streaming = windows, streaming
            self._pool = self._make_pool()

    def _apply(self, model, fuse: bool) -> None:
        before = model.config._attn_implementation
        self._own_configs(model)
        if self._streaming is None:
            hf.set_attention(model, self.backend)
        else:
            hf.set_text_attention(model, self.backend)
            examine(model)
        forward.follow(model)
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self.changes.append(Change("attention of layers", layers, before, self.backend))
        vars(model)[_MARK] = self
        if fuse:
            self._fuse(fusion.find(model))
        if self._pool is None:
            return
        for name, ours in _METHODS.items():
            self._methods[name] = vars(model).get(name, _MARK)
            vars(model)[name] = _KeptInputs(self) if ours is None else getattr(self, ours)
        self.changes.append(Change("methods of generate()", len(_METHODS), type(model).__name__, "this instance's own"))
        kept = model.generation_config.cache_implementation or "dynamic"
        self.changes.append(Change("cache of layers", len(self._windows), kept, self._cache_in_words()))
        if self._streaming is not None:
            self.changes.append(Change("forward pre-hook", 1, "none", "tells the cache of padding"))
        if self.graph and not graphs.why_no_graph(model.device):
            self.changes.append(Change("decode step", 1, "launched from Python", "one CUDA graph"))

    def _fuse(self, found: fusion.Fusible) -> None:
        if not self.graph:  # linear layers change in decode graphs alone
            found = found._replace(linears=[])
        self._fused = [weakref.ref(module) for modules in found for module in modules]
        fusion.fuse(found)
        for what, modules, before, after in (
            ("RMSNorm", found.norms, "six launches", "one"),
            ("rotation of queries and keys", found.layers, "ten launches", "one"),
            ("product in the MLP", found.mlps, "a third tensor", "in place"),
            ("linear layers, in decode graphs of one row", found.linears, "cuBLAS", "one launch of ours"),
        ):
            if modules:
                self.changes.append(Change(what, len(modules), before, after))

    @property
    def _cache_type(self) -> type:
        return PreallocatedCache if self._streaming is None else RollingCache

    def _takes(self, cache) -> bool:
        """Whether steps over this cache are captured: one of ours, or another over a storage (`caches.contract`)."""
        if self._streaming is not None:
            return isinstance(cache, RollingCache)
        return isinstance(cache, StoredCache) and not cache.streams

    def _cache_in_words(self) -> str:
        if self._streaming is None:
            return "static, preallocated"
        return f"rolling, {self._streaming.sinks} sinks and a window of {self._streaming.window}"

    def _own_configs(self, model) -> None:
        """Give the model a configuration of its own: models made from one configuration object share it, attention included."""
        memo: dict = {}
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, hf.PreTrainedConfig):
                    own = copy.deepcopy(value, memo)
                    self._configs.append((weakref.ref(module), name, value, own))
        if self._streaming is not None:
            self._streaming.write(memo.get(id(model.config.get_text_config(decoder=True)), model.config))
        for module, name, value, own in self._configs:
            for theirs, ours in _pairs(value, own):
                self._before.setdefault(id(ours), (theirs, ours, _plain(ours)))
            vars(module())[name] = own

    def _restore_configs(self, model) -> None:
        """Give the modules their configurations back. What was set on ours meanwhile, other than by us, is set on them."""
        for module, name, value, own in self._configs:
            if module() is not None and vars(module()).get(name) is own:
                vars(module())[name] = value
        for module in model.modules():  # one that came meanwhile may have ours from another
            for name, value in list(vars(module).items()):
                if id(value) in self._before:
                    vars(module)[name] = self._before[id(value)][0]
        for theirs, ours, before in self._before.values():
            now = _plain(ours)
            for key in before.keys() | now.keys():
                if key not in now:
                    vars(theirs).pop(key, None)
                elif (key not in before or before[key] != now[key]) and key != "_attn_implementation_internal":
                    vars(theirs)[key] = now[key]
        self._configs.clear()
        self._before.clear()

    def undo(self) -> None:
        """Take back every change. Raises ValueError the second time."""
        if self.undone:
            raise ValueError("This patch is undone already; call hf_fastattn.patch() to patch the model again.")
        self.undone = True
        model = self._model()
        with self._graphs.lock:  # another thread may be in the middle of a step
            self._drop()
            if model is not None:
                self._take_back(model)

    def _take_back(self, model) -> None:
        forward.unfollow(model)
        forget(model)
        fusion.restore([*(module() for module in self._fused if module() is not None), *model.modules()])
        for name, had in self._methods.items():
            if getattr(vars(model).get(name), "__self__", None) is not self:
                continue  # replaced by someone else since; theirs to take back
            if had is _MARK:
                del vars(model)[name]
            else:
                vars(model)[name] = had
        self._restore_configs(model)
        vars(model).pop(_MARK, None)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *error) -> None:
        if not self.undone:
            self.undo()

    def __deepcopy__(self, memo):
        model = memo.get(id(self._model()))
        if model is None:
            raise TypeError("A Patch cannot be copied by itself; copy the model it belongs to.")
        twin = memo[id(self)] = Patch.__new__(Patch)
        twin._begin(model, self.backend, self._windows, self.graph, self._streaming)
        twin.changes = list(self.changes)
        twin.undone = self.undone
        twin._methods = dict(self._methods)
        twin._configs = [
            (weakref.ref(copy.deepcopy(module(), memo)), name, copy.deepcopy(value, memo), copy.deepcopy(own, memo))
            for module, name, value, own in self._configs
            if module() is not None
        ]
        twin._before = {}
        for theirs, ours, before in self._before.values():
            ours = copy.deepcopy(ours, memo)
            twin._before[id(ours)] = (copy.deepcopy(theirs, memo), ours, copy.deepcopy(before))
        twin._fused = [weakref.ref(copy.deepcopy(module(), memo)) for module in self._fused if module() is not None]
        return twin

    def __reduce__(self):
        raise TypeError("A patched model cannot be pickled; call hf_fastattn.unpatch() on it first.")

    def __len__(self) -> int:
        return len(self.changes)

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        model = self._model()
        lines = [f"{type(model).__name__ if model is not None else 'A model that is gone'}: {len(self)} changes"]
        lines += [f"  {change}" for change in self.changes]
        if self.undone:
            lines[0] += ", undone"
        elif model is not None:
            if (now := model.config._attn_implementation) != self.backend:
                lines.append(f"  set_attn_implementation() has changed attention since: {self.backend} -> {now}")
            if self.graph and (reason := graphs.why_no_graph(model.device)):
                lines.append(f"  decode graph: off, as {reason}")
        if self.captures or self.uncaptured:
            lines.append(
                f"  decode steps: {self.replays} replayed, {self.captures} graphs captured, {self.uncaptured} uncaptured"
            )
        lines += [f"  ran uncaptured: {reason}" for reason in self.reasons]
        return "\n".join(lines)

    __repr__ = __str__

    captures = property(lambda self: self._graphs.captures)
    replays = property(lambda self: self._graphs.replays)
    uncaptured = property(lambda self: self._graphs.uncaptured)

    def _say(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
            warnings.warn(f"{type(self._model()).__name__}.generate() runs uncaptured: {reason}.", stacklevel=3)

    # The three methods that stand on the instance.

    def _prepare_cache(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length):
        model = self._model()
        self._refit(model)
        forward.abandon(model)
        if forward.streams(model):
            refresh(model)  # before a graph's fingerprint is taken
        stock = type(model)._prepare_cache_for_generation
        given = model_kwargs.get("past_key_values")
        asked = generation_config.cache_implementation
        if asked == model.generation_config.cache_implementation:
            asked = None  # the checkpoint's default; this call did not ask for it
        if generation_config.compile_config is not None:
            if self._takes(given):
                raise ValueError(
                    f"compile_config asks for Transformers' torch.compile, which cannot trace a {type(given).__name__}; "
                    "pass one of the two, or leave out both to replay decode graphs."
                )
            if given is None and asked is None:
                asked = generation_config.cache_implementation = "static"
        if given is not None or asked is not None or generation_config.use_cache is False:
            stock(model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if self._takes(given):
            layers = len(hf.layer_windows(model.config))
            if len(given.layers) not in (layers, len(self._windows)):
                raise ValueError(
                    f"This cache holds {len(given.layers)} layers, and {type(model).__name__} has {layers}: "
                    "it belongs to another model."
                )
            given.check_rows(rows)
            seen = given.get_seq_length()
            covered = _covered(model_kwargs, seen)
            if seen and covered is not None and covered <= seen:
                raise ValueError(
                    f"past_key_values holds {seen} tokens, and this call covers {covered}. Pass the whole text, or with "
                    "new ids alone the attention_mask of the whole text, or their position_ids: at least one token more."
                )
            # Given only the new ids, the call counts from them.
            given.reserve(max_cache_length if max_cache_length > seen else seen + max_cache_length)
        elif given is not None:
            self._say(f"past_key_values is a {type(given).__name__}, not a {self._cache_type.__name__}")
        elif asked is not None:
            self._say(f"cache_implementation={asked!r} was asked for")
        elif generation_config.use_cache is False:
            self._say("use_cache=False was asked for")
        else:
            given = model_kwargs["past_key_values"] = self._pool.take(rows, max_cache_length)
        mode = str(getattr(generation_mode, "value", generation_mode))
        if self._takes(given):
            given.vet(model_kwargs.get("attention_mask"), given.get_seq_length() + max_cache_length, "assisted" in mode)
        if self.graph and mode not in ("greedy_search", "sample"):
            self._say(f"{mode} calls the model directly")

    def _wants_graph(self, model_kwargs, generation_config) -> bool:
        model = self._model()
        self._local.step = None
        if not self._takes(model_kwargs.get("past_key_values")):
            return type(model)._valid_auto_compile_criteria(model, model_kwargs, generation_config)
        if not self.graph:
            return False
        # disable_compile is about torch.compile, which this is not.
        refused = graphs.why_no_graph(model.device)
        if generation_config.output_hidden_states or generation_config.output_attentions:
            refused = refused or "hidden states or attentions are asked for"
        if (name := model.config._attn_implementation) not in registry.names():
            refused = refused or f"attn_implementation is {name!r}, which cannot read a length from the device"
        mask = model_kwargs.get("attention_mask")
        ones, prompt = False, 0
        if mask is not None and mask.dim() == 2:
            # A mask of ones says nothing, and generate() only ever adds ones: one look at it now saves one per token.
            ones, prompt = bool((mask == 1).all()), mask.shape[1]
        # And not the step itself, by which the model would hold itself.
        chunked = generation_config.prefill_chunk_size is not None
        self._local.step = {"refused": refused, "ignore_mask": ones, "prompt": prompt, "chunked": chunked}
        return True

    def _compiled_call(self, compile_config):
        model = self._model()
        step = getattr(self._local, "step", None)
        self._local.step = None
        if step is None:
            return type(model).get_compiled_call(model, compile_config)
        return graphs.DecodeStep(self._graphs, model, self._say, **step)


def _covered(model_kwargs: dict, seen: int) -> int | None:
    """How many tokens a call covers, those in the cache included, as far as its mask or its positions tell.

    Transformers drops a mask of ones. The positions that it makes from one are as many and begin with 0; those of new ids alone,
    which only a caller gives, begin later.
    """
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return mask.shape[1]
    if mask is None and isinstance(positions, torch.Tensor) and positions.dim() > 1:
        width = positions.shape[-1]
        return seen + width if width <= seen and bool((positions[..., 0] > 0).any()) else width
    return None


def _pairs(theirs, ours) -> Iterator[tuple]:
    """A configuration and our copy of it, and so on for those in it."""
    yield theirs, ours
    for name, value in vars(theirs).items():
        if isinstance(value, hf.PreTrainedConfig):
            yield from _pairs(value, vars(ours)[name])


def _plain(config) -> dict:
    """A copy of a configuration's attributes, but for other configurations."""
    return copy.deepcopy({name: v for name, v in vars(config).items() if not isinstance(v, hf.PreTrainedConfig)})


class _KeptInputs:
    """A model's own prepare_inputs_for_generation(), but for a cache that it drops so that the text is read anew (Phi-3, where
    frequencies change with the length): that one is emptied and kept."""

    def __init__(self, patch: Patch):
        self.__self__ = patch

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._own())

    def _own(self):
        model = self.__self__._model()
        had = self.__self__._methods.get("prepare_inputs_for_generation", _MARK)
        return types.MethodType(type(model).prepare_inputs_for_generation, model) if had is _MARK else had

    def __call__(self, *args, **kwargs):
        inputs = self._own()(*args, **kwargs)
        cache = kwargs.get("past_key_values")
        if self.__self__._takes(cache) and inputs.get("past_key_values") is None:
            cache.reset()
            inputs["past_key_values"] = cache
        return inputs
