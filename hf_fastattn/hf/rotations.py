"""Recognises the rotation of queries and keys in functions of models, by running them on a few tokens.

Families differ in the dimensions of a pair, in how many dimensions they rotate, in the layout of their cosines, and in their
roundings. The steps are elementwise, so a function and a formula that agree on random tokens agree bit for bit, on every device.
"""

from __future__ import annotations

import types
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
from transformers.utils import deprecation

from .llama import module_of

_NAMES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")

Functions = tuple[types.FunctionType, ...]  # one, and all that it calls
Pair = tuple[torch.Tensor, torch.Tensor]


class Rotation(NamedTuple):
    """What a function computes, in the terms of `kernels.decode.rope.run`."""

    interleaved: bool
    apart: bool
    of_pair: bool
    doubled: bool
    late: bool


def without_renaming(forward: object) -> tuple[object, frozenset[str]]:
    """The function within Transformers' wrappers that rename deprecated arguments, and the old names."""
    names: set[str] = set()
    while isinstance(forward, types.FunctionType) and module_of(forward) == deprecation.__name__:
        cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
        if not {"func", "old_name"} <= set(cells):
            break
        names.add(cells["old_name"].cell_contents)
        forward = cells["func"].cell_contents
    return forward, frozenset(names)


def rotations_in(forward: object) -> dict[str, Functions]:
    """The functions by which an attention layer's forward() rotates queries and keys: name to the function and all it calls."""
    forward, _ = without_renaming(forward)
    if not isinstance(forward, types.FunctionType) or forward.__closure__:
        return {}
    return {name: reached(function) for name, function in called(forward).items() if name in _NAMES}


def reached(function: object) -> Functions:
    """A Python function and all that it calls by their global names; () for other callables."""
    found: list[types.FunctionType] = []
    waiting = [function]
    while waiting:
        each = waiting.pop()
        if isinstance(each, types.FunctionType) and each not in found:
            found.append(each)
            waiting += called(each).values()
    return tuple(found)


def called(function: types.FunctionType) -> dict[str, types.FunctionType]:
    """The Python functions that a function calls by their global names."""
    names = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    return {name: each for name, each in names.items() if isinstance(each, types.FunctionType)}


def is_rotation(functions: Functions) -> bool:
    """Whether `rotation_of` recognises a function for some head_dim and dtype."""
    cases = product((64, 32), (torch.float16, torch.float32))
    return any(rotation_of(functions, 64, width, torch.float16, dtype) is not None for width, dtype in cases)


@cache
def rotation_of(functions: Functions, head_dim: int, width: int, dtype: torch.dtype, cos_dtype: torch.dtype) -> Rotation | None:
    """The formula of a function, of queries and keys of this head_dim and dtype with `width` cosines; None if it has none.

    functions: as `reached` returns them; the key of the cache has all of them.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int, kind: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(kind)

    q, k = draw(2, 3, 5, head_dim, kind=dtype), draw(2, 2, 5, head_dim, kind=dtype)
    cos, sin = draw(2, 5, width, kind=cos_dtype), draw(2, 5, width, kind=cos_dtype)
    kept = [x.clone() for x in (q, k, cos, sin)]
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            out = functions[0](q, k, cos, sin)
    except Exception:  # anything that code of others may raise
        return None
    if not (isinstance(out, tuple) and len(out) == 2) or not all(map(torch.equal, kept, (q, k, cos, sin))):
        return None
    return next((formula for formula in _FORMULAS if _fits(formula, out, q, k, cos, sin)), None)


_FORMULAS = [
    Rotation(interleaved, apart, of_pair, doubled, late)
    for interleaved, apart, of_pair, doubled, late in product((False, True), repeat=5)
    if interleaved >= apart and of_pair >= doubled
]


def _fits(formula: Rotation, out: Pair, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    width = cos.shape[-1] * (1 + formula.doubled)
    if width > q.shape[-1] or width % 2:
        return False
    return all(
        isinstance(x, torch.Tensor) and x.dtype == y.dtype and torch.equal(x, _rotate(formula, width, y, cos, sin))
        for x, y in zip(out, (q, k), strict=True)
    )


def _rotate(formula: Rotation, width: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    places, half = torch.arange(width, device="cpu"), width // 2
    neighbours = formula.interleaved and not formula.apart
    pair, second = (places // 2, places % 2) if neighbours else (places % half, places // half)
    own, other = (2 * pair + i if formula.interleaved else pair + half * i for i in (second, 1 - second))
    cos, sin = (t[:, None, :, pair if formula.of_pair else places].float() for t in (cos, sin))
    products = x[..., own].float() * cos, x[..., other].float() * (2 * second - 1) * sin
    by_cos, by_sin = products if formula.late else (each.to(x.dtype).float() for each in products)
    return torch.cat([(by_cos + by_sin).to(x.dtype), x[..., width:]], -1)
