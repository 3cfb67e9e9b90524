"""explain(): which kernels a model runs and why, what one decode step reads and computes, and the least time that this takes.

It is arithmetic over a configuration and needs neither weights nor a GPU.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from .. import hf, registry
from ..kernels import TritonKernel, checks, mixture
from ..kernels.host.gpu import OLDEST
from ..kernels.spec import KV, Spec
from ..model_shapes import SHAPES
from ..patches import preflight
from ..patches.calls import chunks
from ..patches.fused import experts
from ..patches.graphs import graphs as graph
from ..report.machine import find_device
from ..streaming import Settings
from . import costs, curves
from .costs import GPU, GPUS, Facts, Roofline, Step
from .layers import small_layers
from .text import paragraphs

__all__ = ["GPUS", "SHAPES", "Explanation", "explain"]

_LENGTHS = [1 << n for n in range(10, 21, 2)]


@dataclass
class Explanation:
    """The result of explain(). Print it, or use as_dict(), which has the same as plain numbers and strings."""

    facts: Facts
    gpu: GPU
    batch: int
    length: int
    backend: str
    device: str
    supported: bool  # whether the backend runs there
    runs: list[dict[str, str]]  # what, how, why
    refused: list[dict[str, str]]  # what, why
    step: Step
    prompt: Step  # the first forward, up to the first new token
    activation_bytes: int  # of the whole prompt, about
    chunk: int | None  # tokens of a row that patch(prefill_chunk="auto") reads at once; None: all of them
    roofline: Roofline
    ring_chunk: int | None  # least tokens of each rank that hide the sending of ring_attention(); None: unknown
    longest: int | None  # most tokens per row that fit into memory; None: no limit
    memory: list[dict[str, Any]]  # length, kv_bytes, bytes, fits
    variants: list[dict[str, Any]]  # name, kv_bytes, floor_ms, longest
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        del found["facts"]["kinds"]
        for name in ("num_heads", "num_kv_heads", "head_dim", "windows"):
            found["facts"][name] = getattr(self.facts, name)
        found["facts"]["shapes"] = [{"layers": n, **asdict(shape)} for shape, n in Counter(self.facts.shapes).items()]
        found["facts"]["dtype"] = str(self.facts.dtype).removeprefix("torch.")
        return found

    def draw(self, file: str | Path) -> None:
        """Draw operations per byte and the least time of a decode step, against batch and length, for MHA, GQA and MQA.

        The suffix of the file is its format. Raises ImportError without matplotlib, OSError for a folder that cannot be written.
        """
        curves.draw(self.facts, self.gpu, self.batch, self.length, file)

    def __str__(self) -> str:
        return "\n\n".join(paragraphs(self))


def explain(
    model: hf.PreTrainedModel | hf.PreTrainedConfig | str | Path,
    batch: int = 1,
    length: int = 8192,
    backend: str = "lean",
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    gpu: costs.GpuName | None = None,
    window: int | None = None,
    sinks: int | None = None,
    ranks: int = 1,
    kv_dtype: Literal["int8", "fp8"] | None = None,
) -> Explanation:
    """Report what would run for this model, batch and length, its least cost, and what is refused and why.

    model: a model, a configuration, a folder or a name on the Hub, a .gguf file, or a named shape (`hf-fastattn explain --help`
    lists them). Only the configuration of a name, folder or file is read; of a loaded model also which of its layers are
    quantised, and which experts it runs. batch: number of rows, of `length` tokens each. device: by default the model's
    device, and CUDA for a configuration. dtype: of weights and K/V, by default the model's. gpu: use the published figures of
    this GPU (the same --help lists them); without it the GPU of this machine is measured, or an H200 is assumed if there is none.
    window, sinks: for a streaming backend, as in patch(). ranks: the number of GPUs that share the model by tensor parallelism;
    bytes, operations and times are then those of one of them, without the time for sums over the ranks. kv_dtype: 8 bits for K
    and V, as in patch().

    Raises ValueError for a model whose K/V cannot be counted, an unknown backend or GPU, and sizes below 1.
    """
    for name, value in (("batch", batch), ("length", length), ("ranks", ranks)):
        if not checks.is_count(value) or value < 1:
            raise ValueError(f"{name} must be an integer, at least 1; got {value!r}.")
    chosen = registry.get(backend)
    if chosen.linear:
        raise ValueError(
            f"explain() counts K and V, and {backend!r}, which is not the model's attention, keeps sums in their place: "
            'docs/backends/linear.md has their size. Ask for "lean".'
        )
    if not isinstance(model, (hf.PreTrainedModel, hf.PreTrainedConfig, str, Path)):
        raise TypeError(
            f"explain() takes a Transformers model, a configuration, a name or a path; got {type(model).__name__}. "
            "Pass pipeline.model, or peft_model.get_base_model()."
        )
    if not isinstance(model, hf.PreTrainedModel):
        model = _from_config(model, dtype)
    if not hasattr(model, "generate"):
        raise ValueError(f"explain() is for models with generate(), and {type(model).__name__} has none.")
    facts = costs.count(model, dtype, ranks)
    hf.refuse_states(model.config, "explain() counts", costs.MODELS)
    streaming = Settings.asked(chosen.name, chosen.streaming, window, sinks, facts.max_length)
    if streaming is not None:
        facts = replace(facts, kinds=(hf.Kind("window", streaming.sinks + streaming.window),) * len(facts.kinds))
    if kv_dtype is not None and ranks > 1:
        raise ValueError(f"kv_dtype={kv_dtype!r} is for a model on one GPU; got ranks={ranks}. Leave out one of them.")
    cache = None if hf.overrides_generation(model) else "preallocated" if streaming is None else "rolling"
    preflight.which_kv_dtype(model, chosen, cache, kv_dtype)
    facts = replace(facts, kv_dtype=kv_dtype)
    device = find_device(("cuda" if model.device.type == "meta" else model.device) if device is None else device, planned=True)
    figures = costs.find_gpu(gpu, device, facts.dtype)
    runs, refused = _what_runs(chosen, model, facts, batch, length, device, figures, streaming)
    limit, memory, variants = facts.max_length, [], []
    for n in sorted({*_LENGTHS, length}):
        if n <= max(length, limit or n):
            kv = batch * facts.kv_bytes(n)
            held = facts.weight_bytes + kv
            memory.append({"length": n, "kv_bytes": kv, "bytes": held, "fits": held <= figures.memory})
    for name, its in costs.relatives(facts):
        of, most = costs.step(its, figures, batch, length), costs.longest(its, figures, batch)
        variants.append({"name": name, "kv_bytes": of.kv_bytes, "floor_ms": of.floor_ms, "longest": most})
    notes = [] if ranks == 1 else [f"Figures are of one of {ranks} GPUs that share the model by tensor parallelism."]
    if limit and length > limit:
        notes.append(f"{length} tokens are more than the {limit} positions that this model supports.")
    if getattr(model.config, "quantization_config", None) and not facts.quantised:
        notes.append("The configuration asks for quantised weights, counted here as if they were not; pass the loaded model.")
    if device.type == "cuda" and not torch.cuda.is_available():
        notes.append(
            "This machine has no GPU: this is what a machine with a CUDA GPU would run. On this machine the reference in "
            "plain torch would run, on the CPU."
        )
    if figures.rate is None:
        name, other = str(facts.dtype).removeprefix("torch."), "float16" if figures.arch < OLDEST else "bfloat16"
        notes.append(f"No rate of {name} is published for this GPU: times are those of bytes. dtype={other!r} has one.")
    whole = ranks > 1 or batch * length <= chunks.SHORT or chunks.changes(model, length)
    each, room = chunks.bytes_per_token(model), figures.memory - facts.weight_bytes - batch * facts.kv_bytes(length)
    return Explanation(
        facts=facts,
        gpu=figures,
        batch=batch,
        length=length,
        backend=backend,
        device=str(device),
        supported=bool(runs),
        runs=runs,
        refused=refused,
        step=costs.step(facts, figures, batch, length),
        prompt=costs.prompt(facts, figures, batch, length),
        activation_bytes=batch * length * each,
        chunk=None if whole else chunks.largest(batch, length, each, room),
        roofline=costs.roofline(facts, figures, length),
        ring_chunk=costs.ring_chunk(facts, figures),
        longest=costs.longest(facts, figures, batch),
        memory=memory,
        variants=variants,
        notes=notes,
    )


def _from_config(source: hf.PreTrainedConfig | str | Path, dtype: torch.dtype | str | None) -> hf.PreTrainedModel:
    """A model on the meta device, from a configuration or its source."""
    if isinstance(source, str) and source.lower() in SHAPES:
        model_type, options = SHAPES[source.lower()]
        source = hf.make_config(model_type, name_or_path=source, **options)
    elif not isinstance(source, hf.PreTrainedConfig):
        source = hf.load_config(source)
    if source.is_encoder_decoder:
        raise ValueError(f"explain() is for decoder-only models; {type(source).__name__} is an encoder-decoder.")
    return hf.model_on_meta(source, costs.find_dtype(dtype or getattr(source, "dtype", None) or torch.bfloat16))


# ---- what runs ----


@dataclass(frozen=True)
class _Operand:
    """Represents a newly allocated tensor in the check whether a kernel supports it."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]

    def data_ptr(self) -> int:
        return 0

    def stride(self) -> tuple[int, ...]:
        _, heads, length, width = self.shape
        return heads * length * width, length * width, width, 1


