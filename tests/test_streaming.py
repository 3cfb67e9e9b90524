"""Streaming: logits for any chunks, compared with a reference in fp64 that rotates every kept key again at every token."""

import copy
import sys
from itertools import accumulate, pairwise, product

import fake_graph
import models
import pytest
import torch
from cases import pairs, slow_unless
from conftest import INTERPRETED
from hypothesis import given
from hypothesis import strategies as st
from transformers import AttentionInterface, DynamicCache

import hf_fastattn
from hf_fastattn import RollingCache, hf, streaming
from hf_fastattn.attention.step import Step
from hf_fastattn.caches.ring import Ring
from hf_fastattn.kernels import spans as span_layout
from hf_fastattn.kernels.decode import ring
from hf_fastattn.kernels.decode.append import append
from hf_fastattn.kernels.decode.rotate import BLOCK_H, rotate
from hf_fastattn.kernels.spec import KV

WINDOW, SINKS = 9, 3
LENGTH = 5 * WINDOW + SINKS + 4 if not INTERPRETED else WINDOW + SINKS + 18
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 1e4},
}
FAMILIES = {
    "llama": ("llama", {}),
    **{f"llama_{name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_own_window": ("mistral", {"sliding_window": WINDOW + SINKS}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "gpt_neox_partial": ("gpt_neox", {"num_key_value_heads": 4}),
    "stablelm_partial": ("stablelm", {}),
    "cohere_interleaved": ("cohere", {"eos_token_id": 1}),
    "glm_interleaved_partial": ("glm", {"head_dim": 16}),
    "gpt_oss_sink_logits": ("gpt_oss", {**models.FAMILIES["gpt_oss"][1], "sliding_window": 64}),
}
CLAMPED = {"opt": ("opt", {**models.FAMILIES["opt"][1], "max_position_embeddings": 20})}
if INTERPRETED:
    FAMILIES = {name: FAMILIES[name] for name in ("llama", "glm_interleaved_partial")}


# Interpreted kernels take milliseconds per tile: the other tests run only with the reference, or on a GPU.
OF_KERNELS = ("logits_are_those_of_the_reference", "memory_is_constant", "rotation_is", "ring_step", "append_writes")


@pytest.fixture(autouse=True)
def only_kernels_are_interpreted(request):
    if INTERPRETED and not request.node.originalname.removeprefix("test_").startswith(OF_KERNELS):
        pytest.skip("the same with the reference and with an interpreted kernel")


def make(name: str, device) -> torch.nn.Module:
    model_type, own = {**FAMILIES, **CLAMPED}[name]
    return models.tiny(model_type, device=device, **own)


def tokens(rows: int, length: int, device) -> torch.Tensor:
    return torch.randint(2, models.VOCAB, (rows, length), generator=torch.Generator().manual_seed(3)).to(device)


# The reference. Its model gets one token at a time, always at position 0, so that nothing is rotated. At each token the visible
# tokens are rotated by their positions among these.


class Reference:
    def __init__(self, model, dtype: torch.dtype = torch.float64, window: int = WINDOW, sinks: int = SINKS):
        self.model = copy.deepcopy(model).to(dtype)
        self.model.set_attn_implementation("test_streaming_reference")
        if hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")  # the others do not support fp64
        self.window, self.sinks = window, sinks
        self.source = sys.modules[type(next(m for m in self.model.modules() if hf.is_attention(m))).__module__]
        self.apply_rope = getattr(self.source, "apply_rotary_pos_emb", None)
        self.rotary = next((m for m in self.model.modules() if hasattr(m, "inv_freq")), None)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """(tokens, vocabulary) of one row `ids` (tokens,)."""
        global _reference
        _reference = self
        self.kept: dict[int, tuple] = {}
        limit = self.model.config.max_position_embeddings
        out = []
        for step, token in enumerate(ids):
            at = 0 if self.apply_rope is not None else min(step, limit - 1)
            position = torch.tensor([[at]], device=ids.device)
            mask = torch.zeros(1, 1, 1, 1, dtype=self.model.dtype, device=ids.device)  # so that no mask function runs
            with torch.no_grad():
                result = self.model(token.view(1, 1), position_ids=position, attention_mask=mask, use_cache=False)
            out.append(result.logits[0, -1])
        return torch.stack(out)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.apply_rope is None:
            return x
        cos, sin = self.rotary(x, positions[None])
        scale = self.rotary.attention_scaling  # x already includes it
        cos, sin = cos / scale, sin / scale
        dims = 2 * len(self.rotary.inv_freq)
        return torch.cat([self.apply_rope(x[..., :dims], x[..., :dims], cos, sin)[0], x[..., dims:]], -1)

    def attend(self, module, q, k, v, scaling, s_aux=None):
        old = self.kept.get(module.layer_idx)
        k, v = (k, v) if old is None else (torch.cat([old[0], k], 2), torch.cat([old[1], v], 2))
        self.kept[module.layer_idx] = (k, v)
        count = k.shape[2]
        seen = [j for j in range(count) if j < self.sinks or j > count - 1 - self.window]
        positions = torch.arange(len(seen), device=q.device)
        group = q.shape[1] // k.shape[1]
        keys = self.rotate(k[:, :, seen], positions).repeat_interleave(group, 1)
        query = self.rotate(q, positions[-1:])
        scores = query @ keys.transpose(2, 3) * scaling
        if s_aux is not None:
            scores = torch.cat([scores, s_aux.to(scores.dtype).view(1, -1, 1, 1)], -1)
        weights = torch.softmax(scores, -1)[..., : len(seen)]
        return (weights @ v[:, :, seen].repeat_interleave(group, 1)).transpose(1, 2)


_reference: Reference | None = None  # the current one; some models do not pass arguments on


def _attend_by_reference(module, query, key, value, attention_mask, scaling=None, s_aux=None, **kwargs):
    return _reference.attend(module, query, key, value, scaling, s_aux), None


AttentionInterface.register("test_streaming_reference", _attend_by_reference)


def assert_logits(got: torch.Tensor, ids: torch.Tensor, model, **settings) -> None:
    """(tokens, vocabulary) in fp32 against the reference in fp64: at most 4 times the error of the reference in fp32.

    Rotations at position p and at a position within the window round differently, also in the model's own code; at these lengths
    by a few units of fp32.
    """
    expected = Reference(model, **settings).logits(ids)
    peer = Reference(model, torch.float32, **settings).logits(ids)
    allowed = 4 * (peer.double() - expected).abs().max() + 16 * torch.finfo(torch.float32).eps * expected.abs().max()
    error = (got.double() - expected).abs().max()
    assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"


def feed(model, ids: torch.Tensor, sizes, mask=None, cache=None) -> tuple[torch.Tensor, RollingCache]:
    """Logits of every token of ids (rows, tokens), given to a patched model in chunks of these sizes."""
    cache = RollingCache(model) if cache is None else cache
    out, done = [], 0
    for size in sizes:
        part = ids[:, done : done + size]
        done += part.shape[1]
        seen = None if mask is None else mask[:, :done]
        with torch.no_grad():
            out.append(model(part, attention_mask=seen, past_key_values=cache).logits)
    assert done == ids.shape[1]
    return torch.cat(out, 1), cache


def patched(model, **options):
    return hf_fastattn.patch(model, "streaming", **{"window": WINDOW, "sinks": SINKS, "graph": False, **options})


@pytest.mark.parametrize("name", [*FAMILIES, *CLAMPED])
def test_logits_are_those_of_the_reference(name, device):
    model = make(name, device)
    ids = tokens(1, LENGTH, device)
    with patched(model, clamp_positions=name in CLAMPED), hf_fastattn.count_calls() as calls:
        sizes = [WINDOW + SINKS + 2, *[1] * 5, 7]
        got, cache = feed(model, ids, [*sizes, *[1] * (LENGTH - sum(sizes))])
    calls_of_layers = model.config.num_hidden_layers * (LENGTH - sum(sizes) + len(sizes))
    assert sum(calls.values()) == calls_of_layers and set(calls) <= {"streaming.prefill", "streaming.decode"}
    assert cache.get_seq_length() == LENGTH and cache.layers[0].keys.shape[2] == WINDOW + SINKS
    assert_logits(got[0], ids[0], model)


def test_the_reference_depends_on_sinks_windows_and_their_rotation(llama, expected, device):
    """Otherwise the tests in this file would prove nothing."""
    ids, right = tokens(1, LENGTH, device), expected[-1]
    for wrong in (Reference(llama, sinks=SINKS - 1), Reference(llama, window=WINDOW - 1)):
        assert (wrong.logits(ids[0])[-1] - right).abs().max() > 0.1
    with patched(llama), pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "rotation", lambda *args: (None, False))  # sinks at their original positions
        got, _ = feed(llama, ids, [LENGTH])
    assert (got[0, -1] - right).abs().max() > 0.1


@pytest.fixture(scope="module")
def llama(device):
    return make("llama", device)


@pytest.fixture(scope="module")
def expected(llama, device):
    return Reference(llama).logits(tokens(1, LENGTH, device)[0])


FIXED_SPLITS = [
    [1] * LENGTH,
    [LENGTH],
    [WINDOW - 1] + [1] * (LENGTH - WINDOW + 1),
    [WINDOW + SINKS] + [1] * (LENGTH - WINDOW - SINKS),
    [WINDOW + SINKS + 1, *[1] * 3, LENGTH - WINDOW - SINKS - 4],
    [SINKS - 1, 2, LENGTH - SINKS - 1],
]


def test_any_split_gives_the_same_logits(llama, expected, device):
    ids = tokens(1, LENGTH, device)

    def check(sizes):
        with patched(llama):
            got, _ = feed(llama, ids, sizes)
        assert (got[0].double() - expected).abs().max() < 1e-3 * expected.abs().max()

    @given(st.lists(st.integers(1, 2 * WINDOW), min_size=LENGTH, max_size=LENGTH))
    def check_random(sizes):
        ends = [min(end, LENGTH) for end in accumulate(sizes)]
        check([b - a for a, b in pairwise([0, *ends]) if b > a])

    for sizes in FIXED_SPLITS:
        check(sizes)
    check_random()


@pytest.mark.parametrize("sinks, window", [(0, 6), (1, 1), (20, 4), (4, 200)])
def test_other_settings(llama, sinks, window, device):
    ids = tokens(1, LENGTH, device)
    with patched(llama, sinks=sinks, window=window):
        got, _ = feed(llama, ids, [7, *[1] * 4, LENGTH - 11])
    assert_logits(got[0], ids[0], llama, sinks=sinks, window=window)


# Left padding: each row has its own sinks and slots.

PADS = (0, 5, 17)


def padded(device):
    ids = tokens(3, LENGTH, device)
    mask = torch.ones_like(ids)
    for row, pads in enumerate(PADS):
        mask[row, :pads] = 0
    return ids.masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize("sizes", [[LENGTH], [3, 8, *[1] * (LENGTH - 11)], [1] * LENGTH], ids=["whole", "chunks", "ones"])
def test_left_padding(llama, sizes, device):
    ids, mask = padded(device)
    with patched(llama):
        got, cache = feed(llama, ids, sizes, mask)
        assert cache.storage.counts.tolist() == [LENGTH - pads for pads in PADS]
        for row, pads in enumerate(PADS):
            alone, _ = feed(llama, ids[row : row + 1, pads:], [LENGTH - pads])
            assert torch.allclose(got[row, pads:], alone[0], atol=1e-3 * float(alone.abs().max()))
    assert_logits(got[1, PADS[1] :], ids[1, PADS[1] :], llama)


def greedy(reference: Reference, ids: torch.Tensor, count: int) -> list[int]:
    for _ in range(count):
        ids = torch.cat([ids, reference.logits(ids)[-1:].argmax(-1)])
    return ids[-count:].tolist()


@pytest.mark.parametrize("length", [WINDOW - 2, WINDOW, WINDOW + SINKS, 3 * WINDOW])
def test_generate_gives_the_tokens_of_the_reference(llama, length, device):
    ids = tokens(1, length, device)
    with patched(llama):
        out = llama.generate(ids, max_new_tokens=15, do_sample=False)
    assert out[0, length:].tolist() == greedy(Reference(llama), ids[0], 15)


def test_with_transformers_cache_masks_are_exact_and_a_warning_says_that_memory_grows(device):
    model = make("llama", device)
    ids, mask = padded(device)
    model.set_attn_implementation("streaming")
    with pytest.raises(ValueError, match=r"needs a window.*patch\(model, \"streaming\", window=4096"):
        model(ids)
    model.config.streaming_window, model.config.streaming_sinks = WINDOW, SINKS
    with pytest.raises(ValueError, match=r"must know how LlamaAttention rotates.*with cache=None and graph=False"):
        model(ids)
    del model.config.streaming_window, model.config.streaming_sinks
    model.set_attn_implementation("eager")
    hf_fastattn.attention.refuse.warn_once.cache_clear()
    cache = DynamicCache(config=model.config)
    with patched(model, cache=None), torch.no_grad(), pytest.warns(UserWarning, match="grows with the text.*patch"):
        first = model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
        second = model(ids[:, 20:], attention_mask=mask, past_key_values=cache)
    got = torch.cat([first.logits, second.logits], 1)
    for row, pads in enumerate(PADS[:2]):
        assert_logits(got[row, pads:], ids[row, pads:], model)


def test_stock_static_cache_streams_too(llama, device):
    ids = tokens(1, 20, device)
    with patched(llama):
        expected = llama.generate(ids, max_new_tokens=12, do_sample=False)
    with patched(llama, cache=None):
        options = {"cache_implementation": "static", "disable_compile": True}
        assert llama.generate(ids, max_new_tokens=12, do_sample=False, **options).tolist() == expected.tolist()


# Operations of generate() on a cache.


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=["beams", "samples"])
def test_rows_are_reordered_and_repeated(llama, options, device):
    """Compared with a cache that keeps all tokens and a mask."""
    ids, mask = padded(device)
    results = []
    for cache in ("rolling", None):
        with patched(llama, cache=cache):
            torch.manual_seed(0)
            results.append(llama.generate(ids, attention_mask=mask, max_new_tokens=15, **options).tolist())
    assert results[0] == results[1]


