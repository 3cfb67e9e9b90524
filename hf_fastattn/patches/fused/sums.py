"""Sums and columns of the ranks that share a model, in its decode graphs: by kernels, not by the collectives of a process group.

A sum is one launch with the addition and the norm that follow it. A graph without collectives of NCCL also outlives them: after a
failure its launches can be ended (`Peers.release`). Tensors that the kernels do not support, and all forwards outside of graphs,
use the collectives of Transformers.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ... import hf
from ...attention import step as steps
from . import delayed as merged
from . import subclass
from .subclass import Forward

if TYPE_CHECKING:
    from ...kernels.decode.all_reduce import Peers


class _Thread(threading.local):
    peers: Peers | None = None


_thread = _Thread()


@contextlib.contextmanager
def over(peers: Peers | None) -> Iterator[None]:
    """A context in which the layers of `join` use this memory."""
    outer, _thread.peers = _thread.peers, peers
    try:
        yield
    finally:
        _thread.peers = outer


def join(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Let the layers that return sums or columns of all ranks compute them by kernels; returns these layers."""
    found = [(module, kind) for module in model.modules() if (kind := hf.collective_of(module)) is not None]
    for module, kind in found:
        subclass.replace_forward(module, lambda forward, module=module, kind=kind: _with_kernel(forward, module, kind))  # type: ignore[misc]
    return [module for module, _ in found]


def _with_kernel(forward: types.FunctionType, module: Any, kind: str) -> Forward:
    if kind == "lookup":
        return _lookup(forward, module)
    if kind in ("sum", "experts"):
        return hf.with_collective(forward, sum_of, adds_bias=kind == "sum")
    return hf.with_collective(forward, lambda x: columns_of(x, module.out_features), adds_bias=False)


def peers_of(x: torch.Tensor) -> Peers | None:
    """The memory for a tensor of a decode graph."""
    return _thread.peers if steps.captured() and subclass.has_kernels(x) else None


def sum_of(x: torch.Tensor) -> torch.Tensor | None:
    """x, which becomes its sum over the ranks; None, without a change, outside of decode graphs or if x is too large."""
    from ...kernels.decode import residual

    peers = peers_of(x)
    if peers is None or peers.why_not(x) is not None:
        return None
    delayed = merged.current()
    if delayed is None:
        residual.run(residual.Chain(x, peers=peers))
    else:
        delayed.sum_over_ranks(x, peers)
    return x


def columns_of(x: torch.Tensor, columns: int) -> torch.Tensor | None:
    """The columns of all ranks, of which each has as many; None outside of decode graphs or if the kernel refuses x."""
    from ...kernels.decode.all_gather import all_gather

    peers = peers_of(x)
    return all_gather(x, peers) if peers is not None and peers.world * x.shape[-1] == columns else None


def _lookup(forward: types.FunctionType, module: torch.nn.Embedding) -> Forward:
    own: Any = type(module).forward

    def lookup(input: torch.Tensor) -> Any:
        shared, weight = module._parameters["weight"], hf.local(module.weight)
        peers, count = peers_of(weight), module.num_embeddings
        rows = 0 if peers is None else -(count // -peers.world)  # of a rank: they are divided as by torch.chunk
        if peers is None or rows * (peers.world - 1) >= count:  # the last rank would have none
            return forward(input)
        there = input - peers.rank * rows
        here = there.clamp(0, weight.shape[0] - 1)
        module._parameters["weight"] = weight
        try:
            out = own(module, here).masked_fill_((here != there)[..., None], 0)
        finally:
            module._parameters["weight"] = shared
        total = sum_of(out)
        return forward(input) if total is None else total

    return lookup
