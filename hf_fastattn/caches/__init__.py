"""Caches: one file each, over the storage in layers.py."""

from .rolling import RollingCache
from .static import PreallocatedCache

__all__ = ["PreallocatedCache", "RollingCache"]
