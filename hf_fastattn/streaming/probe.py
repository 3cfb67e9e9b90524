"""Runs the layers of a model up to their attention, on a few tokens at chosen positions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from .. import hf
from .recognise import States

NEAR = (0, 1, 2, 3, 5, 7, 13)  # positions that every model supports
INV_FREQ = "_hf_fastattn_inv_freq"  # attribute of an attention module; during the probe a list to which rotation() appends

Layers = dict[torch.nn.Module, torch.nn.Module]  # the layers of a decoder by their self-attention modules
Forwards = Mapping[torch.nn.Module, Callable[..., object]]  # for layers
Change = Callable[[torch.Tensor], torch.Tensor]


class Seen(BaseException):
    """Stops the run of a layer after its queries and keys are recorded. A BaseException, so that no model catches it."""


class _Done(BaseException):
    """Stops the probe after all layers."""


def adds_positions(decoder: hf.PreTrainedModel, layers: Layers, device: torch.device) -> bool:
    """Whether equal tokens have different hidden states at the first layer."""
    found: list[torch.Tensor] = []

    def compare(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> NoReturn:
        found.append((hidden_states - hidden_states[:, :1]).abs().max() > 1e-3 * hidden_states.abs().max())
        raise _Done

    _run(decoder, dict.fromkeys(layers.values(), compare), torch.tensor(NEAR, device=device), None)
    if not found:
        raise RuntimeError("none of its layers ran")
    return bool(found[0])


def queries_and_keys(
    decoder: hf.PreTrainedModel, layers: Layers, positions: torch.Tensor, change: Change
) -> dict[torch.nn.Module, States]:
    """The queries and keys of each attention module at `positions`, twice.

    First without a cache, then with a cache that reports many tokens and, like a ring, returns tokens in another order: code that
    runs after the cache must not depend on slots. change: applied to the weights of the module's norms during the run. Modules
    that are not reached are missing in the result.
    """
    without, long = (_run_layers(decoder, layers, positions, change, past) for past in (None, hf.LongPast()))
    return {
        module: States(*(torch.cat(pair, 2) for pair in zip(without[module], long[module], strict=True)))
        for module in without
        if module in long
    }


def _run_layers(
    decoder: hf.PreTrainedModel, layers: Layers, positions: torch.Tensor, change: Change, past: hf.LongPast | None
) -> dict[torch.nn.Module, States]:
    seen: dict[torch.nn.Module, States] = {}
    waiting = set(layers.values())
    generator = torch.Generator("cpu").manual_seed(0)

    def replacement(layer: torch.nn.Module, forward: Callable[..., object]) -> Callable[..., torch.Tensor]:
        def run(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            states = torch.randn(2, 1, hidden_states.shape[-1], generator=generator, device="cpu").expand(-1, len(positions), -1)
            states = states.to(hidden_states.device, hidden_states.dtype)
            for module in (module for module, around in layers.items() if around is layer):
                found: list[States] = []
                vars(module)[INV_FREQ] = found
                try:
                    with _norms(module, change), contextlib.suppress(Seen):
                        forward(states, *args, **kwargs)
                finally:
                    del vars(module)[INV_FREQ]
                if found:
                    query, key = found[0]
                    seen[module] = States(query, key if past is None else key.flip(2))
            waiting.discard(layer)
            if not waiting:
                raise _Done
            return states

        return run

    _run(decoder, {layer: replacement(layer, layer.forward) for layer in waiting}, positions, past)
    return seen


def _run(decoder: hf.PreTrainedModel, replacements: Forwards, positions: torch.Tensor, past: hf.LongPast | None) -> None:
    """Run a decoder on two rows of equal tokens at `positions` with replaced layers, until a replacement raises _Done."""
    had: dict[torch.nn.Module, Any] = {layer: vars(layer).get("forward") for layer in replacements}
    try:
        for layer, forward in replacements.items():
            vars(layer)["forward"] = forward
        with contextlib.suppress(_Done):
            hf.run_text(decoder, positions.expand(2, -1), past)
    finally:
        for layer, forward in had.items():
            if forward is None:
                vars(layer).pop("forward", None)
            else:
                vars(layer)["forward"] = forward


@contextlib.contextmanager
def in_eval_mode(model: torch.nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def _norms(module: torch.nn.Module, change: Change) -> Iterator[None]:
    """Changes the weights of the norms inside an attention module, so that the result does not depend on special weights."""
    had = [
        (norm, name, weight)
        for norm in module.modules()
        if "Norm" in type(norm).__name__
        for name, weight in norm._parameters.items()
        if weight is not None and weight.device.type != "meta"
    ]
    try:
        for norm, name, weight in had:
            norm._parameters[name] = torch.nn.Parameter(change(weight), requires_grad=False)
        yield
    finally:
        for norm, name, weight in had:
            norm._parameters[name] = weight


def perturbed(weight: torch.Tensor) -> torch.Tensor:
    """The weight plus noise, so that all its elements differ."""
    noise = torch.rand(weight.shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu") - 0.5
    return weight + noise.to(weight.device, weight.dtype)
