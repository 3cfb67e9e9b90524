"""The base class of the caches: the tokens are in a storage, which may outlive the cache and which decode graphs read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

from .. import hf
from ..attention import step as steps
from ..attention.step import CAPTURED, CAPTURED_WITH_MASK, EAGER, Step
from .contract import CHANGE_ROWS, Storage

__all__ = ["StoredCache"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # args and kwargs


class Layers(list[hf.CacheLayerMixin]):
    """The layers of a cache. Those of its storage, which decode graphs run, stay as they are."""

    def __setitem__(self, index: Any, layer: Any) -> None:
        raise TypeError(
            "The layers of this cache cannot be replaced, as decode graphs have the addresses of their buffers. Assign keys and "
            f"values of a layer, or {hf.OTHERS}."
        )


class StoredCache(hf.Cache):
    """A `cache` of a model over a storage, with the layers of the storage.

    streams: whether it drops tokens, as a RollingCache does. Only streaming backends can read such a cache.
    """

    streams = False
    storage: Storage
    layers: list[hf.CacheLayerMixin]  # type: ignore[assignment]  # a Cache may have other kinds of layers

    def _adopt(self, storage: Storage) -> None:
        self.storage = storage
        super().__init__(layers=Layers(storage.layers))  # type: ignore[arg-type]  # a copy, as other code may change it

    @classmethod
    def around(cls, storage: Storage) -> Self:
        """A new cache over an existing storage, with its tokens."""
        cache = cls.__new__(cls)
        cache._adopt(storage)
        return cache

    @property
    def is_initialized(self) -> bool:
        """Whether it held tokens before the current forward; buffers kept for the next call hold none."""
        return self.storage.used

    @property
    def max_cache_len(self) -> int:
        """What PEFT's prefix tuning reads before it replaces the cache by its own."""
        return self.get_max_length()

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in total. The default does nothing."""

    @property
    def _rows(self) -> int | None:
        return self.storage.rows

    def check_rows(self, rows: int) -> None:
        """Raise ValueError if the cache holds tokens of another batch size."""
        held = self._rows
        if self.storage.seen and held is not None and held != rows:
            raise ValueError(f"This cache holds {held} rows, and the call has {rows}. {CHANGE_ROWS}")

    def check_call(self, mask: torch.Tensor | None, tokens: int, crops: bool) -> None:
        """Raise ValueError if the cache cannot serve this call of generate().

        mask: the 2-D mask of the call. crops: whether the call crops the cache. tokens: the most tokens that it reaches.
        """

    def begin(self, step: Step, model: hf.PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Called before a patched model's forward over it. Returns new arguments for the forward, or None to keep them."""
        self.storage.check()
        return None

    def end(self, step: Step, output: Any) -> Any:
        """Called after a patched model's forward over it. output: None if the forward raised. Returns another one, or None."""
        if output is None and step.mode == EAGER:
            self.storage.interrupt(step.seen)

    def settle(self) -> None:
        """End the steps over it that are still open: an interrupt (KeyboardInterrupt) calls no hook of a model."""
        while (step := steps.over(self.storage)) is not None:
            steps.end(step)
            self.storage.interrupt(step.seen)

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self), original=self)  # the storage is free for reuse when both are deleted
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = type(self).__new__(type(self))
        with torch.inference_mode(False):  # tensors of inference could not be written after it
            vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V (batch, num_kv_heads, q_len, head_dim) of one layer; return the K and V to attend to."""
        layers, own = self.layers, self.storage.layers
        if len(layers) != len(own) or layer_idx >= len(own) or layers[layer_idx] is not own[layer_idx]:
            raise ValueError(
                f"This cache holds {len(own)} layers and is given layer {layer_idx} of {len(layers)}: it belongs to another "
                f"model, or other code has changed its layers, which {type(self).__name__} does not support; {hf.OTHERS}."
            )
        return layers[layer_idx].update(key_states, value_states)

    @contextmanager
    def on_device(self, with_mask: bool = False, tokens: int = 1) -> Iterator[None]:
        """A context in which tokens are counted on the device instead of the host, as when a decode graph is captured.

        tokens: those of each row in the graph."""
        step = steps.begin(self.storage, CAPTURED_WITH_MASK if with_mask else CAPTURED)
        step.tokens = tokens
        try:
            yield
        finally:
            steps.end(step)


class ChangeableCache(StoredCache):
    """A cache whose storage can be emptied, cropped and given other rows."""

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """A change of all layers. If it is interrupted, some have changed, and the next forward refuses them."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.storage.cut_short = True
            raise

    def reset(self) -> None:
        """Discard all tokens; the buffers stay in place."""
        self.settle()
        self.storage.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (a negative number, as in Transformers; 0 does nothing)."""
        tokens_to_remove = int(tokens_to_remove)  # a tensor in assisted decoding
        self.settle()
        if tokens_to_remove > 0:
            raise ValueError(f"crop() takes the negative number of tokens to remove; got {tokens_to_remove}.")
        if -tokens_to_remove > (seen := self.storage.seen):
            words = "has read" if self.streams else "holds"
            raise ValueError(f"This cache {words} {seen} tokens; {-tokens_to_remove} cannot be removed.")
        if tokens_to_remove:
            with self._changing():
                self.storage.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Replace every row r by row beam_idx[r], in place: decode graphs stay valid."""
        self.settle()
        with self._changing():
            self.storage.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace every row by `repeats` copies of it."""
        self.batch_select_indices(torch.arange(self._rows or 0, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep rows `indices` (int64, or bool with one entry per row), in this order."""
        self.settle()
        if indices.dtype == torch.bool:
            if (rows := self._rows) and indices.shape != (rows,):
                raise ValueError(
                    f"A mask of rows has one entry for each; this cache holds {rows} rows, and got {tuple(indices.shape)}."
                )
            indices = indices.nonzero().flatten()
        with self._changing():
            self.storage.select(indices)
