"""Rotary position embedding of queries and keys in one launch, instead of ten or more over tensors as large as the queries.

    out = round(round(x * cos) + round(y * sin)),  y = (-x[D/2:], x[:D/2])

Options of `run`: pairs of neighbours, fewer dimensions than a head has, one cosine for each pair, one rounding. In a decode
graph the launch also computes the norms of the heads before it (`rms_norm`), and appends the rotated keys and the values as
`append` does.

Rounds: both products and the sum, with LATE the sum alone. Limits: `why_not`. Oracle: `apply_rotary_pos_emb` of Transformers,
whose bits it has.

Sources: Su et al., "RoFormer" (2021), section 3.4.2; for the order of dimensions and the roundings the models of Transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..checks import DTYPES
from ..device.tile import aligned_strides, head_of
from ..host import gpu, launch, tables
from ..host.overlap import early, let_next_begin, wait_for_inputs
from ..spec import KV, PLAIN, Form
from .append import check
from .rms_norm import moments, scaled

BLOCK_H = 8  # heads that a program rotates after one load of the cosines of their token


@triton.jit(do_not_specialize=["stride_slot", "capacity", "num_heads", "kv_heads", "tokens", "eps"])
def rope_kernel(
    Q,  # (batch, num_heads, tokens, head_dim)
    K,  # (batch, kv_heads, tokens, head_dim)
    Cos,  # (batch or 1, tokens, WIDTH), with OF_PAIR one for each pair
    Sin,  # (batch or 1, tokens, WIDTH), as Cos
    WeightQ,  # (head_dim,), of the norm before, or None
    WeightK,  # (head_dim,), of the norm before, or None
    NormedQ,  # (batch, num_heads, tokens, head_dim), Q after its norm, with OutQ's strides, written; or None
    NormedK,  # (batch, kv_heads, tokens, head_dim), K after its norm, with OutK's strides, written; or None
    OutQ,  # (batch, num_heads, tokens, head_dim), written
    OutK,  # (batch, kv_heads, tokens, head_dim), written
    Keys,  # (batch, kv_heads, capacity, head_dim), or as FORM stores it, written; or None
    Values,  # (batch, kv_heads, capacity, value_dim), or as FORM stores it, written; or None
    Scales,  # of FORM, which its store() may write, or None
    Centre,  # of FORM, which its store() may write, or None
    Pages,  # of FORM, or None
    NewV,  # (batch, kv_heads, tokens, value_dim), or None
    Slot,  # (1,) or (batch,), int64, or None
    Live,  # (1,), int64: tokens of a row that are appended, or None
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_km, stride_cb, stride_cm, stride_oqb, stride_oqh, stride_oqm,
    stride_okb, stride_okh, stride_okm, stride_keysb, stride_keysh, stride_keysm, stride_valuesb, stride_valuesh, stride_valuesm,
    stride_nvb, stride_nvh, stride_nvm, stride_slot, capacity, num_heads, kv_heads, tokens, eps,
    HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, WIDTH: tl.constexpr, INTERLEAVED: tl.constexpr, APART: tl.constexpr,
    OF_PAIR: tl.constexpr, LATE: tl.constexpr, CENTRED: tl.constexpr, NORM_LATE: tl.constexpr, ONE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, ALIGN: tl.constexpr, FORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per token and block of heads; the heads of K follow those of Q."""
    stride_qb, stride_qh, stride_qm = aligned_strides(stride_qb, stride_qh, stride_qm, ALIGN)
    stride_kb, stride_kh, stride_km = aligned_strides(stride_kb, stride_kh, stride_km, ALIGN)
    stride_oqb, stride_oqh, stride_oqm = aligned_strides(stride_oqb, stride_oqh, stride_oqm, ALIGN)
    stride_okb, stride_okh, stride_okm = aligned_strides(stride_okb, stride_okh, stride_okm, ALIGN)
    keys_strides = aligned_strides(stride_keysb, stride_keysh, stride_keysm, ALIGN)
    values_strides = aligned_strides(stride_valuesb, stride_valuesh, stride_valuesm, ALIGN)
    stride_nvb, stride_nvh, stride_nvm = aligned_strides(stride_nvb, stride_nvh, stride_nvm, ALIGN)
    row = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    of_q = head < num_heads
    of_k = (head >= num_heads) & (head < num_heads + kv_heads)
    kv_head = head - num_heads
    offs = tl.arange(0, BLOCK_D)[None, :]
    d_mask = offs < HEAD_DIM
    turns = offs < WIDTH
    if INTERLEAVED and not APART:
        pair, second = offs // 2, offs % 2
    else:
        pair, second = offs % (WIDTH // 2), offs // (WIDTH // 2)
    if INTERLEAVED:
        own, other = 2 * pair + second, 2 * pair + 1 - second
    else:
        own, other = offs, pair + (1 - second) * (WIDTH // 2)
    if APART:
        own = tl.where(turns, own, offs)
    at = pair if OF_PAIR else offs

    if NormedQ is not None:
        own_weight = tl.load(WeightQ + own, mask=of_q & d_mask, other=0.0) + tl.load(WeightK + own, mask=of_k & d_mask, other=0.0)
        other_weight = tl.load(WeightQ + other, mask=of_q & turns, other=0.0)
        other_weight += tl.load(WeightK + other, mask=of_k & turns, other=0.0)
    wait_for_inputs(EARLY)
    let_next_begin(EARLY)

    q_ptrs = Q + row * stride_qb + token * stride_qm + head * stride_qh
    k_ptrs = K + row * stride_kb + token * stride_km + kv_head * stride_kh
    x = tl.load(q_ptrs + own, mask=of_q & d_mask, other=0.0) + tl.load(k_ptrs + own, mask=of_k & d_mask, other=0.0)
    y = tl.load(q_ptrs + other, mask=of_q & turns, other=0.0) + tl.load(k_ptrs + other, mask=of_k & turns, other=0.0)
    # All loads come before the first store, for which a later one would wait.
    cos = tl.load(Cos + row * stride_cb + token * stride_cm + at, mask=turns, other=0.0)
    sin = tl.load(Sin + row * stride_cb + token * stride_cm + at, mask=turns, other=0.0)
    if Keys is not None:
        slot = tl.load(Slot + row * stride_slot) + token
        if Live is not None:
            slot = tl.where(token < tl.load(Live), slot, -1)
        v = tl.load(NewV + row * stride_nvb + token * stride_nvm + kv_head * stride_nvh + offs, mask=of_k & (offs < V_DIM))
    if NormedQ is not None:
        mean, scale = moments(x, eps, (of_q | of_k) & d_mask, HEAD_DIM, CENTRED)
        x = scaled(x, mean, scale, own_weight, None, NORM_LATE, ONE)
        y = scaled(y, mean, scale, other_weight, None, NORM_LATE, ONE)
        tl.store(NormedQ + row * stride_oqb + token * stride_oqm + head * stride_oqh + own, x, mask=of_q & d_mask)
        tl.store(NormedK + row * stride_okb + token * stride_okm + kv_head * stride_okh + own, x, mask=of_k & d_mask)
    y = tl.where(second == 0, -y, y)
    dtype = Q.dtype.element_ty
    by_cos, by_sin = x.to(tl.float32) * cos.to(tl.float32), y.to(tl.float32) * sin.to(tl.float32)
    if not LATE:
        by_cos, by_sin = by_cos.to(dtype).to(tl.float32), by_sin.to(dtype).to(tl.float32)
    out = tl.where(turns, by_cos + by_sin, x.to(tl.float32)).to(dtype)
    tl.store(OutQ + row * stride_oqb + token * stride_oqm + head * stride_oqh + offs, out, mask=of_q & d_mask)
    tl.store(OutK + row * stride_okb + token * stride_okm + kv_head * stride_okh + offs, out, mask=of_k & d_mask)
    if Keys is not None:
        inside = (slot >= 0) & (slot < capacity)
        k_dim = tl.where(inside, HEAD_DIM, 0)
        v_dim = tl.where(inside, V_DIM, 0)
        indices = (row, kv_head, kv_heads, capacity)
        if FORM.store is None:
            k_ptrs = head_of(Keys, keys_strides, indices, FORM) + slot * keys_strides[2]
            v_ptrs = head_of(Values, values_strides, indices, FORM) + slot * values_strides[2]
            tl.store(k_ptrs + offs, out, mask=of_k & (offs < k_dim))
            tl.store(v_ptrs + offs, v, mask=of_k & (offs < v_dim))
        else:
            bases = head_of(Keys, keys_strides, indices, FORM), head_of(Values, values_strides, indices, FORM)
            out, v = tl.where(of_k & d_mask, out, 0.0), tl.where(of_k & (offs < V_DIM), v, 0.0)
            FORM.store(
                out, v, bases, (keys_strides, values_strides), slot, of_k & (0 * head < k_dim), indices, (Scales, Centre, Pages),
                HEAD_DIM, V_DIM,
            )  # fmt: skip


def why_not(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, doubled: bool = False) -> str | None:
    """The reason why these inputs need another path, or None."""
    if not (q.dtype == k.dtype and cos.dtype == sin.dtype and q.device == k.device == cos.device == sin.device):
        return f"q and k, or cos and sin, differ in dtype or device: {q.dtype}, {k.dtype}, {cos.dtype}, {sin.dtype}."
    if q.dtype not in DTYPES or cos.dtype not in (q.dtype, torch.float32):
        return f"q is {q.dtype} and cos {cos.dtype}, and the kernel computes in float32."
    if q.dim() != 4 or k.dim() != 4 or q.numel() == 0:
        return f"q and k must be (batch, heads, tokens, head_dim); got {tuple(q.shape)} and {tuple(k.shape)}."
    batch, _, tokens, head_dim = q.shape
    if k.shape[0] != batch or k.shape[2:] != q.shape[2:]:
        return f"q and k must agree in all but heads; got {tuple(q.shape)} and {tuple(k.shape)}."
    width = cos.shape[-1] * (1 + doubled)
    if any(t.dim() != 3 or t.shape[0] not in (1, batch) or t.shape[1] != tokens for t in (cos, sin)) or width % 2:
        return f"cos and sin must be (batch or 1, {tokens}, an even width); got {tuple(cos.shape)} and {tuple(sin.shape)}."
    if not 0 < width <= head_dim:
        return f"cos and sin rotate {width} of {head_dim} dimensions."
    if cos.shape != sin.shape or cos.stride() != sin.stride() or any(t.stride(-1) != 1 for t in (q, k, cos)):
        return "cos and sin must have one layout, and the last dimension of all must be contiguous."
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        return "q or k requires grad, and this kernel has no backward pass."
    return None


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k, (batch, heads, tokens, head_dim) each, rotated as in Llama by cos and sin, (batch or 1, tokens, width).

    Returns new tensors in the layout of q and k. Raises ValueError with the reason of `why_not`.
    """
    out = run(q, k, cos, sin)
    if out is None:
        raise ValueError(why_not(q, k, cos, sin))
    return out


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    apart: bool = False,
    of_pair: bool = False,
    doubled: bool = False,
    late: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`rope`, or None if `why_not` gives a reason. Dimensions from the width on are copied.

    interleaved: dimensions 2i and 2i + 1 are a pair, instead of i and i + width/2. apart: after the rotation they are i and
    i + width/2. of_pair: pair i reads cos[i], instead of cos[d] for each dimension d. doubled: cos is half as wide as the rotated
    dimensions (then of_pair). late: round only the result.
    """
    made = rotation(q, k, cos, sin, (interleaved, apart, of_pair, doubled, late))
    if made is None:
        return None
    made.launch()
    return made.out


class Normed(NamedTuple):
    """A norm of the heads of x, in the shape of `out`, which is contiguous. options: centred, late, one, as in rms_norm.run."""

    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    options: tuple[bool, bool, str]
    out: torch.Tensor

    def read(self, heads: torch.Tensor) -> torch.Tensor | None:
        """A tensor with the strides by which x is read in the order of `heads`, a view of the whole result.

        None if they are no such view, or in an order that x cannot be read in, or the kernel does not support the norm."""
        out = self.out
        if (gpu.address_of(heads), heads.numel(), heads.dtype) != (gpu.address_of(out), out.numel(), out.dtype):
            return None
        if self.bias is not None or self.weight is None or self.weight.shape != heads.shape[-1:]:
            return None
        if self.x.is_contiguous():
            return heads
        orders = (self.x, out), (self.x.transpose(1, 2), out.transpose(1, 2))
        return next((x for x, out in orders if (out.shape, out.stride()) == (heads.shape, heads.stride())), None)


Options = tuple[bool, bool, bool, bool, bool]
NOT_APPENDED = (None,) * 8


class Rotation(NamedTuple):
    """A rotation that is checked and not launched yet.

    q, k: tensors with the strides of the queries and keys. inputs: these, cos, sin, and the weights of the norms before the
    rotation with the tensors for their results, or None. out: the tensors for the rotated q and k. options: those of `_prepare`.
    """

    q: torch.Tensor
    k: torch.Tensor
    inputs: tuple[torch.Tensor | None, ...]
    out: tuple[torch.Tensor, torch.Tensor]
    options: tuple[Options, float, tuple[bool, bool, str]]

    def appends(self, new_keys: torch.Tensor, new_values: torch.Tensor) -> bool:
        """Whether `launch` can append these: new_keys is the rotated k, and new_values is no result of the launch.

        The rows of new_values must not be longer."""
        k = self.out[1]
        same = gpu.address_of(k) == gpu.address_of(new_keys) and (k.shape, k.stride()) == (new_keys.shape, new_keys.stride())
        read = gpu.storage_of(new_values)  # by another thread than the one that writes it
        computed = any(t is not None and gpu.storage_of(t) == read for t in (*self.out, *self.inputs[6:]))
        return same and not computed and k.dtype == new_keys.dtype and new_values.shape[-1] <= k.shape[-1]

    def launch(
        self,
        kv: KV | None = None,
        new_values: torch.Tensor | None = None,
        slot: torch.Tensor | None = None,
        live: torch.Tensor | None = None,
    ) -> None:
        """Rotate. kv, new_values, slot, live: those of append.append, to append new_values and the rotated k too."""
        others = NOT_APPENDED if kv is None else (*kv.tensors, new_values, slot, live)
        start = _prepare((self.q, self.k, *self.inputs[2:6], *self.out, *others), PLAIN if kv is None else kv.form, *self.options)
        assert start is not None
        start(*self.inputs, *self.out, *others)


def rotation(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, options: Options, norms: Sequence[Normed] = ()
) -> Rotation | None:
    """`run` with these options, without its launch; None if it cannot.

    norms: of q and k, whose results q and k are views of. They are not computed yet, and the rotation computes them before.
    This is only for decode graphs, as in residual.py.
    """
    inputs: tuple[torch.Tensor | None, ...] = (q, k, cos, sin, None, None, None, None)
    eps, norm, read = 0.0, (False, False, ""), (q, k)
    if norms:
        of_q, of_k = norms
        read_q, read_k = of_q.read(q), of_k.read(k)
        if of_q.eps != of_k.eps or of_q.options != of_k.options or options[1] or read_q is None or read_k is None:
            return None
        inputs = (of_q.x, of_k.x, cos, sin, of_q.weight, of_k.weight, of_q.out, of_k.out)
        eps, norm, read = of_q.eps, of_q.options, (read_q, read_k)
    out = torch.empty_like(q), torch.empty_like(k)
    if _prepare((*read, *inputs[2:6], *out, *NOT_APPENDED), PLAIN, options, eps, norm) is None:
        return None
    return Rotation(*read, inputs, out, (options, eps, norm))


@launch.remember
def _prepare(
    tensors: tuple[torch.Tensor | None, ...], form: Form, options: Options, eps: float, norm: tuple[bool, bool, str]
) -> launch.Launch | None:
    given: Any = tensors  # q, k, cos, sin; the weights of norms, or None; the results; what append() takes besides k, or None
    q, k, cos, sin, _, _, oq, ok, *appended, new_values, slot, _ = given
    interleaved, apart, of_pair, doubled, late = options
    if why_not(q, k, cos, sin, doubled):
        return None
    if slot is None:
        appended, new_values = (k, k), k  # not read
    kv = KV(appended[0], appended[1], form, *appended[2:])
    check(kv, k)
    sizes = kv.sizes
    batch, num_heads, tokens, head_dim = q.shape
    kv_heads = k.shape[1]
    laid_out = {"q": q, "k": k, "oq": oq, "ok": ok}
    laid_out |= {"keys": kv.k, "values": kv.v, "nv": new_values}
    return launch.Launch(
        rope_kernel,
        (batch * tokens, triton.cdiv(num_heads + kv_heads, BLOCK_H)),
        **{f"stride_{name}{axis}": tensor.stride(i) for name, tensor in laid_out.items() for i, axis in enumerate("bhm")},
        stride_cb=cos.stride(0) if cos.shape[0] > 1 else 0,
        stride_cm=cos.stride(1),
        stride_slot=0 if slot is None or slot.shape[0] == 1 else slot.stride(0),
        capacity=sizes.kv_len,
        num_heads=num_heads,
        kv_heads=kv_heads,
        tokens=tokens,
        eps=eps,
        HEAD_DIM=head_dim,
        V_DIM=sizes.value_dim,
        WIDTH=cos.shape[-1] * (1 + doubled),
        INTERLEAVED=interleaved,
        APART=apart,
        OF_PAIR=of_pair,
        LATE=late,
        CENTRED=norm[0],
        NORM_LATE=norm[1],
        ONE=norm[2],
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_H=BLOCK_H,
        ALIGN=tables.alignment(*laid_out.values()),
        FORM=form,
        **early(q.device),
        num_warps=2,
        enable_fp_fusion=False,  # the model rounds the product before it adds it
    )
