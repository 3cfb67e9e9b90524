"""Models whose layers have recurrent states, in place of K and V or besides them, or no K and V of their own."""

import copy
from unittest.mock import Mock

import every_model
import fake_graph
import pytest
import torch
from cases import slow_unless
from models import draw_weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hf_fastattn
from hf_fastattn import PreallocatedCache, hf
from hf_fastattn.patches.calls import calls

KINDS = {
    "Qwen3_5": ("qwen3_5", ["state", "full"]),
    "Lfm2": ("lfm2", ["state", "full"]),
    "FalconH1": ("falcon_h1", ["both", "both"]),
    "NemotronH": ("nemotron_h", ["state", "none", "full", "none"]),
    "Zamba": ("zamba", ["state", "both", "both"]),
    "Gemma3n": ("gemma3n", ["window", "full", "none", "none"]),
}
NEW = 5  # tokens
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": [*every_model.SPECIAL]}
IDS = torch.randint(8, 100, (2, 20), generator=torch.Generator().manual_seed(0))


def built(family):
    model = every_model.named(f"{family}ForCausalLM", KINDS[family][0], "causal")
    draw_weights(model)
    return model


def padded(*spans):
    mask = torch.ones_like(IDS)
    for row, first, last in spans:
        mask[row, first:last] = 0
    return mask


def generated(model, ids=IDS, **options):
    torch.manual_seed(0)
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), **OPTIONS, **options})


WAYS = {
    "greedy": {},
    "left padding": {"attention_mask": padded((0, 0, 5))},
    "right padding and a hole": {"attention_mask": padded((0, 15, 20), (1, 4, 8))},
    "beams": {"num_beams": 3, "attention_mask": padded((1, 0, 3))},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 8},
}


@pytest.mark.parametrize("family", slow_unless(["Qwen3_5", "FalconH1"].__contains__, KINDS))
def test_generate_has_the_tokens_of_eager_and_captures_once(family, captured):
    model = built(family)
    assert [kind.name for kind in hf.layer_kinds(model.config)] == KINDS[family][1]
    expected = {name: generated(model, **way) for name, way in WAYS.items()}
    assert len({tuple(row) for way in expected.values() for row in way[:, IDS.shape[1] :].tolist()}) > 4
    with hf_fastattn.patch(model) as patch:
        for name, way in WAYS.items():
            assert torch.equal(generated(model, **way), expected[name]), name
        generated(model)  # without states, a prompt of a known size is captured too
        captures, replays = patch.captures, patch.replays
        assert torch.equal(generated(model), expected["greedy"]) and not patch.reasons
        assert patch.captures == captures and patch.replays >= replays + NEW - 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3_5", "FalconH1", "Lfm2"])
def test_twenty_calls_capture_once(family, captured):
    model = built(family)
    texts = [IDS[i % 2 : i % 2 + 1, : 3 + i * 7 % 17] for i in range(20)]
    expected = [generated(model, text) for text in texts]
    with hf_fastattn.patch(model) as patch:
        assert all(torch.equal(generated(model, text), want) for text, want in zip(texts, expected, strict=True))
        assert patch.captures == 1 and not patch.reasons


@pytest.mark.parametrize("family", ["Qwen3_5", "Lfm2"])
def test_the_loop_runs_ahead_over_states_that_no_caller_has(family, captured, monkeypatch):
    """The step too many enters the states: a cache of the caller does not get it, and the next call begins anew."""
    model, recorded = built(family), []
    monkeypatch.setattr(calls, "records_events", lambda device: True)
    monkeypatch.setattr(torch, "Event", type("Event", (fake_graph.Event,), {"record": lambda self: recorded.append(self)}))
    ids = generated(model, IDS[:1], max_new_tokens=12)
    for eos in ids[0, 24:26].tolist():
        options = {"eos_token_id": eos, "max_new_tokens": 12}
        want = generated(model, IDS[:1], **options)
        text = torch.cat([want, IDS[1:, :4]], 1)
        rest = generated(model, text)
        with hf_fastattn.patch(model) as patch:
            for _ in range(2):
                replays = patch.replays
                assert torch.equal(generated(model, IDS[:1], **options), want) and recorded
            assert patch.replays - replays == want.shape[1] - IDS.shape[1]  # one less is needed after the prompt
            recorded.clear()
            cache = hf_fastattn.PreallocatedCache(model)
            assert torch.equal(generated(model, IDS[:1], past_key_values=cache, **options), want)
            assert torch.equal(generated(model, text, past_key_values=cache), rest) and not recorded
            assert not patch.reasons


