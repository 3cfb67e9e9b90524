"""Online softmax: the scores of a tile, the update of (acc, m, l), and the final normalisation."""

import triton
import triton.language as tl

from ..spans import WORDS

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@triton.jit
def scores_of(q, k, scales, HAS_SOFTCAP: tl.constexpr, IEEE: tl.constexpr):
    """Scores in base 2 of a block of rows and a tile of keys; with a softcap c: c * tanh(s / c).

    With a softcap, `scale_log2` is 2 * log2(e) * scale / c and `cap_log2` is c * log2(e): tanh(x) = 1 - 2 / (1 + e^2x).
    """
    if IEEE:
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        s = tl.dot(q, tl.trans(k))
    return scaled(s, scales, HAS_SOFTCAP, IEEE)


@triton.jit
def scaled(
    s, scales, HAS_SOFTCAP: tl.constexpr, IEEE: tl.constexpr, LN_2: tl.constexpr = LN_2
):  # fmt: skip
    """Products of queries and keys, scaled and softcapped as in `scores_of`."""
    scale_log2, cap_log2 = scales
    s = s * scale_log2
    if HAS_SOFTCAP:
        capped = cap_log2 - 2.0 * cap_log2 / (1.0 + tl.exp2(s))
        if IEEE:
            # Near 0 the difference cancels in fp32; a polynomial (Cephes' tanhf) does not.
            x = s * (0.5 * LN_2)
            z = x * x
            p = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
            capped = tl.where(tl.abs(x) < 0.625, cap_log2 * (x + x * z * (p - 3.33332819422e-1)), capped)
        return capped
    return s


@triton.jit
def safe(m):
    """The maximum to subtract. If a row has seen no key, m is -inf and 0 is subtracted, so that its weights are not NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def softmax_step(s, v, acc, m, l, MASKED: tl.constexpr, IEEE: tl.constexpr, kept=None):
    """(acc, m, l) after a tile of scores s in base 2 and values v. MASKED: a row may not have seen any key yet.

    kept: which weights dropout keeps, None for all. l sums all weights.
    """
    m_new = tl.maximum(m, tl.max(s, 1))
    m_safe = m_new
    if MASKED:
        m_safe = safe(m_new)
    p = tl.exp2(s - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    l = l * alpha + tl.sum(p, 1)
    if kept is not None:
        p = tl.where(kept, p, 0.0)
    acc = acc * alpha[:, None]
    if IEEE:
        acc = tl.dot(p, v, acc, input_precision="ieee")
    else:
        acc = tl.dot(p.to(v.dtype), v, acc)
    return acc, m_new, l


@triton.jit
def masked_step(
    s, v, offs_slot, span_ptr, words_stop, row_lo, row_hi, acc, m, l,
    C: tl.constexpr,
    kept=None,
    WORDS: tl.constexpr = WORDS,
):  # fmt: skip
    """(acc, m, l) after scores s and values v of the slots `offs_slot`; each row sees those in [row_lo, row_hi)."""
    visible = (offs_slot[None, :] >= row_lo[:, None]) & (offs_slot[None, :] < row_hi[:, None])
    if C.HAS_SPANS:
        words = tl.load(span_ptr + WORDS + (offs_slot >> 5), mask=offs_slot < words_stop, other=-1)
        visible = visible & (((words >> (offs_slot & 31)) & 1) != 0)[None, :]
    s = tl.where(visible, s, float("-inf"))
    return softmax_step(s, v, acc, m, l, True, C.IEEE, kept)


@triton.jit
def finalize(
    acc, m, l, sink_ptrs, row_mask,
    HAS_SINK_LOGITS: tl.constexpr,
    LOG2_E: tl.constexpr = LOG2_E,
    LN_2: tl.constexpr = LN_2,
):  # fmt: skip
    """(acc, m, l) -> (out, lse). A learned sink logit adds exp(logit) to the denominator. A row that saw no key gets 0."""
    if HAS_SINK_LOGITS:
        sink = tl.load(sink_ptrs, mask=row_mask, other=0.0).to(tl.float32) * LOG2_E
        m_new = tl.maximum(m, sink)
        m_safe = safe(m_new)  # -inf if a row saw no key and the sink logit is -inf
        alpha = tl.exp2(m - m_safe)
        acc = acc * alpha[:, None]
        l = l * alpha + tl.exp2(sink - m_safe)
        m = m_new
    l_safe = tl.where(l == 0.0, 1.0, l)
    out = acc / l_safe[:, None]
    lse = (m + tl.log2(l_safe)) * LN_2
    return out, lse
