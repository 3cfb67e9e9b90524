"""Kernels that are known, compiled and shipped before their first launch."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import slow_unless
from conftest import INTERPRETED
from models import tiny

pytest.importorskip("triton")
if INTERPRETED:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import every_model
import lives
import triton
import triton.language as tl
from test_compile_offline import OfflineDriver
from transformers import ContinuousBatchingConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from triton import knobs
from triton.runtime.driver import driver

import hf_fastattn
import hf_fastattn_cli as cli
from hf_fastattn import hf
from hf_fastattn.kernels import decode
from hf_fastattn.kernels.ahead import archive, child, describe, locks, server
from hf_fastattn.kernels.decode import rms_norm
from hf_fastattn.kernels.host import gpu, launch
from hf_fastattn.patches import ahead, warm
from hf_fastattn.patches.fused import subclass

TARGETS = {"H100": (90, 132), "H100 PCIe": (90, 114), "A100": (80, 108)}
H100 = TARGETS["H100"]
# The number of kernels in the list of a model, for each of TARGETS.
LISTED = {
    "Llama 1B": (60, 62, 64),
    "Llama 8B": (63, 64, 63),
    "Gemma 3 4B": (66, 64, 61),
    "GPT-OSS 20B": (70, 71, 74),
    "Qwen3 30B": (71, 72, 73),
}
# Of a hybrid, for an H100, and the kernels of its linear layers.
OF_HYBRIDS = {
    "Qwen3.5 0.8B": (78, {"conv_update_kernel", "gated_delta_kernel", "gated_norm_kernel"}),
    "Qwen3.6 35B": (94, {"conv_update_kernel", "gated_delta_kernel", "gated_norm_kernel"}),
    "Falcon-H1 0.5B": (83, {"conv_update_kernel", "selective_kernel"}),
    "LFM2 1.2B": (64, {"conv_update_kernel"}),
    "Gemma 3n E2B": (83, set()),
    "Gemma 3n E2B, sparse": (85, set()),
}
STEPS = {"conv_update_kernel", "gated_delta_kernel", "selective_kernel", "gated_norm_kernel"}
SURPLUS = 1.5  # of a list, over what a life of 300 calls meets


@pytest.mark.parametrize("target", slow_unless("H100".__eq__, TARGETS))
@pytest.mark.parametrize("name", slow_unless(["Llama 1B", "Qwen3 30B"].__contains__, [*LISTED]))
def test_the_list_of_a_model_is_short_and_begins_with_what_its_first_call_needs(name, target):
    kernels = warm.listed(lives.recipe_of(name, TARGETS[target]))
    assert len(kernels) <= LISTED[name][[*TARGETS].index(target)]
    assert {kernel.arch for kernel in kernels} == {TARGETS[target][0]} and len({kernel.key for kernel in kernels}) == len(kernels)
    names = [kernel.name for kernel in kernels]  # those of a first call, with few tokens, and a second one, in a graph of many
    assert max(map(names.index, ("linear_kernel", "rope_kernel", "_build_spans_kernel"))) < names.index("linear_rows_kernel")
    assert target == "A100" or names.index("linear_rows_kernel") < 24


LIVES = [("Llama 1B", "H100", "hour"), ("GPT-OSS 20B", "A100", "hour"), ("Qwen3 30B", "A100", "hour")]
LIVES += [("Llama 1B", "H100", "whole"), *itertools.product(LISTED, ("H100", "A100"), ["day"])]


@pytest.mark.parametrize("name, target, part", slow_unless(LIVES[0].__eq__, LIVES))
def test_the_list_has_what_a_life_meets_and_little_more(name, target, part):
    recipe = lives.recipe_of(name, TARGETS[target])
    met, kernels = lives.met_apart(recipe, part), warm.listed(recipe)
    assert len(met) > 15
    assert not [kernel for kernel in met if kernel not in kernels]
    assert part != "whole" or len(kernels) <= SURPLUS * len(met)


@pytest.mark.parametrize("name", slow_unless("Qwen3.6 35B".__ne__, OF_HYBRIDS))
def test_the_list_of_a_hybrid_has_the_steps_of_its_linear_layers(name):
    (count, steps), kernels = OF_HYBRIDS[name], warm.listed(lives.recipe_of(name, H100))
    assert len(kernels) <= count and {kernel.name for kernel in kernels} & STEPS == steps


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_HYBRIDS)
def test_the_list_of_a_hybrid_has_what_its_calls_meet(name):
    recipe = lives.recipe_of(name, H100)
    met, kernels = lives.met_apart(recipe, "minutes"), warm.listed(recipe)
    assert {kernel.name for kernel in met} & STEPS == OF_HYBRIDS[name][1]
    assert len(met) > 25 and not [kernel for kernel in met if kernel not in kernels]


@pytest.mark.parametrize("family, name", [("deepseek_v3", "DeepseekV3"), ("zamba", "Zamba"), ("nemotron_h", "NemotronH")])
def test_models_whose_caches_or_layers_their_configuration_does_not_say_have_a_list(family, name):
    model = every_model.named(f"{name}ForCausalLM", family, "causal").bfloat16()
    assert len(hf_fastattn.kernels_of(model, (1,), tokens=300, target=H100)) > 10


@triton.jit
def _of_another_package(x, SIZE: tl.constexpr):
    tl.store(x, SIZE)


@pytest.mark.parametrize("tuned", [False, True])
def test_kernels_of_other_packages_are_not_launched_for_the_list(tuned, monkeypatch):
    """They would write to the null pointers of tensors without memory, and an autotuner would keep what it measures."""
    launched, called = [], []
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda self, *args, **kwargs: launched.append(args))
    monkeypatch.setattr(triton.runtime.autotuner.Autotuner, "run", lambda self, *args, **kwargs: launched.append(args))
    kernel = triton.autotune([triton.Config({"SIZE": 1})], key=[])(_of_another_package) if tuned else _of_another_package
    inner = LlamaMLP.forward

    def forward(self, x):
        out = inner(self, x)
        called.append(out.is_meta)
        kernel[(1,)](out)
        return out

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    kernels = hf_fastattn.kernels_of(tiny("llama"), (1,), tokens=300, target=H100)
    assert {"prefill_kernel", "split_kv_kernel"} <= {each.name for each in kernels}
    assert called and all(called) and launched == []
    kernel[(1,)](torch.ones(1))
    assert len(launched) == 1


JOBS = [("Llama 1B", "H100", "job"), *itertools.product(["Llama 1B", "GPT-OSS 20B"], ("H100", "A100"), ["jobs"])]


@pytest.mark.parametrize("name, target, part", slow_unless(JOBS[0].__eq__, JOBS))
def test_the_list_of_generate_batch_has_what_jobs_meet_and_few_further_kernels(name, target, part):
    recipe = lives.recipe_of(name, TARGETS[target])
    met, kernels, others = lives.met_apart(recipe, part), warm.listed(recipe._replace(page=64)), warm.listed(recipe)
    assert len(met) > 15 and any("load_64" in str(kernel.as_json()) for kernel in met)
    assert not [kernel for kernel in met if kernel not in kernels]
    assert len([kernel for kernel in kernels if kernel not in others]) <= 29
    assert part == "job" or len(kernels) <= SURPLUS * len(met)
    assert not any("load_64" in str(kernel.as_json()) for kernel in others)
    seconds = [kernel.seconds for kernel in kernels]
    assert seconds[:20] == sorted(seconds[:20], reverse=True) and seconds[0] == max(seconds)


def small_recipe():
    """Of a model with few kernels."""
    return warm.Recipe.of(tiny("llama").bfloat16(), None, H100)


def norm(size: int = 256) -> describe.Kernel:
    """The description of a kernel that compiles within a second."""
    x = torch.empty(1, size, dtype=torch.bfloat16, device="meta")
    with describe.describing(gpu.Target(*H100)) as found:
        rms_norm.run(x, x[0], None, 1e-6, False, False, "")
    (kernel,) = found.values()
    return kernel


def test_a_description_survives_json_and_nothing_runs_in_its_context():
    kernels = warm.listed(small_recipe(), (1,), 300)
    copies = [describe.Kernel(*json.loads(json.dumps(kernel.as_json()))) for kernel in kernels]
    assert copies == kernels and [copy.key for copy in copies] == [kernel.key for kernel in kernels]
    assert gpu.thread.target is None and launch.thread.describe is None and gpu.thread.calls is None


@pytest.mark.parametrize(
    "constant",
    [
        ["function", "os", "system"],
        ["named", "hf_fastattn.kernels.ahead.describe", "_named", "os", "system"],
        ["object", "hf_fastattn.kernels.spec", "KV", []],
        ["function", "hf_fastattn.kernels.spec.os", "system"],
    ],
)
def test_a_description_names_only_kernels_and_constants(constant):
    kernel = dataclasses.replace(norm(), constants=["dict", [["tuple", 0], constant]])
    with pytest.raises((ValueError, TypeError, ImportError)):
        _ = kernel.key


def test_the_command_line_knows_a_model_that_is_loaded_later(tmp_path):
    model = tiny("llama")
    model.config.save_pretrained(tmp_path)
    made = hf.model_on_meta(hf.load_config(tmp_path), model.dtype)
    names = {ahead.Known(warm.Recipe.of(made, "lean", H100)).name}
    with hf_fastattn.patch(model):
        assert {ahead.Known(warm.Recipe.of(model, None, H100)).name} == names
    assert {ahead.Known(warm.Recipe.of(model, "fa2", H100)).name} != names


def test_the_count_of_calls_is_that_of_real_ones():
    with hf_fastattn.count_calls() as counts:
        warm.listed(small_recipe(), (1,), 300)
    assert not counts


def test_models_whose_kernels_are_not_known_ahead_are_refused_in_a_sentence():
    model = tiny("llama")
    with pytest.raises(ValueError, match=r"model on cpu depend on the GPU.*Pass target=\(90, 132\)"):
        hf_fastattn.kernels_of(model)
    with (
        hf_fastattn.patch(model, "streaming", window=16),
        pytest.raises(ValueError, match="known ahead with a preallocated cache"),
    ):
        hf_fastattn.kernels_of(model, target=H100)
    with pytest.raises(ValueError, match='compile must be "ahead" or "lazy"; got \'never\''):
        hf_fastattn.patch(model, compile="never")
    with hf_fastattn.patch(model) as patched, pytest.raises(ValueError, match="model on cpu depend on the GPU"):
        assert patched.ahead is None and not launch.compiling  # nothing is compiled for a CPU
        patched.warm()
    with pytest.raises(ValueError, match="already undone"):
        patched.warm()


def test_a_list_of_generate_batch_is_of_models_and_pages_that_it_runs():
    model = tiny("llama").bfloat16()
    names = {ahead.Known(warm.Recipe.of(model, None, H100, batch)).name for batch in (False, True, 64, 256)}
    assert len(names) == 3  # True is 64
    one, most = (hf_fastattn.kernels_of(model, (rows,), target=H100, batch=16) for rows in (1, 200))
    assert {kernel.name for kernel in one} < {kernel.name for kernel in most} and not [each for each in one if each not in most]
    with pytest.raises(ValueError, match=r"batch must be True or the tokens of a page, one of \(16, 32, .*; got 48"):
        hf_fastattn.kernels_of(model, target=H100, batch=48)
    with pytest.raises(ValueError, match=r"'batch_invariant' does not read prompts of several texts as one row.*Leave batch out"):
        hf_fastattn.kernels_of(model, backend="batch_invariant", target=H100, batch=True)
    with hf_fastattn.patch(model) as patched, pytest.raises(ValueError, match="graphs=True captures steps of generate"):
        patched.warm(graphs=True, batch=True)


def test_the_first_generate_batch_begins_the_list_of_its_pages(monkeypatch):
    model, begun = tiny("llama"), []
    monkeypatch.setattr(ahead, "begin", lambda model, lazily, page=0: begun.append((lazily, page)))
    with hf_fastattn.patch(model, compile="lazy"):
        for page in (64, 64, 16):
            name = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
            config = ContinuousBatchingConfig(**{name: page})
            model.generate_batch([[5, 6]], None, config, max_new_tokens=1, do_sample=False, eos_token_id=None)
    assert begun == [(True, 0), (True, 64), (True, 16)]


# ---- archives ----


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty folder as Triton's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def pretend(kernel: describe.Kernel, cache: Path) -> None:
    """Put something in the place of a compiled kernel."""
    folder = cache / kernel.key
    digest = base64.b32decode(kernel.key + "====").hex()
    files = {f"{kernel.name}.cubin": b"code", f"{kernel.name}.json": json.dumps({"hash": digest}).encode()}
    folder.mkdir(parents=True)
    archive._write(folder, files)
    (folder / locks.LAUNCHER).touch()


KNOWN = f"hf_fastattn-{'0' * 32}.json"


@pytest.fixture
def exported(cache, tmp_path, monkeypatch):
    """(kernels, their file, an empty cache that is now Triton's)."""
    monkeypatch.setattr(archive, "versions", lambda: {"triton": "3", "the kernels of hf_fastattn": "a"})
    kernels = [norm(256), norm(512)]
    for kernel in kernels:
        pretend(kernel, cache)
    assert archive.export(kernels, tmp_path / "kernels.zip", {"known": KNOWN}) == 2
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    return kernels, tmp_path / "kernels.zip", tmp_path / "other"


def test_an_archive_is_imported_with_paths_of_this_cache(exported):
    kernels, file, cache = exported
    assert archive.import_(file) == kernels == archive.import_(file)
    assert json.loads((cache / KNOWN).read_text())["keys"] == [kernel.key for kernel in kernels]
    (cache / KNOWN).unlink()
    changed(file, lambda _, made: made.update(known="../a.json"))
    assert archive.import_(file) == kernels and not [*cache.parent.glob("*.json"), *cache.glob("*.json")]
    for kernel in kernels:
        group = json.loads((cache / kernel.key / f"__grp__{kernel.name}.json").read_text())["child_paths"]
        assert [*group] == [f"{kernel.name}.cubin", f"{kernel.name}.json"]
        assert all(Path(path).parent == cache / kernel.key and Path(path).is_file() for path in group.values())


def changed(file: Path, change) -> None:
    """Write a file anew, with changed members and a changed manifest."""
    with zipfile.ZipFile(file) as opened:
        members = {name: opened.read(name) for name in opened.namelist()}
    manifest = json.loads(members.pop(archive.MANIFEST))
    change(members, manifest)
    with zipfile.ZipFile(file, "w") as made:
        made.writestr(archive.MANIFEST, json.dumps(manifest))
        for name, data in members.items():
            made.writestr(name, data)


def add(name: str, data: bytes = b"x"):
    def change(members, manifest):
        members[name] = data
        manifest["members"][name if isinstance(name, str) else name.filename] = hashlib.sha256(data).hexdigest()

    return change


def other_kernel(members, manifest):
    """A compiled kernel in the folder of another one, with sums that fit."""
    a, b = sorted(name for name in members if name.endswith(".cubin"))
    json_a, json_b = a.replace(".cubin", ".json"), b.replace(".cubin", ".json")
    members[json_a] = members[json_b]
    manifest["members"][json_a] = manifest["members"][json_b]


def a_link() -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("link")
    info.external_attr = 0o120777 << 16
    return info


BAD = {
    "a path upwards": (add("../evil.cubin"), "has members that are not the kernels it describes"),
    "an absolute path": (add("/tmp/evil.cubin"), "has members that are not the kernels it describes"),
    "a further file": (add(f"{'A' * 52}/evil.cubin"), "has members that are not the kernels it describes"),
    "a changed cubin": (
        lambda m, _: m.update({k: b"other" for k in m if k.endswith("cubin")}),
        "is damaged: .*cubin is not what",
    ),
    "another kernel's": (other_kernel, "has members that are not the kernels it describes"),
    "a member less": (lambda m, _: m.pop(next(iter(m))), "does not have the members that its manifest lists"),
    "other versions": (lambda _, made: made["versions"].update(triton="2"), "another version of triton, '2'; here it is '3'"),
    "other kernels": (
        lambda _, made: made["versions"].pop("the kernels of hf_fastattn"),
        "version of the kernels of hf_fastattn",
    ),
    "no description": (lambda _, made: made.pop("kernels"), "is no whole file of `hf-fastattn warm --export`"),
    "a foreign description": (lambda _, made: made["kernels"][0].__setitem__(0, "os"), "has members that are not the kernels"),
    "a link": (lambda m, _: m.update({a_link(): b"/etc"}), "it has a link"),
    "members that fill the memory": (lambda m, _: m.update({f"{n}": bytes(3 << 20) for n in range(2)}), "1 GiB in all"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_archive_is_refused_before_anything_is_written(what, exported, monkeypatch):
    _, file, cache = exported
    monkeypatch.setattr(archive, "MOST", 4 << 20)
    change, says = BAD[what]
    changed(file, change)
    with pytest.raises(ValueError, match=says):
        archive.import_(file)
    assert not cache.exists() or not [path for path in cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize("content", [b"", b"PK\3\4 cut", b"text" * 100])
def test_a_file_that_is_no_archive_is_refused(content, exported, monkeypatch):
    _, file, cache = exported
    file.write_bytes(content or file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is no whole file of `hf-fastattn warm --export`"):
        archive.import_(file)
    monkeypatch.setenv(archive.VARIABLE, str(file))
    monkeypatch.setattr(archive, "_imported", set())
    with pytest.warns(UserWarning, match="HF_FASTATTN_KERNELS: .* is no whole file.*Kernels are compiled anew"):
        archive.import_of_environment()
    assert not cache.exists()


def test_what_launches_kernels_is_compiled_once_for_each_signature_and_in_this_process(exported, monkeypatch):
    kernels, file, _ = exported
    compiled = []
    monkeypatch.setattr(locks, "has_launchers", lambda: True)
    monkeypatch.setattr(server, "Server", None)
    monkeypatch.setattr(describe.Kernel, "compile", lambda kernel: compiled.append(kernel))
    assert cli.main(["warm", "--import", str(file)]) == 0
    assert len({str(kernel.signature) for kernel in kernels}) == 1
    assert compiled[1:] == kernels and compiled[0] in kernels


@pytest.mark.slow
def test_the_import_of_an_archive_needs_no_transformers(cache, tmp_path):
    kernel = norm()
    pretend(kernel, cache)
    archive.export([kernel], tmp_path / "kernels.zip", {})
    code = """
import sys
sys.modules["transformers"] = None
import hf_fastattn_cli
assert hf_fastattn_cli.main(["warm", "--import", sys.argv[1]]) == 0
del sys.modules["transformers"]
assert not [name for name in sys.modules if name.startswith(("hf_fastattn.", "transformers"))]
import hf_fastattn
assert hf_fastattn.patch
"""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "other")}
    subprocess.run([sys.executable, "-c", code, tmp_path / "kernels.zip"], check=True, env=environment, timeout=120)
    assert (tmp_path / "other" / kernel.key / f"{kernel.name}.cubin").is_file()


# ---- compilation by other processes ----


CHILD = Path(server.__file__).with_name("child.py")


def fake_child(monkeypatch, tmp_path, code: str) -> None:
    """Let servers run this code in place of the program that compiles."""
    (tmp_path / "child.py").write_text(f"import json, os, sys, time\n{code}")
    monkeypatch.setattr(server, "CHILD", tmp_path / "child.py")


ANSWERS = """
kernels = json.loads(sys.stdin.readline())
for number, kernel in enumerate(kernels):
    print(json.dumps([number, None]), flush=True)
"""


def run(recipe) -> ahead.Ahead:
    work = ahead.Ahead(recipe)
    work.thread.join(60)
    assert not work.thread.is_alive() and not launch.compiling
    return work


@pytest.mark.slow
def test_keys_are_the_same_in_a_process_without_torch(cache):
    kernels = [*warm.listed(lives.recipe_of("Llama 1B", TARGETS["H100"])), *warm.listed(lives.recipe_of("Qwen3.6 35B", H100))]
    code = """
import json, sys
sys.path.insert(0, sys.argv[1])
import child
child.leave_out()
from hf_fastattn.kernels.ahead import describe
print(json.dumps([describe.Kernel(*each).key for each in json.load(sys.stdin)]))
assert not hasattr(sys.modules["torch"], "__file__")
"""
    command = [sys.executable, "-c", code, str(CHILD.parent)]
    given = json.dumps([kernel.as_json() for kernel in kernels])
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [kernel.key for kernel in kernels]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "has"), [("H100", True), ("A100", False)])
def test_code_that_depends_on_the_architecture_is_that_of_the_description(target, has, cache):
    recipe = lives.recipe_of("Llama 1B", TARGETS[target])._replace(kv_dtype="fp8")
    reads = next(x for x in warm.listed(recipe) if x.name == "split_kv_kernel" and "load_fp8" in json.dumps(x.as_json()))
    command = [sys.executable, "-P", str(CHILD), "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        process.stdin.write(json.dumps([reads.as_json()]) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == [0, None]
    assert ("cvt.rn.f16x2.e4m3x2" in (locks.folder() / reads.key / "split_kv_kernel.ptx").read_text()) == has


def test_a_list_is_compiled_once_and_then_known(cache, tmp_path, monkeypatch):
    fake_child(monkeypatch, tmp_path, ANSWERS)
    recipe = small_recipe()
    kernels = warm.listed(recipe)
    work = run(recipe)
    assert (work.reason, work.server.done, work.server.total) == (None, len(kernels), len(kernels))
    for kernel in kernels:
        pretend(kernel, cache)
    monkeypatch.setattr(warm, "listed", None)
    hashed: list[tuple[str, str]] = []
    monkeypatch.setattr(describe, "hash_code", hashed.extend)
    assert run(recipe).server is None  # every kernel is there
    assert hashed == [*dict.fromkeys((kernel.module, kernel.name) for kernel in kernels)]  # those of a first call first
    (cache / kernels[0].key / f"__grp__{kernels[0].name}.json").unlink()
    assert run(recipe).server is not None


@pytest.mark.parametrize(
    "code, reason",
    [
        ("sys.stdin.readline(); os._exit(1)", "the process that compiled them has ended"),
        ("os._exit(1)", "the process that compiled them has ended"),
        ("sys.stdin.readline(); print('[0, \"OSError: full\"]')", "1 did not compile ahead: OSError: full"),
    ],
)
def test_a_failure_of_the_other_process_is_a_reason_and_no_error(code, reason, cache, tmp_path, monkeypatch):
    fake_child(monkeypatch, tmp_path, code)
    assert run(small_recipe()).reason == reason


def test_what_a_first_launch_needs_is_computed_before_it_and_once(monkeypatch):
    kernel, calls, release = norm(), [], threading.Event()
    rms_norm.rms_norm_kernel.hash = None
    describe.hash_code([(kernel.module, kernel.name)])
    assert rms_norm.rms_norm_kernel.hash is not None

    def key():
        calls.append(None)
        if len(calls) == 1:
            release.wait(30)

    monkeypatch.setattr("triton.runtime.cache.triton_key", key)
    monkeypatch.setattr(launch, "driver", None)
    threads = [threading.Thread(target=launch.import_triton) for _ in range(2)]
    for thread in threads:
        thread.start()
    threads[1].join(0.1)  # it would end, if it did not wait for the other one
    release.set()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and launch.driver is not None


def test_a_server_ends_with_its_patch(cache, tmp_path, monkeypatch):
    fake_child(monkeypatch, tmp_path, "sys.stdin.readline(); time.sleep(600)")
    held = launch.compiling  # the code of a step reads it: a graph is captured again if the name refers to another object
    work = ahead.Ahead(small_recipe())
    while work.server is None or not work.server.total:
        time.sleep(0.01)
    assert launch.compiling and launch.compiling is held
    work.close()
    work.thread.join(10)
    assert not work.thread.is_alive() and not launch.compiling and work.reason is None and launch.compiling is held
    with pytest.raises(ProcessLookupError):
        os.killpg(work.server.process.pid, 0)


def test_without_a_folder_to_write_to_kernels_are_compiled_at_their_launch(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert "cannot be written" in server.why_not()
    with locks.locked("A" * 52):  # no lock, and no error
        pass
    monkeypatch.setattr(knobs.compilation, "always_compile", True)
    assert "TRITON_ALWAYS_COMPILE" in server.why_not()


def test_a_launch_waits_for_the_process_that_compiles_its_kernel(cache):
    kernel = norm()
    holder = "import fcntl, os, sys, time; f = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); fcntl.flock(f, fcntl.LOCK_EX); "
    holder += "print(flush=True); sys.stdin.readline()"
    (cache / kernel.key).mkdir(parents=True)
    command = [sys.executable, "-c", holder, cache / kernel.key / "compiling"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        waited = []
        with locks.locked(kernel.key, lambda: (waited.append(None), other.stdin.close())[0]):
            assert waited


def workers_of(pid: int) -> list[int]:
    """The workers of this server: a program that it runs has its input, also before the exec(). Raises if it has ended."""
    workers = []
    for process in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if os.readlink(f"/proc/{process}/fd/0") == os.devnull:
                workers.append(process)
    return workers


def is_running(pid: int) -> bool:
    """False for a zombie too: the first process of a container may never wait for it."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


@pytest.mark.slow
def test_a_compiled_kernel_is_found_by_the_launch_itself(cache, monkeypatch):
    kernels = [norm(256), norm(512), norm(768)]
    assert ahead.compile_all(kernels).startswith("3 kernels compiled in ")
    hits = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit))
    monkeypatch.setattr(driver, "_active", OfflineDriver(90))
    monkeypatch.setattr(gpu, "arch", lambda device: 90)
    monkeypatch.setattr(launch, "start", lambda kernel, grid, *args, **named: kernel.warmup(*args, grid=grid, **named))
    for size in (256, 512, 768, 1024):
        x = torch.zeros(1, size, dtype=torch.bfloat16)
        rms_norm.run(x, x[0], None, 1e-6, False, False, "")
    assert hits == [True, True, True, False]
    assert ahead.compile_all(kernels).startswith("0 kernels compiled")


PARENT = """
import sys, time
sys.path.insert(0, {root!r})
from hf_fastattn.kernels.ahead import describe, server
import json
kernels = [describe.Kernel(*each) for each in json.loads({kernels!r})]
served = server.Server()
print(served.process.pid, flush=True)
{then}
"""


@pytest.mark.slow
@pytest.mark.parametrize("then", ["served.run(kernels * 100)", "time.sleep(3)", "sys.exit()"])
def test_the_processes_end_with_that_which_started_them(then, cache):
    root = str(Path(hf_fastattn.__file__).parents[1])
    code = PARENT.format(root=root, kernels=json.dumps([norm(2**n).as_json() for n in range(6, 12)]), then=then)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        if then.startswith("served"):
            while not (workers := workers_of(pid)):  # until it compiles
                time.sleep(0.05)
            parent.send_signal(signal.SIGKILL)
        else:
            workers = []
            parent.wait(30)
        end = time.monotonic() + 30
        while (running := [each for each in (pid, *workers) if is_running(each)]) and time.monotonic() < end:
            time.sleep(0.1)
        assert not running


@pytest.mark.parametrize("then", ["sys.exit(3)", pytest.param("", marks=pytest.mark.slow)])
def test_a_process_that_ends_while_its_kernels_are_listed_ends_well(then, cache):
    """Python ends daemon threads where they are, and the process by a signal if that is in torch's code."""
    code = f"""
import sys, threading, torch
sys.path.insert(0, {str(Path(hf_fastattn.__file__).parents[1])!r})
from hf_fastattn import hf
from hf_fastattn.kernels.ahead import describe
from hf_fastattn.patches import ahead, warm
from transformers import LlamaConfig
begun, whole = threading.Event(), describe.describe
describe.describe = lambda *given: begun.set() or whole(*given)
made = ahead.Ahead(warm.Recipe.of(hf.model_on_meta(LlamaConfig(num_hidden_layers=2), torch.bfloat16), None, (90, 132)))
assert begun.wait(60)
{then}
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, "terminate" in ended.stderr) == (3 if "exit" in then else 0, False), ended.stderr


def test_the_slowest_kernels_begin_first_where_workers_are_left(monkeypatch):
    monkeypatch.setattr(child, "kernels", [SimpleNamespace(seconds=seconds) for seconds in (0.4, 4.0, 1.3, 4.0)])
    assert child.order(3) == [0, 1, 2, 3] and child.order(4) == [1, 3, 0, 2]


@pytest.mark.slow
def test_kernels_of_a_killed_worker_are_compiled_later(cache):
    kernels = [norm(2**n) for n in range(6, 10)]
    served = server.Server()
    work = threading.Thread(target=served.run, args=(kernels,))
    with locks.locked(kernels[0].key):  # a worker waits for it, and the server for the worker
        work.start()
        while not (workers := workers_of(served.process.pid)):
            time.sleep(0.02)
        os.kill(workers[0], signal.SIGKILL)  # which ends the other workers
        work.join()
    assert served.done < len(kernels)
    for kernel in kernels:
        kernel.compile()  # as at its first launch
        assert locks.is_compiled(kernel.key)


# ---- the command line, and the import of the package ----


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "Name a MODEL whose kernels are to be compiled, or a file of kernels with --import"),
        (["--import", "/nowhere"], "--import: there is no file /nowhere."),
        (["{model}"], "This machine has no GPU. Pass --arch: 80 for an A100, 90 for an H100 or H200"),
        (["{model}", "--arch", "70"], "--arch must be one of 80, 86, 89, 90, or another from 80 on with --sms; got 70"),
    ],
)
def test_the_command_refuses_in_a_sentence(arguments, says, tmp_path, capsys):
    if not torch.cuda.is_available():
        tiny("llama").config.save_pretrained(tmp_path)
        assert cli.main(["warm", *(each.format(model=tmp_path) for each in arguments)]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--batch", "64"]], ids=["generate", "batch"])
def test_the_command_compiles_and_exports_from_a_configuration_alone(more, cache, tmp_path, monkeypatch, capsys):
    tiny("llama").config.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(ahead, "_compile", lambda kernels: [pretend(kernel, cache) for kernel in kernels])
    file = str(tmp_path / "kernels.zip")
    options = ["--rows", "1", "--tokens", "300", "--arch", "90", "--dtype", "bfloat16", "--export", file]
    assert cli.main(["warm", str(tmp_path / "model"), *options, *more]) == 0
    said = capsys.readouterr().out
    assert " kernels compiled in " in said and f" kernels are in {file}, 0." in said
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    assert cli.main(["warm", "--import", file]) == 0
    assert f"kernels of {file} are in Triton's cache" in capsys.readouterr().out


def test_patch_imports_no_kernels(monkeypatch):
    """The thread that it starts does: their files take longer than all of patch()."""
    for name in ("linear", "linear_rows", "rms_norm", "rope"):
        monkeypatch.setitem(sys.modules, f"{decode.__name__}.{name}", None)
        monkeypatch.delattr(decode, name, raising=False)
    monkeypatch.setattr(subclass, "_fused_subclass", subclass._fused_subclass.__wrapped__)  # classes of another test
    monkeypatch.setattr(gpu, "on_gpu", lambda device: True)
    with hf_fastattn.patch(tiny("llama").bfloat16()) as patched:
        fused = {change.what: change.count for change in patched.changes}
    assert fused["RMSNorm and LayerNorm"] == 5
    assert fused["linear layers, in decode graphs"] and fused["rotation of queries and keys"]


@pytest.mark.slow
def test_the_import_of_the_package_imports_no_triton():
    code = """
import sys
sys.modules["triton"] = None  # torch imports it otherwise
import torch, transformers.modeling_utils
del sys.modules["triton"]
import hf_fastattn
assert "triton" not in sys.modules
"""
    environment = {**os.environ, "HF_FASTATTN_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
