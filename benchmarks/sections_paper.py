"""The sections on the LeanAttention paper; `sections` has the others."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from hf_fastattn.report.tables import table, thousands

from .models import SHAPES
from .provenance import by
from .shapes import GPUS
from .words import NAMES, by_method, figure, mean, method, microseconds, model

# Figure 7: what is the same in its shapes, in words, and the published point at the end: (in words, `fa2` / `lean`).
FIGURE_7 = {
    "7a": ({"head_dim": 64, "batch": 1, "num_heads": 56}, "batch 1, 56 heads, by context", ("8.33x, its largest, at 512k", 8.33)),
    "7b": ({"head_dim": 64, "batch": 1, "kv_len": 64 << 10}, "batch 1, 64k, by heads", None),
    "7c": ({"head_dim": 64, "num_heads": 56, "kv_len": 64 << 10}, "56 heads, 64k, by batch", ("1.5x at large batch", 1.5)),
}


def held_at(values: dict[str, int]) -> Callable[[dict], bool]:
    return lambda row: all(row[name] == value for name, value in values.items())


def shaped(result: dict) -> str:
    """The model, and its size if it has not the heads of the shape."""
    heads = result.get("heads")
    said = model(result) + (f" with {heads} heads" if heads else "")
    if heads and result["shape"] in SHAPES and heads != SHAPES[result["shape"]][1]["num_attention_heads"]:
        layers, name = result["config"]["num_hidden_layers"], NAMES.get(result["shape"], result["shape"])
        parameters = result["weight_bytes"] / getattr(torch, result["dtype"]).itemsize
        said = f"the {layers} layers of {name} widened to {heads} heads, {parameters / 1e9:.1f}e9 parameters, with random weights"
    return said


def _heads(result: dict) -> str:
    """The model and the attention kernels in lean's decode graph."""
    said, kernels = shaped(result), result.get("attention_kernels", {}).get("lean")
    return said + (f"; in the graph of `lean` run {', '.join(f'`{name}`' for name in kernels)}" if kernels else "")


def paper_e2e(result: dict) -> str:
    names, outputs = ("fa2", "split_kv", "lean"), result["summary"]["outputs"]
    prompt = "with_prompt" in outputs[0]
    head = ["new tokens", *(f"`{name}`, s" for name in names), "`fa2` / `lean`", "`split_kv` / `lean`"]
    head += ["with the prompt: `fa2` / `lean`", "`split_kv` / `lean`, too"] if prompt else []
    ratios = ["lean_over_fa2", "lean_over_split_kv"]
    ratios += [f"with_prompt_{name}" for name in ratios] if prompt else []
    rows = [
        [
            thousands(output["new_tokens"]),
            *(figure(output["seconds"][name]) for name in names),
            *(figure(output[name], 2) for name in ratios),
        ]
        for output in outputs
    ]
    contexts = ", ".join(thousands(row["context"]) for row in result["rows"])
    took = ", ".join(f"`{name}` {s:.2f} s" for name, s in result["summary"].get("prompt_s", {}).items())
    return (
        f"**A growing output after a prompt of {thousands(result['rows'][0]['context'])}**, the LeanAttention paper's figure "
        f"10, {_heads(result)}, all under `patch()` ({by(result)}; {method(result)}). ms per token is measured at contexts of "
        f"{contexts}; the seconds are integrated between them{f', the prompt takes {took}' if took else ''}:"
        f"\n\n{table(head, rows)}"
    )


def share(result: dict) -> str:
    names, prompt = ("fa2", "split_kv", "lean"), result["rows"][0]["context"]
    rows = []
    for output in result["summary"]["outputs"]:
        new = output["new_tokens"]
        rows.append([f"{prompt // new}:1" if new <= prompt else f"1:{new // prompt}", thousands(new)])
        rows[-1] += [f"{100 * output['decode_share'][name]:.0f} %" for name in names]
        rows[-1] += [figure(output["with_prompt"][name], 2) for name in names]
    head = ["prompt:output", "new tokens", *(f"`{name}`" for name in names), *(f"`{name}`, s" for name in names)]
    return (
        f"**The share of decode in generation**, the LeanAttention paper's figure 3, {_heads(result)}, a prompt of "
        f"{thousands(prompt)}, and the seconds with the prompt ({by(result)}; {method(result)}):\n\n{table(head, rows)}"
    )


