"""generate() of a model that several GPUs share by tensor parallelism, compared with Transformers' own and with one GPU.

    torchrun --nproc-per-node 2 -m benchmarks.ranks --shape 8b --cases 1x512,1x65536,8x32768
    torchrun --nproc-per-node 8 -m benchmarks.ranks --shape 8b --keep --rivals patch,collectives,sdpa
    torchrun --nproc-per-node 8 -m benchmarks.ranks --shape 8b --keep --rivals patch,sequence --cases 1x2097152
    torchrun --nproc-per-node 4 -m benchmarks.ranks --shape 8b --share-of 8 --rivals patch,collectives,sdpa,batch

Rivals on the shared model: patch(), whose sums over ranks are kernels where the GPUs allow it; patch(peer_memory=False);
patch(kv_sharding="sequence"); stock generate() with sdpa, with a compiled static cache, and in continuous batches
(generate_batch, by the timestamps of its tokens). On the whole model, in the first process: patch() and stock generate() on one
GPU, and stock generate() over all GPUs by layers, as device_map="auto" places them. There is one model at a time. A rival that
cannot run is in the row with the reason. --keep adds the rows to those of other numbers of GPUs. --share-of 8 gives each GPU
the heads and columns that it would have if there were eight, to tell the step of a larger machine on a smaller one: only the
sums are over fewer ranks.

Weights are random. The floor is the bytes that one GPU reads in a step, divided by its bandwidth (as in families). Before timing,
the logits of captured steps are compared with those of uncaptured ones, and the tokens of all ranks with each other. Prompts of
more than --fill tokens are not read: the caches of patch() get random K and V instead, and the other rivals are left out.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
import transformers
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from hf_fastattn import hf
from hf_fastattn.explanation import costs

from .families import FAMILIES, bandwidth
from .grid import pairs, row_lengths
from .models import COMMON, SHAPES, dtype_for, step_bytes, with_share
from .ranks_group import Group, end_after, join, leave
from .ranks_rivals import MODELS, MORE, NAMES, NO_TIME, OURS, SHARED, check, fills, measure, why_not
from .results import add_options, check_names, command, conditions, listed, need_gpu
from .runs import free, make_prompt

METHOD = "greedy generate() that continues from a cache, 6th new token to last; replays by events around ten; medians"
CASES = ["1x512", "1x65536", "8x32768"]
PADDED = [1024, 32768]  # lengths of the rows of a padded case


def new_row(case: str, config: hf.PreTrainedConfig, dtype: torch.dtype, group: Group, args: argparse.Namespace) -> dict:
    lengths = row_lengths(case, PADDED)
    row = {"case": case, "ranks": group.size, "lengths": lengths, "bytes_of_a_rank": None, "floor_ms": None}
    try:
        facts = costs.count(hf.model_on_meta(config, dtype), ranks=group.size)
        row["bytes_of_a_rank"] = step_bytes(facts, lengths)
        row["floor_ms"] = 1e3 * row["bytes_of_a_rank"] / bandwidth(group.device)
    except ValueError as error:  # more ranks than KV heads
        group.say(f"{case} has no floor: {error}")
    return row | ({"filled": True} if fills(lengths, args) else {}) | {"check": {}, "rivals": {}, "not_run": {}}


def run_rival(name: str, row: dict, model: hf.PreTrainedModel, group: Group, args: argparse.Namespace) -> dict:
    """Check and time one rival of a row."""
    prompt = make_prompt(row["lengths"], model.config.get_text_config(decoder=True).vocab_size, model.device)
    if name in OURS and (prompt.ids.numel() <= args.check_tokens or fills(row["lengths"], args)):
        row["check"][name] = check(name, model, prompt, args, group)
        group.say(f"{row['case']} {name}: check {row['check'][name]}")
    return measure(name, model, prompt, args, group)


def wait() -> None:
    """What a process does whose rival runs in the first one: it waits for its result."""


def run_rivals(names: list[str], rows: list[dict], create: Callable | None, group: Group, args: argparse.Namespace) -> None:
    """All cases of rivals of one model. create: makes the model; None in a process that only waits."""
    wanted = []
    for name in names:
        for row in rows:
            if reason := why_not(name, row["lengths"], args):
                row["not_run"][name] = reason
                group.say(f"{row['case']} {name}: {reason}")
            else:
                wanted.append((row, name))
    wanted.sort(key=lambda pair: rows.index(pair[0]))
    model, reason, made = None, None, False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for row, name in wanted:
        end_after(args.limit)
        began = time.perf_counter()
        if not group.has(args.reserve + MORE.get(name, 0.0)):
            note(name, row, NO_TIME, group)
            continue
        if not made:
            made = True
            model, reason = group.attempt(create or wait)
            free(device)
            group.say(f"the model took {time.perf_counter() - began:.0f} s")
        if reason is not None:
            note(name, row, reason, group)
            continue
        began = time.perf_counter()
        report, failed = group.attempt(wait if model is None else partial(run_rival, name, row, model, group, args))
        free(device)
        if failed is not None:
            note(name, row, failed, group)
            continue
        row["rivals"][name] = report
        group.save(row)
        if group.first:
            kept = {key: report.get(key) for key in ("ms", "replay_ms", "launches", "first_token_ms", "reasons")}
            found = row["check"].get(name, {}).get("passed")
            group.say(f"{row['case']} {name}: {kept}, check {found}, {time.perf_counter() - began:.0f} s")


def note(name: str, row: dict, reason: str, group: Group) -> None:
    row["not_run"][name] = reason
    group.say(f"{row['case']} {name}: {reason}")
    group.save(row)


def read(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser.add_argument("--shape", choices=[*(SHAPES | FAMILIES)], default="8b", help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="number of layers, instead of that of the shape")
    parser.add_argument("--share-of", type=int, help="each GPU has its share of a model on this number of GPUs")
    parser.add_argument("--cases", type=listed, default=CASES, help=f"ROWSxTOKENS; default {','.join(CASES)}")
    parser.add_argument("--rivals", type=listed, help=f"of {', '.join(NAMES)}; default all")
    parser.add_argument("--tokens", type=int, default=48, help="default: %(default)s")
    parser.add_argument("--stock-tokens", type=int, default=14, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--check-tokens", type=int, default=4096, help="longest prompt that is checked (default: %(default)s)")
    parser.add_argument("--fill", type=int, default=200_000, help="longest prompt that is read (default: %(default)s)")
    parser.add_argument("--reserve", type=float, default=10, help="seconds that a rival may need (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=240, help="seconds after which a rival is stuck (default: %(default)s)")
    parser.add_argument("--name", help="of the JSON; default ranks_SHAPE, with --share-of N ranks_SHAPE_ofN")
    parser.add_argument("--keep", action="store_true", help="keep the rows of other runs in the JSON")
    add_options(parser, seconds=560)
    args = parser.parse_args(argv)
    known = [name for name in NAMES if name in SHARED or not args.share_of]  # a share is no model for one GPU
    args.rivals = args.rivals or known
    check_names(parser, args.rivals, known, "rivals")
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        parser.error("start it with several processes: torchrun --nproc-per-node 2 -m benchmarks.ranks")
    if args.share_of and args.share_of < int(os.environ["WORLD_SIZE"]):
        parser.error("--share-of is at least the number of processes.")
    need_gpu(parser, args, [args.shape], pairs(args.cases, PADDED))
    args.name = args.name or f"ranks_{args.shape}{f'_of{args.share_of}' if args.share_of else ''}"
    return args


def shared_random_model(model_type: str, dtype: torch.dtype, ranks: int | None, **config) -> hf.PreTrainedModel:
    """A causal language model with random weights, of which each of so many ranks creates its share (tensor parallelism).

    ranks: None for one process, with the layers on all GPUs as accelerate places them (`device_map="auto"`).
    """
    how = {"device_map": "auto"} if ranks is None else {"distributed_config": DistributedConfig(tp_size=ranks)}
    made = hf.make_config(model_type, **config)
    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(made)]
    return cls.from_pretrained(None, config=made, state_dict={}, dtype=dtype, **how).eval()


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.ranks") -> int:
    """Measure the cases, in each process of torchrun. The first one writes the JSON."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    args = read(parser, argv)
    warnings.simplefilter("ignore")  # why steps run uncaptured is in the row
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    device = join(args.device)
    group, dtype, (model_type, config) = Group(device), dtype_for(device), (SHAPES | FAMILIES)[args.shape]
    config = {"max_position_embeddings": 4096, **COMMON, **config}
    config |= {} if args.layers is None else {"num_hidden_layers": args.layers}
    if args.share_of:
        config = with_share(config, ranks=group.size, of=args.share_of)
    longest = max(max(row_lengths(case, PADDED)) for case in args.cases)
    config["max_position_embeddings"] = max(config["max_position_embeddings"], longest + 128)
    made = hf.make_config(model_type, **config)
    head = {"conditions": conditions(device, METHOD), "shape": args.shape, "layers": made.num_hidden_layers}
    head |= {"dtype": str(dtype).removeprefix("torch."), "unit": "ms a token", "tb_per_s": bandwidth(device) / 1e12}
    head |= {"share_of": args.share_of} if args.share_of else {}
    group.begin(parser, args, args.name, command(prog, argv), head, lambda row: False)
    rows = [new_row(case, made, dtype, group, args) for case in args.cases]
    creators = {
        "shared": lambda: shared_random_model(model_type, dtype, group.size, **config),
        "one": lambda: hf.random_model(model_type, dtype, device, **config),
        "device_map": lambda: shared_random_model(model_type, dtype, None, **config),
    }
    for kind, names in MODELS:
        create = creators[kind] if kind == "shared" or group.first else None
        run_rivals([name for name in args.rivals if name in names], rows, create, group, args)
        free(device)
    for row in rows:
        group.save(row)
    leave(args.limit)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
