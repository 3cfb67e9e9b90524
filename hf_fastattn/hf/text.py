"""The layers that read the text of a model, and their rotary embeddings."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .attention import is_attention
from .caches import CACHE
from .longrope import rope_types


def set_text_attention(model: PreTrainedModel, name: str) -> None:
    """set_attn_implementation(name) only for the part that reads text; vision and audio towers keep their attention."""
    text = model.config.get_text_config(decoder=True)
    parts = [key for key in model.config.sub_configs if getattr(model.config, key, None) is text]
    model.set_attn_implementation({"": name, **{key: name for key in parts}})


def text_layers(model: PreTrainedModel) -> tuple[PreTrainedModel, dict[torch.nn.Module, torch.nn.Module]]:
    """(the innermost model that reads the text, its layers by their self-attention modules)."""
    attention = [module for module in model.modules() if is_attention(module)]
    text = model.config.get_text_config(decoder=True)
    configs = [getattr(module, "config", None) for module in attention]
    if not any(config is text for config in configs):
        text = model.config  # some configurations create a new one for their decoder at every call (Whisper)
    found = [module for module, config in zip(attention, configs, strict=True) if config is text]
    decoder, layers = model, dict[torch.nn.Module, torch.nn.Module]()
    for inner in model.modules():  # outer modules come first
        if isinstance(inner, PreTrainedModel):
            inside = _layers_around(inner)
            if found and all(module in inside for module in found):
                decoder, layers = inner, {module: inside[module] for module in found}
    return decoder, layers


def step_modules(model: PreTrainedModel) -> set[torch.nn.Module]:
    """The modules that a decode step runs: all of a language model; of one that also reads images or sound, the decoder and the
    head."""
    head = model.get_output_embeddings()
    if model.config.get_text_config(decoder=True) is model.config:
        return set(model.modules())
    return {*model.get_decoder().modules(), *(() if head is None else head.modules())}


def _layers_around(model: PreTrainedModel) -> dict[torch.nn.Module, torch.nn.Module]:
    """For each self-attention module, the outermost member of a ModuleList that contains it (possibly itself)."""
    layers: dict[torch.nn.Module, torch.nn.Module] = {}
    for members in model.modules():
        for member in members if isinstance(members, torch.nn.ModuleList) else ():
            for module in member.modules():
                if is_attention(module):
                    layers.setdefault(module, member)
    return layers


def rotary_buffers(model: PreTrainedModel, decoder: PreTrainedModel) -> list[tuple[str, str, torch.Tensor]]:
    """The frequencies of a decoder's rotary embeddings: (path of the module in the model, name of its buffer, the buffer)."""
    inside = set(decoder.modules())
    return [
        (path, name, tensor)
        for path, module in model.named_modules()
        for name, tensor in (module._buffers.items() if module in inside else ())
        if tensor is not None and name.endswith("inv_freq") and "original" not in name
    ]


def changing_rope(decoder: PreTrainedModel) -> str | None:
    """The rope_type of a rotary embedding in a decoder whose frequencies change with the length of the text, or None."""
    kinds = (kind for module in decoder.modules() for kind in rope_types(module).values())
    return next((str(kind) for kind in kinds if kind in ("dynamic", "longrope")), None)


GRIDS = ("image_grid_thw", "video_grid_thw", "pixel_values", "pixel_values_videos")  # inputs with positions in sections


def has_sections(config: PreTrainedConfig) -> bool:
    """Whether a model's positions have three sections (time, height, width), which differ for images and videos."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return any("mrope_section" in each for each in (rope, *rope.values()) if isinstance(each, dict))


class LongPast:
    """A fake cache that reports many tokens and returns only the new ones, in reverse order."""

    is_initialized = True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 1 << 20

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states.flip(2), value_states.flip(2)


def run_text(decoder: PreTrainedModel, positions: torch.Tensor, past: LongPast | None = None) -> None:
    """Run a decoder over equal tokens at these positions (rows, tokens), with an all-zero mask."""
    mask = torch.zeros(1, 1, 1, 1, device=positions.device)  # a 4-D mask is passed through unchanged
    ids = torch.zeros_like(positions)
    decoder(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=past is not None, **{CACHE: past})
