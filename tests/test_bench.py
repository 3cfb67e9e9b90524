"""The end-to-end benchmark on the CPU: everything except the graph and the figures."""

import argparse
import contextlib
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import checkpoint
import pytest
import torch

import hf_fastattn_cli as cli
from benchmarks import (
    batch,
    chunks,
    commits,
    context,
    evaluation,
    families,
    first_tokens,
    generate,
    grid,
    hybrids,
    kv_dtype,
    kv_dtype_speed,
    models,
    modes,
    paper_e2e,
    prompts,
    provenance,
    quantised,
    report,
    results,
    rollout,
    roofline,
    runs,
    sampling,
    sections,
    sections_context,
    sections_paper,
    sections_steps,
    session,
    shapes,
    stream,
    timing,
    unified,
)
from hf_fastattn import PreallocatedCache, hf, patch
from hf_fastattn.explanation import costs
from hf_fastattn_cli import handed_over

RIVALS = {grid.SDPA, grid.STATIC, grid.LEAN, grid.OURS}
CPU = torch.device("cpu")


def bench(tmp_path, *arguments, tokens=8) -> dict:
    common = ["--shape", "tiny", "--device", "cpu", "--tokens", str(tokens), "--repeats", "2", "--out", str(tmp_path)]
    generate.main([*common, *arguments])
    return json.loads((tmp_path / "generate_tiny.json").read_text())


def rows_of(main, tmp_path, name, *arguments) -> list[dict]:
    """The rows of a benchmark that ran on the CPU."""
    assert main([*arguments, "--device", "cpu", "--out", str(tmp_path)]) == 0
    return json.loads((tmp_path / f"{name}.json").read_text())["rows"]


@pytest.fixture
def tiny():
    return models.load("tiny", torch.float32, CPU).model


@pytest.mark.slow
def test_every_backend_is_checked_and_timed(tmp_path, capsys):
    result = bench(tmp_path, "--cases", "1x16,2xpadded", "--compile-cases", "1x16", "--resume", "2xpadded")
    plain, padded = result["rows"]
    assert set(plain["rivals"]) == RIVALS
    assert all(len(rival["all_ms"]) == 2 and rival["ms"] > 0 for rival in plain["rivals"].values())
    assert plain["ratios"].keys() == {grid.SDPA, grid.STATIC, grid.LEAN, "best_stock"}
    assert plain["repeats_from"] == "prompt" and padded["repeats_from"] == "cache"
    assert padded["rivals"][grid.STATIC] is None and "compile-cases" in padded["notes"][0]
    assert padded["lengths"] == [16, 48] and padded["live_tokens"] == 64 and grid.UNPADDED in padded["ratios"]
    for row in (plain, padded):
        ours = row["rivals"][grid.OURS]
        assert ours["check"]["passed"] and ours["check"]["against_uncaptured"]["equal"] == 1
        assert ours["check"][f"against_{grid.SDPA}"]["equal"] == 1
        assert ours["replay_ms"] is None and ours["reasons"]  # no graph on a CPU, and that is said
    assert plain["rivals"][grid.OURS]["tokens_per_s"] == 1e3 / plain["rivals"][grid.OURS]["ms"]
    assert padded["rivals"][grid.OURS]["tokens_per_s"] == 2e3 / padded["rivals"][grid.OURS]["ms"]
    assert result["weight_bytes"] > result["weight_bytes_read_a_token"] > 0 and "x ours" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["", "2x16,2xpadded"])
def test_captured_steps_are_checked_and_captured_once(tmp_path, captured, resume):
    arguments = ["--cases", "2x16,2xpadded", "--rivals", f"{grid.SDPA},{grid.OURS},{grid.ROOMY}", "--resume", resume]
    for row in bench(tmp_path, *arguments)["rows"]:
        assert {grid.ROOMY, grid.SDPA, "best_stock"} <= row["ratios"].keys()
        assert row["ratios"]["best_stock"] == row["ratios"][grid.SDPA]
        for ours in (row["rivals"][name] for name in (grid.OURS, grid.ROOMY)):
            checked = ours["check"]
            assert checked["steps_replayed"] == 8 and checked["passed"] and checked["against_uncaptured"]["equal"] == 1
            assert ours["captures_while_timing"] == 0 and ours["steps"]["uncaptured"] == 0 and not ours["reasons"]


@pytest.mark.parametrize("difference, other, passed", [(0.1, 0.2, True), (0.6, 0.2, False), (0.1, 0.6, False), (1.0, 1.0, False)])
def test_a_check_passes_if_logits_differ_as_those_of_stock_and_by_less_than_their_size(difference, other, passed):
    tokens, logits = torch.zeros(1, 2, dtype=torch.long), torch.ones(2, 1, 8)
    of = [runs.Run(tokens, 0.0, 0.0, 0.0, 0.0, logits + each) for each in (difference, 0, other)]
    assert runs.verdict(*of, torch.float32)["passed"] is passed


def test_kernels_of_a_step_are_listed_separately(tmp_path, captured, monkeypatch):
    listed = [{"kernel": "a", "launches": 2, "us": 7.0}]
    monkeypatch.setattr(grid, "step_kernels", lambda patched: listed if patched.captures else None)
    subject, found = models.load("tiny", torch.float32, CPU), results.Results(tmp_path / "a.json", 60, "command")
    bench = grid.Bench(SimpleNamespace(cases=["2x16", "2x9"], padded=[16, 48], tokens=8), subject, found, CPU)
    bench.list_kernels()
    assert json.loads(found.path.read_text())["step"] == {"case": "2x16", "kernels": listed} and not bench.rivals


@pytest.mark.slow
def test_timing_a_replay_does_not_change_the_next_tokens(captured, monkeypatch, tiny):
    seen = [("b", 1, 3.0), ("cudaGraphLaunch", 1, 0.0), ("a", 2, 7.0)]
    events = [SimpleNamespace(key=key, count=count, self_device_time_total=us) for key, count, us in seen]
    profiler = MagicMock()
    profiler.return_value.__enter__.return_value.key_averages.return_value = events
    event = Mock()
    event.return_value.elapsed_time.return_value = 20.0
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.profiler, "profile", profiler)
    prompt = runs.make_prompt([20, 9], 128, CPU)
    listed = [{"kernel": "a", "launches": 2, "us": 7.0}, {"kernel": "b", "launches": 1, "us": 3.0}]
    with patch(tiny) as patched:
        assert runs.replay_ms(patched) is None
        first = runs.run(tiny, prompt, 8, keep=True)
        for _ in range(2):
            assert runs.replay_ms(patched) == 2.0 and runs.step_kernels(patched) == listed
            again = runs.run(tiny, prompt, 8, logits=True)
            onwards = runs.run(tiny, prompt, 8, cache=runs.rewind(first.cache, prompt), logits=True)
            assert torch.equal(again.tokens, first.tokens) and torch.equal(onwards.tokens, first.tokens)
            torch.testing.assert_close(onwards.logits, again.logits)


