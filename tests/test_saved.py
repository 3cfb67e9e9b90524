"""Caches in files: loaded as they were saved; files that no cache of the model can have written are refused with a message."""

import errno
import json
import os
from functools import partial
from unittest.mock import Mock

import models
import pytest
import safetensors.torch
import torch
from models import family, prompts, tiny
from safetensors import safe_open
from safetensors.torch import save_file

from hf_fastattn.caches import PreallocatedCache
from hf_fastattn.caches import saved as files
from hf_fastattn.patches import patch

generate = partial(models.generate, max_new_tokens=24)
WINDOWED = "mistral_window_below_prompt"


def forward(model, inputs, cache) -> PreallocatedCache:
    """The cache after a forward."""
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    return cache


@pytest.mark.parametrize("name", ["llama", WINDOWED, "qwen2"])
def test_save_and_load(tmp_path, name):
    model, path = family(name, "cpu"), tmp_path / "prompt.safetensors"
    model.set_attn_implementation("lean")
    inputs = prompts("left_padding", "cpu")
    cache = PreallocatedCache(model)
    generate(model, inputs, past_key_values=cache, max_new_tokens=1)
    cache.save(path, model)
    more = torch.cat([inputs["input_ids"], inputs["input_ids"][:, -9:]], 1)
    asked = {"input_ids": more, "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 9), value=1)}
    expected = generate(model, asked)
    for source in (model, model.config):
        loaded = PreallocatedCache.load(path, source)
        assert loaded.get_seq_length() == inputs["input_ids"].shape[1]
        assert torch.equal(generate(model, asked, past_key_values=loaded), expected)
    loaded = PreallocatedCache.load(path, model)
    loaded.batch_select_indices(torch.tensor([2]))  # before its tensors are on a device
    one = {key: tensor[2:] for key, tensor in asked.items()}
    assert torch.equal(generate(model, one, past_key_values=loaded), expected[2:])


@pytest.mark.parametrize("name", ["llama", WINDOWED])
def test_a_loaded_cache_moves_its_window_and_is_cropped(name, tmp_path):
    """Before its K and V are moved to their device: in the first forward, or before it."""
    model, file = family(name, "cpu"), tmp_path / "tokens.safetensors"
    model.set_attn_implementation("sdpa")
    ids = torch.cat([prompts("no_padding", "cpu", rows=1, length=220)["input_ids"]] * 3, 1)
    inputs, cache = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, PreallocatedCache(model)
    expected = generate(model, inputs)
    for chunk in ids[:, :655].split(50, 1):
        forward(model, {"input_ids": chunk}, cache)
    cache.save(file, model)
    loaded = PreallocatedCache.load(file, model)
    assert torch.equal(generate(model, inputs, past_key_values=loaded), expected)
    loaded = PreallocatedCache.load(file, model)
    loaded.crop(-10)
    loaded.save(file, model)
    loaded = PreallocatedCache.load(file, model)
    assert loaded.get_seq_length() == 645
    assert torch.equal(generate(model, inputs, past_key_values=loaded), expected)


def test_a_loaded_cache_is_for_other_rows_once_it_is_empty_and_for_models_that_stream(tmp_path):
    model, file = tiny("llama", "lean"), tmp_path / "tokens.safetensors"
    one, three = (prompts("no_padding", "cpu", rows=rows) for rows in (1, 3))
    cache = PreallocatedCache(model)
    generate(model, one, past_key_values=cache)
    cache.save(file, model)
    cache = PreallocatedCache.load(file, model)
    cache.crop(torch.tensor(-cache.get_seq_length()))
    assert torch.equal(generate(model, three, past_key_values=cache), generate(model, three))
    model.config.streaming_window, model.config.streaming_sinks, model.config.streaming_clamped = 40, 4, False
    PreallocatedCache.load(file, model)


def _parts(path) -> tuple[dict, dict]:
    with safe_open(path, "pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _seen(**counts) -> dict:
    return {"seen": json.dumps({name.removeprefix("_"): count for name, count in counts.items()})}


def _both(layer: int, change) -> dict:
    """A change to keys and values of a layer."""
    return {name: lambda t, name=name: change(t[name]) for name in (f"{layer}.keys", f"{layer}.values")}


# Changes to the metadata and to the tensors, and the message of the refusal.
LIES = {
    "fewer seen": (_seen(_0=1, _1=1), {}, "layer 0, .* 1 to 1 tokens"),
    "more seen": (_seen(_0=97, _1=97), {}, "layer 0, .* 97 to 97 tokens"),
    "one more": (_seen(_0=96, _1=97), {}, "should have one number"),
    "none seen": (_seen(_0=0, _1=0), {}, "should have one number"),
    "not a number": (_seen(_0=96.0, _1=True), {}, "should have one number"),
    "of other layers": (_seen(_0=96, _2=96), {}, "should have one number"),
    "a list": ({"seen": "[96, 96]"}, {}, "should have one number"),
    "cut short": ({"seen": '{"0": 96'}, {}, "should have one number"),
    "no seen": ({"seen": None}, {}, "None for the tokens seen"),
    "no config": ({"config": None}, {}, "None where a configuration in JSON should be"),
    "a list of configs": ({"config": "[1]"}, {}, "where a configuration in JSON should be"),
    "another config": ({"config": "{}"}, {}, "and this one has"),
    "no format": ({"format": None}, {}, "has format None"),
    "another format": ({"format": "hf_fastattn cache 0"}, {}, "has format 'hf_fastattn cache 0'"),
    "no values": ({}, {"1.values": None}, "missing or extra: 1.values"),
    "one too many": ({}, {"2.keys": lambda t: t["1.keys"].clone()}, "missing or extra: 2.keys"),
    "a layer cut": ({}, _both(1, lambda x: x[:, :, :30]), "layer 1, .* 96 to 96 tokens"),
    "keys cut": ({}, {"1.keys": lambda t: t["1.keys"][:, :, 1:]}, "keys .*95.* in layer 1, and needs"),
    "three axes": ({}, {"0.keys": lambda t: t["0.keys"][0]}, "layer 0, and needs"),
    "no rows": ({}, _both(0, lambda x: x[:0]), "layer 0, and needs"),
    "fewer rows": ({}, _both(1, lambda x: x[:2]), "layer 1, and needs .*the rows and dtypes of layer 0"),
    "fewer heads": ({}, _both(1, lambda x: x[:, :1]), "of 2 KV heads"),
    "narrower": ({}, {"0.values": lambda t: t["0.values"][..., :8]}, "layer 0, and needs .*and a value of 16"),
    "another dtype": ({}, {"1.keys": lambda t: t["1.keys"].half()}, "in torch.float16 .* the rows and dtypes of layer 0"),
}
LIES_OF_8_BITS = {
    "another kv_dtype": ({"kv_dtype": "int4"}, {}, "has K and V in 'int4', and this version reads int8, fp8"),
    "no kv_dtype": ({"kv_dtype": None}, {}, "missing or extra: 0.centre, 0.scales"),
    "no scales": ({}, {"1.scales": None}, "missing or extra: 1.scales"),
    "floats": ({}, {"0.keys": lambda t: t["0.keys"].float()}, "in torch.float32, .* in layer 0, and needs"),
    "signed": ({}, {"1.values": lambda t: t["1.values"].to(torch.int8)}, "in torch.int8, .* in layer 1, and needs"),
    "a scale less": ({}, {"0.scales": lambda t: t["0.scales"][:, :, 1:]}, "in torch.int32, .* in layer 0, and needs"),
    "wide scales": ({}, {"0.scales": lambda t: t["0.scales"].long()}, "in torch.int64, .* in layer 0, and needs"),
    "a centre of one row": ({}, {"1.centre": lambda t: t["1.centre"][:1]}, "in layer 1, and needs"),
    "another dtype": ({}, {"0.centre": lambda t: t["0.centre"].half()}, "layer 1, and needs .* the rows and dtypes of layer 0"),
    "a layer cut": ({}, _both(1, lambda x: x[:, :, :9]) | {"1.scales": lambda t: t["1.scales"][:, :, :9]}, "layer 1,"),
    "narrower": ({}, {"1.values": lambda t: t["1.values"][..., :8]}, "layer 1, and needs .*and a value of 16"),
}


@pytest.fixture(scope="module")
def files_of(tmp_path_factory):
    """By kv_dtype a model and a file with its cache."""

    def made(kv_dtype):
        model, path = tiny("llama"), tmp_path_factory.mktemp("saved") / "tokens.safetensors"
        forward(model, prompts("no_padding", "cpu"), PreallocatedCache(model, kv_dtype=kv_dtype)).save(path, model)
        return model, path

    return {kv_dtype: made(kv_dtype) for kv_dtype in (None, "int8")}


@pytest.fixture
def saved(files_of):
    return files_of[None]


@pytest.mark.parametrize("kv_dtype, lie", [*((None, lie) for lie in LIES), *(("int8", lie) for lie in LIES_OF_8_BITS)])
def test_a_file_that_contradicts_itself_is_refused(tmp_path, files_of, kv_dtype, lie):
    model, path = files_of[kv_dtype]
    meta, tensors = _parts(path)
    changed_meta, changed, match = (LIES_OF_8_BITS if kv_dtype else LIES)[lie]
    meta = {name: value for name, value in {**meta, **changed_meta}.items() if value is not None}
    changed = {name: change and change(tensors).contiguous() for name, change in changed.items()}
    tensors = {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}
    save_file(tensors, tmp_path / "lies", meta)
    with pytest.raises(ValueError, match=match) as error:
        PreallocatedCache.load(tmp_path / "lies", model)
    assert str(tmp_path / "lies") in str(error.value)


def test_files_of_other_models_and_programs_are_refused(tmp_path, saved):
    model, path = saved
    with pytest.raises(ValueError, match="intermediate_size=96, and this one has intermediate_size=64"):
        PreallocatedCache.load(path, tiny("llama", intermediate_size=64))
    with pytest.raises(ValueError, match=r"holds torch.float32, and the model runs in torch.bfloat16"):
        PreallocatedCache.load(path, tiny("llama").to(torch.bfloat16))
    whole, broken = path.read_bytes(), tmp_path / "broken"
    for content in (b"", b"{}", b"no such thing" * 99, whole[:7], whole[:100], whole[:1500], whole[:-1], whole + b"0"):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match="is not a complete safetensors file") as error:
            PreallocatedCache.load(broken, model)
        assert type(error.value) is ValueError and str(broken) in str(error.value)
    with pytest.raises(ValueError, match="is a directory"):
        PreallocatedCache.load(tmp_path, model)
    with pytest.raises(FileNotFoundError):
        PreallocatedCache.load(tmp_path / "missing", model)


def _changed(path, content: bytes) -> None:
    """Other content in the same file, as of another program."""
    with path.open("r+b") as file:
        file.truncate(0)
        file.write(content)


def test_a_file_that_changes_while_it_is_read_is_refused_and_is_not_read_again(tmp_path, saved, monkeypatch):
    model, path = saved
    whole, file, check = path.read_bytes(), tmp_path / "tokens", files._check_meta
    file.write_bytes(whole)
    before, loaded = PreallocatedCache.load(path, model), PreallocatedCache.load(file, model)
    _changed(file, whole[:-4000] + bytes(4000))
    assert all(torch.equal(a, b) for old, new in zip(before, loaded, strict=True) for a, b in zip(old[:2], new[:2], strict=True))
    changed = "was changed while it was read"
    for content, message in ((whole[:-9], "is not a complete"), (b"", "is not a complete"), (whole, changed)):
        file.write_bytes(whole)
        os.utime(file, (1, 1))
        monkeypatch.setattr(files, "_check_meta", lambda *args, content=content: (_changed(file, content), check(*args)))
        with pytest.raises(ValueError, match=message):
            PreallocatedCache.load(file, model)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
def test_special_files_are_neither_read_nor_replaced(tmp_path, saved):
    model, path = saved
    cache, fifo = PreallocatedCache.load(path, model), tmp_path / "fifo"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDWR)  # so that no other open() waits
    os.write(held, (2).to_bytes(8, "little") + b"{}")  # nor read()
    try:
        for use in (lambda: PreallocatedCache.load(fifo, model), lambda: cache.save(fifo, model)):
            with pytest.raises(ValueError, match="fifo is a directory, a FIFO, a device or a socket, and a saved cache is a reg"):
                use()
        assert fifo.is_fifo()
    finally:
        os.close(held)
    with pytest.raises(ValueError, match="/dev/zero is a directory, a FIFO, a device or a socket"):
        PreallocatedCache.load("/dev/zero", model)


