"""patch(), unpatch() and the decode graph, on the CPU with a fake CUDA graph that repeats operations without Python."""

import contextlib
import copy
import gc
import inspect
import itertools
import pickle
import queue
import threading
import warnings
import weakref
from functools import partial
from types import SimpleNamespace

import every_model
import fake_graph
import models
import pytest
import torch
import transformers
from cases import slow_unless
from models import FAMILIES, PADDINGS, family, longrope, prompts, tiny
from transformers import AutoModel, AutoModelForImageTextToText, CompileConfig, DynamicCache, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.attention import step as steps
from hf_fastattn.caches import PreallocatedCache
from hf_fastattn.patches import patch_of
from hf_fastattn.patches.calls import overrides as generation
from hf_fastattn.patches.fused import subclass
from hf_fastattn.patches.graphs import graphs

NEW = 12
generate = partial(models.generate, max_new_tokens=NEW)
NEW_NAME = hf.CACHE == "cache"  # since Transformers 5.24, on which GPT-J runs
CHECKPOINTING = "gradient checkpointing is on" if NEW_NAME else "added no token to the cache"


@pytest.fixture
def llama():
    return tiny("llama", "sdpa")


def same(model, *inputs, calls: int = 1, options=None, **patched):
    """The patch after which the model has generated the tokens that it generates without. It is undone."""
    options = options or {}
    expected = [generate(model, each, **options) for each in inputs]
    with hf_fastattn.patch(model, **patched) as patch:
        for each, want in [*zip(inputs, expected, strict=True)] * calls:
            assert torch.equal(generate(model, each, **options), want)
    return patch


def state(model) -> dict:
    """Everything that patch() may change: the attributes of each module, and the attention in every configuration."""
    found = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            found[name, "class"] = type(module)
            found[name, key] = value if isinstance(value, (bool, int, float, str)) else id(value)
        if hasattr(module, "config"):
            found[name, "attention"] = module.config._attn_implementation
    return found


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "chunked_prefill": {"prefill_chunk_size": 40},
    "num_return_sequences": {"do_sample": True, "num_return_sequences": 2},
    "repetition_penalty": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


# Every family and padding greedily; the other modes for the two kinds of layer.
CASES = [(name, "greedy", padding) for name in FAMILIES for padding in PADDINGS]
CASES += [(name, mode, "left_padding") for name in ("llama", "qwen2") for mode in MODES if mode != "greedy"]
FAST = [*zip(FAMILIES, ["greedy"] * 9, PADDINGS * 3, strict=True), *(case for case in CASES if case[0] == "qwen2")]


@pytest.mark.parametrize("name, mode, padding", slow_unless(FAST.__contains__, CASES))
def test_captured_tokens_equal_eager(captured, name, mode, padding):
    model = family(name, "cpu")
    model.set_attn_implementation("eager")
    inputs = prompts(padding, "cpu")
    patch = same(model, inputs, calls=2, options=MODES[mode])
    chunks = mode == "chunked_prefill"  # the second call captures two sizes: of the first chunk, and of the last
    assert (patch.captures, patch.reasons) == (1 + 2 * chunks, [])
    assert patch.replays == 2 * (NEW - 1) - 1 + 4 * chunks  # all steps but the prefills and the warm-up


def test_a_sliding_window_moves_between_replays(captured, monkeypatch):
    from hf_fastattn.caches import layers

    monkeypatch.setattr(layers, "KEEP", 4)
    monkeypatch.setattr(layers, "SLACK", 8)
    model = family("mistral_window_below_prompt", "cpu")
    for padding in ("no_padding", "left_padding"):
        model.set_attn_implementation("eager")
        patch = same(model, prompts(padding, "cpu", length=24), options={"max_new_tokens": 80})
        assert patch.replays == 78 and patch.captures == 1


def test_a_second_call_of_another_length_neither_reallocates_nor_recaptures(captured, llama):
    def compiled():
        """From then on Dynamo may intercept Python's calls, each with one more reference. The first time it replaces methods."""
        with contextlib.suppress(torch._dynamo.exc.Unsupported):
            torch.compile(lambda x: torch._dynamo.graph_break() or x, backend="eager", fullgraph=True)(torch.ones(1))

    compiled()
    with hf_fastattn.patch(llama) as patch:
        generate(llama, prompts("no_padding", "cpu", length=96))
        (storage,) = patch._graphs.entries
        where = [layer.keys.data_ptr() for layer in storage.layers]
        del storage  # a referenced storage is not reused
        for length in (40, 130, 25):
            generate(llama, prompts("no_padding", "cpu", length=length))
            compiled()
        (storage,) = patch._graphs.entries
        assert [layer.keys.data_ptr() for layer in storage.layers] == where
        assert patch.captures == 2  # also of the two short prompts


@pytest.mark.parametrize("padding", ["left_padding", "holes"])
def test_a_mask_is_part_of_the_graph(captured_steps, llama, monkeypatch, padding):
    """No mask is built outside of the graph, and prompts of other lengths leave no values in it."""
    monkeypatch.setattr(hf_fastattn.hf, "decode_mask", None)
    lengths = (60, 96, 30)
    llama.set_attn_implementation("eager")
    expected = {length: generate(llama, prompts(padding, "cpu", length=length)) for length in lengths}
    with hf_fastattn.patch(llama) as patch:
        for length in lengths:
            assert torch.equal(generate(llama, prompts(padding, "cpu", length=length)), expected[length])
            ((entry,),) = patch._graphs.entries.values()
            seen = length + NEW - 1
            assert entry.live.shape == (3, 256) and entry.live[:, length:seen].all() and not entry.live[:, seen:].any()
        assert patch.captures == 1


def test_each_batch_size_has_a_graph_and_growth_makes_new_ones(captured_steps, llama):
    inputs = [prompts("no_padding", "cpu", rows=rows) for rows in (1, 2, 3)]
    assert same(llama, *inputs, calls=2).captures == 3
    long = prompts("no_padding", "cpu", length=300)
    assert same(llama, *inputs, long, long, inputs[2]).captures == 4


