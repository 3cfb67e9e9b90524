"""A decode step of each family of models under patch(), compared with the least time in which its bytes can be read.

    python -m benchmarks.families                                    # all families, two cases each
    python -m benchmarks.families --only 8b --cases 1x512,8x2048,64x256
    python -m benchmarks.families --only gemma,gpt-oss --keep

Models have the depth and width of the named ones, and random weights. The floor is the bytes of the weights that a step reads and
of live K and V, divided by the bandwidth of the GPU (4.5 TB/s for an H200, 3.1 for an H100). Experts count as expected for tokens
that choose them at random. A row has the replay of the captured step, ms per token of generate(), and ms per token of stock
generate() with a dynamic cache.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from hf_fastattn import model_shapes
from hf_fastattn.patches import patch

from .grid import pairs, row_lengths
from .models import COMMON, SHAPES, Subject, dtype_for, load, of_random_weights, step_bytes
from .results import Results, add_options, check_names, command, conditions, find_device, listed, need_gpu, progress
from .runs import Rival, check, free, make_prompt, resumed, run, step_times, twin

READ = {"NVIDIA H200": 4.5e12, "NVIDIA H100 80GB HBM3": 3.1e12}  # bytes that the GPU reads in a second
METHOD = "greedy generate(), 6th new token to last; replays by events around ten; medians"
CASES = ["1x2048", "8xpadded"]
OF_8B = ["1x512", "1x8192", "4x2048", "8x2048", "16x1024", "32x512", "64x256", "1x65536", "8x32768"]

_WIDE = {"vocab_size": 128256, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32}
_LONG = {"max_position_embeddings": 131072}
_PHI = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "pad_token_id": 0}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096}
# As long as the published lists; other numbers take the same time.
_LONGROPE |= {"short_factor": [1.0] * 48, "long_factor": [32 ** (i / 47) for i in range(48)]}
_GRANITE = {"attention_multiplier": 1 / 128, "embedding_multiplier": 12.0, "logits_scaling": 16.0, "residual_multiplier": 0.22}
_GEMMA = _LONG | {"vocab_size": 262208, "head_dim": 256, "sliding_window": 1024, "tie_word_embeddings": True}

# name: model type and configuration, as in the published configurations
FAMILIES: dict[str, tuple[str, dict]] = {
    **{name: model_shapes.SHAPES[name] for name in ("8b", "1b", "opt-1.3b", "opt-6.7b", "mistral-7b")},
    "qwen3-8b": (
        "qwen3",
        _WIDE | _LONG | {"vocab_size": 151936, "intermediate_size": 12288, "num_hidden_layers": 36, "head_dim": 128},
    ),
    "gemma3-4b": (
        "gemma3_text",
        _GEMMA
        | {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
        | {"num_attention_heads": 8, "num_key_value_heads": 4},
    ),
    "gemma3-12b": (
        "gemma3_text",
        _GEMMA
        | {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48}
        | {"num_attention_heads": 16, "num_key_value_heads": 8},
    ),
    "gemma3n-e2b": (
        "gemma3n_text",
        {"num_hidden_layers": 30, "intermediate_size": [8192] * 30, "num_kv_shared_layers": 10}
        | {"activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "max_position_embeddings": 32768},
    ),
    "phi3-mini": (
        "phi3",
        _PHI | {"vocab_size": 32064, "num_attention_heads": 32, "num_key_value_heads": 32, "sliding_window": 2047},
    ),
    "phi4-mini": (
        "phi3",
        _PHI
        | {"vocab_size": 200064, "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True}
        | {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_parameters": _LONGROPE},
    ),
    "glm4-9b": (
        "glm4",
        _WIDE
        | _LONG
        | {"vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2, "head_dim": 128},
    ),
    "granite-8b": (
        "granite",
        _WIDE
        | _LONG
        | _GRANITE
        | {"vocab_size": 49159, "intermediate_size": 12800, "num_hidden_layers": 40, "tie_word_embeddings": True},
    ),
    "olmo2-7b": ("olmo2", _WIDE | {"vocab_size": 100352, "intermediate_size": 11008, "num_key_value_heads": 32}),
    "olmo3-7b": (
        "olmo3",
        _WIDE | {"vocab_size": 100278, "intermediate_size": 11008, "num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "smollm3-3b": (
        "smollm3",
        _LONG
        | {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
        | {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "cohere2-7b": ("cohere2", _WIDE | _LONG | {"vocab_size": 256000, "intermediate_size": 14336, "sliding_window": 4096}),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        _LONG
        | {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "moe_intermediate_size": 768, "num_experts": 128}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts_per_tok": 8},
    ),
    "mixtral-8x7b": ("mixtral", _WIDE | {"vocab_size": 32000, "intermediate_size": 14336, "max_position_embeddings": 32768}),
    "bloom-7b1": ("bloom", {"vocab_size": 250880, "hidden_size": 4096, "n_layer": 30, "n_head": 32}),  # with ALiBi, as the next
    "mpt-7b": (
        "mpt",
        {"vocab_size": 50432, "d_model": 4096, "n_layers": 32, "n_heads": 32, "max_seq_len": 8192, "use_cache": True},
    ),
    "tiny": SHAPES["tiny"],  # for trials
}


def bandwidth(device: torch.device) -> float:
    """Bytes that this GPU reads in a second at most, those of an H200 if it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return READ.get(name, READ["NVIDIA H200"])


