"""Compares explain() with known numbers, with torch's counts, and with a real cache."""

import json
import sys

import every_model
import pytest
import torch
from models import FAMILIES, PROMPT, family, prompts, tiny
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.explanation import SHAPES, costs, explain
from hf_fastattn.kernels.host import gpu


def test_an_8b_model_on_an_h200_by_hand():
    found = explain("8b", batch=2, length=8192, gpu="h200")
    assert found.facts.parameters == 8_030_261_248 and found.facts.weight_bytes == 2 * 8_030_261_248
    kv = 2 * (2 * 32 * 8 * 128 * 2) * 8192  # rows x (K and V, layers, KV heads, head_dim, bytes) x tokens
    weights = 2 * (8_030_261_248 - 128256 * 4096)
    assert found.step.kv_bytes == kv and found.step.weight_bytes == weights
    assert found.step.floor_ms == pytest.approx(1e3 * (weights + kv) / 4.8e12) and found.step.bound_by == "memory"
    flops = 2 * (weights + 32 * 4 * 32 * 128 * 8192)
    assert found.step.flops == pytest.approx(flops) and found.step.flops_per_byte == pytest.approx(flops / (weights + kv))


@pytest.mark.parametrize("name", ["llama", "opt", "qwen3", "gpt_oss"])
def test_kv_bytes_are_those_of_a_cache(name):
    model = family(name, "cpu")
    model.set_attn_implementation("eager")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(**prompts("no_padding", "cpu"), past_key_values=cache)
    facts = costs.count(model)
    full = [layer for layer, window in zip(cache.layers, facts.windows, strict=True) if window is None]
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in full)
    windowed = len(cache.layers) - len(full)
    a_token = 2 * facts.num_kv_heads * facts.head_dim * 4
    assert held == 3 * len(full) * PROMPT * a_token
    assert 3 * facts.kv_bytes(PROMPT) == held + 3 * windowed * 16 * a_token


@pytest.mark.parametrize("name", ["llama", "opt", "qwen2", "phi3"])
def test_flops_are_those_torch_counts(name):
    model = family(name, "cpu")
    model.set_attn_implementation("eager")
    inputs = prompts("no_padding", "cpu", rows=1)
    with torch.no_grad():
        cache = model(**inputs, use_cache=True).past_key_values
        with FlopCounterMode(display=False) as counter:
            model(inputs["input_ids"][:, :1], past_key_values=cache)
    facts = costs.count(model)
    # explain() counts norms and biases as weights; torch does not count them as products.
    assert facts.flops(PROMPT + 1) == pytest.approx(counter.get_total_flops(), rel=0.04)


