"""Kernels compiled ahead of their first launch: by a process of its own (`child.py`), while this one goes on.

A launch of a kernel that is being compiled waits for it; one that nobody has begun compiles it itself. Whatever fails in the
other process, kernels are compiled at their first launch, as without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..host import gpu, launch
from . import locks
from .describe import Kernel, describe, hash_code

CHILD = Path(__file__).with_name("child.py")
MAX_WORKERS = 32


def why_not() -> str | None:
    """Why kernels cannot be compiled ahead in this process, as a sentence without its subject; None if they can."""
    if not gpu.HAS_TRITON or gpu.INTERPRETED:
        return "Triton is not installed" if not gpu.HAS_TRITON else "TRITON_INTERPRET=1 compiles none"
    from triton import knobs

    if knobs.compilation.always_compile or knobs.compilation.override or knobs.compilation.dump_ir:
        return "TRITON_ALWAYS_COMPILE, TRITON_KERNEL_OVERRIDE or TRITON_KERNEL_DUMP is set"
    if knobs.cache.manager_class is not None or knobs.runtime.add_stages_inspection_hook is not None:
        return "Triton's cache or its stages have been replaced"
    try:
        locks.folder().mkdir(parents=True, exist_ok=True)
        if os.access(locks.folder(), os.W_OK):
            return None
    except OSError:
        pass
    return f"{locks.folder()} cannot be written"


class Server:
    """One list of kernels, compiled by another process.

    total: their number. done: how many are compiled. failed: errors by the name of a kernel. ended: whether it has ended.
    """

    def __init__(self) -> None:
        """Start the process, which imports what it needs while the list is made. Raises OSError if there can be no process."""
        ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE") or 1), 1)
        workers = max(1, min((len(os.sched_getaffinity(0)) - 1) // ranks, MAX_WORKERS))
        own = {"TRITON_CACHE_DIR": str(locks.folder()), "HF_FASTATTN_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(CHILD), str(workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **own},
            start_new_session=True,  # Ctrl-C is for this process
        )
        self.total = self.done = 0
        self.failed: dict[str, str] = {}
        self.ended = threading.Event()
        with _lock:
            _servers.add(self)
            launch.compiling[:] = [_compiling]

    def run(self, kernels: Sequence[Kernel]) -> None:
        """Compile these kernels, the first ones first. Returns when all are compiled or the process has ended."""
        ranks, rank = (max(int(os.environ.get(f"LOCAL_{name}") or 0), 0) for name in ("WORLD_SIZE", "RANK"))
        first = len(kernels) * rank // max(ranks, 1)  # ranks begin at different places of the same list
        kernels = [*kernels[first:], *kernels[:first]]
        self.total = len(kernels)
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([kernel.as_json() for kernel in kernels]).encode() + b"\n")
            self.process.stdin.flush()
            hash_code(dict.fromkeys((kernel.module, kernel.name) for kernel in kernels))
            for line in self.process.stdout:
                number, error = json.loads(line)
                self.done += error is None
                if error is not None:
                    self.failed[kernels[number].name] = error
        except (OSError, ValueError):  # it has ended, or was closed
            pass
        finally:
            self.close()

    def close(self) -> None:
        """End the process."""
        with _lock:
            if self.ended.is_set():
                return
            self.ended.set()
            _servers.discard(self)
            if not _servers:
                launch.compiling.clear()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with its workers; no other process has its number before wait()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was to be written is of no use
                    pipe.close()


_servers: weakref.WeakSet[Server] = weakref.WeakSet()  # whose processes run
_lock = threading.Lock()
_known: dict[object, Kernel] = {}
_settled: set[str] = set()  # keys that this process has compiled or found on disk


@contextmanager
def _compiling(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Iterator[None]:
    """The context of a launch that may compile a kernel, for `launch.compiling`."""
    try:
        key = describe(kernel, args, named, gpu.arch(getattr(args[0], "base", args[0]).device), _known).key
    except Exception:  # a form of the user, which no other process knows
        key = ""
    if not key or key in _settled or locks.is_there(key):
        yield
    else:
        shown: list[str] = []
        with locks.locked(key, lambda: _show(shown)):
            if shown:
                print("\r" + " " * len(shown[-1]), end="\r", file=sys.stderr, flush=True)
            yield
    _settled.add(key)


def _show(shown: list[str]) -> None:
    """Say on a terminal how many kernels are compiled."""
    if not sys.stderr.isatty():
        return
    servers = [*_servers]
    text = f"hf_fastattn: {sum(s.done for s in servers)} of {sum(s.total for s in servers)} kernels compiled"
    if shown[-1:] != [text]:
        shown.append(text)
        print(f"\r{text}", end="", file=sys.stderr, flush=True)
