"""Loading a tile of K or V from plain tensors. Another form of K and V (`spec.Form`) has functions of the same signature."""

import triton
import triton.language as tl


@triton.jit
def aligned_strides(stride_b, stride_h, stride_n, ALIGN: tl.constexpr):
    """These strides, which ALIGN divides: the compiler knows it from here on.

    By itself it only knows which strides are multiples of 16. So 16 bytes are loaded at once, and ahead, at a head_dim of 72, 88,
    104 or 120 too.
    """
    if ALIGN < 16:
        stride_b = stride_b // ALIGN * ALIGN
        stride_h = stride_h // ALIGN * ALIGN
        stride_n = stride_n // ALIGN * ALIGN
    return stride_b, stride_h, stride_n


@triton.jit
def load_plain(base, stride, first, offs_n, offs_d, mask, indices, extra):
    """Load the slots first + offs_n and dimensions offs_d of one KV head, [slots, dimensions] in the queries' dtype.

    base: pointer to slot 0 of the head. stride: elements between two slots. mask: 0 is returned outside of it; None: no mask.
    indices: (batch row, KV head, num_kv_heads, kv_len). extra: (Scales, Centre, Pages), the further tensors of a form, None here.
    """
    ptrs = base + first.to(tl.int64) * stride + (offs_n[:, None] * stride + offs_d[None, :])
    if mask is None:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=mask, other=0.0)
