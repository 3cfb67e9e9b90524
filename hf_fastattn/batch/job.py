"""A call of generate_batch(): its arguments are checked, its pages are allocated, and its loop runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .. import hf, registry
from ..caches import paged
from ..caches.memory import free_bytes
from ..caches.paged import GROUP, PagedStorage, windows_of
from ..caches.pages import Pool, check_size
from ..kernels.checks import is_count
from .loop import KEEP, Loop
from .pick import Picker
from .requests import CHILD, BatchError, Row

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
    "speculation_type": (None,),
    "assistant_early_exit": (None,),
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


class Asked(NamedTuple):
    """What a call asks for. config: of generation. limit: the most new tokens of a prompt, by its length."""

    config: hf.GenerationConfig
    limit: Callable[[int], int]
    tokenizer: Any
    processors: Sequence[Any] | None

    @property
    def copies(self) -> int:
        return self.config.num_return_sequences or 1


class Text(NamedTuple):
    """The most tokens of a text, and how many of them are behind a prompt that another text of the call has too."""

    tokens: int
    own: int


class Settings(NamedTuple):
    """The sizes of a job. windows: of each layer; None if it sees all tokens. pages: numbers of pages, for layers of each of
    windows_of(windows). width: the most pages of a text. budget: the most tokens of prompts in a forward."""

    size: int
    rows: int
    windows: list[int | None]
    pages: list[int]
    width: int
    budget: int
    share: bool
    logprobs: bool


def why_not_backend(name: str) -> str | None:
    """Why attention of this name cannot serve a job."""
    if name in registry.names() and registry.get(name).packed and not registry.get(name).invariant:
        return None
    return f"attn_implementation={name!r} does not read prompts of several texts as one row, as 'lean' does"


def why_not(model: hf.PreTrainedModel, kinds: Sequence[hf.Kind], others: str | None) -> str | None:
    """Why K and V of this model cannot be in pages. others: a reason that the caller knows."""
    if (reason := others or paged.why_not(model.config, kinds)) is not None:
        return reason
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
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence) or not all(is_count(token) for token in ids):
            raise TypeError(f"{_TAKES}; prompt {index} is {ids!r:.60}.")
        if not ids:
            raise ValueError(f"Prompt {index} is empty. A text is generated from at least one token, such as bos_token_id.")
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise ValueError(
                f"Prompt {index} has ids from {min(ids)} to {max(ids)}; the model has those from 0 to {vocabulary - 1}."
            )
        prompts.append([int(token) for token in ids])
    return prompts


def check_type(name: str, value: object, wanted: type) -> None:
    if not isinstance(value, wanted | None):
        raise TypeError(f"{name} is a {wanted.__name__} or None; got a {type(value).__name__}.")


def asked_of(model: hf.PreTrainedModel, generation_config: hf.GenerationConfig | None, kwargs: dict[str, Any]) -> Asked:
    """What a call asks for. kwargs: of the call, without max_new_tokens. Raises ValueError, with the reason, for what it would
    ignore."""
    kwargs = dict(kwargs)
    check_type("generation_config", generation_config, hf.GenerationConfig)
    if kwargs.get("cache_implementation") == "paged":
        raise ValueError(
            "generate(cache_implementation='paged') reads padding as text. Leave it out, or call generate_batch() with a list of "
            "prompts without padding, each a list of ids."
        )
    known = {name: kwargs.pop(name, None) for name in _KNOWN}
    config, limit, others = hf.batch_settings(model, generation_config, kwargs)
    if others := {name: value for name, value in others.items() if value is not None}:
        raise ValueError(
            f"generate_batch() does not support {', '.join(map(repr, others))}. It takes the fields of a GenerationConfig, "
            "max_new_tokens (a number, or one for each prompt), tokenizer and logits_processor; for others use generate()."
        )
    own = model.generation_config.cache_implementation  # the default of the checkpoint, which patch() replaces
    for name, neutral in (_REFUSED | {"cache_implementation": (None, own)}).items():
        if (value := getattr(config, name, None)) not in neutral:
            raise ValueError(f"generate_batch() does not support {name}={value!r:.60}. Leave it out, or use generate().")
    for name in ("num_return_sequences", "prefill_chunk_size"):
        if not is_count(value := getattr(config, name) or 1) or value < 1:
            raise ValueError(f"{name} must be an integer, at least 1; got {value!r}.")
    if config.stop_strings and known["tokenizer"] is None:
        raise ValueError("stop_strings need the tokenizer: pass tokenizer=... to generate_batch().")
    return Asked(config, limit, known["tokenizer"], known["logits_processor"])


def limits_of(model: hf.PreTrainedModel, asked: Asked, prompts: list[list[int]], given: Any) -> list[int]:
    """The most new tokens of each prompt. given: max_new_tokens of the call. Raises ValueError."""
    each = given if isinstance(given, (list, tuple)) else None
    if given is not None and each is None:
        each = [given] * len(prompts)
    if each is not None and len(each) != len(prompts):
        raise ValueError(f"max_new_tokens has {len(each)} numbers for {len(prompts)} prompts. Pass one number, or one for each.")
    new = [asked.limit(len(ids)) for ids in prompts] if each is None else each
    for index, count in enumerate(new):
        if not is_count(count) or count < 1:
            raise ValueError(f"max_new_tokens counts new tokens: an integer, at least 1; got {count!r} for prompt {index}.")
    longest = max(map(lambda ids, count: len(ids) + count, prompts, new))
    name = type(model).__name__
    if (most := hf.longest_rotated(model)) is not None and longest > most:
        raise ValueError(
            f"A text of this call may have {longest} tokens, and the rotary frequencies of this {name} change for all rows of a "
            f"batch at {most}. Ask for at most {most} tokens with the prompt, or use generate()."
        )
    if (most := hf.longest_embedded(model)) is not None and longest - 1 > most:  # the last token is not read
        raise ValueError(
            f"A text of this call may have {longest} tokens, and this {name} has a table of {most} positions. Ask for at most "
            f"{most + 1} tokens with the prompt."
        )
    return [int(count) for count in new]


def settings_of(
    model: hf.PreTrainedModel,
    asked: Asked,
    texts: list[Text],
    batching: hf.ContinuousBatchingConfig | None,
    kinds: Sequence[hf.Kind],
    held: int = 0,
) -> Settings:
    """The sizes of a job. kinds: of the layers. held: bytes that can be freed for its pages.
    Raises ValueError."""
    batching = getattr(asked.config, "continuous_batching_config", None) if batching is None else batching
    check_type("continuous_batching_config", batching, hf.ContinuousBatchingConfig)
    size = SIZE if batching is None else hf.page_size_of(batching)
    check_size(size)
    rows = _given(batching, "max_requests_per_batch") or min(MOST_ROWS, len(texts))
    part = _given(batching, "max_memory_percent") or SHARE
    budget = _given(batching, "max_batch_tokens") or asked.config.prefill_chunk_size or BUDGET
    windows = [kind.window for kind in kinds]
    share = bool(getattr(batching, "allow_block_sharing", True))
    lengths = [text.tokens for text in texts]
    own = [min(text.tokens, text.own + size) for text in texts] if share else lengths
    pages = _needed(sorted(own, reverse=True)[:rows], windows, size, budget)
    held_pages = range(0 if None in windows else 1, len(pages))  # those that take memory
    if (given := _given(batching, "num_blocks")) is not None:
        for index in held_pages:
            pages[index] = given if index == 0 else min(given, pages[index])
    elif (free := free_bytes(model.device)) is not None:
        part *= (free + held) / bytes_of(model, windows, size, pages)
        for index in held_pages:
            pages[index] = max(1, min(pages[index], int(pages[index] * part)))
    return Settings(
        size,
        rows,
        windows,
        [count + 1 for count in pages],
        -(-max(lengths) // size),
        budget,
        share,
        bool(getattr(batching, "return_logprobs", False)),
    )


def room_for(rows: list[Row], model: hf.PreTrainedModel) -> list[Text]:
    """The texts for which a manager makes room: as many as a job has rows, of the longest length that waits, rounded
    up to a power of 2. Without a GPU, whose free memory limits them, twice as many as wait."""
    longest = 1 << max(len(row.prompt) + row.limit - 1 for row in rows).bit_length()
    waiting = 2 * sum(row.copies for row in rows)
    return [Text(longest, longest)] * (MOST_ROWS if model.device.type == "cuda" else min(MOST_ROWS, max(8, waiting)))


def _given(batching: hf.ContinuousBatchingConfig | None, name: str) -> Any:
    value = getattr(batching, name, None)
    whole = name == "max_memory_percent" or is_count(value)
    if value is not None and not (whole and value > 0):
        raise ValueError(
            f"{name} of the ContinuousBatchingConfig must be {'' if whole else 'an integer '}above 0; got {value!r}."
        )
    return value


def texts_of(prompts: list[list[int]], new: list[int], copies: int) -> list[Text]:
    """The texts of prompts with so many new tokens, each of which is continued so many times."""
    both = [(len(ids) + count, count) for ids, count in zip(prompts, new, strict=True)]
    return [Text(tokens, own if copy else tokens) for tokens, own in both for copy in range(copies)]


def _needed(texts: list[int], windows: Sequence[int | None], size: int, budget: int) -> list[int]:
    """The pages of texts of these lengths, for layers of each window, with those that a forward of `budget` tokens writes."""
    pools = [Pool(1, size, window) for window in windows_of(windows)]
    full = sum(map(pools[0].needed, texts))
    return [full, *(min(full, sum(pool.needed(text) + 1 for text in texts) + -(-budget // size)) for pool in pools[1:])]


def bytes_of(model: hf.PreTrainedModel, windows: Sequence[int | None], size: int, pages: Sequence[int]) -> int:
    """The bytes of so many pages, for layers of each of windows_of(windows)."""
    counts = dict(zip(windows_of(windows), pages, strict=True))
    shapes = zip(hf.layer_shapes(model.config), windows, strict=True)
    tokens = sum(shape.num_kv_heads * (shape.head_dim + shape.value_dim) * counts[window] for shape, window in shapes)
    return tokens * size * model.dtype.itemsize


def most_members(model: hf.PreTrainedModel) -> int:
    """The most rows whose queries are one block of a decode kernel; 1 if no layer sees all tokens."""
    if all(kind.window is not None for kind in hf.layer_kinds(model.config)):
        return 1
    heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", GROUP)
    return max(1, GROUP * min(shape.num_kv_heads for shape in hf.layer_shapes(model.config)) // heads)


def is_short(model: hf.PreTrainedModel, settings: Settings) -> bool:
    """Whether the pages of a call do not fit into the memory that is free now."""
    free = free_bytes(model.device)
    return free is not None and bytes_of(model, settings.windows, settings.size, settings.pages) > free * SHARE


def loop_of(
    model: hf.PreTrainedModel,
    storage: PagedStorage,
    asked: Asked,
    settings: Settings,
    decode: Callable[..., Any],
    read: Callable[..., Any],
    fingerprint: Callable[[], object],
) -> Loop:
    """The loop of a job over an empty storage. Its arguments are those of `Loop`."""
    config = asked.config
    picker = Picker(model, config, asked.processors, settings.logprobs)
    picker.make_room(storage.most_rows, storage.width * storage.pages.size + 1, model.device)
    return Loop(
        storage,
        picker,
        decode,
        read,
        keeps=hf.takes_argument(model, KEEP),
        most=settings.rows,
        budget=settings.budget,
        ends=frozenset(hf.ends_of(config.eos_token_id)),
        stops=hf.StringEnds(asked.tokenizer, config.stop_strings) if config.stop_strings else None,
        share=settings.share,
        fingerprint=fingerprint,
        group=most_members(model),
    )


def run(
    loop: Loop, prompts: list[list[int]], new: list[int], copies: int, stamped: bool, progress: Callable[[int], object] | None
) -> dict[str, Any]:
    """The results of all prompts, by id, in the order of the prompts. Raises BatchError if a request has failed."""
    names = [f"req_{index}" for index in range(len(prompts))]
    loop.waiting += [Row(name, ids, count, copies, stamped) for name, ids, count in zip(names, prompts, new, strict=True)]
    told = 0
    while loop.busy:
        loop.step()
        if progress is not None and len(loop.results) > told:
            progress(len(loop.results) - told)
            told = len(loop.results)
    ids = [key for name in names for key in (*(f"{name}{CHILD}{index}" for index in range(copies - 1)), name)]
    results = {key: loop.results[key] for key in ids}
    if failed := [key for key, result in results.items() if result.error is not None]:
        some = "; ".join(f"{key}: {results[key].error}" for key in failed[:3])
        raise BatchError(f"{len(failed)} of {len(results)} requests have failed ({some}). The others are in `results`.", results)
    return results
