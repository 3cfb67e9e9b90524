"""The end-to-end benchmark on the CPU: all of it but the graph and the figures."""

import json

import fake_graph
import pytest
import torch

from hf_fastattn import patch
from hf_fastattn.bench import generate, runs

RIVALS = {generate.SDPA, generate.STATIC, generate.LEAN, generate.OURS}


def bench(tmp_path, *arguments, tokens=8) -> dict:
    common = ["--shape", "tiny", "--device", "cpu", "--tokens", str(tokens), "--repeats", "2", "--out", str(tmp_path)]
    generate.main([*common, *arguments])
    return json.loads((tmp_path / "generate_tiny.json").read_text())


def test_every_rival_is_checked_and_timed(tmp_path, capsys):
    result = bench(tmp_path, "--cases", "1x16,2xpadded", "--compile-cases", "1x16", "--resume", "2xpadded")
    plain, padded = result["rows"]
    assert set(plain["rivals"]) == RIVALS
    assert all(len(rival["all_ms"]) == 2 and rival["ms"] > 0 for rival in plain["rivals"].values())
    assert plain["ratios"].keys() == {generate.SDPA, generate.STATIC, generate.LEAN, "best_stock"}
    assert plain["repeats_from"] == "prompt" and padded["repeats_from"] == "cache"
    assert padded["rivals"][generate.STATIC] is None and "compile-cases" in padded["notes"][0]
    assert padded["lengths"] == [16, 48] and padded["live_tokens"] == 64 and generate.UNPADDED in padded["ratios"]
    for row in (plain, padded):
        ours = row["rivals"][generate.OURS]
        assert ours["check"]["passed"] and ours["check"]["against_uncaptured"]["equal"] == 1
        assert ours["check"][f"against_{generate.SDPA}"]["equal"] == 1
        assert ours["replay_ms"] is None and ours["reasons"]  # no graph on a CPU, and that is said
    assert "x best" in capsys.readouterr().out


@pytest.mark.parametrize("resume", ["", "2x16,2xpadded"])
def test_captured_steps_are_checked_and_captured_once(tmp_path, monkeypatch, resume):
    fake_graph.use(monkeypatch)
    for row in bench(tmp_path, "--cases", "2x16,2xpadded", "--compile-cases", "", "--resume", resume)["rows"]:
        ours = row["rivals"][generate.OURS]
        assert (
            ours["check"]["steps_replayed"] == 7 and ours["check"]["passed"] and ours["check"]["against_uncaptured"]["equal"] == 1
        )
        assert ours["captures_while_timing"] == 0 and ours["steps"]["uncaptured"] == 0 and not ours["reasons"]


def test_timing_a_replay_leaves_the_next_tokens_right(monkeypatch):
    class Event:
        def __init__(self, **_): ...
        def record(self): ...
        def synchronize(self): ...
        def elapsed_time(self, other):
            return 20.0

    fake_graph.use(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    device = torch.device("cpu")
    model = generate.compat.random_model("llama", torch.float32, device, **{**generate.COMMON, **generate.SHAPES["tiny"]})
    prompt = runs.make_prompt([20, 9], 128, device)
    with patch(model) as patched:
        assert runs.replay_ms(patched) is None
        first = runs.run(model, prompt, 8, keep=True)
        for _ in range(2):
            assert runs.replay_ms(patched) == 2.0
            again = runs.run(model, prompt, 8, logits=True)
            onwards = runs.run(model, prompt, 8, cache=runs.rewind(first.cache, prompt), logits=True)
            assert torch.equal(again.tokens, first.tokens) and torch.equal(onwards.tokens, first.tokens)
            torch.testing.assert_close(onwards.logits, again.logits)


def test_what_fails_is_written_down_and_stops_nothing_else(tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(generate, "check", fail)
    row = bench(tmp_path, "--cases", "1x16", "--compile-cases", "")["rows"][0]
    assert row["rivals"][generate.OURS]["error"] == "MemoryError: no room"
    assert "ms" not in row["rivals"][generate.OURS] and "ratios" not in row
    assert row["rivals"][generate.SDPA]["ms"] > 0


def test_wrong_logits_are_not_timed(tmp_path, monkeypatch):
    right = generate.check
    monkeypatch.setattr(generate, "check", lambda *them: right(*them) | {"passed": False})
    ours = bench(tmp_path, "--cases", "1x16", "--compile-cases", "")["rows"][0]["rivals"][generate.OURS]
    assert "not those of uncaptured steps" in ours["error"] and "ms" not in ours


def test_what_does_not_fit_the_budget_is_left_out(tmp_path):
    row = bench(tmp_path, "--cases", "1x16", "--seconds", "0")["rows"][0]
    assert row["rivals"] == {} and row["notes"][0].startswith("not run")


def test_a_case_that_means_nothing_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench(tmp_path, "--cases", "8by8192")
    assert "ROWSxTOKENS" in capsys.readouterr().err
