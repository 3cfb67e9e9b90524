"""Rows of the kernel benchmark that time a block of queries over a long context: q_len from one to a thousand.

There is no mask: every query sees all keys. This is the cheapest case for torch's kernels, and their results can be compared. K
and V of a group of rows (heads, head_dim, kv_len, batch) are created once, and the groups are in a fixed random order, so that an
interrupted run is a fair sample.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import replace
from statistics import geometric_mean

import torch
from torch.nn.attention import SDPBackend

from hf_fastattn import registry
from hf_fastattn.kernels import TritonKernel
from hf_fastattn.kernels.spec import KV, Spec
from hf_fastattn.registry import Backend

from . import timing
from .shapes import DTYPE, Shape, best_peer, check, compete, exact, kernel_of_lean, ratios, sdpa

LENGTHS = (1, 2, 4, 8, 9, 16, 17, 24, 33, 64, 65, 100, 128, 200, 256, 300, 512, 1024)
PASTS = tuple(n << 10 for n in (2, 8, 32, 64, 128, 256))
HEADS = ((32, 8), (64, 8), (28, 4), (32, 32), (71, 1), (16, 2))
GROUPS = [(batch, *heads, head_dim, past) for heads in HEADS for head_dim in (64, 128) for past in PASTS for batch in (1, 4)]
random.Random(0).shuffle(GROUPS)
QUERIES = [Shape(*group, q_len, causal=False) for group in GROUPS for q_len in LENGTHS]

SPEC = Spec(causal=False)
PEERS = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
OURS = ("fa2", "lean")
ROUNDS = {"least": 4, "most": 8, "seconds": 0.06}  # few, because there are thousands of rows; in 4 each rival follows each other
REST = 0.5  # seconds before a group, because the clocks remain low for a while after the calls with the most queries
SAMPLE = 8  # queries that are compared with the exact result
FEW, LONG = 128, 8 << 10  # the most queries and the fewest keys for which stream-K is expected to be faster
GOALS = {"few_queries_long_past": 1.5, "the_rest": 1.0}
SLOW = (0.93, 0.85)  # rows below these shares of the better peer's speed are counted, and listed below the larger one
DOUBLING, SLACK_US, SAVING = 2.15, 3.0, 0.05
MESSAGES = [Shape(1, 32, 8, 128, 64 << 10, q_len, causal=False) for q_len in (17, 24)]  # a short message, and an 8B Llama's heads


class _Held:
    """K and V of the last requested group."""

    def __init__(self) -> None:
        self.key: object = None
        self.kv = torch.empty(0)

    def get(self, shape: Shape, device: torch.device) -> torch.Tensor:
        """(sets, 2, batch, num_kv_heads, kv_len, head_dim) of normal noise, created by one kernel."""
        key = (shape.batch, shape.num_kv_heads, shape.kv_len, shape.head_dim, device)
        if key != self.key:
            self.key, self.kv = None, torch.empty(0)  # its memory is needed for the next group
            sets = timing.num_sets(shape.kv_bytes)
            self.kv = torch.empty(sets, 2, *key[:-1], device=device, dtype=DTYPE).normal_()
            self.key = key
            if device.type == "cuda":
                time.sleep(REST)
        return self.kv


_held = _Held()


def _sample(out: torch.Tensor, shape: Shape) -> torch.Tensor:
    """A few queries of the query heads of the last KV head in the last batch row."""
    picked = torch.linspace(0, shape.q_len - 1, min(SAMPLE, shape.q_len)).round().long().to(out.device)
    return out[-1:, -(shape.num_heads // shape.num_kv_heads) :, picked]


def _backends(portable: bool) -> dict[str, Backend]:
    """fa2 and lean; if `portable`, with the kernels that they run on GPUs other than Hopper."""
    fa2, lean = (registry.get(name) for name in OURS)
    if portable:
        fa2, lean = replace(fa2, prefill=TritonKernel("prefill")), replace(lean, prefill=TritonKernel("prefill", stream_k="lean"))
    return {"fa2": fa2, "lean": lean}


def queries_row(shape: Shape, device: torch.device, portable: bool = False) -> dict:
    """Microseconds per call of sdpa flash, sdpa cuDNN, fa2 and lean; if `portable`, without the kernels for Hopper.

    The result of lean is compared with the exact result for a sample of queries, and the other results with that of lean.
    """
    kv = _held.get(shape, device)
    q_bytes = shape.batch * shape.num_heads * shape.q_len * shape.head_dim * DTYPE.itemsize
    sets = min(len(kv), timing.num_sets(shape.kv_bytes + 2 * q_bytes))
    q = torch.empty(sets, shape.batch, shape.num_heads, shape.q_len, shape.head_dim, device=device, dtype=DTYPE).normal_()
    backends = _backends(portable)
    peers = {name: lambda i, backend=backend: sdpa(backend, q[i], kv[i, 0], kv[i, 1]) for name, backend in PEERS.items()}
    ours = {name: lambda i, own=own: own.attend(q[i], KV(kv[i, 0], kv[i, 1]), SPEC) for name, own in backends.items()}
    expected = ours["lean"](0)
    k, v = kv[0, :, -1:, -1:]
    check("lean", _sample(expected, shape), exact(_sample(q[0], shape), k, v, causal=False))
    found = compete(peers, ours, expected.float(), sets=sets, us=None, **ROUNDS)
    us = {name: round(value, 2) for name, value in found["us"].items()}
    best = best_peer(us)
    return shape.row() | {
        "kernel": kernel_of_lean(shape, q[0], kv[0, 0], backends["lean"]),
        "us": us,
        "us_range": {name: [round(value, 2) for value in values] for name, values in found["us_range"].items()},
        "errors": found["errors"],
        "lean_over_best_peer": best and best / us["lean"],
    }


# ---- summary ----


def _pairs(rows: list[dict]) -> Iterable[tuple[dict, dict]]:
    """Pairs of rows of one run of which the second has one query more, or twice as many."""
    by_shape: dict[tuple, dict[int, dict]] = {}
    for row in rows:
        key = tuple(row.get(name) for name in ("batch", "num_heads", "num_kv_heads", "head_dim", "kv_len", "run"))
        by_shape.setdefault(key, {})[row["q_len"]] = row
    for by_q_len in by_shape.values():
        yield from ((by_q_len[few], by_q_len[many]) for few in by_q_len for many in {few + 1, 2 * few} & by_q_len.keys())


def queries_summary(rows: list[dict]) -> dict:
    """The expectations of lean for any number of queries, and the measured figures."""
    few = [row for row in rows if row["q_len"] <= FEW and row["kv_len"] >= LONG]
    rest = [row for row in rows if not (row["q_len"] <= FEW and row["kv_len"] >= LONG)]
    compared = sorted((row for row in rows if row["lean_over_best_peer"]), key=lambda row: row["lean_over_best_peer"])
    doubled, more = [], []
    for one, two in _pairs(rows):
        first, second = one["us"]["lean"], two["us"]["lean"]
        entry = {"shape": two["shape"], "us": [first, second], "ratio": second / first}
        if two["q_len"] == 2 * one["q_len"]:
            doubled.append(entry | {"over": second > DOUBLING * first + SLACK_US})
        if two["q_len"] == one["q_len"] + 1:
            more.append(entry | {"over": second < (1 - SAVING) * first})
    return {
        "of": len(QUERIES),
        "goals": GOALS,
        "few_queries_long_past": ratios(few, "lean_over_best_peer"),
        "the_rest": ratios(rest, "lean_over_best_peer"),
        "slower_than": {str(share): sum(row["lean_over_best_peer"] < share for row in compared) for share in SLOW},
        "slow": {row["shape"]: row["lean_over_best_peer"] for row in compared if row["lean_over_best_peer"] < max(SLOW)},
        "doubling": {"pairs": len(doubled), "over": [pair for pair in doubled if pair.pop("over")]},
        "one_more_query": {"pairs": len(more), "over": [pair for pair in more if pair.pop("over")]},
        "messages_tb_per_s": {
            row["shape"]: row["kv_bytes"] / row["us"]["lean"] / 1e6 for row in rows if row["shape"] in map(str, MESSAGES)
        },
        "lean_over_fa2": geometric_mean([row["us"]["fa2"] / row["us"]["lean"] for row in rows]),
    }
