"""The two functions Transformers calls for a backend, attention and mask, and the ops that stand for them in compiled graphs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch

from . import compat, streaming
from .kernels import reference, spans

# By backend name: what computes attention. By "<backend>.<phase>": how often it did.
_runners: dict[str, Callable[..., torch.Tensor]] = {}
_streaming: set[str] = set()
calls: Counter[str] = Counter()


def register(name: str, run: Callable[..., torch.Tensor], streams: bool = False) -> None:
    """Register both functions with Transformers under `name`; `run` has the signature of `kernels.reference.attention`.

    streams: it gets `window` and `sinks` as the model's config asks (`streaming.Settings`), and by what to turn the query that
    scores the sinks, `inv_freq` and `interleaved` (`streaming.rotation`).
    """
    _runners[name] = run
    (_streaming.add if streams else _streaming.discard)(name)
    compat.register(name, partial(attention_forward, name), partial(attention_mask, name))


@contextmanager
def count_calls() -> Iterator[Counter[str]]:
    """Count this process's kernel calls inside the block, by "<backend>.<phase>"; the counter is filled when it ends.

    "<backend>.dense" counts calls whose mask only the dense path could honour. Replays of a captured CUDA graph launch
    kernels without passing here; the capture itself counts once.
    """
    before = Counter(calls)
    counted: Counter[str] = Counter()
    try:
        yield counted
    finally:
        counted.update(calls - before)


def attention_mask(
    name: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function=compat.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config=None,
    **kwargs,
) -> torch.Tensor | None:
    """Transformers' mask function: None where plain lower-right causal, spans where they suffice, else a dense mask.

    Called once a step per kind of layer; never syncs with the host. Raises ValueError for models that do not use the
    attention interface.
    """
    if config is not None and (reason := compat.why_not_model(type(config))):
        raise ValueError(f"attn_implementation={name!r} cannot be used here: {reason}")
    pattern = compat.mask_pattern(
        mask_function, config, q_length, local_size, use_vmap, allow_is_causal_skip, allow_is_bidirectional_skip
    )
    if name in _streaming:
        streaming.check_mask(name, config, pattern, q_offset)
        if streaming.are_spans(q_offset):
            return q_offset
        if kv_length > q_length and not torch.compiler.is_compiling():
            _say_once(
                f"attn_implementation={name!r} masks what is out of sight, but this cache keeps it, and grows with the text. "
                "hf_fastattn.patch() brings a cache that does not grow."
            )
    if pattern is None:
        return compat.dense_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            use_vmap=use_vmap,
            device=device,
            config=config,
            **kwargs,
        )
    causal, window = pattern
    if (
        causal
        and attention_mask is None
        and allow_is_causal_skip
        and not isinstance(q_offset, torch.Tensor)
        and q_offset + q_length == kv_length + kv_offset
        and (window is None or kv_length <= window)
    ):
        return None
    on_device = isinstance(q_offset, torch.Tensor)
    compiling = torch.compiler.is_compiling()
    build = torch.ops.hf_fastattn.build_spans if compiling else _build_spans
    return build(
        batch_size,
        q_length,
        kv_length,
        torch.device(device),
        q_offset if on_device else None,
        0 if on_device else q_offset,
        int(kv_offset),  # assisted decoding makes it a tensor, and syncs every step anyway
        causal,
        window,
        attention_mask,
        compiling,  # a graph is told the strides of a result beforehand
    )


def attention_forward(
    name: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention function: query (batch, num_heads, q_len, head_dim) -> ((batch, q_len, num_heads, head_dim), None).

    `attention_mask` is what `attention_mask()` returned, or a user's own 4-D mask. Raises ValueError or RuntimeError, in
    a sentence, for arguments that would otherwise be dropped.
    """
    compiling = torch.compiler.is_compiling()
    if kwargs or dropout:
        _refuse(name, module, dropout, attention_mask, kwargs)
    if not compiling and compat.asks_for_weights():
        _refuse_weights(name)
    causal, window = False, None  # a mask says everything: causality and window too
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        window = sliding_window
    sinks, inv_freq, interleaved = 0, None, False
    if name in _streaming:
        inv_freq, interleaved = streaming.rotation(module, query, key)
        settings = streaming.Settings.of(module.config)
        window, sinks = settings.window, settings.sinks
    if compiling and torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise RuntimeError(
            f"{name!r} has no backward pass, and q, k or v requires grad. Compile under torch.no_grad(), "
            'or train with attn_implementation="sdpa".'
        )
    run = torch.ops.hf_fastattn.attention if compiling else _attention
    out = run(name, query, key, value, attention_mask, scaling, causal, window, softcap, s_aux, sinks, inv_freq, interleaved)
    return out.transpose(1, 2), None


