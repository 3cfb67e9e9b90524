"""Every generating model class of the installed Transformers, and a tiny random configuration of each.

There is no list of models. The classes are found in Transformers' mappings and files. A tiny configuration is the default
configuration of the class with all sizes reduced, which are recognised by their names. `OWN` has the exceptions.
"""

import copy
import importlib
import re
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from models import VOCAB
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

# Ids of images, videos and similar tokens are larger than those in prompts.
SPECIAL = range(VOCAB, 160)
MAPPINGS = {  # in Transformers' modeling_auto, and the kind of its models
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "causal",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "vision",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES": "multimodal",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "seq2seq",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "encoder",
}


class Model(NamedTuple):
    """name: the class. model_type: its folder. kind: a value of MAPPINGS, or "other"."""

    name: str
    model_type: str
    kind: str
    module: str
    asks: bool  # its own file; else a part of it does


@cache
def sources() -> dict[str, str]:
    """Every modelling file of Transformers: module name to source."""
    root = Path(transformers.__file__).parent / "models"
    files = sorted(root.glob("*/modeling_*.py"))
    return {f"transformers.models.{file.parent.name}.{file.stem}": file.read_text(encoding="utf-8") for file in files}


@cache
def find() -> list[Model]:
    """Every model class that generates or fills in masked tokens and uses the attention interface, itself or in a part."""
    where = {}  # class: its module
    for module, source in sources().items():
        for name in re.findall(r"^class (\w+)\(", source, re.MULTILINE):
            where[name] = module
    found: dict[str, Model] = {}
    for mapping, kind in MAPPINGS.items():
        for names in getattr(modeling_auto, mapping, {}).values():
            for name in names if isinstance(names, (tuple, list)) else [names]:
                if name in where and name not in found and _has_forward(sources()[where[name]], name):
                    asks = "get_interface(" in sources()[where[name]]
                    if asks or re.search(r"\bAuto\w*Model\w*\.from_config\(", sources()[where[name]]):
                        found[name] = Model(name, where[name].split(".")[2], kind, where[name], asks)
    mapped = {model.module for model in found.values()}
    for module, source in sources().items():  # files that are in no mapping
        if module in mapped or "get_interface(" not in source:
            continue
        for name in re.findall(r"^class (\w+)\([^)]*GenerationMixin[^)]*\)", source, re.MULTILINE):
            found[name] = Model(name, module.split(".")[2], "other", module, True)
    return sorted(found.values())


