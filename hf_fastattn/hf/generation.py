"""The methods of generate() that patch() replaces on an instance: their names, and the versions in a model's class."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from functools import cache
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

PREPARE_CACHE = "_prepare_cache_for_generation"  # adds a cache to the arguments of a call
WANTS_COMPILE = "_valid_auto_compile_criteria"  # whether the decode loop calls the result of COMPILED_CALL
COMPILED_CALL = "get_compiled_call"  # returns the function that the decode loop calls instead of the model
PREPARE_INPUTS = "prepare_inputs_for_generation"  # returns the arguments of one step
_BASES = {PREPARE_CACHE: GenerationMixin, WANTS_COMPILE: GenerationMixin, COMPILED_CALL: PreTrainedModel}


def stock(model: PreTrainedModel, name: str) -> Callable[..., Any]:
    """A method of the model's class, ignoring attributes of the instance."""
    return types.MethodType(getattr(type(model), name), model)


def overrides_generation(model: PreTrainedModel) -> str | None:
    """The first method that patch() replaces and that this model's class overrides, or None."""
    return next((name for name, base in _BASES.items() if getattr(type(model), name) is not getattr(base, name)), None)


def generates_by_another(model: PreTrainedModel) -> str | None:
    """The part of the model whose generate() the model's own generate() calls (BLIP-2), or None."""
    own = getattr(type(model), "generate", None)
    if own is None or own is GenerationMixin.generate:
        return None
    try:
        found = re.search(r"self\.(\w+)\.generate\(", inspect.getsource(inspect.unwrap(own)))
    except (OSError, TypeError):
        return None
    return found and found.group(1)


@cache
def bookkeeping() -> frozenset[str]:
    """Attributes of a model instance that generate() reads but forward() does not."""
    own = {name for name in vars(PreTrainedModel) if name.startswith("_")} | set(vars(GenerationMixin))
    return frozenset(own | {"generation_config", "all_tied_weights_keys", COMPILED_CALL})
