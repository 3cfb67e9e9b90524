"""Rows of the kernel benchmark that time prefill, and a sliding window in prefill and decode."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from hf_fastattn.report.tables import thousands

from .shapes import DTYPE, LEAN, PORTABLE, PREFILL, READ, SPLIT_KV, Shape, compete, exact, make_inputs, ratios, sdpa
from .timing import Call, num_sets

RATE = 5e8  # flops per microsecond, to estimate the time of a call
TAIL = 64  # the exact result needs all scores: the last queries are a sufficient sample

# By head_dim first: Triton compiles once for each.
PREFILL_SHAPES = [
    Shape(batch, heads, kv_heads, head_dim, length, length, causal)
    for head_dim, heads, kv_heads in ((64, 32, 32), (128, 32, 8), (256, 16, 8))
    for batch, length in ((8, 2 << 10), (2, 8 << 10), (1, 16 << 10), (1, 64 << 10))
    for causal in (True, False)
]
# Other widths, values narrower than keys (latent attention), and many short prompts.
WIDTH_SHAPES = [
    Shape(batch, heads, kv_heads, head_dim, length, length, causal, value_dim)
    for head_dim, value_dim, heads, kv_heads, sizes in (
        (80, None, 32, 32, ((8, 2 << 10), (2, 8 << 10), (1, 16 << 10))),
        (96, None, 32, 32, ((8, 2 << 10), (2, 8 << 10), (1, 16 << 10))),
        (112, None, 32, 32, ((8, 2 << 10), (2, 8 << 10), (1, 16 << 10))),
        (192, None, 16, 16, ((8, 2 << 10), (2, 8 << 10))),
        (192, 128, 32, 32, ((8, 2 << 10), (2, 8 << 10))),
        (512, None, 8, 1, ((2, 4 << 10),)),
        (576, 512, 16, 1, ((2, 4 << 10),)),
        (128, None, 32, 8, ((16, 200), (16, 300), (16, 512))),
    )
    for batch, length in sizes
    for causal in (True, False)
]
LENGTH, WINDOW = 128 << 10, 4 << 10


@dataclass(frozen=True)
class Windowed:
    """A causal call in which a query sees the nearest `window` keys; all if None."""

    phase: str
    shape: Shape
    window: int | None

    def __str__(self) -> str:
        name = f"{self.phase}, {self.shape.batch} x {thousands(self.shape.kv_len)}"
        return name if self.window is None else f"{name}, window {thousands(self.window)}"


# A sequence of the window's length, the window in a long sequence, the long sequence without a window.
WINDOWED = [
    Windowed(phase, Shape(batch, 32, 8, 128, length, length if phase == "prefill" else 1), window)
    for phase, batches in (("prefill", (1,)), ("decode", (1, 16)))
    for batch in batches
    for length, window in ((WINDOW, None), (LENGTH, WINDOW), (LENGTH, None))
]


def _tail(out: torch.Tensor) -> torch.Tensor:
    return out[:, :, -TAIL:]


def _expected(inputs, **options) -> torch.Tensor:
    q, k, v = inputs
    return exact(_tail(q), k, v, **options)


def _sets(shape: Shape) -> int:
    q_bytes = shape.batch * shape.num_heads * shape.q_len * shape.head_dim * DTYPE.itemsize
    return num_sets(q_bytes + shape.kv_bytes)


def standard(q, k, v, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention by its formula: matmul, softmax, matmul, with all scores in memory. mask: True for hidden keys."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q * q.shape[3] ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        scores.masked_fill_(mask, float("-inf"))
    return torch.softmax(scores, -1) @ v


def peak_bytes(runs: dict[str, Call], device: torch.device) -> dict[str, int]:
    """Peak memory of one call of each, including its result; no entry for a call that fails, and none on the CPU."""
    found = {}
    for name, run in runs.items() if device.type == "cuda" else ():
        with contextlib.suppress(Exception):  # compete() reports the reason
            run(0)  # later calls reuse what the first one allocated
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            run(0)
            found[name] = torch.cuda.max_memory_allocated(device) - before
    if device.type == "cuda":
        torch.cuda.empty_cache()  # graphs have a separate memory pool
    return found


def prefill_row(shape: Shape, device: torch.device) -> dict:
    """TFLOP/s of the kernel of the backends, the portable kernel, sdpa flash, sdpa cuDNN and standard attention; peak bytes."""
    sets = _sets(shape)
    inputs = make_inputs(shape, sets, device)
    flops = 2 * shape.batch * shape.num_heads * shape.q_len * shape.kv_len * shape.dims / (2 if shape.causal else 1)
    mask = torch.ones(shape.q_len, shape.kv_len, dtype=torch.bool, device=device).triu_(1) if shape.causal else None
    peers: dict[str, Call] = {
        "sdpa_flash": lambda i: sdpa(SDPBackend.FLASH_ATTENTION, *inputs[i], causal=shape.causal),
        "sdpa_cudnn": lambda i: sdpa(SDPBackend.CUDNN_ATTENTION, *inputs[i], causal=shape.causal),
        "standard": lambda i: standard(*inputs[i], mask),
    }
    ours: dict[str, Call] = {
        "ours": lambda i: PREFILL(*inputs[i], causal=shape.causal),
        "portable": lambda i: PORTABLE(*inputs[i], causal=shape.causal),
    }
    peak = peak_bytes(peers | ours, device)
    expected = _expected(inputs[0], causal=shape.causal)
    found = compete(peers, ours, expected, sets=sets, us=flops / RATE, part=_tail)
    rates = {name: flops / us / 1e6 for name, us in found["us"].items()}
    row = shape.row() | found | {"tflops": rates, "peak_bytes": peak}
    for name, kernel, peer in (
        ("ours_over_sdpa_cudnn", "ours", "sdpa_cudnn"),
        ("ours_over_sdpa_flash", "ours", "sdpa_flash"),
        ("portable_over_sdpa_flash", "portable", "sdpa_flash"),
    ):
        row[name] = rates[kernel] / rates[peer] if peer in rates else None
    return row


def prefill_summary(rows: list[dict]) -> dict:
    return {name: ratios(rows, name) for name in ("ours_over_sdpa_cudnn", "ours_over_sdpa_flash", "portable_over_sdpa_flash")}


def widths_summary(rows: list[dict]) -> dict:
    """ours over cuDNN for each width of keys and values, and for short prompts."""
    widths: dict[str, list[dict]] = {}
    for row in rows:
        short = row["kv_len"] < 1 << 10
        dims = str(row["head_dim"]) if row["value_dim"] is None else f"{row['head_dim']}/{row['value_dim']}"
        widths.setdefault(f"{row['batch']} x {row['kv_len']}" if short else dims, []).append(row)
    return {name: ratios(its, "ours_over_sdpa_cudnn") for name, its in widths.items()}


def visible_pairs(q_len: int, kv_len: int, window: int | None) -> int:
    """Visible (query, key) pairs with a causal window, if the queries are the last q_len of kv_len tokens."""
    window = min(window or kv_len, kv_len)
    first = kv_len - q_len  # keys before the first query
    short = max(0, min(q_len, window - 1 - first))  # queries that see less than a full window
    return short * first + short * (short + 1) // 2 + (q_len - short) * window


def window_row(case: Windowed, device: torch.device) -> dict:
    """Microseconds of one call, and its work: the visible (query, key) pairs."""
    shape, window = case.shape, case.window
    pairs = visible_pairs(shape.q_len, shape.kv_len, window) * shape.batch
    if case.phase == "prefill":
        kernels = {"ours": PREFILL, "portable": PORTABLE}
        sets, us = _sets(shape), 4 * pairs * shape.num_heads * shape.head_dim / RATE
    else:
        kernels = {"ours": LEAN, "split_kv": SPLIT_KV}
        live_bytes = shape.kv_bytes * (window or shape.kv_len) // shape.kv_len  # bandwidth is the limit
        sets, us = num_sets(live_bytes), max(7, live_bytes / READ)
    inputs = make_inputs(shape, sets, device)
    found = compete(
        {"flash_attention_2": lambda i: _flash_window(*inputs[i], window)},
        {name: lambda i, kernel=kernel: kernel(*inputs[i], window=window) for name, kernel in kernels.items()},
        _expected(inputs[0], window=window),
        sets=sets,
        us=us,
        part=_tail,
    )
    return shape.row() | {"shape": str(case), "phase": case.phase, "window": window, "pairs": pairs} | found


def _flash_window(q, k, v, window: int | None) -> torch.Tensor:
    """FlashAttention-2 of torch, through the private op, which supports windows."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False, window_size_left=window and window - 1, window_size_right=0
    )[0]
    return out.transpose(1, 2)


def window_summary(rows: list[dict]) -> dict:
    """For each phase and batch, the time of the long windowed call in relation to its work.

    "over_proportion": its time per visible pair over that of a sequence of the window's length. "full_over_windowed": the time
    without a window over that with it.
    """
    found = {}
    for row in rows:
        if row["window"] is None:
            continue
        same = lambda r, row=row: all(r.get(what) == row.get(what) for what in ("phase", "batch", "run"))  # noqa: E731
        similar = [r for r in rows if r["window"] is None and same(r)]
        alone = next((r for r in similar if r["kv_len"] == row["window"]), None)
        full = next((r for r in similar if r["kv_len"] == row["kv_len"]), None)
        found[row["shape"]] = {
            kernel: {
                "over_proportion": alone and us / alone["us"][kernel] * alone["pairs"] / row["pairs"],
                "full_over_windowed": full and full["us"][kernel] / us,
            }
            for kernel, us in row["us"].items()
            if all(kernel in r["us"] for r in similar)
        }
    return found
