"""The checks of patch() on a model and its arguments, before it changes anything. A refusal is a ValueError with the reason."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

import torch

from .. import hf, registry
from ..caches import eight_bits
from ..caches.linear import check_kinds
from ..context_parallel import Shares
from ..streaming import Settings

ALONE = 'model.set_attn_implementation("lean") changes its attention alone, if its code lets it.'
OLD_NAME = 'patch() has kv_sharding= in place of kv=; its values are "heads" and "sequence".'


class Adapted(Protocol):
    """A PEFT model. PEFT is optional, and its own type would stand for any object where it is missing."""

    @property
    def peft_config(self) -> Any: ...

    def get_base_model(self) -> torch.nn.Module: ...


def find_model(target: hf.PreTrainedModel | hf.Pipeline | Adapted) -> hf.PreTrainedModel:
    """The model of a pipeline or a PEFT model, whose generate() runs."""
    model: Any = target
    if not isinstance(model, torch.nn.Module) and isinstance(getattr(model, "model", None), torch.nn.Module):
        model = model.model  # a pipeline
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        if any(getattr(config, "is_prompt_learning", False) for config in model.peft_config.values()):
            raise ValueError(
                "A PEFT model with prompt learning passes its own cache and masks, which the preallocated cache does "
                'not support. model.get_base_model().set_attn_implementation("lean") changes its attention alone.'
            )
        model = model.get_base_model()
    if isinstance(model, hf.PreTrainedModel) and not model.can_generate():
        raise TypeError(f"{type(model).__name__} has no generate(), which patch() is for. {ALONE}")
    if not isinstance(model, hf.PreTrainedModel):
        raise TypeError(
            "patch() takes a Transformers model with generate(), a text-generation pipeline or a PEFT model; "
            f"got {type(target).__name__}."
        )
    return model


def which_cache(cache: str | None, backend: registry.Backend, graph: bool) -> str | None:
    """The cache that patch(cache=...) selects: "preallocated", "rolling", "linear" or None."""
    if cache == "auto":
        cache = "linear" if backend.linear else "rolling" if backend.streaming else "preallocated"
    if (cache == "linear") != backend.linear:
        raise ValueError(
            f"cache={cache!r} and {backend.name!r} cannot be combined: linear attention keeps sums, in a cache of its own, and "
            "other attention tokens. Leave out cache=."
        )
    if cache == "linear":
        return cache
    if cache not in ("preallocated", "rolling", None):
        raise ValueError(f'cache must be "auto", "preallocated", "rolling", or None for Transformers\' own; got {cache!r}.')
    if cache is not None and (cache == "rolling") != backend.streaming:
        raise ValueError(
            f"cache={cache!r} and {backend.name!r} cannot be combined: a rolling cache drops tokens that only a streaming "
            "backend does not read, and a preallocated cache keeps tokens that a streaming backend never reads. Leave out cache=."
        )
    if graph and cache is None:
        raise ValueError(
            "graph=True needs a preallocated cache, whose addresses do not change; pass graph=False with cache=None."
        )
    return cache


def why_not_replaced(model: hf.PreTrainedModel, backend: registry.Backend) -> str | None:
    """Why attention code of the model's own cannot be replaced by this backend; None if it can, or there is none."""
    if hf.own_attention(model) is None or backend.exact:
        return None
    has = "has ALiBi" if hf.has_alibi(model.config) else "has attention code of its own"
    return f"{has}, which {backend.name!r} does not support. Use another backend, such as 'lean'."


