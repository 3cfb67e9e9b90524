"""The layers of a model run up to their attention, on a few tokens at chosen positions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

import torch

from .. import hf
from .turns import States

NEAR = (0, 1, 2, 3, 5, 7, 13)  # positions that any model has
INV_FREQ = "_hf_fastattn_inv_freq"  # of an attention module; while the probe runs it, a list for rotation() to append to
_MISSING = object()

Layers = dict[torch.nn.Module, torch.nn.Module]  # the layers of a decoder by their self-attention modules
Change = Callable[[torch.Tensor], torch.Tensor]


class Seen(BaseException):
    """Stops a probe run after the layer's queries and keys were recorded; no model catches this."""


class _Done(BaseException):
    """So has everything."""


def adds_positions(decoder: hf.PreTrainedModel, layers: Layers, device: torch.device) -> bool:
    """Whether equal tokens reach the first layer as different ones."""
    found: list[torch.Tensor] = []

    def look(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> NoReturn:
        found.append((hidden_states - hidden_states[:, :1]).abs().max() > 1e-3 * hidden_states.abs().max())
        raise _Done

    _run(decoder, dict.fromkeys(layers.values(), look), torch.tensor(NEAR, device=device))
    if not found:
        raise RuntimeError("none of its layers ran")
    return bool(found[0])


def queries_and_keys(
    decoder: hf.PreTrainedModel, layers: Layers, positions: torch.Tensor, change: Change
) -> dict[torch.nn.Module, States]:
    """Each attention module's queries and keys at `positions`, twice.

    Once without a cache, and once with one that is said to be long and, like a ring, has tokens in another order: what is done
    to keys behind it may not ask for a slot. change: what is done meanwhile to the weights of the module's norms. A module that
    is not reached is missing.
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
    generator = torch.Generator().manual_seed(0)

    def stand_in(layer: torch.nn.Module, forward: Callable[..., object]) -> Callable[..., torch.Tensor]:
        def run(hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            states = torch.randn(2, 1, hidden_states.shape[-1], generator=generator).expand(-1, len(positions), -1)
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

    _run(decoder, {layer: stand_in(layer, layer.forward) for layer in waiting}, positions, past)
    return seen


def _run(
    decoder: hf.PreTrainedModel,
    stand_ins: Mapping[torch.nn.Module, Callable[..., object]],
    positions: torch.Tensor,
    past: hf.LongPast | None = None,
) -> None:
    """Run a decoder on two rows of equal tokens at `positions`, with other code for its layers, until that raises _Done."""
    had = {layer: vars(layer).get("forward", _MISSING) for layer in stand_ins}
    try:
        for layer, forward in stand_ins.items():
            vars(layer)["forward"] = forward
        with contextlib.suppress(_Done):
            hf.run_text(decoder, positions.expand(2, -1), past)
    finally:
        for layer, forward in had.items():
            if forward is _MISSING:
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
    """Other weights for the norms inside an attention module: what holds for some only, of one value say, does not count."""
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


def stirred(weight: torch.Tensor) -> torch.Tensor:
    """Weights that are all different."""
    noise = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) - 0.5
    return weight + noise.to(weight.device, weight.dtype)
