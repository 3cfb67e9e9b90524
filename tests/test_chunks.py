"""patch(prefill_chunk="auto"): prompts whose activations do not fit are read in chunks, with the same tokens."""

import pytest
import torch
from models import FAMILIES, longrope, tiny

import hf_fastattn
from hf_fastattn import explain
from hf_fastattn.patches.calls import chunks


@pytest.fixture
def reads(monkeypatch):
    """reads(model, ids, fit, **options): (the result of generate(), the numbers of tokens of each forward that reads a prompt).

    fit: how many tokens of one row fit into the memory that a GPU is said to have. A chunk is a multiple of 4 tokens.
    """
    monkeypatch.setattr(chunks, "SHORT", 8)
    monkeypatch.setattr(chunks, "STEP", 4)

    def run(model, ids, fit, prefill_chunk="auto", **options):
        lengths = []
        note = lambda _, given: lengths.append(tuple(given[0].shape))  # noqa: E731
        options = {"max_new_tokens": 3, "do_sample": False, **options}
        monkeypatch.setattr(
            chunks, "free_bytes", lambda _: None if fit is None else kept + fit * chunks.bytes_per_token(model) / chunks.USED
        )
        with hf_fastattn.patch(model, prefill_chunk=prefill_chunk) as patch:
            rows = len(ids) * max(options.get("num_return_sequences", 1), options.get("num_beams", 1))
            kinds = patch._generation.caches.kinds
            kept = chunks.least_bytes(model, kinds, rows, patch._generation.caches.kept(ids.shape[1] + 2))
            with model.get_input_embeddings().register_forward_pre_hook(note):
                return model.generate(ids, **options), [shape for shape in lengths if shape[1] > 1]

    return run


def prompts(rows=1, tokens=30):
    return torch.arange(5, 5 + rows * tokens).view(rows, tokens) % 100 + 5


@pytest.mark.parametrize("family", ["llama", "mistral_window_below_prompt", "gpt_oss"])
def test_a_prompt_is_read_in_the_largest_chunks_that_fit(family, reads):
    model, ids = tiny(FAMILIES[family][0], **FAMILIES[family][1]), prompts(2)
    want = model.generate(ids, max_new_tokens=3, do_sample=False)
    for fit, lengths in ((1000, [30]), (60, [30]), (59, [28, 2]), (25, [12, 12, 6]), (3, [4] * 7 + [2]), (-50, [4] * 7 + [2])):
        got, read = reads(model, ids, fit)
        assert torch.equal(got, want) and [n for _, n in read] == lengths


@pytest.mark.parametrize("limit, lengths", [(64, [12, 12, 6]), (20, [30])])
def test_frequencies_that_change_with_the_length_are_those_of_the_whole_prompt(reads, limit, lengths):
    model, ids = longrope("phi3", limit), prompts(2)
    want = model.generate(ids, max_new_tokens=3, do_sample=False)
    got, read = reads(model, ids, 25)
    assert torch.equal(got, want) and [n for _, n in read] == lengths


def test_explain_knows_models_that_read_a_prompt_whole(monkeypatch):
    monkeypatch.setattr(chunks, "largest", lambda *_: chunks.STEP)
    found = [explain(model, length=16_384).chunk for model in (tiny("llama"), longrope("phi3", 64))]
    assert found == [chunks.STEP, None]


def test_what_chunks_would_change_is_read_whole(reads):
    model = tiny("llama")
    for options in (
        {"return_dict_in_generate": True, "output_hidden_states": True},
        {"prompt_lookup_num_tokens": 2},
    ):
        assert reads(model, prompts(), 12, **options)[1][0] == (1, 30), options
    assert reads(model, prompts(tokens=8), 4)[1] == [(1, 8)]  # too short to look up the memory
    assert reads(model, prompts(), None)[1] == [(1, 30)]  # the CPU
    assert reads(model, prompts(), 12, prefill_chunk_size=20)[1] == [(1, 20), (1, 10)]  # the call has its own
    assert reads(model, prompts(), 12, prefill_chunk=None)[1] == [(1, 30)]


def test_samples_of_a_prompt_are_read_once_if_it_fits_and_else_each_in_chunks(reads):
    options = {"num_return_sequences": 3, "do_sample": True}
    for fit, lengths in ((30, [30]), (29, [8, 8, 8, 6])):  # the hook of this test has samples read each
        assert [n for _, n in reads(tiny("llama"), prompts(), fit, **options)[1]] == lengths


def test_it_is_refused_where_it_cannot_count():
    model = tiny("llama")
    for arguments, says in (
        ({"prefill_chunk": 512}, r'must be "auto" or None; got 512\. For other chunks pass .* prefill_chunk_size'),
        ({"prefill_chunk": "auto", "cache": None, "graph": False}, "this is cache=None"),
    ):
        with pytest.raises(ValueError, match=says):
            hf_fastattn.patch(model, **arguments)
    with hf_fastattn.patch(model, prefill_chunk="auto") as patch:
        assert "prompts that do not fit" in str(patch)
        assert model.generate(prompts(), max_new_tokens=2).shape == (1, 32)


def test_explain_says_which():
    whole, parts = explain("8b", length=16_384, gpu="h100"), explain("8b", length=262_144, gpu="h100")
    assert whole.chunk is None and "read whole" in str(whole)
    assert parts.chunk % chunks.STEP == 0 and 8192 <= parts.chunk < 262_144
    assert f"in chunks of {parts.chunk} tokens a row" in str(parts)
