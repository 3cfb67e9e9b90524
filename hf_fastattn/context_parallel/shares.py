"""Attention of a few queries over a sequence whose K and V are shared out over ranks.

Every rank has some of the query heads, and of the sequence's K and V a share of the slots, with all KV heads: blocks of
`parts.PART` slots belong to the ranks in turn, so a text of any length is shared out evenly. In a step

1. each rank receives the queries, and K and V of the new tokens, of all heads (all-gather),
2. attends to its share, which gives out and lse,
3. receives out and lse of all shares (all-gather), and merges those of its heads in the order of the ranks.

`parts.part_of` has the spans of a share.

Sources: Shyam et al., "Tree Attention" (2024), section 4; Yang et al., "Context Parallelism for Scalable Million-Token Inference"
(2024), for the queries that are passed instead of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._ops import OpOverload

from ..kernels import parts
from ..kernels import spans as spans_of
from ..kernels.spec import KV, Result, Spec, is_plain

if TYPE_CHECKING:
    from ..kernels.decode.all_reduce import Peers

REMEDY = 'Call patch() without kv_sharding="sequence".'
Part = tuple[torch.Tensor, torch.Tensor]  # the spans of a share, and its slots of new tokens: see `parts.part_of`
Plan = dict[int, tuple[torch.Tensor, Part]]  # by the id of the spans of a sequence: those spans, and the part of this rank


class Shares:
    """How ranks share a sequence's K and V, and which heads each of them computes.

    group: the process group. heads: (num_heads, num_kv_heads) of each layer. copies: the number of consecutive ranks that compute
    the same KV heads, 1 if all are different. whole: whether every rank computes all query and KV heads. peers: returns the
    memory by which kernels exchange such a tensor without collectives, or None; `patch()` sets it.
    """

    def __init__(self, group: Any, heads: Sequence[tuple[int, int]], copies: int = 1, whole: bool = False):
        self.group = group
        self.heads = heads
        self.rank: int = torch.distributed.get_rank(group)
        self.count: int = torch.distributed.get_world_size(group)
        self.copies = copies
        self.peers: Callable[[torch.Tensor], Peers | None] = lambda x: None
        # torch 2.13 has deprecated the second name.
        self.all_gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
        self.whole = whole

    def __deepcopy__(self, memo: dict[int, Any]) -> Shares:
        return self  # a process group is not copied

    def every(self, x: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, (ranks, *x.shape)."""
        x = x.contiguous()
        found = x.new_empty(self.count * x.shape[0], *x.shape[1:])
        self.all_gather(found, x, group=self.group)
        return found.view(self.count, *x.shape)

    def kv_heads(self, layer: int, own: int) -> int:
        """The number of KV heads of a layer. own: the number on this rank. Raises ValueError if they are divided otherwise."""
        _, total = self.heads[layer]
        if own != (total if self.whole else total * self.copies // self.count):
            raise ValueError(f"Layer {layer} has {own} of {total} KV heads on each rank, which its plan does not say. {REMEDY}")
        return total

    def gather_queries(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """The queries of all heads of a layer, from those of this rank, (batch, heads, q_len, head_dim)."""
        own, total = q.shape[1], self.heads[layer][0]
        if own * (1 if self.whole else self.count) != total:
            raise ValueError(
                f"Layer {layer} has {own} of {total} query heads on each rank, which its plan does not say. {REMEDY}"
            )
        return q if self.whole else _joined(self.every(q))

    def gather(self, layer: int, q: torch.Tensor, new: New, slots: torch.Tensor) -> torch.Tensor:
        """As `gather_queries`. K and V of all heads, from those of this rank, are stored in the slots of `parts.part_of`."""
        peers = None if self.whole else self.peers(q)
        if peers is not None:
            from ..kernels.decode.gather_heads import gather_heads

            found = gather_heads(q, *new, slots, peers, self.copies)
            if found is not None:
                return found
        from ..kernels.decode.append import append

        append(KV(new.keys, new.values), *self.gather_kv(new.k, new.v), slots)
        return self.gather_queries(layer, q)

    def gather_kv(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all heads, from those of this rank, (batch, heads, tokens, head_dim). Their dtypes are equal."""
        if self.whole:
            return k, v
        both = _joined(self.every(torch.cat([k, v], -1))[:: self.copies])
        return both[..., : k.shape[3]], both[..., k.shape[3] :]

    def before(self, slot: int) -> int:
        """How many of the slots below this one are in the share of this rank."""
        return parts.slots_before(slot, self.rank, self.count)

    def length(self, slots: int) -> int:
        """The slots of a buffer for the share of so many: besides, all new tokens of a step have room behind its own."""
        return -(-slots // (parts.PART * self.count)) * parts.PART + parts.PART

    def gather_slots(self, x: torch.Tensor) -> torch.Tensor:
        """The K or V of this rank's heads in all slots, from all heads of its buffer (batch, num_kv_heads, length, head_dim)."""
        heads = x.shape[1] if self.whole else x.shape[1] * self.copies // self.count
        first = 0 if self.whole else self.rank // self.copies * heads
        found = self.every(x)[:, :, first : first + heads, : -parts.PART]
        ranks, batch, heads, slots, dim = found.shape
        blocks = found.reshape(ranks, batch, heads, slots // parts.PART, parts.PART, dim)
        return blocks.permute(1, 2, 3, 0, 4, 5).flatten(2, 4)

    def merge(self, out: torch.Tensor, lse: torch.Tensor, heads: int, sink_logits: torch.Tensor | None) -> torch.Tensor:
        """Attention over all shares for this rank's heads, from out and lse of all heads over its share.

        heads: the number of query heads of this rank. sink_logits: those of its heads.
        """
        peers = self.peers(out)
        if peers is not None:
            from ..kernels.decode.merge_ranks import merge_ranks

            found = merge_ranks(out, lse, heads, sink_logits, peers)
            if found is not None:
                return found
        from ..kernels.decode.shares import merge_shares, pack

        first = 0 if self.whole else self.rank * heads
        found = self.every(pack(out, lse))[:, :, first : first + heads]
        return merge_shares(found, out.shape[3], sink_logits)


def _joined(found: torch.Tensor) -> torch.Tensor:
    """(ranks, batch, heads, n, d) -> (batch, ranks * heads, n, d)."""
    return found.transpose(0, 1).flatten(1, 2)


class New(NamedTuple):
    """K and V of new tokens, for the KV heads of this rank, and the buffers for those of all heads, which attention stores."""

    k: torch.Tensor
    v: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class Share(torch.Tensor):
    """K or V of a layer, of which this rank has a share of the slots. For the model it has the shape of the whole,
    (batch, KV heads of this rank, kv_len, head_dim).

    Attention of this package reads it. Any other operation raises ValueError: it would need K and V of all ranks.
    buffer: the share, (batch, num_kv_heads, length, head_dim). layer: its index. plan: the parts of a step, for all layers.
    new_tokens: what attention stores in the buffers first.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # all arrive at __torch_dispatch__

    def __new__(cls, buffer: torch.Tensor, shape: Sequence[int], *_: Any) -> Share:
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=buffer.dtype, device=buffer.device)

    def __init__(self, buffer: torch.Tensor, shape: Sequence[int], shares: Shares, layer: int, plan: Plan, new_tokens: New):
        self.buffer = buffer
        self.shares = shares
        self.layer = layer
        self.plan = plan
        self.new_tokens = new_tokens

    def __repr__(self) -> str:  # type: ignore[override]  # torch's own has an internal argument
        return f"Share({self.shares.rank} of {self.shares.count}, of {tuple(self.shape)} on {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a C function in torch
        cls, function: OpOverload[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise ValueError(
            f'K and V are shared out over ranks (kv_sharding="sequence"), and {function} would need all of them. Only attention '
            f"by a backend of hf_fastattn over spans reads them, without dropout and without autocast to another dtype. {REMEDY}"
        )

    def part(self, whole: torch.Tensor | None, q: torch.Tensor, causal: bool) -> Part:
        """The spans of this share, and its slots of the new tokens. whole: the spans of the sequence, or None for lower-right
        alignment."""
        if whole is not None and (known := self.plan.get(id(whole))) is not None:
            return known[1]
        q_len, key = q.shape[2], whole
        if whole is None:
            kv_len = self.shape[2]
            whole = spans_of.build_spans(q.shape[0], q_len, kv_len, q.device, q_offset=kv_len - q_len, causal=causal)
        part = parts.part_of(whole, q_len, self.buffer.shape[2], self.shares.rank, self.shares.count)
        if key is not None:
            self.plan[id(key)] = key, part
        return part


def over_shares(kernel: Callable[..., Result]) -> Callable[..., Result]:
    """`kernel` for K and V that are a `Share` each. It has the same signature, without return_lse and streaming."""

    def attention(
        q: torch.Tensor,
        kv: KV,
        spec: Spec,
        spans: torch.Tensor | None = None,
        *,
        sink_logits: torch.Tensor | None = None,
        inv_freq: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = kv.k, kv.v
        if not (isinstance(keys, Share) and isinstance(values, Share)) or spec.window is not None or spec.sinks:
            raise ValueError("K and V must be shares of one layer, and a window must be in the spans.")
        if not is_plain(kv.form):
            raise ValueError(f"Shares of K and V are plain tensors, and these have the form {kv.form.name!r}.")
        shares = keys.shares
        own, slots = keys.part(spans, q, spec.causal)
        every = shares.gather(keys.layer, q, keys.new_tokens, slots)
        out, lse = kernel(every, KV(keys.buffer, values.buffer), spec._replace(causal=False), own, return_lse=True)
        return shares.merge(out, lse, q.shape[1], sink_logits)

    return attention
