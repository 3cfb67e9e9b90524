"""evaluate(): equal backends are reported as equal, a wrong one is detected, and the statistics are correct."""

import json
import math
import random
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from calls import as_kernel, attention
from cases import slow_unless

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

import checkpoint

import hf_fastattn
from hf_fastattn.evaluation import Evaluation, data, harness, load, pairs, perplexity, rounding, running
from hf_fastattn.evaluation.pairs import Answers, Measure
from hf_fastattn.evaluation.report import Run
from hf_fastattn.kernels import INTERPRETED, spans

pytestmark = pytest.mark.xdist_group("evaluate")  # one process loads the model
evaluate = hf_fastattn.evaluate


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return checkpoint.tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def tiny():
    return checkpoint.model(), checkpoint.tokenizer()


# ---- a real model: equal backends ----
@pytest.fixture(scope="module")
def smollm2(device):
    if INTERPRETED:
        pytest.skip("30 layers of interpreted kernels take hours")
    try:
        return load("smollm2", dtype=torch.float32, device=device)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_smollm2_backends_and_caches_are_equal(smollm2, small, tmp_path, monkeypatch):
    paddings = []
    generate = type(smollm2[0]).generate

    def spied(self, *args, attention_mask, **options):
        paddings.append((attention_mask == 0).sum(1).tolist())
        return generate(self, *args, attention_mask=attention_mask, **options)

    monkeypatch.setattr(type(smollm2[0]), "generate", spied)
    backends = ["sdpa", "eager", "lean"]
    if smollm2[0].device.type == "cuda":  # on a CPU all backends run the reference
        backends += ["fa2", "split_kv"]
    options = {"tasks": ["small"], "include_path": [small], "batch_size": 3, "decode_tokens": 6, "out": tmp_path}
    found = evaluate(*smollm2, backends=backends, **options)
    assert found.passed and found.verdict().startswith("EQUAL to sdpa, dynamic in every answer and score:"), str(found)
    static = {name: "static" if name in ("sdpa", "eager") else "preallocated" for name in backends}
    assert [run.label for run in found.runs] == [f"{name}, {cache}" for name in backends for cache in ("dynamic", static[name])]
    for run in found.runs:
        for each in run.pairs:
            assert each.same and each.equal in (None, 1.0), each
        prefill = {"small_text", "small_choice"} if run.cache == "dynamic" else set()
        assert {m.task for m in run.measures} == {"small_needle", "decode perplexity", *prefill}
    layers = smollm2[0].config.num_hidden_layers
    for run in found.runs[4:]:
        decoded = run.calls.get(f"{run.backend}.decode", run.calls[f"{run.backend}.prefill"])
        captured = run.cache == "preallocated" and smollm2[0].device.type == "cuda"  # replays are not counted
        assert (decoded > layers * 5 or captured) and f"{run.backend}.dense" not in run.calls
    # The batches were left-padded, with different lengths.
    assert paddings and all(len(set(rows)) == 3 and min(rows) == 0 for rows in paddings)
    # Some answers were correct, so the tasks measure more than noise.
    scores = {(m.task, m.metric): m.score for m in found.baseline.measures}
    assert scores["small_needle", "exact_match, strip"] > 0 and 1 < scores["decode perplexity", "perplexity"] < 1000
    assert json.loads((tmp_path / "eval.json").read_text())["passed"] is True
    assert "| small_needle" in (tmp_path / "eval.md").read_text()


@pytest.mark.slow
def test_smollm2_streaming_within_its_window_is_equal(smollm2, small):
    options = {"tasks": ["small"], "caches": ["dynamic"], "include_path": [small], "batch_size": 3, "decode_tokens": 6}
    found = evaluate(*smollm2, backends=["sdpa", "streaming"], window=1024, sinks=4, **options)
    assert found.passed and found.runs[1].label == "streaming, rolling", str(found)
    assert {m.task for m in found.runs[1].measures} == {"small_text", "small_choice", "small_needle", "decode perplexity"}
    captured = smollm2[0].device.type == "cuda"
    assert found.runs[1].calls["streaming.decode"] > (1 if captured else 5) * smollm2[0].config.num_hidden_layers


