"""Recording and replaying the launches of one decode step."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TextIO, TypeVar

import torch

T = TypeVar("T")
SHORT = 4 << 30  # bytes of free memory, below which a capture first frees what torch keeps for later tensors


class Graph(Protocol):
    def rehearse(self, body: Callable[[], T]) -> T:
        """Run body() once as a warm-up. Raise an error if it reads a value on the host: in a capture that does damage."""

    def capture(self, body: Callable[[], T]) -> T:
        """Record the launches of body() without running them. Return its result, whose tensors every replay overwrites."""

    def replay(self) -> None: ...


class CudaGraph:
    """A torch.cuda.CUDAGraph. Only one graph of a device runs at a time, so the graphs of a model share a memory pool.

    shared: "pool", "bytes" (the memory reserved for the pool) and "graphs" of a model.

    All captures of a device share one stream, because libraries keep a workspace for every stream that they have used.
    """

    _captured_on: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}
    _replayed_on: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}  # the last stream of a replay
    _lock = threading.Lock()
    _rehearsing = threading.RLock()

    def __init__(self, device: torch.device, shared: dict[str, Any]):
        self.device = device
        self.shared = shared
        self.graph = torch.cuda.CUDAGraph()

    def rehearse(self, body: Callable[[], T]) -> T:
        # Warnings instead of errors: the mode is global to the process, and other threads may synchronise.
        syncs: list[str] = []
        me = threading.get_ident()
        with self._rehearsing, warnings.catch_warnings():  # two at once would restore each other's state
            show, mode = warnings.showwarning, torch.cuda.get_sync_debug_mode()

            def collect(
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
                    syncs.append(f"{filename}:{lineno}")

            warnings.filterwarnings("ignore", "Synchronization debug mode")
            warnings.filterwarnings("always", ".*called a synchronizing")
            warnings.showwarning = collect
            torch.cuda.set_sync_debug_mode("warn")
            try:
                result = body()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        if syncs:
            raise RuntimeError(f"it reads a value on the host, at {syncs[0]}")
        return result

    def capture(self, body: Callable[[], T]) -> T:
        with self._lock, torch.cuda.device(self.device):  # captures share a stream
            stream = self._captured_on.get(self.device)
            if stream is None:
                stream = self._captured_on[self.device] = torch.cuda.Stream(self.device)
            living = self.shared.setdefault("graphs", weakref.WeakSet())
            if "pool" not in self.shared or not living:  # a pool without graphs cannot be used again
                self.shared["pool"], self.shared["bytes"] = torch.cuda.graph_pool_handle(), 0
            pool = self.shared["pool"]
            try:
                # cuBLAS has a workspace for each stream. torch.compile clears the workspaces, which would free one that this
                # graph uses. So the graph allocates its own in its memory pool.
                torch._C._cuda_clearCublasWorkspaces()
                torch.cuda.synchronize(self.device)
                # torch.cuda.graph empties torch's cache each time, and the next forward from Python would allocate all anew.
                if self._free() < SHORT:
                    torch.cuda.empty_cache()
                with torch.cuda.stream(stream):
                    self.graph.capture_begin(pool, capture_error_mode="thread_local")
                    try:
                        result = body()
                    finally:
                        self.graph.capture_end()
                torch._C._cuda_clearCublasWorkspaces()
                living.add(self)
                its = [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) == tuple(pool)]
                self.shared["bytes"] = sum(each["total_size"] for each in its)
                return result
            except BaseException:
                del self.shared["pool"], self.shared["bytes"], self.shared["graphs"], self._captured_on[self.device]
                # A failed capture leaves torch's random number generator in capture mode; a successful capture resets it.
                with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
                    torch.zeros(1, device=self.device)
                raise

    def _free(self) -> float:
        """Bytes that torch can still reserve."""
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = torch.cuda.memory.get_per_process_memory_fraction(self.device) * total
        return min(free, allowed - torch.cuda.memory_reserved(self.device))

    def replay(self) -> None:
        stream = torch.cuda.current_stream(self.device)
        with self._lock:  # no two streams replay at once
            last = self._replayed_on.get(self.device)
            if last is not None and last != stream:
                stream.wait_stream(last)
            self._replayed_on[self.device] = stream
            self.graph.replay()
