"""Transformers' tensor parallelism: which ranks share a model, and what each of them holds."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .models import layer_shapes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MODULE = "transformers.distributed.tensor_parallel"  # the file of the forwards that shared layers get
_INNER = "original_forward"  # the name by which they call the layer's own
_KEYS = ("k_proj", "qkv_proj", "query_key_value")  # the layers of a plan that compute keys


def tensor_parallel_mesh(model: object) -> DeviceMesh | None:
    """The ranks that share this model by tensor parallelism, as a mesh of one dimension; None if it is on one rank."""
    mesh: DeviceMesh | None = getattr(model, "_device_mesh", None)
    if mesh is None or (getattr(model, "_tp_size", None) or 1) < 2:
        return None
    return mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh


def is_shared(model: PreTrainedModel | PreTrainedConfig) -> bool:
    """Whether ranks share this model, or the model of this configuration, by tensor parallelism."""
    config = model if isinstance(model, PreTrainedConfig) else model.config
    asked = getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1
    return asked > 1 or tensor_parallel_mesh(model) is not None


def local_kv_heads(model: PreTrainedModel) -> list[int]:
    """The number of KV heads of each layer on this rank. Raises ValueError if they cannot be divided among the ranks."""
    heads = [shape.num_kv_heads for shape in layer_shapes(model.config)]
    ranks = getattr(model, "_tp_size", None) or 1
    plan = getattr(model, "tp_plan", None) or {}
    if ranks < 2 or not any(name.rpartition(".")[2] in _KEYS and style == "colwise" for name, style in plan.items()):
        return heads  # every rank holds all of them
    if uneven := [count for count in heads if count % ranks]:
        raise ValueError(
            f"{type(model).__name__} has {uneven[0]} KV heads, which cannot be divided among {ranks} ranks. Use a number of "
            f"ranks that divides {uneven[0]}."
        )
    return [count // ranks for count in heads]


def _cell(forward: Any, name: str) -> Any:
    """The object that a forward() of tensor parallelism has under this name; None for other functions."""
    code = getattr(forward, "__code__", None)
    if code is None or forward.__module__ != _MODULE or name not in code.co_freevars:
        return None
    return forward.__closure__[code.co_freevars.index(name)].cell_contents


def inner_forward(module: torch.nn.Module) -> types.FunctionType | None:
    """The forward() of a shared layer's class, which computes with the tensors of this rank; None for other layers.

    Tensor parallelism gives such a layer an instance's own forward(), which communicates before or after it calls this one.
    """
    inner = _cell(vars(module).get("forward"), _INNER)
    own = isinstance(inner, types.MethodType) and inner.__self__ is module and inner.__func__ is type(module).forward
    return inner.__func__ if own else None


def with_inner(forward: types.FunctionType, inner: Callable[..., Any]) -> types.FunctionType:
    """The forward() of a shared layer, with another function in the place of `inner_forward`."""
    cells = zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True)
    closure = tuple(types.CellType(inner) if name == _INNER else cell for name, cell in cells)
    made = types.FunctionType(forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, closure)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def computes_part(module: torch.nn.Module) -> bool:
    """Whether a shared layer returns the product of its whole input and the part of the weight on this rank, and no more."""
    style = _cell(vars(module).get("forward"), "self")
    return (
        type(style).__name__ == "ColwiseParallel"
        and style.use_local_output
        and getattr(style.output_layouts, "dim", None) == -1
        and not getattr(module, "_hf_quantized_needs_local_tp", False)
    )


def local(tensor: Any) -> Any:
    """The part of a DTensor on this rank; other objects unchanged."""
    return tensor.to_local() if type(tensor).__name__ == "DTensor" else tensor
