"""The text of an explanation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..report.tables import size, table, thousands

if TYPE_CHECKING:
    from . import Explanation


def paragraphs(found: Explanation) -> Iterator[str]:
    facts, gpu, step = found.facts, found.gpu, found.step
    dtype = " and ".join([kind for kind, _ in facts.quantised] + [str(facts.dtype).removeprefix("torch.")])
    kind = "MHA" if facts.num_kv_heads == facts.num_heads else "MQA" if facts.num_kv_heads == 1 else "GQA"
    windows = {w: facts.windows.count(w) for w in facts.windows}
    layers = ", ".join(f"{n} with a window of {w}" if w else f"{n} that keep everything" for w, n in windows.items())
    batch = "1 row" if found.batch == 1 else f"{found.batch} rows"
    rate = f", {size(gpu.rate, 'FLOP/s')}" if gpu.rate else ""
    shapes = dict.fromkeys(f"{s.num_heads} query heads on {s.num_kv_heads} KV heads, head_dim {s.head_dim}" for s in facts.shapes)
    heads = f"{facts.num_heads} query heads on {facts.num_kv_heads} KV heads ({kind}), head_dim {facts.head_dim}"
    lacks = [row["why"] for row in found.refused if row["what"] in (found.backend, "patch()", "the cache of patch()")]
    yield (
        f"supported: {'yes' if not lacks else f'partly. {lacks[0]}' if found.supported else f'no. {lacks[0]}'}\n"
        f"{facts.name}: {facts.parameters / 1e6:,.0f} million parameters, {size(facts.weight_bytes)} in {dtype}\n"
        f"{heads if len(shapes) == 1 else ' or '.join(shapes)}; layers: {layers}\n"
        f"{batch} of {found.length:,} tokens on {gpu.name}: {size(gpu.memory)}, {size(gpu.bandwidth, 'B/s')}{rate}\n"
        + "\n".join([f"({gpu.source})", *found.notes])
    )
    if found.runs:
        yield f'What runs with "{found.backend}" on {found.device}:\n\n' + _table(found.runs)
    else:
        yield f'Nothing runs with "{found.backend}" on {found.device}.'
    if found.refused:
        yield "Refused:\n\n" + _table(found.refused)
    read, per_second = size(step.weight_bytes + step.kv_bytes), found.batch * 1e3 / step.floor_ms
    speed = f"{per_second:,.{0 if per_second >= 100 else 1}f} tokens a second"
    rows = [
        ["reads", read, f"{size(step.weight_bytes)} of weights, {size(step.kv_bytes)} of K/V"],
        ["computes", size(step.flops, "FLOP"), f"{step.flops_per_byte:.3g} FLOP for each byte it reads"],
        [f"takes at least, on {gpu.name}", f"{step.floor_ms:.3g} ms", f"set by {step.bound_by}; {speed}"],
    ]
    yield table(["one decode step, a token for each row", "", ""], rows)
    yield from _roofline(found)
    rows = [[thousands(n), size(kv), size(held), "yes" if fits else "no"] for n, kv, held, fits in map(dict.values, found.memory)]
    yield table(["tokens a row", "K/V", "K/V and weights", "fits"], rows) + f"\n\n{_limit(found)}"
    of = map(dict.values, found.variants)
    rows = [[name, size(kv), f"{ms:.3g}", "any" if most is None else f"{most:,}"] for name, kv, ms, most in of]
    yield table(["the same weights with", "K/V", "at least, ms", "longest"], rows)


def _roofline(found: Explanation) -> Iterator[str]:
    roofline, prompt = found.roofline, found.prompt
    rows = [
        ["computes", size(prompt.flops, "FLOP"), f"{prompt.flops_per_byte:,.0f} FLOP for each byte it reads or writes"],
        ["first token", size(prompt.floor_ms / 1e3, "s"), f"at least, set by {prompt.bound_by}"],
        ["activations", size(found.activation_bytes), f"about; {_read(found.chunk)}"],
    ]
    if found.ring_chunk is not None and found.gpu.link is not None:
        why = f"hide the sending of K and V, {size(found.gpu.link, 'B/s')} to the next GPU"
        rows.append(["ring_attention()", f"{found.ring_chunk:,} tokens", f"of each rank, at least, {why}"])
    yield table([f"a prompt of {found.length:,} tokens a row", "", ""], rows)
    if roofline.gpu_flops_per_byte is None:
        return

    def least(batch: int | None) -> str:
        return "at no batch" if batch is None else f"from a batch of {batch} on"

    rows = [
        ["products with weights", least(roofline.weights_batch), "all rows share what is read"],
        ["attention", least(roofline.attention_batch), f"{roofline.attention_flops_per_byte:.3g} FLOP per byte at every batch"],
        ["decode step", least(roofline.step_batch), f"of {found.length:,} tokens a row"],
    ]
    yield table([f"{roofline.gpu_flops_per_byte:.3g} FLOP per byte of {found.gpu.name}", "set by compute", ""], rows)


def _read(chunk: int | None) -> str:
    return "read whole" if chunk is None else f'read in chunks of {chunk} tokens a row by patch(prefill_chunk="auto")'


def _table(rows: list[dict[str, str]]) -> str:
    return table(list(rows[0]), [list(row.values()) for row in rows])


def _limit(found: Explanation) -> str:
    what = f"{size(found.gpu.memory)} hold"
    if found.longest is None:
        return f"{what} weights and K/V at any length: every layer has a window."
    if found.longest == 0:
        return f"{what} less than the weights and one token a row."
    return f"{what} weights and K/V up to {found.longest:,} tokens a row; activations, mostly of the prompt, need more."