def test_a_rivals_own_cache_is_empty_for_every_prompt(tiny):
    prompt = runs.make_prompt([20], 128, CPU)
    rival = runs.Rival("ours", tiny, prompt, 4, cache=PreallocatedCache(tiny))
    tiny.set_attn_implementation("lean")
    tokens = [runs.run(tiny, prompt, 4, rival.empty_cache()).tokens for _ in range(2)]
    assert torch.equal(*tokens) and rival.cache.get_seq_length() == 23
    assert runs.Rival("stock", tiny, prompt, 4).empty_cache() is None


def test_wrong_logits_and_failures_are_recorded_and_not_timed(tmp_path, monkeypatch):
    right = grid.check
    monkeypatch.setattr(grid, "check", lambda *them: right(*them) | {"passed": False})
    ours = bench(tmp_path, "--cases", "1x16", "--compile-cases", "")["rows"][0]["rivals"][grid.OURS]
    assert "differ from those of uncaptured steps" in ours["error"] and "ms" not in ours
    monkeypatch.setattr(grid, "check", Mock(side_effect=MemoryError("no room")))
    row = bench(tmp_path, "--cases", "1x16", "--compile-cases", "")["rows"][0]
    assert row["rivals"][grid.OURS]["error"] == "MemoryError: no room" and row["rivals"][grid.SDPA]["ms"] > 0
    assert "ms" not in row["rivals"][grid.OURS] and "ratios" not in row


@pytest.mark.slow
def test_cases_beyond_the_budget_are_skipped(tmp_path):
    row = bench(tmp_path, "--cases", "1x16", "--seconds", "0")["rows"][0]
    assert row["rivals"] == {} and row["notes"][0].startswith("not run")


@pytest.mark.slow
def test_one_case_with_a_static_cache_first_tokens_and_an_attention_that_is_not_installed(tmp_path):
    """The static cache continues from its prompt, first tokens are timed alternately, and the missing attention is named."""
    rivals = "flash_attention_2_dynamic,sdpa_dynamic,sdpa_static_compile,patched"
    row = bench(tmp_path, "--cases", "2x16", "--rivals", rivals, "--resume", "2x16", "--first-tokens", "3")["rows"][0]
    static, sdpa, ours = (row["rivals"][name] for name in (grid.STATIC, grid.SDPA, grid.OURS))
    assert "flash" in row["rivals"]["flash_attention_2_dynamic"]["error"].lower() and sdpa["ms"] > 0
    assert row["repeats_from"] == "cache" and len(static["all_ms"]) == 2 and static["against_sdpa_dynamic"]["equal"] == 1
    assert len(sdpa["all_ttft_ms"]) == len(ours["all_ttft_ms"]) == 3
    assert row["ttft_over_sdpa"] == ours["ttft_ms"] / sdpa["ttft_ms"] and sdpa["ttft_ms"] == sorted(sdpa["all_ttft_ms"])[1]


SMALL = ["--device", "cpu", "--shape"]
LONG = [*SMALL, "tiny", "--padded", "1", "2048", "--cases"]


@pytest.mark.parametrize(
    "main, arguments, said",
    [
        (generate.main, [*SMALL, "tiny", "--cases", "8by8192"], "ROWSxTOKENS"),
        (generate.main, [*SMALL, "tiny", "--rivals", "sdpa"], "unknown rivals sdpa; known are sdpa_dynamic"),
        (generate.main, [*SMALL, "tiny", "--compile-cases", "1x1,1x2,1x3,1x4,1x5,1x6,1x7"], "at most 6 cases; got 7"),
        (generate.main, [*SMALL, "/nowhere", "--cases", "1x16"], "--shape /nowhere: "),
        # Long prompts of a small model need a GPU too.
        (generate.main, [*LONG, "1x16,1x8192"], "error: 1x8192 needs a CUDA GPU"),
        (generate.main, [*LONG, "1x16,16xpadded"], "error: 16xpadded needs a CUDA GPU"),
        (stream.main, [*SMALL, "tiny", "--points", "700,800", "--steps", "100"], "increase by at least 600 tokens"),
        (report.main, ["--results", "/nowhere"], "has no results"),
    ],
)
def test_invalid_options_are_refused(tmp_path, capsys, main, arguments, said):
    with pytest.raises(SystemExit):
        main([*arguments, *([] if main is report.main else ["--out", str(tmp_path)])])
    assert said in capsys.readouterr().err


def test_named_cases_are_of_the_8b_by_default():
    parser = argparse.ArgumentParser()
    with contextlib.suppress(SystemExit):  # without a GPU
        families.read_cases(parser, [], ["a case"], reserve=1, seconds=1)
    assert parser.get_default("shape") == "8b"


MUST = {"kernels": ["prefill"], "commits": ["--before", "."]}  # arguments that a benchmark must have
ON_CPU = ("kv_dtype", "linear", "unified")  # as they are, or by small shapes of their own


