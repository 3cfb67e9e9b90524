"""FlashAttention forward for Hopper (sm_90) in Gluon: the launcher of a warp-specialized kernel (kernel.py).

    out = softmax(scale q K^T) V, and lse

A program computes 128 rows, 64 in each of two consumer warpgroups, for which a producer warp loads Q, K and V by TMA. Programs
are persistent, one per SM, and take their items from a counter. If blocks of rows leave much of the GPU idle, and the caller
allows it, blocks beyond those that fill it are divided into shares of their keys (`schedule.splits_of`), which merge.py merges
in a fixed order. order.py has the order of blocks, plan.py that of items and tiles, item.py one item, pipe.py the
communication between warps, product.py the matrix products, tile.py the other arithmetic on a tile, output.py the output of a
block.

Rounds: P to V's dtype, and the result; sums, shares and lse are fp32; some exponentials are a polynomial if no lse is asked
for. Limits: `why_not`. Oracle: `kernels.reference.attention`.

Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision" (2024), sections 3.1,
3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from ... import checks
from ...host import gpu, launch
from ...host.counters import counters_of
from ...host.descriptors import describe, reads
from ...paged import FORMS
from ...spans import has_rows, has_words, no_spans
from ...spec import KV, Form, Spec, is_plain
from ..plan import Call
from ..schedule import pack_of, splits_of
from .item import BLOCK_M
from .kernel import prefill_hopper_kernel
from .merge import merge_shares
from .pipe import SWIZZLED, columns

MAX_HEAD_DIM = 256
MIN_ROWS = 65  # with fewer rows at least half of a block of 128 rows is empty
_L2_BYTES = 32 << 20  # the most that K and V of the heads in one section take


@dataclass(frozen=True, slots=True)
class Config:
    """The constants of one compiled kernel.

    BLOCK_N: keys per tile. stages: tiles of K, and of V, in flight. q_stages: items whose Q is in flight. own_out: O is stored
    through a separate buffer, not through that of Q. exp2_on_fma: one of so many exponentials is computed by the FMA units, none
    if 0 (see `tile._exp2`). k_width, v_width: columns of K and of V that are multiplied (see product.py). split: some items are
    shares of blocks of rows. pack: heads of a KV head that share a block. rows: the spans have an interval for each query. page:
    tokens of a page; 0: K and V are plain. box: of a page the tokens that one load of a tile has, at a multiple of which tiles
    begin; 1 of plain K and V.
    """

    BLOCK_N: int
    stages: int = 2
    q_stages: int = 1
    own_out: bool = True
    exp2_on_fma: int = 0
    k_width: int = 0
    v_width: int = 0
    split: bool = False
    pack: int = 1
    rows: bool = False
    page: int = 0

    @property
    def box(self) -> int:
        return min(self.page, self.BLOCK_N) or 1


# By the columns of a buffer, the fastest on an H200 for lengths of 2k to 64k, causal or not; docs/dev/log.md has slower variants.
CONFIGS = {
    64: Config(128, stages=3, q_stages=2, exp2_on_fma=8),
    128: Config(128),
    256: Config(64, own_out=False),
}


@cache
def config(head_dim: int, value_dim: int) -> Config:
    """The configuration for these widths of keys and values."""
    wide = columns(max(head_dim, value_dim))
    k_width = -(-head_dim // 16) * 16
    # At most two parts of V: a third costs as much as the zeros that it saves.
    v_width = next(width for width in range(-(-value_dim // 16) * 16, 257, 16) if width.bit_count() <= 2)
    own_out = CONFIGS[wide].own_out or columns(value_dim) != columns(head_dim)  # Q's buffer has another width
    return replace(CONFIGS[wide], k_width=k_width, v_width=v_width, own_out=own_out)


def why_not(q: torch.Tensor, kv: KV, sinks: int = 0, shares: bool = False) -> str | None:
    """Why this kernel does not support these inputs (or is too slow: few queries), as a sentence; None if it does.

    It supports the other arguments of `attention.prefill.prefill`: spans, window, softcap, sink logits, scale. shares: whether K
    and V may be divided into shares. The queries of a KV head then count, otherwise those of one head.
    """
    arch = gpu.arch(q.device)
    if arch != 90:
        return f"The Hopper prefill kernel needs compute capability 9.0; {q.device} has {arch / 10:.1f}."
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"The Hopper prefill kernel supports float16 and bfloat16, not {q.dtype}."
    for what, width in (("queries and keys", q.shape[3]), ("values", kv.sizes.value_dim)):
        if width > MAX_HEAD_DIM or width % 8:
            return f"The Hopper prefill kernel needs {what} with a head_dim in multiples of 8 up to {MAX_HEAD_DIM}, not {width}."
    rows = q.shape[2] * (q.shape[1] // max(kv.k.shape[1], 1) if shares else 1)
    if rows < MIN_ROWS:
        of = " of a KV head" if shares else ""
        return f"The Hopper prefill kernel is for {MIN_ROWS} queries{of} or more, not {rows}."
    if not (is_plain(kv.form) or page_of(kv)):
        return f"The Hopper prefill kernel reads K and V by TMA, plain or in pages, not those of the form {kv.form.name!r}."
    if sinks:
        return f"The Hopper prefill kernel does not support sinks; sinks is {sinks}."
    for name, x in (("q", q), ("k", kv.k), ("v", kv.v)):
        if x.data_ptr() % 16 or not reads(x):
            return (
                "The Hopper prefill kernel reads by TMA, which needs addresses and strides in multiples of 16 bytes; "
                f"{name} has strides {tuple(x.stride())} at an address of {x.data_ptr() % 16} modulo 16."
            )
    return None


def page_of(kv: KV) -> int:
    """Tokens of a page, if K and V are in pages that the kernel reads; otherwise 0."""
    return kv.k.shape[2] if kv.pages is not None and kv.form is FORMS.get(kv.k.shape[2]) else 0


def _describe(x: torch.Tensor, *rows: int) -> Callable[[torch.Tensor], Any]:
    """The TMA descriptor of x (batch, KV heads, ..., head_dim) in boxes of `rows` of the middle dimensions."""
    return describe(x, (1, 1, *rows, columns(x.shape[-1])))


def _packed(x: torch.Tensor, group: int, pack: int) -> Callable[[torch.Tensor], Any]:
    """The descriptor of queries or outputs (batch, heads, q_len, head_dim) in boxes of 64 rows of `pack` heads of a KV head."""
    by_query = x.unflatten(1, (-1, group)).transpose(2, 3)
    return _describe(by_query, 64 // pack, pack)


class Plan(NamedTuple):
    """The launch of the kernel and, if some items are shares, that of their merge; and the number of floats in the workspace
    between them."""

    launch: launch.Launch
    merge: launch.Launch | None
    workspace_size: int


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

    shares: K and V may be divided into shares. Their number, and with it the rounding, depends on the shapes, including batch and
    num_heads, and for one row on how many queries the spans call padding.

    Raises ValueError, with the sentence of `why_not`, for inputs that it does not support.
    """
    aligned = (q.data_ptr() | kv.k.data_ptr() | kv.v.data_ptr()) % 16 == 0
    plan = _prepare((q, *kv.tensors, spans, sink_logits, inv_freq), kv.form, spec, return_lse, shares, aligned)
    out, lse = checks.empty_outputs(q, kv.v.shape[3], return_lse)
    workspace = torch.empty(plan.workspace_size, device=q.device, dtype=torch.float32)
    spans = no_spans(q.device, spec.causal, kv.sizes.kv_len - q.shape[2]) if spans is None else spans
    sink_logits = q if sink_logits is None else sink_logits
    plan.launch(q, kv.k, kv.v, out, lse, workspace, spans, sink_logits, counters_of(q.device), kv.pages)
    if plan.merge is not None:
        plan.merge(out, lse, workspace, spans, sink_logits)
    return (out, lse) if return_lse else out


