"""The inputs of the kernel tests: a list of cases, named by their shapes, and the tensors of a case."""

import itertools
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
import oracle
import pytest
import torch
from conftest import DEVICE, INTERPRETED

from hf_fastattn.kernels.spans import build_spans

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
ON_GPU = DEVICE == "cuda"
# Odd lengths, of several tiles and blocks of queries. The interpreter takes milliseconds a tile and so gets short ones.
MID, LONG = (111, 1000) if ON_GPU else (37, 75)


def on_gpu(*values) -> tuple:
    """Values of a parameter that run only on a GPU; interpreted, they take the same path as other values in the list."""
    return values if ON_GPU else ()


def pairs(*factors: Iterable) -> list[tuple]:
    """Rows of the factors' product in which every two values of different factors meet: few, and in every run the same."""
    rows = list(itertools.product(*map(enumerate, factors)))
    meet = [{(i, a[0], j, b[0]) for (i, a), (j, b) in itertools.combinations(enumerate(row), 2)} for row in rows]
    missing, chosen = set().union(*meet), []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(meet[i] & missing))
        missing -= meet[best]
        chosen.append(best)
    return [tuple(value for _, value in rows[i]) for i in sorted(chosen)]


def slow_unless(keep: Callable, values: Iterable) -> list:
    """`values` as parameters, of which `make test` runs those that keep(value) selects: the others are slow."""
    as_row = lambda value: value if isinstance(value, tuple) else (value,)  # noqa: E731
    return [value if keep(value) else pytest.param(*as_row(value), marks=pytest.mark.slow) for value in values]


@dataclass(frozen=True)
class Case:
    """One call. Positions are absolute; slot j of K and V holds position kv_offset + j."""

    q_len: int
    kv_len: int
    batch: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    value_dim: int | None = None  # head_dim of V; None: as K
    dtype: str = "fp32"
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False  # learned logits
    first_tokens: int = 0  # visible whatever the window: the kernels' `sinks`
    turned: bool = False  # ... and scored with the re-rotated query
    lse: bool = True
    layout: str = "plain"
    # The call has spans if any of the following fields differs from its default.
    spans: bool = False
    rows: tuple[tuple[int, int, float], ...] | None = None  # per batch row: first live slot, end, fraction of holes between
    mask_len: int | None = None  # positions that the attention mask covers; None: all
    q_offset: int | None = None  # position of the first query; None: the last query is at the last slot
    offset_on_device: bool = False
    kv_offset: int = 0
    say_twice: bool = False  # causal and window also as arguments, not only in the spans

    @property
    def id(self) -> str:
        width = f"d{self.head_dim}" + (f"v{self.value_dim}" if self.value_dim else "")
        parts = [self.dtype, f"b{self.batch}", f"h{self.num_heads}x{self.num_kv_heads}", width]
        parts += [f"q{self.q_len}", f"n{self.kv_len}", "causal" if self.causal else "full"]
        for f in fields(self)[9:]:
            value = getattr(self, f.name)
            if f.name == "rows" and value:
                shown = ["{}to{}{}".format(a, b, f"holes{round(100 * h)}" if h else "") for a, b, h in value[:3]]
                parts.append("live" + "_".join(shown) + ("_etc" if len(value) > 3 else ""))
            elif f.name == "layout":
                parts += [value] if value != f.default else []
            elif value is True and f.default is False:
                parts.append(f.name)
            elif f.name != "lse" and value != f.default:
                parts.append(f"{f.name}{value}")
        return "-".join(parts)

    @property
    def has_spans(self) -> bool:
        return any(getattr(self, f.name) != f.default for f in fields(self)[17:])

    @property
    def first_query(self) -> int:
        return self.kv_offset + self.kv_len - self.q_len if self.q_offset is None else self.q_offset


