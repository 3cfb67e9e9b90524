"""One decode graph, with its input tensors and the conditions under which it is valid."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeGuard

import torch

from .. import hf
from ..caches.contract import Storage
from ..caches.stored import StoredCache
from .cuda_graph import Graph
from .fingerprint import Fingerprint

Inputs = dict[str, Any]  # keyword arguments of a model
_SCALARS = (bool, int, float, str, type(None))


class Entry:
    """One graph, from before its capture: its input tensors and the conditions under which it is valid."""

    def __init__(self, cache: StoredCache, fingerprint: Fingerprint, inputs: Inputs):
        storage = cache.storage
        self.around: Callable[[Storage], StoredCache] = type(cache).around
        self.takes_mask = storage.takes_mask
        self.storage = weakref.ref(storage)
        self.device: torch.device = inputs["input_ids"].device
        self.version = storage.version
        self.variant = storage.variant
        self.fingerprint = fingerprint
        self.unread: frozenset[tuple[str, str]] = frozenset()  # attributes in the fingerprint that a step does not read
        self.used = 0
        self.refused: str | None = None
        self.warm = False
        self.graph: Graph | None = None
        self.logits: torch.Tensor  # written by every replay
        self.output_type: Callable[..., Any]
        self.returns_cache = True
        self.constants: dict[str, bool | int | float | str | None] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.live: torch.Tensor | None = None  # bool (rows, capacity): the mask, padded with False
        self.width = 0  # columns of the mask
        self.masks: dict[str, torch.Tensor] = {}
        self.count = len(inputs)
        for name, value in inputs.items():
            if name == "past_key_values":
                continue
            if name == "attention_mask" and grows(value):
                with torch.inference_mode(False):
                    self.live = torch.zeros(len(value), storage.capacity, dtype=torch.bool, device=value.device)
            elif isinstance(value, torch.Tensor):
                self.tensors[name] = _like(value)
            elif isinstance(value, _SCALARS):
                self.constants[name] = value
            elif (
                name == "attention_mask" and isinstance(value, dict) and all(isinstance(v, torch.Tensor) for v in value.values())
            ):
                self.masks = {kind: _like(mask) for kind, mask in value.items()}
            else:
                self.refused = f"its argument {name} is a {type(value).__name__}"
        if self.constants.get("output_hidden_states") or self.constants.get("output_attentions"):
            self.refused = "hidden states or attentions are requested"
        if "position_ids" not in self.tensors:
            self.refused = "the model is called without position_ids"

    def fits(self, storage: Storage) -> bool:
        """Whether this graph is valid for the current state of `storage`."""
        return self.storage() is storage and self.version == storage.version and self.variant == storage.variant

    def accepts(self, inputs: Inputs) -> bool:
        """Whether inputs have the shapes and constants of this graph."""
        if len(inputs) != self.count:
            return False
        for name, tensor in self.tensors.items():
            value = inputs.get(name)
            if not isinstance(value, torch.Tensor) or value.shape != tensor.shape or value.dtype != tensor.dtype:
                return False
        for name, constant in self.constants.items():
            if inputs.get(name, self) != constant:
                return False
        if self.live is not None:
            return grows(inputs.get("attention_mask"))
        if self.masks:
            masks = inputs.get("attention_mask")
            return isinstance(masks, dict) and all(
                kind in masks and masks[kind].shape == mask.shape for kind, mask in self.masks.items()
            )
        return True

    def grown(self, inputs: Inputs) -> str | None:
        """The name of an argument that is one element longer than in this graph, or None."""
        for name, tensor in self.tensors.items():
            shape = getattr(inputs.get(name), "shape", ())
            if shape[:-1] == tensor.shape[:-1] and shape[-1:] == (tensor.shape[-1] + 1,):
                return name
        return None

    def copy_in(self, inputs: Inputs) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(inputs[name])
        for kind, mask in self.masks.items():
            mask.copy_(inputs["attention_mask"][kind])
        if self.live is not None:
            mask = inputs["attention_mask"]
            self.live[:, : mask.shape[1]].copy_(mask)
            if mask.shape[1] < self.width:  # another prompt
                self.live[:, mask.shape[1] :] = False
            self.width = mask.shape[1]

    def body(self, model: hf.PreTrainedModel, storage: Storage) -> Callable[[], Any]:
        """One step over the graph's own tensors, which is run once as a warm-up and then captured."""
        static: Inputs = {**self.constants, **self.tensors}
        if self.masks:
            static["attention_mask"] = self.masks
        if self.live is not None:
            static["attention_mask"] = self.live

        def step() -> Any:
            cache = self.around(storage)
            with cache.on_device():
                inputs = {**static, "past_key_values": cache}
                if self.takes_mask and "attention_mask" not in static:
                    # Built in the graph from the count on the device. Some models count tokens on the host if they get no mask.
                    inputs["attention_mask"] = hf.decode_mask(model, {**inputs, "attention_mask": None})
                outputs = model(**inputs)
                storage.step()
            return outputs

        return step

    def output(self, logits: torch.Tensor, cache: StoredCache) -> Any:
        """The output of a step, in the model's own type."""
        return self.output_type(logits=logits, **({"past_key_values": cache} if self.returns_cache else {}))


def grows(mask: object) -> TypeGuard[torch.Tensor]:
    """Whether this is a mask of generate(), (rows, tokens so far), which grows with every token."""
    return isinstance(mask, torch.Tensor) and mask.dim() == 2


def _like(value: torch.Tensor) -> torch.Tensor:
    # A normal tensor, because the next generate() may run outside of inference mode.
    with torch.inference_mode(False):
        return torch.empty_like(value, memory_format=torch.contiguous_format)
