"""Fast exact attention for Hugging Face Transformers: `attn_implementation="lean"` and other backends.

Importing this package adds names to Transformers and changes nothing else.
"""

from . import backends as _backends
from . import training as training
from .attention.backend import count_calls
from .caches import PreallocatedCache, RollingCache
from .evaluation import evaluate
from .explanation import explain
from .kernels.merge import merge
from .patches import patch, unpatch
from .registry import Backend, get, names, register

__version__ = "0.2.0"
__all__ = [
    "Backend",
    "PreallocatedCache",
    "RollingCache",
    "count_calls",
    "evaluate",
    "explain",
    "get",
    "merge",
    "names",
    "patch",
    "register",
    "unpatch",
]
