"""All code that depends on names and versions of Transformers, one file per subject. No other file imports transformers."""

from typing import TYPE_CHECKING

import transformers

from .version import check_version, warn_once

VERSION = transformers.__version__
check_version(VERSION)

from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import causal_mask_function

if TYPE_CHECKING:  # the import takes time
    from transformers import Pipeline

from .attention import (
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
from .caches import CACHE, CACHES, OTHERS, Kind, cache_in, layer_kinds
from .experts import (
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
from .generation import (
    ASSISTANT,
    BATCHES,
    CALL,
    CHUNKS_FROM_START,
    COMPILED,
    CUSTOM_LOOP,
    FORWARD,
    GENERATE,
    LOOP,
    PREPARE_CACHE,
    PREPARE_INPUTS,
    PROCESSORS,
    Ahead,
    bookkeeping,
    drafts_from_hidden_states,
    generates_by_another,
    generation_parameters,
    generator_of,
    is_stock,
    late_stop_checks,
    other_code,
    overrides_generation,
    stock,
    tokens_given,
    width_of_dropped_mask,
    with_contiguous_ids,
)
from .llama import activation_name, activations, is_llamas_layer, is_llamas_mlp, is_phi3s_mlp, is_torchs, module_of
from .loading import (
    load_config,
    load_model,
    load_tokenizer,
    locate,
    make_config,
    model_on_meta,
    random_model,
    shared_random_model,
    silence,
    spread_random_model,
)
from .longrope import Rotary, chosen_on_device, longropes_in
from .masks import decode_mask, dense_mask, is_causal, mask_pattern, run_starts, runs_pattern, up_to_query
from .models import LayerShape, device_of, is_inert_hook, layer_shapes, sharer, why_not_captured
from .norms import Norm, norm_of
from .packages import is_trusted
from .parallel import (
    WholeHeads,
    collective_of,
    computes_part,
    heads_of_ranks,
    inner_forward,
    is_divided,
    is_shard,
    is_shared,
    is_stage,
    kv_heads_of_rank,
    local,
    local_kv_heads,
    num_ranks,
    parts_of,
    tensor_parallel_mesh,
    with_collective,
    with_inner,
)
from .quantised import Weights, scales_by_tensor, unpacked, weights
from .rotations import Functions, called, is_rotation, rotation_of, rotations_in, without_renaming
from .text import (
    GRIDS,
    LongPast,
    changing_rope,
    has_sections,
    rotary_buffers,
    run_text,
    set_text_attention,
    step_modules,
    text_layers,
)