def test_a_cache_grows_in_the_middle_of_generation(captured, llama):
    inputs = prompts("left_padding", "cpu")
    expected = generate(llama, inputs, max_new_tokens=300)
    with hf_fastattn.patch(llama) as patch:
        cache = PreallocatedCache(llama)
        cache.reserve = lambda tokens: None
        assert torch.equal(generate(llama, inputs, max_new_tokens=300, past_key_values=cache), expected)
        assert patch.captures == 2


def test_a_copied_cache_is_independent(captured, llama):
    inputs = prompts("no_padding", "cpu")
    ids = torch.cat([inputs["input_ids"], inputs["input_ids"][:, :9]], 1)
    expected = generate(llama, {"input_ids": ids})
    with hf_fastattn.patch(llama) as patch:
        prompt = generate(llama, inputs, max_new_tokens=1, return_dict_in_generate=True).past_key_values
        for _ in range(3):
            assert torch.equal(generate(llama, {"input_ids": ids}, past_key_values=copy.deepcopy(prompt)), expected)
        assert prompt.get_seq_length() == inputs["input_ids"].shape[1]
        assert patch.captures == 3 + 2  # each copy has other addresses; the first message is a rehearsal


def test_custom_processors_criteria_and_streamers_run_unchanged(captured, llama):
    def run():
        kept, streamed = [], []
        keep = lambda ids, scores: kept.append(scores) or scores + torch.arange(scores.shape[1]) * 0.01  # noqa: E731
        stop = lambda ids, scores, **_: torch.full((len(ids),), ids.shape[1] >= 110)  # noqa: E731
        stream = SimpleNamespace(put=streamed.append, end=lambda: streamed.append(None))
        inputs = prompts("no_padding", "cpu", rows=1)
        out = generate(llama, inputs, logits_processor=[keep], stopping_criteria=[stop], streamer=stream, max_new_tokens=24)
        return out, len(streamed), torch.stack(kept)

    expected = run()
    with hf_fastattn.patch(llama) as patch:
        found = run()
    assert patch.replays == 12 and torch.equal(found[0], expected[0]) and found[1] == expected[1]
    torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_prompt_learning_is_refused_with_a_way_that_runs(kind):
    peft = pytest.importorskip("peft")
    own = {"encoder_hidden_size": 16} if kind == "PromptEncoderConfig" else {}
    model = peft.get_peft_model(tiny("llama"), getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4, **own)).eval()
    inputs = prompts("left_padding", "cpu")
    expected = generate(model, inputs)
    with pytest.raises(ValueError, match=r'prompt learning .* model\.get_base_model\(\)\.set_attn_implementation\("lean"\)'):
        hf_fastattn.patch(model)
    model.get_base_model().set_attn_implementation("lean")
    with hf_fastattn.count_calls() as calls:
        assert torch.equal(generate(model, inputs), expected)
    assert calls["lean.prefill"]


def _norm(change):
    """Replace forward() of the last norm by change(forward)."""

    def replace(model):
        model.model.norm.forward = change(model.model.norm.forward)

    return replace


def _sync(forward):
    return lambda x: forward(x) if x.sum().item() else x


def _raise(forward):
    def no_mode(x):
        if torch._C._len_torch_dispatch_stack():
            raise TypeError("a mode is active")
        return forward(x)

    return no_mode


class WithoutPositions(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, use_cache=None, **cache):
        return super().forward(input_ids, attention_mask, use_cache=use_cache, **cache)


class GrowingArgument(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args, attention_mask=None, **kwargs):
        inputs = super().prepare_inputs_for_generation(*args, attention_mask=attention_mask, **kwargs)
        return {**inputs, "mm_token_type_ids": torch.zeros_like(attention_mask)}


def _as(cls):
    return lambda model: setattr(model, "__class__", cls)


def nothing(model): ...


HOOKED: list = []
ROLLING = {"backend": "streaming", "window": 400}
HOST, NO_GRAPH = "its code reads a value on the host", "its code does something that a graph cannot"
COUNTS = "is called without position_ids, and .*"
# The reason, and where there are any: what happens before patch() and after it, options of generate(), options of patch().
UNCAPTURED = {
    "hook": ("forward hook", nothing, lambda m: m.model.norm.register_forward_hook(lambda *_: HOOKED.append(1))),
    "checkpointing": (CHECKPOINTING, lambda model: model.gradient_checkpointing_enable() or model.train()),
    "no cache": ("use_cache=False", nothing, nothing, {"use_cache": False}),
    "hidden states": ("hidden states", nothing, nothing, {"output_hidden_states": True, "return_dict_in_generate": True}),
    "other attention": ("attn_implementation is 'sdpa'", nothing, lambda m: m.set_attn_implementation("sdpa")),
    "another cache": ("DynamicCache", nothing, nothing, {"past_key_values": DynamicCache}),
    "cache_implementation": ("cache_implementation='dynamic'", nothing, nothing, {"cache_implementation": "dynamic"}),
    "sync": (HOST + r", in <lambda>\(\), and a graph only repeats what the device does\.$", nothing, _norm(_sync)),
    "error": (NO_GRAPH + r", in no_mode\(\) \(TypeError: a mode is active\)\.$", nothing, _norm(_raise)),
    **{
        name: ("uncaptured", nothing, _norm(lambda forward, read=read: lambda x: (read(x.sum()), forward(x))[1]))
        for name, read in (("tolist", torch.Tensor.tolist), ("numpy", torch.Tensor.numpy))
    },
    "no positions": (COUNTS + "may count tokens on the host", _as(WithoutPositions)),
    "no positions, rolling": (COUNTS + "a RollingCache counts tokens", _as(WithoutPositions), nothing, {}, ROLLING),
    "an argument that grows": ("argument mm_token_type_ids grows by one element per step", _as(GrowingArgument)),
}


