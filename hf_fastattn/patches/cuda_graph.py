"""What records the launches of one decode step and replays them."""

from __future__ import annotations

import contextlib
import random
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TextIO, TypeVar

import torch

T = TypeVar("T")


class Graph(Protocol):
    def rehearse(self, body: Callable[[], T]) -> T:
        """Run body() once, as a warm-up; fail where it reads a value on the host, as a capture would but without its damage."""

    def capture(self, body: Callable[[], T]) -> T:
        """Record what body() launches, without running it; return what it returned, whose tensors every replay fills."""

    def replay(self) -> None: ...


class CudaGraph:
    """A torch.cuda.CUDAGraph. One graph of a device runs at a time, so those of a model share a memory pool.

    All captures of a device share one stream: libraries keep a workspace for every stream they ever saw.
    """

    _captured_on: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}
    _replayed_on: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}  # the last of them
    _lock = threading.Lock()
    _rehearsing = threading.RLock()

    def __init__(self, device: torch.device, shared: dict[str, Any]):
        self.device = device
        self.shared = shared
        self.graph = torch.cuda.CUDAGraph()

    def rehearse(self, body: Callable[[], T]) -> T:
        # As warnings and not as errors: the mode is the process's, and another thread may sync as it likes.
        heard: list[str] = []
        me = threading.get_ident()
        with self._rehearsing, warnings.catch_warnings():  # two at once would restore one another's state
            show, mode = warnings.showwarning, torch.cuda.get_sync_debug_mode()

            def hear(
                message: Warning | str,
                category: type[Warning],
                filename: str,
                lineno: int,
                file: TextIO | None = None,
                line: str | None = None,
            ) -> None:
                if "called a synchronizing" not in str(message):
                    show(message, category, filename, lineno, file, line)
                elif threading.get_ident() == me:
                    heard.append(f"{filename}:{lineno}")

            warnings.filterwarnings("ignore", "Synchronization debug mode")
            warnings.filterwarnings("always", ".*called a synchronizing")
            warnings.showwarning = hear
            torch.cuda.set_sync_debug_mode("warn")
            drawn = torch.random.get_rng_state(), random.getstate()
            try:
                result = body()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        if heard:
            raise RuntimeError(f"it reads a value on the host, at {heard[0]}")
        if not torch.equal(drawn[0], torch.random.get_rng_state()) or drawn[1] != random.getstate():
            raise RuntimeError("it draws random numbers on the host")
        return result

    def capture(self, body: Callable[[], T]) -> T:
        with self._lock, torch.cuda.device(self.device):  # one capture at a time: they share a stream
            outer = torch.cuda.current_stream(self.device)
            stream = self._captured_on.get(self.device)
            if stream is None:
                stream = self._captured_on[self.device] = torch.cuda.Stream(self.device)
            living = self.shared.setdefault("graphs", weakref.WeakSet())
            if "pool" not in self.shared or not living:  # a pool that its last graph has left takes no other
                self.shared["pool"] = torch.cuda.graph_pool_handle()
            pool = self.shared["pool"]
            try:
                # cuBLAS has a workspace for each stream. An older one could be freed under this graph when torch.compile
                # clears the workspaces, so the graph allocates its own in its memory pool.
                torch._C._cuda_clearCublasWorkspaces()
                with torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    result = body()
                torch._C._cuda_clearCublasWorkspaces()
                living.add(self)
                return result
            except BaseException:
                # torch.cuda.graph leaves its stream current where the capture fails to end, and what runs there is not ordered
                # with the rest: tokens come out wrong.
                torch.cuda.set_stream(outer)
                del self.shared["pool"], self.shared["graphs"], self._captured_on[self.device]
                # A capture that failed leaves torch's random numbers in capture mode; one that succeeds takes them out of it.
                with contextlib.suppress(RuntimeError), torch.cuda.stream(outer), torch.cuda.graph(torch.cuda.CUDAGraph()):
                    torch.zeros(1, device=self.device)
                raise

    def replay(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        with self._lock:  # two streams must not replay at once
            last = self._replayed_on.get(self.device)
            if last is not None and last != stream:
                stream.wait_stream(last)
            self._replayed_on[self.device] = stream
            self.graph.replay()