def _refuse(name: str, module, dropout: float, mask, kwargs: dict) -> None:
    """Raise for what a kernel cannot honour; other keyword arguments do not concern attention."""
    if kwargs.get("output_attentions"):
        _refuse_weights(name)
    if kwargs.get("position_bias") is not None:
        raise ValueError(
            f"{name!r} does not support the additive position bias of {type(module).__name__}; "
            'use attn_implementation="sdpa" for this model.'
        )
    if dropout and module.training:
        raise ValueError(f"{name!r} has no dropout, and this module asks for {dropout} in training mode; call model.eval().")
    if mask is None and kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError(
            f"{name!r} got packed sequences as cu_seq_lens without a mask. Pass position_ids that restart at 0 and "
            "use_cache=False, which it honours."
        )
    if kwargs.get("cache") is not None:
        raise ValueError(f"{name!r} does not run in continuous batching (generate_batch); use generate().")


def _refuse_weights(name: str) -> None:
    raise ValueError(
        f"{name!r} never forms the attention weights that output_attentions=True asks for. "
        'Load the model with attn_implementation="eager" to get them.'
    )


@cache
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _attention(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
    sinks: int,
    inv_freq: torch.Tensor | None,
    interleaved: bool,
) -> torch.Tensor:
    """The backend's kernel where the mask is spans or None; torch's sdpa, or plain torch, where it is any other mask."""
    if mask is None or mask.dtype == torch.int32:
        options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "sink_logits": sink_logits}
        if sinks:
            options |= {"sinks": sinks, "inv_freq": inv_freq, "interleaved": interleaved}
        return _runners[name](q, k, v, mask, **options)
    if name in _streaming:
        raise ValueError(
            f"attn_implementation={name!r} was given a mask that it cannot combine with its window (a custom 4-D mask, packed "
            'sequences or chunked attention). Pass the 2-D attention_mask, or use attn_implementation="sdpa".'
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"An attention mask must be bool (True where attended) or float (added to the scores); got {mask.dtype}.")
    calls[f"{name}.dense"] += 1
    _say_once(
        f"attn_implementation={name!r} was given a mask that only the dense path can honour (a custom 4-D mask, packed "
        "sequences or chunked attention); it runs torch's masked attention, exact but slower."
    )
    out = reference.dense_attention(q, k, v, mask, scale=scale, softcap=softcap, sink_logits=sink_logits)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _build_spans(
    batch: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    q_offset_tensor: torch.Tensor | None,
    q_offset: int,
    kv_offset: int,
    causal: bool,
    window: int | None,
    attention_mask: torch.Tensor | None,
    contiguous: bool,
) -> torch.Tensor:
    built = spans.build_spans(
        batch,
        q_len,
        kv_len,
        device,
        q_offset=q_offset if q_offset_tensor is None else q_offset_tensor,
        kv_offset=kv_offset,
        causal=causal,
        window=window,
        attention_mask=attention_mask,
    )
    return built.contiguous() if contiguous else built


# In a compiled graph both stand as opaque ops: nothing of ours is traced, so nothing of ours can break or respecialise it.
_build_spans_op = torch.library.custom_op("hf_fastattn::build_spans", _build_spans, mutates_args=())


@_build_spans_op.register_fake
def _(batch, q_len, kv_len, device, q_offset_tensor, q_offset, kv_offset, causal, window, attention_mask, contiguous):
    words = 0 if attention_mask is None else spans.num_words(kv_len)
    return torch.empty(batch, 1, 1, spans.WORDS + words, dtype=torch.int32, device=device)


_attention_op = torch.library.custom_op("hf_fastattn::attention", _attention, mutates_args=())


@_attention_op.register_fake
def _(name, q, k, v, mask, scale, causal, window, softcap, sink_logits, sinks, inv_freq, interleaved):
    batch, num_heads, q_len, head_dim = q.shape
    return q.new_empty(batch, q_len, num_heads, head_dim).transpose(1, 2)
