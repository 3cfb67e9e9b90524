"""A preallocated cache in a file: one safetensors file with the live K and V and the states of every layer, and metadata."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from .. import hf
from ..kernels.eight_bits import KV_DTYPES
from .buffers import Pair, Part
from .eight_bits import ByteLayer
from .storage import PreallocatedStorage

FORMAT = "hf_fastattn cache 3"
READ = FORMAT, "hf_fastattn cache 2", "hf_fastattn cache 1"  # which had nothing in 8 bits; nor states
BYTES = "keys", "values", "scales", "centre"  # of a layer in 8 bits
_MOST = 100_000_000  # bytes of a header, the limit of safetensors

ModelOrConfig = hf.PreTrainedModel | hf.PreTrainedConfig

# Fields of the configuration that may differ between saving and loading, because K and V do not depend on them.
_FREE = {
    "_name_or_path", "architectures", "attn_implementation", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id",
    "output_attentions", "output_hidden_states", "pad_token_id", "return_dict", "streaming_clamped", "streaming_sinks",
    "streaming_window", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


def config_of(model: ModelOrConfig) -> hf.PreTrainedConfig:
    found = model if isinstance(model, hf.PreTrainedConfig) else getattr(model, "config", None)
    if not isinstance(found, hf.PreTrainedConfig):
        raise TypeError(f"A cache is made for a model or its configuration; got {model!r}.")
    return found


def write(path: str | Path, storage: PreallocatedStorage, model: ModelOrConfig) -> None:
    """Write the live tokens and the states of a storage and the configuration of `model`. Raises OSError if the file cannot be
    written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    _check_whole(model)
    storage.check()
    layers = storage.counted
    seen = {layer.seen for layer in layers}
    if len(seen) > 1:
        counts = ", ".join(f"{layer.seen} in layer {layer.index}" for layer in layers)
        raise ValueError(
            f"The layers of this cache hold different numbers of tokens ({counts}): some did not run, or were given other "
            "K and V. Run the whole model over the text, and save that."
        )
    if seen == {0}:
        raise ValueError("This cache holds no tokens; run the prompt through the model before saving it.")
    tensors = {
        f"{layer.index}.{name}": live.contiguous()
        for layer in layers
        for name, live in zip(layer.names, layer.live(), strict=True)
    }
    tensors |= {f"{layer.index}.centre": layer.centre.contiguous() for layer in layers if isinstance(layer, ByteLayer)}
    states = [part for part in storage.memory() if part.slots is None]
    tensors |= {_name(part): part.tensor.contiguous() for part in states}
    if Path(path).is_dir():
        raise IsADirectoryError(errno.EISDIR, "A cache is saved to one file, and this is a directory", str(path))
    _refuse_special(path)  # the new file would replace a device
    try:
        meta = {"format": FORMAT, "config": _describe(model), "seen": _counts(seen.pop(), len(storage.layers))}
        meta |= {} if storage.kv_dtype is None else {"kv_dtype": storage.kv_dtype}
        save_file(tensors, path, meta | {"states": json.dumps(_sizes(tensors, sorted(map(_name, states))))})
    except SafetensorError as error:
        if (code := re.search(r"os error (\d+)", str(error))) is None:
            raise OSError(f"{path} cannot be written: {error}") from error
        number = int(code[1])
        raise OSError(number, os.strerror(number), str(path), number) from error  # the last one is the number on Windows


