"""Pictures of the JSON under examples/results: one PNG for each file, readable on a light and on a dark page."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from hf_fastattn.report.tables import thousands

from .grid import LEAN, OURS, RIVALS, SDPA, STATIC
from .sections_paper import FIGURE_7, held_at, shaped
from .words import by_past

GREY = "#808080"  # visible on white and on black
COLORS = {
    "lean": "#e8743b",
    OURS: "#e8743b",
    "ring": "#e8743b",
    LEAN: "#f0b24a",
    "split_kv": "#19a979",
    "sdpa_cudnn": "#5899da",
    SDPA: "#5899da",
    "dense": "#5899da",
    "sdpa_flash": "#945ecf",
    STATIC: "#945ecf",
    "fa2": "#13a4b4",
    "eager_dynamic": "#a05a2c",
    "flash_attention_2_dynamic": "#13a4b4",
    "flex_attention_dynamic": "#19a979",
}
LABELS = {
    SDPA: "sdpa",
    STATIC: "sdpa, static + compile",
    LEAN: "lean",
    OURS: "patch()",
    "sdpa_flash": "sdpa flash",
    "sdpa_cudnn": "sdpa cuDNN",
}
STYLE = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "font.size": 10,
}


def tokens_axis(axis, ticks: list[int], name: str, words: Callable[[int], str] = thousands) -> None:
    """A logarithmic axis of token counts, with readable labels."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [words(n) for n in ticks])
    axis.minorticks_off()
    axis.set_xlabel(name)


def curve(axis, x: list, y: list, name: str, label: str | None = None, **how) -> None:
    """A line with markers in the color of this name, which is also its label by default."""
    axis.plot(x, y, **{"marker": "o", "ms": 4, "color": COLORS[name], "label": label or name, **how})


