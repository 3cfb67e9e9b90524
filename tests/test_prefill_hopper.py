"""The Hopper prefill kernel: its plan of tiles on the CPU, its compilation without a GPU, its results on one."""

import builtins
import math
import re
import subprocess
import types
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import oracle
import pytest
import tolerance
import torch
from cases import Case, Inputs, make
from conftest import INTERPRETED

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from hf_fastattn.kernels import checks, reference  # noqa: E402
from hf_fastattn.kernels.attention import prefill_hopper as hopper  # noqa: E402
from hf_fastattn.kernels.attention.plan import Call  # noqa: E402
from hf_fastattn.kernels.attention.prefill_hopper import item as items  # noqa: E402
from hf_fastattn.kernels.attention.prefill_hopper import plan, product  # noqa: E402
from hf_fastattn.kernels.attention.prefill_hopper.item import BLOCK_M  # noqa: E402
from hf_fastattn.kernels.attention.prefill_hopper.merge import merge_shares  # noqa: E402
from hf_fastattn.kernels.attention.prefill_hopper.pipe import CONSUMERS, FIRST_TURN  # noqa: E402
from hf_fastattn.kernels.attention.schedule import pack_of  # noqa: E402
from hf_fastattn.kernels.host import gpu  # noqa: E402
from hf_fastattn.kernels.spans import CAUSAL, NO_WINDOW, PADDING, build_spans, segments, with_rows  # noqa: E402
from hf_fastattn.kernels.spec import KV, Spec, call  # noqa: E402

WHOLE = (64, 128, 256)  # heads that fill their buffers and are multiplied in one part
PARTS = (8, 40, 72, 80, 96, 104, 112, 136, 160, 192, 224)

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a GPU of compute capability 9.0"
)

# --- the plan: plain integer code, run as Python ------------------------------------------------------------------------------


class _Gl(types.SimpleNamespace):
    maximum, minimum = staticmethod(max), staticmethod(min)
    where = staticmethod(lambda c, a, b: a if c else b)


def _as_python(fn, memory=(), **names):
    """A Gluon function of scalars as a Python function; pointers are indices of `memory`."""
    gl = _Gl(load=lambda at, cache_modifier="": memory[at])
    names = {"gl": gl, "tl": gl, "__builtins__": builtins, **names}
    return types.FunctionType(fn.fn.__code__, names, fn.fn.__name__, fn.fn.__defaults__)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize(
    "q_start, q_len, kv_start, kv_stop",
    [(0, 500, 0, 500), (700, 300, 0, 1000), (0, 500, 37, 411), (-50, 500, 0, 450), (10, 128, 300, 310)],
)
def test_plan_visits_every_visible_key_once_and_masks_where_it_must(causal, window, q_start, q_len, kv_start, kv_stop):
    window = NO_WINDOW if window is None else window
    row_bounds = _as_python(plan.row_bounds)
    for holes in (False, True):
        spans = (q_start, kv_start, kv_stop, window, causal, holes, q_start + q_len)
        bounds = [row_bounds(q_start + m, kv_start, kv_stop, window, causal) for m in range(q_len)]
        for block_m, block_n in ((128, 128), (128, 64)):
            assert_visits(bounds, spans, [], block_m, block_n)


@pytest.mark.parametrize("window", [NO_WINDOW, 100])
@pytest.mark.parametrize("live", [1, 40, 128, 290])
def test_plan_of_padding_has_one_tile_for_each_block(live, window):
    q_start, q_len, kv_len = 5000, 512, 8192
    memory = [q_start, 0, q_start + live, window, CAUSAL + ((q_len - live) << PADDING), 0]
    row_bounds, load_spans = _as_python(plan.row_bounds), _as_python(plan.load_spans, memory=memory)
    spans = _as_python(plan.row_spans, load_spans=load_spans)(0, q_len, kv_len, NO_WINDOW, False, False)
    bounds = [row_bounds(q_start + m, 0, q_start + live, window, True) for m in range(live)]
    assert_visits(bounds, spans, [], 128, 128)
    names = {name: _as_python(getattr(plan, name), row_bounds=row_bounds) for name in ("block_bounds", "narrowed_block")}
    tiles_of = _as_python(plan.tiles_of, **names)
    for first in range(0, q_len, 128):
        lo, hi, num_tiles, *_ = tiles_of(first, q_len, 0, spans, 128, 128, False)
        assert (lo, hi, num_tiles) == (lo, lo, 1) if first >= live else hi == min(q_start + first + 128, q_start + live)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("kind", ["documents", "short", "any"])