def _what_runs(
    chosen: registry.Backend,
    model: hf.PreTrainedModel,
    facts: Facts,
    batch: int,
    length: int,
    device: torch.device,
    figures: GPU,
    streaming: Settings | None,
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(what runs how and why, what was refused and why)."""
    runs: list[dict[str, str]] = []
    refused: list[dict[str, str]] = []

    def run(what: str, how: str, why: str) -> None:
        runs.append({"what": what, "how": how, "why": why})

    def refuse(what: str, why: str) -> None:
        refused.append({"what": what, "why": why})

    shape = asdict(facts.widest)
    own_code, too_old = None if hf.own_attention(model) else hf.why_not_model(type(model.config)), None
    if device.type == "cuda" and figures.arch < OLDEST:
        has = f"{figures.name} has {figures.arch / 10}"
        too_old = f'It needs a GPU of compute capability {OLDEST / 10} (Ampere) or higher, and {has}. Use "sdpa" there.'
    for name in registry.names():
        backend = registry.get(name)
        kernel_too_old = too_old if isinstance(backend.prefill, TritonKernel) else None
        replaced = preflight.why_not_replaced(model, backend)
        own = own_code or (replaced and f"{type(model).__name__} {replaced}")
        if reason := own or kernel_too_old or backend.why_not(**shape, dtype=facts.dtype, device=device):
            refuse(name, reason)
    if any(row["what"] == chosen.name for row in refused):
        return runs, refused
    if part := hf.generates_by_another(model):
        refuse("patch()", f"Its generate() is that of its {part}. Patch the part: hf_fastattn.patch(model.{part}).")
    if streaming is not None and (table := hf.longest_embedded(model)) is not None:
        why = f"It has a table of {table} positions, which do not move with a window."
        refuse("patch()", f"{why} clamp_positions=True lets learned ones stop at the last, an approximation.")
    for phase, q_len in (("prefill", length), ("decode", 1)):
        served, kernel = chosen.kernel(q_len, facts.num_heads, facts.num_kv_heads)
        q = _Operand(device, facts.dtype, (batch, facts.num_heads, q_len, facts.head_dim))
        k = _Operand(device, facts.dtype, (batch, facts.num_kv_heads, length, facts.head_dim))
        how, refusal = _kernel(kernel, q, k, 0 if streaming is None else streaming.sinks)
        if refusal is not None:
            refuse(f"{refusal[0]} in {phase}", refusal[1])
        run(phase, how, _why(chosen, served, q_len, facts))
    if owns := hf.overrides_generation(model):
        refuse("the cache of patch()", f"{type(model).__name__} has its own {owns}(), which it would replace.")
        run("cache", "DynamicCache", "copied as it grows")
    elif streaming is not None:
        why = f"with patch(): {streaming.sinks} sinks and a window of {streaming.window}, in constant memory"
        run("cache", "RollingCache", why)
    else:
        bits = f" in 8 bits ({facts.kv_dtype}), an approximation, unless they have a window" if facts.kv_dtype else ""
        run("cache", "PreallocatedCache", f"with patch(): K/V stay in place{bits}, and only what is live is read")
    if facts.experts[1] > 1:
        how, why, reason = _experts(model, facts, device)
        if reason is not None:
            refuse("experts in one read", _sentence(reason))
        run("experts", how, why)
    for kind, layers in facts.quantised:
        run(f"{layers} layers of {kind}", "their own kernels", "their weights are quantised")
    if unpacked := hf.unpacked(model):
        refuse("linear layers in one launch", _sentence(unpacked))
    if off := "a graph needs a preallocated cache" if owns else graph.why_no_graph(device) or hf.why_not_captured(model):
        refuse("decode graph", _sentence(off))
        run("decode step", "from Python", "launched layer by layer")
    else:
        run("decode step", "one CUDA graph", "with patch(): one launch a step, and no Python between layers")
    if device.type == "cuda":
        fused, own = small_layers(model)
        runs += fused
        refused += own
    return runs, refused


def _sentence(reason: str) -> str:
    return f"{reason[0].upper()}{reason[1:]}."


def _experts(model: hf.PreTrainedModel, facts: Facts, device: torch.device) -> tuple[str, str, str | None]:
    """(which implementation of experts runs, why, the reason why the kernel does not)."""
    asking = next(filter(hf.asks_for_experts, model.modules()), None)
    if asking is None:
        own, why = "the model's own", f"{type(model).__name__} computes them in its own code"
        return own, why, "its experts do not dispatch through Transformers' ExpertsInterface"
    own, reason = experts.had(asking), experts.why_not_kind(asking)
    if reason is None and facts.dtype not in mixture.DTYPES:
        reason = f"the weights are {facts.dtype}"
    if reason is None and device.type != "cuda":
        reason = f"the model is on {device}, and the kernel is for CUDA devices"
    if reason is not None:
        return own, "Transformers' own", reason
    return "one read of each chosen expert", f"with patch(): at most {mixture.MAX_TOKENS} tokens; {own} runs more", None


def _kernel(kernel: registry.Kernel, q: _Operand, k: _Operand, sinks: int) -> tuple[str, tuple[str, str] | None]:
    """(description of the kernel, None or the Hopper kernel and why it does not run). V has the shape of K."""
    if not isinstance(kernel, TritonKernel):
        return getattr(kernel, "__qualname__", type(kernel).__name__), None
    device = q.device
    where = kernel.where(device)
    if device.type != "cuda" or kernel.hopper is None:
        return f"{kernel.name}: {where}", None
    if not torch.cuda.is_available():
        return f"{kernel.hopper} where it can run, else {kernel.name}: {where}", None
    tensor = cast(torch.Tensor, k)
    name, reason = kernel.choice(cast(torch.Tensor, q), KV(tensor, tensor), Spec(sinks=sinks))
    return f"{name}: {where}", (kernel.hopper, reason) if reason else None


def _why(chosen: registry.Backend, served: str, q_len: int, facts: Facts) -> str:
    if chosen.decode is None:
        return f"{chosen.name!r} has one kernel for both phases"
    group = facts.num_heads // facts.num_kv_heads
    verdict = "at most" if served == "decode" else "more than"
    return f"{q_len:,} x {group} = {q_len * group:,} query rows per KV head, {verdict} {chosen.max_decode_rows}"
