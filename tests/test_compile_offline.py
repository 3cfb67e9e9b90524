"""Compiles every kernel for GPUs, without a GPU, and checks shared memory, registers, and the position of waits.

The launchers run on CPU tensors. Instead of a launch, each kernel is compiled with exactly the arguments, specialisations and
options that the launch would have had.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import pytest
import test_forms
import torch
from calls import Launched
from cases import slow_unless
from conftest import INTERPRETED

triton = pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from hf_fastattn.kernels import eight_bits, paged, spans  # noqa: E402
from hf_fastattn.kernels.attention import backward, lean, prefill, schedule, split_kv  # noqa: E402
from hf_fastattn.kernels.attention.plan import Call  # noqa: E402
from hf_fastattn.kernels.biased import biased  # noqa: E402
from hf_fastattn.kernels.decode import (  # noqa: E402
    all_gather,
    all_reduce,
    append,
    build_spans,
    conv_update,
    experts,
    gated_delta,
    gated_norm,
    gather_heads,
    linear,
    linear_rows,
    linear_state,
    merge_ranks,
    reorder,
    ring,
    rms_norm,
    rope,
    rotate,
    route,
    sample,
    selective,
    shares,
)
from hf_fastattn.kernels.decode import residual as residual_sums  # noqa: E402
from hf_fastattn.kernels.host import gpu, tables  # noqa: E402
from hf_fastattn.kernels.mixture import Layout, Weights  # noqa: E402
from hf_fastattn.kernels.spec import KV, PLAIN, Spec, call  # noqa: E402

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
KIB = 1024
# Shared memory per program, and the number of multiprocessors, which only affects grids.
SHARED_LIMIT = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB}
PARKED = 256  # bytes per thread that may be spilled outside of loops
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class OfflineDriver:
    """The parts of a driver that Triton needs to compile. The device number is the architecture: caches are per device."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_device(self):
        return self.arch

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)


