"""The LeanAttention paper's end-to-end experiments on the CPU."""

import json
import re

import fake_graph
import pytest

from benchmarks import paper_e2e, report, sections, sections_paper


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
def test_backends_share_one_cache_and_are_checked_at_every_context(tmp_path, monkeypatch):
    fake_graph.use(monkeypatch)
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
