"""generate() of a model that several GPUs share by tensor parallelism, compared with Transformers' own and with one GPU.

    torchrun --nproc-per-node 2 -m benchmarks.ranks --shape 8b --cases 1x512,1x65536,8x32768
    torchrun --nproc-per-node 8 -m benchmarks.ranks --shape 8b --keep --rivals patch,peer_memory,sdpa

All rivals of a case run in one process group, one after another: patch(); patch(peer_memory=True); stock generate() with sdpa;
patch() and stock generate() on the first GPU alone, with a model of its own. --keep adds the rows to those of other numbers of
GPUs. Weights are random. The floor is the bytes that one GPU reads in a step, divided by 4.5 TB/s. Before timing, the logits of
captured steps are compared with those of uncaptured ones, and the tokens of all ranks with each other.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from hf_fastattn import hf
from hf_fastattn.explain import costs
from hf_fastattn.patches import Patch, patch

from .families import READ
from .grid import row_lengths
from .models import SHAPES, step_bytes
from .results import Results, add_options, command, conditions, listed
from .runs import Prompt, free, make_prompt, resumed, run, step_times, verdict

METHOD = "greedy generate() that continues from a cache, 6th new token to last; replays by events around ten; medians"
CASES = ["1x512", "1x65536", "8x32768"]
NAMES = {  # of the rivals, in words
    "patch": "`patch()`",
    "peer_memory": "`patch(peer_memory=True)`",
    "sdpa": "stock `generate()`",
    "one_patch": "one GPU, `patch()`",
    "one_sdpa": "one GPU, stock `generate()`",
}


@contextmanager
def set_up(name: str, model: hf.PreTrainedModel) -> Iterator[Patch | None]:
    """The model as a rival needs it."""
    if name.endswith("sdpa"):
        before = model.config._attn_implementation
        model.set_attn_implementation("sdpa")
        yield None
        model.set_attn_implementation(before)
        return
    with patch(model, "lean", peer_memory=name == "peer_memory") as patched:
        yield patched


def measure(name: str, model: hf.PreTrainedModel, prompt: Prompt, args: argparse.Namespace) -> dict:
    """The times of one rival."""
    with set_up(name, model) as patched:
        first, again = resumed(model, prompt, args.stock_tokens if patched is None else args.tokens)
        row = {"first_token_ms": 1e3 * first.first_token_s}
        if patched is None:
            ms = again().ms
            return row | {"ms": ms, "all_ms": [ms]}
        return row | step_times(patched, again, args.repeats) | {"captures": patched.captures}


def check(name: str, model: hf.PreTrainedModel, prompt: Prompt, ranks: int) -> dict:
    """Captured steps of a rival compared with uncaptured ones and with sdpa, and the tokens of all ranks with each other."""
    with set_up(name, model) as patched:
        ours = run(model, prompt, 12, logits=True)
        again = run(model, prompt, 12, logits=True)
    with patch(model, "lean", graph=False, fuse=False):
        uncaptured = run(model, prompt, 12, logits=True)
    with set_up("sdpa", model):
        sdpa = run(model, prompt, 6, logits=True)
    tokens: list = [None] * ranks
    dist.all_gather_object(tokens, ours.tokens.tolist())
    found = verdict(ours, uncaptured, sdpa, model.dtype)
    same = all(each == tokens[0] for each in tokens) and torch.equal(ours.tokens, again.tokens)
    return found | {"passed": found["passed"] and same, "steps_replayed": patched.replays}


def drop_impossible(args: argparse.Namespace, shared: hf.PreTrainedModel, group: Group) -> None:
    """Leave out the rival that needs memory which the GPUs share, if they have none. All ranks decide alike."""
    if "peer_memory" in args.rivals:
        try:
            patch(shared, "lean", peer_memory=True).undo()
        except ValueError as error:
            group.say(f"peer_memory is left out: {error}")
            args.rivals.remove("peer_memory")


class Group:
    """The processes of torchrun. results: of the first one, None in the others."""

    def __init__(self, results: Results | None):
        self.results, self.size = results, dist.get_world_size()

    def has(self, seconds: float) -> bool:
        """Whether the first process has so much time left."""
        decision = [self.results is not None and self.results.left() > seconds]
        dist.broadcast_object_list(decision)
        return bool(decision[0])

    def say(self, text: str) -> None:
        if self.results is not None:
            self.results.say(text)


def measure_case(
    case: str, shared: hf.PreTrainedModel, one: hf.PreTrainedModel | None, group: Group, args: argparse.Namespace
) -> dict:
    """One row, with all rivals for which there is time. one: the model on one GPU, in the first process."""
    lengths = row_lengths(case, [1024, 32768])
    facts = costs.count(hf.model_on_meta(shared.config, shared.dtype), ranks=group.size)
    bytes_read = step_bytes(facts, lengths)
    row = {"case": case, "ranks": group.size, "lengths": lengths, "bytes_of_a_rank": bytes_read}
    row["floor_ms"] = 1e3 * bytes_read / READ
    row |= {"rivals": {}, "not_run": []}
    prompt = make_prompt(lengths, shared.config.get_text_config(decoder=True).vocab_size, shared.device)
    if prompt.ids.numel() <= args.check_tokens:
        ours = [name for name in args.rivals if name in ("patch", "peer_memory")]
        row["check"] = {name: check(name, shared, prompt, group.size) for name in ours}
        group.say(f"{case}: check {row['check']}")
    for name in args.rivals:
        model = one if name.startswith("one") else shared
        if not group.has(args.reserve):
            row["not_run"].append(name)
        elif model is not None:
            report = row["rivals"][name] = measure(name, model, prompt, args)
            free(shared.device)
            kept = {key: report.get(key) for key in ("ms", "replay_ms", "launches", "first_token_ms", "reasons")}
            group.say(f"{case} {name}: {kept}")
        dist.barrier()
    return row


def read(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="number of layers, instead of that of the shape")
    parser.add_argument("--cases", type=listed, default=CASES, help=f"ROWSxTOKENS; default {','.join(CASES)}")
    parser.add_argument("--rivals", type=listed, default=list(NAMES), help=f"of {', '.join(NAMES)}; default all")
    parser.add_argument("--tokens", type=int, default=48, help="default: %(default)s")
    parser.add_argument("--stock-tokens", type=int, default=14, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--check-tokens", type=int, default=4096, help="longest prompt that is checked (default: %(default)s)")
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
    dtype, (model_type, config) = torch.bfloat16 if cuda else torch.float32, SHAPES[args.shape]
    config = config | ({} if args.layers is None else {"num_hidden_layers": args.layers})
    torch.manual_seed(0)
    shared = hf.shared_random_model(model_type, dtype, int(os.environ["WORLD_SIZE"]), **config)
    one, results = None, None
    if dist.get_rank() == 0:
        head = {"conditions": conditions(shared.device, METHOD), "shape": args.shape, "layers": config["num_hidden_layers"]}
        head |= {"dtype": str(dtype).removeprefix("torch."), "unit": "ms a token"}
        path = args.out / f"{args.name or f'ranks_{args.shape}'}.json"
        results = Results(path, args.seconds, command(prog, argv), shared.device, **head)
        if args.keep:
            results.take_over(parser)
        if any(name.startswith("one") for name in args.rivals):
            one = hf.random_model(model_type, dtype, shared.device, **config)
    group = Group(results)
    drop_impossible(args, shared, group)
    for case in args.cases:
        if not group.has(args.reserve):
            group.say(f"{case}: no time left")
            continue
        row = measure_case(case, shared, one, group, args)
        if results is not None:
            others = [old for old in results.data["rows"] if (old["case"], old["ranks"]) != (case, group.size)]
            results.data["rows"] = [*others, row | {"run": results.run}]
            results.save()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
