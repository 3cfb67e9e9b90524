"""Merges of several rows in a program, interpreted. The Hopper kernel is not interpretable: torch computes its shares."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import INTERPRETED

from hf_fastattn.kernels import checks, reference
from hf_fastattn.kernels.spec import KV, Spec

if not INTERPRETED:
    pytest.skip("with TRITON_INTERPRET=1", allow_module_level=True)

from hf_fastattn.kernels.attention import prefill_hopper as hopper
from hf_fastattn.kernels.attention import split_kv
from hf_fastattn.kernels.attention.plan import Call
from hf_fastattn.kernels.attention.prefill_hopper import merge
from hf_fastattn.kernels.host import gpu

BLOCK_M, BLOCK_N = hopper.BLOCK_M, 128


def _block_at(place, num_blocks, num_packs, total_packs, section):
    """All (block, pack, row) in order: section by section of packs, the last blocks of all its packs first."""
    packs = [divmod(flat, num_packs)[::-1] for flat in range(total_packs)]
    sections = [packs[i : i + section] for i in range(0, total_packs, section)]
    return [(block, *pack) for packs in sections for block in reversed(range(num_blocks)) for pack in packs][place]


@pytest.mark.parametrize(
    "q_len, group, pack, whole, splits, section",
    [(17, 4, 4, 0, 3, 4), (130, 2, 1, 11, 2, 2), (70, 3, 2, 13, 7, 8), (1, 71, 64, 1, 4, 2)],
)
def test_shares_are_merged_into_the_rows_of_their_block(q_len, group, pack, whole, splits, section, monkeypatch):
    monkeypatch.setattr(gpu, "num_sms", lambda device: 2)
    torch.manual_seed(0)
    batch, kv_heads, head_dim, kv_len = 2, 2, 16, 700
    q = torch.randn(batch, kv_heads * group, q_len, head_dim)
    k, v = (torch.randn(batch, kv_heads, kv_len, head_dim) for _ in range(2))
    spec = Spec()
    call = Call.of((q, *KV(k, v).tensors, None, None, None), KV(k, v).form, spec, True)
    num_packs, num_blocks = kv_heads * -(-group // pack), -(-q_len * pack // BLOCK_M)
    order = (num_blocks, num_packs, batch * num_packs, section, whole)
    cut = num_blocks * num_packs * batch - whole
    stats_start = cut * splits * BLOCK_M * head_dim
    workspace = torch.empty(stats_start + cut * splits * BLOCK_M * 2)
    acc, stats = workspace[:stats_start].view(-1, BLOCK_M, head_dim), workspace[stats_start:].view(-1, 2, BLOCK_M)
    out, lse = checks.empty_outputs(q, head_dim, True)
    want, want_lse = reference.attention(q, KV(k, v), spec, return_lse=True)
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * call.scale * math.log2(math.e)
    scores = scores.masked_fill(~reference.visible(q_len, kv_len, q.device, None, True, None)[:, None], -math.inf)
    untouched = torch.ones(batch, kv_heads * group, q_len, dtype=torch.bool)
    for n in range(cut):
        block, packed, row = _block_at(whole + n, *order[:4])
        kv_head, first_head = packed // (num_packs // kv_heads), packed % (num_packs // kv_heads) * pack
        last_query = min((block * BLOCK_M + BLOCK_M - 1) // pack, q_len - 1)
        tiles = -(-(kv_len - q_len + last_query + 1) // BLOCK_N)
        shares = min(splits, tiles)
        for share in range(shares):
            keys = slice(share * tiles // shares * BLOCK_N, (share + 1) * tiles // shares * BLOCK_N)
            local = torch.arange(BLOCK_M)
            query, member = (block * BLOCK_M + local) // pack, first_head + local % pack
            exists = (query < q_len) & (member < group)
            local, query, head = local[exists], query[exists], kv_head * group + member[exists]
            s = scores[row, head, query, keys]
            m = s.amax(-1)
            p = torch.exp2(s - m[:, None]).nan_to_num(0.0)  # a row may see no key of a share
            acc[share * cut + n, local] = p @ v[row, kv_head, keys]
            stats[share * cut + n, :, local] = torch.stack((m, p.sum(-1)))
            untouched[row, head, query] = False
    merge.merge_shares(call, pack, order, splits, BLOCK_M, BLOCK_N, stats_start)(out, lse, workspace, q, q)
    assert bool(whole) == bool(untouched.any()) and out[untouched].isnan().all() and lse[untouched].isnan().all()
    torch.testing.assert_close(out[~untouched], want[~untouched])
    torch.testing.assert_close(lse[~untouched], want_lse[~untouched])


@pytest.mark.parametrize("given, programs", [(None, (11, 2, 1)), (2, (21, 2, 1))])
def test_rows_of_fixed_splits_share_a_program_unless_the_number_of_splits_is_given(given, programs, monkeypatch):
    """With a number of splits, the bits of a row must not depend on the batch, which determines the rows of a program."""
    monkeypatch.setattr(gpu, "num_sms", lambda device: 3)
    q = torch.randn(1, 6, 7, 32)
    kv = KV(*(torch.randn(1, 2, 300, 32) for _ in range(2)))
    plan = split_kv._prepare.__wrapped__((q, *kv.tensors, None, None, None), kv.form, Spec(), True, given)
    assert plan.launches.then.grid == programs
    out, lse = plan.run(q, kv, Spec(), None, None, q, True)
    want, want_lse = reference.attention(q, kv, Spec(), return_lse=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
