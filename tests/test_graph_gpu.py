"""The decode graph on a real GPU: properties that the substitute of test_patches.py does not have."""

from __future__ import annotations

import functools
import gc
import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import every_model
import fake_graph
import models
import pytest
import torch
from models import FAMILIES, PADDINGS, chat, family, longrope, message, prompts, tiny

import hf_fastattn
from hf_fastattn.caches import PreallocatedCache, layers
from hf_fastattn.patches.calls import forwards
from hf_fastattn.patches.graphs import cuda_graph, policy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

NEW = 24
# 20,000 decode steps of a tiny model take about a minute.
SOAK_STEPS = 20_000
generate = functools.partial(models.generate, max_new_tokens=NEW)


@pytest.fixture(autouse=True)
def steps(monkeypatch):
    fake_graph.only_steps(monkeypatch)


@pytest.fixture
def llama():
    return tiny("llama", "lean", device="cuda")


def same_as_eager(model, inputs, calls=2, patched=None, **options):
    """The patch, after calls of generate() that all give the tokens of eager attention. patched: options of these calls alone."""
    model.set_attn_implementation("eager")
    expected = generate(model, inputs, **options)
    with hf_fastattn.patch(model) as patch:
        for _ in range(calls):
            assert torch.equal(generate(model, inputs, **options, **patched or {}), expected)
    return patch


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_captured_tokens_equal_uncaptured_and_eager(name, padding):
    model, inputs = family(name, "cuda"), prompts(padding, "cuda")
    patch = same_as_eager(model, inputs, calls=3)
    tokens = generate(model, inputs)
    model.set_attn_implementation("lean")
    assert torch.equal(generate(model, inputs), tokens)
    if name == "gpt_oss" and patch.reasons:
        pytest.skip(f"its experts cannot be captured here: {patch.reasons}")
    assert patch.captures == 1 and patch.replays == 3 * (NEW - 1) - 1, patch


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 5}], ids=["one token", "several"])
@pytest.mark.parametrize("name", ["phi3", "llama"])
def test_frequencies_that_change_with_the_length(name, options):
    inputs = prompts("no_padding", "cuda", rows=1, length=30)
    inputs["input_ids"][:, 15:] = inputs["input_ids"][:, :15]
    patch = same_as_eager(longrope(name, 40, "cuda"), inputs, **options)
    assert patch.captures and not patch.reasons


def test_sparse_gates_are_captured():
    model = every_model.named("Gemma3nForCausalLM", "gemma3n", "causal")
    models.draw_weights(model)
    assert max(layer.mlp.activation_sparsity for layer in model.model.layers) > 0
    ids = torch.randint(8, 100, (2, 20), generator=torch.Generator().manual_seed(0)).cuda()
    patch = same_as_eager(model.cuda(), {"input_ids": ids}, suppress_tokens=[*every_model.SPECIAL])
    assert patch.captures == 1 and not patch.reasons


