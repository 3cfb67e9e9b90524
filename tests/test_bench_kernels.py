"""The kernel benchmark on the CPU: everything except the graphs and the figures."""

import argparse
import collections
import dataclasses
import itertools
import json
import re
import weakref

import pytest
import torch
from calls import attention, runs_kernels
from cases import slow_unless

import hf_fastattn
from benchmarks import (
    decode,
    generate,
    kernels,
    paper,
    prefill,
    queries,
    report,
    results,
    sections,
    shapes,
    softmax,
    timing,
    training,
    unified,
)
from benchmarks.shapes import Shape
from benchmarks.training import Trained
from hf_fastattn.kernels import reference
from hf_fastattn.kernels.host import gpu

SMALL = {
    "decode": [Shape(2, 4, 2, 16, 64), Shape(1, 4, 4, 16, 96)],
    "speculation": [Shape(2, 4, 2, 16, 64, 4)],
    "ragged": [decode.Ragged("even", [64]), decode.Ragged("uneven", [64, 5, 9])],
    "host": [Shape(1, 4, 2, 16, 64)],
    "queries": [Shape(1, 4, 2, 16, length, q_len, causal=False) for length in (64, 96) for q_len in (8, 9, 16)],
    "queries_portable": [Shape(1, 4, 2, 16, 64, 9, causal=False)],
    "paper": [Shape(1, 4, 4, 64, 96), Shape(2, 4, 4, 128, 64)],
    "paper_ranks": [Shape(4, 3, 3, 64, 96)],
    "sweep": [Shape(1, 4, 4, 64, 96)],
    "prefill": [Shape(1, 4, 2, 16, 80, 80, causal) for causal in (True, False)],
    "widths": [Shape(1, 4, 2, 24, 80, 80, True, 16), Shape(1, 4, 2, 16, 80, 80)],
    "pages": [Shape(2, 4, 2, 16, 256), Shape(1, 4, 2, 16, 256, 32)],
    "window": [
        prefill.Windowed(phase, Shape(1, 4, 2, 16, length, length if phase == "prefill" else 1), window)
        for phase in ("prefill", "decode")
        for length, window in ((16, None), (128, 16), (128, None))
    ],
    "training": [Trained(Shape(1, 4, 2, 16, 80, 80), ("ours", "ours_portable", "sdpa_flash", "sdpa_cudnn"))],
    "training_packed": [Trained(Shape(1, 4, 2, 16, 80, 80), ("ours", "sdpa_masked", "flash_varlen"), documents=20)],
    "training_gpt_oss": [Trained(Shape(1, 8, 2, 16, 80, 80), ("ours", "eager"), window=9, sinks=True)],
    "training_fused": [Trained(Shape(2, 2, 2, 16, 48, 48, causal=False), ("ours", "standard"), torch.float16)],
    "training_layer": [Trained(Shape(1, 2, 2, 16, 80, 80), ("ours", "standard"), torch.float16)],
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, part in kernels.PARTS.items():
        monkeypatch.setitem(kernels.PARTS, name, dataclasses.replace(part, shapes=SMALL[name]))
    monkeypatch.setattr(timing, "L2_BYTES", 1)
    monkeypatch.setattr(timing, "REPLAY_US", 1e-9)


def bench(tmp_path, part, *arguments) -> tuple[int, dict]:
    status = kernels.main([part, "--device", "cpu", "--out", str(tmp_path), *arguments])
    return status, json.loads((tmp_path / f"kernels_{part}.json").read_text())


OURS = {  # what each part times at least, beside split_kv
    "paper": "fa2, split_kv, lean, stream_k",
    "paper_ranks": "fa2, split_kv, lean",
    "sweep": "lean, 64 x 2",
    "window": "ours",
    "pages": "plain, pages of 16, pages of 64, pages of 256",
    **dict.fromkeys(("prefill", "widths"), "ours, portable"),
    **dict.fromkeys(("queries", "queries_portable"), "fa2, lean"),
    "training": "ours, ours_portable, sdpa_flash",
    "training_packed": "ours, sdpa_masked",
    "training_gpt_oss": "ours, eager",
    **dict.fromkeys(("training_fused", "training_layer"), "ours, standard"),
}


@pytest.mark.parametrize("part", slow_unless(("decode", "prefill").__contains__, SMALL))
def test_every_shape_is_checked_and_timed(tmp_path, part):
    status, result = bench(tmp_path, part)
    assert status == 0 and not result["failed"] and not result["not_run"]
    assert [row["shape"] for row in result["rows"]] == [str(shape) for shape in SMALL[part]]
    for row in result["rows"]:
        assert all(us > 0 and low <= us <= high for us, (low, high) in ((us, row["us_range"][n]) for n, us in row["us"].items()))
        assert row["us"].keys() == row["us_range"].keys() >= {*OURS.get(part, "split_kv").split(", ")}
        assert not any("WrongResult" in error for error in row["errors"].values())  # absent on a CPU, but not wrong
    assert result["summary"] and result["conditions"]["torch"] == torch.__version__
    lines = (tmp_path / f"kernels_{part}.json").read_text().splitlines()
    assert sum('"us_range"' in line for line in lines) == len(result["rows"])  # each row is one line


@pytest.mark.slow
def test_a_peer_that_cannot_run_is_named_and_the_others_run(tmp_path):
    (row, _), (_, result) = SMALL["decode"], bench(tmp_path, "decode")
    assert set(result["rows"][0]["errors"]) == {"sdpa_cudnn"}  # needs a GPU
    assert result["rows"][0]["lean_over_best_peer"] == result["rows"][0]["us"]["sdpa_flash"] / result["rows"][0]["us"]["lean"]
    assert row.kv_bytes == 2 * 2 * 2 * 64 * 16 * 2 == result["rows"][0]["kv_bytes"]


WRONG = [
    ("decode", decode, "LEAN", lambda q, k, v, spans=None, **options: attention(q, k[:, :, 1:], v[:, :, 1:], spans, **options)),
    ("queries", queries, "exact", lambda q, *_, **options: torch.ones(q.shape)),
]


@pytest.mark.parametrize("part, module, name, wrong", slow_unless(WRONG[0].__eq__, WRONG))
def test_a_wrong_kernel_is_not_timed(tmp_path, monkeypatch, capsys, part, module, name, wrong):
    monkeypatch.setattr(module, name, wrong)
    status, result = bench(tmp_path, part)
    assert status == 1 and result["rows"] == [] and len(result["failed"]) == len(SMALL[part])
    assert all("lean is wrong: error" in failed["error"] for failed in result["failed"])
    assert "failed" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("part, module", [("decode", decode), ("queries", queries)])
def test_a_wrong_peer_is_not_timed_either(tmp_path, monkeypatch, part, module):
    monkeypatch.setattr(module, "sdpa", lambda backend, q, k, v: torch.zeros_like(q))
    _, result = bench(tmp_path, part)
    assert all("WrongResult" in row["errors"]["sdpa_flash"] for row in result["rows"]) and len(result["rows"]) == len(SMALL[part])
    if part == "decode":
        assert all(row["lean_over_best_peer"] is None for row in result["rows"])
        assert result["summary"]["lean_over_best_peer"] == {"rows": 0}


def test_the_check_accepts_rounding_alone_and_its_reference_does_not_depend_on_its_parts(monkeypatch):
    q, k, v = shapes.make_inputs(Shape(2, 4, 2, 64, 4096), 1, torch.device("cpu"))[0]
    expected = shapes.exact(q, k, v)
    shapes.check("rounded", expected.bfloat16(), expected)
    for wrong in (torch.zeros_like(q), torch.full_like(q, float("nan")), attention(q, k[:, :, :-64], v[:, :, :-64])):
        with pytest.raises(shapes.WrongResult):
            shapes.check("wrong", wrong, expected)
    q, k, v = shapes.make_inputs(Shape(3, 8, 4, 16, 40, 3), 1, torch.device("cpu"))[0]
    whole = attention(q, k, v, window=7).float()
    for size in (1, 2 * 4 * 40 * 16, 1 << 30):
        monkeypatch.setattr(shapes, "REFERENCE_BYTES", size)
        torch.testing.assert_close(shapes.exact(q, k, v, window=7), whole)


@pytest.mark.slow
def test_rows_are_selected_kept_and_skipped(tmp_path, capsys):
    _, result = bench(tmp_path, "decode", "--only", "4/4")
    assert [row["shape"] for row in result["rows"]] == ["1, 4/4, 16, 96"]
    first = result["rows"][0]
    _, result = bench(tmp_path, "decode", "--keep")
    assert len(result["rows"]) == 2 and result["rows"][0] == first and result["summary"]["lean_over_split_kv"]["rows"] == 2
    assert len(set(result["measured_by"])) == 2 == len({row["run"] for row in result["rows"]})
    assert sections.decode(result).count("python -m benchmarks") == 2
    # The best bandwidth of one run does not apply to another.
    both = zip(result["rows"], (4.0, 1.0), strict=True)
    fast, slow = (row | {"kv_bytes": 2 << 30, "tb_per_s": {"lean": tb}} for row, tb in both)
    assert decode.decode_summary([fast, slow])["lean_share_of_best_bandwidth_from_1_gib"]["smallest"] == 1
    status, same = bench(tmp_path, "decode", "--seconds", "0")
    assert status == 1 and same == result and "no time for 2 shapes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench(tmp_path, "decode", "--only", "9/9")
    assert "no shape of decode has '9/9' in its name" in capsys.readouterr().err


def test_rows_of_another_model_or_machine_are_not_kept(tmp_path, capsys):
    same = {"conditions": {}, "shape": "8b", "layers": 4}
    results.Results(tmp_path / "x.json", 1, "bench", **same).save()
    results.Results(tmp_path / "x.json", 1, "bench", **same).take_over(argparse.ArgumentParser())
    for other in ({"shape": "1b"}, {"layers": 32}, {"conditions": {"device": "another"}}):
        with pytest.raises(SystemExit):
            results.Results(tmp_path / "x.json", 1, "bench", **same | other).take_over(argparse.ArgumentParser())
        assert f"was measured under {next(iter(other))}" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_run_keeps_its_rows(tmp_path, monkeypatch):
    part, rows = kernels.PARTS["decode"], []

    def interrupted(shape, device):
        if rows:
            raise KeyboardInterrupt
        rows.append(part.row(shape, device))
        return rows[0]

    monkeypatch.setitem(kernels.PARTS, "decode", kernels.Part(interrupted, part.shapes, part.summary))
    status, result = bench(tmp_path, "decode")
    assert status == 130 and len(result["rows"]) == 1 and result["summary"]
    assert result["not_run"] == [str(shape) for shape in SMALL["decode"][1:]]


@pytest.mark.slow
def test_prefills_memory_is_listed_with_standard_attentions_and_widths_have_a_mean_each(tmp_path):
    _, result = bench(tmp_path, "prefill")
    assert "peak" not in sections.prefill(result) and "| standard |" in sections.prefill(result)
    for row in result["rows"]:
        row["peak_bytes"] = {"ours": 2_000_000, "standard": 4_000_000_000}
    assert " 4 GB / 2 MB |" in sections.prefill(result)
    del result["rows"][0]["peak_bytes"]["standard"]
    assert "- / 2 MB" in sections.prefill(result)
    _, result = bench(tmp_path, "widths")
    assert [(row["shape"], row["kv_bytes"]) for row in result["rows"]] == [
        ("1, 4/2, 24/16, 80, causal", 2 * 80 * (24 + 16) * 2),
        ("1, 4/2, 16, 80, causal", 2 * 80 * (16 + 16) * 2),
    ]
    assert set(result["summary"]) == {"1 x 80"}  # short prompts
    for row, ratio in zip(result["rows"], (2.0, 0.5), strict=True):
        row |= {"kv_len": 4096, "ours_over_sdpa_cudnn": ratio}
    result["summary"] = prefill.widths_summary(result["rows"])
    text = sections.widths(result)
    assert "24/16: 2.00x;" in text and "; 16: 0.50x" in text and "1, 4/2, 24/16, 80 |" in text


# ---- any number of queries ----
def queries_rows(us: dict[int, float], peer: float = 10.0, **fields) -> list[dict]:
    """Rows of one group with these microseconds of lean by q_len."""
    return [
        Shape(1, 4, 2, 64, 8192, q_len, causal=False).row()
        | {"us": {"lean": lean, "fa2": 2 * lean}, "lean_over_best_peer": peer / lean, "run": "a"}
        | fields
        for q_len, lean in us.items()
    ]


def test_statements_about_queries_are_computed_from_the_rows():
    found = queries.queries_summary(queries_rows({1: 8.0, 2: 7.0, 4: 19.0, 512: 12.0}))
    assert found["few_queries_long_past"]["rows"] == 3 and found["the_rest"]["rows"] == 1
    assert found["slower_than"] == {"0.93": 2, "0.85": 2} and list(found["slow"].values()) == [10 / 19, 10 / 12]
    assert found["doubling"]["pairs"] == 2 and [pair["us"] for pair in found["doubling"]["over"]] == [[7.0, 19.0]]
    assert [pair["us"] for pair in found["one_more_query"]["over"]] == [[8.0, 7.0]] and found["lean_over_fa2"] == pytest.approx(2)
    assert not found["messages_tb_per_s"]
    (message,) = queries_rows({17: 100.0})
    message |= {"shape": str(queries.MESSAGES[0]), "kv_bytes": 270_000_000}
    found = queries.queries_summary([message])
    assert found["messages_tb_per_s"] == {"1, 32/8, 128, 64k, 17 queries": pytest.approx(2.7)}
    # Figures of two runs are not compared, and a row without peers is.
    mixed = queries_rows({1: 8.0}) + queries_rows({2: 7.0}, run="b", lean_over_best_peer=None)
    found = queries.queries_summary(mixed)
    assert found["one_more_query"]["pairs"] == 0 and found["few_queries_long_past"]["rows"] == 1


def test_a_part_of_the_queries_is_a_sample_of_all_and_a_row_has_balanced_rounds():
    assert len(queries.QUERIES) == len(set(map(str, queries.QUERIES))) == 2592
    first = queries.QUERIES[: len(queries.QUERIES) // 6]
    for name in ("head_dim", "kv_len", "num_heads", "batch", "q_len"):
        assert {getattr(s, name) for s in first} == {getattr(s, name) for s in queries.QUERIES}
    assert max(s.kv_bytes for s in queries.QUERIES) == 16 << 30
    assert queries.ROUNDS["least"] % len([*queries.PEERS, *queries.OURS]) == 0
    rounds = itertools.islice(timing.orders(list("abc")), queries.ROUNDS["least"])  # if a peer cannot run the shape
    pairs = {pair for order in rounds for pair in itertools.pairwise(order)}
    assert pairs == set(itertools.permutations("abc", 2))


@pytest.mark.slow
def test_keys_of_a_group_are_created_once(monkeypatch):
    cpu, made = torch.device("cpu"), []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: made.append(size) or empty(*size, **options))
    for q_len in (1, 5, 9):
        queries.queries_row(Shape(1, 4, 2, 16, 128, q_len, causal=False), cpu)
    assert [size[1:] for size in made if len(size) == 6] == [(2, 1, 2, 128, 16)]


def test_a_group_begins_after_a_rest(monkeypatch):
    slept, empty, held = [], torch.empty, queries._Held()
    monkeypatch.setattr(queries.time, "sleep", slept.append)
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, dtype=None: empty(*size, dtype=dtype))
    for q_len in (1, 5):
        held.get(Shape(1, 4, 2, 16, 128, q_len), torch.device("cuda"))
    assert slept == [queries.REST]


