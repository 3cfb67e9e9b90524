"""What a decode graph depends on, written down; two of them are compared."""

from __future__ import annotations

from typing import NamedTuple

_MISSING = object()


class Uncapturable(Exception):
    """Why a step runs uncaptured, as a clause that follows "runs uncaptured: "."""


class Record(NamedTuple):
    """One module: its path, what always counts, and its plain attributes, which count where a step reads them."""

    path: str
    fixed: tuple[object, ...]
    attributes: dict[str, object]


class Fingerprint(NamedTuple):
    """What a graph depends on. Two are of the same model in the same state where `differences` finds none."""

    settings: tuple[object, ...]
    modules: list[Record]
    held: list[object]  # weak references whose ids stand in the other two

    def differences(self, other: Fingerprint, unread: frozenset[tuple[str, str]] = frozenset()) -> list[str]:
        """What has changed, by name; attributes in `unread`, pairs of path and name, do not count."""
        found = [] if self.settings == other.settings else ["torch's settings or the backend"]
        if self.modules == other.modules:
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
