"""Fast exact attention for Hugging Face Transformers: `attn_implementation="lean"` and its relatives.

Importing this package adds names to Transformers and changes the behaviour of nothing.
"""

from . import backends as _backends
from .caches import PreallocatedCache
from .interface import count_calls
from .patches import patch, unpatch
from .registry import Backend, get, names, register

__version__ = "0.1.0"
__all__ = ["Backend", "PreallocatedCache", "count_calls", "get", "names", "patch", "register", "unpatch"]
