"""generate() by beams, prompt lookup and an assistant, and first tokens, under patch() and in stock generate().

    python -m benchmarks.modes                               # an 8B model, all rows
    python -m benchmarks.modes --only lookup,message --past 65536

A row of steps has milliseconds per forward of the model, without the prompt: the difference between two calls of generate() with
different numbers of new tokens, divided by the difference of their forwards. "lookup" and "assistant" propose tokens in each
step; hardly any is accepted, because weights are random, but each forward checks them. For this the output is restricted to the
tokens of prompts, of which none is the padding token: the assistant would get a mask. The assistant has 4 layers of the same
width; its drafts are part of the time.

A row of first tokens has milliseconds from the call to the first new token: of a message of so many tokens behind a text in the
cache, or of a prompt. No text comes twice, and no prompt has the length of another.

A row also has the largest error of logits, or with beams of the score, in comparison with one forward of eager attention over the
generated text. It fails if that of patch() is more than twice that of stock generate(), plus 4 eps of the largest logit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from hf_fastattn import hf
from hf_fastattn.patches import Patch, patch

from . import families
from .models import Subject, dtype_for, load, of_random_weights
from .results import Results, command, need_gpu
from .runs import free, synchronize, twin

METHOD = "greedy generate(); both models in the same process, medians"
VOCABULARY = range(3, 100)  # tokens of prompts, and those that the model can generate
SHORT, LONG = 6, 30  # new tokens of the two calls that are compared
DRAFTS = 5  # tokens that the assistant proposes
WARM = 3  # calls before those that are timed
STEPS = {
    "beams": {"num_beams": 4},
    "lookup": {"prompt_lookup_num_tokens": 8, "max_matching_ngram_size": 1},
    "assistant": {},
}
MESSAGES = [8, 20, 100, 300]
PROMPTS = [512, 8192]


class Setting:
    """One of the two models of a comparison: the weights of `subject`, with or without patch(), as in a `with`."""

    def __init__(self, subject: Subject, patched: bool, assistant: Subject | None = None):
        models = [twin(each.model, each.model.config._attn_implementation) for each in (subject, assistant) if each is not None]
        self.model, self.assistant = models[0], models[1] if assistant is not None else None
        self.patches: list[Patch] = [patch(model, "lean") for model in models] if patched else []
        self.forwards = 0
        if not patched:
            self.model.register_forward_pre_hook(self._count)
        if self.assistant is not None:
            given = self.assistant.generation_config
            given.num_assistant_tokens, given.num_assistant_tokens_schedule = DRAFTS, "constant"
            given.assistant_confidence_threshold = 0.0

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        for each in self.patches:
            each.undo()

    def _count(self, *_) -> None:
        self.forwards += 1

    def counted(self) -> int:
        """Forwards of the model so far; under patch() without those of a whole prompt."""
        return self.patches[0].replays + self.patches[0].uncaptured if self.patches else self.forwards

    def timed(self, ids: torch.Tensor, new: int, **options) -> tuple[float, object]:
        """Milliseconds of a generate() of so many tokens, and its output."""
        if self.assistant is not None:
            options["assistant_model"] = self.assistant
        synchronize(ids.device)
        began = time.perf_counter()
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, **options
        )
        synchronize(ids.device)
        return 1e3 * (time.perf_counter() - began), out

    def generated(self, ids: torch.Tensor, new: int, **options) -> object:
        """generate() of so many tokens with its logits and scores."""
        return self.timed(ids, new, return_dict_in_generate=True, output_logits=True, output_scores=True, **options)[1]

    @property
    def reasons(self) -> list[str]:
        """Why steps ran uncaptured."""
        return [reason for each in self.patches for reason in each.reasons]


class Judge:
    """The model of a comparison with eager attention, without patch()."""

    def __init__(self, subject: Subject):
        self.model = twin(subject.model, "eager")

    @torch.no_grad()
    def errors(self, out, new: int, past: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()) -> dict:
        """The largest error of the logits of an output's last `new` tokens, or of the scores of its beams, and the largest logit.

        past: K and V of each layer for the beginning of the text, if it is not to be read again.
        """
        ids, begin = out.sequences, past[0][0].shape[2] if past else 0
        cache = hf.transformers.DynamicCache(past) if past else None
        right = self.model(ids[:, begin:-1], logits_to_keep=new, **{hf.CACHE: cache}).logits.float()
        found = getattr(out, "sequences_scores", None)
        if found is None:
            error = (torch.stack(out.logits, 1).float() - right).abs().max()
        else:  # with a length penalty of 1
            of_tokens = right.log_softmax(-1).gather(-1, ids[:, -new:, None])
            error = (found - of_tokens.mean((1, 2))).abs().max()
        return {"error": error.item(), "largest_logit": right.abs().max().item()}


def texts(device: torch.device) -> Callable[[int], torch.Tensor]:
    """A function that returns a new random text of so many tokens, (1, tokens)."""
    generator = torch.Generator().manual_seed(1)
    return lambda tokens: torch.randint(VOCABULARY.start, VOCABULARY.stop, (1, tokens), generator=generator).to(device)


def forward_ms(setting: Setting, judge: Judge, prompt: torch.Tensor, options: dict, repeats: int) -> dict:
    """Milliseconds of a forward after the prompt, and tokens of each."""
    found, per_forward, tokens = [], [], []
    for repeat in range(repeats + 1):
        calls = []
        for new in (SHORT, LONG):
            before = setting.counted()
            ms, out = setting.timed(prompt, new, **options)
            calls.append((ms, setting.counted() - before))
        tokens = out[0, prompt.shape[1] :].tolist()
        (short, few), (long, many) = calls
        if repeat:
            found.append((long - short) / (many - few))
            per_forward.append((LONG - SHORT) / (many - few))
    errors = judge.errors(setting.generated(prompt, LONG, **options), LONG)
    return timing(found, tokens) | errors | {"tokens_per_forward": statistics.median(per_forward)}


def message_ms(setting: Setting, judge: Judge, past: int, sizes: list[int], repeats: int) -> Iterator[dict]:
    """Milliseconds to the first token of messages of each size behind a text of `past` tokens."""
    text = texts(setting.model.device)
    behind = text(past)
    cache = hf.cache_in(setting.timed(behind, 1, return_dict_in_generate=True)[1])
    for size in sizes:
        found, tokens = [], []
        for _ in range(WARM + repeats):
            ms, out = setting.timed(torch.cat([behind, text(size)], 1), 1, **{hf.CACHE: cache})
            found.append(ms)
            tokens.append(int(out[0, -1]))
            cache.crop(past - int(cache.get_seq_length()))
        out = setting.generated(torch.cat([behind, text(size)], 1), 1, **{hf.CACHE: cache})
        cache.crop(past - int(cache.get_seq_length()))
        read = tuple((layer.keys[:, :, :past], layer.values[:, :, :past]) for layer in cache.layers)
        yield timing(found[WARM:], tokens) | judge.errors(out, 1, read)


def prompt_ms(setting: Setting, judge: Judge, size: int, repeats: int) -> dict:
    """Milliseconds to the first token of prompts of about this size."""
    text, found, tokens = texts(setting.model.device), [], []
    for i in range(WARM + repeats):
        ms, out = setting.timed(text(size - i), 1)
        found.append(ms)
        tokens.append(int(out[0, -1]))
    return timing(found[WARM:], tokens) | judge.errors(setting.generated(text(size), 1), 1)


def timing(found: list[float], tokens: list[int]) -> dict:
    """The median of times, and the new tokens, as fields of a row."""
    return {"ms": statistics.median(found), "all_ms": found, "tokens": tokens}


class Bench:
    """The rows of one model. add: adds a row."""

    def __init__(self, args: argparse.Namespace, subject: Subject, results: Results, device: torch.device):
        self.args, self.subject, self.results, self.device = args, subject, results, device
        self.judge = Judge(subject)

    def compare(self, mode: str, case: str, measure: Callable[[Setting], dict], assistant: Subject | None = None) -> None:
        """Add a row with what `measure` finds for the stock and for the patched model."""
        self.compare_all(mode, [case], lambda setting: iter([measure(setting)]), assistant)

    def compare_all(
        self, mode: str, cases: list[str], measure: Callable[[Setting], Iterator[dict]], assistant: Subject | None = None
    ) -> None:
        found: dict[bool, list[dict]] = {}
        reasons: list[str] = []
        for patched in (False, True):
            if self.results.left() < self.args.reserve:
                self.results.data["not_run"] += [f"{mode} {case}" for case in cases]
                return
            with Setting(self.subject, patched, assistant) as setting:
                found[patched] = list(measure(setting))
                reasons += setting.reasons
            free(self.device)
        for case, stock, ours in zip(cases, found[False], found[True], strict=True):
            self.add({"mode": mode, "case": case, "stock": stock, "patched": ours, "reasons": reasons})

    def add(self, row: dict) -> None:
        """Add a row, or a failure if the logits of the patched model are wrong."""
        stock, ours = row["stock"], row["patched"]
        same = [a == b for a, b in zip(stock.pop("tokens"), ours.pop("tokens"), strict=True)]
        row["equal_tokens"] = sum(same) / len(same)  # logits of random weights in 16 bits are close together
        row["allowed"] = 2 * stock["error"] + 4 * torch.finfo(dtype_for(self.device)).eps * ours["largest_logit"]
        said = f"{row['mode']} {row['case']}: stock {stock['ms']:.2f}, patch() {ours['ms']:.2f} ms, "
        said += f"{row['equal_tokens']:.0%} equal tokens, errors {stock['error']:.3g} and {ours['error']:.3g}"
        said += "".join(f"; {reason}" for reason in row["reasons"])
        self.results.add(row, f"{row['mode']} {row['case']}", said, ours["error"] <= row["allowed"])

    def steps(self, mode: str) -> None:
        prompt = texts(self.device)(self.args.prompt)
        assistant = None
        if mode == "assistant":
            config = {**self.subject.config, "num_hidden_layers": 4}
            dtype, model_type = dtype_for(self.device), config.pop("model_type")
            assistant = of_random_weights("assistant", model_type, config, dtype, self.device, 0)
        measure = lambda setting: forward_ms(setting, self.judge, prompt, STEPS[mode], self.args.repeats)  # noqa: E731
        self.compare(mode, f"behind {prompt.shape[1]}", measure, assistant)

    def message(self) -> None:
        past, repeats = self.args.past, self.args.repeats
        cases = [f"{size} tokens behind {past}" for size in MESSAGES]
        self.compare_all("message", cases, lambda setting: message_ms(setting, self.judge, past, MESSAGES, repeats))

    def first(self) -> None:
        for size in self.args.prompts:
            self.compare("first", f"{size}", lambda setting, size=size: prompt_ms(setting, self.judge, size, self.args.repeats))


def restrict(model: hf.PreTrainedModel) -> None:
    """Let the model with random weights generate only the tokens of prompts."""
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[VOCABULARY.start : VOCABULARY.stop] *= 8.0


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.modes") -> int:
    """Measure the chosen modes. Returns 0, or 1 if there was no time for one."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=2048, help="tokens before the steps (default: %(default)s)")
    parser.add_argument("--past", type=int, default=65536, help="tokens before the messages (default: %(default)s)")
    help_ = f"tokens of prompts (default: {' '.join(map(str, PROMPTS))})"
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS, help=help_)
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    args = families.read_cases(parser, argv, [*STEPS, "message", "first"], reserve=20, seconds=560)
    lengths = (args.past, args.prompt, *args.prompts)
    need_gpu(parser, args, sizes={f"a text of {n} tokens": n * n for n in lengths})
    torch.manual_seed(0)

    def begun(results: Results, device: torch.device) -> Callable[[str], object]:
        subject = load(args.shape, dtype_for(device), device, max(lengths) + 1024)
        restrict(subject.model)
        bench = Bench(args, subject, results, device)
        return lambda mode: bench.steps(mode) if mode in STEPS else getattr(bench, mode)()

    head = {"method": METHOD, "unit": "ms a forward or a first token"}
    return families.run_cases(parser, args, "modes", command(prog, argv), head, begun, key="mode")


if __name__ == "__main__":
    raise SystemExit(main())