def _points(result: dict) -> str:
    """The shapes of figures 7 and 9 beside the points that the paper's text names. TB/s: of the last shape."""
    lines = []
    for name, (held, text, point) in (FIGURE_7 | {"9": ({"head_dim": 128}, "head_dim 128, average", ("1.26x", 1.26))}).items():
        rows = sorted(filter(held_at(held), result["rows"]), key=lambda row: (row["batch"], row["num_heads"], row["kv_len"]))
        if not rows:
            continue
        by = next(axis for axis in ("kv_len", "num_heads", "batch") if axis not in held)
        at = "" if name == "9" else f": {', '.join(thousands(row[by]) for row in rows)}"
        line = [f"figure {name}", text + at, point[0] if point else None]
        for ratio in ("lean_over_fa2", "lean_over_split_kv"):
            its = [row[ratio] for row in rows]
            line.append(f"{statistics.mean(its):.2f}x" if name == "9" else ", ".join(f"{value:.2f}" for value in its))
        last = rows[-1]
        rates = (last["kv_bytes"] / last["us"][kernel] / 1e6 for kernel in ("fa2", "split_kv", "lean"))
        lines.append([*line, None if name == "9" else ", ".join(f"{rate:.2f}" for rate in rates)])
    head = ["", "shapes", f"published, {result['summary']['published']['device']}"]
    head += ["`fa2` / `lean`", "`split_kv` / `lean`", "TB/s of the last: `fa2`, `split_kv`, `lean`"]
    return f"The shapes of its figures beside its points:\n\n{table(head, lines)}"


def paper(result: dict) -> str:
    found, rows = result["summary"], []
    for name, peer in (("lean_over_fa2", "`fa2`"), ("lean_over_split_kv", "`split_kv`")):
        said, ours = found["published"][name], found[name]
        here = f"{ours['average']:.2f}, up to {ours['largest']:.2f}"
        rows.append([f"`lean` over {peer}", f"{said['average']}, up to {said['largest']}", here])
        rows[-1] += [figure(ours["geometric_mean"], 2), figure(ours["smallest"], 2)]
    if (differ := found.get("schedules_differ", {"rows": 0}))["rows"]:
        rows.append([f"stream-K over `split_kv`, {differ['rows']} shapes with other schedules", None])
        rows[-1] += [f"{differ['average']:.2f}, up to {differ['largest']:.2f}"]
        rows[-1] += [figure(differ["geometric_mean"], 2), figure(differ["smallest"], 2)]
    balance = ", ".join(f"`{name}` {value:.2f}" for name, value in found["mean_balance"].items())
    if a100 := found.get("mean_balance_108_sms"):
        balance += "; on the A100's 108 SMs: " + ", ".join(f"`{name}` {value:.2f}" for name, value in a100.items())
    later = found["published"].get("later_text", {}).get("lean_over_split_kv")
    note = f" The paper's later text says {later['average']} and {later['largest']} over `split_kv`." if later else ""
    values = lambda name: [row[name] for row in result["rows"]]  # noqa: E731
    span = lambda name: f"{thousands(min(values(name)))} to {thousands(max(values(name)))}"  # noqa: E731
    head = ["", f"published, {found['published']['device']}", "here: average", "geometric mean", "smallest"]
    return (
        f"**The LeanAttention paper's own comparison**, its figures 7 and 9 {by_method(result)}: {len(result['rows'])} shapes, "
        f"head_dim {span('head_dim')}, {span('num_heads')} heads, batch {span('batch')}, {span('kv_len')} tokens.\n\n"
        f"{table(head, rows)}\n\n"
        f"How evenly the schedules distribute the work over the SMs (its figure 4; 1 is perfect), on average: {balance}.{note}"
        f"\n\n{_points(result)}" + (f"\n\n{_fixup(result)}" if "host_waits_over_stream_k" in found else "")
    )


# The published points: `fa2` / `lean` on eight A100 by batch, heads and tokens.
FIGURE_8 = {(4, 192, n << 10): 1.28 for n in (1, 4, 16)}  # one figure for all contexts below 64k
FIGURE_8 |= {(4, 192, 256 << 10): 1.7, (4, 192, 512 << 10): 1.7, (4, 64, 256 << 10): 4.18, (1, 128, 256 << 10): 7.8}