def load_family(name: str, shape: tuple[str, dict], dtype: torch.dtype, device: torch.device, positions: int) -> Subject:
    model_type, config = shape
    subject = of_random_weights(name, model_type, {**COMMON, "max_position_embeddings": 4096, **config}, dtype, device, positions)
    if model_type == "gemma3n_text":  # whose scale is 1: with weights of 1, scores of normed vectors are so large that any
        for module, weight in subject.model.named_parameters():  # rounding chooses other keys
            if module.endswith("q_norm.weight"):
                torch.nn.init.constant_(weight, 1 / 16)
    return subject


def measure(subject: Subject, case: str, args: argparse.Namespace, device: torch.device, *, profiled: bool = True) -> dict:
    """One row, with the kernels of a step if profiled. Raises RuntimeError if captured steps differ from uncaptured ones."""
    lengths = row_lengths(case, args.padded)
    row = {"model": subject.name, "case": case, "lengths": lengths}
    prompt = make_prompt(lengths, subject.text_config.vocab_size, device)
    stock = twin(subject.model, subject.model.config._attn_implementation)
    row["stock_attention"] = stock.config._attn_implementation
    run(stock, prompt, args.stock_tokens)  # the first call in a process is several times slower
    row["stock_ms"] = run(stock, prompt, args.stock_tokens).ms
    del stock
    free(device)
    model = twin(subject.model, subject.model.config._attn_implementation)
    patched = patch(model, "lean")
    try:
        first, again = resumed(model, prompt, args.tokens)
        states = sum(state.nbytes for state in first.cache.storage.states())
        row["bytes"] = step_bytes(subject.facts, lengths) + 2 * states  # a state is read and written
        row |= {"state_bytes": states, "layers": subject.text_config.num_hidden_layers} if states else {}
        row["floor_ms"] = 1e3 * row["bytes"] / bandwidth(device)
        if not args.unchecked:
            rival = Rival("patched", model, prompt, args.tokens, patch=patched)
            row["check"] = check(rival, first.cache, subject.model)
            if not row["check"]["passed"]:
                raise RuntimeError(f"captured steps differ from uncaptured ones: {row['check']}")
        row |= step_times(patched, again, args.repeats, profiled=profiled)
        if "replay_ms" in row:
            row["host_ms"] = row["ms"] - row["replay_ms"]
            row["over_floor"] = row["replay_ms"] / row["floor_ms"]
        row["stock_over_patched"] = row["stock_ms"] / row["ms"]
        return row
    finally:
        patched.undo()


