"""All code that depends on names and versions of Transformers, one file per subject. No other file imports transformers.

The rest of the package calls the public names of all files here by this module, as in `hf.layer_kinds`.
"""

# ruff: noqa: E402, F403

from typing import TYPE_CHECKING

import transformers

from .messages import warn as warn
from .messages import warn_once as warn_once
from .version import check_version as check_version

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
from transformers.cache_utils import LinearAttentionLayer as LinearAttentionLayer
from transformers.masking_utils import causal_mask_function as causal_mask_function

if TYPE_CHECKING:  # the import takes time
    from transformers import Pipeline as Pipeline

from .attention import *
from .batches import *
from .caches import *
from .experts import *
from .generation import *
from .linear_layers import *
from .llama import *
from .loading import *
from .longrope import *
from .masks import *
from .models import *
from .norms import *
from .own_code import *
from .packages import *
from .parallel import *
from .quantised import *
from .rotations import *
from .sampling import *
from .source import *
from .text import *

if not TYPE_CHECKING:  # type checkers read the imports
    __all__ = [name for name in dir() if not name.startswith("_")]
