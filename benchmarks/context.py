"""Ring, zigzag and Striped attention with a causal mask: a text that is shared out over ranks attends to itself.

    python -m benchmarks.context --ranks 8              one GPU computes the turns of every rank, one after the other
    torchrun --nproc-per-node 2 -m benchmarks.context   every GPU is a rank; --keep keeps the rows of other numbers of GPUs

In each turn all ranks wait for the slowest. On one GPU "critical_us" is therefore the sum over the turns of the slowest rank's
time, without communication, and "balance" the mean time of the ranks divided by it. Over several GPUs "us" is the time of a call
on the slowest rank, with communication, "compute_us" that of a call in which nothing is sent, and "send_us" that of the sending
alone. "hidden" is the share of the sending that does not prolong a call.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from statistics import mean, median
from unittest import mock

import torch
import torch.distributed as dist

from hf_fastattn.context_parallel import ORDERS, pieces, positions, ring, ring_attention
from hf_fastattn.context_parallel.ring import PREFILL, add, attend
from hf_fastattn.kernels.spec import Spec

from .ranks_group import Group, join, leave
from .results import Results, add_options, command, conditions, find_device, need_gpu
from .timing import elapsed_us

METHOD = "CUDA events around one call, median of 3 after a first call"
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SPEC = Spec(causal=False)
LIMIT = 60  # seconds in which the process group is destroyed
CHECKED = 4096  # tokens of the text on which results are checked


def draw(tokens: int, device: torch.device) -> list[torch.Tensor]:
    """q, k and v of a text."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [torch.randn(1, heads, tokens, HEAD_DIM, device=device, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def check(order: str, ranks: int, device: torch.device) -> None:
    """Compare the merged pieces of every rank with torch's attention. Raises AssertionError if they differ."""
    q, k, v = draw(CHECKED if device.type == "cuda" else 64, device)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    tokens = q.shape[2] // ranks
    at = [positions(order, rank, ranks, tokens).to(device) for rank in range(ranks)]
    for rank in range(ranks):
        out = torch.zeros(1, HEADS, tokens, HEAD_DIM, device=device)
        lse = torch.full(out.shape[:3], float("-inf"), device=device)
        for owner in range(ranks):
            for piece in pieces(order, rank, owner, ranks, tokens):
                add(out, lse, piece, attend(PREFILL, q[:, :, at[rank]], k[:, :, at[owner]], v[:, :, at[owner]], SPEC, piece))
        torch.testing.assert_close(out, want[:, :, at[rank]].float(), rtol=0, atol=0.02)


def check_call(order: str, device: torch.device) -> None:
    """Compare the result of this rank with torch's attention. Raises AssertionError if they differ."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    q, k, v = draw(CHECKED if device.type == "cuda" else 64, device)
    at = positions(order, rank, ranks, q.shape[2] // ranks).to(device)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[:, :, at]
    torch.testing.assert_close(ring_attention(q[:, :, at], k[:, :, at], v[:, :, at], order=order), want, rtol=0, atol=0.02)


def time_of(run: Callable[[], object], device: torch.device) -> float:
    """Microseconds of run()."""
    run()
    return median(elapsed_us(run, device) for _ in range(3))


def turn_of(order: str, rank: int, turn: int, text: Sequence[torch.Tensor], ranks: int) -> Callable[[], object]:
    """One turn of a rank. text: q, k and v of its tokens; those of other ranks would take as long."""
    found = pieces(order, rank, (rank - turn) % ranks, ranks, text[0].shape[2])
    return lambda: [attend(PREFILL, *text, SPEC, piece) for piece in found]


def on_one_device(order: str, ranks: int, total: int, device: torch.device) -> dict:
    """The times of the turns of every rank."""
    text = draw(total // ranks, device)
    times = [[time_of(turn_of(order, rank, turn, text, ranks), device) for turn in range(ranks)] for rank in range(ranks)]
    critical = sum(max(turns) for turns in zip(*times, strict=True))
    return {"critical_us": critical, "rank_us": [sum(turns) for turns in times], "balance": mean(map(sum, times)) / critical}


def on_several(order: str, total: int, group: Group) -> dict:
    """The time of a call."""
    q, k, v = draw(total // group.size, group.device)
    held = torch.cat([k.reshape(-1), v.reshape(-1)])
    call = ring._Call(None, dist.get_rank(), group.size, k.shape, v.shape, order, True, None, SPEC, PREFILL, ring.BACKWARD)

    def send() -> None:
        for _ in range(group.size - 1):
            ring._wait(call.pass_on(held)[1])

    def slowest(run: Callable[[], object]) -> float:
        def together() -> None:
            dist.barrier()
            run()

        return max(group.gather(time_of(together, group.device)))

    us, sent = slowest(lambda: ring_attention(q, k, v, order=order)), slowest(send)
    with mock.patch.object(ring._Call, "pass_on", lambda self, held: (held, [])):
        computed = slowest(lambda: ring_attention(q, k, v, order=order))
    return {"us": us, "compute_us": computed, "send_us": sent, "hidden": min(1, max(0, (computed + sent - us) / sent))}


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.context") -> int:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, default=8, help="number of ranks whose turns one GPU computes (default: %(default)s)"
    )
    parser.add_argument("--tokens", default="65536", help="lengths of the text (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the rows of other lengths and numbers of ranks in the JSON")
    add_options(parser, 120)
    args = parser.parse_args(argv)
    need_gpu(parser, args, sizes={f"a text of {n} tokens": int(n) ** 2 for n in args.tokens.split(",")})
    group = Group(join(args.device)) if "WORLD_SIZE" in os.environ else None
    device, ranks = (group.device, group.size) if group else (find_device(args.device), args.ranks)
    head = {"conditions": conditions(device, METHOD), "shape": f"{HEADS}/{KV_HEADS} heads of {HEAD_DIM}, causal"}
    name = "context_ranks.json" if group else "context.json"
    results = Results(args.out / name, args.seconds, command(prog, argv), device if device.type == "cuda" else None, **head)
    if args.keep:
        results.take_over(parser)
    if group:
        group.results = results
    for total in map(int, args.tokens.split(",")):
        for order in ORDERS:
            if not (group.has(10) if group else results.left() >= 10):
                results.say(f"no time for {order} at {total}")
                continue
            check_call(order, device) if group else check(order, ranks, device)
            found = on_several(order, total, group) if group else on_one_device(order, ranks, total, device)
            row = {"order": order, "ranks": ranks, "tokens": total}
            others = [old for old in results.data["rows"] if {name: old[name] for name in row} != row]
            results.data["rows"] = [*others, {**row, "run": results.run, **found}]
            if group is None or group.first:
                results.save()
                results.say(f"{order}, {total} tokens, {ranks} ranks: {found}")
    if group:
        leave(LIMIT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
