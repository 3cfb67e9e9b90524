"""The tolerance for a result, derived from the error of torch's own attention.

    error against fp64 <= 2 * (error of torch's math attention at the same dtype) + 4 * eps * max(P |V|)

P |V| is the attention of the absolute values, to which the rounding error of a sum is proportional. (max|out| is too small if
a thousand values cancel; torch's own matrix products then differ from each other by more.)
If torch has no equivalent (softcap, sink logits, re-rotated queries, lse), the package's reference in that dtype takes its place.
For lse the scale is the largest of |lse|, 1 and the softcap, because numbers of that size are added to compute it.
"""

import numpy as np
import oracle
import torch
from calls import attention
from torch.nn.attention import SDPBackend, sdpa_kernel


def max_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest absolute difference in fp64. Equal infinities differ by 0; NaN anywhere gives NaN."""
    same = result.double() == expected.double()
    return (result.double() - expected.double()).masked_fill(same, 0.0).abs().max().item()


def largest(x: torch.Tensor) -> float:
    return x.masked_fill(x.isinf(), 0.0).abs().max().item()


def torch_math(q, k, v, seen: np.ndarray, scale=None) -> torch.Tensor:
    """torch's own attention, unfused, in q's dtype."""
    group = q.shape[1] // k.shape[1]
    seen = torch.as_tensor(seen, device=q.device)
    unseen = ~seen.any(1)[:, None, :, None]
    k, v = (x.masked_fill(unseen, 0.0).repeat_interleave(group, 1) for x in (k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], scale=scale)


def assert_close(result, expected, peer, eps: float, scale: float, what: str) -> None:
    """Compare `result` with fp64 `expected`, with the tolerance of the module's docstring for `peer` and `scale`."""
    error = max_error(result, expected)
    allowed = 2 * max_error(peer, expected) + 4 * eps * scale
    assert error <= allowed, f"{what}: error {error:.3e} against fp64, allowed {allowed:.3e}"


def assert_attention(result, expected, q, k, v, spans, seen, options: dict, what: str, **of_sinks) -> None:
    """Compare (out, lse or None) of a kernel with (out, lse) of the oracle. of_sinks: the oracle's arguments for sinks."""
    out, lse = result
    assert out.dtype == q.dtype and out.shape == (*q.shape[:3], v.shape[3]), f"{what}: {out.dtype} {tuple(out.shape)}"
    plain = all(options.get(name) is None for name in ("softcap", "sink_logits", "inv_freq"))
    twin_out, twin_lse = attention(q, k, v, spans, **{**options, "return_lse": True})
    peer = torch_math(q, k, v, seen, options.get("scale")) if plain else twin_out
    scoring = {name: value for name, value in options.items() if name in ("scale", "softcap", "sink_logits")}
    scale = largest(oracle.attention(q, k, v.abs(), seen, **scoring, **of_sinks)[0])
    assert_close(out, expected[0], peer, torch.finfo(q.dtype).eps, scale, f"{what}, out")
    if lse is not None:
        assert lse.dtype == torch.float32 and lse.shape == q.shape[:3], f"{what}: lse {lse.dtype} {tuple(lse.shape)}"
        assert torch.equal(lse.isinf(), expected[1].isinf()), f"{what}: lse is infinite in other places than it should be"
        scale = max(largest(expected[1]), options.get("softcap") or 1.0, 1.0)
        assert_close(lse, expected[1], twin_lse, torch.finfo(torch.float32).eps, scale, f"{what}, lse")
