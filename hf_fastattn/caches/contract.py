"""The interface of a cache's storage to the cache itself, to the pool that keeps storages between calls, and to decode graphs.

A cache is what a user holds. Its storage is the buffers and the counts, which may outlive it. The defaults here are those of a
storage that never moves its buffers and counts in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..hf import CacheLayerMixin
from ..step import Step

CHANGE_ROWS = (
    "Use a cache per batch size, or batch_repeat_interleave() or batch_select_indices() to change its rows "
    "(num_return_sequences=n needs n per row)."
)


class Storage:
    """The layers of a cache and their counts.

    layers: in the model's order; their keys and values are None before the first token. rows: of the batch, None while nothing
    is allocated. seen: tokens so far, kept or not, as the host counts them. capacity: tokens that the buffers hold; a pool takes
    the smallest that will do. version: changes whenever a buffer moves in memory. variant: a captured step is valid for one
    version and one variant. takes_mask: whether a captured step reads the attention mask, where rows are padded. recorded:
    references that decode graphs hold, which `pool.references` counts.

    A storage is weakly referenced and hashed by identity. What a step needs of a cache is in its storage: a captured step makes
    the cache anew around it (`StoredCache.around`). The defaults of mark() and rewind() are for a storage whose sync() writes the
    device's count before each step.
    """

    takes_mask: bool = True
    recorded: int = 0

    if TYPE_CHECKING:  # a subclass has each as an attribute or as a property

        @property
        def layers(self) -> Sequence[CacheLayerMixin]: ...
        @property
        def rows(self) -> int | None: ...
        @property
        def seen(self) -> int: ...
        @property
        def capacity(self) -> int: ...
        @property
        def version(self) -> int: ...
        @property
        def variant(self) -> object: ...
    else:
        version, variant = 0, None

    @property
    def used(self) -> bool:
        """Whether it holds tokens; a decode graph runs only where it does."""
        return self.seen > 0

    @property
    def keeps_all(self) -> bool:
        """Whether token n is in slot n: nothing is dropped."""
        return True

    # A pool

    def holds(self, tokens: int) -> bool:
        """Whether this many tokens fit as it is."""
        return tokens <= self.capacity

    def reset(self) -> None:
        """Forget all tokens and keep the buffers."""

    def relieve_with(self, free: Callable[[], None]) -> None:
        """Call the method `free` when memory is short; refer to its object weakly."""

    # A forward of a patched model

    def end(self, step: Step, failed: bool) -> None:
        """After a forward over it; failed: whether it raised."""

    # A decode graph: sync() before each step; what is captured runs within a step of mode CAPTURED (`step.mode(storage)`), where
    # the device counts, and step() comes last in it; advance() after each step that was done, rewind() after one that failed.

    def sync(self, device: torch.device) -> None:
        """Have the host's counts on the device, and room for one token more."""

    def step(self) -> None:
        """Count on the device the token that a forward has written."""

    def advance(self) -> None:
        """Count on the host the token that a graph has written."""

    def mark(self) -> Any:
        """What `rewind` needs to take back the first step of a graph."""

    def rewind(self, mark: Any) -> None:
        """Take back a step that failed; mark: None where the graph has run before."""
