"""The backends by name."""

from __future__ import annotations

from functools import partial

from . import hf
from .attention.backend import Backend, Kernel, _backends, get, names
from .attention.function import attention_forward
from .attention.mask_function import attention_mask

__all__ = ["Backend", "Kernel", "get", "names", "register"]


def register(backend: Backend) -> Backend:
    """Add a backend: register its attention and its mask function with Transformers under its name.

    Registering a name again replaces it, also in models that already run it.
    """
    hf.register(backend.name, partial(attention_forward, backend.name), partial(attention_mask, backend.name))
    _backends[backend.name] = backend
    return backend
