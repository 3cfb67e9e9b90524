"""The rope_type longrope (Phi-3 and Phi-4, for example), whose frequencies depend on the length of the text, in decode graphs.

Transformers chooses one of two constant tables in each forward() and stores it. Old versions choose on the host, which a
graph cannot do. In a graph the same tables are chosen on the device, and nothing is stored.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, modeling_rope_utils

from .llama import module_of

KIND = "longrope"
_UPDATES = [code for code in modeling_rope_utils.dynamic_rope_update.__code__.co_consts if isinstance(code, types.CodeType)]
_IN_PLACE = any("copy_" in code.co_names for code in _UPDATES)  # whether a table takes the dtype of the buffer


class Tables(NamedTuple):
    """The frequencies of texts of at most `limit` tokens, and of longer ones; name: of the buffer."""

    name: str
    limit: int
    short: torch.Tensor
    long: torch.Tensor


Rotary = tuple[Any, dict[str | None, Tables]]  # a rotary embedding, and its tables for each type of layer


def rope_types(module: torch.nn.Module) -> dict[str | None, object]:
    """The rope_type of a rotary embedding for each type of layer; of None if it is the same for all."""
    kinds = getattr(module, "rope_type", None)
    return dict(kinds) if isinstance(kinds, dict) else {None: kinds}


def longropes_in(model: PreTrainedModel) -> list[Rotary]:
    """The rotary embeddings of this kind, unless they have code of their own."""
    found = ((module, _choosing_layers(module)) for module in model.modules())
    return [(module, {layer: _tables(module, layer) for layer in layers}) for module, layers in found if layers]


def replaced_in_forward(module: torch.nn.Module) -> frozenset[str]:
    """The buffers and attributes of a module that its forward() replaces before it reads them."""
    if _IN_PLACE or "rope_type" not in vars(module):
        return frozenset()
    return frozenset(f"{_prefix(layer)}{name}" for layer in _choosing_layers(module) for name in ("inv_freq", "long_inv_freq"))


def _choosing_layers(module: torch.nn.Module) -> list[str | None]:
    """The types of layers for which forward() of a rotary embedding chooses its table."""
    found = [layer for layer, kind in rope_types(module).items() if kind == KIND]
    return found if found and "forward" not in vars(module) and _is_updated(type(module)) else []


def _is_updated(cls: type) -> bool:
    """Whether forward() of a rotary embedding is wrapped by Transformers' `dynamic_rope_update`."""
    function: object = getattr(cls, "forward", None)
    while isinstance(function, types.FunctionType):
        if module_of(function) == modeling_rope_utils.__name__:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _tables(module: Any, layer: str | None) -> Tables:
    prefix = _prefix(layer)
    config, short = module.config, getattr(module, f"{prefix}original_inv_freq")
    rope = config.rope_parameters if layer is None else config.rope_parameters[layer]
    limit = rope["original_max_position_embeddings"]
    long = getattr(module, f"{prefix}long_inv_freq", None) if _IN_PLACE else None  # old versions compute it in each forward()
    if long is None:
        long, _ = modeling_rope_utils.ROPE_INIT_FUNCTIONS[KIND](config, short.device, seq_len=limit + 1, layer_type=layer)
    return Tables(f"{prefix}inv_freq", limit, short, long.to(short.device))


def _prefix(layer: str | None) -> str:
    """Of the names of the tables of a type of layer."""
    return "" if layer is None else f"{layer}_"


@contextmanager
def chosen_on_device(rotaries: list[Rotary]) -> Iterator[None]:
    """A context in which these rotary embeddings choose their tables on the device."""
    try:
        for module, tables in rotaries:
            module.forward = _choosing(module, tables)
        yield
    finally:
        for module, _ in rotaries:
            if "forward" in vars(module):
                del module.forward


def _choosing(module: Any, tables: dict[str | None, Tables]) -> Callable[..., object]:
    def forward(x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> object:
        given = () if layer_type is None else (layer_type,)
        state = {name: getattr(module, name) for name in vars(module) if name != "forward"}
        if layer_type in tables:
            name, limit, short, long = tables[layer_type]
            table = torch.where(position_ids.max() + 1 > limit, long, short)
            buffers, kinds = state["_buffers"], state["rope_type"]
            state["_buffers"] = {**buffers, name: table.to(buffers[name].dtype) if _IN_PLACE else table}
            # With another rope_type it has nothing to choose.
            state["rope_type"] = "default" if layer_type is None else {**kinds, layer_type: "default"}
        copied = object.__new__(type(module))  # as other threads may run the module
        vars(copied).update(state)
        return type(module).forward(copied, x, position_ids, *given)

    return forward
