"""Each JSON under examples/results as Markdown, by one function and one row of SECTIONS."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hf_fastattn.report.tables import size, table, thousands

from . import sections_context, sections_steps
from . import sections_training as training
from .commits import METHOD_FIRST, METHOD_SESSION
from .grid import LEAN, OURS, ROOM, ROOMY, SDPA, STATIC, UNPADDED
from .provenance import by, columns, of_one_run, ratio
from .sections_paper import paper, paper_e2e, paper_gpus, paper_ranks, share, sweep
from .sections_ranks import ranks
from .shapes import ratios
from .words import SHAPE, by_method, by_past, figure, mean, method, microseconds, model, on, same

HEADLINE = "headline"  # which stands only where it is named
SLOWEST = 25  # rows of the queries that the text lists: one in a hundred
# The shapes of the decode grid in the table, besides the worst one.
DECODE_ROWS = [
    "1, 32/8, 128, 1k",
    "1, 32/8, 128, 16k",
    "1, 32/8, 128, 256k",
    "4, 32/8, 128, 4k",
    "16, 32/8, 128, 16k",
    "64, 32/8, 128, 64k",
    "1, 32/32, 128, 64k",
    "16, 28/4, 128, 4k",
    "4, 64/8, 128, 64k",
    "1, 56/56, 64, 16k",
    "64, 9/3, 64, 4k",
    "1, 8/1, 256, 64k",
]


# ---- generate() ----


def measured_rows(result: dict) -> list[dict]:
    """Rows of generate() that have figures, in the order of the table."""
    return sorted((row for row in result["rows"] if row["rivals"]), key=lambda row: (row["padded"], row["rows"], row["lengths"]))


def of(row: dict, name: str, what: str = "ms"):
    return (row["rivals"].get(name) or {}).get(what)


COLUMNS = {SDPA: "`sdpa`", STATIC: "`sdpa`, static + compile", LEAN: "`lean`", OURS: "`patch()`"}


def generate(result: dict) -> str:
    rows = measured_rows(result)
    labels = {name: label for name, label in COLUMNS.items() if any(of(row, name) for row in rows)}
    short = {name: label.split(", ")[-1] for name, label in labels.items()}
    over = [name for name in (SDPA, STATIC) if name in labels and OURS in labels]
    head = ["batch x prompt", *labels.values(), *(f"{short[name]} / `patch()`" for name in over)]
    head += ["first token, `sdpa` / `patch()`", "GiB, `sdpa` / `patch()`"]
    lines = []
    for row in rows:
        lines.append([row["case"], *(figure(of(row, name), 2) for name in labels)])
        lines[-1] += [figure(ratio(result, row, name, OURS), 2, "x") for name in over]
        for what, digits in (("ttft_ms", 0), ("peak_gib", 1)):
            lines[-1].append(" / ".join(figure(of(row, name, what), digits) or "-" for name in (SDPA, OURS)))
    title = f"**`generate()`, milliseconds per token**, {model(result)}; {method(result)}"
    return "\n\n".join([f"{title}.", columns(result, rows, short), table(head, lines), " ".join(generate_notes(result, rows))])


def generate_notes(result: dict, rows: list[dict]) -> list[str]:
    """Notes on the table, from the data."""
    notes, slow = [], {}
    for row in rows:
        if (of(row, SDPA) or 0) * 1.5 < (of(row, SDPA, "all_ms") or [0])[0]:
            slow[row["case"]] = of(row, SDPA, "all_ms")[0]
        if of(row, UNPADDED) and of_one_run(result, row, UNPADDED, OURS):
            low, high = min(row["lengths"]), max(row["lengths"])
            notes.append(
                f"The padded row is {row['rows']} left-padded prompts of {thousands(low)} to {thousands(high)} tokens; an "
                f"unpadded batch with as many live tokens takes {of(row, UNPADDED):.2f} ms under `patch()`."
            )
        if of(row, ROOMY) and of_one_run(result, row, ROOMY, OURS):
            notes.append(f"With room for {ROOM} times the tokens {row['case']} takes {of(row, ROOMY):.2f} ms under `patch()`.")
    notes += untimed(rows, STATIC, "The static cache with compilation")
    if slow:
        took = " to ".join(dict.fromkeys((f"{min(slow.values()):.0f}", f"{max(slow.values()):.0f}")))
        notes.append(f"The first repeat, which the median excludes, took `sdpa` {took} ms per token at {', '.join(slow)}.")
    step = result.get("step") or {}
    if kernels := step.get("kernels"):
        launches = sum(kernel["launches"] for kernel in kernels)
        notes.append(f"A captured step of {step['case']} is {launches} launches of {len(kernels)} kernels, listed in the JSON.")
    if all((of(row, OURS, "check") or {}).get("passed") for row in rows if of(row, OURS)):
        notes.append("Logits of `patch()` were checked against those of steps without a graph.")
    notes.append("First tokens are in milliseconds. `-`: not measured, or failed (the JSON has the reason).")
    return notes


def untimed(rows: list[dict], name: str, label: str) -> list[str]:
    """Why a rival has no figure, as one sentence for each reason."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if of(row, name):
            continue
        error, reason = of(row, name, "error"), "was not timed for"
        if error:
            memory = error.startswith("OutOfMemoryError")
            reason = "ran out of memory, in one process with the other rivals, at" if memory else "failed at"
        reasons.setdefault(reason, []).append(row["case"])
    return [f"{label} {reason} {', '.join(cases)}." for reason, cases in reasons.items()]


