"""Tiny random models of every family, with weights for which a wrong mask changes the greedy tokens."""

import math
from functools import cache

import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 128
COMMON = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
COMMON |= {"tie_word_embeddings": False, "attention_dropout": 0.0}
# name: (model_type, changes to the config). Prompts have PROMPT tokens; windows are smaller or larger than that.
PROMPT = 96
OPT = {"num_key_value_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0, "layerdrop": 0.0}
FAMILIES = {
    "llama": ("llama", {}),
    "mistral_window_below_prompt": ("mistral", {"sliding_window": 16}),
    "mistral_window_above_prompt": ("mistral", {"sliding_window": 128}),
    "opt": ("opt", OPT),  # passes scaling=1.0
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),  # one layer of each kind
    "qwen3": ("qwen3", {"head_dim": 16}),
    "phi3": ("phi3", {"sliding_window": 64}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 16, "attn_logit_softcapping": 4.0, "query_pre_attn_scalar": 16}),
    "gpt_oss": ("gpt_oss", {"head_dim": 16, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def draw_weights(model: torch.nn.Module, seed: int = 0) -> None:
    """Large random weights: attention is far from uniform, and the attended tokens decide the next token.

    With the usual std of 0.02 a random model repeats one token whatever it attends to, so every mask would pass.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=generator)
        if name.endswith("sinks"):
            p.data.copy_(noise)
        elif p.dim() < 2:  # norms and biases; Gemma's norms add 1, and normalised q and k need less than 1
            centre = 0.0 if "norm" not in name.lower() or "bias" in name or "gemma" in type(model).__name__.lower() else 1.0
            p.data.copy_((0.5 if "q_norm" in name else centre) + 0.1 * noise)
        elif "embed" in name:
            p.data.copy_(noise * (0.1 if "gemma" in type(model).__name__.lower() else 0.7))
        else:
            p.data.copy_(noise * 2.0 / math.sqrt(p.shape[-1]))


def tiny(model_type: str, attn_implementation: str = "eager", device="cpu", auto=AutoModelForCausalLM, **own):
    """A model of one type in fp32 and eval mode, from the common tiny config and its own part."""
    set_seed(0)
    config = CONFIG_MAPPING[model_type](**{**COMMON, **own})
    model = auto.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    draw_weights(model)
    return model.eval().to(device)


@cache
def family(name: str, device: torch.device | str) -> PreTrainedModel:
    """The model of a family, which is created once; callers select its attention with `set_attn_implementation`."""
    model_type, own = FAMILIES[name]
    return tiny(model_type, device=device, **own)


def generate(model, inputs, **options):
    """Greedy tokens, or samples of seed 0."""
    torch.manual_seed(0)
    return model.generate(**inputs, **{"do_sample": False, **options})


def message(tokens: int, rows: int = 1) -> torch.Tensor:
    """Ids of so many tokens, the same in each call."""
    return torch.randint(2, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def chat(model, messages, mask=None, cache=None, **options) -> list[torch.Tensor]:
    """The text after each reply, of which the cache is given to the next call. messages: ids; mask: of the first ones."""
    texts: list[torch.Tensor] = []
    for ids in messages:
        inputs = {"input_ids": torch.cat([*texts[-1:], ids], 1)}
        if mask is not None:
            inputs["attention_mask"] = pad(mask, (0, inputs["input_ids"].shape[1] - mask.shape[1]), value=1)
        out = generate(model, inputs, past_key_values=cache, return_dict_in_generate=True, **options)
        texts.append(out.sequences)
        cache = out.past_key_values
    return texts


def sizes(patch) -> set[int]:
    """The tokens of a row in each graph of a patch."""
    return {entry.tokens for held in patch._graphs.entries.values() for entry in held if entry.graph}


PADDINGS = ("no_padding", "left_padding", "holes")


def prompts(padding: str, device: torch.device | str, rows: int = 3, length: int = PROMPT) -> dict[str, torch.Tensor]:
    """input_ids and, except for "no_padding", an attention_mask: rows of several lengths, or with padding between live tokens.

    Some parts of the ids repeat, so that prompt lookup finds candidates.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCAB, (3, length), generator=generator)
    ids[:, length // 2 : length // 2 + 12] = ids[:, -12:]
    mask = torch.ones_like(ids)
    if padding != "no_padding":
        for row in range(3):
            mask[row, : (row + 1) * length // 6] = 0
    if padding == "holes":  # as in batched conversations: padding after the end of each turn
        for row in range(3):
            mask[row, 3 * length // 5 + 3 * row : 3 * length // 5 + 6 + 5 * row] = 0
            mask[row, length - 6 : length - 4 + row] = 0
    ids = ids.masked_fill(mask == 0, COMMON["pad_token_id"])
    inputs = {"input_ids": ids} if padding == "no_padding" else {"input_ids": ids, "attention_mask": mask}
    return {name: tensor[:rows].to(device) for name, tensor in inputs.items()}


def longrope(family, limit, device="cpu"):
    """A model whose frequencies are others for texts of more than `limit` tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": limit}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    own = {"original_max_position_embeddings": limit} if family == "phi3" else {}
    if family == "gemma3_text":  # of one type of layer
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}
        own = {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    return tiny(family, "sdpa", device=device, rope_parameters=rope, **own)
