"""What a model asks of a streaming backend, and how the queries that score its sinks are turned.

Every query sees the first `sinks` tokens of its row and the last `window`, itself included, at positions counted within those.
Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2024), section 3.2.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from . import hf


@dataclass(frozen=True)
class Settings:
    """How many tokens are kept; in a model's config the attributes streaming_window, streaming_sinks, streaming_clamped.

    clamped: positions are learned, and every token beyond the last position is given that one (an approximation).
    """

    window: int
    sinks: int = 4
    clamped: bool = False

    @classmethod
    def of(cls, config) -> Settings:
        """Those of a config, checked."""
        window = getattr(config, "streaming_window", None)
        if window is None:
            raise ValueError(
                'A streaming backend needs a window: use hf_fastattn.patch(model, "streaming", window=4096, sinks=4).'
            )
        settings = cls(window, getattr(config, "streaming_sinks", cls.sinks), getattr(config, "streaming_clamped", cls.clamped))
        settings.check(getattr(config, "max_position_embeddings", None))
        return settings

    @classmethod
    def asked(cls, name: str, window: int | None, sinks: int | None, limit: int | None, clamped: bool = False) -> Settings:
        """Those that a caller of backend `name` asks for, checked; the usual number of sinks where None."""
        if window is None:
            raise ValueError(f"{name!r} needs window=, the number of last tokens to keep, for example 4096.")
        settings = cls(window, cls.sinks if sinks is None else sinks, clamped)
        settings.check(limit)
        return settings

    def check(self, limit: int | None) -> None:
        """Raise ValueError for what is impossible; `limit`: the positions that the model was made for."""
        if not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window counts the last tokens that a query sees, itself included: at least 1; got {self.window}.")
        if not isinstance(self.sinks, int) or self.sinks < 0:
            raise ValueError(f"sinks is the number of first tokens to keep, at least 0; got {self.sinks}.")
        if limit is not None and self.sinks + self.window > limit:
            raise ValueError(
                f"{self.sinks} sinks and a window of {self.window} take {self.sinks + self.window} positions, and this model was "
                f"made for {limit} (max_position_embeddings). Ask for fewer."
            )

    def write(self, config) -> None:
        config.streaming_window, config.streaming_sinks, config.streaming_clamped = self.window, self.sinks, self.clamped


def check_mask(name: str, config, pattern: tuple[bool, int | None] | None, of_ring: bool) -> None:
    """Raise ValueError for what a model asks of a mask that a streaming backend cannot serve.

    pattern: (causal, window), or None where it is neither alone. of_ring: whether a RollingCache has made the mask.
    """
    if pattern is None:
        raise ValueError(
            f"This model asks for a mask that is not plainly causal (an image or a prefix whose tokens see one another, packed "
            f"sequences, chunks), and attn_implementation={name!r} cannot apply its window to that mask. "
            "Use another backend for such inputs."
        )
    causal, window = pattern
    if not causal:
        raise ValueError(f"attn_implementation={name!r} is for causal models; use another backend for this one.")
    if of_ring:
        return
    Settings.of(config)
    if window is not None:
        raise ValueError(
            f"This model has layers with a sliding window of their own ({window} tokens), whose cache drops the first tokens. "
            f"Use hf_fastattn.patch(model, {name!r}, ...), whose cache keeps them."
        )


# How layers rotate. Kernels turn the query that scores the sinks back, which is right only if a layer's queries and keys are
# R(position) x with the last thing done to them a rotation R that the kernels know, or do not depend on the position at all. No
# config and no class says so: examine() runs every layer's own code, up to its queries and keys, at several positions.

_INV_FREQ, _INTERLEAVED = "_hf_fastattn_inv_freq", "_hf_fastattn_interleaved"  # of an attention module
_WATCHED = "_hf_fastattn_rotary"  # of a model: where its frequencies were found, and their state then
_UNKNOWN = object()
_NEAR = (0, 1, 2, 3, 5, 7, 13)  # positions that any model has
_FAR = (101, 1009, 2999, 1 << 20)
_EXACT = 4096  # beyond this position an angle in fp32 says little, and lengths are compared alone
_NOTHING = torch.nn.Identity()
_lock = threading.RLock()


def rotation(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
    """(inv_freq, interleaved) by which kernels turn an attention module's queries; inv_freq is None where they turn nothing.

    Raises ValueError for a module that examine() has not seen.
    """
    inv_freq = getattr(module, _INV_FREQ, _UNKNOWN)
    if inv_freq is _UNKNOWN:
        raise _NotExamined(
            f"A streaming backend must know how {type(module).__name__} rotates its queries and keys. "
            'hf_fastattn.patch(model, "streaming", window=4096, sinks=4) finds it out for the layers that read a model\'s text, '
            "and with cache=None and graph=False leaves Transformers' cache in place. Of a model that is patched already, this "
            "layer is not one of those: use another backend."
        )
    if isinstance(inv_freq, list):  # examine() is running
        inv_freq.append((query, key))
        raise _Seen
    return inv_freq, getattr(module, _INTERLEAVED)


def examine(model) -> None:
    """Find out how every layer that reads a model's text rotates its queries and keys, for rotation().

    The model runs a streaming backend, and its config has Settings. Runs each layer up to its attention on a few tokens.
    Raises ValueError, in a sentence, where a layer's positions cannot move with a window.
    """
    forget(model)
    with _lock, torch.no_grad(), _in_eval_mode(model):
        decoder, layers = hf.text_layers(model)
        name = type(decoder.config).__name__.removesuffix("Config").removesuffix("Text")
        if not layers:
            raise ValueError(f"{name} cannot stream: it has no self-attention layers that could be looked at.")
        if kind := hf.changing_rope(decoder):
            raise ValueError(
                f"{name} has rope_type {kind!r}, whose frequencies change with the length of the text: keys read under one "
                "cannot be scored under another. Set a rope_type of fixed frequencies in its config (default, linear, llama3 or "
                "yarn)."
            )
        places = hf.rotary_buffers(model, decoder)
        try:
            learned, turns = _find_turns(decoder, layers, [tensor for *_, tensor in places])
        except _NotExamined:
            raise ValueError(f"{name} cannot stream: not all of its layers could be looked at. Use another backend.") from None
        except (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError) as error:
            raise ValueError(f"How {name} rotates queries and keys could not be found out: {error}.") from error
        for module, turn in turns.items():
            if isinstance(turn, str):
                raise ValueError(f"{name} cannot stream: its layer {module.layer_idx} {turn}. Use another backend for it.")
        clamped = Settings.of(model.config.get_text_config(decoder=True)).clamped
        _check_positions(name, learned, any(inv_freq is not None for inv_freq, _ in turns.values()), clamped)
        for module, (inv_freq, interleaved) in turns.items():
            vars(module)[_INV_FREQ], vars(module)[_INTERLEAVED] = inv_freq, interleaved
        vars(model)[_WATCHED] = [(*place, _version(place[-1])) for place in places]


def refresh(model) -> None:
    """examine() again where the model's frequencies have been replaced, moved or written to since. Asks the host alone."""
    for path, name, tensor, version in vars(model).get(_WATCHED, ()):
        module = model
        for part in path.split("."):  # get_submodule() takes ten times as long, and this comes before every forward
            module = module._modules.get(part) or _NOTHING
        if module._buffers.get(name) is not tensor or _version(tensor) != version:
            examine(model)
            return