def headline(result: dict) -> str:
    """The short table of generate() for the README."""
    rows, lines = measured_rows(result), []
    for row in rows:
        stock = {name: of(row, name) for name in (SDPA, STATIC) if of(row, name)}
        best = min(stock, key=stock.get, default=SDPA)
        shown = [figure(of(row, name), 2) for name in (SDPA, STATIC, OURS)]
        lines.append([row["case"], *shown, figure(ratio(result, row, best, OURS), 2, "x")])
    head = ["batch x prompt", *(COLUMNS[name] for name in (SDPA, STATIC, OURS)), "speed-up over the faster one"]
    notes = [f"`generate()`, milliseconds per token, {model(result)}: {on(result)}; {method(result)}."]
    if without := untimed(rows, STATIC, "The static cache"):
        notes += [*without, "There the last column is the speed-up over `sdpa`."]
    if any(line[-1] is None for line in lines):
        notes.append("Where a ratio is -, its figures are not of one run.")
    return f"{' '.join(notes)}\n\n{table(head, lines)}"


def stream(result: dict) -> str:
    keeps = result["window"] + result["sinks"]
    head = ["tokens read", "ms per token", f"dense cache of {keeps} tokens", "ratio", "GiB allocated"]
    rows = [
        [
            row["tokens"],
            figure(row["ms"], 3),
            figure(row["dense_ms"], 3),
            figure(row["over_dense"], 3),
            figure(max(row["memory_bytes"]) / 2**30, 3) if row["memory_bytes"] else None,
        ]
        for row in result["rows"]
    ]
    lines = [
        f"**Unbounded generation**, {model(result)}, a window of {result['window']} and {result['sinks']} sinks "
        f"({by(result)}; {method(result)}):",
        table(head, rows),
    ]

    def other(part: str) -> str:
        """The run of this part, if it is known and not that of the table."""
        its = [result["update"]] if part == "update" else result["ring"]
        here = by(result, its) if all("run" in row for row in its) else by(result)
        return f" ({here})" if here != by(result) else ""

    if "update" in result:
        us = result["update"]["us"]
        told = "; ".join(f"{name.replace('_', ' ')} {value:.0f}" for name, value in us.items())
        lines.append(f"Writing one token into the caches of all layers, {result['update']['unit']}{other('update')}: {told}.")
    if result.get("ring"):
        told = ", ".join(f"{row['ring_over_dense']:.2f} ({row['shape']})" for row in result["ring"])
        lines.append(
            "The decode kernel over a full ring, with the re-rotation of the sinks' queries, as a share of `lean`'s "
            f"speed over dense K/V of that size, by {SHAPE}{other('ring')}: {told}."
        )
    return "\n\n".join(lines)


