"""Finds out how the layers that read a model's text rotate queries and keys.

Kernels re-rotate the query that scores the sinks. This is correct only if the queries and keys of a layer are R(position) x,
where R is a rotation that the kernels support and is applied last, or if they do not depend on the position. No configuration and
no class states this, so examine() runs the code of every layer, up to its queries and keys, at several positions, and recognises
the rotation from its effect on one hidden state.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch

from .. import hf
from .settings import Settings

NEAR = (0, 1, 2, 3, 5, 7, 13)  # positions that every model supports
INV_FREQ = "_hf_fastattn_inv_freq"  # attribute of an attention module; during the probe a list to which rotation() appends
_INTERLEAVED = "_hf_fastattn_interleaved"  # attribute of an attention module
_WATCHED = "_hf_fastattn_rotary"  # attribute of a model: the location and the state of its frequencies at examine()
_UNKNOWN: Any = object()
_FAR = (101, 1009, 2999, 1 << 20)
_NOTHING = torch.nn.Identity()
_lock = threading.RLock()
EXACT = 4096  # beyond this position angles in fp32 are too inexact, and only norms are compared
Layers = dict[torch.nn.Module, torch.nn.Module]  # the layers of a decoder by their self-attention modules
Forwards = Mapping[torch.nn.Module, Callable[..., object]]  # for layers
Entry = tuple[dict[str, Any], str, Any]  # a dict, a key and a value
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
    with _lock, torch.no_grad(), _changed([(vars(module), "training", False) for module in model.modules()]):
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
    return len(vars(model).get(_WATCHED, ())) > 0  # torch.compile of 2.11 knows no bool() of a list


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
    seen = queries_and_keys(decoder, layers, positions.to(device))
    rotations = {}
    for module in layers:
        found = recognise(seen.get(module), twice, frequencies)
        if found is None:
            raise ValueError(
                f"{name} cannot stream: its layer {module.layer_idx} rotates queries and keys in a way that streaming does not "
                "support (scaled after it, by a norm or by the position, for example). Use another backend for it."
            )
        rotations[module] = found.for_kernels(seen[module].query.device)
    return learned, rotations


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


# ---- a run of the layers up to their attention ----


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


def queries_and_keys(decoder: hf.PreTrainedModel, layers: Layers, positions: torch.Tensor) -> dict[torch.nn.Module, States]:
    """The queries and keys of each attention module at `positions`, twice.

    First without a cache, then with a cache that reports many tokens and, like a ring, returns tokens in another order: code that
    runs after the cache must not depend on slots. Modules that are not reached are missing in the result.
    """
    without, long = (_run_layers(decoder, layers, positions, past) for past in (None, hf.LongPast()))
    return {
        module: States(*(torch.cat(pair, 2) for pair in zip(without[module], long[module], strict=True)))
        for module in without
        if module in long
    }


def _run_layers(
    decoder: hf.PreTrainedModel, layers: Layers, positions: torch.Tensor, past: hf.LongPast | None
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
                with _changed([(vars(module), INV_FREQ, found), *_norms(module)]), contextlib.suppress(Seen):
                    forward(states, *args, **kwargs)
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
    forwards = [(vars(layer), "forward", forward) for layer, forward in replacements.items()]
    with _changed(forwards), contextlib.suppress(_Done):
        hf.run_text(decoder, positions.expand(2, -1), past)


@contextlib.contextmanager
def _changed(entries: list[Entry]) -> Iterator[None]:
    """A context in which dicts have these entries."""
    had = [(where, name, where.get(name, _UNKNOWN)) for where, name, _ in entries]
    try:
        for where, name, value in entries:
            where[name] = value
        yield
    finally:
        for where, name, value in had:
            if value is _UNKNOWN:
                where.pop(name, None)
            else:
                where[name] = value


def _norms(module: torch.nn.Module) -> Iterator[Entry]:
    """Weights plus noise for the norms inside an attention module, so that the result does not depend on special weights."""
    for norm in module.modules():
        for name, weight in norm._parameters.items() if "Norm" in type(norm).__name__ else ():
            if weight is not None and weight.device.type != "meta":
                noise = torch.rand(weight.shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu") - 0.5
                changed = weight + noise.to(weight.device, weight.dtype)
                yield norm._parameters, name, torch.nn.Parameter(changed, requires_grad=False)


# ---- the rotation that a run shows ----


class States(NamedTuple):
    """Queries and keys of an attention module, (rows, heads, positions, head_dim), for the same hidden state at all positions."""

    query: torch.Tensor
    key: torch.Tensor


class Rotation(NamedTuple):
    """A rotation of queries and keys: frequencies (None: no rotation), the layout of pairs, the first rotated dimension."""

    inv_freq: torch.Tensor | None = None
    interleaved: bool = False
    first: int = 0

    def matches(self, x: torch.Tensor, positions: torch.Tensor) -> bool:
        """Whether x, (rows, heads, positions, head_dim), is, up to rounding in its dtype, this rotation of x at position 0."""
        unit = torch.finfo(x.dtype).eps / 2
        x = x.detach().to("cpu", torch.float64)
        origin, norm = x[:, :, :1], x[:, :, :1].norm(dim=-1)
        rotated = origin.expand_as(x).clone()
        if self.inv_freq is not None:
            pairs = len(self.inv_freq)
            angle = (positions[:, None].float() * self.inv_freq.detach().to("cpu", torch.float32)).double()
            cos, sin = angle.cos(), angle.sin()
            dims = torch.arange(2 * pairs, device="cpu") + self.first
            first, second = (dims[0::2], dims[1::2]) if self.interleaved else (dims[:pairs], dims[pairs:])
            a, b = origin[..., first], origin[..., second]
            rotated[..., first], rotated[..., second] = a * cos - b * sin, b * cos + a * sin
        near = positions <= EXACT
        allowed = (8 * unit + 1e-4 + positions[near] * 2.0**-22) * norm
        error = (x - rotated)[:, :, near].norm(dim=-1)
        same = (x.norm(dim=-1) - norm).abs() <= (8 * unit + 1e-4) * norm  # also at far positions
        return bool(norm.min() > 0 and (error <= allowed).all() and same.all())

    def for_kernels(self, device: torch.device) -> tuple[torch.Tensor | None, bool]:
        """(inv_freq, interleaved), with the frequencies of all pairs from dimension 0 on.

        The result is the model's own tensor if possible, so that later writes to it take effect.
        """
        inv_freq = self.inv_freq
        if inv_freq is None or (
            self.first == 0 and inv_freq.dtype == torch.float32 and inv_freq.device == device and inv_freq.is_contiguous()
        ):
            return inv_freq, self.interleaved
        with torch.inference_mode(False):
            fixed = torch.zeros(self.first // 2, device=device)
            return torch.cat([fixed, inv_freq.to(device, torch.float32)]), self.interleaved


def recognise(seen: States | None, positions: torch.Tensor, candidates: list[torch.Tensor]) -> Rotation | None:
    """The rotation of both queries and keys, by one of the frequencies in `candidates` or by none; None if none matches."""
    if seen is None:  # a run over a few tokens of text does not reach the layer
        return None
    head_dim = seen.query.shape[3]
    rotations = [Rotation()]
    for inv_freq in candidates:
        unrotated = head_dim - 2 * len(inv_freq)
        if unrotated >= 0:
            rotations += [Rotation(inv_freq), Rotation(inv_freq, True), Rotation(inv_freq, True, unrotated)]
    return next((rotation for rotation in rotations if all(rotation.matches(x, positions) for x in seen)), None)