def test_second_turn_and_reset(llama, expected, device):
    ids = tokens(1, LENGTH, device)
    with patched(llama) as patch:
        cache = RollingCache(llama)
        got, cache = feed(llama, ids, [20, LENGTH - 20], cache=cache)
        cache.reset()
        again, cache = feed(llama, ids, [20, LENGTH - 20], cache=cache)
        assert torch.equal(got, again)
        first = llama.generate(ids[:, :20], max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
        turn = torch.cat([first.sequences, ids[:, 20:]], 1)
        options = {"attention_mask": torch.ones_like(turn), "max_new_tokens": 8, "do_sample": False}
        second = llama.generate(turn, past_key_values=first.past_key_values, **options)
        assert second.tolist() == llama.generate(turn, **options).tolist()
        assert "rolling, 3 sinks and a window of 9" in str(patch)


@pytest.mark.parametrize(
    "rows, repeats, mode",
    [([2, 0], 2, torch.no_grad), ([1, 0, 2], 1, torch.inference_mode), ([2, 0], 1, torch.inference_mode)],
    ids=["repeated", "reordered in inference mode", "fewer in inference mode"],
)
def test_rows_selected_and_repeated_in_a_copy(llama, device, rows, repeats, mode):
    """And written outside of inference mode."""
    ids, mask = padded(device)
    with patched(llama), torch.no_grad():
        _, cache = feed(llama, ids[:, :28], [28], mask[:, :28])
        twin = copy.deepcopy(cache)
        whole = llama(ids[:, 28:29], past_key_values=cache).logits
        with mode():
            twin.batch_select_indices(torch.tensor(rows))
            if repeats > 1:
                twin.batch_repeat_interleave(repeats)
        rows = [row for row in rows for _ in range(repeats)]
        part = llama(ids[rows, 28:29], past_key_values=twin).logits
        assert torch.allclose(part, whole[rows], atol=1e-4)


def test_crop_works_until_a_token_was_dropped(llama, device):
    ids = tokens(1, WINDOW + SINKS, device)
    with patched(llama), torch.no_grad():
        whole, cache = feed(llama, ids, [5, 4, WINDOW + SINKS - 9])
        cache.crop(-3)
        assert cache.get_seq_length() == WINDOW + SINKS - 3
        again = llama(ids[:, -3:], past_key_values=cache).logits
        assert torch.allclose(again, whole[:, -3:], atol=1e-4)
        llama(ids[:, :1], past_key_values=cache)
        for _ in range(2):
            with pytest.raises(ValueError, match="in its window of 9 again if 2 of 13 tokens were removed"):
                cache.crop(-2)
            cache.crop(-1)
            with pytest.raises(ValueError, match="if 1 of 12 tokens were removed"):
                cache.crop(-1)
            llama(ids[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match="read 13 tokens; 14 cannot"):
            cache.crop(-14)
        for left in (SINKS, 1, 0):  # tokens that no other has overwritten
            cache.crop(left - cache.get_seq_length())
            again = llama(ids[:, left : SINKS + 4], past_key_values=cache).logits
            assert torch.allclose(again, whole[:, left : SINKS + 4], atol=1e-4)
            cache.crop(-2)
            again = llama(ids[:, SINKS + 2 : SINKS + 4], past_key_values=cache).logits
            assert torch.allclose(again, whole[:, SINKS + 2 : SINKS + 4], atol=1e-4)
        with pytest.raises(ValueError, match="negative number"):
            cache.crop(2)


@pytest.mark.skipif(hf.CACHE == "past_key_values", reason="Transformers has one name for the cache")
def test_of_both_names_of_the_cache_the_present_one_counts(llama, device):
    ids = tokens(1, 5, device)
    with patched(llama), torch.no_grad():
        cache, other = RollingCache(llama), RollingCache(llama)
        for given in (None, other):
            with pytest.warns(FutureWarning):
                llama(ids, **{hf.CACHE: given, "past_key_values": cache})
            assert cache.get_seq_length() == 0
        assert other.get_seq_length() == 5
        llama(ids, **{hf.CACHE: cache})
        assert cache.get_seq_length() == 5


REMOVED = [[[WINDOW + SINKS - 1], [WINDOW + SINKS, 1], [9, 8, 1]], [[1, 1], [2], [1, 3], [WINDOW + 2]], [1, 3]]


@pytest.mark.parametrize("before, more, rows", slow_unless(pairs(*REMOVED)[::2].__contains__, product(*REMOVED)), ids=str)
def test_one_token_can_be_removed_after_others_were_dropped(llama, device, before, more, rows):
    """Later tokens do not see the one that it has overwritten."""
    seen, length = sum(before), sum(before + more)
    ids = tokens(rows, length, device)
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[1, :5] = mask[2, :8] = 0
    with patched(llama), torch.no_grad():
        expected, _ = feed(llama, ids, [*before, *more], mask)
        _, cache = feed(llama, ids[:, :seen], before, mask)
        for wrong in (5, 6):
            llama(torch.full_like(ids[:, :1], wrong), attention_mask=torch.ones_like(mask[:, : seen + 1]), past_key_values=cache)
            cache.crop(-1)
        for count in more:
            part = slice(seen, seen + count)
            got = llama(ids[:, part], attention_mask=mask[:, : part.stop], past_key_values=cache).logits
            assert torch.allclose(got, expected[:, part], atol=1e-4)
            seen += count


def test_memory_is_constant_and_a_token_is_one_write(llama, device):
    ids = tokens(1 if INTERPRETED else 2, LENGTH, device)
    with patched(llama), torch.no_grad():
        _, cache = feed(llama, ids[:, :20], [15, 5])
        buffers = [t for layer in cache.layers for t in (layer.keys, layer.values)]
        before, addresses = [t.clone() for t in buffers], [t.data_ptr() for t in buffers]
        llama(ids[:, 20:21], past_key_values=cache)
        slot = SINKS + (20 - SINKS) % WINDOW
        for old, new in zip(before, buffers, strict=True):
            changed = (old != new).any(-1).any(0).any(0).nonzero().flatten().tolist()
            assert changed == [slot]
        feed(llama, ids[:, 21:], [LENGTH - 21], cache=cache)
        assert addresses == [t.data_ptr() for layer in cache.layers for t in (layer.keys, layer.values)]


# The decode graph and torch.compile.


@pytest.fixture
def graphs(device, monkeypatch) -> None:
    """CUDA graphs on a GPU, otherwise the fake ones."""
    if device.type != "cuda":
        fake_graph.use(monkeypatch)


def test_decode_steps_are_captured(llama, device, graphs):
    """Rows with and without padding have separate graphs."""
    ids, mask = padded(device)
    batches = [{"input_ids": ids[:1]}, *({"input_ids": ids, "attention_mask": m} for m in (torch.ones_like(mask), mask))]
    options = {"max_new_tokens": 2 * WINDOW, "do_sample": False}
    with patched(llama):
        expected = [llama.generate(**inputs, **options).tolist() for inputs in batches]
    with patched(llama, graph=True) as patch:
        for i in (0, 0, 1, 2, 2, 1):
            before = patch.replays
            assert llama.generate(**batches[i], **options).tolist() == expected[i]
            assert patch.replays >= before + 2 * WINDOW - 3
        assert (patch.captures, patch.uncaptured) == (3, 0)


@pytest.mark.parametrize("graph", [False, True])
def test_a_prompt_read_token_by_token_keeps_its_padding(llama, graph, device, graphs):
    ids, mask = padded(device)
    options = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": WINDOW, "do_sample": False}
    with patched(llama, graph=graph):
        expected = llama.generate(**options).tolist()
        assert llama.generate(**options, prefill_chunk_size=1).tolist() == expected


@pytest.mark.parametrize("kind", ["ones", "ended", "four dimensions", "too short"])
def test_masks_that_a_loop_of_the_caller_passes_to_steps(llama, kind, device, graphs):
    ids = tokens(2, WINDOW, device)

    def loop(model, input_ids, **_):
        past_key_values = hf.cache_in(_)
        mask, kept = torch.ones_like(input_ids), []
        logits = model(input_ids=input_ids, attention_mask=mask, past_key_values=past_key_values).logits
        for step in range(6):
            new = mask.new_ones(2, 1)
            new[0] = 0 if kind == "ended" and step == 3 else 1  # the first row has ended for one step
            mask = torch.cat([mask, new], 1)
            given = {"four dimensions": mask[:, None, None].bool(), "too short": mask[:, -5:]}.get(kind, mask)
            position = torch.full((2, 1), mask.shape[1] - 1, device=device)
            inputs = {"input_ids": logits[:, -1:].argmax(-1), "attention_mask": given, "position_ids": position}
            logits = model(**inputs, past_key_values=past_key_values).logits
            kept.append(logits)
        return torch.cat(kept, 1)

    def run(graph):
        with patched(llama, graph=graph) as patch:
            try:
                llama.generate(ids, custom_generate=loop)
                return llama.generate(ids, custom_generate=loop), patch
            except ValueError as error:
                return str(error), patch

    (expected, _), (got, patch) = run(graph=False), run(graph=True)
    if kind in ("four dimensions", "too short"):
        assert "attention_mask" in expected and got == expected
    else:
        torch.testing.assert_close(got, expected)
        assert (patch.replays > 0, patch.uncaptured > 0) == (True, kind == "ended")


@pytest.mark.parametrize("forget", ["crop", "reset of the cache", "reset of a layer"])
def test_reset_forgets_the_padding(llama, forget, device):
    ids, mask = padded(device)
    with patched(llama), torch.no_grad():
        expected = llama(ids, attention_mask=mask, past_key_values=RollingCache(llama)).logits
        cache = RollingCache(llama)
        short = WINDOW - 1
        llama(ids[:, :short], attention_mask=torch.ones_like(mask[:, :short]), past_key_values=cache)
        if forget == "crop":
            cache.crop(-short)
        else:
            (cache if "cache" in forget else cache.layers[0]).reset()
        parts = [(0, short), (short, ids.shape[1])]
        got = [llama(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits for a, b in parts]
        got = torch.cat(got, 1)
    assert torch.allclose(got[mask.bool()], expected[mask.bool()], atol=1e-4)


def test_rows_are_uniform_until_one_has_padding(device):
    device = torch.zeros(1, device=device).device  # with an index, like the device of a model's tensors
    storage = Ring(1, streaming.Settings(window=7, sinks=3))
    begin = lambda q_len, pads=None: storage.begin(Step(storage), 2, q_len, pads, device)  # noqa: E731
    pads = torch.tensor([0, 1], device=device)
    for _ in range(2):
        assert begin(4).stride(0) == begin(1).stride(0) == begin(9).stride(0) == 0
        assert begin(1, pads).stride(0) == begin(1).stride(0) == begin(9).stride(0) == span_layout.WORDS
        storage.reset()


def test_a_step_that_cannot_be_captured_counts_once(llama, device, graphs):
    ids = tokens(1, 20, device)
    with patched(llama):
        expected = llama.generate(ids, max_new_tokens=10, do_sample=False)
    norm = llama.model.norm
    with patched(llama, graph=True) as patch, pytest.MonkeyPatch.context() as inner:
        inner.setattr(norm, "forward", lambda x: type(norm).forward(norm, x) if float(x.sum()) == x.sum() else x)
        with pytest.warns(UserWarning, match="runs uncaptured") as heard:
            assert llama.generate(ids, max_new_tokens=10, do_sample=False).tolist() == expected.tolist()
        assert {warning.filename for warning in heard if "runs uncaptured" in str(warning.message)} == {__file__}
        assert patch.captures == 0 and patch.uncaptured > 0


@pytest.mark.slow
def test_decode_step_compiles_with_fullgraph(llama, device):
    ids = tokens(1, LENGTH, device)
    with patched(llama), torch.no_grad():
        expected, _ = feed(llama, ids, [20, *[1] * (LENGTH - 20)])
        _, cache = feed(llama, ids[:, :20], [20])
        torch._dynamo.reset()
        step = torch.compile(llama, backend="aot_eager", fullgraph=True)
        for i in range(20, 26):
            with cache.on_device():
                logits = step(ids[:, i : i + 1], **{hf.CACHE: cache}, position_ids=torch.tensor([[i]], device=device)).logits
            cache.storage.advance()
            assert torch.allclose(logits[0, -1], expected[0, i], atol=1e-4)


# Rotation.


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [8, 5])
@pytest.mark.parametrize("start", [0, 40, 1_000_003, 4_000_037])
def test_rotation_is_the_models_own_at_the_nearer_position(interleaved, pairs, start, device):
    """Up to the rounding of two successive fp32 rotations, at any position."""
    generator = torch.Generator().manual_seed(0)
    inv_freq = (1.0 / 1e4 ** (torch.arange(pairs) / pairs)).to(device)
    plain = torch.randn(2, BLOCK_H + 3, 5, 20, generator=generator).to(device)

    def rotated(x, positions):  # like models, with angles in fp32
        angle = (positions[..., None].float() * inv_freq).double()[:, None]
        cos, sin = angle.cos(), angle.sin()
        first = slice(0, 2 * pairs, 2) if interleaved else slice(pairs)
        second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
        out = x.double().clone()
        out[..., first], out[..., second] = x[..., first] * cos - x[..., second] * sin, x[..., second] * cos + x[..., first] * sin
        return out

    positions = torch.tensor([[start], [start + 7]], device=device) + torch.arange(5, device=device)
    q = rotated(plain, positions).float().transpose(1, 2).contiguous().transpose(1, 2)
    ints = torch.zeros(2, 1, 1, span_layout.WORDS, dtype=torch.int32, device=device)
    ints[:, 0, 0, span_layout.Q_START], ints[:, 0, 0, span_layout.KV_START] = 12, 3
    ints[:, 0, 0, span_layout.DROPPED] = positions[:, 0] - 9
    got = rotate(q, 100, ints, inv_freq, window=10, sinks=4, interleaved=interleaved)
    assert got.stride() == q.stride()
    near = rotated(plain, positions.clamp(max=13))
    assert (got.double() - near).abs().max() < 2e-6
    if start == 40:
        bare = rotate(q[:1], 45, None, inv_freq, window=10, sinks=4, interleaved=interleaved)
        assert torch.equal(bare, got[:1])


@pytest.mark.parametrize("pads", [None, [0, 1, 0, 0, 1]])
def test_ring_step_and_its_torch_version(pads, device):
    counts = torch.tensor([0, 0, 2, 11, 2**33], device=device)
    pads = None if pads is None else torch.tensor(pads, device=device)
    twin_counts = counts.clone()
    slots, found = ring.ring_step(counts, pads, 7, 3)
    twin_slots, twin = ring._ring_step_torch(twin_counts, pads, 7, 3)
    assert torch.equal(slots, twin_slots) and torch.equal(counts, twin_counts) and torch.equal(found[:4], twin[:4])
    assert slots.tolist() == [0, 0 if pads is None else 10, 2, 4, 3 + (2**33 - 3) % 7 if pads is None else 10]
    assert found[3, 0, 0].tolist() == [9, 0, 10, span_layout.NO_WINDOW, span_layout.CAUSAL, 2]


@pytest.mark.parametrize("slots", [[4], [0, 3, 1], [2, 5, 4]])
def test_append_writes_each_row_at_its_slot_and_none_past_the_end(slots, device):
    buffers = [torch.randn(3, 2, 5, dim, device=device) for dim in (16, 24)]
    new = [torch.randn(3, 1, 2, t.shape[3], device=device).transpose(1, 2) for t in buffers]
    expected = [t.clone() for t in buffers]
    for t, states in zip(expected, new, strict=True):
        for row, slot in enumerate(slots * 3 if len(slots) == 1 else slots):
            if slot < 5:
                t[row, :, slot] = states[row, :, 0]
    append(KV(*buffers), *new, torch.tensor(slots, device=device))
    assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))


