"""The command line, in this process: its output, its exit codes, and its error messages."""

import io
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import checkpoint
import pytest
import torch

import hf_fastattn
import hf_fastattn_cli as cli
from hf_fastattn import explanation, hf, patches
from hf_fastattn.evaluation import CACHES, Evaluation, harness, perplexity, report
from hf_fastattn.explanation import costs

bench_generate, results = (cli.load_benchmark(name) for name in ("generate", "results"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(checkpoint.save(tmp_path_factory.mktemp("tiny")))


def test_backends_lists_every_backend_and_its_kernels(capsys):
    assert cli.main(["backends"]) == 0
    said = capsys.readouterr().out
    for name in hf_fastattn.names():
        assert f"| {name} " in said and hf_fastattn.get(name).summary in said
    assert "PyTorch reference" in said or torch.cuda.is_available() or "interpreted" in said


def test_explain_of_a_named_shape_and_of_a_folder(capsys, folder):
    assert cli.main(["explain", "8B", "--batch", "2", "--length", "4096", "--gpu", "H100"]) == 0
    assert "2 rows of 4,096 tokens on H100 SXM" in capsys.readouterr().out
    assert cli.main(["explain", "1b", "--gpu", "t4", "--dtype", "bfloat16"]) == 0
    assert "--dtype float16 has one" in capsys.readouterr().out
    assert cli.main(["explain", folder, "--length", "64", "--dtype", "bfloat16", "--gpu", "l4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["facts"]["name"] == folder and said["facts"]["dtype"] == "bfloat16" and said["facts"]["num_kv_heads"] == 2
    assert [shape["layers"] for shape in said["facts"]["shapes"]] == [2]


@pytest.mark.parametrize("cache", ["preallocated", "dynamic"])
def test_generate_prints_the_text_and_compares(capsys, folder, cache):
    options = ["--dtype", "float32", "--device", "cpu", "--tokens", "6", "--prompt", "abc", "--cache", cache]
    assert cli.main(["generate", folder, *options, "--compare", "sdpa"]) == 0
    text, _, rows = capsys.readouterr().out.rpartition("| backend")
    model, tokenizer = checkpoint.model(), checkpoint.tokenizer()
    ids = model.generate(**tokenizer("abc", return_tensors="pt"), max_new_tokens=6, do_sample=False)[0, 3:]
    assert text.strip() == tokenizer.decode(ids, skip_special_tokens=True).strip()
    ours, theirs = (next(line for line in rows.splitlines() if line.startswith(f"| {name} ")) for name in ("lean", "sdpa"))
    assert "lean.decode 12 " in ours and "| all " in theirs  # two layers, six tokens: the prompt of three runs the decode kernel


def test_warnings_are_sentences_without_a_place_in_the_code(capsys, folder):
    hf.warn_once.cache_clear()
    assert cli.main(["generate", folder, "--device", "cpu", "--tokens", "2", "--backend", "linear"]) == 0
    said = capsys.readouterr().err
    assert "hf-fastattn generate: warning: attn_implementation='linear' is not the model's softmax" in said
    assert "UserWarning" not in said


def test_kv_in_8_bits(capsys, folder):
    assert cli.main(["explain", "8b", "--gpu", "h100", "--kv-dtype", "int8"]) == 0
    assert "K/V stay in place in 8 bits (int8), an approximation" in capsys.readouterr().out
    options = ["--device", "cpu", "--tokens", "3", "--prompt", "abc", "--kv-dtype", "fp8", "--compare", "sdpa"]
    assert cli.main(["generate", folder, *options]) in (0, 1)  # an approximation
    assert "lean.decode 6 " in capsys.readouterr().out


def test_generate_reads_standard_input_and_chat_templates(capsys, folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert cli.main(["generate", folder, "--device", "cpu", "--tokens", "2", "--prompt", "-", "--chat"]) == 0
    assert "| lean " in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    for prompt in ("-", "\udcff"):
        assert cli.main(["generate", folder, "--device", "cpu", "--tokens", "2", "--prompt", prompt]) == 2
        assert "is not UTF-8 text" in capsys.readouterr().err


def test_eval_writes_what_it_prints_and_returns_the_verdict(capsys, folder, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    options = ["--device", "cpu", "--dtype", "float32", "--tasks", "", "--decode-tokens", "4", "--out", str(tmp_path / "out")]
    (tmp_path / "text.txt").write_text("some words, said again and again. " * 40)
    assert cli.main(["eval", folder, *options, "--backends", "sdpa,lean", "--text", str(tmp_path / "text.txt")]) == 0
    said = capsys.readouterr().out
    assert "EQUAL to sdpa, dynamic" in said and (tmp_path / "out" / "eval.md").read_text().strip() in said
    assert cli.main(["eval", folder, *options, "--backends", "sdpa", "--caches", "dynamic"]) == 3  # nothing is compared
    monkeypatch.setattr(perplexity, "decode_nats", lambda model, *rest: [[1.0 + (model.config._attn_implementation == "lean")]])
    assert cli.main(["eval", folder, *options, "--backends", "sdpa,lean"]) == 1


# ---- output folders ----
@pytest.fixture
def eval_options(folder):
    pytest.importorskip("lm_eval")
    return ["eval", folder, "--device", "cpu", "--dtype", "float32", "--tasks", "", "--decode-tokens", "4", "--caches", "dynamic"]


@pytest.mark.parametrize("out", ["a_file", "a_file/below", "/proc/nope"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_run(capsys, eval_options, tmp_path, monkeypatch, out):
    (tmp_path / "a_file").write_text("kept")
    if out.startswith("/") and not Path("/proc/self").exists():
        pytest.skip("there is no /proc here")

    def never(*args, **options):
        raise AssertionError("it ran")

    monkeypatch.setattr(hf, "load_model", never)
    assert cli.main([*eval_options, "--out", str(tmp_path / out)]) == 2
    assert f"Results cannot be written into {tmp_path / out}: " in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "generate", "--shape", "tiny", "--device", "cpu", "--out", str(tmp_path / out)])
    assert end.value.code == 2 and f"Results cannot be written into {tmp_path / out}: " in capsys.readouterr().err
    assert (tmp_path / "a_file").read_text() == "kept"


def test_a_missing_folder_is_created_also_a_second_time(capsys, eval_options, tmp_path, monkeypatch):
    out, add = tmp_path / "a" / "b", Evaluation.add

    def removed(self, run):
        shutil.rmtree(out)
        add(self, run)

    monkeypatch.setattr(Evaluation, "add", removed)
    assert cli.main([*eval_options, "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["eval.json", "eval.md"]


@pytest.mark.parametrize("fails", [1, 2])
def test_results_that_cannot_be_saved_are_printed_with_an_exit_code(capsys, eval_options, tmp_path, monkeypatch, fails):
    """The disk is full from the first write on, or during one run; then the next run saves all results."""
    write, written = report.write_whole, []

    def full(path, text):
        written.append(path)
        if fails == 1 or len(written) == 1:
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(report, "write_whole", full)
    code = cli.main([*eval_options, "--out", str(tmp_path)])
    said = capsys.readouterr()
    assert "| decode perplexity" in said.out and "EQUAL to sdpa, dynamic" in said.out
    if fails == 1:
        assert code == 2 and f"These results were not saved in {tmp_path}: " in said.err and "No space left" in said.err
        assert "-> " not in said.out and not list(tmp_path.iterdir())
    else:
        assert code == 0 and len(json.loads((tmp_path / "eval.json").read_text())["runs"]) == 2


def test_rows_of_a_benchmark_that_cannot_be_saved_are_printed(capsys, tmp_path, monkeypatch):
    kept = results.Results(tmp_path / "x.json", 10, "typed")
    kept.data["rows"].append({"us": 1234})
    kept.save()
    assert json.loads((tmp_path / "x.json").read_text())["rows"] == [{"us": 1234}]
    monkeypatch.setattr(results, "write_whole", lambda path, text: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    monkeypatch.setattr(bench_generate, "main", lambda argv, prog: kept.save())
    assert cli.main(["bench", "generate"]) == 2
    said = capsys.readouterr()
    assert '"us": 1234' in said.out and "x.json was not saved: " in said.err


def test_bench_and_lm_eval_get_their_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr(bench_generate, "main", lambda argv, prog: seen.append((argv, prog)) or 7)
    assert cli.main(["bench", "generate", "--shape", "tiny"]) == 7
    assert seen == [(["--shape", "tiny"], "hf-fastattn bench generate")]
    main = pytest.importorskip("lm_eval.__main__")
    monkeypatch.setattr(main, "cli_evaluate", lambda: seen.append(list(sys.argv)))
    monkeypatch.setattr("sys.argv", ["hf-fastattn"])
    assert cli.main(["lm_eval", "run", "--model_args", "attn_implementation=lean"]) == 0
    assert seen[1] == ["lm_eval", "run", "--model_args", "attn_implementation=lean"]


def test_benchmarks_are_those_of_the_clone(capsys, monkeypatch, tmp_path):
    assert sys.modules["hf_fastattn_benchmarks"].__file__ == str(Path(__file__).parent.parent / "benchmarks" / "__init__.py")
    # As in site-packages with a folder of that name from another package; and as in another project.
    installed, other = tmp_path / "hf_fastattn", tmp_path / "benchmarks"
    for folder in (installed, other):
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (other / "generate.py").write_text("raise AssertionError")
    monkeypatch.setattr(cli.handed_over, "ROOT", tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "hf_fastattn_benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    for project in (None, '[project]\nname = "mine"\n'):
        if project:
            (tmp_path / "pyproject.toml").write_text(project)
        assert cli.main(["bench", "generate"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("hf-fastattn bench: ") and "clone its repository" in said and 'pip install -e ".[bench]"' in said


@pytest.mark.slow
@pytest.mark.parametrize(("model", "own"), [("hf", "attn_implementation=lean"), ("hf-fastattn", "backend=lean,graph=false")])
def test_lm_evals_own_command_line_runs_our_backend(model, own, folder, monkeypatch, tmp_path):
    evaluator = pytest.importorskip("lm_eval.evaluator")
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)  # seconds
    tasks = tmp_path / "small.yaml"
    metadata = "metadata:\n  version: 1\n  examples: 2\n  facts: 4\n"
    tasks.write_text(f"include: {harness.PACK}/fastattn_choice.yaml\ntask: small\ntag: null\n{metadata}")
    args = f"pretrained={folder},{own},dtype=float32"
    monkeypatch.setattr("sys.argv", ["hf-fastattn"])
    with hf_fastattn.count_calls() as calls:
        options = ["--model", model, "--model_args", args, "--tasks", str(tasks), "--device", "cpu"]
        assert cli.main(["lm_eval", "run", *options]) == 0
    assert calls["lean.prefill"] + calls["lean.decode"] > 0


def test_lm_eval_says_which_model_type_patches(capsys, monkeypatch):
    main = pytest.importorskip("lm_eval.__main__")
    monkeypatch.setattr(main, "cli_evaluate", lambda: print(*sys.argv))
    monkeypatch.setattr("sys.argv", ["hf-fastattn"])
    for arguments in (["run", "--model", "hf", "--tasks", "x"], ["run", "--model=hf-fastattn", "--tasks", "x"]):
        assert cli.main(["lm_eval", *arguments]) == 0
        said = capsys.readouterr()
        assert said.out.split() == ["lm_eval", *arguments]
        assert ("only --model hf-fastattn patches the model" in said.err) == ("hf" in arguments)


@pytest.mark.parametrize("command", ["", "backends", "generate", "explain", "eval", "bench", "lm_eval"])
def test_every_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as end:
        cli.main([*([command] if command else []), "--help"])
    assert end.value.code == 0 and len(capsys.readouterr().out.splitlines()) > 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["explain", "8b", "--gpu", "h900"], "hf-fastattn explain: Unknown GPU 'h900'; known: a100"),
        (["explain", "8b", "--length", "0"], "explain: --length must be an integer, at least 1; got 0."),
        (["explain", "8b", "--sinks", "4"], "--window, --sinks and clamp_positions are for"),
        (["explain", "8b", "--gguf-file", "x"], "'8b' is a named shape and has no files; leave out --gguf-file."),
        (
            ["explain", "8b", "--backend", "streaming"],
            "needs --window, the number of last tokens to keep, for example 4096. Try: ",
        ),
        (["explain", "8b", "--backend", "leen"], "Try: hf-fastattn explain 8b --backend lean"),
        (["warm", "FOLDER", "--arch", "90", "--rows", "x"], "--rows are numbers of at least 1, as in 1,8; got 'x'."),
        (["warm", "FOLDER", "--arch", "90", "--tokens", "0"], "--tokens must be at least 1; got 0."),
        (["warm", "FOLDER", "--arch", "90", "--sms", "0"], "--sms must be at least 1; got 0."),
        (["explain", "/nowhere/at/all"], "hf-fastattn explain: "),
        (["explain", "8b", "--curves", "/nowhere/curves.png"], "hf-fastattn explain: "),
        (["generate", "/nowhere/model.gguf"], "There is no file /nowhere/model.gguf."),
        (["generate", "FOLDER", "--backend", "leen"], "Unknown attention backend 'leen'; known backends: "),
        (["generate", "FOLDER", "--tokens", "0"], "--tokens must be at least 1; got 0."),
        (["generate", "FOLDER", "--prompt", ""], "The prompt is empty"),
        (["eval", "FOLDER", "--backends", ""], "Name at least one backend"),
        (["eval", "FOLDER", "--backends", "sdpa,leen"], "--backends sdpa,lean"),
        (["eval", "FOLDER", "--caches", "rolling"], "--caches are one or both of"),
        (["eval", "FOLDER", "--text", "/nowhere.txt"], "--text /nowhere.txt cannot be read: No such file or directory."),
        (["eval", "FOLDER", "--text", "FOLDER/model.safetensors"], "is not a UTF-8 text file"),
        (["eval", "FOLDER", "--batch-size", "-2"], "--batch-size must be at least 1"),
        (["eval", "FOLDER", "--batch-size", "²"], "--batch-size must be at least 1"),
        (["eval", "FOLDER", "--gen-kwargs", "bogus=1"], "--gen-kwargs has 'bogus', which is not an option of generate()"),
        (["generate", "FOLDER/config.json"], "config.json is a file. Name its folder"),
        (["generate", "FOLDER", "--gguf-file", "zzz"], "There is no file 'zzz' in the folder"),
        (["generate", "FOLDER", "--tokens", "9" * 30, "--device", "cpu"], "Ask for fewer tokens"),
        (["generate", "FOLDER", "--device", ""], "Unknown device ''"),
        (["explain", "FOLDER", "--device", ""], "Unknown device ''"),
        (["explain", "8b", "--tp", "0"], "--tp must be at least 1; got 0."),
        (["explain", "8b", "--tp", "3"], "Use a number of ranks that divides 8."),
        (["explain", "8b", "--tp", "2", "--kv-dtype", "int8"], "--kv-dtype int8 is for a model on one GPU; got --tp 2."),
        (["explain", "8b", "--kv-dtype", "int4"], '--kv-dtype must be "int8", "fp8" or None; got \'int4\'.'),
        (["eval", "FOLDER", "--kv-dtype", "int8", "--backends", "sdpa"], "--kv-dtype is for backends whose kernels read 8 bits"),
        (
            ["generate", "FOLDER", "--kv-dtype", "int8", "--cache", "dynamic"],
            "--kv-dtype needs --cache preallocated and a backend",
        ),
        (["generate", "FOLDER", "--kv-dtype", "int8", "--backend", "sdpa"], "as lean; got preallocated and sdpa."),
        (["warm", "FOLDER", "--arch", "90", "--kv-dtype", "int8", "--batch", "64"], "with a cache of None"),
        (["eval", "FOLDER", "--limit", "-1"], "--limit must be above 0"),
        (["eval", "FOLDER", "--num-fewshot", "-1"], "--num-fewshot must be at least 0"),
        (["eval", "FOLDER", "--decode-tokens", "-4"], "--decode-tokens must be 0 for none, or at least 3; got -4."),
        (["generate", "FOLDER", "--device", "nosuch"], "Unknown device 'nosuch'"),
        (["explain", "FOLDER", "--device", "cuda:-1"], "Unknown device 'cuda:-1'"),
        (["generate", "FOLDER", "--device", "cuda:77"], "There is no device 'cuda:77' here"),
        (["eval", "FOLDER", "--device", "cuda:77"], "There is no device 'cuda:77' here"),
        (["bench", "kernels", "decode", "--device", "cuda:77", "--out", "OUT"], "There is no device 'cuda:77' here"),
        (["generate", "FOLDER", "--device", "xpu"], "There is no device 'xpu' here"),
        (["generate", "FOLDER", "--device", "meta"], "holds no numbers"),
        (
            ["bench"],
            "chunks, rollout, quantised, kv_dtype, kv_dtype_speed, linear, sampling, ranks, commits, kernels",
        ),
        (["bench", "speed"], "Unknown benchmark 'speed'; known: "),
        (["bench", "familys"], "Try: hf-fastattn bench families"),
        (["generate", "FOLDER", "--window", "40"], "--window and --sinks are for streaming backends, and 'lean' is not one"),
        (["generate", "FOLDER", "--backend", "streaming"], "'streaming' needs --window, the number of last tokens to keep"),
    ],
)
def test_mistakes_are_one_line_and_code_2(capsys, folder, tmp_path, arguments, sentence):
    known = {
        "FOLDER": folder,
        "FOLDER/config.json": f"{folder}/config.json",
        "FOLDER/model.safetensors": f"{folder}/model.safetensors",
        "OUT": str(tmp_path),
    }
    assert cli.main([known.get(argument, argument) for argument in arguments]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-fastattn")]
    assert sentence in line


def broken(folder: str, to: Path, how: str) -> str:
    """A copy of the checkpoint with this defect; the path for a command."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    config, weights = to / "config.json", to / "model.safetensors"
    if how == "weights":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif how == "header":
        weights.write_bytes(b"\xff" * 100)
    elif how == "gguf":  # it announces entries, and ends
        (to / "it.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 5))
        return str(to / "it.gguf")
    elif how == "no tokenizer":
        for file in to.glob("*token*"):
            file.unlink()
    elif how == "tokenizer":
        (to / "tokenizer.json").write_text("{")
    elif how.startswith("{"):
        config.write_text(json.dumps(json.loads(config.read_text()) | json.loads(how)))
    else:
        config.write_text(how)
    return str(to)


@pytest.mark.parametrize(
    ("how", "explains", "sentence"),
    [
        ("weights", True, "cannot be loaded: SafetensorError: "),
        ("header", True, "cannot be loaded: SafetensorError: "),
        ("gguf", False, "cannot be loaded: "),
        ("tokenizer", True, "cannot be loaded: "),
        ("no tokenizer", True, "the folder has no tokenizer. Save it there"),
        ("no JSON", False, "is not a valid JSON file"),
        ("[1, 2]", False, "cannot be loaded: "),
        ('{"num_attention_heads": 0}', False, "A size in its config is 0."),
        ('{"num_key_value_heads": 0}', False, "A size in its config is 0."),
        ('{"num_attention_heads": "four"}', False, "expected int, got str"),
        ('{"num_hidden_layers": 0}', False, "no layers"),
        ('{"hidden_size": -4}', False, "negative dimension -4"),
        ('{"model_type": "nosuch"}', False, "`nosuch`"),
    ],
)
def test_a_broken_checkpoint_is_refused_with_a_message(capsys, folder, tmp_path, how, explains, sentence):
    path = broken(folder, tmp_path / "it", how)
    assert cli.main(["generate", path, "--device", "cpu", "--tokens", "2"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("hf-fastattn generate: ") and sentence in said
    assert cli.main(["explain", path, "--length", "64"]) == (0 if explains else 2)
    said = capsys.readouterr().err
    assert explains or (sentence in said and said.startswith("hf-fastattn explain: "))


@pytest.mark.parametrize("model_type", ["rwkv", "mamba"])
def test_a_model_without_attention_is_refused_with_a_message(capsys, tmp_path, model_type):
    sizes = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2}
    hf.random_model(model_type, torch.float32, torch.device("cpu"), **sizes).save_pretrained(tmp_path)
    checkpoint.tokenizer().save_pretrained(tmp_path)
    options = ["--device", "cpu"]
    decode = ["--tasks", "", "--decode-tokens", "4", "--out", str(tmp_path / "out")]
    for command, more in (("explain", []), ("generate", ["--tokens", "2"]), ("eval", decode)):
        assert cli.main([command, str(tmp_path), *options, *more]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"hf-fastattn {command}: ")


def test_a_bug_of_this_package_has_a_traceback_and_a_mistake_when_asked_for(folder, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(costs, "step", None)
        cli.main(["explain", folder])
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="too many values"):
        patch.setattr(hf.loading, "locate", lambda *args: (1, 2, 3))
        cli.main(["explain", folder])
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(cli.generate, "_encode", lambda *args: torch.zeros(2) @ torch.zeros(3))
        cli.main(["generate", folder, "--device", "cpu"])
    with pytest.raises(ValueError, match="at least 1"):
        cli.main(["generate", folder, "--tokens", "0", "--traceback"])


def test_a_bug_of_a_benchmark_has_a_traceback_and_its_refusal_a_message(capsys, monkeypatch):
    grid, shapes = (cli.load_benchmark(name) for name in ("grid", "shapes"))
    monkeypatch.setattr(bench_generate, "main", lambda argv, prog: grid.row_lengths("1xb", []))
    with pytest.raises(ValueError, match="invalid literal"):
        cli.main(["bench", "generate"])
    monkeypatch.setattr(bench_generate, "main", lambda argv, prog: shapes.check("it", torch.zeros(1), torch.ones(1)))
    assert cli.main(["bench", "generate"]) == 2 and "hf-fastattn bench: it is wrong: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nosuch"], "nosuch"),
        (["generate"], "MODEL"),
        (["generate", "x", "--tokens", "many"], "--tokens"),
        (["generate", "x", "--cache", "rolling"], "--cache"),
        (["explain", "8b", "--nosuch"], "--nosuch"),
    ],
)
def test_a_command_line_that_cannot_be_parsed_ends_with_code_2(capsys, arguments, sentence):
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2 and sentence in capsys.readouterr().err.splitlines()[-1]


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert not end.value.code and capsys.readouterr().out == f"hf-fastattn {hf_fastattn.__version__}\n"


def test_help_and_refused_options_import_neither_torch_nor_transformers():
    calls = [["--help"], ["--version"], *([name, "--help"] for name in cli.COMMANDS)]
    calls += [["generate"], ["explain", "8b", "--nosuch"], ["bench"]]
    code = f"""
import sys, hf_fastattn_cli as it
for call in {calls}:
    try: it.main(call)
    except SystemExit: pass
    print(*{{'torch', 'transformers'}} & {{*sys.modules}}, 'end')"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, cwd=cli.ROOT, capture_output=True, text=True)
    ends = [line for line in ran.stdout.splitlines() if line.endswith("end")]
    assert [line.split() for line in ends] == [["end"]] * len(calls), ran.stdout
    assert ran.stdout.count("Usage: hf-fastattn") == 1 + len(cli.COMMANDS) and ran.stderr.count("Usage: ") == 2


def test_help_of_benchmarks_imports_no_torch_and_is_that_of_their_modules(capsys):
    """In a process without torch, and in this one, where the modules are imported as they are."""
    assert {*cli.BENCHES} == {path.stem for path in (cli.ROOT / "benchmarks").glob("*.py") if "def main(argv" in path.read_text()}
    code = f"""
import sys, hf_fastattn_cli as it
for name in {cli.BENCHES}:
    try: it.main(["bench", name, "-h"])
    except SystemExit: pass
sys.exit(bool({{'torch', 'transformers', 'triton', 'hf_fastattn'}} & {{*sys.modules}}))"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, cwd=cli.ROOT, capture_output=True, text=True)
    for name in cli.BENCHES:
        with pytest.raises(SystemExit):
            cli.main(["bench", name, "--help"])
    assert capsys.readouterr().out == ran.stdout and ran.stdout.count("usage: hf-fastattn bench") == len(cli.BENCHES)


def test_names_and_numbers_in_help_are_those_of_the_package():
    assert tuple(explanation.SHAPES) == cli.commands.SHAPES and tuple(explanation.GPUS) == cli.commands.GPUS
    assert tuple(cli.commands.CacheName) == CACHES and harness.PACK == cli.commands.PACK
    assert (cli.warm.ROWS, cli.warm.LONGEST) == (patches.warm.ROWS, patches.warm.LONGEST)


def test_a_missing_package_is_named(capsys, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert cli.main(["eval", folder]) == 2
    assert 'pip install "lm-eval[hf]"' in capsys.readouterr().err
