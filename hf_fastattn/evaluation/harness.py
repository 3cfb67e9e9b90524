"""The use of lm-eval: loads its tasks once, runs them on the loaded model for each backend, and reads its samples."""

from __future__ import annotations

import contextlib
import difflib
import functools
import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from .. import hf
from .pairs import GROUP, NATS, Answer, Answers, Generated, Measure, exp

PACK = Path(__file__).parent.parent / "tasks"
SEED = 1234
PERPLEXITIES = ("perplexity", "weighted_perplexity")
LM_EVALS = ("until", "max_gen_toks", "max_tokens", "max_completion_tokens")  # options of generation, besides generate()'s
BOOTSTRAPS = 1000  # for metrics whose standard error lm-eval estimates by resampling


def require() -> None:
    """Raise ImportError with the remedy if lm-eval is missing."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ImportError(f'Evaluation runs on lm-eval: pip install "lm-eval[hf]" ({error}).') from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses log messages of lm-eval about the settings made here."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class Harness:
    """Loaded tasks for one model. batch_size, num_fewshot, gen_kwargs: as in lm-eval. options: further ones of its evaluate()."""

    def __init__(
        self,
        model: hf.PreTrainedModel,
        tokenizer: hf.PreTrainedTokenizerBase,
        loaded: dict[str, Any],
        batch_size: int | str,
        num_fewshot: int | None,
        gen_kwargs: dict[str, Any],
        **options: Any,
    ) -> None:
        from lm_eval.models.huggingface import HFLM

        self.options = {**options, "fewshot_as_multiturn": bool(options["apply_chat_template"])}
        self.loaded = loaded
        with quiet():
            for task in self.loaded["tasks"].values():
                if gen_kwargs and task.OUTPUT_TYPE == "generate_until":
                    task.set_config("generation_kwargs", gen_kwargs, update=True)
                shots = task.get_config("num_fewshot")
                if shots is None or (num_fewshot is not None and shots != 0):  # 0 is a task's explicit choice
                    task.set_config("num_fewshot", num_fewshot or 0)
                task.set_fewshot_seed(SEED)
                task.aggregation = functools.partial(_aggregations, task.aggregation)
            self.lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        self.generated: dict[tuple[int, ...], list[Generated]] = {}  # tokens generated in the last run, by prompt
        self.texts: dict[str, torch.Tensor] = {}  # the longest request of each task in the last run, (tokens,)
        self._generate, self.lm._model_generate = self.lm._model_generate, self._note

    def _note(self, context: torch.Tensor, *, attention_mask: torch.Tensor, **options: Any) -> torch.Tensor:
        """generate() as called by lm-eval; records the generated tokens, the lead of each over the second most likely one, and
        whether its logit is finite. Others may be -inf: settings of generate() exclude tokens by it."""
        steps: list[torch.Tensor] = []  # the two largest logits of each row, or of each of its beams, (rows, beams, 2)

        def record(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            steps.append(scores.float().topk(2).values.view(len(context), -1, 2))
            return scores

        out: torch.Tensor = self._generate(context, attention_mask=attention_mask, logits_processor=[record], **options)
        two = torch.cat(steps, 1)
        greedy = not options.get("do_sample") and two.shape[1] == len(steps)
        led = (two[..., 0] - two[..., 1]).tolist() if greedy else [[]] * len(context)
        finite = two[..., 0].isfinite().all(1).tolist()
        for prompt, mask, its, tokens, right in zip(context, attention_mask.bool(), led, out, finite, strict=True):
            made = Generated(tokens[len(prompt) :].tolist(), its, right)
            self.generated.setdefault(tuple(prompt[mask].tolist()), []).append(made)
        return out

    def decoding(self) -> list[str]:
        """Names of the tasks that generate, and so depend on the cache."""
        return [name for name, task in self.loaded["tasks"].items() if task.OUTPUT_TYPE == "generate_until"]

    def run(self, only: Sequence[str] | None = None) -> tuple[list[Measure], list[Answers]]:
        """Run all tasks, or those in `only`, on the same examples in the same order in every run."""
        from lm_eval.evaluator import evaluate

        chosen = self.loaded
        if only is not None:
            chosen = {"tasks": {name: chosen["tasks"][name] for name in only}, "groups": {}, "group_map": {}}
        self.generated = {}
        random.seed(SEED)
        torch.manual_seed(SEED)
        with quiet():
            results = evaluate(self.lm, chosen, bootstrap_iters=BOOTSTRAPS, log_samples=True, **self.options)
        measures = _measures(results, chosen["tasks"])
        for name, scores in results.get("groups", {}).items():
            measures += [Measure(name, label, score, stderr, [], GROUP) for _, _, label, score, stderr in _scores(scores)]
        return measures, [self._answered(name, samples) for name, samples in results["samples"].items()]

    def _answered(self, name: str, samples: list[dict[str, Any]]) -> Answers:
        """The answers in a task's samples, with the number of tokens of each request that has a log-likelihood."""
        docs = {sample["doc_id"]: sample for sample in samples}  # one sample per filter, with the same responses
        requests = [sample["arguments"] for sample in docs.values()]
        answers, lls = zip(*(_answer(sample["resps"]) for sample in docs.values()), strict=True) if docs else ((), ())
        texts = ("".join(part for part in each if isinstance(part, str)) for of in requests for each in of)
        self.texts[name] = torch.tensor(self.lm.tok_encode(max(texts, key=len, default="")))
        tokens = [
            [max(1, len(self.lm.tok_encode(each[-1]))) if isinstance(each[-1], str) else 1 for each in of[: len(its)]]
            for of, its in zip(requests, lls, strict=True)
        ]
        return Answers(name, list(answers), list(lls), tokens, list(docs))