@pytest.mark.parametrize("case", UNCAPTURED)
def test_what_cannot_be_captured_runs_uncaptured_with_the_reason(captured, llama, case):
    match, before, *more = UNCAPTURED[case]
    after, options, patched = (*more, *(nothing, {}, {})[len(more) :])
    inputs = prompts("no_padding", "cpu") if case != "an argument that grows" else prompts("left_padding", "cpu")
    HOOKED.clear()
    before(llama)

    def run(**options):
        given = {name: value(config=llama.config) if value is DynamicCache else value for name, value in options.items()}
        return generate(llama, inputs, **given)

    expected = run(**options)
    with hf_fastattn.patch(llama, **patched) as patch:
        after(llama)
        with pytest.warns(UserWarning, match=match):
            got = run(**options)
        assert patch.captures == 0 and (case != "hidden states" or patch.uncaptured == NEW - 1) and len(patch.reasons) == 1
        assert torch.equal(getattr(got, "sequences", got), getattr(expected, "sequences", expected))
        assert len(HOOKED) == (NEW if case == "hook" else 0)
        if case == "hidden states":
            assert len(got.hidden_states) == NEW
            run(return_dict_in_generate=True)  # the hooks that Transformers leaves are inactive
            assert patch.captures == 1


def test_graph_on_the_cpu_warns_that_it_is_off(llama):
    inputs = prompts("no_padding", "cpu")
    expected = generate(llama, inputs)
    with hf_fastattn.patch(llama) as patch:
        assert "decode graph: off, as the model is on cpu" in str(patch)
        with pytest.warns(UserWarning, match="graphs are for CUDA devices"):
            assert torch.equal(generate(llama, inputs), expected)
    with hf_fastattn.patch(llama, graph=False), warnings.catch_warnings(action="error", category=UserWarning):
        assert torch.equal(generate(llama, inputs), expected)


@pytest.mark.parametrize("options", [{}, {"graph": False}, {"cache": None, "graph": False}], ids=str)
def test_undo_leaves_no_trace(captured, llama, options):
    before = state(llama)
    with pytest.raises(ZeroDivisionError), hf_fastattn.patch(llama, "reference", **options):
        assert llama.config._attn_implementation == "reference"
        generate(llama, prompts("left_padding", "cpu"))
        raise ZeroDivisionError
    assert state(llama) == before
    patch = hf_fastattn.patch(llama, **options)
    assert len(patch) == len(patch.changes) >= 1 and "sdpa -> lean (2)" in str(patch)
    hf_fastattn.unpatch(llama)
    assert patch.undone and state(llama) == before