def test_a_file_that_cannot_be_written_is_an_error_of_the_system(tmp_path, saved, monkeypatch):
    model, path = saved
    cache, file = PreallocatedCache.load(path, model), tmp_path / "missing" / "tokens"
    with pytest.raises(FileNotFoundError) as error:
        cache.save(file, model)
    assert error.value.filename == str(file)
    with pytest.raises(IsADirectoryError):
        cache.save(tmp_path, model)
    for number, kind in ((errno.EACCES, PermissionError), (errno.ENOSPC, OSError), (None, OSError)):
        told = "no reason" if number is None else f"Error while serializing: I/O error: why (os error {number})"
        monkeypatch.setattr(safetensors.torch, "save_file", Mock(side_effect=safetensors.SafetensorError(told)))
        with pytest.raises(kind) as error:
            cache.save(tmp_path / "tokens", model)
        assert str(tmp_path / "tokens") in str(error.value) and (os.name == "nt" or error.value.errno == number)


def test_a_window_of_a_saved_cache_may_have_moved(tmp_path):
    """A sliding layer keeps at least the tokens of its window, and at most all that it saw; other files are refused."""
    model, path = family(WINDOWED, "cpu"), tmp_path / "tokens"
    forward(model, prompts("no_padding", "cpu"), PreallocatedCache(model)).save(path, model)
    meta, tensors = _parts(path)
    for kept in (96, 15):
        save_file({name: tensor[:, :, -kept:].contiguous() for name, tensor in tensors.items()}, path, meta)
        assert PreallocatedCache.load(path, model).get_seq_length() == 96
    save_file({name: tensor[:, :, -14:].contiguous() for name, tensor in tensors.items()}, path, meta)
    with pytest.raises(ValueError, match=r"keys .*14.* in layer 0, .* 15 to 96 tokens"):
        PreallocatedCache.load(path, model)