class NewDevice(OfflineDriver):
    """A device of its own, for which nothing is compiled yet: Triton keeps what other tests compile by device."""

    numbers = itertools.count(1000)

    def __init__(self, arch: int):
        super().__init__(arch)
        self.number = next(self.numbers)

    def get_current_device(self):
        return self.number


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: bytes of shared memory, registers and bytes of stack (spills) per thread, code at three levels."""

    shared: int
    registers: int
    stack: int
    ttgir: str
    ptx: str
    sass: str
    begins_early: bool


def read(kernel, folder: Path) -> Binary:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    run = subprocess.run([BIN / "cuobjdump", "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", run.stdout)}
    stack, sass = usage["STACK"] + usage["LOCAL"], ""
    if stack:
        sass = subprocess.run([BIN / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    return Binary(
        kernel.metadata.shared, usage["REG"], stack, kernel.asm["ttgir"], kernel.asm["ptx"], sass, kernel.metadata.launch_pdl
    )


def spills_in_tile_loops(sass: str, instructions: str = "LDL|STL") -> int:
    """Loads and stores of spilled registers in the innermost loops with matrix instructions."""
    return sum(in_tile_loops(sass, instructions))


def in_tile_loops(sass: str, instructions: str) -> list[int]:
    """How many of these instructions each of the innermost loops with matrix instructions has."""
    lines = sass.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*(\.L\w+):", line))}
    jumps = [(m[1], i) for i, line in enumerate(lines) if (m := re.search(r"\bBRA\b.*`\((\.L\w+)\)", line))]
    loops = [(labels[label], i) for label, i in jumps if labels[label] < i]
    multiply = [(a, b) for a, b in loops if any(re.search(r"\b(HMMA|HGMMA)\b", line) for line in lines[a:b])]
    assert multiply, "no loop with matrix instructions found"
    innermost = [(a, b) for a, b in multiply if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in multiply)]
    return [sum(bool(re.search(rf"\b({instructions})\b", line)) for line in lines[a:b]) for a, b in innermost]


@contextmanager
def compiling(module, kernels: tuple[str, ...], arch: int):
    """A context in which launches of these kernels compile them for `arch`; yields the compiled kernels by name."""
    compiled: dict = {}

    def compile_only(kernel, grid, *args, **kwargs):
        compiled[kernel.__name__] = kernel.warmup(*args, grid=grid, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", OfflineDriver(arch))
        patch.setattr(gpu, "arch", lambda device: arch)
        patch.setattr(gpu, "num_sms", lambda device: 108)
        if module is lean:  # its own kernels, also where it would use those of split_kv
            patch.setattr(schedule, "shares_within_heads", lambda *args: False)
            patch.setattr(schedule, "brief", lambda *args: None)
        if hasattr(module, "_prepare"):  # it caches launches of another architecture
            patch.setattr(module, "_prepare", module._prepare.__wrapped__)
        for name in kernels:
            patch.setattr(module, name, Launched(getattr(module, name), compile_only))
        yield compiled
    assert set(compiled) == set(kernels)


@dataclass(frozen=True)
class Shape:
    """One compilation with typical, aligned arguments."""

    dtype: str
    head_dim: int
    q_len: int = 1
    group: int = 4
    spans: bool = True
    batch: int = 4
    sinks: bool = False
    value_dim: int | None = None  # None: head_dim

    @property
    def id(self) -> str:
        width = self.head_dim if self.value_dim is None else f"{self.head_dim}v{self.value_dim}"
        name = f"{self.dtype}-d{width}-q{self.q_len}x{self.group}-b{self.batch}"
        return name + "-spans" * self.spans + "-sinks" * self.sinks


KERNELS = {
    "lean": (lean, ("lean_kernel", "lean_merge_kernel")),
    "split_kv": (split_kv, ("split_kv_kernel", "combine_kernel")),
    "split_kv, a program a head": (split_kv, ("split_kv_kernel",)),
    "prefill": (prefill, ("prefill_kernel",)),
}


@cache
def build(name: str, shape: Shape, arch: int, folder: Path) -> dict[str, Binary]:
    """The compiled kernels of one call of the launcher `name`."""
    module, kernels = KERNELS[name]
    q = torch.zeros(shape.batch, 8 * shape.group, shape.q_len, shape.head_dim, dtype=DTYPES[shape.dtype])
    k = torch.zeros(shape.batch, 8, 2048, shape.head_dim, dtype=q.dtype)
    v = k if shape.value_dim is None else k.new_zeros(shape.batch, 8, 2048, shape.value_dim)
    span = torch.zeros(shape.batch, 1, 1, spans.WORDS + spans.num_words(2048), dtype=torch.int32) if shape.spans else None
    sinks = {"sinks": 4, "window": 1000, "inv_freq": torch.ones(shape.head_dim // 2)} if shape.sinks else {}
    with compiling(module, kernels, arch) as compiled:
        call(getattr(module, name.partition(",")[0]), q, k, v, span, causal=not shape.spans, **sinks)
    return {kernel: read(binary, folder) for kernel, binary in compiled.items()}


DECODE = [
    Shape("bf16", 64),
    Shape("bf16", 64, spans=False),
    Shape("bf16", 128),
    Shape("fp16", 128, spans=False),
    Shape("bf16", 128, q_len=16),
    Shape("bf16", 256, q_len=16),
    Shape("fp32", 128),
    Shape("bf16", 64, sinks=True),
    Shape("bf16", 128, sinks=True),
]
PREFILL = [
    Shape("bf16", 64, q_len=2048),
    Shape("bf16", 128, q_len=2048),
    Shape("fp16", 128, q_len=2048, spans=False),
    Shape("bf16", 256, q_len=2048),
    Shape("fp32", 128, q_len=2048),
]
# Heads of latent attention and of Gemma 4. If values are also wider than 256, registers may be spilled.
WIDE = [
    Shape("bf16", 192, value_dim=128, q_len=16),
    Shape("bf16", 576, value_dim=512, q_len=16),
    Shape("fp32", 512, q_len=16),
    Shape("bf16", 512, sinks=True),
]
# More packed rows than one decode block has.
MANY_ROWS = [
    *((90, Shape("bf16", head_dim, q_len=100, sinks=sinks)) for head_dim in (64, 128, 256) for sinks in (False, True)),
    *((arch, Shape("bf16", head_dim, q_len=100)) for arch in (80, 89) for head_dim in (64, 128, 256)),
]
COMPILATIONS = [
    *(("lean", arch, shape) for arch, shape in MANY_ROWS),
    *(("lean", arch, shape) for arch in (80, 90) for shape in DECODE),
    ("lean", 80, Shape("bf16", 64, q_len=16)),
    *(("split_kv", arch, shape) for arch in (80, 90) for shape in DECODE if shape.spans),
    ("split_kv, a program a head", 90, Shape("bf16", 128, q_len=16, batch=13)),  # few keys of 64 rows
    *(("split_kv", 90, Shape("bf16", 64, q_len=8, sinks=sinks)) for sinks in (False, True)),
    *(("prefill", arch, shape) for arch in (80, 90) for shape in PREFILL),
    *(("lean", arch, shape) for arch in (80, 90) for shape in WIDE),
    *(("lean", 89, shape) for shape in WIDE[1:3]),
    *(("prefill", arch, replace(shape, q_len=2048)) for arch in (89, 90) for shape in WIDE[:3]),
    # Consumer GPUs have the least shared memory.
    *((name, 86, Shape("bf16", 256, q_len=16)) for name in ("lean", "split_kv")),
    *(("prefill", arch, shape) for arch in (86, 89) for shape in PREFILL if shape.dtype == "bf16"),
]


def new(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


TYPICAL = (DECODE[2], PREFILL[1])
NEW = slow_unless((90).__eq__, [80, 90])  # architectures


@pytest.mark.parametrize(
    "name, arch, shape",
    slow_unless(lambda c: c[1] in (80, 90) and c[2] in TYPICAL, COMPILATIONS),
    ids=lambda x: getattr(x, "id", x),
)
def test_shared_memory_and_registers(name, arch, shape, tmp_path):
    for kernel, binary in build(name, shape, arch, tmp_path).items():
        print(f"{kernel} sm_{arch} {shape.id}: {binary.shared} B shared, {binary.registers} registers, {binary.stack} B stack")
        assert f".target sm_{arch}" in binary.ptx
        assert binary.shared <= SHARED_LIMIT[arch], f"{kernel} needs {binary.shared} bytes of shared memory"
        # fp32 with IEEE dots is not optimised, and with values of 256 dimensions the output alone may exceed the registers.
        narrow = (shape.value_dim or shape.head_dim) <= 128
        if shape.dtype != "fp32" and (narrow or (arch, shape) in MANY_ROWS) and binary.stack:
            # With all 255 registers in use, ptxas may spill some around the loops over tiles, but not inside of them.
            assert not narrow or binary.stack <= PARKED, f"{kernel} spills {binary.stack} bytes per thread"
            # Triton 3.6 loads up to 8 numbers that do not change in these loops, of 650 to 1650 instructions; 3.9 none.
            loads = 8 if (name, shape) == ("lean", WIDE[0]) else 0
            assert spills_in_tile_loops(binary.sass) <= loads, f"{kernel} spills in the loops over K/V tiles"
            assert spills_in_tile_loops(binary.sass, "STL") == 0, f"{kernel} spills in the loops over K/V tiles"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, q_len, most_registers, most_instructions",
    [
        ("lean", 1, 250, 2200),
        ("split_kv", 1, 255, 2450),
        ("prefill", 2048, 251, 2750),
        ("append", 0, 30, 140),
        ("rope", 0, 54, 480),
    ],
)
def test_plain_keys_and_values_pay_nothing_for_forms(name, q_len, most_registers, most_instructions, tmp_path, monkeypatch):
    """The larger figure of Triton 3.6 and 3.9 from before forms changed scores or stored tokens (docs/dev/log.md)."""
    monkeypatch.setattr(gpu, "on_gpu", lambda device: True)
    if q_len:
        binary = next(iter(build(name, Shape("bf16", 128, q_len=q_len), 90, tmp_path).values()))
    else:
        module, run = {"append": (append, _append), "rope": (rope, _rope_that_appends)}[name]
        with compiling(module, (f"{name}_kernel",), 90) as compiled:
            run(head_dim=128)
        binary = read(compiled[f"{name}_kernel"], tmp_path)
    sass = subprocess.run([BIN / "nvdisasm", "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    # Triton 3.9 keeps one value of split_kv in memory, outside of the loops over tiles.
    assert binary.stack <= (8 if name == "split_kv" else 0) and binary.registers <= most_registers
    assert len(re.findall(r"/\*[0-9a-f]{4,}\*/ +.*;", sass)) <= most_instructions


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 256])  # at 256 dK and dV have programs of their own
def test_gradients_with_a_bias_of_keys_compile(head_dim):
    q, k, v, out, dout = (new(2, 4, 64, head_dim) for _ in range(5))
    bias, lse = torch.zeros(2, 2, 4, 64)
    with compiling(backward, ("dq_kernel", "dkdv_kernel"), 90):
        backward.backward(q, biased(KV(k, v), bias), out=out, lse=lse, dout=dout)


@pytest.mark.slow
@pytest.mark.parametrize("form", test_forms.FORMS, ids=lambda form: form.name)
def test_forms_compile(form, tmp_path, monkeypatch):
    """What the interpreter does not show. Also with sinks, and with a store in both launches that append."""
    monkeypatch.setattr(gpu, "on_gpu", lambda device: True)
    new = torch.zeros(2, 2, 1, 128, dtype=torch.bfloat16)
    k = new.expand(2, 2, 2048, 128).contiguous()
    if form is test_forms.PAGED:
        kv = KV(*[new.new_zeros(200, 2, test_forms.PAGE, 128)] * 2, form, pages=torch.zeros(2, 128, dtype=torch.int32))
    elif form is test_forms.BYTES:
        kv = eight_bits.eight_bits(*eight_bits.empty(k, k), new[:, :, 0].contiguous(), "int8")
    else:
        kv = KV(k, k, form)
    for name, q_len in (("lean", 1), ("prefill", 40)):
        module, kernels = KERNELS[name]
        with compiling(module, kernels, 90):
            getattr(module, name)(new.new_zeros(2, 8, q_len, 128), kv, Spec(sinks=4, window=99))
    if form.store is not None:
        slot, cos = torch.zeros(1, dtype=torch.int64), new.new_zeros(1, 1, 128)
        with compiling(append, ("append_kernel",), 90):
            append.append(kv, new, new, slot)
        with compiling(rope, ("rope_kernel",), 90):
            rope.rotation(new, new, cos, cos, (False,) * 5).launch(kv, new, slot)


EIGHT_BITS = [  # Triton 3.6 and 3.9; with single bytes in shared memory there are 4.1 to 6.1
    *(("int8", arch, head_dim, 4, most) for arch in (90, 80) for head_dim, most in ((128, 2.85), (256, 2.65), (64, 3.65))),
    *(("int8", 90, head_dim, 32, most) for head_dim, most in ((128, 4.0), (256, 3.8))),
    ("int8", 86, 128, 4, 3.3),
    ("fp8", 90, 128, 4, 2.7),
    ("fp8", 80, 128, 4, 4.2),  # which has no instruction for e4m3
]


@pytest.mark.parametrize("name", ["lean", "split_kv"])
@pytest.mark.parametrize("kv_dtype, arch, head_dim, rows, most", slow_unless(EIGHT_BITS[0].__eq__, EIGHT_BITS))
def test_few_instructions_for_each_number_in_8_bits(name, kv_dtype, arch, head_dim, rows, most, tmp_path):
    """In the loop over full tiles, with 16 or 32 rows; no byte is loaded alone, and nothing is spilled there."""
    module, kernels = KERNELS[name]
    k = torch.zeros(4, 8, 2048, head_dim, dtype=torch.bfloat16)
    kv = eight_bits.eight_bits(*eight_bits.empty(k, k), k[:, :, 0].contiguous(), kv_dtype)
    with compiling(module, kernels, arch) as compiled:
        getattr(module, name)(k.new_zeros(4, 8 * rows, 1, head_dim), kv, Spec())
        config = tables.decode(k.device, torch.uint8, head_dim, rows, None)
    binary = read(compiled[kernels[0]], tmp_path)
    sass = subprocess.run([BIN / "nvdisasm", "-c", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    numbers = 2 * config.BLOCK_N * head_dim // (32 * config.num_warps)
    assert binary.shared * config.programs_per_sm <= SHARED_LIMIT[arch] and spills_in_tile_loops(sass) == 0
    assert spills_in_tile_loops(sass, r"LDS\.U8|LDS\.S8") == 0 and "cp.async.cg" in binary.ptx
    found = min(in_tile_loops(sass, "[A-Z][A-Z0-9]+")) / numbers
    assert 1 < found <= most, found


PAGES = [
    (n, arch, size, dim)
    for n in ("lean", "split_kv", "prefill")
    for arch in (90, 80, 86)
    for size in (16, 256)
    for dim in (64, 128)
]


@pytest.mark.parametrize("name, arch, size, head_dim", slow_unless(("lean", 90, 256, 128).__eq__, PAGES))
def test_pages_are_loaded_as_far_ahead_as_plain_keys_and_values(name, arch, size, head_dim, tmp_path):
    """With as many tiles in shared memory, no more bytes of it, no program less per SM, and no spills in the loops over tiles."""
    shape = Shape("bf16", head_dim, q_len=2048 if name == "prefill" else 1)
    module, kernels = KERNELS[name]
    plain = build(name, shape, arch, tmp_path)[kernels[0]]
    q, pool = torch.zeros(4, 32, shape.q_len, head_dim).bfloat16(), torch.zeros(200, 8, size, head_dim).bfloat16()
    kv = paged.paged(pool, pool, torch.zeros(4, 2048 // size, dtype=torch.int32))
    with compiling(module, kernels, arch) as compiled:
        getattr(module, name)(q, kv, Spec(), torch.zeros(4, 1, 1, spans.WORDS + spans.num_words(2048), dtype=torch.int32))
    binary = read(compiled[kernels[0]], tmp_path)
    tiles = re.compile(r"local_alloc : \(\) -> !ttg.memdesc<(\d+x\d+x\d+)x")
    assert tiles.findall(binary.ttgir) == tiles.findall(plain.ttgir) != []
    assert binary.shared == plain.shared
    assert binary.stack == 0 or (binary.stack <= PARKED and spills_in_tile_loops(binary.sass) == 0)
    assert (64 << 10) // (128 * binary.registers) >= (64 << 10) // (128 * plain.registers)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("head_dim", [72, 120])
def test_a_head_dim_that_is_a_multiple_of_8_is_loaded_16_bytes_at_once(head_dim, arch, tmp_path):
    for name, q_len in (("split_kv", 1), ("lean", 1), ("lean", 100), ("prefill", 2048)):
        binary = next(iter(build(name, Shape("bf16", head_dim, q_len=q_len), arch, tmp_path).values()))
        as_at_128 = next(iter(build(name, Shape("bf16", 128, q_len=q_len), arch, tmp_path).values()))
        assert 0 < binary.ptx.count("cp.async.cg") <= as_at_128.ptx.count("cp.async.cg"), name
        assert not binary.stack or spills_in_tile_loops(binary.sass) == 0, name


WAIT = re.compile(r"griddepcontrol[._]wait|grid_dependency_wait")
LET = re.compile(r"griddepcontrol[._]launch_dependents|grid_dependency_launch_dependents")
TOUCH = re.compile(r"\b(tt\.(load|store)|ttg\.async_copy_global_to_local)\b")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [replace(s, batch=52, q_len=min(s.q_len, 4)) for s in DECODE if s.dtype == "bf16" and s.head_dim <= 128],
    ids=lambda s: s.id,
)
def test_with_many_heads_four_programs_fit_an_sm(shape, tmp_path):
    (binary,) = build("split_kv, a program a head", shape, 90, tmp_path).values()
    warps = 4 if shape.head_dim == 64 else 2
    assert 4 * 32 * warps * binary.registers <= 65536 and 4 * binary.shared <= SHARED_LIMIT[90]
    assert binary.stack <= 32 and (not binary.stack or spills_in_tile_loops(binary.sass) == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "head_dim, block", [(head_dim, block) for head_dim, found in schedule.BRIEF.items() for block, *_ in found]
)
@pytest.mark.parametrize("arch", [80, 90])
def test_blocks_of_packed_rows_do_not_spill_in_a_loop(arch, head_dim, block, tmp_path):
    q, k = (torch.zeros(1, heads, 2, head_dim, dtype=torch.bfloat16) for heads in (71, 1))
    k = k[:, :, :1].expand(1, 1, 2048, head_dim)
    with compiling(split_kv, ("split_kv_kernel", "combine_kernel"), arch) as compiled:
        config = tables.decode(torch.device("cuda", arch), q.dtype, head_dim, block, -(-142 // block))
        given = Call.of((q, k, k, *[None] * 6), PLAIN, Spec(), False)
        split_kv.fixed_splits(given, config, None).run(q, KV(k, k), Spec(), None, None, q, False)
    for binary in compiled.values():
        found = read(binary, tmp_path)
        assert not found.stack or spills_in_tile_loops(found.sass) == 0


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("head_dim, group", [(64, 1), (64, 16), (96, 8), (128, 1), (128, 16), (128, 64)])
def test_of_one_program_per_sm_two_do_not_fit(head_dim, group, sinks, tmp_path, monkeypatch):
    """Both would be placed on the first SM that is free (`tables.one_per_sm`)."""
    used: list[tables.Config] = []
    monkeypatch.setattr(tables, "one_per_sm", lambda *args, of=tables.one_per_sm: used.append(of(*args)) or used[-1])
    q, k = (torch.zeros(1, heads, 1, head_dim, dtype=torch.bfloat16) for heads in (12 * group, 12))
    k, frequencies = k.expand(1, 12, 32 << 10, head_dim), torch.ones(head_dim // 2)
    with compiling(split_kv, ("split_kv_kernel", "combine_kernel"), 90) as compiled:
        call(split_kv.split_kv, q, k, k, **{"sinks": sinks, "window": 32 << 10, "inv_freq": frequencies} if sinks else {})
    binary = read(compiled["split_kv_kernel"], tmp_path)
    assert used[0].programs_per_sm == 1 and SHARED_LIMIT[90] < 2 * binary.shared <= 2 * SHARED_LIMIT[90]
    assert binary.stack <= PARKED and (not binary.stack or spills_in_tile_loops(binary.sass) == 0)


@pytest.mark.slow
def test_four_programs_of_the_merge_of_shares_fit_an_sm(tmp_path):
    """Each warp merges rows of its own. If warps shared rows, sums over partial results would take twice the registers."""
    merge = pytest.importorskip("hf_fastattn.kernels.attention.prefill_hopper.merge")
    q, k = torch.zeros(1, 32, 300, 128, dtype=torch.bfloat16), torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16)
    k = k.expand(1, 8, 8192, 128)
    given = Call.of((q, k, k, *[None] * 6), PLAIN, Spec(causal=False), False)
    with compiling(merge, ("merge_shares_kernel",), 90) as compiled:
        start = merge.merge_shares(given, 4, (10, 8, 8, 8, 0), 7, 128, 128, 0, 0)
        start(q, q, torch.zeros(1), spans.no_spans(q.device, False), q)
    (kernel,) = compiled.values()
    assert 4 * kernel.metadata.num_warps * 32 * read(kernel, tmp_path).registers <= 65536


@pytest.mark.parametrize("arch", NEW)
@pytest.mark.parametrize(
    "shape", slow_unless(TYPICAL.__contains__, [s for s in DECODE if s.dtype == "bf16" and s.q_len == 1]), ids=lambda s: s.id
)
def test_launches_begin_early_from_hopper_on_and_wait_before_memory_accesses(shape, arch, tmp_path):
    for name in ("lean", "split_kv"):
        for kernel, binary in build(name, shape, arch, tmp_path).items():
            # The merge of lean may read spans, int32, past the L1 cache before the wait: lean_kernel has waited for them.
            past_l1 = re.sub(r"tt\.load(?=.*cache_?[mM]odifier = cg.*ptr<i32>)", "read", binary.ttgir)
            code = past_l1 if kernel == "lean_merge_kernel" else binary.ttgir
            waits, touches = WAIT.search(code), TOUCH.search(code)
            assert bool(waits) == (arch == 90), kernel
            assert not waits or waits.start() < touches.start(), f"{kernel} touches memory before it waits"
            assert binary.begins_early == bool(waits), f"{kernel} is launched early and does not wait, or waits for nothing"
            lets = LET.search(code)
            assert not (waits and lets) or waits.start() < lets.start(), f"{kernel} lets the next begin before it waits"
            if kernel == "split_kv_kernel" and waits and shape.sinks and 2 * binary.shared <= SHARED_LIMIT[90]:
                assert 3 * 4 * 32 * binary.registers <= 65536, "no room for one more program"


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [Shape("bf16", 128, q_len=16, batch=6), *(s for s in DECODE if s.dtype == "bf16" and not s.sinks)],
    ids=lambda s: s.id,
)
def test_merges_load_everything_before_their_first_reduction(shape, tmp_path):
    for name in ("lean", "split_kv"):
        for kernel, binary in build(name, shape, 90, tmp_path).items():
            if kernel in ("combine_kernel", "lean_merge_kernel"):
                # The sums of lean's schedule come before the wait: Triton 3.6 reduces them over threads, 3.9 within one.
                merge = binary.ptx[WAIT.search(binary.ptx).end() :]
                loads, reduction = merge.rindex("ld.global"), merge.index("shfl.sync")
                assert loads < reduction, f"{kernel}: loads after a barrier take the time of a second load"


def _append(q_len=1, head_dim=64):
    new, slot = torch.zeros(2, 4, q_len, head_dim, dtype=torch.float16), torch.zeros(1, dtype=torch.int64)
    buffer = torch.zeros(2, 4, 100, head_dim, dtype=torch.float16)
    append.append(KV(buffer, buffer), new, new, slot)


def _rotate(head_dim=64):
    q, span = torch.zeros(2, 8, 1, head_dim, dtype=torch.float16), torch.zeros(2, 1, 1, spans.WORDS, dtype=torch.int32)
    rotate.rotate(q, 100, span, torch.ones(head_dim // 2), window=64, sinks=4, interleaved=False)


def _rope(width=64, **options):
    q, cos = torch.zeros(2, 8, 1, 64, dtype=torch.bfloat16), torch.zeros(1, 1, width, dtype=torch.bfloat16)
    assert rope.run(q, q, cos, cos, **options) is not None


def _rope_that_appends(head_dim):
    new, cos = torch.zeros(2, 8, 1, head_dim, dtype=torch.bfloat16), torch.zeros(1, 1, head_dim, dtype=torch.bfloat16)
    buffer, slot = torch.zeros(2, 8, 100, head_dim, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int64)
    rope.rotation(new, new, cos, cos, (False,) * 5).launch(KV(buffer, buffer), new, slot)


def _norm(bias=False, **options):
    x, weight = torch.zeros(2, 96, dtype=torch.bfloat16), torch.zeros(96, dtype=torch.bfloat16)
    assert rms_norm.run(x, weight, weight if bias else None, 1e-6, **options) is not None


def _residual(rows=2, **options):
    x, weight = torch.zeros(rows, 96, dtype=torch.bfloat16), torch.zeros(96, dtype=torch.bfloat16)
    gemma = residual_sums.Normed(weight, None, 1e-6, (False, True, "fp32"), x)
    centred = residual_sums.Normed(weight, weight, 1e-6, (True, True, ""), x)
    residual_sums.run(
        residual_sums.Chain(x, gemma, 0.5, x, ((x, x), (x, x))) if options else residual_sums.Chain(x, sums=((x, x),)), centred
    )


def _gated_sum(gate_of_rows=True):
    x, weight = torch.zeros(2, 96, dtype=torch.bfloat16), torch.zeros(96, dtype=torch.bfloat16)
    gate = x[:, :1].clone() if gate_of_rows else x
    gemma = residual_sums.Normed(weight, None, 1e-6, (False, True, "fp32"), x)
    residual_sums.run(residual_sums.Chain(x, scaled=x, sums=((x, x), (x, x)), gate=(gate, gate)), gemma)


def _peers(x):
    addresses, counts = torch.zeros(4, dtype=torch.int64), torch.zeros(64, dtype=torch.int32)
    return all_reduce.Peers(x, addresses, counts, 1, 4, all_reduce.block_bytes(4096, x.dtype))


def _sum_over_ranks(dtype=torch.bfloat16, rows=2):
    x = torch.zeros(rows, 4096, dtype=dtype)
    residual_sums.run(residual_sums.Chain(x, sums=((x, x),), peers=_peers(x)))


def _all_gather(dtype=torch.bfloat16):
    x = torch.zeros(2, 4096, dtype=dtype)
    assert all_gather.all_gather(x, _peers(x)) is not None


def _gather_heads(dtype=torch.bfloat16, tokens=1, copies=1):
    q, kv, keys = (torch.zeros(2, heads, n, 128, dtype=dtype) for heads, n in ((16, tokens), (2, tokens), (8 // copies, 4096)))
    peers = _peers(torch.zeros(1, 4096, dtype=dtype))
    assert gather_heads.gather_heads(q, kv, kv, keys, keys, torch.zeros(1, tokens, dtype=torch.int64), peers, copies) is not None


def _merge_ranks(dtype=torch.bfloat16, tokens=1, sinks=False):
    out, lse, logits = torch.zeros(2, 64, tokens, 128, dtype=dtype), torch.zeros(2, 64, tokens), torch.zeros(16, dtype=dtype)
    peers = _peers(torch.zeros(1, 4096, dtype=dtype))
    assert merge_ranks.merge_ranks(out, lse, 16, logits if sinks else None, peers) is not None


def _rope_of_norms():
    x, cos, weight = torch.zeros(2, 8, 1, 96).bfloat16(), torch.zeros(1, 1, 96).bfloat16(), torch.zeros(96).bfloat16()
    norm = rope.Normed(x, weight, None, 1e-6, (False, True, "fp32"), x)
    rotation = rope.rotation(x, x, cos, cos, (False, False, False, False, False), (norm, norm))
    rotation.launch(KV(x, x), x, torch.zeros(1, dtype=torch.int64))


def _conv(gated=False, dtype=torch.bfloat16):
    x, weight = torch.zeros(2, 3 * 1024, dtype=dtype), torch.zeros(1024, 4, dtype=dtype)
    gates = [x[:, :1024], x[:, 1024:2048]] if gated else []
    conv_update.prepared(x[:, 2048:], x.new_zeros(2, 1024, 4), weight, weight[:, 0].clone(), not gated, *gates).launch()


def _delta(rows=1, dim=128, state=torch.float32):
    mixed, gates, own = new(rows, 4 * 8 * dim), new(rows, 8, 2), new(16)
    gated_delta.prepared(mixed, gates, gates, own, own, torch.zeros(rows, 16, dim, dim, dtype=state)).launch()


def _selective(rows=1, head_dim=64, size=128, gated=False, dtype=torch.bfloat16):
    mixed, own = torch.zeros(rows, 48 * head_dim + 2 * size, dtype=dtype), torch.zeros(48, dtype=dtype)
    gate = torch.zeros(rows, 48 * head_dim, dtype=dtype) if gated else None
    dt, state = torch.zeros(rows, 48, dtype=dtype), torch.zeros(rows, 48, head_dim, size)
    selective.prepared(mixed, dt, own, own, own, state, gate).launch()


def _gated_norm(size=128, groups=1, **options):
    x = new(2, size)
    assert gated_norm.run(x, x, x[0], 1e-6, options.get("first", False), options.get("late", False), groups) is not None


def _linear_state(features=256, dim=128, group=4):
    fq, z, v = torch.zeros(2, 8 * group, features), torch.zeros(2, 8, features), new(2, 8, dim)
    linear_state.linear_state(fq, z, v, torch.zeros(2, 8, features, dim), z)


SMALL = {
    "conv_update": (conv_update, _conv),
    "conv_update, of gates": (conv_update, lambda: _conv(True)),
    "conv_update, fp32": (conv_update, lambda: _conv(dtype=torch.float32)),
    "gated_delta": (gated_delta, _delta),
    "gated_delta, many rows": (gated_delta, lambda: _delta(64)),
    "gated_delta, wide": (gated_delta, lambda: _delta(64, 256, torch.bfloat16)),
    "selective": (selective, _selective),
    "selective, many rows": (selective, lambda: _selective(64)),
    "selective, wide": (selective, lambda: _selective(64, 128, 256, gated=True)),
    "selective, fp32": (selective, lambda: _selective(dtype=torch.float32)),
    "linear_state": (linear_state, _linear_state),
    "linear_state, wide": (linear_state, lambda: _linear_state(8385, 80, 5)),
    "gated_norm": (gated_norm, _gated_norm),
    "gated_norm, of groups": (gated_norm, lambda: _gated_norm(8192, 8, first=True, late=True)),
    "append": (append, _append),
    "append of several tokens": (append, partial(_append, 8)),
    "ring_step": (ring, lambda: ring.ring_step(torch.zeros(2, dtype=torch.int64), None, 64, 4)),
    "rotate": (rotate, _rotate),
    "rope": (rope, _rope),
    "rope, partial and interleaved": (rope, lambda: _rope(48, interleaved=True, of_pair=True)),
    "rope, one cosine a pair": (rope, lambda: _rope(32, of_pair=True, doubled=True)),
    "rope, of norms": (rope, _rope_of_norms),
    "rope, apart": (rope, lambda: _rope(interleaved=True, apart=True, of_pair=True, late=True)),
    "residual": (residual_sums, _residual),
    "residual, one row": (residual_sums, lambda: _residual(1)),
    "residual, everything": (residual_sums, lambda: _residual(everything=True)),
    "residual, of a gate": (residual_sums, lambda: _gated_sum(False)),
    "residual, of a gate for each row": (residual_sums, _gated_sum),
    "residual, over ranks": (residual_sums, _sum_over_ranks),
    "residual, over ranks, fp32": (residual_sums, lambda: _sum_over_ranks(torch.float32)),
    "residual, over ranks, many rows": (residual_sums, lambda: _sum_over_ranks(rows=16)),
    "all_gather": (all_gather, _all_gather),
    "all_gather, fp32": (all_gather, lambda: _all_gather(torch.float32)),
    "gather_heads": (gather_heads, _gather_heads),
    "gather_heads, copies": (gather_heads, lambda: _gather_heads(torch.float32, 9, 2)),
    "merge_ranks": (merge_ranks, _merge_ranks),
    "merge_ranks, sinks": (merge_ranks, lambda: _merge_ranks(torch.float32, 9, sinks=True)),
    "rms_norm": (rms_norm, _norm),
    "rms_norm, Gemma": (rms_norm, lambda: _norm(late=True, one="fp32")),
    "rms_norm, rounded": (rms_norm, lambda: _norm(one="rounded")),
    "rms_norm, LayerNorm": (rms_norm, lambda: _norm(True, centred=True, late=True)),
    "merge_shares": (shares, lambda: shares.merge_shares(torch.zeros(2, 1, 8, 1, 66, dtype=torch.bfloat16), 64)),
    "merge_shares, sinks": (shares, lambda: shares.merge_shares(torch.zeros(2, 1, 8, 1, 66).half(), 64, torch.zeros(8))),
    "sample": (sample, lambda: sample.Sampler()(torch.zeros(2, 128_256), sample.Settings(0.5, 50, 0.9))),
    "route": (route, lambda: route.route(torch.zeros(2, 60), 3, "softmax")),
}


def check_exchange(ptx: str, every: bool) -> None:
    """Words of 8 bytes with data and flag are written and read at once, and read again until they have come: two words at once,
    unless those of all ranks are read together."""
    assert not re.search("membar|fence", ptx) and "trap;" in ptx
    if every:
        assert len(re.findall(r"ld\.volatile\.global\.(v2\.)?b64", ptx)) >= 4 and "st.global.v2.b64" in ptx
        return
    assert "st.global.v2.b64" in ptx and ptx.count("ld.volatile.global.v2.b64") >= 6  # of three ranks, before and in the loop
    assert not re.search(r"st\.global\.b(16|64)|ld\.volatile\.global\.b64", ptx)


def check_stores_last(ttgir: str) -> None:
    """A load after a store waits for it, as it may read the same address."""
    assert ttgir.rindex("tt.load") < ttgir.index("tt.store")


@pytest.mark.parametrize("arch", NEW)
@pytest.mark.parametrize("name", slow_unless(str.isidentifier, SMALL))
def test_small_kernels_begin_early_from_hopper_on_and_wait_first(name, arch, monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")  # the default from Triton 3.10 on
    module, call = SMALL[name]
    if hasattr(module, "INTERPRETED"):  # otherwise CPU tensors run the reference
        monkeypatch.setattr(module, "INTERPRETED", True)
    with compiling(module, (f"{re.split('[ ,]', name)[0]}_kernel",), arch) as compiled:
        call()
    (kernel,) = compiled.values()
    waits, touches = WAIT.search(kernel.asm["ttgir"]), list(TOUCH.finditer(kernel.asm["ttgir"]))
    assert bool(waits) == kernel.metadata.launch_pdl == (arch == 90)
    lets = LET.search(kernel.asm["ttgir"])
    weights = {"residual": 2, "residual, one row": 2, "residual, everything": 3, "rope, of norms": 4}.get(
        name, int(module in (gated_delta, selective) or "gate for" in name or name == "residual, of a gate")
    )  # older than the previous launch
    assert not waits or waits.start() < touches[weights].start()
    # A norm of one row lets a linear layer load weights before its own inputs are there.
    assert not waits or (lets is not None and lets.start() < waits.start()) == (name == "residual, one row")
    assert not waits or (lets is None) == (name == "ring_step")  # the next launch does not begin early
    assert not waits or not weights or touches[weights - 1].start() < waits.start()
    if "ranks" in name or "gather" in name:
        check_exchange(kernel.asm["ptx"], module is merge_ranks)
    # Products are rounded before they are added to.
    rounds = module in (residual_sums, rope, rms_norm, conv_update, selective, gated_norm)
    assert kernel.metadata.enable_fp_fusion != (rounds or module in (append, sample))
    if rounds and "ranks" not in name:
        check_stores_last(kernel.asm["ttgir"])


STEPS = [name for name, (module, _) in SMALL.items() if module in (conv_update, gated_delta, selective, gated_norm)]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("name", slow_unless(("gated_delta, many rows", "selective, wide").__contains__, STEPS))
def test_a_state_is_read_and_written_in_words_of_16_bytes_and_nothing_is_spilled(name, arch, tmp_path):
    module, call = SMALL[name]
    with compiling(module, (f"{re.split('[ ,]', name)[0]}_kernel",), arch) as compiled:
        call()
    binary = read(*compiled.values(), tmp_path)
    assert binary.stack <= 8 and binary.registers <= 96  # one register may be parked; five programs fit a multiprocessor
    if module in (gated_delta, selective):
        before, _, after = binary.ptx.partition("griddepcontrol.wait")  # there is none on an A100
        loads = binary.ptx.count("ld.global.cg.v4.b32")
        assert loads == before.count("ld.global.cg.v4.b32") >= 2 and binary.ptx.count("st.global.v4.b32") == loads
        assert bool(after) == (arch == 90)


@pytest.mark.parametrize("arch", slow_unless((90).__eq__, SHARED_LIMIT))
@pytest.mark.parametrize("kind", ["plain", "bias", "gated"])
@pytest.mark.parametrize("size", slow_unless((4096).__eq__, [576, 4096, 14336]))
def test_linear_layers_load_parameters_ahead_of_the_wait_and_nothing_else(size, kind, arch, tmp_path):
    x, weight, gated = new(1, 1, size), new(64, size), kind == "gated"
    name = "gated_linear_kernel" if gated else "linear_kernel"
    with compiling(linear, (name,), arch) as compiled:
        linear.gated_linear(x, weight, weight) if gated else linear.linear(x, weight, new(64) if kind == "bias" else None)
    binary = read(compiled[name], tmp_path)
    assert binary.stack == 0 and binary.shared <= SHARED_LIMIT[arch]
    wait = WAIT.search(binary.ttgir)
    assert bool(wait) == binary.begins_early == (arch == 90)
    if wait:
        assert wait.start() < LET.search(binary.ttgir).start()
        ahead = [line for line in binary.ttgir[: wait.start()].splitlines() if TOUCH.search(line)]
        assert [bool(re.search(r"tt\.load.*tensor<\d+x\d+x", line)) for line in ahead] == {
            "plain": [True],
            "bias": [True, False],
            "gated": [True, True],
        }[kind]  # of the bias, as of X, it is one row


@pytest.mark.parametrize("arch", slow_unless((90).__eq__, [80, 89, 90]))
@pytest.mark.parametrize("tokens", slow_unless((64).__ne__, [1, 16, 64]))
@pytest.mark.parametrize("kind", slow_unless(("all", "gated").__contains__, ["all", "sum", "relu", "gelu_tanh", "mul", "gated"]))
def test_linear_layers_load_16_bytes_at_once_and_spill_nothing(kind, tokens, arch, tmp_path, monkeypatch):
    x, weight, bias = new(1, tokens, 4096), new(64, 4096), new(64)
    module, name = (linear, "linear_kernel") if tokens == 1 else (linear_rows, "linear_rows_kernel")
    if kind == "gated" and tokens == 1:
        name = "gated_linear_kernel"
    if module is linear_rows:
        monkeypatch.setattr(linear, "_prepare", linear._prepare.__wrapped__)  # it caches launches of another architecture
    with compiling(module, (name,), arch) as compiled:
        if kind == "gated":
            linear.gated_linear(x, weight, weight, "gelu_tanh")
        elif kind == "sum":
            linear.linear_and_sum(x, weight, bias, new(1, tokens, 64))
        elif kind == "all":
            linear.linears(x, (weight,) * linear_rows.MAX_WEIGHTS, (bias,) * linear_rows.MAX_WEIGHTS)
        else:
            number, then = (3, linear.Then(kind, factor=0.125)) if kind == "mul" else (1, linear.Then(kind))
            linear.prepared(x, (weight,) * number, (bias,) * number).launch_with(then, new(1, tokens, 64))
    binary = read(compiled[name], tmp_path)
    assert binary.stack == 0 and binary.shared <= SHARED_LIMIT[arch]
    assert binary.begins_early == (arch == 90)
    if tokens == 1:
        assert re.search(r"ld\.global\S*\.v4\.b32", binary.ptx)
        check_stores_last(binary.ttgir)
    else:
        stores = Counter(re.findall(r"st\.global\.(\S+)", binary.ptx))
        assert stores.pop("b32", 0) <= 1  # to the counter of a tile
        assert set(stores) <= ({"v4.b32", "v2.b32"} if kind == "gated" else {"v4.b32"})
        assert "cp.async.cg.shared.global" in binary.ptx and "cp.async.ca" not in binary.ptx  # .cg has 16 bytes
        waits, touches = WAIT.search(binary.ttgir), list(TOUCH.finditer(binary.ttgir))
        assert bool(waits) == (arch == 90)
        ahead = [each for each in touches if waits and each.start() < waits.start()]
        assert len(ahead) == (arch == 90 and kind not in ("gated", "all", "mul"))  # the bias of one weight
        requests = binary.ptx.find("prefetch.global.L2")
        assert (requests >= 0) == (arch == 90 and tokens == 16)  # for the first columns of the weights, before the wait
        assert requests < 0 or requests < WAIT.search(binary.ptx).start()


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokens, kind",
    [*itertools.product([16, 32, 64], ["sum", "gated", "head"]), *((128, kind) for kind in ("gated", "half", "projections"))],
)
def test_the_buffers_of_linear_layers_fill_the_shared_memory_of_hopper(kind, tokens, tmp_path, monkeypatch):
    """One program on each multiprocessor if there are no more tiles than multiprocessors, otherwise two."""
    wide = 2 if (tokens, kind) == (128, "gated") else 1  # tiles of 128 rows instead of 64, or half as many tiles
    gated = kind in ("gated", "half")
    x, weight = new(1, tokens, 1024), new(wide * 108 * 64 + (kind == "head"), 1024)  # 108 multiprocessors
    monkeypatch.setattr(linear, "_prepare", linear._prepare.__wrapped__)
    with compiling(linear_rows, ("linear_rows_kernel",), 90) as compiled:
        if kind == "projections":
            linear.linears(x, (weight, weight))
        else:
            linear.gated_linear(x, weight, weight) if gated else linear.linear(x, weight)
    binary, resident = read(compiled["linear_rows_kernel"], tmp_path), 1 if kind in ("sum", "half") else 2
    assert binary.stack == 0 and 2 / 3 * 228 * KIB < resident * (binary.shared + KIB) <= 228 * KIB
    rows = [len(weight)] * (2 if kind == "projections" else 1)
    assert linear_rows.tiles(90, 108, tokens, rows, 1024, gated).splits == 1


@pytest.mark.parametrize(
    "tokens, kind, arch",
    slow_unless(
        (1, "plain", 90).__eq__,
        [
            *((1, "plain", 90), (8, "long rows", 90), (32, "long rows", 89), (64, "interleaved", 90)),
            *((4, "interleaved", 80), (64, "fp32", 80), (64, "fp32", 90)),
        ],
    ),
)
def test_experts_wait_before_they_read_what_launches_write(tokens, kind, arch, tmp_path):
    new = lambda *shape: torch.zeros(*shape, dtype=torch.float32 if kind == "fp32" else torch.bfloat16)  # noqa: E731
    size, layout, biases = 4096 if kind == "long rows" else 1920, Layout(), ()
    weights = new(4, 256, size), new(4, size, 128)
    if kind == "interleaved":
        layout = Layout(transposed=True, interleaved=True, act="sigmoid", alpha=1.702, limit=7.0)
        weights, biases = tuple(weight.transpose(1, 2).contiguous() for weight in weights), (new(4, 256), new(4, size))
    chosen = torch.zeros(tokens, 2, dtype=torch.int64)
    with compiling(experts, ("gate_up_kernel", "down_kernel", "sum_kernel"), arch) as compiled:
        experts.run(new(tokens, size), chosen, new(tokens, 2), Weights(*weights, *biases), layout)
    for name, kernel in compiled.items():
        binary = read(kernel, tmp_path)
        assert binary.stack == 0 and binary.shared <= SHARED_LIMIT[arch]
        wait = WAIT.search(binary.ttgir)
        assert bool(wait) == binary.begins_early == (arch == 90)
        assert not wait or wait.start() < TOUCH.search(binary.ttgir).start(), f"{name} touches memory before it waits"
        if name != "sum_kernel" and arch == 90 and kind != "fp32":
            assert "wgmma" in binary.ptx
        if name == "sum_kernel":  # with one token it does not look for the first choice of an expert
            assert ("shfl" in binary.ptx) == (tokens > 1)
        if name != "sum_kernel" and kind == "interleaved":  # biases arrive while the weights are read
            assert binary.ttgir.rindex("tt.load") < binary.ttgir.index("scf.for")


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("count, choices, form", [(128, 8, "softmax"), (32, 4, "choice"), (256, 8, "sigmoid")])
def test_a_choice_of_experts_is_two_or_three_reductions_of_one_instruction(count, choices, form, arch, tmp_path):
    correction = torch.zeros(count) if form == "sigmoid" else None
    with compiling(route, ("route_kernel",), arch) as compiled:
        route.route(torch.zeros(4, count, dtype=torch.bfloat16), choices, form, normalise=True, correction=correction)
    binary = read(compiled["route_kernel"], tmp_path)
    number = len(re.findall(r"redux\.sync\.(?:max|min)", binary.ptx))
    assert binary.stack == 0 and number == choices * (3 if form == "sigmoid" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("count, choices, form", [(128, 8, "softmax"), (32, 4, "choice"), (128, 8, "sigmoid")])
def test_a_choice_in_the_launch_of_experts_spills_nothing_and_its_warps_choose_apart(count, choices, form, arch, tmp_path):
    correction = torch.zeros(count) if form == "sigmoid" else None
    with compiling(route, ("route_kernel",), arch) as alone:
        choice = route.prepared(new(1, count), choices, form, normalise=True, correction=correction)
        choice.launch()
    with compiling(experts, ("gate_up_kernel", "down_kernel", "sum_kernel"), arch) as compiled:
        weights = Weights(new(count, 256, 256), new(count, 256, 128))
        experts.run(new(1, 256), choice.experts, choice.scores, weights, Layout(), choice)
    binary = read(compiled["gate_up_kernel"], tmp_path)
    assert binary.stack == 0
    reductions = [
        re.findall(r"redux\.sync\.(?:max|min)", kernel.asm["ptx"])
        for kernel in (alone["route_kernel"], compiled["gate_up_kernel"])
    ]
    assert 0 <= len(reductions[1]) - len(reductions[0]) <= 2  # those of the expert of this program
    wait = WAIT.search(binary.ttgir)
    assert bool(wait) == (arch == 90) and not (wait and wait.start() > TOUCH.search(binary.ttgir).start())
    assert "convert_layout" not in binary.ttgir[: binary.ttgir.index("scf.for")]  # through shared memory, with a barrier


@pytest.mark.parametrize("arch", [80, 90])
def test_spans_kernel_compiles(arch, tmp_path):
    mask = torch.zeros(4, 100, dtype=torch.bool)
    span = torch.zeros(4, 1, 1, spans.WORDS + spans.num_words(100), dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int64)
    with compiling(build_spans, ("_build_spans_kernel",), arch) as compiled:
        build_spans._build_spans_kernel[(4,)](
            *(span, mask, one, one, 0, 100, 1, 100, spans.num_words(100), 1, 100, 0, spans.NO_WINDOW),
            EACH=False,
            HAS_MASK=True,
            CAUSAL=spans.CAUSAL,
            HOLES=spans.HOLES,
            NUM_INTS=spans.WORDS,
            BLOCK=128,
            num_warps=8,
        )
    binary = read(compiled["_build_spans_kernel"], tmp_path)
    assert binary.shared <= SHARED_LIMIT[arch] and binary.stack == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("rows, head_dim", [(4, 128), (64, 128), (3, 80), (4, 72)])
def test_reordered_rows_move_in_wide_words(rows, head_dim, arch, tmp_path, monkeypatch):
    monkeypatch.setattr(reorder, "INTERPRETED", True)  # otherwise CPU tensors run the reference
    buffer = torch.zeros(rows, 2, 256, head_dim, dtype=torch.bfloat16)
    assert reorder.fits(buffer)
    with compiling(reorder, ("reorder_kernel",), arch) as compiled:
        reorder.reorder(torch.zeros(4, dtype=torch.int64), buffer, 100, torch.zeros(rows, dtype=torch.int64))
    binary = read(compiled["reorder_kernel"], tmp_path)
    assert binary.stack == 0 and re.search(r"ld\.global\.v4\.b32", binary.ptx) and "bar.sync" in binary.ptx


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("head_dim", [72, 120])
@pytest.mark.parametrize("module, call", [(append, _append), (rotate, _rotate), (rope, _rope_that_appends)])
def test_rows_move_in_wide_words_at_a_head_dim_that_is_a_multiple_of_8(module, call, head_dim, arch, monkeypatch):
    monkeypatch.setattr(module, "INTERPRETED", True, raising=False)
    kernel, loads, stores = f"{module.__name__.rpartition('.')[2]}_kernel", [], []
    for size in (head_dim, 128):
        with compiling(module, (kernel,), arch) as compiled:
            call(head_dim=size)
        ptx = compiled[kernel].asm["ptx"]
        loads.append(ptx.count("ld.global"))
        stores.append(Counter(re.findall(r"st\.global\S+", ptx)))
    assert stores[0] == stores[1] and loads[0] < 2 * loads[1]  # half of 72 or 120 dimensions is no multiple of 8