def measure_cases(
    results: Results,
    name: str,
    cases: list[str],
    load: Callable[[], Subject],
    measure: Callable[[Subject, str], dict],
    line: Callable[[dict], str],
    device: torch.device,
    reserve: float,
) -> None:
    """Add the rows of one model, which is loaded for the first of them. A row is not run if less than `reserve` seconds are left.

    line: the line of the log for a row.
    """
    subject = None
    for case in cases:
        if results.left() < reserve:
            results.data["not_run"].append(f"{name} {case}")
            continue
        try:
            with warnings.catch_warnings(action="ignore"):  # why steps run uncaptured is in the row
                subject = subject or load()
                row = measure(subject, case)
        except Exception as error:  # the other rows are still useful
            results.add({}, f"{name} {case}", f"{name} {case} failed: {type(error).__name__}: {str(error)[:300]}", False)
        else:
            results.add(row, name, line(row))
        free(device)
    del subject
    free(device)


def line(row: dict) -> str:
    """The line of the log for a row."""
    found = f"{row['model']} {row['case']}: floor {row['floor_ms']:.2f} ms"
    if "replay_ms" in row:
        found += f", replay {row['replay_ms']:.2f} ({row['over_floor']:.2f}x, {row.get('launches', '-')} launches)"
    return f"{found}, patch() {row['ms']:.2f}, stock {row['stock_ms']:.1f}" + "".join(f"; {text}" for text in row["reasons"])


def add_step_options(parser: argparse.ArgumentParser, cases: str, padded: tuple[int, int], tokens: int) -> None:
    """The options of a benchmark of decode steps, with these defaults."""
    parser.add_argument("--cases", type=listed, help=f"ROWSxTOKENS or ROWSxpadded; default {cases}")
    parser.add_argument("--padded", type=int, nargs=2, default=padded, help=f"of padded rows (default: {padded[0]} {padded[1]})")
    parser.add_argument("--tokens", type=int, default=tokens, help="default: %(default)s")
    parser.add_argument("--stock-tokens", type=int, default=14, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="keep the rows that are in the JSON, and measure the others")
    add_options(parser, seconds=560)


def begin(
    parser: argparse.ArgumentParser, args: argparse.Namespace, name: str, command: str, device: torch.device, head: dict
) -> Results:
    """The Results of a benchmark of decode steps, with the rows of the JSON if they are kept."""
    head = {"dtype": str(dtype_for(device)).removeprefix("torch."), "unit": "ms a token", **head}
    results = Results(args.out / f"{name}.json", args.seconds, command, device, **head, failed=[], not_run=[])
    if args.keep:
        results.take_over(parser)
        results.data |= {"failed": [], "not_run": []}
    return results


def read_cases(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    cases: Iterable[str],
    *,
    reserve: float,
    seconds: float,
    shapes: Iterable[str] = SHAPES,
    shape: str = "8b",
) -> argparse.Namespace:
    """The arguments of a benchmark of named cases, checked: cases of the tiny shape run with it alone by default.

    shapes: names of models. shape: the default one."""
    cases = [*cases]
    parser.add_argument("--shape", default=shape, choices=shapes, help="default: %(default)s")
    help_ = f"of {', '.join(cases)}; default all but those of the tiny shape, and those alone for it"
    parser.add_argument("--only", type=listed, help=help_)
    parser.add_argument("--reserve", type=float, default=reserve, help="seconds that a case may need (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the other cases in the JSON")
    add_options(parser, seconds=seconds)
    args = parser.parse_args(argv)
    args.only = args.only or [n for n in cases if n.startswith("tiny") == args.shape.startswith("tiny")] or cases
    check_names(parser, args.only, cases, "cases")
    need_gpu(parser, args, [args.shape])
    return args


Begun = Callable[[Results, torch.device], Callable[[str], object]]