def generate(result: dict):
    """ms per token of each batch against the prompt, a line for each rival, and the bandwidth limit; of padded prompts, bars."""
    rows = [row for row in result["rows"] if "lengths" in row and not row["padded"]]
    batches = sorted({row["rows"] for row in rows})
    batches = [b for b in batches if sum(row["rows"] == b for row in rows) > 1] or batches  # a line needs two points
    padded = [row for row in result["rows"] if row.get("padded") and row["rivals"]][:1]
    panels = len(batches) + len(padded)
    figure, axes = plt.subplots(1, panels, figsize=(4 * panels, 4.4), squeeze=False)
    for batch, axis in zip(batches, axes[0], strict=False):
        of_batch = sorted((row for row in rows if row["rows"] == batch), key=lambda row: row["lengths"][0])
        for name in RIVALS:
            found = [(row["lengths"][0], ms) for row in of_batch if (ms := (row["rivals"].get(name) or {}).get("ms"))]
            if found:
                curve(axis, *zip(*found, strict=True), name, LABELS.get(name))
        floor = [(row["lengths"][0], row["floor_ms"]) for row in of_batch if "floor_ms" in row]
        if floor:
            axis.plot(*zip(*floor, strict=True), lw=1, color=GREY, label="weights and K/V read once")
        axis.set(title=f"batch {batch}", ylabel="ms a token")
        axis.set_ylim(bottom=0)
        tokens_axis(axis, [row["lengths"][0] for row in of_batch], "prompt, tokens")
    for row in padded:
        _bars(axes[0, -1], row)
    known = {text: line for axis in axes[0] for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(known.values(), known.keys(), loc="lower center", ncols=len(known), fontsize=9)
    figure.suptitle(f"generate(), {result['shape']}-shaped, {result['conditions']['device']}")
    return figure


def _bars(axis, row: dict) -> None:
    """ms per token of the padded row, a bar for each rival."""
    found = {name: row["rivals"][name]["ms"] for name in RIVALS if (row["rivals"].get(name) or {}).get("ms")}
    names = [LABELS.get(name, name) for name in found]
    axis.bar_label(axis.bar(names, list(found.values()), color=[COLORS[name] for name in found]), fmt="%.2f", color=GREY)
    low, high = min(row["lengths"]), max(row["lengths"])
    axis.set(title=f"batch {row['rows']}, padded, {thousands(low)} to {thousands(high)}", ylabel="ms a token")
    axis.grid(False, axis="x")


def decode(result: dict):
    """Bandwidth against bytes of K/V, one dot per shape."""
    figure, axis = plt.subplots(figsize=(7, 4))
    for name in ("sdpa_flash", "sdpa_cudnn", "split_kv", "lean"):
        points = [(row["kv_bytes"], row["tb_per_s"][name]) for row in result["rows"] if name in row["tb_per_s"]]
        if points:
            axis.scatter(*zip(*points, strict=True), s=14, alpha=0.8, color=COLORS[name], label=LABELS.get(name, name))
    best = result["summary"]["best_tb_per_s"]["tb_per_s"]
    axis.axhline(best, lw=1, color=GREY)
    axis.text(0.01, best, f"best seen: {best:.2f}", transform=axis.get_yaxis_transform(), va="bottom", fontsize=8)
    axis.set_xscale("log", base=2)
    ticks = [1 << n for n in range(20, 38, 4)]
    axis.set_xticks(ticks, ["1 MiB", "16 MiB", "256 MiB", "4 GiB", "64 GiB"])
    axis.set(xlabel="K and V of the call", ylabel="TB/s of K and V", title=f"Decode kernels, {result['conditions']['device']}")
    axis.legend()
    return figure


def queries(result: dict):
    """Speed of lean over the better torch backend by q_len and kv_len, geometric means over heads and batch, by head_dim."""
    dims = sorted({row["head_dim"] for row in result["rows"]})
    figure, axes = plt.subplots(1, len(dims), figsize=(5.6 * len(dims), 6), squeeze=False)
    for axis, head_dim in zip(axes[0], dims, strict=True):
        cells = by_past(result["rows"], head_dim)
        lengths, pasts = (sorted({at[i] for at in cells}) for i in (0, 1))
        shown = [[cells.get((q_len, past), float("nan")) for past in pasts] for q_len in lengths]
        axis.imshow([[math.log2(value) for value in line] for line in shown], cmap="RdYlGn", vmin=-1.5, vmax=1.5, aspect="auto")
        for y, line in enumerate(shown):
            for x, value in enumerate(line):
                color = "white" if abs(math.log2(value)) > 1 else "black"  # beside the middle the colors are dark
                axis.text(x, y, f"{value:.2f}" if value == value else "", ha="center", va="center", fontsize=8, color=color)
        axis.set_xticks(range(len(pasts)), [thousands(past) for past in pasts])
        axis.set_yticks(range(len(lengths)), lengths)
        axis.set(xlabel="keys", ylabel="queries", title=f"head_dim {head_dim}")
        axis.grid(False)
    figure.suptitle(f"Time of torch's better backend over lean's, {result['conditions']['device']}")
    return figure


AXES = (("kv_len", "context, tokens"), ("num_heads", "heads"), ("batch", "batch"))


def averages(axis, rows: list[dict], by: str, value: Callable[[dict], float], color: str, label: str, dashes: str = "-") -> None:
    """A line of arithmetic means of value(row) against row[by], and their range as a band if the line is solid."""
    at = sorted({row[by] for row in rows})
    found = [[value(row) for row in rows if row[by] == x] for x in at]
    axis.plot(at, [sum(v) / len(v) for v in found], dashes, marker="o", ms=4, color=color, label=label)
    if dashes == "-":
        axis.fill_between(at, list(map(min, found)), list(map(max, found)), color=color, alpha=0.12, lw=0)


def paper(result: dict):
    """Figures 7a to 7c, lean over its peers; over all shapes, lean over its peers against context, heads and batch (7 and 9);
    4, balance; in results from before their kernels were removed, the fix-ups in one launch.

    Stars and dashed lines are the published figures.
    """
    figure, (curves, *axes) = plt.subplots(5, 3, figsize=(13, 17.5))
    rows, published = result["rows"], result["summary"]["published"]
    for axis, (by, words), (name, (held, text, point)) in zip(curves, AXES, FIGURE_7.items(), strict=True):
        its = sorted(filter(held_at(held), rows), key=lambda row: row[by])
        at = [row[by] for row in its]
        for peer in ("fa2", "split_kv"):
            curve(axis, at, [row[f"lean_over_{peer}"] for row in its], peer, f"over {peer}")
        if point and its:
            axis.plot(at[-1], point[1], "*", ms=9, color=GREY, label=f"published, {published['device']}")
        tokens_axis(axis, at, words)
        axis.set(title=f"figure {name}: {text}", ylabel="times as fast")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8)
    later = published.get("later_text", {})
    for line, (name, peer) in zip(axes, (("lean_over_fa2", "fa2"), ("lean_over_split_kv", "split_kv")), strict=False):
        for axis, (by, words) in zip(line, AXES, strict=True):
            for head_dim, color, number in ((64, COLORS["sdpa_cudnn"], 7), (128, COLORS["lean"], 9)):
                its = [row for row in rows if row["head_dim"] == head_dim]
                averages(axis, its, by, lambda row: row[name], color, f"head_dim {head_dim} (figure {number})")  # noqa: B023
            axis.axhline(published[name]["average"], ls="--", lw=1, color=GREY, label=f"published average, {published['device']}")
            for said in (published[name], later.get(name, {})):
                if by == "kv_len" and "largest_at" in said:
                    axis.plot(said["largest_at"], said["largest"], "*", ms=9, color=GREY, label="published largest")
            if name in later:
                axis.axhline(later[name]["average"], ls=":", lw=1, color=GREY, label="its later text")
            tokens_axis(axis, sorted({row[by] for row in rows}), words)
            axis.set(ylabel=f"times as fast as {peer}")
        line[-1].legend(fontsize=8)
    for axis, (by, words) in zip(axes[2], AXES, strict=True):
        for key, dashes, sms in (("schedule", "-", ""), ("schedule_108_sms", "--", ", 108 SMs")):
            for name in ("fa2", "split_kv", "lean") if key in rows[0] else ():
                balance = lambda row, key=key, name=name: row[key][name]["balance"]  # noqa: E731
                averages(axis, rows, by, balance, COLORS[name], name + sms, dashes)
        tokens_axis(axis, sorted({row[by] for row in rows}), words)
        axis.set(ylabel="balance (figure 4)", ylim=(0, 1.05))
    axes[2][-1].legend(fontsize=8, loc="lower right")
    for axis, (by, words) in zip(axes[3], AXES, strict=True):
        for name, color in (("host_waits", COLORS["sdpa_flash"]), ("last_arriver", COLORS["split_kv"])):
            timed = [row for row in rows if name in row["us"]]
            averages(axis, timed, by, lambda row: row["us"]["stream_k"] / row["us"][name], color, name)  # noqa: B023
        axis.axhline(1, lw=1, color=GREY)
        tokens_axis(axis, sorted({row[by] for row in rows}), words)
        axis.set(ylabel="times as fast as a second launch")
    axes[3][-1].legend(fontsize=8)
    figure.suptitle(
        f"The LeanAttention paper's comparison on {result['conditions']['device']}: averages and ranges over the rest"
    )
    return figure


