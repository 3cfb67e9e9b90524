"""The arguments of attention besides the queries: K and V as a cache stores them, and the static arguments.

`Spec` is hashable: compiled kernels and prepared launches are cached by it. `KV` holds the tensors. A `Form` describes a storage
format of K and V other than plain tensors (paged, quantised): device functions that load a tile, and their equivalent in PyTorch
for the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["KV", "Form", "Spec"]

Result = torch.Tensor | Any  # of attention: out, or with return_lse the pair (out, lse), which the type does not express
# Of q, k, v and sink_logits; None for those that are not needed.
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Spec(NamedTuple):
    """The static arguments of attention. `kernels.reference.attention` documents each of them."""

    scale: float | None = None
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: int = 0
    interleaved: bool = False  # layout of the rotary embedding whose frequencies are `inv_freq`
    dropout: float = 0.0


class Form(NamedTuple):
    """The storage format of K and V, and how a kernel and the reference read it.

    load_k, load_v: Triton device functions with the arguments of tile.load_plain; None for plain tensors. unpack: their
    equivalent in torch, KV -> (k, v), plain tensors (batch, num_kv_heads, kv_len, head_dim) in the queries' dtype. check: raises
    ValueError or TypeError for tensors of another format; called with (q, kv). It replaces the check that q, k and v share one
    dtype. It may depend on shapes, strides and dtypes, not on contents.

    Create a form once, at module level: prepared launches are cached by it, and a check runs once for each of them.
    """

    name: str
    load_k: Any = None
    load_v: Any = None
    unpack: Callable[[KV], tuple[torch.Tensor, torch.Tensor]] | None = None
    check: Callable[[torch.Tensor, KV], None] | None = None


PLAIN = Form("plain")


def is_plain(form: Form) -> bool:
    """Whether K and V of this form are plain tensors. `is PLAIN` does not work under torch.compile in torch 2.11."""
    return form.load_k is None and form.load_v is None and form.unpack is None


class KV(NamedTuple):
    """K and V, as a layer of a cache passes them to a kernel.

    k, v: (batch, num_kv_heads, kv_len, head_dim), any strides with stride(-1) == 1. The head_dim of V may differ from that of K.
    A form other than PLAIN may give the sizes another meaning. scales, centre, pages: further tensors that a form reads,
    contiguous and on q's device.
    """

    k: torch.Tensor
    v: torch.Tensor
    form: Form = PLAIN
    scales: torch.Tensor | None = None
    centre: torch.Tensor | None = None
    pages: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """k, v and the further tensors of the form, in the order of the kernels' arguments."""
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
    """Call `kernel` on plain K and V; `static`: the fields of `Spec`."""
    return kernel(
        q, KV(k, v), Spec(**static), spans, sink_logits=sink_logits, inv_freq=inv_freq, return_lse=return_lse
    )  # fmt: skip
