"""One attention call to be timed: its shape, its inputs, its exact result, and torch's kernels for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_fastattn.kernels import TritonKernel, reference
from hf_fastattn.kernels.spec import KV, Spec, call
from hf_fastattn.registry import Backend
from hf_fastattn.report.tables import thousands

from . import timing

DTYPE = torch.bfloat16
READ = 4.5e6  # bytes per microsecond that a GPU with HBM3e reads, to estimate the time of a call and for the limit of bytes
GPUS = 8  # of the LeanAttention paper's figure 8, which divide the heads
REFERENCE_BYTES = 1 << 30  # bytes of K in float32 that are in memory at once for the exact result

# The Triton kernels on a GPU; on the CPU their references, so that everything except the times can be tested there.
LEAN, SPLIT_KV, PORTABLE = (partial(call, TritonKernel(name)) for name in ("lean", "split_kv", "prefill"))
PREFILL = partial(call, TritonKernel("prefill", hopper="prefill_hopper"))  # the kernel that the backends run


class WrongResult(RuntimeError):
    """The result of a kernel is wrong."""


@dataclass(frozen=True)
class Shape:
    """q is (batch, num_heads, q_len, head_dim); K and V are (batch, num_kv_heads, kv_len, head_dim), V of value_dim if given."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_len: int
    q_len: int = 1
    causal: bool = True
    value_dim: int | None = None

    def __str__(self) -> str:
        dims = str(self.head_dim) if self.value_dim is None else f"{self.head_dim}/{self.value_dim}"
        name = f"{self.batch}, {self.num_heads}/{self.num_kv_heads}, {dims}, {thousands(self.kv_len)}"
        if self.q_len == self.kv_len:
            return f"{name}, {'causal' if self.causal else 'not causal'}"
        return name if self.q_len == 1 else f"{name}, {self.q_len} queries"

    @property
    def dims(self) -> int:
        """Numbers of a key and of a value, added."""
        return self.head_dim + (self.value_dim or self.head_dim)

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.num_kv_heads * self.kv_len * self.dims * DTYPE.itemsize

    def row(self) -> dict:
        """The fields of a row that identify its shape."""
        return {"shape": str(self), **asdict(self), "kv_bytes": self.kv_bytes}


def kernel_of_lean(shape: Shape, q: torch.Tensor, k: torch.Tensor, backend: Backend) -> str:
    """The kernel that `backend`, a lean, runs for this shape: "stream_k", "split_kv", or the name of a prefill kernel."""
    phase, kernel = backend.kernel(shape.q_len, shape.num_heads, shape.num_kv_heads)
    if phase == "prefill":
        name = kernel.choice(q, KV(k, k), Spec(causal=shape.causal))[0] if q.is_cuda else kernel.name
        if name != "lean":
            return name
    rows, heads = shape.q_len * shape.num_heads // shape.num_kv_heads, shape.batch * shape.num_kv_heads
    from hf_fastattn.kernels.attention.schedule import choose  # not every benchmark needs Triton

    return "split_kv" if choose(q.device, q.dtype, shape.head_dim, rows, heads, shape.kv_len, uniform=True)[1] else "stream_k"


