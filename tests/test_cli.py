"""The command line, in this process: what it prints, what it returns, and what it says to mistakes."""

import io
import json
import sys

import checkpoint
import pytest
import torch

import hf_fastattn
from hf_fastattn import cli
from hf_fastattn.bench import generate as bench_generate
from hf_fastattn.evaluate import Evaluation, harness

with torch.device("meta"):  # as in test_explain.py
    torch.empty(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(checkpoint.save(tmp_path_factory.mktemp("tiny")))


def test_backends_lists_every_one_and_what_it_runs(capsys):
    assert cli.main(["backends"]) == 0
    said = capsys.readouterr().out
    for name in hf_fastattn.names():
        assert f"| {name} " in said and hf_fastattn.get(name).summary in said
    assert "torch twin" in said or torch.cuda.is_available() or "interpreted" in said


def test_explain_of_a_named_shape_and_of_a_folder(capsys, folder):
    assert cli.main(["explain", "8b", "--batch", "2", "--length", "4096", "--gpu", "H100"]) == 0
    assert "2 rows of 4096 tokens on H100 SXM" in capsys.readouterr().out
    assert cli.main(["explain", folder, "--length", "64", "--dtype", "bfloat16", "--gpu", "l4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["facts"]["name"] == folder and said["facts"]["dtype"] == "bfloat16" and said["facts"]["num_kv_heads"] == 2


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_generate_prints_the_text_and_compares(capsys, folder, cache):
    options = ["--dtype", "float32", "--device", "cpu", "--tokens", "6", "--prompt", "abc", "--cache", cache]
    assert cli.main(["generate", folder, *options, "--compare", "sdpa"]) == 0
    text, _, rows = capsys.readouterr().out.rpartition("| backend")
    model, tokenizer = checkpoint.model(), checkpoint.tokenizer()
    ids = model.generate(**tokenizer("abc", return_tensors="pt"), max_new_tokens=6, do_sample=False)[0, 3:]
    assert text.strip() == tokenizer.decode(ids, skip_special_tokens=True).strip()
    ours, theirs = (next(line for line in rows.splitlines() if line.startswith(f"| {name} ")) for name in ("lean", "sdpa"))
    assert "lean.decode 12 " in ours and "| all " in theirs  # two layers, six tokens: the prompt of three is no prefill


def test_generate_asks_for_a_window_where_there_is_one_to_keep(capsys, folder):
    for options, says in (
        (["--window", "40"], "--window and --sinks are for streaming backends, and 'lean' is none"),
        (["--backend", "streaming"], "'streaming' must know how many of the last tokens stay in sight; pass --window"),
    ):
        assert cli.main(["generate", folder, *options]) == 2
        assert says in capsys.readouterr().err


def test_generate_reads_standard_input_and_chat_templates(capsys, folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert cli.main(["generate", folder, "--device", "cpu", "--tokens", "2", "--prompt", "-", "--chat"]) == 0
    assert "| lean " in capsys.readouterr().out


def test_eval_writes_what_it_prints_and_returns_the_verdict(capsys, folder, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    options = ["--device", "cpu", "--dtype", "float32", "--tasks", "", "--decode-tokens", "4", "--out", str(tmp_path / "out")]
    (tmp_path / "text.txt").write_text("some words, said again and again. " * 40)
    assert cli.main(["eval", folder, *options, "--backends", "sdpa,lean", "--text", str(tmp_path / "text.txt")]) == 0
    said = capsys.readouterr().out
    assert "EQUAL to sdpa, dynamic" in said and (tmp_path / "out" / "eval.md").read_text().strip() in said
    monkeypatch.setattr(Evaluation, "passed", False)
    assert cli.main(["eval", folder, *options, "--backends", "sdpa", "--caches", "dynamic"]) == 1


def test_bench_and_lm_eval_are_handed_their_arguments(monkeypatch):
    seen = []
    monkeypatch.setattr(bench_generate, "main", lambda argv, prog: seen.append((argv, prog)) or 7)
    assert cli.main(["bench", "generate", "--shape", "tiny"]) == 7
    assert seen == [(["--shape", "tiny"], "hf-fastattn bench generate")]
    main = pytest.importorskip("lm_eval.__main__")
    monkeypatch.setattr(main, "cli_evaluate", lambda: seen.append(list(sys.argv)))
    monkeypatch.setattr("sys.argv", ["hf-fastattn"])
    assert cli.main(["lm_eval", "run", "--model_args", "attn_implementation=lean"]) == 0
    assert seen[1] == ["lm_eval", "run", "--model_args", "attn_implementation=lean"]


def test_lm_evals_own_command_line_runs_our_backend(folder, monkeypatch, tmp_path):
    pytest.importorskip("lm_eval")
    tasks = tmp_path / "small.yaml"
    metadata = "metadata:\n  version: 1\n  examples: 2\n  facts: 4\n"
    tasks.write_text(f"include: {harness.PACK}/fastattn_choice.yaml\ntask: small\ntag: null\n{metadata}")
    args = f"pretrained={folder},attn_implementation=lean,dtype=float32"
    monkeypatch.setattr("sys.argv", ["hf-fastattn"])
    with hf_fastattn.count_calls() as calls:
        options = ["--model", "hf", "--model_args", args, "--tasks", str(tasks), "--device", "cpu"]
        assert cli.main(["lm_eval", "run", *options]) == 0
    assert calls["lean.prefill"] + calls["lean.decode"] > 0


@pytest.mark.parametrize("command", ["", "backends", "generate", "explain", "eval", "bench", "lm_eval"])
def test_every_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as end:
        cli.main([*([command] if command else []), "--help"])
    assert end.value.code == 0 and len(capsys.readouterr().out.splitlines()) > 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["explain", "8b", "--gpu", "h900"], "hf-fastattn explain: Unknown GPU 'h900'; known: a100"),
        (["explain", "8b", "--length", "0"], "length must be at least 1; got 0."),
        (["explain", "/nowhere/at/all"], "hf-fastattn explain: "),
        (["generate", "/nowhere/model.gguf"], "There is no file /nowhere/model.gguf."),
        (["generate", "FOLDER", "--backend", "leen"], "Unknown attention backend 'leen'; known backends: "),
        (["generate", "FOLDER", "--tokens", "0"], "--tokens must be at least 1; got 0."),
        (["generate", "FOLDER", "--prompt", ""], "The prompt is empty"),
        (["eval", "FOLDER", "--backends", ""], "Name at least one backend"),
        (["eval", "FOLDER", "--caches", "rolling"], "caches are one or both of"),
        (["eval", "FOLDER", "--text", "/nowhere.txt"], "No such file or directory: '/nowhere.txt'"),
        (["bench"], "Name a benchmark, one of generate, kernels, stream, paper_e2e, report; got none."),
        (["bench", "speed"], "got speed."),
    ],
)
def test_mistakes_are_one_line_and_code_2(capsys, folder, arguments, sentence):
    assert cli.main([folder if argument == "FOLDER" else argument for argument in arguments]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-fastattn")]
    assert sentence in line


def test_a_traceback_is_shown_when_asked_for(folder):
    with pytest.raises(ValueError, match="at least 1"):
        cli.main(["generate", folder, "--tokens", "0", "--traceback"])


def test_a_missing_package_is_named(capsys, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert cli.main(["eval", folder]) == 2
    assert 'pip install "lm-eval[hf]"' in capsys.readouterr().err
