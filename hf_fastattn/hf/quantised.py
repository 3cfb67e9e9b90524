"""Quantised weights: the layers that hold them, which run kernels of other packages, and the memory that they take.

Such a weight is a tensor of another package's class (bitsandbytes, torchao), or a plain tensor of integers or of 8-bit floats in
a layer that unpacks it (GPTQ, AWQ, Transformers' own integrations).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_PACKED = {torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2}
_INTEGRATIONS = "transformers.integrations."  # layers that a quantiser of Transformers puts into a model
_PLAIN = ("torch.", "transformers.models.")  # layers whose integers are indices and masks


@dataclass(frozen=True, eq=False)
class Weights:
    """The parameters of one module. bytes: of the tensors that store them. count: before they were quantised, if that is known.

    kind: package and class of what is quantised, None for plain parameters.
    """

    path: str
    module: torch.nn.Module
    bytes: int
    count: int
    kind: str | None

    @property
    def of_experts(self) -> bool:
        """Whether each token chooses some of these parameters."""
        return ".experts." in f"{self.path}." or type(self.module).__name__.endswith("Experts")


def quantised_as(module: torch.nn.Module) -> str | None:
    """Package and class of a module's quantised weights, or None."""
    cls = type(module)
    unpacks = not cls.__module__.startswith(_PLAIN)
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is None:
            continue
        foreign = _package(type(tensor)) != "torch"
        if foreign and _package(cls) == "torch":
            return f"{_package(type(tensor))} {type(tensor).__name__}"
        if foreign or (unpacks and tensor.dim() > 1 and tensor.dtype in _PACKED):
            return f"{_package(cls)} {cls.__name__}"
    return f"{_package(cls)} {cls.__name__}" if cls.__module__.startswith(_INTEGRATIONS) and not module._modules else None


def weights(model: torch.nn.Module) -> list[Weights]:
    """The Weights of each module that has parameters of its own or quantised weights. Shared parameters count once."""
    found: list[Weights] = []
    seen: set[object] = set()
    for path, module in model.named_modules():
        kind = quantised_as(module)
        own = [p for p in module._parameters.values() if p is not None and id(p) not in seen]
        seen.update(map(id, own))
        if kind is not None:
            stored = {_key(tensor): tensor.nbytes for tensor in _tensors(vars(module), 6)}
            new = stored.keys() - seen
            seen |= new
            found.append(Weights(path, module, sum(stored[key] for key in new), _count(module), kind))
        elif own:
            found.append(Weights(path, module, sum(p.nbytes for p in own), sum(p.numel() for p in own), None))
    return found


def unpacked(model: torch.nn.Module) -> str | None:
    """Why linear layers of compressed-tensors are not replaced, and read more than their checkpoint, or None without any."""
    layers = sum("quantization_scheme" in vars(module) for module in model.modules() if isinstance(module, torch.nn.Linear))
    if not layers:
        return None
    return f"compressed-tensors unpacks the weights of {layers} layers to 16 bits at the first forward and runs its own code"


def scales_by_tensor(model: torch.nn.Module) -> bool:
    """Whether a layer computes one scale for the inputs of all tokens (torchao), so that each depends on all others."""
    for weight in model.parameters():
        how = getattr(weight, "act_quant_kwargs", None)
        computed = getattr(weight, "act_quant_scale", None) is None
        if computed and type(getattr(how, "granularity", None)).__name__ == "PerTensor":
            return True
    return False


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _key(tensor: torch.Tensor) -> object:
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """The plain tensors that a value consists of: of a subclass, the tensors inside, and of other objects, their attributes."""
    if isinstance(value, (torch.nn.Module, type)) or depth == 0:
        return
    if hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _tensors(getattr(value, name), depth - 1)
        return
    if isinstance(value, torch.Tensor):
        yield value
    inner = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    for item in list(inner.values()):
        yield from _tensors(item, depth - 1)


def _count(module: Any) -> int:
    """The number of a module's parameters before they were quantised; without features, the number of stored values."""
    features: list[Any] = [getattr(module, name, None) for name in ("in_features", "out_features")]
    bias = getattr(module, "bias", None)
    if all(isinstance(n, int) for n in features):
        return int(math.prod(features)) + (bias.numel() if isinstance(bias, torch.Tensor) else 0)
    return sum(p.numel() for p in module._parameters.values() if p is not None)