def forget(model) -> None:
    """Take back what examine() wrote."""
    for module in model.modules():
        for name in (_INV_FREQ, _INTERLEAVED, _WATCHED):
            vars(module).pop(name, None)


def _check_positions(name: str, learned: bool, rotates: bool, clamped: bool) -> None:
    if learned and rotates:
        raise ValueError(
            f"{name} cannot stream: it has learned positions besides rotated ones. Use another backend for this model."
        )
    if learned and not clamped:
        raise ValueError(
            f"{name} has no rotary embedding, and learned positions cannot move with a window. "
            "hf_fastattn.patch(..., clamp_positions=True) gives every token beyond the last position that one, which is an "
            "approximation."
        )
    if clamped and not learned:
        raise ValueError(f"clamp_positions=True is for models with learned positions, and {name} has none; leave it out.")


class _NotExamined(ValueError):
    """A layer runs that examine() has not looked at."""


class _Seen(BaseException):
    """Stops a probe run after the layer's queries and keys were recorded; no model catches this."""


class _Done(BaseException):
    """So has everything."""


def _find_turns(decoder, layers: dict, found: list[torch.Tensor]) -> tuple[bool, dict]:
    """(whether positions are added to the tokens, what rotation() answers for each module, or why it cannot, as a clause).

    found: the frequencies that the decoder has.
    """
    device = found[0].device if found else decoder.device
    learned = _adds_positions(decoder, layers, device)
    # Whoever looks positions up in a table has none beyond its end, and a GPU that reads there is lost to the process.
    positions = torch.tensor(_NEAR if learned or not found else _NEAR + _FAR)
    seen = _queries_and_keys(decoder, layers, positions.to(device), _stirred)
    explained = {module: _explain(seen.get(module), positions, found) for module in layers}
    if None in explained.values():
        even = _queries_and_keys(decoder, layers, positions.to(device), _even)
        return learned, {
            module: turn or _why_not(seen.get(module), even.get(module), positions, found) for module, turn in explained.items()
        }
    return learned, {module: _for_kernels(*turn, seen[module][0].device) for module, turn in explained.items()}


