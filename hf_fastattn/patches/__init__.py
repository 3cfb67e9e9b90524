"""What patch() changes on one model instance, and the decode graph it brings."""

from .swap import Change, Patch, patch, unpatch

__all__ = ["Change", "Patch", "patch", "unpatch"]