@launch.remember
def _prepare(tensors, form: Form, spec: Spec, return_lse: bool, shares: bool, aligned: bool) -> Plan:
    """Check the arguments and prepare the launches. aligned: whether q, k and v are where TMA can read them."""
    call = Call.of(tensors, form, spec, return_lse, rows=True)
    q, *of_kv, spans, sink_logits, _ = tensors
    kv = KV(of_kv[0], of_kv[1], form, *of_kv[2:])
    reason = why_not(q, kv, spec.sinks, shares)
    if reason is not None:
        raise ValueError(reason)
    C = config(call.head_dim, call.value_dim)
    if return_lse:  # in fp32, in which the error of the polynomial of `tile._exp2` is visible
        C = replace(C, exp2_on_fma=0)
    rows = has_rows(spans)
    pack = pack_of(call.q_len, call.group, has_words(spans))
    packs_each = -(-call.group // pack)
    num_packs, num_blocks = call.num_kv_heads * packs_each, -(-call.q_len * pack // BLOCK_M)
    blocks = num_blocks * num_packs * call.batch
    whole, splits = blocks, 1
    if shares and not rows:  # the host does not know how many keys an interval contains
        whole, splits = splits_of(q, kv, spec, pack, columns(max(call.head_dim, call.value_dim)))
    num_shares = (blocks - whole) * splits
    num_items = whole + num_shares
    C = replace(C, split=num_shares > 0, pack=pack, rows=rows, page=page_of(kv))
    fitting = max(1, _L2_BYTES // (call.kv_len * (call.head_dim + call.value_dim) * q.element_size()))
    section = packs_each * (1 << (fitting.bit_length() - 1))
    order = (num_blocks, num_packs, call.batch * num_packs, section, whole)
    scale_log2, cap_log2 = checks.log2_scales(call.scale, spec.softcap)
    out, _ = checks.empty_outputs(q.to("meta"), call.value_dim, False)
    start = launch.Launch(
        prefill_hopper_kernel,
        (min(num_items, gpu.num_sms(q.device)),),
        None,
        (
            _packed(q, call.group, pack),
            *(describe(x, (1, 1, C.box, SWIZZLED)) if C.page else _describe(x, C.BLOCK_N) for x in (kv.k, kv.v)),
            _packed(out, call.group, pack),
        ),
        stride_sb=0 if spans is None else spans.stride(0),
        num_items=num_items,
        num_packs=num_packs,
        total_packs=call.batch * num_packs,
        group=call.group,
        section=section,
        whole=whole,
        q_len=call.q_len,
        kv_len=call.kv_len,
        window=call.window,
        scale_log2=scale_log2,
        cap_log2=cap_log2,
        C=C,
        HAS_WORDS=has_words(spans),
        IS_CAUSAL=call.is_causal,
        HAS_SOFTCAP=spec.softcap is not None,
        HAS_SINK_LOGITS=sink_logits is not None,
        WRITE_LSE=return_lse,
        num_warps=4,
    )
    if num_shares == 0:
        return Plan(start, None, 0)
    stats_start = num_shares * BLOCK_M * call.block_dv
    merge = merge_shares(call, pack, order, splits, BLOCK_M, C.BLOCK_N, C.box, stats_start)
    return Plan(start, merge, stats_start + num_shares * BLOCK_M * 2)
