"""Caches that `patch()` makes or takes, over storages (contract.py)."""

from .rolling import RollingCache
from .static import PreallocatedCache

__all__ = ["PreallocatedCache", "RollingCache"]
