"""Separate configurations for a patched model: models created from one configuration object share it, with its attention."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import torch

from .. import hf
from ..streaming import Settings


class _Place(NamedTuple):
    """An attribute of a module that holds a configuration: the original, and our copy."""

    module: weakref.ref[torch.nn.Module]
    name: str
    theirs: hf.PreTrainedConfig
    ours: hf.PreTrainedConfig


class _Copy(NamedTuple):
    """A configuration, our copy of it, and the attributes of the copy when it was created."""

    theirs: hf.PreTrainedConfig
    ours: hf.PreTrainedConfig
    before: dict[str, Any]


class OwnConfigs:
    """Replaces the configurations of a model by copies, and restores them."""

    def __init__(self) -> None:
        self._places: list[_Place] = []
        self._copies: dict[int, _Copy] = {}  # by the id of our copy

    def give(self, model: hf.PreTrainedModel, streaming: Settings | None) -> None:
        """Give a model copies of its configurations. The copy for its text gets the settings of a streaming backend."""
        memo: dict[int, Any] = {}
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, hf.PreTrainedConfig):
                    self._places.append(_Place(weakref.ref(module), name, value, copy.deepcopy(value, memo)))
        for place in self._places:
            vars(place.module())[place.name] = place.ours
        if streaming is not None:
            streaming.write(model.config.get_text_config(decoder=True))
        for place in self._places:
            for theirs, ours in _pairs(place.theirs, place.ours):
                self._copies.setdefault(id(ours), _Copy(theirs, ours, _plain(ours)))

    def restore(self, model: torch.nn.Module) -> None:
        """Restore the configurations of the modules, and copy to them the attributes that others have since set on the copies."""
        for place in self._places:
            module = place.module()
            if module is not None and vars(module).get(place.name) is place.ours:
                vars(module)[place.name] = place.theirs
        for module in model.modules():  # a module added since may share a copy
            for name, value in list(vars(module).items()):
                if id(value) in self._copies:
                    vars(module)[name] = self._copies[id(value)].theirs
        for theirs, ours, before in self._copies.values():
            now = _plain(ours)
            for key in before.keys() | now.keys():
                if key not in now:
                    vars(theirs).pop(key, None)
                elif (key not in before or before[key] != now[key]) and key != "_attn_implementation_internal":
                    vars(theirs)[key] = now[key]
        self._places.clear()
        self._copies.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = type(self)()
        twin._places = [
            _Place(weakref.ref(copy.deepcopy(module, memo)), name, copy.deepcopy(theirs, memo), copy.deepcopy(ours, memo))
            for place, name, theirs, ours in self._places
            if (module := place()) is not None
        ]
        for theirs, ours, before in self._copies.values():
            ours = copy.deepcopy(ours, memo)
            twin._copies[id(ours)] = _Copy(copy.deepcopy(theirs, memo), ours, copy.deepcopy(before))
        return twin


def _pairs(theirs: hf.PreTrainedConfig, ours: hf.PreTrainedConfig) -> Iterator[tuple[hf.PreTrainedConfig, hf.PreTrainedConfig]]:
    """A configuration and its copy, then the same for the configurations that it contains."""
    yield theirs, ours
    for name, value in vars(theirs).items():
        if isinstance(value, hf.PreTrainedConfig):
            yield from _pairs(value, vars(ours)[name])


def _plain(config: hf.PreTrainedConfig) -> dict[str, Any]:
    """A copy of a configuration's attributes, except those that are configurations."""
    return copy.deepcopy({name: v for name, v in vars(config).items() if not isinstance(v, hf.PreTrainedConfig)})