def parse_options(gen_kwargs: dict[str, Any] | str | None) -> dict[str, Any]:
    """Options of generation as a dict. Raises ValueError for one that neither lm-eval nor Transformers has."""
    from lm_eval.utils import simple_parse_args_string

    if isinstance(gen_kwargs, str) and not all("=" in part for part in gen_kwargs.split(",") if part):
        raise ValueError(f"gen_kwargs is a list as in max_gen_toks=64,do_sample=False; got {gen_kwargs!r}.")
    options: dict[str, Any] = simple_parse_args_string(gen_kwargs) if isinstance(gen_kwargs, str) else gen_kwargs or {}
    known = {*LM_EVALS, *vars(hf.GenerationConfig())}
    for name in options:
        if name not in known:
            raise ValueError(f"gen_kwargs has {name!r}, which is not an option of generate(). One of lm-eval is max_gen_toks.")
    return options


def load_tasks(names: Sequence[str], include_path: Sequence[str | Path] = ()) -> dict[str, Any]:
    """lm-eval's dict of the tasks with these names, with their data.

    Indexing all tasks of lm-eval takes seconds, so it is done only if a name needs it.
    """
    from lm_eval.tasks import TaskManager

    paths = [PACK, *map(Path, include_path)]
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"There is no folder {path} to look for tasks in.")
    manager = TaskManager(include_path=paths, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=paths)
    wanted: list[str] = []
    for name in names:
        found = [name] if Path(name).is_file() else manager.match_tasks([name])
        if not found:
            near = difflib.get_close_matches(name, manager.all_tasks, 3, 0.5)
            hint = f"Near it: {', '.join(near)}." if near else "`hf-fastattn lm_eval ls tasks` lists all."
            raise ValueError(f"Unknown task {name!r}. {hint}")
        wanted += found
    try:
        with quiet():
            loaded: dict[str, Any] = manager.load(wanted)
            return loaded
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:  # tasks are arbitrary YAML and Python
        raise ValueError(f"The tasks {', '.join(names)} cannot be loaded: {type(error).__name__}: {error}") from error


def _measures(results: dict[str, Any], tasks: dict[str, Any]) -> list[Measure]:
    """Every metric of every task, with its values for the examples."""
    found = []
    for name, samples in results["samples"].items():
        for metric, kind, label, score, stderr in _scores(results["results"][name]):
            its = [sample for sample in samples if sample["filter"] == kind and metric in sample]
            items, aggregate = _aggregate(tasks[name].aggregation().get(metric), [sample[metric] for sample in its], score)
            found.append(Measure(name, label, score, stderr, items, aggregate, [sample["doc_id"] for sample in its]))
    return found


def _scores(scores: dict[str, Any]) -> Iterator[tuple[str, str, str, float, float | None]]:
    """(metric, filter, label, score, standard error) of each of lm-eval's "metric,filter" that is a score."""
    for key, value in scores.items():
        metric, _, kind = key.partition(",")
        if kind and not metric.endswith("_stderr"):
            stderr = scores.get(f"{metric}_stderr,{kind}")
            label = metric if kind == "none" else f"{metric}, {kind}"
            yield metric, kind, label, _score(value), stderr if isinstance(stderr, float) else None


def _score(value: object) -> float:
    """A score as a float; NaN if it is not a number."""
    return float(value) if isinstance(value, Real) else math.nan


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) or (math.isnan(a) and math.isnan(b))


def _aggregations(theirs: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """lm-eval's functions that compute scores from examples, with perplexities that are too large for a float as inf."""
    return {metric: _or_infinite(its) if _name(its) in PERPLEXITIES else its for metric, its in theirs().items()}


def _or_infinite(function: Callable[[list[Any]], float]) -> Callable[[list[Any]], float]:
    @functools.wraps(function)
    def score(items: list[Any]) -> float:
        try:
            return function(items)
        except OverflowError:
            return math.inf

    return score


def _name(function: object) -> str:
    return getattr(function, "__name__", "mean")


def _aggregate(function: object, items: list[Any], score: float) -> tuple[list[Any], str]:
    """(items, aggregate) for a Measure. A function is known by its name and by its result, because a task may have its own."""
    name = _name(function)
    numbers = all(isinstance(item, Real) for item in items)
    weighted = [(item, 1) for item in items] if name == "perplexity" and numbers else items  # all have the same weight
    if name in ("mean", "nanmean") and numbers and items and _close(float(sum(items)) / len(items), score):
        return items, "mean"
    if name in (*PERPLEXITIES, "bits_per_byte") and all(isinstance(item, tuple) and len(item) == 2 for item in weighted):
        nats = -sum(ll for ll, _ in weighted) / (sum(weight for _, weight in weighted) or math.nan)
        if name == "bits_per_byte" and _close(nats / math.log(2), score):
            return weighted, name
        if name != "bits_per_byte" and _close(exp(nats), score):
            return weighted, "perplexity"
    return items, "other" if name in ("mean", *NATS) else name


def _answer(responses: list[list[Any]]) -> tuple[Answer, list[float]]:
    """(answer, log-likelihoods of the requests) of one example, whose requests have these responses, with repeats."""
    first = [repeats[0] for repeats in responses]
    texts = [text for repeats in responses for text in repeats if isinstance(text, str)]
    scored = [response for response in first if isinstance(response, (tuple, list))]
    answer: Answer = bool(scored[0][1]) if scored else None
    if texts:
        answer = "\n".join(texts)
    elif len(scored) > 1:
        answer = max(range(len(scored)), key=lambda i: scored[i][0])
    return answer, [float(r[0] if isinstance(r, (tuple, list)) else r) for r in first if not isinstance(r, str)]
