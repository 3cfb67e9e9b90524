"""K and V in 8 bits: a code for each number, a scale of K and one of V for each token and head, and a centre of K.

    K[b, h, t] = centre[b, h] + scale_k[b, h, t] * code,   V[b, h, t] = scale_v[b, h, t] * code

"int8": codes are the integers from -127 to 127. "fp8": numbers of e4m3, up to 448. The centre c is any vector; the mean of the
first tokens takes from K what all tokens share, so that a few large channels do not cost the others their resolution. Scores add
q c, so the centre itself loses nothing. Tokens do not depend on each other: what is written is never written again.

`lean`, `split_kv`, the reference and all launches that append take the `KV` of `eight_bits`. For more than 64 query rows of a KV
head it is slow: these read K and V after `widened`, as tensors of the queries' dtype.

Rounds: K and V when they are stored, queries and P to fp16 in the kernels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .checks import DTYPES
from .host.gpu import HAS_TRITON
from .spec import KV, Form, is_plain

__all__ = ["KV_DTYPES", "eight_bits", "empty", "widened"]

KV_DTYPES = ("int8", "fp8")
_TOP = {"int8": 127.0, "fp8": 448.0}
_LEAST = 2.0**-64  # of a scale


def eight_bits(k: torch.Tensor, v: torch.Tensor, scales: torch.Tensor, centre: torch.Tensor, kv_dtype: str) -> KV:
    """K and V in 8 bits. kv_dtype: "int8" or "fp8".

    k, v: uint8 (batch, num_kv_heads, kv_len, head_dim), contiguous, or a slice of slots of such a tensor; the head_dim of V may
    differ, both are even. The code of the integer i is i + 128. scales: int32 (batch, num_kv_heads, kv_len), a slice of the same
    slots: all bits are K's scale in float32, and the lower half is V's in bfloat16. centre: (batch, num_kv_heads, head_dim),
    contiguous, in the dtype that K and V have as plain tensors. Raises ValueError or TypeError.
    """
    kv = KV(k, v, forms()[kv_dtype], scales, centre)
    _check_layout(kv)
    return kv


def empty(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes of K, codes of V, scales) for as many tokens as k and v have, (batch, num_kv_heads, tokens, head_dim)."""
    codes = (torch.zeros(x.shape, dtype=torch.uint8, device=x.device) for x in (k, v))
    return *codes, torch.zeros(k.shape[:3], dtype=torch.int32, device=k.device)  # type: ignore[return-value]


def widened(kv: KV, dtype: torch.dtype) -> KV:
    """The same K and V as plain tensors of this dtype if they are in 8 bits; else kv itself."""
    return KV(*_unpack(kv, dtype)) if not is_plain(kv.form) and kv.form in forms().values() else kv


def _scales(kv: KV) -> tuple[torch.Tensor, torch.Tensor]:
    """Of K and of V, fp32 (batch, num_kv_heads, kv_len, 1)."""
    assert kv.scales is not None
    return kv.scales.view(torch.float32)[..., None], (kv.scales << 16).view(torch.float32)[..., None]


