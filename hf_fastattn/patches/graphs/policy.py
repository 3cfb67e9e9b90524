"""Which graph reads a prompt or a message, and which graphs are captured after a reply.

A step is bound by reading weights up to some hundred tokens, so few sizes serve most prompts: SIZES. Where their padding costs
more than it saves, by the arithmetic of `Cost`, a size of NEAREST is used, several graphs one after the other, each of which
reads a part of the prompt, or the model's Python, which reads no padding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

from ... import hf
from ...caches.contract import FEW, Storage
from ...caches.stored import StoredCache
from ...kernels.host import gpu
from ...kernels.host.tables import MAX_DECODE_ROWS
from ..fused import experts

SIZES = (1, 16, 64, 128, 256, 512, 1024, 2048)  # tokens of each row in a graph
NEAREST: tuple[int, ...] = (1, 2, 4, 8, 16, 32, *range(64, 513, 64), *range(640, 2049, 128))
MOST = 512  # tokens of all rows in a graph of more than FEW of each; more if their kernels take less time than launches
OFTEN = 3  # prompts of one size of NEAREST, after which it gets a graph of its own if that saves time
USUAL = 1, 128  # sizes that are wanted after each reply: of a step, and of most messages
SHARE = 0.1  # of the time of the calls, for captures after their replies
FIRST = 0.5  # seconds for the first of these captures
NEVER = -1 << 62  # how often a prompt of a size that cannot be captured was read
LAUNCHES = 0.85e-3, 1.8e-3  # seconds of a layer's launches from Python, on hosts of H200s: of one rank, of several
FLOPS = 6e14, 1.5e14  # that products reach in 16 bits: on Hopper and later, before; in 32 bits a tenth
BYTES = 3.6e12, 1.5e12  # that a second reads: between those of an H100 and an H200, before
OF_ATTENTION = 0.6  # of FLOPS
OF_BYTES = 0.8  # of BYTES, that the attention of more than MAX_DECODE_ROWS rows of queries reaches
PARTS = 8  # the most graphs that read a prompt one after the other, not counting smaller ones at its end
REPLAY, GAP = 1.3e-3, 2e-4  # seconds of the host for each of them, and of the device between two
SLOW = 2  # how many times as long launches may take on other hosts: prompts whose kernels take longer are not read in parts


def nearest(tokens: int) -> int:
    """The smallest size of a graph for so many tokens of each row. Raises StopIteration above the largest one."""
    return next(size for size in NEAREST if size >= tokens)


def several(ids: torch.Tensor) -> tuple[int, ...]:
    """The number of these tokens, as the last argument of a storage's sync() and advance(), which get none for one token."""
    return () if ids.shape[1] == 1 else (ids.shape[1],)