def test_weights_of_a_model_and_of_its_config_are_equal():
    model = tiny("llama")
    facts = explain(model, length=64).facts
    assert facts.weight_bytes == sum(p.nbytes for p in model.parameters())
    assert facts.dense_bytes == facts.weight_bytes - model.get_input_embeddings().weight.nbytes
    assert costs.count(tiny("llama", tie_word_embeddings=True)).dense_bytes == facts.dense_bytes
    of_config = explain(model.config, length=64, dtype="float32").facts
    assert (of_config.parameters, of_config.dense_bytes) == (facts.parameters, facts.dense_bytes)
    half = explain(model, length=64, dtype="bfloat16").facts
    assert half.weight_bytes == facts.weight_bytes // 2 and half.kv_bytes(64) == facts.kv_bytes(64) // 2
    model_type, options = SHAPES["1b"]
    model = hf.model_on_meta(hf.make_config(model_type, **options), torch.bfloat16)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("name", ["LlavaForConditionalGeneration", "Qwen3VLForConditionalGeneration"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_no_weights_of_a_vision_tower(name, tied):
    found = next(model for model in every_model.find() if model.name == name)
    config = every_model.tiny_config(every_model.config_class(every_model.load_class(found)), every_model.own_of(found))
    config.tie_word_embeddings = tied
    of_config, model = explain(config, length=64, dtype="float32").facts, every_model.load_class(found)._from_config(config)
    facts = explain(model, length=64).facts
    assert facts.weight_bytes == of_config.weight_bytes == sum(p.nbytes for p in model.parameters())
    text = {*model.get_decoder().parameters(), *model.lm_head.parameters()}
    if not tied:
        text.remove(model.get_input_embeddings().weight)
    assert facts.dense_bytes == of_config.dense_bytes == sum(p.nbytes for p in text)


def test_only_experts_that_rows_choose_are_read():
    model_type, own = FAMILIES["gpt_oss"]
    model = tiny(model_type, **{**own, "num_local_experts": 8, "num_experts_per_tok": 2})
    facts = costs.count(model)
    assert facts.expert_bytes == sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name) > 0
    assert facts.read_bytes(1) == pytest.approx(facts.dense_bytes + facts.expert_bytes / 4)
    assert facts.read_bytes(2) == pytest.approx(facts.dense_bytes + facts.expert_bytes * (1 - 0.75**2))
    assert facts.read_bytes(10**4) == pytest.approx(facts.dense_bytes + facts.expert_bytes)


@pytest.mark.parametrize("model_type", ["gemma4_text", "aria_text", "jetmoe", "hunyuan_v1_moe"])
def test_experts_by_their_other_names(model_type):
    own = {"gemma4_text": {"enable_moe_block": True, "num_experts": 16, "top_k_experts": 2, "moe_intermediate_size": 704}}
    own["hunyuan_v1_moe"] = {"num_hidden_layers": 2, "num_experts": 8, "moe_topk": [1, 2], "head_dim": 128}
    facts = explain(CONFIG_MAPPING[model_type](**own.get(model_type, {})), length=64).facts
    chosen, count = facts.experts
    assert chosen == 2 and count == (16 if model_type == "gemma4_text" else 8)
    model = hf.model_on_meta(CONFIG_MAPPING[model_type](**own.get(model_type, {})), torch.bfloat16)
    of_experts = sum(p.numel() for p in model.parameters() if p.dim() == 3 and len(p) == count)
    assert facts.expert_weights == pytest.approx(of_experts, rel=1e-4)  # JetMoE has a router in it


def test_a_chunk_of_a_ring_computes_for_as_long_as_it_is_sent():
    found = explain("8b", gpu="h200")
    assert found.ring_chunk == 1099 and "1,099 tokens" in str(found)
    for chunk in (1098, 1099):  # of each token half of the chunk is visible
        computed, sent = found.facts.attention_flops(chunk) * chunk / 2 / 989e12, found.facts.kv_bytes(chunk) / 450e9
        assert (computed >= sent) == (chunk == 1099)
    assert explain("gpt3", gpu="h200").ring_chunk == 4396  # MHA: twice rate / link
    assert explain("mistral-7b", gpu="h200").ring_chunk is None and "ring_attention" not in str(explain("mistral-7b", gpu="h200"))
    assert explain("8b", gpu="h200", dtype="float32").ring_chunk is None


def test_longest_is_the_last_length_that_fits():
    for batch in (1, 64):
        found = explain("1b", batch=batch, gpu="l4")
        held = [found.facts.weight_bytes + batch * found.facts.kv_bytes(found.longest + more) for more in (0, 1)]
        assert held[0] <= 24e9 < held[1]
        assert all(row["fits"] == (row["length"] <= found.longest) for row in found.memory)
    assert explain("70b", gpu="l4").longest == 0
    assert explain("mistral-7b", gpu="l4").longest is None
    assert "at any length" in str(explain("mistral-7b", gpu="l4")) and "less than the weights" in str(explain("70b", gpu="l4"))


def test_gpt3_on_an_a100_by_hand():
    found = explain("gpt3", length=4096, gpu="a100-40gb")
    kv = {row["name"][:3]: row["kv_bytes"] for row in found.variants}
    assert (kv["MHA"], kv["MQA"]) == (19_327_352_832, 201_326_592)
    assert found.facts.weight_bytes == pytest.approx(350e9, rel=0.003)
    # 312e12 FLOP/s over 1.55e12 B/s. A weight of two bytes has two operations for each row; an element of K/V, two for its row.
    assert round(found.roofline.gpu_flops_per_byte) == found.roofline.weights_batch == 201
    assert found.roofline.attention_flops_per_byte == 1 and found.roofline.attention_batch is found.roofline.step_batch is None
    # Two operations per weight and token, of the head (the embedding) for the last token alone; 8_390_656 pairs of query and key.
    head, attention = 50257 * 12288, 4 * 96 * 96 * 128 * (4096 * 4097 // 2)
    weights = found.facts.dense_weights - head
    assert found.prompt.flops == 2 * (4096 * weights + head) + attention
    assert found.prompt.weight_bytes + found.prompt.kv_bytes == found.facts.dense_bytes + 19_327_352_832
    assert found.prompt.floor_ms == pytest.approx(1e3 * found.prompt.flops / 312e12) and found.prompt.bound_by == "compute"
    assert "201 FLOP per byte of A100 SXM 40 GB" in str(found) and "from a batch of 201 on" in str(found)


@pytest.mark.parametrize(("name", "length", "part"), [("8b", 64, "step_batch"), ("gpt_oss", 64, "weights_batch")])
def test_the_batch_from_which_compute_sets_the_time_is_the_least(name, length, part):
    its, experts = {}, {"num_local_experts": 8, "num_experts_per_tok": 2}
    model = name if name == "8b" else tiny(FAMILIES[name][0], **FAMILIES[name][1] | experts).config
    found = explain(model, length=length, gpu="h200", dtype="bfloat16")
    batch = getattr(found.roofline, part)
    for n in (batch - 1, batch):
        step = costs.step(found.facts, found.gpu, n, length)
        flops, read = (step.flops, step.kv_bytes) if part == "step_batch" else (n * found.facts.weight_flops, 0)
        its[n] = flops / (step.weight_bytes + read)
    assert its[batch - 1] < 989e12 / 4.8e12 <= its[batch]
    assert batch > 206 + 100 * (part == "weights_batch")  # two of eight experts: a row has a quarter of the operations


def test_a_prompt_in_a_window_has_the_pairs_of_each_query():
    facts = costs.count(tiny("mistral", sliding_window=7))
    whole = facts.prompt_flops(30)
    assert whole == sum(map(facts.flops, range(1, 31))) - 2 * 29 * facts.head_weights
    assert facts.head_weights == tiny("mistral").lm_head.weight.numel()


def test_a_gpu_without_kernels_and_a_dtype_without_a_rate():
    old = explain("8b", gpu="t4")
    assert not old.supported and "needs a GPU of compute capability 8.0 (Ampere) or higher, and T4 has 7.5" in str(old)
    assert str(old).startswith("supported: no. It needs") and {row["what"] for row in old.refused} >= {"lean", "fa2"}
    assert explain("8b", gpu="t4", backend="reference").supported and explain(tiny("llama"), length=64, gpu="t4").supported
    assert old.roofline.weights_batch is None and "dtype='float16' has one" in str(old)
    assert explain("8b", gpu="t4", dtype="float16").roofline.weights_batch == 204
    assert "dtype='bfloat16' has one" in str(explain("1b", gpu="b200", dtype="float32"))


def test_curves_are_drawn_or_ask_for_matplotlib(monkeypatch, tmp_path):
    found, file = explain("8b", gpu="h200"), tmp_path / "curves.png"
    with monkeypatch.context() as m, pytest.raises(ImportError, match=r"Curves need matplotlib .*hf-fastattn\[bench\]"):
        m.setitem(sys.modules, "matplotlib.figure", None)
        found.draw(file)
    image = pytest.importorskip("matplotlib.image")
    found.draw(file)
    assert image.imread(file).std() > 0


def test_several_backends_are_compared():
    rows = {row["name"]: row for row in explain("8b", length=32768, gpu="h200").variants}
    assert list(rows) == ["MHA, 32 KV heads", "GQA, 8 KV heads (this model)", "MQA, 1 KV head", "window of 4096 in every layer"]
    mha, gqa, mqa, window = (row["kv_bytes"] for row in rows.values())
    assert mha == 4 * gqa == 32 * mqa and window == gqa // 8
    assert [row["longest"] for row in rows.values()][-1] is None
    assert "without its window" in {row["name"] for row in explain("mistral-7b").variants}
    for heads, kv_heads, kinds in ((8, 8, "MHA MQA"), (8, 1, "MHA MQA"), (32, 1, "MHA GQA MQA")):
        model = tiny("llama", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16)
        names = [name for name, _ in costs.relatives(costs.count(model))]
        assert [name[:3] for name in names[:-1]] == kinds.split()
        assert sum(f"{kv_heads} KV head" in name and "(this model)" in name for name in names) == 1


def test_kv_in_8_bits_have_half_the_bytes_and_a_scale():
    found, plain = (explain("8b", length=65536, gpu="h200", kv_dtype=each) for each in ("int8", None))
    assert found.step.kv_bytes == 65536 * 32 * 8 * (2 * 128 + 4) and found.step.flops == plain.step.flops
    assert found.step.floor_ms < plain.step.floor_ms and found.roofline.attention_batch is None
    assert found.longest > 1.9 * plain.longest and found.memory[-1]["kv_bytes"] < 0.51 * plain.memory[-1]["kv_bytes"]
    assert next("in 8 bits (int8), an approximation" in row["why"] for row in found.runs if row["what"] == "cache")
    model = tiny("llama")
    cache = hf_fastattn.PreallocatedCache(model, kv_dtype="fp8")
    with torch.no_grad():
        model(**prompts("no_padding", "cpu", rows=1), past_key_values=cache)
    held = sum(buffer.nbytes for layer in cache.storage.layers for buffer in layer.buffers)
    assert explain(model, kv_dtype="fp8").facts.kv_bytes(cache.storage.tracks[0].capacity) == held
    facts = explain(family("qwen2", "cpu"), dtype="bfloat16", kv_dtype="fp8").facts  # the second layer has a window of 16
    assert facts.kv_bytes(64) == facts.num_kv_heads * (64 * (2 * facts.head_dim + 4) + 16 * 2 * facts.head_dim * 2)


def test_streaming_keeps_the_tokens_that_patch_reports(monkeypatch):
    found = explain("8b", backend="streaming", window=4092, sinks=4, length=1 << 20, gpu="h200")
    assert set(found.facts.windows) == {4096} and found.longest is None
    assert found.step.kv_bytes == 2 * 32 * 8 * 128 * 2 * 4096
    assert runs(found)["cache"] == "RollingCache" and explain("8b", backend="streaming", window=9).facts.windows[0] == 13
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "arch", lambda device: 90)
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    found = explain("8b", backend="streaming", window=4092, device="cuda", gpu="h200")
    assert runs(found)["prefill"] == "prefill: the Triton kernel" and "sinks is 4" in found.refused[0]["why"]


def runs(found) -> dict[str, str]:
    return {row["what"]: row["how"] for row in found.runs}


def test_kernels_on_the_cpu_are_the_reference_and_short_prompts_go_to_the_decode_kernel():
    found = explain(tiny("llama"), length=64)
    assert found.device == "cpu"
    assert runs(found)["decode"] == "lean: the PyTorch reference" and runs(found)["prefill"] == "prefill: the PyTorch reference"
    assert [row["what"] for row in found.refused] == ["decode graph"] and "graphs are for CUDA" in found.refused[0]["why"]
    for length, kernel in ((32, "lean"), (33, "prefill")):
        (row,) = [row for row in explain(tiny("llama"), length=length).runs if row["what"] == "prefill"]
        assert row["how"].startswith(kernel) and row["why"].startswith(f"{length} x 2 = {2 * length} query rows")


@pytest.mark.parametrize(("arch", "kernel"), [(90, "prefill_hopper"), (80, "prefill")])
def test_the_hopper_kernel_runs_on_hopper_and_is_refused_elsewhere(monkeypatch, arch, kernel):
    pytest.importorskip("triton.experimental.gluon")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "arch", lambda device: arch)
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    found = explain("8b", device="cuda", gpu="h200")
    assert runs(found)["prefill"] == f"{kernel}: the Triton kernel" and runs(found)["decode step"] == "one CUDA graph"
    refused = {row["what"]: row["why"] for row in found.refused}
    if arch == 90:
        assert refused == {}
        (of_fa2,) = explain("8b", backend="fa2", gpu="h200").refused  # one kernel for both phases, and one query in decode
        assert of_fa2["what"] == "prefill_hopper in decode" and "65 queries or more, not 1" in of_fa2["why"]
    else:
        assert list(refused) == ["prefill_hopper in prefill"]
        assert "needs compute capability 9.0" in refused["prefill_hopper in prefill"]


