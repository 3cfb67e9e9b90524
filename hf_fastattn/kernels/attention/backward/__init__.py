"""Gradients of attention, in two launches: `dq`, which also stores lse and delta in pairs, then `dkdv` or, if it can, `hopper`.

They compute seven products instead of the five of a fused backward kernel. In return there are no atomics, results are
bitwise repeatable, and the pairs are as a rule the only workspace. Scores are recomputed from lse, so memory grows linearly
with the lengths.

With dropout, Z being 1 / (1 - p) where a weight is kept and else 0: dV = (Z * P)^T dO, dP = Z * dO V^T.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache
from types import ModuleType

import torch
import triton

from ... import checks
from ...dropout import keep_scale, threshold
from ...host import gpu, tables
from ...spec import KV, Gradients, Spec
from ..plan import Call
from .dkdv import dkdv_kernel
from .dq import dq_kernel


@cache
def _hopper() -> ModuleType:
    return importlib.import_module(f"{__name__}.hopper")  # Gluon is not imported on other architectures


def _on_hopper(q: torch.Tensor, kv: KV, dout: torch.Tensor) -> bool:
    return gpu.arch(q.device) == 90 and _hopper().supports(q, kv.k, kv.v, dout)


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
) -> Gradients:
    """`kernels.reference.backward` for heads of at most 256 dimensions."""
    checks.check_backward(q, kv, spec, spans, out, lse, dout, dlse, sink_logits, seed)
    checks.check_trained_widths(q, kv)
    call = Call.of((q, *kv.tensors, spans, sink_logits, None), kv.form, spec._replace(dropout=0.0), True, rows=True)
    out = checks.token_major(out)
    if dout.stride(3) != 1 or dout.dtype != q.dtype:  # the gradient of a sum is an expanded scalar
        dout = dout.to(q.dtype).contiguous()
    lse = lse.contiguous()
    stats = torch.empty(*lse.shape, 2, device=lse.device, dtype=torch.float32)  # pairs of lse in base 2 and delta
    dq, _ = checks.empty_outputs(q, call.head_dim, False)
    arguments = call.arguments()
    del arguments["LOAD_K"], arguments["LOAD_V"]
    arguments |= {"stride_ob": dout.stride(0), "stride_oh": dout.stride(1), "stride_om": dout.stride(2), "scale": call.scale}
    arguments |= {"Q": q, "K": kv.k, "V": kv.v, "DOut": dout, "Stats": stats, "Spans": q if spans is None else spans}
    dropped = spec.dropout > 0.0
    arguments |= {"Seed": seed, "drop_below": threshold(spec.dropout), "keep_scale": keep_scale(spec.dropout)}
    for_dq = tables.backward_dq(q.device, q.dtype, call.width, call.q_len)
    for_dkdv = tables.backward_dkdv(q.device, q.dtype, call.width, call.kv_len, dropped)
    hopper = None
    if not dropped and _on_hopper(q, kv, dout):
        hopper = _hopper().config(call.head_dim, call.value_dim, spec.softcap is not None)
    blocks = triton.cdiv(call.kv_len, (hopper or for_dkdv).BLOCK_N) * (2 if hopper is None and for_dkdv.split else 1)
    splits = tables.group_splits(q.device, blocks * call.num_kv_heads * call.batch, call.group)
    parts = (splits, call.batch, call.kv_len, call.num_kv_heads)
    dtype = q.dtype if splits == 1 else torch.float32
    dk, dv = (torch.empty(*parts, dim, device=q.device, dtype=dtype) for dim in (call.head_dim, call.value_dim))
    # Launched by Triton, without a cached Launch: the lengths of packed sequences change in every step.
    with torch.cuda.device_of(q):
        dq_kernel[(triton.cdiv(call.q_len, for_dq.BLOCK_M), call.num_heads, call.batch)](
            **arguments,
            Out=out,
            Lse=lse,
            DLse=lse if dlse is None else dlse.to(lse.dtype).contiguous(),
            DQ=dq,
            num_heads=call.num_heads,
            C=replace(call.constants(for_dq, packed=False), DROPOUT=dropped),
            HAS_DLSE=dlse is not None,
            WRITE_DQ=needs[0],
            num_warps=for_dq.num_warps,
            num_stages=for_dq.num_stages,
        )
        if needs[1] and hopper is not None:
            _hopper().launch(hopper, call, dout, stats, dk, dv, splits)
        elif needs[1]:
            dkdv_kernel[(blocks, call.num_kv_heads * splits, call.batch)](
                **arguments,
                DK=dk,
                DV=dv,
                C=replace(call.constants(for_dkdv, packed=False), DROPOUT=dropped),
                SPLIT=for_dkdv.split,
                SPLITS=splits,
                num_warps=for_dkdv.num_warps,
                num_stages=for_dkdv.num_stages,
            )
    dsink = None if sink_logits is None else checks.sink_gradient(sink_logits, lse, stats[..., 1])
    if not needs[1]:
        return dq if needs[0] else None, None, None, dsink
    dk, dv = (x[0] if splits == 1 else x.sum(0).to(q.dtype) for x in (dk, dv))
    return dq if needs[0] else None, dk.transpose(1, 2), dv.transpose(1, 2), dsink
