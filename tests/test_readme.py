"""The README, the documentation and the package agree."""

import importlib
import inspect
import json
import re
import warnings
from pathlib import Path

import checkpoint
import pytest
import torch
from models import tiny
from test_boundaries import ORDER
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, GenerationConfig

import hf_fastattn
import hf_fastattn_cli as cli
from benchmarks import grid, provenance
from benchmarks import report as bench_report
from hf_fastattn import backends, hf, kernels
from hf_fastattn.attention import function
from hf_fastattn.kernels import checks, reference, spans
from hf_fastattn.kernels.host import gpu, launch
from hf_fastattn.kernels.spec import KV, Spec

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_backends_table_is_the_registry():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page("guides/backends.md"), re.MULTILINE))
    assert rows == {backend.name: backend.summary for backend in backends.ALL}


def test_every_public_name_is_explained():
    assert [name for name in hf_fastattn.__all__ if f" hf_fastattn.{name}\n" not in page("reference/api.md")] == []


def test_documented_names_are_public():
    """Those of the reference and of the text, and those that documents and examples import, are in __all__ of their modules."""
    found = re.findall(r"auto\w+:: ([\w.]+)\.(\w+)", page("reference/api.md"))
    for path in [*DOCUMENTS, *(ROOT / "examples").glob("*.py")]:
        text = path.read_text().replace("`hf_fastattn.bench`", "")  # the place of the benchmarks before version 0.2
        found += re.findall(r"`(hf_fastattn[\w.]*)\.(\w+)[`(]", text)
        for module, names in re.findall(r"^from (hf_fastattn[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
            found += [(module, name) for name in names.split(", ")]
    assert ("hf_fastattn.kernels.spec", "KV") in found
    assert [each for each in found if each[1] not in importlib.import_module(each[0]).__all__] == []


def test_every_parameter_of_patch_is_in_its_table():
    rows = re.findall(r"^\| `(\w+)` \|", page("guides/patch.md").partition("## Parameters")[2], re.MULTILINE)
    assert rows == list(inspect.signature(hf_fastattn.patch).parameters)


def test_the_help_of_every_command_is_shown():
    wanted = {*cli.COMMANDS, *(f"bench {name}" for name in cli.BENCHES)} - {"bench"}
    assert set(re.findall(r"\{command-help\} (.+)", page("reference/cli.md"))) == wanted


def test_first_example_runs(tmp_path, capsys):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert name in code and len([line for line in code.splitlines() if line]) == 8
    exec(code.replace(name, str(checkpoint.save(tmp_path))), {})
    assert capsys.readouterr().out.startswith("Attention is")


def _generate(model, **options):
    return model.generate(torch.arange(8)[None], max_new_tokens=2, **options)


def _lean(*shapes, **options):
    return hf_fastattn.get("lean")(*(torch.zeros(shape, **options) for shape in shapes))


def _on_a_t4():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        patch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
        gpu._arch.__wrapped__(torch.device("cuda"))


@torch.no_grad()
def _packed(rows, lengths):
    lengths = torch.tensor(lengths)
    tiny("llama", "lean")(torch.arange(8).expand(rows, -1), cu_seq_lens_q=lengths, cu_seq_lens_k=lengths)


def _forward_mode():
    q = torch.ones(1, 1, 2, 16)
    torch.func.jvp(lambda q: hf_fastattn.training.attention("lean", q, q, q)[0].sum(), (q,), (q,))


def _second():
    q = torch.zeros(SHAPE, requires_grad=True)
    (grad,) = torch.autograd.grad(hf_fastattn.training.attention("lean", q, q, q)[0].sum(), q, create_graph=True)
    grad.sum().backward()


def _export():
    torch.export.export(tiny("llama", "lean"), (), {"input_ids": torch.arange(8)[None], "use_cache": False}, strict=False)


def _train_streaming():
    model = tiny("llama")
    with hf_fastattn.patch(model, "streaming", window=16):
        model(torch.arange(8)[None], use_cache=False)


def _batches(model, **options):
    with hf_fastattn.patch(model):
        model.generate_batch([[3, 4]], **options)


def _without_its_cache(model):
    model.config.use_cache = model.generation_config.use_cache = False
    with hf_fastattn.patch(model):
        _generate(model, past_key_values=hf_fastattn.PreallocatedCache(model))


def _paged_streaming():
    model = tiny("llama")
    with hf_fastattn.patch(model, "streaming", window=16):
        _generate(model, past_key_values=hf_fastattn.PagedCache(model))


def _manager():
    model = tiny("llama")
    with hf_fastattn.patch(model):
        model.init_continuous_batching().add_request([3], temperature=0.5)


def _in_a_pause():
    model = tiny("llama")
    with hf_fastattn.patch(model), model.init_continuous_batching(GenerationConfig(max_new_tokens=4000)) as manager:
        next(manager.request_id_iter(manager.add_request([3], streaming=True)))
        with manager.pause():
            model.generate_batch([[3]])


def _prompt_learning():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(tiny("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


def _scripted(model):
    with warnings.catch_warnings(action="ignore"):  # deprecated in torch
        model.model.layers[1].mlp.act_fn = torch.jit.script(torch.nn.Tanh())
    return model


SHAPE = (1, 2, 4, 64)
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 8, "first_k_dense_replace": 2}
T5 = {"d_model": 64, "num_heads": 4, "num_layers": 2, "decoder_start_token_id": 0}
REFUSED = {  # a part of the request in a row of the table: code for the request
    "an unknown backend": lambda: hf_fastattn.get("leen"),
    "require grad": lambda: _lean(SHAPE, SHAPE, SHAPE, requires_grad=True),
    "create_graph": lambda: _second(),
    "jvp": lambda: _forward_mode(),
    "torch.export": lambda: _export(),
    "training under": lambda: _train_streaming(),
    "output_attentions": lambda: _generate(tiny("llama", "lean"), output_attentions=True, return_dict_in_generate=True),
    "GPT-Neo": lambda: hf_fastattn.patch(tiny("gpt_neo", num_layers=2, num_heads=4, attention_types=[[["global"], 2]])),
    "T5": lambda: _generate(tiny("t5", "lean", auto=AutoModelForSeq2SeqLM, **T5)),
    "packed": lambda: _packed(2, [0, 4, 8]),
    "cumulative lengths": lambda: _packed(1, [0, 4, 9]),
    "head_dim above 576": lambda: _lean(*[(1, 2, 4, 600)] * 3),
    "head_dim above 512": lambda: _lean(SHAPE, SHAPE, (1, 2, 4, 520)),
    "float64": lambda: _lean(SHAPE, SHAPE, SHAPE, dtype=torch.float64),
    "without `patch()`": lambda: function.attention_forward("lean", None, *[torch.zeros(SHAPE)] * 3, None, cache=object()),
    "with beams": lambda: _batches(tiny("llama"), num_beams=2),
    "latent attention": lambda: _batches(tiny("deepseek_v3", **LATENT)),
    "`PagedCache` of a model": lambda: hf_fastattn.PagedCache(tiny("deepseek_v3", **LATENT)),
    "`PagedCache` with": lambda: _paged_streaming(),
    "a request of a manager": lambda: _manager(),
    "inside `pause()`": lambda: _in_a_pause(),
    "without a window": lambda: hf_fastattn.patch(checkpoint.model(), "streaming"),
    "encoder-decoder": lambda: hf_fastattn.patch(tiny("bart", auto=AutoModelForSeq2SeqLM, d_model=64)),
    "without generate()": lambda: hf_fastattn.patch(tiny("llama", auto=AutoModelForSequenceClassification)),
    "prompt learning": lambda: hf_fastattn.patch(_prompt_learning()),
    "TorchScript": lambda: hf_fastattn.patch(_scripted(tiny("llama"))),
    "the default of MPT": lambda: _without_its_cache(tiny("llama")),
    "over recurrent states": lambda: hf_fastattn.PreallocatedCache(
        tiny("lfm2", layer_types=["conv", "full_attention"])
    ).storage.crop(1),
    '"sdpa"': lambda: hf_fastattn.patch(tiny("llama"), "sdpa"),
    "another backend than": lambda: hf_fastattn.patch(tiny("llama"), "fa2", kv_dtype="int8"),
    "all have a window": lambda: hf_fastattn.patch(tiny("mistral", sliding_window=16), kv_dtype="int8"),
    'kv_sharding="sequence"': lambda: hf_fastattn.patch(tiny("llama"), kv_sharding="sequence"),
    "peer_memory": lambda: hf_fastattn.patch(tiny("llama"), peer_memory=True),
    "mps": lambda: kernels.TritonKernel("prefill").where("mps"),
    "T4": lambda: _on_a_t4(),
    "before": lambda: hf.check_version("5.16.0"),
}


@pytest.mark.parametrize("asked", REFUSED)
def test_refusals_are_those_of_the_table(asked):
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", page("refusals.md"), re.MULTILINE)[1:]
    assert len(rows) == len(REFUSED)
    (promised,) = [said for what, said in rows if asked in what]
    with pytest.raises((ValueError, TypeError, RuntimeError, ImportError)) as refused:
        REFUSED[asked]()
    for part in promised.removesuffix(" (Newer Transformers refuse it first.)").split("..."):
        assert part.strip() in str(refused.value)


def test_messages_in_troubleshooting_are_those_of_the_package():
    source = "".join(path.read_text() for path in (ROOT / "hf_fastattn").rglob("*.py"))
    headings = re.findall(r"^## `(.*\.\.\..*)`$", page("troubleshooting.md"), re.MULTILINE)
    assert len(headings) == 3
    assert [part for heading in headings for part in heading.split("...") if part.strip() not in source] == []


def test_stated_versions_and_limits_are_those_of_the_package():
    oldest = ".".join(map(str, hf.version.OLDEST))
    assert f"Transformers >= {oldest}" in README and f"transformers>={oldest}" in (ROOT / "pyproject.toml").read_text()
    widths = f"head_dim | up to {checks.MAX_HEAD_DIM}, of values up to {checks.MAX_VALUE_DIM}"
    assert widths in page("supported.md") and f"head_dim up to {checks.MAX_HEAD_DIM}" in README
    assert f'version = "{hf_fastattn.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_example_of_a_new_backend_works(registering):
    blocks = re.findall(r"```python\n(.*?)```", page("guides/adding-a-backend.md"), re.DOTALL)
    (code,) = [block for block in blocks if "register(" in block]
    exec(code, {})
    model = tiny("llama", vocab_size=50)
    ids = torch.arange(8)[None]
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    model.set_attn_implementation("mine")
    with hf_fastattn.count_calls() as calls:
        assert model.generate(ids, max_new_tokens=8, do_sample=False).tolist() == expected.tolist()
    assert calls == {"mine.prefill": 8 * 2}


@pytest.mark.parametrize("document", [ROOT / "CONTRIBUTING.md", *DOCUMENTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_and_targets_exist(document):
    text = document.read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([\w-]+)", text):
        assert f"\n{target}:" in makefile, target
    for path in re.findall(r"`((?:hf_fastattn|benchmarks|tests|examples|\.ci)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text):
        assert (document.parent / link).exists(), link


def test_contributing_is_short_and_says_where_files_are():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(text.splitlines()) <= 120
    named = re.findall(r"`(\w+/[\w./]*)`", text)
    assert (
        len(named) > 50
        and [path for path in named if not ((ROOT / "hf_fastattn" / path).exists() or (ROOT / path).exists())] == []
    )


def test_contracts_are_those_of_the_package():
    (signature,) = re.findall(r"^attention\((.*)\)$", page("dev/contracts.md"), re.MULTILINE)
    said = [name.partition("=")[0].strip() for name in signature.split(",")]
    assert [name for name in said if name != "*"] == list(inspect.signature(reference.attention).parameters)
    text = page("concepts/spans.md")
    integers = re.findall(r"^\| `([A-Z_]+)` \|", text, re.MULTILINE)
    assert [getattr(spans, name) for name in integers] == list(range(spans.WORDS)) and f"(batch, 1, 1, {spans.WORDS})" in text
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    diagram = next(block for block in blocks if block.startswith("distillation "))
    there = {path.stem for path in (ROOT / "hf_fastattn").iterdir()}
    assert [set(line.split()) for line in diagram.splitlines()] == [there & set(parts) for parts in ORDER[1:]]


KERNEL_ROWS = [line.strip("| ").split(" | ") for line in page("concepts/kernels.md").splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("row", KERNEL_ROWS[1:], ids=lambda row: "-".join(row[:8]))
def test_kernels_of_a_request_are_those_of_the_table(row, monkeypatch):
    pytest.importorskip("triton.experimental.gluon")
    request, rows, keys, width, dtype, arch, mask, dropout, *wanted = row
    launched = []

    def launch_only(self, *tensors):
        launched.append(self.kernel.fn.__name__.removesuffix("_kernel"))
        if self.then is not None:
            launch_only(self.then)

    monkeypatch.setattr(kernels, "INTERPRETED", True)  # otherwise CPU tensors run the reference
    monkeypatch.setattr(launch.Launch, "__call__", launch_only)
    monkeypatch.setattr(gpu, "arch", lambda device: int(float(arch) * 10))
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    for name in ("lean", "split_kv", "prefill", "prefill_hopper", "backward"):  # their launches are cached for another GPU
        module = importlib.import_module(f"hf_fastattn.kernels.attention.{name}")
        monkeypatch.setattr(module, "_prepare", module._prepare.__wrapped__)
    q_len, batch = int(rows) // 4, 4 if mask == "padding" else 1
    q = torch.zeros(batch, 32, q_len, int(width), dtype=getattr(torch, dtype))
    k = torch.zeros(batch, 8, int(keys), int(width), dtype=q.dtype)
    seen = {"padding": (batch, 1, 1, 6), "packed": (1, 1, 2, 6 + q_len)}.get(mask)
    seen = None if seen is None else torch.zeros(seen, dtype=torch.int32)
    spec = Spec(sinks=4 * (mask == "sinks"), window=512 if mask == "sinks" else None, dropout=float(dropout))
    given = {"seed": torch.zeros(1, dtype=torch.int64)} if spec.dropout else {}
    by_backend = dict(zip(KERNEL_ROWS[0][8:], wanted, strict=True))
    for backend, kernel in ((name, kernel) for said, kernel in by_backend.items() for name in re.findall(r"\w+", said)):
        launched.clear()
        run, kv = hf_fastattn.get(backend), KV(k, k[..., :512])
        if request == "training":
            out, lse = run.forward(q, kv, spec, seen, **given)
            run.gradients(q, kv, spec, seen, out=out, lse=lse, dout=torch.ones_like(out), **given)
        else:
            run.attend(q, kv, spec, seen, **given)
        assert ", ".join(launched) == kernel, backend


MEASURED = [path for path in DOCUMENTS if "<!-- measured" in path.read_text()]


@pytest.mark.parametrize("document", MEASURED, ids=lambda path: path.stem)
def test_measured_tables_are_those_of_the_json_files(document):
    text, folder = document.read_text(), ROOT / "examples" / "results"
    assert bench_report.rewrite(text, folder, bench_report.relative(folder, document)) == text


def test_every_result_has_its_place():
    folder = ROOT / "examples" / "results"
    named = [match[1] for path in MEASURED for match in bench_report.MARKS.finditer(path.read_text())]
    shown = [name for name, file, _ in bench_report.SECTIONS if (folder / file).exists()]
    assert sorted(named) == sorted([*shown, *[bench_report.HEADLINE] * 2])  # of the README, the summary and the site


def test_the_first_sentences_have_the_figures_of_the_headline():
    result = json.loads((ROOT / "examples" / "results" / "generate_8b.json").read_text())
    ratios = {}
    for row in result["rows"]:
        over = [provenance.ratio(result, row, name, grid.OURS) for name in (grid.SDPA, grid.STATIC)]
        ratios[row["case"]] = min(filter(None, over))
    padded = ratios.pop("8xpadded")
    for document in ("README.md", "docs/index.md", "docs/results.md"):
        first = " ".join((ROOT / document).read_text()[:800].split())
        assert f"{min(ratios.values()):.1f} to {max(ratios.values()):.1f} times" in first, document
        assert document == "docs/index.md" or f"{padded:.1f} times" in first, document


def test_every_picture_exists():
    """Except for badges, pictures that are links."""
    picture = r"(?<!\[)!\[[^]]*\]\(([^)]+)\)"
    shown = [(path.parent, link) for path in DOCUMENTS for link in re.findall(picture, path.read_text())]
    assert shown and all((folder / link).is_file() for folder, link in shown)


def test_results_are_of_a_gpu_and_state_their_conditions():
    for name, file, _ in bench_report.SECTIONS:
        path = ROOT / "examples" / "results" / file
        if path.exists():
            result = json.loads(path.read_text())
            assert "NVIDIA" in result.get("conditions", result)["device"], name
            if name == "perplexity":  # written by an example
                continue
            if name == "accuracy":  # written by `hf-fastattn eval`
                assert f"limit {result['conditions']['limit']:.0f}" in page("results/generate.md")
                continue
            assert all("bench" in command for command in result["commands"]), name