@pytest.mark.parametrize("name", [name for name in handed_over.BENCHES if name != "report"])
def test_a_benchmark_without_a_gpu_says_so_before_it_loads_anything(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for module, function in ((hf, "random_model"), (hf, "make_config"), (torch, "randn"), (torch.distributed, "new_group")):
        monkeypatch.setattr(module, function, Mock(side_effect=AssertionError("it ran")))
    refusals = [([], "is_available() is False here")]
    if name not in ON_CPU:
        refusals.append((["--device", "cpu"], "needs a CUDA GPU. --device cpu is for"))
    for more, said in refusals:
        with pytest.raises(SystemExit) as end:
            cli.main(["bench", name, *MUST.get(name, []), *more, "--out", str(tmp_path)])
        assert end.value.code == 2 and said in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_runs_of_their_own_add_rivals_and_have_no_ratio_in_a_table(tmp_path):
    first = bench(tmp_path, "--cases", "1x16,2x16", "--rivals", "sdpa_dynamic,patched")
    both = bench(tmp_path, "--cases", "1x16", "--rivals", "sdpa_static_compile,eager_dynamic", "--add")
    assert len(both["rows"]) == 2 and both["rows"][1] == first["rows"][1]
    row = both["rows"][0]
    assert set(row["rivals"]) == {grid.SDPA, grid.OURS, grid.STATIC, "eager_dynamic"}
    assert row["rivals"][grid.OURS] == first["rows"][0]["rivals"][grid.OURS]
    assert row["ratios"].keys() == {grid.SDPA, "best_stock"}  # there is no ratio to the figures of another run
    assert "run of their own" in row["notes"][0]
    ids = {name: rival["run"] for name, rival in row["rivals"].items()}
    assert ids[grid.OURS] == ids[grid.SDPA] != ids[grid.STATIC] == ids["eager_dynamic"]
    assert [both["measured_by"][ids[name]]["command"] for name in (grid.OURS, grid.STATIC)] == both["commands"]
    for rival, ms in ((grid.SDPA, 5.0), (grid.STATIC, 3.0), (grid.OURS, 2.0)):
        both["rows"][0]["rivals"][rival]["ms"] = ms
    lines = sections.generate(both).splitlines()
    first, second = both["commands"]
    assert f"- run 1[^`{first}`]: `sdpa` and `patch()` of 1x16, 2x16" in lines
    assert [line for line in lines if line.startswith(f"- run 2[^`{second}`]: ") and line.endswith(" of 1x16")]
    (cells,) = [[cell.strip() for cell in line.split("|")] for line in lines if "| 1x16 |" in " ".join(line.split())]
    assert cells[2:7] == ["5.00", "3.00", "2.00", "2.50x", "-"]
    (cells,) = [[cell.strip() for cell in line.split("|")] for line in sections.headline(both).splitlines() if "3.00" in line]
    assert cells[2:6] == ["5.00", "3.00", "2.00", "-"]  # the best is of another run
    alone = bench(tmp_path, "--cases", "1x16", "--rivals", "sdpa_dynamic,patched")
    assert "All columns are of one run" in sections.generate(alone)
    assert "The static cache with compilation was not timed for 1x16." in sections.generate(alone)
    alone["rows"][0]["rivals"][grid.STATIC] = {"error": "OutOfMemoryError: CUDA out of memory."}
    failed = "ran out of memory, in one process with the other rivals, at 1x16."
    assert f"The static cache with compilation {failed}" in sections.generate(alone)
    assert f"The static cache {failed} There the last column is the speed-up over `sdpa`." in sections.headline(alone)


OLD = ["python -m it --cases 1x16,2x16", "python -m it --cases 1x16 --rivals sdpa_dynamic,patched --add"]
NOTE = "sdpa_dynamic, patched" + grid.ADDED


@pytest.mark.parametrize(
    "commands, notes, runs",  # of sdpa, patched and the static cache
    [
        (OLD[:1], [], [0, 0, 0]),
        (OLD, [], [0, 0, 0]),
        (OLD, [NOTE], [1, 1, 0]),
        (OLD, [NOTE, "not run: needs about 9 s, 3 s left"], [0, 0, 0]),
        (OLD, [NOTE, NOTE], [None, None, 0]),  # the second may have measured only one of them
        ([*OLD, OLD[1] + " --repeats 9"], [NOTE], [None, None, 0]),
        ([*OLD, OLD[0] + " --repeats 9"], [NOTE], [1, 1, None]),
        (OLD[1:], [], [None, None, None]),
        ([OLD[0].replace("1x16,", ""), OLD[1]], [], [None, None, None]),
        ([OLD[0] + " --rivals=patched"], [], [None, 0, None]),
    ],
)
def test_older_results_are_assigned_to_runs_by_their_conditions(commands, notes, runs):
    names = [grid.SDPA, grid.OURS, grid.STATIC]
    row = {"case": "1x16", "notes": notes, "rivals": {name: {"ms": 2.0} for name in names}}
    result = {"commands": commands, "rows": [row]}
    expected = [None if run is None else commands[run] for run in runs]
    assert [provenance.run_of(result, row, name) for name in names] == expected
    for name, run in ((grid.SDPA, runs[0]), (grid.STATIC, runs[2])):
        ours = runs[1]
        assert provenance.ratio(result, row, name, grid.OURS) == (1.0 if run == ours and run is not None else None)
    row["rivals"][grid.STATIC]["run"] = "id"  # measured since
    assert provenance.run_of(result, row, grid.STATIC) == "id" and provenance.run_of(result, row, grid.SDPA) == expected[0]


def test_driver_and_clocks_are_in_the_conditions_of_a_run(tmp_path, monkeypatch):
    said = ["580.95, 345, 2619\n", "580.95, 1980, 2619\n"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    monkeypatch.setattr(results.subprocess, "run", lambda query, **_: SimpleNamespace(stdout=said.pop(0)))
    monkeypatch.setattr(results, "CLOCKS_EVERY", 0)
    found = results.Results(tmp_path / "a.json", 60, "typed", torch.device("cuda"), conditions={"device": "a GPU"})
    found.save()
    found.save()
    (at,) = [run["conditions"] for run in json.loads(found.path.read_text())["measured_by"].values()]
    assert at == {"device": "a GPU", "driver": "580.95", "sm_mhz": [345, 1980], "memory_mhz": [2619, 2619]}
    assert provenance.told(found.data, found.run) == "`typed`, driver 580.95, SM clock 345 to 1980 MHz, memory clock 2619 MHz"

    def none(query, **_):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(results.subprocess, "run", none)
    assert results.clocks(torch.device("cuda")) == results.clocks(CPU) == {}


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_was_measured(tmp_path, monkeypatch):
    calls = []

    def interrupted(*arguments, **options):
        calls.append(1)
        if len(calls) == 8:  # in the second repeat: two calls each to prepare, two in the first
            raise KeyboardInterrupt
        return runs.run(*arguments, **options)

    monkeypatch.setattr(grid, "run", interrupted)
    row = bench(tmp_path, "--cases", "1x16,2x16", "--rivals", "sdpa_dynamic,lean_dynamic")["rows"][0]
    assert [len(rival["all_ms"]) for rival in row["rivals"].values()] == [1, 1]


@pytest.mark.slow
def test_learned_positions_cover_the_prompt(tmp_path, monkeypatch):
    model_type, config = models.SHAPES["tiny-opt"]
    monkeypatch.setitem(models.SHAPES, "tiny-opt", (model_type, {**config, "max_position_embeddings": 64}))
    options = ["--shape", "tiny-opt", "--cases", "1x100", "--tokens", "4", "--repeats", "1"]
    (row,) = rows_of(generate.main, tmp_path, "generate_tiny-opt", *options)
    result = json.loads((tmp_path / "generate_tiny-opt.json").read_text())
    assert result["config"]["max_position_embeddings"] == 168 and row["rivals"][grid.OURS]["ms"] > 0


def test_kernels_for_an_import_are_not_compiled_into_the_cache_of_a_kind_that_follows(tmp_path, monkeypatch):
    caches = []
    monkeypatch.setattr(session, "imported", lambda *args: caches.append([path.name for path in args[3:5]]) or 0.0)
    phase = {"first_s": [1.0], "stall_s": [0.5, 0.5], "compiled": 0}
    monkeypatch.setattr(session, "run", lambda *_: json.dumps({"phases": [phase], "patch_s": 0.0}))
    for kinds in ("empty,imported", "imported,empty", "imported"):
        assert session.main(["--shape", "tiny", "--kinds", kinds, "--device", "cpu", "--out", str(tmp_path)]) == 0
    assert caches == [["empty", "imported"], *[["full", "imported"]] * 2]


@pytest.mark.slow
def test_first_sessions(tmp_path, monkeypatch):
    """In processes of their own; a kind whose process fails says why."""
    arguments = ["--shape", "tiny", "--kinds", "empty,imported,stock", "--device", "cpu", "--out", str(tmp_path)]
    assert session.main(arguments) == 1  # nothing is compiled for a CPU
    found = json.loads((tmp_path / "session_tiny.json").read_text())
    assert [row["kind"] for row in found["rows"]] == ["empty", "stock"] and "imported failed" in str(found["failed"])
    for row in found["rows"]:
        assert [len(phase["stall_s"]) for phase in row["phases"]] == [1, 2, 25, 25, 8, 3, 2, 2]
        assert bool(row["reasons"]) == (row["kind"] == "empty")  # no graph on a CPU, and that is said
    assert "| chat of 25 turns" in report.report(tmp_path, ["session_1b"]) or "chat of 25 turns" in sections_steps.session(found)
    monkeypatch.setattr(session.sys, "executable", shutil.which("ls"))
    with pytest.raises(RuntimeError, match=r"(?s)tiny cpu failed with \d: .*tiny"):
        session.run(session.CHILD, ["tiny", "cpu"], tmp_path, 100)


@pytest.mark.slow
def test_no_code_runs_between_the_steps_of_generate(captured, monkeypatch):
    """After other code than that of Transformers, patch() compares the model in each step."""
    found, original = [], hf.other_code
    monkeypatch.setattr(hf, "other_code", lambda arguments: found.append(original(arguments)) or found[-1])
    subject = models.load("tiny", torch.float32, CPU)
    with patch(subject.model, "lean") as patched:
        for length in (64, 24):
            runs.run(subject.model, runs.make_prompt([length], 128, CPU), 8)
    assert patched.captures == 1 and len(found) == 2 and not any(found)


@pytest.mark.slow
def test_batches_that_are_bound_by_compute(tmp_path):
    rows = rows_of(roofline.main, tmp_path, "roofline", "--shape", "tiny", "--reserve", "0")
    assert [row["rows"] for row in rows] == [1, 4] and all(row["check"]["passed"] for row in rows)
    found = json.loads((tmp_path / "roofline.json").read_text())
    rows = [{"rows": n, "replay_ms": ms} for n, ms in ((1, 4.0), (64, 5.0), (256, 8.0), (512, 16.0))]
    said = sections_steps.roofline(found | {"rows": rows})
    assert "as 128 further ones between 256 and 512 rows, and as 128 of 512" in " ".join(said.split()), said


# ---- unbounded generation ----
def stream_bench(tmp_path, *arguments) -> tuple[int, dict]:
    small = ["--shape", "tiny", "--window", "64", "--chunk", "100", "--points", "700,1400", "--steps", "100", "--device", "cpu"]
    status = stream.main([*small, "--out", str(tmp_path), *arguments])
    return status, json.loads((tmp_path / "stream.json").read_text())


@pytest.fixture
def short_parts(monkeypatch):
    """Fewer repeats than figures need."""
    monkeypatch.setattr(stream, "device_us", lambda call, calls, device: timing.elapsed_us(call, device))
    for name in ("LEAST", "MOST"):
        monkeypatch.setattr(timing, name, 1)
    monkeypatch.setattr(timing, "REPLAY_US", 1e-9)


@pytest.mark.slow
def test_a_long_text_is_read_and_generated_at_every_point(tmp_path, captured):
    status, result = stream_bench(tmp_path, "--parts", "read")
    assert status == 0 and [row["tokens"] for row in result["rows"]] == [700, 1400] and not result["reasons"]
    for row in result["rows"]:
        assert row["steps"] == 100 and row["ms"] > 0 and row["over_dense"] == row["ms"] / row["dense_ms"]
        assert row["check"]["passed"] and row["check"]["equal"] == 1
    first, second = result["rows"]
    assert first["read_tokens"] == 700 and second["read_tokens"] == 1400 - 700 - 3 * stream.BLOCK  # two blocks warm up


@pytest.mark.slow
def test_parts_of_the_stream_are_checked_and_timed_separately(tmp_path, short_parts):
    assert stream_bench(tmp_path, "--parts", "update")[0] == 0
    status, result = stream_bench(tmp_path, "--parts", "ring")
    assert status == 0 and len(result["update"]["us"]) == 4 and len(result["ring"]) == 3  # the first part stays
    for row in result["ring"]:
        assert row["kv_len"] == 68 and row["ring_over_dense"] == row["us"]["dense"] / row["us"]["ring"]


@pytest.mark.slow
def test_a_wrong_ring_is_not_timed(tmp_path, short_parts, monkeypatch):
    kernel = stream.shapes.LEAN
    monkeypatch.setattr(stream.shapes, "LEAN", lambda *them, **options: kernel(*them, **options) * (0.9 if options else 1))
    with pytest.raises(stream.shapes.WrongResult, match="ring is wrong"):
        stream_bench(tmp_path, "--parts", "ring")


def test_times_of_a_step_are_medians(monkeypatch):
    patched = SimpleNamespace(reasons=[])
    replays, kernels = iter([5.0, 1.0, 3.0]), [{"kernel": str(i), "launches": 2, "us": 1.0} for i in range(20)]
    monkeypatch.setattr(runs, "replay_ms", lambda patched: next(replays))
    monkeypatch.setattr(runs, "step_kernels", lambda patched: kernels)
    for cuda, figures in ((False, {}), (True, {"replay_ms": 3.0, "launches": 40, "kernels": kernels[:12]})):
        times = iter([9.0, 2.0, 4.0])
        again = lambda times=times, cuda=cuda: SimpleNamespace(ms=next(times), tokens=SimpleNamespace(is_cuda=cuda))  # noqa: E731
        assert runs.step_times(patched, again, 3) == {"ms": 4.0, "all_ms": [9.0, 2.0, 4.0], "reasons": []} | figures


def test_a_row_that_fails_does_not_end_the_others(tmp_path):
    kept = results.Results(tmp_path / "x.json", 60, "", CPU, failed=[], not_run=[])
    loaded = []

    def measure(subject, case):
        if case == "b":
            raise ValueError("no")
        return {"case": case}

    families.measure_cases(kept, "x", ["a", "b", "c"], lambda: loaded.append(1) or "model", measure, str, CPU, reserve=2)
    assert [row["case"] for row in kept.data["rows"]] == ["a", "c"] and loaded == [1]
    assert kept.data["failed"] == [{"row": "x b", "error": "x b failed: ValueError: no"}] and not kept.data["not_run"]
    families.measure_cases(kept, "x", ["d"], lambda: "model", measure, str, CPU, reserve=1e9)
    assert kept.data["not_run"] == ["x d"]


@pytest.mark.slow
def test_a_step_of_each_family_beside_its_floor(tmp_path):
    options = ["--only", "tiny", "--cases", "2xpadded", "--padded", "9", "20", "--tokens", "8", "--stock-tokens", "8"]
    (row,) = rows_of(families.main, tmp_path, "families", *options, "--repeats", "1")
    facts = costs.count(hf.random_model("llama", torch.float32, torch.device("meta"), **families.FAMILIES["tiny"][1]))
    assert row["bytes"] == facts.read_bytes(2) + facts.kv_bytes(9) + facts.kv_bytes(20)
    assert row["lengths"] == [9, 20] and row["check"]["passed"] and row["ms"] > 0 < row["stock_ms"]
    assert "| tiny" in (text := report.report(tmp_path, ["families"])) and "left-padded rows of 9 to 20 tokens" in text
    found = json.loads((tmp_path / "families.json").read_text())
    assert "left-padded" not in sections_steps.families({**found, "rows": [row | {"case": "2x9"}]})


@pytest.mark.slow
def test_a_step_of_a_hybrid_beside_its_floor(tmp_path):
    options = ["--only", "tiny", "--cases", "2xpadded", "--padded", "9", "20", "--tokens", "8", "--stock-tokens", "8"]
    (row,) = rows_of(hybrids.main, tmp_path, "hybrids", *options, "--repeats", "1")
    facts = costs.count(hf.random_model("qwen3_5_text", torch.float32, torch.device("meta"), **hybrids.HYBRIDS["tiny"][1]))
    # Of each of 2 rows and 3 linear layers: a convolution of 4 over 128 channels, and 4 heads of 16 x 16. One layer has K and V.
    assert row["state_bytes"] == 2 * 3 * 4 * (128 * 4 + 4 * 16 * 16) and facts.kv_bytes(9) == 9 * 2 * 2 * 16 * 4
    assert row["bytes"] == facts.read_bytes(2) + facts.kv_bytes(9) + facts.kv_bytes(20) + 2 * row["state_bytes"]
    assert row["check"]["passed"] and row["ms"] > 0 < row["stock_ms"]
    assert re.search(r"hybrids, with the number of their layers.*\| tiny \(4\) \|", report.report(tmp_path, ["hybrids"]), re.S)


def test_replays_that_are_timed_leave_recurrent_states_as_they_were(captured):
    model = hf.random_model("qwen3_5_text", torch.float32, CPU, **hybrids.HYBRIDS["tiny"][1])
    with patch(model) as patched:
        prompt = runs.make_prompt([9], 128, CPU)
        first, again = runs.resumed(model, prompt, 8)
        for _ in range(2):
            before = [state.clone() for state in first.cache.storage.states()]
            with runs.beside_generate(entry := runs.last_graph(patched)):
                entry.graph.replay()
            assert all(map(torch.equal, first.cache.storage.states(), before))
        assert torch.equal(again().tokens[:, :8], first.tokens)


@pytest.mark.slow
def test_other_modes_of_generate(tmp_path):
    options = ["--shape", "tiny", "--prompt", "300", "--past", "64", "--prompts", "24", "--repeats", "1", "--reserve", "0"]
    rows = rows_of(modes.main, tmp_path, "modes", *options)
    assert [row["mode"] for row in rows] == [*modes.STEPS, *["message"] * len(modes.MESSAGES), "first"]
    assert all(row["equal_tokens"] == 1 and row["patched"]["ms"] > 0 < row["stock"]["ms"] for row in rows)
    text = report.report(tmp_path, ["modes"])
    assert "first token of a message of 300 tokens behind 64" in text and "first token of a prompt of 24 tokens" in text
    assert text.count("100%") == len(rows)
    assert len(rows_of(modes.main, tmp_path, "modes", *options, "--only", "first", "--keep")) == len(rows)


RECORDED = {"stops": [["\n", 3], ["Q:", 4]], "options": {"do_sample": False, "use_cache": True}}


@pytest.mark.slow
def test_the_calls_of_an_evaluation_are_replayed(tmp_path, captured, monkeypatch):
    calls = [{"lengths": [9, 20, 14], "new": 5}, {"lengths": [8], "new": 7}]
    recorded = {"recorded": "lm-eval 0, a model, a task", "runs": [{"name": "a", "calls": calls} | RECORDED]}
    (tmp_path / "calls.json").write_text(evaluation.as_text(recorded))
    asked = []
    generated = evaluation.generated

    def noted(model, tokenizer, run, call, prompt, **own):
        asked.append((prompt.mask.sum(1).tolist(), call["new"], [text for text, _ in run["stops"]]))
        return generated(model, tokenizer, run, call, prompt, **own)

    monkeypatch.setattr(evaluation, "generated", noted)
    options = ["--shape", "tiny", "--calls", str(tmp_path / "calls.json"), "--repeats", "1", "--reserve", "0"]
    (row,) = rows_of(evaluation.main, tmp_path, "evaluation", *options)
    assert row["case"] == "a" and row["equal_tokens"] == 1 and row["patched"]["error"] <= row["allowed"] < 0.1
    assert row["patched"]["replays"] > 0 == row["patched"]["uncaptured"] and not row["reasons"] and "replays" not in row["stock"]
    both = [(call["lengths"], call["new"], ["\n", "Q:"]) for call in calls]
    assert asked == 2 * (both + both + both[1:])  # a first pass, a repeat, and the check, of two models
    assert "| a" in (text := report.report(tmp_path, ["evaluation"])) and "lm-eval 0, a model, a task" in text
    with pytest.raises(ValueError, match="A recorded call of 7 tokens ended after 2: a random text had a stop string"):
        evaluation.new_tokens([1, 2], calls[1])


def test_the_stop_strings_of_an_evaluation_are_found_as_by_lm_eval():
    utils = pytest.importorskip("lm_eval.models.utils_hf")
    tokenizer, generator = evaluation.tokenizer_of(3), torch.Generator().manual_seed(0)
    assert tokenizer.decode([0, 2]) == "aaaaaaac"
    ended = 0
    for text in ("ca", "aaab", "caaaaaab"):
        theirs = utils.MultiTokenEOSCriteria(text, tokenizer, 4, 3)
        ours = evaluation.Ends(tokenizer, text, theirs.sequence_id_len, 4, 3)
        ids = torch.randint(3, (3, 24), generator=generator)
        for width in range(5, 25):
            assert ours(ids[:, :width], None) == theirs(ids[:, :width], None) and ours.ended == theirs.done_tracker
            ended += sum(ours.ended)
    assert ended


@pytest.mark.slow
def test_calls_of_lm_eval_are_recorded(tmp_path, monkeypatch):
    evaluator = pytest.importorskip("lm_eval.evaluator")
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)  # seconds
    monkeypatch.setattr(evaluation, "RUNS", {"a": (2, 3, {"max_gen_toks": 4, "until": ["zz"]})})
    checkpoint.save(tmp_path / "it", max_position_embeddings=4096)
    assert evaluation.main(["--record", str(tmp_path / "it"), "--calls", str(tmp_path / "calls.json")]) == 0
    (run,) = json.loads((tmp_path / "calls.json").read_text())["runs"]
    assert [len(call["lengths"]) for call in run["calls"]] == [2, 1] and min(run["calls"][0]["lengths"]) > 1000
    assert run["name"] == "a" and all(call["new"] == 4 for call in run["calls"])
    assert run["stops"] == [["zz", 4], ["</s>", 3]] and run["options"] == {"do_sample": False, "use_cache": True}


@pytest.mark.slow
def test_kv_in_8_bits_have_a_speed(tmp_path, captured, monkeypatch):
    monkeypatch.setattr(timing, "L2_BYTES", 1)
    monkeypatch.setattr(timing, "REPLAY_US", 1e-9)
    options = ["--shape", "tiny", "--reserve", "0", "--device", "cpu", "--out", str(tmp_path)]
    assert kv_dtype_speed.main(options) == 0
    call, row = json.loads((tmp_path / "kv_dtype_speed_tiny.json").read_text())["rows"]
    assert set(call["us"]) == set(call["largest_error"]) == {"16 bits", "int8", "fp8"} and min(call["us"].values()) > 0
    for name in ("16 bits", "int8", "fp8"):
        assert row[name]["check"]["passed"] and row[name]["check"]["steps_replayed"] and row[name]["captured"]
    assert row["int8"]["cache_bytes"] == row["fp8"]["cache_bytes"] < row["16 bits"]["cache_bytes"] / 3  # of float32
    assert row["DynamicCache"]["ms"] > 0 and not row["failed"]
    assert (row.get("Transformers fp8") or row["missing"]["Transformers fp8"]) and not {*row["missing"]} & {"int8", "fp8"}
    store = kv_dtype_speed.stored
    monkeypatch.setattr(kv_dtype_speed, "exact", lambda q, kv, row: torch.zeros(4, 1, 32))
    with pytest.raises(shapes.WrongResult, match="16 bits of 2, 4/2, 32, 70 is wrong"):
        kv_dtype_speed.main(options)
    assert store(*torch.randn(2, 1, 1, 3, 32), "int8").k.dtype == torch.uint8


@pytest.mark.slow
def test_rounded_k_and_v_are_told_from_those_of_the_model(tmp_path):
    """With needles and outliers; formats that are not installed are named."""
    folder = checkpoint.save(tmp_path / "model")
    options = ["--rows", "2", "--prompt", "40", "--tokens", "65", "--lengths", "700", "--texts", "2", "--step", "32"]
    options += ["--only", f"int8,{kv_dtype.INT4},Transformers fp8"]
    assert kv_dtype.main([*options, "--model", str(folder), "--device", "cpu", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "kv_dtype.json").read_text())
    (run,) = found["measured_by"].values()
    names = {"int8", kv_dtype.INT4, "Transformers fp8"} - {*run["missing"]}
    text, needles = ([row for row in found["rows"] if ("length" in row) == each] for each in (False, True))
    assert {(row["kv_dtype"], row["outliers"]) for row in text} == {(name, each) for name in names for each in (False, True)}
    kl = {(row["kv_dtype"], row["outliers"]): row["kl"] for row in text}
    assert 0 < kl["int8", False] < 0.1 * kl[kv_dtype.INT4, False] and kl["int8", True] < 2 * kl["int8", False]
    assert all(row["tokens"] == 2 * 64 and 0 <= row["top_1"] <= 1 for row in text)
    base, *others = (row for row in needles if not row["outliers"])
    assert base["kv_dtype"] == kv_dtype.BASE and base["dnll"] == 0 and base["needles"] == 16 and len(others) == len(names)
    assert all(row["dnll"] != 0 for row in others)


@pytest.mark.slow
def test_first_tokens(tmp_path, captured):
    assert first_tokens.main(["--shape", "tiny", "--reserve", "0", "--device", "cpu", "--out", str(tmp_path)]) == 0
    chats, again = json.loads((tmp_path / "first_tokens_tiny.json").read_text())["rows"]
    assert len(chats["patched"]["before"]) == 2 * len(chats["lengths"]) and not chats["reasons"]
    assert sum(chats["patched"]["before"]) + sum(chats["patched"]["after"]) == chats["captures"] and again["captures"]


@pytest.mark.slow
def test_prompts_in_chunks(tmp_path):
    options = ["--shape", "tiny", "--repeats", "1", "--reserve", "0"]
    whole, parts, auto = rows_of(chunks.main, tmp_path, "chunks_tiny", *options)
    assert whole["chunk"] is auto["chunk"] is None and (parts["chunk"], parts["pairs"]) == (100, 30_000)
    assert whole["estimate_bytes"] == 3 * parts["estimate_bytes"] and min(each["first_token_s"] for each in (whole, parts)) > 0


@pytest.mark.slow
def test_ragged_prompts(tmp_path, monkeypatch):
    monkeypatch.setattr(prompts.unpadded, "TILE", 1)
    options = ["--shape", "tiny", "--only", "tiny", "--repeats", "1", "--reserve", "0", "--device", "cpu", "--out", str(tmp_path)]
    assert prompts.main(options) == 0
    (row,) = json.loads((tmp_path / "prompts.json").read_text())["rows"]
    assert row["skipped_tokens"] > 0 and row["errors"]["patched"] < 1e-4 and "| tiny" in report.report(tmp_path, ["prompts"])


@pytest.mark.slow
def test_jobs(tmp_path):
    options = ["--shape", "tiny", "--only", "tiny", "--rivals", "batch,generate,stock", "--repeats", "1", "--reserve", "0"]
    (row,) = rows_of(batch.main, tmp_path, "batch_tiny", *options)
    assert row["shortfall"]["batch"] < 1e-4 and all(row[name]["tokens_per_s"] > 0 for name in ("batch", "generate", "stock"))


@pytest.mark.slow
def test_sampled_tokens(tmp_path):
    rows = rows_of(sampling.main, tmp_path, "sampling_tiny", "--shape", "tiny", "--reserve", "0")
    assert [row["setting"] for row in rows] == [*sampling.SETTINGS] and all(row["patched"]["ms"] > 0 for row in rows)
    assert rows[0]["patched"]["above_ms"] == 0


@pytest.mark.slow
def test_two_processes_answer_in_turn(tmp_path):
    assert unified.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "unified.json").read_text())["rows"]
    assert row["gain"] == row["us"]["maximum"] / row["us"]["unified"] - 1 and "with the maximum" in report.report(
        tmp_path, ["unified"]
    )