def _adds_positions(decoder, layers: dict, device: torch.device) -> bool:
    """Whether equal tokens reach the first layer as different ones."""
    found = []

    def look(states):
        found.append((states - states[:, :1]).abs().max() > 1e-3 * states.abs().max())
        raise _Done

    stand_ins = {layer: lambda hidden_states, *args, **kwargs: look(hidden_states) for layer in layers.values()}
    _run(decoder, stand_ins, torch.tensor(_NEAR, device=device))
    if not found:
        raise RuntimeError("none of its layers ran")
    return bool(found[0])


def _queries_and_keys(decoder, layers: dict, positions: torch.Tensor, change: Callable) -> dict[torch.nn.Module, tuple]:
    """Each attention module's queries and keys, (rows, heads, 2 x positions, head_dim), of states that are the same everywhere.

    Once without a cache, and once with one that is said to be long and, like a ring, has tokens in another order: what is done
    to keys behind it may not ask for a slot. change: what is done meanwhile to the weights of the module's norms. A module that
    is not reached is missing.
    """
    without, long = (_run_layers(decoder, layers, positions, change, past) for past in (None, hf.LongPast()))
    return {
        module: tuple(torch.cat([a, b], 2) for a, b in zip(without[module], long[module], strict=True))
        for module in without
        if module in long
    }


def _run_layers(decoder, layers: dict, positions: torch.Tensor, change: Callable, past: hf.LongPast | None) -> dict:
    seen: dict = {}
    waiting = set(layers.values())
    generator = torch.Generator().manual_seed(0)

    def stand_in(layer, forward):
        def run(hidden_states, *args, **kwargs):
            states = torch.randn(2, 1, hidden_states.shape[-1], generator=generator).expand(-1, len(positions), -1)
            states = states.to(hidden_states.device, hidden_states.dtype)
            for module in (module for module, around in layers.items() if around is layer):
                found = vars(module)[_INV_FREQ] = []
                try:
                    with _norms(module, change), contextlib.suppress(_Seen):
                        forward(states, *args, **kwargs)
                finally:
                    del vars(module)[_INV_FREQ]
                if found:
                    query, key = found[0]
                    seen[module] = query, key if past is None else key.flip(2)
            waiting.discard(layer)
            if not waiting:
                raise _Done
            return states

        return run

    _run(decoder, {layer: stand_in(layer, layer.forward) for layer in waiting}, positions, past)
    return seen


def _run(decoder, stand_ins: dict[torch.nn.Module, Callable], positions: torch.Tensor, past=None) -> None:
    """Run a decoder on two rows of equal tokens at `positions`, with other code for its layers, until that raises _Done."""
    had = {layer: vars(layer).get("forward", _UNKNOWN) for layer in stand_ins}
    try:
        for layer, forward in stand_ins.items():
            vars(layer)["forward"] = forward
        with contextlib.suppress(_Done):
            hf.run_text(decoder, positions.expand(2, -1), past)
    finally:
        for layer, forward in had.items():
            if forward is _UNKNOWN:
                vars(layer).pop("forward", None)
            else:
                vars(layer)["forward"] = forward


