"""The processes of other ranks on this host: one that is killed ends without a report."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import weakref

Process = tuple[str, int]  # where its number is valid, "" if unknown; its number


def this_process() -> Process:
    """A name that the processes of one host and container have in common, and the number of this process."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid"), os.getpid()
    except OSError:  # not Linux
        return "", os.getpid()


class Processes:
    """Processes of this host, by rank. found: those of all ranks."""

    def __init__(self, found: dict[int, Process]):
        here, own = this_process()
        self._opened: dict[int, int] = {}
        for rank, (where, number) in found.items():
            if here and where == here and number != own and sys.platform == "linux":
                with contextlib.suppress(OSError):  # not permitted in some containers
                    self._opened[rank] = os.pidfd_open(number)
        weakref.finalize(self, _close, list(self._opened.values()))

    def has_ended(self, rank: int) -> bool:
        """Whether the process of this rank is known to have ended."""
        if (process := self._opened.get(rank)) is None:
            return False
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return bool(poll.poll(0))


def _close(opened: list[int]) -> None:
    for process in opened:
        os.close(process)