@pytest.mark.slow
def test_rollouts_with_the_arguments_of_trl(tmp_path, captured_steps):
    options = ["--shape", "tiny", "--prompts", "2", "--samples", "2", "--prompt-tokens", "24", "--new", "8", "--rollouts", "2"]
    rows = rows_of(rollout.main, tmp_path, "rollout", *options, "--reserve", "0")
    assert [row["precision"] for row in rows] == ["autocast", "bf16"]
    for row in rows:
        ours = row["patched"]
        assert ours["tokens"] == row["stock"]["tokens"] == [8, 8] and len(ours["step_s"]) == 2
        assert (ours["captures"], ours["replays"], ours["uncaptured"], ours["reasons"]) == (1, 2 * 7 - 1, 0, [])
    text = report.report(tmp_path, ["rollout"])
    assert "as TRL 1.16.0 calls" in text and "| rollout 2 |" in text and text.count("`patch()`") >= 2


@pytest.mark.slow
def test_a_rollout_with_the_weights_before_a_step_is_wrong():
    arguments = SimpleNamespace(shape="tiny", lr=1e-2, prompts=2, samples=2, prompt_tokens=24)
    policy, device = rollout.Policy(arguments, "bf16", CPU), CPU
    prompt = rollout.prompts(arguments, 128, device)
    assert policy.errors(prompt)["error"] < 1e-4 and policy.model.training and policy.model.is_gradient_checkpointing
    old = runs.copy.deepcopy(policy.judge)
    policy.learn(prompt, policy.rollout(prompt, 8), 2)
    assert policy.errors(prompt)["error"] < 1e-4
    policy.judge = old
    assert policy.errors(prompt)["error"] > 1e-2