def make_inputs(shape: Shape, sets: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """`sets` independent (q, k, v) of normal noise."""
    kv = (shape.batch, shape.num_kv_heads, shape.kv_len)
    sizes = (
        (shape.batch, shape.num_heads, shape.q_len, shape.head_dim),
        (*kv, shape.head_dim),
        (*kv, shape.value_dim or shape.head_dim),
    )
    new = lambda size: torch.randn(size, device=device, dtype=DTYPE)  # noqa: E731
    return [(new(sizes[0]), new(sizes[1]), new(sizes[2])) for _ in range(sets)]


def exact(q, k, v, spans=None, **options) -> torch.Tensor:
    """The fp32 reference, for a few KV heads of a row at a time, because it converts them to fp32."""
    group, heads = q.shape[1] // k.shape[1], k.shape[1]
    step = max(1, REFERENCE_BYTES // (4 * k.shape[2] * k.shape[3]))
    rows = []
    for b in range(q.shape[0]):
        parts = []
        for h in range(0, heads, step):
            its = (x[b : b + 1, n * h : n * (h + step)] for x, n in ((q, group), (k, 1), (v, 1)))
            parts.append(call(reference.attention, *its, None if spans is None else spans[b : b + 1], **options))
        rows.append(torch.cat(parts, 1))
    return torch.cat(rows).float()


def check(name: str, out: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise WrongResult for an error above 4 units of rounding of the largest value; correct kernels stay below 2."""
    error = (out.float() - expected).abs().max().item()
    allowed = 4 * torch.finfo(out.dtype).eps * expected.abs().max().item()
    if not error <= allowed:  # also for NaN
        raise WrongResult(f"{name} is wrong: error {error:.2e}, allowed {allowed:.2e}.")


def compete(
    peers: dict[str, timing.Call],
    ours: dict[str, timing.Call],
    expected: torch.Tensor,
    *,
    sets: int,
    us: float | None,
    part: Callable[[torch.Tensor], torch.Tensor] = lambda out: out,
    ready: Callable[[], object] = lambda: None,
    **rounds: float,
) -> dict:
    """Check all rivals on input set 0, then time them: the "us", "us_range" and "errors" of a row.

    A peer that cannot run the shape, or whose result is wrong, is skipped, with the reason in "errors". A wrong result of one of
    the package's kernels raises WrongResult. `expected` is the exact `part` of the result; `us` an estimate of the time of a
    call, None to measure one of each; `ready` is called before the times; rounds: see `timing.time_rivals`.
    """
    calls: dict[str, int] = {}
    runs, errors, device = {}, {}, expected.device
    for name, run in {**peers, **ours}.items():
        try:
            check(name, part(run(0)), expected)
            took = timing.elapsed_us(lambda run=run: run(min(1, sets - 1)), device) if us is None else us
            calls[name] = timing.num_calls(sets, took)
            runs[name] = timing.record(run, sets, calls[name], device)
        except Exception as error:  # any error: the others are still timed
            if name in ours:
                raise
            errors[name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
    ready()
    return timing.medians(timing.time_rivals(runs, calls, device, **rounds)) | {"errors": errors}


def bandwidth(device: torch.device) -> float | None:
    """TB/s at which lean reads 2 GiB of K/V, for the bandwidth limit in pictures; None on the CPU."""
    if device.type != "cuda":
        return None
    shape = Shape(1, 32, 8, 128, 512 << 10)
    inputs = make_inputs(shape, 2, device)
    found = compete({}, {"lean": lambda i: LEAN(*inputs[i])}, exact(*inputs[0]), sets=2, us=shape.kv_bytes / READ)
    return shape.kv_bytes / found["us"]["lean"] / 1e6


def best_peer(us: dict[str, float]) -> float | None:
    """Microseconds of the faster of torch's fast backends that ran."""
    return min((us[name] for name in ("sdpa_flash", "sdpa_cudnn") if name in us), default=None)


def sdpa(backend: SDPBackend, q, k, v, causal: bool = False, mask: torch.Tensor | None = None) -> torch.Tensor:
    """torch's scaled_dot_product_attention on one backend, with K and V not expanded."""
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )


def sdpa_masked(q, k, v, mask: torch.Tensor) -> torch.Tensor:
    """sdpa as Transformers calls it with a mask: K and V expanded to all heads, and torch's choice of backend."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def ratios(rows: list[dict], name: str) -> dict:
    """Geometric mean, smallest and largest of a ratio over the rows that have it, and the shape of the smallest."""
    having = [row for row in rows if row.get(name) is not None]
    if not having:
        return {"rows": 0}
    values: Sequence[float] = [row[name] for row in having]
    worst = min(having, key=lambda row: row[name])
    return {
        "rows": len(values),
        "geometric_mean": statistics.geometric_mean(values),
        "smallest": worst[name],
        "smallest_at": worst["shape"],
        "largest": max(values),
    }
