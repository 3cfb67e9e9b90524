"""The values that ranks exchange through a store, as JSON: a pickle would let whoever writes to the store run code on the ranks.

Arguments of a call are compared by facts: a short description, and a digest that is equal for equal values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from ... import __version__

LONG = 60  # characters of a value in a message
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_FREE = frozenset({"streamer", "transformers_version", "_from_model_config", "_name_or_path"})  # may differ between ranks
_MARK = f"hf_fastattn {__version__} ".encode()  # before each value: another version may write other ones

Fact = tuple[str, str]  # (words, digest); a list when it has been sent


class Malformed(RuntimeError):
    """A value in the store that no rank with this version of the package has written."""


def encode(value: object) -> bytes:
    """JSON of None, bool, int, float, str, lists, tuples and dicts by str."""
    return _MARK + json.dumps(value).encode()


def decode(key: str, data: bytes) -> Any:
    """The value of this key, with lists for tuples. Raises Malformed."""
    try:
        if data.startswith(_MARK):
            return json.loads(data[len(_MARK) :])
    except (ValueError, RecursionError):
        pass
    raise Malformed(
        f"The store of torch.distributed has {data[:40]!r} under {key!r}, the key of rank {key.rpartition('/')[2]}, where "
        f"hf_fastattn {__version__} writes JSON. Run the same version on all ranks, and no other program that writes these keys."
    )


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
            found[name] = _fact(entries)
    return found


def _fact(value: Any) -> Fact:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        words = f"a tensor of shape {tuple(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
        return words, _hash(words.encode() + value.reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, _SCALARS):
        words = repr(value)
        return words if len(words) <= LONG else f"{words[:LONG]}...", _hash(words.encode())
    name = type(value).__name__
    if isinstance(value, (list, tuple)):
        return f"a {name} of {len(value)}", _hash("".join(_fact(item)[1] for item in value).encode())
    return f"a {name}", name  # objects of one class count as equal


def difference(ranks: list[int], found: list[dict[str, Fact]]) -> str | None:
    """A clause with the first argument that is not the same on all ranks; None if there is none."""
    first = found[0]
    for rank, other in zip(ranks[1:], found[1:], strict=True):
        for name in dict.fromkeys((*first, *other)):
            ours, theirs = first.get(name), other.get(name)
            if ours is None or theirs is None:
                has, lacks = (ranks[0], rank) if theirs is None else (rank, ranks[0])
                return f"{name} was passed on rank {has} and not on rank {lacks}"
            if ours[0] != theirs[0]:
                return f"{name} is {ours[0]} on rank {ranks[0]} and {theirs[0]} on rank {rank}"
            if ours != theirs:
                return f"{name}, {ours[0]}, has other values on rank {rank} than on rank {ranks[0]}"
    return None


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
