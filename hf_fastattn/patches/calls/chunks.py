"""A prompt in chunks: the number of tokens that patch(prefill_chunk="auto") lets generate() read at once."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ... import hf
from ...caches import memory
from ...caches.stored import StoredCache
from ..graphs.entry import KEEP
from ..ranks.ranks import least_bytes
from .caches import CallCaches
from .calls import Call
from .unpadded import TENSORS, has_tensors

SHORT = 8192  # tokens of all rows: fewer are read whole, and the free memory is not looked up
STEP = 1024  # a chunk is a multiple of so many tokens of each row
USED = 0.9  # the part of the free memory that activations may have


def check(config: hf.GenerationConfig, seen: int) -> None:
    """Raise ValueError for chunks over a cache that holds tokens, if this Transformers reads these again."""
    if seen and hf.CHUNKS_FROM_START and config.prefill_chunk_size is not None:
        raise ValueError(
            f"Transformers before 5.21 reads all tokens again in chunks, and {hf.CACHE} holds {seen} of them. "
            "Leave out prefill_chunk_size, or upgrade Transformers."
        )


def choose(
    model: hf.PreTrainedModel,
    config: hf.GenerationConfig,
    given: dict[str, Any],
    caches: CallCaches,
    call: Call,
    prompts: int,
    rows: int,
    limit: int,
) -> None:
    """Set the chunk of a call whose prompt does not fit as a whole, unless chunks would change what the call returns.

    prompts: their number; as a whole the samples and beams of one are read once, in chunks each of the `rows` is. limit: the most
    tokens of the call.
    """
    cache: StoredCache = given[hf.CACHE]
    seen, new = cache.get_seq_length(), call.tokens
    if prompts * new <= SHORT or (seen and hf.CHUNKS_FROM_START):
        return
    if config.prefill_chunk_size is not None or config.output_hidden_states or config.output_attentions:
        return
    if changes(model, seen + new):
        return
    if any(name not in TENSORS and name != hf.CACHE and has_tensors(x) for name, x in given.items()):
        return  # images, and what else belongs to some of the tokens
    if (free := free_bytes(model.device)) is None:
        return
    kept = least_bytes(model, caches.kinds, rows, caches.kept(limit))
    if sum(part.tensor.nbytes for part in cache.storage.memory()) < kept:
        free -= kept  # its buffers are made, or replaced by larger ones, while it is read
    each = bytes_per_token(model)
    if largest(prompts, new, each, free) is not None:
        config.prefill_chunk_size = largest(rows, new, each, free)


def changes(model: hf.PreTrainedModel, tokens: int) -> bool:
    """Whether a text of so many tokens has other rotary frequencies in chunks: a forward has those of its last token."""
    longest = hf.longest_rotated(model)
    return longest is not None and tokens > longest


def free_bytes(device: torch.device) -> int | None:
    """Bytes of a GPU that new tensors can have; None on the CPU."""
    return memory.free_bytes(device) if device.type == "cuda" else None


def largest(rows: int, tokens: int, each: int, free: float) -> int | None:
    """The most of `tokens` tokens of each row that fit at once, a multiple of STEP; None if all do. each: bytes of one token."""
    fit = int(USED * max(0, free)) // (rows * each)
    return None if tokens <= max(fit, STEP) else max(STEP, fit // STEP * STEP)


def bytes_per_token(model: hf.PreTrainedModel) -> int:
    """About the most bytes of activations for each token of a forward, without a decode graph.

    These are six hidden states, three more for each chosen expert, and four results of the widest linear layer (gate, up,
    activation, product) of each chosen expert; and the logits, if the model computes those of all tokens.
    """
    config, head, run = model.config.get_text_config(decoder=True), model.get_output_embeddings(), hf.step_modules(model)
    (chosen, _), states, widest = hf.experts_of(config), 6, 0
    for weights in hf.weights(model):
        module, times = weights.module, chosen if weights.of_experts else 1
        if module not in run or module is head or isinstance(module, torch.nn.Embedding):
            continue
        matrices = [p for p in module._parameters.values() if p is not None and p.dim() > 1]
        widest = max(widest, times * max([getattr(module, "out_features", 0), *(max(p.shape[-2:]) for p in matrices)]))
        states = max(states, 6 + 3 * times if times > 1 else 6)
    each: int = (states * config.hidden_size + 4 * widest) * model.dtype.itemsize
    all_logits = KEEP not in inspect.signature(model.forward).parameters
    return each + (4 * config.vocab_size if all_logits else 0)