def paper_e2e(result: dict):
    """ms per token against context, and the integrated seconds of an output."""
    figure, (time, whole) = plt.subplots(1, 2, figsize=(10, 4))
    names = ("fa2", "split_kv", "lean")
    for name in names:
        curve(time, [row["context"] for row in result["rows"]], [row["ms"][name] for row in result["rows"]], name)
    outputs, prompt = result["summary"]["outputs"], result["summary"].get("prompt_s")
    for i, name in enumerate(names):
        at, seconds = [at + 0.27 * (i - 1) for at in range(len(outputs))], [output["seconds"][name] for output in outputs]
        whole.bar(at, seconds, 0.25, color=COLORS[name], bottom=prompt[name] if prompt else 0, label=name)
        if prompt:
            whole.bar(at, prompt[name], 0.25, color=GREY, label=None if i else "the prompt")
    whole.set_xticks(range(len(outputs)), [thousands(output["new_tokens"]) for output in outputs])
    time.set(xlabel="context, tokens", ylabel="ms a token")
    time.set_ylim(bottom=0)
    whole.set(xlabel="new tokens", ylabel="seconds, integrated")
    time.legend()
    whole.legend()
    figure.suptitle(f"{shaped(result)},\nbehind a long prompt, {result['conditions']['device']}")
    return figure