def test_a_restricted_model_generates_no_padding(tiny):
    """Whose tokens would be masked for the assistant."""
    modes.restrict(tiny)
    ids = modes.texts(CPU)(2000)
    with torch.no_grad():
        tokens = tiny(ids).logits.argmax(-1)
    assert {*tokens.flatten().tolist(), *ids.flatten().tolist()} <= set(modes.VOCABULARY)


def test_a_row_of_a_mode_with_wrong_logits_fails(tmp_path):
    subject = SimpleNamespace(model=hf.random_model("llama", torch.float32, CPU, **models.SHAPES["tiny"][1]))
    found = results.Results(tmp_path / "x.json", 60, "", failed=[])
    bench, ids, errors = modes.Bench(None, subject, found, CPU), torch.arange(3, 12)[None], []
    logits = subject.model(ids[:, :-1]).logits[:, -2:]
    for wrong in (0.0, 1.0, math.nan):
        out = SimpleNamespace(sequences=ids, logits=(logits[:, 0], logits[:, 1] + wrong))
        errors.append(bench.judge.errors(out, 2))
        stock, ours = ({"tokens": [1], "ms": 1.0, **error} for error in (errors[0], errors[-1]))
        bench.add({"mode": "first", "case": str(wrong), "stock": stock, "patched": ours, "reasons": []})
    assert errors[0]["error"] < 1e-4 and errors[1]["error"] == pytest.approx(1, abs=1e-4)
    assert [row["case"] for row in found.data["rows"]] == ["0.0"]
    assert [failed["row"] for failed in found.data["failed"]] == ["first 1.0", "first nan"]


