"""K and V shared out over ranks by sequence: the functions below patch(), and Ring, zigzag and Striped attention."""

from __future__ import annotations

import processes
import pytest
import torch
import torch.distributed as dist
from calls import attention
from conftest import INTERPRETED

from hf_fastattn import get, merge, training
from hf_fastattn.caches import contract
from hf_fastattn.context_parallel import ORDERS, pieces, positions, ring_attention
from hf_fastattn.kernels import parts
from hf_fastattn.kernels import spans as spans_of
from hf_fastattn.kernels.decode import part_of
from hf_fastattn.kernels.decode.append import append
from hf_fastattn.kernels.decode.shares import merge_shares, pack
from hf_fastattn.kernels.spec import KV, Spec

SLOTS = 384  # of the whole
RANKS = 3
KINDS = {"uniform": {}, "window": {"window": 70}, "ragged rows": {"attention_mask": "left"}, "holes": {"attention_mask": "holes"}}
MANY = ((130, 5), (200, 40), (384, 64), (60, 3), (340, 20))  # tokens, queries


def mask_of(kind: str, seen: int, device) -> torch.Tensor:
    mask = torch.ones(2, seen, dtype=torch.bool, device=device)
    mask[0, :100] = False  # row 0 sees nothing of the first share
    if kind == "holes":
        mask[1, 40:170:3] = False
        mask[0, 130:140] = False
    return mask


