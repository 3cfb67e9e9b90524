"""Separate configurations for a patched model: models created from one configuration object share it, with its attention."""

from __future__ import annotations

import copy
import weakref
from typing import Any, NamedTuple, Self

import torch

from .. import hf
from ..streaming import Settings


class _Copy(NamedTuple):
    """A configuration, our copy of it, and the attributes of the copy when it was created."""

    theirs: hf.PreTrainedConfig
    ours: hf.PreTrainedConfig
    before: dict[str, Any]


class OwnConfigs:
    """Replaces the configurations of a model by copies, and restores them."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[torch.nn.Module]] = []  # which were given copies
        self._copies: dict[int, _Copy] = {}  # by the id of our copy

    def give(self, model: hf.PreTrainedModel, streaming: Settings | None) -> None:
        """Give a model copies of its configurations. The copy for its text gets the settings of a streaming backend."""
        held = [(module, *each) for module in model.modules() for each in vars(module).items() if _is_config(each[1])]
        memo: dict[int, Any] = {}
        pairs = [(theirs, copy.deepcopy(theirs, memo)) for *_, theirs in held]
        for (module, name, _), (_, ours) in zip(held, pairs, strict=True):
            vars(module)[name] = ours
        if streaming is not None:
            streaming.write(model.config.get_text_config(decoder=True))
        self._modules = [weakref.ref(module) for module, *_ in held]
        while pairs:
            theirs, ours = pairs.pop()
            if id(ours) not in self._copies:
                self._copies[id(ours)] = _Copy(theirs, ours, _plain(ours))
                pairs += [(value, vars(ours)[name]) for name, value in vars(theirs).items() if _is_config(value)]

    def restore(self, model: torch.nn.Module) -> None:
        """Restore the configurations of the modules, and copy to them the attributes that others have since set on the copies."""
        given = (module for ref in self._modules if (module := ref()) is not None)
        for module in {*given, *model.modules()}:  # a module added since may share a copy
            for name, value in vars(module).items():
                if id(value) in self._copies:
                    vars(module)[name] = self._copies[id(value)].theirs
        for theirs, ours, before in self._copies.values():
            now = _plain(ours)
            for key in before.keys() | now.keys():
                if key not in now:
                    vars(theirs).pop(key, None)
                elif (key not in before or before[key] != now[key]) and key != "_attn_implementation_internal":
                    vars(theirs)[key] = now[key]
        self._modules, self._copies = [], {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = memo[id(self)] = type(self)()
        twin._modules = [weakref.ref(copy.deepcopy(module, memo)) for ref in self._modules if (module := ref()) is not None]
        for each in self._copies.values():
            own = copy.deepcopy(each, memo)
            twin._copies[id(own.ours)] = own
        return twin


def _is_config(value: object) -> bool:
    return isinstance(value, hf.PreTrainedConfig)


def _plain(config: hf.PreTrainedConfig) -> dict[str, Any]:
    """A copy of a configuration's attributes, except those that are configurations."""
    return copy.deepcopy({name: v for name, v in vars(config).items() if not _is_config(v)})
