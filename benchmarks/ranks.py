"""generate() of a model that several GPUs share by tensor parallelism, compared with Transformers' own and with one GPU.

    torchrun --nproc-per-node 2 -m benchmarks.ranks --shape 8b --cases 1x512,1x65536,8x32768
    torchrun --nproc-per-node 8 -m benchmarks.ranks --shape 8b --keep --rivals patch,collectives,sdpa

All rivals of a case run in one process group, one after another: patch(), whose sums over ranks are kernels where the GPUs allow
it; patch(peer_memory=False); patch(kv="sequence"); stock generate() with sdpa, with a compiled static cache, and in continuous
batching (generate_batch). Then the ranks leave their shares, and the first process has the whole model: patch() and stock
generate() on one GPU, and stock generate() over all GPUs by layers, as device_map="auto" places them. --keep adds the rows to
those of other numbers of GPUs.

Weights are random. The floor is the bytes that one GPU reads in a step, divided by 4.5 TB/s. Before timing, the logits of
captured steps are compared with those of uncaptured ones, and the tokens of all ranks with each other. Prompts of more than
--fill tokens are not read: the caches of patch() get random K and V instead, and rivals without them are left out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hf_fastattn import hf
from hf_fastattn.explain import costs
from hf_fastattn.patches import Patch, patch

from .families import FAMILIES, READ
from .grid import row_lengths
from .models import COMMON, SHAPES, step_bytes
from .results import Results, add_options, command, conditions, listed
from .runs import Prompt, Run, free, make_prompt, resumed, rewind, run, step_times, verdict

METHOD = "greedy generate() that continues from a cache, 6th new token to last; replays by events around ten; medians"
CASES = ["1x512", "1x65536", "8x32768"]
OURS = {  # rivals that patch the shared model: arguments of patch()
    "patch": {},
    "collectives": {"peer_memory": False},
    "sequence": {"kv": "sequence"},
}
NAMES = {  # of the rivals, in words
    "patch": "`patch()`",
    "collectives": "`patch(peer_memory=False)`",
    "sequence": '`patch(kv="sequence")`',
    "sdpa": "stock `generate()`",
    "static": "stock, static cache, compiled",
    "batch": "stock `generate_batch()`",
    "one_patch": "one GPU, `patch()`",
    "one_sdpa": "one GPU, stock `generate()`",
    "device_map": "`device_map`, stock `generate()`",
}
ALONE = ("one_patch", "one_sdpa", "device_map")  # in the first process, while the others wait


@contextmanager
def set_up(name: str, model: hf.PreTrainedModel, **options) -> Iterator[Patch | None]:
    """The model as a rival needs it. options: further arguments of patch()."""
    if name not in OURS and name != "one_patch":
        before = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        yield None
        model.set_attn_implementation(before)
        return
    with patch(model, **{"backend": "lean", **OURS.get(name, {}), **options}) as patched:
        yield patched


def filled(model: hf.PreTrainedModel, prompt: Prompt) -> object:
    """A cache of the patched model with random K and V for all tokens of the prompt, the same in each call."""
    first = run(model, Prompt(prompt.ids[:, :64], prompt.mask[:, :64], [64] * len(prompt.ids)), 2, keep=True)
    cache = first.cache
    cache.reset()
    cache.reserve(prompt.ids.shape[1] + 128)
    generator = torch.Generator(model.device).manual_seed(7)
    shapes = zip(hf.layer_shapes(model.config), hf.local_kv_heads(model), strict=True)
    for index, (shape, heads) in enumerate(shapes):
        size = (*prompt.ids.shape, heads)
        k, v = (
            torch.randn(size[0], heads, size[1], width, dtype=model.dtype, device=model.device, generator=generator)
            for width in (shape.head_dim, shape.value_dim)
        )
        cache.update(k, v, index)
    return cache


def start(model: hf.PreTrainedModel, prompt: Prompt, args: argparse.Namespace, tokens: int):
    """As `resumed`, with a filled cache for a long prompt: (the first call, None if the prompt was not read; a function)."""
    if max(prompt.lengths) <= args.fill:
        return resumed(model, prompt, tokens)
    cache = filled(model, prompt)

    def again() -> Run:
        return run(model, prompt, tokens, rewind(cache, prompt))

    again()
    return None, again


def measure(name: str, model: hf.PreTrainedModel, prompt: Prompt, args: argparse.Namespace) -> dict:
    """The times of one rival."""
    if name == "batch":
        return measure_batch(model, prompt, args)
    with set_up(name, model) as patched:
        if name == "static":
            return measure_static(model, prompt, args)
        first, again = start(model, prompt, args, args.stock_tokens if patched is None else args.tokens)
        row = {"first_token_ms": None if first is None else 1e3 * first.first_token_s}
        if patched is None:
            ms = again().ms
            return row | {"ms": ms, "all_ms": [ms]}
        row |= step_times(patched, again, args.repeats) | {"captures": patched.captures}
        return row | {"changes": [str(change) for change in patched.changes if "all ranks" in str(change)]}


def measure_static(model: hf.PreTrainedModel, prompt: Prompt, args: argparse.Namespace) -> dict:
    """Transformers' static cache with its compiled decode step: calls until none of their steps compiles."""
    cache, calls = None, []
    options = {"cache_implementation": "static"}
    while len(calls) < 4 and (len(calls) < 2 or calls[-1].slowest_ms > 1000):
        calls.append(run(model, prompt, args.stock_tokens, rewind(cache, prompt), keep=True, **options))
        cache, options = calls[-1].cache, {}
    last = run(model, prompt, args.stock_tokens, rewind(cache, prompt))
    return {"first_token_ms": None, "ms": last.ms, "all_ms": [last.ms], "compiled": hasattr(model, "_compiled_call")}


