"""A picture of the roofline: operations per byte and least time of a decode step, against batch and length."""

from __future__ import annotations

from pathlib import Path

from . import costs
from .costs import GPU, Facts

BATCHES = [1 << n for n in range(11)]
LENGTHS = [1 << n for n in range(10, 21)]


def draw(facts: Facts, gpu: GPU, batch: int, length: int, file: str | Path) -> None:
    try:
        from matplotlib.figure import Figure  # without pyplot, which chooses a backend for the whole process
    except ImportError as error:
        raise ImportError(f'Curves need matplotlib ({error}); run `pip install "hf-fastattn[bench]"`.') from error
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    figure.suptitle(f"A decode step of {facts.name} on {gpu.name}")
    by_batch, by_length = [(n, length) for n in BATCHES], [(batch, n) for n in LENGTHS]
    for column, points in zip(figure.subplots(2, 2).T, (by_batch, by_length), strict=True):
        at, words = (
            (BATCHES, f"batch, of {length} tokens a row") if points is by_batch else (LENGTHS, f"tokens a row, batch {batch}")
        )
        # Without the last, whose windows differ and not its heads.
        for name, its in costs.relatives(facts)[:-1] or [(facts.name, facts)]:
            steps = [costs.step(its, gpu, *point) for point in points]
            column[0].plot(at, [step.flops_per_byte for step in steps], marker="o", ms=3, label=name)
            column[1].plot(at, [step.floor_ms for step in steps], marker="o", ms=3, label=name)
        if gpu.rate:
            column[0].axhline(gpu.rate / gpu.bandwidth, color="grey", ls="--", label=f"{gpu.name}: compute sets the time above")
        column[0].set(ylabel="FLOP per byte")
        column[1].set(ylabel="ms, at least")
        for axis in column:
            axis.set_xscale("log", base=2)
            axis.set(yscale="log", xlabel=words)
            axis.legend(fontsize=8)
    figure.savefig(file, dpi=130)
