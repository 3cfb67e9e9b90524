"""patch(): attention, cache and decode graph of one model, in one call that can be undone."""

from __future__ import annotations

from .. import registry
from .preflight import check_model, find_model, which_cache, which_settings, which_windows
from .swap import Change, Patch
from .walker import MARK

__all__ = ["Change", "Patch", "patch", "unpatch"]


def patch(
    target: object,
    backend: str = "lean",
    *,
    cache: str | None = "auto",
    graph: bool = True,
    fuse: bool = True,
    window: int | None = None,
    sinks: int | None = None,
    clamp_positions: bool = False,
) -> Patch:
    """Make plain generate() of one model run `backend`, on a cache of ours, with one CUDA graph per decode step.

    target: a model, a text-generation pipeline or a PEFT model. cache: "static" keeps everything, in preallocated buffers;
    "rolling" what "streaming" sees, in constant memory; "auto" is the one that fits the backend; None leaves the choice to
    Transformers. graph=False runs every step uncaptured. fuse=True replaces, on GPUs and with the model's roundings: RMSNorm (one
    launch instead of six), the rotation of queries and keys (one instead of ten), the MLP's product (in place), and, in decode
    graphs of one row in 16 bits, cuBLAS in linear layers. fuse=False replaces none of these.

    window, sinks: for "streaming", the last and the first tokens that every query sees (sinks: 4 where None). clamp_positions:
    for models with learned positions (OPT), gives every token beyond the last position the last position (an approximation).

    Returns a Patch: print it for what changed, use it in a `with` block or call its undo() to take everything back. Only this
    instance changes; a deepcopy of it is patched too, on its own.

    Raises ValueError or TypeError, in a sentence, for a model that cannot run this, and then changes nothing.
    """
    model = find_model(target)
    if MARK in vars(model):
        raise ValueError(f"This {type(model).__name__} is patched already; call hf_fastattn.unpatch() on it first.")
    chosen = registry.get(backend)
    cache = which_cache(cache, chosen, graph)
    check_model(model, chosen)
    streaming = which_settings(model, chosen, window, sinks, clamp_positions)
    windows = which_windows(model, chosen, cache, streaming)
    return Patch(model, backend, windows, graph, fuse, streaming)


def unpatch(target: object) -> None:
    """Undo patch() on this model, pipeline or PEFT model. Raises ValueError if it is not patched."""
    model = find_model(target)
    if MARK not in vars(model):
        raise ValueError(f"This {type(model).__name__} is not patched; there is nothing to undo.")
    vars(model)[MARK].undo()