def test_a_failing_patch_changes_nothing(llama, monkeypatch):
    before = state(llama)
    monkeypatch.setattr(LlamaForCausalLM, "set_attn_implementation", lambda self, name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hf_fastattn.patch(llama)
    assert state(llama) == before
    with pytest.raises(ValueError, match="is not patched"):
        hf_fastattn.unpatch(llama)
    monkeypatch.undo()
    with hf_fastattn.patch(llama) as patch:
        assert hf_fastattn.patch(llama) is patch


def test_nothing_else_changes(captured, llama):
    twin = LlamaForCausalLM(llama.config).eval()  # with the same configuration object
    before = state(twin), dict(vars(type(llama))), dict(vars(type(llama).__mro__[2]))
    with hf_fastattn.patch(llama):
        assert twin.config._attn_implementation == "sdpa"
        with hf_fastattn.count_calls() as calls:
            generate(twin, prompts("no_padding", "cpu"))
        assert not calls
        assert (state(twin), dict(vars(type(llama))), dict(vars(type(llama).__mro__[2]))) == before


def test_a_deepcopy_is_patched_independently(captured, llama):
    inputs = prompts("no_padding", "cpu")
    expected = generate(llama, inputs)
    before = state(llama)
    patch = hf_fastattn.patch(llama)
    generate(llama, inputs)
    twin = copy.deepcopy(llama)
    with torch.no_grad():
        twin.lm_head.weight.copy_(twin.lm_head.weight.flip(0))
    other = generate(twin, inputs)
    assert not torch.equal(other, expected) and torch.equal(generate(llama, inputs), expected) and patch.captures == 1
    hf_fastattn.unpatch(twin)
    assert twin.config._attn_implementation == "sdpa" and llama.config._attn_implementation == "lean"
    assert "generate" not in vars(twin) and "generate" in vars(llama)
    assert torch.equal(generate(twin, inputs), other)
    patch.undo()
    assert state(llama) == before
    with hf_fastattn.patch(llama), pytest.raises(TypeError, match="unpatch"):
        pickle.dumps(llama)


def test_rehearsals_of_two_models_restore_the_process(monkeypatch):
    """Warnings and torch's sync debug mode are global: a thread must not restore the value that the other one has set."""
    mode = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: mode[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda new: mode.__setitem__(0, new))
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()
    shown, show = [], warnings.showwarning

    def first():
        first_is_in.set()
        second_is_in.wait(0.2)  # times out: the second must not begin before the first has ended

    def second():
        second_is_in.set()
        first_is_out.wait(5)
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    def rehearse(body):
        try:
            graphs.CudaGraph.rehearse(SimpleNamespace(_rehearsing=graphs.CudaGraph._rehearsing), body)
        except RuntimeError as error:
            shown.append(str(error))
        first_is_out.set()

    with warnings.catch_warnings(action="ignore"):
        threads = [threading.Thread(target=rehearse, args=(body,)) for body in (first, second)]
        threads[0].start()
        first_is_in.wait(5)
        threads[1].start()
        for thread in threads:
            thread.join(5)
    assert warnings.showwarning is show and mode == ["default"]
    assert len(shown) == 1 and shown[0].startswith("it reads a value on the host, at ") and __file__ in shown[0]


def test_a_prompt_read_one_by_one_is_captured_from_its_second_token(captured, llama):
    """Without a mask the length of the prompt is unknown: the first token of an empty cache is not a decode step."""
    inputs = {"input_ids": prompts("no_padding", "cpu")["input_ids"]}
    for patched in ({}, ROLLING):
        patch = same(llama, inputs, options={"prefill_chunk_size": 1}, **patched)
        assert patch.captures == 1 and not patch.uncaptured and not patch.reasons


class NoCacheInOutput(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        return CausalLMOutput(logits=super().forward(input_ids, attention_mask, position_ids, **kwargs).logits)


def _older_name(model):
    """The name of the cache as in older versions."""
    own = model.prepare_inputs_for_generation

    def prepare(self, *args, **kwargs):
        return {"past_key_values" if name == hf.CACHE else name: value for name, value in own(*args, **kwargs).items()}

    model.__class__ = type("Older", (LlamaForCausalLM,), {"prepare_inputs_for_generation": prepare})


CAPTURED = {
    "an output without its cache": (_as(NoCacheInOutput), {}),
    "an older name of the cache": (_older_name, {}),
    "arguments of torch.compile": (nothing, {"disable_compile": True}),
    "training": (lambda model: model.train(), {}),
}


@pytest.mark.parametrize("case", CAPTURED)
def test_steps_are_captured(captured, llama, case):
    change, options = CAPTURED[case]
    change(llama)
    patch = same(llama, prompts("left_padding", "cpu"), options=options)
    assert (patch.captures, patch.uncaptured, patch.reasons) == (1, 0, [])


BART = {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "is_decoder": True}


@pytest.mark.parametrize("padding", PADDINGS)
def test_a_model_that_is_called_without_positions_is_captured(captured, padding):
    model = tiny("bart", **BART)
    plain = copy.deepcopy(model)
    with hf_fastattn.patch(model) as patch:
        for length in (96, 60):
            inputs = prompts(padding, "cpu", length=length)
            assert torch.equal(generate(model, inputs), generate(plain, inputs))
        assert patch.captures == 1 and not patch.uncaptured
        with pytest.warns(match="without position_ids, and a step of several tokens is padded|tokens may see later ones"):
            generate(model, prompts("no_padding", "cpu", rows=1), prompt_lookup_num_tokens=3)


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
SMALL_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}


def test_frequencies_that_grow_with_the_text_are_the_reason(captured):
    model = tiny("llama", **DYNAMIC)
    with hf_fastattn.patch(model) as patch, pytest.warns(match="its rope_type 'dynamic' computes new frequencies on the host"):
        generate(model, prompts("no_padding", "cpu"))
        assert "decode graph: off, as its rope_type 'dynamic'" in str(patch)


def test_paligemma_over_gemma_2_takes_no_masks(captured):
    text = {"model_type": "gemma2", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16, "pad_token_id": 0}
    vision = {"model_type": "siglip_vision_model", "patch_size": 4, **SMALL_VISION}
    own = {"text_config": text, "vision_config": vision, "projection_dim": 64, "image_token_id": 127, "hidden_size": 64}
    model = tiny("paligemma", auto=AutoModelForImageTextToText, **own)
    patch = same(model, prompts("no_padding", "cpu"))
    assert patch.captures and not patch.reasons
    with pytest.warns(match="it takes one mask for all layers, and with padding a sliding window needs its own"):
        same(model, prompts("left_padding", "cpu"))


def test_an_argument_in_the_output_is_that_of_the_step(captured):
    model = every_model.named("Qwen2AudioForConditionalGeneration", "qwen2_audio", "multimodal")
    seen, update = [], model._update_model_kwargs_for_generation

    def keep(outputs, *args, **kwargs):
        seen.append(outputs.attention_mask)
        return update(outputs, *args, **kwargs)

    inputs = prompts("left_padding", "cpu")
    with hf_fastattn.patch(model):
        model._update_model_kwargs_for_generation = keep
        generate(model, inputs)
    assert [mask.shape[1] for mask in seen] == list(range(96, 96 + NEW))


def test_methods_have_the_signature_of_the_models_own(llama, monkeypatch):
    """It is derived once."""
    reads = []
    signature = lambda method: reads.append(method.__name__) or inspect.signature(method)  # noqa: E731
    monkeypatch.setattr(generation, "inspect", SimpleNamespace(signature=signature))
    with hf_fastattn.patch(llama):
        for _ in range(2):
            generate(llama, prompts("no_padding", "cpu"))
        assert reads == ["prepare_inputs_for_generation"]
        for own in (LlamaForCausalLM, GrowingArgument, LlamaForCausalLM):
            llama.__class__ = own
            for name in ("generate", "prepare_inputs_for_generation"):
                expected = inspect.signature(getattr(own, name).__get__(llama))
                assert inspect.signature(getattr(llama, name)) == expected
        monkeypatch.setattr(LlamaForCausalLM, "generate", lambda self, ids: ids)
        assert list(inspect.signature(llama.generate).parameters) == ["ids"]


def test_a_model_whose_signature_cannot_be_copied_is_copied(llama):
    class Locked(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, *args, lock=threading.Lock(), **kwargs):  # noqa: B008
            return super().prepare_inputs_for_generation(*args, **kwargs)

    llama.__class__ = Locked
    with hf_fastattn.patch(llama):
        expected = generate(llama, prompts("no_padding", "cpu"))
        assert torch.equal(generate(copy.deepcopy(llama), prompts("no_padding", "cpu")), expected)


REFUSED = {
    "mamba": ({"num_attention_heads": None}, "number of attention heads"),
    "doge": ({}, "adds a mask of its own to the one it is given, which must be dense. Leave it unpatched."),
    "t5": ({"auto": AutoModel, "d_model": 64, "num_heads": 4}, r"T5Model has no generate\(\), .* if its code lets it\."),
    "bloom": ({"auto": AutoModel, "n_head": 4}, r"BloomModel has no generate\(\), .* if its code lets it\."),
    "gpt_neo": (
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
        "never asks Transformers' attention interface",
    ),
    **({} if NEW_NAME else {"gptj": ({"n_layer": 1, "n_head": 4, "n_embd": 64, "rotary_dim": 8}, "cannot be patched")}),
    "minimax": ({"num_hidden_layers": 2}, "keeps its recurrent states outside"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_models_that_cannot_run_are_refused_beforehand(model_type):
    own, says = REFUSED[model_type]
    model = tiny(model_type, "eager", **own)
    before = dict(vars(model)), state(model)
    with pytest.raises((TypeError, ValueError), match=says):
        hf_fastattn.patch(model)
    assert (vars(model), state(model)) == before


UNPATCHED = [
    *(("llama", auto, {}) for auto in (AutoModel, transformers.AutoModelForSequenceClassification)),
    ("qwen3", transformers.AutoModelForTokenClassification, {"head_dim": 16}),
    *(("bert", AutoModel, {"num_key_value_heads": 4}), ("bart", transformers.AutoModelForSeq2SeqLM, {"d_model": 64})),
]


@pytest.mark.parametrize("model_type, auto, own", UNPATCHED)
@torch.no_grad()
def test_the_way_without_patch_runs(model_type, auto, own):
    model = tiny(model_type, auto=auto, **own)
    before, inputs = state(model), prompts("left_padding", "cpu")
    expected = model(**inputs)[0]
    says = "is an encoder-decoder" if model.config.is_encoder_decoder else "has no generate"
    with pytest.raises((TypeError, ValueError), match=rf'{type(model).__name__} {says}.*\.set_attn_implementation\("lean"\)'):
        hf_fastattn.patch(model)
    assert state(model) == before
    loaded = tiny(model_type, "lean", auto=auto, **own)
    model.set_attn_implementation("lean")
    live = inputs["attention_mask"].bool()
    for each in (model, loaded):
        with hf_fastattn.count_calls() as calls:
            found = each(**inputs)[0]
        assert calls["lean.prefill"]
        where = live if found.shape[:2] == live.shape else slice(None)
        torch.testing.assert_close(found[where], expected[where], atol=1e-4, rtol=1e-4)


BOTH_CACHES = pytest.mark.parametrize("options", [{}, ROLLING], ids=["preallocated", "rolling"])


def empty_cache(model, options):
    """A user's cache, of the kind that patch() with these options uses."""
    return hf_fastattn.RollingCache(model) if options else PreallocatedCache(model)


@pytest.mark.parametrize("padding", ["no_padding", "left_padding"])
@BOTH_CACHES
def test_a_call_that_covers_no_more_than_the_cache_is_refused(options, padding):
    model = tiny("llama", "sdpa")
    inputs = prompts(padding, "cpu")
    with hf_fastattn.patch(model, graph=False, **options):
        out = generate(model, inputs, max_new_tokens=1, return_dict_in_generate=True)
        assert out.past_key_values.get_seq_length() == 96
        with pytest.raises(ValueError, match=r"holds 96 tokens, and this call covers 96. Pass the whole text"):
            generate(model, inputs, past_key_values=out.past_key_values)
        more = {"input_ids": out.sequences[:, -1:]}
        with pytest.raises(ValueError, match=r"holds 96 tokens, and this call covers 1. Pass the whole text"):
            generate(model, more, past_key_values=out.past_key_values)
        if not options:
            mask = inputs.get("attention_mask", torch.ones(3, 96, dtype=torch.long))
            more["attention_mask"] = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
            onwards = generate(model, more, past_key_values=out.past_key_values, max_new_tokens=5)
            assert torch.equal(onwards, generate(model, inputs, max_new_tokens=6)[:, 96:])


@contextlib.contextmanager
def raising(name: str, error, at: int | None = None):
    """The `at`-th call of a method of recorded graphs, or every one, raises an error after its work."""
    own, calls = getattr(fake_graph.RecordedGraph, name), itertools.count(1)

    def method(self, *args):
        out = own(self, *args)
        if at is None or next(calls) == at:
            raise error
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_graph.RecordedGraph, name, method)
        yield


def first_tokens(inputs, text, count: int) -> dict:
    """The beginning of a text with its mask."""
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, count - inputs["attention_mask"].shape[1]), value=1)
    return {"input_ids": text[:, :count], "attention_mask": mask}


