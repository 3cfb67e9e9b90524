"""All code that depends on names and versions of Transformers, one file per subject. No other file imports transformers."""

# ruff: noqa: E402

from typing import TYPE_CHECKING

import transformers

from .version import check_version as check_version
from .version import warn_once as warn_once

VERSION = transformers.__version__
check_version(VERSION)

from transformers import ContinuousBatchingConfig as ContinuousBatchingConfig
from transformers import GenerationConfig as GenerationConfig
from transformers import MaxLengthCriteria as MaxLengthCriteria
from transformers import MaxTimeCriteria as MaxTimeCriteria
from transformers import PreTrainedConfig as PreTrainedConfig
from transformers import PreTrainedModel as PreTrainedModel
from transformers import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.cache_utils import Cache as Cache
from transformers.cache_utils import CacheLayerMixin as CacheLayerMixin
from transformers.masking_utils import causal_mask_function as causal_mask_function

if TYPE_CHECKING:  # the import takes time
    from transformers import Pipeline as Pipeline

from .attention import BESIDE_ATTENTION as BESIDE_ATTENTION
from .attention import asks_for_weights as asks_for_weights
from .attention import attention_names as attention_names
from .attention import is_attention as is_attention
from .attention import register as register
from .attention import registered as registered
from .attention import set_attention as set_attention
from .attention import stock_attention as stock_attention
from .attention import unset_parts as unset_parts
from .attention import why_not_model as why_not_model
from .caches import CACHE as CACHE
from .caches import CACHES as CACHES
from .caches import OTHERS as OTHERS
from .caches import Kind as Kind
from .caches import cache_in as cache_in
from .caches import layer_kinds as layer_kinds
from .experts import STOCK_EXPERTS as STOCK_EXPERTS
from .experts import Routing as Routing
from .experts import asks_for_experts as asks_for_experts
from .experts import expert_layout as expert_layout
from .experts import expert_weights as expert_weights
from .experts import experts_implementation as experts_implementation
from .experts import register_experts as register_experts
from .experts import routing as routing
from .experts import set_experts_implementation as set_experts_implementation
from .experts import stock_experts as stock_experts
from .generation import ASSISTANT as ASSISTANT
from .generation import BATCHES as BATCHES
from .generation import CALL as CALL
from .generation import CHUNKS_FROM_START as CHUNKS_FROM_START
from .generation import COMPILED as COMPILED
from .generation import CUSTOM_LOOP as CUSTOM_LOOP
from .generation import FORWARD as FORWARD
from .generation import GENERATE as GENERATE
from .generation import LOOP as LOOP
from .generation import PREPARE_CACHE as PREPARE_CACHE
from .generation import PREPARE_INPUTS as PREPARE_INPUTS
from .generation import PROCESSORS as PROCESSORS
from .generation import Ahead as Ahead
from .generation import bookkeeping as bookkeeping
from .generation import drafts_from_hidden_states as drafts_from_hidden_states
from .generation import generates_by_another as generates_by_another
from .generation import generation_parameters as generation_parameters
from .generation import generator_of as generator_of
from .generation import is_stock as is_stock
from .generation import late_stop_checks as late_stop_checks
from .generation import other_code as other_code
from .generation import overrides_generation as overrides_generation
from .generation import stock as stock
from .generation import tokens_given as tokens_given
from .generation import width_of_dropped_mask as width_of_dropped_mask
from .generation import with_contiguous_ids as with_contiguous_ids
from .llama import activation_name as activation_name
from .llama import activations as activations
from .llama import is_llamas_layer as is_llamas_layer
from .llama import is_llamas_mlp as is_llamas_mlp
from .llama import is_phi3s_mlp as is_phi3s_mlp
from .llama import is_torchs as is_torchs
from .llama import module_of as module_of
from .loading import load_config as load_config
from .loading import load_model as load_model
from .loading import load_tokenizer as load_tokenizer
from .loading import locate as locate
from .loading import make_config as make_config
from .loading import model_on_meta as model_on_meta
from .loading import random_model as random_model
from .loading import shared_random_model as shared_random_model
from .loading import silence as silence
from .longrope import Rotary as Rotary
from .longrope import chosen_on_device as chosen_on_device
from .longrope import longropes_in as longropes_in
from .masks import Runs as Runs
from .masks import decode_mask as decode_mask
from .masks import dense_mask as dense_mask
from .masks import is_causal as is_causal
from .masks import mask_pattern as mask_pattern
from .masks import run_starts as run_starts
from .masks import runs_pattern as runs_pattern
from .masks import up_to_query as up_to_query
from .models import LayerShape as LayerShape
from .models import device_of as device_of
from .models import is_inert_hook as is_inert_hook
from .models import layer_shapes as layer_shapes
from .models import sharer as sharer
from .models import why_not_captured as why_not_captured
from .norms import Norm as Norm
from .norms import norm_of as norm_of
from .packages import is_of_python as is_of_python
from .packages import is_trusted as is_trusted
from .parallel import WholeHeads as WholeHeads
from .parallel import collective_of as collective_of
from .parallel import computes_part as computes_part
from .parallel import heads_of_ranks as heads_of_ranks
from .parallel import inner_forward as inner_forward
from .parallel import is_divided as is_divided
from .parallel import is_shard as is_shard
from .parallel import is_shared as is_shared
from .parallel import is_stage as is_stage
from .parallel import kv_heads_of_rank as kv_heads_of_rank
from .parallel import local as local
from .parallel import local_kv_heads as local_kv_heads
from .parallel import num_ranks as num_ranks
from .parallel import parts_of as parts_of
from .parallel import tensor_parallel_mesh as tensor_parallel_mesh
from .parallel import with_collective as with_collective
from .parallel import with_inner as with_inner
from .quantised import Weights as Weights
from .quantised import scales_by_tensor as scales_by_tensor
from .quantised import unpacked as unpacked
from .quantised import weights as weights
from .rotations import Functions as Functions
from .rotations import called as called
from .rotations import is_rotation as is_rotation
from .rotations import rotation_of as rotation_of
from .rotations import rotations_in as rotations_in
from .rotations import without_renaming as without_renaming
from .text import GRIDS as GRIDS
from .text import LongPast as LongPast
from .text import changing_rope as changing_rope
from .text import has_sections as has_sections
from .text import rotary_buffers as rotary_buffers
from .text import run_text as run_text
from .text import set_text_attention as set_text_attention
from .text import step_modules as step_modules
from .text import text_layers as text_layers

if not TYPE_CHECKING:  # type checkers read the imports
    __all__ = [name for name in dir() if not name.startswith("_")]