# ---- wrong backends ----
def off_by(slots: int):
    """Attention with queries shifted by `slots`: with +1 they see the next token, with -1 not their own."""

    @as_kernel
    def attend(q, k, v, its_spans=None, *, causal=True, window=None, **options):
        if its_spans is None:
            (batch, _, q_len, _), kv_len = q.shape, k.shape[2]
            its_spans = spans.build_spans(batch, q_len, kv_len, q.device, q_offset=kv_len - q_len, causal=causal, window=window)
        its_spans = its_spans.clone()
        its_spans[..., spans.Q_START] += slots
        return attention(q, k, v, its_spans, **options)

    return attend


@pytest.fixture
def wrong(registering):
    """Two backends with the causal mask off by one."""
    for name, slots in (("sees_the_next", 1), ("misses_itself", -1)):
        hf_fastattn.register(hf_fastattn.Backend(name=name, summary="off by one", prefill=off_by(slots)))
    return ["sees_the_next", "misses_itself"]


@pytest.mark.parametrize("which", slow_unless("tiny".__eq__, ["smollm2", "tiny"]))
def test_a_mask_that_is_off_by_one_is_detected_and_named(request, which, wrong, small):
    model, tokenizer = request.getfixturevalue(which)
    tasks = [f"small_{name}" for name in ("text", "choice", "needle")[: 2 if which == "smollm2" else 3]]
    options = {"tasks": tasks, "include_path": [small], "caches": ["dynamic"], "decode_tokens": 6}
    found = evaluate(model, tokenizer, backends=["sdpa", "lean", *wrong], **options)
    assert not found.passed
    assert [run.backend for run in found.differing()] == wrong
    verdict = found.verdict()
    assert verdict.startswith("DIFFERENT from sdpa, dynamic: ") and all(f"{name}, dynamic in small_" in verdict for name in wrong)
    assert "lean" not in verdict
    right = {m.task: m.score for m in found.baseline.measures}
    for run in found.runs[2:]:  # in prefill and in decode
        ours = {m.task: m.score for m in run.measures}
        assert all(ours[task] != pytest.approx(right[task], rel=1e-3) for task in ("small_text", "decode perplexity"))


def test_a_backend_that_is_never_called_does_not_pass(tiny):
    found = evaluate(*tiny, backends=["sdpa"], tasks=[], decode_tokens=4, caches=["dynamic"])
    run = found.runs[0]
    found.add(Run("lean", "dynamic", 0.0, {}, run.measures, run.answers, called=False))
    assert not found.passed and "lean, dynamic: none of its kernels was called" in found.verdict()


# ---- decode perplexity ----
def test_decode_perplexity_is_that_of_one_pass(tiny):
    model, tokenizer = tiny
    given = perplexity.excerpts(tokenizer, data.text(), rows=3, tokens=9, prompt=20)
    assert (given.mask == 0).sum(1).tolist() == [0, 5, 10]
    with running(model, "lean", "preallocated"):
        nats = perplexity.decode_nats(model, given)
    ids = torch.cat([given.prompts, given.targets], 1)
    mask = torch.cat([given.mask, torch.ones_like(given.targets)], 1)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    expected = -logits[:, 19:-1].log_softmax(-1).gather(2, given.targets[..., None])[..., 0]
    torch.testing.assert_close(torch.tensor(nats, dtype=torch.float64), expected[:, 1:].double(), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="needs a text of 40 tokens, and this one has 5"):
        perplexity.excerpts(tokenizer, "short", rows=2, tokens=10, prompt=10)
    with pytest.raises(ValueError, match="needs its tokenizer"):
        evaluate(model, tasks=[])


