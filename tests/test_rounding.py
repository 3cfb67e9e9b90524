"""The verdict in float32: results with other rounding, as on another machine, are equal; other computations are not."""

import math

import checkpoint
import pytest
import torch
from calls import as_kernel, attention
from cases import slow_unless

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

import hf_fastattn
from hf_fastattn.evaluation import Evaluation, data, pairs, perplexity, report, rounding
from hf_fastattn.evaluation.pairs import Answers, Generated, Measure
from hf_fastattn.evaluation.report import Run
from hf_fastattn.evaluation.rounding import Rounding

pytestmark = pytest.mark.xdist_group("evaluate")
evaluate = hf_fastattn.evaluate
ULP = 2.0**-23


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The shipped tasks with few and short examples, as options of evaluate()."""
    folder = checkpoint.tasks(tmp_path_factory.mktemp("tasks"))
    return {"tasks": ["small"], "include_path": [folder], "caches": ["dynamic"], "decode_tokens": 6, "backends": ["sdpa", "lean"]}


@pytest.fixture(scope="module")
def tokenizer():
    return checkpoint.tokenizer()


def scores(run: Run) -> dict:
    return {(m.task, m.metric): m.score for m in run.measures}


def noisy(model, size: float):
    """The model with random errors of `size` in its logits when attention of the package runs."""

    def off(module, arguments, out):
        return out + size * torch.randn_like(out) if model.config._attn_implementation == "lean" else out

    model.get_output_embeddings().register_forward_hook(off)
    return model


@pytest.mark.parametrize("sign", slow_unless((1).__eq__, [1, -1, 0]))
def test_log_likelihoods_that_differ_by_a_few_units_in_the_last_place_are_equal(tokenizer, small, monkeypatch, sign):
    """Perplexities per word change much more then, and an earlier version decided by them."""
    from lm_eval.models.huggingface import HFLM

    model, draw = checkpoint.model(), torch.Generator().manual_seed(0)

    def off(ll: float) -> float:
        if model.config._attn_implementation != "lean":
            return ll
        return ll * (1 + 4 * ULP * (sign or 2 * torch.rand((), generator=draw).item() - 1))

    decode, rolling, read = perplexity.decode_nats, HFLM.loglikelihood_rolling, HFLM.loglikelihood
    monkeypatch.setattr(perplexity, "decode_nats", lambda *a: [[off(nat) for nat in row] for row in decode(*a)])
    monkeypatch.setattr(HFLM, "loglikelihood_rolling", lambda *a, **k: [off(ll) for ll in rolling(*a, **k)])
    monkeypatch.setattr(HFLM, "loglikelihood", lambda *a, **k: [(off(ll), greedy) for ll, greedy in read(*a, **k)])
    found = evaluate(model, tokenizer, **small)
    assert found.passed and found.verdict().startswith("EQUAL to sdpa, dynamic in every answer and score: lean, dynamic.")
    name = "small_text", "word_perplexity"
    if sign:
        assert scores(found.runs[1])[name] != pytest.approx(scores(found.baseline)[name], rel=1e-5)
    of_texts = [each for each in found.runs[1].pairs if each.task != "small_needle"]
    assert all(0 < each.largest_loglikelihood_difference < math.inf for each in of_texts)


def test_other_choices_at_ties_are_equal_and_reported(tokenizer, small):
    """Every token of this model has the same logit as another one, and rounding decides which of the two is chosen."""
    model = noisy(checkpoint.model(), 1e-6)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[1::2] = head[::2]
    found = evaluate(model, tokenizer, **small)
    needle = next(each for each in found.runs[1].pairs if each.task == "small_needle")
    assert needle.equal < 1 and needle.same and needle.first["token"] >= 0
    assert found.passed and found.verdict().startswith(
        "EQUAL to sdpa, dynamic except for answers that were a tie within rounding: lean, dynamic."
    )
    assert f" {2 * found.rounding.margin:.2g} | equal " in str(found)


@pytest.mark.parametrize(("task", "size"), [("small_text", 0.01), ("small_choice", 0.01), ("small_needle", 2.0)])
def test_differences_beyond_rounding_are_differences(tokenizer, small, task, size):
    model = noisy(checkpoint.model(), size)
    found = evaluate(model, tokenizer, **{**small, "tasks": [task], "decode_tokens": 0})
    assert not found.passed and f"lean, dynamic in {task} (" in found.verdict()
    if task != "small_needle":
        assert "nats off, of which rounding explains" in found.verdict()
    assert not evaluate(model, tokenizer, **{**small, "tasks": []}).passed


def test_a_scale_that_is_off_by_a_thousandth_differs(tokenizer, small, registering):
    @as_kernel
    def scaled(q, k, v, its_spans=None, *, scale=None, **options):
        return attention(q, k, v, its_spans, scale=1.001 * (scale or q.shape[-1] ** -0.5), **options)

    hf_fastattn.register(hf_fastattn.Backend(name="scaled", summary="off by a thousandth", prefill=scaled))
    found = evaluate(checkpoint.model(), tokenizer, **{**small, "backends": ["sdpa", "lean", "scaled"]})
    assert [run.backend for run in found.differing()] == ["scaled"]
    assert {each.task for each in found.runs[2].pairs if not each.same} >= {"small_text", "small_choice", "decode perplexity"}


def test_the_rounding_of_this_model_is_measured(tokenizer):
    """It is larger than the error of float32, much smaller than that of 16-bit weights, and depends on the weights."""
    model = checkpoint.model()
    ids = tokenizer(data.text()[:200], return_tensors="pt")["input_ids"]
    found = rounding.measure(model, [ids[0]])
    assert found.unit == 2**-24 and rounding.measure(model, [ids[0]]) == found  # and it is deterministic
    assert not any(module._forward_hooks for module in model.modules())

    def lls(its):
        with torch.no_grad():
            return its(ids).logits[:, :-1].double().log_softmax(-1).gather(2, ids[:, 1:, None])

    with torch.no_grad():
        exact = lls(checkpoint.model().double())
    assert 0 < (lls(model) - exact).abs().max() < found.token
    coarse = checkpoint.model()
    with torch.no_grad():
        for weight in coarse.parameters():
            weight.copy_(weight.bfloat16())
    assert found.token < (lls(coarse) - exact).abs().max() / 10
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)
    assert rounding.measure(model, [ids[0]]).margin == pytest.approx(8 * found.margin, rel=0.5)


def test_log_likelihoods_are_judged_by_their_tokens_and_size():
    within = Rounding(unit=2**-24, token=1e-4)
    assert within.nats(-10.0, 1) == pytest.approx(2e-4, rel=0.01) and within.nats(-10.0, 100) == pytest.approx(2e-3, rel=0.01)
    assert within.nats(-1e4, 100) > 0.01
    base = Answers("t", [True, False], [[-100.0], [-math.inf]], [[100], [1]])
    near, far = (Answers("t", [True, True], [[-100.0 + off], [-math.inf]], [[100], [1]]) for off in (0.0019, 0.0025))
    assert pairs.compare_answers(base, near, None, within)["same"]
    found = pairs.compare_answers(base, far, None, within)
    assert not found["same"] and found["unexplained"]["example"] == 0
    nothing = Answers("t", [True, False], [[math.nan], [-math.inf]], [[100], [1]])
    assert not pairs.compare_answers(base, nothing, None, within)["same"]


def test_texts_differ_at_ties_only_or_are_different():
    def made(*tokens, leads=(3.0, 1e-5, 3.0)):
        return {(7, 8): [Generated(list(tokens), list(leads))]}

    within = Rounding(margin=1e-5)
    assert pairs.differ_only_at_ties(made(1, 2, 3), made(1, 5, 9), within)
    assert not pairs.differ_only_at_ties(made(1, 2, 3), made(1, 2, 3), within)  # no difference
    assert not pairs.differ_only_at_ties(made(1, 2, 3), made(4, 2, 3), within)
    assert not pairs.differ_only_at_ties(made(1, 2, 3, leads=()), made(1, 5, 3), within)  # sampled
    assert not pairs.differ_only_at_ties(made(1, 2, 3), {}, within)


def test_a_perplexity_alone_is_judged_by_its_log_likelihoods():
    def its(off: float) -> Evaluation:
        found = Evaluation("m", torch.float32, torch.device("cpu"))
        for backend, factor in (("sdpa", 1.0), ("lean", 1 + off)):
            items = [(-2400.0 * factor, 40), (-2000.0, 40)]
            score = math.exp(-sum(ll for ll, _ in items) / 80)
            measure = Measure("t", "word_perplexity", score, None, items, "perplexity")
            found.add(report.Run(backend, "dynamic", 0.0, {}, [measure]))
        return found

    assert its(4 * ULP).passed and not its(1e-4).passed
    ours, theirs = (scores(run)["t", "word_perplexity"] for run in its(4 * ULP).runs)
    assert ours != pytest.approx(theirs, rel=1e-5)
