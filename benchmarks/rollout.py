"""Rollouts of GRPO, as TRL's trainer runs them: 8 samples of each of 8 prompts, a step of the optimiser, and again.

    python -m benchmarks.rollout                          # the shape of Qwen3-1.7B, 512 new tokens, stock and under patch()
    python -m benchmarks.rollout --only autocast          # without the rows of bf16=False

TRL is not needed. generate() gets the arguments of `GIVEN`, which a test compares with those of the installed TRL. As under TRL
the model is in training mode, its embedding has the hook of enable_input_require_grads(), and gradient checkpointing is off
during the rollout and on during the step. A row "autocast" has the model's forward under torch.autocast, as with bf16=True, which
is TRL's default on a GPU; "bf16" has not.

A row has the seconds of each of the first rollouts and steps, of stock generate() with sdpa and of patch(), and the peak memory
of both. Between two rollouts AdamW changes all weights, by the gradient of a policy loss over the last tokens of one sample of
each prompt. After the last step the logits of some sampled tokens are compared with one forward of eager attention with the same
weights. The row fails if the error of patch() is more than twice that of stock generate(), plus 4 eps of the largest logit.
"""

from __future__ import annotations

import argparse
import contextlib
import time
import types
import warnings
from collections.abc import Callable, Iterator

import torch

from hf_fastattn import hf
from hf_fastattn.patches import patch

from . import families
from .models import SHAPES, dtype_for, of_random_weights
from .results import Results, command
from .runs import Prompt, free, make_prompt, synchronize, twin

METHOD = "sampled generate() with TRL's arguments, a step of AdamW between two calls; stock and patch() in the same process"
# What GRPOTrainer of this version passes to generate() with default arguments, except for the ids of special tokens.
GIVEN = {
    "trl": "1.16.0",
    "arguments": ["input_ids", "attention_mask", "generation_config"],
    "generation_config": {
        "disable_compile": True,
        "do_sample": True,
        "max_new_tokens": 512,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
    },
}
QWEN3 = {  # Qwen3-1.7B
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "pad_token_id": 151643,
}
MODELS = {"qwen3-1.7b": ("qwen3", QWEN3), "tiny": SHAPES["tiny"]}
PRECISIONS = ("autocast", "bf16")
CHECKED = 16  # tokens whose logits are compared
LEARNED = 128  # tokens of a sample in the loss, at most


