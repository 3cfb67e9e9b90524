"""Cache "preallocated": K and V of every token in buffers that stay in place and grow in steps between forwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch

from .. import hf
from ..attention import step as steps
from ..attention.step import EAGER, Step
from ..kernels.checks import is_count
from . import eight_bits, saved
from .layers import Layer, round_up
from .states import NO_CROP
from .storage import PreallocatedStorage
from .stored import Arguments, ChangeableCache


class PreallocatedCache(ChangeableCache):
    """K and V of every layer in buffers that stay in place; a drop-in `cache` (before Transformers 5.24:
    `past_key_values`) for decoder-only models.

    config: the model's configuration, or the model. capacity: number of tokens to allocate first, rounded up. The buffers grow
    in steps, between two forwards. grow=False raises a ValueError instead. Sliding-window layers allocate little more than
    their window. Nothing is allocated before the first forward.

    kv_dtype: "int8" or "fp8" stores K and V in 8 bits in layers without a sliding window: an approximation
    (docs/guides/kv-dtype.md), for patched models. None stores what the model computes.

    It supports what a DynamicCache supports: left padding, holes, chunked prefill, beams, num_return_sequences, assisted
    and prompt-lookup decoding, several turns, reset(), deepcopy, several devices. It raises an error for gradients, for
    offloading, for another batch size or K/V shape, and for cropping more of a sliding window than it keeps.
    """

    storage: PreallocatedStorage

    def __init__(self, config: saved.ModelOrConfig, capacity: int = 1, *, grow: bool = True, kv_dtype: str | None = None):
        tokens = checked(capacity)
        kinds = hf.layer_kinds(saved.config_of(config))
        if reason := eight_bits.why_not(kv_dtype, config):
            raise ValueError(reason)
        self._adopt(eight_bits.storage_of(kinds, round_up(tokens) if grow else tokens, kv_dtype, grow))

    def __repr__(self) -> str:
        tracks = ", ".join(
            f"{len(seen)} layers{f' of window {own}' if (own := t.kind.window) else ''} at {max(seen)}/{t.capacity} tokens"
            for t in self.storage.tracks
            if (seen := [layer.seen for layer in t.layers()])
        )
        return f"{type(self).__name__}({tracks})"

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
        """K, V and the sliding window (or None) of each layer, as a DynamicCache yields them."""
        for layer in self.storage.layers:
            window = layer.track.kind.window if isinstance(layer, Layer) else None
            yield layer.keys, layer.values, None if window is None else torch.tensor(window)

    def begin(self, step: Step, model: hf.PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if self.storage.kv_dtype is not None and not self.storage.seen:
            step.plan = kwargs.get("attention_mask")  # which tokens are padding
        arguments = super().begin(step, model, args, kwargs)
        if step.mode == EAGER and not torch.compiler.is_compiling():
            step.seen = [layer.seen for layer in self.storage.counted]
        if not self.storage.can_undo:  # the code of a linear layer does not compare the rows of its state
            given = (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
            rows = next((len(x) for x in given if isinstance(x, torch.Tensor)), self._rows or 0)
            try:
                self.check_rows(rows)
            except ValueError:
                steps.end(step)  # nothing has run: the states are those of the text
                raise
        return arguments

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:  # type: ignore[override]  # a StaticCache's is a tensor
        layer = self.storage.layers[layer_idx]
        return (layer if isinstance(layer, Layer) else self.storage.counted[0]).query_offset()

    def check_call(self, mask: torch.Tensor | None, tokens: int, crops: bool) -> None:
        if crops and not self.storage.can_undo:
            raise ValueError(NO_CROP)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens in total, so that no buffer grows before that."""
        for track in self.storage.tracks:
            capacity = min(round_up(tokens), track.limit)
            if track.capacity < capacity and track.growable:
                track.grow(capacity)

    @property
    def _rows(self) -> int | None:
        """Also those of a file."""
        held = (len(layer.live()[0]) for layer in self.storage.counted if layer.is_initialized or layer.pending)
        return next(held, None)

    def save(self, path: str | Path, model: saved.ModelOrConfig) -> None:
        """Write the live tokens, recurrent states and the configuration of `model` to one safetensors file.

        Raises ValueError for a cache without tokens, for one in which some layers did not run, for a model that ranks share, and
        for a path that is a directory or a device; OSError if the file cannot be written.
        """
        self.settle()
        saved.write(path, self.storage, model)

    @classmethod
    def load(cls, path: str | Path, model: saved.ModelOrConfig, *, capacity: int = 1, grow: bool = True) -> Self:
        """Read a cache written by save(), for `model`, with the kv_dtype that it had. K and V move from memory to the device of
        each layer in the first forward, recurrent states at once, if `model` is a model.

        Only the configuration is compared, not the weights: K and V of other weights are not detected. Raises ValueError with
        path and reason if the file has another format, configuration, dtype or shape, or if it is truncated or inconsistent.
        """
        tokens = checked(capacity)
        seen, kv_dtype, held, states = saved.read(path, hf.layer_kinds(saved.config_of(model)), model)
        cache = cls(model, max(tokens, seen), grow=grow, kv_dtype=kv_dtype)
        for index, (keys, values, *others) in held.items():
            layer = cache.storage.layers[index]
            if others:
                layer.load(keys, values, *others)
                continue
            kept = min(keys.shape[2], layer.track.kept(seen))
            layer.pending = keys[:, :, keys.shape[2] - kept :], values[:, :, values.shape[2] - kept :]
            layer.seen, layer.base = seen, seen - kept
        devices = hf.layer_devices(model)
        for index, each in states.items():
            for name, state in each.items():
                cache.storage.layers[index].put(name, state.to(devices.get(index, state.device)))
            cache.storage.layers[index].whole = True
        return cache


def checked(capacity: int) -> int:
    """A capacity that a caller has given. Raises ValueError unless it is a number of tokens."""
    if not is_count(capacity) or capacity < 1:
        raise ValueError(f"capacity counts tokens: an integer, at least 1; got {capacity!r}.")
    return int(capacity)
