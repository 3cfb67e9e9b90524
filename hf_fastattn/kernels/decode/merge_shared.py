"""Merge what rows see by themselves with what a group of rows sees together, in one launch, in place.

    w = sigmoid(lse_once[place[b]] - lse[b]),  out[b] += w (once[place[b]] - out[b])

Rounds: the result, to its dtype; sums are fp32. Limits: one query of each row. Oracle: `_merge_torch`, and `kernels.merge.merge`.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU tensors need no Triton
    triton = None

from .. import INTERPRETED
from ..host import gpu, launch, tables

HEADS = 8  # of a program


def merge_shared(
    out: torch.Tensor, lse: torch.Tensor, once: torch.Tensor, lse_once: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """Both merged: `out`, overwritten by the kernel, or a new tensor where torch runs.

    out, lse: attention of rows over their own keys, (rows, heads, 1, head_dim) and (rows, heads, 1), fp32, finite. once,
    lse_once: of the queries of groups over the keys that they share, (groups, heads, most, head_dim) and (groups, heads, most);
    lse -inf where a query sees none. place: int64 (rows,), of each row in (groups, most), flattened.
    """
    if triton is None or torch.compiler.is_compiling() or not (INTERPRETED or gpu.on_gpu(out.device)):
        return _merge_torch(out, lse, once, lse_once, place)
    _prepare((out, lse, once, lse_once, place))(out, lse, once, lse_once, place)
    return out


def _merge_torch(
    out: torch.Tensor, lse: torch.Tensor, once: torch.Tensor, lse_once: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    once, lse_once = once.transpose(1, 2).flatten(0, 1)[place], lse_once.transpose(1, 2).flatten(0, 1)[place]
    weight = torch.sigmoid(lse_once[..., None] - lse)[..., None]
    return torch.lerp(out.float(), once[:, :, None].float(), weight).to(out.dtype)


@launch.remember
def _prepare(tensors: tuple[torch.Tensor, ...]) -> launch.Launch:
    out, lse, once, lse_once, _ = tensors
    rows, heads, _, head_dim = out.shape
    strides = {"ob": out, "oh": out, "lb": lse, "lh": lse, "gb": once, "gh": once, "gm": once}
    strides |= {"sb": lse_once, "sh": lse_once, "sm": lse_once}
    return launch.Launch(
        merge_shared_kernel,
        (rows, triton.cdiv(heads, HEADS)),
        **{f"stride_{name}": tensor.stride("bhm".index(name[1])) for name, tensor in strides.items()},
        heads=heads,
        most=once.shape[2],
        HEADS=HEADS,
        DIM=head_dim,
        BLOCK_D=tables.block_d(head_dim),
        **early(out.device),
        num_warps=4,
    )


if triton is not None:
    from ..host.overlap import early, let_next_begin, wait_for_inputs

    @triton.jit(
        do_not_specialize=[
            "stride_ob", "stride_oh", "stride_lb", "stride_lh", "stride_gb", "stride_gh", "stride_gm", "stride_sb", "stride_sh",
            "stride_sm", "heads", "most",
        ],
        do_not_specialize_on_alignment=["Place"],
    )  # fmt: skip
    def merge_shared_kernel(
        Out,  # (rows, heads, 1, head_dim), read and written
        Lse,  # (rows, heads, 1), fp32
        Once,  # (groups, heads, most, head_dim)
        LseOnce,  # (groups, heads, most), fp32
        Place,  # (rows,), int64
        stride_ob, stride_oh, stride_lb, stride_lh, stride_gb, stride_gh, stride_gm, stride_sb, stride_sh, stride_sm, heads, most,
        HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """One program per row and HEADS heads."""
        wait_for_inputs(EARLY)
        let_next_begin(EARLY)
        row = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        there = head < heads
        place = tl.load(Place + row)
        group, member = place // most, place % most
        once = tl.load(LseOnce + group * stride_sb + head * stride_sh + member * stride_sm, mask=there, other=0.0)
        lse = tl.load(Lse + row * stride_lb + head * stride_lh, mask=there, other=0.0)
        weight = 1 / (1 + tl.exp(lse - once))
        offs_d = tl.arange(0, BLOCK_D)
        mask = there[:, None] & (offs_d < DIM)[None, :]
        at = Out + row * stride_ob + (head * stride_oh)[:, None] + offs_d[None, :]
        out = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        at_once = Once + group * stride_gb + member * stride_gm + (head * stride_gh)[:, None] + offs_d[None, :]
        theirs = tl.load(at_once, mask=mask, other=0.0).to(tl.float32)
        out += weight[:, None] * (theirs - out)
        tl.store(at, out.to(Out.dtype.element_ty), mask=mask)
