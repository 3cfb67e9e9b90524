"""The interface of a cache's storage to the cache itself, to the pool that keeps storages between calls, and to decode graphs.

The user holds a cache. Its storage has the buffers and the token counts, and may outlive the cache. The defaults here suit a
storage that never moves its buffers and counts tokens in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..hf import CacheLayerMixin
from .buffers import Part

__all__ = ["Storage"]

CHANGE_ROWS = (
    "Use a cache per batch size, or batch_repeat_interleave() or batch_select_indices() to change its rows "
    "(num_return_sequences=n needs n per row)."
)

CUT_SHORT = (
    "A forward over this cache or a change of its rows was interrupted, or a forward ran other layers than the first, so some of "
    "its layers now lack tokens. Call reset() on the cache and read the text again."
)

FEW = 64  # tokens of each row: a step of so many is captured for any number of rows, and merges results if ranks share K and V


class Storage:
    """The layers of a cache and their token counts.

    layers: in the model's order; their keys and values are None before the first token. rows: batch size, None while nothing
    is allocated. seen: number of tokens so far, including dropped ones, counted on the host. capacity: number of tokens that fit
    into the buffers; a pool selects the smallest sufficient storage. version: changes whenever a buffer moves in memory.
    variant: a captured step is valid for one version and one variant. takes_mask: whether a captured step of padded rows reads
    the attention mask. takes_many: whether a captured step may have several tokens of each row. takes_prompts: whether these may
    also be some hundred, or the first. takes_packed: whether its layers store the prompts of several rows that a forward reads as
    one row. most_tokens: how many they may be at most. looks_ahead: whether a forward has let tokens see later ones, for which a
    graph has no mask. resized: whether other code has replaced K and V by those of fewer or more tokens. endless: whether its
    text may be longer than the model has positions. cut_short: whether layers lack tokens, after an interrupted forward.
    skips_padding: whether kernels of a captured step are told how many of its tokens are padding, by `real_tokens`.
    recorded: number of references held by decode graphs, as `pool.references` counts them. serial: its number among the storages
    of a model, by which ranks that share the model name it.

    A storage is weakly referenced and hashed by identity. It has everything that a step needs of its cache, because a captured
    step creates a new cache over it (`StoredCache.around`).
    """

    takes_mask: bool = True
    takes_many: bool = False
    takes_prompts: bool = False
    takes_packed: bool = False
    most_tokens: int = 512
    skips_padding: bool = False
    looks_ahead: bool = False
    resized: bool = False
    endless: bool = False
    cut_short: bool = False
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
    def smallest(self) -> int:
        """How many tokens the smallest of its buffers holds, but for those of windows, which hold any text."""
        return self.capacity

    @property
    def unused(self) -> int:
        """How many tokens can be added without other buffers, and without moving a window."""
        return self.capacity - self.seen

    @property
    def real_tokens(self) -> torch.Tensor | None:
        """Number of tokens of each row that are no padding, int64 (1,) on the device, which sync() writes; None without
        `skips_padding`."""
        return None

    @property
    def can_undo(self) -> bool:
        """Whether the next token can be removed as if it had never been stored, if the cache can be cropped."""
        return True

    @property
    def keeps_all(self) -> bool:
        """Whether it keeps all tokens, token n in slot n."""
        return True

    @property
    def windowed(self) -> bool:
        """Whether a layer sees only a window of the tokens."""
        return not self.keeps_all

    def memory(self) -> list[Part]:
        """The tensors of its layers, which are counted, moved and permuted. Layers of other classes than Buffered list none."""
        return [part for layer in self.layers for part in getattr(layer, "parts", tuple)()]

    def states(self) -> list[torch.Tensor]:
        """The tensors that a step replaces, such as recurrent states; none in a storage that only adds tokens."""
        return []

    def check(self) -> None:
        """Raise ValueError if layers lack tokens."""
        if self.cut_short:
            raise ValueError(CUT_SHORT)

    # Used by a pool

    def holds(self, tokens: int) -> bool:
        """Whether this many tokens fit without growing."""
        return tokens <= self.smallest

    def ahead(self, tokens: int) -> int:
        """For how many tokens the buffers are made that follow these, which are too small for `tokens`: so many, or more, so that
        growing texts seldom need others, whose graphs would be captured again."""
        return tokens

    def reset(self) -> None:
        """Discard all tokens and keep the buffers."""

    def call_on_low_memory(self, free: Callable[[], None]) -> None:
        """Set the method to call when memory is short. Keep only a weak reference to its object."""

    # Used by a ChangeableCache

    def select(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in this order."""
        raise NotImplementedError

    def reorder(self, index: torch.Tensor) -> None:
        """Replace every row r by row index[r], in place if the number of rows does not change."""
        self.select(index)

    def crop(self, tokens: int) -> None:
        """Remove the last tokens. Raises ValueError if later ones would see tokens that are gone."""
        raise NotImplementedError

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

    def mark(self) -> list[torch.Tensor]:
        """What `rewind` needs to undo a step: copies of the states. Counts need none, as sync() writes them before each step."""
        return [state.clone() for state in self.states()]

    def rewind(self, mark: list[torch.Tensor] | None) -> None:
        """Undo a failed step. mark: the result of mark() before it; None for a replay or a forward that was interrupted, after
        which states are unknown."""
        if mark is None:
            self.cut_short = self.cut_short or bool(self.states())
        else:
            for state, old in zip(self.states(), mark, strict=True):
                state.copy_(old)

    def interrupt(self, seen: list[int]) -> None:
        """Undo a forward from Python that was interrupted, or note that layers lack tokens. seen: see `Step`."""
        self.rewind(None)
