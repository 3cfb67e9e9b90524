"""Small values exchanged between the ranks of a model on their hosts, and the end of all ranks when one of them fails.

It uses the key-value store of torch.distributed and no collective, so a rank that waits can be interrupted, sees the failure of
another, and gives up after a limit. During a call of generate() a thread looks for the failure of another rank. The rank may
then be blocked in a collective in which the failed rank does not take part. If it does not leave the call by itself, the thread
aborts the process group. A rank that is killed reports nothing, so ranks of one host look at each other's processes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .facts import Malformed, decode, encode
from .processes import Processes

__all__ = ["WAIT"]

WAIT = 600.0  # seconds that a rank waits for another that is slow
GRACE = 2.0  # seconds in which ranks leave a call by themselves, after one of them has failed
EXIT = 10.0  # seconds that the exit of a process waits for an abort
POLL = 0.25  # seconds between two checks for a failure
SHORTEST, PAUSE = 5e-5, 0.02  # seconds between two checks for the values of other ranks, at least and at most
KEPT = 8  # calls whose keys stay in the store, for ranks that are behind
_WITHDRAWN = ["", None]  # the value of a rank that no longer waits for the others
_LEFT = "its patch was undone, its process ended, or an earlier call failed there."
_NO_STORE = "The process that holds the store of torch.distributed (rank 0, or torchrun's) has ended."


class End(NamedTuple):
    """How a call ended on one rank.

    steps: number of forwards that it began. error: None if it returned. usual: whether the error is an Exception. tokens: a
    checksum of the new tokens, None if they are unknown.
    """

    steps: int
    error: str | None
    usual: bool
    tokens: int | None = None


class Call:
    """One generate() on this rank; calls have the same number on all ranks.

    count: number of exchanges. steps: number of forwards. begun: the time when the last of them began. running: whether all
    ranks have agreed to run them. failure: a sentence, once another rank has failed. left: set when it ends.
    """

    def __init__(self, number: int):
        self.number = number
        self.count = self.steps = 0
        self.begun = time.monotonic()
        self.running = False
        self.failure: str | None = None
        self.left = threading.Event()


def nothing() -> None:
    """What an `Exchange` without graphs, or without kernels that wait, calls in their place."""


class Exchange:
    """The ranks of one process group. broken: a sentence, once the group was aborted."""

    def __init__(self, group: Any, ranks: list[int], store: Any, prefix: str, device: torch.device):
        self.group, self.ranks, self.device = group, ranks, device
        self.rank = torch.distributed.get_rank()
        self.store: Any = torch.distributed.distributed_c10d.PrefixStore(prefix, store)
        self.call = Call(0)  # that of patch()
        self.broken: str | None = None
        self.drop_graphs: Callable[[], object] = nothing  # neither refers to the model
        self.end_waits: Callable[[], object] = nothing  # those of the kernels for other ranks
        self._mine: list[tuple[int, str]] = []  # (number of the call, key) of the keys that this rank has set
        self.leave = weakref.finalize(self, _leave, self.store, self.rank)  # also called at the exit of the process
        self.processes = Processes({})
        if device.type == "cuda":
            threading.Thread(target=_guard, args=(weakref.ref(self),), name="hf_fastattn group", daemon=True).start()

    # ---- exchange ----

    def gather(self, what: str, mine: Any, limit: float | None = None) -> list[Any]:
        """The values of all ranks, in the order of the ranks. what: the place in the code; ranks that meet at other places raise.

        limit: seconds to wait; WAIT if None. Raises RuntimeError if a rank fails or does not come.
        """
        self.call.count += 1
        name = str(self.call.count)
        self._set(name, (what, mine))
        try:
            found = self._wait(what, self._keys(name), WAIT if limit is None else limit)
        except BaseException:
            self._set(name, _WITHDRAWN)  # so that a later rank does not continue; it may be reading the key
            raise
        for rank, (place, _) in zip(self.ranks, found, strict=True):
            if place != found[0][0]:
                raise RuntimeError(
                    f"Rank {self.ranks[0]} is at {found[0][0]} while rank {rank} is at {place}: they run other code."
                )
        return [value for _, value in found]

    def _wait(self, what: str, keys: list[str], limit: float) -> list[Any]:
        began = time.monotonic()
        while (found := self._read(keys)) is None:
            waited = time.monotonic() - began
            pause = min(max(waited / 16, SHORTEST), PAUSE)  # a rank that comes late makes the others little later
            failed = self.failed(self.call) if pause == PAUSE else None
            if failed is None and waited > limit:
                late = [str(rank) for rank, key in zip(self.ranks, keys, strict=True) if self._read([key]) is None]
                failed = (
                    f"Rank{'s' * (len(late) > 1)} {', '.join(late)} did not reach {what} within {limit:.0f} seconds. All ranks "
                    "must call patch() and generate() in the same order."
                )
            if failed is not None and self._read(keys) is None:
                raise RuntimeError(failed)
            time.sleep(pause)
        return found

    def _read(self, keys: list[str]) -> list[Any] | None:
        """The values of these keys; None if one of them is missing or withdrawn."""
        if not self.store.check(keys):
            return None
        values = self.store.multi_get(keys)  # one message for all keys
        found = [decode(key, value) for key, value in zip(keys, values, strict=True)]
        return None if _WITHDRAWN in found else found

    def _of(self, call: Call, name: str, rank: int) -> Any:
        """A value of one rank; None if there is none."""
        found = self._read([f"{call.number}/{name}/{rank}"])
        return found and found[0]

    def _keys(self, name: str) -> list[str]:
        return [f"{self.call.number}/{name}/{rank}" for rank in self.ranks]

    def _set(self, name: str, value: object) -> None:
        key = f"{self.call.number}/{name}/{self.rank}"
        self.store.set(key, encode(value))
        self._mine.append((self.call.number, key))

    # ---- calls ----

    def begin(self) -> None:
        self.call = Call(self.call.number + 1)

    def run(self) -> None:
        """Begin the forwards of a call. A thread looks for the failure of another rank until the call ends."""
        self._set("steps", self.call.steps)
        self.call.begun = time.monotonic()
        self.call.running = True
        threading.Thread(target=_watch, args=(weakref.ref(self), self.call), name="hf_fastattn ranks", daemon=True).start()

    def end(self, error: BaseException | None, tokens: int | None = None) -> str | None:
        """Report the end of a call to the other ranks. Returns the failure of another rank that explains `error`, or None; if
        there is no error, what `_last` returns.

        After an error within the forwards it waits until all ranks have left the call. If they have not, or at different places,
        a collective may still wait for a rank that does not come, and the group is aborted.
        """
        call = self.call
        call.left.set()
        text = None if error is None else f"{type(error).__name__}: {error}".rstrip(": .") + "."
        mine = End(call.steps, text, isinstance(error, Exception), tokens)
        failed, ends = call.failure, [mine]
        try:
            self._set("end", mine)
            if text is not None:
                failed = failed or self.failed(call)
                self._set("failed", failed or f"Rank {self.rank} failed during generate(): {text}")
                ends = self._ends(GRACE if call.running and mine.usual else 0)
                failed = failed or self._killed(call)  # its connections end before its process
        except RuntimeError as error:
            failed = failed or _of_store(error)
        if text is None:
            return self._last()
        if call.running and not (len(ends) == len(self.ranks) and _harmless(ends)):
            self.abort(failed or f"generate() failed on this rank: {text}")
            self.leave()
        same = len(ends) == len(self.ranks) and all(end == mine for end in ends)
        return None if same else failed

    def _last(self) -> str | None:
        """Delete the keys of old calls. Returns a sentence with a rank that has generated other tokens, if this rank is the last
        to end the call and there is one."""
        try:
            for number, key in self._mine:
                if number <= self.call.number - KEPT:
                    self.store.delete_key(key)
            self._mine = [(number, key) for number, key in self._mine if number > self.call.number - KEPT]
            ends = self._read(self._keys("end"))
        except Malformed as error:
            return str(error)
        except RuntimeError:  # of the store
            return None
        return None if ends is None else self.other_tokens([End(*end).tokens for end in ends])  # on the last rank

    def other_tokens(self, found: list[int | None]) -> str | None:
        """A sentence with two ranks that have generated other tokens; None if there are none. found: checksums by rank."""
        known = [(rank, tokens) for rank, tokens in zip(self.ranks, found, strict=True) if tokens is not None]
        for rank, tokens in known:
            if tokens != known[0][1]:
                return (
                    f"Rank {rank} generated other tokens than rank {known[0][0]}. Logits processors, stopping criteria and hooks "
                    "must decide alike on all ranks."
                )
        return None

    def _ends(self, limit: float) -> list[End]:
        """How the call has ended, on the ranks that have left it within `limit` seconds."""
        end = time.monotonic() + limit
        while not self.store.check(self._keys("end")) and time.monotonic() < end:
            time.sleep(0.01)
        ends = []
        for rank in self.ranks:
            with contextlib.suppress(Malformed):  # which `failed` reports
                ends += [End(*found)] if (found := self._of(self.call, "end", rank)) else []
        self._set("bye", True)
        while self.rank == self.ranks[0] and time.monotonic() < end and not self.store.check(self._keys("bye")):
            time.sleep(0.01)  # its process may hold the store
        return ends

    # ---- failures ----

    def refuse(self, reason: str) -> None:
        """Tell the other ranks that this one takes part in no call, and why."""
        self.leave.detach()
        _leave(self.store, self.rank, reason)

    def failed(self, call: Call) -> str | None:
        """A sentence with the failure of another rank in a call; None if there is none."""
        try:
            for rank in self.ranks:
                if rank == self.rank:
                    continue
                if (reason := self._of(call, "failed", rank)) is not None:
                    return str(reason)
                if (found := self._of(call, "end", rank)) is not None:
                    end = End(*found)
                    if call.running and end.error is None and end.steps < call.steps:
                        return (
                            f"Rank {rank} ended generate() after {end.steps} forwards, and rank {self.rank} has begun another. "
                            "Stopping criteria must decide alike on all ranks."
                        )
                elif (gone := self._read([f"gone/{rank}"])) is not None:
                    return gone[0] or f"Rank {rank} has left: {_LEFT}"
            return self._killed(call)
        except RuntimeError as error:
            return _of_store(error)

    def behind(self, call: Call) -> str | None:
        """A sentence with a rank that has not begun the present forward of a call for WAIT seconds; None if there is none."""
        steps, begun = call.steps, call.begun
        try:
            self.store.set(f"{call.number}/steps/{self.rank}", encode(steps))
            for rank in self.ranks if time.monotonic() > begun + WAIT else ():
                at = self._of(call, "steps", rank)
                if self._of(call, "end", rank) is None and (at is None or at < steps):
                    return f"Rank {rank} did not begin forward {steps} of generate() within {WAIT:.0f} seconds."
        except RuntimeError as error:
            return _of_store(error)
        return None

    def _killed(self, call: Call) -> str | None:
        """A sentence with another rank whose process has ended in a call without a report; None if there is none."""
        for rank in self.ranks:
            if rank != self.rank and self.processes.has_ended(rank) and not self.store.check([f"{call.number}/end/{rank}"]):
                return f"The process of rank {rank} has ended."
        return None

    def abort(self, reason: str) -> None:
        """Abort the collectives of the group, which cannot be used afterwards. Returns after GRACE seconds at the latest.

        Graphs are dropped first: NCCL waits in an abort until no graph with its collectives is left. The process does not exit in
        the middle of an abort, as its thread would then end the process by a signal.
        """
        self.broken = self.broken or reason

        def run() -> None:
            for each in (self.drop_graphs, self.end_waits):
                each()
            with contextlib.suppress(RuntimeError, AttributeError):
                self.group.abort()

        thread = threading.Thread(target=run, name="hf_fastattn abort", daemon=True)
        thread.start()
        thread.join(GRACE)
        if thread.is_alive():
            atexit.register(thread.join, EXIT)


def _harmless(ends: list[End]) -> bool:
    """Whether no collective waits for a rank that has left: all ranks began the same forwards, and stopped at the same place."""
    if len({end.steps for end in ends}) > 1 or not all(end.usual or end.error is None for end in ends):
        return False
    # Before the first forward, after the last one, or by the same error.
    return ends[0].steps == 0 or any(end.error is None for end in ends) or len({end.error for end in ends}) == 1


def _leave(store: Any, rank: int, reason: str = "") -> None:
    with contextlib.suppress(Exception):  # the store may have ended before
        store.set(f"gone/{rank}", encode(reason))


def _of_store(error: RuntimeError) -> str:
    """A sentence for an error of the store: torch's DistStoreError and DistNetworkError, or a value that is none of ours."""
    return str(error) if isinstance(error, Malformed) else _NO_STORE


