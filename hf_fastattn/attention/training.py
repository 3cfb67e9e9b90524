"""Attention with gradients, for eager, compiled, checkpointed and autocast training.

Two custom ops: `hf_fastattn::flash_attn` returns (out, lse), and `hf_fastattn::flash_attn_backward` the gradients. torch.compile
treats an op as a unit. Selective activation checkpointing may keep the result of the first: policies list the flash_attn ops by
name. Where nothing needs to see the ops, an autograd.Function runs the same code without the dispatcher, which costs more time on
the host than the launches. Inference runs neither.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..kernels import checks
from ..kernels.spec import KV, Spec
from . import refuse
from .backend import SPEC, Backend, get, names, with_bias


def why_not(
    backend: Backend, q: torch.Tensor, v: torch.Tensor, in_spans: bool, dropped: bool, key_bias: torch.Tensor | None = None
) -> str | None:
    """The reason why the backend has no gradients for such tensors, as a predicate for its name; None if it has.

    in_spans: whether spans describe the mask. dropped: whether there is dropout. key_bias: of `attend`.
    """
    if dropped and not (backend.dropout and backend.backward):
        return "has no dropout"
    if backend.backward is None:
        return "has no backward pass"
    if not in_spans:
        return "has no backward pass for this mask (a custom 4-D mask, blocks of an image, or chunks with padding)"
    if key_bias is not None and key_bias.requires_grad:
        return "has no gradient of a bias of keys"
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
    refuse.transforms(q, k, v, sink_logits)
    backend = get(name) if name in names() else None
    if backend is None or backend.backward is None:
        trained = sorted(each for each in names() if get(each).backward is not None)
        raise ValueError(f"{name!r} has no backward pass; use one of {', '.join(trained)}.")
    if dropout != 0.0 and not backend.dropout:
        dropping = sorted(each for each in names() if get(each).backward is not None and get(each).dropout)
        raise ValueError(f"{name!r} has no dropout; use one of {', '.join(dropping)}, or dropout=0.")
    spec = Spec(scale, causal, window, softcap, dropout=dropout)
    return attend(backend, q, k, v, spec, spans, sink_logits)


def attend(
    backend: Backend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: Spec,
    spans: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    key_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` of a backend with gradients, and with dropout if `spec` has some. key_bias: a constant (`kernels.biased`)."""
    seed = None
    if spec.dropout != 0.0:
        if not 0.0 < spec.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1; got {spec.dropout}. Set another, or use eager attention.")
        seed = torch.randint(-(1 << 62), 1 << 62, (1,), device=q.device)
    tensors = q, k, v, spans, sink_logits, seed, key_bias
    if not torch.compiler.is_compiling() and _is_direct(*tensors):
        out, lse = _Attention.apply(backend, *tensors, spec)  # type: ignore[no-untyped-call]
    else:
        out, lse = torch.ops.hf_fastattn.flash_attn(backend.name, *tensors, *spec)
    return out, lse


def _is_direct(*tensors: torch.Tensor | None) -> bool:
    """Whether nothing needs to see an op of these tensors: no tracer or other mode of the dispatcher (selective checkpointing,
    fake tensors), no class of tensors with operations of its own (DTensor), and no batch of gradients (is_grads_batched=True)."""
    if torch._C._len_torch_dispatch_stack():
        return False
    given = [x for x in tensors if x is not None]
    plain, in_batch = torch.Tensor.__torch_dispatch__, torch._C._functorch.is_legacy_batchedtensor
    return all((x.is_cuda or x.is_cpu) and type(x).__torch_dispatch__ is plain and not in_batch(x) for x in given)


def _without_autocast(device_type: str) -> AbstractContextManager[None]:
    """A context without autocast, in which the reference computes in fp32."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _forward(backend: Backend, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse). inputs: the op's arguments after the name, with `spec` as one."""
    q, k, v, spans, sink_logits, seed, key_bias, spec = inputs
    given = {"sink_logits": sink_logits} | ({} if seed is None else {"seed": seed})
    with torch.no_grad(), _without_autocast(q.device.type):
        return backend.forward(q, with_bias(KV(k, v), key_bias), spec, spans, **given)


_INPUTS = "Tensor? spans, Tensor? sink_logits, Tensor? seed, Tensor? key_bias"
_flash_attn = torch.library.custom_op(
    "hf_fastattn::flash_attn",
    lambda name, *given: _forward(get(name), *given[:7], Spec(*given[7:])),
    mutates_args=(),
    schema=f"(str name, Tensor q, Tensor k, Tensor v, {_INPUTS}, {SPEC}) -> (Tensor, Tensor)",
)


@_flash_attn.register_fake
def _(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: object) -> tuple[torch.Tensor, torch.Tensor]:
    return _token_major(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _gradients(backend: Backend, spec: Spec, *given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv, dsink_logits); tensors that are not needed are empty. given: the op's arguments before `spec`."""
    dout, dlse, q, k, v, out, lse, spans, sink_logits, seed, key_bias, *needs = given
    named = {"out": out, "lse": lse, "dout": dout, "dlse": dlse, "sink_logits": sink_logits, "needs": tuple(needs)}
    with torch.no_grad(), _without_autocast(q.device.type):
        kv = with_bias(KV(k, v), key_bias)
        found = backend.gradients(q, kv, spec, spans, **named, **({} if seed is None else {"seed": seed}))
    dq, dk, dv, dsink = (q.new_empty(0) if x is None else x for x in found)
    return dq, dk, dv, dsink


_flash_attn_backward = torch.library.custom_op(
    "hf_fastattn::flash_attn_backward",
    lambda name, *given: _gradients(get(name), Spec(*given[13:]), *given[:13]),
    mutates_args=(),
    schema="(str name, Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_INPUTS}, bool needs_q, bool needs_kv, {SPEC}) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_flash_attn_backward.register_fake
def _(name: str, *given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _, _, q, k, v, _, _, _, sink_logits, _, _, needs_q, needs_kv, *_ = given
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
    backend, q, k, v, spans, sink_logits, seed, key_bias, *spec = inputs
    ctx.save_for_backward(q, k, v, *output, spans, sink_logits, seed, key_bias)
    direct = isinstance(backend, Backend)
    ctx.backend, ctx.spec = (backend, *spec) if direct else (get(backend), Spec(*spec))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, spans, sink_logits, *constants = ctx.saved_tensors
    _, needs_q, needs_k, needs_v, _, needs_sinks, *others = ctx.needs_input_grad
    if dout is None and dlse is None:
        return (None,) * len(ctx.needs_input_grad)
    dout = torch.zeros_like(out) if dout is None else dout
    sinks = sink_logits if needs_sinks else None
    given = dout, dlse, q, k, v, out, lse, spans, sinks, *constants, needs_q, needs_k or needs_v
    # With create_graph=True the op refuses second derivatives.
    if not torch.compiler.is_compiling() and not torch.is_grad_enabled() and _is_direct(q, dout, dlse, spans):
        dq, dk, dv, dsink = _gradients(ctx.backend, ctx.spec, *given)
    else:
        dq, dk, dv, dsink = torch.ops.hf_fastattn.flash_attn_backward(ctx.backend.name, *given, *ctx.spec)
    grads = (dq if needs_q else None, dk if needs_k else None, dv if needs_v else None)
    return None, *grads, None, dsink if needs_sinks else None, *(None for _ in others)


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
