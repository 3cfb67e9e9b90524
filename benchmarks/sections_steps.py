"""The JSON of decode steps of many models, schemes and modes, as Markdown."""

from __future__ import annotations

from statistics import median

from hf_fastattn.report.tables import table, thousands

from .words import bandwidth, by_method, figure, model, on


def families(result: dict, of: str = "each family") -> str:
    rows = []
    for row in result["rows"]:
        figures = [figure(row["floor_ms"], 2), figure(row.get("replay_ms"), 2), figure(row.get("over_floor"), 2, "x")]
        name = f"{row['model']} ({row['layers']})" if "layers" in row else row["model"]
        rows.append([name, row["case"], *figures, row.get("launches"), figure(row["ms"], 2), figure(row["stock_ms"])])
    head = ["model", "batch x prompt", "floor", "replay", "replay / floor", "launches", "`patch()`", "stock `generate()`"]
    padded = next((row["lengths"] for row in result["rows"] if row["case"].endswith("padded")), None)
    lengths = f"; the padded case has left-padded rows of {min(padded)} to {max(padded)} tokens" if padded else ""
    title = f"**A decode step of {of}, milliseconds**, random weights, the floor at {bandwidth(result)}"
    return f"{title} {by_method(result)}{lengths}:\n\n{table(head, rows)}"


def families_headline(result: dict) -> str:
    """The rows of one text of the 8B on another GPU, for the README."""
    rows = [row for row in result["rows"] if row["model"] == "8b" and row["case"].startswith("1x")]
    cells = [[row["case"], *(figure(row[name], 2) for name in ("stock_ms", "ms", "floor_ms"))] for row in rows]
    table_ = table(["batch x prompt", "`sdpa`", "`patch()`", "least time"], cells)
    return f"The same shape: {on(result)}; the static cache was not measured, and `sdpa` depends on the host.\n\n{table_}"


MODES = {
    "beams": "a step of 4 beams",
    "lookup": "a step with 8 tokens of prompt lookup",
    "assistant": "a step with 5 drafts of an assistant of 4 layers, with the drafts",
    "message": "first token of a message of",
    "first": "first token of a prompt of",
}


def modes(result: dict) -> str:
    rows = []
    for row in result["rows"]:
        stock, ours = row["stock"]["ms"], row["patched"]["ms"]
        end = " tokens" if row["mode"] == "first" else ""
        figures = [figure(stock, 2), figure(ours, 2), figure(stock / ours, 2, "x"), f"{row['equal_tokens']:.0%}"]
        figures += [f"{row[model]['error']:.2g}" for model in ("stock", "patched")]
        rows.append([f"{MODES[row['mode']]} {row['case']}{end}", *figures])
    head = ["", "stock `generate()`", "`patch()`", "stock / `patch()`", "equal tokens", "error of stock", "of `patch()`"]
    return f"**Other modes of `generate()`, milliseconds**, {model(result)} {by_method(result)}:\n\n{table(head, rows)}"


def evaluation(result: dict) -> str:
    rows = []
    for row in result["rows"]:
        stock, ours = row["stock"], row["patched"]
        speeds = [figure(1e3 / each[what], 2) for what in ("ms", "first_ms") for each in (stock, ours)]
        ratios = [figure(stock[what] / ours[what], 2, "x") for what in ("ms", "first_ms")]
        errors = [f"{each['error']:.2g}" for each in (stock, ours)]
        rows.append([row["case"], *speeds[:2], ratios[0], *speeds[2:], ratios[1], f"{row['equal_tokens']:.0%}", *errors])
    head = ["run x batch size", "stock `generate()`", "`patch()`", "`patch()` / stock"]
    head += [f"first pass, {name}" for name in ("stock", "`patch()`", "`patch()` / stock")]
    head += ["equal tokens", "error of stock", "of `patch()`"]
    title = f"**The calls of an evaluation, samples a second**, {model(result)}, calls of {result['recorded']}"
    return f"{title} {by_method(result)}:\n\n{table(head, rows)}"


def rollout(result: dict) -> str:
    rows = []
    for row in result["rows"]:
        for name, label in (("stock", "stock, `sdpa`"), ("patched", "`patch()`")):
            found = row[name]
            memory = found["peak_bytes"] / 1e9 if "peak_bytes" in found else None
            figures = [*(figure(each, 2) for each in found["rollout_s"]), figure(found["step_s"][-1], 2), figure(memory, 1)]
            rows.append([row["precision"], label, *figures, f"{found['error']:.2g}"])
    count = max((len(row["stock"]["rollout_s"]) for row in result["rows"]), default=0)
    head = ["precision", "", *(f"rollout {i + 1}" for i in range(count)), "step", "peak GB", "error"]
    text = f"**Rollouts, seconds**, {result['prompts']} prompts x {result['samples']} samples x {result['new']} new tokens"
    text += f", as TRL {result['given']['trl']} calls `generate()`, {model(result)} {by_method(result)}"
    return f"{text}:\n\n{table(head, rows)}"


