"""One file = one backend. Importing this package registers them all."""

from . import fa2, lean, reference, split_kv

__all__ = ["fa2", "lean", "reference", "split_kv"]