# ---- accuracy ----


def accuracy(result: dict) -> str:
    """A row for each backend and cache, a column for each score."""
    at = result["conditions"]
    scores = [{(s["task"], s["metric"]): s for s in run["scores"]} for run in result["runs"]]
    shown = [key for key in scores[0] if key[1] != "byte_perplexity"]  # the same information as word_perplexity
    rows = []
    for run, found in zip(result["runs"], scores, strict=True):
        cells = [f"{found[key]['score']:.4g} ± {found[key]['stderr']:.2g}" if key in found else None for key in shown]
        equal = [pair["equal"] for pair in run["against_baseline"] if pair["equal"] is not None]
        rows.append([f"`{run['backend']}`", run["cache"], *cells, f"{100 * min(equal):.0f} %" if equal else None])
    head = ["backend", "cache", *(f"{task.removeprefix('fastattn_')}, {metric.partition(',')[0]}" for task, metric in shown)]
    return (
        f"**{at['model']}**, {at['dtype']}, {at['device']}, torch {at['torch']}, transformers {at['transformers']}, at most "
        f"{at['limit']:.0f} examples a task, standard errors behind ±. The last column is the least share of equal answers "
        f"in a task, beside {result['baseline']}:\n\n{table([*head, 'equal'], rows)}\n\nThe verdict: {result['verdict']}"
    )


def perplexity(result: dict) -> str:
    """The sentence of examples/streaming_perplexity.py, whose picture follows."""
    versions, found = result["versions"], result["sinks_over_recomputed"]
    return (
        f"**Perplexity along a text**, {result['model']}, trained for {result['trained_length']} tokens, over {result['tokens']} "
        f"tokens, a window of {result['window']} and {result['sinks']} sinks, {result['device']}, {result['dtype']}, "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())} (`python examples/streaming_perplexity.py "
        f"--dtype {result['dtype']}`). At the {found['positions']} positions where the window was recomputed for each token, the "
        f"perplexity with sinks is {found['perplexity_ratio']:.4f} times that of recomputing."
    )


# ---- kernels ----


def decode(result: dict) -> str:
    found = result["summary"]
    worst = found["lean_over_best_peer"].get("smallest_at")
    rows = [row for row in result["rows"] if row["shape"] in DECODE_ROWS or row["shape"] == worst]
    names = {name: f"`{name}`" for name in ("sdpa_flash", "sdpa_cudnn", "split_kv", "batch_invariant", "lean")}
    more = {
        "best sdpa / `lean`": lambda row: figure(row["lean_over_best_peer"], 2),
        "`lean`, TB/s": lambda row: figure(row["tb_per_s"]["lean"], 2),
    }
    below, above = (found[f"lean_over_best_peer_{size}"] for size in ("below_256_mib", "from_256_mib"))
    price = found["lean_over_batch_invariant"]
    return (
        f"**Decode kernels, microseconds per call** {by_method(result)}. The time "
        f"of the better sdpa backend over that of `lean`: {mean(below)} below 256 MiB of K/V, {mean(above)} from there on. "
        f"`batch_invariant`, in which a row does not depend on its batch, takes {price['geometric_mean']:.2f} times as long as "
        f"`lean` in geometric mean, and {price['largest']:.2f} times at most. "
        f"Some of the {len(result['rows'])} shapes, and the worst:\n\n{microseconds(rows, names, more)}"
    )


def speculation(result: dict) -> str:
    queries = " and ".join(map(str, sorted({row["q_len"] for row in result["rows"]})))
    return (
        f"**Several queries per row**, {queries}, {same(result['rows'])} {by_method(result)}: the time of the better sdpa "
        f"backend over that of `lean` is {mean(result['summary']['lean_over_best_peer'])}."
    )