def measure_batch(model: hf.PreTrainedModel, prompt: Prompt, args: argparse.Namespace) -> dict:
    """Transformers' continuous batching: the median time between two tokens of a row, from its 6th new token on."""
    before = model.config._attn_implementation
    config = hf.GenerationConfig(max_new_tokens=args.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    try:
        found = model.generate_batch(prompt.ids.tolist(), generation_config=config, record_timestamps=True)
    finally:
        model.set_attn_implementation(before)
    times = [each.timestamps for each in found.values()]
    if len(times) < len(prompt.ids) or any(each is None or len(each) < args.tokens for each in times):
        raise RuntimeError("generate_batch() did not return the time of each token.")
    gaps = [1e3 * (b - a) for each in times for a, b in itertools.pairwise(each[5:])]
    return {"first_token_ms": None, "ms": statistics.median(gaps), "all_ms": [statistics.mean(gaps)]}


def check(name: str, model: hf.PreTrainedModel, prompt: Prompt, args: argparse.Namespace) -> dict:
    """Captured steps of a rival compared with uncaptured ones, and the tokens of all ranks with each other.

    The difference that is allowed is that of sdpa from uncaptured steps; of a filled cache, that of one with the ranks' heads.
    """
    long = max(prompt.lengths) > args.fill

    def steps(tokens: int, calls: int = 1, stock: bool = False, **options) -> tuple[list[Run], int]:
        cache = None
        if stock and long:  # over a cache of patch()
            with set_up("patch", model, graph=False, fuse=False):
                cache = filled(model, prompt)
        with set_up("sdpa" if stock else name, model, **options) as patched:
            if long and not stock:
                cache = filled(model, prompt)
            found = [run(model, prompt, tokens, rewind(cache, prompt), logits=True) for _ in range(calls)]
            replays = 0 if patched is None else patched.replays
        free(model.device)
        return found, replays

    (ours, again), replays = steps(12, 2)
    (uncaptured,), _ = steps(12, graph=False, fuse=False)
    (stock,), _ = steps(6, stock=True)
    beside = uncaptured if not long else steps(6, graph=False, fuse=False, kv="heads")[0][0]
    tokens: list = [None] * dist.get_world_size()
    dist.all_gather_object(tokens, ours.tokens.tolist())
    found = verdict(ours, uncaptured, stock, model.dtype, beside)
    same = all(each == tokens[0] for each in tokens) and torch.equal(ours.tokens, again.tokens)
    return found | {"passed": found["passed"] and same, "steps_replayed": replays}


class Group:
    """The processes of torchrun. results: of the first one, None in the others. They meet over gloo: a collective of NCCL would
    keep the GPU of a waiting rank busy."""

    def __init__(self):
        self.results: Results | None = None
        self.size, self.first = dist.get_world_size(), dist.get_rank() == 0
        self.hosts = dist.new_group(backend="gloo")

    def meet(self) -> None:
        dist.barrier(group=self.hosts)

    def has(self, seconds: float) -> bool:
        """Whether the first process has so much time left."""
        decision = [self.results is not None and self.results.left() > seconds]
        dist.broadcast_object_list(decision, group=self.hosts)
        return bool(decision[0])

    def say(self, text: str) -> None:
        if self.results is not None:
            self.results.say(text)

    def save(self, row: dict) -> None:
        """Write a row, in the place of an earlier one of the same case and number of GPUs."""
        if self.results is not None:
            rows = self.results.data["rows"]
            others = [old for old in rows if (old["case"], old["ranks"]) != (row["case"], row["ranks"])]
            self.results.data["rows"] = [*others, row | {"run": self.results.run}]
            self.results.save()


def new_row(case: str, config: hf.PreTrainedConfig, dtype: torch.dtype, group: Group) -> dict:
    lengths = row_lengths(case, [1024, 32768])
    bytes_read = step_bytes(costs.count(hf.model_on_meta(config, dtype), ranks=group.size), lengths)
    row = {"case": case, "ranks": group.size, "lengths": lengths, "bytes_of_a_rank": bytes_read}
    return row | {"floor_ms": 1e3 * bytes_read / READ, "check": {}, "rivals": {}, "not_run": {}}


def run_rival(name: str, row: dict, model: hf.PreTrainedModel, group: Group, args: argparse.Namespace) -> None:
    """Check and time one rival of a row, or note why not."""
    prompt = make_prompt(row["lengths"], model.config.get_text_config(decoder=True).vocab_size, model.device)
    began, reason = time.perf_counter(), None
    if max(row["lengths"]) > args.fill and name not in (*OURS, "one_patch"):
        reason = "it would read the prompt"
    elif name == "batch" and prompt.mask.min() == 0:
        reason = "it takes no padding"
    try:
        if reason is None and name in OURS and (prompt.ids.numel() <= args.check_tokens or max(row["lengths"]) > args.fill):
            row["check"][name] = check(name, model, prompt, args)
            free(model.device)
        if reason is None:
            row["rivals"][name] = measure(name, model, prompt, args)
    except (ValueError, RuntimeError, NotImplementedError, AttributeError, TypeError, MemoryError) as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    if reason is not None:
        row["not_run"][name] = reason
    free(model.device)
    kept = {key: row["rivals"].get(name, {}).get(key) for key in ("ms", "replay_ms", "launches", "first_token_ms", "reasons")}
    found = row["check"].get(name, {}).get("passed")
    seconds = time.perf_counter() - began
    group.say(f"{row['case']} {name}: {reason or kept}, check {found}, {seconds:.0f} s")


def run_rivals(names: list[str], rows: list[dict], model: hf.PreTrainedModel | None, group: Group, args) -> None:
    """All cases of these rivals. model: None in a process that only waits."""
    for row in rows:
        for name in names:
            if not group.has(args.reserve):
                row["not_run"][name] = "no time left"
                group.say(f"{row['case']} {name}: no time left")
            elif model is not None:
                run_rival(name, row, model, group, args)
                group.save(row)
            group.meet()


def over_all_gpus(model: hf.PreTrainedModel, count: int) -> hf.PreTrainedModel:
    """The model with consecutive layers on each of so many GPUs, as device_map="auto" places them."""
    from accelerate import dispatch_model

    layers = len(model.model.layers)
    where: dict = {f"model.layers.{index}": index * count // layers for index in range(layers)}
    where |= {name: 0 for name in ("model.embed_tokens", "model.rotary_emb")} | {"model.norm": count - 1, "lm_head": count - 1}
    return dispatch_model(model, where)


def read(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser.add_argument("--shape", choices=[*SHAPES, *(FAMILIES.keys() - SHAPES)], default="8b", help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="number of layers, instead of that of the shape")
    parser.add_argument("--cases", type=listed, default=CASES, help=f"ROWSxTOKENS; default {','.join(CASES)}")
    parser.add_argument("--rivals", type=listed, default=list(NAMES), help=f"of {', '.join(NAMES)}; default all")
    parser.add_argument("--tokens", type=int, default=48, help="default: %(default)s")
    parser.add_argument("--stock-tokens", type=int, default=14, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--check-tokens", type=int, default=4096, help="longest prompt that is checked (default: %(default)s)")
    parser.add_argument("--fill", type=int, default=200_000, help="longest prompt that is read (default: %(default)s)")
    parser.add_argument("--reserve", type=float, default=10, help="seconds that a rival may need (default: %(default)s)")
    parser.add_argument("--name", help="of the JSON; default ranks_SHAPE")
    parser.add_argument("--keep", action="store_true", help="keep the rows of other cases and numbers of GPUs in the JSON")
    add_options(parser, seconds=560)
    args = parser.parse_args(argv)
    if unknown := set(args.rivals) - set(NAMES):
        parser.error(f"unknown rivals {', '.join(sorted(unknown))}; known are {', '.join(NAMES)}.")
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        parser.error("start it with several processes: torchrun --nproc-per-node 2 -m benchmarks.ranks")
    return args


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.ranks") -> int:
    """Measure the cases, in each process of torchrun. The first one writes the JSON."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    args = read(parser, argv)
    warnings.simplefilter("ignore")  # why steps run uncaptured is in the row
    hf.silence()
    cuda = torch.cuda.is_available()
    dtype, (model_type, config) = torch.bfloat16 if cuda else torch.float32, (SHAPES | FAMILIES)[args.shape]
    config = {**COMMON, "max_position_embeddings": 4096, **config}
    config |= {} if args.layers is None else {"num_hidden_layers": args.layers}
    longest = max(max(row_lengths(case, [1024, 32768])) for case in args.cases)
    config["max_position_embeddings"] = max(config["max_position_embeddings"], longest + 128)
    torch.manual_seed(0)
    began = time.perf_counter()
    shared: hf.PreTrainedModel | None = hf.shared_random_model(model_type, dtype, int(os.environ["WORLD_SIZE"]), **config)
    device, made, group = shared.device, shared.config, Group()
    if group.first:
        head = {"conditions": conditions(device, METHOD), "shape": args.shape, "layers": made.num_hidden_layers}
        head |= {"dtype": str(dtype).removeprefix("torch."), "unit": "ms a token"}
        path = args.out / f"{args.name or f'ranks_{args.shape}'}.json"
        group.results = Results(path, args.seconds, command(prog, argv), device, **head)
        if args.keep:
            group.results.take_over(parser)
    group.say(f"the shared model took {time.perf_counter() - began:.0f} s")
    rows = [new_row(case, made, dtype, group) for case in args.cases]
    run_rivals([name for name in args.rivals if name not in ALONE], rows, shared, group, args)
    shared = None
    free(device)
    one = None
    if group.first and any(name in ALONE for name in args.rivals):
        one = hf.random_model(model_type, dtype, device, **config)
    run_rivals([name for name in args.rivals if name in ALONE and name != "device_map"], rows, one, group, args)
    if "device_map" in args.rivals:
        if one is not None and cuda:
            one = over_all_gpus(one, group.size)
            free(device)
        run_rivals(["device_map"], rows, one, group, args)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
