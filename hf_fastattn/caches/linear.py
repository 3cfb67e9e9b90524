"""The cache of linear attention: for each layer and KV head the sums U and z, of a size that no length changes.

`update()` stores nothing. It passes the new K and V on with the sums, to which attention adds them in place
(`attention.linear`), so a step that fails between the two leaves the storage `cut_short`, as one of a hybrid.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch

from .. import hf
from ..attention.linear import NAME, STATE, USE, map_of
from ..attention.step import EAGER
from ..kernels.linear_attention import num_features
from ..kernels.spec import KV
from . import saved
from .buffers import Pair, refuse_gradient
from .contract import CHANGE_ROWS
from .layers import Layer, Track
from .preallocated import PreallocatedCache
from .states import NO_CROP
from .storage import PreallocatedStorage

ANY = 1 << 62  # tokens


def dtype_of(keys: torch.Tensor) -> torch.dtype:
    """That of the sums."""
    return torch.float64 if keys.dtype == torch.float64 else torch.float32


class LinearLayer(Layer):
    """U (batch, num_kv_heads, features, value_dim) and z (batch, num_kv_heads, features), in fp32, or fp64 if K is."""

    names = ("recurrent.0", "recurrent.1")
    keys = values = slots = None  # type: ignore[assignment]
    is_croppable = False

    def __init__(self, index: int, track: Track, linear_map: str):
        super().__init__(index, track)
        self.linear_map = linear_map

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object) -> Pair:
        step = self.track.step
        config: Any = None if step is None or step.model is None else step.model.config
        if step is None or (config is not None and config._attn_implementation != NAME):
            raise RuntimeError(f"A LinearCache needs a model that runs {NAME!r}, with the hook of a patched one: {USE}.")
        if config is not None and (now := map_of(config)) != self.linear_map:
            raise ValueError(
                f"This cache has sums of the map {self.linear_map!r}, and the model has now {now!r}. Make another one."
            )
        if step.mode != EAGER:
            self.mark_written(step)
        else:
            refuse_gradient(key_states, value_states)
            self.check(key_states, value_states)
            if not self.is_initialized:
                self.put(self.sums(key_states, value_states))
            self.seen, self.track.stale = self.seen + key_states.shape[2], True
        step.kv = KV(key_states, value_states, STATE, *self.buffers)
        return key_states, value_states

    def sums(self, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """Those of no tokens, for K and V of these shapes."""
        shape = *keys.shape[:2], num_features(self.linear_map, keys.shape[3])
        with torch.inference_mode(False):
            return [torch.zeros(*size, dtype=dtype_of(keys), device=keys.device) for size in ((*shape, values.shape[3]), shape)]

    def put(self, sums: list[torch.Tensor]) -> None:
        self.buffers, self.is_initialized, self.device = sums, True, sums[0].device

    def check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        new = key_states.shape[:2], key_states.device, value_states.shape[3], dtype_of(key_states)
        held = self.buffers[1].shape[:2], self.buffers[0].device, self.buffers[0].shape[3], self.buffers[0].dtype
        if new == held and self.buffers[1].shape[2] == num_features(self.linear_map, key_states.shape[3]):
            return
        if self.seen:
            what = "It belongs to another model." if new[0][0] == held[0][0] else CHANGE_ROWS
            raise ValueError(f"This cache holds (rows, KV heads) {tuple(held[0])}, and it is given {tuple(new[0])}. {what}")
        for layer in self.track.layers():
            layer.clear()

    def reallocate(self, capacity: int) -> None: ...

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask is that of the new tokens."""
        return query_length, self.seen if self.track.mode == EAGER else 0

    def reset(self) -> None:
        super().reset()
        for state in self.buffers:
            state.zero_()


class LinearStorage(PreallocatedStorage):
    """The layers of one cache. A step has one token, as padding would enter the sums, and is undone by a mark alone."""

    takes_mask = takes_many = takes_prompts = takes_packed = False
    can_undo = False

    def __init__(self, layers: int, linear_map: str):
        self.linear_map = linear_map
        super().__init__([hf.Kind("full")] * layers, ANY)

    def make_layer(self, index: int, track: Track) -> Layer:
        return LinearLayer(index, track, self.linear_map)

    def states(self) -> list[torch.Tensor]:
        return [part.tensor for part in self.memory()]

    def crop(self, tokens: int) -> None:
        raise ValueError(NO_CROP)


class LinearCache(PreallocatedCache):
    """The sums of linear attention of every layer, in constant memory: a `cache` (before Transformers 5.24: `past_key_values`)
    for a model patched with hf_fastattn.patch(model, "linear"), whose attention is an approximation.

    model: that model, or its configuration, whose `linear_map` decides the sizes. Nothing is allocated before the first forward.

    It supports left padding, holes, chunks, several turns, beams, reset(), save(), load() and deepcopy. It raises an error for a
    model with windows or states, for gradients, offloading, another batch size, and for crop() and assisted decoding.
    """

    storage: PreallocatedStorage

    def __init__(self, model: saved.ModelOrConfig):
        config = saved.config_of(model)
        check_kinds(config)
        self._adopt(LinearStorage(len(hf.layer_kinds(config)), map_of(config)))

    def __repr__(self) -> str:
        return f"LinearCache({len(self.layers)} layers, the sums of {self.storage.seen} tokens, an approximation)"

    @classmethod
    def load(cls, path: str | Path, model: saved.ModelOrConfig, *, capacity: int = 1, grow: bool = True) -> Self:
        """Read a cache written by save(), as PreallocatedCache.load; capacity and grow have no effect."""
        cache, devices = cls(model), hf.layer_devices(model)
        layers = cache.storage.layers
        seen, _, _, states = saved.read(path, [hf.Kind("state", states=2)] * len(layers), model)
        for layer in layers:
            each = [states[layer.index][name] for name in layer.names]
            layer.put([x.to(devices.get(layer.index, x.device)) for x in each])
            layer.seen = seen
        return cache


def check_kinds(config: hf.PreTrainedConfig) -> None:
    """Raise ValueError for layers that are not of full attention."""
    found: set[str] = {kind.name for kind in hf.layer_kinds(config)}
    crosses = getattr(config.get_text_config(decoder=True), "cross_attention_layers", None)
    found |= {name for name, has in (("latent", hf.has_latents(config)), ("cross", crosses)) if has}
    if others := sorted(found - {"full"}):
        raise ValueError(
            f"Linear attention needs layers that see all earlier tokens, and {type(config).__name__} has layers of the kind "
            f"{', '.join(others)}. Use another backend."
        )
