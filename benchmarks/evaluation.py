"""The generate() calls of an evaluation by lm-eval, under patch() and in stock generate(): samples a second.

    python -m benchmarks.evaluation                          # a 1B model, all recorded runs
    python -m benchmarks.evaluation --shape 8b --only "needle x 16"
    python -m benchmarks.evaluation --record smollm2         # needs lm-eval; writes benchmarks/evaluation.json anew

`evaluation.json` has the calls that lm-eval's `--model hf` made on the CPU: the lengths of the rows of each batch, which are
left-padded, the stop strings, and the number of tokens after which the call ended. A replay makes the same calls, with random
tokens and weights, in the same order. lm-eval decodes the end of each row after each token, once for each stop string, and looks
for the string; a stopping criterion here does the same. It finds none in random texts: a call ends at the recorded number.

"ms" is milliseconds per sample over all calls, when they have been made once before: the median of several passes. "first_ms" is
that of the first pass, in which buffers are allocated, graphs captured and, in the first run of a process, kernels compiled. Both
are without lm-eval's own work outside of generate(). Errors of logits are measured and judged as in `modes.py`, of the first
tokens of the last call.
"""

from __future__ import annotations

import argparse
import json
import string
import time
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch

from hf_fastattn import hf

from . import families, modes
from .models import SHAPES, dtype_for, load
from .results import add_options, check_names, command, conditions, find_device, listed, need_gpu, progress
from .runs import Prompt, free, make_prompt, synchronize

METHOD = "greedy generate() with lm-eval's stopping criteria; both models in the same process, medians of passes over all calls"
RECORDED = Path(__file__).parent / "evaluation.json"
CHECKED = 32  # tokens whose logits are compared
# name: batch size, examples of fastattn_needle, generation settings that replace those of the task
RUNS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "needle x 1": (1, 4, {}),
    "needle x 16": (16, 20, {}),
    "256 tokens x 16": (16, 16, {"until": ["Question:", "</s>", "<|im_end|>"], "max_gen_toks": 256}),  # as in gsm8k
}


class Ends(hf.transformers.StoppingCriteria):
    """lm-eval's criterion for one stop string: whether every row has had it in its last `window` tokens at some step."""

    def __init__(self, tokenizer: hf.PreTrainedTokenizerBase, text: str, window: int, begin: int, rows: int):
        self.tokenizer, self.text, self.window, self.begin = tokenizer, text, window, begin
        self.ended = [False] * rows

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> bool:
        texts = self.tokenizer.batch_decode(input_ids[:, self.begin :][:, -self.window :])
        self.ended = [ended or self.text in text for ended, text in zip(self.ended, texts, strict=True)]
        return all(self.ended)


def tokenizer_of(size: int) -> hf.PreTrainedTokenizerBase:
    """A tokenizer with so many tokens, each a word of letters, which decodes as that of Llama 3 does."""
    from tokenizers import Tokenizer, decoders, models

    words = islice(map("".join, product(string.ascii_lowercase, repeat=4)), size)
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    core.decoder = decoders.ByteLevel()
    return hf.transformers.PreTrainedTokenizerFast(tokenizer_object=core)


def generated(model: hf.PreTrainedModel, tokenizer: hf.PreTrainedTokenizerBase, run: dict, call: dict, prompt: Prompt, **own):
    """The output of one recorded call."""
    rows, width = prompt.ids.shape
    ends = [Ends(tokenizer, text, window, width, rows) for text, window in run["stops"]]
    own = {"max_length": width + call["new"], **run["options"], **own}
    return model.generate(
        input_ids=prompt.ids,
        attention_mask=prompt.mask,
        stopping_criteria=hf.transformers.StoppingCriteriaList(ends),
        pad_token_id=model.config.pad_token_id,
        **own,
    )


def measure(setting: modes.Setting, judge: modes.Judge, tokenizer: hf.PreTrainedTokenizerBase, run: dict, repeats: int) -> dict:
    """Milliseconds per sample of all calls of a run, its tokens, and the errors of logits."""
    model = setting.model
    prompts = [make_prompt(call["lengths"], model.config.vocab_size, model.device) for call in run["calls"]]
    passes, tokens = [], []
    for _ in range(1 + repeats):
        synchronize(model.device)
        began = time.perf_counter()
        outs = [
            generated(model, tokenizer, run, call, prompt).tolist() for call, prompt in zip(run["calls"], prompts, strict=True)
        ]
        passes.append(1e3 * (time.perf_counter() - began) / sum(len(out) for out in outs))
        tokens = [
            token
            for out, call, prompt in zip(outs, run["calls"], prompts, strict=True)
            for row in out
            for token in new_tokens(row[prompt.ids.shape[1] :], call)
        ]
    found = modes.timing(passes[1:], tokens) | {"first_ms": passes[0]} | errors(model, judge, tokenizer, run, prompts[-1])
    counts = {what: getattr(each, what) for each in setting.patches for what in ("captures", "replays", "uncaptured")}
    return found | counts


def new_tokens(tokens: list[int], call: dict) -> list[int]:
    """The new tokens of a row, as many as were recorded."""
    if len(tokens) != call["new"]:
        raise ValueError(f"A recorded call of {call['new']} tokens ended after {len(tokens)}: a random text had a stop string.")
    return tokens


