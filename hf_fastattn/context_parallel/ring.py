"""Ring attention: a text that is shared out over ranks attends to itself, and no rank holds all of its K and V.

In each turn a rank attends to the K and V of one share, while they are sent to the next rank and those of the previous rank are
received. The results of the turns are merged. In the backward pass the gradients of K and V travel behind them: every rank adds
its part, and those of a share are complete when they are back at its rank. Three orders share the tokens out:

    ring      rank r has tokens r * n ... (r + 1) * n - 1. With a causal mask the last rank computes in all turns and the first in
              one of them. As all wait for the slowest, half of the time is lost
    zigzag    the tokens are 2 * ranks chunks, and rank r has chunks r and 2 * ranks - 1 - r: equal work in all turns
    striped   rank r has tokens r, r + ranks, r + 2 * ranks, ...: equal work up to one token
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist

from ..kernels import TritonKernel, checks, reference
from ..kernels import spans as spans_of
from ..kernels.merge import merge
from ..kernels.spec import KV, Result, Spec

Order = Literal["ring", "zigzag", "striped"]
ORDERS: tuple[Order, ...] = get_args(Order)
_COMPARED = ["batch", "tokens", "head_dim", "num_kv_heads", "head_dim of V", "bytes of a number", "bfloat16"]
_COMPARED += ["order", "causal", "window", "scale", "softcap", "checksum of sink_logits", "requires_grad"]
_REFUSED = -math.inf
PREFILL = TritonKernel("prefill", hopper="prefill_hopper", stream_k="lean")
BACKWARD = TritonKernel("backward", twin=reference.backward)


class Run(NamedTuple):
    """Tokens start, start + step, start + 2 * step, ...: `length` of them."""

    start: int
    step: int
    length: int


def runs_of(order: Order, rank: int, ranks: int, tokens: int) -> list[Run]:
    """The tokens of a rank, in its order. tokens: the number of tokens of each rank. Raises ValueError for another order."""
    if order == "ring":
        return [Run(rank * tokens, 1, tokens)]
    if order == "striped":
        return [Run(rank, ranks, tokens)]
    if order != "zigzag" or tokens % 2:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, and zigzag needs an even number of tokens; got {order!r}.")
    half = tokens // 2
    return [Run(rank * half, 1, half), Run((2 * ranks - 1 - rank) * half, 1, half)]


def positions(order: Order, rank: int, ranks: int, tokens: int) -> torch.Tensor:
    """The positions of a rank's tokens in the text, int64 (tokens,), in its order.

    tokens: the number of tokens of each rank, even for zigzag. Raises ValueError for another order.
    """
    return torch.cat([run.start + run.step * torch.arange(run.length) for run in runs_of(order, rank, ranks, tokens)])


class Piece(NamedTuple):
    """Queries of one run over keys of another: query i sees key j only if j <= i + offset, and i + offset - j < window.

    offset: None if not causal. window: None for no limit.
    """

    queries: slice
    keys: slice
    offset: int | None
    window: int | None


def pieces(
    order: Order, rank: int, owner: int, ranks: int, tokens: int, causal: bool = True, window: int | None = None
) -> list[Piece]:
    """The parts of the attention of a rank's queries to the keys of another rank, without those in which nothing is visible."""
    found, first_query = [], 0
    for mine in runs_of(order, rank, ranks, tokens):
        first_key = 0
        for theirs in runs_of(order, owner, ranks, tokens):
            queries, keys = slice(first_query, first_query + mine.length), slice(first_key, first_key + theirs.length)
            first_key += theirs.length
            if not causal:
                found.append(Piece(queries, keys, None, None))
                continue
            offset, rest = divmod(mine.start - theirs.start, mine.step)
            width = None if window is None else -((rest - window) // mine.step)  # rounded up
            if offset + mine.length > 0 and (width is None or (width > 0 and offset - width < theirs.length - 1)):
                found.append(Piece(queries, keys, offset, width))
        first_query += mine.length
    return found


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any = None,
    *,
    order: Order = "striped",
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    return_lse: bool = False,
    kernel: Callable[..., Result] = PREFILL,
    backward: Callable[..., Any] = BACKWARD,
) -> Result:
    """Attention of a text to itself, of which every rank of a process group has as many tokens, of all heads.

    q: (batch, num_heads, tokens, head_dim), k and v: (batch, num_kv_heads, tokens, head_dim), the tokens of this rank in the
    order that `positions` returns. group: None for all ranks. window: with causal, a query sees the last `window` tokens, its own
    included. kernel, backward: attention and its gradients, with the signatures of `kernels.reference.attention` and
    `kernels.reference.backward`. The other arguments, and the result for the tokens of this rank, are those of
    `kernels.reference.attention`.

    There are gradients of all four tensors. Those of q, k and v are of the sum of the losses of all ranks, that of sink_logits is
    the part of this rank's tokens, to be summed over the ranks as that of other weights. Every rank has to run the backward pass,
    of several calls in one order. The gradients of K and V travel in fp32.

    The ranks compare all arguments but the contents of q, k and v, for which the host waits, except while a graph is captured.
    Raises ValueError if they differ and on a rank outside of the group, and ValueError or TypeError for arguments that no kernel
    supports and for a window without causal; second derivatives raise RuntimeError. If one rank raises for its arguments, all of
    them do.

    Sources: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023), also for the gradients;
    Brandon et al., "Striped Attention" (2023); for zigzag Dubey et al., "The Llama 3 Herd of Models" (2024), section 3.3.2.
    """
    error, alone = None, not dist.is_initialized() or (q.is_cuda and torch.cuda.is_current_stream_capturing())
    if dist.is_initialized() and dist.get_rank(group) < 0:
        raise ValueError(f"Rank {dist.get_rank()} is not in the group of this ring_attention(). Only its ranks call it.")
    mine: list[float] = []
    spec = Spec(scale=scale, causal=False, softcap=softcap)
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sink_logits))
    with torch.no_grad():
        try:
            _check(q, k, v, order, causal, window)
            held = torch.cat([k.reshape(-1), v.reshape(-1)])
            sinks = None if sink_logits is None else sink_logits.contiguous()
            checks.check(q, kv := _parts_of(held, k.shape, v.shape), spec, sink_logits=sinks)  # before K and V travel
            if trained:
                checks.check_trained_widths(q, kv)
            mine = [q.shape[0], q.shape[2], q.shape[3], k.shape[1], v.shape[3], q.element_size(), int(q.dtype == torch.bfloat16)]
            mine += [ORDERS.index(order), int(causal), window or 0, scale or 1 / math.sqrt(q.shape[3]), softcap or 0]
            mine += [0 if sinks is None or alone else zlib.crc32(sinks.float().cpu().numpy().tobytes()), int(trained)]
        except Exception as found:
            error, mine = found, [_REFUSED] * len(_COMPARED)  # the other ranks wait for this one
    every: list[torch.Tensor] = []  # the numbers of all ranks
    if not alone:
        own = torch.tensor(mine, dtype=torch.float64, device=q.device)
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, own, group=group)
    if error is not None:
        raise error
    _compare(torch.stack(every).tolist() if every else [])
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    call = _Call(group, rank, ranks, k.shape, v.shape, order, causal, window, spec, kernel, backward)
    out, lse = _Ring.apply(q, k, v, sink_logits, held, call)  # type: ignore[no-untyped-call]
    return (out, lse) if return_lse else out


