"""All code that depends on names and versions of Transformers, one file per subject. No other file imports transformers."""

import transformers

from .version import check_version

VERSION = transformers.__version__
check_version(VERSION)

from transformers import (  # noqa: E402
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
)
from transformers.cache_utils import Cache, CacheLayerMixin  # noqa: E402
from transformers.masking_utils import causal_mask_function  # noqa: E402

from .activations import activation_name  # noqa: E402
from .attention import (  # noqa: E402
    BESIDE_ATTENTION,
    asks_for_weights,
    attention_names,
    is_attention,
    register,
    registered,
    set_attention,
    stock_attention,
    unset_parts,
    why_not_model,
)
from .caches import OTHERS, layer_windows  # noqa: E402
from .experts import (  # noqa: E402
    STOCK_EXPERTS,
    Routing,
    asks_for_experts,
    expert_layout,
    expert_weights,
    experts_implementation,
    register_experts,
    routing,
    set_experts_implementation,
    stock_experts,
)
from .generation import (  # noqa: E402
    CALL,
    COMPILED,
    GENERATE,
    PREPARE_CACHE,
    PREPARE_INPUTS,
    bookkeeping,
    generates_by_another,
    generation_parameters,
    overrides_generation,
    stock,
)
from .llama import activations, is_llamas_layer, is_llamas_mlp, is_phi3s_mlp, silus  # noqa: E402
from .loading import load_config, load_model, load_tokenizer, locate, make_config, model_on_meta, random_model  # noqa: E402
from .masks import decode_mask, dense_mask, mask_pattern, run_starts, runs_pattern  # noqa: E402
from .models import LayerShape, is_inert_hook, layer_shapes, sharer  # noqa: E402
from .norms import Norm, norm_of  # noqa: E402
from .parallel import (  # noqa: E402
    computes_part,
    heads_of_ranks,
    inner_forward,
    is_shared,
    keep_whole_heads,
    local,
    local_kv_heads,
    restore_heads,
    tensor_parallel_mesh,
    with_inner,
)
from .quantised import Weights, quantised_as, weights, why_not_captured  # noqa: E402
from .rotations import Functions, Rotation, called, is_rotation, rotation_of, rotations_in  # noqa: E402
from .text import GRIDS, LongPast, changing_rope, has_sections, rotary_buffers, run_text, set_text_attention, text_layers  # noqa: E402

__all__ = [
    "BESIDE_ATTENTION",
    "CALL",
    "COMPILED",
    "GENERATE",
    "GRIDS",
    "OTHERS",
    "PREPARE_CACHE",
    "PREPARE_INPUTS",
    "STOCK_EXPERTS",
    "VERSION",
    "Cache",
    "CacheLayerMixin",
    "Functions",
    "GenerationConfig",
    "GenerationMixin",
    "LayerShape",
    "LongPast",
    "Norm",
    "PreTrainedConfig",
    "PreTrainedModel",
    "PreTrainedTokenizerBase",
    "Rotation",
    "Routing",
    "StoppingCriteria",
    "Weights",
    "activation_name",
    "activations",
    "asks_for_experts",
    "asks_for_weights",
    "attention_names",
    "bookkeeping",
    "called",
    "causal_mask_function",
    "changing_rope",
    "check_version",
    "computes_part",
    "decode_mask",
    "dense_mask",
    "expert_layout",
    "expert_weights",
    "experts_implementation",
    "generates_by_another",
    "generation_parameters",
    "has_sections",
    "heads_of_ranks",
    "inner_forward",
    "is_attention",
    "is_inert_hook",
    "is_llamas_layer",
    "is_llamas_mlp",
    "is_phi3s_mlp",
    "is_rotation",
    "is_shared",
    "keep_whole_heads",
    "layer_shapes",
    "layer_windows",
    "load_config",
    "load_model",
    "load_tokenizer",
    "local",
    "local_kv_heads",
    "locate",
    "make_config",
    "mask_pattern",
    "model_on_meta",
    "norm_of",
    "overrides_generation",
    "quantised_as",
    "random_model",
    "register",
    "register_experts",
    "registered",
    "restore_heads",
    "rotary_buffers",
    "rotation_of",
    "rotations_in",
    "routing",
    "run_starts",
    "run_text",
    "runs_pattern",
    "set_attention",
    "set_experts_implementation",
    "set_text_attention",
    "sharer",
    "silus",
    "stock",
    "stock_attention",
    "stock_experts",
    "tensor_parallel_mesh",
    "text_layers",
    "unset_parts",
    "weights",
    "why_not_captured",
    "why_not_model",
    "with_inner",
]
