"""The calls of generate() in progress, and which of their loops may run a step ahead of the host."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from ... import hf
from ...caches.stored import StoredCache
from .forwards import Forwards


@dataclass
class Call:
    """A generate() in progress. code: its arguments with code that is not of Transformers. forwards: None if not captured.

    stock_loop: whether its loop is that of Transformers. processors: whether it is given logits processors, of any class, which
    may have a state. tokens: number of ids of each row that it is given. draws: whether its steps draw random numbers. cached: of
    the ids, those that the first forward of an assisted generation leaves out, because the cache holds them. samples: whether it
    only draws tokens from scores.
    """

    assistant: object
    code: list[str]
    stock_loop: bool
    processors: bool
    tokens: int
    cached: int = 0
    draws: bool = True
    samples: bool = False
    forwards: Forwards | None = None

    @property
    def own_loop(self) -> bool:
        """Whether the loop that runs is that of Transformers."""
        return self.stock_loop and hf.CUSTOM_LOOP not in self.code

    @property
    def stock(self) -> bool:
        """Whether only code of Transformers runs between its steps."""
        return self.stock_loop and not self.code

    def may_wait(self, device: torch.device) -> bool:
        """Whether its loop may run a step ahead, as far as this rank knows before the first forward."""
        return self.stock and not self.processors and records_events(device)


class CallsOfThread(threading.local):
    """calls: those in progress in this thread, innermost last."""

    def __init__(self) -> None:
        self.calls: list[Call] = []


running = CallsOfThread()  # of any model


def records_events(device: torch.device) -> bool:
    """Whether Transformers' loop can record events on this device: it takes the stream of the current one."""
    return device.type == "cuda" and device.index == torch.cuda.current_device()


@dataclass
class Ahead:
    """The loop of a call that launches a step before the host knows that it is needed: see `hf.Ahead`."""

    forwards: Forwards
    random: torch.Generator | None

    def next_is_ready(self, kept: bool) -> bool:
        """Whether the next step is a replay in buffers that have room: it runs no Python of the model and cannot fail. kept:
        whether the caller has the cache, from which it has to be removed if it was one too many."""
        storage, limit = self.forwards.replayed, self.forwards.positions
        if storage is None or not (storage.holds(storage.seen + 1) and (storage.can_undo or not kept)):
            return False
        return limit is None or storage.endless or storage.seen < limit


def ahead(call: Call, device: torch.device, cache: object) -> Ahead | None:
    """How the loop of a generate() may run a step ahead, or None.

    Code of the caller between the steps would run once more.
    """
    forwards = call.forwards
    if forwards is None or not (call.may_wait(device) and forwards.graphs.ranks.may_wait):
        return None
    if not isinstance(cache, StoredCache):
        return None
    return Ahead(forwards, hf.generator_of(device) if call.draws else None)
