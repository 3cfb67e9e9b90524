"""The kernels that a patched model launches in its life, before it runs.

A copy of the model with as many layers as there are kinds of them, whose tensors have no memory, runs a few forwards, in which
every launch is described (`kernels.ahead`). Attention then runs alone, over tensors of other numbers of rows and tokens: these
select its kernels in more ways than those of other operations.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from .. import hf, registry
from ..batch import job
from ..batch.loop import BUCKETS
from ..caches.paged import COUNTS, counted
from ..kernels.ahead.describe import Kernel, describing
from ..kernels.host import gpu
from ..kernels.spec import PAGE_SIZES
from .described import Batches, Forwards, Point
from .graphs.policy import launch_bound
from .graphs.state import MARK
from .patched import LONGEST as LONGEST
from .patched import ROWS as ROWS
from .patched import Patch

# Numbers of tokens: before those of a forward, in a prompt, in a graph of several tokens, and in one whose logits are all used.
DEPTHS = (100, 300, 700, 1500, 3000, 6000, 12_000, 24_000, 60_000)
PROMPTS = (5, 10, 16, 24, 40, 64, 100, 128, 180, 300, 600, 1200, 2500, 5000, 10_000, 20_000)
SEVERAL = (2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 512, 1024, 2048)
DRAFTS = (2, 4, 8, 16)


class Recipe(NamedTuple):
    """What decides which kernels a model launches. dtypes: of its parameters and buffers. most: tokens of all rows in a graph.

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
        if not registry.get(backend).exact or had.get("cache", "preallocated") != "preallocated" or hf.num_ranks(model) > 1:
            raise ValueError(
                "The kernels of a model are known ahead with a preallocated cache and on one rank. Those of another are compiled "
                "at their first launch; leave this call out."
            )
        page = job.SIZE if batch is True else int(batch)
        if page and page not in PAGE_SIZES:
            raise ValueError(f"batch must be True or the tokens of a page, one of {PAGE_SIZES}; got {batch!r}.")
        others = job.why_not_backend(backend)
        if page and (reason := job.why_not(model, hf.layer_kinds(model.config), others)) is not None:
            raise ValueError(f"generate_batch() cannot run this {type(model).__name__}: {reason}. Leave batch out.")
        dtypes = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        most, config, kv_dtype = launch_bound(model, target.arch), copy.deepcopy(model.config), had.get("kv_dtype")
        return cls(type(model), config, model.dtype, dtypes, backend, had["graph"], had["fuse"], most, target, page, kv_dtype)

    def small(self) -> hf.PreTrainedModel:
        """A model of the same widths and dtypes, with as few layers as have all kinds, on the meta device."""
        whole = copy.deepcopy(self.config)
        whole._attn_implementation = "eager"
        config = copy.deepcopy(whole)
        text = config.get_text_config(decoder=True)
        kinds, types = [*hf.layer_kinds(config)], getattr(text, "layer_types", None)
        # Layers without K and V of one kind may differ, as the experts and the dense ones of Nemotron-H.
        own = [(kind, types[i] if types and not kind.has_kv else None) for i, kind in enumerate(kinds)]
        # A model with dense and sparse layers (DeepSeek) has the dense ones first.
        dense = getattr(text, "first_k_dense_replace", None) or 0
        count = min(max(2, 1 + max(map(own.index, own)), dense + 1), len(kinds))
        if getattr(text, "num_kv_shared_layers", None):  # the last ones
            text.num_kv_shared_layers -= len(kinds) - count
        for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
            if isinstance(each := vars(text).get(name), list):
                setattr(text, name, each[:count])
        if text.num_hidden_layers != count:  # the length of a list in Nemotron-H
            text.num_hidden_layers = count
        with torch.device("meta"):
            try:
                made: hf.PreTrainedModel = self.cls(config).eval()
            except ValueError:  # Zamba ties a second layer to its first with K and V
                made = self.cls(whole).eval()
        for name, parameter in made.named_parameters():
            parameter.data = parameter.data.to(self.dtypes.get(name, self.dtype))
        for name, buffer in made.named_buffers():  # Falcon-H1 multiplies by one
            buffer.data = buffer.data.to(self.dtypes.get(name, buffer.dtype))
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
        run = Forwards(model, patch, recipe.kv_dtype)
        ends, many = [0], run.storage(1).takes_many
        prompt = Point(tokens=100, past=0)
        first = prompt, prompt._replace(masked=True), Point(past=100, captured=graph)
        for points in (first, [Point(tokens=128, past=0, captured=graph and many)]):  # of the first call; of a second one
            for point in points:
                run(point)
            if recipe.fuse:
                scores = torch.empty(1, model.get_output_embeddings().weight.shape[0], device="meta")
                from ..kernels.decode.sample import Sampler, Settings  # with Triton

                Sampler()(scores, Settings())
            ends.append(len(found))
        # Point of a forward; the rows, the tokens before and the tokens with which its attention runs again.
        cases: list[tuple[Point, list[int], list[int], Iterable[int]]] = []
        for masked in (False, True):
            cases.append((Point(masked=masked, captured=graph), between[masked:], depths, (1,)))
            cases.append((Point(tokens=100, past=0, masked=masked), rows, [0], prompts))
        cases.append((Point(tokens=100, masked=True), one, depths, prompts))
        if graph and many:
            cases.append((Point(tokens=16, captured=True), one, [0, *depths], SEVERAL))
        for point, counts, depths_of, lengths in cases:
            most = recipe.most if point.captured else LONGEST
            for template in run.attention(point):
                for count, past, length in itertools.product(counts, depths_of, lengths):
                    if count * length <= most:
                        template.attend(count, past, length)
                if many and not (point.past or point.masked) and registry.get(recipe.backend).packed:
                    for length in prompts[5:]:
                        template.attend(1, 0, length, packed=True)
        windows = [kind.window for kind in hf.layer_kinds(model.config) if kind.window is not None and kind.window < tokens]
        few = [length for length in prompts if length <= 64]  # which fused experts may serve
        points = [Point(tokens=length, past=0) for length in (*few, *(window + 1 for window in windows))]
        points += [Point(count, captured=graph) for count in rows]
        if graph and many:
            points += [Point(tokens=length, captured=True) for length in SEVERAL if length <= min(256, recipe.most)]
            points += [Point(tokens=length, captured=True, last=False) for length in DRAFTS]
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
        run = Batches(model, patch, recipe.page)
        for past in (0, 300):
            for template in run.attention(Point(tokens=100, past=past)):
                for length, depth in itertools.product(lengths, depths if past else [0]):
                    template.attend(1, depth, length, packed=True)
        for length in lengths:
            run(Point(tokens=length, past=0))
        for rows in buckets:
            for template in run.attention(Point(rows, captured=recipe.graph)):
                for depth in depths:
                    template.attend(rows, depth, 1)
        alone = len(found)
        for rows, depth in itertools.product((size for size in buckets if size >= 4), depths[-1::-3]):
            for groups in sorted({counted(count, rows) for count in COUNTS}):
                run(Point(rows, past=depth, captured=recipe.graph, groups=groups))
    return _slowest_first([*found.values()], [0, alone])