class _Call(NamedTuple):
    """What the two passes of a call have in common. k, v: the shapes."""

    group: Any
    rank: int
    ranks: int
    k: torch.Size
    v: torch.Size
    order: Order
    causal: bool
    window: int | None
    spec: Spec
    kernel: Callable[..., Result]
    backward: Callable[..., Any]

    def turns(self, held: torch.Tensor, tokens: int) -> Iterator[tuple[KV, list[Piece]]]:
        """K and V of each turn and the pieces of this rank's queries over them, while they are sent on."""
        for turn in range(self.ranks):
            incoming, requests = self.pass_on(held) if turn + 1 < self.ranks else (held, [])
            owner = (self.rank - turn) % self.ranks
            yield (
                _parts_of(held, self.k, self.v),
                pieces(self.order, self.rank, owner, self.ranks, tokens, self.causal, self.window),
            )
            _wait(requests)
            held = incoming

    def pass_on(self, held: torch.Tensor) -> tuple[torch.Tensor, Sequence[Any]]:
        """Begin to send a tensor to the next rank, and to receive that of the previous one."""
        if self.ranks == 1:
            return held, []
        incoming = torch.empty_like(held)
        world: Any = self.group if self.group is not None else dist.group.WORLD
        after, before = (dist.get_global_rank(world, (self.rank + turn) % self.ranks) for turn in (1, -1))
        send, receive = dist.P2POp(dist.isend, held, after, self.group), dist.P2POp(dist.irecv, incoming, before, self.group)
        return incoming, dist.batch_isend_irecv([send, receive])


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sink_logits: torch.Tensor | None,
        held: torch.Tensor,
        call: _Call,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, heads, tokens, _ = q.shape
        wide = torch.zeros(batch, tokens, heads, v.shape[3], dtype=torch.float32, device=q.device).transpose(1, 2)
        lse = torch.full(q.shape[:3], float("-inf"), device=q.device)
        if sink_logits is not None:
            lse[:] = sink_logits[None, :, None]  # a part without values
        for kv, found in call.turns(held, tokens):
            for piece in found:
                add(wide, lse, piece, attend(call.kernel, q, *kv[:2], call.spec, piece))
        out = wide.to(q.dtype)
        ctx.save_for_backward(q, held, out, lse, sink_logits)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("ring_attention() has no second derivatives. Call backward() without create_graph=True.")
        q, held, out, lse, sink_logits = ctx.saved_tensors
        call: _Call = ctx.call
        dout = torch.zeros_like(out) if dout is None else dout
        dq = torch.zeros_like(q, dtype=torch.float32)
        arrived = torch.zeros(held.shape, dtype=torch.float32, device=q.device)  # the sum of the ranks that had a share before
        requests: Sequence[Any] = []
        for kv, found in call.turns(held, q.shape[2]):
            total = torch.zeros_like(arrived)
            dk, dv, *_ = _parts_of(total, call.k, call.v)
            for piece in found:
                rows = (x if x is None else x[:, :, piece.queries] for x in (out, lse, dout, dlse))
                named = dict(zip(("out", "lse", "dout", "dlse"), rows, strict=True))
                into = dq[:, :, piece.queries], dk[:, :, piece.keys], dv[:, :, piece.keys]
                for whole, part in zip(into, call.backward(*_cut(q, *kv[:2], call.spec, piece), **named), strict=False):
                    whole += part
            _wait(requests)
            total += arrived
            arrived, requests = call.pass_on(total)
        _wait(requests)
        dk, dv = (x.to(q.dtype) for x in _parts_of(arrived, call.k, call.v)[:2])
        dsink = None
        if sink_logits is not None:
            delta = (dout.float() * out).sum(-1)
            dsink = checks.sink_gradient(sink_logits, lse, delta if dlse is None else delta - dlse)
        return dq.to(q.dtype), dk, dv, dsink, None, None