# ---- tables and pictures ----
@pytest.mark.slow
def test_every_table_and_picture_can_be_made(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    folder = tmp_path / "results"
    for part in SMALL:
        bench(folder, part)
    options = ["--cases", "1x16,2x16,2xpadded", "--repeats", "1", "--tokens", "8", "--device", "cpu", "--out", str(folder)]
    generate.main(["--shape", "tiny", *options])
    (folder / "generate_tiny.json").rename(folder / "generate_8b.json")
    document = tmp_path / "document.md"
    document.write_text("before\n<!-- measured: begin -->\n<!-- measured: end -->\nafter\n")
    assert report.main([str(document), "--results", str(folder)]) == 0
    text = document.read_text()
    assert text.startswith("before\n<!-- measured: begin -->\ncpu") and text.endswith("<!-- measured: end -->\nafter\n")
    titles = "`generate()`|Decode kernels|Several queries|Any number of queries|Ragged|Prefill|Time of a sliding window"
    titles += "|The LeanAttention paper's|Tiles and grids of stream-K|Attention with gradients"
    titles += "|Packed sequences|GPT-OSS's attention|The table of the fused|One layer of GPT-J"
    for words in titles.split("|"):
        assert f"**{words}" in text
    names = [name for name in SMALL if name.startswith("training")]
    # Of flash: backward, both, and the portable backward; of the dense mask; of eager.
    assert len(re.findall(r"(?:flash|masked|eager) \d+\.\d\dx", report.report(folder, names))) == 5
    for part in ("decode", "queries", "paper", "training", "training_layer"):
        assert f"](results/kernels_{part}.png)" in text
        assert matplotlib.image.imread(folder / f"kernels_{part}.png").std() > 0
    assert report.rewrite(text, folder, "results") == text and "best measured stock" not in text
    measured = json.loads((folder / "kernels_decode.json").read_text())
    worst = measured["summary"]["lean_over_best_peer"]["smallest_at"]  # always included
    (us,) = [row["us"]["lean"] for row in measured["rows"] if row["shape"] == worst]
    assert [line for line in text.splitlines() if worst in line and f" {sections.figure(us)} " in line]


@pytest.mark.slow
def test_graphs_larger_than_the_cache_are_stored_once(monkeypatch):
    (case,), kept = SMALL["training_gpt_oss"], []

    def stored(x):
        out = training._eager(x)
        kept.append(weakref.ref(out))
        return out

    def timed(runs, *args):
        alive.append(sum(ref() is not None for ref in kept))
        return {name: [1.0] for name in runs}

    for size, sets in ((100, 3), (9 << 30, 1)):
        alive: list[int] = []
        kept.clear()
        monkeypatch.setattr(timing, "num_sets", lambda count, size=size, sets=sets: sets if count == size else 3)
        monkeypatch.setattr(training, "peak_bytes", lambda *args, size=size: size)
        monkeypatch.setattr(timing, "time_rivals", timed)
        monkeypatch.setitem(training.RIVALS, "eager", stored)
        training.trained_row(case, torch.device("cpu"))
        assert alive == [sets]


def test_gradients_are_checked_those_of_long_inputs_by_their_last_queries(tmp_path, monkeypatch):
    (case,) = SMALL["training"]
    x = training.make(case, torch.device("cpu"))
    expected = training.exact(x, x.dout)
    right = [t.to(case.dtype) for t in expected]
    assert set(training.check("ours", right, expected, 0)) == {"out", "dq", "dk", "dv"}
    for i, what in enumerate(("out", "dq", "dk", "dv")):
        wrong = [t.clone() for t in right]
        wrong[i][0, 0, 3] = float("nan")
        with pytest.raises(shapes.WrongResult, match=f"{what} of ours is wrong: error nan"):
            training.check("ours", wrong, expected, 0)
    dout = x.dout.clone()
    dout[:, :, : -training.TAIL] = 0
    whole = training.exact(x, dout)
    monkeypatch.setattr(training, "WHOLE", 16)
    tail = training.exact(x, dout)
    assert tail[0].shape[2] == training.TAIL
    for a, b in zip(tail, whole, strict=True):
        torch.testing.assert_close(a, b[:, :, -a.shape[2] :])


def test_results_of_a_loop_are_not_held():
    held = weakref.WeakSet()

    def call(i):
        assert not held
        held.add(out := torch.zeros(i + 1))
        return out

    training._loop(call, 3, 2)()


def test_documents_fill_the_row_and_visible_pairs_are_those_of_the_reference():
    for q_len, kv_len, window in ((1, 9, None), (1, 9, 4), (9, 9, 4), (9, 9, None), (5, 9, 3), (5, 9, 7), (3, 9, 20)):
        seen = reference.visible(q_len, kv_len, torch.device("cpu"), None, True, window)
        assert prefill.visible_pairs(q_len, kv_len, window) == seen.sum().item()
    (case,) = SMALL["training_packed"]
    assert case.cuts[0] == 0 and case.cuts[-1] == 80 and len(case.cuts) == 5 and sorted(set(case.cuts)) == case.cuts
    pairs = sum(n * (n + 1) // 2 for n in (b - a for a, b in itertools.pairwise(case.cuts)))
    assert case.flops == 4 * 4 * 16 * pairs


@pytest.mark.slow
def test_sections_are_written_between_their_marks(tmp_path):
    for part in ("decode", "ragged"):
        bench(tmp_path, part)
    document = "".join(f"<!-- measured{name}: {mark} -->\n" for name in (" ragged", "") for mark in ("begin", "end"))
    first, rest = report.rewrite(document, tmp_path).split("<!-- measured: begin -->")
    assert "**Ragged" in first and "**Decode" not in first and "**Decode" in rest and "**Ragged" not in rest
    with pytest.raises(ValueError, match="no sections raged; known are headline, generate"):
        report.rewrite(document.replace("ragged", "raged"), tmp_path)
    _, result = bench(tmp_path, "paper_ranks")
    row = next(line for line in sections.paper_ranks(result).splitlines() if "x |" in line)
    assert [cell.strip() for cell in row.split("|")][1:5] == ["8", "4", "24", "96"]  # the heads of a GPU are those of all


@pytest.mark.slow
def test_figures_of_earlier_code_have_its_date_and_version(tmp_path):
    _, result = bench(tmp_path, "decode")
    (new,) = result["measured_by"].values()
    assert new["version"] == hf_fastattn.__version__
    says, path = "**Decode", tmp_path / "kernels_decode.json"

    def sentence(**older) -> str:
        path.write_text(json.dumps(result | {"older": {"version": "0.1.0", **older}}))
        return report.report(tmp_path).partition(says)[0]

    assert "code has changed" not in sentence()
    first, second, *_ = result["rows"]
    first["run"], second["run"] = "20260102T030405Z-a", "20260103T030405Z-b"  # without a version
    assert "Measured on 2026-01-02 and 2026-01-03 with hf_fastattn 0.1.0. The code has changed since." in sentence()
    chosen = {"shape": [second["shape"]]}
    assert f"The rows of shape {second['shape']} were measured on 2026-01-03 with hf_fastattn 0.1.0." in sentence(rows=chosen)
    for row in result["rows"]:
        del row["run"]
    assert "Measured on 2025-12-31 with hf_fastattn 0.1.0." in sentence(dates=["2025-12-31"])


def test_a_document_without_marks_is_refused_and_the_command_reproduces_the_figures(tmp_path, capsys):
    typed = ["decode", "--out", "/somewhere", "--only", "32/8 a", "--seconds=5", "--seconds", "7"]
    assert results.command("python -m bench", typed) == "python -m bench decode --only '32/8 a'"
    (tmp_path / "document.md").write_text("nothing")
    with pytest.raises(SystemExit):
        report.main([str(tmp_path / "document.md")])
    assert "has no marks" in capsys.readouterr().err


# ---- what is timed ----
@pytest.mark.parametrize("part", ["decode", "speculation", "paper", "prefill", "widths", "window", "pages"])
def test_inputs_of_a_round_are_larger_than_l2(monkeypatch, part):
    monkeypatch.undo()
    for shape in kernels.PARTS[part].shapes:
        of = shape.shape if part == "window" else shape
        kv_bytes = of.kv_bytes * ((part == "window" and shape.window) or of.kv_len) // of.kv_len
        sets = timing.num_sets(kv_bytes)
        assert sets * kv_bytes >= 128 << 20 and (sets > 1 or kv_bytes >= 100 * (50 << 20)), str(shape)
        assert timing.num_calls(sets, 7.0) % sets == 0


def test_rivals_alternate():
    seen = []
    cpu = torch.device("cpu")
    runs = {name: timing.record(lambda i, name=name: seen.append((name, i)), 2, 4, cpu) for name in "abc"}
    times = timing.time_rivals(runs, 4, cpu)
    assert {len(values) for values in times.values()} == {timing.MOST}
    order = [name for name, _ in seen[::4]][3:]  # after the warm-up
    assert order == [name for names in itertools.islice(timing.orders(list("abc")), timing.MOST) for name in names]
    assert [i for _, i in seen[:4]] == [0, 1, 0, 1]
    assert timing.medians({"a": [5.0, 1.0, 2.0]}) == {"us": {"a": 2.0}, "us_range": {"a": [1.0, 5.0]}}

    for rivals in (1, 2, 3, 4, 5, 8):  # none always follows the same other
        names = list("abcdefgh")[:rivals]
        rounds = list(itertools.islice(timing.orders(names), rivals * (1 + rivals % 2)))
        assert all(sorted(order) == names for order in rounds)
        pairs = collections.Counter(pair for order in rounds for pair in itertools.pairwise(order))
        assert pairs == dict.fromkeys(itertools.permutations(names, 2), 1 + rivals % 2)


def test_schedules_are_computed_for_an_absent_gpu():
    shape, cpu = Shape(1, 56, 56, 64, 64 << 10), torch.device("cpu")
    with paper.as_if(90, 132):
        here = paper.schedules(shape, cpu)
    with paper.as_if(*paper.A100):
        there = paper.schedules(shape, cpu)
    assert here["fa2"]["balance"] == pytest.approx(56 / 132) and there["fa2"]["balance"] == pytest.approx(56 / 108)
    assert gpu.num_sms(cpu) != 132 and min(here["lean"]["balance"], there["lean"]["balance"]) > 0.95
    for shape in paper.SWEEP:
        with paper.as_if(90, 132):
            configs = paper.sweep_configs(shape, cpu)
        assert {"64 x 1", "64 x 2", "128 x 1"} <= configs.keys()
        for config in configs.values():  # stays within shared memory
            tile = 2 * config.BLOCK_N * shape.head_dim * 2
            assert config.num_stages >= 2 and config.programs_per_sm * (config.num_stages - 1) * tile <= 160 << 10


def test_rows_with_other_schedules_and_the_fastest_are_summarised_separately():
    same = {"programs": 1, "sms_with_work": 1.0, "balance": 1.0}
    rows = [
        {"shape": name, "head_dim": 64, "lean_over_fa2": 2.0, "lean_over_split_kv": 1.0, "stream_k_over_split_kv": ratio}
        | {"schedule": {"fa2": same, "split_kv": same, "lean": same | {"programs": programs}}}
        | {"us": {"lean": 2.0, "fa2": ratio}, "kernel_of_lean": "split_kv" if programs == 1 else "stream_k"}
        for name, ratio, programs in (("a", 0.9, 1), ("b", 1.1, 2), ("c", 1.2, 3))
    ]
    found = paper.paper_summary(rows)
    assert found["stream_k_over_split_kv"]["rows"] == 3 and found["schedules_differ"]["rows"] == 2
    assert found["schedules_differ"]["average"] == pytest.approx(1.15) and found["schedules_differ"]["smallest"] == 1.1
    assert found["fastest"] == {"lean": 0, "fa2": 3} and found["lean_is_split_kv"] == 1


def test_schedules_contain_every_tile_and_lean_is_balanced(monkeypatch):
    monkeypatch.setattr(gpu, "arch", lambda device: 90)
    monkeypatch.setattr(gpu, "num_sms", lambda device: 132)
    few = Shape(1, 12, 12, 128, 64 << 10)
    found = {kernel: paper.schedule(kernel, few, torch.device("cpu")) for kernel in ("fa2", "split_kv", "lean")}
    assert found["fa2"]["programs"] == 12 and found["fa2"]["sms_with_work"] == found["fa2"]["balance"] == 12 / 132
    assert 0.95 < found["lean"]["balance"] <= 1 and found["lean"]["sms_with_work"] == 1
    assert found["fa2"]["balance"] < found["split_kv"]["balance"] <= found["lean"]["balance"]
    short = paper.schedules(Shape(1, 12, 12, 64, 1 << 10), torch.device("cpu"))
    assert short["split_kv"] == short["lean"]  # the same launch
    for kernel in found:  # a full wave of whole shares has nothing idle
        assert paper.schedule(kernel, Shape(1, 132 * 4, 132 * 4, 128, 64 << 10), torch.device("cpu"))["balance"] == 1
    for kv_len, programs in ((1 << 10, 512), (64 << 10, 264)):  # one program for each of many short heads
        assert paper.schedule("lean", Shape(16, 32, 32, 64, kv_len), torch.device("cpu"))["programs"] == programs


@pytest.fixture
def small_softmax(monkeypatch):
    for name, value in {"BLOCK": 32, "HEADS": 4, "KV_HEADS": 2, "HEAD_DIM": 16}.items():
        monkeypatch.setattr(softmax, name, value)
    monkeypatch.setattr(shapes, "DTYPE", torch.float32)
    monkeypatch.setattr(timing, "LEAST", 1)
    monkeypatch.setattr(timing, "MOST", 1)


def test_softmaxes_and_steps_without_a_cache_are_checked_and_timed(tmp_path, small_softmax, monkeypatch):
    options = ["--batches", "3", "--vocab", "3,70", "--lengths", "40", "--device", "cpu", "--out", str(tmp_path)]
    assert softmax.main(options) == 0
    *scores, step = json.loads((tmp_path / "softmax.json").read_text())["rows"]
    assert [(row["batch"], row["vocab"]) for row in scores] == [(3, 3), (3, 70)] and step["length"] == 40
    weights = 64 * (4 + 2 * 2) * 16
    assert step["flops"] == {"cache": 2 * weights + 4 * 40 * 64, "no_cache": 40 * 2 * weights + 4 * 40 * 40 * 64 // 2}
    text = report.report(tmp_path, ["softmax"])
    assert re.search(r"\| +3 x 70 \|", text) and re.search(r"\| +40 \|.*x \|", text)
    monkeypatch.setattr(softmax, "get", lambda name: argparse.Namespace(attend=lambda q, kv: torch.zeros_like(q)))
    with pytest.raises(shapes.WrongResult, match="no_cache is wrong"):
        softmax.main(options)


@runs_kernels
@pytest.mark.parametrize("vocab", [3, 32, 70])
def test_kernels_of_softmax_are_right(small_softmax, vocab, device):
    rivals, *_ = softmax.softmaxes(2, vocab, device)
    assert {*softmax.KINDS, "one_reading"} <= rivals.keys()
    for name, (call, of, want) in rivals.items():
        torch.testing.assert_close(of(call(0)).double(), want.double(), rtol=1e-5, atol=1e-7, msg=name)


@runs_kernels
def test_a_kernel_without_the_maximum_is_right_for_small_scores(device, monkeypatch):
    if device.type == "cuda":
        pytest.skip("the benchmark compiles it in a process of its own")
    for module in ("attend", "online"):
        monkeypatch.setattr(f"hf_fastattn.kernels.device.{module}.softmax_step", unified.unified_step)
    q, k, v = (x.half() for x in shapes.make_inputs(*unified.TINY, 1, device)[0])
    shapes.check("unified", shapes.SPLIT_KV(q, k, v), shapes.exact(q, k, v))
    assert not shapes.SPLIT_KV(200 * q, k, v).isfinite().all()  # no maximum is subtracted
