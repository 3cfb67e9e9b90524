"""Timing on a GPU that flatters nobody: CUDA-graph replays over inputs larger than L2, rivals taking turns."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence

import torch

L2_BYTES = 256 << 20  # inputs of one timed round are at least this large, several times any L2


def num_sets(bytes_per_set: int) -> int:
    """How many sets of inputs to rotate through so that none is found in L2 when its turn comes again."""
    return max(2, min(128, -(-L2_BYTES // bytes_per_set)))


def capture(call: Callable[[int], object], sets: int, calls: int) -> torch.cuda.CUDAGraph:
    """A graph of `calls` calls, the i-th on input set i % sets."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(2):
            call(i % sets)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % sets)
    return graph


def time_rivals(
    rivals: dict[str, Callable[[int], object]], sets: int, rounds: int = 9, calls: int | None = None
) -> dict[str, float]:
    """Median microseconds a call of each rival; `call(i)` runs it on input set i. Rivals alternate within every round."""
    calls = max(sets, 2) if calls is None else calls
    graphs = {name: capture(call, sets, calls) for name, call in rivals.items()}
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for round_ in range(rounds + 1):
        for name, graph in graphs.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            if round_:  # the first is a warm-up
                times[name].append(1e3 * start.elapsed_time(stop) / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def conditions() -> dict[str, str]:
    """What a reader needs to judge a figure: device and versions."""
    import transformers
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "method": "CUDA-graph replays over inputs larger than L2, rivals alternating, median",
    }


def geometric_mean(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values)