def prompts(result: dict) -> str:
    labels = {"stock": "stock", "padded": "padding read", "patched": "`patch()`"}
    names = [name for name in labels if any(name in row for row in result["rows"])]
    rows = []
    for row in result["rows"]:
        read = f"{sum(row['lengths'])} of {max(row['lengths']) * len(row['lengths']) * row['copies']}"
        firsts, speeds, peaks = ([row.get(name, {}).get(what) for name in names] for what in _OF_PROMPTS)
        ratio = row["padded"]["first_token_s"] / row["patched"]["first_token_s"]
        figures = [*(figure(each, 3) for each in firsts), figure(ratio, 2, "x"), *(figure(each, 0) for each in speeds)]
        rows.append([row["case"], read, *figures, *(figure(each and each / 1e9, 1) for each in peaks)])
    head = ["case", "tokens read", *(f"first token s, {labels[name]}" for name in names), "padding read / `patch()`"]
    head += [f"{what}, {labels[name]}" for what in ("tokens/s", "peak GB") for name in names]
    return f"**Batches of prompts**, {model(result)} {by_method(result)}:\n\n{table(head, rows)}"


def batch(result: dict) -> str:
    labels = {"batch": "`generate_batch()`", "unshared": "prompts not shared", "generate": "`generate()`"}
    labels |= {"stock": "stock", "continuous": "stock's batching"}
    rows = []
    for row in result["rows"]:
        found = [row.get(name, {}) for name in labels]
        figures = [*(figure(each.get("tokens_per_s"), 0) for each in found)]
        figures += [figure(peak and peak / 1e9, 1) for peak in (each.get("peak_bytes") for each in found)]
        figures.append(None if row.get("idle") is None else figure(100 * row["idle"]))
        rows.append([row["case"], len(row["lengths"]), row["copies"], sum(row["new"]) * row["copies"], row["part"], *figures])
    head = ["case", "prompts", "samples", "new tokens", "part", *(f"tokens/s, {label}" for label in labels.values())]
    head += [*(f"peak GB, {label}" for label in labels.values()), "GPU idle, %"]
    missed = f" No time was left for {', '.join(result['not_run'])}." if result["not_run"] else ""
    return f"**Jobs of prompts**, {model(result)} {by_method(result)}.{missed}\n\n{table(head, rows)}"


def chunks(result: dict) -> str:
    rows = []
    for row in result["rows"]:
        asked = "in chunks" if row["asked"].isdecimal() else {"whole": "whole", "auto": '`"auto"`'}[row["asked"]]
        read = row["chunk"] or row["tokens"]
        figures = [figure(row.get("first_token_s"), 3)]
        figures += [figure(row.get(name) and row[name] / 1e9, 2) for name in ("peak_bytes", "estimate_bytes")]
        rows.append([f"{row['tokens']:,}", asked, f"{read:,}", *figures, f"{row['pairs'] / 1e6:,.0f}"])
    head = ["tokens", "read", "tokens at once", "seconds", "peak GB", "estimated GB", "million scores of a head"]
    taken = result.get("occupied_bytes")
    less = f", {taken / 1e9:.0f} GB of memory taken by another tensor" if taken else ""
    return f"**Prompts read whole and in chunks**, {model(result)}{less} {by_method(result)}:\n\n{table(head, rows)}"


_OF_PROMPTS = ("first_token_s", "tokens_per_s", "peak_bytes")


def quantised(result: dict) -> str:
    rows = []
    plain = {row["case"]: row for row in result["rows"] if row["scheme"] == "bf16"}
    for row in sorted(result["rows"], key=lambda row: row["case"]):
        than = plain.get(row["case"], {})
        same_run = than.get("run") == row["run"]
        figures = [f"{row['weight_bytes'] / 1e9:.2f}", figure(row.get("replay_ms"), 2), figure(row["ms"], 2)]
        figures += [figure(row["uncaptured_ms"], 1), figure(row["stock_ms"], 1)]
        figures += [figure(row["stock_ms"] / row["ms"], 2, "x"), figure(than["ms"] / row["ms"], 2, "x") if same_run else None]
        rows.append([row["case"], row["scheme"], *figures])
    head = ["batch x prompt", "weights", "GB", "replay", "`patch()`", "without graphs", "stock", "stock / `patch()`"]
    layers = result["config"]["num_hidden_layers"]
    text = f"**Quantised weights, milliseconds per token**, {model(result)}, {layers} layers {by_method(result)}"
    return f"{text}:\n\n{table([*head, 'bf16 / these weights'], rows)}"


