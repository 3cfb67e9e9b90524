"""The program that compiles kernels for another process, in several processes of its own. `server.py` starts it.

It reads one line, the descriptions in JSON, and writes a line for each kernel: its number, and the error or null. It needs no
GPU. It ends after the last kernel, if one of its processes is killed, and when the process that has started it ends, in
whatever way. It imports Triton and hf_fastattn.kernels alone, and once: its workers are forks. To import torch would take
longer than all of that, and kernels need it in functions of the host alone.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import select
import signal
import sys
import threading
import types
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

kernels: list[Any] = []
SLOW = 2.0  # a kernel whose compilation takes more seconds is slow


class Absent(types.ModuleType):
    """A module whose names are classes without content."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def leave_out() -> None:
    """Let the files of kernels be imported without torch and Transformers."""
    package = types.ModuleType("hf_fastattn")
    package.__path__ = [str(Path(__file__).parents[2])]
    sys.modules["hf_fastattn"] = package
    sys.modules["torch"] = Absent("torch")


def main(workers: int) -> None:
    parent = os.getppid()
    leave_out()
    from hf_fastattn.kernels.ahead import describe

    describe.prepare()
    kernels.extend(describe.Kernel(*fields) for fields in json.loads(sys.stdin.readline() or "[]"))
    for name in {kernel.module for kernel in kernels}:
        importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(max(1, min(workers, len(kernels))), fork, _begin) as pool:
        tasks = [pool.submit(_compile, number) for number in order(workers)]  # after which all workers run
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        for task in as_completed(tasks):
            print(json.dumps(task.result()), flush=True)


def order(workers: int) -> list[int]:
    """The numbers of the kernels in the order in which they begin: as they are, but the slowest ones first if half of the workers
    can take them all."""
    slow = [number for number, kernel in enumerate(kernels) if kernel.seconds > SLOW]
    return sorted(range(len(kernels)), key=lambda number: 2 * len(slow) > workers or number not in slow)


def _end_with(parent: int) -> None:
    """End all processes when the one that has started them ends, or closes their input."""
    while os.getppid() == parent and not select.select([sys.stdin], [], [], 1.0)[0]:
        pass  # a fork of it may still hold the other end of stdin
    os.killpg(0, signal.SIGKILL)  # `server` has begun a session


def _begin() -> None:
    """What a worker does first."""
    os.nice(5)  # the first process goes on
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):  # whose other ends must notice the end of the first process
        os.dup2(nothing, standard)


def _compile(number: int) -> tuple[int, str | None]:
    from triton.runtime import driver

    from hf_fastattn.kernels.ahead import describe, locks

    target = describe.target(kernels[number].arch)  # for code that depends on it; Triton would ask torch and a GPU
    driver.set_active(types.SimpleNamespace(get_current_target=lambda: target))
    try:
        with locks.locked(kernels[number].key):
            kernels[number].compile()
    except Exception as failed:
        return number, f"{type(failed).__name__}: {failed}"[:1000]
    return number, None


if __name__ == "__main__":
    main(int(sys.argv[1]))
