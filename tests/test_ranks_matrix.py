"""Every decoder with a plan of tensor parallelism and every padding: 2 and 4 ranks, compared with one process. K and V are
divided by heads and by sequence."""

import os
import warnings

import every_model
import model_inputs
import processes
import pytest
import torch
from models import PADDINGS, draw_weights
from test_ranks import generate, shared, tokens_and_logits

import hf_fastattn
from hf_fastattn.patches.calls import caches as call_caches

COUNTS = [int(count) for count in os.environ.get("HF_FASTATTN_RANKS", "").split(",") if count]
pytestmark = [processes.HIDDEN, pytest.mark.slow, pytest.mark.skipif(not COUNTS, reason="half an hour: make test-ranks")]
NEW = 6
SIZES = {
    "HeliumForCausalLM": {"head_dim": 8},  # its output layer needs heads of hidden_size / num_attention_heads
    "CodeGenForCausalLM": {"rotary_dim": 8},  # at most the dimensions of a head
    "GPTJForCausalLM": {"rotary_dim": 8},
}
SKIPPED = {  # a line of a traceback, and what it says
    "in from_pretrained": "Transformers cannot share this configuration",
    "in requires_backends": "the model needs a package that is not installed",
}


def entries() -> list[every_model.Model]:
    return [entry for entry in every_model.find() if entry.kind == "causal" and has_plan(entry)] if COUNTS else []


def has_plan(entry: every_model.Model) -> bool:
    config = every_model.config_class(every_model.load_class(entry))
    return any(getattr(each, "base_model_tp_plan", None) for each in (config, *config.sub_configs.values()))


def build(entry: every_model.Model, kv: str):
    cls = every_model.load_class(entry)
    kind, own = every_model.config_class(cls), {**every_model.own_of(entry), **SIZES.get(entry.name, {})}
    text = every_model.tiny_config(kind, own).get_text_config(decoder=True)
    grouped = getattr(text, "num_key_value_heads", 1) != text.num_attention_heads
    heads = 8 if not grouped else 4 if kv == "heads" else 2
    config = every_model.tiny_config(kind, {**own, "num_attention_heads": 8, "num_key_value_heads": heads})
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    draw_weights(model)
    return model


def decode(rank: int, entry: every_model.Model, count: int, kv: str) -> dict:
    warnings.simplefilter("ignore")
    call_caches.round_up = lambda tokens: tokens  # no spare slots, so that several ranks have a share
    one = build(entry, kv)
    model, found = shared(one, count), {}
    for padding in PADDINGS:
        inputs = model_inputs.text(one, padding)
        want = generate(one, inputs, max_new_tokens=NEW)
        try:
            same = kv == "sequence" or torch.equal(generate(model, inputs, max_new_tokens=NEW), want)
        except Exception as error:  # of Transformers
            same = str(error)
        if same is not True:
            found[padding] = f"unpatched: {same or 'its tokens are not those of one process'}"
            continue
        try:
            patch = hf_fastattn.patch(model, "lean", kv_sharding=kv)
        except ValueError as refused:
            found[padding] = f"refused: {refused}"
            continue
        with patch:
            try:
                outputs = [tokens_and_logits(model, inputs, max_new_tokens=NEW) for _ in range(3)]
            except (ValueError, RuntimeError) as error:
                assert kv == "sequence"  # by which the unpatched model has not run
                # Layers whose numbers of heads are not those of the configuration; DTensors in the model's own code.
                known = {"which its plan does not say": "refused", "mixed torch.Tensor and DTensor": "unpatched"}
                found[padding] = next(f"{kind}: {error}" for words, kind in known.items() if words in str(error))
                continue
        assert all(torch.equal(each.sequences, want) for each in outputs), padding
        assert patch.captures or patch.reasons
        found[padding] = [x.numpy().tobytes() for each in outputs for x in each.logits], patch.captures, patch.reasons
    return found


@pytest.mark.parametrize("kv", ["heads", "sequence"])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_tokens_are_those_of_one_process(tmp_path, entry, count, kv):
    ended = processes.run(tmp_path, count, decode, entry, count, kv, limit=120)
    for words, reason in SKIPPED.items():
        if any(words in each.output for each in ended):
            pytest.skip(reason)
    assert all(each.result is not None for each in ended), "\n".join(each.output for each in ended)
    first, *others = (each.result for each in ended)
    assert all(other == first for other in others)  # the same bits of logits, the same reasons
    print({padding: found if isinstance(found, str) else found[1:] for padding, found in first.items()})
