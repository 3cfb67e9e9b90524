"""The hooks around a patched model's forward, which begin and end a step for the caches of the package."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .. import hf, registry
from ..attention import step as steps
from ..streaming import refresh
from .pool import Pool
from .stored import Arguments, StoredCache


class TrainingBegins:
    """A forward pre-hook: a training step frees the idle K and V of a pool. A copy has none until free_for_training()."""

    def __init__(self) -> None:
        self.pool: Callable[[], Pool | None] = lambda: None

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        if not isinstance(hf.cache_in(kwargs), StoredCache) and (pool := self.pool()) is not None:
            pool.free_for_training()

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainingBegins, ()


def free_for_training(model: hf.PreTrainedModel, pool: Pool) -> None:
    """Let training steps of this model, or of its part without the head, free the idle K and V of `pool`."""
    for module in {model, model.base_model}:
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, TrainingBegins):
                hook.pool = weakref.ref(pool)


def add_hooks(model: hf.PreTrainedModel) -> None:
    """Begin and end a step around each forward of this model."""
    for module in {model, model.base_model}:
        module.register_forward_pre_hook(TrainingBegins(), with_kwargs=True)
    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, always_call=True)


def remove_hooks(model: hf.PreTrainedModel) -> None:
    """Remove the hooks, also on a copy of the model."""
    for module in {model, model.base_model}:
        options = module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs, module._forward_hooks_always_called
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if is_ours(hook)]:
                del hooks[key]
                for of_keys in options:  # a key is that of one hook
                    of_keys.pop(key, None)


def has_hooks(model: torch.nn.Module) -> bool:
    return before in model._forward_pre_hooks.values()


def is_ours(hook: object) -> bool:
    return hook is before or hook is after or isinstance(hook, TrainingBegins)


def streams(model: hf.PreTrainedModel) -> bool:
    """Whether a model runs a streaming backend now."""
    name = model.config._attn_implementation
    return name in registry.names() and registry.get(name).streaming


def before(model: hf.PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
    """The forward pre-hook. A StoredCache counts the new tokens and may replace the model's arguments."""
    positional = len(args) > 1 and not torch.compiler.is_compiling()
    named = {**hf.by_name(model.forward, args), **kwargs} if positional else kwargs
    cache = hf.cache_in(named)
    if not torch.compiler.is_compiling():
        abandon(model)
        if streams(model):
            refresh(model)
    if not isinstance(cache, StoredCache):
        return None
    step = steps.begin(cache.storage, model=model)
    step.cache = weakref.ref(cache)
    if named is not kwargs and len(named) == len(args) + len(kwargs):  # else the forward raises
        args, kwargs = (), named
    return cache.begin(step, model, args, kwargs) or (args, kwargs)


def after(model: torch.nn.Module, args: tuple[Any, ...], output: object) -> Any:
    """The forward hook, which is also called, without an output, if the forward raises. A StoredCache may replace the output."""
    if (step := steps.of_model(model)) is None:
        return None
    steps.end(step)
    cache = step.cache()
    return None if cache is None else cache.end(step, output)


def abandon(model: torch.nn.Module) -> None:
    """End the steps of forwards of this model whose hook was not called (KeyboardInterrupt)."""
    while (step := steps.of_model(model)) is not None:
        steps.end(step)
        if (storage := step.storage) is not None:
            storage.interrupt(step.seen)
