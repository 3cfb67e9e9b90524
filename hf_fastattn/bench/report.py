"""Tables in Markdown from the JSON under examples/results.

python -m hf_fastattn.bench.report              # print them
python -m hf_fastattn.bench.report README.md    # write them between the marks in this file
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def _table(head: list[str], rows: list[list]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join("-" if cell is None else str(cell) for cell in line) + " |" for line in lines)


def _length(n: int) -> str:
    return f"{n >> 10}k" if n % 1024 == 0 else str(n)


def generate_table(result: dict) -> str:
    """Milliseconds a token of generate(), stock paths beside patched."""
    kinds = ["sdpa_dynamic", "sdpa_static_compile", "lean_dynamic", "patched"]
    rows = []
    for row in result["rows"]:
        ms = {kind: (row["rivals"].get(kind) or {}).get("ms") for kind in kinds}
        stock = [ms[kind] for kind in kinds[:2] if ms[kind]]
        gain = f"{min(stock) / ms['patched']:.2f}x" if stock and ms["patched"] else None
        rows.append([row["case"], *(None if ms[kind] is None else f"{ms[kind]:.2f}" for kind in kinds), gain])
    head = ["batch x prompt", "`sdpa`", "`sdpa`, static + compile", "`lean`", "`patch()`", "best stock / `patch()`"]
    return _table(head, rows)


def decode_table(result: dict) -> str:
    """Microseconds a decode call."""
    kinds = ["sdpa_flash", "sdpa_cudnn", "fa2", "split_kv", "lean"]
    rows = [
        [
            f"{row['batch']}, {row['num_heads']}/{row['num_kv_heads']}, {row['head_dim']}, {_length(row['kv_len'])}",
            *(f"{row['us'][kind]:.1f}" for kind in kinds),
            f"{row['lean_over_best_peer']:.2f}",
        ]
        for row in result["rows"]
    ]
    return _table(["batch, heads/KV heads, head_dim, kv_len", *(f"`{kind}`" for kind in kinds), "best sdpa / `lean`"], rows)


def ragged_table(result: dict) -> str:
    """Microseconds a decode call over rows of unequal length."""
    rows = [
        [row["name"], *(f"{row['us'][kind]:.0f}" for kind in ("sdpa_masked", "split_kv", "lean")), f"{row['lean_tb_per_s']:.2f}"]
        for row in result["rows"]
    ]
    return _table(["rows", "`sdpa`, masked", "`split_kv`", "`lean`", "`lean`, TB/s of live K/V"], rows)


def prefill_table(result: dict) -> str:
    """TFLOP/s of prefill."""
    kinds = ["sdpa_flash", "sdpa_cudnn", "portable", "ours"]
    rows = [
        [
            f"{row['batch']}, {row['num_heads']}/{row['num_kv_heads']}, {row['head_dim']}, {_length(row['length'])}",
            "yes" if row["causal"] else "no",
            *(f"{row['tflops'][kind]:.0f}" for kind in kinds),
            f"{row['ours_over_sdpa_cudnn']:.2f}",
        ]
        for row in result["rows"]
    ]
    head = ["batch, heads/KV heads, head_dim, length", "causal", "`sdpa` flash", "`sdpa` cuDNN", "portable kernel", "ours here"]
    return _table([*head, "ours / cuDNN"], rows)


def report(folder: Path) -> str:
    """All tables, each under a line with its command and conditions."""
    read = lambda name: json.loads((folder / name).read_text())  # noqa: E731
    generate, decode = read("generate_8b.json"), read("kernels_decode.json")
    ragged, prefill = read("kernels_ragged.json"), read("kernels_prefill.json")
    on = decode["conditions"]
    padded = next(row for row in generate["rows"] if row["padded"])["rivals"]["patched_unpadded"]["ms"]
    means = prefill["geometric_mean"]
    return "\n\n".join(
        [
            f"{on['device']}, torch {on['torch']}, triton {on['triton']}, transformers {on['transformers']}, bfloat16, medians. "
            "Every result was checked before it was timed, peers in the same run; losses stand beside the wins.",
            "**`generate()`, milliseconds a token**, a Llama-3.1-8B-shaped model with random weights, greedy "
            "(`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python -m hf_fastattn.bench.generate --shape 8b "
            "--cases 1x512,1x8192,8x8192,1x65536,8x32768,8xpadded --compile-cases 1x512,1x8192,8x8192,1x65536`):",
            generate_table(generate),
            "The padded row is 8 left-padded prompts of 1k to 32k; an unpadded batch with as many live tokens takes "
            f"{padded:.2f} ms under `patch()`. Time to first token and all else is in the JSON; - was not run, or failed with "
            "the reason recorded there.",
            "**Decode kernels, microseconds a call**, CUDA-graph replays over inputs larger than L2 "
            "(`python -m hf_fastattn.bench.kernels decode ragged prefill`): "
            f"`lean` is {decode['geometric_mean']['lean_over_best_peer']:.2f}x the better sdpa backend in geometric mean, "
            f"{decode['smallest']['lean_over_best_peer']:.2f}x at worst.",
            decode_table(decode),
            "**Ragged batches, microseconds a decode call**, 32 heads over 8 KV heads, head_dim 128, left-padded:",
            ragged_table(ragged),
            f"**Prefill, TFLOP/s**: the Hopper kernel is {means['ours_over_sdpa_cudnn']:.2f}x cuDNN and "
            f"{means['ours_over_sdpa_flash']:.2f}x sdpa's flash backend in geometric mean, the portable kernel "
            f"{means['portable_over_sdpa_flash']:.2f}x the latter:",
            prefill_table(prefill),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("document", nargs="?", type=Path, help="Markdown file to write the tables into, between its marks")
    parser.add_argument("--results", type=Path, default=Path("examples/results"), help="folder of the JSON")
    args = parser.parse_args()
    text = report(args.results)
    if args.document is None:
        print(text)
        return
    document = args.document.read_text()
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        parser.error(f"{args.document} has no marks {BEGIN} and {END}.")
    args.document.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
