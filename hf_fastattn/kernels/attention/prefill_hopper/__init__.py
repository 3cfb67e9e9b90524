"""FlashAttention forward for Hopper (sm_90) in Gluon, warp-specialized: a producer warp loads, two warpgroups compute.

One program holds 128 query rows, 64 to each of two consumer warpgroups. A producer warp streams Q, K and V through shared memory
with the tensor memory accelerator (TMA); full and empty mbarriers per buffer are all that couples it to the consumers. A consumer
issues S = Q K^T of tile i + 1 and O += P V of tile i together, and computes the softmax of tile i + 1 while the second product
runs (section 3.2 of the source); named barriers make the consumers take turns, so that one fills the tensor cores while the other
exponentiates (section 3.1). P never leaves registers. Programs are persistent, one per SM, and draw their work from a counter.

This file launches; kernel.py has the warps, plan.py their order of work, counters.py what they draw it from, pipe.py what passes
between them, product.py the matrix products, merge.py what shares leave, tile.py the rest of the arithmetic on one tile.

Slots at and past a row's KV_STOP may hold anything, NaN too, and 0 * NaN is NaN. TMA fills zeros past the buffer's end; where the
live keys end earlier, only the item's first tile can reach past them, and consumers zero those rows of V in shared memory before
they use it. Both consumers may do so at once: they write the same zeros to rows that nobody reads otherwise.

Heads may have any multiple of 8 dimensions: their buffers have a power of two columns, which TMA fills up with zeros, and
products take them in parts of powers of two (product.py), 96 = 64 + 32.

Where blocks of query rows alone leave much of the GPU idle, and the caller allows it, each is cut into shares of its tiles
(`schedule.splits_of`), which are items of their own; merge.py merges them in a second launch, in a fixed order.

Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024), sections 3.1, 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ... import checks
from ...host import gpu
from ...spans import WORDS
from ...spec import KV, Spec
from ..plan import Call
from ..schedule import splits_of
from .counters import counters_of
from .kernel import BLOCK_M, prefill_hopper_kernel
from .merge import merge_shares, workspace_of

MAX_HEAD_DIM = 256
MIN_Q_LEN = 65  # below this a block of 128 rows is mostly empty
_L2_BYTES = 32 << 20  # K and V of the heads in one section


@dataclass(frozen=True, slots=True)
class Config:
    """One compiled shape of the kernel.

    BLOCK_N: keys per tile. stages: tiles of K, and of V, in flight. q_stages: items whose Q is in flight. own_out: O leaves
    through a buffer of its own and not through Q's. exp2_on_fma: one in so many exponentials runs on the FMA units, none where 0;
    see `tile._exp2`. k_width, v_width: columns of K and of V that are multiplied; see product.py. split: items
    are shares of blocks of rows.
    """

    BLOCK_N: int
    stages: int = 2
    q_stages: int = 1
    own_out: bool = True
    exp2_on_fma: int = 0
    k_width: int = 0
    v_width: int = 0
    split: bool = False


# By columns of a buffer, the fastest on an H200 over lengths 2k to 64k, causal and not; docs/dev/log.md has slower variants.
CONFIGS = {
    64: Config(128, stages=3, q_stages=2, exp2_on_fma=8),
    128: Config(128),
    256: Config(64, own_out=False),
}
_SPEED = {64: 1.3, 128: 1.55, 256: 1.5}  # by the same, beside `lean` on as many rows and keys


def columns(head_dim: int) -> int:
    """Columns of the buffers of heads that wide."""
    return max(64, 1 << (head_dim - 1).bit_length())


def speed(head_dim: int) -> float:
    """How many products of a row and a key the kernel computes in the time in which `lean` computes one."""
    return _SPEED[columns(head_dim)]


@cache
def config(head_dim: int, value_dim: int) -> Config:
    """The kernel for keys and values that wide."""
    wide = columns(max(head_dim, value_dim))
    k_width = -(-head_dim // 16) * 16
    # A third part of V costs as much as the zeros that it leaves out.
    v_width = next(width for width in range(-(-value_dim // 16) * 16, 257, 16) if width.bit_count() <= 2)
    own_out = CONFIGS[wide].own_out or columns(value_dim) != columns(head_dim)  # which Q's buffer does not fit
    return replace(CONFIGS[wide], k_width=k_width, v_width=v_width, own_out=own_out)


def why_not(q: torch.Tensor, kv: KV, sinks: int = 0) -> str | None:
    """A sentence on why this kernel cannot take these inputs (or should not: few queries), or None where it can.

    Everything else that `attention.prefill.prefill` takes (spans, window, softcap, sink logits, scale) it takes as well.
    """
    arch = gpu.arch(q.device)
    if arch != 90:
        return f"The Hopper prefill kernel needs compute capability 9.0; {q.device} has {arch / 10:.1f}."
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"The Hopper prefill kernel takes float16 and bfloat16, not {q.dtype}."
    for what, width in (("head_dim", q.shape[3]), ("values of head_dim", kv.v.shape[3])):
        if width > MAX_HEAD_DIM or width % 8:
            return f"The Hopper prefill kernel takes {what} of multiples of 8 up to {MAX_HEAD_DIM}, not {width}."
    if q.shape[2] < MIN_Q_LEN:
        return f"The Hopper prefill kernel is for {MIN_Q_LEN} queries or more, not {q.shape[2]}."
    if kv.form.load_k is not None or kv.form.load_v is not None:
        return f"The Hopper prefill kernel reads plain K and V by TMA, not those of the form {kv.form.name!r}."
    if sinks:
        return f"The Hopper prefill kernel has no tile for sinks, and sinks is {sinks}."
    for name, x in (("q", q), ("k", kv.k), ("v", kv.v)):
        aligned = x.data_ptr() % 16 == 0 and all(
            size == 1 or (stride > 0 and stride % 8 == 0) for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
        )
        if not aligned:
            return (
                "The Hopper prefill kernel reads by TMA, which needs addresses and strides in multiples of 16 bytes; "
                f"{name} has strides {tuple(x.stride())} at an address of {x.data_ptr() % 16} modulo 16."
            )
    return None


@cache
def _layout(rows: int, columns: int, dtype: torch.dtype):
    element = gl.float16 if dtype == torch.float16 else gl.bfloat16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], element)


def _descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """TMA descriptor of x (batch, heads, length, head_dim) in boxes of `rows` rows of one head."""
    head_dim, width = x.shape[3], columns(x.shape[3])
    # The stride of a dimension of one element says nothing, and may not be what TMA allows.
    strides = [head_dim if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, width], _layout(rows, width, x.dtype))


def prefill(
    q: torch.Tensor,
    kv: KV,
    spec: Spec = Spec(),  # noqa: B008 (a tuple)
    spans: torch.Tensor | None = None,
    *,
    sink_logits: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    return_lse: bool = False,
    shares: bool = False,
):
    """Exact attention of many query rows; arguments, result and errors as in `kernels.reference.attention`.

    shares: K and V may be cut; the number of shares depends on the shapes, batch and heads among them, and rounding on it.

    Raises ValueError, with the sentence of `why_not`, for inputs that it cannot take.
    """
    call = Call.of((q, *kv.tensors, spans, sink_logits, inv_freq), kv.form, spec, return_lse)
    reason = why_not(q, kv, spec.sinks)
    if reason is not None:
        raise ValueError(reason)
    C = config(call.head_dim, call.value_dim)
    if return_lse:  # in fp32, where the polynomial of `tile._exp2` shows
        C = replace(C, exp2_on_fma=0)
    out, lse = checks.empty_outputs(q, call.value_dim, return_lse)
    splits = splits_of(q, kv, spec)[0] if shares else 1
    C = replace(C, split=splits > 1)
    num_blocks = splits * -(-call.q_len // BLOCK_M)
    num_items = num_blocks * call.num_heads * call.batch
    fitting = max(1, _L2_BYTES // (call.kv_len * (call.head_dim + call.value_dim) * q.element_size()))
    section = call.group * (1 << (fitting.bit_length() - 1))
    scale_log2, cap_log2 = checks.log2_scales(call.scale, spec.softcap)
    lse_or_workspace, stats_start = (lse, 0) if splits == 1 else workspace_of(call, splits, BLOCK_M)
    with torch.cuda.device_of(q):
        prefill_hopper_kernel[(min(num_items, gpu.num_sms(q.device)),)](
            _descriptor(q, 64),
            _descriptor(kv.k, C.BLOCK_N),
            _descriptor(kv.v, C.BLOCK_N),
            _descriptor(out, 64),
            lse_or_workspace,
            q if spans is None else spans,
            q if sink_logits is None else sink_logits,
            counters_of(q.device),
            0 if spans is None else spans.stride(0),
            num_items,
            num_blocks,
            call.num_heads,
            call.group,
            call.batch * call.num_heads,
            section,
            call.q_len,
            call.kv_len,
            call.window,
            scale_log2,
            cap_log2,
            C=C,
            HAS_SPANS=spans is not None,
            HAS_WORDS=spans is not None and spans.shape[3] > WORDS,
            IS_CAUSAL=spec.causal,
            HAS_SOFTCAP=spec.softcap is not None,
            HAS_SINK_LOGITS=splits == 1 and sink_logits is not None,
            WRITE_LSE=splits == 1 and return_lse,
            num_warps=4,
        )
        if splits > 1:
            merge_shares(call, splits, BLOCK_M, C.BLOCK_N, out, lse, lse_or_workspace, stats_start, sink_logits)
    return (out, lse) if return_lse else out
