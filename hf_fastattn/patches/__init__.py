"""patch(): sets attention, cache and decode graph of one model in one call, which can be undone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, ParamSpec

from .. import hf, registry
from ..streaming import Settings
from . import ahead
from .graphs.state import MARK
from .patched import Change, Patch
from .preflight import (
    OLD_NAME,
    Adapted,
    check_chunks,
    check_model,
    check_peer_memory,
    find_model,
    which_cache,
    which_kinds,
    which_kv_dtype,
    which_settings,
    which_shares,
)
from .ranks.ranks import refusing

__all__ = ["Change", "Patch", "patch", "unpatch"]

P = ParamSpec("P")


def _without_old_name(function: Callable[P, Patch]) -> Callable[P, Patch]:
    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> Patch:
        if "kv" in options:
            raise TypeError(OLD_NAME)
        return function(*args, **options)

    return call


@_without_old_name
def patch(
    target: hf.PreTrainedModel | hf.Pipeline | Adapted,
    backend: str = "lean",
    *,
    cache: Literal["auto", "preallocated", "rolling", "linear"] | None = "auto",
    graph: bool = True,
    fuse: bool = True,
    kv_dtype: Literal["int8", "fp8"] | None = None,
    kv_sharding: Literal["heads", "sequence"] = "heads",
    window: int | None = None,
    sinks: int | None = None,
    clamp_positions: bool = False,
    peer_memory: bool | None = None,
    keep_graphs: bool = False,
    prefill_chunk: Literal["auto"] | None = None,
    compile: Literal["ahead", "lazy"] = "ahead",
) -> Patch:
    """Make generate() of one model run `backend`, with a cache of this package and one CUDA graph per decode step.

    target: a model, a text-generation pipeline or a PEFT model. cache: "preallocated" keeps all tokens, in buffers that stay in
    place; "rolling" keeps the tokens that "streaming" sees, in constant memory; "linear" keeps the sums of linear attention;
    "auto" selects the one for the backend; None leaves the choice to Transformers. graph=False runs every step from Python.
    fuse=True replaces, on GPUs and with the model's roundings: norms (one launch instead of six or more), the rotation of queries
    and keys (one instead of ten or more), the product in the MLP (computed in place), a GELU that the model computes in parts
    (rounded once), a quantile that Gemma 3n reads on the host in each forward, the experts of a mixture and their choice (up to
    64 tokens), the one-token steps of layers with a recurrent state (two launches instead of forty), the draw of a token (two
    launches), and, in decode graphs of up to 64 tokens in 16 bits, cuBLAS in linear layers. fuse=False replaces none.

    kv_dtype: "int8" or "fp8" stores K and V in 8 bits, an approximation: half the memory, and half of what a step reads of a long
    text. The first prompt of a cache is read without it. Layers with a sliding window keep K and V as the model computes them.
    For "lean", "split_kv" and "batch_invariant", on one rank.

    kv_sharding: how ranks of tensor parallelism divide K and V of layers that keep all tokens. With "heads" each rank has the KV
    heads that it computes. With "sequence" it has a share of the tokens, with all KV heads: for models with fewer KV heads than
    ranks, and for those whose plan keeps all KV heads on every rank.

    window, sinks: for "streaming", the numbers of last and of first tokens that every query sees (sinks: None for 4).
    clamp_positions: for models with learned positions (OPT), gives every token beyond the last position the last position, which
    is an approximation.

    peer_memory, for a model under tensor parallelism: whether sums over the ranks in decode graphs are kernels that write to the
    memory of the other GPUs, and not collectives of the process group. None: if all GPUs support it. True: require it, or a
    ValueError with the reason.

    keep_graphs: a graph of steps that run your own code, which is of no installed package, is valid for one call of generate(),
    because such code may read anything. True keeps it: you promise that nothing changes that this code reads besides its inputs
    and the model's weights. After a change call undo() and patch() again.

    prefill_chunk: "auto" reads a prompt in chunks, as large as possible, if its activations as a whole do not fit into the free
    memory of the GPU. None leaves that to generate(prefill_chunk_size=...), which also replaces "auto" in a call.

    compile: "ahead" compiles the kernels of a model on a GPU from now on, in other processes, before they are needed; "lazy"
    compiles each at its first launch. Both keep them in Triton's cache on disk.

    Returns a Patch. Print it to see what changed. Use it in a `with` block or call its undo() to undo everything. Only this
    instance changes; a deepcopy of the model has a patch of its own. A patched model keeps its Patch, which is returned again for
    equal arguments.

    Raises ValueError or TypeError, with the reason, for a model that cannot run this or is patched with other arguments, and then
    changes nothing.
    """
    model = find_model(target)
    with _claim(model):
        with refusing(model):
            flags = {"graph": graph, "fuse": fuse, "clamp_positions": clamp_positions, "keep_graphs": keep_graphs}
            for name, value in flags.items():
                if not isinstance(value, bool):
                    raise TypeError(f"{name} must be True or False; got {value!r}.")
            chosen = registry.get(backend)
            kind = which_cache(cache, chosen, graph)
            arguments: dict[str, object] = {"backend": backend, "cache": kind, **flags}
            arguments |= {"window": window, "sinks": Settings.sinks if sinks is None and chosen.streaming else sinks}
            arguments |= {"kv_sharding": kv_sharding, "peer_memory": peer_memory, "kv_dtype": kv_dtype}
            arguments |= {"prefill_chunk": prefill_chunk}
            arguments["compile"] = _which_compile(compile)
            if (found := patch_of(model)) is not None and found.is_of(model, arguments):
                return found
            check_model(model, chosen)
            shares = which_shares(model, kind, kv_sharding)
            streaming = which_settings(model, chosen, window, sinks, clamp_positions)
            kinds = which_kinds(model, kind)
            which_kv_dtype(model, chosen, kind, kv_dtype)
            if peer_memory:
                check_peer_memory(model, graph and fuse)
            check_chunks(model, prefill_chunk, kind)
        made = Patch(model, backend, kinds, graph, fuse, streaming, shares, peer_memory, keep_graphs, kv_dtype)
        made.arguments = arguments
        if prefill_chunk is not None:
            made.read_in_chunks()
        made.ahead = ahead.begin(model, compile == "lazy")
        return made


def _which_compile(asked: str) -> str:
    if asked not in ("ahead", "lazy"):
        raise ValueError(f'compile must be "ahead" or "lazy"; got {asked!r}.')
    return asked


def patch_of(model: hf.PreTrainedModel) -> Patch | None:
    """The Patch of a model; None if it is not patched."""
    found: Patch | None = vars(model).get(MARK)
    return found


_claims: dict[int, object] = {}  # by the id of a model that a thread is changing


@contextmanager
def _claim(model: hf.PreTrainedModel) -> Iterator[None]:
    """The time of a patch() or unpatch() of a model. Raises ValueError if another thread is in one."""
    claim = object()
    if _claims.setdefault(id(model), claim) is not claim:  # one operation, during which no other thread runs
        raise ValueError(
            f"Another thread is in patch() or unpatch() of this {type(model).__name__}. Call them from one thread; all threads "
            "may then call generate()."
        )
    try:
        yield
    finally:
        del _claims[id(model)]


def unpatch(target: hf.PreTrainedModel | hf.Pipeline | Adapted) -> None:
    """Undo patch() on this model, pipeline or PEFT model. Raises ValueError if it is not patched."""
    model = find_model(target)
    with _claim(model):
        if (found := patch_of(model)) is None:
            raise ValueError(f"This {type(model).__name__} is not patched; there is nothing to undo.")
        found.undo()