@pytest.mark.slow
def test_a_step_with_quantised_weights(tmp_path):
    options = ["--shape", "tiny", "--layers", "1", "--cases", "2x9", "--tokens", "8", "--stock-tokens", "8", "--only", "bf16"]
    (row,) = rows_of(quantised.main, tmp_path, "quantised", *options, "--repeats", "1")
    assert row["check"]["passed"] and row["ms"] > 0 < row["uncaptured_ms"] and row["kinds"] == []
    assert "2x9 | bf16" in report.report(tmp_path, ["quantised"])


@pytest.mark.parametrize("name", families.FAMILIES)
def test_families_have_the_size_of_the_named_models(name):
    published = re.search(r"([\d.]+)b(?=$|-a3b)", name)
    model_type, config = families.FAMILIES[name]
    model = hf.random_model(model_type, torch.bfloat16, torch.device("meta"), **{"pad_token_id": 0, **config})
    billions = {"phi3-mini": 3.8, "phi4-mini": 3.8, "mixtral-8x7b": 46.7, "cohere2-7b": 8.0, "1b": 1.24}
    billions |= dict.fromkeys(("olmo2-7b", "olmo3-7b"), 7.3) | {"bloom-7b1": 7.07, "mpt-7b": 6.65, "gemma3n-e2b": 4.44}
    expected = billions.get(name) or (0 if name == "tiny" else float(published[1]))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(expected, rel=0.05, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("what", [[], ["--first"], ["--sessions", "greedy"]], ids=str)
def test_two_checkouts_alternate_and_agree(tmp_path, what):
    here = str(Path(commits.__file__).parent.parent)
    options = ["--shape", "tiny", "--cases", "2xpadded", "--padded", "9", "20", "--pairs", "2", "--tokens", "8"]
    commits.main(["--before", here, *options, "--device", "cpu", "--out", str(tmp_path), *what])
    found = json.loads((tmp_path / "commits.json").read_text())
    (row,) = found["rows"]
    case, lengths = ("greedy", [*commits.PROMPTS]) if "greedy" in what else ("2xpadded", [9, 20])
    methods = {"": commits.METHOD, "--first": commits.METHOD_FIRST, "--sessions": commits.METHOD_SESSION}
    assert row["same_tokens"] and row["lengths"] == lengths and len(row["now"]["all_ms"]) == 2
    assert found["conditions"]["method"] == methods[what[0] if what else ""]
    assert row["now_over_before"] == row["now"]["ms"] / row["before"]["ms"] and set(found["measured_by"]) == {row["run"]}
    shown = [cell.strip() for cell in sections.commits(found).splitlines()[-1].split("|")]
    assert shown[1] == case and shown[4:6] == ["-", "-"]  # no graphs here, so the host's part is not known


@pytest.mark.slow
def test_orders_of_context_parallelism_are_checked_and_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(context, "HEADS", 4)
    monkeypatch.setattr(context, "KV_HEADS", 2)
    rows = rows_of(context.main, tmp_path, "context", "--ranks", "2", "--tokens", "64")
    assert [row["order"] for row in rows] == ["ring", "zigzag", "striped"]
    assert all(len(row["rank_us"]) == 2 and 0 < row["balance"] <= 1 for row in rows)
    text = sections_context.balance(json.loads((tmp_path / "context.json").read_text()))
    assert [line.split("|")[3].strip() for line in text.splitlines()[-3:]] == ["ring", "zigzag", "striped"]
    reversed_order = lambda order, rank, ranks, tokens: torch.arange(tokens) + tokens * (ranks - 1 - rank)  # noqa: E731
    monkeypatch.setattr(context, "positions", reversed_order)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        context.check("ring", 2, CPU)


# ---- the LeanAttention paper's end-to-end experiments ----
def test_outputs_are_integrated_between_the_contexts():
    seconds = [paper_e2e.integrate([50, 60, 100], [10.0, 20.0, 40.0], new) for new in (5, 10, 50)]
    assert seconds == pytest.approx([5 * 12.5 / 1e3, 10 * 15 / 1e3, (10 * 15 + 40 * 30) / 1e3])


def test_published_points_stand_beside_the_shapes_of_their_figures():
    us = {"fa2": 6.0, "split_kv": 2.0, "lean": 2.0}
    row = {"head_dim": 64, "num_heads": 56, "kv_len": 64 << 10, "us": us, "lean_over_split_kv": 1.0}
    rows = [row | {"batch": batch, "kv_bytes": 1e7 * batch, "lean_over_fa2": 3.0 / batch} for batch in (4, 1)]
    other = row | {"batch": 1, "num_heads": 32, "kv_bytes": 1e7, "lean_over_fa2": 5.0}
    text = sections_paper._points({"rows": [*rows, other], "summary": {"published": {"device": "NVIDIA A100"}}})
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "figure 7" in line]
    shapes = ["batch 1, 56 heads, by context: 64k", "batch 1, 64k, by heads: 32, 56", "56 heads, 64k, by batch: 1, 4"]
    assert [line[1] for line in lines] == shapes and [line[3] for line in lines] == ["3.00", "5.00, 3.00", "3.00, 0.75"]
    assert lines[2][2] == "1.5x at large batch" and lines[2][5] == "6.67, 20.00, 20.00" and "figure 9" not in text


