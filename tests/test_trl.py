"""Rollouts of TRL's trainers on a patched model: those of an unpatched model of the same seed, captured.

`make test-trl` runs the tests with `long` too, a few minutes.
"""

from __future__ import annotations

import os
import re
import types
from pathlib import Path
from types import SimpleNamespace

import checkpoint
import processes
import pytest
import torch
import torch.distributed as dist
from conftest import INTERPRETED
from models import prompts, tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel, modeling_utils

import hf_fastattn
from benchmarks import rollout
from hf_fastattn import hf
from hf_fastattn.caches import pool
from hf_fastattn.patches.fused import subclass

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(INTERPRETED, reason="a graph is recorded from the reference"),
    pytest.mark.xdist_group("ranks"),
    pytest.mark.usefixtures("captured_steps"),
]
long = pytest.mark.skipif("HF_FASTATTN_TRL" not in os.environ, reason="make test-trl")
NEW = 12  # tokens of a completion, of which the prompt's forward gives the first
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def generate(model, **options):
    return model.generate(**prompts("left_padding", "cpu", length=30), **{"max_new_tokens": NEW, "do_sample": False, **options})


# ---- the hook that lets the output of an embedding require grad ----


def _transformers(model):
    model.enable_input_require_grads()
    return model


def _lora(model):
    peft = pytest.importorskip("peft")
    model.gradient_checkpointing_enable()
    return _transformers(peft.get_peft_model(model, peft.LoraConfig(**LORA, init_lora_weights=False)))


def _bits(model):
    model.is_loaded_in_4bit = True
    return pytest.importorskip("peft").prepare_model_for_kbit_training(model)


def _of_peft(model):
    """PEFT's own hook, for models without Transformers' method."""
    other = SimpleNamespace(get_input_embeddings=model.get_input_embeddings)
    pytest.importorskip("peft").PeftModel._prepare_model_for_gradient_checkpointing(None, other)
    return model


@pytest.mark.parametrize("prepare", [_transformers, _lora, _bits, _of_peft])
def test_a_hook_that_lets_inputs_require_grad_is_inert(prepare):
    model, stock = prepare(tiny("llama", "sdpa")), prepare(tiny("llama", "sdpa"))
    assert model.get_input_embeddings()._forward_hooks
    with hf_fastattn.patch(model) as patch:
        for step in range(3):
            if step == 2:
                model.disable_input_require_grads()
            with torch.set_grad_enabled(step % 2 == 0):  # generate() has its own mode
                found = generate(model, output_logits=True, return_dict_in_generate=True)
            tokens, logits = found.sequences, found.logits
            del found  # with its cache, whose buffers the next call uses
            assert torch.equal(tokens, generate(stock)) and not any(each.requires_grad for each in logits)
            with torch.no_grad():
                for each in (model, stock):
                    each.get_input_embeddings().weight.mul_(-0.9)
        assert (patch.captures, patch.replays, patch.uncaptured) == (1, 3 * (NEW - 1) - 1, 0), patch


def _of_the_same_name(embedding):
    def make_inputs_require_grads(module, input, output):
        output.requires_grad_(True)

    make_inputs_require_grads.__module__ = modeling_utils.__name__
    make_inputs_require_grads.__qualname__ = "PreTrainedModel.enable_input_require_grads.<locals>.make_inputs_require_grads"
    return make_inputs_require_grads


def _own(embedding):
    (hook,) = embedding._forward_hooks.values()
    return hook


def _with_other_globals(embedding):
    return types.FunctionType(_own(embedding).__code__, {"__name__": modeling_utils.__name__})


def _with_other_code(embedding):
    _own(embedding).__code__ = (lambda module, input, output: 2 * output).__code__
    return _own(embedding)


def _of_the_same_file(embedding):
    exec("def twice(module, input, output): return 2 * output", vars(modeling_utils))
    return vars(modeling_utils).pop("twice")


