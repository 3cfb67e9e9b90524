"""The interface of a cache's storage to the cache itself, to the pool that keeps storages between calls, and to decode graphs.

The user holds a cache. Its storage has the buffers and the token counts, and may outlive the cache. The defaults here suit a
storage that never moves its buffers and counts tokens in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..attention.step import Step
from ..hf import CacheLayerMixin

__all__ = ["Storage"]

CHANGE_ROWS = (
    "Use a cache per batch size, or batch_repeat_interleave() or batch_select_indices() to change its rows "
    "(num_return_sequences=n needs n per row)."
)

FEW = 64  # tokens of each row: a step of so many is captured for any number of rows, and merges results if ranks share K and V


class Storage:
    """The layers of a cache and their token counts.

    layers: in the model's order; their keys and values are None before the first token. rows: batch size, None while nothing
    is allocated. seen: number of tokens so far, including dropped ones, counted on the host. capacity: number of tokens that fit
    into the buffers; a pool selects the smallest sufficient storage. version: changes whenever a buffer moves in memory.
    variant: a captured step is valid for one version and one variant. takes_mask: whether a captured step of padded rows reads
    the attention mask. takes_many: whether a captured step may have several tokens of each row. takes_prompts: whether these may
    also be some hundred, or the first. most_tokens: how many they may be at most. looks_ahead: whether a forward has let tokens
    see later ones, for which a graph has no mask. resized: whether other code has replaced K and V by those of fewer or more
    tokens. endless: whether its text may be longer than the model has positions. recorded: number of references held by decode
    graphs, as `pool.references` counts them. serial: its number among the storages of a model, by which ranks that share the
    model name it.

    A storage is weakly referenced and hashed by identity. It has everything that a step needs of its cache, because a captured
    step creates a new cache over it (`StoredCache.around`). The defaults of mark() and rewind() suit a storage whose sync()
    writes the count to the device before each step.
    """

    takes_mask: bool = True
    takes_many: bool = False
    takes_prompts: bool = False
    most_tokens: int = 512
    looks_ahead: bool = False
    resized: bool = False
    endless: bool = False
    recorded: int = 0
    serial: int = 0

    if TYPE_CHECKING:  # in a subclass each is an attribute or a property

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
        """Whether it holds tokens; a decode graph runs only if it does."""
        return self.seen > 0

    @property
    def can_undo(self) -> bool:
        """Whether the next token can be removed as if it had never been stored, if the cache can be cropped."""
        return True

    @property
    def keeps_all(self) -> bool:
        """Whether it keeps all tokens, token n in slot n."""
        return True

    # Used by a pool

    def holds(self, tokens: int) -> bool:
        """Whether this many tokens fit without growing."""
        return tokens <= self.capacity

    def reset(self) -> None:
        """Discard all tokens and keep the buffers."""

    def call_on_low_memory(self, free: Callable[[], None]) -> None:
        """Set the method to call when memory is short. Keep only a weak reference to its object."""

    # Used by the forward of a patched model

    def end(self, step: Step, failed: bool) -> None:
        """Called after a forward over this storage. failed: whether the forward raised."""

    # Used by a decode graph. It calls sync() before each step. The captured code runs within a step of mode CAPTURED
    # (`step.mode(storage)`), in which tokens are counted on the device, and ends with step(). advance() follows each successful
    # step, rewind() each failed one. A step of several tokens may write slots beyond them, which are not counted.

    def sync(self, device: torch.device, tokens: int = 1) -> None:
        """Write the host's counts to the device, and make room for `tokens` more tokens. `tokens` is passed only if
        `takes_many`, here and in advance()."""

    def step(self) -> None:
        """Count the token that a forward has written, on the device. After several tokens sync() writes the count."""

    def advance(self, tokens: int = 1) -> None:
        """Count the tokens that a graph has written, on the host."""

    def mark(self) -> Any:
        """The state that `rewind` needs to undo the first step of a graph."""

    def rewind(self, mark: Any) -> None:
        """Undo a failed step. mark: the result of mark(), or None if the graph has run before."""
