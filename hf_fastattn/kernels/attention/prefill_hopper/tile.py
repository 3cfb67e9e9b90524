"""Arithmetic on one tile of the Hopper prefill kernel: 64 query rows of a warpgroup and BLOCK_N keys.

Scores s [64, BLOCK_N] are unscaled products; the scale, in base 2, is applied in the exponential.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...device.online import LN_2, LOG2_E


@gluon.jit
def cap(s, scale_log2, cap_log2, HAS_SOFTCAP: gl.constexpr):
    """Softcapped scores in base 2, as in `device.online.scaled`; without softcap s itself, which is scaled later."""
    if HAS_SOFTCAP:
        s = cap_log2 - 2.0 * cap_log2 / (1.0 + gl.exp2(s * scale_log2))
    return s


@gluon.jit
def mask(s, start, seen, HAS_WORDS: gl.constexpr):
    """-inf where a row does not see a key of the tile that begins at slot `start`.

    seen: (row_lo [64], row_hi [64], pointer to the row's packed key mask, its end in slots, whether it has holes).
    """
    row_lo, row_hi, word_ptr, hi, holes = seen
    offs = start + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    visible = (offs[None, :] >= row_lo[:, None]) & (offs[None, :] < row_hi[:, None])
    s = gl.where(visible, s, float("-inf"))
    if HAS_WORDS:  # noqa: SIM102 (known at compile time; the next is not)
        if holes:
            words = gl.load(word_ptr + (offs >> 5), mask=offs < hi, other=0)
            s = gl.where((((words >> (offs & 31)) & 1) != 0)[None, :], s, float("-inf"))
    return s


@gluon.constexpr_function
def _exp2_asm(group):
    """PTX for `group` numbers x <= 0: exp2 of all but the last by the exp2 unit, of the last by the FMA units.

    exp2(n + f) = 2^n * exp2(f), |f| <= 1/2: adding 1.5 * 2^23 rounds x to the integer n and leaves n in the low bits, a cubic
    (relative error 7.5e-5; the weights are then rounded to 2e-3 or 2e-4) gives exp2(f), and n is added to its exponent.
    """
    last = group - 1
    lines = [f"ex2.approx.ftz.f32 ${i}, ${group + i};" for i in range(last)]
    lines += [
        "{ .reg .f32 n, f, p; .reg .b32 i, r;",
        f"max.f32 f, ${group + last}, 0fC2FC0000;",
        "add.rn.f32 n, f, 0f4B400000;",
        "mov.b32 i, n;",
        "sub.rn.f32 n, n, 0f4B400000;",
        "sub.rn.f32 f, f, n;",
        "fma.rn.f32 p, f, 0f3D61FBB0, 0f3E786F0E;",
        "fma.rn.f32 p, p, f, 0f3F31798D;",
        "fma.rn.f32 p, p, f, 0f3F7FFB49;",
        "shl.b32 i, i, 23;",
        "mov.b32 r, p;",
        "add.s32 r, r, i;",
        f"mov.b32 ${last}, r; }}",
    ]
    return " ".join(lines)


@gluon.constexpr_function
def _exp2_constraints(group):
    return ",".join(["=&f"] * group + ["f"] * group)


@gluon.jit
def _exp2(x, FMA_SHARE: gl.constexpr):
    """exp2 of x <= 0; one of FMA_SHARE numbers (none if 0) is computed by the FMA units, to relieve the exp2 unit."""
    if FMA_SHARE > 0:
        y = gl.inline_asm_elementwise(
            _exp2_asm(FMA_SHARE), _exp2_constraints(FMA_SHARE), [x], dtype=gl.float32, is_pure=True, pack=FMA_SHARE
        )
    else:
        y = gl.exp2(x)
    return y


@gluon.jit
def softmax_step(s, m, l, scale_log2, MASKED: gl.constexpr, FMA_SHARE: gl.constexpr):
    """One online-softmax step over unscaled scores s [64, BLOCK_N]: (p, m, l, factor of earlier sums)."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    m_safe = m_new
    if MASKED:
        # A row that has seen nothing yet has m_new = -inf; subtracting 0 instead keeps its weights 0, not NaN.
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    # An explicit fma: whether a * b - c becomes one is a compiler option, whose default may change.
    x = gl.fma(s, scale_log2, -m_safe[:, None])
    # exp2 of a masked score, -inf, must be 0, which the exp2 unit computes and the polynomial does not.
    p = gl.exp2(x) if MASKED else _exp2(x, FMA_SHARE)
    alpha = gl.exp2(m - m_safe)
    return p, m_new, l * alpha + gl.sum(p, 1), alpha


@gluon.constexpr_function
def _pack_asm(dtype):
    return f"cvt.rn.{'f16x2' if dtype == gl.float16 else 'bf16x2'}.f32 $0, $2, $1;"


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """Weights p [64, BLOCK_N] rounded to 16 bits, two neighbours in an int32 [64, BLOCK_N / 2], for `operand`.

    They take half the registers until the next product: a loop that carries 16-bit numbers keeps each in a separate register.
    """
    low, high = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(_pack_asm(dtype), "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def operand(p, dtype: gl.constexpr, layout: gl.constexpr):
    """Packed weights as an operand [64, BLOCK_N] of O += P V."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    halves = gl.join(low, high).reshape([p.shape[0], p.shape[1] * 2])
    return gl.convert_layout(halves.to(dtype, bitcast=True), layout)


@gluon.jit
def normaliser(m, l, sink_ptr, HAS_SINK_LOGITS: gl.constexpr, LOG2_E: gl.constexpr = LOG2_E, LN_2: gl.constexpr = LN_2):
    """(factor that makes acc the output, lse), as in `device.online.finalize`."""
    factor = 1.0
    if HAS_SINK_LOGITS:
        sink = gl.load(sink_ptr).to(gl.float32) * LOG2_E
        m_new = gl.maximum(m, sink)
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
        factor = gl.exp2(m - m_safe)
        l = l * factor + gl.exp2(sink - m_safe)
        m = m_new
    l_safe = gl.where(l == 0.0, 1.0, l)
    return factor / l_safe, (m + gl.log2(l_safe)) * LN_2


@gluon.jit
def zero_rows(v_smem, first, limit):
    """Zero the rows of a V tile before `first` and from `limit` on, 16 at a time because few registers are free."""
    BLOCK_N: gl.constexpr = v_smem.shape[0]
    HEAD_DIM: gl.constexpr = v_smem.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    for chunk in gl.static_range(BLOCK_N // 16):
        if (limit < (chunk + 1) * 16) | (first > chunk * 16):
            part = v_smem.slice(chunk * 16, 16, dim=0)
            rows = chunk * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
            v = part.load(layout)
            part.store(gl.where(((rows >= first) & (rows < limit))[:, None], v, gl.zeros_like(v)))
