"""merge(): the combination of attention over parts of the keys equals attention over all of them."""

from itertools import pairwise

import pytest
import torch
from calls import attention
from hypothesis import given
from hypothesis import strategies as st
from test_kernels import RUNNABLE, TRITON_RUNS

from hf_fastattn import merge
from hf_fastattn.kernels.spec import call


def parts_of(q, k, v, cuts, kernel=attention):
    """[(out, lse)] over the keys between one cut and the next."""
    return [kernel(q, k[:, :, a:b], v[:, :, a:b], causal=False, return_lse=True) for a, b in pairwise(cuts)]


def inputs(device, kv_len=40, dtype=torch.float32, q_len=3):
    torch.manual_seed(kv_len)
    new = lambda heads, length: torch.randn(2, heads, length, 16, device=device, dtype=dtype)  # noqa: E731
    return new(4, q_len), new(2, kv_len), new(2, kv_len)


def nothing(like):
    return torch.zeros_like(like), torch.full(like.shape[:3], float("-inf"), device=like.device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@given(cuts=st.lists(st.integers(1, 39), unique=True, max_size=6).map(sorted), scale=st.sampled_from((1.0, 40.0)))
def test_any_parts_merge_to_the_whole(dtype, device, cuts, scale):
    q, k, v = inputs(device, dtype=dtype)
    q = q * scale  # at 40 one part has nearly all the weight
    out, lse = merge(*zip(*parts_of(q, k, v, [0, *cuts, 40]), strict=True))
    whole, whole_lse = attention(q, k, v, causal=False, return_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    # Rounding: sums of 16 products and of 40 exponentials in float32, the out of each part and the result in the dtype.
    products = (q.abs().float() @ k.abs().float().repeat_interleave(2, 1).transpose(2, 3)).max().item() / 4
    of_scores = (16 * products + 40) * torch.finfo(torch.float32).eps
    most = v.abs().max().item()
    torch.testing.assert_close(out, whole, rtol=0, atol=(2 * of_scores + 4 * torch.finfo(dtype).eps) * most)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=2 * of_scores)


@pytest.mark.parametrize("kernel", RUNNABLE, ids=lambda kernel: kernel.name)
def test_kernels_results_are_merged(kernel, device):
    dtype = torch.float16 if kernel.half_only else torch.float32
    q, k, v = (x.repeat(1, 1, 1, 4) for x in inputs(device, 50, dtype, q_len=max(3, kernel.min_q_len)))
    run = lambda *qkv, **options: call(kernel.launcher(), *qkv, **options)  # noqa: E731
    out, _ = merge(*zip(*parts_of(q, k, v, [0, 20, 50], run), strict=True))
    whole = attention(q, k, v, causal=False)
    torch.testing.assert_close(out, whole, rtol=0, atol=8 * torch.finfo(dtype).eps * v.abs().max().item())


def test_order_and_grouping_do_not_matter(device):
    a, b, c = parts_of(*inputs(device), [0, 7, 20, 40])
    at_once = merge(*zip(a, b, c, strict=True))
    left = merge(*zip(merge(*zip(a, b, strict=True)), c, strict=True))
    right = merge(*zip(a, merge(*zip(b, c, strict=True)), strict=True))
    turned = merge(*zip(c, a, b, strict=True))
    for other in (left, right, turned):
        torch.testing.assert_close(other, at_once)
    stacked = merge(torch.stack([a[0], b[0], c[0]]), torch.stack([a[1], b[1], c[1]]))
    assert torch.equal(stacked[0], at_once[0]) and torch.equal(stacked[1], at_once[1])


def test_a_part_that_sees_nothing_changes_nothing(device):
    out, lse = parts_of(*inputs(device), [0, 40])[0]
    empty, minus_inf = nothing(out)
    for parts in ([(out, lse)], [(out, lse), (empty, minus_inf)], [(empty, minus_inf), (out, lse), (empty, minus_inf)]):
        merged, merged_lse = merge(*zip(*parts, strict=True))
        assert torch.equal(merged, out) and torch.equal(merged_lse, lse)
    merged, merged_lse = merge([empty, empty], [minus_inf, minus_inf])
    assert torch.equal(merged, empty) and torch.equal(merged_lse, minus_inf)


def test_gradients_are_those_of_one_attention(device):
    q, k, v = (x.double() for x in inputs(device, 12))

    def dense(keys, values):  # kernels have no backward pass
        scores = q @ keys.repeat_interleave(2, 1).transpose(2, 3)
        return scores.softmax(-1) @ values.repeat_interleave(2, 1), scores.logsumexp(-1)

    def gradients(of):
        leaves = [x.clone().requires_grad_() for x in (k, v)]
        out, lse = of(*leaves)
        (out.sin().sum() + lse.sum()).backward()
        return [x.grad for x in leaves]

    def merged(keys, values):
        parts = [dense(keys[:, :, s], values[:, :, s]) for s in (slice(5), slice(5, 12))]
        parts = [(out.float(), lse.float()) for out, lse in parts]
        return merge(*zip(*parts, nothing(parts[0][0]), strict=True))

    for found, expected in zip(gradients(merged), gradients(dense), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    lse = torch.full((1, 1, 1), float("-inf"), requires_grad=True)
    out, merged_lse = merge([torch.zeros(1, 1, 1, 4)] * 2, [lse, lse])
    out.sum().backward()
    assert torch.equal(lse.grad, torch.zeros(1, 1, 1)) and merged_lse.isinf().all()


OUT, LSE = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)


UNFIT = [
    *(
        ([], [], ValueError, "at least one of each; got 0 outs and 0 lses"),
        ([OUT] * 2, [LSE], ValueError, "got 2 outs and 1 lses"),
    ),
    ([OUT, OUT[:, :, :2]], [LSE, LSE[:, :, :2]], ValueError, r"an out \(1, 2, 2, 4\).*the first out is \(1, 2, 3, 4\)"),
    ([OUT], [LSE[..., None]], ValueError, r"with an lse \(1, 2, 3, 1\)"),
    (OUT, LSE[:, 0], ValueError, r"outs of one shape.*got an out \(2, 3, 4\)"),
    ([OUT, OUT.half()], [LSE, LSE], TypeError, "in torch.float16 with .* the first out is in torch.float32"),
    ([OUT], [LSE.half()], TypeError, "lses in float32.*Cast"),
    ([OUT], [LSE.to("meta")], ValueError, "one device; got an out on cpu with an lse on meta"),
]


def test_parts_that_do_not_fit_are_refused():
    for outs, lses, error, sentence in UNFIT:
        with pytest.raises(error, match=sentence):
            merge(outs, lses)


@pytest.mark.parametrize("heads, head_dim", [(8, 16), (3, 24)])
@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
def test_rows_merge_what_their_group_sees(heads, head_dim, kernel, device):
    if kernel and not TRITON_RUNS:
        pytest.skip("kernels run on a GPU or interpreted")
    from hf_fastattn.kernels.decode import merge_shared as module

    torch.manual_seed(0)
    out, once = (torch.randn(rows, most, heads, head_dim, device=device).transpose(1, 2) for rows, most in ((5, 1), (3, 4)))
    lse, lse_once = torch.randn(5, heads, 1, device=device), torch.randn(3, heads, 4, device=device)
    once[2], lse_once[2] = 0, -torch.inf  # the empty group
    place = torch.tensor([0, 6, 3, 8, 11], device=device)
    theirs = [x.transpose(1, 2).flatten(0, 1)[place].unsqueeze(2) for x in (once, lse_once)]
    expected = merge([out, theirs[0]], [lse, theirs[1]])[0]
    before = out.clone()
    run = module.merge_shared if kernel else module._merge_torch
    assert torch.allclose(found := run(out, lse, once, lse_once, place), expected, rtol=1e-6, atol=1e-6)
    assert (found is out) == kernel and torch.equal(found[3:], before[3:])