def share(result: dict):
    """Figure 3: the share of decode in the time of a generation, and that time, against the number of new tokens."""
    figure, (share, time) = plt.subplots(1, 2, figsize=(11, 4))
    outputs, prompt = result["summary"]["outputs"], result["rows"][0]["context"]
    new = [output["new_tokens"] for output in outputs]
    for name in ("fa2", "split_kv", "lean"):
        curve(share, new, [100 * output["decode_share"][name] for output in outputs], name)
        curve(time, new, [output["with_prompt"][name] for output in outputs], name)
    for axis in (share, time):
        ratio = lambda n: f"{prompt // n}:1" if n <= prompt else f"1:{n // prompt}"  # noqa: E731
        tokens_axis(axis, new, f"tokens of the prompt ({thousands(prompt)}) : new tokens", ratio)
        axis.legend()
    share.set(ylabel="decode, % of the time", ylim=(0, 102))
    time.set(ylabel="seconds", yscale="log")
    figure.suptitle(f"{shaped(result)}, {result['conditions']['device']}")
    return figure


def stream(result: dict):
    """ms per token and memory against tokens read."""
    figure, (time, memory) = plt.subplots(1, 2, figsize=(10, 4))
    read = [row["tokens"] for row in result["rows"]]
    keeps = result["window"] + result["sinks"]
    curve(time, read, [row["ms"] for row in result["rows"]], "ring", "rolling cache", ms=None)
    curve(time, read, [row["dense_ms"] for row in result["rows"]], "dense", f"dense cache of {keeps} tokens", ms=None)
    time.set_ylabel("ms a token")
    time.set_ylim(0, 1.3 * time.get_ylim()[1])
    time.legend()
    if all(row["memory_bytes"] for row in result["rows"]):
        memory.plot(read, [max(row["memory_bytes"]) / 2**30 for row in result["rows"]], marker="o", color=COLORS["ring"])
    memory.set_ylabel("GiB allocated")
    memory.set_ylim(bottom=0)
    for axis in (time, memory):
        tokens_axis(axis, read, "tokens read", lambda n: f"{n // 1000}k" if n < 1_000_000 else f"{n // 1_000_000}M")
    figure.suptitle(f"Unbounded generation, {result['shape']}-shaped, {result['conditions']['device']}")
    return figure


