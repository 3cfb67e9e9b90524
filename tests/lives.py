"""What models of true widths do in their lives on a GPU, on a CPU: every kernel that they launch is described, and none runs.

A model has the layers that are needed for each kind of layer to occur. Products of linear layers and of experts are zeros, and
graphs are rehearsed, captured (which runs the model's Python) and replayed (which does nothing).
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_compile_offline import NewDevice
from transformers import (
    FalconH1Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.batch import groups
from hf_fastattn.hf import llama, packages
from hf_fastattn.kernels import TritonKernel
from hf_fastattn.kernels.ahead.describe import Kernel, _plain
from hf_fastattn.kernels.host import gpu
from hf_fastattn.patches import warm
from hf_fastattn.patches.fused import experts, subclass
from hf_fastattn.patches.graphs import graphs, policy

packages.PACKAGES |= {__name__, NewDevice.__module__}  # what records a step is no code of the model
Call = Callable[[], object]
LONG = {"max_position_embeddings": 140_000}
LLAMA_1B = {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
MODELS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "Llama 1B": (LlamaConfig, {**LLAMA_1B, **HEADS, **LONG}),
    "Llama 8B": (
        LlamaConfig,
        {**LLAMA_1B, **HEADS, **LONG, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "head_dim": 128},
    ),
    "Gemma 3 4B": (
        Gemma3TextConfig,
        {"vocab_size": 262_208, "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024}
        | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, **LONG},
    ),
    "GPT-OSS 20B": (GptOssConfig, {"num_hidden_layers": 24, "num_local_experts": 32, **LONG}),
    "Qwen3 30B": (
        Qwen3MoeConfig,
        {"vocab_size": 151_936, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_experts": 128}
        | {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts_per_tok": 8, **LONG},
    ),
}
# With a smaller vocabulary, which has to fit into the memory of a CPU.
HYBRIDS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "Qwen3.5 0.8B": (
        Qwen3_5TextConfig,
        {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "linear_num_value_heads": 16}
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 32_000, **LONG},
    ),
    "Qwen3.6 35B": (
        Qwen3_5MoeTextConfig,
        {"hidden_size": 2048, "num_hidden_layers": 40, "linear_num_value_heads": 32, "num_attention_heads": 16}
        | {"num_key_value_heads": 2, "head_dim": 256, "vocab_size": 32_000, "num_experts": 32, **LONG},
    ),
    "Falcon-H1 0.5B": (
        FalconH1Config,
        {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 36, "vocab_size": 32_784}
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24}
        | {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, **LONG},
    ),
    "LFM2 1.2B": (
        Lfm2Config,
        {"hidden_size": 2048, "block_ff_dim": 12_288, "num_hidden_layers": 16, "vocab_size": 65_536, **HEADS, **LONG}
        | {"layer_types": [*["conv"] * 2, "full_attention"] * 3 + ["conv", "full_attention"] * 3 + ["conv"]},
    ),
    "Gemma 3n E2B": (  # 4 layers, of which the last 2 read K and V of the others
        Gemma3nTextConfig,
        {"num_hidden_layers": 4, "intermediate_size": [8192] * 4, "num_kv_shared_layers": 2, "activation_sparsity_pattern": None}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size": 32_000, "vocab_size_per_layer_input": 32_000}
        | LONG,
    ),
}

_SPARSE = {"activation_sparsity_pattern": [0.95] * 2 + [0.0] * 2}
HYBRIDS["Gemma 3n E2B, sparse"] = Gemma3nTextConfig, HYBRIDS["Gemma 3n E2B"][1] | _SPARSE


class _Graph:
    def __init__(self, device, shared):
        pass

    def rehearse(self, body):
        return body()

    def capture(self, body):
        return body()

    def replay(self):
        pass


def recipe_of(name: str, target: tuple[int, int]) -> warm.Recipe:
    """The recipe of a whole model."""
    cls, options = {**MODELS, **HYBRIDS}[name]
    return warm.Recipe.of(hf.model_on_meta(cls(**options), torch.bfloat16), None, target)


@contextmanager
def living(recipe: warm.Recipe) -> Iterator[tuple[torch.nn.Module, dict[object, Kernel]]]:
    """A context in which CPU tensors are on a GPU; yields a patched model with few layers, and what it has compiled."""
    found: dict[object, Kernel] = {}
    arch, sms = recipe.target

    def compile_(self, key, signature, device, constants, options, attrs, warmup):
        own = {name: value for name, value in vars(options).items() if name != "extern_libs"}
        found[self, key] = Kernel(self.module, self.__name__, arch, *map(_plain, (signature, constants, attrs, own)))

    def linear(x, weight, bias=None):
        return x.new_zeros(*x.shape[:-1], weight.shape[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", NewDevice(arch))
        patch.setattr(JITFunction, "_do_compile", compile_)
        patch.setattr(gpu, "arch", lambda device: arch)
        patch.setattr(gpu, "num_sms", lambda device: sms)
        patch.setattr(gpu, "on_gpu", lambda device: True)
        patch.setattr(subclass, "has_kernels", lambda tensor: type(tensor) in (torch.Tensor, torch.nn.Parameter))
        patch.setattr(TritonKernel, "where", lambda self, device: "the Triton kernel")
        patch.setattr(graphs, "new_graph", _Graph)
        patch.setattr(graphs, "why_no_graph", lambda device: None)
        patch.setattr(policy, "launch_bound", lambda *_, **__: recipe.most)
        for module in (torch.nn.functional, experts):
            patch.setattr(module, "linear", linear)
        patch.setitem(llama._FUNCTIONS, "linear", linear)
        patch.setattr(groups, "SAVES", 0)  # rows share few tokens here
        patch.setattr(hf, "stock_experts", lambda module, name: lambda module, x, *rest: torch.zeros_like(x))
        model = recipe.small().to_empty(device="cpu")
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.fill_(0.1) if buffer.is_floating_point() else buffer.zero_()
            for parameter in model.parameters():
                if parameter.numel() < 1e8:  # the others are not read
                    parameter.zero_()
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 3
        hf_fastattn.patch(model, recipe.backend)
        yield model, found


class Life:
    """The calls of one model."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.random = model, random.Random(5)

    def generate(self, tokens: int, rows: int = 1, new: int = 8, **options: Any) -> Call:
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False} | options
        return lambda: self.model.generate(torch.randint(5, 30_000, (rows, tokens)), **options)

    def length(self, low: int, high: int) -> int:
        """Lengths from 1 << low to 1 << high, as many between two powers of two as between the next two."""
        return int(2 ** self.random.uniform(low, high))

    def chat(self, first: int, lengths: list[int], capacity: int) -> Iterator[Call]:
        cache, text = hf_fastattn.PreallocatedCache(self.model, capacity=capacity), [torch.randint(5, 30_000, (1, first))]

        def turn(tokens: int) -> None:
            ids = torch.cat([text[0], torch.randint(5, 30_000, (1, tokens))], 1)
            options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
            text[0] = self.model.generate(ids, past_key_values=cache, **options)

        return (lambda tokens=tokens: turn(tokens) for tokens in lengths)

    def padded(self) -> Call:
        mask = torch.ones(4, 300, dtype=torch.long)
        mask[0, :100] = 0
        return self.generate(300, 4, attention_mask=mask)

    def hour(self) -> Iterator[Call]:
        """A few calls of each kind."""
        yield from [self.generate(100)] * 2
        yield from (self.generate(tokens) for tokens in (20, 700, 3000))
        yield from self.chat(500, [5, 90, 300], 8192)
        yield from (self.generate(200, rows) for rows in (2, 16))
        yield from (self.padded(), self.generate(300, num_beams=4), self.generate(300, prompt_lookup_num_tokens=8))

    def minutes(self) -> Iterator[Call]:
        """A few short calls, none with tokens that may be removed: prompts of linear layers are read on the CPU."""
        yield from (self.generate(tokens) for tokens in (100, 100, 20, 300, 700))
        yield from self.chat(200, [5, 90], 1024)
        yield from (self.generate(30, rows) for rows in (2, 16))
        yield from (self.padded(), self.generate(50, num_beams=4))

    def day(self) -> Iterator[Call]:
        """One user, then several."""
        yield from [self.generate(100)] * 3
        yield from (self.generate(self.random.randint(10, 4000)) for _ in range(25))
        yield from self.chat(500, [self.random.randint(5, 400) for _ in range(25)], 16_384)
        yield from (self.generate(200, rows) for rows in (2, 3, 4, 6, 8, 12, 16, 24))
        yield from (self.generate(tokens, new=4) for tokens in (8000, 16_000, 30_000))
        yield from [self.padded()] * 2
        yield from (self.generate(300, num_beams=4), self.generate(300, prompt_lookup_num_tokens=8))

    def batch(self, lengths: list[int], new: int = 3, **options: Any) -> Call:
        prompts = [torch.randint(5, 30_000, (length,)).tolist() for length in lengths]
        prompts.append([*prompts[0], 7])  # read behind the pages of another prompt, if that is long enough
        return lambda: self.model.generate_batch(prompts, **{"max_new_tokens": new, "do_sample": False, **options})

    def job(self) -> Iterator[Call]:
        """Few calls of generate_batch()."""
        yield from (self.batch([100, 20, 200]), self.batch([10] * 20), self.batch([1]))

    def jobs(self) -> Iterator[Call]:
        """Few and many prompts, short and long ones, with rows that come and go, and in parts."""
        yield from self.job()
        yield from (self.batch([self.length(0, 10) for _ in range(rows)]) for rows in (1, 2, 3, 7, 40, 60, 90, 120, 250))
        yield from (self.batch(lengths) for lengths in ([9000, 1], [30_000], [100, 1500]))
        yield self.batch([20] * 12, max_new_tokens=[3, 5, 9] * 4 + [4])

    def whole(self) -> Iterator[Call]:
        """300 calls."""
        yield from self.day()
        yield from (self.generate(self.length(3, 13), new=3) for _ in range(120))
        for _ in range(6):
            yield from self.chat(self.random.randint(20, 20_000), [self.length(2, 11) for _ in range(12)], 32_768)
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64):
            yield from (self.generate(self.length(3, 10), rows, new=3) for _ in range(2))


def met_apart(recipe: warm.Recipe, part: str) -> list[Kernel]:
    """`met` in a process of its own: launches that a process has prepared for one GPU are not those of another."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(met, recipe, part).result()


def met(recipe: warm.Recipe, part: str) -> list[Kernel]:
    """What a part of the life of a model compiles: "minutes", "hour", "day", "whole", "job" or "jobs"."""
    torch.manual_seed(0)
    with living(recipe) as (model, found), torch.inference_mode():
        for call in getattr(Life(model), part)():
            call()
    return [*found.values()]
