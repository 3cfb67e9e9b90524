"""lm-eval's model type "hf-fastattn": the answers are those of "hf", and the patched model gave them."""

import warnings

import pytest
import torch

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

import checkpoint
from cases import slow_unless
from lm_eval import evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM

import hf_fastattn
from hf_fastattn.evaluation.hflm import FastHFLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(checkpoint.save(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def manager(tmp_path_factory):
    return TaskManager(include_path=str(checkpoint.tasks(tmp_path_factory.mktemp("tasks"))), include_defaults=False)


def created(folder: str, name: str = "hf-fastattn", batch_size: int | str = 2, **options):
    """A model of lm-eval, created as from the arguments of its command line."""
    arguments = ",".join(f"{key}={value}" for key, value in {"pretrained": folder, "dtype": "float32", **options}.items())
    return get_model(name).create_from_arg_string(arguments, {"device": "cpu", "batch_size": batch_size})


def texts(lm, **options) -> list[str]:
    """What it generates for prompts of several lengths, in batches with left padding."""
    options = {"until": ["\x00", "zz"], "max_gen_toks": 10, **options}
    requests = [Instance("generate_until", {}, ("some words, " * (i + 1), dict(options)), i) for i in range(4)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*runs uncaptured")
        return lm.generate_until(requests, disable_tqdm=True)


def samples(results: dict) -> dict:
    """The answers to all requests of all tasks."""
    return {name: [sample["resps"] for sample in each] for name, each in results["samples"].items()}


def flat(answers) -> list:
    return [each for answer in answers for each in flat(answer)] if isinstance(answers, (list, tuple)) else [answers]


@pytest.mark.parametrize("chat", [False, True])
def test_answers_to_every_type_of_request_are_those_of_hf(chat, folder, manager, captured, monkeypatch):
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)  # seconds
    found = {}
    for name, own in (("hf", "attn_implementation=eager"), ("hf-fastattn", "backend=lean")):
        with hf_fastattn.count_calls() as calls:
            options = {"model_args": f"pretrained={folder},dtype=float32,{own}", "apply_chat_template": chat, "device": "cpu"}
            options |= {"tasks": ["small"], "task_manager": manager, "batch_size": 2, "bootstrap_iters": 0}
            found[name] = evaluator.simple_evaluate(model=name, **options)
    theirs, ours = map(samples, found.values())
    assert ours["small_needle"] == theirs["small_needle"] and any(flat(ours["small_needle"]))
    for task in ("small_text", "small_choice"):
        assert flat(ours[task]) == pytest.approx(flat(theirs[task]), rel=1e-4)
    did = found["hf-fastattn"]["config"]["hf_fastattn"]
    assert did["backend"] == "lean" and did["captures"] and did["replays"] > did["captures"] and not did["uncaptured"]
    assert calls["lean.prefill"] and not found["hf"]["config"].get("hf_fastattn")


OPTIONS = {
    "none": {},
    "split_kv": {"backend": "split_kv", "fuse": False, "cache": "preallocated"},
    "of HFLM": {"backend": "causal", "logits_cache": False},  # its own backend= and another of its arguments
    "both": {"attn_implementation": "fa2", "backend": "fa2"},
    "no graph": {"graph": False, "cache": None},
    "static": {},
    "auto": {"batch_size": "auto", "max_batch_size": 3, "max_length": 96},
}


@pytest.mark.parametrize("name", slow_unless(["of HFLM", "static", "auto"].__contains__, OPTIONS))
def test_options_of_patch_reach_it_and_the_others_hflm(name, folder, captured):
    options, static = OPTIONS[name], name == "static"
    gen_kwargs = {"cache_implementation": "static"} if static else {}
    lm = created(folder, **options)
    backend = options.get("backend", "lean").replace("causal", "lean")
    assert lm.patch.backend == lm.model.config._attn_implementation == backend
    assert lm.logits_cache == options.get("logits_cache", True) and lm.backend == "causal"
    assert texts(lm, **gen_kwargs) == texts(created(folder, "hf", attn_implementation="eager"), **gen_kwargs)
    assert lm.patch.reasons == ["cache_implementation='static' was requested"] * static
    assert bool(lm.patch.replays) == (not static and options.get("graph", True))


CONFLICTS = [
    ({"backend": "fast"}, "Unknown attention backend 'fast'; known backends: "),
    ({"attn_implementation": "sdpa"}, "Leave out attn_implementation, and use --model hf for that one."),
    ({"attn_implementation": "fa2"}, "and give backend='fa2' for that one."),
    ({"attn_implementation": "lean", "backend": "fa2"}, "conflicts with backend='fa2'"),
    *(({"graph": "off"}, "graph must be True or False; got 'off'."), ({"kv": "sequence"}, "has kv_sharding= in place of kv=")),
]


def test_conflicts_are_sentences_before_the_model_is_loaded_and_other_refusals(folder, monkeypatch):
    with monkeypatch.context() as unloaded:
        unloaded.setattr(AutoModelForCausalLM, "from_pretrained", None)
        for options, sentence in CONFLICTS:
            with pytest.raises((ValueError, TypeError)) as error:
                created(folder, **options)
            assert sentence in str(error.value)
    with pytest.raises(ValueError, match="needs a preallocated cache"):
        created(folder, cache=None)
    with pytest.raises(ValueError, match='window, sinks and clamp_positions are for "streaming"'):
        created(folder, window=8)
    errors = []
    for name in ("hf", "hf-fastattn"):
        with pytest.raises(TypeError) as error:
            created(folder, name, no_such_argument=1)
        errors.append(str(error.value))
    assert errors[0] == errors[1] and "no_such_argument" in errors[0]


def test_an_adapter_is_applied(folder, tmp_path, captured):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_alpha=32)
    torch.manual_seed(0)
    peft.get_peft_model(checkpoint.model(), config).save_pretrained(tmp_path)
    adapted, without = created(folder, peft=tmp_path), created(folder)
    found = texts(adapted)
    assert adapted.patch.replays and not adapted.patch.reasons
    assert found == texts(created(folder, "hf", peft=tmp_path, attn_implementation="eager")) != texts(without)
    assert without.patch is not adapted.patch and without.patch.replays  # two models beside each other


def test_a_model_object_stays_patched_and_a_patched_one_is_used(captured):
    model, tokenizer = checkpoint.model(), checkpoint.tokenizer()
    eager = texts(get_model("hf")(pretrained=model, tokenizer=tokenizer, batch_size=2))
    first = FastHFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, backend="split_kv")
    assert texts(first) == eager and first.patch.replays
    for own in ({}, {"backend": "split_kv"}, {"backend": "split_kv", "fuse": True}):
        assert FastHFLM(pretrained=model, tokenizer=tokenizer, **own).patch is first.patch
    for own in ({"backend": "lean"}, {"backend": "split_kv", "graph": False}, {"fuse": True}):
        with pytest.raises(ValueError, match=r"already patched: it has .*, and this call asks for .*\. Call hf_fastattn.unpatch"):
            FastHFLM(pretrained=model, tokenizer=tokenizer, **own)
    hf_fastattn.unpatch(model)
    assert texts(FastHFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, fuse=False)) == eager
    with pytest.raises(TypeError, match="takes a Transformers model"):
        FastHFLM(pretrained=torch.nn.Linear(1, 1), tokenizer=tokenizer)
