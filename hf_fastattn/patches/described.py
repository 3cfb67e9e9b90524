"""Forwards of a small model whose tensors have no memory: every launch in them is described (`warm`)."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from .. import hf, registry
from ..attention import ragged
from ..batch import job
from ..caches import PreallocatedCache
from ..caches.buffers import Part
from ..caches.eight_bits import storage_of
from ..caches.layers import KEEP as KEPT
from ..caches.layers import SLACK, round_up
from ..caches.paged import BatchCache, PagedStorage, windows_of
from ..caches.storage import PreallocatedStorage
from ..kernels import eight_bits
from ..kernels.host import gpu
from ..kernels.spans import WORDS, num_words
from ..kernels.spec import KV
from .graphs.entry import KEEP, Entry
from .graphs.policy import several
from .patched import Patch

BEAMS = 8  # the most rows that beam search is expected to have


class Point(NamedTuple):
    """One forward. tokens: new ones of each row; past: those before. captured: for a graph. masked: with a mask.

    last: whether it returns only the logits of the last token. groups: of rows in pages that share their first tokens.
    """

    rows: int = 1
    tokens: int = 1
    past: int = 700
    captured: bool = False
    masked: bool = False
    last: bool = True
    groups: int = 0


class Template(NamedTuple):
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
            shape = (rows, 1, 2, WORDS + tokens) if packed else (rows, 1, 1, WORDS)
            ints = self.q.new_empty(shape, dtype=torch.int32)
            q = _like(self.q, {0: rows, 2: tokens})
            registry.get(self.backend).attend(q, self.kv._replace(pages=table), self.spec, ints, **self.options)
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


class Unknown(torch.overrides.TorchFunctionMode):
    """Within it a tensor without memory is False, as for models with linear layers, which ask whether a mask has no padding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return False
        return func(*args, **kwargs or {})


class Forwards:
    """Forwards of a model on the meta device."""

    def __init__(self, model: hf.PreTrainedModel, patch: Patch, kv_dtype: str | None):
        self.model, self.backend, self.kv_dtype = model, patch.backend, kv_dtype
        self.kinds = hf.layer_kinds(model.config)
        # Of one row, as the first prompt leaves them.
        self.kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.states: list[Part] = []

    def storage(self, tokens: int) -> PreallocatedStorage:
        return storage_of(self.kinds, round_up(tokens), self.kv_dtype)

    def __call__(self, point: Point) -> None:
        """One forward over a cache of `point.past` tokens."""
        model, total = self.model, point.past + point.tokens
        storage = self.storage(total)
        cache = PreallocatedCache.around(storage)
        ids = torch.empty(point.rows, point.tokens, dtype=torch.int64, device="meta")
        for layer in storage.counted if self.kv else ():
            layer.lazy_initialization(*(_like(x, {0: point.rows, 2: 0}) for x in self.kv[layer.index]))
            layer.seen, layer.base = point.past, point.past - layer.track.kept(point.past)
        for part in self.states if point.past else ():
            storage.layers[part.layer].put(part.name, _like(part.tensor, {0: point.rows}))
        state: Any = None  # which is compared in a generate() alone
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": ids, KEEP: int(point.last), hf.CACHE: cache}
        if point.masked:
            inputs["attention_mask"] = torch.empty(point.rows, total, dtype=torch.int64, device="meta")
        if point.captured:
            storage.sync(ids.device, *several(ids))
            Entry(cache, state, inputs, point.tokens).body(model, model.__call__, storage, None)()
        else:
            with Unknown():
                model(**inputs)
        if not self.kv:
            self.kv = {layer.index: (layer.keys, layer.values) for layer in storage.counted}
            self.states = [part for part in storage.memory() if part.slots is None]
        if 1 < point.rows <= BEAMS:
            cache.reorder_cache(ids[:, 0].int())  # as beam search does

    def attention(self, point: Point) -> list[Template]:
        """The calls of attention of a forward, one for each kind of layer."""
        gpu.thread.calls = []
        try:
            self(point)
            calls = gpu.thread.calls
        finally:
            gpu.thread.calls = None
        kinds = self.kinds if len(calls) == len(self.kinds) else [kind for kind in self.kinds if kind.has_kv]
        by_window: dict[int | None, Template] = {}
        for (q, kv, spec, spans, options), kind in zip(calls, kinds, strict=False):
            if not kind.has_kv:  # it reads K and V of an earlier layer
                continue
            by_window[kind.window] = Template(
                self.backend, q, kv, spec, spans, options, point.captured, kind.window, self.kv_dtype
            )
        return [*by_window.values()]


class Batches(Forwards):
    """Forwards of generate_batch(): of prompts in one row, which follow cached tokens if `past` is not 0, and steps of rows."""

    def __init__(self, model: hf.PreTrainedModel, patch: Patch, size: int):
        super().__init__(model, patch, None)
        self.size = size

    def __call__(self, point: Point) -> None:
        model, device, rows, tokens = self.model, torch.device("meta"), point.rows, point.tokens
        windows = [kind.window for kind in self.kinds]
        pages = [2 for _ in windows_of(windows)]
        storage = PagedStorage(windows, pages, self.size, rows, -(-(point.past + tokens) // self.size), device)
        for layer, shape in zip(storage.layers, hf.layer_shapes(model.config), strict=True):
            sizes = ((1, shape.num_kv_heads, 0, width) for width in (shape.head_dim, shape.value_dim))
            layer.lazy_initialization(*(torch.empty(size, dtype=model.dtype, device=device) for size in sizes))
        cache, storage.bucket = BatchCache.around(storage), rows
        storage.sharing, storage.counted = job.most_members(model) if point.groups else 0, point.groups
        ids = torch.empty(rows, tokens, dtype=torch.int64, device=device)
        state: Any = None  # which is compared in a generate_batch() alone
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": ids, KEEP: 1, hf.CACHE: cache}
        if tokens > 1 or not point.past:
            kv_len = storage.width * self.size if point.past else tokens
            build = partial(ragged.of_prompts, ids[0], ids[0], kv_len)
            ends = ids[:, :1] if point.past else None
            storage.prompts = ragged.Ragged((1, tokens, kv_len), build, storage.tables[:, :1], ids, ends)
        if point.captured:
            Entry(cache, state, inputs).body(model, model.__call__, storage, None)()
        else:
            model(**inputs)
