"""Which small layers and steps of linear layers of a model patch() fuses on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from .. import hf
from ..patches.fused import subclass

Rows = list[dict[str, str]]


def small_layers(model: torch.nn.Module) -> tuple[Rows, Rows]:
    """(what runs how and why, what was refused and why)."""
    runs: Rows = []
    refused: Rows = []
    kinds: dict[str, tuple[Callable[[torch.nn.Module], bool], Callable[[torch.nn.Module], bool]]] = {
        "norms": (lambda module: "Norm" in type(module).__name__ and not module._modules, _is_known_norm),
        "rotation of queries and keys": (_rotates, lambda m: any(map(hf.is_rotation, _rotations(m)))),
        "steps of linear layers": (_has_steps, lambda m: hf.mixer_of(type(m).forward) is not None),
        "choice of experts": (_routes, lambda m: hf.routing(type(m).forward, m) is not None),
    }
    for what, (is_one, is_known) in kinds.items():
        found: dict[bool, set[str]] = {True: set(), False: set()}
        for module in filter(is_one, model.modules()):
            found[subclass.is_fused(module) or is_known(module)].add(type(module).__name__)
        if found[True]:
            how = "two launches each" if is_one is _has_steps else "one launch each"
            runs.append({"what": what, "how": how, "why": f"with patch(): {', '.join(sorted(found[True]))}"})
        if found[False]:
            why = f"The code of {', '.join(sorted(found[False]))} is not a known formula, and runs as it is."
            refused.append({"what": f"fused {what}", "why": why})
    return runs, refused


def _is_known_norm(module: torch.nn.Module) -> bool:
    return hf.norm_of(module) is not None or hf.gated_norm_of(module) is not None


def _has_steps(module: torch.nn.Module) -> bool:
    return hasattr(module, "layer_idx") and any(isinstance(child, torch.nn.Conv1d) for child in module.children())


def _routes(module: torch.nn.Module) -> bool:
    return hasattr(module, "top_k") and type(module).__name__.lower().endswith("router")


def _rotations(module: torch.nn.Module) -> Iterable[hf.Functions]:
    return hf.rotations_in(type(module).forward).values()


def _rotates(module: torch.nn.Module) -> bool:
    return any(_rotations(module)) or (subclass.is_fused(module) and hf.is_attention(module))