@pytest.mark.parametrize("make", [_of_the_same_name, _with_other_globals, _with_other_code, _of_the_same_file])
def test_another_hook_on_an_embedding_is_refused(make):
    model = tiny("llama", "sdpa")
    with hf_fastattn.patch(model) as patch:
        model.enable_input_require_grads()
        generate(model), generate(model)
        assert patch.captures == 1
        embedding = model.get_input_embeddings()
        hook = make(embedding)
        if hook not in embedding._forward_hooks.values():
            embedding.register_forward_hook(hook)
        with pytest.warns(UserWarning, match="Embedding has the forward hook"):
            got = generate(model)
        assert patch.captures == 1 and patch.uncaptured == NEW - 1
    assert torch.equal(generate(model), got)


def test_a_method_of_the_users_makes_no_inert_hook(monkeypatch):
    def enable(self):
        self.get_input_embeddings().register_forward_hook(lambda module, input, output: 2 * output)

    monkeypatch.setattr(PreTrainedModel, "enable_input_require_grads", enable)
    model = tiny("llama")
    model.enable_input_require_grads()
    (hook,) = model.get_input_embeddings()._forward_hooks.values()
    assert not hf.is_inert_hook(hook)


# ---- trainers ----


def texts(rows: int = 64):
    """Prompts of different lengths: a batch of equal ones, without padding, would have a graph of its own."""
    return pytest.importorskip("datasets").Dataset.from_dict({"prompt": [chr(97 + i % 26) * (3 + i) for i in range(rows)]})


def reward(completions, **_) -> list[float]:
    return [float(sum(ord(letter) % 7 == 0 for letter in text)) for text in completions]