def test_kv_in_8_bits_are_one_more_run(tiny, tmp_path):
    options = {"tasks": [], "caches": ["preallocated"], "decode_tokens": 8, "batch_size": 1, "out": tmp_path}
    found = evaluate(*tiny, backends=["fa2", "lean"], kv_dtype="int8", **options)
    assert [run.label for run in found.runs] == ["fa2, preallocated", "lean, preallocated", "lean, int8"]
    eight = found.runs[2]
    (before,), (same,), (rounded,) = (run.measures for run in found.runs)
    assert same.score == pytest.approx(before.score, rel=1e-5) != rounded.score == pytest.approx(before.score, rel=0.2)
    assert found.differing() == [eight] and "| int8 " in (tmp_path / "eval.md").read_text()
    with running(tiny[0], "lean", "fp8") as patched:
        assert patched.arguments["kv_dtype"] == "fp8"


# ---- the statistics ----
def test_interval_of_a_mean_is_that_of_paired_differences():
    base, other = [1, 0, 1, 1, 0, 1, 0, 1], [1, 0, 0, 1, 1, 1, 0, 0]
    found = pairs.pair(*(Measure("t", "acc", fmean(items), None, items, "mean") for items in (base, other)))
    each = [b - a for a, b in zip(base, other, strict=True)]
    half = 1.96 * stdev(each) / math.sqrt(8)
    assert found.difference == fmean(each) and found.interval == pytest.approx((fmean(each) - half, fmean(each) + half))
    assert not found.same and not found.beyond_chance()


def test_interval_of_a_perplexity_is_that_of_the_bootstrap():
    draw = random.Random(0)
    weights = [draw.randint(20, 200) for _ in range(300)]
    lls = [-w * draw.gauss(3.0, 0.5) for w in weights]
    others = [ll + w * draw.gauss(0.02, 0.05) for ll, w in zip(lls, weights, strict=True)]

    def score(values, indices):
        return math.exp(-sum(values[i] for i in indices) / sum(weights[i] for i in indices))

    whole = range(300)
    measures = [Measure("t", "p", score(v, whole), None, list(zip(v, weights, strict=True)), "perplexity") for v in (lls, others)]
    found = pairs.pair(*measures)
    drawn = [[draw.randrange(300) for _ in whole] for _ in range(800)]
    differences = sorted(score(others, i) - score(lls, i) for i in drawn)
    assert found.interval == pytest.approx((differences[20], differences[780]), rel=0.12) and found.beyond_chance(20)
    assert measures[0].stderr == pytest.approx(stdev(score(lls, i) for i in drawn), rel=0.1)


def test_first_difference_of_texts_is_a_token_and_of_choices_an_example(tiny):
    texts = pairs.compare_answers(Answers("t", ["abc", "abcd"], [[], []]), Answers("t", ["abc", "abXd"], [[], []]), tiny[1])
    assert texts["equal"] == 0.5 and texts["first"] == {"example": 1, "baseline": "abcd", "got": "abXd", "token": 2}
    longer = pairs.compare_answers(Answers("t", ["ab"], [[]]), Answers("t", ["abc"], [[]]), tiny[1])
    assert longer["first"]["token"] == 2
    chosen = pairs.compare_answers(Answers("t", [0, 3], [[-1.0], [-2.0]]), Answers("t", [0, 1], [[-1.0], [-2.5]]), tiny[1])
    assert chosen["first"] == {"example": 1, "baseline": 3, "got": 1} and chosen["largest_loglikelihood_difference"] == 0.5
    nothing = pairs.compare_answers(Answers("t", [None], [[-1.0]]), Answers("t", [None], [[-1.0]]), tiny[1])
    assert "equal" not in nothing


def judged(dtype: torch.dtype, **scores: list[float]) -> Evaluation:
    """An evaluation of one metric with these values by backend."""
    found = Evaluation("m", dtype, torch.device("cpu"))
    for backend, items in scores.items():
        found.add(Run(backend, "dynamic", 0.0, {}, [Measure("t", "acc", fmean(items), None, items, "mean")]))
    return found


