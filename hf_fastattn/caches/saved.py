"""A preallocated cache in a file: one safetensors file with the live K and V and the states of every layer, and metadata."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from .. import hf
from .eight_bits import ByteLayer
from .storage import PreallocatedStorage

FORMAT = "hf_fastattn cache 4"
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
    tensors |= {f"{part.layer}.{part.name}": part.tensor.contiguous() for part in states}
    if Path(path).is_dir():
        raise IsADirectoryError(errno.EISDIR, "A cache is saved to one file, and this is a directory", str(path))
    _refuse_special(path)  # the new file would replace a device
    try:
        meta = {"format": FORMAT, "config": _describe(model), "seen": str(seen.pop()), "kv_dtype": storage.kv_dtype or ""}
        save_file(tensors, path, meta | {"sum": _sum(meta, tensors)})
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
    if meta.pop("sum", None) != _sum(meta, tensors):
        raise ValueError(f"{path} is not as save() wrote it: tensors or metadata were changed. Compute it again.")
    kv_dtype = meta["kv_dtype"] or None
    parts = {i: BYTES[: 2 if kv_dtype is None or kind.window else 4] for i, kind in enumerate(kinds) if kind.has_kv}
    states: dict[int, dict[str, torch.Tensor]] = {index: {} for index, kind in enumerate(kinds) if kind.states}
    for name in tensors:
        index, _, part = name.partition(".")
        if part.startswith(("conv.", "recurrent.")) and int(index) in states:
            states[int(index)][part] = tensors[name]
    names = {f"{index}.{name}" for each in (parts, states) for index, own in each.items() for name in own}
    if wrong := sorted(tensors.keys() ^ names):
        raise ValueError(f"{path} needs K and V of {len(parts)} layers; missing or extra: {', '.join(wrong)}.")
    held = {index: tuple(tensors[f"{index}.{name}"] for name in each) for index, each in parts.items()}
    dtype = getattr(model, "dtype", None)
    dtypes = {x.dtype for each in held.values() for x in each[-1 if len(each) == 4 else 0 :]}  # of 8 bits, the centre's
    if dtype is not None and dtypes and dtype not in dtypes:  # under autocast, K or V may have another dtype
        words = " and ".join(sorted(map(str, dtypes)))
        raise ValueError(f"{path} holds {words}, and the model runs in {dtype}; load the model in {words}, or compute it again.")
    return int(meta["seen"]), kv_dtype, held, states


def _sum(meta: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    """A digest of the metadata and of the names, shapes and dtypes of the tensors."""
    sizes = [f"{name} {[*tensors[name].shape]} {tensors[name].dtype}" for name in sorted(tensors)]
    return hashlib.blake2b(json.dumps([dict(sorted(meta.items())), sizes]).encode(), digest_size=16).hexdigest()


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
    if meta.get("format") != FORMAT:
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