def test_impossible_settings_and_what_is_no_model_are_refused_with_the_reason():
    wide = CONFIG_MAPPING["llama"](hidden_size=64, num_attention_heads=4, head_dim=600, num_hidden_layers=1, vocab_size=32)
    found = explain(wide, length=64)
    assert found.runs == [] and set(hf_fastattn.names()) - {"reference"} <= {row["what"] for row in found.refused}
    assert "head_dim 600 is above 576" in found.refused[0]["why"] and 'Nothing runs with "lean"' in str(found)
    neo = explain(CONFIG_MAPPING["gpt_neo"](), length=64)
    assert neo.runs == [] and "computes attention in its own code" in neo.refused[0]["why"]
    assert all(explain(CONFIG_MAPPING[name](), length=64).runs for name in ("bloom", "falcon"))
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"models with generate\(\), and LlamaModel has none"):
        explain(model.model)
    with pytest.raises(TypeError, match="a name or a path; got LlamaDecoderLayer"):
        explain(model.model.layers[0])


def test_a_folder_a_printed_table_and_json(tmp_path):
    config = tiny("llama").config
    config.save_pretrained(tmp_path)
    found = explain(str(tmp_path), batch=3, length=1000, gpu="h100")
    assert found.facts.num_heads == 4 and found.facts.windows == (None, None)
    said = json.loads(json.dumps(found.as_dict()))
    assert said["batch"] == 3 and said["facts"]["dtype"] == "float32" and said["gpu"]["name"] == "H100 SXM"
    text = str(found)
    assert "3 rows of 1,000 tokens on H100 SXM" in text and "1000 tokens are more than the 512 positions" in text
    assert "takes at least" in text and "MQA, 1 KV head" in text


