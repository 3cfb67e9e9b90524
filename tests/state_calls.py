"""Steps of tests/state.py that change how generate() is called: configurations, caches, modes, the patch itself."""

import contextlib
import copy
import gc
import itertools

import torch
from calls import At, Puts
from state import PROCESS, Interrupted, action
from state_model import noise
from transformers import LogitsProcessorList

import hf_fastattn

# Configurations


@action(8)
def edit_the_config(side, variant):
    config = side.model.config
    if variant in (1, 2):  # smaller, larger
        if getattr(config, "sliding_window", None):
            config.sliding_window = window = (8, 64)[variant - 1]
            for layer in side.layers:  # which have read it at their creation
                if layer.self_attn.sliding_window:
                    layer.self_attn.sliding_window = window
            side.kept.clear()
        return
    if variant == 0:
        config.rope_parameters["rope_theta"] *= 3
        return
    changes = (("attention_dropout", 0.5), ("rms_norm_eps", 0.5), ("use_cache", not config.use_cache))
    setattr(config, *(*changes, ("some_setting", {"of": ["a", "user"]}), ("hidden_act", "relu"))[variant - 3])


@action(2)
def edit_attention(side, variant):
    for layer in side.layers:
        if variant == 0:
            if hasattr(layer, "self_attn"):
                layer.self_attn.scaling *= 0.5
            else:
                layer.linear_attn.activation = None
        else:
            layer.input_layernorm.variance_epsilon = 0.7


@action(4)
def rotate_otherwise(side, variant):
    rotary = side.model.model.rotary_emb
    if variant == 0:
        rotary.attention_scaling *= 1.4
    elif variant == 1:
        rotary.rope_type = "dynamic"
    elif variant == 2:
        config = copy.deepcopy(side.model.config)
        config.rope_parameters["rope_theta"] = 100.0
        side.model.model.rotary_emb = type(rotary)(config).eval()
    else:
        forward = type(rotary).forward
        rotary.forward = lambda x, position_ids: forward(rotary, x, position_ids * 2)


GENERATION = {
    **{"do_sample": True, "temperature": 3.0, "repetition_penalty": 3.0, "max_length": 40, "eos_token_id": 5},
    **{"use_cache": False, "num_return_sequences": 2, "prefill_chunk_size": 7, "top_k": 3},
}


@action(len(GENERATION))
def edit_the_generation_config(side, variant):
    config, name = side.model.generation_config, [*GENERATION][variant]
    before = getattr(config, name)
    setattr(config, name, GENERATION[name])
    if name == "num_return_sequences":
        config.do_sample = True
    return lambda side: setattr(side.model.generation_config, name, before)


@action(4)
def set_attention(side, variant):
    before = side.model.config._attn_implementation
    side.model.set_attn_implementation(("sdpa", "eager", "reference", "split_kv")[variant])
    return lambda side: side.model.set_attn_implementation(before)


# Calls


@action(12)
def call_otherwise(side, variant):
    name, values = (
        ("rows", (1, 2, 3)),
        ("padding", ("no_padding", "left_padding", "holes")),
        ("length", (24, 40, 260)),
        ("new", (2, 4, 12)),
    )[variant // 3]
    setattr(side.call, name, values[variant % 3])


@action(8)
def ask_otherwise(side, variant):
    options = (
        {"do_sample": True, "top_k": 20},
        {"num_return_sequences": 2, "do_sample": True},
        {"repetition_penalty": 1.5},
        {"use_cache": False},
        {"prefill_chunk_size": 5},
        {"num_beams": 2},
        {"cache_implementation": "dynamic"},
        {"prompt_lookup_num_tokens": 2},
    )[variant]
    if "prompt_lookup_num_tokens" in options or "num_beams" in options:  # for one call: they return different types
        side.now = {} if "num_beams" not in options and (side.call.rows > 1 or side.call.options) else options
        return None
    side.call.options, side.call.seed = options, variant
    return lambda side: vars(side.call).update(options={}, seed=0)


@action()
def keep_the_cache(side, variant):
    side.keep = True


@action(2)
def drop_caches(side, variant):
    del side.kept[: 1 + variant]
    gc.collect()


def _continued(side, held) -> dict:
    cache, ids, mask = held
    more = noise((len(ids), 5)).abs().mul(40).long() % 40 + 2
    ids = torch.cat([ids, more], 1)
    given = {"input_ids": ids, "past_key_values": cache}
    if mask is not None:
        mask = mask.repeat_interleave(len(ids) // len(mask), 0)
        given["attention_mask"] = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], 1)
    return given


