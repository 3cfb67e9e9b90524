"""Which attention weights dropout keeps: a function of a seed and of a weight's place, in torch.

Forward and backward kernels evaluate the same function (`device.dropout`), so no mask is stored. A weight's random number has 16
bits: Philox with 7 rounds gives those of 8 adjacent keys at once.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), section 3.3.
"""

from __future__ import annotations

import torch

ROUNDS = 7
GROUP = 8  # adjacent keys whose numbers are computed together
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEYS = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def threshold(p: float) -> int:
    """Weights with a random number below this are dropped; p is rounded to a multiple of 2^-16."""
    return min(round(p * 65536), 65535)


def keep_scale(p: float) -> float:
    """The factor of the weights that are kept."""
    return 65536.0 / (65536 - threshold(p))


def kept(seed: torch.Tensor, p: float, num_heads: int, rows, heads, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """bool (rows, heads, queries, keys): which weights are kept. rows, heads, queries, keys: int64 indices.

    seed: int64, one number. num_heads: of the query, of which `heads` are some.
    """
    place = (rows[:, None] * num_heads + heads)[:, :, None, None]
    shape = (*place.shape[:2], queries.shape[0], keys.shape[0])
    counters = [(keys // GROUP).expand(shape), queries[:, None].expand(shape), place.expand(shape), torch.zeros_like(place)]
    words = torch.stack(_philox(counters, seed & _LOW, (seed >> 32) & _LOW))
    word = words.gather(0, ((keys % GROUP) // 2).expand(1, *shape))[0]
    return ((word >> (16 * (keys % 2))) & 0xFFFF) >= threshold(p)


def _philox(c: list[torch.Tensor], key_a, key_b) -> list[torch.Tensor]:
    """Philox4x32 of counters in int64, each below 2^32."""
    for _ in range(ROUNDS):
        (high_a, low_a), (high_b, low_b) = _product(_MULTIPLIERS[0], c[0]), _product(_MULTIPLIERS[1], c[2])
        c = [high_b ^ c[1] ^ key_a, low_b, high_a ^ c[3] ^ key_b, low_a]
        key_a, key_b = (key_a + _KEYS[0]) & _LOW, (key_b + _KEYS[1]) & _LOW
    return c


def _product(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low 32 bits of a * b, both below 2^32."""
    lower, upper = a * (b & 0xFFFF), a * (b >> 16)
    low = lower + ((upper & 0xFFFF) << 16)
    return (upper >> 16) + (low >> 32), low & _LOW
