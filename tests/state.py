"""User actions between two calls of generate(), applied to a patched model and to an unpatched twin.

A step is a name in ACTIONS and the number of a variant. A World applies a step to both models and then calls generate() on both:
tokens, logits and exceptions must be equal.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch
from models import FAMILIES, prompts, tiny

import hf_fastattn

NEW = 6  # tokens of a call: from the prompt, a rehearsal, a capture and three replays
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}  # relative to the largest logit
WORLDS = {
    "llama": ("llama", "lean", {}),
    "two kinds of layers": ("qwen2", "lean", {}),
    "window": ("mistral_window_below_prompt", "lean", {}),
    "rolling": ("llama", "streaming", {"window": 400}),
    "recurrent": ("qwen3_5_text", "lean", {}),
    "recurrent beside K and V": ("falcon_h1", "lean", {}),
}
_LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
HYBRIDS = {
    "qwen3_5_text": {"layer_types": ["full_attention", "linear_attention"], "head_dim": 16, **_LINEAR},
    "falcon_h1": {"head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
}
REFUSED = (  # refusals of the package, for which the twin succeeds
    "A rolling cache discards left padding, and this attention_mask has zeros behind ones",
    "which cannot read a RollingCache; use hf_fastattn.patch(",
    "rotates queries and keys in a way that streaming does not support",
    "has recurrent states, from which no token can be removed",
)
ACTIONS: dict[str, tuple[Callable, int]] = {}  # name: (function, number of variants)


class Interrupted(Exception):
    """Raised by user code during generate()."""


def action(variants: int = 1):
    """Register a function of (side, variant) under its name. It may return a function of the side that undoes it, which the next
    step of the same name then calls instead."""

    def add(function):
        ACTIONS[function.__name__] = (function, variants)
        return function

    return add


@cache
def _original(name: str):
    model_type, own = FAMILIES[name] if name in FAMILIES else (name, HYBRIDS[name])
    return tiny(model_type, "sdpa", **own)


@dataclass
class Call:
    """The arguments of generate(), until a step changes them."""

    rows: int = 1
    padding: str = "no_padding"
    length: int = 24
    new: int = NEW
    seed: int = 0
    options: dict = field(default_factory=dict)


class Side:
    """One of the two models, with the objects that its user holds."""

    def __init__(self, family: str, patch: tuple[str, dict] | None, streams: bool):
        self.model = copy.deepcopy(_original(family))
        self.model.generation_config.do_sample = False
        self.how = patch
        self.crops = not streams and family not in HYBRIDS  # whether the cache of the patched side removes tokens
        self.peft = None
        self.call = Call()
        self.contexts: list = []  # for the next calls, each created by a function of the side
        self.taking_back: dict[str, Callable] = {}
        self.kept: list[tuple] = []  # (cache, the tokens it covers, their mask)
        self.keep = False  # the cache of the next call
        self.now: dict = {}  # options of only the next call
        self.given: dict | None = None  # inputs of only the next call
        self.scratch: dict = {}  # data that steps keep for later steps
        self.apply()

    @property
    def layers(self):
        return self.model.model.layers

    @property
    def patch(self):
        return vars(self.model).get("_hf_fastattn_patch")

    def apply(self, **more) -> None:
        """Patch the model, or give the twin the same attention."""
        if self.how is None:
            return
        backend, options = self.how
        hf_fastattn.patch(self.model, backend, **options, **more)

    def do(self, name: str, variant: int) -> None:
        function, variants = ACTIONS[name]
        if name in self.taking_back:
            self.taking_back.pop(name)(self)
            return
        with torch.no_grad():
            undo = function(self, variant % variants)
        if undo is not None:
            self.taking_back[name] = undo

    def inputs(self) -> dict:
        call = self.call
        return prompts(call.padding, "cpu", rows=call.rows, length=call.length)

    def generate(self):
        given, now = self.given or self.inputs(), self.now
        self.given, self.now = None, {}
        options = {"max_new_tokens": self.call.new, **self.call.options, **now}
        torch.manual_seed(self.call.seed)
        with contextlib.ExitStack() as stack:
            for context in self.contexts:
                stack.enter_context(context(self))
            out = self.model.generate(**given, **options, return_dict_in_generate=True, output_logits=True)
        cache = out.past_key_values
        if self.keep and cache is not None:
            self.kept = [*self.kept[-2:], (cache, out.sequences, given.get("attention_mask"))]
        self.keep = False
        # Nothing else may hold the cache: a call whose storage is in use gets another storage, with other graphs.
        return out.sequences, [logits.float() for logits in out.logits], None if cache is None else cache.get_seq_length()


class Different(AssertionError):
    pass


class World:
    """Two equal models, one of them patched, and the steps that are applied to both."""

    def __init__(self, name: str = "llama"):
        family, backend, options = WORLDS[name]
        streams = backend == "streaming"
        self.ours, self.twin = Side(family, (backend, options), streams), Side(family, None, streams)
        self.sides = (self.twin, self.ours)
        self.fixed = family in HYBRIDS  # the twin's cache has as many layers as its configuration, whichever layers run
        self.refused: list[str] = []  # calls that raised the same error on both sides
        self.compare("at first")
        if self.refused:
            raise Different(f"nothing runs at all: {self.refused}")

    def run(self, steps) -> World:
        for name, variant in steps:
            self.step(name, variant)
        return self

    def step(self, name: str, variant: int = 0) -> None:
        errors = []
        for side in self.sides:
            try:
                side.do(name, variant)
                errors.append(None)
            except (Exception, KeyboardInterrupt) as error:
                errors.append(error)
        self._same_errors(f"{name}({variant})", *errors)
        self.compare(f"after {name}({variant})")

    def compare(self, when: str) -> None:
        """Call generate() on both, and compare."""
        results, errors = [], []
        for side in self.sides:
            before = counts(side.patch)
            try:
                results.append(side.generate())
                errors.append(None)
            except (Exception, KeyboardInterrupt) as error:
                results.append(None)
                errors.append(error)
        self._same_errors(when, *errors)
        if any(errors):
            self.refused.append(f"{when}: {errors}")
        else:
            why = difference(*results, self.twin.model.dtype, self.twin.call)
            if why:
                raise Different(f"{when}: {why}")
            patch = self.ours.patch
            if patch is not None and patch.graph and len(results[0][1]) >= 3 and counts(patch) == before and not patch.reasons:
                raise Different(f"{when}: steps ran uncaptured without a reason")

    def _same_errors(self, when: str, expected, got) -> None:
        if type(expected) is type(got) or (got is not None and any(sentence in str(got) for sentence in REFUSED)):
            return
        if self.fixed and isinstance(expected, IndexError):
            return
        if expected is None:
            raise Different(f"{when}: the patched model raises {type(got).__name__}: {got}") from got
        raise Different(f"{when}: the twin raises {type(expected).__name__}: {expected}, the patched model {got!r}") from expected

    def close(self) -> None:
        """Restore global settings; after undo() the model must equal its twin."""
        for side in self.sides:
            for name in [name for name in side.taking_back if name in PROCESS]:
                side.taking_back.pop(name)(side)


PROCESS: set[str] = set()  # actions that change more than the model


def counts(patch) -> tuple | None:
    return patch and (patch.captures, patch.replays)


def difference(expected, got, dtype: torch.dtype, call: Call) -> str | None:
    """The differences between two results of generate() beyond rounding."""
    (ids, logits, seen), (our_ids, our_logits, our_seen) = expected, got
    if seen != our_seen:
        return f"the cache has seen {our_seen} tokens, the twin's {seen}"
    if ids.shape != our_ids.shape or [step.shape for step in logits] != [step.shape for step in our_logits]:
        shapes = [(tuple(i.shape), [tuple(step.shape) for step in l]) for i, l in ((ids, logits), (our_ids, our_logits))]
        return f"tokens and logits of {shapes[1]}, where the twin has {shapes[0]}"
    steps, rows = len(logits), len(ids)
    if any(len(step) != rows for step in logits):  # beams
        return None if torch.equal(ids, our_ids) else "other beams won"
    prompt = ids.shape[1] - steps
    alive = torch.ones(rows, dtype=torch.bool)
    for step in range(steps):
        a, b = logits[step][alive], our_logits[step][alive]
        if not len(a):
            break
        scale = a[a.isfinite()].abs().max().item() if a.isfinite().any() else 1.0
        bound = TOLERANCE.get(dtype, 1e-3) * max(scale, 1e-3)
        if not torch.allclose(a, b, rtol=0, atol=bound, equal_nan=True):
            return f"logits of step {step} differ by {(a - b).abs().max():.3g} of {scale:.3g}"
        same = ids[:, prompt + step] == our_ids[:, prompt + step]
        if not same[alive].all() and torch.equal(a, b):
            return f"the same logits of step {step} gave other tokens"
        alive &= same  # a tie that rounding decided: the texts differ from here on
    return None
