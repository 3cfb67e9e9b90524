"""Figure 8 of the LeanAttention paper on several GPUs: attention in decode, whose heads the GPUs divide.

    torchrun --nproc-per-node 4 -m benchmarks.paper_ranks   every GPU is a rank; --keep keeps the rows of other numbers of GPUs

All ranks compute their heads at the same time. "us" is the time of a call on the slowest rank. No rank needs anything of another,
so with --share-of 8 four GPUs, each with the heads of one of eight, take the time that eight would.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from .paper import FIGURE_8
from .ranks_group import Group, end_after, join, leave
from .results import add_options, command, conditions, need_gpu
from .shapes import DTYPE, LEAN, PORTABLE, READ, SPLIT_KV, Shape, compete, exact, make_inputs
from .timing import METHOD, num_sets

LEAST_SECONDS = 8  # a row does not begin with less left
LIMIT = 60  # seconds after which a row is stuck
KERNELS = {"fa2": PORTABLE, "split_kv": SPLIT_KV, "lean": LEAN}


def row_of(shape: Shape, group: Group, share_of: int) -> dict:
    """Microseconds per call on the slowest rank. A rank with a wrong result raises WrongResult, and torchrun ends the others."""
    torch.manual_seed(dist.get_rank())
    sets = num_sets(shape.kv_bytes)
    inputs = make_inputs(shape, sets, group.device)
    rivals = {name: lambda i, kernel=kernel: kernel(*inputs[i]) for name, kernel in KERNELS.items()}
    expected = exact(*inputs[0])
    us = max(7, shape.kv_bytes / READ)
    times = group.gather(compete({}, rivals, expected, sets=sets, us=us, ready=lambda: group.gather(None))["us"])
    us = {name: max(of_rank[name] for of_rank in times) for name in KERNELS}
    over = {f"lean_over_{name}": us[name] / us["lean"] for name in ("fa2", "split_kv")}
    return shape.row() | {"ranks": group.size, "share_of": share_of, "us": us, "us_of_ranks": times} | over


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.paper_ranks") -> int:
    """Measure the points of the figure, in each process of torchrun. The first one writes the JSON."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, help="longest context of a row, in tokens (default: that of the figure)")
    parser.add_argument("--share-of", type=int, help="GPUs that divide the heads (default: those of the ranks)")
    parser.add_argument("--keep", action="store_true", help="keep the rows of other numbers of GPUs in the JSON")
    add_options(parser, 120)
    args = parser.parse_args(argv)
    need_gpu(parser, args, sizes={str(at): at[0] * at[1] * at[2] for at in FIGURE_8 if at[2] <= (args.longest or at[2])})
    device = join(args.device)
    group = Group(device)
    share_of = args.share_of or group.size
    if share_of < group.size:
        parser.error("--share-of is at least the number of processes.")
    head = {"conditions": conditions(device, METHOD), "dtype": str(DTYPE).removeprefix("torch."), "unit": "us a call"}
    again = lambda row: (row["ranks"], row.get("share_of", row["ranks"])) == (group.size, share_of)  # noqa: E731
    group.begin(parser, args, "paper_ranks", command(prog, argv), head, again)
    for batch, heads, tokens in FIGURE_8:
        shape = Shape(batch, heads // share_of, heads // share_of, 64, tokens)
        if heads % share_of or tokens > (args.longest or tokens):
            continue
        end_after(LIMIT)
        if not group.has(LEAST_SECONDS):
            group.say(f"no time for {shape}")
            continue
        with torch.inference_mode():
            row = row_of(shape, group, share_of)
        if group.results is not None:
            group.results.add(row, str(shape), "  ".join([str(shape), *(f"{name} {x:.1f}" for name, x in row["us"].items())]))
    leave(LIMIT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
