"""The arguments of a call in a form that ranks can compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

LONG = 60  # characters of a value in a message
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_FREE = frozenset({"streamer", "transformers_version", "_from_model_config", "_name_or_path"})  # may differ between ranks


class Fact(NamedTuple):
    """words: a short description of a value. digest: equal for equal values."""

    words: str
    digest: str


def facts(values: Mapping[str, Any]) -> dict[str, Fact]:
    """A fact for each argument, and for each entry of an argument that is a dict or a configuration."""
    found: dict[str, Fact] = {}
    for name, value in values.items():
        entries = value.to_dict() if hasattr(value, "to_dict") else value
        if name in _FREE or value is None:
            continue
        if isinstance(entries, Mapping):
            found |= {f"{name}[{inner!r}]": fact for inner, fact in facts({str(k): v for k, v in entries.items()}).items()}
        else:
            found[name] = fact(entries)
    return found


def fact(value: Any) -> Fact:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        words = f"a tensor of shape {tuple(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
        return Fact(words, _hash(words.encode() + value.reshape(-1).view(torch.uint8).numpy().tobytes()))
    if isinstance(value, _SCALARS):
        words = repr(value)
        return Fact(words if len(words) <= LONG else f"{words[:LONG]}...", _hash(words.encode()))
    name = type(value).__name__
    if isinstance(value, (list, tuple)):
        return Fact(f"a {name} of {len(value)}", _hash("".join(fact(item).digest for item in value).encode()))
    return Fact(f"a {name}", name)  # objects of one class count as equal


def difference(ranks: list[int], found: list[dict[str, Fact]]) -> str | None:
    """A clause with the first argument that is not the same on all ranks; None if there is none."""
    first = found[0]
    for rank, other in zip(ranks[1:], found[1:], strict=True):
        for name in dict.fromkeys((*first, *other)):
            ours, theirs = first.get(name), other.get(name)
            if ours is None or theirs is None:
                has, lacks = (ranks[0], rank) if theirs is None else (rank, ranks[0])
                return f"{name} was passed on rank {has} and not on rank {lacks}"
            if ours.words != theirs.words:
                return f"{name} is {ours.words} on rank {ranks[0]} and {theirs.words} on rank {rank}"
            if ours.digest != theirs.digest:
                return f"{name}, {ours.words}, has other values on rank {rank} than on rank {ranks[0]}"
    return None


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
