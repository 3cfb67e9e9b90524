"""The state of a model that a decode graph depends on, in a form that can be compared."""

from __future__ import annotations

from typing import NamedTuple

_MISSING = object()


class Uncapturable(Exception):
    """The reason why a step runs uncaptured, a clause for "... runs uncaptured: "."""


class Record(NamedTuple):
    """One module: its path, the values that are always compared, and its plain attributes, compared only if a step reads them."""

    path: str
    fixed: tuple[object, ...]
    attributes: dict[str, object]


class Fingerprint(NamedTuple):
    """The state that a graph depends on. Two fingerprints are equal if `differences` returns nothing."""

    settings: tuple[object, ...]
    modules: list[Record]
    held: list[object]  # weak references whose ids the other two fields contain

    def differences(self, other: Fingerprint, unread: frozenset[tuple[str, str]] = frozenset()) -> list[str]:
        """The names of what has changed. unread: pairs (path, name) of attributes to ignore."""
        found = [] if self.settings == other.settings else ["torch's settings or the backend"]
        if self.modules is other.modules or self.modules == other.modules:
            return found
        if [record.path for record in self.modules] != [record.path for record in other.modules]:
            return [*found, "the model's modules"]
        for old, new in zip(self.modules, other.modules, strict=True):
            if old == new:
                continue
            if old.fixed != new.fixed:
                found.append(old.path or "the model")
            for name in old.attributes.keys() | new.attributes.keys():
                changed = old.attributes.get(name, _MISSING) != new.attributes.get(name, _MISSING)
                if changed and (old.path, name) not in unread:
                    found.append(f"{old.path}.{name}".lstrip("."))
        return found
