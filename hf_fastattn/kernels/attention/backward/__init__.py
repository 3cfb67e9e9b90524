"""Gradients of attention, in two launches: `dq`, which also stores delta, then `dkdv` or, if it can, `hopper`.

They compute seven products instead of the five of a fused backward kernel. In return there are no atomics, results are
bitwise repeatable, and delta, for `dkdv` in pairs with lse, is as a rule the only workspace. Scores are recomputed from lse, so
memory grows linearly with the lengths.

Their files have formulas and roundings. Oracle: `kernels.reference.backward`.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
import triton

from ... import checks
from ...device.online import LOG2_E
from ...host import gpu, launch, tables
from ...spans import no_spans
from ...spec import KV, Form, Gradients, Spec, is_plain
from ..plan import Call
from .dkdv import dkdv_kernel
from .dq import dq_kernel


@cache
def _hopper() -> ModuleType:
    return importlib.import_module(f"{__name__}.hopper")  # Gluon is not imported on other architectures


class Plan(NamedTuple):
    """The launches of the gradients. parts: the sizes of dK and dV but for their head_dim, the first of them the number of sums
    that are still to be added. stats: the numbers that dq stores for each query and head: delta, or lse in base 2 and delta."""

    dq: launch.Launch
    dkdv: launch.Launch
    parts: tuple[int, ...]
    stats: int


def backward(
    q: torch.Tensor,
    kv: KV,
    spec: Spec = Spec(),  # noqa: B008 (a tuple)
    spans: torch.Tensor | None = None,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
    needs: tuple[bool, bool] = (True, True),
    portable: bool = False,
) -> Gradients:
    """`kernels.reference.backward` for heads of at most 256 dimensions. portable: without the Hopper kernel, which
    takes no bias."""
    if dout.stride(-1) != 1 or dout.dtype != q.dtype or dout.data_ptr() % 16:  # the gradient of a sum is an expanded scalar
        dout = _copied(dout, q.dtype)
    k, v = kv.k, kv.v
    by_tma = not portable and is_plain(kv.form) and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0
    plan = _prepare((q, *kv.tensors, spans, sink_logits, seed, out, lse, dout, dlse), kv.form, spec, needs[0], by_tma)
    if plan is None:  # the gradient of a mean over tokens has a stride of 0
        dout = _copied(dout, q.dtype)
        plan = _prepare((q, *kv.tensors, spans, sink_logits, seed, out, lse, dout, dlse), kv.form, spec, needs[0], by_tma)
        assert plan is not None
    out, lse = checks.token_major(out), lse.contiguous()
    dlse = lse if dlse is None else dlse.to(lse.dtype).contiguous()
    stats = torch.empty(*lse.shape, plan.stats, device=lse.device, dtype=torch.float32)
    dq = checks.empty_outputs(q, q.shape[3], False)[0] if needs[0] else None
    some_spans = no_spans(q.device, spec.causal) if spans is None else spans
    plan.dq(q, k, v, out, dout, lse, dlse, some_spans, q if dq is None else dq, stats, seed, kv.scales)
    dsink = None if sink_logits is None else checks.sink_gradient(sink_logits, lse, stats[..., -1])
    if not needs[1]:
        return dq, None, None, dsink
    dtype = q.dtype if plan.parts[0] == 1 else torch.float32
    dk, dv = (torch.empty(*plan.parts, x.shape[3], device=q.device, dtype=dtype) for x in (k, v))
    some_stats = (stats,) if plan.stats == 2 else (lse, stats)
    written = (x.view(q.dtype) for x in (dk, dv))  # one type: sums in fp32 would be another compiled kernel
    plan.dkdv(*(q, k, v, dout, *some_stats, some_spans, *written, seed, kv.scales)[: plan.dkdv.takes])
    dk, dv = (x[0] if plan.parts[0] == 1 else x.sum(0).to(q.dtype) for x in (dk, dv))
    return dq, dk.transpose(1, 2), dv.transpose(1, 2), dsink


def _copied(dout: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return dout.to(dtype, memory_format=torch.contiguous_format, copy=True)


@launch.remember
def _prepare(tensors, form: Form, spec: Spec, write_dq: bool, by_tma: bool) -> Plan | None:
    """Check the arguments and prepare the launches; None if dout has to be contiguous for the Hopper kernel.

    by_tma: whether the addresses of q, k and v suit the Hopper kernel; that of dout does.
    """
    q, k, v, *others, spans, sink_logits, seed, out, lse, dout, dlse = tensors
    kv = KV(k, v, form, *others)
    checks.check_backward(q, kv, spec, spans, out, lse, dout, dlse, sink_logits, seed)
    checks.check_trained_widths(q, kv)
    dropped = spec.dropout > 0.0
    call = Call.of((q, *kv.tensors, spans, sink_logits, None), form, spec, True, rows=True, dropout=True, seed=seed)
    for_dq = tables.backward_dq(q.device, q.dtype, call.width, call.q_len)
    for_dkdv = tables.backward_dkdv(q.device, q.dtype, call.width, call.kv_len, dropped)
    hopper = None
    if by_tma and not dropped and gpu.arch(q.device) == 90 and _hopper().supports(q, k, v):
        if not _hopper().reads(dout):
            return None
        hopper = _hopper().config(call.head_dim, call.value_dim, spec.softcap is not None)
    blocks = triton.cdiv(call.kv_len, (hopper or for_dkdv).BLOCK_N) * (2 if hopper is None and for_dkdv.split else 1)
    splits = tables.group_splits(q.device, blocks * call.num_kv_heads * call.batch, call.group)
    arguments = call.arguments()
    arguments |= {"stride_ob": dout.stride(0), "stride_oh": dout.stride(1), "stride_om": dout.stride(2), "scale": call.scale}
    arguments |= call.dropout()
    dq = launch.Launch(
        dq_kernel,
        (triton.cdiv(call.q_len, for_dq.BLOCK_M), call.num_heads, call.batch),
        **arguments,
        num_heads=call.num_heads,
        C=call.constants(for_dq, False, q, dout),
        HAS_DLSE=dlse is not None,
        WRITE_DQ=write_dq,
        PAIRS=hopper is None,
        LOG2_E=LOG2_E,
        num_warps=for_dq.num_warps,
        num_stages=for_dq.num_stages,
    )
    if hopper is not None:
        dkdv = _hopper().launch(hopper, call, dout, splits)
    else:
        dkdv = launch.Launch(
            dkdv_kernel,
            (blocks, call.num_kv_heads * splits, call.batch),
            **arguments,
            splits=splits,
            C=call.constants(for_dkdv, False, q, dout),
            SPLIT=for_dkdv.split,
            num_warps=for_dkdv.num_warps,
            num_stages=for_dkdv.num_stages,
        )
    return Plan(dq, dkdv, (splits, call.batch, call.kv_len, call.num_kv_heads), 2 if hopper is None else 1)