def _wait(requests: Sequence[Any]) -> None:
    for request in requests:
        request.wait()


def _parts_of(held: torch.Tensor, k: torch.Size, v: torch.Size) -> KV:
    """K and V of these shapes, in the tensor that travels."""
    return KV(held[: k.numel()].view(k), held[k.numel() :].view(v))


def attend(
    kernel: Callable[..., Result], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec, piece: Piece
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one piece."""
    out, lse = kernel(*_cut(q, k, v, spec, piece), return_lse=True)
    return out, lse


def _cut(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec, piece: Piece
) -> tuple[torch.Tensor, KV, Spec, torch.Tensor | None]:
    """The arguments of a kernel for one piece. One of which every query sees every key, or that ends at the diagonal, needs no
    spans."""
    q, k, v = q[:, :, piece.queries], k[:, :, piece.keys], v[:, :, piece.keys]
    (batch, _, q_len, _), kv_len, spans = q.shape, k.shape[2], None
    if piece.offset is not None:
        last = piece.offset + q_len - 1  # the slot of the last query
        window = piece.window if piece.window is not None and piece.window <= last else None
        if last == kv_len - 1:
            spec = spec._replace(causal=True, window=window)
        elif piece.offset < kv_len - 1 or window is not None:
            spans = spans_of.build_spans(batch, q_len, kv_len, q.device, q_offset=piece.offset, window=window)
    return q, KV(k, v), spec, spans


def add(out: torch.Tensor, lse: torch.Tensor, piece: Piece, part: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Merge (out, lse) of one piece into those of all queries, which are float32, in place."""
    held = out[:, :, piece.queries], lse[:, :, piece.queries]
    out[:, :, piece.queries], lse[:, :, piece.queries] = merge((held[0], part[0].float()), (held[1], part[1]))


def _compare(found: list[list[float]]) -> None:
    """Raise ValueError if one of the ranks has other arguments than the others."""
    for rank, theirs in enumerate(found):
        if _REFUSED in theirs:
            raise ValueError(f"ring_attention() raised an error on rank {rank}, for its arguments. See the message there.")
    for rank, theirs in enumerate(found):
        for name, first, other in zip(_COMPARED, found[0], theirs, strict=True):
            if first != other:
                is_, other_is = (ORDERS[int(x)] if name == "order" else int(x) if x.is_integer() else x for x in (first, other))
                raise ValueError(
                    f"Ranks call ring_attention() differently: {name} is {is_} on rank 0 and {other_is} on rank {rank}."
                )


def _check(q: Any, k: Any, v: Any, order: Order, causal: bool, window: int | None) -> None:
    if not q.dim() == k.dim() == v.dim() == 4:
        dims = f"{q.dim()}-D, {k.dim()}-D and {v.dim()}-D"
        raise ValueError(f"q, k and v must be 4-D, (batch, heads, tokens, head_dim); got {dims}.")
    if q.shape[2] != k.shape[2] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"Every rank attends with as many queries as it has keys; got {q.shape[2]} queries, K {tuple(k.shape)} and V "
            f"{tuple(v.shape)}."
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype; got {q.dtype}, {k.dtype} and {v.dtype}.")
    if window is not None and not (causal and checks.is_count(window) and window >= 1):
        raise ValueError(f"A window needs causal=True, and is an integer, at least 1; got causal={causal} and window={window!r}.")
    runs_of(order, 0, 1, q.shape[2])
