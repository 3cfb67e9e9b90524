"""Timing of kernels: replays of CUDA graphs over inputs larger than L2, rivals alternating."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch

L2_BYTES = 256 << 20  # the inputs of one round are at least this large, several times the size of L2
ONE_SET_BYTES = 8 << 30  # less than one percent of a set of this size stays in L2
REPLAY_US = 1000  # a replay takes at least about this long, so that its launch (some 5 us) is negligible
SHAPE_SECONDS = 0.3  # the longest time for the rounds of one shape, if LEAST allows it
LEAST, MOST = 5, 15  # rounds

METHOD = "CUDA-graph replays over inputs larger than L2, rivals alternating, median"

Call = Callable[[int], object]
Run = Callable[[], object]


def num_sets(bytes_per_set: int) -> int:
    """The number of input sets to cycle through, so that none is still in L2 when it is used again."""
    return 1 if bytes_per_set >= ONE_SET_BYTES else max(2, min(512, -(-L2_BYTES // bytes_per_set)))


def num_calls(sets: int, us: float) -> int:
    """The number of calls in one replay, a multiple of `sets`, for calls of about `us` microseconds."""
    return sets * max(1, math.ceil(REPLAY_US / (sets * us)))


def record(call: Call, sets: int, calls: int, device: torch.device) -> Run:
    """A function that runs `calls` calls, the i-th on input set i % sets: a replay of a CUDA graph, or a loop on the CPU."""
    if device.type != "cuda":
        return lambda: [call(i % sets) for i in range(calls)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(2):
            call(i % sets)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for i in range(calls):
                call(i % sets)
    except RuntimeError:
        # A failed capture leaves torch's random generator in capture mode; a successful one ends it.
        with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=device)
        raise

    def replay(call: Call = call) -> None:  # whose tensors the graph does not keep alive
        graph.replay()

    return replay


def elapsed_us(run: Run, device: torch.device) -> float:
    """Microseconds of one run(), measured on the device."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - began)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return 1e3 * start.elapsed_time(stop)


def orders(names: list[str]) -> Iterator[list[str]]:
    """The order of the rivals in each round, without an end.

    Within n rounds of n rivals each follows each other once if n is even, within 2n rounds twice if it is odd (Williams,
    "Experimental designs balanced for the estimation of residual effects of treatments", 1949).
    """
    n = len(names)
    steps = [-(i // 2) if i % 2 == 0 else (i + 1) // 2 for i in range(n)]  # 0, 1, -1, 2, -2, ...
    for turn in itertools.count():
        shift, backwards = divmod(turn, 2) if n % 2 else (turn, 0)
        order = [names[(shift + step) % n] for step in steps]
        yield order[::-1] if backwards else order


def time_rivals(
    runs: dict[str, Run],
    calls: int | dict[str, int],
    device: torch.device,
    least: int | None = None,
    most: int | None = None,
    seconds: float | None = None,
) -> dict[str, list[float]]:
    """Microseconds per call of each rival in each round. A run, from record(), has `calls` calls, a number or one for each rival.

    A rival that heats the GPU slows down the next one, so in few rounds too none may always follow the same other (`orders`). The
    first round is the warm-up, from which the number of rounds follows: from `least` to `most`, within about `seconds` (None:
    LEAST, MOST and SHAPE_SECONDS).
    """
    least, most = LEAST if least is None else least, MOST if most is None else most
    budget = SHAPE_SECONDS if seconds is None else seconds
    warm_up = sum(elapsed_us(run, device) for run in runs.values())
    rounds = max(least, min(most, int(1e6 * budget / max(warm_up, 1))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for order in itertools.islice(orders(list(runs)), rounds):
        for name in order:
            replay_calls = calls if isinstance(calls, int) else calls[name]
            times[name].append(elapsed_us(runs[name], device) / replay_calls)
    return times


def host_us(call: Run, device: torch.device, calls: int = 200) -> float:
    """Microseconds of host time of one call(), with an idle device before it."""
    for _ in range(10):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    us = 1e6 * (time.perf_counter() - began) / calls
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return us


def medians(times: dict[str, list[float]]) -> dict:
    """The fields of a row: "us", the medians, and "us_range", the fastest and the slowest round."""
    return {
        "us": {name: statistics.median(values) for name, values in times.items()},
        "us_range": {name: [min(values), max(values)] for name, values in times.items()},
    }