def queries(result: dict, *, flash: bool = False) -> str:
    """flash: with the ratio to sdpa's flash backend alone, whose kernel is that of GPUs before Hopper."""
    found, rows = result["summary"], result["rows"]
    cells = by_past(rows)
    pasts = sorted({past for _, past in cells})
    lines = [
        [str(q_len), *(figure(cells.get((q_len, past)), 2) for past in pasts)] for q_len in sorted({q_len for q_len, _ in cells})
    ]
    counts = ", ".join(f"{count} below {share}" for share, count in found["slower_than"].items())
    slow = ", ".join(f"{value:.2f} ({shape})" for shape, value in list(found["slow"].items())[:SLOWEST])
    doubling, more = found["doubling"], found["one_more_query"]
    steepest = max(doubling["over"], key=lambda pair: pair["ratio"], default=None)
    notes = [
        f"{len(rows)} of {found['of']} shapes: 6 pairs of heads, head_dim 64 and 128, batch 1 and 4, no mask.",
        f"Up to 128 queries over at least 8k keys: {mean(found['few_queries_long_past'])}; others: {mean(found['the_rest'])}.",
        *([f"Against flash alone: {mean(ratios([over_flash(row) for row in rows], 'over_flash'))}."] if flash else []),
        f"Of all shapes {counts}{f'; the slowest: {slow}' if slow else ''}.",
        f"Twice the queries take more than 2.15 times as long and 3 us in {len(doubling['over'])} of {doubling['pairs']} pairs"
        + (f", at most {steepest['ratio']:.2f} times ({steepest['shape']})." if steepest else "."),
        f"One more query takes 5 % less time or better in {len(more['over'])} of {more['pairs']} pairs.",
        *(f"`lean` reads K and V at {rate:.2f} TB/s for {shape}." for shape, rate in found.get("messages_tb_per_s", {}).items()),
        f"`lean` over `fa2`, which does not split the keys: {found['lean_over_fa2']:.2f}x in geometric mean.",
    ]
    head = ["queries", *(f"{thousands(past)} keys" for past in pasts)]
    return (
        f"**Any number of queries over a long context**, the time of the better sdpa backend over that of `lean` "
        f"{by_method(result)}. {' '.join(notes)} In geometric mean over heads, head_dim and batch:\n\n{table(head, lines)}"
    )


def over_flash(row: dict) -> dict:
    us = row["us"]
    return row | {"over_flash": us["sdpa_flash"] / us["lean"] if us.get("sdpa_flash") else None}


def ragged(result: dict) -> str:
    names = {"sdpa_masked": "`sdpa`, masked", "split_kv": "`split_kv`", "lean": "`lean`"}
    more = {"`lean`, TB/s of live K/V": lambda row: figure(row["tb_per_s"]["lean"], 2)}
    return (
        f"**Ragged batches, microseconds per decode call**, {same(result['rows'])}, left-padded "
        f"{by_method(result)}:\n\n{microseconds(result['rows'], names, more, 'rows')}"
    )


def _prompts(result: dict, names: dict[str, str], over: str) -> tuple[str, str]:
    """A table of TFLOP/s of the causal rows, and a note on the memory of standard attention if it was measured."""
    names |= {"standard": "standard"} if any("standard" in row["tflops"] for row in result["rows"]) else {}
    causal = [row for row in result["rows"] if row["causal"]]
    rows = [
        [
            row["shape"].removesuffix(", causal"),
            *(figure(row["tflops"].get(name), 0) for name in names),
            figure(row["ours_over_sdpa_cudnn"], 2),
        ]
        for row in causal
    ]
    head, note = [SHAPE, *names.values(), over], ""
    if any(row.get("peak_bytes") for row in result["rows"]):
        head.append("peak, standard / ours")
        for line, row in zip(rows, causal, strict=True):
            peak = [row["peak_bytes"].get(name) for name in ("standard", "ours")]
            line.append(" / ".join("-" if n is None else size(n) for n in peak))
        note = " Standard attention (matmul, softmax, matmul) has all scores in memory; - means that they do not fit."
    return table(head, rows), note


KERNELS_OF_PROMPTS = {
    "sdpa_flash": "`sdpa` flash",
    "sdpa_cudnn": "`sdpa` cuDNN",
    "portable": "portable kernel",
    "ours": "ours here",
}