def trained(result: dict):
    """TFLOP/s of forward and backward by length, one axis for each head_dim, and the peak memory of one row."""
    names = {"ours": "lean", "ours_portable": LEAN, "sdpa_flash": "sdpa_flash", "sdpa_cudnn": "sdpa_cudnn"}
    labels = {"ours": "ours", "ours_portable": "ours, portable backward"} | LABELS
    widths = sorted({row["head_dim"] for row in result["rows"]})
    longest = max(result["rows"], key=lambda row: row["kv_len"])["head_dim"]
    figure, axes = plt.subplots(1, len(widths) + 1, figsize=(4 * len(widths) + 4, 4.4))
    for width, axis in zip(widths, axes, strict=False):
        rows = sorted((row for row in result["rows"] if row["head_dim"] == width), key=lambda row: row["kv_len"])
        lengths = [row["kv_len"] for row in rows]
        for name, color in names.items():
            for what, products, dashes in (("backward_us", 2.5, "-"), ("forward_us", 1, ":")):
                if name == "ours_portable" and dashes == ":":
                    continue  # the same kernel
                rates = [products * row["flops"] / row[what].get(name, math.nan) / 1e6 for row in rows]
                label = labels[name] if dashes == "-" else None
                axis.plot(lengths, rates, dashes, marker="o", ms=4, color=COLORS[color], label=label)
            peaks = [(row["kv_len"], row["peak_bytes"].get(name), row["batch"]) for row in rows]
            known = [(length, count / batch / 1e9) for length, count, batch in peaks if count]  # not on a CPU
            if known and width == longest and name != "ours_portable":
                axes[-1].plot(*zip(*known, strict=True), marker="o", ms=4, color=COLORS[color])
                axes[-1].set_yscale("log")
                tokens_axis(axes[-1], lengths, "tokens")
        tokens_axis(axis, lengths, "tokens")
        axis.set(title=f"head_dim {width}, forward dotted", ylabel="TFLOP/s")
        axis.set_ylim(bottom=0)
    axes[-1].set(title=f"head_dim {longest}", ylabel="GB of one row, peak")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=len(names), fontsize=9)
    figure.suptitle(f"Attention with gradients, {result['conditions']['device']}")
    return figure


def layer(result: dict):
    """Time and peak memory of one layer, forward and backward, by length."""
    figure, (time, memory) = plt.subplots(1, 2, figsize=(10, 4))
    lengths = [row["kv_len"] for row in result["rows"]]
    for name, color, label in (("standard", COLORS["dense"], "standard attention"), ("ours", COLORS["lean"], "ours")):
        time.plot(lengths, [row["us"].get(name, math.nan) / 1e3 for row in result["rows"]], marker="o", color=color, label=label)
        peaks = [(row["kv_len"], row["peak_bytes"].get(name)) for row in result["rows"]]
        known = [(length, count / 2**30) for length, count in peaks if count]  # not on a CPU
        memory.plot(*zip(*known, strict=True), marker="o", color=color, label=label) if known else None
    for axis, unit in ((time, "ms, forward and backward"), (memory, "GiB, peak")):
        apart = [a for a, b in itertools.pairwise([*lengths, math.inf]) if b > 1.5 * a]  # labels that do not overlap
        tokens_axis(axis, apart, "tokens")
        axis.set(ylabel=unit, yscale="log")
        axis.legend()
    figure.suptitle(f"One layer of GPT-J, {result['conditions']['device']}")
    return figure


PICTURES: dict[str, Callable] = {
    "generate_8b.json": generate,
    "kernels_decode.json": decode,
    "kernels_queries.json": queries,
    "kernels_training.json": trained,
    "kernels_training_layer.json": layer,
    "kernels_paper.json": paper,
    "paper_e2e.json": paper_e2e,
    "paper_e2e_opt-1.3b.json": paper_e2e,
    "paper_e2e_opt-1.3b_56_heads.json": paper_e2e,
    "paper_share.json": share,
    "stream.json": stream,
}
# Of what is not the title or the legend of all axes: left, bottom, right, top.
PLACES = {"generate_8b.json": (0, 0.07, 1, 1), "kernels_training.json": (0, 0.07, 1, 1), "kernels_paper.json": (0, 0, 1, 0.99)}


def draw(folder: Path) -> list[Path]:
    """Draw the results that have rows. Returns the files written."""
    drawn = []
    for file, picture in PICTURES.items():
        path = folder / file
        result = json.loads(path.read_text()) if path.exists() else {"rows": []}
        if not result["rows"]:
            continue
        with plt.rc_context(STYLE):
            figure = picture(result)
            figure.tight_layout(rect=PLACES.get(file, (0, 0, 1, 1)))
            figure.savefig(path.with_suffix(".png"), dpi=130, metadata={"Software": None})
            plt.close(figure)
        drawn.append(path.with_suffix(".png"))
    return drawn
