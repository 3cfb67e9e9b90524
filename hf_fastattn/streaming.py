"""What a model asks of a streaming backend, and how the queries that score its sinks are turned.

Every query sees the first `sinks` tokens of its row and the last `window`, itself included, at positions counted within those.
Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2024), section 3.2.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cache

import torch

from . import compat


@dataclass(frozen=True)
class Settings:
    """How many tokens stay in sight; in a model's config the attributes streaming_window, streaming_sinks, streaming_clamped.

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
                "A streaming backend must know how many tokens stay in sight: use "
                'hf_fastattn.patch(model, "streaming", window=4096, sinks=4), or set streaming_window and streaming_sinks on the '
                "model's config."
            )
        settings = cls(window, getattr(config, "streaming_sinks", cls.sinks), getattr(config, "streaming_clamped", cls.clamped))
        settings.check(getattr(config, "max_position_embeddings", None))
        return settings

    @classmethod
    def asked(cls, name: str, window: int | None, sinks: int | None, limit: int | None, clamped: bool = False) -> Settings:
        """Those that a caller of backend `name` asks for, checked; the usual number of sinks where None."""
        if window is None:
            raise ValueError(f"{name!r} must know how many of the last tokens stay in sight; pass window=, say 4096.")
        settings = cls(window, cls.sinks if sinks is None else sinks, clamped)
        settings.check(limit)
        return settings

    def check(self, limit: int | None) -> None:
        """Raise ValueError for what is impossible; `limit`: the positions that the model was made for."""
        if not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window counts the last tokens that a query sees, itself included: at least 1; got {self.window}.")
        if not isinstance(self.sinks, int) or self.sinks < 0:
            raise ValueError(f"sinks counts the first tokens that stay in sight: at least 0; got {self.sinks}.")
        if limit is not None and self.sinks + self.window > limit:
            raise ValueError(
                f"{self.sinks} sinks and a window of {self.window} take {self.sinks + self.window} positions, and this model was "
                f"made for {limit} (max_position_embeddings). Ask for fewer."
            )

    def write(self, config) -> None:
        config.streaming_window, config.streaming_sinks, config.streaming_clamped = self.window, self.sinks, self.clamped


def check_mask(name: str, config, causal: bool, window: int | None) -> None:
    """Raise ValueError for a mask pattern of a model that a streaming backend cannot serve."""
    Settings.of(config)
    if not causal:
        raise ValueError(f"attn_implementation={name!r} is for causal models; use another backend for this one.")
    if window is not None:
        raise ValueError(
            f"This model has layers with a sliding window of their own ({window} tokens), whose cache drops the first tokens. "
            f"Use hf_fastattn.patch(model, {name!r}, ...), whose cache keeps them."
        )


_ropes: list[compat.Rope] = []
_rope_of: dict[int, int] = {}  # by id() of the module: what torch.compile can look up in every version


def rope_index(module: torch.nn.Module, head_dim: int) -> int:
    """Which of the known rotary embeddings an attention module has, as an index; -1 where it has learned positions, clamped.

    Raises ValueError for a module whose positions cannot move with a window.
    """
    index = _rope_of.get(id(module))
    if index is None:
        index = _find_rope(module, head_dim)
    if index < 0 and not Settings.of(module.config).clamped:
        raise ValueError(
            f"{type(module.config).__name__.removesuffix('Config')} has no rotary embedding, and learned positions cannot move "
            "with a window. hf_fastattn.patch(..., clamp_positions=True) gives every token beyond the last position that one, "
            "which is an approximation."
        )
    return index


@torch.compiler.assume_constant_result  # takes no module before torch 2.13: there a model must be patched, or have run once
def _find_rope(module: torch.nn.Module, head_dim: int) -> int:
    found = compat.rope(module, head_dim)
    if found is not None and found not in _ropes:
        _ropes.append(found)
    _rope_of[id(module)] = -1 if found is None else _ropes.index(found)
    weakref.finalize(module, _rope_of.pop, id(module), None)
    return _rope_of[id(module)]


@cache
def _inv_freq(index: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(_ropes[index].inv_freq, dtype=torch.float32, device=device)


def rotation(rope: int, device: torch.device) -> dict:
    """By what kernels turn the query that scores the sinks, as their options; none where the rotary embedding `rope` is none."""
    if rope < 0:
        return {}
    return {"inv_freq": _inv_freq(rope, device), "interleaved": _ropes[rope].interleaved}
