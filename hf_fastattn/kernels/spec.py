"""What a call of attention is made of, besides the queries: K and V as a cache holds them, and what is static.

`Spec` is hashable and keys what is compiled and remembered; `KV` holds the tensors. A form of K and V other than plain tensors
(in pages, in fewer bits) is one `Form`: device functions that load a tile, and the same in PyTorch for the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Result = torch.Tensor | Any  # of attention: out; with return_lse the pair (out, lse), which the type leaves open
# Of q, k, v and sink_logits; None for what is not wanted or not given.
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Spec(NamedTuple):
    """What is static in a call of attention. The reference (`kernels.reference.attention`) says what each means."""

    scale: float | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: int = 0
    interleaved: bool = False  # of the rotary embedding that `inv_freq` belongs to


class Form(NamedTuple):
    """How K and V lie in memory, and how a kernel and the reference read them.

    load_k, load_v: Triton device functions (tile.load_plain says with which arguments), None for plain tensors. unpack: what they
    read, in torch: KV -> (k, v), plain tensors (batch, num_kv_heads, kv_len, head_dim) in the queries' dtype. check: raises
    ValueError or TypeError for tensors that are not of this form; called with (q, kv). It takes the place of the check that q, k
    and v have one dtype, and may look at shapes, strides and dtypes, not at contents.

    Make a form once, at module level: launches are remembered by it, and so is that a check has passed.
    """

    name: str
    load_k: Any = None
    load_v: Any = None
    unpack: Callable[[KV], tuple[torch.Tensor, torch.Tensor]] | None = None
    check: Callable[[torch.Tensor, KV], None] | None = None


PLAIN = Form("plain")


class KV(NamedTuple):
    """What a layer of a cache passes to a kernel.

    k, v: (batch, num_kv_heads, kv_len, head_dim), V's head_dim its own, any strides with stride(-1) == 1; in another form than
    PLAIN, of that shape as far as the form can say it. scales, centre, pages: tensors that a form reads besides them, contiguous
    and on q's device.
    """

    k: torch.Tensor
    v: torch.Tensor
    form: Form = PLAIN
    scales: torch.Tensor | None = None
    centre: torch.Tensor | None = None
    pages: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """k, v and what the form reads besides, in the order of the kernels' arguments."""
        return self.k, self.v, self.scales, self.centre, self.pages

    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as plain tensors."""
        return (self.k, self.v) if self.form.unpack is None else self.form.unpack(self)


def call(
    kernel: Callable[..., Result],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: torch.Tensor | None = None,
    *,
    sink_logits: torch.Tensor | None = None,
    inv_freq: torch.Tensor | None = None,
    return_lse: bool = False,
    **static: Any,
) -> Result:
    """`kernel` on plain K and V; `static`: the fields of `Spec`."""
    return kernel(
        q, KV(k, v), Spec(**static), spans, sink_logits=sink_logits, inv_freq=inv_freq, return_lse=return_lse
    )  # fmt: skip