@BOTH_CACHES
def test_graphs_do_not_write_to_buffers_that_were_replaced(options, captured):
    """Between two steps, where beams then continue other rows, and between two calls over one cache."""
    inputs = prompts("no_padding", "cpu", rows=1)

    def replace(ids, scores):
        for layer in cache.layers if ids.shape[1] == inputs["input_ids"].shape[1] + 3 else ():
            layer.keys, layer.values = layer.keys.flip(1).clone(), layer.values.clone()
        return scores

    found = []
    for graph in (False, True):
        model = tiny("llama", "sdpa")
        with hf_fastattn.patch(model, graph=graph, **options) as patch:
            cache = empty_cache(model, options)
            beams = {"past_key_values": cache, "num_beams": 3, "max_new_tokens": 8}
            found.append(generate(model, inputs, **beams, logits_processor=[replace]))
            cache.reset()
            found.append(generate(model, inputs, **beams))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3]) and not torch.equal(found[0], found[1])
    assert patch.captures == 2


@pytest.mark.parametrize("method, at", [("rehearse", None), ("replay", 3)])
@BOTH_CACHES
def test_an_interrupted_graph_leaves_no_wrong_count(captured, llama, options, method, at):
    """A replay has counted on the device. A preallocated cache writes the host's count again; a rolling one has to be reset."""
    inputs = prompts("left_padding", "cpu")
    with hf_fastattn.patch(llama, **options):
        expected = generate(llama, inputs, max_new_tokens=16)
    with hf_fastattn.patch(llama, **options):  # which has rehearsed nothing
        cache = empty_cache(llama, options)
        with raising(method, KeyboardInterrupt, at), pytest.raises(KeyboardInterrupt):
            generate(llama, inputs, past_key_values=cache)
        assert method == "replay" or cache.get_seq_length() == 96
        count = cache.get_seq_length() + 1
        onwards = first_tokens(inputs, expected, count)
        if method == "replay" and options:
            with pytest.raises(ValueError, match="interrupted"):
                generate(llama, onwards, past_key_values=cache, max_new_tokens=4)
            cache.reset()
        assert torch.equal(generate(llama, onwards, past_key_values=cache, max_new_tokens=10), expected[:, : count + 10])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_failed_rehearsal_restores_the_pools_buffers(captured, llama, error):
    """The rehearsal has already counted on the device, and the next call may need the count that the host has."""
    padded, plain = prompts("left_padding", "cpu"), prompts("no_padding", "cpu")
    expected = [generate(llama, inputs) for inputs in (padded, plain)]
    with hf_fastattn.patch(llama) as patch:
        with raising("rehearse", error("too late")), warnings.catch_warnings(), contextlib.suppress(KeyboardInterrupt):
            warnings.simplefilter("ignore")
            generate(llama, padded)
        gc.collect()
        assert torch.equal(generate(llama, plain), expected[1]) and patch.captures == 1
        if error is KeyboardInterrupt:
            assert torch.equal(generate(llama, padded), expected[0]) and patch.captures == 2


