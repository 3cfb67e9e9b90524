"""Rows of the kernel benchmark that time attention over K and V in pages, beside plain K and V of the same values."""

from __future__ import annotations

import torch

from hf_fastattn.kernels.paged import paged
from hf_fastattn.kernels.spec import KV, Spec

from .prefill import RATE, visible_pairs
from .shapes import LEAN, PREFILL, READ, Shape, compete, exact, make_inputs, ratios
from .timing import num_sets

SIZES = (16, 64, 256)  # tokens of a page
PAGES = [
    *(Shape(batch, 32, 8, 128, length << 10) for batch, length in ((1, 8), (1, 64), (8, 32), (16, 8), (64, 4), (256, 1))),
    *(Shape(batch, 32, 8, 64, length << 10) for batch, length in ((1, 64), (64, 4))),
    Shape(1, 32, 8, 128, 16 << 10, 2 << 10),  # a chunk of a prompt behind others
    Shape(4, 32, 8, 128, 16 << 10, 2 << 10),
]


def in_pages(x: torch.Tensor, size: int, table: torch.Tensor) -> torch.Tensor:
    """K or V (batch, num_kv_heads, kv_len, head_dim) as a pool (num_pages, num_kv_heads, size, head_dim) with this table."""
    batch, heads, length, dim = x.shape
    pool = x.new_empty(batch * length // size, heads, size, dim)
    pool[table.flatten().long()] = x.view(batch, heads, -1, size, dim).transpose(1, 2).flatten(0, 1)
    return pool


def pages_row(shape: Shape, device: torch.device) -> dict:
    """Microseconds per call over plain K and V, and over pages in random order."""
    flops = 2 * shape.dims * shape.batch * shape.num_heads * visible_pairs(shape.q_len, shape.kv_len, None)
    kernel = (LEAN if shape.q_len == 1 else PREFILL).args[0]  # without the wrapper for plain tensors
    sets = num_sets(shape.kv_bytes)
    inputs = make_inputs(shape, sets, device)
    held = {"plain": [KV(k, v) for _, k, v in inputs]}
    for size in SIZES:
        orders = [torch.randperm(shape.batch * shape.kv_len // size, device=device).int().view(shape.batch, -1) for _ in inputs]
        held[f"pages of {size}"] = [
            paged(in_pages(k, size, order), in_pages(v, size, order), order)
            for (_, k, v), order in zip(inputs, orders, strict=True)
        ]
    found = compete(
        {},
        {name: lambda i, kv=kv: kernel(inputs[i][0], kv[i], Spec()) for name, kv in held.items()},
        exact(*inputs[0]),
        sets=sets,
        us=max(7, shape.kv_bytes / READ, flops / RATE),
    )
    us = found["us"]
    return shape.row() | found | {name: us[name] / us["plain"] for name in held if name != "plain"}


def pages_summary(rows: list[dict]) -> dict:
    """Times of plain K and V, by size of a page, for one query of a row and for several."""
    several = {"one query": [r for r in rows if r["q_len"] == 1], "several queries": [r for r in rows if r["q_len"] > 1]}
    return {kind: {name: ratios(its, name) for name in (f"pages of {size}" for size in SIZES)} for kind, its in several.items()}
