"""Finds out how the layers that read a model's text rotate queries and keys.

Kernels re-rotate the query that scores the sinks. This is correct only if the queries and keys of a layer are R(position) x,
where R is a rotation that the kernels support and is applied last, or if they do not depend on the position. No configuration and
no class states this, so examine() runs the code of every layer, up to its queries and keys, at several positions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from .. import hf
from .probe import INV_FREQ, NEAR, Layers, Seen, adds_positions, in_eval_mode, perturbed, queries_and_keys
from .recognise import States, recognise, why_not
from .settings import Settings

_INTERLEAVED = "_hf_fastattn_interleaved"  # attribute of an attention module
_WATCHED = "_hf_fastattn_rotary"  # attribute of a model: the location and the state of its frequencies at examine()
_UNKNOWN: Any = object()
_FAR = (101, 1009, 2999, 1 << 20)
_NOTHING = torch.nn.Identity()
_lock = threading.RLock()

KernelRotation = tuple[torch.Tensor | None, bool]  # the result of rotation()


def rotation(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor) -> KernelRotation:
    """(inv_freq, interleaved), with which kernels re-rotate the queries of an attention module; inv_freq is None for no rotation.

    Raises ValueError for a module that examine() has not examined.
    """
    inv_freq = getattr(module, INV_FREQ, _UNKNOWN)
    if inv_freq is _UNKNOWN:
        raise _NotExamined(
            f"A streaming backend must know how {type(module).__name__} rotates its queries and keys. "
            'hf_fastattn.patch(model, "streaming", window=4096, sinks=4) examines the layers that read a model\'s text, '
            "and with cache=None and graph=False leaves Transformers' cache in place. If the model is already patched, this "
            "layer is not one of them: use another backend."
        )
    if isinstance(inv_freq, list):  # examine() is running
        inv_freq.append(States(query, key))
        raise Seen
    return inv_freq, getattr(module, _INTERLEAVED)


def examine(model: hf.PreTrainedModel) -> None:
    """Find out how every layer that reads a model's text rotates its queries and keys, for rotation().

    The model must run a streaming backend, with Settings in its config. Each layer runs up to its attention on a few tokens.
    Raises ValueError, with the reason, if the positions of a layer cannot move with a window.
    """
    forget(model)
    with _lock, torch.no_grad(), in_eval_mode(model):
        decoder, layers = hf.text_layers(model)
        name = type(decoder.config).__name__.removesuffix("Config").removesuffix("Text")
        if not layers:
            raise ValueError(f"{name} cannot stream: no self-attention layers were found in it.")
        if kind := hf.changing_rope(decoder):
            raise ValueError(
                f"{name} has rope_type {kind!r}, whose frequencies change with the length of the text: keys rotated with old "
                "frequencies cannot be scored with new ones. Set a rope_type of fixed frequencies in its config (default, "
                "linear, llama3 or yarn)."
            )
        places = hf.rotary_buffers(model, decoder)
        try:
            learned, rotations = _find_rotations(name, decoder, layers, [tensor for *_, tensor in places])
        except _NotExamined:
            raise ValueError(f"{name} cannot stream: not all of its layers could be examined. Use another backend.") from None
        except (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"How {name} rotates queries and keys could not be found out: its code does not run on a few tokens by "
                "themselves. Use another backend."
            ) from error
        clamped = Settings.of(model.config.get_text_config(decoder=True)).clamped
        _check_positions(name, learned, any(inv_freq is not None for inv_freq, _ in rotations.values()), clamped)
        for module, (inv_freq, interleaved) in rotations.items():
            vars(module)[INV_FREQ], vars(module)[_INTERLEAVED] = inv_freq, interleaved
        vars(model)[_WATCHED] = [(*place, _version(place[-1])) for place in places]


def refresh(model: hf.PreTrainedModel) -> None:
    """Call examine() again if the model's frequencies were replaced, moved or written since. Does not access the device."""
    watched: Iterable[tuple[str, str, torch.Tensor, int]] = vars(model).get(_WATCHED, ())
    for path, name, tensor, version in watched:
        module: torch.nn.Module = model
        for part in path.split("."):  # ten times as fast as get_submodule(); this runs before every forward
            module = module._modules.get(part) or _NOTHING
        if module._buffers.get(name) is not tensor or _version(tensor) != version:
            examine(model)
            return


def has_frequencies(model: torch.nn.Module) -> bool:
    """Whether examine() has found buffers of frequencies, from which a rotation of any position is computed."""
    return bool(vars(model).get(_WATCHED))


def forget(model: torch.nn.Module) -> None:
    """Remove the attributes that examine() set."""
    for module in model.modules():
        for name in (INV_FREQ, _INTERLEAVED, _WATCHED):
            vars(module).pop(name, None)


def _check_positions(name: str, learned: bool, rotates: bool, clamped: bool) -> None:
    if learned and rotates:
        raise ValueError(
            f"{name} cannot stream: it has learned positions besides rotated ones. Use another backend for this model."
        )
    if learned and not clamped:
        raise ValueError(
            f"{name} has no rotary embedding, and learned positions cannot move with a window. "
            "hf_fastattn.patch(..., clamp_positions=True) gives every token beyond the last position the last position, an "
            "approximation."
        )
    if clamped and not learned:
        raise ValueError(f"clamp_positions=True is for models with learned positions, and {name} has none; leave it out.")


class _NotExamined(ValueError):
    """A layer runs that examine() has not examined."""


def _find_rotations(
    name: str, decoder: hf.PreTrainedModel, layers: Layers, frequencies: list[torch.Tensor]
) -> tuple[bool, dict[torch.nn.Module, KernelRotation]]:
    """(whether positions are added to the tokens, the result of rotation() for each module). frequencies: those of the decoder.

    Raises ValueError for the first module with a rotation that the kernels do not support.
    """
    device = frequencies[0].device if frequencies else decoder.device
    learned = adds_positions(decoder, layers, device)
    # A table of positions is finite, and a GPU that reads beyond its end cannot be used by this process any more.
    positions = torch.tensor(NEAR if learned or not frequencies else NEAR + _FAR, device="cpu")
    twice = positions.repeat(2)
    seen = queries_and_keys(decoder, layers, positions.to(device), perturbed)
    rotations = {}
    for module in layers:
        found = recognise(seen.get(module), twice, frequencies)
        if found is None:
            unscaled = queries_and_keys(decoder, layers, positions.to(device), torch.ones_like)
            reason = why_not(seen.get(module), unscaled.get(module), twice, frequencies)
            raise ValueError(f"{name} cannot stream: its layer {module.layer_idx} {reason}. Use another backend for it.")
        rotations[module] = found.for_kernels(seen[module].query.device)
    return learned, rotations


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