def softmax(result: dict) -> str:
    names = {"naive": "naive, 2 readings", "safe": "safe, 3", "online": "online, 2", "torch": "torch"}
    names |= {"torch_softmax_topk": "torch's softmax, topk", "torch_topk_softmax": "topk, softmax", "one_reading": "one reading"}
    both = {"safe": "online", "torch_softmax_topk": "one_reading", "no_cache": "cache"}

    def cells(row: dict, shown: list[str]) -> list[str | None]:
        """Microseconds, and the ratios of those that are both there."""
        us = row["us"]
        ratios = [figure(us[x] / us[y], 2, "x") if {x, y} <= us.keys() else None for x, y in both.items() if x in shown]
        return [*(figure(us.get(name)) for name in shown), *ratios]

    rows = [[f"{row['batch']} x {row['vocab']}", *cells(row, [*names])] for row in result["rows"] if "vocab" in row]
    head = ["batch x scores", *names.values(), "safe / online", "softmax, topk / one reading"]
    steps = [row for row in result["rows"] if "flops" in row]
    lines = [
        [str(row["length"]), *cells(row, ["no_cache", "cache"]), figure(row["flops"]["no_cache"] / row["flops"]["cache"], 0, "x")]
        for row in steps
    ]
    return (
        f"**Softmax, microseconds**, the last three of the top {result['rows'][0]['top_k']}; one reading also draws a token "
        f"{by_method(result)}:\n\n{table(head, rows)}\n\nA layer's attention and projections for one new token, microseconds, "
        f"{', '.join({row['heads']: None for row in steps})}:\n\n"
        + table(["tokens", "without a cache", "with it", "ratio", "ratio of operations"], lines)
    )


def linear(result: dict) -> str:
    rows = result["rows"]
    names = [*rows[0]["us"]]
    lines = [[thousands(row["length"]), *(figure(row["us"][name]) for name in names)] for row in rows]
    head = ["tokens before", *(f"`{name}`" for name in names)]
    sizes = ", ".join(f"{size / 1e6:.1f} MB for `{name}`" for name, size in rows[-1]["bytes"].items())
    return (
        f"**A step of one layer of linear attention, microseconds**, one row, heads {result['heads'].replace(',', '/')}, beside "
        f"exact attention {by_method(result)}; it reads {sizes} at {thousands(rows[-1]['length'])}:\n\n{table(head, lines)}"
    )


def unified(result: dict) -> str:
    gains, rows = sorted(row["gain"] for row in result["rows"]), []
    for row in sorted(result["rows"], key=lambda row: -row["gain"])[:8]:
        rows.append([row["shape"], *(figure(row["us"][name], 2) for name in ("maximum", "unified")), f"{row['gain']:.1%}"])
    ends = f"from {gains[0]:.1%} to {gains[-1]:.1%}, median {median(gains):.1%}"
    long = max(row["gain"] for row in result["rows"] if row["us"]["maximum"] > 30)
    return (
        f"**What `split_kv` gains at most without the maximum**, {len(gains)} shapes, {ends}; of calls above 30 us "
        f"at most {long:.1%} {by_method(result)}. The largest, microseconds:\n\n"
        + table(["rows, heads, head_dim, keys", "with the maximum", "without", "gain"], rows)
    )


def sampling(result: dict) -> str:
    rows = []
    for row in result["rows"]:
        figures = [figure(row[name][what], 3) for what in ("ms", "above_ms") for name in ("stock", "patched")]
        rows.append([row["case"], row["setting"], *figures])
    head = ["", "", *(f"{what}, {name}" for what in ("ms", "above greedy") for name in ("stock", "`patch()`"))]
    return f"**Sampled tokens, milliseconds**, {model(result)} {by_method(result)}:\n\n{table(head, rows)}"


def kv_dtype(result: dict) -> str:
    calls, steps, rivals, found = [], [], [], []
    for row in result["rows"]:
        if "us" in row:
            us = row["us"]
            figures = [figure(us[name]) for name in ("16 bits", "int8", "fp8")]
            figures += [figure(row["over_16_bits"][name], 2, "x") for name in ("int8", "fp8")]
            calls.append([row["shape"], f"{row['kv_bytes'] / 2**20:.0f} MiB", *figures])
            continue
        rivals = [name for name, each in row.items() if isinstance(each, dict) and "ms" in each]
        steps += [[row["case"], name, figure(row[name]["ms"], 2), f"{row[name]['peak_bytes'] / 1e9:.1f}"] for name in rivals]
        found += row.get("missing", {})
    missing = f" Not installed: {', '.join(dict.fromkeys(found))}." if found else ""
    head = ["rows, heads, head_dim, keys", "K and V in 16 bits", "us, 16 bits", "int8", "fp8", "16 bits / int8", "16 bits / fp8"]
    return (
        f"**K and V in 8 bits: decode calls of `lean`** {by_method(result)}:\n\n{table(head, calls)}\n\nTokens of `generate()`, "
        f"{model(result)}; the first three under `patch()`, the others stock.{missing}\n\n"
        + table(["batch x prompt", "K and V", "ms per token", "peak GB"], steps)
    )


