"""Recognises the rotation of queries and keys from its effect on one hidden state at several positions."""

from __future__ import annotations

from typing import NamedTuple

import torch

EXACT = 4096  # beyond this position angles in fp32 are too inexact, and only norms are compared


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
        return bool(norm.min() > 0 and (error <= allowed).all() and _has_constant_norm(x, unit))

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
    if seen is None:
        return None
    head_dim = seen.query.shape[3]
    rotations = [Rotation()]
    for inv_freq in candidates:
        unrotated = head_dim - 2 * len(inv_freq)
        if unrotated >= 0:
            rotations += [Rotation(inv_freq), Rotation(inv_freq, True), Rotation(inv_freq, True, unrotated)]
    return next((rotation for rotation in rotations if all(rotation.matches(x, positions) for x in seen)), None)


def why_not(seen: States | None, unscaled: States | None, positions: torch.Tensor, candidates: list[torch.Tensor]) -> str:
    """A clause: why queries and keys without a known rotation cannot stream. unscaled: with all weights of norms equal to 1."""
    if seen is None:
        return "is not reached by a run over a few tokens of text, so that its queries and keys could not be examined"
    if recognise(unscaled, positions, candidates) is not None:
        return (
            "scales each dimension of its queries and keys after it has rotated them (a norm with weights of its own), and "
            "scaled queries cannot be re-rotated"
        )
    unit = torch.finfo(seen.query.dtype).eps / 2
    if not all(_has_constant_norm(x.detach().to("cpu", torch.float64), unit) for x in seen):
        return "has queries or keys whose length depends on their position, and streaming changes positions"
    return "rotates queries and keys in a way that streaming does not support"


def _has_constant_norm(x: torch.Tensor, unit: float) -> bool:
    norms = x.norm(dim=-1)
    return bool(((norms - norms[:, :, :1]).abs() <= (8 * unit + 1e-4) * norms[:, :, :1]).all())
