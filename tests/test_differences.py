"""The page "Where results differ from Transformers'": docs/guides/differences.md."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, RobertaConfig, RobertaModel, StaticCache
from transformers.generation import ContinuousBatchingConfig

from hf_fastattn import PreallocatedCache, get, hf, names, patch

EXACT = [name for name in names() if get(name).exact]
FEW = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
CAUSAL = FEW | {"num_key_value_heads": 1, "head_dim": 16, "eos_token_id": None, "pad_token_id": 0}
WRONG, CLOSE = 1e-3, 1e-5  # differences of results of about 1


def decoder(model_type: str, seed: int = 0, **config):
    torch.manual_seed(seed)
    return hf.random_model(model_type, torch.float32, torch.device("cpu"), **CAUSAL, **config)


def ids(tokens: int) -> torch.Tensor:
    return torch.randint(3, 60, (1, tokens), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_a_bool_mask_of_two_documents():
    model, text, places = decoder("llama"), ids(12), torch.arange(12)[None]
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    mask[5:, :5] = False

    def logits(name: str, mask: torch.Tensor) -> torch.Tensor:
        model.set_attn_implementation(name)
        return model(text, position_ids=places, attention_mask=mask[None, None]).logits

    model.set_attn_implementation("eager")
    parts = [model(text[:, at], position_ids=places[:, at]).logits for at in (slice(5), slice(5, 12))]
    expected = torch.cat(parts, 1)
    torch.testing.assert_close(logits("eager", torch.where(mask, 0.0, -torch.inf)), expected, atol=CLOSE, rtol=CLOSE)
    assert (logits("eager", mask) - expected).abs().max() > WRONG
    for name in ("sdpa", *EXACT):
        torch.testing.assert_close(logits(name, mask), expected, atol=CLOSE, rtol=CLOSE)


@torch.no_grad()
def test_queries_that_see_no_key():
    model, text, mask = decoder("llama"), ids(12).expand(2, -1), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5], mask[1] = 0, 0
    live = mask[..., None] == 1

    def states(name: str) -> torch.Tensor:
        model.set_attn_implementation(name)
        return model.model(text, attention_mask=mask).last_hidden_state

    expected, eager = states("sdpa"), states("eager")
    torch.testing.assert_close(eager * live, expected * live, atol=CLOSE, rtol=CLOSE)
    for part in (eager[0, :5] - expected[0, :5], eager[1] - expected[1]):
        assert part.abs().max() > WRONG
    for name in EXACT:
        torch.testing.assert_close(states(name), expected, atol=CLOSE, rtol=CLOSE)


@torch.no_grad()
def test_padding_free_sequences_of_an_encoder():
    torch.manual_seed(0)
    config = RobertaConfig(**FEW, max_position_embeddings=32, pad_token_id=1, initializer_range=0.3)
    model, text, lengths = RobertaModel(config).eval(), ids(12), (5, 7)
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    places = torch.cat([torch.arange(2, 2 + n) for n in lengths])[None]  # RoBERTa's positions begin after its padding index
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}

    def states(name: str) -> torch.Tensor:
        model.set_attn_implementation(name)
        return model(text, position_ids=places, **packed).last_hidden_state

    model.set_attn_implementation("eager")
    expected = torch.cat([model(part).last_hidden_state for part in text.split(lengths, 1)], 1)
    for name in ("eager", "sdpa"):
        assert (states(name) - expected).abs().max() > WRONG
    for name in EXACT:
        torch.testing.assert_close(states(name), expected, atol=CLOSE, rtol=CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("back", [1, 12])
def test_rolling_back_past_a_window(back):
    model, text, new = decoder("mistral", sliding_window=8), ids(30), ids(3)
    model.set_attn_implementation("eager")
    expected = model(torch.cat([text[:, :-back], new], 1)).logits[:, -3:]

    def logits(name: str, cache) -> torch.Tensor:
        model.set_attn_implementation(name)
        model(text[:, :20], past_key_values=cache)
        model(text[:, 20:], past_key_values=cache)
        cache.crop(-back)
        return model(new, past_key_values=cache).logits

    for name in ("eager", "sdpa"):
        static = StaticCache(config=model.config, max_cache_len=64)
        if hasattr(static.layers[0], "crop"):
            assert (logits(name, static) - expected).abs().max() > WRONG
        else:  # Transformers 5.17
            with pytest.raises(AttributeError, match="crop"):
                logits(name, static)
        with pytest.raises(RuntimeError, match="crop"):
            logits(name, DynamicCache(config=model.config))
    for name in ("eager", *EXACT):
        torch.testing.assert_close(logits(name, PreallocatedCache(model, 64)), expected, atol=CLOSE, rtol=CLOSE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="continuous batching would take the memory of the GPU")
def test_gemma_2_in_continuous_batching():
    sizes = {"query_pre_attn_scalar": 1, "initializer_range": 0.15, "tie_word_embeddings": False}
    model, prompt = decoder("gemma2", 4, **sizes, attn_logit_softcapping=1.0), ids(6)
    settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=63, pad_token_id=0)

    def greedy(model, cap: float | None) -> list[int]:
        """By definition: the most likely token behind the whole text, without a cache."""
        model.set_attn_implementation("eager")
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = cap
        text = prompt
        with torch.no_grad():
            for _ in range(6):
                best = model(text, use_cache=False).logits[:, -1].topk(2)
                assert best.values.diff().abs() > WRONG  # no rounding decides
                text = torch.cat([text, best.indices[:, :1]], 1)
        return text[0, 6:].tolist()

    uncapped, expected = greedy(model, None), greedy(model, 1.0)
    assert uncapped != expected
    sizes = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=256)
    batch = {"generation_config": settings, "continuous_batching_config": sizes}
    (found,) = model.generate_batch([prompt[0].tolist()], **batch).values()
    assert found.error is None and found.generated_tokens == uncapped
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:
        pass
    else:  # Transformers 5.17
        assert model.generate(prompt, generation_config=settings)[0, 6:].tolist() == uncapped
    for name in ("eager", "lean"):
        model.set_attn_implementation(name)
        with patch(model, "lean"):
            assert model.generate(prompt, generation_config=settings)[0, 6:].tolist() == expected
            (found,) = model.generate_batch([prompt[0].tolist()], **batch).values()
            assert found.generated_tokens == expected
