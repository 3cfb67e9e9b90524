"""The attention and the mask function that Transformers calls for a backend, and their custom ops for compiled graphs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from . import context_parallel, hf, masks, packed, refuse, streaming, training
from . import step as steps
from .kernels import reference, spans
from .kernels.spec import Spec, is_plain

# The attention function of each backend name, and the number of calls by "<backend>.<phase>".
_runners: dict[str, Callable[..., torch.Tensor]] = {}
_streaming: set[str] = set()
_packed: set[str] = set()
calls: Counter[str] = Counter()


def register(name: str, run: Callable[..., torch.Tensor], streams: bool = False, packs: bool = False) -> None:
    """Register both functions with Transformers under `name`; `run` has the signature of `kernels.reference.attention`.

    streams: `run` gets `window` and `sinks` from the model's config (`streaming.Settings`), and the rotation of the queries that
    score the sinks, `inv_freq` and `interleaved` (`streaming.rotation`). packs: it reads spans with an interval for each query.
    """
    _runners[name] = run
    (_streaming.add if streams else _streaming.discard)(name)
    (_packed.add if packs else _packed.discard)(name)
    hf.register(name, partial(attention_forward, name), partial(attention_mask, name))


@contextmanager
def count_calls() -> Iterator[Counter[str]]:
    """Count the kernel calls of this process inside the block, by "<backend>.<phase>"; the counter is filled at its end.

    "<backend>.backward" counts backward passes, "<backend>.dense" calls with a mask that only the dense path supports,
    "<backend>.stock" calls that ran the model's own attention because the backend does not support their gradients or dropout.
    The capture of a CUDA graph is counted once. Its replays are not counted: they launch kernels without running this code.
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
    mask_function: Callable[..., bool] = hf.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: hf.PreTrainedConfig | None = None,
    **kwargs: Any,
) -> masks.Mask:
    """The mask function for Transformers: plain causal, spans, or dense if spans cannot express it (`masks.Mask`).

    Called once per step and kind of layer. Never synchronises with the device.
    """
    if not (torch.compiler.is_compiling() or hf.is_causal(mask_function)) and steps.looks_ahead(config, q_length, q_offset):
        mask_function, allow_is_bidirectional_skip = hf.up_to_query(mask_function), False
    pattern = hf.mask_pattern(
        mask_function, config, q_length, local_size, use_vmap, allow_is_causal_skip, allow_is_bidirectional_skip
    )
    model = "This model" if config is None else type(config).__name__.removesuffix("Config")
    made_for = name, model
    if name in _streaming:
        made = steps.mask_for((batch_size, q_length, kv_length), q_offset)
        streaming.check_mask(name, config, pattern, made is not None)
        if made is not None:
            return made
        if kv_length > q_length and not torch.compiler.is_compiling():
            _say_once(
                f"attn_implementation={name!r} masks dropped tokens, but this cache keeps them and grows with the text. "
                "hf_fastattn.patch() adds a cache that does not grow."
            )
    runs = None
    if pattern is None and name in _packed and attention_mask is None and kv_length == q_length > 1:
        at_start = not isinstance(q_offset, torch.Tensor) and q_offset == kv_offset == 0
        flags = use_vmap, allow_is_causal_skip, allow_is_bidirectional_skip
        runs = hf.runs_pattern(mask_function, config, local_size, *flags) if at_start else None
    if runs is not None:
        return packed.of_runs(mask_function, runs[0], (batch_size, q_length, kv_length), device, made_for, runs[1])
    if pattern is None:
        mask = hf.dense_mask(
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
        return masks.of_bools(mask, made_for)
    causal, window = pattern
    compiling = torch.compiler.is_compiling()
    on_host, on_device = (0, q_offset) if isinstance(q_offset, torch.Tensor) else (q_offset, None)
    sizes = batch_size, q_length, kv_length
    if (
        causal
        and attention_mask is None
        and on_device is None
        and not compiling
        and allow_is_causal_skip
        and on_host + q_length == kv_length + kv_offset
        and (window is None or kv_length <= window)
    ):
        return masks.plain(sizes, device, made_for)
    build = torch.ops.hf_fastattn.build_spans if compiling else _build_spans
    ints = build(
        batch_size,
        q_length,
        kv_length,
        torch.device(device),
        attention_mask,
        on_device,
        on_host,
        int(kv_offset),  # a tensor in assisted decoding, which synchronises at every step anyway
        causal,
        window,
        compiling,  # a compiled graph needs fixed strides
    )
    return masks.of_spans(ints, sizes, made_for)


def attention_forward(
    name: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function for Transformers: query (batch, num_heads, q_len, head_dim) -> ((batch, q_len, num_heads,
    head_dim), None).

    `attention_mask` is the result of `attention_mask()`, or a user's 4-D mask. Under autocast q, k and v are cast as in torch's
    sdpa. With gradients the ops of `training` run, or the model's own attention if the backend does not support their gradients
    or dropout (`_stock`). Raises ValueError, TypeError or RuntimeError, with the reason, for arguments that would be ignored.
    """
    compiling = torch.compiler.is_compiling()
    refuse.tracing(name, attention_mask)
    # A mask includes causality and window. Without a mask there is no window, whatever the value of sliding_window.
    mask, causal, window = attention_mask, False, None
    if kwargs:
        cu_q, cu_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
        if cu_q is not None or cu_k is not None:
            mask = packed.separated(name, name in _packed, mask, cu_q, cu_k)
        refuse.unknown_arguments(name, module, kwargs)
    if not compiling and hf.asks_for_weights():
        refuse.weights(name)
    sinks, inv_freq, interleaved = 0, None, False
    if name in _streaming:
        inv_freq, interleaved = streaming.rotation(module, query, key)
    if mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if causal and 1 < query.shape[2] != key.shape[2]:
            refuse.missing_mask(name, module, query, key)
    elif isinstance(mask, masks.Mask):
        causal = isinstance(mask, masks.PlainMask)
        # In a compiled graph only the shape is symbolic. Elsewhere reading the shape is slow.
        sizes = mask.sizes if not compiling else refuse.sizes_of(mask)
        if (query.shape[0], query.shape[2], key.shape[2]) != sizes and not (causal and sizes[1] == query.shape[2] == 1):
            mask, causal = masks.broadcast(mask, refuse.other_sizes(mask, query, key)), False  # a single query sees all keys
    elif mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"An attention mask must be bool (True where attended) or float (added to the scores); got {mask.dtype}.")
    in_spans = mask is None or isinstance(mask, (masks.SpansMask, masks.PlainMask))
    if name in _streaming and not in_spans:
        raise ValueError(
            f"attn_implementation={name!r} was given a mask that it cannot combine with its window (a custom 4-D mask, packed "
            "sequences or chunked attention). Pass the 2-D attention_mask, or use another backend."
        )
    training.refuse_transforms(query, key, value, s_aux)
    if not 1 == query.stride(-1) == key.stride(-1) == value.stride(-1):
        query, key, value = steps.channels_last(query, key, value)
    dropped, differentiated = dropout != 0 and module.training, training.requires_grad(query, key, value, s_aux, mask)
    if dropped or differentiated:
        refuse.other_forms(name, steps.kv_of(key, value))
        lacks = training.why_not(name, query, value, in_spans, dropped)
        if lacks is not None:
            return _stock(name, lacks, module, query, key, value, mask, causal, window, dropout, scaling, softcap, s_aux, kwargs)
    given = mask.given if isinstance(mask, masks.Mask) and not compiling else mask
    if name in _streaming:
        settings = streaming.Settings.of(module.config)  # type: ignore[arg-type]
        window, sinks = settings.window, settings.sinks
    device_type = "cuda" if query.is_cuda else query.device.type
    autocast = torch.is_autocast_enabled(device_type)
    if autocast:
        if is_plain(steps.kv_of(key, value).form):
            key, value = _autocast(device_type, key, value)
        (query,) = _autocast(device_type, query)
    if dropped or differentiated:
        rate = dropout if dropped else 0.0
        out = _differentiable(name, query, key, value, given, scaling, causal, window, softcap, s_aux, rate)
        return out.transpose(1, 2), None
    run = torch.ops.hf_fastattn.attention if compiling else _attention
    arguments = name, query, key, value, given, scaling, causal, window, softcap, s_aux, sinks, inv_freq, interleaved
    if autocast:
        with torch.autocast(device_type, enabled=False):  # the reference computes in fp32
            return run(*arguments).transpose(1, 2), None
    return run(*arguments).transpose(1, 2), None


def _autocast(device_type: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast tensors as torch's autocast does for sdpa: to its dtype, except float64."""
    dtype = torch.get_autocast_dtype(device_type)
    return [x if x.dtype == torch.float64 else x.to(dtype) for x in tensors]


def _differentiable(
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
    dropout: float,
) -> torch.Tensor:
    """Attention with gradients or dropout, always by the prefill kernel."""
    if q.is_cuda and q.dtype == torch.float32 and not torch.compiler.is_compiling():
        _say_once(
            f"attn_implementation={name!r} trains in float32, without tensor cores: several times slower than in bfloat16. "
            "Load the model in bfloat16, or train under torch.autocast."
        )
    mask = None if isinstance(mask, masks.PlainMask) else mask
    out, _ = training.attention(
        name, q, k, v, mask, sink_logits=sink_logits, scale=scale, causal=causal, window=window, softcap=softcap, dropout=dropout
    )  # fmt: skip
    return out


def _stock(
    name: str,
    lacks: str,
    module: torch.nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    window: int | None,
    dropout: float,
    scale: float | None,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Attention with gradients or dropout that the backend does not support: torch's sdpa, or the model's eager attention for a
    softcap or sink logits, which sdpa does not support. lacks: a predicate for the backend's name."""
    eager = softcap is not None or sink_logits is not None
    attend = hf.stock_attention(module, eager)
    if name in _streaming or attend is None:
        raise RuntimeError(
            f"attn_implementation={name!r} {lacks}, and q, k or v requires grad, or the model is in training mode. "
            'Run under torch.no_grad() and call model.eval(), or train with attn_implementation="eager".'
        )
    if not torch.compiler.is_compiling():
        calls[f"{name}.stock"] += 1
        _say_once(
            f"attn_implementation={name!r} {lacks}: where it is needed, as in training, "
            f"{'the model' if eager else 'torch'}'s own {'eager' if eager else 'sdpa'} attention runs. For inference, use "
            "torch.no_grad() and model.eval()."
        )
    q_len, kv_len = q.shape[2], k.shape[2]
    if isinstance(mask, masks.PlainMask):
        mask = None
    elif isinstance(mask, masks.Mask):
        mask = masks.dense(mask)
    if mask is None and (causal or window is not None) and (eager or q_len != kv_len or (window is not None and window < kv_len)):
        mask = reference.visible(q_len, kv_len, q.device, None, causal, window)[:, None]
    if eager and mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~mask, torch.finfo(q.dtype).min)
    own: dict[str, Any] = {"softcap": softcap, "s_aux": sink_logits} if eager else {"is_causal": causal}
    further = {key: value for key, value in {**kwargs, **own}.items() if value is not None}
    return attend(module, q, k, v, mask, dropout=dropout, scaling=scale, **further)[0], None


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
    """Run the backend's kernel if the mask is spans or None; for any other mask torch's sdpa, or plain torch."""
    kv = steps.kv_of(k, v)
    if mask is None or mask.dtype == torch.int32:
        spec = Spec(scale, causal, window, softcap, sinks, interleaved)
        run = context_parallel.over_shares(_runners[name]) if isinstance(k, context_parallel.Share) else _runners[name]
        return run(q, kv, spec, mask, sink_logits=sink_logits, inv_freq=inv_freq if sinks else None)
    k, v = kv.plain()
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share one dtype; got {q.dtype}, {k.dtype} and {v.dtype}. Cast them.")
    calls[f"{name}.dense"] += 1
    _say_once(
        f"attn_implementation={name!r} was given a mask that falls back to the dense path (a custom 4-D mask, packed "
        "sequences or chunked attention); it runs torch's masked attention, exact but slower."
    )
    out = reference.dense_attention(q, k, v, mask, scale=scale, softcap=softcap, sink_logits=sink_logits)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _build_spans(
    batch: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    attention_mask: torch.Tensor | None,
    q_offset_tensor: torch.Tensor | None,
    q_offset: int,
    kv_offset: int,
    causal: bool,
    window: int | None,
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


# In compiled graphs both are opaque ops: our code is not traced, so it can neither break nor respecialise a graph.
_build_spans_op = torch.library.custom_op("hf_fastattn::build_spans", _build_spans, mutates_args=())


@_build_spans_op.register_fake
def _(
    batch: int, q_len: int, kv_len: int, device: torch.device, attention_mask: torch.Tensor | None, *others: object
) -> torch.Tensor:
    words = 0 if attention_mask is None else spans.num_words(kv_len)
    return torch.empty(batch, 1, 1, spans.WORDS + words, dtype=torch.int32, device=device)


_attention_op = torch.library.custom_op("hf_fastattn::attention", _attention, mutates_args=())


@_attention_op.register_fake
def _(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: object) -> torch.Tensor:
    batch, num_heads, q_len, _ = q.shape
    return q.new_empty(batch, q_len, num_heads, v.shape[3]).transpose(1, 2)
