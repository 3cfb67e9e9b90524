"""The backward kernels compiled without a GPU: shared memory, registers, no spills in the loops over tiles."""

import re
import subprocess
from unittest.mock import MagicMock

import pytest
import torch
from conftest import INTERPRETED

pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from test_compile_offline import BIN, DTYPES, PARKED, SHARED_LIMIT, compiling, read, spills_in_tile_loops

from hf_fastattn.kernels import spans
from hf_fastattn.kernels.attention import backward, prefill
from hf_fastattn.kernels.attention.backward import hopper
from hf_fastattn.kernels.biased import biased
from hf_fastattn.kernels.host import gpu
from hf_fastattn.kernels.host.launch import Launch
from hf_fastattn.kernels.spec import KV, Spec

HOPPER = [(90, "bf16", 64, {}), (90, "fp16", 128, {"form": "rows"}), (90, "bf16", 256, {})]
SHAPES = [
    (80, "bf16", 64, {}),
    (80, "bf16", 128, {"form": "rows", "softcap": 30.0}),
    (80, "fp32", 128, {}),
    (89, "bf16", 128, {}),
    (89, "bf16", 256, {}),
    *HOPPER,  # only dQ; the others run the portable kernel for dK and dV
    (90, "bf16", 64, {"form": "spans", "softcap": 30.0, "length": 64}),
    (90, "bf16", 128, {"form": "spans", "length": 64}),
    (90, "fp32", 128, {}),
    *((arch, "bf16", dim, {"form": "bias"}) for arch, dim in ((80, 128), (90, 64), (90, 128))),
]


def inputs(head_dim: int, dtype: str, own: dict) -> tuple:
    """The arguments of a backward call, by position and by name."""
    form, length = own.get("form"), own.get("length", 2048)
    q = torch.zeros(2, 16, length, head_dim, dtype=DTYPES[dtype])
    heads = 16 if form == "bias" else 4
    k = q.new_zeros(2, heads, length, head_dim)
    v = q.new_zeros(2, heads, length, own.get("value_dim", head_dim))
    out, lse = q.new_zeros(2, 16, length, v.shape[3]), torch.zeros(2, 16, length)
    span = spans.build_spans(2, length, length, q.device, attention_mask=torch.ones(2, length, dtype=torch.bool))
    if form == "rows":
        span = spans.with_rows(span, *spans.segments(torch.ones(2, length, dtype=torch.bool)))
    spec = Spec(causal=form is None, softcap=own.get("softcap"))
    kv = biased(KV(k, v), torch.zeros(2, heads, length)) if form == "bias" else KV(k, v)
    return (q, kv, spec, span if form else None), {"out": out, "lse": lse, "dout": out}


@pytest.mark.slow
@pytest.mark.parametrize("arch, dtype, head_dim, own", SHAPES, ids=str)
def test_backward_kernels_compile(arch, dtype, head_dim, own, tmp_path, monkeypatch):
    monkeypatch.setattr(hopper, "dkdv_hopper_kernel", MagicMock(arg_names=hopper.dkdv_hopper_kernel.arg_names))
    arguments, options = inputs(head_dim, dtype, own)
    kernels = ("dq_kernel",) if (arch, dtype, head_dim, own) in HOPPER else ("dq_kernel", "dkdv_kernel")
    with compiling(backward, kernels, arch) as compiled:
        backward.backward(*arguments, **options)
    for name, kernel in compiled.items():
        binary = read(kernel, tmp_path)
        print(f"{name} sm_{arch}: {binary.shared} B shared, {binary.registers} registers, {binary.stack} B stack")
        assert binary.shared <= SHARED_LIMIT[arch]
        if binary.stack and dtype != "fp32":
            # With 128 dimensions, dK and dV take half the registers: a few values spill in the loop with a mask. So does a bias.
            few = 16 if (arch, name) == (90, "dkdv_kernel") and (head_dim == 128 or own == {"form": "bias"}) else 0
            assert binary.stack <= PARKED and spills_in_tile_loops(binary.sass) <= few, f"{name} spills"
        if arch == 90 and dtype != "fp32":
            assert "wgmma" in binary.ptx


def _in_the_middle(x):
    """A view at an address that is not divisible by 16."""
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