def test_linear_layers_are_told_that_they_are_in_a_graph(captured):
    """Only inside a graph: not in prefill, and not in uncaptured steps. Without graphs no layer is changed."""
    model, seen = tiny("llama"), queue.SimpleQueue()  # not a list: a step that changes the closure of its code is not captured
    own = model.lm_head.forward
    model.lm_head.forward = lambda x: (seen.put(steps.captured()), own(x))[1]
    inputs = prompts("no_padding", "cpu", rows=1)
    with hf_fastattn.patch(model):
        model.generate(**inputs, max_new_tokens=8, do_sample=False)
    # The prompt; the rehearsal, the step that the graph is compared with, and the capture.
    assert [seen.get() for _ in range(seen.qsize())] == [False] + 3 * [True]
    with hf_fastattn.patch(model, graph=False):
        model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert [seen.get() for _ in range(seen.qsize())] == 4 * [False]


def test_linear_layers_are_changed_only_for_graphs(monkeypatch):
    monkeypatch.setattr(subclass, "INTERPRETED", True)
    model = tiny("llama").half()
    for graph in (True, False):
        with hf_fastattn.patch(model, graph=graph) as patch:
            assert subclass.is_fused(model.lm_head) == ("linear layers" in str(patch)) == graph
        assert not subclass.is_fused(model.lm_head)


def test_buffers_that_come_back_after_undo_are_not_kept():
    model = tiny("llama")
    with hf_fastattn.patch(model, graph=False) as patch:
        out = generate(model, prompts("no_padding", "cpu"), return_dict_in_generate=True)
        generate(model, prompts("no_padding", "cpu"))
        gc.collect()
        assert len(patch._generation.caches.pool.idle) == 1
    assert not patch._generation.caches.pool.idle
    del out
    gc.collect()
    assert not patch._generation.caches.pool.idle


def test_a_pool_without_graphs_is_not_used_again(monkeypatch):
    """Also if a graph of another pool still exists, from before a failed capture. Its stream does not stay current, and torch
    gives memory that it keeps back only if there is little else."""
    pools, failing, streams, emptied, free, reserved = [], [], [], [], [1 << 40], [0]

    class Graph:
        def capture_begin(self, pool=None, **_):
            pools.append(pool)

        def capture_end(self):
            if failing:
                raise RuntimeError(failing.pop())

    @contextlib.contextmanager
    def on(stream):
        streams.append(stream)
        try:
            yield
        finally:
            streams.remove(stream)

    handles = ((0, n) for n in range(99))
    for name, fake in {"CUDAGraph": Graph, "graph_pool_handle": lambda: next(handles), "stream": on}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name, fake in {"synchronize": lambda _: None, "empty_cache": lambda: emptied.append(len(pools))}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved[0])
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda _: 0.5)
    for name in ("device", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda _: pools.append(None) or contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    segments = lambda: [{"segment_pool_id": pool, "total_size": 10} for pool in pools if pool is not None]  # noqa: E731
    monkeypatch.setattr(torch.cuda, "memory_snapshot", segments)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(graphs.CudaGraph, "_captured_on", {})
    shared: dict = {}

    def capture():
        graph = graphs.CudaGraph(torch.device("cuda", 0), shared)
        graph.capture(lambda: None)
        return graph

    first = capture()
    second = capture()
    assert shared["bytes"] == 20 and not emptied
    failing.append("a capture that fails")
    with pytest.raises(RuntimeError, match="fails"):
        capture()
    assert not streams and pools[-1] is None  # the next one ends the state of the failed one
    free[0] = 1 << 30
    third = capture()
    del third
    free[0], reserved[0] = 1 << 40, 1 << 39  # all that the process may have
    fourth = capture()
    assert shared["bytes"] == 10 and emptied == [4, 5]
    assert [pool[1] for pool in pools if pool is not None] == [0, 0, 0, 1, 2]
    del first, second, fourth


def test_a_patched_model_is_freed_with_its_graphs(captured):
    model = tiny("llama", "sdpa")
    patch = hf_fastattn.patch(model)
    generate(model, prompts("no_padding", "cpu"))
    gone = weakref.ref(model)
    patch._graphs.clear()  # a CUDA graph keeps memory, but the fake one keeps Python objects
    its_generate = model.generate
    del model
    gc.collect()
    assert gone() is None and "deleted" in str(patch)
    with pytest.raises(ReferenceError, match=r"was deleted: .* Keep a reference to it"):
        its_generate()
    patch.undo()


def test_pipeline(captured, llama):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w2"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")
    pipe = transformers.pipeline("text-generation", model=llama, tokenizer=tokenizer, device="cpu")
    asked = (["w3 w4 w5", "w6 w7 w8 w9 w10 w11"],)
    options = {"max_new_tokens": 12, "do_sample": False, "batch_size": 2}
    expected = pipe(*asked, **options)
    with hf_fastattn.patch(pipe) as patch:
        assert pipe(*asked, **options) == expected and patch.captures == 1
    assert llama.config._attn_implementation == "sdpa"


