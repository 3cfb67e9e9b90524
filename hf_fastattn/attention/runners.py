"""What the attention function runs: the backend's kernel, or the dense path, also with gradients that the backend lacks."""

from __future__ import annotations

from typing import Any

import torch

from .. import context_parallel, hf
from ..kernels import eight_bits, reference
from ..kernels.spec import Spec
from . import masks
from . import step as steps
from .backend import SPEC, Backend, calls, get, with_bias


def attend(
    backend: Backend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: Spec,
    mask: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    inv_freq: torch.Tensor | None,
    key_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the backend's kernel if the mask is spans or None; for any other mask torch's sdpa, or plain torch."""
    kv = steps.kv_of(k, v)
    if mask is None or mask.dtype == torch.int32:
        rows = steps.ragged()
        if rows is not None and rows.shared is not None:
            return rows.attend(backend.attend, q, kv, spec, mask, sink_logits=sink_logits)
        run = context_parallel.over_shares(backend.attend) if isinstance(k, context_parallel.Share) else backend.attend
        return run(q, with_bias(kv, key_bias), spec, mask, sink_logits=sink_logits, inv_freq=inv_freq if spec.sinks else None)
    k, v = eight_bits.widened(kv, q.dtype).plain()
    step = steps.innermost()
    if kv.pages is not None and step is not None:  # the last page may end behind the tokens
        tokens = step.shown_tokens
        k, v, mask = k[:, :, :tokens], v[:, :, :tokens], mask[..., :tokens]
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share one dtype; got {q.dtype}, {k.dtype} and {v.dtype}. Cast them.")
    calls[f"{backend.name}.dense"] += 1
    hf.warn_once(
        f"attn_implementation={backend.name!r} was given a mask that falls back to the dense path (a custom 4-D mask, packed "
        "sequences or chunked attention); it runs torch's masked attention, exact but slower."
    )
    mask = _additive(mask[..., : k.shape[2]], q.dtype, key_bias)
    out = reference.dense_attention(q, k, v, mask, scale=spec.scale, softcap=spec.softcap, sink_logits=sink_logits)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _attention(name: str, q: Any, k: Any, v: Any, mask: Any, *given: Any) -> torch.Tensor:
    return attend(get(name), q, k, v, Spec(*given[3:]), mask, *given[:3])


# In a compiled graph it is an opaque op: our code is not traced, so it can neither break nor respecialise the graph.
_op = torch.library.custom_op(
    "hf_fastattn::attention",
    _attention,
    mutates_args=(),
    schema="(str name, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sink_logits, Tensor? inv_freq, Tensor? key_bias, "
    f"{SPEC}) -> Tensor",
)


@_op.register_fake
def _(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: object) -> torch.Tensor:
    batch, num_heads, q_len, _ = q.shape
    return q.new_empty(batch, q_len, num_heads, v.shape[3]).transpose(1, 2)


def trained(
    backend: Backend,
    lacks: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    spec: Spec,
    sink_logits: torch.Tensor | None,
    key_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Attention with gradients or dropout that the backend does not support, by the dense path. lacks: a predicate for the
    backend's name."""
    if backend.streaming:
        raise RuntimeError(
            f"attn_implementation={backend.name!r} {lacks}, and q, k or v requires grad, or the model is in training mode. "
            'Run under torch.no_grad() and call model.eval(), or train with attn_implementation="eager".'
        )
    if not torch.compiler.is_compiling():
        calls[f"{backend.name}.dense"] += 1
        hf.warn_once(
            f"attn_implementation={backend.name!r} {lacks}: where it is needed, as in training, torch's masked attention runs. "
            "For inference, use torch.no_grad() and model.eval()."
        )
    if mask is None:
        mask = reference.visible(q.shape[2], k.shape[2], q.device, None, spec.causal, None)[:, None]
    elif isinstance(mask, masks.Mask):
        mask = masks.dense(mask)
    mask = _additive(mask, q.dtype, key_bias)
    options = {"scale": spec.scale, "softcap": spec.softcap, "sink_logits": sink_logits, "dropout": spec.dropout}
    return reference.dense_attention(q, k, v, mask, **options).transpose(1, 2), None  # type: ignore[arg-type]


def _additive(mask: torch.Tensor, dtype: torch.dtype, key_bias: torch.Tensor | None) -> torch.Tensor:
    """A mask for scores in this dtype that also adds a bias of keys, if there is one."""
    if key_bias is None:
        return mask
    bias = key_bias[:, :, None]
    return torch.where(mask, bias, torch.finfo(dtype).min) if mask.dtype == torch.bool else mask + bias
