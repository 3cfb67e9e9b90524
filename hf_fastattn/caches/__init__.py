"""The caches of the package. The base classes for other caches are in contract.py and stored.py."""

from .linear import LinearCache
from .paged_cache import PagedCache
from .preallocated import PreallocatedCache
from .rolling import RollingCache

__all__ = ["LinearCache", "PagedCache", "PreallocatedCache", "RollingCache"]
