"""K and V in pages: a pool of pages of P tokens, and for each batch row a table of the pages that hold its tokens, in order.

Slot s of a row is token s % P of page pages[row, s // P]. Rows may share pages, and -1 is no page: no query may see a slot of it,
and tokens appended there are not written. Lengths are in the spans, as for plain tensors, and so a step changes neither shapes
nor addresses: a captured launch reads the table and the lengths on the device.

All attention kernels, the reference and all launches that append take the `KV` of `paged`; the Hopper prefill kernel reads it by
TMA, in boxes of at most a page.
"""

from __future__ import annotations

from typing import Any

import torch

from .host.gpu import HAS_TRITON
from .spec import KV, PAGE_SIZES, PLAIN, Form, Sizes

__all__ = ["PAGE_SIZES", "gather", "paged"]


def paged(k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor) -> KV:
    """K and V in pages.

    k, v: (num_pages, num_kv_heads, P, head_dim), P in PAGE_SIZES; the head_dim of V may differ. Any strides with stride(-1) == 1.
    pages: int32 (batch, max_pages), contiguous, on the same device: numbers of pages, below num_pages, or -1. The kernels do not
    check these. kv_len is max_pages * P. Raises ValueError or TypeError.

    To append tokens of several rows that are packed into one, `append` takes slots of the pool, page * P + s % P, if the table is
    torch.arange(num_pages)[None].
    """
    kv = KV(k, v, FORMS.get(k.shape[2] if k.dim() == 4 else 0, PLAIN), pages=pages)
    _check_pages(kv)
    return kv


def gather(kv: KV, tokens: int | None = None) -> KV:
    """The same K and V as plain tensors: copies of the pages with the first `tokens` slots of each row, by default of all.

    The queries of a long prompt behind a past read K and V many times, and the portable kernel reads plain tensors faster. A copy
    reads and writes them once. No synchronisation. Slots without a page have any content.
    """
    table, size = _table(kv), kv.k.shape[2]
    if tokens is not None and not 0 < tokens <= table.shape[1] * size:
        raise ValueError(f"tokens must be at least 1 and at most {table.shape[1] * size}, the slots of a row; got {tokens}.")
    return KV(*_unpack(kv if tokens is None else kv._replace(pages=table[:, : -(-tokens // size)])))


def _table(kv: KV) -> torch.Tensor:
    if kv.pages is None:
        raise ValueError("K and V in pages need a table of their pages. Create them with kernels.paged.paged(k, v, pages).")
    return kv.pages


def _sizes(kv: KV) -> Sizes:
    batch, most = _table(kv).shape
    return Sizes(batch, kv.k.shape[1], most * kv.k.shape[2], kv.k.shape[3], kv.v.shape[3])


def _unpack(kv: KV) -> tuple[torch.Tensor, torch.Tensor]:
    pages, heads = _table(kv).clamp(min=0)[:, None], torch.arange(kv.k.shape[1], device=kv.k.device)[:, None]
    k, v = (x[pages, heads].flatten(2, 3) for x in (kv.k, kv.v))
    return k, v


def _pack(kv: KV, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    size, kv_len = kv.k.shape[2], kv.sizes.kv_len
    pages = _table(kv).gather(1, slots.clamp(0, kv_len - 1) // size)
    inside = ((slots >= 0) & (slots < kv_len) & (pages >= 0)).flatten()
    # Tokens without a place repeat the first that has one, or write nothing if none has: no shape depends on contents.
    token = torch.where(inside, torch.arange(len(inside), device=slots.device), inside.long().argmax())
    page, slot = pages.clamp(min=0).flatten()[token], slots.flatten()[token] % size
    for pool, new in ((kv.k, k), (kv.v, v)):
        states = new.transpose(1, 2).flatten(0, 1)[token]
        pool[page, :, slot] = torch.where(inside.any(), states, pool[page, :, slot])


def _check_pages(kv: KV) -> None:
    """Refuse what the kernels could not read, whatever the queries."""
    k, v, pages = kv.k, kv.v, _table(kv)
    if k.dim() != 4 or kv.form is not FORMS.get(k.shape[2]):
        raise ValueError(
            f"Pages of K are (num_pages, num_kv_heads, P, head_dim), with P in {PAGE_SIZES}; got {tuple(k.shape)} for "
            f"{kv.form.name!r}. Allocate pages of 64 tokens, for example, and call kernels.paged.paged."
        )
    if v.dim() != 4 or k.shape[:3] != v.shape[:3] or k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            "Pages of K and V must have one shape but for head_dim, one dtype and one device; got "
            f"{tuple(k.shape)} of {k.dtype} on {k.device}, and {tuple(v.shape)} of {v.dtype} on {v.device}."
        )
    if pages.dtype != torch.int32:
        raise TypeError(f"The table of pages is an int32 tensor, (batch, max_pages); got {pages.dtype}. Call .int() on it.")
    if pages.dim() != 2 or not pages.is_contiguous() or pages.device != k.device or 0 in pages.shape:
        raise ValueError(
            f"The table of pages is (batch, max_pages), at least (1, 1), contiguous and on {k.device}; got {tuple(pages.shape)}, "
            f"strides {pages.stride()}, on {pages.device}. Call .contiguous() on a slice of columns."
        )
    for name, x in (("K", k), ("V", v)):
        if x.stride(3) != 1 or x.stride(2) * x.shape[2] >= 1 << 31:
            raise ValueError(
                f"A page of {name} needs stride(-1) == 1 and fewer than {1 << 31} elements between its first and its last token; "
                f"got strides {x.stride()}. Call .contiguous() on it."
            )


def _check(q: torch.Tensor, kv: KV) -> None:
    _check_pages(kv)
    if len(_table(kv)) != len(q):
        raise ValueError(f"The table of pages has {len(_table(kv))} rows, and the batch {len(q)}. Pass the table of these rows.")
    if q.dtype != kv.k.dtype:
        raise TypeError(f"Queries and new tokens have the dtype of the pages; got {q.dtype} and {kv.k.dtype}. Cast them.")


_LOADS: tuple[Any, ...] = (object(),) * len(PAGE_SIZES)
_STORES = _LOADS
if HAS_TRITON:
    from .device import pages as device

    _LOADS = (device.load_16, device.load_32, device.load_64, device.load_128, device.load_256)
    _STORES = (device.store_16, device.store_32, device.store_64, device.store_128, device.store_256)

FORMS = {
    size: Form(
        f"pages of {size}",
        load_k=load,
        load_v=load,
        unpack=_unpack,
        check=_check,
        sizes=_sizes,
        store=store,
        pack=_pack,
        paged=True,
    )
    for size, load, store in zip(PAGE_SIZES, _LOADS, _STORES, strict=True)
}