def prefill(result: dict) -> str:
    found = result["summary"]
    text, note = _prompts(result, dict(KERNELS_OF_PROMPTS), "ours / cuDNN")
    return (
        f"**Prefill, TFLOP/s** {by_method(result)}. Causal and not, ours over cuDNN is {mean(found['ours_over_sdpa_cudnn'])}, "
        f"over sdpa's flash backend {mean(found['ours_over_sdpa_flash'])}; the portable kernel over the latter is "
        f"{mean(found['portable_over_sdpa_flash'])}.{note} The causal half:\n\n{text}"
    )


def widths(result: dict) -> str:
    text, note = _prompts(result, dict(KERNELS_OF_PROMPTS), "ours / cuDNN")
    means = [f"{name}: {mean(found)}" for name, found in result["summary"].items() if found["rows"]]
    return (
        f"**Prefill of other widths, and of short prompts, TFLOP/s** {by_method(result)}. 192/128 is keys of 192 and values of "
        f"128 numbers. Causal and not, ours over cuDNN, for each width or number of prompts: {'; '.join(means)}.{note} The "
        f"causal half:\n\n{text}"
    )


def pages(result: dict) -> str:
    sizes = [name for name in result["rows"][0]["us"] if name != "plain"]
    means = [
        f"{name} take {found['geometric_mean']:.2f} times as long with {kind} ({found['largest']:.2f} at most)"
        for kind, each in result["summary"].items()
        for name, found in each.items()
    ]
    columns = {f"{name} / plain": lambda row, name=name: figure(row[name], 2) for name in sizes}
    text = microseconds(result["rows"], {name: name for name in ("plain", *sizes)}, columns)
    return (
        f"**K and V in pages in random order, microseconds per call** {by_method(result)}. In geometric mean {'; '.join(means)}:"
        f"\n\n{text}"
    )


def window(result: dict) -> str:
    rows = [[row["shape"], figure(row["us"]["ours"]), figure(row["us"].get("flash_attention_2"))] for row in result["rows"]]
    return f"**Time of a sliding window, microseconds per call**, {same(result['rows'])} {by_method(result)}:\n\n" + table(
        ["call", "ours", "torch's FlashAttention-2"], rows
    )


def host(result: dict) -> str:
    largest = ", ".join(f"`{name}` {us:.0f}" for name, us in result["summary"]["largest_us"].items())
    return (
        f"**Host time of one eager decode call**, microseconds ({by(result)}): {largest}; `backend` is `lean` as "
        "models call it. A decode graph does not need this time."
    )


def commits(result: dict) -> str:
    trees, rows = result["trees"], []
    for row in result["rows"]:
        figures = [figure(row[name].get(what), 3) for what in ("ms", "host_ms") for name in ("before", "now")]
        rows.append([row["case"], *figures, figure(row["now_over_before"], 3)])
    head = ["batch x prompt", trees["before"], "after", "host's part, " + trees["before"], "after", "after / before"]
    unit = {METHOD_SESSION: "of a session", METHOD_FIRST: "of a call"}.get(result["conditions"]["method"], "per token")
    return (
        f"**Two commits, alternating, milliseconds {unit}**, {model(result)}, {trees['before']} and the code after it "
        f"{by_method(result)}:\n\n{table(head, rows)}"
    )


