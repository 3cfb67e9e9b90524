"""Attention with gradients, for eager, compiled, checkpointed and autocast training.

Two custom ops: `hf_fastattn::flash_attn` returns (out, lse), and `hf_fastattn::flash_attn_backward` the gradients. torch.compile
treats an op as a unit. Selective activation checkpointing may keep the result of the first: policies list the flash_attn ops by
name. Where nothing needs to see the ops, an autograd.Function runs the same code without the dispatcher, which costs more time on
the host than the launches. Inference runs neither.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad

from .kernels import checks
from .kernels.spec import KV, Gradients, Spec

__all__ = ["attention"]

# The functions of each backend name that compute (out, lse) and the gradients, and the names whose functions support dropout.
_passes: dict[str, tuple[Callable[..., tuple[torch.Tensor, torch.Tensor]], Callable[..., Gradients]]] = {}
_dropping: set[str] = set()


def register(
    name: str,
    passes: tuple[Callable[..., tuple[torch.Tensor, torch.Tensor]], Callable[..., Gradients]] | None,
    dropout: bool = False,
) -> None:
    """Set the functions with which the backend `name` computes (out, lse) and their gradients; None if it has none."""
    _passes.pop(name, None)
    _dropping.discard(name)
    if passes is not None:
        _passes[name] = passes
        if dropout:
            _dropping.add(name)


def why_not(name: str, q: torch.Tensor, v: torch.Tensor, in_spans: bool, dropped: bool) -> str | None:
    """The reason why the backend has no gradients for such tensors, as a predicate for its name; None if it has.

    in_spans: whether spans describe the mask. dropped: whether there is dropout.
    """
    if dropped and name not in _dropping:
        return "has no dropout"
    if name not in _passes:
        return "has no backward pass"
    if not in_spans:
        return "has no backward pass for this mask (a custom 4-D mask, blocks of an image, or chunks with padding)"
    if (width := max(q.shape[3], v.shape[3])) > checks.MAX_TRAINED_DIM:
        return f"has no backward pass for heads wider than {checks.MAX_TRAINED_DIM} (here {width})"
    return None


def attention(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: torch.Tensor | None = None,
    *,
    sink_logits: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the backend `name`, with gradients to q, k, v and sink_logits.

    q (batch, num_heads, q_len, head_dim), k and v (batch, num_kv_heads, kv_len, head_dim), and the other arguments are those of
    `kernels.reference.attention`, as are out and lse. Gradients are summed in fp32 and have the dtypes of their tensors. On a GPU
    they are bitwise repeatable. dropout: the probability of dropping a weight, rounded to a multiple of 2^-16. Torch's generator
    gives the seed, outside of the op, so recomputation with the state of the generator preserved drops the same weights.

    Raises ValueError for a backend without gradients or dropout, and for a probability below 0 or from 1 on; RuntimeError for
    second and forward-mode derivatives, and under transforms of torch.func.

    Source: Dao, "FlashAttention-2" (2023), algorithms 1 and 2.
    """
    refuse_transforms(q, k, v, sink_logits)
    if name not in _passes:
        raise ValueError(f"{name!r} has no backward pass; use one of {', '.join(sorted(_passes))}.")
    seed = None
    if dropout != 0.0:
        if not 0.0 < dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1; got {dropout}. Set another, or use eager attention.")
        if name not in _dropping:
            raise ValueError(f"{name!r} has no dropout; use one of {', '.join(sorted(_dropping))}, or dropout=0.")
        seed = torch.randint(-(1 << 62), 1 << 62, (1,), device=q.device)
    arguments = name, q, k, v, spans, sink_logits, scale, causal, window, softcap, dropout, seed
    direct = not torch.compiler.is_compiling() and _is_direct(q, k, v, spans, sink_logits)
    out, lse = _Attention.apply(*arguments) if direct else torch.ops.hf_fastattn.flash_attn(*arguments)  # type: ignore[no-untyped-call]
    return out, lse


def _is_direct(*tensors: torch.Tensor | None) -> bool:
    """Whether nothing needs to see an op of these tensors: no tracer or other mode of the dispatcher (selective checkpointing,
    fake tensors), no class of tensors with operations of its own (DTensor), and no batch of gradients (is_grads_batched=True)."""
    if torch._C._len_torch_dispatch_stack():
        return False
    given = [x for x in tensors if x is not None]
    plain, in_batch = torch.Tensor.__torch_dispatch__, torch._C._functorch.is_legacy_batchedtensor
    return all((x.is_cuda or x.is_cpu) and type(x).__torch_dispatch__ is plain and not in_batch(x) for x in given)


