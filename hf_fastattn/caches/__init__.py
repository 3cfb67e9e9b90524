"""The caches of the package. The base classes for other caches are in contract.py and stored.py."""

from .rolling import RollingCache
from .static import PreallocatedCache

__all__ = ["PreallocatedCache", "RollingCache"]
