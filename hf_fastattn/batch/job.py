"""A call of generate_batch(): its arguments are checked, its pages are allocated, and its loop runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch

from .. import hf
from ..caches.layers import free_bytes
from ..caches.paged import PagedStorage
from .loop import KEEP, Loop
from .pick import Picker
from .requests import BatchError, Row

SIZES = (16, 32, 64, 128, 256)  # tokens of a page
SIZE = 64
MOST_ROWS = 256
BUDGET = 8192  # tokens of prompts in a step
SHARE = 0.8  # of the free memory that pages may take

# Settings of a GenerationConfig that change what generate() does, with the value that changes nothing.
_REFUSED: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None,),
    "prompt_lookup_num_tokens": (None,),
    "use_mtp": (None, False),
    "dola_layers": (None,),
    "guidance_scale": (None, 1, 1.0),
    "max_time": (None,),
    "token_healing": (None, False),
    "watermarking_config": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "compile_config": (None,),
    "use_cache": (None, True),
}
_KNOWN = ("tokenizer", "logits_processor")  # arguments of generate() that are also taken here
_TAKES = "generate_batch() takes a list of prompts, each a list of ids (int)"


class Settings(NamedTuple):
    """What a job needs besides its prompts. config: of generation. new: the most new tokens of each prompt."""

    config: hf.GenerationConfig
    new: list[int]
    size: int
    rows: int
    pages: int
    width: int
    budget: int
    share: bool
    logprobs: bool
    tokenizer: Any
    processors: Sequence[Any] | None

    @property
    def copies(self) -> int:
        return self.config.num_return_sequences or 1


def why_not(model: hf.PreTrainedModel, kinds: Sequence[hf.Kind], others: str | None) -> str | None:
    """Why K and V of this model cannot be in pages. others: a reason that the caller knows."""
    config = model.config.get_text_config(decoder=True)
    if others is not None:
        return others
    if getattr(config, "qk_nope_head_dim", None):
        return "it caches latents (MLA), which pages do not hold yet"
    if any(kind.name not in ("full", "window") for kind in kinds):
        return "it has layers with recurrent states, or without K and V of their own, which pages do not hold"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "its weights are on several devices"
    return None


def read_prompts(inputs: Any, vocabulary: int) -> list[list[int]]:
    """The prompts of a call as lists. Raises TypeError and ValueError for others."""
    if isinstance(inputs, (str, bytes, Mapping)) or not isinstance(inputs, (Sequence, torch.Tensor)):
        raise TypeError(f"{_TAKES}; got a {type(inputs).__name__}.")
    prompts: list[list[int]] = []
    for index, ids in enumerate(inputs):
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        if isinstance(ids, str) or not isinstance(ids, Sequence) or not all(isinstance(token, Integral) for token in ids):
            raise TypeError(f"{_TAKES}; prompt {index} is {ids!r:.60}.")
        if not ids:
            raise ValueError(f"Prompt {index} is empty. A text is generated from at least one token, such as bos_token_id.")
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise ValueError(
                f"Prompt {index} has ids from {min(ids)} to {max(ids)}; the model has those from 0 to {vocabulary - 1}."
            )
        prompts.append([int(token) for token in ids])
    return prompts


def settings_of(
    model: hf.PreTrainedModel,
    prompts: list[list[int]],
    generation_config: hf.GenerationConfig | None,
    batching: hf.ContinuousBatchingConfig | None,
    kwargs: dict[str, Any],
    held: int = 0,
) -> Settings:
    """The settings of a call. held: bytes that can be freed for its pages.

    Raises ValueError and TypeError, with the reason, for what it would ignore.
    """
    kwargs = dict(kwargs)
    if kwargs.get("cache_implementation") == "paged":
        raise ValueError(
            "generate(cache_implementation='paged') reads padding as text. Leave it out, or call generate_batch() with a list of "
            "prompts without padding, each a list of ids."
        )
    known = {name: kwargs.pop(name, None) for name in _KNOWN}
    asked = kwargs.pop("max_new_tokens", None)
    each = asked if isinstance(asked, (list, tuple)) else None
    if asked is not None and each is None:
        each = [asked] * len(prompts)
    config, limit, others = hf.batch_settings(model, generation_config, kwargs)
    if others := {name: value for name, value in others.items() if value is not None}:
        raise ValueError(
            f"generate_batch() does not support {', '.join(map(repr, others))}. It takes the fields of a GenerationConfig, "
            "max_new_tokens (a number, or one for each prompt), tokenizer and logits_processor; for others use generate()."
        )
    for name, neutral in _REFUSED.items():
        if (value := getattr(config, name, None)) not in neutral:
            raise ValueError(f"generate_batch() does not support {name}={value!r:.60}. Leave it out, or use generate().")
    if config.stop_strings and known["tokenizer"] is None:
        raise ValueError("stop_strings need the tokenizer: pass tokenizer=... to generate_batch().")
    if each is not None and len(each) != len(prompts):
        raise ValueError(f"max_new_tokens has {len(each)} numbers for {len(prompts)} prompts. Pass one number, or one for each.")
    new = [limit(len(ids)) for ids in prompts] if each is None else each
    for index, count in enumerate(new):
        if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
            raise ValueError(f"max_new_tokens counts new tokens: an integer, at least 1; got {count!r} for prompt {index}.")
    longest = max(map(lambda ids, count: len(ids) + count, prompts, new))
    if (most := hf.longest_rotated(model)) is not None and longest > most:
        raise ValueError(
            f"A text of this call may have {longest} tokens, and the rotary frequencies of this {type(model).__name__} change "
            f"for all rows of a batch at {most}. Ask for at most {most} tokens with the prompt, or use generate()."
        )
    size = SIZE if batching is None else hf.page_size_of(batching)
    if size not in SIZES:
        raise ValueError(f"A page has {', '.join(map(str, SIZES[:-1]))} or {SIZES[-1]} tokens; got page_size={size}.")
    copies = config.num_return_sequences or 1
    rows = _given(batching, "max_requests_per_batch") or min(MOST_ROWS, len(prompts) * copies)
    needs = sorted(
        (-(-(len(ids) + count) // size) for ids, count in zip(prompts, new, strict=True) for _ in range(copies)), reverse=True
    )
    share = _given(batching, "max_memory_percent") or SHARE
    pages = _given(batching, "num_blocks") or _affordable(model, sum(needs[:rows]), size, share, held)
    return Settings(
        config,
        [int(count) for count in new],
        size,
        rows,
        pages + 1,
        needs[0],
        _given(batching, "max_batch_tokens") or config.prefill_chunk_size or BUDGET,
        bool(getattr(batching, "allow_block_sharing", True)),
        bool(getattr(batching, "return_logprobs", False)),
        known["tokenizer"],
        known["logits_processor"],
    )


def _given(batching: hf.ContinuousBatchingConfig | None, name: str) -> Any:
    value = getattr(batching, name, None)
    if value is not None and not value > 0:
        raise ValueError(f"{name} of the ContinuousBatchingConfig must be above 0; got {value!r}.")
    return value


def bytes_of_token(model: hf.PreTrainedModel) -> int:
    """The bytes of K and V of one token in all layers."""
    shapes = hf.layer_shapes(model.config)
    return sum(shape.num_kv_heads * (shape.head_dim + shape.value_dim) for shape in shapes) * model.dtype.itemsize


def _affordable(model: hf.PreTrainedModel, needed: int, size: int, share: float, held: int) -> int:
    """As many of the needed pages as fit into the free memory."""
    free = free_bytes(model.device)
    if free is None:
        return needed
    return max(1, min(needed, int((free + held) * share) // (bytes_of_token(model) * size)))


def is_short(model: hf.PreTrainedModel, settings: Settings) -> bool:
    """Whether the pages of a call do not fit into the memory that is free now."""
    free = free_bytes(model.device)
    return free is not None and settings.pages * settings.size * bytes_of_token(model) > free * SHARE


def loop_of(
    model: hf.PreTrainedModel, storage: PagedStorage, settings: Settings, decode: Callable[..., Any], read: Callable[..., Any]
) -> Loop:
    """The loop of a job over an empty storage."""
    config = settings.config
    picker = Picker(model, config, settings.processors, settings.logprobs)
    picker.make_room(storage.most_rows, storage.width * storage.pages.size + 1, model.device)
    eos = config.eos_token_id
    parameters = [*model.parameters()]
    return Loop(
        storage,
        picker,
        decode,
        read,
        keeps=hf.takes_argument(model, KEEP),
        most=settings.rows,
        budget=settings.budget,
        ends=[] if eos is None else eos if isinstance(eos, (list, tuple)) else [eos],
        stops=hf.stop_check(config, settings.tokenizer),
        share=settings.share,
        fingerprint=lambda: [(p.data_ptr(), p._version if not p.is_inference() else 0) for p in parameters],
    )


def run(
    loop: Loop, prompts: list[list[int]], settings: Settings, stamped: bool, progress: Callable[[int], object] | None
) -> dict[str, Any]:
    """The results of all prompts, by id, in the order of the prompts. Raises BatchError if a request has failed."""
    names = [f"req_{index}" for index in range(len(prompts))]
    loop.waiting += [
        Row(name, ids, new, settings.copies, stamped) for name, ids, new in zip(names, prompts, settings.new, strict=True)
    ]
    told = 0
    while loop.busy:
        loop.step()
        if progress is not None and len(loop.results) > told:
            progress(len(loop.results) - told)
            told = len(loop.results)
    ids = [key for name in names for key in (*(f"{name}__child#{index}" for index in range(settings.copies - 1)), name)]
    results = {key: loop.results[key] for key in ids}
    if failed := [key for key, result in results.items() if result.error is not None]:
        some = "; ".join(f"{key}: {results[key].error}" for key in failed[:3])
        raise BatchError(f"{len(failed)} of {len(results)} requests have failed ({some}). The others are in `results`.", results)
    return results
