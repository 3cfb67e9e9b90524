"""Copies of a patched model: a deepcopy has a patch of its own, and a pickle is refused."""

from __future__ import annotations

import weakref
from typing import Any

from ... import hf


def copied(model: weakref.ref[hf.PreTrainedModel], memo: dict[int, Any]) -> hf.PreTrainedModel:
    """The copy of a patched model during a deepcopy. Objects that belong to a model can only be copied with it."""
    twin: hf.PreTrainedModel | None = memo.get(id(model()))
    if twin is None:
        raise TypeError("A Patch cannot be copied by itself; copy the model it belongs to.")
    return twin


def not_pickled() -> TypeError:
    return TypeError("A patched model cannot be pickled; call hf_fastattn.unpatch() on it first.")
