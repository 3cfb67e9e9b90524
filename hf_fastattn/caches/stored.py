"""What the caches have in common: their tokens are in a storage, which outlives them and which decode graphs read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

from .. import hf
from .. import step as steps
from ..step import CAPTURED, CAPTURED_WITH_MASK, Step
from .contract import CHANGE_ROWS, Storage

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs


class StoredCache(hf.Cache):
    """A `past_key_values` over a storage, whose layers are its layers.

    streams: whether it drops tokens, as a RollingCache does, which streaming backends alone read.
    """

    streams = False
    storage: Storage
    layers: list[hf.CacheLayerMixin]  # type: ignore[assignment]  # a Cache may have other kinds of layers, too

    def _adopt(self, storage: Storage) -> None:
        self.storage = storage
        super().__init__(layers=list(storage.layers))  # a copy: changes to a cache's list do not reach the storage's

    @classmethod
    def around(cls, storage: Storage) -> Self:
        """A cache whose tokens are those of `storage`."""
        cache = cls.__new__(cls)
        cache._adopt(storage)
        return cache

    @property
    def is_initialized(self) -> bool:
        """Whether it held tokens before the forward under way: buffers that wait for the next call hold none."""
        return self.storage.used

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in all, where a cache can know beforehand."""

    def check_rows(self, rows: int) -> None:
        """Raise ValueError if the cache holds tokens of another number of rows."""
        held = self.storage.rows
        if self.storage.seen and held is not None and held != rows:
            raise ValueError(f"This cache holds {held} rows, and the call has {rows}. {CHANGE_ROWS}")

    def vet(self, mask: torch.Tensor | None, tokens: int, takes_back: bool) -> None:
        """Raise ValueError for what a call will need and cannot have.

        mask: the call's, 2-D. takes_back: the call crops as it goes, up to `tokens` tokens in all.
        """

    def begin(self, step: Step, model: hf.PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Called before a patched model's forward over it: other arguments for it, or None to keep `args` and `kwargs`."""
        return None

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self), original=self)  # the storage is free for others when both are gone
        return copied

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V, (batch, num_kv_heads, q_len, head_dim), of one layer; return those to attend to."""
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"This cache holds {len(self.layers)} layers and is given layer {layer_idx}: it belongs to another model."
            )
        return self.layers[layer_idx].update(key_states, value_states)

    @contextmanager
    def on_device(self, with_mask: bool = False) -> Iterator[None]:
        """Inside, tokens are counted on the device and not on the host: for what a decode graph captures."""
        step = steps.begin(self.storage, CAPTURED_WITH_MASK if with_mask else CAPTURED)
        try:
            yield
        finally:
            steps.end(step)
