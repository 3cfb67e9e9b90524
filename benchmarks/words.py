"""Common phrases of the tables of results: figures, machines, models, runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import geometric_mean

from hf_fastattn.report.tables import table

from .provenance import by

SHAPE = "batch, heads/KV heads, head_dim, length"
NAMES = {
    "8b": "Llama-3.1-8B",
    "1b": "Llama-3.2-1B",
    "opt-1.3b": "OPT-1.3B",
    "opt-6.7b": "OPT-6.7B",
    "mistral-7b": "Mistral-7B-v0.1",
}


def figure(value: float | None, digits: int = 1, unit: str = "") -> str | None:
    """A number as text, without decimals from 1000 on."""
    return None if value is None else f"{value:.{digits if abs(value) < 1000 else 0}f}{unit}"


def on(result: dict) -> str:
    """Device, versions and dtype, as text."""
    at = result["conditions"]
    # Older results, without a dtype, ran in bfloat16 on a GPU.
    dtype = result.get("dtype") or ("bfloat16" if "NVIDIA" in at["device"] else None)
    versions = [f"{name} {at[name]}" for name in ("torch", "triton", "transformers")]
    unknown = [] if "measured_by" in result else ["driver and clocks not recorded"]
    return ", ".join([at["device"], *versions, *([dtype] if dtype else []), *unknown])


def method(result: dict) -> str:
    return result["conditions"]["method"]


def model(result: dict) -> str:
    """The model of a result, as text."""
    name = NAMES.get(result["shape"], result["shape"])
    return f"{name}-shaped with random weights" if result.get("weights", "random") == "random" else name


def mean(found: dict) -> str:
    """A ratio of a summary, as text."""
    if not found["rows"]:
        return "not measured"
    if found["rows"] == 1:
        return f"{found['geometric_mean']:.2f}x"
    return f"{found['geometric_mean']:.2f}x in geometric mean ({found['rows']} shapes, {found['smallest']:.2f}x at worst)"


def microseconds(
    rows: Iterable[dict], names: dict[str, str], more: dict[str, Callable[[dict], str | None]], first: str = SHAPE
) -> str:
    """A table of microseconds per kernel, with further columns."""
    lines = [
        [row["shape"], *(figure(row["us"].get(name)) for name in names), *(cell(row) for cell in more.values())] for row in rows
    ]
    return table([first, *names.values(), *more], lines)


def bandwidth(result: dict) -> str:
    """That of the floor; results from before it was stored have that of an H200."""
    return f"{figure(result.get('tb_per_s', 4.5))} TB/s"


def by_method(result: dict) -> str:
    return f"({by(result)}; {method(result)})"


def same(rows: Iterable[dict]) -> str:
    """Heads and head_dim of the rows, as text."""
    rows = list(rows)
    values = {name: sorted({row[name] for row in rows}) for name in ("num_heads", "num_kv_heads", "head_dim")}
    heads, kv_heads, head_dim = (" or ".join(map(str, found)) for found in values.values())
    return f"{heads} heads over {kv_heads} KV heads, head_dim {head_dim}"


def by_past(rows: Iterable[dict], head_dim: int | None = None) -> dict[tuple[int, int], float]:
    """Geometric mean of lean over the better peer, over heads and batches, for each (q_len, kv_len)."""
    cells: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        if row["lean_over_best_peer"] and head_dim in (None, row["head_dim"]):
            cells.setdefault((row["q_len"], row["kv_len"]), []).append(row["lean_over_best_peer"])
    return {at: geometric_mean(values) for at, values in cells.items()}