def whole_and_shares(device, kind: str, seen: int, q_len: int, softcap=None, sinks: bool = False, backend: str = "lean"):
    """(out over all slots, out merged of the shares of all ranks) for the queries at the last q_len of `seen` tokens."""
    torch.manual_seed(0)
    new = lambda heads, length: torch.randn(2, heads, length, 32, device=device)  # noqa: E731
    q, k, v = new(6, q_len), new(2, SLOTS), new(2, SLOTS)
    k[:, :, seen:], v[:, :, seen:] = float("nan"), float("nan")
    logits = torch.randn(6, device=device) if sinks else None
    options = dict(KINDS[kind])
    if "attention_mask" in options:
        options["attention_mask"] = mask_of(kind, seen, device)
    spans = spans_of.build_spans(2, q_len, SLOTS, device, q_offset=seen - q_len, **options)
    run = get(backend).attend
    spec = Spec(causal=False, softcap=softcap)
    whole = run(q, KV(k, v), spec, spans, sink_logits=logits)
    packed, slots = [], torch.arange(SLOTS, device=device)
    for rank in range(RANKS):
        length = SLOTS // RANKS + parts.PART
        share = KV(*(torch.full((2, 2, length, 32), float("nan"), device=device) for _ in "kv"))
        mine = slots[(slots // parts.PART % RANKS == rank) & (slots < seen - q_len)]
        own, new = parts.part_of(spans, q_len, length, rank, RANKS)
        for buffer, all_slots in ((share.k, k), (share.v, v)):
            buffer[:, :, : len(mine)] = all_slots[:, :, mine]
        append(share, *(x[:, :, seen - q_len : seen] for x in (k, v)), new)
        packed.append(pack(*run(q, share, spec, own, return_lse=True)))
        # The tokens that this rank keeps are where later steps see them.
        mine = slots[(slots // parts.PART % RANKS == rank) & (slots < seen)]
        assert len(mine) == parts.slots_before(seen, rank, RANKS)
        assert torch.equal(share.k[:, :, : len(mine)], k[:, :, mine]) and torch.equal(share.v[:, :, : len(mine)], v[:, :, mine])
    return whole, merge_shares(torch.stack(packed), 32, logits)


@pytest.mark.parametrize("backend", ["lean", "split_kv"])
@pytest.mark.parametrize(
    ("kind", "seen", "q_len", "sinks"),
    [
        *((kind, seen, 1, False) for kind in KINDS for seen in (300, 192, 257)),  # the last two begin a block, or follow that
        ("ragged rows", 200, 1, True),  # sink logits are one more part
        # Across blocks of two ranks, from the last rank to the first, as many queries as a block, within a block, empty shares.
        *((kind, *size, False) for kind in KINDS if kind != "window" for size in MANY),
    ],
)
def test_merged_shares_equal_the_whole(device, kind, seen, q_len, sinks, backend):
    whole, merged = whole_and_shares(device, kind, seen, q_len, 3.0 if q_len > 1 else None, sinks, backend)
    assert merged.isfinite().all() and merged.stride() == whole.stride()
    torch.testing.assert_close(merged, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_results_of_ranks_are_merged_as_by_merge(device, dtype, sinks):
    torch.manual_seed(0)
    outs, lses = torch.randn(3, 2, 6, 2, 24, device=device, dtype=dtype), 9 * torch.randn(3, 2, 6, 2, device=device)
    lses[1, :, 4] = lses[:, 0, 3] = float("-inf")
    packed = torch.stack([pack(out, lse) for out, lse in zip(outs, lses, strict=True)])[:, :, 2:5]  # the heads of one rank
    logits = torch.randn(3, device=device) if sinks else None
    want = [*outs[:, :, 2:5]], [*lses[:, :, 2:5]]
    if sinks:
        want[0].append(torch.zeros_like(want[0][0]))
        want[1].append(logits[:, None].expand_as(want[1][0]).contiguous())
    merged = merge_shares(packed, 24, logits)
    assert merged.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(merged, merge(*want)[0], rtol=0, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_packed_results_keep_the_bits_of_lse(device, dtype):
    out, lse = torch.randn(2, 3, 4, 16, device=device, dtype=dtype), torch.randn(2, 3, 4, device=device)
    lse[0, 0, 0] = float("-inf")
    packed = pack(out, lse)
    assert packed.dtype == dtype
    assert torch.equal(packed[..., :16], out) and torch.equal(packed[..., 16:].view(torch.float32)[..., 0], lse)
    none = torch.stack([pack(torch.zeros_like(out), torch.full_like(lse, float("-inf")))] * 3)
    if dtype != torch.bfloat16 or out.is_cuda:
        assert torch.equal(merge_shares(none, 16), torch.zeros_like(out))  # no rank has a key


def test_spans_of_a_part_are_refused_where_there_are_none():
    spans = spans_of.build_spans(1, 4, 64, torch.device("cpu"))
    lo = torch.zeros(1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="interval for each query"):
        parts.part_of(spans_of.with_rows(spans, lo, lo + 4), 4, 128, 0, 2)
    with pytest.raises(ValueError, match="at most 64 queries"):
        parts.part_of(spans, 65, 128, 0, 2)
    assert contract.FEW <= parts.PART


@pytest.mark.parametrize("q_len", [1, 30, 64])
@pytest.mark.parametrize("mask", [False, True])
def test_the_kernel_computes_the_spans_of_a_part(device, q_len, mask):
    if device.type != "cuda" and not INTERPRETED:
        pytest.skip("needs a GPU or the interpreter")
    live = mask_of("holes", 1000, device) if mask else None
    for seen in (0, 5, 64, 127, 190, 700):
        spans = spans_of.build_spans(2, q_len, 1000, device, q_offset=seen, attention_mask=live)
        for rank, ranks in ((0, 2), (1, 2), (2, 3)):
            length = 512 + parts.PART
            rows = spans[:1] if spans.stride(0) == 0 else spans
            found, want = (make(rows, q_len, length, rank, ranks) for make in (part_of.run, parts._part_of_torch))
            for mine, other in zip(found, want, strict=True):
                assert mine.dtype == other.dtype and torch.equal(mine, other)


# ---- Ring, zigzag, Striped ----
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 5, 13, 40])
def test_pieces_are_the_visible_pairs(order, ranks, window):
    tokens = 8
    for rank in range(ranks):
        mine = positions(order, rank, ranks, tokens)
        for owner in range(ranks):
            theirs = positions(order, owner, ranks, tokens)
            distance = mine[:, None] - theirs
            want = (distance >= 0) & (distance < (1 << 30 if window is None else window))
            found = torch.zeros_like(want)
            for piece in pieces(order, rank, owner, ranks, tokens, True, window):
                inner = torch.arange(tokens)[piece.queries] - piece.queries.start + piece.offset
                between = inner[:, None] - (torch.arange(tokens)[piece.keys] - piece.keys.start)
                seen = (between >= 0) & (between < (1 << 30 if piece.window is None else piece.window))
                assert seen.any()
                found[piece.queries, piece.keys] = seen
            assert torch.equal(found, want)


def pairs(piece) -> int:
    """Number of pairs of a query and a key that it sees."""
    seen = torch.arange(piece.queries.stop - piece.queries.start) + piece.offset + 1
    return int(seen.clamp(0, piece.keys.stop - piece.keys.start).sum())


@pytest.mark.parametrize(("order", "least", "most"), [("ring", 0.50, 0.60), ("zigzag", 0.99, 1.0), ("striped", 0.99, 1.0)])
def test_zigzag_and_striped_share_causal_work_equally(order, least, most):
    """The mean work of 8 ranks over the work of the slowest rank in every turn, for which all wait."""
    ranks, tokens = 8, 4096
    of = lambda rank, turn: sum(map(pairs, pieces(order, rank, (rank - turn) % ranks, ranks, tokens)))  # noqa: E731
    work = torch.tensor([[of(rank, turn) for turn in range(ranks)] for rank in range(ranks)])
    total = ranks * tokens
    assert work.sum() == total * (total + 1) // 2
    assert least <= work.sum() / ranks / work.amax(0).sum() <= most


def test_all_tokens_are_on_one_rank_each():
    for order in ORDERS:
        assert torch.equal(torch.cat([positions(order, rank, 4, 6) for rank in range(4)]).sort().values, torch.arange(24))
    for order, tokens, match in (("spiral", 4, "one of ring, zigzag, striped"), ("zigzag", 3, "even number of tokens")):
        with pytest.raises(ValueError, match=match):
            positions(order, 0, 2, tokens)


CASES = {
    "causal": {},
    "window": {"window": 9},
    "softcap and sink logits": {"softcap": 2.0, "sink_logits": torch.linspace(-1, 1, 4)},
    "not causal": {"causal": False},
}


def text(tokens: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, tokens, width) for heads, width in ((4, 16), (2, 16), (2, 8))]


def pass_around(rank: int, ranks: int) -> dict:
    whole, found = text(8 * ranks), {}
    for order in ORDERS:
        index = positions(order, rank, ranks, 8)
        mine = [x[:, :, index] for x in whole]
        for name, options in CASES.items():
            out, lse = ring_attention(*mine, order=order, return_lse=True, **options)
            want, want_lse = attention(*whole, return_lse=True, **{"causal": True, **options})
            errors = out - want[:, :, index], lse - want_lse[:, :, index]
            found[order, name] = max(error.abs().max().item() for error in errors)
    trained = whole[0].clone().requires_grad_() if rank == 1 else whole[0]
    with pytest.raises(ValueError, match="requires_grad is 0 on rank 0 and 1 on rank 1"):
        ring_attention(*(x[:, :, :8] for x in (trained, *whole[1:])))
    different = [("tokens", {}), ("order", {"order": ORDERS[rank % 2]}), ("window", {"window": rank or None})]
    different += [("scale", {"scale": 0.3 * rank or None}), ("softcap", {"softcap": 0.5 * rank or None})]
    different += [("checksum of sink_logits", {"sink_logits": torch.full((4,), float(rank))})]
    for name, options in different:
        mine = [x[:, :, : 8 + (name == "tokens") * rank] for x in whole]
        with pytest.raises(ValueError, match=f"{name} is .* on rank 0 and .* on rank 1"):
            ring_attention(*mine, **options)
    mine = [x[:, :, : 8 - rank % 2] for x in whole]  # refused on one rank
    with pytest.raises(ValueError, match="even number of tokens" if rank % 2 else "an error on rank 1"):
        ring_attention(*mine, order="zigzag")
    for options in ({"softcap": -1.0}, {"sink_logits": torch.zeros(3)}):
        with pytest.raises(ValueError, match="must" if rank == 1 else "an error on rank 1"):
            ring_attention(*(x[:, :, :8] for x in whole), **(options if rank == 1 else {}))
    pair = dist.new_group([0, 1])  # a rank's number in a group is not that in the world
    if rank < 2:
        index = positions("striped", rank, 2, 8)
        out = ring_attention(*(x[:, :, :16][:, :, index] for x in whole), pair)
        found["a group"] = (out - attention(*(x[:, :, :16] for x in whole), causal=True)[:, :, index]).abs().max().item()
    return found


def train_around(rank: int, ranks: int) -> dict:
    """The largest differences of the gradients of a rank's tokens from those of one process that has all of them."""
    found, whole = {}, [x.requires_grad_() for x in text(8 * ranks)]
    for name, options in CASES.items():
        options = {"causal": True, **options}
        sinks = [options.pop("sink_logits").clone().requires_grad_()] if "sink_logits" in options else []
        named = lambda given: {**options, "sink_logits": given[3] if sinks else None}  # noqa: B023, E731
        out, lse = training.attention("reference", *whole, **named(whole + sinks))
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        want = torch.autograd.grad((out, lse), whole + sinks, (dout, dlse))
        for order in ORDERS:
            at = positions(order, rank, ranks, 8)
            mine = [x[:, :, at].detach().requires_grad_() for x in whole] + sinks
            outs = ring_attention(*mine[:3], order=order, return_lse=True, **named(mine))
            grads = torch.autograd.grad(outs, mine, (dout[:, :, at], dlse[:, :, at]))
            for grad in grads[3:]:
                dist.all_reduce(grad)
            wants = [x[:, :, at] for x in want[:3]] + [*want[3:]]
            found[order, name] = max((x - y).abs().max().item() for x, y in zip(grads, wants, strict=True))
            assert all(x.abs().max() > 0.1 for x in wants)
    q, k, v = (x[:, :, :8].detach() for x in whole)  # gradients of K alone, of a loss that has not all results
    (alone,) = torch.autograd.grad(ring_attention(q, k.requires_grad_(), v, causal=False).sum(), k)
    out = training.attention("reference", *(torch.cat([x] * ranks, 2) for x in (q, k, v)), causal=False)[0]
    found["K alone"] = (alone - torch.autograd.grad(out.sum(), k)[0] / ranks).abs().max().item()
    return found


@pytest.mark.slow
@processes.HIDDEN
@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("function", "most"), [(pass_around, 1e-5), (train_around, 1e-4)], ids=["results", "gradients"])
def test_ring_attention_is_attention_to_the_whole_text(tmp_path, function, most, ranks):
    for each in processes.run(tmp_path, ranks, function, ranks):
        assert each.result is not None, each.output
        assert max(each.result.values()) < most, each.result


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_gradients_of_ring_attention_on_one_rank(one_rank):
    assert max(train_around(0, 1).values()) < 1e-4


def test_a_rank_outside_of_the_group_is_refused(one_rank):
    with pytest.raises(ValueError, match="Rank 0 is not in the group"):
        ring_attention(*text(8), dist.GroupMember.NON_GROUP_MEMBER)


def test_second_derivatives_of_ring_attention_are_refused(one_rank):
    q, k, v = (x.requires_grad_() for x in text(8))
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(ring_attention(q, k, v).sum(), q, create_graph=True)


def test_ring_attention_refuses_what_it_does_not_support():
    q, k, v = text(8)
    for error, match, tensors, options in (
        (ValueError, "as many queries as it has keys", (q[:, :, :4], k, v), {}),
        (ValueError, "A window needs causal=True", (q, k, v), {"causal": False, "window": 4}),
        (ValueError, "an integer, at least 1; got .* window=4.5", (q, k, v), {"window": 4.5}),
        (ValueError, "must have one dtype", (q, k, v.half()), {}),
        (ValueError, "q, k and v must be 4-D", (q[0], k[0], v[0]), {}),
        (ValueError, "agree in batch and head_dim", (q, k[:1], v[:1]), {}),
        (ValueError, "one logit per query head", (q, k, v), {"sink_logits": torch.zeros(3)}),
    ):
        with pytest.raises(error, match=match):
            ring_attention(*tensors, **options)