def test_layers_that_hold_different_numbers_of_tokens_are_not_saved(tmp_path):
    model, states = tiny("llama"), torch.zeros(1, 2, 5, 16)
    cache = PreallocatedCache(model)
    cache.update(states, states, 0)
    with pytest.raises(ValueError, match="5 in layer 0, 0 in layer 1"):
        cache.save(tmp_path / "tokens", model)
    cache.reset()
    with pytest.raises(ValueError, match="holds no tokens"):
        cache.save(tmp_path / "tokens", model)


# ---- K and V in 8 bits ----


@pytest.mark.parametrize("name, kv_dtype", [("llama", "int8"), ("qwen2", "fp8")])  # qwen2 has a layer with a window
def test_8_bits_are_saved_as_they_are_stored(tmp_path, name, kv_dtype, device):
    model, path = family(name, device), tmp_path / "prompt.safetensors"
    inputs = prompts("left_padding", device)
    with patch(model, "lean", kv_dtype=kv_dtype, graph=False):
        cache = PreallocatedCache(model, kv_dtype=kv_dtype)
        forward(model, inputs, cache)
        cache.crop(-1)
        cache.save(path, model)
        held = [[x.clone() for x in layer.live()] for layer in cache.layers]
        shown = cache.layers[0].keys, cache.layers[0].values
        expected = generate(model, inputs, past_key_values=cache)
        for source in (model, model.config):
            loaded = PreallocatedCache.load(path, source)
            assert [layer.kv_dtype for layer in loaded.layers] == [layer.kv_dtype for layer in cache.layers]
            assert torch.equal(loaded.layers[0].keys.to(device), shown[0])
            assert torch.equal(loaded.layers[0].values.to(device), shown[1])
            loaded.save(tmp_path / "again", model)
            assert torch.equal(generate(model, inputs, past_key_values=loaded), expected)
            for layer, before in zip(loaded.layers, held, strict=True):
                now = [x[:, :, : before[0].shape[2]] for x in layer.live()] if layer.kv_dtype else before
                assert all(map(torch.equal, now, before)) and layer.buffers[0].device.type == torch.device(device).type
        (first, tensors), (meta, others) = _parts(path), _parts(tmp_path / "again")
        assert meta == first and all(torch.equal(others[key], tensor) for key, tensor in tensors.items())
        loaded = PreallocatedCache.load(path, model)
        loaded.batch_select_indices(torch.tensor([2, 0]))  # before its tensors are on a device
        some = {key: tensor[[2, 0]] for key, tensor in inputs.items()}
        assert torch.equal(generate(model, some, past_key_values=loaded), expected[[2, 0]])
        loaded = PreallocatedCache.load(path, model)
        loaded.reset()
        assert torch.equal(generate(model, inputs, past_key_values=loaded), generate(model, inputs))