@pytest.mark.parametrize("padding", ["no_padding", "left_padding"])
@pytest.mark.parametrize("mode", ["beams", "lookup", "assistant"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral_window_below_prompt", "gemma2"])
def test_forwards_that_call_the_model_directly(name, mode, padding):
    model, inputs = family(name, "cuda"), prompts(padding, "cuda", rows=2 if mode == "beams" else 1)
    assistant = tiny("llama", num_hidden_layers=1, device="cuda")
    assistant.generation_config.assistant_confidence_threshold = 0.0
    options = {"beams": {"num_beams": 3}, "lookup": {"prompt_lookup_num_tokens": 9, "max_matching_ngram_size": 1}}
    with hf_fastattn.patch(assistant) as drafts:
        patched = {"assistant_model": assistant} if mode == "assistant" else None
        patch = same_as_eager(model, inputs, calls=3, patched=patched, **options.get(mode, {}))
        assert patch.captures and patch.replays > 2 * patch.captures and not patch.reasons and not patch.uncaptured
        assert mode != "assistant" or (drafts.captures and not drafts.uncaptured)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_messages_after_a_cached_text(name, monkeypatch):
    monkeypatch.undo()
    model = family(name, "cuda")
    ids, mask = prompts("left_padding", "cuda", rows=2).values()
    messages = [ids, *(message(tokens, 2).cuda() for tokens in (5, 7, 40, 6, 33, 8, 50))]
    model.set_attn_implementation("eager")
    expected = chat(model, messages, mask, max_new_tokens=4)
    with hf_fastattn.patch(model) as patch:
        assert all(map(torch.equal, chat(model, messages, mask, max_new_tokens=4), expected))
        assert patch.captures >= 3 and not patch.uncaptured


@pytest.mark.parametrize("name, padding", [("llama", "no_padding"), ("llama", "left_padding"), ("qwen2", "holes")])
def test_prompts_and_messages(name, padding, monkeypatch):
    monkeypatch.undo()
    model = family(name, "cuda")
    model.set_attn_implementation("lean")
    texts = [prompts(padding, "cuda", rows=2, length=length) for length in (128, 70, 90, 128, 101)]
    expected = [generate(model, text) for text in texts]
    with hf_fastattn.patch(model) as patch:
        for text, want in zip(texts, expected, strict=True):
            assert torch.equal(generate(model, text), want)
        # The graph of the prompts is captured after the first reply, if there is time, or before the third first token.
        assert patch.captures == 2 and 0 <= patch.replays - (3 + 5 * (NEW - 1) - 1) <= 1 and not patch.reasons


@pytest.mark.parametrize("rows", [1, 3])  # one row: its linear layers run our kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["lean", "split_kv", "fa2"])
def test_every_backend_is_captured(llama, backend, dtype, rows):
    llama.to(dtype)
    inputs = prompts("left_padding", "cuda", rows=rows)
    llama.set_attn_implementation(backend)
    expected = generate(llama, inputs, output_scores=True, return_dict_in_generate=True)
    with hf_fastattn.patch(llama, backend) as patch:
        got = generate(llama, inputs, output_scores=True, return_dict_in_generate=True)
        assert patch.captures == 1
    # Up to the first token that rounding changes, the scores are equal up to rounding.
    same = int((got.sequences == expected.sequences).all(0).cumprod(0).sum()) - inputs["input_ids"].shape[1]
    assert same > 0
    for a, b in zip(got.scores[:same], expected.scores[:same], strict=True):
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.2)


def test_sampling_draws_the_same_tokens_and_graphs_have_a_size(llama):
    inputs = prompts("no_padding", "cuda")
    options = {"do_sample": True, "top_p": 0.9, "num_return_sequences": 2}
    expected = generate(llama, inputs, **options)
    with hf_fastattn.patch(llama) as patch:
        assert torch.equal(generate(llama, inputs, **options), expected) and patch.captures == 1
        assert 0 < patch.graph_bytes < 1 << 30 and "MB" in str(patch)


def test_a_step_neither_syncs_nor_allocates(llama, monkeypatch):
    """torch's sync debug mode raises on a synchronisation. After the capture a step only allocates its logits."""
    step, allocated = forwards.Forwards.__call__, []

    def watched(self, **inputs):
        if self.graphs.captures == 0:
            return step(self, **inputs)
        torch.cuda.set_sync_debug_mode("error")
        before = torch.cuda.memory_allocated()
        try:
            out = step(self, **inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        allocated.append(torch.cuda.memory_allocated() - before)
        return out

    monkeypatch.setattr(forwards.Forwards, "__call__", watched)
    for padding in PADDINGS:
        with hf_fastattn.patch(llama):
            generate(llama, prompts(padding, "cuda"))
    assert len(allocated) >= 3 * (NEW - 4) and max(allocated) <= 1 << 16


def test_a_sliding_window_moves_between_replays(monkeypatch):
    monkeypatch.setattr(layers, "KEEP", 4)
    monkeypatch.setattr(layers, "SLACK", 8)
    for padding in ("no_padding", "left_padding"):
        inputs = prompts(padding, "cuda", length=24)
        assert same_as_eager(family("mistral_window_below_prompt", "cuda"), inputs, calls=1, max_new_tokens=80).captures == 1


def test_growth_in_the_middle_of_generation(llama):
    inputs = prompts("left_padding", "cuda")
    expected = generate(llama, inputs, max_new_tokens=300)
    with hf_fastattn.patch(llama) as patch:
        cache = hf_fastattn.PreallocatedCache(llama)
        cache.reserve = lambda tokens: None
        assert torch.equal(generate(llama, inputs, max_new_tokens=300, past_key_values=cache), expected)
        assert patch.captures == 2


def test_streams_and_threads(llama):
    """Graphs share memory: replays from several streams must not overlap."""
    inputs = {rows: prompts("left_padding", "cuda", rows=rows) for rows in (1, 2, 3)}
    expected = {rows: generate(llama, inputs[rows], max_new_tokens=100) for rows in inputs}
    with hf_fastattn.patch(llama) as patch:
        for rows in inputs:
            generate(llama, inputs[rows], max_new_tokens=4)
        torch.cuda.synchronize()

        def work(rows):
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(5):
                    assert torch.equal(generate(llama, inputs[rows], max_new_tokens=100), expected[rows]), rows

        with ThreadPoolExecutor() as pool:
            list(pool.map(work, inputs))  # which raises what a thread has raised
        assert patch.captures == 3


def test_a_sync_in_the_model_falls_back_and_the_gpu_stays_usable(llama, monkeypatch):
    inputs = prompts("no_padding", "cuda")
    expected = generate(llama, inputs)
    forward = llama.model.norm.forward
    monkeypatch.setattr(llama.model.norm, "forward", lambda x: forward(x) if x.float().sum().item() else x)
    with hf_fastattn.patch(llama) as patch:
        with pytest.warns(UserWarning, match="its code reads a value on the host, in "):
            assert torch.equal(generate(llama, inputs), expected)
        assert patch.captures == 0
        # A capture that fails for a reason that the rehearsal does not have.
        monkeypatch.setattr(cuda_graph.CudaGraph, "rehearse", lambda self, body: body())
        llama.model.norm.weight = torch.nn.Parameter(llama.model.norm.weight.detach().clone(), requires_grad=False)
        stream = torch.cuda.current_stream()
        assert torch.equal(generate(llama, inputs), expected) and patch.captures == 0
        assert torch.cuda.current_stream() == stream  # torch leaves that of a failed capture
        generate(llama, inputs, do_sample=True)
        monkeypatch.undo()
        for _ in range(2):
            assert torch.equal(generate(llama, inputs), expected)
        assert patch.captures in (1, 2)  # of prompts too, if there is time after a reply


def test_a_capture_keeps_the_memory_that_torch_holds(monkeypatch):
    """Without it the next forward from Python waits until the driver has given it all of its memory again."""
    held = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)
    del held
    for short, kept in ((0, True), (1 << 60, False)):
        monkeypatch.setattr(cuda_graph, "SHORT", short)
        before = torch.cuda.memory_reserved()
        cuda_graph.CudaGraph(torch.device("cuda", 0), {}).capture(lambda: torch.zeros(4, device="cuda"))
        assert (torch.cuda.memory_reserved() >= before) == kept


def test_undo_frees_the_memory(llama):
    generate(llama, prompts("no_padding", "cuda"))
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        with hf_fastattn.patch(llama):
            generate(llama, prompts("no_padding", "cuda"), max_new_tokens=200)
        gc.collect()
    assert torch.cuda.memory_allocated() - before < 1 << 26  # cuBLAS keeps a workspace per stream


def test_a_cache_that_does_not_fit_says_how_much_is_missing(llama):
    rows = 1 << 12
    with hf_fastattn.patch(llama), pytest.raises(MemoryError, match=r"needs \d+ bytes .* are free"):
        llama.generate(torch.ones(rows, 4, dtype=torch.long, device="cuda"), max_new_tokens=1_000_000)


def equal_but_for_ties(got, expected) -> bool:
    """Whether the tokens of each row are the expected ones, up to a step whose two best logits differ by less than rounding."""
    tokens = expected.sequences[:, -got.shape[1] :]
    for row in range(got.shape[0]):
        for step in (got[row] != tokens[row]).nonzero().flatten().tolist()[:1]:
            logits = expected.logits[step][row]
            if abs(float(logits[got[row, step]] - logits[tokens[row, step]])) > 1e-3:
                return False
    return True


def test_a_saved_prompt_is_continued(llama, tmp_path):
    inputs = prompts("no_padding", "cuda", rows=1)
    with hf_fastattn.patch(llama):
        whole = generate(llama, inputs)
        cache = hf_fastattn.PreallocatedCache(llama)
        head = {"input_ids": inputs["input_ids"][:, :-1]}
        with torch.no_grad():
            llama(**head, past_key_values=cache)
        cache.save(tmp_path / "prompt.safetensors", llama)
        loaded = hf_fastattn.PreallocatedCache.load(tmp_path / "prompt.safetensors", llama)
        assert torch.equal(generate(llama, inputs, past_key_values=loaded), whole)
        assert loaded.layers[0].keys.is_cuda


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_gpus
@pytest.mark.parametrize("name", ["llama", "mistral_window_below_prompt"])
def test_models_beside_the_current_gpu(name):
    """cuda:0 stays the current device; the graphs and kernels of each GPU run on the device of their tensors."""
    model_type, own = FAMILIES[name]
    first, second = (tiny(model_type, device=device, **own) for device in ("cuda:0", "cuda:1"))
    inputs = prompts("left_padding", "cpu")
    expected = generate(first, {key: value.to("cuda:0") for key, value in inputs.items()}).cpu()
    with hf_fastattn.patch(first) as one, hf_fastattn.patch(second) as other:
        for _ in range(2):
            for model in (second, first):
                there = {key: value.to(model.device) for key, value in inputs.items()}
                assert torch.equal(generate(model, there).cpu(), expected)
        assert one.captures == other.captures == 1 and one.replays == other.replays == 2 * (NEW - 1) - 1
    assert torch.cuda.current_device() == 0


@two_gpus
def test_a_model_over_two_gpus():
    from accelerate import dispatch_model

    inputs = prompts("left_padding", "cuda:0")
    expected = generate(tiny("llama", "eager", device="cuda:0"), inputs)
    model = tiny("llama", "lean")
    first = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.rotary_emb"), 0)
    model = dispatch_model(model, first | dict.fromkeys(("model.layers.1", "model.norm", "lm_head"), 1))
    assert torch.equal(generate(model, inputs), expected)
    with hf_fastattn.patch(model) as patch, pytest.warns(UserWarning, match="uncaptured"):
        assert torch.equal(generate(model, inputs), expected)
        assert patch.captures == 0 and patch.reasons


def test_soak():
    """Changing batches, lengths, prompts, adapters and weights: no wrong token, no leak, few captures."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    both = []
    for _ in range(2):
        torch.manual_seed(5)
        both.append(peft.get_peft_model(tiny("llama", "lean", device="cuda"), config).eval())
    plain, model = both
    draw = random.Random(0)
    steps, memory = 0, []
    with hf_fastattn.patch(model) as patch:
        for call in itertools.count():
            rows, length, new = draw.choice((1, 2, 3)), draw.randint(26, 200), draw.randint(5, 200)
            inputs = prompts(draw.choice(PADDINGS), "cuda", rows=rows, length=length)
            inputs["input_ids"] = (inputs["input_ids"] + call) % 126 + 2
            if call % 7 == 3:
                with torch.no_grad():
                    for each in (plain, model):
                        each.get_base_model().lm_head.weight.mul_(-1)
            adapted = call % 3 != 1
            with plain.disable_adapter() if not adapted else torch.no_grad():
                check = call % 4 == 0
                options = {"max_new_tokens": new, "output_logits": True, "return_dict_in_generate": True}
                expected = generate(plain, inputs, **options) if check else None
            with model.disable_adapter() if not adapted else torch.no_grad():
                got = generate(model, inputs, max_new_tokens=new)
            if check:
                assert equal_but_for_ties(got[:, length:], expected), f"call {call}: {rows} x {length} + {new}"
            steps += new - 1
            del got, expected, inputs
            if call % 20 == 0:
                gc.collect()
                torch.cuda.synchronize()
                memory.append(torch.cuda.memory_allocated())
            if steps >= SOAK_STEPS:
                break
        assert patch.captures < 60 and patch.replays > 0.98 * (steps - 2 * patch.captures) and not patch.reasons, patch
    late = memory[len(memory) // 2 :]
    assert max(late) - min(late) < 1 << 22, memory


def test_a_graph_has_its_own_cublas_workspace():
    """torch.compile frees the workspaces of all streams; a graph must not use one of them."""
    inputs = {"input_ids": torch.randint(3, 100, (8, 16), device="cuda")}

    def model():
        sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 16}
        return tiny("llama", "lean", device="cuda", **sizes).to(torch.bfloat16)

    def of_graphs():
        return {segment["address"] for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] != (0, 0)}

    first = model()
    with hf_fastattn.patch(first):  # its graph is the first on the capturing stream, and its pool is freed with it
        generate(first, inputs)
    second = model()
    with hf_fastattn.patch(second) as patch:
        # Only the logits: a kept result keeps its cache, and the next call then has another cache and another graph.
        expected = generate(second, inputs, output_logits=True, return_dict_in_generate=True).logits
        gc.collect()
        torch.cuda.empty_cache()
        before = of_graphs()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        assert before and of_graphs() == before
        again = generate(second, inputs, output_logits=True, return_dict_in_generate=True).logits
        assert all(map(torch.equal, again, expected))
        assert patch.captures == 1 and patch.uncaptured == 0


class _Scaled(torch.nn.Module):
    def __init__(self, inner, by):
        super().__init__()
        self.inner, self.by = inner, by

    def forward(self, x):
        return self.inner(x) * self.by


def test_a_number_on_the_host_is_a_part_of_the_launch(llama):
    inputs = prompts("no_padding", "cuda")
    scaled = llama.model.layers[0].mlp = _Scaled(llama.model.layers[0].mlp, torch.tensor(1.0)).eval()
    expected = {}
    for by in (1.0, 3.0):
        scaled.by.fill_(by)
        expected[by] = generate(llama, inputs)
    assert not torch.equal(expected[1.0], expected[3.0])
    with hf_fastattn.patch(llama, keep_graphs=True) as patch:  # the module is code of the user
        for by in (1.0, 3.0, 1.0):
            scaled.by.fill_(by)
            assert torch.equal(generate(llama, inputs), expected[by])
        assert (patch.captures, patch.reasons) == (2, [])


@pytest.mark.parametrize("of_attention", [False, True])
def test_dropout_in_training_mode_differs_in_every_replay(llama, of_attention):
    if of_attention:
        for layer in llama.model.layers:
            layer.self_attn.attention_dropout = 0.5
    else:
        llama.model.norm = torch.nn.Sequential(llama.model.norm, torch.nn.Dropout(0.5))
    llama.train()
    inputs = prompts("no_padding", "cuda", rows=1)
    options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 40}
    with hf_fastattn.patch(llama) as patch:
        found = generate(llama, inputs, **options)
        assert (patch.captures, patch.reasons) == (1, [])
    assert len(torch.unique(torch.cat(found.logits).sum(1))) > 30


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_in_parts(name, monkeypatch):
    """Of any length, by graphs that others have left: the launches of a layer from Python seem to take half a second."""
    monkeypatch.undo()  # prompts have graphs
    for field, value in (("LAUNCHES", (0.5, 0.5)), ("SHARE", 1e9), ("REPLAY", 1e-2), ("NEAREST", (1, 16, 64)), ("MOST", 64)):
        monkeypatch.setattr(policy, field, value)
    monkeypatch.setattr(policy, "SIZES", (1, 16, 64))
    model, lengths = family(name, "cuda"), (100, 30, 130, 65, 200, 128)
    texts = [prompts("no_padding", "cuda", rows=1, length=tokens) for tokens in lengths]
    model.set_attn_implementation("eager")
    expected = [generate(model, text, max_new_tokens=4) for text in texts]
    with hf_fastattn.patch(model) as patch:
        for _ in range(2):
            before = patch.replays, patch.captures
            found = [generate(model, text, max_new_tokens=4) for text in texts]
            assert all(map(torch.equal, found, expected))
        assert patch.captures == before[1] and not patch.reasons
        parts = sum(-(-tokens // 64) for tokens in lengths)
        assert patch.replays - before[0] == parts + 3 * len(lengths), patch


def test_buffers_of_a_new_cache_are_one_allocation(llama):
    allocations = lambda: torch.cuda.memory_stats()["num_device_alloc"]  # noqa: E731
    with hf_fastattn.patch(llama) as patch:
        found = []
        for tokens in (20_000, 200_000):  # the first call loads kernels
            torch.cuda.empty_cache()
            before, cache = allocations(), PreallocatedCache(llama, tokens)
            generate(llama, prompts("no_padding", "cuda"), past_key_values=cache, max_new_tokens=1)
            found.append(allocations() - before)
        sizes = {buffer.nbytes for layer in cache.storage.layers for buffer in layer.buffers}
    assert min(sizes) > 20 << 20 and found[1] <= 2 < len(cache.storage.layers) * 2 and not patch.reasons
