"""The values that ranks exchange through a store, as JSON: a pickle would let whoever writes to the store run code on the ranks.

Scalars, strings and lists are those of JSON. A value of another type is an object with one entry, the name of the type and its
content: {"tuple": [1, 2]}.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, TypeVar, get_type_hints

from .facts import Fact
from .processes import Process

T = TypeVar("T")


class End(NamedTuple):
    """How a call ended on one rank.

    steps: number of forwards that it began. error: None if it returned. usual: whether the error is an Exception. tokens: a
    checksum of the new tokens, None if they are unknown.
    """

    steps: int
    error: str | None
    usual: bool
    tokens: int | None = None


class Malformed(RuntimeError):
    """A value in the store that no rank with this version of the package has written."""


_RECORDS: dict[str, Any] = {kind.__name__: kind for kind in (End, Fact, Process)}


def encode(value: object) -> bytes:
    return json.dumps(_as_json(value)).encode()


def decode(key: str, data: bytes, kind: type[T]) -> T:
    """The value of this key, of this kind. Raises Malformed."""
    try:
        value = json.loads(data, object_hook=_of_json)
        if type(value) is kind:
            return value
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise Malformed(
        f"The store of torch.distributed has {data[:40]!r} under {key!r}, the key of rank {key.rpartition('/')[2]}, where this "
        f"version of hf_fastattn writes a value of the type {kind.__name__} as JSON. Run the same version on all ranks, and no "
        "other program that writes these keys."
    )


def alike(found: object, own: object) -> bool:
    """Whether the value of another rank has the structure of this rank's. Either may be None in place of a scalar."""
    if isinstance(found, tuple) and type(found) is type(own):
        return len(found) == len(own) and all(map(alike, found, own))
    if isinstance(found, dict) and isinstance(own, dict):  # of facts, which may differ in number
        return all(type(name) is str and type(fact) is Fact for name, fact in found.items())
    if found is None or own is None:
        return not isinstance(own if found is None else found, (list, tuple, dict))
    return type(found) is type(own)


def _as_json(value: Any) -> object:
    name = type(value).__name__
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_as_json(item) for item in value]
    if type(value) is dict:
        return {name: [[_as_json(item) for item in pair] for pair in value.items()]}
    if type(value) is bytes:
        return {name: value.hex()}
    if type(value) is tuple or type(value) is _RECORDS.get(name):
        return {name: [_as_json(item) for item in value]}
    raise TypeError(f"Ranks exchange None, bool, int, float, str, bytes, list, tuple, dict, {', '.join(_RECORDS)}; got {name}.")


def _of_json(entry: dict[str, Any]) -> object:
    """The value of an object with one entry. Raises ValueError, TypeError or KeyError for one that `_as_json` does not write."""
    ((name, content),) = entry.items()
    if name == "bytes":
        return bytes.fromhex(content)
    if type(content) is not list:
        raise TypeError
    if name in ("tuple", "dict"):
        return tuple(content) if name == "tuple" else dict(content)
    found = _RECORDS[name]._make(content)
    if not all(map(isinstance, found, get_type_hints(type(found)).values())):
        raise TypeError
    return found
