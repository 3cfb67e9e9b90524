"""The name of the argument that is the cache, and what each layer of a model keeps in it."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any, Literal

from transformers import PreTrainedConfig, __version__, cache_utils
from transformers.cache_utils import get_layer_types_and_kwargs

from .messages import warn_once
from .source import modeling_code, modeling_source
from .version import number_of

OTHERS = "use a DynamicCache"
CACHE = "cache" if number_of(__version__) >= (5, 24) else "past_key_values"  # the argument and the output of models
CACHES = tuple(dict.fromkeys((CACHE, "past_key_values")))  # Transformers renames the old name


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a model or of generate(), or None. If both names are given, the present one counts."""
    return next((arguments[name] for name in CACHES if name in arguments), None)


class NoLayer(getattr(cache_utils, "DummyLayer", object)):  # type: ignore[misc]  # Transformers has one from 5.19 on
    """What a cache holds for a layer without a cache."""

    keys = values = None
    is_compileable, is_croppable, is_initialized = False, True, True

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None: ...
    def crop(self, tokens_to_remove: int) -> None: ...
    def activate_past_recording(self) -> None: ...


@dataclass(frozen=True)
class Kind:
    """What a layer keeps: K and V of all tokens ("full") or of a sliding window ("window"), a recurrent state in place of them
    ("state") or besides them ("both"), or nothing ("none").

    window: number of tokens that a query sees, itself included; None if it sees all of them. states: how many convolutions, and
    recurrences, the state may have.
    """

    name: Literal["full", "window", "state", "both", "none"]
    window: int | None = None
    states: int = 0

    @property
    def has_kv(self) -> bool:
        return self.name not in ("state", "none")

    def sees(self, tokens: int) -> int:
        """How many of `tokens` earlier tokens a query sees, whose K and V the layer keeps."""
        if not self.has_kv:
            return 0
        return tokens if self.window is None else min(tokens, self.window - 1)


def layer_kinds(config: PreTrainedConfig) -> tuple[Kind, ...]:
    """The kind of each layer.

    The masks that the code of the models requests decide about a window. A window of the configuration that they do not have is
    reported once, as a warning. A layer without a cache, or that reads K and V of an earlier layer, is of kind "none". Raises
    ValueError for configs with other kinds of layers (chunks, latent or sparse attention), for a window that is no number of
    tokens, for models without attention, and for models that add layers to their cache.
    """
    text = config.get_text_config(decoder=True)
    config_class: type = type(text)
    name = type(config).__name__
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder, and these caches are for decoder-only models; {OTHERS}.")
    if _adds_layers(config_class):
        raise ValueError(f"{name} adds layers to its cache, in which it runs some of its layers again; {OTHERS}.")
    stock, options = get_layer_types_and_kwargs(text)
    if isinstance(options, dict):  # before 5.19, one for all layers
        options = [options] * len(stock)
    if getattr(text, "layer_types", None) is None:
        stock = getattr(text, "layers_block_type", stock)  # the name in RecurrentGemma, 5.17
    stock = stock[: text.num_hidden_layers]  # early exit lowers only num_hidden_layers
    missing = text.num_hidden_layers - len(stock)
    if missing == getattr(text, "num_kv_shared_layers", None):  # before 5.19 layers that read K and V of others are not listed
        stock, options = [*stock, *["dummy"] * missing], [*options, *[{}] * missing]
    types = [_masked(text, kind) for kind in stock]
    others = sorted(set(types) - {FULL, SLIDING, *_STATES, *_NONE})
    if others or len(types) != text.num_hidden_layers or not {FULL, SLIDING, *_BOTH}.intersection(types):
        kinds = ", ".join(others or sorted(set(types))) or "none of these"
        raise ValueError(
            f"These caches hold full, sliding and linear attention layers, at least one of them with K and V, and {name} has "
            f"{kinds}; {OTHERS}."
        )
    if set(_STATES).intersection(types) and not _UPDATES.search(modeling_source(config_class)):
        raise ValueError(f"{name} keeps its recurrent states outside of a cache of Transformers, or replaces them; {OTHERS}.")
    unread = {_SIZES[was] for was, now in zip(stock, types, strict=True) if now == FULL != was}
    for field in sorted(unread):
        if (size := getattr(text, field, None)) is None:
            continue
        if (reason := why_unknown_masks(config)) is not None:
            said = f"{reason}. The caches of hf_fastattn keep all tokens, which is right under any mask but takes more memory."
        else:
            said = (
                f"{config_class.__name__} has {field}={size!r}, and the code of its models has no mask for it. The caches of "
                "hf_fastattn keep all tokens, so that generate() returns what it returns with use_cache=False; Transformers' own "
                f"caches drop tokens. Set {field} to None, and do not set layer_types."
            )
        warn_once(said)
    own = getattr(text, "sliding_window", None) if SLIDING in types else None
    return tuple(_kind(now, each, own) for now, each in zip(types, options, strict=False))


def _kind(name: str, options: Mapping[str, Any], window: int | None) -> Kind:
    """The kind of a layer. name, options: of Transformers. window: that of a sliding layer without one of its own."""
    if name in _NONE:
        return Kind("none")
    own = options.get("sliding_window", window) if name in (SLIDING, _BOTH[1]) else None
    if name in (SLIDING, _BOTH[1]):
        check_window(own)
    if name in _STATES:
        return Kind("both" if name in _BOTH else "state", own, options.get("number_of_states", 1))
    return Kind("full") if own is None else Kind("window", own)


