"""lm-eval's model type "hf-fastattn": its HFLM with a model that patch() has changed."""

from __future__ import annotations

import inspect
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from .. import registry
from ..patches import Patch, patch, patch_of
from ..patches.preflight import OLD_NAME, find_model

KINDS = ("default", "causal", "seq2seq")  # what backend= of HFLM may be
OPTIONS = {name: each for name, each in inspect.signature(patch).parameters.items() if name != "target"}


@register_model("hf-fastattn")
class FastHFLM(HFLM):  # type: ignore[misc]
    """HFLM, for `lm_eval run --model hf-fastattn` and `simple_evaluate(model="hf-fastattn")`, whose model is patched.

    Arguments with the name of one of patch() go to patch(), all others to HFLM. backend: that of patch(); HFLM's own values
    ("causal", "seq2seq", "default") still reach HFLM. A model object given as `pretrained` stays patched afterwards, until
    `unpatch(model)`; one that is already patched is used as it is if no arguments are for patch().

    patch: the Patch of the model.

    Raises ValueError or TypeError for arguments that conflict, before the model is loaded, and the errors of patch() after that.
    """

    patch: Patch

    def __init__(self, pretrained: Any, **options: Any):
        if "kv" in options:
            raise TypeError(OLD_NAME)
        asked = {name: options.pop(name) for name in OPTIONS.keys() & options.keys()}
        if asked.get("backend") in KINDS:
            options["backend"] = asked.pop("backend")
        known = None if isinstance(pretrained, str) else patch_of(find_model(pretrained))
        backend = known.backend if known is not None else asked.get("backend", OPTIONS["backend"].default)
        _check(asked, backend, options.pop("attn_implementation", backend))
        super().__init__(pretrained, **options)
        self.patch = patch(self.model, **asked) if asked or known is None else known

    def get_model_info(self) -> dict[str, Any]:
        """lm-eval's facts about the model, for its results, and what ran: backend, graphs and steps so far."""
        did = {name: getattr(self.patch, name) for name in ("backend", "captures", "replays", "uncaptured", "reasons")}
        return {**super().get_model_info(), "hf_fastattn": did}


def _check(asked: dict[str, Any], backend: str, attention: str) -> None:
    """Raise ValueError or TypeError for arguments that conflict. attention: the attn_implementation."""
    registry.get(backend)
    for name, value in asked.items():
        if isinstance(OPTIONS[name].default, bool) and not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False; got {value!r}.")
    if attention != backend:
        other = f"give backend={attention!r} for that one" if attention in registry.names() else "use --model hf for that one"
        raise ValueError(
            f"attn_implementation={attention!r} conflicts with backend={backend!r}, whose attention hf-fastattn runs. Leave out "
            f"attn_implementation, and {other}."
        )