def test_transformers_own_compile_on_request(captured, llama):
    inputs, one = prompts("left_padding", "cpu"), prompts("no_padding", "cpu", rows=1)
    assert not same(llama, one, options={"prompt_lookup_num_tokens": 4, "compile_config": CompileConfig()}).reasons
    expected = generate(llama, inputs)
    compile_config = CompileConfig(backend="eager")
    compile_config._compile_all_devices = True
    with hf_fastattn.patch(llama) as patch:
        with pytest.warns(UserWarning, match="compile_config was passed"):
            out = generate(llama, inputs, compile_config=compile_config, return_dict_in_generate=True)
        assert type(out.past_key_values) is transformers.StaticCache and hasattr(llama, "_compiled_call")
        assert torch.equal(out.sequences, expected) and patch.captures == 0
        with pytest.raises(ValueError, match="cannot trace a PreallocatedCache"):
            generate(llama, inputs, compile_config=compile_config, past_key_values=PreallocatedCache(llama))


BAD_INPUT = [
    (ValueError, "Unknown attention backend 'flashy'", ["flashy"], {}),
    (ValueError, r"'sdpa' is no backend of hf_fastattn, but other attention\. Its backends: .*lean", ["sdpa"], {}),
    (ValueError, 'cache must be "auto", "preallocated", "rolling", or None .*; got .static.', [], {"cache": "static"}),
    (TypeError, "has kv_sharding= in place of kv=", [], {"kv": "sequence"}),
    (ValueError, "graph=True needs a preallocated cache", [], {"cache": None}),
    (TypeError, "graph must be True or False; got 'no'", [], {"graph": "no"}),
    (TypeError, "fuse must be True or False; got 1", [], {"fuse": 1}),
    (TypeError, "clamp_positions must be True or False; got None", [], {"clamp_positions": None}),
]


def test_bad_input(llama):
    before = state(llama)
    for error, match, arguments, options in BAD_INPUT:
        with pytest.raises(error, match=match):
            hf_fastattn.patch(llama, *arguments, **options)
    with pytest.raises(TypeError, match="takes a Transformers model"):
        hf_fastattn.patch(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="is not patched"):
        hf_fastattn.unpatch(llama)
    with hf_fastattn.patch(llama) as patch:
        with hf_fastattn.patch(llama) as again:
            assert again is patch
        assert not patch.undone
        patch.undo()
        for call in (patch.undo, patch.__enter__):
            with pytest.raises(ValueError, match="already undone"):
                call()
    assert state(llama) == before


NO_CACHE, OTHER = {"cache": None, "graph": False}, {"cache": "auto", "fuse": False}
AGAIN = [
    ({}, {"backend": "lean", "cache": "preallocated", "graph": True}, {"graph": False}, "graph=True, .* graph=False"),
    (NO_CACHE, {}, OTHER, "cache=None, fuse=True, .*cache='pre.*', fuse=False"),
    ({"backend": "streaming", "window": 8}, {"sinks": 4, "cache": "rolling"}, {"window": 9}, "window=8, .* window=9"),
]


@pytest.mark.parametrize("first, equal, other, differs", AGAIN)
def test_patch_again(llama, first, equal, other, differs):
    before = state(llama)
    patch = hf_fastattn.patch(llama, **first)
    after = state(llama)
    assert "since" not in str(patch)
    assert hf_fastattn.patch(llama, **first) is hf_fastattn.patch(llama, **first, **equal) is patch
    with pytest.raises(ValueError, match=f"LlamaForCausalLM is already patched: it has {differs}. Call hf_fastattn.unpatch"):
        hf_fastattn.patch(llama, **{**first, **other})
    twin = copy.deepcopy(llama)
    assert hf_fastattn.patch(twin, **first) is patch_of(twin) is not patch
    assert state(llama) == after and not patch.undone
    llama.set_attn_implementation("sdpa")
    assert f"has since changed attention: {patch.backend} -> sdpa" in str(patch)
    with pytest.raises(ValueError, match=f"it has backend='sdpa', and this call asks for backend='{patch.backend}'"):
        hf_fastattn.patch(llama, **first)
    hf_fastattn.unpatch(llama)
    assert state(llama) == before


def test_caches_of_another_model_or_batch(llama):
    inputs = prompts("no_padding", "cpu")
    with hf_fastattn.patch(llama, graph=False):
        cache = generate(llama, inputs, return_dict_in_generate=True).past_key_values
        with pytest.raises(ValueError, match="holds 3 rows, and the call has 1"):
            generate(llama, prompts("no_padding", "cpu", rows=1), past_key_values=cache)
        with pytest.raises(ValueError, match="holds 3 layers, and LlamaForCausalLM has 2"):
            generate(llama, inputs, past_key_values=PreallocatedCache(tiny("llama", num_hidden_layers=3)))
        with pytest.raises(ValueError, match="Passing both"):
            generate(llama, inputs, past_key_values=cache, cache_implementation="static")


def phi(**own):
    """A tiny Phi-3, which drops its cache when the text becomes longer than original_max_position_embeddings."""
    return tiny("phi3", "sdpa", original_max_position_embeddings=40, **own)


@pytest.mark.parametrize("length, chunk", [(30, None), (60, None), (60, 25), (36, None)])
def test_a_cache_that_the_model_drops_is_emptied_and_kept(captured, length, chunk):
    model, inputs = phi(), prompts("left_padding", "cpu", length=length)
    options = {"prefill_chunk_size": chunk, "return_dict_in_generate": True}
    expected = generate(model, inputs, **options).sequences
    with hf_fastattn.patch(model) as patch:
        for _ in range(2):
            found = generate(model, inputs, **options)
            assert torch.equal(found.sequences, expected)
            assert isinstance(found.past_key_values, PreallocatedCache)
            del found  # and with it the cache, whose storage the next call reuses
        assert [entry.tokens for held in patch._graphs.entries.values() for entry in held if entry.graph].count(1) == 1
    assert "prepare_inputs_for_generation" not in vars(model)


