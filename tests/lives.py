"""What models of true widths do in their lives on a GPU, on a CPU: every kernel that they launch is described, and none runs.

The model has the layers that are needed for each kind of layer to occur. Products of linear layers are not computed, and graphs
are rehearsed, captured (which runs the model's Python) and replayed (which does nothing).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import hf_fastattn
from hf_fastattn.hf import packages
from hf_fastattn.kernels import TritonKernel
from hf_fastattn.kernels.ahead.describe import Kernel, _plain
from hf_fastattn.kernels.host import gpu
from hf_fastattn.patches.calls import forwards
from hf_fastattn.patches.fused import subclass
from hf_fastattn.patches.graphs import graphs

packages.PACKAGES |= {__name__}  # what records a step is no code of the model
Call = Callable[[], object]


class _Driver:
    def __init__(self, arch: int):
        self.arch = arch

    def get_current_device(self):
        return self.arch

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


class _Graph:
    def __init__(self, device, shared):
        pass

    def rehearse(self, body):
        return body()

    def capture(self, body):
        return body()

    def replay(self):
        pass


@contextmanager
def living(target: gpu.Target, most: int) -> Iterator[dict[str, Kernel]]:
    """A context in which CPU tensors are on a GPU of this kind; yields what is compiled. most: tokens of a captured prompt."""
    found: dict[str, Kernel] = {}

    def compile_(self, key, signature, device, constants, options, attrs, warmup):
        values = map(_plain, (signature, constants, attrs, vars(options)))
        kernel = Kernel(self.module, self.fn.__qualname__, target.arch, *values)
        found[repr(kernel.as_json())] = kernel

    def linear(x, weight, bias=None):
        return x.new_zeros(*x.shape[:-1], weight.shape[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", _Driver(target.arch))
        patch.setattr(JITFunction, "_do_compile", compile_)
        patch.setattr(gpu, "arch", lambda device: target.arch)
        patch.setattr(gpu, "num_sms", lambda device: target.sms)
        patch.setattr(gpu, "on_gpu", lambda device: True)
        patch.setattr(gpu, "holds", lambda tensor: True)
        patch.setattr(subclass, "has_kernels", lambda tensor: type(tensor) in (torch.Tensor, torch.nn.Parameter))
        patch.setattr(TritonKernel, "where", lambda self, device: "the Triton kernel")
        patch.setattr(graphs, "new_graph", _Graph)
        patch.setattr(graphs, "why_no_graph", lambda device: None)
        patch.setattr(forwards, "launch_bound", lambda model: most)
        patch.setattr(torch.nn.functional, "linear", linear)
        yield found


def made(config, cls=None):
    """A model of this configuration, of zeros."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = (cls or AutoModelForCausalLM).from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for tensor in model.buffers():
            tensor.fill_(0.1) if tensor.is_floating_point() else tensor.zero_()
        for tensor in model.parameters():
            tensor.zero_()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


class Life:
    """The calls of one model."""

    def __init__(self, model: torch.nn.Module, seed: int = 5):
        self.model, self.random = model, random.Random(seed)

    def generate(self, tokens: int, rows: int = 1, new: int = 8, **options) -> Call:
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False} | options
        return lambda: self.model.generate(torch.randint(5, 30000, (rows, tokens)), **options)

    def length(self, low: int, high: int) -> int:
        """Lengths from 1 << low to 1 << high, as many of each power of two."""
        return int(2 ** self.random.uniform(low, high))

    def chat(self, first: int, lengths: list[int], capacity: int) -> list[Call]:
        cache, ids = hf_fastattn.PreallocatedCache(self.model, capacity=capacity), [torch.randint(5, 30000, (1, first))]

        def turn(tokens: int) -> None:
            text = torch.cat([ids[0], torch.randint(5, 30000, (1, tokens))], 1)
            ids[0] = self.model.generate(text, past_key_values=cache, max_new_tokens=20, min_new_tokens=20, do_sample=False)

        return [lambda tokens=tokens: turn(tokens) for tokens in lengths]

    def padded(self) -> Call:
        mask = torch.ones(4, 300, dtype=torch.long)
        mask[0, :100] = 0
        return self.generate(300, 4, attention_mask=mask)

    def session(self) -> Iterator[tuple[str, list[Call]]]:
        """One user, then several."""
        yield "first call", [self.generate(100)]
        yield "again", [self.generate(100)] * 2
        yield "one row", [self.generate(self.random.randint(10, 4000)) for _ in range(25)]
        yield "chat", self.chat(500, [self.random.randint(5, 400) for _ in range(25)], 16384)
        yield "several rows", [self.generate(200, rows) for rows in (2, 3, 4, 6, 8, 12, 16, 24)]
        yield "long", [self.generate(tokens, new=4) for tokens in (8000, 16000, 30000)]
        yield "padded", [self.padded()] * 2
        yield "beams", [self.generate(300, num_beams=4)]
        yield "lookup", [self.generate(300, prompt_lookup_num_tokens=8)]

    def rest(self) -> Iterator[tuple[str, list[Call]]]:
        """The rest of a life of 300 calls."""
        yield "all lengths", [self.generate(self.length(3, 13), new=3) for _ in range(120)]
        for _ in range(6):
            yield "chats", self.chat(self.random.randint(20, 20000), [self.length(2, 11) for _ in range(12)], 32768)
        rows = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)
        yield "1 to 64 rows", [self.generate(self.length(3, 10), r, new=3) for r in rows for _ in range(2)]


def run(phases: Iterator[tuple[str, list[Call]]], found: dict[str, Kernel]) -> dict[str, list[Kernel]]:
    """What each phase compiles."""
    by_phase: dict[str, list[Kernel]] = {}
    with torch.inference_mode():
        for name, calls in phases:
            before = len(found)
            for call in calls:
                call()
            by_phase.setdefault(name, []).extend([*found.values()][before:])
    return by_phase
