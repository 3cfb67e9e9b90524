"""The checks of arguments that the kernels share, and the allocation of their outputs."""

from __future__ import annotations

import math
import numbers

import torch

from .host import tables
from .spans import NO_WINDOW, WORDS, has_rows, num_words
from .spec import KV, PLAIN, Spec, is_plain

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LINEAR_DTYPES = DTYPES[:2]  # of `decode.linear`
MAX_HEAD_DIM, MAX_VALUE_DIM = 576, 512  # the widths of latent attention
MAX_TRAINED_DIM = 256  # of K and of V, with gradients
MAX_TOKEN_STRIDE = 1 << 24  # elements; a tile has at most 128 tokens, and offsets in it have 32 bits


def check(
    q,
    kv: KV,
    spec: Spec,
    spans=None,
    sink_logits=None,
    inv_freq=None,
    seed=None,
    *,
    decode: bool = False,
    rows: bool = False,
    dropout: bool = False,
) -> float:
    """Raise an error with the reason for unsupported arguments; return the scale (None: head_dim ** -0.5).

    rows: whether the kernel reads spans with an interval for each query. dropout: whether it drops weights.
    """
    _check_dropout(spec, q, seed, dropout)
    k, v = kv.k, kv.v
    _check_shapes(q, kv)
    if spans is not None:
        _check_spans(spans, q, kv.sizes.kv_len, spec, rows)
    _check_spec(spec, q, sink_logits, inv_freq)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sink_logits)):
        raise RuntimeError(
            "A kernel by itself has no backward pass, and q, k, v or sink_logits requires grad. Run it under torch.no_grad() or "
            "torch.inference_mode(), or call hf_fastattn.training.attention, which has gradients."
        )
    group = q.shape[1] // k.shape[1]
    if decode and q.shape[2] * group > tables.MAX_DECODE_ROWS:
        raise ValueError(
            f"A decode kernel takes at most {tables.MAX_DECODE_ROWS} query rows per KV head; got q_len {q.shape[2]} x "
            f"{group} query heads per KV head. Use the prefill kernel."
        )
    return q.shape[3] ** -0.5 if spec.scale is None else float(spec.scale)


def _check_dropout(spec: Spec, q, seed, supported: bool) -> None:
    if spec.dropout == 0.0 and seed is None:
        return
    if not supported:
        raise ValueError("This kernel has no dropout; kernels.attention.prefill has, without sinks.")
    if not 0.0 <= spec.dropout < 1.0 or seed is None or spec.sinks:
        raise ValueError(
            f"dropout must be at least 0 and below 1, with a seed and without sinks; got {spec.dropout}, the seed {seed} and "
            f"{spec.sinks} sinks."
        )
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device:
        raise ValueError(f"The seed must be one int64 on {q.device}; got {seed.dtype} {tuple(seed.shape)} on {seed.device}.")


def _check_shapes(q, kv: KV) -> None:
    k, v = kv.k, kv.v
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"q, k and v must be 4-D, (batch, heads, length, head_dim); got {q.dim()}-D, {k.dim()}-D and {v.dim()}-D."
        )
    if kv.form is not PLAIN:
        _check_form(q, kv)
    if kv.form.sizes is None and k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must have one shape but for head_dim; got {tuple(k.shape)} and {tuple(v.shape)}.")
    sizes, num_heads = kv.sizes, q.shape[1]
    if (sizes.batch, sizes.head_dim) != (q.shape[0], q.shape[3]):
        raise ValueError(f"q and k must agree in batch and head_dim; got q {tuple(q.shape)} and k {tuple(k.shape)}.")
    if sizes.num_kv_heads == 0 or num_heads % sizes.num_kv_heads:
        raise ValueError(
            f"The number of query heads must be a multiple of the number of KV heads; got {num_heads} and {sizes.num_kv_heads}."
        )
    if 0 in (*q.shape, *k.shape, *v.shape, *sizes):
        raise ValueError(
            f"Nothing to attend: q is {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}; every size must be at least 1."
        )
    if q.dtype not in DTYPES or (kv.form.check is None and not q.dtype == k.dtype == v.dtype):
        raise TypeError(
            f"q, k and v must share one dtype out of float16, bfloat16 and float32; got {q.dtype}, {k.dtype} and {v.dtype}. "
            "Cast them, or load the model with one of these dtypes."
        )
    if k.device != q.device or v.device != q.device:
        raise ValueError(f"q, k and v must be on one device; got {q.device}, {k.device} and {v.device}.")
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError(
            "The last dimension of q, k and v must be contiguous (stride 1); got strides "
            f"{q.stride(3)}, {k.stride(3)} and {v.stride(3)}. Call .contiguous() on the tensor first."
        )
    for name, x in (("q", q), *((("k", k), ("v", v)) if kv.form is PLAIN else ())):
        if x.shape[2] > 1 and x.stride(2) >= MAX_TOKEN_STRIDE:
            raise ValueError(
                f"{name} has {x.stride(2)} elements between two tokens, and the kernels support fewer than {MAX_TOKEN_STRIDE}. "
                "Call .contiguous() on it first."
            )