LONGROPE = itertools.product(["phi3", "llama", "gemma3_text"], [False, True])


@pytest.mark.parametrize("family, lookup", slow_unless([("phi3", True), ("llama", False)].__contains__, LONGROPE))
def test_frequencies_that_change_with_the_length_are_captured(captured, family, lookup):
    """Transformers chooses them in each step, by its positions: old versions on the host, others in place in a buffer."""
    options = {"prompt_lookup_num_tokens": 5} if lookup else {}
    if family == "gemma3_text" and hf.VERSION.startswith("5.17."):
        pytest.skip("Transformers 5.17 raises an UnboundLocalError")
    model, inputs = longrope(family, 40), prompts("no_padding", "cpu", rows=1, length=30)
    inputs["input_ids"][:, 15:] = inputs["input_ids"][:, :15]  # which gives prompt lookup something to find
    assert not torch.equal(generate(longrope(family, 64), inputs, **options), generate(model, inputs, **options))
    patch = same(model, inputs, calls=4, options=options)
    assert 0 < patch.captures <= 4 and not patch.reasons  # a graph for each number of tokens


def test_a_rotary_embedding_that_is_changed_between_calls(captured):
    model, twin, inputs = longrope("phi3", 40), longrope("phi3", 40), prompts("no_padding", "cpu", rows=1, length=30)
    with hf_fastattn.patch(model) as patch:
        for change in ("attention_scaling", "long_inv_freq", None):
            assert torch.equal(generate(model, inputs), generate(twin, inputs))
            for rotary in (model.model.rotary_emb, twin.model.rotary_emb):
                if change is not None and hasattr(rotary, change):
                    setattr(rotary, change, getattr(rotary, change) * 1.7)
        assert not patch.reasons


def test_new_ids_alone_with_their_positions(captured, llama):
    def turn(patched):
        first = generate(llama, {"input_ids": prompts("no_padding", "cpu", rows=1)["input_ids"]}, return_dict_in_generate=True)
        seen = first.past_key_values.get_seq_length()
        ids = torch.cat([first.sequences[:, seen:], torch.arange(3, 11)[None]], 1)
        positions = torch.arange(seen, seen + ids.shape[1])[None]
        mask = torch.ones(1, seen + ids.shape[1], dtype=torch.long)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return generate(llama, inputs, past_key_values=first.past_key_values)

    expected = turn(False)
    with hf_fastattn.patch(llama) as patch:
        assert torch.equal(turn(True), expected) and not patch.reasons


PER_LAYER = {
    "head_dim": 16, "global_head_dim": 32, "sliding_window": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 128, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip


SHAPES = slow_unless([(32, "left_padding"), (512, "holes")].__contains__, itertools.product((32, 512), PADDINGS))


@pytest.mark.parametrize("head_dim, padding", SHAPES)
def test_layers_of_different_shapes(captured, padding, head_dim):
    model = tiny("gemma4_text", **{**PER_LAYER, "global_head_dim": head_dim})
    assert same(model, prompts(padding, "cpu")).captures == 1
    with pytest.raises(ValueError, match="cannot run 'lean': head_dim 600 is above 576"):
        hf_fastattn.patch(tiny("gemma4_text", **{**PER_LAYER, "global_head_dim": 600}))


def test_configuration_changes_made_while_patched_are_kept(llama):
    llama.config.id2label = {0: "zero"}
    llama.config.note = {"list": [1]}
    with hf_fastattn.patch(llama, graph=False):
        llama.config.id2label[0] = "changed"
        llama.config.rope_parameters["note"] = 1
        llama.config.note["list"].append(2)
        llama.config.added = [3]
        llama.config.use_cache = False
        llama.config.pad_token_id = 7
        del llama.config.pretraining_tp
    config = llama.config
    assert config.id2label[0] == "changed" and config.rope_parameters["note"] == 1 and config.note == {"list": [1, 2]}
    assert config.added == [3] and not config.use_cache and config.pad_token_id == 7 and config._attn_implementation == "sdpa"
    assert "pretraining_tp" not in vars(config)


def test_a_model_built_over_a_part_of_another(llama):
    other = LlamaForCausalLM(llama.config).eval()
    other.model = llama.model
    with pytest.raises(ValueError, match="a LlamaForCausalLM in this process shares a part of it"):
        hf_fastattn.patch(llama)
    other.model = copy.deepcopy(llama.model)
    other.model.embed_tokens = llama.model.embed_tokens  # has no attention to change
    with hf_fastattn.patch(llama, graph=False), hf_fastattn.count_calls() as calls:
        generate(other, prompts("no_padding", "cpu"))
    assert not calls


def test_objects_of_the_process_are_searched_only_where_a_part_has_further_references(llama, captured, monkeypatch):
    searches = []
    objects = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: searches.append(True) or objects())
    for _ in range(2):  # also after a call of a patched model
        with hf_fastattn.patch(llama):
            generate(llama, prompts("no_padding", "cpu"))
    assert not searches
    layer = llama.model.layers[0]  # a variable
    hf_fastattn.patch(llama).undo()
    assert searches
    del layer

    def with_its_layers(model):
        other = LlamaForCausalLM(model.config)
        other.model.layers = model.model.layers
        return other

    def with_its_attributes(model):
        other = LlamaForCausalLM(model.config).model
        other.__dict__ = model.model.__dict__
        return other

    for share in (copy.copy, lambda model: copy.copy(model.model), with_its_layers, with_its_attributes):
        other = share(llama)
        with pytest.raises(ValueError, match="shares a part of it"):
            hf_fastattn.patch(llama)
        del other
    hf_fastattn.patch(llama).undo()


def test_a_model_whose_generate_is_that_of_a_part():
    model = every_model.named("Blip2ForConditionalGeneration", "blip_2")
    with pytest.raises(ValueError, match=r"patch\(model\.language_model\)"):
        hf_fastattn.patch(model)
    with hf_fastattn.patch(model.language_model, graph=False) as patch:
        assert patch.changes