RIGHT = [1.0, 0.0] * 20
WORSE = [0.0] * 40  # every second example: far beyond chance
NEAR = [0.0, *RIGHT[1:]]  # one example of 40: may be chance


def test_differences_count_by_the_dtype_and_the_stock_backends():
    assert judged(torch.float32, sdpa=RIGHT, lean=RIGHT).passed and judged(torch.bfloat16, sdpa=RIGHT, lean=RIGHT).passed
    assert not judged(torch.float32, sdpa=RIGHT, lean=NEAR).passed
    near = judged(torch.bfloat16, sdpa=RIGHT, lean=NEAR)
    assert near.passed and near.verdict() == "No difference larger than chance: lean, dynamic."
    assert " 0.15 |" in str(near) and near.as_dict()["runs"][1]["against_baseline"][0]["detectable"] == pytest.approx(0.15)
    assert not judged(torch.bfloat16, sdpa=RIGHT, lean=WORSE).passed
    assert judged(torch.bfloat16, sdpa=RIGHT, eager=WORSE, lean=WORSE).differing()[0].backend == "eager"
    found = judged(torch.bfloat16, sdpa=RIGHT, eager=NEAR, lean=NEAR)
    assert found.passed and "than between Transformers' own backends" in found.verdict()
    items = [-1.0, 0.0, 0.0, 0.0, 0.0] * 8  # 3.1 standard errors below 0: more comparisons need more
    found = pairs.pair(Measure("t", "m", 0.0, None, [0.0] * 40, "mean"), Measure("t", "m", -0.2, None, items, "mean"))
    assert found.beyond_chance() and found.beyond_chance(20) and not found.beyond_chance(100)


# ---- what cannot be judged ----
def compared(dtype: torch.dtype, base: Measure, other: Measure, *answers: Answers) -> Evaluation:
    """An evaluation of two runs with one metric each, and with these answers."""
    found = Evaluation("m", dtype, torch.device("cpu"))
    for backend, measure, its in zip(("sdpa", "lean"), (base, other), answers or (None, None), strict=True):
        found.add(Run(backend, "dynamic", 0.0, {}, [measure], [] if its is None else [its]))
    return found