def check_widths(q, kv: KV) -> None:
    """Refuse heads wider than the kernels support. The reference supports any width, but not in place of a kernel."""
    value_dim = kv.sizes.value_dim
    for what, width, most in (("head_dim", q.shape[-1], MAX_HEAD_DIM), ("the values' head_dim", value_dim, MAX_VALUE_DIM)):
        if width > most:
            raise ValueError(
                f"{what} {width} is above {most}, the largest these kernels hold; load this model without attn_implementation."
            )
    form, head_dim = kv.form, q.shape[-1]
    if tables.part_d(head_dim) < head_dim and (form.parts > 1 or form.queries is not None or form.weights is not None):
        raise ValueError(
            f"The kernels read a head_dim of {head_dim} in pieces, and the form {form.name!r} of K and V needs whole heads, of "
            "at most 256 dimensions. Store plain K and V, or a form that only loads."
        )


def _check_form(q, kv: KV) -> None:
    form = kv.form
    if is_plain(form):
        raise ValueError(f"The form {form.name!r} of K and V has no unpack(), the equivalent of its loads in torch. Add one.")
    for name in ("scales", "centre", "pages"):
        tensor = getattr(kv, name)
        if tensor is not None and (tensor.device != q.device or (tensor.dim() and tensor.stride(-1) != 1)):
            raise ValueError(
                f"{name} of K and V must have stride(-1) == 1 and be on {q.device}; got strides {tensor.stride()} on "
                f"{tensor.device}."
            )
    if form.check is not None:
        form.check(q, kv)
    if form.parts not in (1, 2) or any(width % form.parts for width in kv.sizes[3:]):
        raise ValueError(
            f"The form {form.name!r} divides {kv.sizes.head_dim} and {kv.sizes.value_dim} dimensions of K and V into "
            f"{form.parts} parts; it may have 1 part, or 2 equal ones."
        )


def _check_spans(spans, q, kv_len: int, spec: Spec, rows: bool) -> None:
    sizes = (WORDS, WORDS + num_words(kv_len))
    batch, _, q_len, _ = q.shape
    if has_rows(spans):
        if spans.dtype != torch.int32 or spans.shape != (batch, 1, 2, WORDS + q_len) or not spans[0].is_contiguous():
            raise ValueError(
                f"Spans with an interval for each query must be int32, ({batch}, 1, 2, {WORDS + q_len}) and contiguous but for "
                f"the batch; got {spans.dtype} {tuple(spans.shape)}. Build them with kernels.spans.with_rows."
            )
        if not rows or spec.sinks:
            raise ValueError(
                "This kernel reads no spans with an interval for each query (packed sequences); kernels.attention.prefill does, "
                "without sinks."
            )
    elif spans.dtype != torch.int32 or spans.shape[:-1] != (batch, 1, 1) or spans.shape[-1] not in sizes:
        raise ValueError(
            f"spans must be int32 of shape ({batch}, 1, 1, {sizes[0]}) or ({batch}, 1, 1, {sizes[1]}) for {kv_len} slots; "
            f"got {spans.dtype} {tuple(spans.shape)}. Build them with kernels.spans.build_spans."
        )
    if spans.device != q.device or spans.stride(3) != 1:
        raise ValueError(f"spans must be on q's device ({q.device}) with stride(-1) == 1; got {spans.device}.")


