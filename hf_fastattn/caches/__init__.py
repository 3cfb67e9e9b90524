"""Caches: one file each, over the storage in layers.py."""

from .static import PreallocatedCache

__all__ = ["PreallocatedCache"]