@pytest.mark.parametrize("q_start, kv_start, kv_len", [(0, 0, 700), (0, 0, 800), (100, 0, 800), (0, 37, 700)])
def test_plan_of_intervals(causal, window, kind, q_start, kv_start, kv_len):
    q_len, window = 700, NO_WINDOW if window is None else window
    lo, hi = (x[0] for x in intervals(kind, 1, q_len, q_start, kv_len))
    ints = torch.tensor([q_start, kv_start, kv_len, window, CAUSAL if causal else 0, 0])
    memory = with_rows(ints.view(1, 1, 1, -1), lo[None], hi[None]).flatten().tolist()
    row_bounds, load_spans = _as_python(plan.row_bounds), _as_python(plan.load_spans, memory=memory)
    row_spans = _as_python(plan.row_spans, memory=memory, load_spans=load_spans)
    spans = row_spans(0, q_len, kv_len, NO_WINDOW, True, False)
    narrowed = [row_bounds(q_start + m, kv_start, kv_len, window, causal) for m in range(q_len)]
    bounds = [(max(a, int(x)), max(a, x, min(b, int(y)))) for (a, b), x, y in zip(narrowed, lo, hi, strict=True)]
    assert spans[2] == min(kv_len, hi[-1]) and not spans[5]
    for block_m, block_n, align in ((128, 128, 1), (128, 128, 64), (16, 64, 1), (16, 64, 16)):
        assert_visits(bounds, spans, memory, block_m, block_n, align)


def assert_visits(bounds, spans, memory, block_m, block_n, align=1) -> None:
    """Check the tiles of all blocks against the (first, last + 1) key of each query.

    memory: spans with intervals; empty if there are none. align: tiles begin at its multiples.
    """
    narrowed = _as_python(plan.narrowed, memory=memory)
    bounds_of = {"row_bounds": _as_python(plan.row_bounds), "narrowed": narrowed}
    names = {name: _as_python(getattr(plan, name), **bounds_of) for name in ("block_bounds", "narrowed_block")}
    tiles_of, tile_start = _as_python(plan.tiles_of, **names), _as_python(plan.tile_start)
    _q_start, _kv_start, kv_stop, _window, _causal, holes, _live_stop = spans
    q_len = len(bounds)
    for first in range(0, q_len, block_m):
        tiles = tiles_of(first, q_len, 0, spans, block_m, block_n, bool(memory), align)
        lo, _hi, num_tiles, _num_after, num_masked = tiles
        starts = [tile_start(i, tiles, block_n, align) for i in range(num_tiles)]
        lo = lo // align * align
        assert sorted(starts) == [lo + t * block_n for t in range(num_tiles)] and num_tiles >= 1
        own = bounds[first : first + block_m]
        covered = range(lo, lo + num_tiles * block_n)
        assert all(a == b or (a in covered and b - 1 in covered) for a, b in own)
        assert num_tiles == 1 or starts[0] < max(b for _, b in own)
        whole = [not holes and all(a <= start and start + block_n <= b for a, b in own) for start in starts]
        assert whole == [i >= num_masked for i in range(num_tiles)]
        assert all(start + block_n <= kv_stop for start in starts[1:])  # V is made safe in the first tile only


@pytest.mark.parametrize("num_blocks, num_heads, batch, section", [(5, 6, 2, 4), (1, 3, 1, 8), (7, 4, 3, 1), (16, 8, 2, 16)])
def test_every_item_is_listed_once(num_blocks, num_heads, batch, section):
    total = num_heads * batch
    item = _as_python(plan.block_at)
    items = [item(i, num_blocks, num_heads, total, section) for i in range(num_blocks * total)]
    assert sorted(items) == [(b, h, r) for b in range(num_blocks) for h in range(num_heads) for r in range(batch)]


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 16])
def test_shares_of_an_item_cover_its_tiles(splits):
    share_of = _as_python(plan.share_of)
    for num_tiles in range(1, 40):
        shares = [share_of(num_tiles, which, splits) for which in range(splits)]
        assert all(tiles >= 1 for _, tiles in shares)
        merged = shares[: min(splits, num_tiles)]
        assert [i for begin, tiles in merged for i in range(begin, begin + tiles)] == list(range(num_tiles))
        assert max(tiles for _, tiles in merged) - min(tiles for _, tiles in merged) <= 1


