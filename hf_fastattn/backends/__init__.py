"""One file = one backend. Importing this package registers them all."""

from . import batch_invariant, fa2, lean, reference, split_kv, streaming

__all__ = ["batch_invariant", "fa2", "lean", "reference", "split_kv", "streaming"]