@pytest.mark.slow
def test_backends_share_one_cache_and_are_checked_at_every_context(tmp_path, captured):
    arguments = ["--shape", "tiny-opt", "--contexts", "40,60,90", "--tokens", "8", "--repeats", "2", "--out", str(tmp_path)]
    assert paper_e2e.main([*arguments, "--outputs", "20,50,60", "--heads", "6", "--device", "cpu"]) == 0
    result = json.loads((tmp_path / "paper_e2e_tiny-opt_6_heads.json").read_text())
    assert result["heads"] == 6 and result["config"]["hidden_size"] == 96 and result["config"]["ffn_dim"] == 144
    assert [row["context"] for row in result["rows"]] == [40, 60, 90]
    for row in result["rows"]:
        assert set(row["ms"]) == set(paper_e2e.BACKENDS) and all(len(times) == 2 for times in row["all_ms"].values())
        for checked in row["check"].values():
            assert checked["passed"] and checked["steps_replayed"] == 8 and checked["against_uncaptured"]["equal"] == 1
    outputs, prompt_s = result["summary"]["outputs"], result["summary"]["prompt_s"]
    assert [output["new_tokens"] for output in outputs] == [20, 50]  # 60 is beyond the measured contexts
    for output in outputs:
        for name in paper_e2e.BACKENDS:
            whole = output["seconds"][name] + prompt_s[name]
            assert output["with_prompt"][name] == whole and output["decode_share"][name] == output["seconds"][name] / whole
    text = sections.paper_e2e(result)
    assert "the 2 layers of tiny-opt widened to 6 heads, 0.0e9 parameters" in text and re.search(r"\n\| +50 \|", text)
    assert result["config"]["max_position_embeddings"] == 2048 and not any(result["reasons"].values())