GRADIENTS = {
    "contiguous": lambda out: out,
    "of tokens before heads": lambda out: out.transpose(1, 2).contiguous().transpose(1, 2),
    "of a sum": lambda out: out.new_zeros(()).expand_as(out),
    "of a mean over tokens": lambda out: out[:, :, :1].expand_as(out),
    "of a mean over heads": lambda out: out[:, :1].expand_as(out),
    "of a part": lambda out: torch.cat([out, out[..., :1]], -1)[..., :-1],
    "at an odd address": _in_the_middle,
    "in fp32": torch.Tensor.float,
}


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("arch", [80, 90])
def test_the_layout_of_the_gradient_does_not_choose_the_kernel(arch, kind, monkeypatch):
    monkeypatch.setattr(gpu, "arch", lambda device: arch)
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    monkeypatch.setattr(backward, "_prepare", backward._prepare.__wrapped__)
    launched = {}
    monkeypatch.setattr(Launch, "__call__", lambda self, *tensors: launched.update({self.kernel: tensors}))
    arguments, options = inputs(64, "bf16", {"length": 256})
    dout = options["dout"] = GRADIENTS[kind](torch.randn_like(options["out"]))
    backward.backward(*arguments, **options)
    assert launched.keys() == {backward.dq_kernel, hopper.dkdv_hopper_kernel if arch == 90 else backward.dkdv_kernel}
    for tensors in launched.values():
        given = tensors[4 if tensors is launched[backward.dq_kernel] else 3]
        assert torch.equal(given, dout.to(given.dtype)) and given.dtype == torch.bfloat16 and given.data_ptr() % 16 == 0
    copied = kind in ("of a sum", "at an odd address", "in fp32")
    copied = copied or (arch == 90 and kind not in ("contiguous", "of tokens before heads"))
    assert (given.data_ptr() != dout.data_ptr()) == copied


@pytest.mark.slow
@pytest.mark.parametrize("arch, head_dim", [(80, 64), (80, 128), (90, 64), (90, 256)])
def test_kernels_with_dropout_compile(arch, head_dim, tmp_path):
    (q, kv, _, _), options = inputs(head_dim, "bf16", {"length": 512})
    spec, seed = Spec(dropout=0.1), torch.zeros(1, dtype=torch.int64)
    with compiling(prefill, ("prefill_kernel",), arch) as compiled:
        prefill.prefill(q, kv, spec, seed=seed)
    if head_dim == 64:
        with compiling(backward, ("dq_kernel", "dkdv_kernel"), arch) as gradients:
            backward.backward(q, kv, spec, seed=seed, **options)
        compiled |= gradients
    for name, kernel in compiled.items():
        binary = read(kernel, tmp_path)
        print(f"{name} sm_{arch}: {binary.shared} B shared, {binary.registers} registers, {binary.stack} B stack")
        assert binary.shared <= SHARED_LIMIT[arch] and binary.stack <= PARKED, name
        assert not binary.stack or spills_in_tile_loops(binary.sass) == 0, name


@pytest.mark.slow
@pytest.mark.parametrize("arch, dtype, head_dim, own", HOPPER, ids=str)
def test_the_hopper_kernel_compiles(arch, dtype, head_dim, own, tmp_path, monkeypatch):
    skipped = MagicMock(arg_names=backward.dq_kernel.arg_names)
    monkeypatch.setattr(backward, "dq_kernel", skipped)
    monkeypatch.setattr(backward, "_prepare", backward._prepare.__wrapped__)
    arguments, options = inputs(head_dim, dtype, own)
    with compiling(hopper, ("dkdv_hopper_kernel",), arch) as compiled:
        backward.backward(*arguments, **options)
    (kernel,) = compiled.values()
    binary = read(kernel, tmp_path)
    print(f"{own}: {binary.shared} B shared, {binary.registers} registers, {binary.stack} B stack")
    assert binary.shared <= SHARED_LIMIT[arch] and binary.registers == 168  # before warpgroups exchange registers
    products = products_without_masks(kernel, tmp_path)
    for instructions in products:  # of each consumer
        assert not any(re.search(r"\b(LDL|STL)\b", line) for line in instructions), "spills in the loop without masks"
        # One wait for each of: S, dP, dV and dK together. ptxas waits after every product if registers are too few.
        assert sum("WARPGROUP.DEPBAR" in line for line in instructions) <= 4


def products_without_masks(kernel, folder) -> list[list[str]]:
    """The instructions of the loops without masks: from the products of one iteration to the next."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    sass = subprocess.run([BIN / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    blocks = [block.splitlines() for block in re.split(r"\n\s*\.L\w+:", sass)]
    many = lambda block, word, count: sum(word in line for line in block) > count  # noqa: E731
    found = [block for block in blocks if many(block, "HGMMA", 4) and many(block, "MUFU.EX2", 8)]
    return sorted(found, key=len)[:2]
