"""The preallocated cache without patch(): equal to a DynamicCache, with sdpa and with the backends."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import warnings
from unittest.mock import Mock

import models
import numpy as np
import pytest
import torch
from cases import slow_unless
from models import COMMON, FAMILIES, PADDINGS, family, prompts, tiny
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_fastattn import hf, patch
from hf_fastattn.caches import PagedCache, PreallocatedCache, RollingCache, layers, memory, shared
from hf_fastattn.kernels.decode.append import append
from hf_fastattn.kernels.spec import KV

WINDOWED = "mistral_window_below_prompt"
generate = functools.partial(models.generate, max_new_tokens=16)


def check_patched(model, inputs, expected, calls=2):
    """Of 8 tokens: patched, in graphs."""
    with patch(model) as patched:
        for _ in range(calls):
            assert torch.equal(generate(model, inputs, max_new_tokens=8), expected)
        assert patched.replays and not patched.reasons


MODES = {
    "greedy": {},
    "chunked_prefill": {"prefill_chunk_size": 40},
    "beam": {"num_beams": 3},
    "num_return_sequences": {"num_return_sequences": 2, "do_sample": True},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}


# Every family and padding with greedy search; the other modes for models with two kinds of layers.
CASES = [(name, "greedy", padding) for name in FAMILIES for padding in PADDINGS]
CASES += [(name, mode, "left_padding") for name in ("llama", WINDOWED, "qwen2") for mode in MODES if mode != "greedy"]
FAST = [*zip(FAMILIES, ["greedy"] * 9, PADDINGS * 3, strict=True), *(case for case in CASES if case[0] == "qwen2")]


@pytest.mark.parametrize("name, mode, padding", slow_unless(FAST.__contains__, CASES))
def test_tokens_equal_those_of_a_dynamic_cache(name, mode, padding):
    model = family(name, "cpu")
    inputs = prompts(padding, "cpu", rows=1 if mode == "prompt_lookup" else 3)
    for attention in ("eager", "lean"):
        model.set_attn_implementation(attention)
        expected = generate(model, inputs, **MODES[mode])
        assert torch.equal(generate(model, inputs, past_key_values=PreallocatedCache(model), **MODES[mode]), expected), attention


@pytest.mark.parametrize("chunk", [1, 3, 9, 40])
@pytest.mark.parametrize("keep, slack", [(1, 1), (4, 8), (128, 512)])
def test_a_sliding_window_with_chunks_of_any_size(monkeypatch, keep, slack, chunk):
    monkeypatch.setattr(layers, "KEEP", keep)
    monkeypatch.setattr(layers, "SLACK", slack)
    model = family(WINDOWED, "cpu")
    model.set_attn_implementation("eager")
    inputs = prompts("left_padding", "cpu")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        cache = PreallocatedCache(model, 4)
        for start in range(0, ids.shape[1], chunk):
            stop = start + chunk
            places = torch.arange(start, min(stop, ids.shape[1]))[None]
            given = {"attention_mask": mask[:, :stop], "position_ids": places, "past_key_values": cache}
            logits, live = model(ids[:, start:stop], **given).logits, mask[:, start:stop].bool()
            torch.testing.assert_close(logits[live], whole[:, start:stop][live], rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == ids.shape[1]
    assert cache.layers[0].buffers[0].shape[2] <= 16 - 1 + keep + slack


def test_one_token_is_one_write_and_the_buffers_are_kept():
    model = family(WINDOWED, "cpu")
    cache = PreallocatedCache(model)
    generate(model, prompts("no_padding", "cpu"), past_key_values=cache)
    layer = cache.layers[0]
    where, before = layer.buffers[0].data_ptr(), layer.buffers[0].clone()
    states = torch.ones(3, 2, 1, 16)
    for each in cache.layers:
        keys, _ = each.update(states, states)
    changed = (layer.buffers[0] != before).any(-1).any(1).any(0)
    assert layer.buffers[0].data_ptr() == where and int(changed.sum()) == 1
    assert keys.untyped_storage().data_ptr() == cache.layers[-1].keys.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ["llama", WINDOWED])
def test_conversations_with_full_and_with_new_ids(name):
    model = family(name, "cpu")
    model.set_attn_implementation("lean")
    first = prompts("left_padding", "cpu")
    more = prompts("no_padding", "cpu")["input_ids"][:, :7]
    cache = PreallocatedCache(model)
    said = generate(model, first, past_key_values=cache)
    ids = torch.cat([said, more], 1)
    mask = torch.cat([first["attention_mask"], torch.ones(3, ids.shape[1] - first["input_ids"].shape[1], dtype=torch.long)], 1)
    expected = generate(model, {"input_ids": ids, "attention_mask": mask})
    with torch.inference_mode():
        other = copy.deepcopy(cache)
    full = generate(model, {"input_ids": ids, "attention_mask": mask}, past_key_values=cache)
    assert torch.equal(full, expected)
    assert cache.get_seq_length() == expected.shape[1] - 1 and other.get_seq_length() == said.shape[1] - 1
    # The last token of `said` is not in the cache yet, so it is also new.
    new = generate(model, {"input_ids": ids[:, said.shape[1] - 1 :], "attention_mask": mask}, past_key_values=other)
    assert torch.equal(new[:, 8:], expected[:, ids.shape[1] :])


def test_reset_keeps_the_buffers_and_forgets_the_tokens():
    model = family("llama", "cpu")
    inputs = prompts("left_padding", "cpu")
    cache = PreallocatedCache(model)
    expected = generate(model, inputs, past_key_values=cache)
    where = cache.layers[0].keys.data_ptr()
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, inputs, past_key_values=cache), expected) and cache.layers[0].keys.data_ptr() == where
    cache.reset()
    inputs = prompts("left_padding", "cpu", rows=2)  # an empty cache accepts any batch size
    assert torch.equal(generate(model, inputs, past_key_values=cache), generate(model, inputs))


def test_growth_moves_the_tokens_and_a_fixed_cache_refuses_before_it_writes():
    model = family("qwen2", "cpu")
    inputs = prompts("left_padding", "cpu")
    expected = generate(model, inputs, max_new_tokens=170)
    cache = PreallocatedCache(model, 100)  # of 256
    assert torch.equal(generate(model, inputs, max_new_tokens=170, past_key_values=cache), expected)
    assert cache.storage.version > 0
    fixed = PreallocatedCache(model, 100, grow=False)
    with pytest.raises(ValueError, match=r"holds 100 tokens .* has seen 100 and is given 1 more"):
        generate(model, inputs, past_key_values=fixed)
    assert fixed.get_seq_length() == 100 and fixed.get_max_length() == 100


def test_a_capacity_that_does_not_fit_is_refused_before_it_is_allocated(monkeypatch):
    model = tiny("llama", "lean")
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    cache = PreallocatedCache(model, 256)
    # 2 layers x (K and V) x 3 rows x 2 heads x 16 x 4 bytes x 256 tokens
    with pytest.raises(MemoryError, match=r"256 tokens needs 393216 bytes .* 1000 .* are free"):
        generate(model, prompts("no_padding", "cpu"), past_key_values=cache)


ELSEWHERE = torch.device("cpu", 1)
ASKED = {  # GPUs of the process, whether the model is patched, devices of its layers: layers whose memory is asked for each time
    "one GPU": (1, False, {}, [2]),
    "several": (2, True, {}, [2]),
    "devices not known": (2, False, {}, [1, 1]),
    "two devices": (2, True, {1: ELSEWHERE}, [1]),
    "in the memory of the host": (2, True, {1: torch.device("meta")}, [1, 1]),
}


@pytest.mark.parametrize("name", ASKED)
def test_memory_is_asked_for_once_for_each_device(monkeypatch, name):
    """The first token waits for the answer of the driver."""
    gpus, patched, devices, expected = ASKED[name]
    asked, reserved, model = [], [], tiny("llama", "lean")
    each = 2 * 3 * 2 * 16 * 4  # K and V, 3 rows, 2 heads
    monkeypatch.setattr(memory, "refuse_unless_fits", lambda tokens, size, *_: asked.append(size / each))
    monkeypatch.setattr(memory, "reserve", lambda total, count, device: reserved.append((total, count)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    placed = dict.fromkeys(range(2), torch.device("cpu")) | devices
    monkeypatch.setattr(hf, "layer_devices", lambda model: placed if isinstance(model, hf.PreTrainedModel) else {})
    with patch(model) if patched else contextlib.nullcontext():
        generate(model, prompts("no_padding", "cpu"), past_key_values=PreallocatedCache(model, 256))
    assert asked == expected and reserved == [(256 * each * count, 2 * count) for count in expected if count > 1]


def test_the_memory_of_a_shared_cache_is_that_of_its_own_slots(monkeypatch):
    shares, reserved = Mock(length=lambda tokens: tokens // 8), []
    shares.before = shares.length
    monkeypatch.setattr(memory, "reserve", lambda total, count, device: reserved.append(total))
    track = shared.SharedTrack(8192, True, shares)
    made = [shared.SharedLayer(index, track) for index in range(2)]
    for layer in made:
        layer.lazy_initialization(*[torch.zeros(1, 4, 0, 16)] * 2)
    assert reserved == [sum(buffer.nbytes for layer in made for buffer in layer.buffers)] == [2 * 2 * 4 * 1024 * 16 * 4]


HUGE = 10**13  # tokens, more than fit into the address space of a process


BEYOND = [(HUGE, False), (10**30, True), (HUGE, True), (10**30, False)]


@pytest.mark.parametrize("capacity, grow", slow_unless(BEYOND[:2].__contains__, BEYOND))
def test_a_capacity_beyond_all_memory_is_refused_on_the_cpu(capacity, grow):
    model, inputs = tiny("llama", "lean"), prompts("no_padding", "cpu")
    cache = PreallocatedCache(model, capacity, grow=grow)
    with pytest.raises(MemoryError, match=r"tokens needs \d+ bytes .* on cpu, and at most .* are free"):
        generate(model, inputs, past_key_values=cache)
    cache.reset()
    if grow:  # the remedy of the message
        assert torch.equal(generate(model, inputs, past_key_values=cache), generate(model, inputs))


@pytest.mark.parametrize("options", [{}, {"backend": "streaming", "window": 40}])
def test_a_call_beyond_all_memory_leaves_nothing_in_the_pool(options):
    model, inputs = tiny("llama", "lean"), prompts("no_padding", "cpu")
    with patch(model, graph=False, **options):
        expected = generate(model, inputs)
        if not options:
            with pytest.raises(MemoryError, match=r"needs \d+ bytes .* on cpu"):
                generate(model, inputs, max_new_tokens=HUGE)
        assert torch.equal(generate(model, inputs), expected)
        cache = hf.cache_in(generate(model, inputs, return_dict_in_generate=True))
        if not options:
            with pytest.raises(MemoryError, match="on cpu"):
                cache.reserve(HUGE)
            assert cache.layers[0].keys.shape[2] == cache.get_seq_length()
    model.config.max_position_embeddings = 1 << 62
    with patch(model, "streaming", window=HUGE, graph=False), pytest.raises(MemoryError, match="on cpu"):
        generate(model, inputs)


WRONG = [True, False, 0, -1, 1.5, 40.0, float("inf"), float("nan"), "40", None, np.float64(40), np.bool_(True)]


def test_a_capacity_is_a_number_of_tokens():
    model = tiny("llama", "lean")
    for wrong in WRONG:
        for make in (PreallocatedCache, lambda model, wrong: PreallocatedCache.load("nowhere", model, capacity=wrong)):
            with pytest.raises(ValueError, match="capacity counts tokens: an integer, at least 1; got "):
                make(model, wrong)
        for name in ("window", "sinks") if wrong != 0 and wrong is not None else ():
            with pytest.raises(ValueError, match=f"{name} (counts|is) .* an integer, at least"):
                patch(model, "streaming", **{"window": 40, name: wrong})


@pytest.mark.parametrize("window", [None, 16])
def test_keys_and_values_keep_their_dtypes(tmp_path, window):
    """As under autocast, which rotates keys in fp32 and computes values in bf16."""
    model, inputs = tiny("mistral", "sdpa", sliding_window=window), prompts("no_padding", "cpu", rows=2)
    cache, states = PreallocatedCache(model, 4), torch.randn(2, 2, 40, 16)
    for start, stop in ((0, 3), (3, 4), (4, 40)):
        new, seen = states[:, :, start:stop], max(0, start - (window or 99) + 1)
        for index in (0, 1):
            keys, values = cache.update(new, new.bfloat16(), index)
            assert torch.equal(keys, states[:, :, seen:stop]) and torch.equal(values, states[:, :, seen:stop].bfloat16())
    cache.save(tmp_path / "tokens", model)
    loaded = PreallocatedCache.load(tmp_path / "tokens", model)
    keys, values = loaded.update(new[:, :, :1], new[:, :, :1].bfloat16(), 0)
    assert (keys.dtype, values.dtype) == (torch.float32, torch.bfloat16)
    with pytest.raises(ValueError, match=r"float32 and 2 KV heads of 16 in torch.bfloat16 on cpu, and it is given 2 KV heads of"):
        cache.update(new, new, 0)
    with torch.autocast("cpu", torch.bfloat16):
        expected = generate(model, inputs)
        assert torch.equal(generate(model, inputs, past_key_values=PreallocatedCache(model)), expected)
        with patch(model, graph=False):
            model.set_attn_implementation("sdpa")
            assert torch.equal(generate(model, inputs), expected)
    assert torch.equal(generate(model, inputs, past_key_values=PreallocatedCache(model)), generate(model, inputs))


TYPES = {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
UNREAD = {  # fields of the configuration from which Transformers makes caches, and the windows of the model's masks
    "window": ("llama", {"sliding_window": 5}, [None, None]),
    "no number of tokens": ("granite", {"sliding_window": -5.5}, [None, None]),
    "kinds of layers": ("llama", TYPES, [None, None]),
    "chunks": ("llama", {"attention_chunk_size": 8}, [None, None]),
    "chunks, full layers": ("mistral", {"sliding_window": None, "attention_chunk_size": 8}, [None, None]),
    "kinds of layers, a window for all": ("mistral", TYPES, [5, 5]),
    "window, chunks": ("starcoder2", {"sliding_window": 5, "attention_chunk_size": 8}, [5, 5]),
    "window, full layers": ("qwen2", {"sliding_window": 5, "layer_types": ["full_attention"] * 2}, [None, None]),
    "read": ("qwen2", {"use_sliding_window": True, **TYPES}, [None, 5]),
}


@pytest.mark.parametrize("name", slow_unless(["window", "kinds of layers, a window for all", "read"].__contains__, UNREAD))
def test_the_window_of_a_layer_is_that_of_its_mask(captured, name):
    model_type, own, windows = UNREAD[name]
    hf.warn_once.cache_clear()
    model, inputs = tiny(model_type, "sdpa", **own), prompts("left_padding", "cpu", length=24)
    expected = generate(model, inputs, use_cache=False, max_new_tokens=8)
    with warnings.catch_warnings(record=True, action="always") as said:
        assert [kind.window for kind in hf.layer_kinds(model.config)] == windows
        cache = PreallocatedCache(model)
    told = [str(each.message) for each in said if "keep all tokens" in str(each.message)]
    assert len(told) == (windows == [None, None] and name != "window, full layers"), told
    assert torch.equal(generate(model, inputs, past_key_values=cache, max_new_tokens=8), expected)
    check_patched(model, inputs, expected)


def test_the_text_of_a_composite_model_keeps_what_its_masks_show(captured):
    text = {"model_type": "llama", "sliding_window": 5, **COMMON}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
    own = {"text_config": text, "vision_config": {"model_type": "clip_vision_model", "patch_size": 8, **vision}}
    model, inputs = tiny("llava", "sdpa", auto=AutoModelForImageTextToText, **own), prompts("left_padding", "cpu", length=24)
    expected = generate(model, inputs, use_cache=False, max_new_tokens=8)
    check_patched(model, inputs, expected)


@pytest.mark.parametrize("source", ["", "if", "attribute"])
def test_code_that_does_not_show_the_windows_of_layers(captured, monkeypatch, source):
    """Its caches keep all tokens, and its masks are not made for it: no step is captured."""
    model, inputs = tiny("mistral", "sdpa", sliding_window=5), prompts("left_padding", "cpu", length=24)
    code = hf.caches.modeling_source(type(model.config))
    choice = "mask_function = create_causal_mask if self.config.sliding_window is None else create_sliding_window_causal_mask"
    assert choice in code
    other = {
        "": "",
        "if": code.replace(choice, "mask_function = create_sliding_window_causal_mask"),
        "attribute": code.replace(choice, "mask_function = masking_utils.create_sliding_window_causal_mask  # layer_types"),
    }
    monkeypatch.setattr(hf.caches, "modeling_source", lambda config_class: other[source])
    for function in (hf.caches._found_in, hf.warn_once):
        function.cache_clear()
        monkeypatch.setattr(hf.caches, function.__name__, function.__wrapped__)
    expected = generate(model, inputs, use_cache=False, max_new_tokens=8)
    with pytest.warns(UserWarning, match="does not show which layers mask by it.*takes more memory"), patch(model) as patched:
        assert torch.equal(generate(model, inputs, max_new_tokens=8), expected)
        assert not patched.captures and "MistralConfig has sliding_window=5" in patched.reasons[0]
    refused = pytest.raises(ValueError, match=r"window of its own, 5 tokens.*16 are")
    with patch(model, "streaming", window=16, graph=False), refused:
        generate(model, inputs)


@pytest.mark.parametrize("base, own", [("Mistral", {}), ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1})])
@pytest.mark.usefixtures("captured")
def test_models_in_a_file_of_their_own_have_the_windows_of_those_from_which_they_inherit(base, own, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    file = f"of_{base.lower()}"
    for part, name in (("configuration", f"{base}Config"), ("modeling", f"{base}ForCausalLM")):
        text = f"import transformers\n\nclass Own(transformers.{name}):\n    pass\n"
        (tmp_path / f"{part}_{file}.py").write_text(text)
    configuration, modeling = (importlib.import_module(f"{part}_{file}") for part in ("configuration", "modeling"))
    config = configuration.Own(**COMMON, sliding_window=12, **own)
    torch.manual_seed(0)
    model, inputs = modeling.Own._from_config(config, attn_implementation="eager").eval(), prompts("no_padding", "cpu", rows=1)
    expected = generate(model, inputs, use_cache=False, max_new_tokens=8)
    assert [kind.window for kind in hf.layer_kinds(config)] == ([12, 12] if base == "Mistral" else [None, 12])
    check_patched(model, inputs, expected, calls=3)


@pytest.mark.parametrize("backend", ["lean", "streaming"])
def test_a_window_that_no_layer_reads(backend):
    """The code of Qwen2-MoE requests masks of both kinds. By default all layers have full attention, and the window is 0."""
    sizes = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    model, inputs = tiny("qwen2_moe", **sizes), prompts("no_padding", "cpu")
    assert model.config.sliding_window == 0 and set(model.config.layer_types) == {"full_attention"}
    expected = generate(model, inputs, max_new_tokens=8)
    patched = patch(model, backend, **({"window": 256, "sinks": 4} if backend == "streaming" else {}))
    assert torch.equal(generate(model, inputs, max_new_tokens=8), expected)
    patched.undo()


@pytest.mark.parametrize("window", [-5, 0, 5.0, True, "5"])
def test_a_window_that_is_no_number_of_tokens(window):
    model = tiny("mistral", "lean")
    vars(model.config)["sliding_window"] = window  # not checked, as in a configuration that has no such field
    match = f"an integer, at least 1; got {window!r}. Correct"
    for make in (PreallocatedCache, patch):
        with pytest.raises(ValueError, match=match):
            make(model)
    if not isinstance(window, (bool, str)):  # on which Transformers fails before it requests a mask
        with pytest.raises(ValueError, match=match):
            model(prompts("no_padding", "cpu")["input_ids"], use_cache=False)


def test_crop():
    model = family("qwen2", "cpu")
    model.set_attn_implementation("lean")
    inputs = prompts("no_padding", "cpu")
    cache = PreallocatedCache(model)
    expected = generate(model, inputs)
    generate(model, inputs, past_key_values=cache)
    cache.crop(0)
    cache.crop(-30)
    assert cache.get_seq_length() == inputs["input_ids"].shape[1] + 15 - 30
    assert torch.equal(generate(model, inputs, past_key_values=cache), expected)
    with pytest.raises(ValueError, match="negative number"):
        cache.crop(5)
    with pytest.raises(ValueError, match="holds 111 tokens; 112 cannot"):
        cache.crop(-112)
    cache.layers[1 if cache.layers[1].is_sliding else 0].base = 111 - 20
    with pytest.raises(ValueError, match="sliding window of 16 has kept 20 of 111"):
        cache.crop(-10)
    cache, states = PreallocatedCache(model), torch.zeros(1, 2, 5, 16)  # layers that an early exit has not reached crop nothing
    cache.update(states, states, 0)
    cache.crop(-2)
    assert cache.get_seq_length() == 3 and [layer.seen for layer in cache.layers] == [3, 0]
    with pytest.raises(ValueError, match="holds 3 tokens; 4 cannot be removed"):
        cache.crop(torch.tensor(-4))
    with pytest.raises(ValueError, match="holds 0 tokens; 1 cannot be removed"):
        PreallocatedCache(model).crop(-1)


def test_rows_are_repeated_selected_and_reordered():
    model = family("qwen2", "cpu")
    inputs = prompts("left_padding", "cpu")
    cache = PreallocatedCache(model)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    keys = [layer.live()[0].clone() for layer in cache.layers]
    where = cache.layers[0].keys.data_ptr()
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert cache.layers[0].keys.data_ptr() == where
    assert all(torch.equal(layer.live()[0], old[[2, 0, 1]]) for layer, old in zip(cache.layers, keys, strict=True))
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 6
    cache.batch_select_indices(torch.tensor([False, True, False, False, True, True]))
    assert all(torch.equal(layer.live()[0], old[[2, 1, 1]]) for layer, old in zip(cache.layers, keys, strict=True))
    with pytest.raises(ValueError, match=r"holds 3 rows, and got \(2,\)"):
        cache.batch_select_indices(torch.tensor([True, False]))


@pytest.mark.parametrize("rolling", [False, True])
def test_gradients_are_refused_also_those_of_values_alone(rolling):
    model, ids = tiny("llama", "lean"), prompts("no_padding", "cpu")["input_ids"]
    if rolling:
        patch(model, "streaming", window=16)
    cache = RollingCache(model) if rolling else PreallocatedCache(model)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
    with torch.no_grad():
        model(ids[:, :1], past_key_values=cache)
    with pytest.raises(RuntimeError, match="carries no gradient"):
        model(ids[:, :1], past_key_values=cache)
    model.requires_grad_(False)
    model.model.layers[-1].self_attn.v_proj.weight.requires_grad_(True)  # the last layer: no later keys have a gradient
    with pytest.raises(RuntimeError, match="carries no gradient"):
        model(ids, past_key_values=RollingCache(model) if rolling else PreallocatedCache(model))


def test_bad_input():
    model, ids = tiny("llama", "lean"), prompts("no_padding", "cpu")["input_ids"]
    recurrent = {"num_hidden_layers": 2, "layers_block_type": ["recurrent", "attention"]}  # of RecurrentGemma in 5.17
    configs = {
        "encoder-decoder": CONFIG_MAPPING["t5"](),
        "has linear_attention": CONFIG_MAPPING["qwen3_next"](layer_types=["linear_attention"] * 48),
        "chunked_attention": CONFIG_MAPPING["llama4_text"](),
        "has attention, recurrent": CONFIG_MAPPING["llama"](**recurrent),
    }
    for match, config in configs.items():
        with pytest.raises(ValueError, match=match):
            PreallocatedCache(config)
    cache = PreallocatedCache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for other, rows, match in (
            (model, 2, "holds 3 rows, and it is given 2"),
            (tiny("llama", "lean", num_key_value_heads=4), 3, r"2 KV heads of 16 .* is given 4 KV heads of 16"),
            (tiny("llama", "lean", num_hidden_layers=3), 3, "holds 2 layers and is given layer 2"),
        ):
            with pytest.raises(ValueError, match=match):
                other(ids[:rows, :1], past_key_values=cache)
    with pytest.raises(NotImplementedError, match="cannot be offloaded"):
        cache.layers[0].offload()
    assert not cache.is_compileable  # otherwise generate() would start torch.compile by itself


@torch.no_grad()
def test_an_interrupted_forward_over_layers_of_several_kinds():
    """The mask of the second layer is made for the tokens that this layer has, and would fit."""
    model, ids = family("qwen2", "cpu"), prompts("no_padding", "cpu")["input_ids"]
    expected = model(ids).logits
    with patch(model):
        cache = PreallocatedCache(model)
        with model.model.layers[1].register_forward_pre_hook(lambda *_: 1 // 0), pytest.raises(ZeroDivisionError):
            model(ids, past_key_values=cache)
        assert not cache.get_seq_length()
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected, rtol=1e-3, atol=1e-3)


CHANGES = {"reorder_cache": torch.tensor([2, 0, 1]), "batch_select_indices": torch.tensor([1, 1]), "crop": -3}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("cls", [PreallocatedCache, PagedCache])
def test_an_interrupted_change_of_all_layers(cls, change, monkeypatch):
    model, ids = family("qwen2", "cpu"), prompts("no_padding", "cpu")["input_ids"]
    with patch(model):
        cache = cls(model)
        expected = model(ids, past_key_values=cache).logits
        for name in ("movable", "select", "why_not_crop"):
            monkeypatch.setattr(cache.layers[1], name, Mock(side_effect=KeyboardInterrupt), raising=False)
        if cls is PagedCache:
            monkeypatch.setattr(type(cache.storage), "write", Mock(side_effect=KeyboardInterrupt))
            monkeypatch.setattr(type(cache.storage), "make_ready", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            getattr(cache, change)(CHANGES[change])
        monkeypatch.undo()
        with pytest.raises(ValueError, match="change of its rows was interrupted"):
            model(ids[:, :1], past_key_values=cache)
        cache.reset()
        assert torch.equal(model(ids, past_key_values=cache).logits, expected)
        assert cls is PreallocatedCache or cache.pages_in_use == cache.storage.pages.in_use == 12


def test_layers_that_a_model_adds_to_its_cache():
    """Looped models copy the layers of their cache, one for each loop. Reordering and cropping would miss the copies."""
    model = tiny("llama", "lean")
    ids, cache = prompts("no_padding", "cpu")["input_ids"], PreallocatedCache(model)
    cache.layers += [copy.deepcopy(layer) for layer in cache.layers]
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"2 layers and is given layer . of 4.*changed its layers.*use a DynamicCache"),
    ):
        model(ids, past_key_values=cache)
    cache.layers = cache.layers[:2]
    with torch.no_grad():
        model(ids, past_key_values=cache)
        copied = copy.deepcopy(cache)
        assert torch.equal(model(ids[:, :1], past_key_values=copied).logits, model(ids[:, :1], past_key_values=cache).logits)
    if "dory" in CONFIG_MAPPING:
        with pytest.raises(ValueError, match="DoryConfig adds layers to its cache"):
            PreallocatedCache(CONFIG_MAPPING["dory"]())


def test_capacities():
    assert [layers.round_up(n) for n in (1, 256, 257, 2047, 2049, 5000, 65600)] == [256, 256, 512, 2048, 2304, 5120, 73728]
    model = tiny("llama", "lean")
    assert PreallocatedCache(model, np.int64(300)).storage.capacity == 512
    with patch(model, "streaming", window=np.int64(40), sinks=np.int32(4)):
        assert type(model.config.streaming_window) is int and type(model.config.streaming_sinks) is int


@pytest.mark.parametrize("live", [None, 1, 3])
@pytest.mark.parametrize("slot", [-9, -4, -2, 0, 3, 5, 7, 8, 20])
def test_append_writes_some_tokens_and_nothing_outside_the_buffer(slot, live, device):
    keys, values = torch.arange(2 * 3 * 8 * 4.0, device=device).view(2, 3, 8, 4).split(2, -1)
    new = torch.rand(2, 4, 3, 4, device=device).transpose(1, 2).split(2, -1)
    expected = [torch.cat([held, torch.zeros(2, 3, 16, 2, device=device)], 2) for held in (keys, values)]
    for held, states in zip(expected, new, strict=True):
        skipped = max(-slot, 0)
        stop = live or 4  # those that follow are padding
        held[:, :, max(slot, 0) : max(slot + stop, 0)] = states[:, :, skipped:stop]
    append(KV(keys, values), *new, torch.tensor([slot], device=device), live and torch.tensor([live], device=device))
    assert all(torch.equal(got, held[:, :, :8]) for got, held in zip((keys, values), expected, strict=True))


@pytest.mark.parametrize("rows", [2, 5])
def test_rows_are_reordered_in_place_in_every_layer(rows, device):
    model = tiny("qwen2", num_hidden_layers=4, use_sliding_window=True, sliding_window=16, max_window_layers=2)
    cache = PreallocatedCache(model, capacity=40)
    for index, head_dim in enumerate((16, 24, 16, 16)):
        cache.update(*torch.randn(2, rows, 2, 30 + index, head_dim, device=device), index)
    for _ in range(2):
        before = [(layer.buffers[0].clone(), layer.buffers[1].clone()) for layer in cache.layers]
        addresses = [layer.buffers[0].data_ptr() for layer in cache.layers]
        order = torch.randint(rows, (rows, 7), dtype=torch.int32, device=device)[:, 3]  # as beam search does
        cache.reorder_cache(order)
        for layer, old in zip(cache.layers, before, strict=True):
            for got, held in zip(layer.live(), old, strict=True):
                assert torch.equal(got, held[order.long(), :, : got.shape[2]])
        assert addresses == [layer.buffers[0].data_ptr() for layer in cache.layers]
    cache.reorder_cache(torch.tensor([0, 0, rows - 1], device=device))  # another number of rows
    assert cache.layers[0].batch_size == 3 and cache.layers[3].keys.shape[0] == 3
