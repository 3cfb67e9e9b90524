"""Every kernel on every case that it supports, compared with the fp64 oracle; spans; bad input.

On a GPU the real kernels run, on a CPU the PyTorch reference, and with TRITON_INTERPRET=1 on a CPU the interpreted kernels.
A result only counts if the kernel was launched, and if its memory was NaN before.
"""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock
from unittest.mock import call as called

import numpy as np
import oracle
import pytest
import tolerance
import torch
from calls import Launched
from cases import CASES, DTYPES, ON_GPU, Case, cover, make, slow_unless
from conftest import DEVICE, INTERPRETED
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_fastattn import kernels, registry
from hf_fastattn.kernels import checks, reference, spans
from hf_fastattn.kernels.attention import schedule, split_kv
from hf_fastattn.kernels.decode import build_spans as build_spans_kernel
from hf_fastattn.kernels.host import gpu, launch, tables
from hf_fastattn.kernels.spec import KV, Spec, call


@dataclass(frozen=True)
class Kernel:
    """A launcher and the Triton kernels that one call of it launches once each. A new kernel is one row in KERNELS."""

    name: str
    launches: tuple[str, ...] = ()
    function: str | None = None  # the name of the launcher, if it differs from the module's
    max_rows: int | None = None  # query rows per KV head
    min_q_len: int = 1
    head_dims: tuple[int, ...] | None = None
    half_only: bool = False
    no_first_tokens: bool = False
    aligned_only: bool = False
    arch: tuple[int, int] | None = None  # the only supported compute capability
    other: tuple[str, ...] = ()  # the kernels that it may launch instead

    @property
    def module(self):
        return importlib.import_module(f"hf_fastattn.kernels.{'attention.' * bool(self.launches)}{self.name}")

    def launcher(self):
        return getattr(self.module, self.function or self.name)

    def runs_here(self) -> bool:
        if ON_GPU:
            return self.arch in (None, torch.cuda.get_device_capability())
        # The reference runs in the process without the interpreter.
        return self.arch is None and bool(self.launches) == INTERPRETED

    def fit(self, case: Case) -> Case:
        """The case itself if this kernel supports it, else a similar case that it supports."""
        if self.max_rows and case.q_len * (case.num_heads // case.num_kv_heads) > self.max_rows:
            case = replace(case, q_len=1)
        if case.q_len < self.min_q_len:
            case = replace(case, q_len=case.q_len + self.min_q_len - 1)
        if self.head_dims and case.head_dim not in self.head_dims:
            case = replace(case, head_dim=min((d for d in self.head_dims if d > case.head_dim), default=self.head_dims[-1]))
        if self.head_dims and case.value_dim not in self.head_dims:
            case = replace(case, value_dim=None)
        if self.half_only and case.dtype == "fp32":
            case = replace(case, dtype="fp16")
        if self.no_first_tokens:
            case = replace(case, first_tokens=0, turned=False)
        if self.aligned_only and case.layout in ("unaligned", "one_row_for_all"):
            case = replace(case, layout="plain")
        return case


REFERENCE = Kernel("reference", function="attention")
PREFILL = Kernel("prefill", ("prefill_kernel",))
_of_hopper = {"min_q_len": 65, "head_dims": (*range(8, 257, 8),), "half_only": True, "no_first_tokens": True}
_of_hopper |= {"aligned_only": True, "arch": (9, 0)}
HOPPER = Kernel("prefill_hopper", ("prefill_hopper_kernel",), "prefill", **_of_hopper)
SPLIT_KV = Kernel("split_kv", ("split_kv_kernel", "combine_kernel"), max_rows=tables.MAX_DECODE_ROWS)
LEAN = Kernel("lean", ("lean_kernel", "lean_merge_kernel"), other=SPLIT_KV.launches)
KERNELS = (REFERENCE, PREFILL, HOPPER, SPLIT_KV, LEAN)
RUNNABLE = tuple(k for k in KERNELS if k.runs_here())
TRITON_RUNS = LEAN in RUNNABLE


def here(*values):
    """Parameters of a test that launches Triton kernels; none, so one skip, if only the reference runs."""
    return values if TRITON_RUNS else ()


with_lean = pytest.mark.parametrize("kernel", here(LEAN), ids=lambda k: k.name)


def never(*args) -> bool:
    """Replaces schedule.shares_within_heads, so that lean's own kernels run."""
    return False


def without_fixed_splits(patch) -> None:
    """Make lean run its own kernels."""
    patch.setattr(schedule, "shares_within_heads", never)
    patch.setattr(schedule, "brief", lambda *args: None)


@contextmanager
def counted_launches(kernel: Kernel):
    counter = Counter()

    def count(launched, grid, *args, **kwargs):
        counter[launched.__name__] += 1
        return launched[grid](*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if hasattr(kernel.module, "_prepare"):  # cached launches are not counted
            patch.setattr(kernel.module, "_prepare", kernel.module._prepare.__wrapped__)
        for name in kernel.launches + kernel.other:
            module = kernel.module if hasattr(kernel.module, name) else split_kv
            patch.setattr(module, name, Launched(getattr(module, name), count))
        yield counter


def run(kernel: Kernel, q, k, v, span, options: dict):
    """(out, lse or None) of one call; asserts that the kernel was launched."""
    with counted_launches(kernel) as launched:
        result = call(kernel.launcher(), q, k, v, span, **options)
    allowed = [kernel.launches]
    if kernel in (SPLIT_KV, LEAN) and schedule.shares_within_heads is not never:
        allowed += [SPLIT_KV.launches, SPLIT_KV.launches[:1]]  # one launch if there is nothing to combine
    assert launched in map(Counter, allowed)
    return result if options.get("return_lse") else (result, None)


def launches(kernel: Kernel, case: Case, device) -> tuple[str, ...]:
    """The kernels that a call launches, each once."""
    x = make(case, device)
    with counted_launches(kernel) as launched:
        call(kernel.launcher(), x.q, x.k, x.v, x.spans, **x.options)
    assert set(launched.values()) == {1}
    return tuple(launched)


def check_case(kernel: Kernel, case: Case, device) -> None:
    x = make(case, device)
    assert (x.spans is not None) == case.has_spans
    result = run(kernel, x.q, x.k, x.v, x.spans, x.options)
    of_sinks = {"q_sinks": x.q_sinks, "is_sink": x.is_sink}
    expected = oracle.attention(x.q, x.k, x.v, x.seen, **_plain(x.options), **of_sinks)
    what = f"{kernel.name} on {case.id}"
    tolerance.assert_attention(result, expected, x.q, x.k, x.v, x.spans, x.seen, x.options, what, **of_sinks)


def _plain(options: dict) -> dict:
    return {name: options.get(name) for name in ("scale", "softcap", "sink_logits")}


RUNS = [(k, c) for c in CASES for k in RUNNABLE if k.fit(c) == c]
# Few cases have shapes of the Hopper kernel; it runs a similar case for every case that is not decode.
RUNS += [(HOPPER, c) for c in dict.fromkeys(HOPPER.fit(c) for c in CASES if c.q_len > 1 and HOPPER in RUNNABLE) if c not in CASES]
QUICK = {(k, c) for k in RUNNABLE for c in cover(c for kernel, c in RUNS if kernel == k)} if INTERPRETED else RUNS


@pytest.mark.parametrize("kernel, case", slow_unless(QUICK.__contains__, RUNS), ids=lambda x: getattr(x, "id", None) or x.name)
def test_case(kernel, case, device):
    check_case(kernel, case, device)


def test_every_kernel_of_every_backend_is_a_row_and_package_memory_is_nan_filled(device):
    used = [k for b in map(registry.get, registry.names()) for k in (b.prefill, b.decode) if hasattr(k, "where")]
    assert {k.name for k in used} | {k.hopper for k in used if k.hopper} == {k.name for k in KERNELS if k.launches}
    out, lse = checks.empty_outputs(torch.zeros(1, 2, 3, 16, device=device), 24, True)
    assert out.isnan().all() and lse.isnan().all()


# Properties: any shape, strides, length, padding.


@st.composite
def any_case(draw) -> Case:
    most = 700 if ON_GPU else 50  # interpreted programs take milliseconds each
    group = draw(st.sampled_from((1, 2, 3, 4, 7, 8)))
    kv_heads = draw(st.integers(1, 3 if ON_GPU else 2))
    batch = draw(st.integers(1, 3 if ON_GPU else 2))
    kv_len = draw(st.integers(1, most))
    few = st.integers(1, max(1, min(kv_len, (64 if ON_GPU else 16) // group)))
    q_len = draw(st.one_of(st.just(1), few, st.integers(1, kv_len)))
    kv_offset = draw(st.sampled_from((0, 0, 0, 1, 45)))
    end = kv_offset + kv_len
    point = st.integers(0, end)
    row = st.tuples(point, point, st.sampled_from((0.0, 0.0, 0.2, 0.9))).map(lambda r: (min(r[:2]), max(r[:2]), r[2]))
    q_offset = draw(st.one_of(st.none(), st.integers(kv_offset, max(kv_offset, end - q_len))))
    sizes = {"q_len": q_len, "kv_len": kv_len, "batch": batch, "num_heads": group * kv_heads, "num_kv_heads": kv_heads}
    return Case(
        **sizes,
        head_dim=draw(st.sampled_from((16, 32, 48, 64, 80, 96, 112, 128, 256, 320))),
        value_dim=draw(st.sampled_from((None, None, None, 16, 40, 64, 128, 264))),
        dtype=draw(st.sampled_from(("fp16", "fp32") if not ON_GPU else ("fp16", "bf16", "fp32"))),
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.none(), st.integers(1, kv_len + 5))),
        softcap=draw(st.sampled_from((None, None, 5.0, 50.0))),
        sinks=draw(st.booleans()),
        first_tokens=draw(st.sampled_from((0, 0, 1, 4, 20))),
        turned=draw(st.booleans()),
        lse=draw(st.booleans()),
        layout=draw(st.sampled_from(("plain", "token_major", "slices", "unaligned", "batch_gap", "one_row_for_all"))),
        spans=draw(st.booleans()),
        rows=draw(st.one_of(st.none(), st.tuples(*[row] * batch))),
        mask_len=None if draw(st.booleans()) else draw(point),
        offset_on_device=draw(st.booleans()),
        say_twice=draw(st.booleans()),
        **{"q_offset": q_offset, "kv_offset": kv_offset},
    )


@pytest.mark.parametrize("kernel", slow_unless(REFERENCE.__eq__, RUNNABLE), ids=lambda k: k.name)
def test_any_case(kernel, device):
    @given(any_case())
    def check(case):
        check_case(kernel, kernel.fit(case), device)

    check()


@st.composite
def any_spans(draw) -> tuple[Case, list[list[int]]]:
    """Spans that no mask would give: every integer of every row is drawn independently."""
    kv_len = draw(st.integers(1, 500 if ON_GPU else 50))
    q_len = draw(st.integers(1, 8 if ON_GPU else 4))
    batch = draw(st.integers(1, 4 if ON_GPU else 3))
    case = Case(q_len=q_len, kv_len=kv_len, batch=batch, num_heads=4 if ON_GPU else 2, num_kv_heads=2, head_dim=16)
    words = draw(st.booleans()) * spans.num_words(kv_len)
    around = st.integers(-3, kv_len + 3)
    rows = []
    for _ in range(batch):
        ints = [draw(around), draw(around), draw(around)]
        ints += [draw(st.one_of(st.just(spans.NO_WINDOW), st.integers(1, kv_len)))]
        ints += [draw(st.sampled_from((0, spans.CAUSAL))) | (draw(st.sampled_from((0, spans.HOLES))) if words else 0)]
        ints += [draw(st.integers(0, 1 << 30))]
        rows.append(ints + [draw(st.integers(-(1 << 31), (1 << 31) - 1)) for _ in range(words)])
    return case, rows


@pytest.mark.parametrize("kernel", slow_unless(LEAN.__ne__, RUNNABLE), ids=lambda k: k.name)
def test_any_spans(kernel, device):
    @given(any_spans(), st.booleans(), st.one_of(st.none(), st.integers(1, 30)), st.sampled_from((0, 0, 3, 20)), st.booleans())
    def check(drawn, causal, window, sinks, interleaved):
        case, rows = drawn
        case, sinks = kernel.fit(case), 0 if kernel.no_first_tokens else sinks
        x = make(replace(case, causal=False), device)
        span = torch.tensor(rows, dtype=torch.int32, device=device)[:, None, None]
        seen = oracle.visible_from_spans(span, case.q_len, case.kv_len, causal=causal, window=window, sinks=sinks)
        options = {"causal": causal, "window": window, "return_lse": True, "sinks": sinks}
        of_sinks = {}
        if sinks:
            rotation = {"inv_freq": torch.tensor([1.0, 0.3, 1e-3, 1e-5], device=device), "interleaved": interleaved}
            options |= rotation
            ints = np.array([row[: spans.WORDS] for row in rows])
            first = np.maximum(ints[:, spans.KV_START], 0)[:, None]
            tokens = (ints[:, spans.Q_START] + ints[:, spans.DROPPED])[:, None] - first + np.arange(case.q_len)
            of_sinks["q_sinks"] = oracle.rerotated(x.q, tokens, window=window, sinks=sinks, **rotation)
            slots = np.arange(case.kv_len)
            of_sinks["is_sink"] = (slots >= first) & (slots < first + sinks)
        result = run(kernel, x.q, x.k, x.v, span, options)
        expected = oracle.attention(x.q, x.k, x.v, seen, **of_sinks)
        what = f"{kernel.name} on {rows}"
        tolerance.assert_attention(result, expected, x.q, x.k, x.v, span, seen, options, what, **of_sinks)

    check()


@pytest.mark.parametrize("kernel", RUNNABLE, ids=lambda k: k.name)
def test_the_layout_of_models_sink_logits_of_minus_infinity_and_grad_without_its_mode(kernel, device):
    """Out is stored in the layout of models, such logits are no sinks, and grad is refused only while it is enabled."""
    x = make(kernel.fit(Case(q_len=3, kv_len=40, batch=2, rows=((0, 40, 0.0), (0, 0, 0.0)))), device)
    off = torch.full((4,), float("-inf"), device=device)
    with_off, _ = run(kernel, x.q, x.k, x.v, x.spans, {**x.options, "sink_logits": off})
    without, _ = run(kernel, x.q, x.k, x.v, x.spans, x.options)
    assert torch.equal(with_off, without) and without.transpose(1, 2).is_contiguous()
    x.q.requires_grad_()
    with torch.no_grad():
        out, _ = run(kernel, x.q, x.k, x.v, x.spans, x.options)
    assert torch.equal(out, without)


# lean: schedules.

SCHEDULE_CASES = [
    Case(q_len=1, kv_len=4000 if ON_GPU else 300, batch=1, num_heads=4, num_kv_heads=1, head_dim=32),
    Case(q_len=2, kv_len=1000 if ON_GPU else 150, batch=3, head_dim=32, rows=((0, 150, 0.0), (120, 150, 0.0), (0, 0, 0.0))),
    Case(q_len=1, kv_len=200, q_offset=20, head_dim=32),
]


def force_programs(patch, programs: int) -> None:
    """Make lean divide one linearised tile range among `programs` programs, if the buffer has at least as many tiles."""
    without_fixed_splits(patch)
    config = tables.decode
    patch.setattr(tables, "decode", lambda *args: replace(config(*args), programs_per_sm=1, MIN_TILES=1))
    patch.setattr(gpu, "num_sms", lambda device: programs)


def has_fixed_splits(case: Case) -> bool:
    """Whether `lean` runs fixed splits here, as it may for few keys, and for decode rows in a batch that the host knows to be
    uniform."""
    rows, heads = case.q_len * case.num_heads // case.num_kv_heads, case.batch * case.num_kv_heads
    if ON_GPU and rows > min(block for block, *_ in schedule.BRIEF[128]):
        return True
    if rows > tables.MAX_DECODE_ROWS or (case.batch > 1 and case.has_spans):
        return False
    visible = case.kv_len if case.window is None or case.has_spans else min(case.kv_len, case.window + case.q_len - 1)
    config = tables.decode(torch.device(DEVICE), DTYPES[case.dtype], max(case.head_dim, case.value_dim or 0), rows, heads)
    return schedule.shares_within_heads(torch.device(DEVICE), config, heads, visible)


FIXED = [case for case in here(*CASES) if has_fixed_splits(case)]


@with_lean
@pytest.mark.parametrize("case", slow_unless(FIXED[::6].__contains__, FIXED), ids=lambda c: c.id)
def test_lean_schedules_on_the_device_as_on_the_host(kernel, case, device, monkeypatch):
    without_fixed_splits(monkeypatch)
    check_case(kernel, case, device)


BLOCK_CASES = [
    Case(q_len=1, kv_len=203, batch=2, num_heads=71, num_kv_heads=1, head_dim=32),
    Case(q_len=3, kv_len=100, batch=2, num_heads=28, num_kv_heads=2, head_dim=32, lse=True),
    Case(q_len=5, kv_len=203, batch=1, num_heads=14, num_kv_heads=2, head_dim=48, first_tokens=4, turned=True, window=60),
    Case(q_len=7, kv_len=120, batch=1, num_heads=10, num_kv_heads=1, head_dim=32, first_tokens=4, turned=True, window=60),
    Case(q_len=9, kv_len=77, num_heads=10, head_dim=32, rows=((3, 77, 0.2), (0, 0, 0.0)), sinks=True, softcap=20.0, window=40),
    # Short prompts: the first blocks have fewer tiles than splits, and none where the row is padding.
    Case(q_len=40, kv_len=40, head_dim=32, rows=((25, 40, 0.0), (0, 15, 0.3))),
    Case(q_len=33, kv_len=33, head_dim=32, first_tokens=4, turned=True, window=8, rows=((9, 33, 0.0), (0, 33, 0.0))),
]


TEAM_CASES = [
    Case(q_len=9, kv_len=103, batch=2, num_heads=8, num_kv_heads=2, head_dim=32, lse=True),
    Case(q_len=11, kv_len=90, batch=2, num_heads=3, num_kv_heads=1, head_dim=32, window=40, rows=((0, 90, 0.1), (30, 80, 0.0))),
    Case(q_len=20, kv_len=90, batch=1, num_heads=2, num_kv_heads=2, head_dim=48, first_tokens=4, turned=True, window=30),
    Case(q_len=40, kv_len=40, num_heads=2, num_kv_heads=1, head_dim=32, rows=((15, 40, 0.0), (0, 0, 0.0)), sinks=True, window=20),
    Case(q_len=18, kv_len=120, batch=1, num_heads=1, num_kv_heads=1, head_dim=32, causal=False),
]


def schedules():
    """(whether `make test` runs it, case, values of the schedule, the kernels that are launched or None for any)"""
    one, both = SPLIT_KV.launches[:1], SPLIT_KV.launches
    for n, case in itertools.product((8, 1), BLOCK_CASES):  # fixed splits; a single one needs no merge
        brief = tables.Config(16, 16, 4, 1, programs_per_sm=n)
        yield n == 8 and case == BLOCK_CASES[2], case, {"num_sms": 6, "brief": brief}, both if n > 1 else one
    # Also fewer programs than blocks, and more than one row of a batch, or no key, in a share.
    teams = {"brief": None, "many_rows": tables.Config(16, 16, 4, 1)}
    for n, case in itertools.product((1, 7, 23, 10_000 if ON_GPU else 200), TEAM_CASES):
        yield n == 7, case, {"num_sms": n, **teams}, LEAN.launches
    # Only uniform rows are scheduled on the host, one program for each KV head.
    uniform = Case(q_len=1, kv_len=100, batch=3, num_heads=4, num_kv_heads=2, head_dim=32)
    padded = replace(uniform, rows=((0, 100, 0.0), (60, 100, 0.0), (0, 100, 0.0)))
    for case in (uniform, replace(uniform, q_offset=80, offset_on_device=True), padded):
        yield True, case, {"num_sms": 6, "programs_per_sm": 1}, LEAN.launches if case is padded else one
    # Each of many short heads has its own program.
    for kv_len, launched in ((100, one), (520, LEAN.launches)):
        case = Case(q_len=1, kv_len=kv_len, batch=3, num_heads=3, num_kv_heads=3, head_dim=16)
        yield True, case, {"arch": 0, "num_sms": 3}, launched
    for n, case in itertools.product((1, 2, 3, 7, 10_000 if ON_GPU else 1000), SCHEDULE_CASES):
        yield n == 7, case, {"programs": n}, None
    whole = Case(q_len=1, kv_len=32, batch=2, num_heads=4, num_kv_heads=2, head_dim=16)  # programs own whole rows
    yield True, whole, {"programs": 4}, None


SCHEDULES = [pytest.param(*each, marks=() if quick else pytest.mark.slow) for quick, *each in here(*schedules())]


@with_lean
@pytest.mark.parametrize("case, values, launched", SCHEDULES, ids=lambda x: getattr(x, "id", None))
def test_lean_by_any_schedule(kernel, case, values, launched, device, monkeypatch):
    decode = tables.decode
    for name, value in values.items():
        if name == "programs":
            force_programs(monkeypatch, value)
        elif name == "programs_per_sm":
            monkeypatch.setattr(tables, "decode", lambda *args: replace(decode(*args), programs_per_sm=1))
        else:
            module = {"brief": schedule, "many_rows": tables}.get(name, gpu)
            monkeypatch.setattr(module, name, lambda *args, value=value: value)
    if "many_rows" in values:
        monkeypatch.setattr(tables, "MAX_DECODE_ROWS", 16)
    assert launched is None or launches(kernel, case, device) == launched
    check_case(kernel, case, device)


GPU, BF16 = torch.device("cuda", 0), torch.bfloat16


@pytest.fixture
def h100(monkeypatch):
    """132 multiprocessors; returns a function that sets another architecture."""
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    set_arch = lambda arch: monkeypatch.setattr(gpu, "arch", lambda device: arch)  # noqa: E731
    set_arch(90)
    return set_arch


def test_heads_have_separate_programs_where_measured_faster(monkeypatch):
    monkeypatch.setattr(gpu, "num_sms", lambda device: 100)
    own = {  # (programs per SM, heads, tiles)
        *((2, 100, 10_000), (2, 190, 10_000)),
        (2, 70, 200),  # one or two tenths are idle, which short shares compensate
        *((2, 400, 32), (4, 400, 128)),  # one wave, and as many heads on each SM
        *((4, 350, 64), (2, 280, 1)),  # the last wave is two fifths full
    }
    shared = {(2, 120, 10_000), (2, 70, 1000), (2, 400, 33), (4, 400, 129), (4, 350, 65), (2, 279, 1), (1, 400, 1)}
    for programs, heads, tiles in own | shared:
        config = tables.Config(16, 64, 4, 3, programs_per_sm=programs)
        found = schedule.shares_within_heads(None, config, heads, 64 * tiles)
        assert found == ((programs, heads, tiles) in own), (programs, heads, tiles)


def test_fixed_splits_of_few_keys_have_launches_of_their_own_at_head_dim_64(h100):
    for arch in (80, 90):
        h100(arch)
        keys = 4 << 10, (4 << 10) + 1, 8 << 10, (8 << 10) + 1, None
        fewest, above, few, many, unknown = (tables.fixed(GPU, BF16, 64, 8, 8, number) for number in keys)
        assert many == unknown == tables.decode(GPU, BF16, 64, 8, 8) and above == few
        assert (few != many) == (fewest != few) == (arch == 90)
    assert few.programs_per_sm == 1 and tables.num_splits(GPU, few, 8, 8 << 10, 64) == 16
    assert schedule.choose(GPU, BF16, 64, 8, 8, 8 << 10, True) == (few, True)
    assert tables.fixed(GPU, BF16, 64, 8, 67, 256) == tables.decode(GPU, BF16, 64, 8, 67)  # too many heads


def test_of_one_program_per_sm_two_do_not_fit_if_there_are_a_dozen_heads(h100):
    """Otherwise both may be placed on the first SM that is free, and others stay idle."""

    def buffers(head_dim, rows, heads, kv_len=32 << 10):
        """(KB of K and V that a program loads ahead, programs per SM)"""
        config = tables.fixed(GPU, BF16, head_dim, rows, heads, kv_len)
        tile = 4 * config.BLOCK_N * tables.block_d(head_dim)
        return tile * (config.num_stages - 1) >> 10, config.programs_per_sm  # Triton allocates one buffer less than stages

    alone = [(128, 4, 12), (128, 1, 32), (128, 4, 128), (96, 1, 24), (112, 4, 48), (64, 4, 16), (128, 64, 8), (128, 64, 64)]
    assert {buffers(*call) for call in alone} == {(128, 1)}
    # With few heads there is one, too. With few keys, smaller tiles arrive earlier.
    assert buffers(128, 4, 8) == buffers(128, 4, 16, 1 << 10) == (128, 1) and buffers(64, 4, 32, 4 << 10) == (64, 2)
    others = [(128, 4, 80), (80, 1, 32), (64, 4, 48), (128, 4, 192), (128, 64, 128), (128, 64, 4)]  # too many SMs would be idle
    unaligned = [(120, 4, 24), (100, 1, 16), (88, 64, 12), (40, 1, 64)]  # lengths select two kernels as it is
    assert {buffers(*call) for call in others + unaligned} == {(64, 2)}
    for arch, dtype, keys in ((80, BF16, 32 << 10), (90, torch.float32, 32 << 10), (90, BF16, None)):
        h100(arch)
        assert tables.fixed(GPU, dtype, 128, 4, 32, keys) == tables.decode(GPU, dtype, 128, 4, 32)


def test_programs_and_splits_by_the_number_of_heads(h100):
    decode = lambda heads, rows, head_dim: tables.decode(GPU, BF16, head_dim, rows, heads)  # noqa: E731
    for head_dim, few in ((64, 2), (128, 1)):
        programs = lambda heads, rows=4, d=head_dim: decode(heads, rows, d).programs_per_sm  # noqa: E731
        assert [programs(h) for h in (1, 132, 133, 264, None)] == [few, few, 2, 2, 2]
        assert [programs(h) for h in (8, 24, 33, 36, 64, 100)] == [few, 2, few, 2, few, 2]  # with 24, 36, 100, SMs would be idle
        assert {programs(h) for h in (265, 528, 792, 1056, 2048)} == {4}  # the last wave is at least half full
        assert {programs(h) for h in (529, 640, 791, 1280)} == {2}
        assert programs(528, rows=16) == 4 and programs(528, rows=17) == 2  # no registers are left
    assert decode(8, 4, 96).programs_per_sm == 2  # 3/4 of a tile is loaded
    fixed = lambda heads, kv_len, d=128: schedule.choose(GPU, BF16, d, 1, heads, kv_len << 10, True)[1]  # noqa: E731
    assert [fixed(heads, 4) for heads in (384, 512, 896, 270)] == [True, True, False, False]
    assert fixed(384, 8, 64) and not fixed(384, 16)
    # 96 programs that are alone on their SM read about as fast as 132.
    assert [fixed(96, keys) for keys in (16, 32, 64)] == [True, True, False]

    def splits(heads, kv_len, rows=64, head_dim=128):
        return tables.num_splits(GPU, decode(heads, rows, head_dim), heads, kv_len << 10, head_dim)

    def of_few_keys(heads, keys, head_dim, rows=8):
        config = tables.fixed(GPU, BF16, head_dim, 8, heads, keys)
        return tables.num_splits(GPU, config, heads, keys, head_dim, rows)

    # Of one tile, up to a number that is merged fast, or if half of the SMs are idle.
    assert [of_few_keys(4, keys, 256) for keys in (256, 768, 1024, 2048, 3072)] == [4, 12, 16, 16, 24]
    assert [of_few_keys(8, keys, 64) for keys in (128, 256, 2048, 4096)] == [1, 4, 32, 32] and of_few_keys(1, 4096, 256) == 64
    assert of_few_keys(4, 768, 256, rows=128) == 6  # of a prompt

    # Few keys of 64 rows are not split if each SM has one head.
    assert [splits(128, n) for n in (2, 8, 16, 32)] == [1, 1, 1, 2]
    assert splits(66, 2) == 4 and splits(128, 2, rows=32) == 2 and splits(128, 2, head_dim=64) == 2


@pytest.mark.parametrize("kernel", here(SPLIT_KV, LEAN), ids=lambda k: k.name)
@pytest.mark.parametrize("case", here(*SCHEDULE_CASES), ids=lambda c: c.id)
def test_merging_in_several_chunks(kernel, case, device, monkeypatch):
    force_programs(monkeypatch, 19)
    monkeypatch.setattr(tables, "merge", lambda *args: {"ROWS": 1, "CHUNK": 2, "num_warps": 1})
    check_case(kernel, case, device)


# Spans.


@st.composite
def any_mask(draw):
    batch, kv_len = draw(st.integers(1, 3)), draw(st.integers(1, 3000 if ON_GPU else 150))
    kv_offset = draw(st.sampled_from((0, 0, 1, 33, 200)))
    q_len = draw(st.integers(1, min(kv_len, 60) + 3))
    q_offset = draw(st.integers(kv_offset, kv_offset + kv_len))
    causal, window = draw(st.booleans()), draw(st.one_of(st.none(), st.integers(1, kv_len + 10)))
    mask = None
    if draw(st.sampled_from((True, True, True, False))):
        seen = kv_offset + kv_len + draw(st.sampled_from((0, 0, 5, -kv_len // 2)))
        rng = np.random.default_rng(draw(st.integers(0, 1000)))
        mask = rng.random((batch, seen)) < draw(st.sampled_from((0.0, 0.1, 0.9, 1.0)))
        for row in mask:  # left and right padding
            row[: int(seen * draw(st.sampled_from((0.0, 0.0, 0.3, 0.7, 1.0))))] = False
            row[int(seen * draw(st.sampled_from((1.0, 1.0, 0.8, 0.2)))) :] = False
    return batch, q_len, kv_len, q_offset, kv_offset, causal, window, mask


def test_spans_agree_with_the_mask(device):
    """The kernel, on a GPU or interpreted, and its equivalent in torch agree in every integer that is read."""

    @settings(max_examples=150)
    @given(any_mask(), st.booleans(), st.booleans())
    def check(drawn, on_device, transposed):
        batch, q_len, kv_len, q_offset, kv_offset, causal, window, mask = drawn
        offset = torch.tensor(q_offset, device=device) if on_device else q_offset
        tensor = None
        if mask is not None:
            tensor = torch.as_tensor(mask, device=device)
            tensor = tensor.t().contiguous().t() if transposed else tensor
        options = dict(kv_offset=kv_offset, causal=causal, window=window, attention_mask=tensor)
        span = spans.build_spans(batch, q_len, kv_len, device, q_offset=offset, **options)
        words = 0 if mask is None else -(-kv_len // 32)
        assert span.dtype == torch.int32 and span.shape == (batch, 1, 1, spans.WORDS + words)
        assert batch == 1 or (span.stride(0) == 0) == (mask is None)  # a uniform batch
        expected = oracle.visible(
            batch, q_len, kv_len, q_offset=q_offset, kv_offset=kv_offset, causal=causal, window=window, attention_mask=mask
        )
        assert np.array_equal(oracle.visible_from_spans(span, q_len, kv_len), expected)
        twin = spans._build_spans_torch(batch, q_len, kv_len, device, offset, kv_offset, causal, window, tensor)
        assert np.array_equal(reference.visible(q_len, kv_len, device, twin, False, None).cpu().numpy(), expected)
        if TRITON_RUNS:
            span = build_spans_kernel.run(len(twin), q_len, kv_len, device, offset, kv_offset, causal, window, tensor)
        stop = max(0, min(kv_len, q_offset - kv_offset + q_len)) if causal else kv_len
        read = spans.WORDS + min(words, -(-stop // 32))
        assert torch.equal(span[..., :read], twin[: len(span), ..., :read])

    check()


@pytest.mark.parametrize("masked", [False, True])
def test_spans_with_padding_are_those_of_the_other_queries(masked, device):
    mask = torch.ones(3, 50, dtype=torch.bool, device=device)
    mask[1, :7] = False
    options = {"q_offset": torch.tensor([40], device=device), "window": 20, "attention_mask": mask if masked else None}
    expected = spans.build_spans(3, 5, 70, device, **options).clone()
    expected[..., spans.FLAGS] += 11 << spans.PADDING
    found = spans.build_spans(3, 16, 70, device, live=torch.tensor([5], device=device), **options)
    assert torch.equal(found[..., : spans.WORDS + 2 * masked], expected[..., : spans.WORDS + 2 * masked])


@pytest.mark.parametrize("masked, window", [(True, None), (False, 25)])
@pytest.mark.parametrize("kernel", here(PREFILL, SPLIT_KV, LEAN), ids=lambda k: k.name)
def test_padding_visits_no_keys(kernel, masked, window, device):
    """Queries 17 to 79 are padding. K and V are NaN from slot 47 on."""
    past, live, q_len = 30, 17, 32 if kernel.max_rows else 80
    q, (k, v) = torch.randn(2, 2, q_len, 16, device=device), torch.randn(2, 2, 1, 130, 16, device=device)
    k[:, :, past + live :] = v[:, :, past + live :] = float("nan")
    mask = torch.ones(2, past + live, dtype=torch.bool, device=device)
    mask[1, :9] = False
    ints = spans.build_spans(
        2, q_len, 130, device, q_offset=torch.tensor([past], device=device), live=torch.tensor([live], device=device),
        window=window, attention_mask=mask if masked else None,
    )  # fmt: skip
    own = spans.build_spans(2, live, past + live, device, q_offset=past, window=window, attention_mask=mask if masked else None)
    found = kernel.launcher()(q, KV(k, v), Spec(), ints)
    expected = reference.attention(q[:, :, :live], KV(k[:, :, : past + live], v[:, :, : past + live]), Spec(), own)
    assert torch.allclose(found[:, :, :live], expected, atol=2e-5) and found.isfinite().all()
    # In the interpreter a block has 32 rows. No tile is read for the others.
    assert ON_GPU or kernel.max_rows or not found[:, :, 32:].any()


@pytest.mark.parametrize("window", [None, 9])
def test_spans_of_rows_with_offsets_of_their_own(window, device):
    offsets = torch.tensor([0, 69, 80, 12, 5], device=device)
    span = spans.build_spans(5, 1, 70, device, q_offset=offsets, window=window)
    each = [spans.build_spans(1, 1, 70, device, q_offset=int(offset), window=window) for offset in offsets]
    assert torch.equal(span, torch.cat(each)) and len(set(span.flatten(1)[:, spans.KV_STOP].tolist())) == 4
    if TRITON_RUNS:
        apart = offsets.repeat_interleave(2)[::2]
        assert torch.equal(build_spans_kernel.run(5, 1, 70, device, apart, 0, True, window, None), span)
    with pytest.raises(ValueError, match=r"one element, or one for each of 5 rows; got \(3,\)"):
        spans.build_spans(5, 1, 70, device, q_offset=offsets[:3])


def test_spans_need_a_bool_mask_and_are_marked_without_holes(device):
    for rows, dtype in ((2, torch.int64), (3, torch.bool)):
        sentence = rf"attention_mask must be bool of shape \(2, positions seen\); got {dtype} \({rows}, 5\)"
        with pytest.raises(ValueError, match=sentence):
            spans.build_spans(2, 1, 5, device, attention_mask=torch.ones(rows, 5, dtype=dtype, device=device))
    mask = torch.ones(4, 70, dtype=torch.bool, device=device)
    mask[1, :10] = mask[2, 60:] = mask[3, 30] = False
    span = spans.build_spans(4, 1, 70, device, q_offset=69, attention_mask=mask)
    assert (span[:, 0, 0, spans.FLAGS] & spans.HOLES != 0).tolist() == [False, False, False, True]


# Bad input: an error with the reason, and no launch. The checks precede any launch, so they need no GPU.


def good(device, **changes) -> dict:
    new = lambda h, n: torch.randn(2, h, n, 32, device=device)  # noqa: E731
    return {"q": new(4, 3), "k": new(2, 9), "v": new(2, 9), **changes}


def _bad(device) -> dict[str, tuple[dict, type[Exception], str]]:
    randn = lambda *shape, **kw: torch.randn(*shape, device=device, **kw)  # noqa: E731
    half = {"dtype": torch.float16}
    other = "meta"
    ints = lambda *shape, dtype=torch.int32, d=device: torch.zeros(*shape, dtype=dtype, device=d)  # noqa: E731
    return {
        "rank of q": ({"q": randn(4, 3, 32)}, ValueError, r"must be 4-D.*got 3-D, 4-D and 4-D"),
        "rank of v": ({"v": randn(2, 2, 9, 32, 1)}, ValueError, r"must be 4-D.*got 4-D, 4-D and 5-D"),
        "v length": ({"v": randn(2, 2, 8, 16)}, ValueError, r"k and v must have one shape but for head_dim.*\(2, 2, 8, 16\)"),
        "batch": ({"q": randn(3, 4, 3, 32)}, ValueError, r"agree in batch and head_dim.*\(3, 4, 3, 32\)"),
        "head_dim differs": ({"q": randn(2, 4, 3, 64)}, ValueError, r"agree in batch and head_dim"),
        "heads": ({"q": randn(2, 5, 3, 32)}, ValueError, r"multiple of the number of KV heads; got 5 and 2"),
        "more KV heads": ({"q": randn(2, 1, 3, 32)}, ValueError, r"multiple of the number of KV heads; got 1 and 2"),
        "no queries": ({"q": randn(2, 4, 0, 32)}, ValueError, r"Nothing to attend.*at least 1"),
        "no values": ({"v": randn(2, 2, 9, 0)}, ValueError, r"Nothing to attend.*at least 1"),
        "no keys": ({"k": randn(2, 2, 0, 32), "v": randn(2, 2, 0, 32)}, ValueError, r"Nothing to attend.*at least 1"),
        "dtype": ({n: x.double() for n, x in good(device).items()}, TypeError, r"bfloat16 and float32; got torch.float64.*Cast"),
        "mixed dtypes": ({"k": randn(2, 2, 9, 32, **half)}, TypeError, r"share one dtype.*got torch.float32, torch.float16"),
        "device": ({"k": torch.empty(2, 2, 9, 32, device=other)}, ValueError, r"on one device; got .*, meta and"),
        "stride of q": ({"q": randn(2, 4, 32, 3).mT}, ValueError, r"last dimension.*contiguous.*got strides 3, 1 and 1"),
        "stride of v": ({"v": randn(2, 2, 9, 64)[..., ::2]}, ValueError, r"last dimension.*strides 1, 1 and 2.*contiguous\(\)"),
        "grad": ({"q": randn(2, 4, 3, 32, requires_grad=True)}, RuntimeError, r"no backward.*requires grad.*no_grad"),
        "grad of v": ({"v": randn(2, 2, 9, 32, requires_grad=True)}, RuntimeError, r"no backward"),
        "spans dtype": ({"spans": ints(2, 1, 1, 6, dtype=torch.int64)}, ValueError, r"spans must be int32.*torch.int64"),
        "spans shape": ({"spans": ints(2, 5)}, ValueError, r"spans must be int32 of shape \(2, 1, 1, 6\) or \(2, 1, 1, 7\)"),
        "spans batch": ({"spans": ints(3, 1, 1, 6)}, ValueError, r"spans must be int32.*got torch.int32 \(3, 1, 1, 6\)"),
        "spans words": ({"spans": ints(2, 1, 1, 8)}, ValueError, r"spans must be int32.*for 9 slots.*build_spans"),
        "spans device": ({"spans": ints(2, 1, 1, 6, d=other)}, ValueError, r"spans must be on q's device.*got meta"),
        "window": ({"window": 0}, ValueError, r"window counts.*at least 1; got 0"),
        "window bool": ({"window": True}, ValueError, r"window counts.*an integer, at least 1; got True"),
        "window float": ({"window": 2.0}, ValueError, r"window counts.*an integer, at least 1; got 2.0"),
        "sinks bool": ({"sinks": True}, ValueError, r"sinks is the number of first keys.*an integer.*; got True"),
        "sinks beyond int32": ({"sinks": 1 << 40}, ValueError, r"sinks is the number of first.*at most 1073741824.*; got 109"),
        "first tokens": ({"sinks": -1}, ValueError, r"sinks is the number of first keys.*at least 0; got -1"),
        "inv_freq alone": ({"inv_freq": randn(16)}, ValueError, r"inv_freq.*sinks is 0; pass both or neither"),
        "inv_freq shape": ({"sinks": 2, "inv_freq": randn(16, 1)}, ValueError, r"inv_freq must be float32.*\(16, 1\)"),
        "inv_freq dtype": ({"sinks": 2, "inv_freq": randn(16, **half)}, ValueError, r"inv_freq must be float32.*torch.float16"),
        "inv_freq strides": ({"sinks": 2, "inv_freq": randn(32)[::2]}, ValueError, r"inv_freq must be float32.*contiguous"),
        "inv_freq size": ({"sinks": 2, "inv_freq": randn(17)}, ValueError, r"pairs of q's 32 dimensions; got 17 frequencies"),
        "softcap": ({"softcap": 0.0}, ValueError, r"softcap must be above 0; got 0.0.*None"),
        "scale": ({"scale": 0.0}, ValueError, r"scale must be above 0; got 0.0"),
        "softcap inf": ({"softcap": float("inf")}, ValueError, r"softcap must be above 0; got inf.*finite"),
        "softcap bool": ({"softcap": True}, ValueError, r"softcap must be above 0; got True"),
        "scale inf": ({"scale": float("inf")}, ValueError, r"scale must be above 0; got inf.*finite"),
        "scale complex": ({"scale": (-1) ** -0.5}, ValueError, r"scale must be above 0; got \(.*j\)"),
        "scale bool": ({"scale": True}, ValueError, r"scale must be above 0; got True"),
        "scale nan": ({"scale": float("nan")}, ValueError, r"scale must be above 0; got nan"),
        "sinks": ({"sink_logits": randn(2)}, ValueError, r"one logit per query head, \(4,\).*got \(2,\)"),
        "sinks stride": ({"sink_logits": randn(8)[::2]}, ValueError, r"sink_logits must be contiguous.*stride 2"),
        "sinks device": ({"sink_logits": torch.empty(4, device=other)}, ValueError, r"one logit per query head.*on meta"),
    }


@pytest.mark.skipif(INTERPRETED, reason="nothing is launched")
@pytest.mark.parametrize("what", _bad("cpu"))
def test_bad_input(what, device):
    changes, error, sentence = _bad(device)[what]
    for kernel in KERNELS:
        with counted_launches(kernel) as launched, pytest.raises(error, match=sentence):
            call(kernel.launcher(), **good(device, **changes))
        assert not launched, kernel.name


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_strides_between_tokens_that_overflow_in_a_tile_are_refused(kernel):
    for name, x in good("meta").items():
        far = torch.empty_strided(x.shape, (32, 32, 1 << 24, 1), device="meta")
        with pytest.raises(ValueError, match=rf"^{name} has 16777216 elements between two tokens.*contiguous\(\)"):
            call(kernel.launcher(), **good("meta", **{name: far}))


@pytest.mark.parametrize("kernel, q_len", here((PREFILL, 65), (SPLIT_KV, 1), (LEAN, 1), (LEAN, 65)))
def test_more_rows_than_a_launch_has_are_refused(kernel, q_len, device):
    rows = lambda n: torch.randn(1, 1, n, 32, device=device).expand(65536, -1, -1, -1)  # noqa: E731
    with counted_launches(kernel) as launched, pytest.raises(ValueError, match=r"65536\), and a GPU has at most 65535.*in parts"):
        call(kernel.launcher(), rows(q_len), rows(70), rows(70))
    assert not launched


@with_lean
def test_lean_copies_many_queries_whose_offsets_exceed_32_bits(kernel, monkeypatch):
    given = []
    plan = SimpleNamespace(run=lambda q, *rest: given.append(q))
    monkeypatch.setattr(kernel.module, "_prepare", lambda tensors, *options: plan)
    k = torch.empty(1, 1, 200, 64, device="meta")
    for stride in (1 << 23, 1 << 24):
        call(kernel.launcher(), torch.empty_strided((1, 1, 129, 64), (64, 64, stride - 64, 1), device="meta"), k, k)
    assert [q.is_contiguous() for q in given] == [False, True]


TOO_WIDE = [
    (584, 32, r"^head_dim 584 is above 576.*without attn_implementation"),
    (32, 520, r"^the values' head_dim 520 is above"),
]


@pytest.mark.parametrize("d, dv, sentence", TOO_WIDE)
def test_heads_that_are_too_wide_are_refused(d, dv, sentence, device):
    new = lambda h, n, dim: torch.randn(2, h, n, dim, device=device)  # noqa: E731
    x = {"q": new(4, 3, d), "k": new(2, 9, d), "v": new(2, 9, dv)}
    for kernel in KERNELS[1:]:
        with counted_launches(kernel) as launched, pytest.raises(ValueError, match=sentence):
            call(kernel.launcher(), **x)
        assert not launched
    for backend in map(registry.get, registry.names()):
        why_not = backend.why_not(num_heads=4, num_kv_heads=2, head_dim=d, value_dim=dv, dtype=torch.float32, device=device)
        if backend.linear:  # it has no call without a layer
            assert f"{max(d, dv)} is above" in why_not
            continue
        if backend.name == "reference":
            assert why_not is None and backend(**x).shape == (2, 4, 3, dv)
            continue
        with pytest.raises(ValueError, match=sentence):  # also on a CPU, where the reference would support them
            backend(**x)
        assert f"{max(d, dv)} is above" in why_not


def test_split_kv_refuses_many_rows_and_splits_that_are_no_number(device):
    with pytest.raises(ValueError, match=r"at most 64 query rows per KV head; got q_len 33 x 2 query heads.*prefill"):
        call(SPLIT_KV.launcher(), **good(device, q=torch.randn(2, 4, 33, 32, device=device)))
    for splits in (0, True, 2.5):
        with pytest.raises(ValueError, match=rf"splits.*an integer, at least 1, or None; got {splits}"):
            call(partial(SPLIT_KV.launcher(), splits=splits), **good(device))


def test_other_devices_and_a_missing_triton_are_refused_with_a_message(monkeypatch):
    kernel = kernels.TritonKernel("lean")
    with pytest.raises(RuntimeError, match=r"runs on CUDA devices.*'mps'.*sdpa"):
        kernel.where("mps")
    with pytest.raises(RuntimeError, match=r"'meta'.*sdpa"):
        call(kernel, **good("meta"))
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    with pytest.raises(RuntimeError, match=r"lean kernel needs Triton.*pip install triton.*\"reference\""):
        kernel.where("cuda")
    assert kernel.where("cpu") == "the PyTorch reference"
    assert "needs Triton" in registry.get("lean").why_not(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float16)


def test_each_gpu_runs_the_kernel_for_its_architecture(monkeypatch):
    """In any order of the GPUs."""
    portable = SimpleNamespace(any=lambda *_: "portable")
    hopper = SimpleNamespace(prefill=lambda *_, shares: "hopper", why_not=lambda *_: None)
    monkeypatch.setattr(kernels, "_module", {"any": portable, "any_hopper": hopper}.get)
    monkeypatch.setattr(gpu, "arch", lambda device: device.arch)
    on = lambda arch: SimpleNamespace(type="cuda", arch=arch)  # noqa: E731
    q = {arch: SimpleNamespace(is_cuda=True, dtype=torch.float16, device=on(arch)) for arch in (80, 90, 100)}
    for first, second in ((80, 90), (90, 80)):
        kernel = kernels.TritonKernel("any", hopper="any_hopper")
        said = {arch: kernel(q[arch], KV(None, None), Spec()) for arch in (first, second, 100, first)}
        assert said == {80: "portable", 90: "hopper", 100: "portable"}
        intervals = torch.zeros(1, 1, 2, spans.WORDS + 70)
        assert {arch: kernel(q[arch], KV(None, None), Spec(), intervals) for arch in said} == said


def tensor_at(address: int, index: int = 0):
    """What a launch reads of a CUDA tensor."""
    return SimpleNamespace(device=torch.device("cuda", index), is_cuda=True, data_ptr=lambda: address)


def test_an_interpreted_launch_is_not_cached(monkeypatch):
    """The interpreter also accepts CUDA tensors, and returns nothing that could be launched again."""
    kernel = MagicMock(arg_names=["X", "n"])
    kernel.__getitem__.return_value.return_value = None
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    start = launch.Launch(kernel, (1,), num_warps=1, n=3)
    start(tensor_at(256)), start(tensor_at(256))
    assert kernel.__getitem__.return_value.call_count == 2


@pytest.mark.parametrize("hooks", [False, True], ids=["no hooks", "hooks"])
def test_a_launch_is_repeated_without_triton_looking_it_up(hooks, monkeypatch):
    kernel, second = MagicMock(arg_names=["X", "Y", "n"]), MagicMock(arg_names=["Y"])
    kernel.fn.__name__ = "kernel"
    compiled, follows = (k.__getitem__.return_value.return_value for k in (kernel, second))
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 77)
    runtime = {"launch_enter_hook": SimpleNamespace(calls=[]), "launch_exit_hook": SimpleNamespace(calls=["hook"] * hooks)}
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active), raising=False)
    monkeypatch.setattr(launch, "knobs", SimpleNamespace(runtime=SimpleNamespace(**runtime)), raising=False)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    start = launch.Launch(kernel, (5, 2), launch.Launch(second, (7,), num_warps=8), num_warps=1, n=3)
    tensor, last = tensor_at(256), tensor_at(512)
    for _ in range(3):
        start(tensor, last)
    kernel.__getitem__.return_value.assert_called_once_with(tensor, last, 3, num_warps=1, enable_fp_fusion=True)
    second.__getitem__.return_value.assert_called_once_with(last, num_warps=8, enable_fp_fusion=True)
    launches = ((compiled, (5, 2, 1), (256, 512, 3)), (follows, (7, 1, 1), (512,)))
    for binary, grid, arguments in launches:
        if hooks:  # through Triton, which calls the hooks
            assert binary.__getitem__.return_value.call_args_list == [called(*arguments)] * 2 and not binary.run.called
        else:
            again = called(*grid, 77, binary.function, binary.packed_metadata, None, None, None, *arguments)
            assert binary.run.call_args_list == [again] * 2
    start(tensor_at(260), last)  # another alignment is another variant
    start(tensor_at(256, index=1), last)  # another device than the current one
    assert kernel.__getitem__.return_value.call_count == 3
    repeats = follows.__getitem__.return_value if hooks else follows.run  # whose own tensors have not changed
    assert second.__getitem__.return_value.call_count == 1 and repeats.call_count == 4
    with pytest.raises(TypeError, match="kernel takes 2 tensors here; got 1"):
        launch.Launch(kernel, (5, 2), n=3)(tensor)


@pytest.mark.parametrize("name", [PREFILL.name, SPLIT_KV.name, LEAN.name])
def test_cpu_tensors_run_what_where_says(name, device):
    kernel = kernels.TritonKernel(name)
    words = {"cuda": "the Triton kernel", "cpu": "the Triton kernel, interpreted" if INTERPRETED else "the PyTorch reference"}
    assert kernel.where(device.type) == words[device.type]
    with counted_launches(next(k for k in KERNELS if k.name == name)) as launched:
        call(kernel, **good(device))
    assert bool(launched) == TRITON_RUNS
    if TRITON_RUNS and not ON_GPU:
        with pytest.raises(TypeError, match=r"interpreter computes bfloat16 wrongly.*float32 or float16"):
            call(kernel, **{name: t.bfloat16() for name, t in good("cpu").items()})


@pytest.mark.parametrize("kernel", here(SPLIT_KV), ids=lambda k: k.name)
def test_a_constant_number_of_splits_makes_rows_independent_of_their_batch(kernel, device):
    """The same bits alone, with longer and shorter rows in the batch, with left padding, and in a longer buffer."""
    split_kv = kernel.launcher()
    n, batch = (3000, 70) if ON_GPU else (100, 4)
    q, k, v = (torch.randn(batch, h, x, 32, device=device) for h, x in ((4, 1), (2, n), (2, n)))
    live = torch.arange(n, device=device) >= torch.randint(0, n, (batch, 1), device=device)
    live[1] = torch.arange(n, device=device) >= n // 3
    span = spans.build_spans(batch, 1, n, q.device, q_offset=n - 1, attention_mask=live)
    together = call(partial(split_kv, splits=8), q, k, v, span)
    alone = call(partial(split_kv, splits=8), q[1:2], k[1:2, :, n // 3 :], v[1:2, :, n // 3 :])
    longer = [torch.nn.functional.pad(x[1:2, :, n // 3 :], (0, 0, 0, 77)) for x in (k, v)]
    short = spans.build_spans(1, 1, n - n // 3 + 77, q.device, q_offset=n - n // 3 - 1)
    assert torch.equal(alone, together[1:2])
    assert torch.equal(alone, call(partial(split_kv, splits=8), q[1:2], *longer, short))
    assert not torch.equal(call(partial(split_kv, splits=1), q, k, v, span)[1:2], alone)  # other sums have other rounding errors


@pytest.mark.skipif(not INTERPRETED, reason="with TRITON_INTERPRET=1")
@pytest.mark.parametrize("given, programs", [(None, (6, 2, 1)), (2, (21, 2, 1))])
def test_rows_of_fixed_splits_share_a_program_unless_the_number_of_splits_is_given(given, programs, monkeypatch):
    """With a number of splits, the bits of a row must not depend on the batch, which determines the rows of a program."""
    monkeypatch.setattr(gpu, "num_sms", lambda device: 2)
    q = torch.randn(1, 6, 7, 32)
    kv = KV(*(torch.randn(1, 2, 300, 32) for _ in range(2)))
    plan = split_kv._prepare.__wrapped__((q, *kv.tensors, None, None, None), kv.form, Spec(), True, given)
    assert plan.launches.then.grid == programs
    out, lse = plan.run(q, kv, Spec(), None, None, q, True)
    want, want_lse = reference.attention(q, kv, Spec(), return_lse=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