@contextlib.contextmanager
def _in_eval_mode(model) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def _norms(module: torch.nn.Module, change: Callable) -> Iterator[None]:
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


def _stirred(weight: torch.Tensor) -> torch.Tensor:
    noise = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)) - 0.5
    return weight + noise.to(weight.device, weight.dtype)


_even = torch.ones_like


def _explain(seen: tuple | None, positions: torch.Tensor, candidates: list[torch.Tensor]) -> tuple | None:
    """(inv_freq or None, interleaved, first dimension that is turned) that both queries and keys come out as, or None."""
    if seen is None:
        return None
    head_dim = seen[0].shape[3]
    turns = [(None, False, 0)]
    for inv_freq in candidates:
        room = head_dim - 2 * len(inv_freq)
        turns += [(inv_freq, False, 0), (inv_freq, True, 0), (inv_freq, True, room)] if room >= 0 else []
    return next((turn for turn in turns if all(_fits(x, positions, *turn) for x in seen)), None)


def _fits(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor | None, interleaved: bool, first: int) -> bool:
    """Whether x, as in _queries_and_keys(), is what stands at position 0, turned; up to what its dtype rounds."""
    unit = torch.finfo(x.dtype).eps / 2
    positions = positions.repeat(2)
    x = x.detach().to("cpu", torch.float64)
    start, size = x[:, :, :1], x[:, :, :1].norm(dim=-1)
    turned = start.expand_as(x).clone()
    if inv_freq is not None:
        pairs = len(inv_freq)
        angle = (positions[:, None].float() * inv_freq.detach().to("cpu", torch.float32)).double()
        cos, sin = angle.cos(), angle.sin()
        places = torch.arange(2 * pairs) + first
        one, two = (places[0::2], places[1::2]) if interleaved else (places[:pairs], places[pairs:])
        a, b = start[..., one], start[..., two]
        turned[..., one], turned[..., two] = a * cos - b * sin, b * cos + a * sin
    near = positions <= _EXACT
    allowed = (8 * unit + 1e-4 + positions[near] * 2.0**-22) * size
    off = (x - turned)[:, :, near].norm(dim=-1)
    return bool(size.min() > 0 and (off <= allowed).all() and _keeps_length(x, unit))


def _keeps_length(x: torch.Tensor, unit: float) -> bool:
    sizes = x.norm(dim=-1)
    return bool(((sizes - sizes[:, :, :1]).abs() <= (8 * unit + 1e-4) * sizes[:, :, :1]).all())


def _why_not(seen: tuple | None, even: tuple | None, positions: torch.Tensor, candidates: list[torch.Tensor]) -> str:
    if seen is None:
        return "is not reached by a run over a few tokens of text, so that its queries and keys could not be looked at"
    if _explain(even, positions, candidates) is not None:
        return (
            "scales each dimension of its queries and keys after it has rotated them (a norm with weights of its own), and what "
            "is scaled cannot be re-rotated"
        )
    unit = torch.finfo(seen[0].dtype).eps / 2
    if not all(_keeps_length(x.detach().to("cpu", torch.float64), unit) for x in seen):
        return "has queries or keys whose length depends on their position, and streaming counts positions within the kept tokens"
    return "rotates queries and keys in a way that streaming does not support"


def _for_kernels(
    inv_freq: torch.Tensor | None, interleaved: bool, first: int, device: torch.device
) -> tuple[torch.Tensor | None, bool]:
    """The frequencies of all pairs from dimension 0 on; the model's own tensor where that will do: writes to it count."""
    own = inv_freq is None or (
        first == 0 and inv_freq.dtype == torch.float32 and inv_freq.device == device and inv_freq.is_contiguous()
    )
    if own:
        return inv_freq, interleaved
    with torch.inference_mode(False):
        return torch.cat([torch.zeros(first // 2, device=device), inv_freq.to(device, torch.float32)]), interleaved


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
