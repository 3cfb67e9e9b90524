"""Graphs that are captured after the reply of a generate(), for the messages that follow: no token waits for them."""

from __future__ import annotations

import math
import time

import torch

from ... import hf
from ...caches.contract import Storage
from ..graphs import policy
from ..graphs.entry import KEEP, PADDED, Inputs, unpaddable
from ..graphs.policy import NEVER, SIZES, most_of_prompt
from ..graphs.undo import Mark, undo
from .forwards import Forwards


def capture_wanted(forwards: Forwards, began: float, alone: bool) -> None:
    """Capture graphs of the sizes that prompts and messages of a call wanted, the cheapest first. All calls together spend FIRST
    seconds and SHARE of their time on it.

    began: when the call did, by time.perf_counter(). alone: whether no other thread is in a call of the model; the caller
    keeps it so. The reply is the caller's, so what fails here is not raised: the size is read from Python then. Several
    ranks capture none: one that has ended its call must not wait for those that have not.
    """
    graphs, device = forwards.graphs, forwards.model.device
    graphs.budget += policy.SHARE * (time.perf_counter() - began)
    sizes = _sizes(forwards) if alone and graphs.rehearsed and forwards.may_capture_later() else ()
    if sizes and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    now = time.perf_counter()
    until = math.inf if graphs.everything else now + graphs.budget
    needed = {size: graphs.late_for.get(size, (1, 0.0)) for size in sizes}
    sizes = tuple(size for size, (steps, before) in needed.items() if now + steps * graphs.seconds + before <= until)
    if not sizes:
        return
    with torch.no_grad(), graphs.lock:
        replays, seconds = graphs.replays, graphs.seconds
        try:
            forwards.present.forget()
            forwards.present.compare()
            before = time.perf_counter() - now
            for size in sizes:
                if graphs.closed:
                    break
                graphs.late_for.pop(size, None)
                if steps := _capture(forwards, size, until):
                    graphs.late_for[size] = steps, before
        except Exception as error:
            if "no memory" in str(error):
                graphs.late = False
                name = type(forwards.model).__name__
                hf.warn(f"{name}.generate() captures no more graphs after its replies: {error}.")
        finally:
            graphs.replays = replays
            if graphs.seconds != seconds:  # a step has run; a try without time takes nothing of what is saved for the next one
                graphs.budget = max(0.0, graphs.budget - (time.perf_counter() - now))


def _sizes(forwards: Forwards) -> tuple[int, ...]:
    """The sizes to capture; none if a step cannot be run and undone as if it had never been."""
    graphs, storage, given = forwards.graphs, forwards.storage, forwards.prompted
    if not given or storage is None:
        return ()
    rows, seen = len(given["input_ids"]), storage.seen
    if storage.rows != rows or not seen or forwards.refused is not None or unpaddable(given) is not None:
        return ()
    if storage.resized or storage.cut_short or not _has_room(forwards, storage):
        return ()
    masked = storage is not forwards.unmasked and given.get("attention_mask") is not None
    there = graphs.sizes(storage, rows, given.get(KEEP) == 1, masked)
    most = most_of_prompt(storage, rows, forwards.most)
    asked = graphs.asked[storage]
    chosen = {size for size in (SIZES if graphs.everything else forwards.wanted) if asked.get(size, 0) >= 0}
    return tuple(policy.wanted(forwards.cost.over(storage), rows, seen, chosen, there, most))


def _has_room(forwards: Forwards, storage: Storage) -> bool:
    more = storage.seen + 1
    return storage.can_undo and storage.holds(more) and (forwards.positions is None or more <= forwards.positions)


def _capture(forwards: Forwards, size: int, until: float) -> int:
    """Capture the graph of one size. Returns 0, or, if there is no time, how many times the step would run."""
    graphs, storage, given = forwards.graphs, forwards.storage, forwards.prompted
    assert storage is not None  # see `_sizes`
    ids = given["input_ids"]
    cache = forwards.around(storage)
    inputs: Inputs = {**given, hf.CACHE: cache}
    for name in PADDED & given.keys():
        if given[name] is not None:
            inputs[name] = given[name][..., :1].expand(*given[name].shape[:-1], size)
    live = max(1, min(size, storage.unused))  # tokens that are no padding
    counted = (live,) if live > 1 else ()
    storage.sync(ids.device, *counted)
    forwards.set_mask(cache, inputs, size)
    entry = forwards.present.entry(cache, inputs, size)
    if entry.graph is not None or entry.refused is not None:
        if entry.rehearsal is not None and entry.refused is not None:  # by what its step did
            graphs.asked[storage][size] = NEVER  # nor is the model compared for it after each reply
        return 0
    passes = 2 if forwards.recorder.must_rehearse(entry) else 1
    if time.perf_counter() + passes * graphs.seconds > until:
        return passes
    for _ in range(passes):
        mark = Mark(storage, entry.device)
        try:
            entry.copy_in(inputs)
            forwards.recorder.step(entry, storage, inputs, counted)
        except Exception as error:
            entry.refused = str(error)
            graphs.asked[storage][size] = NEVER
            raise
        finally:
            undo(storage, mark)
            storage.sync(ids.device, *counted)
        if entry.refused is not None:
            break
    return 0