def metric(items: list, aggregate: str = "mean", score: float | None = None, ids: tuple = ()) -> Measure:
    if score is None:
        score = fmean(items) if aggregate == "mean" else pairs.exp(-sum(ll for ll, _ in items) / len(items))
    return Measure("t", "m", score, None, items, aggregate, list(ids))


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_or_infinity_in_one_example_does_not_pass(dtype, bad, tmp_path):
    right = [(-1.0 - i / 40, 1) for i in range(40)]
    wrong = [*right[:7], (bad, 1), *right[8:]]
    ours = metric(wrong, "perplexity"), metric([bad, *RIGHT[1:]])
    for base, other in ((metric(right, "perplexity"), ours[0]), (metric(RIGHT), ours[1])):
        found = compared(dtype, base, other)
        assert [run.backend for run in found.differing()] == ["lean"] and not found.passed
        assert "NaN or infinity in 1 of 40 examples)" in found.verdict()
        for its in (compared(dtype, other, base), compared(dtype, other, other)):  # the baseline has it, or both have it
            assert not its.passed and not its.differing() and its.verdict().startswith("NOT JUDGED against sdpa, dynamic: lean")
            assert "NaN or infinity in 1 of 40 examples of the baseline" in its.verdict() and "EQUAL" not in its.verdict()
        saved = found.save(tmp_path).read_text()
        kept = json.loads(saved, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert not kept["passed"] and float(kept["runs"][1]["scores"][0]["score"]) != 0.5
        assert "| different " in (tmp_path / "eval.md").read_text()


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_likelihoods_and_logits_count_also_where_the_score_is_finite(dtype):
    answers = [Answers("t", [0] * 40, [[-1.0, off] for off in offs]) for offs in ([-2.0] * 40, [-2.0] * 39 + [-math.inf])]
    found = compared(dtype, metric(RIGHT), metric(RIGHT), *answers)
    assert not found.passed and "NaN or infinity in 1 of 40 examples" in found.verdict()
    assert not compared(dtype, metric(RIGHT), metric(RIGHT), answers[1], answers[1]).passed
    found = Evaluation("m", dtype, torch.device("cpu"))
    for backend, finite in (("sdpa", True), ("lean", False), ("eager", True)):
        made = {(1, 2): [pairs.Generated([5], [1.0], finite)], (1, 3): [pairs.Generated([5], [1.0])]}
        found.add(Run(backend, "dynamic", 0.0, {}, [metric(RIGHT)], generated=made))
    assert [run.backend for run in found.differing()] == ["lean"]
    assert "lean, dynamic: NaN or infinity in the logits of 1 of 2 prompts" in found.verdict()


def test_a_changed_score_without_a_formula_is_not_judged_in_16_bits():
    for aggregate in ("median", "f1", "matthews_corrcoef", "bleu", "other"):
        base, near = metric(RIGHT, aggregate, 0.5), metric(NEAR, aggregate, 0.4)
        found = compared(torch.bfloat16, base, near)
        assert not found.passed and not found.differing() and f"aggregated by {aggregate}" in found.verdict()
        assert compared(torch.bfloat16, base, base).passed and compared(torch.float32, base, near).differing()


def test_bits_per_byte_are_judged_as_perplexities():
    draw = random.Random(0)
    items = [(-100.0 - draw.random(), 50) for _ in range(40)]
    near, far = ([(ll + off * draw.gauss(1, 0.1), w) for ll, w in items] for off in (0, -0.5))
    nats = [-sum(ll for ll, _ in its) / 2000 for its in (items, near, far)]
    found = [metric(its, "bits_per_byte", nat / math.log(2)) for its, nat in zip((items, near, far), nats, strict=True)]
    assert compared(torch.bfloat16, found[0], found[1]).passed
    worse = compared(torch.bfloat16, found[0], found[2])
    assert worse.differing() and sum(worse.runs[1].pairs[0].interval) / 2 == pytest.approx(0.01 / math.log(2), rel=0.1)


def test_too_few_examples_and_scores_that_cannot_fall_are_not_judged_in_16_bits():
    assert "fewer than 6 examples cannot show a difference" in judged(torch.bfloat16, sdpa=[1.0], lean=[0.0]).verdict()
    five = judged(torch.bfloat16, sdpa=[1.0] * 5, lean=[0.0] * 5)
    assert not five.passed and not five.differing()  # the same sign five times: 6 % by chance
    tokens = [metric([(ll - off * (1 + i / 9), 1) for i, ll in enumerate([-2.0, -3.0, -1.0])], "perplexity") for off in (0, 0.01)]
    assert not compared(torch.bfloat16, *tokens).passed and not compared(torch.bfloat16, *tokens).differing()
    assert judged(torch.bfloat16, sdpa=[1.0] * 6, lean=[0.0] * 6).differing()
    texts = [Answers("t", [f"{name} {i}" for i in range(40)], [[]] * 40) for name in ("right", "garbage")]
    nothing = compared(torch.bfloat16, metric([0.0] * 40), metric([0.0] * 40), *texts)
    assert not nothing.passed and "a score of 0 cannot fall by the smallest detectable difference, 0.15" in nothing.verdict()
    assert compared(torch.bfloat16, metric([1.0] * 40), metric([1.0] * 40), *texts).passed  # other texts, all of them right


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_examples_or_with_others_nothing_is_judged(dtype):
    nothing, not_a_number, no_answers = metric([], score=0.5), metric(RIGHT, score=math.nan), Answers("t", [], [])
    alone = Evaluation("m", dtype, torch.device("cpu"))
    alone.add(Run("sdpa", "dynamic", 0.0, {}, [metric(RIGHT)]))
    for found, sentence in (
        (compared(dtype, nothing, nothing, no_answers, no_answers), "it has no examples"),
        (compared(dtype, metric(RIGHT), metric(RIGHT[2:], ids=tuple(range(2, 40)))), "2 examples are in one run only"),
        (compared(dtype, metric(RIGHT), metric(RIGHT, ids=tuple(range(1, 41)))), "2 examples are in one run only"),
        (compared(dtype, metric(RIGHT), Measure("t", "other", 0.5, None, RIGHT, "mean")), "t (m) is missing in one of the"),
        (alone, "nothing to compare"),
        (compared(dtype, not_a_number, not_a_number), "the score of the baseline is not a finite number"),
    ):
        assert not found.passed and sentence in found.verdict()


def test_a_perplexity_beyond_floats_is_infinite_and_judged_by_its_log_likelihoods():
    items = [(-800.0 - i / 7, 1) for i in range(40)]
    base = metric(items, "perplexity")
    assert base.score == math.inf and compared(torch.bfloat16, base, base).passed and compared(torch.float32, base, base).passed
    near = metric([(ll + (-1) ** i * 0.01, w) for i, (ll, w) in enumerate(items)], "perplexity")
    found = compared(torch.bfloat16, base, near)
    assert found.passed and json.dumps(found.as_dict(), allow_nan=False, default=str) and "| inf " in str(found)
    assert compared(torch.bfloat16, base, metric([(ll - 1, w) for ll, w in items], "perplexity")).differing()


def test_single_log_likelihoods_beyond_rounding_differ_in_16_bits():
    """The mean of the differences is 0, as with a wrong backend and a model of random weights."""
    items = [(-8.0, 1)] * 40
    for size, passes in ((0.05, True), (2.0, False)):
        found = Evaluation("m", torch.bfloat16, torch.device("cpu"))
        found.rounding = rounding.Rounding(2**-8, token=0.4, margin=0.4)
        for backend, off in (("sdpa", 0.0), ("lean", size)):
            its = [(ll + (-1) ** i * off, w) for i, (ll, w) in enumerate(items)]
            found.add(Run(backend, "dynamic", 0.0, {}, [metric(its, "perplexity")]))
        assert found.passed == passes, found.verdict()


def broken(change):
    @as_kernel
    def attend(q, k, v, its_spans=None, **options):
        out = attention(q, k, v, its_spans, **options)
        return (change(out[0], q.shape[2]), out[1]) if isinstance(out, tuple) else change(out, q.shape[2])

    return attend


BROKEN = {
    "nan": lambda out, q_len: out * math.nan,
    "nan_of_a_row": lambda out, q_len: torch.cat([out[:-1], out[-1:] * math.nan]),
    "infinite_steps": lambda out, q_len: out + math.inf if q_len == 1 else out,
    "constant": lambda out, q_len: torch.full_like(out, 0.1),
    "swapped_heads_of_steps": lambda out, q_len: out.flip(1) if q_len == 1 else out,
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_broken_backends_do_not_pass_and_a_right_one_does(dtype, registering, tmp_path):
    for name, change in BROKEN.items():
        hf_fastattn.register(hf_fastattn.Backend(name=name, summary="broken", prefill=broken(change)))
    model = checkpoint.model().to(dtype)
    options = {"tasks": (), "text": data.text()[:900], "decode_tokens": 8, "batch_size": 3, "caches": ["dynamic"]}
    options["out"] = tmp_path
    found = evaluate(model, checkpoint.tokenizer(), backends=["sdpa", "eager", "lean", *BROKEN], **options)
    assert [run.backend for run in found.differing()] == list(BROKEN) and not found.not_judged(), found.verdict()
    json.loads((tmp_path / "eval.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    bad = evaluate(model, checkpoint.tokenizer(), backends=["nan", "lean"], **options)
    assert not bad.passed and [run.backend for run in bad.not_judged()] == ["lean"]


def test_a_prompt_that_is_nan_is_seen_in_decode_perplexity(tiny):
    model, tokenizer = checkpoint.model(num_hidden_layers=1), tiny[1]  # the steps of one layer do not depend on its output
    given = perplexity.excerpts(tokenizer, data.text()[:200], rows=2, tokens=5, prompt=20)
    nan = lambda module, arguments, out: out * math.nan if out.shape[1] > 1 else out  # noqa: E731
    with model.model.layers[0].self_attn.o_proj.register_forward_hook(nan):
        assert all(math.isnan(nat) for row in perplexity.decode_nats(model, given) for nat in row)
    assert all(math.isfinite(nat) for row in perplexity.decode_nats(model, given) for nat in row)


def test_aggregates_of_lm_eval_are_known_by_name_and_value():
    from lm_eval.api import metrics

    aggregate = harness._aggregate
    assert aggregate(metrics.mean, RIGHT, 0.5) == (RIGHT, "mean") == aggregate(metrics.nanmean, RIGHT, 0.5)
    assert aggregate(metrics.mean, RIGHT, 0.4)[1] == "other" and aggregate(metrics.mean, [(1, 2)], 0.5)[1] == "other"
    assert aggregate(metrics.median, RIGHT, 1.0)[1] == "median" and aggregate(metrics.bypass_agg, [None], 999)[1] == "bypass_agg"
    assert aggregate(metrics.perplexity, [-1.0, -3.0], math.exp(2)) == ([(-1.0, 1), (-3.0, 1)], "perplexity")
    assert aggregate(metrics.weighted_perplexity, [(-4.0, 2)], math.exp(2)) == ([(-4.0, 2)], "perplexity")
    assert aggregate(metrics.bits_per_byte, [(-4.0, 2)], 2 / math.log(2))[1] == "bits_per_byte"
    large = harness._aggregations(lambda: {"p": metrics.perplexity, "acc": metrics.mean})
    assert large["p"]([-800.0]) == math.inf and large["acc"] is metrics.mean
    assert math.isnan(harness._score("N/A")) and harness._score(torch.tensor(0.5).numpy()[()]) == 0.5


# ---- results and refusals ----
def test_interrupted_runs_are_kept(tiny, tmp_path, monkeypatch):
    decode, ran = perplexity.decode_nats, []

    def interrupted(*args):
        if ran:
            raise KeyboardInterrupt
        ran.append(True)
        return decode(*args)

    monkeypatch.setattr(perplexity, "decode_nats", interrupted)
    found = evaluate(*tiny, tasks=[], decode_tokens=4, out=tmp_path)
    kept = json.loads((tmp_path / "eval.json").read_text())
    assert found.interrupted and kept["interrupted"] and [run["backend"] for run in kept["runs"]] == ["sdpa"]
    assert kept["runs"][0]["scores"][0]["score"] > 1 and "Interrupted" in (tmp_path / "eval.md").read_text()


def test_the_model_is_restored(tiny):
    model, tokenizer = tiny
    model.set_attn_implementation("eager")
    before = dict(vars(model.generation_config))
    evaluate(model, tokenizer, backends=["sdpa", "lean"], tasks=[], decode_tokens=4)
    assert model.config._attn_implementation == "eager" and vars(model.generation_config) == before
    for backends in (["sdpa"], ["lean"]):
        with hf_fastattn.patch(model, cache=None, graph=False, fuse=False) as patch:
            with pytest.raises(ValueError, match="is already patched"):
                evaluate(model, tokenizer, backends=backends, caches=["dynamic"], tasks=[], decode_tokens=4)
            assert not patch.undone


def test_gen_kwargs_and_limit_reach_lm_eval(tiny, small):
    options = {"backends": ["sdpa", "lean"], "caches": ["dynamic"], "tasks": ["small_needle"], "include_path": [small]}
    found = evaluate(*tiny, **options, limit=2, gen_kwargs="max_gen_toks=3", decode_tokens=0)
    (answers,) = found.runs[1].answers
    assert len(answers.answers) == 2
    assert found.runs[1].calls["lean.decode"] == 2 * 2  # layers x tokens after the first


def test_a_group_has_a_score_and_its_tasks_are_compared(tiny, small, tmp_path):
    (tmp_path / "other.yaml").write_text((small / "choice.yaml").read_text().replace("small", "other") + "  seed: 1\n")
    (tmp_path / "group.yaml").write_text(
        "group: both\ntask: [small_choice, other_choice]\naggregate_metric_list:\n  - metric: acc\n    weight_by_size: true\n"
    )
    found = evaluate(*tiny, tasks=["both"], include_path=[small, tmp_path], caches=["dynamic"], decode_tokens=0)
    scores = {m.task: m for m in found.baseline.measures}
    tasks = {"small_choice", "other_choice"}
    assert set(scores) == {"both", *tasks} and scores["both"].stderr is not None
    assert scores["both"].score == pytest.approx(fmean(scores["small_choice"].items + scores["other_choice"].items))
    assert found.passed and {each.task for each in found.runs[1].pairs} == tasks and "| see its tasks " in str(found)


def test_the_tasks_are_the_same_in_every_process_and_answerable():
    from hf_fastattn.tasks import data as again

    for make in (data.choices, data.needles, data.pages):
        assert make()["test"].to_list() == make()["test"].to_list() == getattr(again, make.__name__)()["test"].to_list()
    for doc in data.choices()["test"]:
        assert len(set(doc["choices"])) == 4 and f" {doc['choices'][doc['answer']]} " in doc["question"]
    needles = data.needles()["test"]
    assert all(f"{doc['city']} is: {doc['phrase']}." in doc["hay"] for doc in needles)
    assert sorted(doc["depth"] for doc in needles) == [i / 19 for i in range(20)]


MISTAKES = [
    *(({"backends": []}, "Name at least one backend"), ({"tasks": [], "decode_tokens": 0}, "nothing to run")),
    ({"backends": ["sdpa", "leen"]}, "Unknown attention backend 'leen'; known backends: .*lean"),
    ({"caches": ["static"]}, 'caches are one or both of "dynamic" and "preallocated"; got \'static\''),
    *(({"decode_tokens": 2}, "at least 3; got 2"), ({"limit": math.inf}, "limit must be above 0: .* got inf")),
    ({"batch_size": "auto:x"}, "\"auto:N\" to find it N times; got 'auto:x'"),
    ({"gen_kwargs": "bogus"}, "a list as in max_gen_toks=64,do_sample=False; got 'bogus'"),
    *(({"gen_kwargs": {"bogus": 1}}, "gen_kwargs has 'bogus'"), ({"window": 8}, 'options of the backend "streaming"')),
    ({"kv_dtype": "int8", "backends": ["sdpa", "fa2"]}, "kv_dtype is for backends whose kernels read 8 bits"),
    ({"kv_dtype": "int4"}, """'lean' cannot be evaluated with a int4 cache: kv_dtype must be "int8", "fp8" or None"""),
    ({"tasks": ["small_texts"]}, "Unknown task 'small_texts'. Near it: small_text"),
    ({"include_path": ["/nowhere"]}, "no folder /nowhere"),
    ({"backends": ["sdpa", "flash_attention_2"]}, "'flash_attention_2' cannot be evaluated"),
]


@pytest.mark.parametrize("options, sentence", slow_unless(lambda case: "tasks" not in case[0] or not case[0]["tasks"], MISTAKES))
def test_mistakes_are_refused_before_the_run(tiny, small, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        evaluate(*tiny, **{"tasks": ["small_text"], "include_path": [small], **options})
