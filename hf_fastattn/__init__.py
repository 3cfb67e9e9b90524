"""Fast exact attention for Hugging Face Transformers: `attn_implementation="lean"` and other backends.

Importing this package adds names to Transformers and changes nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

from . import backends as _backends
from . import training as training
from .attention.backend import count_calls
from .caches import LinearCache, PagedCache, PreallocatedCache, RollingCache
from .kernels.merge import merge
from .patches import patch, unpatch
from .patches.warm import kernels_of
from .registry import Backend, get, names, register

if TYPE_CHECKING:
    from .distillation import distill, load_distilled
    from .evaluation import evaluate
    from .explanation import explain

__all__ = [
    "Backend",
    "LinearCache",
    "PagedCache",
    "PreallocatedCache",
    "RollingCache",
    "count_calls",
    "distill",
    "evaluate",
    "explain",
    "get",
    "kernels_of",
    "load_distilled",
    "merge",
    "names",
    "patch",
    "register",
    "unpatch",
]


_LATER = {"distill": "distillation", "load_distilled": "distillation", "evaluate": "evaluation", "explain": "explanation"}


def __getattr__(name: str) -> Any:
    """Functions whose files are imported when they are asked for."""
    if name in _LATER:
        return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