def _has_forward(source: str, name: str) -> bool:
    """Whether a class has its own forward() or that of another model; otherwise it only contains models that are also found."""
    bases, block = re.search(rf"^class {name}\(([^)]*)\):(.*?)(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL).groups()
    return "def forward(" in block or not all(base.strip().endswith(("PreTrainedModel", "Mixin")) for base in bases.split(","))


def load_class(model: Model) -> type:
    with warnings.catch_warnings(action="ignore"):
        return getattr(importlib.import_module(model.module), model.name)


def config_class(cls: type) -> type:
    """The declared configuration of a class; some inherit that of the model of which they are a part."""
    said = vars(cls).get("__annotations__", {}).get("config")
    said = getattr(sys.modules[cls.__module__], said, None) if isinstance(said, str) else said
    return said if isinstance(said, type) and issubclass(said, PreTrainedConfig) else cls.config_class


# Sizes by name; the first pattern that matches the whole name decides. No size is increased.
SIZES = [
    (r".*(num_layers|num_hidden_layers|encoder_layers|decoder_layers|blocks)|n_layers?|depth|layers|resampler_depth", 2),
    (r"num_(encoder|decoder)_layers|num_layers_per_stack|\w*_depth", 2),
    (r".*(key_value_heads|kv_heads|kv_n_heads)", 2),
    (r".*(attention_heads|num_heads|n_heads?|num_groups|mamba_heads|n_mamba_heads)", 4),
    (r"qk_head_dim", 32),
    (r".*(qk_nope_head_dim|v_head_dim|qk_rope_head_dim)", 16),
    (r".*head_dim|d_kv|dim_head|kv_channels", 16),
    (r".*q_lora_rank", 32),
    (r".*(lora_rank|_rank)", 16),
    (r".*(num_experts|n_routed_experts|num_local_experts|experts_number|zero_expert_num)", 4),
    (r".*(experts_per_tok|experts_per_token|topk|top_k|moe_k)", 2),
    (r"n_group|topk_group|num_expert_group|.*n_groups|n_shared_experts|moe_num_shared_experts|num_shared_experts", 1),
    (r"codebook_size", 128),
    (r".*vocab_size.*|num_embeddings|.*vocab", SPECIAL.stop),
    (r".*(intermediate_size.*|ffn_dim|ffn_hidden_size|d_ff|dff|mlp_dim|inner_dim|dense_intermediate_size)", 96),
    (r"mamba_d_ssm|mamba_intermediate", 128),
    (
        r".*(hidden_size.*|condition_dim|adapter_in_dim|adapter_input_size|global_embed_dim|hidden_dim|d_model|n_embd|embed_dim|embedding_size|embedding_dim|output_dim|projection_dim|out_dim|^dim)",
        64,
    ),
    (r".*(sliding_window|window_size|local_attention|chunk_size|sliding_window_size|window_len)", 16),
    (r"(max|n|num)_\w*position\w*|n_ctx|max_seq_len|model_max_length|max_length|rel_extent", 512),
    (r".*image_size", 16),
    (r".*patch_size", 4),
    (r".*d_state|ssm_state_size", 8),
    (r"num_filters|mm_tokens_per_image", 4),
    (r"upsample_initial_channel|resblock_\w*channel", 64),
]
ROPE = {"rope_type": "default", "rope_theta": 1e4}
ROPE_BY_TYPE = {kind: {**ROPE, "mrope_section": [4, 2, 2]} for kind in ("full_attention", "sliding_attention")}
MOE = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KV_SHARED = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
TWO_KINDS = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 8.0}
LONGROPE |= {"original_max_position_embeddings": 64}
GEMMA4 = {"global_head_dim": 32, "num_global_key_value_heads": 1}
DECODER = {"is_decoder": True, "add_cross_attention": True}
THINKER = {"vision_start_token_id": SPECIAL.stop - 2, "audio_start_token_id": SPECIAL.stop - 3}
QWEN4 = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4}
MLA_SLIDING = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "head_dim": 32}
MLA_SLIDING |= {"qk_nope_head_dim": 16, "v_head_dim": 16, "qk_rope_head_dim": 16}
DOTS3 = {"layer_types": ["indexed_attention", "sliding_attention"], "per_layer_config": {1: MLA_SLIDING}}
DOTS3 |= {"mlp_layer_types": ["dense", "sparse"], "use_dsa": True, "num_hidden_layers": 2}
DORY = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
DORY |= {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1}
VQ = {"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 32}
CODEC = {"codebook_dim": 64, "upsample_groups": 64, "num_filters": 8}
ASSISTED = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 2, "num_hidden_layers": 2}
OWN: dict[str, dict] = {
    "chameleon": {"vocabulary_map": {"<image>": SPECIAL.start}, "vq_config": VQ},
    "codegen": {"rotary_dim": 16},
    "csm": {"codec_config": CODEC},
    "dory": DORY,
    "dots3_note": {"text_config": DOTS3},
    "Dots3NoteForCausalLM": DOTS3,
    "emu3": {"vocabulary_map": {"<|extra_200|>": SPECIAL.start, "<image>": SPECIAL.start + 1}, "vq_config": VQ},
    "fast_vlm": {"vision_config": {"model_args": {"layers": [1] * 5, "embed_dims": [32] * 5}}},  # passed to timm
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "gemma4_assistant": {"init": {"text_config": ASSISTED}},
    "gemma4_unified_assistant": {"init": {"text_config": ASSISTED}},
    "blip_2": {"image_token_index": SPECIAL.start},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "instructblip": {"image_token_index": SPECIAL.start},
    "instructblipvideo": {"image_token_index": SPECIAL.start, "video_token_index": SPECIAL.start},
    "gptj": {"rotary_dim": 16},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "janus": {"vq_config": VQ},
    "kyutai_speech_to_text": {"codec_config": CODEC},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "qwen3_asr": {"eos_token_id": SPECIAL.stop - 1},
    "qwen3_omni_moe": {"talker_config": {"text_config": {"shared_expert_intermediate_size": 32}}},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},
    "cohere_compass": {"text_config": {"rope_parameters": ROPE_BY_TYPE}},
    "CohereCompassForCausalLM": {"rope_parameters": ROPE_BY_TYPE},
    "cosmos3_edge": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "encoder_decoder": {"init": {"encoder": {"model_type": "bert"}, "decoder": {"model_type": "bert", **DECODER}}},
    "vision_encoder_decoder": {"init": {"encoder": {"model_type": "vit"}, "decoder": {"model_type": "bert", **DECODER}}},
    "bamba": {"attn_layer_indices": [1]},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "DiffusionGemmaForBlockDiffusion": {
        "init": {"vision_config": {"model_type": "gemma4_vision"}},
        "text_config": {**MOE, **GEMMA4, "top_k_experts": 2},
        "canvas_length": 16,
    },
    "dots1": {**MOE, "n_shared_experts": 1},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}}},
    "esm": {"vocab_size": SPECIAL.stop, "mask_token_id": SPECIAL.start, "pad_token_id": 0},
    "esmc": {"num_key_value_heads": 4, "vocab_size": SPECIAL.stop},
    "Gemma3nForCausalLM": KV_SHARED,
    "Gemma4UnifiedForCausalLM": KV_SHARED,
    "glm5_next": {"text_config": {"index_topk": 16, "index_kpool": 4}},
    "granite4_vision": {
        **{"deepstack_layer_map": [(-1, 0)], "downsample_rate": "1/2", "spatial_target_layers": [0, 0, 1, 1]},
        "init": {"text_config": {"model_type": "granite"}},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mobilebert": {"intra_bottleneck_size": 64, "true_hidden_size": 64},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "unlimited_ocr": {"text_config": {"num_key_value_heads": 4}},
    "xmod": {"default_language": "en_XX"},
    "Mistral4ForCausalLM": {"head_dim": 32},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "pix2struct": {"vision_config": {"patch_embed_hidden_size": 768}},
    "granite_speech5": {"encoder_config": {"num_key_value_heads": 4}},
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "MllamaForCausalLM": {"cross_attention_layers": [1]},
    "MoshiForCausalLM": {"sliding_window": 4096},  # no mask has it, and only the cache of eager drops tokens
    "moonshine_streaming": {"num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "Qwen4ExpForCausalLM": QWEN4,
    "qwen4_exp": {"text_config": QWEN4},
    "Qwen2_5OmniThinkerForConditionalGeneration": THINKER,
    "Qwen3OmniMoeThinkerForConditionalGeneration": THINKER,
    "Qwen2ForCausalLM@windows": {**TWO_KINDS, "use_sliding_window": True},
    "DoryForCausalLM@last_loop": {**DORY, "recurrent_kv_cache_mode": "last_loop", "sliding_window": 512},
    "Phi3ForCausalLM@window": {"sliding_window": 16},
    "Phi3ForCausalLM@longrope": {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
    "SmolLM3ForCausalLM@unrotated": {"no_rope_layers": [1, 0]},
    "DeepseekV3ForCausalLM@equal_sizes": {"v_head_dim": 32},
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForCausalLM@head_of_512": {"global_head_dim": 512, "vocab_size_per_layer_input": SPECIAL.stop},
    "Gemma4ForCausalLM@shared_kv": {**GEMMA4, **KV_SHARED},
    "gemma4": {"text_config": GEMMA4},
    "gemma4_unified": {"text_config": GEMMA4},
    "step3p7": {"text_config": {"sliding_window": 16}},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba": {
        **{"attention_hidden_size": 128, "attention_head_dim": 32, "num_hidden_layers": 3},
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
}


def tiny_config(cls: type, own: dict | None = None) -> PreTrainedConfig:
    """The default configuration of a class, with reduced sizes."""
    own = own or {}
    given = {name: value for name, value in own.items() if name == "init"}
    default = cls(**copy.deepcopy(given.get("init", {})))
    return cls(**_merge(_shrunk(default, {}), {k: v for k, v in own.items() if k != "init"}))


def _merge(a: dict, b: dict) -> dict:
    out = dict(a)
    for key, value in b.items():
        out[key] = _merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def _shrunk(config: PreTrainedConfig, ids: dict) -> dict:
    values = {k: v for k, v in vars(config).items() if not k.startswith("_")}
    layers = next((values[k] for k in ("num_hidden_layers", "num_layers", "n_layer") if isinstance(values.get(k), int)), None)
    kept = _layers_to_keep(values, layers)
    out = {}
    for name, value in values.items():
        if isinstance(value, PreTrainedConfig):
            out[name] = {"model_type": value.model_type, **_set_by_owner(value), **_shrunk(value, ids)}
            continue
        new = _shrink(name, value, ids)
        if kept and _is_per_layer(name, value, layers):
            new = [_shrink(name, value[i], ids) if isinstance(value[i], int) else value[i] for i in kept]
        if new is not value:
            out[name] = new
    if kept:
        for name in ("num_hidden_layers", "num_layers", "n_layer"):
            if name in out:
                out[name] = len(kept)
                break
    if values.get("head_dim", 0) is None:
        out["head_dim"] = 16
    rope = values.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope and "mrope_section" in _source_of(config):
        pairs = int(out.get("head_dim", 16) * rope.get("partial_rotary_factor", 1.0)) // 2
        out["rope_parameters"] = {**rope, "mrope_section": [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]}
    if values.get("kv_lora_rank") and "num_key_value_heads" in values:
        out["num_key_value_heads"] = 4
    return out


def _set_by_owner(config: PreTrainedConfig) -> dict:
    """Numbers and names in the owner's defaults that the defaults of the class lack."""
    try:
        plain = vars(type(config)())
    except Exception:  # not a configuration by itself
        return {}
    simple = {k: v for k, v in vars(config).items() if not k.startswith("_") and isinstance(v, (bool, int, float, str))}
    return {k: v for k, v in simple.items() if k in plain and plain[k] != v}


def _source_of(config: PreTrainedConfig) -> str:
    return sources().get(type(config).__module__.replace("configuration_", "modeling_"), "")


def _is_per_layer(name: str, value, layers) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == layers and layers > 2 and "label" not in name


def _layers_to_keep(values: dict, layers: int | None) -> list[int] | None:
    """Indices of the first layer of each kind, by all per-layer lists in the configuration."""
    lists = [v for k, v in values.items() if layers and _is_per_layer(k, v, layers)]
    if not lists:
        return None
    first: dict = {}
    for i in range(layers):
        first.setdefault(repr([each[i] for each in lists]), i)
    kept = sorted(first.values())[:6]
    return kept if len(kept) > 1 else [0, 1]


def _shrink(name: str, value, ids: dict):
    if isinstance(value, bool) or value is None or isinstance(value, (str, float)):
        return value
    if re.search(r"token(_id|_ids|_index|_indices|_idx)$", name):
        return _token(name, value, ids)
    if isinstance(value, int):
        for pattern, size in SIZES:
            if re.fullmatch(pattern, name):
                return min(value, size) if value > 0 else value
        return value
    if name == "image_grid_pinpoints" and value:
        return [[32, 32]]
    if isinstance(value, (list, tuple)) and value and all(isinstance(x, int) and not isinstance(x, bool) for x in value):
        if re.search(r"index|indices|idx|_layers|layer_ids|feature_layer", name):
            return type(value)(dict.fromkeys(x % 2 if x >= 0 else max(x, -1) for x in value))
        return type(value)(_shrink(name, x, ids) for x in value)
    return value


def _token(name: str, value, ids: dict):
    if name.startswith(("eos_", "forced_")):
        return None
    if name.startswith("pad_"):
        return 0
    if name.startswith("bos_"):
        return 1
    if name.startswith("decoder_start"):
        return 2
    if isinstance(value, int):
        key = name.replace("_index", "_id")
        return ids.setdefault(key, SPECIAL.start + len(ids)) if value >= 0 else value
    return value


def own_of(model: Model, variant: str = "") -> dict:
    for key in (model.name + variant, model.model_type + variant):
        if key in OWN:
            return OWN[key]
    return {}


def variants(model: Model) -> list[str]:
    """ "" and the "@..." of OWN that this model has."""
    found = {key.removeprefix(name) for name in (model.name, model.model_type) for key in OWN if key.startswith(name + "@")}
    return ["", *sorted(found)]


def build(model: Model, variant: str = "") -> torch.nn.Module:
    """The tiny model, in eval mode, with Transformers' own weights drawn from seed 0."""
    cls = load_class(model)
    config = tiny_config(config_class(cls), own_of(model, variant))
    if model.kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    transformers.set_seed(0)
    return cls._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


def named(name: str, model_type: str, kind: str = "vision") -> torch.nn.Module:
    """The tiny model of one class, without a search for all of them."""
    return build(Model(name, model_type, kind, f"transformers.models.{model_type}.modeling_{model_type}", True))