@pytest.mark.parametrize("family", ["Qwen3_5", "FalconH1", "Lfm2"])
def test_turns_copies_rows_and_files(family, captured, tmp_path):
    model, path = built(family), tmp_path / "cache"
    text = generated(model)
    more = torch.cat([text, IDS[:, :2]], 1)
    expected = generated(model, more)
    with hf_fastattn.patch(model):
        cache = PreallocatedCache(model)
        assert torch.equal(generated(model, past_key_values=cache), text)
        cache.save(path, model)
        for kept in (copy.deepcopy(cache), PreallocatedCache.load(path, model), cache):
            assert torch.equal(generated(model, more, past_key_values=kept), expected)
        cache = PreallocatedCache.load(path, model)
        cache.batch_select_indices(torch.tensor([1]))
        assert torch.equal(generated(model, more[1:], past_key_values=cache), expected[1:])
        with pytest.raises(ValueError, match="holds 1 rows"):
            generated(model, torch.cat([expected] * 2), past_key_values=cache)
        cache.reset()
        assert torch.equal(generated(model, past_key_values=cache), text)


@pytest.mark.parametrize("change", ["missing", "dtype", "rows", "layer", "a number"])
def test_a_file_with_other_states_is_refused(change, tmp_path):
    model, path = built("Qwen3_5"), tmp_path / "cache"
    cache = PreallocatedCache(model)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    cache.save(path, model)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    state = tensors.pop("0.recurrent.0")
    new = {
        "dtype": {"0.recurrent.0": state.half()},
        "rows": {"0.recurrent.0": state[:1].clone()},
        "layer": {"1.recurrent.0": state},
        "a number": {"0.recurrent.0": torch.tensor(1.0)},
    }
    if change == "a number":
        metadata["states"] = metadata["states"].replace(str([*state.shape]), "[]")
    save_file(tensors | new.get(change, {}), path, metadata)
    with pytest.raises(ValueError, match=r"needs the recurrent states of each layer|has states of 0 rows, and others of 2"):
        PreallocatedCache.load(path, model)


def test_a_file_whose_metadata_lacks_a_state_too_is_refused_in_the_first_step(tmp_path):
    model, path = built("Qwen3_5"), tmp_path / "cache"
    cache = PreallocatedCache(model)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    for name in ("conv_states", "recurrent_states"):
        state = getattr(cache.layers[0], name).pop(0)
        cache.save(path, model)
        getattr(cache.layers[0], name)[0] = state
        with hf_fastattn.patch(model), torch.no_grad():
            with pytest.raises(ValueError, match="Layer 0 lacks a recurrent state"):
                model(IDS[:, :1], past_key_values=(loaded := PreallocatedCache.load(path, model)))
            loaded.reset()
            assert torch.equal(generated(model, past_key_values=loaded), generated(model))


@pytest.mark.parametrize("family", ["Qwen3_5", "FalconH1", "Lfm2"])
def test_a_forward_with_other_rows_is_refused_and_leaves_the_text(family, captured, tmp_path):
    model = built(family)
    with hf_fastattn.patch(model), torch.no_grad():
        cache = PreallocatedCache(model)
        text = generated(model, past_key_values=cache)
        states = [state.clone() for state in cache.storage.states()]
        more = text[:, -1:]
        for given in ({"input_ids": more[:1]}, {"inputs_embeds": model.get_input_embeddings()(more.repeat(2, 1)[:3])}):
            with pytest.raises(ValueError, match=r"This cache holds 2 rows, and the call has [13]\."):
                model(**given, past_key_values=cache)
        with pytest.raises(ValueError, match="holds 2 rows, and the call has 3"):
            model(more.repeat(2, 1)[:3], past_key_values=cache)
        assert all(map(torch.equal, cache.storage.states(), states)) and cache.get_seq_length() == text.shape[1] - 1
        expected = generated(model, torch.cat([text, IDS[:, :2]], 1))
        cache.save(tmp_path / "text", model)
        assert torch.equal(generated(model, torch.cat([text, IDS[:, :2]], 1), past_key_values=cache), expected)
        loaded = PreallocatedCache.load(tmp_path / "text", model)
        with pytest.raises(ValueError, match="holds 2 rows, and the call has 1"):
            model(more[:1], past_key_values=loaded)
        assert torch.equal(generated(model, torch.cat([text, IDS[:, :2]], 1), past_key_values=loaded), expected)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_cache_is_refused_after_an_interrupted_forward_from_python(error, captured, monkeypatch):
    model = built("Qwen3_5")
    expected = generated(model)
    with hf_fastattn.patch(model), torch.no_grad():
        cache = PreallocatedCache(model)
        with monkeypatch.context() as patched, pytest.raises(error):
            patched.setattr(model.lm_head, "forward", Mock(side_effect=error))
            generated(model, past_key_values=cache)
        parts = {(part.layer, part.name.partition(".")[0], part.slots) for part in cache.storage.memory()}
        assert parts == {(0, "conv", None), (0, "recurrent", None), (1, "keys", 20), (1, "values", 20)}
        with pytest.raises(ValueError, match="was interrupted"):
            model(IDS[:, :1], past_key_values=cache)
        cache.reset()
        assert torch.equal(generated(model, past_key_values=cache), expected)