# Refusals: immediately, with a message.


BAD = [
    ({"window": 0}, r"window counts the last tokens.*at least 1; got 0"),
    ({"window": None}, r"needs window=, the number of last tokens to keep, for example 4096"),
    *(({"sinks": value}, rf"sinks is the number of first .* an integer, at least 0; got {value}") for value in (-1, False)),
    *(({"window": value}, f"window counts.*an integer, at least 1; got {value!r}") for value in (True, "40")),
    ({"window": 510}, r"3 sinks and a window of 510 take 513 positions.*made for 512"),
    ({"cache": "preallocated"}, r"cache='preallocated' and 'streaming' cannot be combined"),
    ({"cache": "ring"}, r"\"rolling\", or None.*got 'ring'"),
]


def test_bad_settings_and_those_of_streaming_for_another_backend(llama):
    for options, sentence in BAD:
        with pytest.raises(ValueError, match=sentence):
            patched(llama, **options)
    of_streaming = r'are for "streaming"; \'lean\' sees every token'
    settings = [({name: 2}, of_streaming) for name in ("window", "sinks")] + [({"clamp_positions": True}, of_streaming)]
    for options, sentence in (*settings, ({"cache": "rolling"}, "cannot be combined")):
        with pytest.raises(ValueError, match=sentence):
            hf_fastattn.patch(llama, "lean", **options)