@pytest.mark.parametrize("shape", SHAPES)
def test_named_shapes_have_the_size_in_their_name(shape):
    found = explain(shape)
    name = {"gpt3": "175b"}.get(shape, shape)
    billions = found.facts.parameters / 1e9
    assert billions == pytest.approx(float(name.rpartition("-")[2].removesuffix("b")), rel=0.25)
    assert found.supported and str(found).startswith("supported: yes\n")


def test_a_model_that_generates_by_its_part_is_supported_partly():
    assert str(explain(CONFIG_MAPPING["blip-2"]())).startswith("supported: partly. Its generate() is that of its language_model.")


def test_streaming_is_supported_where_patch_streams():
    for model_type, says in (("bloom", "no. BloomForCausalLM has ALiBi"), ("gpt2", "partly. It has a table of 1024 positions")):
        found = explain(CONFIG_MAPPING[model_type](), length=64, backend="streaming", window=16)
        assert str(found).startswith(f"supported: {says}")
    assert str(explain("8b", backend="streaming", window=16)).startswith("supported: yes")


MISTAKES = [
    *(({"batch": 0}, "batch must be an integer, at least 1; got 0"), ({"length": -3}, "at least 1; got -3")),
    *(({"batch": True}, "batch must be an int"), ({"length": float("nan")}, "at least 1; got nan"), ({"ranks": 1.5}, "got 1.5")),
    ({"gpu": ["h100"]}, "Unknown GPU .'h100'.; known"),
    *(({"backend": "leen"}, "Unknown attention backend 'leen'"), ({"gpu": "h900"}, "Unknown GPU 'h900'; known: a100")),
    ({"backend": "streaming"}, "needs window=, the number of last tokens to keep"),
    ({"window": 8}, "'lean' sees every token that the model does"),
    ({"kv_dtype": "int4"}, 'kv_dtype must be "int8", "fp8" or None'),
    ({"kv_dtype": "int8", "backend": "fa2"}, "decode kernel reads 8 bits: .*; got 'fa2'"),
    ({"kv_dtype": "int8", "backend": "streaming", "window": 9}, "'streaming' with a cache of 'rolling'"),
    ({"kv_dtype": "fp8", "ranks": 2}, "kv_dtype='fp8' is for a model on one GPU; got ranks=2"),
    ({"dtype": "float8"}, "Unknown dtype 'float8'; choose one of"),
]
UNCOUNTED = {  # models whose K and V it cannot count
    **{"t5": "decoder-only", "mamba": "full and sliding attention only"},
    **{"deepseek_v3": "multi-head latent attention, .* table of models", "mllama": "the K/V of cross-attention"},
    "qwen3_next": "recurrent states. The table of models .* says whether patch",
    **({"dots3_note": "multi-head latent attention"} if "dots3_note" in CONFIG_MAPPING else {}),  # of other ranks in some layers
}


def test_mistakes_are_refused_with_a_message():
    cases = [("8b", *each) for each in MISTAKES] + [(CONFIG_MAPPING[name](), {}, says) for name, says in UNCOUNTED.items()]
    for model, options, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            explain(model, **options)


def test_a_model_of_several_decoders_is_refused():
    with pytest.raises(ValueError, match=r"one decoder, and Qwen2_5Omni.* has several"):
        explain(CONFIG_MAPPING["qwen2_5_omni"](enable_audio_output=False))


def test_kv_heads_and_widths_that_the_config_does_not_have_are_those_of_the_projections():
    if "mimo_v2_flash" not in CONFIG_MAPPING:
        pytest.skip("this Transformers has no MiMo-V2")
    own = {"head_dim": 24, "v_head_dim": 16, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}
    model = tiny("mimo_v2_flash", **own, mlp_layer_types=["dense", "dense"])
    with torch.no_grad():
        cache = model(torch.arange(8)[None] + 2, use_cache=True).past_key_values
    held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    assert explain(model, length=8).facts.kv_bytes(8) == held
    assert 2 * explain(model.config, length=8, dtype="float32", ranks=2).facts.kv_bytes(8) == held