@pytest.mark.slow
def test_the_share_of_decode_is_of_prompts_and_outputs_of_any_ratio(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    arguments = ["--figure", "3", "--shape", "tiny-opt", "--contexts", "64,80,192", "--outputs", "16,64,128", "--tokens", "8"]
    assert paper_e2e.main([*arguments, "--repeats", "1", "--out", str(tmp_path), "--device", "cpu"]) == 0
    text = sections.share(json.loads((tmp_path / "paper_share.json").read_text()))
    assert all(re.search(rf"\n\| +{ratio} \|", text) for ratio in ("4:1", "1:1", "1:2"))
    (tmp_path / "document.md").write_text("<!-- measured: begin -->\n<!-- measured: end -->\n")
    assert report.main([str(tmp_path / "document.md"), "--results", str(tmp_path)]) == 0
    assert matplotlib.image.imread(tmp_path / "paper_share.png").std() > 0


@pytest.mark.slow
def test_wrong_logits_end_the_experiment(tmp_path, monkeypatch):
    right = paper_e2e.check
    monkeypatch.setattr(paper_e2e, "check", lambda *them: right(*them) | {"passed": False})
    arguments = ["--shape", "tiny-opt", "--contexts", "40,60", "--tokens", "8", "--repeats", "1", "--out", str(tmp_path)]
    assert paper_e2e.main([*arguments, "--device", "cpu"]) == 1 and not list(tmp_path.iterdir())