def test_models_that_cannot_stream():
    own = models.tiny("mistral", sliding_window=10)
    with pytest.raises(ValueError, match=r"sliding window of its own, 10 tokens.*at most 7"):
        patched(own)
    with pytest.raises(ValueError, match=r"10 tokens, and 10 sinks.* Use another backend"):
        patched(own, sinks=10)
    own.set_attn_implementation("streaming")
    own.config.streaming_window = 5
    with pytest.raises(ValueError, match=r"sliding window of their own \(10 tokens\).*patch"):
        own(tokens(1, 5, "cpu"))
    model_type, config = CLAMPED["opt"]
    with pytest.raises(ValueError, match=r"OPT has no rotary embedding.*clamp_positions=True.*approximation"):
        patched(models.tiny(model_type, **config))


def test_a_cache_that_its_model_cannot_read(llama, device):
    ids = tokens(2, 8, device)
    with pytest.raises(ValueError, match=r"'eager', which cannot read a RollingCache; use hf_fastattn.patch"):
        RollingCache(llama)
    with patched(llama), torch.no_grad():
        cache = RollingCache(llama)
        llama(ids, past_key_values=cache)
        with pytest.raises(RuntimeError, match="pre-hook of a patched model"):
            llama.model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match=r"holds 2 rows.*given 1"):
            llama(ids[:1], past_key_values=cache)
        with pytest.raises(ValueError, match="holds 2 rows, and the call has 1"):
            llama.generate(ids[:1], past_key_values=cache, max_new_tokens=2)
        with pytest.raises(ValueError, match="made for another model or other settings"):
            other = make("llama", device)
            with patched(other, window=WINDOW + 1):
                other(ids, past_key_values=cache)
        llama.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match="'sdpa', which cannot read a RollingCache"):
            llama(ids, past_key_values=cache)
    llama.set_attn_implementation("eager")
    with pytest.raises(RuntimeError, match="pre-hook of a patched model"):
        llama(ids, past_key_values=cache)