def refuse_states(config: PreTrainedConfig, what: str, remedy: str) -> None:
    """Raise ValueError for a model with layers of other kinds than full and window. what: needs these. remedy: a sentence."""
    held = {
        "state": "recurrent states",
        "both": "recurrent states besides K and V",
        "none": "layers without K and V of their own",
    }
    if others := sorted({kind.name for kind in layer_kinds(config)} - {"full", "window"}):
        has = " and ".join(held[other] for other in others)
        raise ValueError(f"{what} layers that all have K and V, and {type(config).__name__} has {has}. {remedy}")


def check_window(window: object) -> None:
    """Raise ValueError for a sliding window of a configuration that is no number of tokens."""
    if type(window) is not int or window < 1:
        raise ValueError(
            "The sliding_window of a model's configuration counts the tokens that a query sees, itself included: an integer, at "
            f"least 1; got {window!r}. Correct the configuration."
        )


def has_window(config: Any) -> bool:
    """Whether a layer may read the sliding-window mask that the code of the models requests."""
    by_kind, _ = _local_masks(config) or (False, None)
    return not by_kind or SLIDING in (getattr(config, "layer_types", None) or (SLIDING,))


def as_masked(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration for a function that chooses masks by it alone: without fields that the models do not choose theirs by."""
    text = config.get_text_config(decoder=True)
    by_kind, masks = _local_masks(text) or (True, frozenset())
    unread = ["layer_types", *(name for kind, name in _SIZES.items() if kind not in masks)]
    if by_kind or all(getattr(text, name, None) is None for name in unread):
        return config
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    vars(text).update(dict.fromkeys(unread))
    del vars(text)["layer_types"]  # its presence alone is read
    return config


def why_unknown_masks(config: PreTrainedConfig) -> str | None:
    """The reason why masks of the models' layers cannot be made for them; None if they can."""
    text = config.get_text_config(decoder=True)
    sizes = [f"{name}={size!r}" for name in _SIZES.values() if (size := getattr(text, name, None)) is not None]
    if not sizes or _local_masks(text) is not None:
        return None
    return f"{type(text).__name__} has {' and '.join(sizes)}, and the code of its models does not show which layers mask by it"


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_BOTH = "hybrid", "hybrid_sliding"
_STATES = "linear_attention", "conv", *_BOTH
_NONE = "dummy", "moe", "mlp"
_UPDATES = re.compile(r"\.update_(conv|recurrent)_state\(")
_SIZES = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}
_FUNCTIONS = {SLIDING: "create_sliding_window_causal_mask", CHUNKED: "create_chunked_causal_mask"}
_BY_CONFIG = "create_masks_for_generate"
_ONE_FOR_ALL = re.compile(rf"\bcreate_causal_mask\s+if\s+[\w.]+\.sliding_window\s+is\s+None\s+else\s+{_FUNCTIONS[SLIDING]}\b")
_LOCAL = re.compile(r"\w*(sliding|chunk|local)\w*(mask|overlay)\w*")


def _masked(text: PreTrainedConfig, kind: str) -> str:
    """The kind of a layer of full or local attention by the mask that it gets; other kinds unchanged.

    Where the code does not show a window, there is none: a cache that keeps all tokens is right under any mask.
    """
    if kind != FULL and kind not in _SIZES:
        return kind
    by_kind, masks = _local_masks(text) or (False, frozenset())
    if by_kind:
        return kind if kind in masks else FULL
    return SLIDING if SLIDING in masks and getattr(text, "sliding_window", None) is not None else FULL


def _local_masks(text: PreTrainedConfig) -> tuple[bool, frozenset[str]] | None:
    """(whether the kind of a layer decides its mask; the kinds of local attention for which the models have one).

    None if their code does not show it.
    """
    config_class: type = type(text)
    found = _found_in(config_class)
    if _BY_CONFIG in found:  # as Transformers' own caches do
        return True, frozenset(_SIZES)
    if "layer_types" in found and getattr(text, "layer_types", None) is not None:
        return True, frozenset(kind for kind, function in _FUNCTIONS.items() if function in found)
    if "layer_types" not in found and _ONE_FOR_ALL.pattern in found:
        return False, frozenset({SLIDING})
    return None if _LOCAL.pattern in found else (False, frozenset())


@cache
def _found_in(config_class: type) -> frozenset[str]:
    """The names in functions of the models of a config class that tell how they choose masks, and the patterns that it has."""
    for cls in takewhile(lambda each: each is not PreTrainedConfig, config_class.__mro__):
        if "create_causal_mask" in (source := modeling_source(cls)):
            break  # the file that creates the causal masks: its own, or that of a class from which it inherits
    else:
        return frozenset({_LOCAL.pattern})
    names: set[str] = set()
    for code in modeling_code(cls):
        # A method of this name is for compiled calls of generate() alone. The body of a class only defines names.
        if _BY_CONFIG not in code.co_qualname.split(".") and code.co_flags & inspect.CO_OPTIMIZED:
            names.update(code.co_names, code.co_varnames, code.co_cellvars)
    found = names & {"layer_types", _BY_CONFIG, *_FUNCTIONS.values()}
    found |= {_LOCAL.pattern for name in names if _LOCAL.fullmatch(name)}
    return frozenset(found | {_ONE_FOR_ALL.pattern} if _ONE_FOR_ALL.search(source) else found)


@cache
def _adds_layers(config_class: type) -> bool:
    adds = re.compile(r"(?m)^[^#\n]*\b(cache|past_key_values)\.layers( \+=|\.append|\.extend)")
    return adds.search(modeling_source(config_class)) is not None