def _divided(result: dict) -> str:
    """The table of heads that GPUs divide."""
    names, rows = ("fa2", "split_kv", "lean"), []
    for row in result["rows"]:
        ranks, gpus = row.get("ranks"), row.get("share_of") or row.get("ranks", GPUS)
        shape = row["batch"], row["num_heads"] * gpus, row["kv_len"]
        rows.append(
            [
                gpus if ranks in (None, gpus) else f"{ranks} of {gpus}",
                *shape[:2],
                thousands(row["kv_len"]),
                *(figure(row["us"].get(name)) for name in names),
            ]
        )
        rows[-1] += [figure(row[name], 2, "x") for name in ("lean_over_fa2", "lean_over_split_kv")]
        rows[-1].append(figure(FIGURE_8.get(shape), 2, "x"))
    if not any(row.get("ranks", GPUS) == GPUS for row in result["rows"]):  # not run
        rows += [[GPUS, *at[:2], thousands(at[2]), *[None] * 5, figure(said, 2, "x")] for at, said in FIGURE_8.items()]
    head = ["GPUs", "batch", "heads", "tokens", *(f"`{name}`" for name in names), "`fa2` / `lean`", "`split_kv` / `lean`"]
    return table([*head, "published `fa2` / `lean`, 8 A100"], rows)


def paper_ranks(result: dict) -> str:
    return (
        f"**Attention whose heads are divided among {GPUS} GPUs, microseconds per call**, the LeanAttention paper's figure 8, "
        f"head_dim 64: the heads of one GPU, on one GPU, without communication {by_method(result)}:\n\n{_divided(result)}"
    )


def paper_gpus(result: dict) -> str:
    return (
        f"**The same over several GPUs**, which compute at the same time: microseconds per call on the slowest of them. "
        f"2 of {GPUS} are two GPUs, each with the heads of one of {GPUS}. Rows without figures were not run "
        f"{by_method(result)}:\n\n{_divided(result)}"
    )


# The shapes of the fix-ups in the table.
FIXUP_ROWS = ["1, 56/56, 64, 4k", "1, 56/56, 64, 64k", "1, 12/12, 128, 4k", "1, 56/56, 128, 16k", "1, 56/56, 128, 256k"]
FIXUP_ROWS += ["4, 24/24, 128, 64k", "4, 32/32, 64, 16k", "16, 12/12, 128, 64k", "16, 56/56, 64, 16k"]


def _fixup(result: dict) -> str:
    """The fix-ups, of a result from before their kernels were removed (docs/dev/log.md)."""
    found, rows = result["summary"], [row for row in result["rows"] if row["shape"] in FIXUP_ROWS]
    names = {"fa2": "`fa2`", "split_kv": "`split_kv`", "lean": "`lean`", "host_waits": "host waits"}
    names |= {"last_arriver": "last arriver", "stream_k": "second launch"}
    more = {"`lean` runs": lambda row: "stream-K" if row["kernel_of_lean"] == "stream_k" else "fixed splits"}
    fastest = ", ".join(f"{names[name]} {count}" for name, count in found["fastest"].items() if count)
    return (
        f"**The fix-up of LeanAttention, microseconds per call**, its section 4: in one launch the program that begins a head "
        f"waits for the others, or the last to arrive merges; in `lean` a second launch merges. These three columns are "
        f"stream-K for every shape; `lean` runs `split_kv`'s kernel at {found['lean_is_split_kv']} of "
        f"{len(result['rows'])}. Over the second launch: host waits {mean(found['host_waits_over_stream_k'])}, last arriver "
        f"{mean(found['last_arriver_over_stream_k'])}. Fastest by shape: {fastest}. Some of them:\n\n"
        f"{microseconds(sorted(rows, key=lambda row: FIXUP_ROWS.index(row['shape'])), names, more)}"
    )


def sweep(result: dict) -> str:
    found = result["summary"]
    sizes = list(dict.fromkeys(name for row in result["rows"] for name in row["us"] if name != "lean"))
    sizes.sort(key=lambda name: [int(n) for n in name.split(" x ")])
    return (
        f"**Tiles and grids of stream-K, microseconds per call** by keys of a tile x programs for each SM, its section 4 "
        f"{by_method(result)}; `lean`, whose sizes are fixed by a table, over the best of a row: {mean(found['lean_over_best'])}."
        f"\n\n{microseconds(result['rows'], {**{name: name for name in sizes}, 'lean': '`lean`'}, {})}"
    )