@pytest.mark.parametrize("family, interrupted", [("Qwen3_5", 1), ("Zamba", 1), ("Zamba", 2)])
def test_a_step_is_undone_bit_for_bit_or_the_cache_is_refused(family, interrupted, captured, monkeypatch):
    """The first replay of a call has a mark, as the model is compared meanwhile; a later one has none."""
    model = built(family)
    expected, replay, before = generated(model), fake_graph.RecordedGraph.replay, []
    with hf_fastattn.patch(model), torch.no_grad():
        generated(model)
        cache = PreallocatedCache(model)

        def interrupt(part):
            before.append([state.clone() for state in cache.storage.states()])
            replay(part)
            if len(before) == interrupted:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(fake_graph.RecordedGraph, "replay", interrupt)
            generated(model, past_key_values=cache)
        assert before[-1] and all(map(torch.equal, cache.storage.states(), before[-1])) == (interrupted == 1)
        if interrupted == 2:
            with pytest.raises(ValueError, match="was interrupted"):
                model(IDS[:, :1], past_key_values=cache)
        cache.reset()
        assert torch.equal(generated(model, past_key_values=cache), expected)


def test_a_state_that_the_user_keeps_or_replaces(captured):
    model = built("Qwen3_5")
    expected = generated(model)
    with hf_fastattn.patch(model) as patch:
        cache = PreallocatedCache(model)
        generated(model, past_key_values=cache)
        kept = cache.layers[0].recurrent_states[0]
        content, captures = kept.clone(), patch.captures
        del cache
        assert torch.equal(generated(model), expected) and torch.equal(kept, content)
        cache = PreallocatedCache(model)
        text = generated(model, past_key_values=cache)
        cache.layers[0].recurrent_states[0] = cache.layers[0].recurrent_states[0].clone()
        captures = patch.captures
        more = generated(model, torch.cat([text, IDS[:, :1]], 1), past_key_values=cache)
        assert patch.captures == captures + 1
        for put in (None, kept[:1].expand_as(kept), torch.cat([kept, kept], -1)):
            cache = PreallocatedCache(model)
            generated(model, past_key_values=cache)
            cache.layers[0].recurrent_states[0] = put
            del cache
            assert torch.equal(generated(model), expected)
    assert torch.equal(more, generated(model, torch.cat([text, IDS[:, :1]], 1)))


def test_what_needs_k_and_v_in_all_layers_refuses_a_hybrid(captured):
    model, cache = built("Lfm2"), PreallocatedCache(built("Lfm2"))
    with pytest.raises(ValueError, match=r'rolling cache needs layers .* recurrent states\. .*patch\(model, "lean"\)'):
        hf_fastattn.patch(model, "streaming", window=64)
    with pytest.raises(ValueError, match=r'kv_sharding="sequence" needs layers .*Leave out kv_sharding='):
        hf_fastattn.patch(model, kv_sharding="sequence")
    with hf_fastattn.patch(model), torch.no_grad():
        assert torch.equal(generated(model, past_key_values=cache)[:, :20], IDS)
        seen, states = cache.get_seq_length(), [state.clone() for state in cache.storage.states()]
        for call in (
            lambda: cache.crop(-1),
            lambda: generated(model, IDS[:1], prompt_lookup_num_tokens=3),
            lambda: cache.activate_past_recording(),
        ):
            with pytest.raises(ValueError, match=r"no token can be removed.*Leave out"):
                call()
        assert cache.get_seq_length() == seen and all(map(torch.equal, cache.storage.states(), states))
        assert not cache.is_croppable and not cache.is_compileable
        with pytest.raises(ValueError, match=r"recurrent states, .* which pages do not hold"):
            model.generate_batch([[5, 6, 7]])


@pytest.mark.parametrize("name, kind", [("MiniMax", "minimax"), ("RecurrentGemma", "recurrent_gemma")])
def test_states_outside_of_a_cache_of_transformers_are_refused(name, kind):
    with pytest.raises(ValueError, match=r"keeps its recurrent states outside|has attention, recurrent"):
        hf_fastattn.patch(every_model.named(f"{name}ForCausalLM", kind, "causal"))
