"""Properties of models, from their configurations and classes."""

from __future__ import annotations

import gc
import sys
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .attention import is_attention
from .caches import why_unknown_masks
from .longrope import rope_types


@dataclass(frozen=True)
class LayerShape:
    """The attention of one layer: query heads, KV heads, and the width of a key and of a value."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


def layer_shapes(config: PreTrainedConfig) -> tuple[LayerShape, ...]:
    """The shapes in the configuration of a decoder, one per layer. Raises ValueError if it has no attention heads."""
    text = config.get_text_config(decoder=True)
    name = type(config).__name__
    if getattr(text, "is_heterogeneous", False):
        return tuple(_layer_shape(layer, name) for layer in text.per_layer_config)
    return (_layer_shape(text, name),) * int(text.num_hidden_layers)


def _layer_shape(config: PreTrainedConfig, name: str) -> LayerShape:
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"{name} has no number of attention heads (it is {heads!r}), so no attention backend can run in it.")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    value_dim = head_dim
    if getattr(config, "qk_nope_head_dim", None):  # latent attention
        head_dim, value_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if config.model_type == "falcon":
        kv_heads = config.num_kv_heads if config.new_decoder_architecture or not config.multi_query else 1
    return LayerShape(heads, kv_heads, head_dim, value_dim)


def changes_cached(config: PreTrainedConfig) -> bool:
    """Whether the code of a decoder repeats or joins heads of K or V that its cache returns, before attention reads them."""
    return config.get_text_config(decoder=True).model_type in ("diffllama", "jetmoe")


def has_latents(config: PreTrainedConfig) -> bool:
    """Whether a decoder has latent attention (MLA): its own code computes K and V from what a cache holds."""
    text = config.get_text_config(decoder=True)
    layers = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]
    return any(getattr(layer, "kv_lora_rank", None) for layer in layers)


def device_of(model: PreTrainedModel) -> torch.device:
    """The device that computes a model: of one whose weights accelerate offloads, that of its hooks."""
    if model.device.type == "meta":
        for module in model.modules():
            hook = getattr(module, "_hf_hook", None)
            for each in (hook, *getattr(hook, "hooks", ())):
                if (at := getattr(each, "execution_device", None)) is not None:
                    return torch.device(at)
    return model.device


def layer_devices(model: object) -> dict[int, torch.device]:
    """The devices of the layers of a model with a cache, by their index; empty for a configuration."""
    parts = model.modules() if isinstance(model, PreTrainedModel) else ()
    held = {getattr(part, "layer_idx", None): next(part.parameters(), None) for part in parts}
    return {index: first.device for index, first in held.items() if isinstance(index, int) and first is not None}


def sharer(model: PreTrainedModel) -> str | None:
    """The class of another model in memory that shares a part with attention with this one, or None.

    A process may have millions of objects, and they are searched only if there can be such a model. It refers to the part in a
    `_modules` of its own; or its `_modules` or all its attributes are the very dict that a module here has (copy.copy()). So a
    part or a dict has more references than the modules of this model explain. A reference from elsewhere (a variable, a hook)
    causes the search too, and changes no result.
    """
    modules = list(model.modules())
    ours = {id(module) for module in modules}
    around = [module for module in modules if any(map(is_attention, module.modules()))]
    held = Counter(id(child) for module in modules for child in module._modules.values())
    parts: list[object] = [module for module in around if module is not model]
    explained = [*(held[id(part)] for part in parts), *[1] * (2 * len(around))]
    parts += [each for module in around for each in (vars(module), module._modules)]
    del modules, around
    # By map(), because a variable of a Python frame counts or not, depending on what evaluates it.
    (alone,) = map(sys.getrefcount, [object()])
    if all(count <= alone + own for count, own in zip(map(sys.getrefcount, parts), explained, strict=True)):
        return None
    for other in gc.get_objects():
        if not issubclass(type(other), PreTrainedModel) or id(other) in ours:
            continue
        for part in other._modules.values():
            if part is not model and id(part) in ours and any(is_attention(module) for module in part.modules()):
                return type(other).__name__
    return None


# Functions that register a hook, which is local to them, on the embedding: it lets the output require grad, for gradients through
# checkpoints. By module; PEFT has its own for models without Transformers' method.
_REQUIRE_GRAD = {
    "transformers.modeling_utils": "PreTrainedModel.enable_input_require_grads",
    "peft.peft_model": "PeftModel._prepare_model_for_gradient_checkpointing",
    "peft.utils.other": "prepare_model_for_kbit_training",
}


def is_inert_hook(hook: Callable[..., Any]) -> bool:
    """Whether this hook of a library changes no value of a generate(): Transformers' that collects hidden states, inactive unless
    they are requested, and the one that lets the output of an embedding require grad."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing" or _requires_grad(hook)


def _requires_grad(hook: object) -> bool:
    """Whether this is the local function of one of these functions, with its code and its globals."""
    if type(hook) is not types.FunctionType:
        return False
    for file, path in _REQUIRE_GRAD.items():
        outer: Any = sys.modules.get(file)
        if outer is not None and vars(outer) is hook.__globals__:
            for name in path.split("."):
                outer = getattr(outer, name, None)
            code = getattr(outer, "__code__", None)
            return code is not None and any(constant is hook.__code__ for constant in code.co_consts)
    return False


def why_not_captured(model: PreTrainedModel) -> str | None:
    """The reason why the model's layers cannot be captured in a CUDA graph, if it is known before one has run, else None."""
    bitsandbytes = sys.modules.get("bitsandbytes")
    kind = getattr(getattr(bitsandbytes, "nn", None), "Linear8bitLt", None)
    if kind is not None and any(isinstance(module, kind) and module.state.threshold > 0 for module in model.modules()):
        return (
            "the 8-bit layers of bitsandbytes look for outliers on the host; BitsAndBytesConfig(load_in_8bit=True, "
            "llm_int8_threshold=0.0) loads the model without outliers"
        )
    if any("dynamic" in rope_types(module).values() for module in model.modules()):
        return "its rope_type 'dynamic' computes new frequencies on the host when the text grows"
    return why_unknown_masks(model.config)