def read(
    path: str | Path, kinds: Sequence[hf.Kind], model: ModelOrConfig
) -> tuple[int, str | None, dict[int, tuple[torch.Tensor, ...]], dict[int, dict[str, torch.Tensor]]]:
    """(number of tokens, kv_dtype, K and V of layers (rows, num_kv_heads, kept tokens, head_dim), with scales and centre if they
    are in 8 bits, states of layers) from a file of write().

    Raises ValueError with path and reason if the file is not a cache of `model`, OSError if it cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    _check_whole(model)
    _refuse_special(path)
    # Not mapped to memory: another program may write to the file, or cut it off, at any time.
    with Path(path).open("rb") as file:
        before = os.fstat(file.fileno())
        try:
            meta = _metadata(file)
            _check_meta(path, meta, model)
            file.seek(0)
            tensors = load(file.read())
        except (SafetensorError, EOFError) as error:
            raise ValueError(f"{path} is not a complete safetensors file: {error}. Compute it again.") from error
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ValueError(f"{path} was changed while it was read. Read it again once it is complete.")
    with_kv = [index for index, kind in enumerate(kinds) if kind.has_kv]
    if (kv_dtype := meta.get("kv_dtype")) not in (None, *KV_DTYPES):
        raise ValueError(f"{path} has K and V in {kv_dtype!r}, and this version reads {', '.join(KV_DTYPES)}. Compute it again.")
    parts = {index: BYTES[: 2 if kv_dtype is None or kinds[index].window else 4] for index in with_kv}
    names = {f"{index}.{name}" for index, each in parts.items() for name in each}
    states = _states(path, meta, tensors, kinds)
    names |= {f"{index}.{name}" for index, each in states.items() for name in each}
    if wrong := sorted(tensors.keys() ^ names):
        raise ValueError(f"{path} needs K and V of {len(with_kv)} layers; missing or extra: {', '.join(wrong)}.")
    counted = re.match(r'\{"0": ([1-9]\d{0,8})', meta.get("seen", ""))
    seen = int(counted[1]) if counted else 0
    if not seen or meta["seen"] != _counts(seen, len(kinds)):
        raise ValueError(
            f"{path} has {meta.get('seen')!r:.100} for the tokens seen by each layer, and should have one number, 1 or more, for "
            f"each of {len(kinds)}. Compute it again."
        )
    held = {index: tuple(tensors[f"{index}.{name}"] for name in each) for index, each in parts.items()}
    pairs = {index: _plain(path, index, *each) if len(each) == 4 else (each[0], each[1]) for index, each in held.items()}
    if pairs:
        _check_pairs(path, pairs, [kind.sees(seen) for kind in kinds], seen, model)
    found = [state.shape[0] if state.dim() else 0 for each in states.values() for state in each.values()]
    rows = len(next(iter(pairs.values()))[0]) if pairs else found[0]
    if other := {*found} - {rows}:
        raise ValueError(f"{path} has states of {other.pop()} rows, and others of {rows}. Compute it again.")
    return seen, kv_dtype, held, states


def _plain(
    path: str | Path, index: int, keys: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, centre: torch.Tensor
) -> Pair:
    """Tensors of the shapes and the dtype of these K and V as a model computes them. Raises ValueError unless all four are those
    of a layer in 8 bits."""
    kinds = keys.dtype, values.dtype, scales.dtype
    right = kinds == (torch.uint8, torch.uint8, torch.int32) and keys.dim() == values.dim() == 4
    if not right or scales.shape != (*keys.shape[:3], 1) or centre.shape != (*keys.shape[:2], 1, keys.shape[3]):
        shapes = ", ".join(f"{tuple(x.shape)} in {x.dtype}" for x in (keys, values, scales, centre))
        raise ValueError(
            f"{path} has keys, values, scales and a centre of {shapes} in layer {index}, and needs (rows, KV heads, tokens, "
            "width) in torch.uint8 twice, (rows, KV heads, tokens, 1) in torch.int32 and (rows, KV heads, 1, width). Compute it "
            "again."
        )
    return centre.expand(keys.shape), centre[..., :1].expand(values.shape)


def _name(part: Part) -> str:
    return f"{part.layer}.{part.name}"


def _sizes(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, str]:
    """Shape and dtype of tensors, as a file has them."""
    return {name: f"{[*tensors[name].shape]} {tensors[name].dtype}" for name in names}


def _states(
    path: str | Path, meta: dict[str, str], tensors: dict[str, torch.Tensor], kinds: Sequence[hf.Kind]
) -> dict[int, dict[str, torch.Tensor]]:
    """The states of each layer that has some, by their names. Raises ValueError unless they are those that were written."""
    found = sorted(name for name in tensors if re.fullmatch(r"\d+\.(conv|recurrent)\.\d+", name))
    held: dict[int, dict[str, torch.Tensor]] = {index: {} for index, kind in enumerate(kinds) if kind.states}
    for name in found:
        index, _, state = name.partition(".")
        held.setdefault(int(index), {})[state] = tensors[name]
    now, then = {*_sizes(tensors, found).items()}, meta.get("states", "{}")
    if then != json.dumps(dict(sorted(now))) or [*held] != [index for index, kind in enumerate(kinds) if kind.states]:
        raise ValueError(
            f"{path} needs the recurrent states of each layer with the shapes and dtypes that were saved: {then:.200}; it has "
            f"{dict(sorted(now))!s:.200}. Compute it again."
        )
    return held


def _counts(seen: int, layers: int) -> str:
    return json.dumps({str(index): seen for index in range(layers)})


def _refuse_special(path: str | Path) -> None:
    """Raise ValueError for a FIFO, which would block, a device or a socket. It is not opened."""
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"{path} is a directory, a FIFO, a device or a socket, and a saved cache is a regular file.")


def _metadata(file: BinaryIO) -> dict[str, str]:
    """The metadata of a safetensors file: a length, and so many bytes of JSON."""
    length = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(min(length, _MOST)))
    except (ValueError, RecursionError) as error:
        raise EOFError("its header is no JSON") from error
    found = header.get("__metadata__") if isinstance(header, dict) else None
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def _check_whole(model: ModelOrConfig) -> None:
    if hf.is_shared(model):
        raise ValueError(
            "Under tensor parallelism a cache holds the KV heads of one rank, and no file says which. Save and load caches with "
            "the model on one GPU."
        )


def _describe(model: ModelOrConfig) -> str:
    config = config_of(model).to_dict()
    return json.dumps({k: v for k, v in config.items() if k not in _FREE}, sort_keys=True, default=str)


def _check_meta(path: str | Path, meta: dict[str, str], model: ModelOrConfig) -> None:
    if meta.get("format") not in READ:
        raise ValueError(f"{path} has format {meta.get('format')!r}, and this version reads {FORMAT!r}. Compute it again.")
    try:
        saved = json.loads(meta.get("config", ""))
    except (ValueError, RecursionError):
        saved = None
    if not isinstance(saved, dict):
        raise ValueError(f"{path} has {meta.get('config')!r:.100} where a configuration in JSON should be. Compute it again.")
    wanted = json.loads(_describe(model))
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise ValueError(
                f"{path} was saved for a model with {name}={saved.get(name)!r}, and this one has {name}={wanted.get(name)!r}: "
                "its K and V do not match. Compute it again with this model."
            )


def _check_pairs(path: str | Path, pairs: dict[int, Pair], least: list[int], seen: int, model: ModelOrConfig) -> None:
    """Raise ValueError unless K and V are as the configuration and `seen` say, in all layers with the rows and dtypes of the
    first. least: the number of tokens that each layer keeps of so many."""
    first = min(pairs)
    rows, dtypes, shapes = pairs[first][0].shape[:1], [x.dtype for x in pairs[first]], _shapes(model)
    for index, (keys, values) in pairs.items():
        right = keys.dim() == values.dim() == 4 and 0 not in keys.shape[:2] and keys.shape[:3] == values.shape[:3]
        right = (
            right and keys.shape[:1] == rows and [keys.dtype, values.dtype] == dtypes and least[index] <= keys.shape[2] <= seen
        )
        if not right or (shapes is not None and shapes[index] != (keys.shape[1], keys.shape[3], values.shape[3])):
            sizes = "" if shapes is None else ", of {} KV heads, a key of {} and a value of {}".format(*shapes[index])
            raise ValueError(
                f"{path} has keys {tuple(keys.shape)} in {keys.dtype} and values {tuple(values.shape)} in {values.dtype} in "
                f"layer {index}, and needs (rows, KV heads, tokens, width){sizes}, with the rows and dtypes of layer {first} and "
                f"{least[index]} to {seen} tokens. Compute it again."
            )
    dtype, held = getattr(model, "dtype", None), " and ".join(sorted(map(str, {*dtypes})))
    if dtype is not None and dtype not in dtypes:  # under autocast, K or V may have another dtype
        raise ValueError(f"{path} holds {held}, and the model runs in {dtype}; load the model in {held}, or compute it again.")


def _shapes(model: ModelOrConfig) -> list[tuple[int, int, int]] | None:
    """(KV heads, width of a key, of a value) of each layer; None if the configuration has other fields for these."""
    config = config_of(model)
    usual = {"head_dim", "num_key_value_heads"}
    words = ("head_dim", "key_value_head", "kv_head", "value_dim", "multi_query", "lora_rank")
    if any(word in name for name in vars(config.get_text_config(decoder=True)) if name not in usual for word in words):
        return None
    return [(shape.num_kv_heads, shape.head_dim, shape.value_dim) for shape in hf.layer_shapes(config)]
