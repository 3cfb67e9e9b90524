"""patch(): sets attention, cache and decode graph of one model in one call, which can be undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .. import hf, registry
from .preflight import check_model, check_peer_memory, find_model, which_cache, which_settings, which_shares, which_windows
from .ranks import refusing
from .state import MARK
from .swap import Change, Patch

__all__ = ["Change", "Patch", "patch", "unpatch"]


def patch(
    target: object,
    backend: str = "lean",
    *,
    cache: str | None = "auto",
    graph: bool = True,
    fuse: bool = True,
    kv: str = "heads",
    window: int | None = None,
    sinks: int | None = None,
    clamp_positions: bool = False,
    peer_memory: bool | None = None,
    keep_graphs: bool = False,
) -> Patch:
    """Make generate() of one model run `backend`, with a cache of this package and one CUDA graph per decode step.

    target: a model, a text-generation pipeline or a PEFT model. cache: "static" keeps all tokens, in preallocated buffers;
    "rolling" keeps the tokens that "streaming" sees, in constant memory; "auto" selects the one for the backend; None leaves the
    choice to Transformers. graph=False runs every step from Python. fuse=True replaces, on GPUs and with the model's roundings:
    norms (one launch instead of six or more), the rotation of queries and keys (one instead of ten or more), the product in the
    MLP (computed in place), the experts of a mixture and their choice (up to 64 tokens), and, in decode graphs of up to 64 tokens
    in 16 bits, cuBLAS in linear layers. fuse=False replaces none.

    kv: how ranks of tensor parallelism divide K and V of layers that keep all tokens. With "heads" each rank has the KV heads
    that it computes. With "sequence" it has a share of the tokens, with all KV heads: for models with fewer KV heads than ranks,
    and for those whose plan keeps all KV heads on every rank.

    window, sinks: for "streaming", the numbers of last and of first tokens that every query sees (sinks: None for 4).
    clamp_positions: for models with learned positions (OPT), gives every token beyond the last position the last position, which
    is an approximation.

    peer_memory, for a model under tensor parallelism: whether sums over the ranks in decode graphs are kernels that write to the
    memory of the other GPUs, and not collectives of the process group. None: where all GPUs of the ranks can. True: or a
    ValueError with the reason.

    keep_graphs: a graph of steps that run your own code, which is of no installed package, is valid for one call of generate(),
    because such code may read anything. True keeps it: you promise that nothing changes that this code reads besides its inputs
    and the model's weights. After a change call undo() and patch() again.

    Returns a Patch. Print it to see what changed. Use it in a `with` block or call its undo() to undo everything. Only this
    instance changes; a deepcopy of the model has a patch of its own.

    Raises ValueError or TypeError, with the reason, for a model that cannot run this, and then changes nothing.
    """
    model = find_model(target)
    with _claim(model):
        with refusing(model):
            if MARK in vars(model):
                raise ValueError(f"This {type(model).__name__} is already patched; call hf_fastattn.unpatch() on it first.")
            flags = {"graph": graph, "fuse": fuse, "clamp_positions": clamp_positions, "keep_graphs": keep_graphs}
            for name, value in flags.items():
                if not isinstance(value, bool):
                    raise TypeError(f"{name} must be True or False; got {value!r}.")
            chosen = registry.get(backend)
            cache = which_cache(cache, chosen, graph)
            check_model(model, chosen)
            shares = which_shares(model, cache, kv)
            streaming = which_settings(model, chosen, window, sinks, clamp_positions)
            windows = which_windows(model, chosen, cache, streaming)
            if peer_memory:
                check_peer_memory(model, graph and fuse)
        return Patch(model, backend, windows, graph, fuse, streaming, shares, peer_memory, keep_graphs)


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


def unpatch(target: object) -> None:
    """Undo patch() on this model, pipeline or PEFT model. Raises ValueError if it is not patched."""
    model = find_model(target)
    with _claim(model):
        found = vars(model).get(MARK)
        if found is None:
            raise ValueError(f"This {type(model).__name__} is not patched; there is nothing to undo.")
        found.undo()