def test_loaded_8_bits_are_cropped_and_continued_in_a_graph(tmp_path, captured):
    model, path, inputs = tiny("llama"), tmp_path / "prompt", prompts("no_padding", "cpu", rows=1)
    with patch(model, "lean", kv_dtype="int8") as patched:
        cache = PreallocatedCache(model, kv_dtype="int8")
        forward(model, inputs, cache)
        cache.save(path, model)
        cache.crop(-1)
        expected = generate(model, inputs, past_key_values=cache)
        loaded = PreallocatedCache.load(path, model)
        loaded.crop(-1)
        replayed = patched.replays
        assert torch.equal(generate(model, inputs, past_key_values=loaded), expected) and patched.replays > replayed
        loaded = PreallocatedCache.load(path, model)
        loaded.crop(-loaded.get_seq_length())
        three = prompts("no_padding", "cpu")
        assert torch.equal(generate(model, three, past_key_values=loaded), generate(model, three))


def test_files_of_8_bits_are_for_the_dtype_of_their_model_and_old_formats_are_read(tmp_path, files_of, saved):
    model, path = files_of["int8"]
    with pytest.raises(ValueError, match=r"holds torch.float32, and the model runs in torch.bfloat16"):
        PreallocatedCache.load(path, tiny("llama").to(torch.bfloat16))
    (tmp_path / "cut").write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is not a complete safetensors file"):
        PreallocatedCache.load(tmp_path / "cut", model)
    meta, tensors = _parts(saved[1])
    for number in (1, 2):
        save_file(tensors, tmp_path / "old", meta | {"format": f"hf_fastattn cache {number}"})
        assert PreallocatedCache.load(tmp_path / "old", saved[0]).get_seq_length() == 96
