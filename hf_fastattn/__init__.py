"""Fast exact attention for Hugging Face Transformers: `attn_implementation="lean"` and its relatives.

Importing this package adds names to Transformers and changes the behaviour of nothing.
"""

from . import backends as _backends
from .caches import PreallocatedCache, RollingCache

# Imported here and not when first asked for: a module imported later would take the place of its function. lm-eval waits.
from .evaluate import evaluate
from .explain import explain
from .interface import count_calls
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
    "names",
    "patch",
    "register",
    "unpatch",
]