def check_model(model: hf.PreTrainedModel, backend: registry.Backend) -> None:
    """Raise ValueError for a model that cannot run the backend, or that generates through another model."""
    name = type(model).__name__
    replaced = hf.own_attention(model) is not None
    if reason := why_not_replaced(model, backend):
        raise ValueError(f"{name} {reason}")
    if reason := hf.why_not_own_attention(model):
        raise ValueError(f"{name} cannot be patched: {reason}")
    if (reason := hf.why_not_model(type(model.config))) and not replaced:
        raise ValueError(f"{name} cannot be patched: {reason.partition('; load this model')[0]}. Leave it unpatched.")
    if not (replaced or model._can_set_attn_implementation()):
        raise ValueError(
            f"{name} cannot be patched: it computes attention in its own code and does not let its attn_implementation be set."
        )
    if backend.linear:
        check_kinds(model.config)
        if hf.tensor_parallel_mesh(model) is not None:
            raise ValueError(f"{name} is shared by several ranks, which {backend.name!r} does not support. Use 'lean'.")
    if hf.is_stage(model):
        raise ValueError(
            f"{name} cannot be patched: this rank has a part of its layers (pipeline parallelism), and masks are made for the "
            "first layer, which other ranks do not run. Use tensor parallelism: DistributedConfig(tp_size=N)."
        )
    if part := hf.generates_by_another(model):
        raise ValueError(
            f"{name} cannot be patched: its generate() is that of its {part}. Patch the part: hf_fastattn.patch(model.{part})."
        )
    if other := hf.sharer(model):
        raise ValueError(
            f"{name} cannot be patched: a {other} in this process shares a part of it and would be changed too. Delete "
            "the other model, or build it over a copy (copy.deepcopy) of the part."
        )
    if part := next((path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)), None):
        script = "is a torch.jit.ScriptModule, whose code cannot be read. Use its module."
        raise ValueError(f"{name} cannot be patched: {part} {script}")
    if reason := _why_no_kernel(model, backend):
        raise ValueError(f"{name} cannot run {backend.name!r}: {reason}")
    if reason := hf.unpacked(model):
        hf.warn(f"The linear layers of this {name} are not replaced, as {reason}.")


def check_peer_memory(model: hf.PreTrainedModel, fused_graphs: bool) -> None:
    """Raise ValueError if patch() would not use memory that ranks share."""
    if hf.tensor_parallel_mesh(model) is None:
        raise ValueError(
            "peer_memory=True is for a model that several ranks share by tensor parallelism; this one is on one rank."
        )
    if not fused_graphs:
        raise ValueError("peer_memory=True needs graph=True and fuse=True: its kernels run in decode graphs.")


def check_chunks(model: hf.PreTrainedModel, asked: str | None, cache: str | None) -> None:
    """Raise ValueError for another prefill_chunk= than None if it is unknown, or the memory of a prompt cannot be counted."""
    if asked is None:
        return
    number = "pass a number of tokens to generate(), as prefill_chunk_size"
    if asked != "auto":
        raise ValueError(f'prefill_chunk must be "auto" or None; got {asked!r}. For other chunks {number}.')
    if cache is None:
        raise ValueError(f'prefill_chunk="auto" counts the bytes of caches of the package, and this is cache=None. Or {number}.')
    devices = set(getattr(model, "hf_device_map", {}).values())
    if hf.tensor_parallel_mesh(model) is not None or len(devices) > 1:
        raise ValueError(f'prefill_chunk="auto" is for a model on one device. Leave it out, and {number}.')


def _why_no_kernel(model: hf.PreTrainedModel, backend: registry.Backend) -> str | None:
    """The reason why the backend cannot serve one of the model's layers, or None."""
    for shape in dict.fromkeys(hf.layer_shapes(model.config)):
        if reason := backend.why_not(**asdict(shape), dtype=model.dtype, device=hf.device_of(model)):
            return reason
    return None