def each(
    args: argparse.Namespace,
    measure: Callable[[Subject, str, torch.device], Any],
    add: Callable[[Results, Any], object],
    positions: int = 0,
    prepare: Callable[[Subject], object] = lambda subject: None,
) -> Begun:
    """`begun` of cases that `measure` measures and `add` adds, of one model. prepare: called with the model."""

    def begun(results: Results, device: torch.device) -> Callable[[str], object]:
        if args.shape in FAMILIES.keys() - SHAPES:
            subject = load_family(args.shape, FAMILIES[args.shape], dtype_for(device), device, positions)
        else:
            subject = load(args.shape, dtype_for(device), device, positions)
        prepare(subject)
        return lambda case: add(results, measure(subject, case, device))

    return begun


def run_cases(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    name: str,
    command: str,
    head: dict,
    begun: Begun,
    key: str = "case",
) -> int:
    """Measure the chosen cases. begun: returns a function that measures a case and adds its rows. name: of the JSON; key: of the
    case in a row. Returns 0, or 1 if one failed or there was no time for it."""
    device = find_device(args.device)
    head = {"conditions": conditions(device, head.pop("method")), "shape": args.shape, **head}
    results = begin(parser, args, name, command, device, head)
    results.data["rows"] = [row for row in results.data["rows"] if row[key] not in args.only]
    run = begun(results, device)
    for case in progress(args.only, name.replace("_", " "), "case"):
        if results.left() < args.reserve:
            results.data["not_run"].append(case)
            continue
        run(case)
        free(device)
    return end(results)


def end(results: Results) -> int:
    """Save the Results. Returns 0, or 1 if a row failed or there was no time for it."""
    results.save()
    results.say(f"-> {results.path}")
    return 1 if results.data["failed"] or results.data["not_run"] else 0


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.families") -> int:
    """Measure the chosen families. Returns 0, or 1 if a row failed or there was no time for it."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    return run_shapes(parser, argv, "families", FAMILIES, {"": CASES, "8b": OF_8B})


def run_shapes(
    parser: argparse.ArgumentParser,
    argv: list[str] | None,
    name: str,
    shapes: dict[str, tuple[str, dict]],
    of: dict[str, list[str]],
    **versions: str,
) -> int:
    """Measure the chosen ones of these shapes. Returns 0, or 1 if a row failed or there was no time for it.

    name: of the JSON. of: the cases by the name of a shape, "" for all others. versions: further conditions.
    """
    parser.add_argument("--only", type=listed, help="beginnings of names; default all but tiny")
    parser.add_argument("--unchecked", action="store_true", help="do not compare logits with those of uncaptured steps")
    more = "".join(f", and more for {other}" for other in of if other)
    add_step_options(parser, f"{','.join(of[''])}{more}", (1024, 4096), tokens=32)
    args = parser.parse_args(argv)
    names = [each for each in shapes if (each.startswith(tuple(args.only)) if args.only else not each.startswith("tiny"))]
    if not names:
        parser.error(f"no family begins with {' or '.join(args.only)}; known are {', '.join(shapes)}.")
    need_gpu(parser, args, names, pairs(args.cases or of[""], args.padded))
    device = find_device(args.device)
    results = begin(parser, args, name, command(parser.prog, argv), device, {"conditions": conditions(device, METHOD) | versions})
    results.data["tb_per_s"] = bandwidth(device) / 1e12
    known = {(row["model"], row["case"]) for row in results.data["rows"]}
    for each in progress(names, name, "model"):
        cases = [case for case in args.cases or of.get(each, of[""]) if (each, case) not in known]
        if not cases:
            continue
        longest = max(max(row_lengths(case, args.padded)) for case in cases) + args.tokens + 64
        load = partial(load_family, each, shapes[each], dtype_for(device), device, longest)
        row_of = lambda subject, case: measure(subject, case, args, device)  # noqa: E731
        measure_cases(results, each, cases, load, row_of, line, device, reserve=20)
    return end(results)


if __name__ == "__main__":
    raise SystemExit(main())