@dataclass
class Inputs:
    """The tensors of a case, the options of the kernels, the visible slots by the contract, the slots that are sinks and the
    queries that score them (None: q)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    spans: torch.Tensor | None
    options: dict
    seen: np.ndarray
    is_sink: np.ndarray
    q_sinks: torch.Tensor | None


def attention_mask(case: Case, rng: np.random.Generator) -> np.ndarray | None:
    if case.rows is None:
        return None
    seen = case.kv_offset + case.kv_len if case.mask_len is None else case.mask_len
    mask = np.zeros((case.batch, seen), dtype=bool)
    for row, (start, stop, holes) in zip(mask, case.rows, strict=True):
        row[start:stop] = rng.random(len(row[start:stop])) >= holes
    return mask


def placed(x: torch.Tensor, layout: str) -> torch.Tensor:
    """`x` (batch, heads, length, head_dim) as a view of memory that is NaN everywhere else."""
    batch, heads, length, dim = x.shape
    around = lambda *shape: x.new_full(shape, float("nan"))  # noqa: E731
    if layout == "plain":
        return x.contiguous()
    if layout == "token_major":  # as after .view().transpose(1, 2) of a projection
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "slices":  # of one larger buffer, with a gap after each head's vector
        view = around(batch, heads, length + 7, dim + 24)[:, :, 3 : 3 + length, 8 : 8 + dim]
    elif layout == "unaligned":  # no pointer and no stride divisible by 16
        view = around(batch, heads, length, dim + 5)[..., 3 : 3 + dim]
    elif layout == "batch_gap":
        view = around(2 * batch + 1, heads, length, dim)[1::2]
    elif layout == "one_row_for_all":  # batch stride 0
        return x[:1].contiguous().expand(batch, -1, -1, -1)
    else:
        raise ValueError(layout)
    return view.copy_(x)


def make(case: Case, device: torch.device) -> Inputs:
    seed = zlib.crc32(case.id.encode())
    rng = np.random.default_rng(seed)
    new = lambda heads, length, dim: torch.as_tensor(  # noqa: E731
        rng.standard_normal((case.batch, heads, length, dim)), dtype=DTYPES[case.dtype], device=device
    )
    q, k = new(case.num_heads, case.q_len, case.head_dim), new(case.num_kv_heads, case.kv_len, case.head_dim)
    v = new(case.num_kv_heads, case.kv_len, case.value_dim or case.head_dim)
    mask = attention_mask(case, rng)
    shape = case.batch, case.q_len, case.kv_len
    common = {"kv_offset": case.kv_offset, "causal": case.causal, "window": case.window}
    seen = oracle.visible(*shape, q_offset=case.first_query, attention_mask=mask, sinks=case.first_tokens, **common)
    # Slots past the last query, and before the first and after the last live position, were never written.
    if case.layout != "one_row_for_all":
        for b in range(case.batch):
            live = np.ones(case.kv_len, dtype=bool)
            if case.causal:
                live[max(0, case.first_query + case.q_len - case.kv_offset) :] = False
            if mask is not None:
                row = np.zeros(case.kv_len, dtype=bool)
                known = mask[b, case.kv_offset : case.kv_offset + case.kv_len]
                row[: len(known)] = known
                live &= row
            where = np.flatnonzero(live)
            unwritten = np.ones(case.kv_len, dtype=bool)
            if len(where):
                unwritten[where[0] : where[-1] + 1] = False
            for x in (k, v):
                x[b, :, torch.as_tensor(unwritten, device=device)] = float("nan")
    sink_logits = None
    if case.sinks:
        sink_logits = torch.as_tensor(rng.standard_normal(case.num_heads), dtype=DTYPES[case.dtype], device=device)
    spans = None
    if case.has_spans:
        q_offset = case.first_query
        if case.offset_on_device:
            q_offset = torch.tensor([q_offset], dtype=torch.int64, device=device)
        known = None if mask is None else torch.as_tensor(mask, device=device)
        spans = build_spans(*shape, device, q_offset=q_offset, attention_mask=known, **common)
    by_argument = spans is None or case.say_twice
    turned = case.turned and case.first_tokens > 0
    options = {
        "scale": case.scale,
        "causal": case.causal and by_argument,
        "window": case.window if by_argument or turned else None,
        "softcap": case.softcap,
        "sink_logits": sink_logits,
        "return_lse": case.lse,
    }
    q, k, v = (placed(x, case.layout) for x in (q, k, v))
    if case.first_tokens:
        options["sinks"] = case.first_tokens
    is_sink = oracle.sink_slots(case.batch, case.kv_len, case.kv_offset, mask, case.first_tokens)
    q_sinks = None
    if turned:
        pairs = int(rng.choice((case.head_dim // 2, case.head_dim // 4)))
        inv_freq = torch.as_tensor(rng.uniform(0.0, 3.0, pairs), dtype=torch.float32, device=device)
        rotation = {"inv_freq": inv_freq, "interleaved": bool(rng.integers(2))}
        options |= rotation
        first_slot = np.where(is_sink.any(1), is_sink.argmax(1), case.kv_len)
        tokens = case.first_query - case.kv_offset + np.arange(case.q_len)[None] - first_slot[:, None]
        q_sinks = oracle.rerotated(q, tokens, window=case.window, sinks=case.first_tokens, **rotation)
    return Inputs(q, k, v, spans, options, seen, is_sink, q_sinks)


def ragged(batch: int, kv_len: int, *, right: bool = True) -> tuple[tuple[int, int, float], ...]:
    """Rows of very different lengths, one of them empty."""
    lengths = [(7 * b * b + 1) % kv_len + 1 for b in range(batch)]
    lengths[batch // 2] = 0
    return tuple((0, n, 0.0) if right else (kv_len - n, kv_len, 0.0) for n in lengths)


# Interpreted, a program takes as long as all programs on a GPU: one for each tile of queries, unless a case is about several.
_many = {"batch": 2, "num_heads": 4, "num_kv_heads": 2}
_few = {"batch": 1, "num_heads": 2, "num_kv_heads": 1} if INTERPRETED else _many
_decode = Case(q_len=1, kv_len=LONG, **_few)
_prompt = Case(q_len=MID, kv_len=MID, **_few)
_append = Case(q_len=17 if ON_GPU else 3, kv_len=LONG, **_few)
BOTH = (_decode, _prompt)

CASES: list[Case] = [
    # head_dim, dtypes
    *(replace(base, head_dim=d) for base in BOTH for d in (16, 64, 80, 256, *on_gpu(32, 96, 112, 128))),
    *(replace(base, head_dim=d, dtype="fp16") for base in BOTH for d in (80, 128, *on_gpu(16, 64, 256))),
    *(replace(base, head_dim=d, dtype="bf16") for base in BOTH for d in (16, 64, 80, 128, 256)),
    # values of another width than keys, and wide heads: latent attention as models run it and absorbed, Gemma 4
    *(
        replace(base, head_dim=d, value_dim=dv, dtype=dtype)
        for base, dtypes, widths in (
            (_decode, ("fp16", "bf16"), ((24, 80), (576, 512), *on_gpu((192, 128), (96, 64), (512, None)))),
            (
                replace(_prompt, **_many | {"num_heads": 2, "batch": 1}),
                ("fp16", "bf16"),
                ((96, 64), (24, 80), (512, None), *on_gpu((192, 128), (576, 512))),
            ),
            (
                replace(_append, **_many | {"num_heads": 2, "batch": 1}),
                ("fp32",),
                ((192, 128), (576, 512), *on_gpu((96, 64), (24, 80), (512, None))),
            ),
        )
        for d, dv in widths
        for dtype in dtypes
    ),
    *(
        replace(base, head_dim=d, value_dim=dv, layout="slices", batch=3, **options)
        for base in (replace(_decode, **_many), replace(_append, num_heads=2, num_kv_heads=2))
        for turned, widths in (
            (True, ((328, 72), (64, 264), *on_gpu((192, 128)))),
            (False, ((328, 72), (192, 128), *on_gpu((64, 264)))),
        )
        for d, dv in widths
        for options in (
            {"first_tokens": 20, "turned": True, "window": 30, "rows": ((0, base.kv_len, 0.0), (9, 60, 0.4), (0, 0, 0.0))}
            if turned
            else {"first_tokens": 3, "window": 16, "softcap": 10.0, "sinks": True, "dtype": "fp16"},
        )
    ),
    # heads: multi-head, grouped, multi-query
    *(
        replace(base, num_heads=h, num_kv_heads=hkv, head_dim=32, batch=1, lse=False)
        for base in BOTH
        for h, hkv in ((3, 3), (6, 2), (7, 1), (16, 2), *on_gpu((8, 2), (5, 1)))
    ),
    # lengths: one key, one query block, odd ones, q_len < kv_len, more queries than keys
    *(
        Case(q_len=q, kv_len=n, head_dim=32, num_heads=h, causal=causal, batch=_few["batch"])
        for q, n, h in (
            (1, 1, 4),
            (1, 2, 2),
            (1, 16, 4),
            (2, 33, 4),
            (3, 63, 2),
            (5, MID, 8),
            (16, 16, 2),
            (16, LONG, 8 if ON_GPU else 4),
        )
        for causal in ((True, False) if ON_GPU or n < LONG else (True,))
    ),
    _append,
    replace(_append, causal=False, lse=False),
    replace(_append, dtype="fp16", head_dim=128),
    Case(q_len=64, kv_len=LONG, num_heads=2, batch=1),
    Case(q_len=65, kv_len=LONG, num_heads=2, batch=1),
    Case(q_len=LONG, kv_len=LONG, num_heads=2, num_kv_heads=1, batch=1, dtype="fp16"),
    Case(q_len=9, kv_len=5, head_dim=32),
    Case(q_len=9, kv_len=5, head_dim=32, causal=False),
    # strides
    *(
        replace(base, layout=layout, dtype=dtype, head_dim=d, **_many)
        for base in (_decode, _append)
        for layout, dtype, d in (
            ("token_major", "fp32", 64),
            ("slices", "fp16", 32),
            ("unaligned", "fp32", 80),
            ("batch_gap", "fp32", 16),
            ("one_row_for_all", "fp32", 16),
            *on_gpu(("token_major", "fp16", 80), ("slices", "fp16", 64), ("slices", "fp32", 32), ("unaligned", "fp16", 64)),
        )
    ),
    # window: 1, below, at and above the length; both sides where not causal
    *(
        replace(base, window=w, causal=causal, head_dim=32, batch=1)
        for base in (_decode, _prompt, _append)
        for w in (1, 20, base.kv_len, base.kv_len + 40)
        for causal in (True, False)
    ),
    # windows that int32 does not hold, or not with what is added to them
    *(
        Case(q_len=3, kv_len=20, head_dim=16, batch=1, window=w, causal=False, spans=spans, first_tokens=n, turned=n > 0)
        for w, spans, n in ((2**31 - 1, False, 4), (2**31 - 1, True, 0), (2**40, True, 4), (2**40, False, 0))
    ),
    # softcap, scale, sink logits
    *(
        replace(base, head_dim=32, **options)
        for base in BOTH
        for options in (
            {"softcap": 2.0},
            {"softcap": 30.0, "scale": 0.5, "dtype": "fp16"},
            {"scale": 1.0},
            {"sinks": True, "dtype": "fp16", "lse": False},
            {"sinks": True, "softcap": 10.0, "window": 13},
            *on_gpu({"softcap": 50.0}, {"sinks": True}),
        )
    ),
    # sinks: one tile and several, windows after, at and over them, padding, holes, queries among them
    *(
        replace(base, **{"head_dim": 32, "first_tokens": n, "turned": turned, **options})
        for base in (_decode, _prompt, _append)
        for n, turned, options in (
            (4, True, {"window": 20}),
            (4, False, {"window": 20, "dtype": "fp16"}),
            (1, True, {"window": 1}),
            (21, True, {"window": 13, "batch": 1}),
            (base.kv_len + 9, True, {"causal": False}),
            (5, True, {"window": 9, "causal": False, "sinks": True, "softcap": 10.0}),
            *(
                (4, True, {"window": 16, "batch": 3, "rows": rows})
                for n in (base.kv_len,)
                for rows in (((0, n, 0.0), (9, n, 0.4), (0, 0, 0.0)), ((0, n - 9, 0.0), (2, 5, 0.0), (n - 2, n, 0.0)))
            ),
            (3, True, {"window": 30, "layout": "slices", "head_dim": 80, "dtype": "fp16", "say_twice": True}),
        )
    ),
    # sinks of a row without a live key in its window, with more splits or shares than tiles
    replace(
        replace(_decode, **_few | {"batch": 2}),
        **{"q_offset": LONG - 1, "rows": ((0, 20, 0.0), (5, 9, 0.0)), "first_tokens": 4, "turned": True, "window": 20},
    ),
    # padding: left, right, holes, an empty row, everything masked
    *(
        replace(base, rows=rows(base.kv_len), head_dim=32, batch=3, causal=causal)
        for base in (_decode, _prompt, _append)
        for rows, both in (
            (lambda n: ((0, n, 0.0), (9, n, 0.0), (n - 1, n, 0.0)), ON_GPU),
            (lambda n: ((0, n, 0.0), (0, n - 9, 0.0), (0, 1, 0.0)), True),
            (lambda n: ((0, n, 0.3), (5, n, 0.5), (0, n - 20, 0.9)), ON_GPU),
            (lambda n: ((0, n, 0.0), (0, 0, 0.0), (3, n, 0.2)), True),
            (lambda n: ((0, 0, 0.0), (0, 0, 0.0), (0, 0, 0.0)), ON_GPU),
        )
        for causal in ((True, False) if both else (True,))
    ),
    # a preallocated buffer longer than its live part
    *(
        replace(base, kv_len=LONG + 90, q_offset=base.kv_len - base.q_len, offset_on_device=on_device, head_dim=32)
        for base in (_decode, _prompt, _append)
        for on_device in (False, True)
    ),
    replace(_decode, kv_len=LONG + 90, q_offset=0, head_dim=32),
    replace(_decode, kv_len=LONG + 90, q_offset=40, rows=((3, 41, 0.0), (0, 41, 0.3)), mask_len=41, head_dim=32, batch=2),
    replace(
        _append, kv_len=LONG + 90, q_offset=40, rows=((30, 57, 0.0), (0, 57, 0.0)), offset_on_device=True, dtype="fp16", batch=2
    ),
    # a buffer whose slot 0 is not position 0
    replace(_decode, kv_offset=37, spans=True, head_dim=32),
    replace(_decode, kv_offset=37, window=50, rows=((30, 37 + LONG, 0.0), (60, 37 + LONG, 0.1)), head_dim=32, batch=2),
    replace(_append, kv_offset=5, q_offset=LONG - 12, rows=((0, LONG + 5, 0.0), (9, LONG + 5, 0.2)), head_dim=32, batch=2),
    # all at once
    *(
        replace(
            replace(base, batch=3, num_heads=6, num_kv_heads=2, head_dim=80, window=40, softcap=20.0, sinks=True, causal=causal),
            rows=((0, base.kv_len, 0.0), (11, base.kv_len, 0.25), (0, 0, 0.0)),
            **{"layout": layout, "dtype": dtype, "say_twice": layout == "slices"},
        )
        for base, layout, dtype, causal in (
            *((_decode, "slices", "fp32", False), (_prompt, "slices", "fp16", True), (_append, "token_major", "fp32", True)),
            *on_gpu((_decode, "token_major", "fp32", True), (_decode, "slices", "fp16", True)),
            *on_gpu((_prompt, "token_major", "fp32", True), (_prompt, "slices", "fp32", False)),
            *on_gpu((_append, "slices", "fp16", True), (_append, "slices", "fp32", False)),
        )
    ),
    # many rows of very different lengths
    replace(_decode, batch=1000 if ON_GPU else 9, head_dim=16, rows=ragged(1000 if ON_GPU else 9, LONG), lse=False),
    replace(_decode, batch=5, head_dim=16, rows=ragged(5, LONG, right=False), num_heads=8, num_kv_heads=2, dtype="fp16"),
]
if not ON_GPU and INTERPRETED:  # Triton's interpreter computes bf16 wrongly
    CASES = [case for case in CASES if case.dtype != "bf16"]
CASES = list({case.id: case for case in CASES}.values())


def traits(case: Case) -> set[tuple]:
    """What a kernel may treat differently, with lengths by their order of magnitude."""
    found = {f.name: getattr(case, f.name) for f in fields(case)[5:] if f.name not in ("scale", "first_tokens")}
    found |= {name: found[name] not in (None, 0) for name in ("softcap", "q_offset", "kv_offset", "mask_len")}
    found["q_len"] = min(case.q_len, 17), case.q_len > case.kv_len
    found["window"] = case.window is None or case.window >= case.kv_len, (case.window or 0) > 1 << 30
    found["rows"] = [(a >= b, a > 0, holes > 0) for a, b, holes in case.rows or ()]
    found["heads"] = case.num_heads // case.num_kv_heads, case.num_kv_heads > 1, min(case.batch, 4)
    found["tokens"] = case.first_tokens > 0, case.first_tokens > 16
    return {(name, str(value)) for name, value in found.items()}


def cover(cases: Iterable[Case]) -> set[Case]:
    """Few and small ones of the cases in which every trait occurs."""
    of = {case: traits(case) for case in cases}
    work = {case: case.batch * case.num_kv_heads * (16 + case.q_len) * (16 + case.kv_len) * (64 + case.head_dim) for case in of}
    missing, chosen = set().union(*of.values()), set()
    while missing:
        chosen.add(best := max(of, key=lambda case: len(of[case] & missing) / work[case]))
        missing -= of[best]
    return chosen