def test_masks_that_are_refused(llama, device):
    ids, mask = padded(device)
    holes = mask.clone()
    holes[0, 10] = 0
    with patched(llama):
        for call in (llama.generate, llama):
            with pytest.raises(ValueError, match=r"discards left padding.*zeros behind ones.*padding_side"):
                call(ids, attention_mask=holes, past_key_values=RollingCache(llama))
        with pytest.raises(ValueError, match="covers 5 tokens; this cache has read 0 and is given"):
            llama(ids, attention_mask=mask[:, :5], past_key_values=RollingCache(llama))
        with pytest.raises(ValueError, match="takes a 2-D attention_mask"):
            llama(ids, attention_mask=mask[:, None, None].bool(), past_key_values=RollingCache(llama))
        with pytest.raises(ValueError, match="cannot combine with its window"):
            llama(ids, attention_mask=mask[:, None, None].bool())


def test_assisted_generation_is_refused_before_it_drops_anything(llama, device):
    ids = tokens(1, 20, device)
    with patched(llama):
        with pytest.raises(ValueError, match=r"removes several tokens.*12 tokens.*may reach"):
            llama.generate(ids, max_new_tokens=5, prompt_lookup_num_tokens=3)
        few = llama.generate(ids[:, :4], max_new_tokens=5, do_sample=False)
        assert llama.generate(ids[:, :4], max_new_tokens=5, do_sample=False, prompt_lookup_num_tokens=2).tolist() == few.tolist()


def test_undo_restores_the_model(llama):
    before = dict(vars(llama.config))
    with patched(llama):
        assert llama.config.streaming_window == WINDOW
        twin = copy.deepcopy(llama)
    assert dict(vars(llama.config)) == before and not llama._forward_pre_hooks
    hf_fastattn.unpatch(twin)
    assert not twin._forward_pre_hooks and not hasattr(twin.config, "streaming_window")
