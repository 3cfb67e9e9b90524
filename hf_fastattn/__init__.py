"""Fast exact attention for Hugging Face Transformers: `attn_implementation="lean"` and its relatives.

Importing this package adds names to Transformers and changes the behaviour of nothing.
"""

from . import backends as _backends
from .interface import count_calls
from .registry import Backend, get, names, register

__version__ = "0.1.0"
__all__ = ["Backend", "count_calls", "get", "names", "register"]