# The section of the README and of docs/results.md, then those of docs/results/ in their order: name, file, text.
SECTIONS: list[tuple[str, str, Callable[[dict], str]]] = [
    (HEADLINE, "generate_8b.json", headline),
    ("generate", "generate_8b.json", generate),
    ("generate_oldest", "generate_8b_oldest.json", generate),
    ("commits", "commits.json", commits),
    ("families", "families.json", sections_steps.families),
    ("families_h100", "families_h100.json", sections_steps.families),
    ("hybrids", "hybrids.json", partial(sections_steps.families, of="hybrids, with the number of their layers")),
    ("hybrids_fla", "hybrids_fla.json", partial(sections_steps.families, of="hybrids beside flash-linear-attention")),
    ("modes", "modes.json", sections_steps.modes),
    ("modes_1b", "modes_1b.json", sections_steps.modes),
    ("evaluation", "evaluation.json", sections_steps.evaluation),
    ("evaluation_8b", "evaluation_8b.json", sections_steps.evaluation),
    ("prompts", "prompts.json", sections_steps.prompts),
    ("sampling", "sampling_1b.json", sections_steps.sampling),
    ("sampling_8b", "sampling_8b.json", sections_steps.sampling),
    ("kv_dtype_speed", "kv_dtype_speed.json", sections_steps.kv_dtype),
    ("batch", "batch.json", sections_steps.batch),
    ("batch_samples", "batch_samples.json", sections_steps.batch),
    ("batch_gemma3", "batch_gemma3-4b.json", sections_steps.batch),
    ("batch_gpt_oss", "batch_gpt-oss-20b.json", sections_steps.batch),
    ("chunks", "chunks_8b.json", sections_steps.chunks),
    ("chunks_less", "chunks_8b_80gb_less.json", sections_steps.chunks),
    ("rollout", "rollout.json", sections_steps.rollout),
    ("quantised", "quantised.json", sections_steps.quantised),
    ("ranks", "ranks_8b.json", partial(ranks, cases=["1x2097152"])),
    ("ranks_8b_of8", "ranks_8b_of8.json", partial(ranks, counts=())),
    ("ranks_70b", "ranks_70b.json", partial(ranks, cases=["1x65536", "8x32768"])),
    ("ranks_70b_of8", "ranks_70b_of8.json", partial(ranks, counts=())),
    ("ranks_glm4", "ranks_glm4-9b.json", ranks),
    ("ranks_8b_h100", "ranks_8b_h100.json", partial(ranks, counts=())),
    ("ranks_glm4_h100", "ranks_glm4-9b_h100.json", partial(ranks, counts=())),
    ("generate_1b", "generate_1b.json", generate),
    ("session_1b", "session_1b.json", sections_steps.session),
    ("first_tokens_1b", "first_tokens_1b.json", sections_steps.first_tokens),
    ("first_tokens_8b", "first_tokens_8b.json", sections_steps.first_tokens),
    ("roofline", "roofline.json", sections_steps.roofline),
    ("stream", "stream.json", stream),
    ("perplexity", "streaming_perplexity.json", perplexity),
    ("accuracy", "eval_smollm2.json", accuracy),
    ("decode", "kernels_decode.json", decode),
    ("speculation", "kernels_speculation.json", speculation),
    ("queries", "kernels_queries.json", queries),
    ("queries_portable", "kernels_queries_portable.json", partial(queries, flash=True)),
    ("ragged", "kernels_ragged.json", ragged),
    ("window", "kernels_window.json", window),
    ("host", "kernels_host.json", host),
    ("pages", "kernels_pages.json", pages),
    ("prefill", "kernels_prefill.json", prefill),
    ("widths", "kernels_widths.json", widths),
    ("training", "kernels_training.json", training.lengths),
    ("training_packed", "kernels_training_packed.json", training.packed),
    ("training_gpt_oss", "kernels_training_gpt_oss.json", training.gpt_oss),
    ("training_fused", "kernels_training_fused.json", training.fused),
    ("training_layer", "kernels_training_layer.json", training.layer),
    ("softmax", "softmax.json", sections_steps.softmax),
    ("unified", "unified.json", sections_steps.unified),
    ("linear", "linear_decode.json", sections_steps.linear),
    ("context", "context.json", sections_context.balance),
    ("context_ranks", "context_ranks.json", sections_context.times),
    ("tree", "tree_ranks.json", sections_context.tree),
    ("paper", "kernels_paper.json", paper),
    ("paper_ranks", "kernels_paper_ranks.json", paper_ranks),
    ("paper_gpus", "paper_ranks.json", paper_gpus),
    ("sweep", "kernels_sweep.json", sweep),
    ("paper_e2e", "paper_e2e.json", paper_e2e),
    ("paper_e2e_small", "paper_e2e_opt-1.3b.json", paper_e2e),
    ("paper_e2e_widened", "paper_e2e_opt-1.3b_56_heads.json", paper_e2e),
    ("paper_share", "paper_share.json", share),
]