def session(result: dict) -> str:
    kinds, lines = result["rows"], []
    for number, phase in enumerate(kinds[0]["phases"]):
        stalls = [max(row["phases"][number]["stall_s"]) for row in kinds]
        lines.append([phase["phase"], str(len(phase["stall_s"])), *(figure(each, 2) for each in stalls)])
    every = [sum(max(0, stall) for phase in row["phases"] for stall in phase["stall_s"]) for row in kinds]
    lines.append(["all stalls together", None, *(figure(each, 1) for each in every)])
    compiled = [str(sum(phase["compiled"] for phase in row["phases"])) for row in kinds]
    lines.append(["kernels compiled by the process itself", None, *compiled])
    imports = "".join(f" The import took {row['import_s']:.1f} s." for row in kinds if "import_s" in row)
    return (
        f"**The first session of a process**, {model(result)} {by_method(result)}, {result['conditions']['cores']} cores: the "
        f"longest stall of the calls of a phase, seconds.{imports}\n\n"
        + table(["phase", "calls", *(row["kind"] for row in kinds)], lines)
    )


def first_tokens(result: dict) -> str:
    lines = []
    for row in result["rows"]:
        stock, again, patched = row["stock"], row["again"], row["patched"]
        ours, cells = patched["first_token_s"], []
        for name in ("median_ms", "p95_ms", "max_ms"):
            cells += [figure(each[name]) for each in (stock, again, patched)]
        for each in (stock, again):
            times = each["first_token_s"]
            cells.append(f"{sum(mine > times[turn % len(times)] for turn, mine in enumerate(ours))} of {len(ours)}")
        lines.append([row["case"], *cells, f"{sum(patched['before'])}, {sum(patched['after'])}"])
    head = [f"{what}, {who}" for what in ("median", "95 %", "longest") for who in ("stock", "again", "`patch()`")]
    head += ["turns slower than stock's", "than again", "captures before, after"]
    return (
        f"**Milliseconds to the first token**, {model(result)} {by_method(result)}. Stock reads the chats once, `patch()` "
        'twice. "again" is stock after it has read prompts of the same lengths: sdpa takes longer for lengths that are new to '
        f"it.\n\n{table(['case', *head], lines)}"
    )


def first_tokens_of_chats(result: dict) -> str:
    """One sentence for the headline."""
    row = next(row for row in result["rows"] if row["case"] == "chats")
    turns, shortest, longest = len(row["lengths"]), min(row["lengths"]), max(row["lengths"])
    stock, again, patched = (figure(1e3 * median(row[rival]["first_token_s"][:turns])) for rival in ("stock", "again", "patched"))
    return (
        f"The first token of a turn of a chat takes {patched} ms under `patch()` and {stock} with `sdpa`, or {again} at lengths "
        f"that `sdpa` has read before (medians of {turns} turns, in which {shortest} to {longest} tokens and those of the last "
        f"reply are read, {model(result)}, {on(result)})."
    )


def roofline(result: dict) -> str:
    rows = sorted(result["rows"], key=lambda row: row["rows"])
    lines = [[str(row["rows"]), figure(row["replay_ms"], 2), figure(1e3 * row["replay_ms"] / row["rows"], 1)] for row in rows]
    one, middle, last = rows[0], next(row for row in rows if 2 * row["rows"] >= rows[-1]["rows"]), rows[-1]
    further = (last["replay_ms"] - middle["replay_ms"]) / (last["rows"] - middle["rows"])
    return (
        f"**Decode steps by the number of rows**, {model(result)} {by_method(result)}. A step of one row takes as long as "
        f"{one['replay_ms'] / further:.0f} further ones between {middle['rows']} and {last['rows']} rows, and as "
        f"{one['replay_ms'] / last['replay_ms'] * last['rows']:.0f} of {last['rows']}, whose time has all other launches. "
        f"`explain()` says that products with weights are bound by compute from {result['explained']['weights_batch']} rows on:"
        f"\n\n{table(['rows', 'ms a step', 'us a row'], lines)}"
    )