def _guard(of: weakref.ref[Exchange]) -> None:
    """Drop the graphs whenever a process group is being destroyed: NCCL waits until no graph with its collectives is left.

    The group may be another one. Then the graphs are captured again.
    """
    while (exchange := of()) is not None and exchange.leave.alive:
        if _is_destroying():
            exchange.drop_graphs()
        del exchange
        time.sleep(POLL)


def _is_destroying() -> bool:
    """Whether a thread is in destroy_process_group(), which tells nobody that it is called."""
    code, frames = torch.distributed.destroy_process_group.__code__, list(sys._current_frames().values())
    while frames:
        frame = frames.pop()
        if frame.f_code is code:
            return True
        if frame.f_back is not None:
            frames.append(frame.f_back)
    return False


def _watch(of: weakref.ref[Exchange], call: Call) -> None:
    while not call.left.wait(POLL):
        exchange = of()
        if exchange is None:
            return
        call.failure = exchange.failed(call) or exchange.behind(call)
        if call.failure is None:
            del exchange
            continue
        if call.left.wait(GRACE):
            return
        exchange.abort(call.failure)
        if call.left.wait(2 * GRACE):  # the failed rank takes about GRACE to end, and only then does Gloo's collective raise here
            return
        # Gloo, for one, cannot be aborted: this rank would wait for hours.
        with contextlib.suppress(RuntimeError):  # of the store
            exchange._set("failed", call.failure)
        exchange.leave()
        sys.stderr.write(f"hf_fastattn: {call.failure} This process ends, as its collective cannot be interrupted.\n")
        sys.stderr.flush()
        os._exit(1)