def _unpack(kv: KV, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    assert kv.centre is not None
    found: list[torch.Tensor] = []
    for codes, scale in zip((kv.k, kv.v), _scales(kv), strict=True):
        x = codes.view(torch.float8_e4m3fn).float() if kv.form is forms()["fp8"] else codes.float() - 128
        x.mul_(scale)
        found.append((x if found else x.add_(kv.centre[:, :, None])).to(dtype))
    return found[0], found[1]


def _pack(kv: KV, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    assert kv.centre is not None and kv.scales is not None
    name = next(name for name, form in forms().items() if form is kv.form)
    both = k.float() - kv.centre[:, :, None].float(), v.float()
    of_k, of_v = (_scale_bits(x, _TOP[name]) for x in both)
    scales = (of_k << 16) | of_v
    # Tokens outside repeat one that is inside, or write nothing if there is none: the host reads nothing.
    inside = (slots >= 0) & (slots < kv.k.shape[2])
    token = torch.where(inside, torch.arange(slots.shape[1], device=slots.device), inside.int().argmax(1, keepdim=True))
    slot = slots.gather(1, token).clamp(0, kv.k.shape[2] - 1)
    rows, written = torch.arange(len(slots), device=slots.device)[:, None], inside.any(1)[:, None, None, None]
    codes = (_codes(x, bits, name) for x, bits in zip(both, (scales, of_v << 16), strict=True))
    for buffer, new in zip((kv.k, kv.v, kv.scales[..., None]), (*codes, scales[..., None]), strict=True):
        buffer[rows, :, slot] = torch.where(written, new.transpose(1, 2)[rows, token], buffer[rows, :, slot])


def _codes(x: torch.Tensor, scale_bits: torch.Tensor, name: str) -> torch.Tensor:
    x = x / scale_bits.view(torch.float32)[..., None]
    if name == "fp8":
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return ((x + 0.5).floor() + 128).to(torch.int32).to(torch.uint8)


def _scale_bits(x: torch.Tensor, top: float) -> torch.Tensor:
    """The least bfloat16 that is at least max |x| / top over the last dimension, and at least 2^-64, as bits; or NaN."""
    scale = x.abs().amax(-1) / torch.full((), top, device=x.device)  # by a number torch multiplies with its reciprocal on a GPU
    bits = (scale.clamp(min=_LEAST).view(torch.int32) + 0xFFFF) >> 16
    return torch.where(scale < torch.inf, bits, 0x7FC0)


def _check_layout(kv: KV) -> None:
    """Refuse what the kernels could not read, whatever the queries."""
    k, v, scales, centre = kv.k, kv.v, kv.scales, kv.centre
    if scales is None or centre is None:
        raise ValueError("K and V in 8 bits need scales and a centre. Create them with kernels.eight_bits.eight_bits.")
    if (k.dtype, v.dtype, scales.dtype) != (torch.uint8, torch.uint8, torch.int32) or centre.dtype not in DTYPES:
        raise TypeError(
            "Codes of K and V are uint8, their scales int32, and the centre has the dtype of plain K and V; got "
            f"{k.dtype}, {v.dtype}, {scales.dtype} and {centre.dtype}."
        )
    if k.dim() != 4 or v.shape[:-1] != k.shape[:-1] or scales.shape != k.shape[:-1] or centre.shape != (*k.shape[:2], k.shape[3]):
        raise ValueError(
            "K and V are (batch, num_kv_heads, kv_len, head_dim), scales (batch, num_kv_heads, kv_len) and the centre (batch, "
            f"num_kv_heads, head_dim); got {tuple(k.shape)}, {tuple(v.shape)}, {tuple(scales.shape)} and {tuple(centre.shape)}."
        )
    if k.shape[3] % 2 or v.shape[3] % 2 or k.shape[3] > 256:
        raise ValueError(f"K and V in 8 bits have an even head_dim, up to 256 for K; got {k.shape[3]} and {v.shape[3]}.")
    heads, slots = k.shape[1], scales.stride(1)
    strides = [(heads * slots * width, slots * width, width, 1) for width in (k.shape[3], v.shape[3])]
    if [k.stride(), v.stride()] != strides or scales.stride() != (heads * slots, slots, 1) or not centre.is_contiguous():
        raise ValueError(
            "K, V and scales are slices of the same slots of contiguous tensors, and the centre of K is contiguous; got strides "
            f" {k.stride()}, {v.stride()}, {scales.stride()} and {centre.stride()}."
        )


def _check(q: torch.Tensor, kv: KV) -> None:
    _check_layout(kv)
    if q.dtype not in DTYPES:
        raise TypeError(f"Queries and new tokens are float16, bfloat16 or float32; got {q.dtype}. Cast them.")


def bytes_per_token(k: torch.Tensor, v: torch.Tensor) -> int:
    return k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3] + 4)


@cache
def forms() -> dict[str, Form]:
    """The form of each of KV_DTYPES. The first call imports Triton."""
    functions: dict[str, tuple[Any, Any]] = dict.fromkeys(KV_DTYPES, (object(), object()))  # a load and a store
    queries = weights = None
    if HAS_TRITON:
        from .device import eight_bits as device

        functions = {"int8": (device.load_int8, device.store_int8), "fp8": (device.load_fp8, device.store_fp8)}
        queries, weights = device.queries, device.weights
    return {
        name: Form(
            name,
            load_k=load,
            load_v=load,
            unpack=_unpack,
            check=_check,
            store=store,
            pack=_pack,
            bytes_per_token=bytes_per_token,
            queries=queries,
            weights=weights,
            parts=2,
        )
        for name, (load, store) in functions.items()
    }
