"""Online softmax: the scores of a tile, the update of (acc, m, l), and the final normalisation."""

import triton
import triton.language as tl

from ..spans import WORDS

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@triton.jit
def scores_of(queries, k, cap_log2, C: tl.constexpr, FORM: tl.constexpr):
    """Scores in base 2 of a block of rows and a tile of keys. queries: see `tile.queries_of`. k: see `tile.load_tile`.

    A softcap needs the shift of a row, and sinks have another one. Without both `shifted` adds it at the end."""
    q, factor, shift = queries
    s = tl.dot(q[0], tl.trans(k[0]), input_precision="ieee")
    if FORM.parts == 2:
        s = tl.dot(q[1], tl.trans(k[1]), s, input_precision="ieee")
    if FORM.weights is not None:
        s *= k[FORM.parts][None, :]
    s *= factor
    if FORM.queries is not None and (C.HAS_SOFTCAP or C.SINKS > 0):
        s += shift
    s = capped(s, cap_log2, C.HAS_SOFTCAP, C.IEEE)
    if FORM.weights is not None:
        s += k[FORM.parts + 1][None, :]
    return s


@triton.jit
def shifted(m, queries, C: tl.constexpr, FORM: tl.constexpr):
    """The maximum m of rows with the shift of their scores."""
    if FORM.queries is not None and not (C.HAS_SOFTCAP or C.SINKS > 0):
        m += tl.reshape(queries[2], m.shape)
    return m


@triton.jit
def scaled(s, scales, HAS_SOFTCAP: tl.constexpr, IEEE: tl.constexpr):
    """Products of queries and keys, scaled and softcapped. scales: (scale_log2, cap_log2), see `capped`."""
    return capped(s * scales[0], scales[1], HAS_SOFTCAP, IEEE)


@triton.jit
def capped(s, cap_log2, HAS_SOFTCAP: tl.constexpr, IEEE: tl.constexpr, LN_2: tl.constexpr = LN_2):
    """Scores in base 2, with a softcap c: c * tanh(s / c).

    With a softcap, `scale_log2` is 2 * log2(e) * scale / c and `cap_log2` is c * log2(e): tanh(x) = 1 - 2 / (1 + e^2x).
    """
    if HAS_SOFTCAP:
        found = cap_log2 - 2.0 * cap_log2 / (1.0 + tl.exp2(s))
        if IEEE:
            # Near 0 the difference cancels in fp32; a polynomial (Cephes' tanhf) does not.
            x = s * (0.5 * LN_2)
            z = x * x
            p = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
            found = tl.where(tl.abs(x) < 0.625, cap_log2 * (x + x * z * (p - 3.33332819422e-1)), found)
        return found
    return s


@triton.jit
def safe(m):
    """The maximum to subtract. If a row has seen no key, m is -inf and 0 is subtracted, so that its weights are not NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def softmax_step(s, v, acc, m, l, MASKED: tl.constexpr, FORM: tl.constexpr, kept=None):
    """(acc, m, l) after a tile of scores s in base 2 and values v. MASKED: a row may not have seen any key yet.

    v: see `tile.load_tile`. acc has a sum for each part. kept: which weights dropout keeps, None for all. l sums all weights.
    """
    PARTS: tl.constexpr = FORM.parts
    m_new = tl.maximum(m, tl.max(s, 1))
    m_safe = m_new
    if MASKED:
        m_safe = safe(m_new)
    p = tl.exp2(s - m_safe[:, None])
    alpha = tl.exp2(m - m_safe)
    summed = p
    if FORM.weights is not None:
        summed = p * v[PARTS][None, :]
        if MASKED:  # a token that no row sees may have any scale, also NaN
            summed = tl.where(p > 0.0, summed, 0.0)
    l = l * alpha + tl.sum(summed, 1)
    if kept is not None:
        p = tl.where(kept, p, 0.0)
    sums = ()
    for i in tl.static_range(PARTS):
        before = acc[i] * alpha[:, None]
        sums += (tl.dot(p.to(v[i].dtype), v[i], before, input_precision="ieee"),)  # type: ignore[assignment]
    return sums, m_new, l


@triton.jit
def masked_step(
    s, v, offs_slot, span_ptr, words_stop, row_lo, row_hi, acc, m, l,
    C: tl.constexpr,
    FORM: tl.constexpr,
    kept=None,
    WORDS: tl.constexpr = WORDS,
):  # fmt: skip
    """(acc, m, l) after scores s and values v of the slots `offs_slot`; each row sees those in [row_lo, row_hi)."""
    visible = (offs_slot[None, :] >= row_lo[:, None]) & (offs_slot[None, :] < row_hi[:, None])
    if C.HAS_WORDS:
        words = tl.load(span_ptr + WORDS + (offs_slot >> 5), mask=offs_slot < words_stop, other=-1)
        visible = visible & (((words >> (offs_slot & 31)) & 1) != 0)[None, :]
    s = tl.where(visible, s, float("-inf"))
    return softmax_step(s, v, acc, m, l, True, FORM, kept)


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
