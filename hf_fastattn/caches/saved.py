"""A preallocated cache in a file: one safetensors file with the live K and V of every layer, and metadata."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .. import hf
from .buffers import Pair
from .layers import Layer

FORMAT = "hf_fastattn cache 1"
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


def write(path: str | Path, layers: list[Layer], model: ModelOrConfig) -> None:
    """Write the live tokens of these layers and the configuration of `model`. Raises OSError if the file cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    _check_whole(model)
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
    meta = {"format": FORMAT, "config": _describe(model), "seen": json.dumps({str(layer.index): layer.seen for layer in layers})}
    if Path(path).is_dir():
        raise IsADirectoryError(errno.EISDIR, "A cache is saved to one file, and this is a directory", str(path))
    _refuse_special(path)  # the new file would replace a device
    try:
        save_file(tensors, path, meta)
    except SafetensorError as error:
        if (code := re.search(r"os error (\d+)", str(error))) is None:
            raise OSError(f"{path} cannot be written: {error}") from error
        number = int(code[1])
        raise OSError(number, os.strerror(number), str(path), number) from error  # the last one is the number on Windows


def read(path: str | Path, kinds: Sequence[hf.Kind], model: ModelOrConfig) -> tuple[int, list[Pair]]:
    """(number of tokens, K and V of each layer (rows, num_kv_heads, kept tokens, head_dim)) from a file of write().

    Raises ValueError with path and reason if the file is not a cache of `model`, OSError if it cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    _check_whole(model)
    if Path(path).is_dir():
        raise ValueError(f"{path} is a directory, and a saved cache is one file.")
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
    names = [f"{index}.{name}" for index in range(len(kinds)) for name in ("keys", "values")]
    if tensors.keys() != set(names):
        wrong = ", ".join(sorted(tensors.keys() ^ set(names)))
        raise ValueError(f"{path} needs K and V of {len(kinds)} layers; missing or extra: {wrong}.")
    tensors = {name: tensors[name] for name in names}
    seen = _read_seen(path, meta, len(kinds))
    _check_tensors(path, tensors, model)
    for name in names:
        least, slots = kinds[int(name.partition(".")[0])].sees(seen), tensors[name].shape[2]
        if not least <= slots <= seen:
            raise ValueError(
                f"{path} gives {seen} as the number of tokens, of which this layer keeps at least {least}; {name} has {slots}. "
                "Compute it again."
            )
    return seen, [(tensors[keys], tensors[values]) for keys, values in zip(names[::2], names[1::2], strict=True)]


def _refuse_special(path: str | Path) -> None:
    """Raise ValueError for a FIFO, which would block, a device or a socket. It is not opened."""
    if Path(path).exists() and not Path(path).is_file():
        raise ValueError(f"{path} is a FIFO, a device or a socket, and a saved cache is a regular file.")


def _metadata(file: BinaryIO) -> dict[str, str]:
    """The metadata of a safetensors file: a length, and so many bytes of JSON."""
    length = int.from_bytes(file.read(8), "little")
    try:
        header = json.loads(file.read(min(length, _MOST)))
    except (ValueError, RecursionError) as error:
        raise EOFError("its header is no JSON") from error
    found = header.get("__metadata__") if isinstance(header, dict) else None
    return found if isinstance(found, dict) else {}


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
    if meta.get("format") != FORMAT:
        raise ValueError(f"{path} has format {meta.get('format')!r}, and this version reads {FORMAT!r}. Compute it again.")
    saved, wanted = _parse(path, meta, "config"), json.loads(_describe(model))
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise ValueError(
                f"{path} was saved for a model with {name}={saved.get(name)!r}, and this one has {name}={wanted.get(name)!r}: "
                "its K and V do not match. Compute it again with this model."
            )


def _parse(path: str | Path, meta: dict[str, str], name: str) -> dict[str, Any]:
    try:
        found = json.loads(meta.get(name, ""))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} has {meta.get(name)!r:.100} where a JSON object {name!r} should be. Compute it again.")
    return found


def _read_seen(path: str | Path, meta: dict[str, str], layers: int) -> int:
    counts = _parse(path, meta, "seen")
    found: list[int] = list(counts.values())
    if (
        counts.keys() != {str(index) for index in range(layers)}
        or any(type(count) is not int or not 0 < count < 1 << 31 for count in found)
        or len(set(found)) != 1
    ):
        raise ValueError(
            f"{path} has {str(counts)[:100]!r} for the tokens seen by each layer, and should have one number, 1 or more, for "
            f"each of {layers}. Compute it again."
        )
    return found[0]


def _check_tensors(path: str | Path, tensors: dict[str, torch.Tensor], model: ModelOrConfig) -> None:
    """Raise ValueError unless all tensors have one batch size, K and V one dtype each, and shapes that match the config."""
    for name, tensor in tensors.items():
        if tensor.dim() != 4 or 0 in tensor.shape[:2]:
            raise ValueError(f"{path} has {name} of shape {tuple(tensor.shape)}, and K and V have four axes. Compute it again.")
    of = {kind: [t for name, t in tensors.items() if name.endswith(kind)] for kind in ("keys", "values")}
    rows = {tensor.shape[0] for tensor in tensors.values()}
    dtypes = [{tensor.dtype for tensor in each} for each in of.values()]
    if len(rows) > 1 or any(len(each) > 1 for each in dtypes):
        raise ValueError(
            f"{path} has {sorted(rows)} rows, keys in {_words(dtypes[0])} and values in {_words(dtypes[1])}, and should have one "
            "of each. Compute it again."
        )
    shapes = _shapes(model)
    for index in range(len(of["keys"])):
        keys, values = (tensors[f"{index}.{kind}"] for kind in of)
        if keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"{path} has keys of shape {tuple(keys.shape)} and values of shape {tuple(values.shape)} in layer {index}. "
                "Compute it again."
            )
        found = keys.shape[1], keys.shape[3], values.shape[3]
        if shapes is not None and found != shapes[index]:
            raise ValueError(
                f"{path} has (KV heads, width of a key, of a value) = {found} in layer {index}, and its configuration needs "
                f"{shapes[index]}. Compute it again."
            )
    dtype, held = getattr(model, "dtype", None), dtypes[0] | dtypes[1]
    if dtype is not None and dtype not in held:  # under autocast, K or V may have another dtype
        raise ValueError(
            f"{path} holds {_words(held)}, and the model runs in {dtype}; load the model in {_words(held)}, or compute it again."
        )


def _words(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(map(str, dtypes)))


def _shapes(model: ModelOrConfig) -> list[tuple[int, int, int]] | None:
    """(KV heads, width of a key, of a value) of each layer; None if the configuration has other fields for these."""
    config = config_of(model)
    usual = {"head_dim", "num_key_value_heads"}
    words = ("head_dim", "key_value_head", "kv_head", "value_dim", "multi_query", "lora_rank")
    if any(word in name for name in vars(config.get_text_config(decoder=True)) if name not in usual for word in words):
        return None
    return [(shape.num_kv_heads, shape.head_dim, shape.value_dim) for shape in hf.layer_shapes(config)]
