"""The caches of generate() of one patched model: which one a call gets, and which ones a call may pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from ... import hf
from ...attention.linear import map_of
from ...caches import LinearCache, PreallocatedCache, RollingCache
from ...caches.eight_bits import storage_of
from ...caches.layers import round_up
from ...caches.linear import LinearStorage
from ...caches.pool import Pool
from ...caches.ring import Ring
from ...caches.shared import SharedCache, SharedStorage
from ...caches.stored import StoredCache
from ...context_parallel import Shares
from ...streaming import Settings


@dataclass(eq=False)
class CallCaches:
    """The caches of one model. kinds: of its layers. streaming: the settings of a streaming backend, None for others.

    shares: how ranks share K and V by sequence. kv_dtype: of K and V in 8 bits. linear: the map of linear attention, None for
    other attention. pool: the storages that are kept between calls.
    """

    kinds: tuple[hf.Kind, ...]
    streaming: Settings | None
    shares: Shares | None = None
    kv_dtype: str | None = None
    linear: str | None = None

    def __post_init__(self) -> None:
        self.pool = self._make_pool(0)
        self.fitted = ("", 0)  # the configuration for which the pool was made, and the number of its layers

    def _make_pool(self, serial: int) -> Pool:
        kinds, streaming, shares, kv_dtype = self.kinds, self.streaming, self.shares, self.kv_dtype
        if (linear := self.linear) is not None:
            return Pool(lambda tokens: LinearStorage(len(kinds), linear), LinearCache.around, serial)
        if shares is not None:
            return Pool(lambda tokens: SharedStorage(kinds, round_up(tokens), shares), SharedCache.around, serial)
        if streaming is None:
            return Pool(lambda tokens: storage_of(kinds, round_up(tokens), kv_dtype), PreallocatedCache.around, serial)
        return Pool(lambda tokens: Ring(len(kinds), streaming), RollingCache.around, serial)

    def refit(self, model: hf.PreTrainedModel) -> int:
        """Replace the pool if the layers or the configuration of the model have changed. Return the number of layers."""
        text = model.config.get_text_config(decoder=True)
        config = repr(vars(text))  # by value, as lists may be changed in place; reading the kinds takes longer
        if config != self.fitted[0]:
            self.fitted = config, self._fit(model)
        return self.fitted[1]

    def _fit(self, model: hf.PreTrainedModel) -> int:
        kinds = hf.layer_kinds(model.config)
        streaming = None if self.streaming is None else Settings.of(model.config.get_text_config(decoder=True))
        linear = None if self.linear is None else map_of(model.config)
        if streaming is None and kinds == self.kinds[: len(kinds)] and linear == self.linear:
            return len(kinds)  # a model that runs only its first layers (early exit) leaves the others empty
        if (kinds, streaming, linear) != (self.kinds, self.streaming, self.linear):
            self.pool.close()
            self.kinds, self.streaming, self.linear = kinds, streaming, linear
            self.pool = self._make_pool(self.pool.serial)
        return len(kinds)

    @property
    def run(self) -> tuple[hf.Kind, ...]:
        """Of the layers that the model runs."""
        return self.kinds[: self.fitted[1]]

    @property
    def type(self) -> type[StoredCache]:
        if self.shares is not None:
            return SharedCache
        if self.linear is not None:
            return LinearCache
        return PreallocatedCache if self.streaming is None else RollingCache

    def in_words(self) -> str:
        if self.shares is not None:
            return f"preallocated, shared out over {self.shares.count} ranks by sequence"
        if self.linear is not None:
            return f"linear, sums of the map {self.linear!r} in place of K and V, an approximation"
        if self.kv_dtype is not None:
            full = sum(kind.window is None for kind in self.kinds)
            rest = f", {len(self.kinds) - full} with a window as the model computes them" if full < len(self.kinds) else ""
            return f"preallocated, K and V of {full} layers in 8 bits ({self.kv_dtype}), an approximation{rest}"
        if self.streaming is None:
            return "preallocated"
        return f"rolling, {self.streaming.sinks} sinks and a window of {self.streaming.window}"

    def takes(self, cache: object) -> TypeGuard[StoredCache]:
        """Whether steps over this cache are captured: a cache over a storage (`caches.contract`) for this backend."""
        if self.streaming is not None:
            return isinstance(cache, RollingCache)
        if self.linear is not None or isinstance(cache, LinearCache):
            return self.linear is not None and isinstance(cache, LinearCache)
        return (
            isinstance(cache, StoredCache) and not cache.streams and isinstance(cache, SharedCache) == (self.shares is not None)
        )

    def kept(self, tokens: int) -> int:
        """How many of `tokens` tokens a layer without a sliding window keeps."""
        if self.linear is not None:
            return 0
        return tokens if self.streaming is None else min(tokens, self.streaming.sinks + self.streaming.window)

    def is_new(self, cache: object) -> TypeGuard[PreallocatedCache]:
        """Whether it is a cache of the caller that has allocated nothing, and may have the storage of another one."""
        if type(cache) is not PreallocatedCache or self.type is not PreallocatedCache or cache.storage.serial:
            return False
        storage = cache.storage
        new = not storage.memory() and not any(layer.pending or layer.seen for layer in storage.counted)
        new = new and storage.kv_dtype == self.kv_dtype
        return new and all(track.growable for track in storage.tracks) and storage.kinds == self.kinds

    def make_ready(
        self,
        cache: StoredCache,
        model: hf.PreTrainedModel,
        model_kwargs: dict[str, Any],
        rows: int,
        tokens: int,
        among: list[int] | None,
    ) -> None:
        """Make room in a cache that the caller passed. Raise ValueError if it does not fit this call. among: see `Pool.take`."""
        layers = self.fitted[1]
        if len(cache.layers) not in (layers, len(self.kinds)):
            raise ValueError(
                f"This cache holds {len(cache.layers)} layers, and {type(model).__name__} has {layers}: "
                "it belongs to another model."
            )
        if self.is_new(cache):
            asked = max(track.capacity for track in cache.storage.tracks)
            self.pool.adopt(cache, rows, max(asked, tokens), among)
        cache.check_rows(rows)
        seen = cache.get_seq_length()
        whole = covered(model_kwargs, seen)
        if seen and whole is not None and whole <= seen:
            raise ValueError(
                f"{hf.CACHE} holds {seen} tokens, and this call covers {whole}. Pass the whole text, or only the "
                "new ids with the attention_mask of the whole text or with their position_ids: at least one token more."
            )
        # If only the new ids are given, the length of the call counts from them.
        tokens = tokens if tokens > seen else seen + tokens
        cache.reserve(tokens if among is not None or cache.storage.holds(tokens) else cache.storage.ahead(tokens))


def covered(model_kwargs: dict[str, Any], seen: int) -> int | None:
    """Number of tokens that a call covers, including those in the cache, from its mask or its positions; None if unknown.

    Transformers drops a mask of ones. The positions that it derives from the mask have the same length and begin with 0.
    Positions of only the new ids, which a caller may pass, begin later.
    """
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return mask.shape[1]
    if mask is None and isinstance(positions, torch.Tensor) and positions.dim() > 1:
        width = positions.shape[-1]
        return seen + width if width <= seen and bool((positions[..., 0] > 0).any()) else width
    return None