def requires_grad(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def refuse_transforms(*tensors: torch.Tensor | None) -> None:
    """Raise RuntimeError under a transform of torch.func, and for forward-mode differentiation, whose tangents would be 0."""
    if torch.compiler.is_compiling():
        return
    in_forward_mode = getattr(forward_ad, "_current_level", 0) >= 0
    if torch._C._are_functorch_transforms_active() or (
        in_forward_mode and any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    ):
        raise RuntimeError(
            "Attention of hf_fastattn has no forward-mode derivatives (torch.autograd.forward_ad) and does not run under "
            "transforms of torch.func (grad, vmap, jvp, jacrev). Use torch.autograd.grad, or "
            'attn_implementation="eager" for them.'
        )


def _without_autocast(device_type: str) -> AbstractContextManager[None]:
    """A context without autocast, in which the reference computes in fp32."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _forward(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    dropout: float,
    seed: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    forward, _ = _passes[name]
    given = {"sink_logits": sink_logits} | ({} if seed is None else {"seed": seed})
    with torch.no_grad(), _without_autocast(q.device.type):
        return forward(q, KV(k, v), Spec(scale, causal, window, softcap, dropout=dropout), spans, **given)


_flash_attn = torch.library.custom_op("hf_fastattn::flash_attn", _forward, mutates_args=())


@_flash_attn.register_fake
def _(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: object) -> tuple[torch.Tensor, torch.Tensor]:
    return _token_major(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _gradients(
    name: str,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spans: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    dropout: float,
    seed: torch.Tensor | None,
    needs_q: bool,
    needs_kv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv, dsink_logits); tensors that are not needed are empty."""
    _, gradients = _passes[name]
    given = {} if seed is None else {"seed": seed}
    with torch.no_grad(), _without_autocast(q.device.type):
        dq, dk, dv, dsink = gradients(
            q,
            KV(k, v),
            Spec(scale, causal, window, softcap, dropout=dropout),
            spans,
            out=out,
            lse=lse,
            dout=dout,
            dlse=dlse,
            sink_logits=sink_logits,
            needs=(needs_q, needs_kv),
            **given,
        )
    return _or_empty(dq, q), _or_empty(dk, q), _or_empty(dv, q), _or_empty(dsink, q)


def _or_empty(x: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0) if x is None else x


_flash_attn_backward = torch.library.custom_op("hf_fastattn::flash_attn_backward", _gradients, mutates_args=())


@_flash_attn_backward.register_fake
def _(
    name: str,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spans: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    dropout: float,
    seed: torch.Tensor | None,
    needs_q: bool,
    needs_kv: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        _token_major(q, q.shape[3]) if needs_q else q.new_empty(0),
        _token_major(k, k.shape[3]) if needs_kv else q.new_empty(0),
        _token_major(v, v.shape[3]) if needs_kv else q.new_empty(0),
        q.new_empty(0) if sink_logits is None else torch.empty_like(sink_logits),
    )


def _token_major(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A new tensor like x (batch, heads, length, any) with `dim` columns, in the layout of the kernels' outputs."""
    batch, heads, length, _ = x.shape
    return x.new_empty(batch, length, heads, dim).transpose(1, 2)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    name, q, k, v, spans, sink_logits, *static, seed = inputs
    ctx.save_for_backward(q, k, v, *output, spans, sink_logits, seed)
    ctx.backend, ctx.static = name, static
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, spans, sink_logits, seed = ctx.saved_tensors
    _, needs_q, needs_k, needs_v, _, needs_sinks, *_ = ctx.needs_input_grad
    if dout is None and dlse is None:
        return (None,) * 12
    # With create_graph=True the op refuses second derivatives.
    direct = not torch.compiler.is_compiling() and not torch.is_grad_enabled() and _is_direct(q, dout, dlse, spans)
    run: Callable[..., tuple[torch.Tensor, ...]] = _gradients if direct else torch.ops.hf_fastattn.flash_attn_backward
    dq, dk, dv, dsink = run(
        ctx.backend,
        torch.zeros_like(out) if dout is None else dout,
        dlse,
        *(q, k, v, out, lse, spans, sink_logits if needs_sinks else None, *ctx.static, seed),
        needs_q,
        needs_k or needs_v,
    )
    grads = (dq if needs_q else None, dk if needs_k else None, dv if needs_v else None)
    return None, *grads, None, dsink if needs_sinks else None, *(None,) * 6


_flash_attn.register_autograd(_backward, setup_context=_save_for_backward)


class _Attention(torch.autograd.Function):
    """The ops without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output = _forward(*inputs)
        _save_for_backward(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)


def _refuse_second(ctx: Any, *grads: torch.Tensor | None) -> Any:
    raise RuntimeError(
        "Attention of hf_fastattn has no second derivatives (create_graph=True, gradient penalties, Hessians). "
        'Use attn_implementation="eager" for them.'
    )


_flash_attn_backward.register_autograd(_refuse_second)
