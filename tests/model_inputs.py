"""Inputs for the models of `every_model`: prompts, and pictures or sounds if a generic recipe fits the model.

A recipe is a shape of `pixel_values` (or of the audio input) and the names and values of further arguments. The first recipe that
`get_image_features()` or forward() of the model accepts is used; the model determines the number of tokens of a picture. Model
and inputs are on the CPU, where an index out of bounds is an exception; on a GPU it ends the CUDA context of the process.
"""

import inspect
import itertools
from collections.abc import Iterator

import torch
from models import prompts

ROWS = 3
BEGINS = 52  # position of the pictures: after all left padding, before the holes at the end


def text(model, padding: str) -> dict:
    inputs = prompts(padding, "cpu")
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = prompts("no_padding", "cpu", length=40)["input_ids"]
    canvas = getattr(model.config, "canvas_length", None)
    if canvas and "attention_mask" in inputs:  # as in its generate(): without one the canvas reads the padding
        inputs["decoder_attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], (0, canvas), value=1)
    return inputs


def with_picture(model, padding: str) -> dict | None:
    """A prompt with one picture per row; None if no recipe fits."""
    found = _picture(model)
    ids = _ids_of_pictures(model.config)
    if found is None or ids is None:
        return None
    pixels, tokens = found
    begin, image, end = ids
    inputs = prompts(padding, "cpu")
    placed = torch.tensor([*begin, *[image] * tokens, *end]).expand(ROWS, -1)
    out = {"input_ids": torch.cat([inputs["input_ids"][:, :BEGINS], placed, inputs["input_ids"][:, BEGINS:]], 1)}
    if "attention_mask" in inputs:
        mask = inputs["attention_mask"]
        out["attention_mask"] = torch.cat([mask[:, :BEGINS], torch.ones_like(placed), mask[:, BEGINS:]], 1)
    accepted = inspect.signature(model.forward).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in accepted:
            out[name] = (out["input_ids"] == image).long()
    return out | pixels


def _ids_of_pictures(config) -> tuple[list[int], int, list[int]] | None:
    def value(*names):
        return next((getattr(config, n) for n in names if isinstance(getattr(config, n, None), int)), None)

    image = value("image_token_id", "image_token_index", "img_token_id", "image_patch_id", "media_placeholder_token_id")
    if image is None:
        return None
    begin, end = value("vision_start_token_id", "image_start_token_id"), value("vision_end_token_id", "image_end_token_id")
    return [begin] if begin is not None else [], image, [end] if end is not None else []


def _vision(config):
    for name in ("vision_config", "image_config", "vit_config", "encoder"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    thinker = getattr(config, "thinker_config", None)
    return None if thinker is None else _vision(thinker)


def _number(config, *names, default):
    value = next((getattr(config, name) for name in names if getattr(config, name, None)), default)
    return value[0] if isinstance(value, (list, tuple)) else value


def _pictures(model) -> Iterator[dict]:
    """All recipes for a picture, with their further arguments."""
    vision = _vision(model.config)
    if vision is None:
        return
    patch = _number(vision, "patch_size", default=4)
    merge = _number(vision, "spatial_merge_size", "merge_size", default=1)
    time = _number(vision, "temporal_patch_size", "patch_temporal", default=1)
    sides = dict.fromkeys([_number(vision, "image_size", default=4 * patch), 4 * patch, 4 * patch * merge])
    generator = torch.Generator().manual_seed(3)
    for side in sides:
        across = side // patch
        patches = across * across
        shapes = [(ROWS, 3, side, side), (ROWS, patches, 3 * patch * patch), (ROWS * patches, 3 * time * patch * patch)]
        shapes += [(ROWS, 1, 3, side, side), (ROWS, 5, 3, side, side)]
        shapes += [(ROWS * patches, 3, patch, patch), (ROWS * patches, time, 3, patch, patch)]
        beside = dict.fromkeys(("image_grid_thw", "grid_thw"), [[1, across, across]] * ROWS)
        beside |= dict.fromkeys(("image_grid_hw", "spatial_shapes", "target_sizes"), [[across, across]] * ROWS)
        beside |= {"image_sizes": [[side, side]] * ROWS, "num_local_patches": [0] * ROWS, "images_per_sample": [1] * ROWS}
        beside |= {"qformer_input_ids": [[5, 6, 7]] * ROWS, "image_attention_mask": [[[1]] * 96] * ROWS}
        latent = getattr(model.config, "latent_query_num", 0)
        beside["image_embeds_position_mask"] = [[1 <= i <= latent for i in range(96)]] * ROWS
        arguments = {name: torch.tensor(value) for name, value in beside.items()}
        places = torch.stack(torch.meshgrid(torch.arange(across), torch.arange(across), indexing="ij"), -1).view(1, patches, 2)
        arguments |= {name: places.expand(ROWS, -1, -1) for name in ("pixel_position_ids", "image_position_ids")}
        for shape in shapes:
            pixels = torch.randn(shape, generator=generator)
            if len(shape) == 5 and shape[1] == 5:  # a small one and four tiles of one twice as large
                arguments["image_sizes"] = torch.full((ROWS, 2), 2 * side)
            for mask in ((ROWS, patches), (ROWS, 1, side, side)):
                whole = torch.ones(mask, dtype=torch.long)
                yield {"pixel_values": pixels, **arguments, "pixel_attention_mask": whole}


@torch.no_grad()
def _picture(model) -> tuple[dict, int] | None:
    """(arguments of forward() for the pictures, number of tokens of one)."""
    features = getattr(model, "get_image_features", None) or getattr(getattr(model, "model", None), "get_image_features", None)
    if features is None:
        return None
    takes = inspect.signature(features).parameters
    accepted = inspect.signature(model.forward).parameters
    for arguments in _pictures(model):
        given = {name: value for name, value in arguments.items() if name in takes}
        try:
            size = _size(features(**given))
        except Exception:
            continue  # another recipe
        if size and size % ROWS == 0:
            return {name: value for name, value in given.items() if name in accepted}, size // ROWS
    return None


def _size(out) -> int:
    """Number of tokens in the result of get_image_features()."""
    if hasattr(out, "keys"):
        out = next(out[name] for name in ("pooler_output", "last_hidden_state") if out.get(name) is not None)
    if isinstance(out, torch.Tensor):
        return out.numel() // out.shape[-1]
    return sum(_size(each) for each in out)


def others(model) -> Iterator[dict]:
    """Inputs of models that need more than text: sounds, codes, pictures for an encoder."""
    config = model.config
    generator = torch.Generator().manual_seed(4)
    decoder = {"decoder_input_ids": prompts("no_padding", "cpu", length=40)["input_ids"]}
    ids = prompts("no_padding", "cpu")["input_ids"]
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    names = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "input_size")
    mels = [getattr(part, name) for part in parts if part is not None for name in names if getattr(part, name, 0)]
    for mel, frames in itertools.product(dict.fromkeys([*mels, 80, 320]), (1024, 96)):
        for shape in ((ROWS, mel, frames), (ROWS, frames, mel)):
            sound = torch.randn(shape, generator=generator)
            live = torch.ones(ROWS, frames, dtype=torch.long)
            live[0, -frames // 3 :] = 0
            for inputs in ({"input_features": sound, "attention_mask": live}, {"input_features": sound}):
                yield {**inputs, **decoder}
                yield inputs
            yield {"input_features": sound, "attention_mask": live, "input_ids": ids}
    for samples in (1920, 16000):
        yield {"input_values": torch.randn(ROWS, samples, generator=generator), **decoder}
        yield {"input_values": torch.randn(ROWS, samples, generator=generator)}
    accepted = inspect.signature(model.forward).parameters
    for pictures in itertools.islice(_pictures(model), 14):
        given = {name: value for name, value in pictures.items() if name in accepted}
        yield {**given, "input_ids": ids}
        yield {**given, **decoder}
    for side in (4, 16):
        yield {"flattened_patches": torch.rand(ROWS, 10, 2 + 3 * side * side, generator=generator), **decoder}
    yield {"input_ids": ids, "bbox": torch.rand(*ids.shape, 4, generator=generator), **decoder}
    for channels in (config.__dict__.get("num_codebooks"), 4, 8, 9, 32, 33):
        if channels:
            yield {"input_ids": ids[..., None].expand(-1, -1, channels) % 60}
            yield {"input_ids": ids, "decoder_input_ids": decoder["decoder_input_ids"][..., None].expand(-1, -1, channels) % 60}
            yield {"input_ids": ids, "decoder_input_ids": decoder["decoder_input_ids"].repeat_interleave(channels, 0) % 60}
    yield {"input_ids": ids[:, :2] % 60}
    yield {"input_ids": ids % 60, **decoder}