def is_count(x: object) -> bool:
    """Whether this is an integer, also one of NumPy. True and False are not."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def check_factors(scale: float | None, softcap: float | None) -> None:
    """Raise ValueError for a scale or a softcap that is no finite number above 0."""
    for name, x, default in (("scale", scale, "head_dim ** -0.5"), ("softcap", softcap, "no softcap")):
        if x is not None and (isinstance(x, bool | complex | str) or not 0 < x < math.inf):
            raise ValueError(f"{name} must be above 0; got {x!r}. Pass a finite number, or None for {default}.")


def _check_spec(spec: Spec, q, sink_logits, inv_freq) -> None:
    scale, _, window, softcap, sinks, *_ = spec
    num_heads, head_dim = q.shape[1], q.shape[3]
    if window is not None and not (is_count(window) and window >= 1):
        raise ValueError(f"window counts the keys a query sees, itself included: an integer, at least 1; got {window!r}.")
    if not (is_count(sinks) and 0 <= sinks <= NO_WINDOW):
        raise ValueError(
            f"sinks is the number of first keys of a row to keep: an integer, at most {NO_WINDOW} and at least 0; got {sinks!r}."
        )
    if inv_freq is not None:
        if sinks == 0:
            raise ValueError("inv_freq re-rotates the query that scores the sinks, and sinks is 0; pass both or neither.")
        if inv_freq.dtype != torch.float32 or inv_freq.dim() != 1 or inv_freq.device != q.device or not inv_freq.is_contiguous():
            raise ValueError(
                f"inv_freq must be float32, (rotary_dim / 2,), contiguous and on {q.device}; "
                f"got {inv_freq.dtype} {tuple(inv_freq.shape)} on {inv_freq.device}."
            )
        if not 0 < 2 * inv_freq.shape[0] <= head_dim:
            raise ValueError(f"inv_freq rotates pairs of q's {head_dim} dimensions; got {inv_freq.shape[0]} frequencies.")
    check_factors(scale, softcap)
    if sink_logits is not None and (tuple(sink_logits.shape) != (num_heads,) or sink_logits.device != q.device):
        raise ValueError(
            f"sink_logits must hold one logit per query head, ({num_heads},), on {q.device}; "
            f"got {tuple(sink_logits.shape)} on {sink_logits.device}."
        )
    if sink_logits is not None and num_heads > 1 and sink_logits.stride(0) != 1:
        raise ValueError(f"sink_logits must be contiguous; got stride {sink_logits.stride(0)}. Call .contiguous() on it first.")


def check_backward(q, kv: KV, spec: Spec, spans, out, lse, dout, dlse, sink_logits, seed=None) -> float:
    """Raise an error with the reason for arguments that backward kernels do not support; return the scale."""
    scale = check(q, kv, spec, spans, sink_logits, seed=seed, rows=True, dropout=True)
    if not (kv.form is PLAIN or kv.form.bias) or spec.sinks:
        raise ValueError(
            f"A backward pass takes plain K and V, also with a bias, and no sinks; got the form {kv.form.name!r} and "
            f"{spec.sinks} sinks. Run under torch.no_grad()."
        )
    shape = (*q.shape[:3], kv.v.shape[3])
    for name, x, wanted in (("out", out, shape), ("dout", dout, shape), ("lse", lse, shape[:3]), ("dlse", dlse, shape[:3])):
        if x is not None and (x.shape != wanted or x.device != q.device):
            raise ValueError(
                f"{name} must be {tuple(wanted)} on {q.device}, as in the forward; got {tuple(x.shape)} on {x.device}."
            )
    return scale


def check_trained_widths(q, kv: KV) -> None:
    """Refuse heads wider than the backward kernels support."""
    width = max(q.shape[3], kv.v.shape[3])
    if width > MAX_TRAINED_DIM:
        raise ValueError(
            f"head_dim {width} is above {MAX_TRAINED_DIM}, the largest for which these kernels have gradients; train this model "
            'with attn_implementation="sdpa".'
        )


def sink_gradient(sink_logits: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """The gradient of sink_logits (num_heads,). A sink has the weight exp(sink - lse) and the value 0."""
    wide = sink_logits.to(lse.dtype)[:, None]
    weights = torch.exp(wide - lse).masked_fill_(lse == float("-inf"), 0.0)  # a sink logit of -inf too
    return -(weights * delta).sum((0, 2)).to(sink_logits.dtype)


def why_not_inference(x: torch.Tensor, *others: torch.Tensor | None, strided: bool = False) -> str | None:
    """The reason why a kernel without a backward pass, for tensors on one device, cannot have these; else None.

    strided: whether only the last dimension must be contiguous.
    """
    for tensor in (x, *others):
        if tensor is None:
            continue
        if tensor.device != x.device:
            return f"All tensors must be on one device; got {x.device} and {tensor.device}."
        if tensor.stride(-1) != 1 if strided else not tensor.is_contiguous():
            return f"Every tensor must be contiguous; got strides {tensor.stride()}."
        if torch.is_grad_enabled() and tensor.requires_grad:
            return "A tensor requires grad, and this kernel has no backward pass."
    return None


def token_major(x: torch.Tensor) -> torch.Tensor:
    """x (batch, heads, length, dim) stored as (batch, length, heads, dim); x itself if it is."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def empty_outputs(q: torch.Tensor, value_dim: int, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse): out is (batch, num_heads, q_len, value_dim) stored as (batch, q_len, num_heads, value_dim), as models expect.

    lse is fp32 (batch, num_heads, q_len). Without `return_lse` it is `out`, as a pointer that is not used.
    """
    batch, num_heads, q_len, _ = q.shape
    token = num_heads * value_dim
    strides = (q_len * token, value_dim, token, 1)
    out = torch.empty_strided((batch, num_heads, q_len, value_dim), strides, device=q.device, dtype=q.dtype)
    lse_dtype = torch.promote_types(q.dtype, torch.float32)  # the reference takes float64 where a test lets it
    lse = torch.empty(batch, num_heads, q_len, device=q.device, dtype=lse_dtype) if return_lse else out
    return out, lse


def log2_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """(scale_log2, cap_log2), the arguments of `device.online.scaled`."""
    log2_e = math.log2(math.e)
    if softcap is None:
        return scale * log2_e, 0.0
    return 2.0 * scale * log2_e / softcap, softcap * log2_e
