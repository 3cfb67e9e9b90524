"""Rows of the kernel benchmark that time a block of queries over a long past: q_len from one to a thousand.

No mask: every query sees all keys, which is the cheapest form of the same work for torch's kernels, and one whose results can be
compared. K and V of a group of rows (heads, head_dim, past, batch) are made once, and groups come in a fixed shuffle, so that the
rows of a run that was stopped are a fair sample of all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from statistics import geometric_mean

import torch
from torch.nn.attention import SDPBackend

from hf_fastattn import registry
from hf_fastattn.kernels.spec import KV, Spec

from . import timing
from .shapes import DTYPE, Shape, best_peer, check, exact, kernel_of_lean, ratios, sdpa

LENGTHS = (1, 2, 4, 8, 9, 16, 17, 24, 33, 64, 65, 100, 128, 200, 256, 300, 512, 1024)
PASTS = tuple(n << 10 for n in (2, 8, 32, 64, 128, 256))
HEADS = ((32, 8), (64, 8), (28, 4), (32, 32), (71, 1), (16, 2))
GROUPS = [(batch, *heads, head_dim, past) for heads in HEADS for head_dim in (64, 128) for past in PASTS for batch in (1, 4)]
random.Random(0).shuffle(GROUPS)
QUERIES = [Shape(*group, q_len, causal=False) for group in GROUPS for q_len in LENGTHS]

SPEC = Spec(causal=False)
PEERS = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
OURS = ("fa2", "lean")
ROUNDS = {"least": 3, "most": 7, "seconds": 0.06}  # of thousands of rows
SAMPLE = 8  # queries that are compared with the exact result
FEW, LONG = 128, 8 << 10  # up to how many queries, over how many keys and more, stream-K is meant to win
GOALS = {"few_queries_long_past": 1.5, "the_rest": 1.0}
SLOW = (0.93, 0.85)  # rows below these shares of the better peer's speed are counted, and listed
DOUBLING, SLACK_US, SAVING = 2.15, 3.0, 0.05


class _Held:
    """K and V of the group that was asked for last."""

    def __init__(self) -> None:
        self.key: object = None
        self.kv = torch.empty(0)

    def get(self, shape: Shape, device: torch.device) -> torch.Tensor:
        """(sets, 2, batch, num_kv_heads, kv_len, head_dim) of normal noise, made by one kernel."""
        key = (shape.batch, shape.num_kv_heads, shape.kv_len, shape.head_dim, device)
        if key != self.key:
            self.key, self.kv = None, torch.empty(0)  # its memory is needed for the next
            sets = timing.num_sets(shape.kv_bytes)
            self.kv = torch.empty(sets, 2, *key[:-1], device=device, dtype=DTYPE).normal_()
            self.key = key
        return self.kv


_held = _Held()


def _sample(out: torch.Tensor, shape: Shape) -> torch.Tensor:
    """A few queries of the heads of the last KV head, in the last batch row."""
    picked = torch.linspace(0, shape.q_len - 1, min(SAMPLE, shape.q_len)).round().long().to(out.device)
    return out[-1:, -(shape.num_heads // shape.num_kv_heads) :, picked]


def queries_row(shape: Shape, device: torch.device) -> dict:
    """Microseconds a call of sdpa flash, sdpa cuDNN, fa2 and lean.

    lean is checked against the exact result of a sample of queries; all of every other result against lean's.
    """
    kv = _held.get(shape, device)
    q_bytes = shape.batch * shape.num_heads * shape.q_len * shape.head_dim * DTYPE.itemsize
    sets = min(len(kv), timing.num_sets(shape.kv_bytes + 2 * q_bytes))
    q = torch.empty(sets, shape.batch, shape.num_heads, shape.q_len, shape.head_dim, device=device, dtype=DTYPE).normal_()
    ours = {name: registry.get(name).attend for name in OURS}
    rivals: dict[str, Callable[[int], torch.Tensor]] = {
        **{name: lambda i, backend=backend: sdpa(backend, q[i], kv[i, 0], kv[i, 1]) for name, backend in PEERS.items()},
        **{name: lambda i, attend=attend: attend(q[i], KV(kv[i, 0], kv[i, 1]), SPEC) for name, attend in ours.items()},
    }
    expected = rivals["lean"](0)
    k, v = kv[0, :, -1:, -1:]
    check("lean", _sample(expected, shape), exact(_sample(q[0], shape), k, v, causal=False))
    expected, calls, runs, errors = expected.float(), {}, {}, {}
    for name, run in rivals.items():
        try:
            check(name, run(0), expected)
            us = timing.elapsed_us(lambda run=run: run(min(1, sets - 1)), device)
            calls[name] = timing.num_calls(sets, us)
            runs[name] = timing.record(run, sets, calls[name], device)
        except Exception as error:  # a peer that cannot run the shape leaves the others worth timing
            if name in ours:
                raise
            errors[name] = f"{type(error).__name__}: {str(error).strip()[:300]}"
    found = timing.medians(timing.time_rivals(runs, calls, device, **ROUNDS))
    us = {name: round(value, 2) for name, value in found["us"].items()}
    best = best_peer(us)
    return shape.row() | {
        "kernel": kernel_of_lean(shape, q[0], kv[0, 0]),
        "us": us,
        "us_range": {name: [round(value, 2) for value in values] for name, values in found["us_range"].items()},
        "errors": errors,
        "lean_over_best_peer": best and best / us["lean"],
    }


def compile_kernels(group: tuple[int, int, int], device: torch.device, shapes: Iterable[Shape] = ()) -> None:
    """Run fa2 and lean once for each shape of these (num_heads, num_kv_heads, head_dim), over heads that share memory.

    So that processes beside one another compile what rows would compile one after the other.
    """
    num_heads, num_kv_heads, head_dim = group
    for shape in shapes or QUERIES:
        if (shape.num_heads, shape.num_kv_heads, shape.head_dim) != group:
            continue
        q = torch.zeros(shape.batch, num_heads, shape.q_len, head_dim, device=device, dtype=DTYPE)
        k = torch.zeros(shape.kv_len + shape.batch * num_kv_heads, head_dim, device=device, dtype=DTYPE)
        size, strides = (shape.batch, num_kv_heads, shape.kv_len, head_dim), (num_kv_heads * head_dim, head_dim, head_dim, 1)
        k = k.as_strided(
            size, strides
        )  # each head a token further: what is compiled depends on strides, as far as 16 divides them
        for name in OURS:
            registry.get(name).attend(q, KV(k, k), SPEC)


# ---- what the rows say ----


def _pairs(rows: list[dict]) -> Iterable[tuple[dict, dict]]:
    """Rows of one run that differ by one query, or in that one has twice as many; the one with fewer first."""
    alike: dict[tuple, dict[int, dict]] = {}
    for row in rows:
        key = tuple(row.get(name) for name in ("batch", "num_heads", "num_kv_heads", "head_dim", "kv_len", "run"))
        alike.setdefault(key, {})[row["q_len"]] = row
    for its in alike.values():
        yield from ((its[few], its[many]) for few in its for many in {few + 1, 2 * few} & its.keys())


def queries_summary(rows: list[dict]) -> dict:
    """What is promised of lean over any number of queries, beside what was measured."""
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
        "lean_over_fa2": geometric_mean([row["us"]["fa2"] / row["us"]["lean"] for row in rows]),
    }