class Policy:
    """A model as GRPOTrainer trains it. judge: one with the same weights and eager attention."""

    def __init__(self, args: argparse.Namespace, precision: str, device: torch.device):
        kind, config = MODELS[args.shape]
        torch.manual_seed(0)
        self.subject = of_random_weights(args.shape, kind, config, dtype_for(device), device, 0)
        self.model, self.device = self.subject.model, device
        self.model.set_attn_implementation("sdpa")
        self.judge = twin(self.model, "eager")
        if precision == "autocast":
            for model in (self.model, self.judge):
                forward = torch.autocast(device.type, torch.bfloat16)(type(model).forward)
                model.forward = types.MethodType(forward, model)
        self.model.train()
        self.model.enable_input_require_grads()
        self._checkpoints(True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, fused=device.type == "cuda" or None)

    def _checkpoints(self, on: bool) -> None:
        # TRL calls them by these names, which Transformers 5.17 has.
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            if on:
                self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=None)
            else:
                self.model.gradient_checkpointing_disable()

    @contextlib.contextmanager
    def unwrapped(self) -> Iterator[None]:
        """What TRL does around generate() (unwrap_model_for_generation)."""
        self._checkpoints(False)
        with torch.no_grad():
            yield
        self._checkpoints(True)

    def rollout(self, prompt: Prompt, new: int, **options) -> object:
        """Sampled tokens, and the ids of the prompts before them; with output_logits=True an output of generate()."""
        special = {name: getattr(self.model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        config = hf.GenerationConfig(**{**GIVEN["generation_config"], **special, "max_new_tokens": new}, **options)
        with self.unwrapped():
            return self.model.generate(input_ids=prompt.ids, attention_mask=prompt.mask, generation_config=config)

    def learn(self, prompt: Prompt, ids: torch.Tensor, samples: int) -> None:
        """One step on the last tokens of one sample of each prompt, with random advantages."""
        ids, mask = ids[::samples], prompt.mask[::samples]
        tokens = min(LEARNED, ids.shape[1] - mask.shape[1])
        mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1)
        logits = self.model(ids, attention_mask=mask, use_cache=False, logits_to_keep=tokens + 1).logits[:, :-1]
        found = logits.float().log_softmax(-1).gather(-1, ids[:, -tokens:, None])[..., 0]
        advantage = torch.randn(len(ids), 1, device=ids.device)
        (-advantage * found).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def errors(self, prompt: Prompt) -> dict:
        """The largest error of the logits of some sampled tokens, and the largest logit."""
        torch.manual_seed(5)
        out = self.rollout(prompt, CHECKED, output_logits=True, return_dict_in_generate=True)
        ids, new, largest, error = out.sequences, len(out.logits), 0.0, 0.0
        for row in range(len(ids)):  # at once they would need much memory
            width = prompt.mask.shape[1]
            begin = width - int(prompt.mask[row].sum())
            right = self.judge(ids[row : row + 1, begin:-1], logits_to_keep=new, use_cache=False).logits[0].float()
            found = torch.stack([each[row] for each in out.logits]).float()
            error, largest = max(error, (found - right).abs().max().item()), max(largest, right.abs().max().item())
        return {"error": error, "largest_logit": largest}


def prompts(args: argparse.Namespace, vocab_size: int, device: torch.device) -> Prompt:
    """Prompts of several lengths, left-padded, each as many times as it has samples."""
    lengths = [args.prompt_tokens * (i + 1) // args.prompts for i in range(args.prompts)]
    once = make_prompt(lengths, vocab_size, device)
    ids, mask = (x.repeat_interleave(args.samples, 0) for x in (once.ids, once.mask))
    return Prompt(ids, mask, [length for length in lengths for _ in range(args.samples)])


def measure(args: argparse.Namespace, precision: str, patched: bool, device: torch.device) -> dict:
    """Seconds of rollouts and steps of one model, its peak memory and the error of its logits."""
    free(device)
    policy = Policy(args, precision, device)
    prompt = prompts(args, policy.subject.text_config.vocab_size, device)
    found: dict = {"rollout_s": [], "step_s": [], "tokens": []}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with patch(policy.model, "lean") if patched else contextlib.nullcontext() as under:
        for i in range(args.rollouts):
            torch.manual_seed(i)
            synchronize(device)
            began = time.perf_counter()
            ids = policy.rollout(prompt, args.new)
            synchronize(device)
            between = time.perf_counter()
            policy.learn(prompt, ids, args.samples)
            synchronize(device)
            found["rollout_s"].append(between - began)
            found["step_s"].append(time.perf_counter() - between)
            found["tokens"].append(ids.shape[1] - prompt.ids.shape[1])
        if device.type == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        if under is not None:
            found |= {"captures": under.captures, "replays": under.replays, "uncaptured": under.uncaptured}
            found |= {"reasons": list(under.reasons), "graph_bytes": under.graph_bytes}
        found |= policy.errors(prompt)
    return found


def add(results: Results, precision: str, stock: dict, ours: dict, device: torch.device) -> None:
    """Add a row, or a failure if the logits of the patched model are wrong."""
    dtype = torch.bfloat16 if precision == "autocast" else dtype_for(device)
    row = {"precision": precision, "stock": stock, "patched": ours}
    row["allowed"] = 2 * stock["error"] + 4 * torch.finfo(dtype).eps * ours["largest_logit"]
    said = f"{precision}: stock {seconds(stock)}, patch() {seconds(ours)}, errors {stock['error']:.3g} and {ours['error']:.3g}"
    said += f"; {ours['captures']} captures, {ours['replays']} replays, {ours['uncaptured']} uncaptured"
    said += "".join(f"; {reason}" for reason in ours["reasons"])
    results.add(row, precision, said, ours["error"] <= row["allowed"])


def seconds(found: dict) -> str:
    """The times of the rollouts and the peak memory in words."""
    memory = f", {found['peak_bytes'] / 1e9:.1f} GB" if "peak_bytes" in found else ""
    return f"{' '.join(f'{each:.2f}' for each in found['rollout_s'])} s{memory}"


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.rollout") -> int:
    """Measure the chosen rows. Returns 0, or 1 if there was no time for one or its logits are wrong."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of the longest prompt (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt (default: %(default)s)")
    new = GIVEN["generation_config"]["max_new_tokens"]
    parser.add_argument("--new", type=int, default=new, help="new tokens (default: %(default)s, TRL's)")
    parser.add_argument("--rollouts", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=1e-3, help="of AdamW (default: %(default)s)")
    args = families.read_cases(parser, argv, PRECISIONS, reserve=90, seconds=225, shapes=MODELS, shape="qwen3-1.7b")
    head = {"method": METHOD, "unit": "s a rollout", "given": GIVEN}
    head |= {name: getattr(args, name) for name in ("prompts", "prompt_tokens", "samples", "new", "lr")}

    def begun(results: Results, device: torch.device) -> Callable[[str], object]:
        return lambda precision: add(
            results, precision, *(measure(args, precision, patched, device) for patched in (False, True)), device
        )

    return families.run_cases(parser, args, "rollout", command(prog, argv), head, begun, key="precision")


if __name__ == "__main__":
    raise SystemExit(main())
