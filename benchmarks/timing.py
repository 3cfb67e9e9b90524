"""Timing that flatters nobody: CUDA-graph replays over inputs larger than L2, rivals taking turns."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable

import torch

L2_BYTES = 256 << 20  # the inputs of one round are at least this large, several times any L2
ONE_SET_BYTES = 8 << 30  # one set as large as this leaves less than one percent of itself in L2
REPLAY_US = 1000  # a replay takes at least about this long, so that its own launch (some 5 us) does not show
SHAPE_SECONDS = 0.3  # what the repeats of one shape may take, as far as LEAST allows
LEAST, MOST = 5, 15  # rounds

METHOD = "CUDA-graph replays over inputs larger than L2, rivals alternating, median"

Call = Callable[[int], object]
Run = Callable[[], object]


def num_sets(bytes_per_set: int) -> int:
    """How many sets of inputs to rotate through so that none is found in L2 when its turn comes again."""
    return 1 if bytes_per_set >= ONE_SET_BYTES else max(2, min(512, -(-L2_BYTES // bytes_per_set)))


def num_calls(sets: int, us: float) -> int:
    """Calls in one replay: every set equally often, for calls of about `us` microseconds."""
    return sets * max(1, math.ceil(REPLAY_US / (sets * us)))


def record(call: Call, sets: int, calls: int, device: torch.device) -> Run:
    """What runs `calls` calls, the i-th on input set i % sets: a CUDA graph's replay, or a plain loop on the CPU."""
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
        # A capture that failed leaves torch's random numbers in capture mode; one that succeeds takes them out of it.
        with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=device)
        raise
    return graph.replay


def elapsed_us(run: Run, device: torch.device) -> float:
    """Microseconds of one run(), by the device's clock."""
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


def time_rivals(
    runs: dict[str, Run],
    calls: int | dict[str, int],
    device: torch.device,
    least: int | None = None,
    most: int | None = None,
    seconds: float | None = None,
) -> dict[str, list[float]]:
    """Microseconds a call of each rival, once a round; what record() made of it runs `calls` calls, or its own number of them.

    Rivals take turns within a round and go first in turn. The first round warms up and says how many there is time for: from
    `least` to `most` rounds, in some `seconds`; LEAST, MOST and SHAPE_SECONDS where None.
    """
    least, most = LEAST if least is None else least, MOST if most is None else most
    budget = SHAPE_SECONDS if seconds is None else seconds
    warm_up = sum(elapsed_us(run, device) for run in runs.values())
    rounds = max(least, min(most, int(1e6 * budget / max(warm_up, 1))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(rounds):
        for name in runs if round_ % 2 == 0 else reversed(runs):
            its_calls = calls if isinstance(calls, int) else calls[name]
            times[name].append(elapsed_us(runs[name], device) / its_calls)
    return times


def host_us(call: Run, device: torch.device, calls: int = 200) -> float:
    """Microseconds of the host's time that one call() takes to launch what it launches; call the device idle before."""
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
    """The fields of a row: medians as "us", and the fastest and slowest round as "us_range"."""
    return {
        "us": {name: statistics.median(values) for name, values in times.items()},
        "us_range": {name: [min(values), max(values)] for name, values in times.items()},
    }