@torch.no_grad()
def errors(
    model: hf.PreTrainedModel, judge: modes.Judge, tokenizer: hf.PreTrainedTokenizerBase, run: dict, prompt: Prompt
) -> dict:
    """The largest logit in the last call of a run, and the largest error, in comparison with one forward of eager attention."""
    new = min(run["calls"][-1]["new"], CHECKED)
    own = {"return_dict_in_generate": True, "output_logits": True}
    out = generated(model, tokenizer, run, {"new": new}, prompt, **own)
    mask = torch.nn.functional.pad(prompt.mask, (0, new - 1), value=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    right = judge.model(out.sequences[:, :-1], attention_mask=mask, position_ids=positions, logits_to_keep=new).logits.float()
    error = (torch.stack(out.logits, 1).float() - right).abs().max()
    return {"error": error.item(), "largest_logit": right.abs().max().item()}


def record(source: str) -> dict:
    """The generate() calls of lm-eval's `hf` for RUNS with this model."""
    import lm_eval
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from hf_fastattn.evaluation import harness
    from hf_fastattn.evaluation import load as load_model

    model, tokenizer = load_model(source, device="cpu")
    manager = TaskManager(include_path=str(harness.PACK), include_defaults=False)
    stock, runs = model.generate, []
    for name, (rows, limit, settings) in RUNS.items():
        run: dict[str, Any] = {"name": name, "calls": []}

        def generate(*, input_ids, attention_mask, stopping_criteria, max_length, pad_token_id, run=run, **options):
            given = {"stopping_criteria": stopping_criteria, "max_length": max_length, "pad_token_id": pad_token_id, **options}
            out = stock(input_ids=input_ids, attention_mask=attention_mask, **given)
            run["calls"].append({"lengths": attention_mask.sum(1).tolist(), "new": out.shape[1] - input_ids.shape[1]})
            run["stops"] = [[each.sequence, each.sequence_id_len] for each in stopping_criteria]
            run["options"] = options
            return out

        model.generate = generate
        given = {"limit": limit, "gen_kwargs": settings or None, "task_manager": manager, "bootstrap_iters": 0}
        simple_evaluate(model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=rows), tasks=["fastattn_needle"], **given)
        runs.append(run)
    return {"recorded": f"lm-eval {lm_eval.__version__}, {Path(source).name}, fastattn_needle", "runs": runs}


def as_text(recorded: dict) -> str:
    """The JSON of recorded calls, one line for each."""
    lines = []
    for run in recorded["runs"]:
        calls = ",\n    ".join(map(json.dumps, run["calls"]))
        head = json.dumps({name: value for name, value in run.items() if name != "calls"})[:-1]
        lines.append(f'{head},\n   "calls": [\n    {calls}]}}')
    runs = ",\n  ".join(lines)
    return f'{{"recorded": {json.dumps(recorded["recorded"])},\n "runs": [\n  {runs}]}}\n'


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.evaluation") -> int:
    """Replay the recorded runs. Returns 0, or 1 if a row failed or there was no time for it."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument(
        "--record", metavar="MODEL", help="run lm-eval with this model on the CPU; its calls are written to --calls"
    )
    parser.add_argument("--calls", type=Path, default=RECORDED, help="the recorded calls (default: benchmarks/evaluation.json)")
    parser.add_argument("--shape", default="1b", choices=SHAPES, help="default: %(default)s")
    parser.add_argument("--only", type=listed, help="names of recorded runs; default all")
    parser.add_argument("--repeats", type=int, default=3, help="passes after the first (default: %(default)s)")
    parser.add_argument("--reserve", type=float, default=20, help="seconds that a row may need (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the rows of other runs in the JSON")
    add_options(parser, seconds=170)
    args = parser.parse_args(argv)
    if args.record:
        args.calls.write_text(as_text(record(args.record)), encoding="utf-8")
        return 0
    recorded = json.loads(args.calls.read_text(encoding="utf-8"))
    runs = {run["name"]: run for run in recorded["runs"]}
    chosen = list(runs) if args.only is None else args.only
    check_names(parser, chosen, runs, "runs")
    need_gpu(parser, args, [args.shape])
    device = find_device(args.device)
    torch.manual_seed(0)
    longest = max(max(call["lengths"]) + call["new"] for run in runs.values() for call in run["calls"])
    subject = load(args.shape, dtype_for(device), device, longest)
    head = {
        "conditions": conditions(device, METHOD),
        "shape": args.shape,
        "unit": "ms a sample",
        "recorded": recorded["recorded"],
    }
    results = families.begin(parser, args, "evaluation", command(prog, argv), device, head)
    results.data["rows"] = [row for row in results.data["rows"] if row["case"] not in chosen]
    bench = modes.Bench(args, subject, results, device)
    tokenizer = tokenizer_of(subject.model.config.vocab_size)
    bench.judge.model.generate(modes.texts(device)(8), max_new_tokens=2)  # torch loads its libraries
    for name in progress(chosen, "evaluation", "run"):
        run = partial(measure, judge=bench.judge, tokenizer=tokenizer, run=runs[name], repeats=args.repeats)
        bench.compare("evaluation", name, run)
        free(device)
    return families.end(results)


if __name__ == "__main__":
    raise SystemExit(main())
