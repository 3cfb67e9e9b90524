"""Loads and stores of K and V in 8 bits (`kernels.eight_bits`), with the signatures in tile.py.

Two codes are loaded as one number of 16 bits: matrix instructions take tiles of these from shared memory as they lie there, and
of single bytes they do not. So a tile has two parts, the even and the odd dimensions, each in fp16, which has all 256 numbers
of both formats. The scales of a token are no part of its tile, see `weights`.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from ..host import gpu

INTERPRETED = gpu.INTERPRETED  # the interpreter runs no assembly


@triton.jit
def _int8(code):
    return (code - 128).to(tl.float16)


@triton.jit
def _fp8(code):
    return (((code & 128) << 8) | ((code & 127) << 7)).to(tl.int16).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _pairs(base, strides, first, offs_n, offs_d, mask):
    """Two codes of each of the dimensions 2 * offs_d, int16 [slots, dimensions / 2]."""
    start = base.to(tl.pointer_type(tl.int16)) + first.to(tl.int64) * (strides[2] // 2)
    ptrs = start + (offs_n[:, None] * (strides[2] // 2) + offs_d[None, :])
    if mask is None:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=mask, other=0)


# The code in assembly takes the bytes (b0, b1, b2, b3) of two numbers to (b0, b2) and (b1, b3) in fp16.


@triton.jit
def load_int8(base, strides, first, offs_n, offs_d, mask, indices, extra, INTERPRETED: tl.constexpr = INTERPRETED):
    x = _pairs(base, strides, first, offs_n, offs_d, mask)
    if INTERPRETED:
        x = x.to(tl.int32)
        return _int8(x & 255), _int8((x >> 8) & 255)
    else:  # 1024 + code, by its bits; minus 1152
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c; mov.b32 c, 0x64806480;"
            " prmt.b32 a, $2, 0x64646464, 0x4240; prmt.b32 b, $2, 0x64646464, 0x4341;"
            " sub.f16x2 $0, a, c; sub.f16x2 $1, b, c; }",
            "=r,=r,r", [x], (tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def load_fp8(base, strides, first, offs_n, offs_d, mask, indices, extra, INTERPRETED: tl.constexpr = INTERPRETED):
    x = _pairs(base, strides, first, offs_n, offs_d, mask)
    if INTERPRETED:
        x = x.to(tl.int32)
        return _fp8(x & 255), _fp8((x >> 8) & 255)
    elif cuda_capability_geq(8, 9):
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r", [x], (tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:  # sign, exponent and mantissa in the places of fp16, whose exponents are larger by 8; times 256
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, d; mov.b32 d, 0x5c005c00; shl.b32 a, $2, 8;"
            " and.b32 b, $2, 0x7f007f00; shr.u32 b, b, 1; lop3.b32 b, $2, 0x80008000, b, 0xea; mul.f16x2 $1, b, d;"
            " and.b32 c, a, 0x7f007f00; shr.u32 c, c, 1; lop3.b32 c, a, 0x80008000, c, 0xea; mul.f16x2 $0, c, d; }",
            "=r,=r,r", [x], (tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _scales_at(strides, slots, indices, extra):
    """Pointers to the scales of slots, which are (batch, num_kv_heads, slots): the layout of K, one number for each token."""
    row, kv_head, kv_heads, _ = indices
    return extra[0] + (row * kv_heads + kv_head) * (strides[1] // strides[2]) + slots


@triton.jit
def weights(strides, slots, indices, extra, INTERPRETED: tl.constexpr = INTERPRETED):
    """The scale of K; that of V as a shift of the scores, so that no element of V is multiplied. Past the end both are 0: another
    number would be selected after the load, for each token."""
    both = tl.load(_scales_at(strides, slots, indices, extra), mask=slots < indices[3], other=0)
    of_v = (both << 16).to(tl.float32, bitcast=True)
    if INTERPRETED:
        shift = tl.log2(tl.maximum(of_v, 2.0**-126))
    else:  # one instruction; tl.log2 has a polynomial
        shift = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [of_v], dtype=tl.float32, is_pure=True, pack=1)
    return both.to(tl.float32, bitcast=True), shift, tl.exp2(-shift)


@triton.jit
def queries(q, indices, extra, HEAD_DIM: tl.constexpr):
    """The largest |q| of a row is scaled by a power of two to at least 2^14 and below 2^15: exact in fp16 but for numbers that
    are smaller by 2^28."""
    row, kv_head, kv_heads, _ = indices
    offs_d = tl.arange(0, q.shape[1])
    centre = tl.load(extra[1] + (row * kv_heads + kv_head) * HEAD_DIM + offs_d, mask=offs_d < HEAD_DIM, other=0.0)
    q = q.to(tl.float32)
    shift = tl.sum(q * centre.to(tl.float32)[None, :], 1)[:, None]
    power = tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) >> 23
    power = tl.minimum(tl.maximum(power, 64), 190)
    turned = (q * ((268 - power) << 23).to(tl.float32, bitcast=True)[:, None]).to(tl.float16)
    factor = ((power - 14) << 23).to(tl.float32, bitcast=True)
    return tl.split(tl.reshape(turned, [q.shape[0], q.shape[1] // 2, 2])), factor[:, None], shift


@triton.jit
def _scale_of(x, TOP: tl.constexpr):
    """The least bfloat16 that is at least max |x| / TOP, and at least 2^-64, as bits [heads, 1]; NaN if x is not finite."""
    largest = tl.max(tl.abs(x), 1) + tl.sum(x * 0.0, 1)
    scale = tl.where(largest >= 0.0, tl.div_rn(largest, tl.zeros_like(largest) + TOP), float("nan"))
    bits = (tl.maximum(scale, 2.0**-64).to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    return tl.where(scale < float("inf"), bits, 0x7FC0)[:, None]


@triton.jit
def _code(x, scale, FP8: tl.constexpr):
    """The codes of x in 8 bits, of x / scale rounded to nearest."""
    x = tl.div_rn(x, scale + tl.zeros_like(x))
    if FP8:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 codes are multiples of 2^-9: the sum with 2^23 rounds to one.
        small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 15
        return tl.where(tl.abs(x) < 0.015625, small, tl.minimum(normal, 126)) | ((bits >> 24) & 128)
    else:
        return tl.floor(x + 0.5).to(tl.int32) + 128


@triton.jit
def _store(
    k, v, bases, strides, slot, mask, indices, extra,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TOP: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    row, kv_head, kv_heads, _ = indices
    offs_d = tl.arange(0, k.shape[1])[None, :]
    k_mask, v_mask = mask & (offs_d < HEAD_DIM), mask & (offs_d < VALUE_DIM)
    centre = tl.load(extra[1] + (row * kv_heads + kv_head) * HEAD_DIM + offs_d, mask=k_mask, other=0.0)
    k, v = k.to(tl.float32) - centre.to(tl.float32), v.to(tl.float32)
    of_v = _scale_of(v, TOP)
    both = (_scale_of(k, TOP) << 16) | of_v
    k = _code(k, both.to(tl.float32, bitcast=True), FP8)
    v = _code(v, (of_v << 16).to(tl.float32, bitcast=True), FP8)
    tl.store(bases[0] + slot * strides[0][2] + offs_d, k.to(tl.uint8), mask=k_mask)
    tl.store(bases[1] + slot * strides[1][2] + offs_d, v.to(tl.uint8), mask=v_mask)
    tl.store(_scales_at(strides[0], slot, indices, extra), both, mask=mask)


@triton.jit
def store_int8(k, v, bases, strides, slot, mask, indices, extra, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    _store(k, v, bases, strides, slot, mask, indices, extra, HEAD_DIM, VALUE_DIM, 127.0, False)


@triton.jit
def store_fp8(k, v, bases, strides, slot, mask, indices, extra, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    _store(k, v, bases, strides, slot, mask, indices, extra, HEAD_DIM, VALUE_DIM, 448.0, True)
