"""The processes of other ranks on this host: one that is killed ends without a report.

/proc is read. Not every Python has `os.pidfd_open`: it depends on the kernel headers with which Python was compiled.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Process(NamedTuple):
    """where: what the processes of one host and container have in common, "" if unknown. begin: the time of its begin."""

    where: str
    number: int
    begin: str


def this_process() -> Process:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            where = file.read().strip() + os.readlink("/proc/self/ns/pid")
        return Process(where, os.getpid(), _status("self")[1])
    except OSError:  # not Linux
        return Process("", os.getpid(), "")


class Processes:
    """Processes of this host, by rank. found: those of all ranks."""

    def __init__(self, found: dict[int, Process]):
        here = this_process()
        others = {rank: each for rank, each in found.items() if here.where and each.where == here.where and each != here}
        # /proc may hide processes or be that of another container.
        self._watched = {rank: each for rank, each in others.items() if not _has_ended(each) or _is_free(each.number)}

    def has_ended(self, rank: int) -> bool:
        """Whether the process of this rank is known to have ended."""
        return rank in self._watched and _has_ended(self._watched[rank])


def _has_ended(process: Process) -> bool:
    try:
        state, begin = _status(process.number)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # of this process, such as too many open files
        return False
    return state in "ZX" or begin != process.begin  # a zombie, or another process with the same number


def _status(number: int | str) -> tuple[str, str]:
    """(state, time of the begin) of a process."""
    with open(f"/proc/{number}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()  # after the name, which may contain spaces
    return fields[0], fields[19]


def _is_free(number: int) -> bool:
    """Whether no process has this number."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
