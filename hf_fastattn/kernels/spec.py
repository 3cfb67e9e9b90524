"""The arguments of attention besides the queries: K and V as a cache stores them, and the static arguments.

`Spec` is hashable: compiled kernels and prepared launches are cached by it. `KV` holds the tensors. A `Form` describes a storage
format of K and V other than plain tensors (paged, quantised, latent): device functions that load a tile and store a token, and
their equivalents in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["KV", "PAGE_SIZES", "Form", "Spec"]

PAGE_SIZES = (16, 32, 64, 128, 256)  # tokens of a page of K and V

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


class Sizes(NamedTuple):
    """The sizes of K and V for attention. The tensors of a form may have other shapes."""

    batch: int
    num_kv_heads: int
    kv_len: int
    head_dim: int
    value_dim: int


def bytes_per_token(*buffers: torch.Tensor) -> int:
    """The bytes of one token of all rows of K and V, or of what a layer caches of them: (batch, heads, any, width) each."""
    return sum(t.shape[0] * t.shape[1] * t.shape[3] * t.element_size() for t in buffers)


class Form(NamedTuple):
    """The storage format of K and V, and how kernels and the reference read and write it.

    On the host:

    unpack: KV -> plain tensors k, v, (batch, num_kv_heads, kv_len, head_dim), in the queries' dtype or in fp32; all forms but
    PLAIN have it.
    check: raises ValueError or TypeError for tensors of another format; called with (q, kv), and where tokens are appended with
    (new keys, kv). It replaces the check that q, k and v share one dtype. It may depend on shapes, strides and dtypes, not on
    contents. sizes: KV -> `Sizes`, or these errors, since it may be called before; None if the sizes are those of k and v. pack:
    (kv, k, v, slots) writes the tokens k and v, (batch, num_kv_heads, q_len, head_dim), to `slots`, int64 (batch, q_len), except
    those below 0 and from kv_len on. bytes_per_token: (k, v), tokens as `pack` takes them -> the bytes of one token of all rows
    in this form. bias: KV -> what is added to the scores of each key, (batch, num_kv_heads, kv_len), or None; in kernels
    `weights` shifts them. K and V are then plain, and `unpack`, which would lose the bias, raises an error.

    Triton device functions, None as for plain tensors (`device.tile` has their arguments and results):

    load_k, load_v: the equivalent of `unpack` for one tile. store: that of `pack` for one token. queries: changes the queries
    before they are multiplied with K. weights: a factor and a shift for each token, besides what load_k and load_v return.

    paged: dimension 0 of k and v is the page, not the batch row, and tiles begin at multiples of their size (`device.pages.load`
    needs both, and what `device.tile.ends_of` adds to its arguments). parts: 1 or 2. With 2, load_k, load_v and queries return a
    pair of tiles, of the even and of the odd dimensions. `queries`, `weights` and parts are for a head_dim up to 256.

    Create a form once, at module level: prepared launches are cached by it, and a check runs once for each of them.
    """

    name: str
    load_k: Any = None
    load_v: Any = None
    unpack: Callable[[KV], tuple[torch.Tensor, torch.Tensor]] | None = None
    check: Callable[[torch.Tensor, KV], None] | None = None
    sizes: Callable[[KV], Sizes] | None = None
    store: Any = None
    pack: Callable[[KV, torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None
    bytes_per_token: Callable[..., int] = bytes_per_token
    queries: Any = None
    weights: Any = None
    paged: bool = False
    parts: int = 1
    bias: Callable[[KV], torch.Tensor | None] | None = None

    @property
    def cache_key(self) -> str:
        """By this Triton tells forms apart in its cache of compiled kernels on disk: the code of their device functions."""
        code = (self.load_k, self.load_v, self.store, self.queries, self.weights)
        return str((self.paged, self.parts, *(function and function.cache_key for function in code)))


PLAIN = Form("plain")


def is_plain(form: Form) -> bool:
    """Whether K and V of this form are plain tensors. `is PLAIN` does not work under torch.compile in torch 2.11."""
    return form.unpack is None


class KV(NamedTuple):
    """K and V, as a layer of a cache passes them to a kernel.

    k, v: (batch, num_kv_heads, kv_len, head_dim), any strides with stride(-1) == 1. The head_dim of V may differ from that of K.
    A form other than PLAIN may give the sizes another meaning, except num_kv_heads. scales, centre, pages: further tensors that a
    form reads, on q's device with stride(-1) == 1.
    """

    k: torch.Tensor
    v: torch.Tensor
    form: Form = PLAIN
    scales: torch.Tensor | None = None
    centre: torch.Tensor | None = None
    pages: torch.Tensor | None = None

    @property
    def sizes(self) -> Sizes:
        if self.form.sizes is not None:
            return self.form.sizes(self)
        batch, num_kv_heads, kv_len = self.k.shape[:3]
        return Sizes(batch, num_kv_heads, kv_len, self.k.shape[-1], self.v.shape[-1])

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
