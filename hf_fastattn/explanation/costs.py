"""The bytes and operations of one new token, the least time that they take, and the length at which memory is full.

Bytes are those of weights and live K/V, each read once; activations are ignored. The least time follows the roofline model
(Williams et al., 2009): the maximum of bytes over bandwidth and operations over their rate.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from .. import hf
from ..report.tables import size

WINDOW = 4096  # for the variant with a window
BATCHES, LENGTHS = range(1, 1 << 30), range(1, 1 << 40)
MODELS = "The table of models in the documentation (docs/models.md) says whether patch() runs it."
SCALES = 4  # bytes of a token and KV head besides K and V in 8 bits


@dataclass(frozen=True)
class GPU:
    """memory in bytes, bandwidth in bytes per second, rate in dense operations per second (None: unknown), compute capability as
    one number; link: bytes per second to another GPU in one direction, half of the published sum (NVLink, else PCIe; None:
    unknown); source: of the rates."""

    name: str
    memory: float
    bandwidth: float
    rate: float | None
    arch: int
    link: float | None
    source: str = "published by NVIDIA for dense 16-bit products"


GpuName = Literal["a100", "a100-40gb", "b200", "h100", "h200", "l4", "l40s", "rtx4090", "t4"]
GPUS: dict[GpuName, GPU] = {
    "a100": GPU("A100 SXM 80 GB", 80e9, 2.039e12, 312e12, 80, 300e9),
    "a100-40gb": GPU("A100 SXM 40 GB", 40e9, 1.555e12, 312e12, 80, 300e9),
    "b200": GPU("B200 SXM", 180e9, 8e12, 2250e12, 100, 900e9),
    "h100": GPU("H100 SXM", 80e9, 3.35e12, 989e12, 90, 450e9),
    "h200": GPU("H200 SXM", 141e9, 4.8e12, 989e12, 90, 450e9),
    "l4": GPU("L4", 24e9, 0.3e12, 121e12, 89, 32e9),
    "l40s": GPU("L40S", 48e9, 0.864e12, 362e12, 89, 32e9),
    "rtx4090": GPU("GeForce RTX 4090", 24e9, 1.008e12, 165e12, 89, 32e9),
    "t4": GPU("T4", 16e9, 0.32e12, 65e12, 75, 16e9),
}


@dataclass(frozen=True)
class Facts:
    """The properties of a model that the arithmetic needs. windows: of the kinds of layers.

    num_heads, num_kv_heads, head_dim: of the widest layer, if layers differ.
    """

    name: str
    dtype: torch.dtype
    shapes: tuple[hf.LayerShape, ...]  # of each layer
    kinds: tuple[hf.Kind, ...]  # of each layer
    max_length: int | None
    parameters: int
    weight_bytes: int  # in memory
    dense_bytes: int  # read by every step: all weights except experts, embedding tables, and towers for images or sound
    dense_weights: int  # their number
    head_weights: int = 0  # the part of these that a prompt reads for its last token only
    expert_bytes: int = 0
    expert_weights: int = 0
    experts: tuple[int, int] = (1, 1)  # (active per token, total)
    quantised: tuple[tuple[str, int], ...] = ()  # (kind, number of layers)
    kv_dtype: str | None = None  # 8 bits for K and V of the layers without a window

    @property
    def widest(self) -> hf.LayerShape:
        return max(self.shapes, key=lambda shape: shape.head_dim)

    num_heads = property(lambda self: self.widest.num_heads)
    num_kv_heads = property(lambda self: self.widest.num_kv_heads)
    head_dim = property(lambda self: self.widest.head_dim)
    windows = property(lambda self: tuple(kind.window for kind in self.kinds))

    def _seen(self, length: int) -> list[tuple[hf.LayerShape, int]]:
        """The shape of each layer with K and V, and the number of tokens that a query attends to in it."""
        each = zip(self.shapes, self.kinds, strict=True)
        return [(shape, 1 + kind.sees(length - 1)) for shape, kind in each if kind.has_kv]

    def kv_bytes(self, length: int) -> int:
        """Bytes of K and V of one row."""
        held = 0
        for (shape, n), kind in zip(self._seen(length), (kind for kind in self.kinds if kind.has_kv), strict=True):
            width = shape.head_dim + shape.value_dim
            in_8_bits = self.kv_dtype is not None and kind.window is None
            held += n * shape.num_kv_heads * (width + SCALES if in_8_bits else width * self.dtype.itemsize)
        return held

    def read_bytes(self, batch: int) -> float:
        """Bytes of weights that one step reads. Rows are assumed to select experts independently and uniformly."""
        chosen, count = self.experts
        return self.dense_bytes + self.expert_bytes * (1 - (1 - chosen / count) ** batch)

    @property
    def weight_flops(self) -> float:
        """Operations with weights for one new token: two per weight."""
        chosen, count = self.experts
        return 2 * (self.dense_weights + self.expert_weights * chosen / count)

    def attention_flops(self, length: int) -> int:
        """Operations of attention for one new token: two per element of each visible key and value and query head."""
        return 2 * sum(shape.num_heads * (shape.head_dim + shape.value_dim) * n for shape, n in self._seen(length))

    def flops(self, length: int) -> float:
        return self.weight_flops + self.attention_flops(length)

    def prompt_flops(self, length: int) -> float:
        """Operations for a prompt of one row, whose last token alone needs the head."""
        seen = [(shape, n * (n + 1) // 2 + (length - n) * n) for shape, n in self._seen(length)]  # by all its tokens
        attention = 2 * sum(shape.num_heads * (shape.head_dim + shape.value_dim) * n for shape, n in seen)
        return length * self.weight_flops - 2 * (length - 1) * self.head_weights + attention


@dataclass(frozen=True)
class Step:
    """One decode step: bytes, operations, and the least time in milliseconds."""

    weight_bytes: float
    kv_bytes: float
    flops: float
    flops_per_byte: float
    floor_ms: float
    bound_by: str


def count(model: hf.PreTrainedModel, dtype: torch.dtype | str | None = None, ranks: int = 1) -> Facts:
    """The Facts of a model, from its configuration and the shapes of its parameters. Recurrent states are not in them.

    ranks: the number of GPUs that share the model by tensor parallelism; the Facts are those of one of them.
    """
    config, name = model.config.get_text_config(decoder=True), model.config._name_or_path or type(model).__name__
    if hf.has_latents(config):
        raise ValueError(f"explain() cannot count the K/V of multi-head latent attention, which {name} has. {MODELS}")
    if getattr(config, "cross_attention_layers", None):
        raise ValueError(f"explain() cannot count the K/V of cross-attention, which {name} has. {MODELS}")
    if not getattr(config, "num_hidden_layers", 0):
        raise ValueError(f"explain() counts attention, and the config of {name} has no layers.")
    try:
        kinds = hf.layer_kinds(model.config)
    except ValueError as error:
        raise ValueError(f"explain() counts the K/V of full and sliding attention only. {error}") from error
    dtype = find_dtype(dtype) if dtype is not None else model.dtype
    scale = dtype.itemsize / model.dtype.itemsize
    try:
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    except NotImplementedError:
        raise ValueError(f"explain() counts one decoder, and {name} has several. Pass one of its parts.") from None
    weights = [_share(model, each, ranks) for each in hf.weights(model)]
    is_head = head is None or getattr(head, "weight", None) is embedding._parameters.get("weight")
    last = embedding if is_head else head
    run = {m for m in hf.step_modules(model) if not isinstance(m, torch.nn.Embedding) or (is_head and m is embedding)}
    experts = [w for w in weights if w.of_experts]
    dense = [w for w in weights if w.module in run and not w.of_experts]

    def size_of(them: list[hf.Weights]) -> int:
        return round(sum(w.bytes if w.kind else scale * w.bytes for w in them))

    configured = hf.layer_shapes(model.config)
    shapes = configured if hf.is_shared(model) else _projected(run, configured)
    if ranks > 1:
        kept = hf.local_kv_heads(model, ranks)
        all_heads = [shape.num_kv_heads for shape in configured]
        shapes = tuple(
            replace(shape, num_heads=shape.num_heads * kv // total, num_kv_heads=shape.num_kv_heads * kv // total)
            for shape, total, kv in zip(shapes, all_heads, kept, strict=True)
        )
    return Facts(
        name=name,
        dtype=dtype,
        shapes=shapes,
        kinds=kinds,
        max_length=getattr(config, "max_position_embeddings", None),
        parameters=sum(w.count for w in weights),
        weight_bytes=size_of(weights),
        dense_bytes=size_of(dense),
        dense_weights=sum(w.count for w in dense),
        head_weights=sum(w.count for w in dense if w.module is last),
        expert_bytes=size_of(experts),
        expert_weights=sum(w.count for w in experts),
        quantised=tuple(Counter(w.kind for w in weights if w.kind).items()),
        experts=hf.experts_of(config),
    )


def _projected(modules: set[torch.nn.Module], shapes: tuple[hf.LayerShape, ...]) -> tuple[hf.LayerShape, ...]:
    """The shapes with the KV heads that layers project to, which differ from those of the config in MiMo-V2."""
    found = list(shapes)
    for module in modules:
        index = getattr(module, "layer_idx", None)
        k, v = (getattr(getattr(module, name, None), "out_features", None) for name in ("k_proj", "v_proj"))
        if not isinstance(index, int) or index >= len(shapes) or not k or not v:
            continue
        kv_heads, rest = divmod(k, shapes[index].head_dim)
        if kv_heads and not rest and v % kv_heads == 0:
            found[index] = replace(shapes[index], num_kv_heads=kv_heads, value_dim=v // kv_heads)
    return tuple(found)


def _share(model: hf.PreTrainedModel, weights: hf.Weights, ranks: int) -> hf.Weights:
    """The part of these weights on one of so many ranks."""
    own = {f"{weights.path}.{name}": p for name, p in weights.module._parameters.items() if p is not None}
    divided = [p for name, p in own.items() if ranks > 1 and hf.is_divided(model, name)]
    fewer = sum(p.numel() - p.numel() // ranks for p in divided)
    return replace(weights, bytes=weights.bytes - fewer * model.dtype.itemsize, count=weights.count - fewer)


def find_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"Unknown dtype {dtype!r}; choose one of float32, bfloat16 and float16.")
    return found


def find_gpu(name: GpuName | None, device: torch.device, dtype: torch.dtype) -> GPU:
    """The published figures of the named GPU; without a name the measured GPU of this device, or else an H200."""
    if name is not None and name not in tuple(GPUS):
        raise ValueError(f"Unknown GPU {name!r}; known: {', '.join(GPUS)}. Leave it out to measure the GPU of this machine.")
    if name is None and device.type == "cuda" and torch.cuda.is_available():
        return measure(device, dtype)
    found = GPUS[name or "h200"]
    if name is None:
        found = replace(found, source=f"{found.source}; assumed because this machine has no GPU; gpu= selects another")
    # The rates are for 16-bit products on tensor cores. float32 products run on CUDA cores, bfloat16 ones before Ampere too.
    on_tensor_cores = dtype == torch.float16 or (dtype == torch.bfloat16 and found.arch >= 80)
    return found if on_tensor_cores else replace(found, rate=None)


def measure(device: torch.device, dtype: torch.dtype) -> GPU:
    """Measure this GPU: the bandwidth of a sum over up to 2 GiB, and the rate of a product of 8192 x 8192 in this dtype."""
    properties = torch.cuda.get_device_properties(device)
    free, _ = torch.cuda.mem_get_info(device)
    data = torch.zeros(int(min(2 << 30, free // 4)) // 4, device=device)
    edge = 8192 if free > 4 << 30 else 2048
    square = torch.randn(edge, edge, device=device, dtype=dtype)  # products of zeros draw less power and are faster
    with torch.cuda.device(device):
        read, multiplied = _seconds(data.sum), _seconds(lambda: square @ square)
    source = f"measured on this machine: a sum over {size(data.nbytes)}, a product of {edge} x {edge} in {str(dtype)[6:]}"
    arch = 10 * properties.major + properties.minor
    return GPU(properties.name, properties.total_memory, data.nbytes / read, 2 * edge**3 / multiplied, arch, None, source)


def _seconds(call: Callable[[], object]) -> float:
    """Best of ten on the current stream, after a warm-up."""
    times: list[float] = []
    for _ in range(11):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(1e-3 * start.elapsed_time(stop))
    return min(times[1:])


def step(facts: Facts, gpu: GPU, batch: int, length: int) -> Step:
    weights, kv = facts.read_bytes(batch), batch * facts.kv_bytes(length)
    return _at_least(gpu, weights, kv, batch * facts.flops(length))


def prompt(facts: Facts, gpu: GPU, batch: int, length: int) -> Step:
    """The first forward of `length` tokens a row: all weights are read once, and K and V are written once."""
    return _at_least(gpu, facts.read_bytes(batch * length), batch * facts.kv_bytes(length), batch * facts.prompt_flops(length))


def _at_least(gpu: GPU, weights: float, kv: float, flops: float) -> Step:
    memory, compute = (weights + kv) / gpu.bandwidth, flops / gpu.rate if gpu.rate else 0.0
    bound = "memory" if memory >= compute else "compute"
    return Step(weights, kv, flops, flops / (weights + kv), 1e3 * max(memory, compute), bound)


@dataclass(frozen=True)
class Roofline:
    """From where on operations set the time of a decode step, and not bytes.

    gpu_flops_per_byte: the operations for which the GPU needs as long as for one byte; None if its rate is unknown. The batches
    are the least for which a part has as many: its products with weights, its attention, and both. None: no batch has.
    """

    gpu_flops_per_byte: float | None
    attention_flops_per_byte: float
    weights_batch: int | None
    attention_batch: int | None
    step_batch: int | None


def roofline(facts: Facts, gpu: GPU, length: int) -> Roofline:
    kv, attention = facts.kv_bytes(length), facts.attention_flops(length)
    ratio = gpu.rate / gpu.bandwidth if gpu.rate else None

    def least(weight_flops: float, weights: Callable[[int], float], attention: int, kv: int) -> int | None:
        """By bisection: operations grow with the batch, and the bytes for each row do not."""
        if ratio is None:
            return None
        reached = lambda batch: batch * (weight_flops + attention) >= ratio * (weights(batch) + batch * kv)  # noqa: E731
        found = bisect_left(BATCHES, True, key=reached)
        return BATCHES[found] if found < len(BATCHES) else None

    return Roofline(
        ratio,
        attention / kv,
        least(facts.weight_flops, facts.read_bytes, 0, 0),
        least(0, lambda batch: 0, attention, kv),
        least(facts.weight_flops, facts.read_bytes, attention, kv),
    )


def ring_chunk(facts: Facts, gpu: GPU) -> int | None:
    """The least number of tokens of each rank for which a turn of `context_parallel.ring_attention` computes, with a causal mask
    and equal work, for as long as K and V are sent; for the layers without a window. None: a rate is unknown, or all have one.

    After Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023), section 3, where it is
    rate / link for 16 bits, without a mask and with as many KV heads as heads.
    """
    kv_bytes = [
        facts.dtype.itemsize * shape.num_kv_heads / shape.num_heads
        for shape, kind in zip(facts.shapes, facts.kinds, strict=True)
        if kind.has_kv and kind.window is None
    ]
    return math.ceil(max(kv_bytes) * gpu.rate / gpu.link) if kv_bytes and gpu.rate and gpu.link else None


def longest(facts: Facts, gpu: GPU, batch: int) -> int | None:
    """The most tokens per row for which weights and K/V fit into memory (0: none); None if there is no limit."""
    found = bisect_right(LENGTHS, (gpu.memory - facts.weight_bytes) / batch, key=facts.kv_bytes)
    return found if found < len(LENGTHS) else None


def relatives(facts: Facts) -> list[tuple[str, Facts]]:
    """Variants of the model: MHA, GQA, MQA, with and without a window. The model's own variant is marked."""
    grouped = facts.num_kv_heads if 1 < facts.num_kv_heads < facts.num_heads else 8
    heads = {facts.num_heads: "MHA", **{n: kind for n, kind in ((grouped, "GQA"), (1, "MQA")) if n != facts.num_heads}}
    rows = []
    for kv_heads, kind in heads.items():
        if facts.num_heads % kv_heads or len(set(facts.shapes)) > 1:
            continue
        its = replace(facts, shapes=tuple(replace(shape, num_kv_heads=kv_heads) for shape in facts.shapes))
        rows.append((f"{kind}, {kv_heads} KV heads" if kv_heads > 1 else f"{kind}, 1 KV head", its))
    windowed = any(facts.windows)
    other = (hf.Kind("full") if windowed else hf.Kind("window", WINDOW),) * len(facts.kinds)
    rows.append(("without its window" if windowed else f"window of {WINDOW} in every layer", replace(facts, kinds=other)))
    return [(f"{name} (this model)" if its == facts else name, its) for name, its in rows]
