"""K and V in pages: every kernel that reads or appends them, against the oracle. tests/test_forms.py has further shapes.

With TRITON_INTERPRET=1 the kernels run interpreted, otherwise on a CPU the equivalents in torch.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import oracle
import pytest
import test_kernels
import tolerance
import torch
from cases import slow_unless
from conftest import DEVICE

from hf_fastattn import registry
from hf_fastattn.caches.paged import PagedStorage
from hf_fastattn.kernels import paged, reference
from hf_fastattn.kernels.attention import lean, plan, prefill, split_kv
from hf_fastattn.kernels.decode.append import append
from hf_fastattn.kernels.host import tables
from hf_fastattn.kernels.spans import CAUSAL, FLAGS, HOLES, KV_STOP, PADDING, num_words, width_of
from hf_fastattn.kernels.spec import KV, Spec, call

runs = pytest.mark.skipif(not test_kernels.TRITON_RUNS, reason="launches kernels")
KERNELS = [kernel for kernel in test_kernels.RUNNABLE if not kernel.aligned_only]


@dataclass(frozen=True)
class Case:
    """A ragged batch: the last q_len tokens of each row are the queries."""

    size: int  # tokens of a page
    q_len: int
    lengths: tuple[int, ...] = (70, 37, 0, 64)
    group: int = 2
    options: dict = field(default_factory=dict, hash=False)
    logits: bool = False
    start: int = 0  # the first live slot of each row
    holes: bool = False
    dim: int = 32

    @property
    def id(self) -> str:
        shown = "".join(f"-{name}{value}" for name, value in self.options.items())
        marks = "-logits" * self.logits + "-holes" * self.holes + f"-from{self.start}" * (self.start > 0)
        return f"p{self.size}-q{self.q_len}-b{len(self.lengths)}-d{self.dim}{shown}{marks}"


def spans_of(lengths, q_len: int, window=None, start: int = 0, holes: bool = False) -> torch.Tensor:
    stop = torch.as_tensor(lengths, dtype=torch.int32)
    none = torch.zeros_like(stop)
    words = [stop - q_len, none + start, stop, none + width_of(window), none + CAUSAL + HOLES * holes, none]
    if holes:
        words += torch.randint(-(1 << 31), 1 << 31, (num_words(max(lengths)), len(lengths))).int()
    return torch.stack(words, -1).view(-1, 1, 1, len(words))


def pool_of(case: Case, k, v, device) -> KV:
    """Permuted pages, NaN where no token is; the first page of row 1 is that of row 0 where their tokens are equal."""
    batch, heads, most, _ = k.shape
    pages = -(-most // case.size) + 1
    table = torch.randperm(batch * pages + 3)[: batch * pages].view(batch, pages).int()
    kv = paged.paged(
        *(
            torch.full((batch * pages + 3, heads, case.size, x.shape[3]), float("nan"), dtype=x.dtype, device=device)
            for x in (k, v)
        ),
        table.to(device),
    )
    slots = torch.arange(most, device=device).expand(batch, -1)
    is_live = (slots < torch.tensor(case.lengths, device=device)[:, None]) & (slots >= case.start)
    kv.form.pack(kv, k, v, slots.where(is_live, -1))
    window, first = case.options.get("window"), case.options.get("sinks", 0)
    for row, length in enumerate(case.lengths):
        kv.pages[row, -(-length // case.size) :] = -1
        if window is not None:  # pages that the window has passed are free, except those of the first tokens
            gone = -(-(case.start + first) // case.size)
            kv.pages[row, gone : max(length - case.q_len - window + 1, 0) // case.size] = -1
    if len(case.lengths) > 1 and min(case.lengths[:2]) >= case.size and kv.pages[0, 0] >= 0:
        kv.pages[1, 0] = kv.pages[0, 0]
    return kv


CASES = [
    Case(16, 1),
    Case(64, 1, options={"window": 20}),
    Case(256, 1, options={"softcap": 3.0}, logits=True),
    Case(16, 5, options={"window": 20, "sinks": 4}),
    Case(64, 5, (100, 70, 3), logits=True),
    Case(16, 33, (70, 60, 33), group=1, options={"window": 9}),
    Case(64, 33, (0, 97), group=1, options={"softcap": 3.0}),
    Case(256, 33, (270,), group=1, options={"window": 40}),
    Case(32, 1, tuple(range(200)), options={"window": 24}),
    *(
        Case(16, q, (130, 77), group=1, options={"window": 30, "sinks": 4}, start=start)
        for q, start in ((1, 5), (5, 21), (40, 5))
    ),
    Case(16, 1, (130, 77), options={"window": 30, "sinks": 4}, start=21, dim=288),
    *(Case(64, q_len, (250, 77), start=45, dim=288) for q_len in (1, 5)),
    *(Case(16, q, (130, 77), group=1, options={"window": 30}, start=start, holes=True) for q, start in ((1, 5), (40, 21))),
    Case(16, 1, (130, 77), options={"window": 30, "sinks": 20}, start=5, holes=True),
]


@pytest.mark.parametrize("case", slow_unless(lambda case: len(case.lengths) < 99, CASES), ids=lambda case: case.id)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_pages(kernel, case, device, monkeypatch):
    assert_right(kernel, case, device, monkeypatch)


@pytest.mark.skipif(not test_kernels.INTERPRETED, reason="the tables of a GPU have such tiles")
@pytest.mark.parametrize(
    "case",
    [
        Case(16, 1, (70, 37, 0, 64, 130)),
        Case(32, 1, (300, 65), options={"window": 90}, logits=True),
        *(Case(size, 5, (130, 70, 3), options={"window": 70, "sinks": 20}) for size in (16, 64)),
    ],
    ids=lambda case: case.id,
)
@pytest.mark.parametrize("name", ["lean", "split_kv"])
def test_tiles_of_several_pages(name, case, device, monkeypatch):
    monkeypatch.setattr(tables, "_launch", lambda *_: tables.Config(16, 64, 4, 1, 2))
    assert_right(next(kernel for kernel in KERNELS if kernel.name == name), case, device, monkeypatch)


def assert_right(kernel, case, device, monkeypatch):
    torch.manual_seed(0)
    heads, dim, value_dim, batch = (1, 16, 16, 200) if len(case.lengths) > 99 else (2, case.dim, 24, len(case.lengths))
    q = torch.randn(batch, heads * case.group, case.q_len, dim, device=device)
    k, v = (torch.randn(batch, heads, max(case.lengths), width, device=device) for width in (dim, value_dim))
    if batch > 1:
        k[1, :, : case.size], v[1, :, : case.size] = k[0, :, : case.size], v[0, :, : case.size]
    kv = pool_of(case, k, v, device)
    spans = spans_of(case.lengths, case.q_len, case.options.get("window"), case.start, case.holes).to(device)
    logits = torch.randn(q.shape[1], device=device) if case.logits else None
    if kernel.name == "lean":
        test_kernels.without_fixed_splits(monkeypatch)
    with test_kernels.counted_launches(kernel) as launched:
        found = kernel.launcher()(q, kv, Spec(**case.options), spans, sink_logits=logits, return_lse=True)
    assert set(kernel.launches[:1]) <= set(launched)
    seen = oracle.visible_from_spans(spans, case.q_len, k.shape[2], causal=True, sinks=case.options.get("sinks", 0))
    options = {"softcap": case.options.get("softcap"), "sink_logits": logits}
    expected = oracle.attention(q, k, v, seen, **options)
    tolerance.assert_attention(found, expected, q, k, v, spans, seen, {**case.options, **options}, f"{kernel.name} {case.id}")


@runs
@pytest.mark.parametrize("window", [None, 30])
def test_dropout_over_pages(window, device):
    case = Case(16, 7, (130, 77), options={} if window is None else {"window": window})
    torch.manual_seed(0)
    q, seed = torch.randn(2, 4, 7, 32, device=device), torch.tensor([5], device=device)
    k, v = torch.randn(2, 2, 2, 130, 32, device=device)
    kv, spans = pool_of(case, k, v, device), spans_of(case.lengths, 7, window).to(device)
    k[1, :, :16], v[1, :, :16] = k[0, :, :16], v[0, :, :16]  # of the page that both have
    spec = Spec(window=window, dropout=0.3)
    found, want = (prefill.prefill(q, each, spec, spans, seed=seed) for each in (kv, KV(k, v)))
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


@runs
@pytest.mark.parametrize("name", ["lean", "split_kv", "prefill"])
@pytest.mark.parametrize("start, window", [(0, 30), (5, None)])
def test_padding_over_pages_is_finite(name, start, window, device):
    """Queries that are padding alone, in several blocks of rows."""
    case, live, q_len = Case(16, 10, (100,), options={"window": 200}, start=start), 10, 40
    torch.manual_seed(0)
    q, (k, v) = torch.randn(1, 2, q_len, 32, device=device), torch.randn(2, 1, 2, 130, 32, device=device)
    kv, spans = pool_of(case, k, v, device), spans_of((130,), q_len, window, start).to(device)
    spans[..., KV_STOP], spans[..., FLAGS] = 100, CAUSAL + ((q_len - live) << PADDING)
    call, config = plan.Call.of((q, *kv.tensors, spans, None, None), kv.form, Spec(), False), tables.Config(16, 16, 4, 1, 2)
    make = {"lean": lean.stream_k, "split_kv": lambda *args: split_kv.fixed_splits(*args, 3)}
    if name == "prefill":
        found = prefill.prefill(q, kv, Spec(), spans)
    else:
        found = make[name](call, config).run(q, kv, Spec(), spans, None, q, False)
    seen = oracle.visible_from_spans(spans, q_len, 130, causal=True)[:, :live]
    expected = torch.as_tensor(oracle.attention(q[:, :, :live], k, v, seen)[0])
    torch.testing.assert_close(found[:, :, :live].double().cpu(), expected.double().cpu(), atol=2e-5, rtol=2e-5)
    assert found.isfinite().all()


@pytest.mark.skipif(test_kernels.HOPPER not in test_kernels.RUNNABLE, reason="needs a Hopper GPU")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("size, dim", [*((size, 128) for size in paged.PAGE_SIZES), (64, 64), (64, 96), (16, 256)])
def test_the_hopper_kernel_reads_pages(size, dim, window, device):
    """NaN is where no token is, and pages that the window has passed are -1."""
    torch.manual_seed(0)
    kernel, case = test_kernels.HOPPER, Case(size, 130, (700, 300, 130), options={} if window is None else {"window": window})
    q = torch.randn(3, 4, 130, dim, device=device, dtype=torch.float16)
    k, v = torch.randn(2, 3, 2, 700, dim, device=device, dtype=torch.float16)
    k[1, :, :size], v[1, :, :size] = k[0, :, :size], v[0, :, :size]
    kv, spans = pool_of(case, k, v, device), spans_of(case.lengths, 130, window).to(device)
    with test_kernels.counted_launches(kernel) as launched:
        found = kernel.launcher()(q, kv, Spec(**case.options), spans, return_lse=True)
    assert kernel.launches[0] in launched
    seen = oracle.visible_from_spans(spans, 130, 700, causal=True)
    expected = oracle.attention(q, k, v, seen)
    tolerance.assert_attention(found, expected, q, k, v, spans, seen, dict(case.options), f"pages of {size}, head_dim {dim}")


@pytest.mark.parametrize("name, logits", [("lean", True), ("split_kv", False)])
def test_tokens_that_rows_share_are_read_once(name, logits, device):
    """Two groups, of which one is full, a row that shares tokens and is in none, and one that only fills the batch."""
    torch.manual_seed(0)
    lengths, heads, dim, most = [35, 33, 50, 17, 20, 40, 1, 38], 4, 32, 3
    k, v = (torch.randn(len(lengths), 2, 64, width, device=device) for width in (dim, 24))
    groups = [([5, 0, 1], 32), ([4, 3], 16)]
    for rows, tokens in [*groups, ([0, 7], 16)]:
        for x in (k, v):
            x[rows, :, :tokens] = x[rows[0], :, :tokens].clone()
    table = torch.randperm(len(lengths) * 4).view(-1, 4).int()
    for rows, tokens in [*groups, ([0, 7], 16)]:
        table[rows, : tokens // 16] = table[rows[0], : tokens // 16].clone()
    pools = [torch.full((len(lengths) * 4, 2, 16, x.shape[3]), float("nan"), device=device) for x in (k, v)]
    kv = paged.paged(*pools, table.to(device))
    slots = torch.arange(64, device=device).expand(len(lengths), -1)
    kv.form.pack(kv, k, v, slots.where(slots < torch.tensor(lengths, device=device)[:, None], -1))
    storage = PagedStorage([None], [2], 16, len(lengths), 4, torch.device(device))
    storage.bucket = len(lengths)
    storage.lengths[:] = torch.tensor(lengths) - 1
    storage.share(groups, most)
    rows = storage.present()
    sizes = (len(lengths), 1, 64)
    content = rows.mask((True, None), sizes, (name, "A model")).content
    q, sinks = torch.randn(len(lengths), heads, 1, dim, device=device), torch.randn(heads, device=device) if logits else None
    calls, run = [], registry.get(name).attend
    found = rows.attend(
        lambda q, kv, spec, spans, **options: calls.append(q.shape) or run(q, kv, spec, spans, **options),
        *(q, kv, Spec(softcap=3.0), content),
        sink_logits=sinks,
    )
    assert calls == [(8, heads, 1, dim), (3, heads, most, dim)]
    seen = oracle.visible_from_spans(content, 1, 64)
    options = {"softcap": 3.0, "sink_logits": sinks}
    expected = oracle.attention(q, k, v, seen, **options)[0]
    torch.testing.assert_close(found.double().cpu(), torch.as_tensor(expected).double().cpu(), atol=2e-5, rtol=2e-5)


@pytest.mark.skipif(DEVICE != "cpu", reason="memory that is not touched takes no room on a CPU")
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_pages_beyond_2_31_elements(kernel):
    torch.manual_seed(0)
    shape = ((1 << 31) // (2 * 16 * 64) + 2, 2, 16, 64)
    memory = mmap.mmap(-1, 4 * (1 << 30) + (1 << 14), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    pool = torch.frombuffer(memory, dtype=torch.float16)[: shape[0] * 2 * 16 * 64].view(shape)
    last = shape[0] - 1
    kv = paged.paged(pool, pool, torch.tensor([[last, last - 1]], dtype=torch.int32))
    assert last * pool.stride(0) >= 1 << 31
    q, k = torch.randn(1, 2, 1, 64, dtype=torch.float16), torch.randn(1, 2, 20, 64, dtype=torch.float16)
    append(kv, k, k, torch.tensor([0]))
    torch.testing.assert_close(pool[last], k[0, :, :16])
    spans = spans_of((20,), 1)
    found = kernel.launcher()(q, kv, Spec(), spans)
    torch.testing.assert_close(found, call(reference.attention, q, k, k, spans), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("size", paged.PAGE_SIZES)
def test_tokens_of_packed_rows_are_appended_to_the_pool(size, device):
    """By their slots in the pool, to the pages that each row's own table gives; rows without pages write nothing."""
    k, v = (torch.randn(1, 2, 7, dim, device=device) for dim in (24, 16))
    pools = [torch.zeros(5, 2, size, dim, device=device) for dim in (24, 16)]
    tables = torch.tensor([[3, 1], [4, -1]], dtype=torch.int32, device=device)
    by_row = paged.paged(*(pool.clone() for pool in pools), tables)
    append(by_row, *(x[:, :, :4].expand(2, -1, -1, -1) for x in (k, v)), torch.tensor([size - 2, size - 2], device=device))
    whole = paged.paged(*pools, torch.arange(5, dtype=torch.int32, device=device)[None])
    first, second = 3 * size + size - 2, 4 * size + size - 2
    slots = torch.tensor([[first, first + 1, size, size + 1, second, second + 1, -1]], device=device)
    append(whole, *(torch.cat((x[:, :, :4], x[:, :, :2], x[:, :, 6:]), 2) for x in (k, v)), slots)
    assert torch.equal(whole.k, by_row.k) and torch.equal(whole.v, by_row.v)
    assert whole.k.any(-1).sum() == 2 * 6


