"""A decode call over K and V that GPUs share out by sequence: Tree, which passes results, and Ring, which passes K and V.

    torchrun --nproc-per-node 2 -m benchmarks.tree     every GPU is a rank; --keep keeps the rows of other numbers of GPUs

All ranks have the query, and afterwards the result. Tree is what a step with kv_sharding="sequence" does: `lean` over the rank's
share, then one launch that sends out and lse to the other ranks and merges theirs. Ring passes the shares on from rank to rank
while the present one is read by `lean`, and merges. Both are compared with sdpa over all K and V. Times are of the slowest rank.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch
import torch.distributed as dist

from hf_fastattn.context_parallel import ring
from hf_fastattn.context_parallel.shares import Shares
from hf_fastattn.kernels import TritonKernel
from hf_fastattn.kernels.decode.all_reduce import block_bytes
from hf_fastattn.kernels.merge import merge
from hf_fastattn.kernels.spec import KV, Spec

from .context import HEAD_DIM, HEADS, KV_HEADS, draw
from .ranks_group import Group, end_after, join, leave
from .results import add_options, command, conditions, listed, need_gpu
from .timing import elapsed_us

METHOD = "CUDA events around ten calls, launched one by one; median of 5 after a first one; the slowest rank"
LEAN, SPEC = TritonKernel("lean"), Spec(causal=False)
CALLS, LIMIT = 10, 60  # seconds after which a row is stuck


class Subject:
    """K and V of one row, the share of this rank, and the two ways to attend to all of it."""

    def __init__(self, tokens: int, group: Group):
        self.ranks, self.rank = group.size, dist.get_rank()
        _, self.k, self.v = draw(tokens, group.device)
        self.q = draw(1, group.device)[0]
        self.each = tokens // self.ranks
        mine = slice(self.rank * self.each, (self.rank + 1) * self.each)
        shapes = [torch.Size((1, KV_HEADS, self.each, HEAD_DIM))] * 2
        self.held = torch.cat([self.k[:, :, mine].reshape(-1), self.v[:, :, mine].reshape(-1)])
        self.share = ring._parts_of(self.held, *shapes)
        self.call = ring._Call(None, self.rank, self.ranks, *shapes, "ring", False, None, SPEC, LEAN, ring.BACKWARD)
        self.shares = Shares(dist.group.WORLD, [(HEADS, KV_HEADS)], whole=True)
        if group.device.type == "cuda" and self.ranks > 1:
            from hf_fastattn.kernels.host import symmetric

            block = block_bytes(HEADS * HEAD_DIM, self.q.dtype)
            peers = symmetric.connect(dist.group.WORLD, block, symmetric.allocate(self.ranks, block, group.device))
            self.shares.peers = lambda x: peers

    def tree(self) -> torch.Tensor:
        out, lse = LEAN(self.q, self.share, SPEC, None, return_lse=True)
        return out if self.ranks == 1 else self.shares.merge(out, lse, HEADS, None)

    def ring(self) -> torch.Tensor:
        found = None
        for kv, _ in self.call.turns(self.held, 1):
            out, lse = LEAN(self.q, KV(*kv[:2]), SPEC, None, return_lse=True)
            found = (out.float(), lse) if found is None else merge((found[0], out.float()), (found[1], lse))
        return found[0].to(self.q.dtype)

    def check(self) -> None:
        """Raises AssertionError if a result is wrong."""
        want = torch.nn.functional.scaled_dot_product_attention(self.q, self.k, self.v, enable_gqa=True)
        for run in (self.tree, self.ring):
            torch.testing.assert_close(run(), want, rtol=0, atol=0.02 * want.abs().max().item())  # of a mean of many values


def row_of(tokens: int, group: Group) -> dict:
    """Microseconds of a call on the slowest rank."""
    subject = Subject(tokens, group)
    subject.check()
    us = {}
    for name in ("tree", "ring"):
        run = getattr(subject, name)

        def several(run=run) -> None:
            for _ in range(CALLS):
                run()

        times = []
        for _ in range(6):
            dist.barrier()
            times.append(elapsed_us(several, group.device) / CALLS)
        us[name] = max(group.gather(median(times[1:])))
    return {"tokens": tokens, "ranks": group.size, "us": us, "ring_over_tree": us["ring"] / us["tree"]}


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.tree") -> int:
    """Measure the lengths, in each process of torchrun. The first one writes the JSON."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = "16384,65536,262144,1048576"
    parser.add_argument("--tokens", type=listed, default=listed(lengths), help=f"lengths of the text (default: {lengths})")
    parser.add_argument("--keep", action="store_true", help="keep the rows of other numbers of GPUs in the JSON")
    add_options(parser, 60)
    args = parser.parse_args(argv)
    need_gpu(parser, args, sizes={f"a text of {n} tokens": int(n) * 2**14 for n in args.tokens})
    device = join(args.device)
    group = Group(device)
    head = {"conditions": conditions(device, METHOD), "shape": f"{HEADS}/{KV_HEADS} heads of {HEAD_DIM}", "unit": "us a call"}
    group.begin(parser, args, "tree_ranks", command(prog, argv), head, lambda row: row["ranks"] == group.size)
    for tokens in map(int, args.tokens):
        end_after(LIMIT)
        if not group.has(8):
            group.say(f"no time for {tokens} tokens")
            continue
        with torch.inference_mode():
            row = row_of(tokens, group)
        if group.results is not None:
            group.results.add(row, str(tokens), f"{tokens} tokens, {group.size} ranks: {row['us']}")
    leave(LIMIT)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
