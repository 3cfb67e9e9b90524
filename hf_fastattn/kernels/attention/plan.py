"""A checked call of attention with the arguments of its launches, and the plan of a decode kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import checks
from ..device.constants import Constants
from ..device.tile import load_plain
from ..dropout import GROUP, keep_scale, threshold
from ..host import launch, tables
from ..host.overlap import early
from ..spans import has_rows, has_words, no_spans, width_of
from ..spec import KV, Form, Spec

LEAST = 16  # dimensions of a part of K and V, the smallest size for tl.dot


@dataclass(frozen=True, slots=True)
class Call:
    """A call of attention whose arguments have been checked.

    tensors: (q, k, v, scales, centre, pages, spans, sink_logits, inv_freq).
    """

    tensors: tuple[torch.Tensor | None, ...]
    form: Form
    spec: Spec
    return_lse: bool
    scale: float
    batch: int
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int

    @classmethod
    def of(
        cls,
        tensors,
        form: Form,
        spec: Spec,
        return_lse: bool,
        *,
        decode: bool = False,
        rows: bool = False,
        dropout: bool = False,
        seed: torch.Tensor | None = None,
    ) -> Call:
        """The call of these tensors. Raises the errors of `checks.check`, which explains decode, rows and dropout, and of
        `checks.check_widths`. seed: of dropout."""
        q, *of_kv, spans, sink_logits, inv_freq = tensors
        kv = KV(of_kv[0], of_kv[1], form, *of_kv[2:])
        scale = checks.check(q, kv, spec, spans, sink_logits, inv_freq, seed, decode=decode, rows=rows, dropout=dropout)
        checks.check_widths(q, kv)
        if spec.dropout:
            checks.check_trained_widths(q, kv)
        batch, num_kv_heads, kv_len, head_dim, value_dim = kv.sizes
        sizes = (batch, q.shape[1], num_kv_heads, q.shape[2], kv_len, head_dim, value_dim)
        return cls(tensors, form, spec, return_lse, scale, *sizes)

    @property
    def q(self) -> torch.Tensor:
        q = self.tensors[0]
        assert q is not None
        return q

    @property
    def spans(self) -> torch.Tensor | None:
        return self.tensors[-3]

    @property
    def uniform(self) -> bool:
        """Whether the host knows that all rows of the batch have the same spans."""
        return self.spans is None or self.batch == 1 or self.spans.stride(0) == 0

    @property
    def page(self) -> int:
        """Tokens of a page of K and V; 0 if they are not in pages."""
        k = self.tensors[1]
        return k.shape[2] if self.form.paged and k is not None else 0

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Packed query rows per KV head."""
        return self.q_len * self.group

    @property
    def many_rows(self) -> bool:
        """Whether there are more packed rows than a decode kernel supports."""
        return self.rows > tables.MAX_DECODE_ROWS

    @property
    def window(self) -> int:
        return width_of(self.spec.window)

    @property
    def is_causal(self) -> bool:
        """Whether rows are causal whatever the given spans say; without spans, `no_spans` says it."""
        return self.spec.causal and self.spans is not None

    @property
    def width(self) -> int:
        """The larger head_dim, which determines the tile sizes."""
        return max(self.head_dim, self.value_dim)

    @property
    def dtype(self) -> torch.dtype:
        """The one that selects tiles: of the queries, or of K and V in 8 bits that queries of 16 bits read."""
        k = self.tensors[1]
        assert k is not None
        return k.dtype if k.dtype == torch.uint8 and self.q.dtype.itemsize == 2 else self.q.dtype

    @property
    def block_dv(self) -> int:
        return max(tables.block_d(self.value_dim), LEAST * self.form.parts)

    def tile_align(self, BLOCK_N: int) -> int:
        """Where tiles of BLOCK_N keys begin, see `device.tile.begin_of`."""
        return max(BLOCK_N if self.form.paged else 1, GROUP if self.spec.dropout else 1)

    def output(self, BLOCK_N: int = 0) -> dict[str, Any]:
        """The fields of `Output`."""
        return {
            "GROUP": self.group,
            "VALUE_DIM": self.value_dim,
            "BLOCK_DV": self.block_dv,
            "BLOCK_N": BLOCK_N,
            "HAS_SINK_LOGITS": self.tensors[-2] is not None,
            "WRITE_LSE": self.return_lse,
            "SINKS": self.spec.sinks,
            "IS_CAUSAL": self.is_causal,
        }

    def constants(self, config: tables.Config, packed: bool, *others: torch.Tensor) -> Constants:
        """The constants of a kernel. packed: the query heads of a KV head share a block. With few rows, a packed kernel itself
        re-rotates the queries that score the sinks. others: besides K and V, tensors of which tiles are loaded in a loop."""
        _, k, v, _, _, _, spans, _, inv_freq = self.tensors
        pairs = inv_freq.shape[0] if packed and inv_freq is not None and not self.many_rows else 0
        return Constants(
            **self.output(config.BLOCK_N),
            HEAD_DIM=self.head_dim,
            BLOCK_M=config.BLOCK_M,
            BLOCK_D=max(tables.part_d(self.head_dim), LEAST * self.form.parts),
            HAS_WORDS=packed or has_words(spans),
            HAS_SOFTCAP=self.spec.softcap is not None,
            IEEE=self.q.dtype == torch.float32,
            PAIRS=pairs,
            INTERLEAVED=pairs > 0 and self.spec.interleaved,
            ONE_QUERY=pairs > 0 and self.q_len == 1,
            ROWS=has_rows(spans),
            DROPOUT=self.spec.dropout > 0.0,
            ALIGN=tables.alignment(k, v, *others),
            TILE_ALIGN=self.tile_align(config.BLOCK_N),
        )

    def arguments(self) -> dict[str, Any]:
        """Strides, lengths, scales, and the form of K and V, by the names of the kernels' arguments."""
        q, k, v = self.tensors[:3]
        named: dict[str, Any] = {"stride_sb": 0 if self.spans is None else self.spans.stride(0)}
        for letter, tensor in (("q", q), ("k", k), ("v", v)):
            assert tensor is not None
            axes = ("b", "h", "m" if letter == "q" else "n")
            named |= {f"stride_{letter}{axis}": tensor.stride(i) for i, axis in enumerate(axes)}
        scale_log2, cap_log2 = checks.log2_scales(self.scale, self.spec.softcap)
        return named | {
            "q_len": self.q_len,
            "kv_len": self.kv_len,
            "window": self.window,
            "scale_log2": scale_log2,
            "cap_log2": cap_log2,
            "FORM": self.form._replace(load_k=self.form.load_k or load_plain, load_v=self.form.load_v or load_plain),
        }

    def dropout(self) -> dict[str, Any]:
        """What `device.dropout.kept` takes besides the seed, by the names of the kernels' arguments."""
        return {"drop_below": threshold(self.spec.dropout), "keep_scale": keep_scale(self.spec.dropout)}

    def registers(self, config: tables.Config) -> dict[str, int]:
        """The register limit of a launch that begins early, as Triton's option."""
        limit = config.registers or (config.sink_registers if self.spec.sinks else 0)
        return {"maxnreg": limit} if limit and early(self.q.device)["EARLY"] else {}


class Plan(NamedTuple):
    """The launches of a decode kernel, attention and the merge of its partials if it stores any, the number of floats in the
    workspace between them, and the head_dim of the values."""

    launches: launch.Launch
    workspace_size: int
    value_dim: int

    def run(self, q, kv: KV, spec: Spec, spans, sink_logits, sink_query, return_lse: bool):
        """The result of these launches, for tensors like those that they were prepared for.

        sink_query: the queries that score sinks, or the frequencies with which the kernel re-rotates them.
        """
        out, lse = checks.empty_outputs(q, self.value_dim, return_lse)
        workspace = torch.empty(self.workspace_size, device=q.device, dtype=torch.float32)
        self.launches(
            q,
            *kv.tensors,
            sink_query if spec.sinks else None,
            out,
            lse,
            workspace,
            no_spans(q.device, spec.causal) if spans is None else spans,
            q if sink_logits is None else sink_logits,
        )
        return (out, lse) if return_lse else out