def test_gathered_pages_are_plain(device):
    k, v = (torch.randn(9, 2, 16, dim, device=device) for dim in (24, 16))
    kv = paged.paged(k, v, torch.tensor([[3, 8, -1], [8, 0, 5]], dtype=torch.int32, device=device))
    for tokens, slots in ((None, 48), (32, 32), (17, 32), (16, 16)):
        found = paged.gather(kv, tokens)
        assert found.form.unpack is None and found.sizes == (2, 2, slots, 24, 16)
        assert torch.equal(found.k[0, :, :16], k[3]) and torch.equal(found.v[1, :, :16], v[8])
        if slots > 16:
            assert torch.equal(found.v[1, :, 16:32], v[0])
    with pytest.raises(ValueError, match="at least 1 and at most 48, the slots of a row; got 49"):
        paged.gather(kv, 49)


def test_what_is_no_page_is_refused(device):
    k, table = torch.zeros(4, 2, 64, 32, device=device), torch.zeros(2, 3, dtype=torch.int32, device=device)
    cases = [
        ((k[:, :, :48], k[:, :, :48], table), ValueError, r"P in \(16, 32, 64, 128, 256\); got \(4, 2, 48, 32\)"),
        ((k[0], k[0], table), ValueError, r"got \(2, 64, 32\)"),
        ((k, k[:3], table), ValueError, "one shape but for head_dim"),
        ((k, k.half(), table), ValueError, "one dtype"),
        ((k, k, table.long()), TypeError, "int64. Call .int"),
        ((k, k, table[0]), ValueError, r"got \(3,\)"),
        ((k, k, table[:, :2]), ValueError, "Call .contiguous"),
        ((k, k, table[:, :0]), ValueError, r"at least \(1, 1\)"),
        ((k.mT.contiguous().mT, k, table), ValueError, r"K needs stride\(-1\) == 1"),
    ]
    for tensors, error, sentence in cases:
        with pytest.raises(error, match=sentence):
            paged.paged(*tensors)
    kv, slot = paged.paged(k, k, table), torch.zeros(1, dtype=torch.int64, device=device)
    calls = [kernel.launcher() for kernel in KERNELS] + [registry.get(name).attend for name in ("lean", "fa2", "split_kv")]
    calls.append(lambda q, kv: append(kv, q, q, slot))
    bad = [
        (torch.zeros(3, 2, 1, 32, device=device), kv, ValueError, "has 2 rows, and the batch 3"),
        (torch.zeros(2, 2, 1, 32, device=device).half(), kv, TypeError, "the dtype of the pages; got torch.float16"),
        (torch.zeros(2, 2, 1, 32, device=device), kv._replace(form=paged.FORMS[16]), ValueError, "for 'pages of 16'"),
        (torch.zeros(2, 2, 1, 32, device=device), kv._replace(pages=None), ValueError, "need a table"),
    ]
    for attend in calls:
        for q, given, error, sentence in bad:
            with pytest.raises(error, match=sentence):
                attend(q, given)