def _tensor_gl():
    """Gluon's functions on tensors without layouts."""

    def on_tensors(fn):
        return lambda *args: fn(*map(torch.as_tensor, args))

    same = {name: on_tensors(getattr(torch, name)) for name in ("maximum", "minimum", "where")}
    return types.SimpleNamespace(**same, arange=lambda a, b, layout: torch.arange(a, b), int64=torch.int64)


GROUPS = [(4, 1, 130), (4, 4, 17), (4, 4, 65), (4, 2, 64), (7, 8, 33), (3, 2, 70), (71, 64, 1), (71, 8, 9)]


SPLITS = [(None, 1, None), (0, 3, None), (3, 2, None), (0, 3, 1), (0, 3, 33), (0, 2, 65)]
SPLIT_GROUPS = [(*group, *splits) for group in GROUPS for splits in SPLITS if (splits[2] or 0) < group[2]]


@pytest.mark.parametrize("group, pack, q_len, whole, splits, live", SPLIT_GROUPS)
def test_each_query_of_each_head_is_one_row_of_one_block(group, pack, q_len, whole, splits, live):
    """live: queries that are no padding, of one batch row."""
    gl, kv_heads, batch = _tensor_gl(), 2, 2 if live is None else 1
    words = [0, 0, 1000, NO_WINDOW, 0 if live is None else (q_len - live) << PADDING]
    gl.load = lambda at, cache_modifier: torch.tensor(words[at])
    names = {"gl": gl, "tl": gl, "__builtins__": builtins}
    python = lambda fn, **more: types.FunctionType(fn.fn.__code__, names | more, fn.fn.__name__, fn.fn.__defaults__)  # noqa: E731
    bounds = {"row_bounds": python(plan.row_bounds)}
    bounds["block_bounds"] = python(plan.block_bounds, **bounds)
    bounds["narrowed_block"] = python(plan.narrowed_block)
    functions = ("block_and_share", "block_at", "live_blocks", "share_of", "tiles_of")
    bounds["load_spans"] = python(plan.load_spans)
    used = {name: python(getattr(plan, name), **bounds) for name in functions}
    stop = 1000 - (0 if live is None else q_len - live)
    used["row_spans"] = lambda _ptr, q_len, kv_len, window, *_: (kv_len - q_len, 0, stop, window, False, False, stop)
    work, rows = python(items.item_of, **used), python(items.heads_and_queries)
    config = replace(hopper.config(64, 64), pack=pack, split=splits > 1)
    num_packs = kv_heads * -(-group // pack)
    num_blocks = -(-q_len * pack // BLOCK_M)
    blocks = num_blocks * num_packs * batch
    whole = blocks if whole is None else whole
    num_shares = (blocks - whole) * splits
    sizes = (0, whole + num_shares, num_packs, batch * num_packs, group, 2 * num_packs, whole, q_len, 1000, NO_WINDOW)
    seen = torch.zeros(batch, kv_heads * group, q_len, dtype=torch.int64)
    padded = [first for first in range(0, q_len, BLOCK_M // pack) if live is not None and first >= live]
    slots = []
    for index in range(whole + num_shares):
        (first, kv_head, group_head, row), _, _, _, (_begin, tiles), slot = work(
            torch.tensor(index), torch.tensor(0), sizes, config, False, BLOCK_M
        )
        slots.append(int(slot))
        for wg in range(CONSUMERS):
            place = (first + wg * 64 // pack, kv_head, group_head, row)
            heads, queries, exists = rows(place, sizes, config, None)
            assert bool(place[0] < q_len) == bool(exists.any())  # else the consumer passes
            heads = heads.expand(64)
            assert heads.max() < kv_heads * group  # sink logits are read also for rows that do not exist
            done = seen[row, heads[exists], queries[exists]]
            seen[row, heads[exists], queries[exists]] = (0 if int(first) in padded else done) + tiles  # padding may be repeated
    shares = [slot for slot in slots if slot >= 0]
    assert slots == [-1] * whole + shares + [-1] * (num_shares - len(shares)) and shares == list(range(len(shares)))
    last = padded[0] if padded else q_len
    assert (seen[..., :last] == -(-stop // config.BLOCK_N)).all() and (seen[..., last:] == 1).all()
    live_blocks = num_packs * (num_blocks - len(padded))
    assert not padded or (len(shares) % live_blocks == 0 and splits * live_blocks <= len(shares) < num_shares)


@pytest.mark.skipif(not INTERPRETED, reason="the merge alone, interpreted")
@pytest.mark.parametrize(
    "q_len, group, pack, whole, splits, section, padding",
    [
        *(
            (17, 4, 4, 0, 3, 4, 0),
            (130, 2, 1, 11, 2, 2, 0),
            (70, 3, 2, 13, 7, 8, 0),
            (1, 71, 64, 1, 4, 2, 0),
            (20, 7, 8, 0, 3, 2, 0),
        ),
        *((130, 2, 1, 0, 2, 1, 100), (70, 3, 2, 0, 3, 4, 66), (31, 7, 8, 0, 2, 2, 5)),
    ],
)
def test_merged_shares_are_rows_of_their_heads(q_len, group, pack, whole, splits, section, padding, monkeypatch):
    """The kernel is not interpretable: torch computes its shares, from which the merge makes the rows of each block."""
    monkeypatch.setattr(gpu, "num_sms", lambda device: 2)
    torch.manual_seed(0)
    batch, kv_heads, head_dim, kv_len, block_n = 1 if padding else 2, 2, 16, 700, 128
    q = torch.randn(batch, kv_heads * group, q_len, head_dim)
    k, v = (torch.randn(batch, kv_heads, kv_len, head_dim) for _ in range(2))
    spec = Spec()
    given = Call.of((q, *KV(k, v).tensors, None, None, None), KV(k, v).form, spec, True)
    num_packs, num_blocks = kv_heads * -(-group // pack), -(-q_len * pack // BLOCK_M)
    order = (num_blocks, num_packs, batch * num_packs, section, whole)
    ints = [kv_len - q_len, 0, kv_len, NO_WINDOW, CAUSAL + (padding << PADDING), 0]
    given_splits, live_blocks = splits, _as_python(plan.live_blocks, load_spans=_as_python(plan.load_spans, memory=ints))
    live, splits = live_blocks(0, q_len, kv_len, NO_WINDOW, BLOCK_M // pack, whole, splits, *order[:3])
    assert (live < num_blocks) == (padding > 5) == (splits > given_splits)
    cut = live * num_packs * batch - whole
    stats_start = cut * splits * BLOCK_M * head_dim
    workspace = torch.empty(stats_start + cut * splits * BLOCK_M * 2)
    acc, stats = workspace[:stats_start].view(-1, BLOCK_M, head_dim), workspace[stats_start:].view(-1, BLOCK_M, 2)
    out, lse = checks.empty_outputs(q, head_dim, True)
    out.fill_(torch.nan), lse.fill_(torch.nan)
    want, want_lse = reference.attention(q, KV(k, v), spec, return_lse=True)
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * given.scale * math.log2(math.e)
    scores = scores.masked_fill(~reference.visible(q_len, kv_len, q.device, None, True, None)[:, None], -math.inf)
    untouched, block_at = torch.ones(batch, kv_heads * group, q_len, dtype=torch.bool), _as_python(plan.block_at)
    for n in range(cut):
        block, packed, row = block_at(whole + n, live, *order[1:4])
        kv_head, first_head = packed // (num_packs // kv_heads), packed % (num_packs // kv_heads) * pack
        last_query = min((block * BLOCK_M + BLOCK_M - 1) // pack, q_len - 1)
        tiles = -(-(kv_len - q_len + min(last_query, q_len - padding - 1) + 1) // block_n)
        shares = min(splits, tiles)
        for share in range(shares):
            keys = slice(share * tiles // shares * block_n, (share + 1) * tiles // shares * block_n)
            local = torch.arange(BLOCK_M)
            query, member = (block * BLOCK_M + local) // pack, first_head + local % pack
            exists = (query < q_len) & (member < group)
            local, query, head = local[exists], query[exists], kv_head * group + member[exists]
            s = scores[row, head, query, keys]
            m = s.amax(-1)
            p = torch.exp2(s - m[:, None]).nan_to_num(0.0)  # a row may see no key of a share
            acc[share * cut + n, local] = p @ v[row, kv_head, keys]
            stats[share * cut + n, local] = torch.stack((m, p.sum(-1)), -1)
            untouched[row, head, query] = False
    spans = torch.tensor(ints, dtype=torch.int32).view(1, 1, 1, -1)
    merge_shares(given, pack, order, given_splits, BLOCK_M, block_n, 1, stats_start)(out, lse, workspace, spans, q)
    assert (
        bool(whole or live < num_blocks) == bool(untouched.any())
        and out[untouched].isnan().all()
        and lse[untouched].isnan().all()
    )
    untouched[..., q_len - padding :] = True  # what padding in a block with other queries gets is not defined
    torch.testing.assert_close(out[~untouched], want[~untouched])
    torch.testing.assert_close(lse[~untouched], want_lse[~untouched])


def test_heads_share_a_block_where_it_leaves_fewer_rows_empty():
    assert {group: {pack_of(q_len, group) for q_len in range(1, 600)} for group in (1, 2, 4, 6, 8, 12, 128)} == {
        1: {1}, 2: {2}, 4: {4}, 6: {2}, 8: {8}, 12: {4}, 128: {64}
    }  # fmt: skip
    assert [pack_of(q_len, 7) for q_len in (17, 33, 64, 4096)] == [8, 8, 8, 1] and pack_of(4096, 3) == pack_of(4096, 71) == 1
    assert pack_of(1, 71) == pack_of(65, 71) == 8
    assert {pack_of(q_len, 4, words=True) for q_len in range(1, 600)} == {1, 4} and pack_of(1024, 4, words=True) == 1


def intervals(kind, batch, q_len, q_start, kv_len):
    """(lo, hi) of each query: documents, short ones, or any intervals that never move back. Slots before q_start belong to the
    first document."""
    noise = torch.Generator().manual_seed(0)
    if kind == "any":
        lo, hi = (torch.randint(most, (batch, q_len), generator=noise).sort(-1).values for most in (kv_len // 2, kv_len - 50))
        return lo, torch.maximum(lo, hi)
    mean = {"documents": 300, "short": 25}[kind]
    lo, hi = segments(torch.rand(batch, q_len, generator=noise) < 1 / mean)
    return torch.where(lo > 0, lo + q_start, 0), hi + q_start


# --- compilation, no GPU needed -------------------------------------------------------------------------------------------------


def _compile(head_dim, dtype="bf16", value_dim=None, config=None, **flags):
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    value_dim = head_dim if value_dim is None else value_dim
    config = hopper.config(head_dim, value_dim) if config is None else config
    constants = dict(C=config, HAS_WORDS=False, IS_CAUSAL=False, HAS_SOFTCAP=False, HAS_SINK_LOGITS=False)
    constants |= dict(WRITE_LSE=False) | flags
    element = {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype]

    def descriptor(*box):
        layout = gl.NVMMASharedLayout.get_default_for([1, 1, *box], element)
        return f"tensordesc<{dtype}{[1, 1, *box]},{layout!r}>"

    of_k, of_v = hopper.columns(head_dim), hopper.columns(value_dim)
    rows = (64 // config.pack, config.pack)
    fn = hopper.prefill_hopper_kernel
    types = {"q_desc": descriptor(*rows, of_k), "out_desc": descriptor(*rows, of_v), "SinkLogits": f"*{dtype}"}
    types |= {"k_desc": descriptor(config.BLOCK_N, of_k), "v_desc": descriptor(config.BLOCK_N, of_v)}
    types |= {"Lse": "*fp32", "Workspace": "*fp32", "Spans": "*i32", "Counters": "*i32"}
    types |= {"scale_log2": "fp32", "cap_log2": "fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in fn.arg_names}
    source = GluonASTSource(fn, signature, {(fn.arg_names.index(name),): value for name, value in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))


def _sass(kernel, folder):
    """The machine code line by line, or a skip where Triton came without the disassembler."""
    nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    if not nvdisasm.exists():
        pytest.skip("this Triton has no nvdisasm")
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    return subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True).stdout.splitlines()


def _tile_loops(sass):
    """Each loop over tiles: the shortest way from a label back to it around the place where the turn is passed on."""
    labels = {found[1]: at for at, line in enumerate(sass) if (found := re.match(r"(\.L\w+):", line))}
    jumps = [(labels[found[1]], at) for at, line in enumerate(sass) if (found := re.search(r"\bBRA\b.*`\((\.L\w+)\)", line))]
    passed_on = [at for at, line in enumerate(sass) if "BAR.ARV" in line]
    around = [[(stop - start, start) for start, stop in jumps if start < at < stop] for at in passed_on]
    loops = [sass[start : start + size] for size, start in (min(ways) for ways in around if ways)]
    return [loop for loop in loops if sum("BAR.ARV" in line for line in loop) == 1 and any("HGMMA" in line for line in loop)]


SHARES = {"HAS_SINK_LOGITS": True, "WRITE_LSE": True}
COMPILED = [  # widths of heads, changes to the configuration, flags
    *((d, dv, {}, {}) for d, dv in (*((d, d) for d in (*WHOLE, 40, 80, 96, 112, 192, 224)), (192, 128), (64, 256))),
    *((d, d, {"split": True, "pack": n}, SHARES) for d, n in ((64, 8), (96, 1), (128, 1), (128, 4), (256, 64))),
    *(
        (d, d, {"rows": True, "pack": n, "exp2_on_fma": 0}, {"WRITE_LSE": True})  # intervals
        for d, n in ((128, 4), (256, 2))
    ),
]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU compiles what it runs")
@pytest.mark.parametrize("head_dim, value_dim, changes, flags", COMPILED)
def test_compiles_for_hopper_without_a_gpu(head_dim, value_dim, changes, flags, tmp_path):
    config = replace(hopper.config(head_dim, value_dim), **changes)
    kernel = _compile(head_dim, value_dim=value_dim, config=config, **flags)
    ptx = kernel.asm["ptx"]
    assert "wgmma.mma_async" in ptx and "setmaxnreg" in ptx
    assert "cp.async.bulk.tensor.4d" in ptx and "cp.async.bulk.tensor.5d" in ptx  # K and V, Q
    parts = product.num_parts(hopper.config(head_dim, value_dim).v_width)
    assert f"wgmma.wait_group.sync.aligned {parts};" in ptx  # S is waited for while P V runs
    assert kernel.metadata.num_warps == 4 * CONSUMERS + 4  # a warp that loads counts as four
    turns = {int(n) for n in re.findall(r"bar\.(?:sync|arrive) (\d+), 256;", ptx)}
    assert turns == {FIRST_TURN + wg for wg in range(CONSUMERS)}
    assert not turns & {int(n) for n in re.findall(r"bar(?:rier)?\.sync\s+(\d+)(?:, 128)?;", ptx)}  # Triton's own
    assert kernel.metadata.shared <= 227 * 1024
    loops = _tile_loops(_sass(kernel, tmp_path))
    assert len(loops) == 2 * CONSUMERS  # of the masked tiles and of the others
    for loop in loops:
        turn = {op: int(n, 16) for op, n in re.findall(r"BAR\.(SYNC|ARV)\S* (0x\w+), 0x100", "\n".join(loop))}
        assert set(turn) == {"SYNC", "ARV"} and set(turn.values()) == turns  # waits at its own barrier, arrives at the other's
        # Triton 3.6 with intervals keeps one address in local memory, and reads it twice in a loop of one consumer.
        assert sum(bool(re.search(r"\b(?:LDL|STL)\b", line)) for line in loop) <= (2 if config.rows else 0)  # no spills


# --- results, on the GPU --------------------------------------------------------------------------------------------------------


def new(q_len=300, kv_len=300, mask=None, **own) -> Case:
    """A case, with padding or holes among the positions that its queries see."""
    case = Case(q_len, kv_len, **{"head_dim": 128, "dtype": "bf16", **own})
    if mask is None:
        return case
    seen, edges = case.first_query + q_len, [60 + 77 * row for row in range(case.batch)]
    rows = {"left": [(e, seen, 0.0) for e in edges], "right": [(0, seen - e, 0.0) for e in edges], "holes": [(0, seen, 0.3)] * 2}
    return replace(case, rows=tuple(rows[mask]), mask_len=seen)


# Longer ones than those of test_kernels, in which every option of this kernel occurs.
CASES = [
    *(new(n, n, head_dim=d, causal=c) for d in WHOLE for c in (True, False) for n in (128, 511, 1000)),
    *(new(n, n, head_dim=d, causal=c) for d in PARTS for c, n in ((True, 511), (False, 300))),
    *(new(777, 777, head_dim=d, dtype="fp16") for d in (*WHOLE, *PARTS)),
    *(new(511, 511, head_dim=d, value_dim=v) for d, v in ((192, 128), (128, 192), (96, 64), (64, 200))),
    *(new(2100, 2100, head_dim=d, batch=3, num_heads=16, num_kv_heads=4) for d in (*WHOLE, 80, 96, 112, 192)),
]
SHARED = [
    *(new(n, 1333, head_dim=d, causal=c) for d in (64, 80, 96, 112, 128, 192, 256) for n, c in ((200, True), (100, False))),
    *(new(130, 4000, dtype="fp16"), new(130, 1500, head_dim=192, value_dim=128), new(), new(100, 1, causal=False)),
    *(new(300, 2000, window=256), new(300, 2000, softcap=20.0, sinks=True), new(300, 4096, q_offset=1000), new(400, 150)),
    new(70, 1000, num_heads=9, num_kv_heads=3, head_dim=64),
    new(200, 1500, "left", q_offset=900, sinks=True),
    *(new(200, 1500, "right", q_offset=900), new(200, 1500, "holes", q_offset=900), new(200, 1500, layout="token_major")),
    new(700, 2100, batch=3, num_heads=16, num_kv_heads=4),
]
PACKED = [
    *(
        new(q_len, 1333, num_heads=heads, num_kv_heads=kv_heads, head_dim=d)
        for d, heads, kv_heads, q_len in ((128, 8, 2, 17), (64, 71, 1, 1), (128, 14, 2, 33), (256, 16, 2, 65), (96, 8, 4, 64))
    ),
    new(50, 1500, num_heads=8, window=256, sinks=True),
    new(40, 900, num_heads=14, softcap=20.0, causal=False, dtype="fp16"),
    new(20, 4096, num_heads=8, q_offset=1000, sinks=True),
    new(70, 1500, "left", num_heads=16, q_offset=900, value_dim=64),
    new(33, 1500, "holes", num_heads=14, q_offset=900, sinks=True),
    *(new(130, 700, num_heads=32, layout="token_major"), new(400, 150, num_heads=8)),
]
assert all(pack_of(case.q_len, case.num_heads // case.num_kv_heads) > 1 for case in PACKED)
_rows = new(700, 700, q_offset=0)
ROWS = [  # with an interval for each query, of a kind of `intervals`
    *((replace(_rows, head_dim=d), "documents") for d in (*WHOLE, 80, 96, 112, 192)),
    *((replace(_rows, causal=False, kv_len=n), "documents") for n in (700, 900)),
    *((replace(_rows, head_dim=d, num_heads=8), "short") for d in WHOLE),
    *((replace(_rows, num_heads=3, num_kv_heads=3), "any"), (replace(_rows, causal=False, head_dim=64), "any")),
    *((replace(_rows, head_dim=d, window=100, softcap=20.0, sinks=True), "documents") for d in WHOLE),
    (replace(_rows, window=100, causal=False), "documents"),
    (replace(_rows, q_offset=150, kv_len=1000, num_heads=8), "documents"),
    (new(700, 700, "left", q_offset=0, sinks=True), "documents"),
    (new(700, 700, "right", q_offset=0, head_dim=64), "documents"),
    (replace(_rows, num_heads=9, num_kv_heads=3, head_dim=64), "documents"),
    (replace(_rows, layout="token_major", num_heads=14, dtype="fp16"), "documents"),
    (replace(_rows, head_dim=192, value_dim=128), "documents"),
    (new(2100, 2100, q_offset=0, batch=3, num_heads=16, num_kv_heads=4), "documents"),
]


def with_intervals(x: Inputs, case: Case, kind: str) -> Inputs:
    lo, hi = intervals(kind, case.batch, case.q_len, case.q_offset, case.kv_len)
    slots = np.arange(case.kv_len)
    x.seen &= (lo.numpy()[..., None] <= slots) & (slots < hi.numpy()[..., None])
    x.spans = with_rows(x.spans, lo.to(x.q.device), hi.to(x.q.device))
    for row, stop in enumerate(hi[:, -1].tolist()):  # no query sees what follows the last interval
        x.k[row, :, stop:] = x.v[row, :, stop:] = float("nan")
    return x


def assert_right(case: Case, kernel, kind: str | None = None, device="cuda") -> None:
    x = make(case, torch.device(device))
    x = x if kind is None else with_intervals(x, case, kind)
    run = partial(call, kernel, x.q, x.k, x.v, x.spans, **x.options)
    out, lse = run()
    expected = oracle.attention(x.q, x.k, x.v, x.seen, **{n: x.options[n] for n in ("scale", "softcap", "sink_logits")})
    tolerance.assert_attention((out, lse), expected, x.q, x.k, x.v, x.spans, x.seen, x.options, case.id)
    assert out.transpose(1, 2).is_contiguous() and not out.isnan().any() and torch.equal(out, run()[0])  # the same bits again


ids = {"ids": lambda value: getattr(value, "id", None)}


@on_hopper
@pytest.mark.parametrize("case", [*CASES, *(case for case in PACKED if case.q_len >= hopper.MIN_ROWS)], **ids)
def test_results_are_correct(case):
    assert_right(case, hopper.prefill)


@on_hopper
@pytest.mark.parametrize("case, kind", ROWS, **ids)
def test_results_of_intervals_are_correct(case, kind):
    assert_right(case, partial(hopper.prefill, shares=True), kind)


@on_hopper
@pytest.mark.parametrize("whole, splits", [(0, 2), (0, 3), (0, 16), (1, 2), (2, 5)])
@pytest.mark.parametrize("case", [*SHARED, *PACKED], **ids)
def test_results_of_shares_are_correct(case, whole, splits, monkeypatch):
    launches = []
    monkeypatch.setattr(hopper, "splits_of", lambda *args: launches.append(args) or (whole, splits))
    monkeypatch.setattr(hopper, "_prepare", hopper._prepare.__wrapped__)
    assert_right(case, partial(hopper.prefill, shares=True))
    assert launches


@on_hopper
@pytest.mark.parametrize("live", [1, 8, 31, 33, 100, 128])
@pytest.mark.parametrize("heads, head_dim, window", [(32, 128, None), (8, 64, None), (24, 128, 1500), (16, 256, None)])
def test_results_of_a_padded_step_are_correct(heads, head_dim, window, live):
    """Programs of padding compute shares of the live queries; NaN is behind these."""
    q_len, past, capacity = 128, 3000, 5000
    q = torch.randn(1, heads, q_len, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 8, capacity, head_dim, device="cuda", dtype=torch.bfloat16)
    k[:, :, past + live :] = v[:, :, past + live :] = float("nan")
    number = torch.tensor([live], device="cuda")
    spans = build_spans(1, q_len, capacity, q.device, q_offset=past, window=window, live=number)
    kernel, spec = partial(hopper.prefill, shares=True, return_lse=True), Spec(window=window)
    assert hopper.splits_of(q, KV(k, v), spec, pack_of(q_len, heads // 8), hopper.columns(head_dim))[0] == 0
    out, lse = (x[:, :, :live] for x in kernel(q, KV(k, v), spec, spans))
    seen = oracle.visible_from_spans(spans, q_len, capacity, causal=True)[:, :live]
    expected = oracle.attention(q[:, :, :live], k, v, seen)
    tolerance.assert_attention((out, lse), expected, q[:, :, :live], k, v, spans, seen, {"window": window}, "padded")


@on_hopper
def test_a_chat_turn_after_a_long_context_is_split_and_repeatable():
    q = torch.randn(1, 32, 256, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 8, 40000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert hopper.splits_of(q, KV(k, v), Spec(), 1, 128)[1] > 1
    cut = partial(call, partial(hopper.prefill, shares=True))
    first, whole = cut(q, k, v), call(hopper.prefill, q, k, v)
    assert torch.equal(first, cut(q, k, v)) and (first.double() - whole.double()).abs().max() < 1e-3


@on_hopper
def test_refuses_with_a_message():
    q = torch.randn(1, 2, 100, 128, device="cuda", dtype=torch.bfloat16)
    assert hopper.why_not(q, KV(q, q)) is None
    assert "float32" in hopper.why_not(q.float(), KV(q.float(), q.float()))
    assert "head_dim" in hopper.why_not(q[..., :84], KV(q[..., :84], q[..., :84]))
    assert "values" in hopper.why_not(q, KV(q, torch.cat([q, q, q], -1)))
    assert "queries" in hopper.why_not(q[:, :, :4], KV(q, q))
    odd = torch.randn(1, 2, 100, 132, device="cuda", dtype=torch.bfloat16)[..., 4:]
    assert "16 bytes" in hopper.why_not(q, KV(odd, q))
    with pytest.raises(ValueError, match="16 bytes"):
        call(hopper.prefill, q, odd, q)