def _may_continue(side) -> bool:
    config, never = side.model.generation_config, {"num_return_sequences", "prefill_chunk_size", "max_length"}
    if any(getattr(config, name) for name in never) or config.use_cache is False:
        return False
    return not ((never - {"max_length"}) | {"use_cache", "cache_implementation"}) & set(side.call.options)


@action(6)
def continue_a_conversation(side, variant):
    """Continue from a kept cache: the last or the first one, unchanged, cropped, or copied."""
    if not side.kept or not _may_continue(side):
        return
    held = side.kept[-1 if variant % 2 else 0]
    if variant // 2 == 1:
        if not side.crops or any(held[0].is_sliding):
            return  # neither removes tokens
        held[0].crop(-2)
    elif variant // 2 == 2:
        held = (copy.deepcopy(held[0]), *held[1:])
    else:
        side.kept = [other for other in side.kept if other[0] is not held[0]]
    side.given = _continued(side, held)


def _fail(error):
    raise error


@action(24)
def raise_in_the_middle(side, variant):
    """Raise in a processor, a criterion, a streamer or the model, at the first token or later; also KeyboardInterrupt."""
    error = (Interrupted, KeyboardInterrupt)[variant % 2]("a user's")
    at, where = (0, 1, 3)[variant // 2 % 3], variant // 6
    at = min(at, side.call.new - 1)
    if where == 0:
        side.now = {"logits_processor": LogitsProcessorList([At(at, lambda: _fail(error))])}
    elif where == 1:
        counting = itertools.count()

        def criterion(ids, scores, **kwargs):
            if next(counting) == at:
                raise error
            return torch.zeros(len(ids), dtype=torch.bool)

        side.now = {"stopping_criteria": [criterion]}
    elif where == 2:
        if side.call.rows == 1 and not side.call.options:
            side.now = {"streamer": Puts(lambda: _fail(error), at)}
    else:
        _raise_in_a_forward(side, at, error)


def _raise_in_a_forward(side, at: int, error):
    """Raise once in the model. A replay runs no Python, so the step would differ; therefore both generate a single token."""
    norm = side.model.model.norm
    calls = itertools.count()

    class Once:
        def __call__(self, x):
            if next(calls) == at:
                raise error
            return type(norm).forward(norm, x)

    @contextlib.contextmanager
    def context(side):
        norm.forward = Once()
        try:
            yield
        finally:
            vars(norm).pop("forward", None)
            side.contexts.remove(context)

    if "forward" not in vars(norm) and at < 2:
        side.contexts.append(context)


@action(4)
def generate_within_generate(side, variant):
    """A processor that calls the same model, at the first token or later, with the same batch or another."""

    def ask():
        inner = {"input_ids": side.inputs()["input_ids"][:1]} if variant % 2 else side.inputs()
        side.model.generate(**inner, max_new_tokens=5, do_sample=False)

    side.now = {"logits_processor": LogitsProcessorList([At((0, 3)[variant // 2], ask)])}


@action(3)
def forward_by_hand(side, variant):
    """The model called outside generate(), with and without a cache."""
    ids = side.inputs()["input_ids"]
    if variant == 0:
        side.model(ids)
    elif variant == 1:
        out = side.model(ids, use_cache=True)
        side.model(ids[:, :1], past_key_values=out.past_key_values)
    else:
        side.model.train()
        side.model.eval()


@action(2)
def modes(side, variant):
    context = (lambda side: torch.inference_mode(), lambda side: torch.no_grad())[variant]
    side.contexts.append(context)
    return lambda side: side.contexts.remove(context)


@action(3)
def train_and_back(side, variant):
    """The model, a norm, an MLP."""
    (side.model, side.model.model.norm, side.layers[0].mlp)[variant].train()
    return lambda side: side.model.eval()


# The patch itself


@action(3)
def patch_again(side, variant):
    side.kept.clear()
    side.taking_back.pop("set_attention", None)
    if side.how is None:
        side.model.set_attn_implementation("sdpa")  # as after undo()
    else:
        hf_fastattn.unpatch(side.model)
        side.apply(**({}, {"graph": False}, {"fuse": False})[variant])


@action()
def deepcopy_the_model(side, variant):
    if side.peft is None:
        side.model = copy.deepcopy(side.model)
        side.taking_back = {name: undo for name, undo in side.taking_back.items() if name in PROCESS}
        side.contexts = []


@action()
def share_modules_with_another_model(side, variant):
    """A second model over the same inner model runs in between; on the patched side it is patched."""
    other = type(side.model)(copy.deepcopy(side.model.config)).eval()
    other.model, other.lm_head = side.model.model, side.model.lm_head
    with torch.no_grad():
        other.generate(**side.inputs(), max_new_tokens=4, do_sample=False)
