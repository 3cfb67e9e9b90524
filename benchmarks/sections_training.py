"""The tables of attention with gradients."""

from __future__ import annotations

from hf_fastattn.report.tables import size, table, thousands

from .words import SHAPE, by_method, figure, mean, same

NAMES = {
    "ours": "ours",
    "ours_portable": "ours, portable backward",
    "sdpa_flash": "`sdpa` flash",
    "sdpa_cudnn": "`sdpa` cuDNN",
    "sdpa_efficient": "`sdpa` efficient",
    "sdpa_masked": "`sdpa`, masked",
    "flash_varlen": "torch's varlen",
    "flex": "compiled flex",
    "eager": "eager",
    "standard": "standard",
}
# Milliseconds of forward and backward, and MB, as published with the fused attention, for its own kernels and GPU.
PUBLISHED = {1920: (5.23, 16.87, 605), 2048: (9.57, 38.5, 1203)}


def _rivals(result: dict) -> list[str]:
    return [name for name in NAMES if any(name in row["us"] for row in result["rows"])]


def _ratios(result: dict, what: str, ours: str = "ours") -> str:
    """The times of the rivals over ours, as text; what: "us", "forward_us" or "backward_us"."""
    ratios = {name: result["summary"].get(f"{name}_over_{ours}_{what}", {"rows": 0}) for name in _rivals(result)}
    return ", ".join(f"{NAMES[name]} {mean(found)}" for name, found in ratios.items() if found["rows"])


def lengths(result: dict) -> str:
    names = _rivals(result)
    rates, peaks = [], []
    for row in result["rows"]:
        flops = row["flops"]
        cells = [
            [flops * times / row[what][name] / 1e6 if name in row[what] else None for name in names]
            for what, times in (("forward_us", 1), ("backward_us", 2.5))
        ]
        rates.append([row["shape"].removesuffix(", causal"), *(_pair(pair, 0) for pair in zip(*cells, strict=True))])
        peaks.append([row["shape"].removesuffix(", causal"), *(_size(row["peak_bytes"].get(name)) for name in names)])
    head = [SHAPE, *(NAMES[name] for name in names)]
    memory = f"\n\n{_memory(result['rows'])}\n\n{table(head, peaks)}" if any(result["rows"][0]["peak_bytes"].values()) else ""
    portable = _ratios(result, "backward_us", "ours_portable")
    return (
        f"**Attention with gradients, TFLOP/s forward / backward**, causal {by_method(result)}. A backward pass counts 2.5 times "
        f"the products of the forward, whatever it recomputes. The time of the rivals' backward over that of ours: "
        f"{_ratios(result, 'backward_us')}; of forward and backward: "
        f"{_ratios(result, 'us')}. With the portable kernel for dK and dV, backward: {portable or 'not measured'}."
        f"\n\n{table(head, rates)}{memory}"
    )


def _memory(rows: list[dict]) -> str:
    """The peak memory of a token at each length, of the head_dim with the longest row."""
    longest = max(rows, key=lambda row: row["kv_len"])
    each = {
        row["kv_len"]: row["peak_bytes"]["ours"] / (row["batch"] * row["kv_len"])
        for row in rows
        if row["head_dim"] == longest["head_dim"]
    }
    text = ", ".join(f"{size(round(count))} at {thousands(length)}" for length, count in sorted(each.items()))
    results = 2 * longest["head_dim"] * 2 * (longest["num_heads"] + longest["num_kv_heads"])  # out, dq, dk and dv in 16 bits
    return (
        f"Peak memory of forward and backward; of ours with head_dim {longest['head_dim']}, each token takes {text}, of which "
        f"output and gradients are {size(results)}:"
    )


def packed(result: dict) -> str:
    many = sorted({row["documents"] for row in result["rows"]})
    return (
        f"**Packed sequences, milliseconds forward / backward**, {' or '.join(map(str, many))} documents in a row, causal "
        f"{by_method(result)}. The rivals' forward and backward over ours: "
        f"{_ratios(result, 'us')}.\n\n{_milliseconds(result)}"
    )


def gpt_oss(result: dict) -> str:
    return (
        f"**GPT-OSS's attention with learned sinks, milliseconds forward / backward**, {same(result['rows'])} "
        f"{by_method(result)}. Transformers' eager attention over ours, forward and backward: "
        f"{_ratios(result, 'us')}.\n\n{_milliseconds(result)}"
    )


def fused(result: dict) -> str:
    lines = []
    for row in result["rows"]:
        for name in _rivals(result):
            if name in row["us"]:
                largest, average = row["errors_of"][name]["out"]
                timed = [figure(row[what][name] / 1e3, 2) for what in ("forward_us", "backward_us")]
                lines.append([_place(row), NAMES[name], *timed, _megabytes(row["peak_bytes"].get(name)), f"{largest:.1e}"])
                lines[-1].append(f"{average:.1e}")
        if row["kv_len"] in PUBLISHED:
            forward, backward, megabytes = PUBLISHED[row["kv_len"]]
            lines.append([_place(row), "published", f"{forward:.2f}", f"{backward:.2f}", str(megabytes), None, None])
    head = ["length x head_dim", "", "forward, ms", "backward, ms", "peak, MB", "largest error", "mean error"]
    return (
        f"**The table of the fused attention**, {result['dtype']}, not causal, {same(result['rows'])}, batch "
        f"{result['rows'][0]['batch']} {by_method(result)}. Published figures are of another GPU. Errors are those of the output "
        f"against fp32.\n\n{table(head, lines)}"
    )


def layer(result: dict) -> str:
    lines = []
    for row in result["rows"]:
        both = [figure(row["us"].get(name, 0) / 1e3 or None, 2) for name in ("standard", "ours")]
        peaks = [_size(row["peak_bytes"].get(name)) for name in ("standard", "ours")]
        worst = max(error[0] for error in row["errors_of"]["ours"].values())
        lines.append([str(row["kv_len"]), *both, *peaks, f"{worst:.1e}"])
    head = ["tokens", "standard, ms", "ours, ms", "standard, peak", "ours, peak", "largest error of ours"]
    return (
        f"**One layer of GPT-J, forward and backward by length**, {result['dtype']}, causal, {same(result['rows'])} "
        f"{by_method(result)}. The error is the largest of output and gradients against fp32; past 8k tokens of the last "
        f"queries' alone.\n\n{table(head, lines)}"
    )


def _milliseconds(result: dict) -> str:
    names = _rivals(result)
    rows = [
        [
            row["shape"],
            *(
                _pair([row[what][n] / 1e3 if n in row[what] else None for what in ("forward_us", "backward_us")], 2)
                for n in names
            ),
            *(_size(row["peak_bytes"].get(name)) for name in names),
        ]
        for row in result["rows"]
    ]
    return table([SHAPE, *(NAMES[n] for n in names), *(f"{NAMES[n]}, peak" for n in names)], rows)


def _pair(pair, digits: int) -> str | None:
    return None if None in pair else " / ".join(figure(x, digits) or "-" for x in pair)


def _size(count: int | None) -> str | None:
    return None if count is None else size(count)


def _megabytes(count: int | None) -> str | None:
    return None if count is None else f"{count / 1e6:.0f}"


def _place(row: dict) -> str:
    return f"{row['kv_len']} x {row['head_dim']}"