class Run:
    """A trainer of TRL over a tiny model. when: "before" or "after" it is made the model is patched; None: never."""

    def __init__(self, folder, kind: str, when: str | None, lora: bool = False, given: dict | None = None, **options):
        trl, path = pytest.importorskip("trl"), folder / "model"
        if not path.exists():
            checkpoint.save(path)
        # With Adam, a gradient of rounding errors alone is a step as large as any.
        common = {"max_steps": 3, "optim": "sgd", "learning_rate": 3e-2, "logging_steps": 1, "save_strategy": "no"}
        common |= {"output_dir": str(folder / "out"), "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True}
        if kind in ("GRPO", "RLOO"):
            common |= {"max_completion_length": NEW, "num_generations": 2, "per_device_train_batch_size": 4}
        module = trl if hasattr(trl, f"{kind}Trainer") else pytest.importorskip("trl.experimental.online_dpo")
        arguments = getattr(module, f"{kind}Config")(**{**common, **options})
        given = {"train_dataset": texts(), "processing_class": checkpoint.tokenizer(), **(given or {})}
        if kind != "SFT":
            given.setdefault("reward_funcs", reward)
        if lora:
            given["peft_config"] = pytest.importorskip("peft").LoraConfig(**LORA, init_lora_weights=False)
        model = given.pop("model", None) or AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
        self.patch = hf_fastattn.patch(model) if when == "before" else None
        torch.manual_seed(0)
        self.trainer = getattr(module, f"{kind}Trainer")(model=model, args=arguments, **given)
        self.patch = hf_fastattn.patch(self.trainer.model) if when == "after" else self.patch

    def train(self, **options) -> Run:
        self.trainer.train(**options)
        return self

    def logged(self, name: str) -> list[float]:
        return [entry[name] for entry in self.trainer.state.log_history if name in entry]

    def counts(self) -> tuple[int, int, int]:
        return self.patch.captures, self.patch.replays, self.patch.uncaptured

    def agrees(self, stock: Run) -> None:
        """Compare what was logged, and tokens of the model as it is now without its patch."""
        for name in ("reward", "loss", "grad_norm", "eval_reward"):
            assert self.logged(name) == pytest.approx(stock.logged(name), rel=1e-3, abs=1e-4), name
        assert self.logged("grad_norm")
        model = self.trainer.accelerator.unwrap_model(self.trainer.model).eval()
        found = generate(model)
        self.patch.undo()
        assert torch.equal(generate(model), found)


@pytest.mark.parametrize(
    "kind, lora, when, steps, kept",
    [
        ("GRPO", True, "after", 3, pool.KEPT),  # the hook on the embedding
        pytest.param("GRPO", False, "before", 3, 0, marks=long),
        *(
            pytest.param(kind, lora, when, 10, pool.KEPT, marks=long)
            for kind in ("GRPO", "RLOO")
            for lora in (False, True)
            for when in ("before", "after")
        ),
    ],
)
def test_rollouts(kind, lora, when, steps, kept, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "KEPT", kept)  # with 0 each step frees K and V, and each rollout is captured
    stock, ours = (Run(tmp_path, kind, each, lora, max_steps=steps).train() for each in (None, when))
    if lora:
        assert ours.trainer.model.get_input_embeddings()._forward_hooks
    captures = 1 if kept else steps
    assert ours.counts() == (captures, steps * (NEW - 1) - captures, 0) and len(set(ours.logged("reward"))) > 1
    ours.agrees(stock)


@long
def test_rollouts_of_a_hybrid(tmp_path, steps=10):
    kinds = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_value_heads": 4}
    kinds |= {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    sizes = {"vocab_size": 320, "max_position_embeddings": 2048, "eos_token_id": 2}
    stock, ours = (
        Run(tmp_path, "GRPO", when, given={"model": tiny("qwen3_5_text", "sdpa", **sizes, **kinds)}, max_steps=steps).train()
        for when in (None, "before")
    )
    assert ours.counts() == (1, steps * (NEW - 1) - 1, 0) and len(set(ours.logged("reward"))) > 1
    ours.agrees(stock)
    assert ours.logged("reward") == stock.logged("reward")


def test_the_arguments_of_the_benchmark_are_those_of_trl(tmp_path):
    trl = pytest.importorskip("trl")
    run, found = Run(tmp_path, "GRPO", None, max_completion_length=trl.GRPOConfig.max_completion_length), {}
    model = run.trainer.model

    def generate_of_trl(**given):
        found.update(given)
        assert model.training and not model.is_gradient_checkpointing and not torch.is_grad_enabled()
        raise InterruptedError

    model.generate = generate_of_trl
    with pytest.raises(InterruptedError):
        run.train()
    assert (rollout.GIVEN["trl"], rollout.GIVEN["arguments"]) == (trl.__version__, list(found))
    given = found["generation_config"]
    special = {name: getattr(given, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    assert hf.GenerationConfig(**rollout.GIVEN["generation_config"], **special).to_dict() == given.to_dict()


OPTIONS = {  # options of the trainer: captures, or None for the reason
    "a reference model": ({"beta": 0.1}, 1),
    "several updates of a rollout": ({"num_iterations": 2, "steps_per_generation": 4, "max_steps": 8}, 1),
    "beams": ({"generation_kwargs": {"num_beams": 2}}, 1),
    "no checkpoints": ({"gradient_checkpointing": False}, 1),
    "autocast": ({"bf16": True}, 1),
    "evaluation": ({"eval_strategy": "steps", "eval_steps": 1, "num_generations_eval": 1, "per_device_eval_batch_size": 1}, 2),
    "epochs": ({"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch"}, 2),
    "Transformers' cache": ({"cache_implementation": "static"}, "cache_implementation='static' was requested"),
}


@long
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("case", OPTIONS)
def test_options(case, lora, tmp_path):
    options, expected = OPTIONS[case]
    given = {"train_dataset": texts(8), "eval_dataset": texts(3)} if "eval_strategy" in options else {}
    stock, ours = (Run(tmp_path, "GRPO", when, lora, given, **options).train() for when in (None, "before"))
    if isinstance(expected, str):
        assert ours.patch.captures == 0 and ours.patch.reasons == [expected]
    else:
        assert (ours.patch.captures, ours.patch.uncaptured, ours.patch.reasons) == (expected, 0, [])
    if not options.get("bf16"):  # its rounding decides tokens
        ours.agrees(stock)


@long
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_saving_and_resuming(lora, when, tmp_path):
    runs = []
    for each in (None, when):
        Run(tmp_path, "GRPO", each, lora, max_steps=2, save_strategy="steps", save_steps=2).train()
        saved = str(tmp_path / "out" / "checkpoint-2")
        runs.append(Run(tmp_path, "GRPO", each, lora, max_steps=5).train(resume_from_checkpoint=saved))
    assert runs[1].counts() == (1, 3 * (NEW - 1) - 1, 0) and len(runs[1].logged("reward")) == 5
    runs[1].agrees(runs[0])


def test_use_cache_false_names_the_remedy():
    model = tiny("llama")
    with hf_fastattn.patch(model), pytest.warns(UserWarning, match='generation_kwargs={"use_cache": True}'):
        generate(model, use_cache=False)


@long
def test_online_dpo(tmp_path):
    given = lambda: {"ref_model": AutoModelForCausalLM.from_pretrained(tmp_path / "model")}  # noqa: E731
    checkpoint.save(tmp_path / "model")
    options = {"per_device_train_batch_size": 4, "max_new_tokens": NEW}
    stock = Run(tmp_path, "OnlineDPO", None, given=given(), **options).train()
    with pytest.warns(UserWarning, match="use_cache=False was requested, and each step reads the whole text again"):
        slow = Run(tmp_path, "OnlineDPO", "before", given=given(), **options).train()
    ours = Run(tmp_path, "OnlineDPO", "before", given=given(), **options, generation_kwargs={"use_cache": True}).train()
    assert slow.patch.captures == 0 and ours.counts() == (1, 3 * (NEW - 1) - 1, 0)
    for run in (slow, ours):
        run.agrees(stock)


@long
@pytest.mark.parametrize("packing", [False, True])
def test_fine_tuning(packing, tmp_path):
    rows = [{"text": "word " * (2 + i)} for i in range(12)]
    given = lambda: {"train_dataset": pytest.importorskip("datasets").Dataset.from_list(rows)}  # noqa: E731
    options = {"max_length": 64, "packing": packing, "per_device_train_batch_size": 2}
    stock, *runs = (Run(tmp_path, "SFT", when, given=given(), **options).train() for when in (None, "before", "after"))
    for run in runs:
        run.agrees(stock)


@long
def test_the_example_of_the_page(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parent.parent / "docs" / "guides" / "rollouts.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    name, options = "HuggingFaceTB/SmolLM2-135M-Instruct", 'output_dir="grpo"'
    assert name in code and options in code
    short = f"{options}, use_cpu=True, bf16=False, report_to=[], max_steps=2, max_completion_length={NEW}"
    found: dict = {}
    exec(code.replace(name, str(checkpoint.save(tmp_path / "tiny"))).replace(options, short), found)
    assert found["patched"].captures == 1 and not found["patched"].uncaptured


# ---- what goes wrong, and what users do between the steps ----


@long
def test_refusals(tmp_path):
    """A hook of the user's as long as it is there; continuous batching; autocast around the trainer."""
    runs = []
    for when in (None, "before"):
        run = Run(tmp_path, "GRPO", when, lora=True)
        with run.trainer.model.get_input_embeddings().register_forward_hook(lambda module, args, out: 1.5 * out):
            run.train()
        runs.append(run.train())
    (reason,) = runs[1].patch.reasons
    assert "Embedding has the forward hook" in reason and "<lambda>" in reason
    assert runs[1].counts() == (1, 3 * (NEW - 1) - 1, 3 * (NEW - 1))
    runs[1].agrees(runs[0])
    run = Run(tmp_path, "GRPO", "before", use_transformers_continuous_batching=True)
    run.train()
    assert len(run.trainer.state.log_history) > 1
    run = Run(tmp_path, "GRPO", "before")
    with torch.autocast("cpu", torch.bfloat16):
        run.train()
    assert run.patch.captures == 0 and run.patch.reasons == ["autocast is on, and its copies of the weights are temporary"]


@long
@pytest.mark.parametrize("layers", [None, 1], ids=["copied", "shared"])
def test_a_reference_model(layers):
    utils = pytest.importorskip("trl.experimental.utils")
    model = tiny("llama", "sdpa")
    with hf_fastattn.patch(model) as patch:
        reference = utils.create_reference_model(model, num_shared_layers=layers)
        expected = generate(model)
        for _ in range(2):
            assert torch.equal(generate(reference), expected) and torch.equal(generate(model), expected)
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        assert torch.equal(generate(reference), expected) and not torch.equal(generate(model), expected)
        assert patch.captures == 1 and not patch.reasons


def _replicated(rank, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # accelerate asks for them, although the group exists
    found = []
    for when in (None, "before"):
        run = Run(folder, "GRPO", when, lora=True, ddp_find_unused_parameters=False).train()
        kind = type(run.trainer.model_wrapped).__name__
        found.append((kind, run.logged("reward"), run.logged("grad_norm"), run.patch and (run.counts(), run.patch.reasons)))
    return found


def _fsdp2(model):
    for part in (*model.model.layers, model.model.norm, model):  # accelerate shards the norm too
        fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def _accelerate(model):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(model)


def _wrapped(rank, wrap):
    """Rollouts and steps of a patched model that is then wrapped. The last rollout is without the patch."""
    model, stock, equal, idle = tiny("llama").train(), tiny("llama", "sdpa").train(), [], []
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(subclass, "INTERPRETED", True)  # this fuses on a CPU too
        patch = hf_fastattn.patch(model)
    whole = wrap(model)
    for _ in range(3):
        equal.append(torch.equal(generate(model), generate(stock)))
        for each in (whole, stock):
            each(**prompts("left_padding", "cpu")).logits.square().mean().backward()
            torch.optim.SGD(each.parameters(), 1e-2).step()
            each.zero_grad()
        idle.append(patch._generation.caches.pool.idle_bytes)
    patch.undo()
    return [*equal, torch.equal(generate(model), generate(stock))], idle, patch.captures, patch.reasons


@processes.HIDDEN
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=long)])
@pytest.mark.parametrize("wrap", [_fsdp2, torch.nn.parallel.DistributedDataParallel, _accelerate])
def test_wrapped_models(wrap, count, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "KEPT", 0)
    for ended in processes.run(tmp_path, count, _wrapped, wrap):
        assert ended.result is not None, ended.output
        equal, idle, captures, reasons = ended.result
        assert all(equal) and not any(idle)
        if wrap is _fsdp2:
            assert captures == 0 and len(reasons) == 1 and "FSDP" in reasons[0] and "forward hook" in reasons[0]
        else:
            assert (captures, reasons) == (3, [])


@pytest.mark.slow
@long
@processes.HIDDEN
def test_two_processes(tmp_path):
    checkpoint.save(tmp_path / "model")
    for ended in processes.run(tmp_path / "run", 2, _replicated, tmp_path, limit=200):
        assert ended.result is not None, ended.output
        (_, rewards, norms, _), (kind, *ours, counts) = ended.result
        assert kind == "DistributedDataParallel" and ours == [rewards, pytest.approx(norms, rel=1e-3)]
        assert counts == ((1, 3 * (NEW - 1) - 1, 0), [])


@long
def test_pictures(tmp_path):
    """GRPO of a LLaVA with a picture in each prompt."""
    image = pytest.importorskip("PIL.Image")
    from transformers import LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = checkpoint.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    part = "{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}"
    parts = "{% for c in m['content'] %}" + part + "{% endfor %}"
    content = "{% if m['content'] is string %}{{ m['content'] }}{% else %}" + parts + "{% endif %}"
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    options = {"patch_size": 4, "vision_feature_select_strategy": "default", "image_token": "<image>"}
    options |= {"num_additional_image_tokens": 1, "chat_template": "{% for m in messages %}" + content + "\n{% endfor %}"}
    processor = LlavaProcessor(pixels, tokenizer, **options)
    text = {**checkpoint.model().config.to_dict(), "vocab_size": len(tokenizer)}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8}
    own = {"text_config": text, "vision_config": {"model_type": "clip_vision_model", **vision, "patch_size": 4}}
    own |= {"image_token_index": tokenizer.convert_tokens_to_ids("<image>"), "vision_feature_layer": -1}
    prompt = lambda i: [{"role": "user", "content": "w" * (3 + i)}]  # noqa: E731
    rows = [{"prompt": prompt(i), "image": image.new("RGB", (8, 8), (40 * i, 9, 90))} for i in range(6)]
    runs = []
    for when in (None, "before", "after"):
        torch.manual_seed(0)
        config = LlavaForConditionalGeneration.config_class(**own)
        config.text_config.architectures = None
        model = LlavaForConditionalGeneration._from_config(config, attn_implementation="sdpa")
        given = {
            "model": model,
            "processing_class": processor,
            "train_dataset": pytest.importorskip("datasets").Dataset.from_list(rows),
            "reward_funcs": lambda completions, **_: reward([message["content"] for (message,) in completions]),
        }
        runs.append(Run(tmp_path, "GRPO", when, given=given).train())
    for run in runs[1:]:
        assert run.counts() == (1, 3 * (NEW - 1) - 1, 0)
        run.agrees(runs[0])
