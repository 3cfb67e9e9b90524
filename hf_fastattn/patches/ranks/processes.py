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
        return Process(where, os.getpid(), _begin_of(os.getpid()))
    except OSError:  # not Linux
        return Process("", os.getpid(), "")


class Processes:
    """Processes of this host, by rank. found: those of all ranks. One that /proc hides is not watched."""

    def __init__(self, found: dict[int, Process]):
        here = this_process()
        others = {rank: each for rank, each in found.items() if here.where and each.where == here.where and each != here}
        self._watched = {rank: each for rank, each in others.items() if not _has_ended(each)}

    def has_ended(self, rank: int) -> bool:
        """Whether the process of this rank is known to have ended."""
        return rank in self._watched and _has_ended(self._watched[rank])


def _has_ended(process: Process) -> bool:
    try:
        return _begin_of(process.number) != process.begin  # another process may have the same number
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # of this process, such as too many open files
        return False


def _begin_of(number: int) -> str:
    """The time of the begin of a process, "" of a zombie."""
    with open(f"/proc/{number}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()  # after the name, which may contain spaces
    return "" if fields[0] in "ZX" else fields[19]