def most_tokens(storage: Storage, rows: int, most: int = MOST) -> int:
    """The most tokens of each row in a graph over this storage: FEW for any number of rows, more only up to `most` tokens of all
    rows."""
    if not storage.takes_many:
        return 1
    found = max(FEW, min(most, storage.most_tokens) // max(rows, 1) if storage.takes_prompts else 0)
    return max(size for size in NEAREST if size <= found)


def most_of_prompt(storage: Storage, rows: int, most: int) -> int:
    """The same for a prompt: no more than its buffers hold, as graphs end with them."""
    return min(most_tokens(storage, rows, most), nearest(max(1, min(storage.smallest, NEAREST[-1]))))


def tokens_in(cache: StoredCache) -> int:
    """Number of tokens whose K and V are on the device."""
    storage = cache.storage
    return 0 if storage.rows is None else cache.get_seq_length() or storage.seen  # the first layer may not run


class Cost(NamedTuple):
    """What forwards of a model take on one of its ranks, by arithmetic.

    It is the same on all ranks, which must decide alike, even if their GPUs differ. weights: numbers in matrices but tables.
    read: bytes that each forward reads, besides experts; routed: those of experts. active: numbers that a token is multiplied
    by. chosen: the part of the experts that a token has. layers: (kind, bytes of K and V of a token, width of all heads, query
    heads of a KV head). Reads of weights and products overlap in part: their time is near the root of the sum of both squares.
    attends, routes: whether attention and experts of a graph take as long for its padding as for other tokens.
    """

    weights: float
    read: float
    routed: float
    active: float
    chosen: float
    layers: tuple[tuple[hf.Kind, float, float, int], ...]
    launches: float
    flops: float
    bytes: float
    attends: bool
    routes: bool

    @classmethod
    def of(cls, model: hf.PreTrainedModel, arch: int | None = None) -> Cost:
        """That of a model. arch: as in `gpu.arch`; None for that of the model's GPU."""
        ranks, config, shapes = hf.num_ranks(model), model.config.get_text_config(decoder=True), hf.layer_shapes(model.config)
        head = model.get_output_embeddings()
        tables = {id(getattr(each, "weight", None)) for each in (model.get_input_embeddings(), head)}
        matrices = [(f"{name}.", p) for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in tables]
        of_experts = [p for name, p in matrices if ".experts." in name]
        of_token, count = hf.experts_of(config)
        chosen = of_token / count
        weights, routed = sum(p.numel() for _, p in matrices) / ranks, sum(p.nbytes for p in of_experts) / ranks
        layers = Counter(zip(hf.layer_kinds(model.config), shapes, strict=False))
        if arch is None:
            arch = gpu.arch(model.device) if model.device.type == "cuda" else 90
        old = ranks == 1 and arch < 90
        return cls(
            weights,
            (sum(p.nbytes for _, p in matrices) + getattr(getattr(head, "weight", None), "nbytes", 0)) / ranks - routed,
            routed,
            weights - (1 - chosen) * sum(p.numel() for p in of_experts) / ranks,
            chosen,
            tuple(
                (
                    kind,
                    count * shape.num_kv_heads * (shape.head_dim + shape.value_dim) * model.dtype.itemsize / ranks,
                    count * shape.num_heads * (shape.head_dim + shape.value_dim) / ranks,
                    shape.num_heads // max(shape.num_kv_heads, 1),
                )
                for (kind, shape), count in layers.items()
            ),
            LAUNCHES[ranks > 1] * len(shapes),
            FLOPS[old] / (1 if model.dtype.itemsize <= 2 else 10),
            BYTES[old],
            old,  # stream-K has shares of all blocks of queries
            not any(experts.is_used(module) for module in model.modules()),
        )

    def over(self, storage: Storage) -> Cost:
        """That of steps over this storage."""
        return self if storage.skips_padding else self._replace(attends=True, routes=True)

    def graph(self, rows: int, tokens: int, past: int, live: int | None = None) -> float:
        """Seconds of the kernels of a forward with so many tokens of each row, behind `past` others. live: those that are no
        padding; None for all."""
        every = rows * tokens
        attended, routed = (tokens if live is None or computed else live for computed in (self.attends, self.routes))
        read = self.read + self.routed * (1 - (1 - self.chosen) ** (rows * routed))
        kv = pairs = 0.0
        for kind, size, width, group in self.layers:
            seen = kind.sees(past)
            kv += size * (seen + attended) * rows / (1 if tokens * group <= MAX_DECODE_ROWS else OF_BYTES)
            pairs += width * (seen + attended / 2) * rows * attended
        attention = max(kv / self.bytes, 2 * pairs / (OF_ATTENTION * self.flops))
        return math.hypot(read / self.bytes, 2 * every * self.active / self.flops) + attention

    def python(self, rows: int, tokens: int, past: int) -> float:
        """The same from Python."""
        return max(self.launches, self.graph(rows, tokens, past))

    def launch_bound(self) -> int:
        """The most tokens of a prompt, from MOST on, whose kernels take less time than their launches from Python."""
        tokens = int(self.launches * self.flops / (2 * max(self.weights, 1)))
        return max(MOST, min(tokens, NEAREST[-1]))


def launch_bound(model: hf.PreTrainedModel, arch: int | None = None, cost: Cost | None = None) -> int:
    """The most tokens of a graph of several rows' prompts. arch: see `Cost.of`. cost: that of the model, if it is known."""
    return MOST if model.device.type != "cuda" and arch is None else (cost or Cost.of(model, arch)).launch_bound()


Reading = tuple[float, tuple[int, ...]]  # seconds, and the sizes of the graphs that read a prompt one after the other
NO_GRAPHS: Reading = math.inf, ()


class Choice(NamedTuple):
    """sizes: tokens of each row in the graphs that read a prompt one after the other; (): it is read from Python. wanted: sizes
    to capture later."""

    sizes: tuple[int, ...] = ()
    wanted: frozenset[int] = frozenset()


def choose(
    cost: Cost, rows: int, tokens: int, past: int, *, graphs: Collection[int], asked: int, most: int, own: bool = False,
    later: bool = False, in_parts: bool = False,
) -> Choice:  # fmt: skip
    """How a prompt of so many tokens of each row is read, behind `past` others.

    graphs: sizes of the graphs there are for it. asked: how many prompts of its nearest size came before. most: see
    `most_of_prompt`. own: whether code of the user runs, which may depend on the number of tokens: only the nearest size is used.
    later: whether a graph is captured after this reply or a later one, when there is time; if not, this prompt waits for it.
    in_parts: whether several graphs may read it one after the other.
    Graphs are used if they cost no more than 5 % or 1 ms over Python without padding, and no more than 30 % or 3 ms over the
    smallest one that reads the whole prompt, which would have to be captured first.
    """
    if asked < 0 or (tokens > most and not in_parts):
        return Choice()

    def of(size: int) -> float:
        return cost.graph(rows, size, past, tokens)

    python, goal, near = cost.python(rows, tokens, past), None, 0
    if tokens <= most:
        near = nearest(tokens)
        largest = most if _is_close(of(most), of(near)) else near  # one size for all prompts of small buffers
        standard = () if own else (*SIZES, largest)
        fitting = (size for size in (*standard, near) if tokens <= size <= most and _is_close(of(size), python))
        goal = next(fitting, None)
    options: list[Reading] = [
        (of(size), (size,)) for size in sorted({near}.intersection(graphs) if own else graphs) if size >= tokens
    ]
    least, goals = NO_GRAPHS if goal is None else (of(goal), (goal,))
    often = goal is not None and asked >= OFTEN and not _is_close(least, of(near))
    if often:
        least, goals, goal = of(near), (near,), near
    unpadded = of(tokens)
    as_fast = _is_close(min(options, default=NO_GRAPHS)[0], unpadded)  # as anything else could be
    if in_parts and not (own or as_fast) and unpadded < SLOW * cost.launches:
        parts = Parts(cost, rows, tokens, past)
        options.append(parts.best(size for size in graphs if size <= most))
        seconds, sizes = parts.wanted(most, python)
        if not _is_close(least, seconds):
            least, goals = seconds, sizes
    seconds, sizes = min(options, key=lambda option: option[0], default=NO_GRAPHS)
    if not _is_close(seconds, python):
        seconds, sizes = NO_GRAPHS
    enough = 1.05 * least if often else max(1.3 * least, least + 3e-3)
    if goal is not None and seconds > enough and not (later and not own and (sizes or asked < OFTEN)):
        sizes = goals = (goal,)
    elif _is_close(seconds, least):
        goals = ()
    return Choice(sizes, frozenset() if own or not (sizes or goals) else frozenset({*goals, *USUAL}))


class Parts(NamedTuple):
    """What several graphs cost that read a prompt one after the other."""

    cost: Cost
    rows: int
    tokens: int
    past: int

    def best(self, sizes: Iterable[int]) -> Reading:
        """Those of these sizes that read the prompt in the least time."""
        return _split(self.tokens, [(size, self.seconds(size)) for size in sorted({*sizes}) if size > 1])

    def seconds(self, size: int) -> float:
        """Of one graph, behind as many tokens as those of this size see on average."""
        before = max(0, self.tokens - size) // 2
        return max(REPLAY, self.cost.graph(self.rows, size, self.past + before) + GAP)

    def wanted(self, most: int, python: float) -> Reading:
        """One of SIZES, repeated, and one for the rest: of SIZES too, or of NEAREST if Python takes less time than those."""
        for of_rest in (SIZES, NEAREST):
            found: list[Reading] = []
            for size in SIZES:
                count, rest = divmod(self.tokens, size)
                if self.tokens > size > 1 and size <= most and count + (rest > 0) <= PARTS:
                    sizes = (size,) * count + ((next(each for each in of_rest if each >= rest),) if rest else ())
                    found.append((sum(map(self.seconds, sizes)), sizes))
            least = min(found, default=NO_GRAPHS)
            if _is_close(least[0], python):
                return least
        return NO_GRAPHS


def _split(tokens: int, each: list[tuple[int, float]]) -> Reading:
    """The sizes that have at least so many tokens and take the least time. each: all sizes, ascending, with their times."""
    found: list[Reading] = [(seconds, (size,)) for size, seconds in each if size >= tokens]
    for index, (size, seconds) in enumerate(each):
        count, rest = divmod(tokens, size)
        if size < tokens and count + (rest > 0) <= PARTS:
            others, sizes = _split(rest, each[: index + 1]) if rest else (0.0, ())
            found.append((count * seconds + others, (size,) * count + sizes))
    return min(found, key=lambda option: (option[0], len(option[1])), default=NO_GRAPHS)


def wanted(cost: Cost, rows: int, past: int, sizes: Collection[int], graphs: Collection[int], most: int) -> list[int]:
    """Which of these sizes are captured after a reply, the cheapest first: those that no graph serves as well."""
    found: list[int] = []
    for size in sorted({size for size in sizes if size <= most} - {*graphs}, reverse=True):
        served = [other for other in (*graphs, *found) if other >= size > 1]  # a step of one token has its own
        if not any(_is_close(cost.graph(rows, each, past, size), cost.graph(rows, size, past)) for each in served):
            found.append(size)
    return found[::-1]


def _is_close(cost: float, least: float) -> bool:
    """Whether padding costs no more than 5 % or 1 ms."""
    return cost <= max(1.05 * least, least + 1e-3)
