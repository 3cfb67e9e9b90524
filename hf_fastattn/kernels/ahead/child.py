"""The program that compiles kernels for another process, in several processes of its own. `server.py` starts it.

It reads one line, the descriptions in JSON, and writes a line for each kernel: its number, and the error or null. It needs no
GPU. It ends after the last kernel, and when the process that has started it ends, in whatever way. It imports torch, Triton and
hf_fastattn.kernels alone, and once: its workers are forks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main(workers: int) -> None:
    parent = os.getppid()
    package = types.ModuleType("hf_fastattn")  # without its imports, of Transformers
    package.__path__ = [str(Path(__file__).parents[2])]
    sys.modules["hf_fastattn"] = package
    from hf_fastattn.kernels.ahead import describe, locks

    describe.prepare()
    kernels = [describe.of_json(fields) for fields in json.loads(sys.stdin.readline() or "[]")]
    for name in {kernel.module for kernel in kernels}:
        importlib.import_module(name)
    waiting = iter(range(len(kernels)))
    selector = selectors.DefaultSelector()
    children: dict[int, tuple[socket.socket, int]] = {}
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    with contextlib.suppress(OSError):  # no more processes: fewer workers
        for _ in range(min(workers, len(kernels))):
            ours, theirs = socket.socketpair()
            if (pid := os.fork()) == 0:
                ours.close()
                for each in children.values():
                    each[0].close()
                _work(theirs, kernels, locks)
            theirs.close()
            selector.register(ours, selectors.EVENT_READ)
            children[ours.fileno()] = (ours, pid)
    for end, _ in children.values():
        _give(end, waiting)
    try:
        while children:
            for key, _ in selector.select(timeout=1.0):
                if key.fd == sys.stdin.fileno():
                    return
                end, _ = children[key.fd]
                answer = end.recv(1 << 16)
                if answer:
                    sys.stdout.write(answer.decode())
                    sys.stdout.flush()
                if not answer or not _give(end, waiting):
                    selector.unregister(end)
                    children.pop(key.fd)[0].close()
            if os.getppid() != parent:  # a fork of it may still hold the other end of stdin
                return
    finally:
        for _, pid in children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def _give(end: socket.socket, waiting: Iterator[int]) -> bool:
    """Send the number of the next kernel to a worker. Returns False if none is left, or the worker has ended."""
    number = next(waiting, None)
    with contextlib.suppress(OSError):
        if number is not None:
            end.send(f"{number}\n".encode())
            return True
    return False


def _work(end: socket.socket, kernels: list[Any], locks: Any) -> None:
    """What a worker does: compile the kernels whose numbers it reads. It ends with the other process."""
    os.nice(5)  # the first process goes on
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):  # whose other ends must notice the end of the first process
        os.dup2(nothing, standard)
    while number := end.recv(64):
        kernel, error = kernels[int(number)], None
        try:
            with locks.locked(kernel.key):
                kernel.compile()
        except BaseException as failed:
            error = f"{type(failed).__name__}: {failed}"[:1000]
        end.send(f"{json.dumps([int(number), error])}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
