"""Append: writes K and V of the new tokens of every row and head into their buffers, in one launch.

    K[b, h, slot[b] + i] = NewK[b, h, i],  V[b, h, slot[b] + i] = NewV[b, h, i],  i < live

Slots are read on the device, so every replay of a captured launch can write to other slots. Rounds: nothing; a form's `store`
does. Limits: one dtype; a token whose slot is outside of the buffer is not written. Oracle: `_append_torch`, or the form's
`pack`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU tensors need no Triton
    triton = None

from .. import INTERPRETED
from ..host import gpu, launch, tables
from ..spec import KV, Form, is_plain


class _Thread(threading.local):
    instead: Callable[..., bool] | None = None  # called with the arguments of each launch; whether it has done the same


thread = _Thread()


def append(
    kv: KV, new_keys: torch.Tensor, new_values: torch.Tensor, slot: torch.Tensor, live: torch.Tensor | None = None
) -> None:
    """Write new_keys and new_values, (batch, num_kv_heads, q_len, head_dim), from `slot` of kv on.

    Plain k and v are (batch, num_kv_heads, N, head_dim); kv of another form needs its `store` and `pack`. Both and the new ones
    have any strides with stride(-1) == 1. slot: int64, on the same device, (1,) for all rows or (batch,), or (1, q_len),
    contiguous, with that of each token. A token whose slot is below 0, or N or more, is not written. live: int64 (1,), the
    number of tokens of each row that are no padding, which is not written either; None for all. It is for slots of first tokens.
    """
    form = kv.form
    if not is_plain(form) and (form.store is None or form.pack is None):
        raise ValueError(
            f"Tokens cannot be appended to K and V of the form {form.name!r}: it has no store() and pack(), which write them. "
            "Add both to it, or append to plain tensors."
        )
    if triton is None or torch.compiler.is_compiling() or not (INTERPRETED or gpu.on_gpu(kv.k.device)):
        if form.pack is None:
            _append_torch(kv.k, kv.v, new_keys, new_values, slot, live)
            return
        check(kv, new_keys)
        token = torch.arange(new_keys.shape[2], device=slot.device)
        slots = slot if slot.dim() == 2 else slot[:, None] + token
        slots = slots if live is None else torch.where(token < live, slots, -1)
        form.pack(kv, new_keys, new_values, slots.expand(len(new_keys), -1))
        return
    if thread.instead is not None and thread.instead(kv, new_keys, new_values, slot, live):
        return
    tensors = (*kv.tensors, new_keys, new_values, slot, live)
    _prepare(tensors, form)(*tensors)


def check(kv: KV, new_keys: torch.Tensor) -> None:
    """Raise the error of a form whose check refuses these tensors."""
    if kv.form.check is not None:
        kv.form.check(new_keys, kv)


@launch.remember
def _prepare(tensors: tuple[torch.Tensor | None, ...], form: Form) -> launch.Launch:
    given: Any = tensors  # the tensors of a KV; new_keys, new_values, slot, live
    keys, values, scales, centre, pages, new_keys, new_values, slot, _ = given
    kv = KV(keys, values, form, scales, centre, pages)
    check(kv, new_keys)
    batch, heads, capacity, head_dim, value_dim = kv.sizes
    laid_out = (("k", keys, "bhn"), ("v", values, "bhn"), ("nk", new_keys, "bhn"), ("nv", new_values, "bhn"))
    return launch.Launch(
        append_kernel,
        (batch * heads, new_keys.shape[2]),
        **{f"stride_{name}{axis}": tensor.stride(i) for name, tensor, axes in laid_out for i, axis in enumerate(axes)},
        stride_slot=slot.stride(0) if slot.shape[0] > 1 else 0,
        heads=heads,
        capacity=capacity,
        EACH=slot.dim() == 2,
        K_DIM=head_dim,
        V_DIM=value_dim,
        BLOCK_D=tables.block_d(max(head_dim, value_dim)),
        ALIGN=tables.alignment(keys, values, new_keys, new_values),
        FORM=form,
        **early(keys.device),
        num_warps=1,
        enable_fp_fusion=False,  # as in rope.py, so that a form stores the same bits
    )


def _append_torch(
    keys: torch.Tensor,
    values: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    slot: torch.Tensor,
    live: torch.Tensor | None = None,
) -> None:
    rows, last = torch.arange(keys.shape[0], device=keys.device)[:, None], keys.shape[2] - 1
    if slot.dim() == 2:
        for i in range(new_keys.shape[2]):
            _append_torch(keys, values, new_keys[:, :, i : i + 1], new_values[:, :, i : i + 1], slot[:, i])
        return
    # Tokens outside repeat the token of the first or the last slot, or write nothing if no token has it.
    token = torch.arange(new_keys.shape[2], device=keys.device).maximum(-slot[:, None]).minimum(last - slot[:, None])
    token = token.clamp(0, new_keys.shape[2] - 1)
    token = token if live is None else token.minimum(live - 1)  # padding repeats the last token
    slots = slot[:, None] + token
    inside = slots.clamp(0, last)
    written = (slots == inside)[..., None, None]
    for buffer, new in ((keys, new_keys), (values, new_values)):
        states = new.transpose(1, 2)[rows, token.expand(len(rows), -1)]
        buffer[rows, :, inside] = torch.where(written, states, buffer[rows, :, inside])


if triton is not None:
    from ..device.tile import aligned_strides, head_of
    from ..host.overlap import early, let_next_begin, wait_for_inputs

    @triton.jit(do_not_specialize=["stride_slot", "heads", "capacity"])
    def append_kernel(
        K,  # (batch, num_kv_heads, capacity, head_dim), or as FORM stores it, written
        V,  # (batch, num_kv_heads, capacity, value_dim), or as FORM stores it, written
        Scales,  # of FORM, which its store() may write, or None
        Centre,  # of FORM, which its store() may write, or None
        Pages,  # of FORM, or None
        NewK,  # (batch, num_kv_heads, q_len, head_dim)
        NewV,  # (batch, num_kv_heads, q_len, value_dim)
        Slot,  # (1,) or (batch,), int64: of the first token of a row; with EACH (1, q_len): of each token
        Live,  # (1,), int64: tokens of a row that are written, or None
        stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_nkb, stride_nkh, stride_nkn, stride_nvb,
        stride_nvh, stride_nvn, stride_slot, heads, capacity,
        EACH: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr,
        FORM: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """One program per row and head, and token."""
        wait_for_inputs(EARLY)
        let_next_begin(EARLY)
        strides = aligned_strides(stride_kb, stride_kh, stride_kn, ALIGN), aligned_strides(stride_vb, stride_vh, stride_vn, ALIGN)
        stride_nkb, stride_nkh, stride_nkn = aligned_strides(stride_nkb, stride_nkh, stride_nkn, ALIGN)
        stride_nvb, stride_nvh, stride_nvn = aligned_strides(stride_nvb, stride_nvh, stride_nvn, ALIGN)
        row = (tl.program_id(0) // heads).to(tl.int64)
        head = (tl.program_id(0) % heads).to(tl.int64)
        token = tl.program_id(1)
        slot = tl.load(Slot + token) if EACH else tl.load(Slot + row * stride_slot) + token
        if Live is not None:
            slot = tl.where(token < tl.load(Live), slot, -1)
        offs_d = tl.arange(0, BLOCK_D)
        inside = (slot >= 0) & (slot < capacity)
        k_dim = tl.where(inside, K_DIM, 0)
        v_dim = tl.where(inside, V_DIM, 0)
        k = tl.load(NewK + row * stride_nkb + head * stride_nkh + token * stride_nkn + offs_d, mask=offs_d < K_DIM)
        v = tl.load(NewV + row * stride_nvb + head * stride_nvh + token * stride_nvn + offs_d, mask=offs_d < V_DIM)
        indices = (row, head, heads, capacity)
        if FORM.store is None:
            tl.store(head_of(K, strides[0], indices, FORM) + slot * strides[0][2] + offs_d, k, mask=offs_d < k_dim)
            tl.store(head_of(V, strides[1], indices, FORM) + slot * strides[1][2] + offs_d, v, mask=offs_d < v_dim)
        else:
            k, v = tl.where(offs_d < K_DIM, k, 0.0)[None, :], tl.where(offs_d < V_DIM, v, 0.0)[None, :]
            one = tl.zeros([1, 1], tl.int64)
            bases = head_of(K, strides[0], indices, FORM) + one, head_of(V, strides[1], indices, FORM) + one
            FORM.store(
                k, v, bases, strides, slot, one < k_dim, (row, head + one, heads, capacity), (Scales, Centre, Pages),
                K_DIM, V_DIM,
            )  # fmt: skip
