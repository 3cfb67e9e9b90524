"""Which compiled variants of the attention kernels lengths select, without a GPU: launches of tensors without memory.

Triton computes the key of each launch, with types, alignments and constants, and compiles nothing.
"""

import importlib
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import log2

import pytest
import torch
from cases import slow_unless
from conftest import INTERPRETED

pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("interpreted kernels have no variants", allow_module_level=True)

from test_compile_offline import NewDevice
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from hf_fastattn import registry
from hf_fastattn.kernels import TritonKernel
from hf_fastattn.kernels.host import gpu
from hf_fastattn.kernels.spans import WORDS
from hf_fastattn.kernels.spec import KV, Spec

NAMES = ("prefill", "prefill_hopper", "lean", "split_kv", "backward")
LAUNCHERS = {name: importlib.import_module(f"hf_fastattn.kernels.attention.{name}") for name in NAMES}
SMS = {80: 108, 90: 132}
OTHERS = (*range(201, 2600, 126), 4096, 5001, 20_000, 100_000)
# (query heads, KV heads, head_dim, whether packed sequences have an interval for each query)
TRAINED = [(16, 8, 64, True), (8, 8, 64, False), (2, 2, 128, False), (32, 8, 128, True), (8, 4, 256, True)]
SERVED = [(8, 8, 64), (32, 8, 128), (28, 4, 128), (71, 1, 64), (16, 16, 72), (256, 32, 128)]
MANY_HEADS = [(12, 12, 64), (56, 56, 64), (24, 24, 88), (32, 32, 128), (96, 96, 128)]


@pytest.fixture
def variants(monkeypatch):
    """A context for launches on a GPU of this architecture; yields the keys of the variants by kernel."""
    for module in LAUNCHERS.values():  # they keep launches of other architectures
        monkeypatch.setattr(module, "_prepare", module._prepare.__wrapped__)
    monkeypatch.setattr(TritonKernel, "where", lambda self, device: "the Triton kernel")

    @contextmanager
    def of(arch: int) -> Iterator[dict[str, set[str]]]:
        found = defaultdict(set)
        with monkeypatch.context() as patch:
            patch.setattr(driver, "_active", NewDevice(arch))
            patch.setattr(gpu, "arch", lambda device: arch)
            patch.setattr(gpu, "num_sms", lambda device: SMS[arch])
            patch.setattr(JITFunction, "_do_compile", lambda self, key, *rest: found[self.__name__].add(key))
            yield found

    return of


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def train(heads: int, kv_heads: int, head_dim: int, packed: bool, length: int, portable: bool) -> None:
    q = new(1, length, heads, head_dim).transpose(1, 2)
    kv = KV(*(new(1, length, kv_heads, head_dim).transpose(1, 2) for _ in range(2)))
    spans = new(1, 1, 2, WORDS + length, dtype=torch.int32) if packed else None
    spec = Spec(causal=not packed)
    out, lse = registry.get("lean").forward(q, kv, spec, spans)
    LAUNCHERS["backward"].backward(q, kv, spec, spans, out=out, lse=lse, dout=new(*q.shape), portable=portable)


@pytest.mark.parametrize("arch, portable", [(80, False), (90, False), (90, True)])
@pytest.mark.parametrize("shape", TRAINED, ids=str)
def test_training_compiles_nothing_for_another_length(shape, arch, portable, variants):
    with variants(arch) as found:
        for length in (200, *OTHERS):
            train(*shape, length, portable)
    kinds = {name: len(keys) for name, keys in found.items()}
    forward = "prefill_hopper_kernel" if arch == 90 else "prefill_kernel"
    dkdv = "dkdv_hopper_kernel" if arch == 90 and not portable else "dkdv_kernel"
    assert kinds == dict.fromkeys((forward, "dq_kernel", dkdv), 1)


def serve(heads: int, kv_heads: int, head_dim: int, q_len: int, kv_len: int) -> None:
    q = new(1, q_len, heads, head_dim).transpose(1, 2)
    registry.get("lean").attend(q, KV(*(new(1, kv_heads, kv_len, head_dim) for _ in range(2))))


def lengths(count: int) -> list[int]:
    """Lengths from 1 to 100,000, as many from 1k to 2k as from 32k to 64k."""
    rng = random.Random(0)
    return [*range(1, 70), *(int(2 ** rng.uniform(6, log2(100_000))) for _ in range(count))]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("shape", SERVED + MANY_HEADS, ids=str)
def test_a_number_of_keys_selects_one_of_three_variants_and_of_three_merges(shape, arch, variants):
    """One token is decoded. Variants are for few keys and for many, and for keys with strides that are no multiple of 16."""
    with variants(arch) as found:
        for kv_len in lengths(200):
            serve(*shape, 1, kv_len)
    counts = {name: len(keys) for name, keys in found.items()}
    most = dict.fromkeys(counts, 3)  # of merges by warps
    assert counts.get("split_kv_kernel", 0) + counts.get("lean_kernel", 0) <= 3
    assert counts and all(most[name] >= count for name, count in counts.items()), counts


# Tiles, heads in a block where a group has an odd number of them, shares or not, the forms of a merge; strides of keys that are
# a multiple of 16 or not. A row of 2**31 elements or more, of many heads, has a stride of 64 bits.
MOST = {
    "prefill_kernel": 5,
    "prefill_hopper_kernel": 4,
    "merge_shares_kernel": 2,
    "split_kv_kernel": 6,
    "combine_kernel": 3,
    "lean_kernel": 2,
    "lean_merge_kernel": 2,
}


QUERIES = [*product(SERVED, (80, 90))]


@pytest.mark.parametrize("shape, arch", slow_unless(QUERIES[::5].__contains__, QUERIES), ids=str)
def test_a_number_of_queries_selects_one_of_a_few_variants(shape, arch, variants):
    with variants(arch) as found:
        for kv_len in lengths(500):
            for q_len in {1 + kv_len // 300, 1 + kv_len // 30, 1 + kv_len // 3, kv_len}:
                serve(*shape, q_len, kv_len)
    counts = {name: len(keys) for name, keys in found.items()}
    assert all(MOST[name] >= count for name, count in counts.items()), counts
    if arch == 90 and shape[0] == shape[1]:  # whole or in shares
        assert counts["prefill_hopper_kernel"] <= 2
