"""The kernels that a patched model launches in its life, before it runs.

A copy of the model with as many layers as there are kinds of them, whose tensors have no memory, runs a few forwards, in which
every launch is described (`kernels.ahead`). Attention then runs alone, over tensors of other numbers of rows and tokens: these
select its kernels in more ways than those of other operations.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import hf, registry
from ..attention import ragged
from ..batch import job
from ..batch.loop import BUCKETS
from ..caches import PreallocatedCache
from ..caches.eight_bits import storage_of
from ..caches.layers import KEEP as KEPT
from ..caches.layers import SLACK, round_up
from ..caches.paged import BatchCache, PagedStorage, windows_of
from ..caches.pages import SIZES
from ..kernels import eight_bits
from ..kernels.ahead.describe import Kernel, describing
from ..kernels.host import gpu
from ..kernels.spans import WORDS, num_words
from ..kernels.spec import KV
from .graphs.entry import KEEP, Entry
from .graphs.policy import launch_bound, several
from .graphs.state import MARK
from .patched import LONGEST as LONGEST
from .patched import ROWS as ROWS
from .patched import Patch

BEAMS = 8  # the most rows that beam search is expected to have
# Numbers of tokens: before those of a forward, in a prompt, in a graph of several tokens, and in one whose logits are all used.
DEPTHS = (100, 300, 700, 1500, 3000, 6000, 12_000, 24_000, 60_000)
PROMPTS = (5, 10, 16, 24, 40, 64, 100, 128, 180, 300, 600, 1200, 2500, 5000, 10_000, 20_000)
SEVERAL = (2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 512, 1024, 2048)
DRAFTS = (2, 4, 8, 16)


class Recipe(NamedTuple):
    """What decides which kernels a model launches. dtypes: of its parameters. most: tokens of all rows in a graph.

    page: tokens of a page for those of generate_batch(), 0 for those of generate(). kv_dtype: of K and V in 8 bits."""

    cls: type[hf.PreTrainedModel]
    config: hf.PreTrainedConfig
    dtype: torch.dtype
    dtypes: dict[str, torch.dtype]
    backend: str
    graph: bool
    fuse: bool
    most: int
    target: gpu.Target
    page: int = 0
    kv_dtype: str | None = None

    @classmethod
    def of(
        cls,
        model: hf.PreTrainedModel,
        backend: str | None = None,
        target: tuple[int, int] | None = None,
        batch: bool | int = False,
    ) -> Recipe:
        """That of a model; arguments as in `kernels_of`."""
        if target is None:
            if not gpu.on_gpu(model.device):
                raise ValueError(
                    f"The kernels of a model on {model.device} depend on the GPU that will run it. Pass target=(90, 132), for "
                    "example: its compute capability and its number of multiprocessors."
                )
            target = gpu.Target(gpu.arch(model.device), gpu.num_sms(model.device))
        target = gpu.Target(*target)
        patch: Patch | None = vars(model).get(MARK)
        had: dict[str, Any] = {"backend": "lean", "graph": True, "fuse": True} if patch is None else patch.arguments
        backend = backend or had["backend"]
        if registry.get(backend).streaming or had.get("cache", "preallocated") != "preallocated" or hf.num_ranks(model) > 1:
            raise ValueError(
                "The kernels of a model are known ahead with a preallocated cache and on one rank. Those of another are compiled "
                "at their first launch; leave this call out."
            )
        hf.refuse_states(model.config, "Kernels are known ahead for models with", "Leave this call out.")
        page = job.SIZE if batch is True else int(batch)
        if page and page not in SIZES:
            raise ValueError(f"batch must be True or the tokens of a page, one of {SIZES}; got {batch!r}.")
        others = job.why_not_backend(backend)
        if page and (reason := job.why_not(model, hf.layer_kinds(model.config), others)) is not None:
            raise ValueError(f"generate_batch() cannot run this {type(model).__name__}: {reason}. Leave batch out.")
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        most, config, kv_dtype = launch_bound(model, target.arch), copy.deepcopy(model.config), had.get("kv_dtype")
        return cls(type(model), config, model.dtype, dtypes, backend, had["graph"], had["fuse"], most, target, page, kv_dtype)

    def small(self) -> hf.PreTrainedModel:
        """A model of the same widths and dtypes, with as few layers as have all kinds, on the meta device."""
        config = copy.deepcopy(self.config)
        text = config.get_text_config(decoder=True)
        kinds = [*hf.layer_kinds(config)]
        # A model with dense and sparse layers (DeepSeek) has the dense ones first.
        dense = getattr(text, "first_k_dense_replace", None) or 0
        text.num_hidden_layers = min(max(2, 1 + max(kinds.index(kind) for kind in kinds), dense + 1), len(kinds))
        for name in ("layer_types", "mlp_layer_types"):
            if isinstance(each := getattr(text, name, None), list):
                setattr(text, name, each[: text.num_hidden_layers])
        config._attn_implementation = "eager"
        with torch.device("meta"):
            made: hf.PreTrainedModel = self.cls(config).eval()
        for name, parameter in made.named_parameters():
            parameter.data = parameter.data.to(self.dtypes.get(name, self.dtype))
        return made


def kernels_of(
    model: hf.PreTrainedModel,
    rows: Iterable[int] | None = None,
    *,
    tokens: int = LONGEST,
    backend: str | None = None,
    target: tuple[int, int] | None = None,
    batch: bool | int = False,
) -> list[Kernel]:
    """The kernels that a model launches in inference with patch(): those of a first call, of a second one, then the others;
    of each, the slowest first.

    rows: of its calls; None for 1 to 64. tokens: the longest text. backend: for a model that is not patched; "lean" if None.
    target: (compute capability, number of multiprocessors) of the GPU, as (90, 132), which this process need not have; None for
    that of the model. batch: True or the number of tokens of a page for those of generate_batch() instead, the slowest first,
    with all numbers of rows up to the largest of `rows`, by default 256. The model may be on the meta device: its weights are not
    read.
    Raises ValueError for a model whose kernels are not known ahead: with a rolling cache or with Transformers' own, or on several
    ranks.
    """
    return listed(Recipe.of(model, backend, target, batch), rows, tokens)


def listed(
    recipe: Recipe, rows: Iterable[int] | None = None, tokens: int = LONGEST, stop: Callable[[], None] | None = None
) -> list[Kernel]:
    """`kernels_of` a recipe, from any thread. stop: called now and then; what it raises ends the work."""
    if recipe.page:
        return _of_batches(recipe, max(rows or [job.MOST_ROWS]), tokens, stop)
    rows = sorted(set(rows or ROWS))
    one, depths, graph = rows[:1] if rows[0] == 1 else [], [depth for depth in DEPTHS if depth < tokens], recipe.graph
    prompts = [length for length in PROMPTS if length <= tokens]
    between = sorted({*rows, *(count * part // 4 for count in rows[:-1] for part in (5, 6))})  # other batches up to the largest
    with describing(recipe.target, stop) as found, torch.no_grad():
        model = recipe.small()
        patch = Patch(model, recipe.backend, hf.layer_kinds(model.config), graph, recipe.fuse, None)
        run = _Forwards(model, patch, recipe.kv_dtype)
        ends = [0]
        prompt = _Point(tokens=100, past=0)
        first = prompt, prompt._replace(masked=True), _Point(past=100, captured=graph)
        for points in (first, [_Point(tokens=128, past=0, captured=graph)]):  # of the first call; of a second one
            for point in points:
                run(point)
            if recipe.fuse:
                scores = torch.empty(1, model.get_output_embeddings().weight.shape[0], device="meta")
                from ..kernels.decode.sample import Sampler, Settings  # with Triton

                Sampler()(scores, Settings())
            ends.append(len(found))
        # Point of a forward; the rows, the tokens before and the tokens with which its attention runs again.
        cases: list[tuple[_Point, list[int], list[int], Iterable[int]]] = []
        for masked in (False, True):
            cases.append((_Point(masked=masked, captured=graph), between[masked:], depths, (1,)))
            cases.append((_Point(tokens=100, past=0, masked=masked), rows, [0], prompts))
        cases.append((_Point(tokens=100, masked=True), one, depths, prompts))
        if graph:
            cases.append((_Point(tokens=16, captured=True), one, [0, *depths], SEVERAL))
        for point, counts, depths_of, lengths in cases:
            most = recipe.most if point.captured else LONGEST
            for template in run.attention(point):
                for count, past, length in itertools.product(counts, depths_of, lengths):
                    if count * length <= most:
                        template.attend(count, past, length)
                if not (point.past or point.masked) and registry.get(recipe.backend).packed:
                    for length in prompts[5:]:
                        template.attend(1, 0, length, packed=True)
        windows = [kind.window for kind in hf.layer_kinds(model.config) if kind.window is not None and kind.window < tokens]
        few = [length for length in prompts if length <= 64]  # which fused experts may serve
        points = [_Point(tokens=length, past=0) for length in (*few, *(window + 1 for window in windows))]
        points += [_Point(count, captured=graph) for count in rows]
        if graph:
            points += [_Point(tokens=length, captured=True) for length in SEVERAL if length <= min(256, recipe.most)]
            points += [_Point(tokens=length, captured=True, last=False) for length in DRAFTS]
        for point in points:
            run(point)
    return _slowest_first([*found.values()], ends)


def _slowest_first(kernels: list[Kernel], begins: list[int]) -> list[Kernel]:
    """The kernels of each part, which begin at these places, with its slowest ones first."""
    parts = (kernels[begin:end] for begin, end in itertools.pairwise([*begins, len(kernels)]))
    return [kernel for part in parts for kernel in sorted(part, key=lambda each: -each.seconds)]


def _of_batches(recipe: Recipe, most: int, tokens: int, stop: Callable[[], None] | None) -> list[Kernel]:
    """The kernels of generate_batch() with up to `most` rows: those of rows that each read their own keys, then the others."""
    depths, lengths = [depth for depth in DEPTHS if depth < tokens], [n for n in (1, 2, *PROMPTS) if n <= min(tokens, job.BUDGET)]
    buckets = [size for i, size in enumerate(BUCKETS) if not i or BUCKETS[i - 1] < most]
    with describing(recipe.target, stop) as found, torch.no_grad():
        model = recipe.small()
        patch = Patch(model, recipe.backend, hf.layer_kinds(model.config), recipe.graph, recipe.fuse, None)
        run = _Batches(model, patch, recipe.page)
        for past in (0, 300):
            for template in run.attention(_Point(tokens=100, past=past)):
                for length, depth in itertools.product(lengths, depths if past else [0]):
                    template.attend(1, depth, length, packed=True)
        for length in lengths:
            run(_Point(tokens=length, past=0))
        for rows in buckets:
            for template in run.attention(_Point(rows, captured=recipe.graph)):
                for depth in depths:
                    template.attend(rows, depth, 1)
        alone = len(found)
        for rows, depth in itertools.product((size for size in buckets if size >= 4), depths[-1::-3]):
            run(_Point(rows, past=depth, captured=recipe.graph, shared=True))
    return _slowest_first([*found.values()], [0, alone])


class _Point(NamedTuple):
    """One forward. tokens: new ones of each row; past: those before. captured: for a graph. masked: with a mask.

    last: whether it returns only the logits of the last token. shared: whether rows in pages share their first tokens.
    """

    rows: int = 1
    tokens: int = 1
    past: int = 700
    captured: bool = False
    masked: bool = False
    last: bool = True
    shared: bool = False


class _Template(NamedTuple):
    """One call of attention. window: of its layer. kv_dtype: of K and V behind a past."""

    backend: str
    q: torch.Tensor
    kv: KV
    spec: Any
    spans: torch.Tensor | None
    options: dict[str, Any]
    captured: bool
    window: int | None
    kv_dtype: str | None

    def attend(self, rows: int, past: int, tokens: int, packed: bool = False) -> None:
        """The same call with other numbers of rows and tokens. packed: of prompts that are read as one row."""
        if self.kv.pages is not None:
            table = self.kv.pages.new_empty(rows, -(-(past + tokens) // self.kv.k.shape[2]))
            ints = self.q.new_empty(rows, 1, 1, WORDS, dtype=torch.int32)
            registry.get(self.backend).attend(
                _like(self.q, {0: rows}), self.kv._replace(pages=table), self.spec, ints, **self.options
            )
            return
        limit, seen = 1 << 62, past
        if self.window is not None and not (packed and past):
            limit, seen = self.window - 1 + KEPT + SLACK, min(past, self.window - 1)
        capacity = min(round_up(past + tokens), limit)
        kv_len = capacity if self.captured else seen + tokens
        q = _like(self.q, {0: rows, 2: tokens})
        k, v = (_like(x, {0: rows, 2: max(capacity, kv_len)}) for x in (self.kv.k, self.kv.v))
        kv = KV(k[:, :, :kv_len], v[:, :, :kv_len])
        if self.kv_dtype is not None and self.window is None and (past or self.captured):
            held, centre = eight_bits.empty(k, v), q.new_empty(rows, k.shape[1], k.shape[3])
            k, v, scales = (x[:, :, :kv_len] for x in held)
            kv = eight_bits.eight_bits(k, v, scales, centre, self.kv_dtype)
        spans, spec = self.spans, self.spec
        if spans is not None:
            words = num_words(kv_len) if spans.shape[3] > WORDS else 0
            spans = spans.new_empty(rows if words else 1, 1, 1, WORDS + words).expand(rows, -1, -1, -1)
        if packed:
            spans, spec = q.new_empty(1, 1, 2, WORDS + tokens, dtype=torch.int32), spec._replace(causal=False)
        if self.kv.form.bias is not None:
            bias: Any = self.kv.scales
            from ..kernels.biased import BIASED, biased

            kv = biased(kv, _like(bias, {0: rows if self.kv.form is BIASED else 1, 2: kv_len}))
        registry.get(self.backend).attend(q, kv, spec, spans, **self.options)


def _like(x: torch.Tensor, sizes: dict[int, int]) -> torch.Tensor:
    """A tensor whose dimensions have the same order in memory, with some of other sizes."""
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    made = x.new_empty([sizes.get(dim, x.shape[dim]) for dim in order])
    return made.permute([order.index(dim) for dim in range(x.dim())])


class _Forwards:
    """Forwards of a model on the meta device."""

    def __init__(self, model: hf.PreTrainedModel, patch: Patch, kv_dtype: str | None):
        self.model, self.backend, self.kv_dtype = model, patch.backend, kv_dtype
        self.kinds = hf.layer_kinds(model.config)

    def __call__(self, point: _Point) -> None:
        """One forward over a cache of `point.past` tokens."""
        model, total = self.model, point.past + point.tokens
        storage = storage_of(self.kinds, round_up(total), self.kv_dtype)
        cache = PreallocatedCache.around(storage)
        ids = torch.empty(point.rows, point.tokens, dtype=torch.int64, device="meta")
        for layer, shape in zip(storage.layers, hf.layer_shapes(model.config), strict=True):
            sizes = ((point.rows, shape.num_kv_heads, 0, width) for width in (shape.head_dim, shape.value_dim))
            layer.lazy_initialization(*(torch.empty(size, dtype=model.dtype, device="meta") for size in sizes))
            layer.seen, layer.base = point.past, point.past - layer.track.kept(point.past)
        state: Any = None  # which is compared in a generate() alone
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": ids, KEEP: int(point.last), hf.CACHE: cache}
        if point.masked:
            inputs["attention_mask"] = torch.empty(point.rows, total, dtype=torch.int64, device="meta")
        if point.captured:
            storage.sync(ids.device, *several(ids))
            Entry(cache, state, inputs, point.tokens).body(model, model.__call__, storage, None)()
        else:
            model(**inputs)
        if 1 < point.rows <= BEAMS:
            cache.reorder_cache(ids[:, 0].int())  # as beam search does

    def attention(self, point: _Point) -> list[_Template]:
        """The calls of attention of a forward, one for each kind of layer."""
        gpu.thread.calls = []
        try:
            self(point)
            calls = gpu.thread.calls
        finally:
            gpu.thread.calls = None
        by_window: dict[int | None, _Template] = {}
        for (q, kv, spec, spans, options), kind in zip(calls, self.kinds, strict=False):
            by_window[kind.window] = _Template(
                self.backend, q, kv, spec, spans, options, point.captured, kind.window, self.kv_dtype
            )
        return [*by_window.values()]


class _Batches(_Forwards):
    """Forwards of generate_batch(): of prompts in one row, which follow cached tokens if `past` is not 0, and steps of rows."""

    def __init__(self, model: hf.PreTrainedModel, patch: Patch, size: int):
        super().__init__(model, patch, None)
        self.size = size

    def __call__(self, point: _Point) -> None:
        model, device, rows, tokens = self.model, torch.device("meta"), point.rows, point.tokens
        windows = [kind.window for kind in self.kinds]
        pages = [2 for _ in windows_of(windows)]
        storage = PagedStorage(windows, pages, self.size, rows, -(-(point.past + tokens) // self.size), device)
        for layer, shape in zip(storage.layers, hf.layer_shapes(model.config), strict=True):
            sizes = ((1, shape.num_kv_heads, 0, width) for width in (shape.head_dim, shape.value_dim))
            layer.lazy_initialization(*(torch.empty(size, dtype=model.dtype, device=device) for size in sizes))
        cache, storage.bucket = BatchCache.around(storage), rows
        storage.sharing = job.most_members(model) if point.shared else 0
        ids = torch.empty(rows, tokens, dtype=torch.int64, device=device)
        state: Any = None  # which is compared in a generate_batch() alone
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": ids, KEEP: 1, hf.CACHE: cache}
        if tokens > 1 or not point.past:
            kv_len, keys = point.past + tokens, None
            if point.past:
                keys = ids.new_empty(len(pages), kv_len), ids.new_empty(kv_len)
            build = partial(ragged.of_prompts, ids[0], ids[0], kv_len)
            storage.prompts = ragged.Ragged((1, tokens, kv_len), build, ids.expand(len(pages), -1), ids[0], keys)
        if point.captured:
            Entry(cache, state, inputs).body(model, model.__call__, storage, None)()
        else:
            model(**inputs)
