"""One file per backend. Importing this package registers all of them."""

from . import batch_invariant, fa2, lean, reference, split_kv, streaming

__all__ = ["batch_invariant", "fa2", "lean", "reference", "split_kv", "streaming"]