def which_settings(
    model: hf.PreTrainedModel, backend: registry.Backend, window: int | None, sinks: int | None, clamped: bool
) -> Settings | None:
    """The checked settings of a streaming backend for this model; None for other backends."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    settings = Settings.asked(backend.name, backend.streaming, window, sinks, limit, clamped)
    if settings is not None:
        _check_width(model, settings)
    return settings


def _check_width(model: hf.PreTrainedModel, asked: Settings) -> None:
    """Raise ValueError if a sliding window of the model is smaller than the sinks and the window together."""
    own = min((kind.window for kind in hf.layer_kinds(model.config) if kind.window is not None), default=None)
    if own is None or asked.sinks + asked.window <= own:
        return
    says = (
        f"{type(model).__name__} has a sliding window of its own, {own} tokens, and {asked.sinks} sinks and a window of "
        f"{asked.window} are more."
    )
    if own <= asked.sinks:
        raise ValueError(f"{says} Use another backend.")
    raise ValueError(f"{says} A window of at most {own - asked.sinks} fits.")


def which_shares(model: hf.PreTrainedModel, cache: str | None, kv_sharding: str) -> Shares | None:
    """How ranks share K and V by sequence; None if each rank has the KV heads that it computes."""
    if kv_sharding == "heads":
        hf.local_kv_heads(model)
        return None
    if kv_sharding != "sequence":
        raise ValueError(f'kv_sharding must be "heads" or "sequence"; got {kv_sharding!r}.')
    hf.refuse_states(model.config, 'kv_sharding="sequence" needs', "Leave out kv_sharding=.")
    name, mesh = type(model).__name__, hf.tensor_parallel_mesh(model)
    if mesh is None:
        raise ValueError(
            f'kv_sharding="sequence" shares K and V out over the ranks of tensor parallelism, and this {name} is on one. Leave '
            "out kv_sharding=."
        )
    if cache != "preallocated":
        raise ValueError(f'kv_sharding="sequence" needs cache="preallocated"; got a cache of {cache!r}. Leave out kv_sharding=.')
    if hf.Kind("full") not in hf.layer_kinds(model.config):
        raise ValueError(f"Every layer of {name} has a sliding window, so no K and V grow with the text. Leave out kv_sharding=.")
    heads = [(shape.num_heads, shape.num_kv_heads) for shape in hf.layer_shapes(model.config)]
    return Shares(mesh.get_group(), heads, *hf.heads_of_ranks(model))


def which_kinds(model: hf.PreTrainedModel, cache: str | None) -> tuple[hf.Kind, ...] | None:
    """The kinds of the model's layers for a cache of the package; None for Transformers' cache."""
    if cache is None:
        return None
    remedy = "patch(cache=None, graph=False) leaves Transformers' own cache in place."
    if name := hf.overrides_generation(model):
        raise ValueError(f"{type(model).__name__} has its own {name}(), which the cache would replace. {remedy}")
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder, and the caches of patch() are for decoder-only models. {ALONE}"
        )
    try:
        kinds = hf.layer_kinds(model.config)
    except ValueError as error:
        raise ValueError(f"{error} {remedy}") from None
    if cache == "rolling":
        hf.refuse_states(model.config, "A rolling cache needs", 'hf_fastattn.patch(model, "lean") runs it.')
    return kinds


def which_kv_dtype(model: hf.PreTrainedModel, backend: registry.Backend, cache: str | None, kv_dtype: str | None) -> None:
    """Raise ValueError if this model cannot have K and V in 8 bits, with this backend and cache."""
    if kv_dtype is None:
        return
    reason = eight_bits.why_not(kv_dtype, model)
    if reason is None and hf.has_alibi(model.config):
        reason = f"kv_dtype={kv_dtype!r} is for models without ALiBi, whose bias needs plain K and V. Leave out kv_dtype=."
    if reason is None and (cache != "preallocated" or not backend.reads_eight_bits):
        reads = [name for name in registry.names() if registry.get(name).reads_eight_bits]
        reason = (
            f"kv_dtype={kv_dtype!r} needs a preallocated cache and a backend whose decode kernel reads 8 bits: "
            f"{', '.join(reads)}; got {backend.name!r} with a cache of {cache!r}. Leave out kv_dtype=, or use one of these."
        )
    if reason is not None:
        raise ValueError(reason)
