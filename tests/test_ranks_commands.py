"""Commands that torchrun starts in several processes."""

import json
import os
from types import SimpleNamespace

import checkpoint
import processes
import psutil
import pytest
import torch

import hf_fastattn_cli as cli
from benchmarks import context as context_bench
from benchmarks import models, paper_ranks, ranks_rivals, sections, sections_context, sections_paper, timing, tree
from benchmarks import ranks as ranks_bench
from hf_fastattn import explain, hf
from hf_fastattn.context_parallel import ORDERS
from hf_fastattn.explanation import costs
from hf_fastattn.model_shapes import SHAPES

pytestmark = [processes.HIDDEN, pytest.mark.xdist_group("ranks")]


def run_commands(rank: int, folder) -> list[int]:
    os.environ["TORCHELASTIC_RUN_ID"] = "of the test"
    options = ["--tokens", "6", "--stock-tokens", "6", "--repeats", "1"]
    options += ["--shape", "tiny", "--device", "cpu", "--fill", "20", "--out", str(folder)]
    # generate ends the process group, so it is the last.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "destroy_process_group", lambda group=None: None)
        small = psutil.virtual_memory()._replace(total=psutil.Process().memory_info().rss + (512 << 20))
        patch.setattr(psutil, "virtual_memory", lambda: small)  # by which Transformers sizes what is not told its size
        codes = [ranks_bench.main(["--cases", "1x9", *options])]
        # A rival that raises is left out, by all ranks.
        patch.setitem(ranks_rivals.OURS, "collectives", {"peer_memory": True})
        more = ["--cases", "1x9,2x40", "--rivals", "patch,collectives,sequence,sdpa", "--keep"]
        codes.append(ranks_bench.main([*more, *options]))
        share = ["--share-of", "4", "--cases", "1x9", "--rivals", "patch,sdpa"]
        codes.append(ranks_bench.main([*options, *share, "--shape", "tiny-8"]))
        patch.setattr(paper_ranks, "FIGURE_8", [(4, 64, 64), (1, 2, 64), (1, 3, 64), (1, 2, 128)])
        for name in ("L2_BYTES", "REPLAY_US"):
            patch.setattr(timing, name, 1)
        codes.append(paper_ranks.main(["--longest", "64", "--device", "cpu", "--out", str(folder)]))
        codes.append(paper_ranks.main(["--longest", "64", "--device", "cpu", "--keep", "--out", str(folder)]))
        codes.append(paper_ranks.main(["--longest", "64", "--device", "cpu", "--keep", "--share-of", "4", "--out", str(folder)]))
        codes.append(tree.main(["--tokens", "64", "--device", "cpu", "--out", str(folder)]))
        codes.append(context_bench.main(["--tokens", "32", "--device", "cpu", "--out", str(folder)]))
    return [*codes, cli.main(["generate", str(folder / "tiny"), "--compare", "sdpa", "--tokens", "5", "--dtype", "float32"])]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    checkpoint.save(folder / "tiny")
    return folder, processes.run(folder, 2, run_commands, folder, limit=600)


@pytest.mark.slow
def test_generate_prints_on_one_rank(commands):
    first, second = commands[1]
    assert first.result == second.result == [0] * 9, first.output + second.output
    assert "| lean" in first.output and "lean.decode" in first.output
    assert "| lean" not in second.output


def test_the_check_of_tree_and_ring_fails_for_zeros_where_results_are_small():
    q, k, v = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 64, 8), torch.randn(1, 2, 64, 8) / 1000
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    given = {"q": q, "k": k, "v": v, "tree": lambda: right}
    tree.Subject.check(SimpleNamespace(**given, ring=lambda: right))
    with pytest.raises(AssertionError):
        tree.Subject.check(SimpleNamespace(**given, ring=lambda: torch.zeros_like(right)))


def lines_of(found: dict) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in sections.ranks(found).splitlines() if "|" in line]


@pytest.mark.slow
def test_the_benchmark_compares_all_rivals(commands):
    found = json.loads((commands[0] / "ranks_tiny.json").read_text())
    row = found["rows"][0]
    assert (row["case"], row["ranks"], row["not_run"]) == ("1x9", 2, {}) and "filled" not in row
    assert {name: each["passed"] for name, each in row["check"].items()} == dict.fromkeys(ranks_rivals.OURS, True)
    assert sorted(row["rivals"]) == sorted(ranks_bench.NAMES) and all(each["ms"] > 0 for each in row["rivals"].values())
    lines = lines_of({**found, "rows": [row]})
    figures = {(cells[1], cells[2]): cells[4] for cells in lines if cells[0] == "1x9"}
    for name, words in ranks_bench.NAMES.items():
        assert figures.pop(("1" if name.startswith("one") else "2", words)) != "-"
    assert figures == {("4", "-"): "-", ("8", "-"): "-"}  # not run


@pytest.mark.slow
def test_a_long_prompt_is_not_read_and_a_rival_that_raises_is_left_out(commands):
    found = json.loads((commands[0] / "ranks_tiny.json").read_text())
    every, again, long = found["rows"]  # the first has rivals that the second run did not time
    assert (again["case"], long["case"], long["filled"]) == ("1x9", "2x40", True) and every["run"] != again["run"] == long["run"]
    assert list(again["rivals"]) == ["patch", "sequence", "sdpa"] and list(long["rivals"]) == ["patch", "sequence"]
    assert all(long["check"][name]["passed"] and "first_token_ms" not in long["rivals"][name] for name in long["rivals"])
    assert "peer_memory=True" in again["not_run"]["collectives"] and "reads the prompt" in long["not_run"]["sdpa"]
    notes = {(cells[0], cells[2]): cells[-1] for cells in lines_of(found) if cells[1] == "2"}
    names = ranks_bench.NAMES
    assert notes["2x40", names["patch"]] == "random K and V" and "reads the prompt" in notes["2x40", names["sdpa"]]
    assert notes["1x9", names["collectives"]] == "-" and "peer_memory=True" in notes["2x40", names["collectives"]]


@pytest.mark.slow
def test_the_orders_of_context_parallelism_are_timed_over_ranks(commands):
    found = json.loads((commands[0] / "context_ranks.json").read_text())
    assert [(row["order"], row["ranks"], row["tokens"]) for row in found["rows"]] == [(order, 2, 32) for order in ORDERS]
    lines = [[cell.strip() for cell in line.split("|")] for line in sections_context.times(found).splitlines()]
    empty = [cells[2:4] for cells in lines if cells[1:2] == ["32"] and cells[4] == "-"]
    assert empty == [[ranks, order] for ranks in ("4", "8") for order in ORDERS]  # not run


@pytest.mark.slow
def test_tree_and_ring_are_timed_over_ranks(commands):
    found = json.loads((commands[0] / "tree_ranks.json").read_text())
    (row,) = found["rows"]
    assert (row["tokens"], row["ranks"]) == (64, 2) and row["ring_over_tree"] == row["us"]["ring"] / row["us"]["tree"] > 0
    assert "|     64 |    2 |" in sections_context.tree(found)


@pytest.mark.slow
def test_the_heads_of_the_papers_figure_are_timed_over_ranks(commands):
    found = json.loads((commands[0] / "paper_ranks.json").read_text())
    shapes = [(row["batch"], row["num_heads"], row["kv_len"], row["ranks"]) for row in found["rows"]]
    # Not those of three heads, nor of longer contexts; measured again; with the share of one of four.
    assert shapes == [(4, 32, 64, 2), (1, 1, 64, 2), (4, 16, 64, 2)]
    for row in found["rows"]:
        assert row["us"] == {name: max(each[name] for each in row["us_of_ranks"]) for name in ("fa2", "split_kv", "lean")}
    lines = [[cell.strip() for cell in line.split("|")] for line in sections_paper.paper_gpus(found).splitlines()]
    assert [cells[1:5] for cells in lines if cells[1:2] == ["2"]] == [["2", "4", "64", "64"], ["2", "1", "2", "64"]]
    assert [cells[1:5] for cells in lines if cells[1:2] == ["2 of 4"]] == [["2 of 4", "4", "64", "64"]]
    empty = [cells for cells in lines if cells[1:2] == ["8"]]
    assert empty and all(cells[5:10] == ["-"] * 5 and cells[10] != "-" for cells in empty)  # not run


@pytest.mark.slow
def test_ranks_with_the_share_of_more_gpus_have_its_shapes(commands):
    found = json.loads((commands[0] / "ranks_tiny-8_of4.json").read_text())
    row, (model_type, config) = found["rows"][0], models.SHAPES["tiny-8"]
    facts = costs.count(hf.model_on_meta(hf.make_config(model_type, **config), torch.float32), ranks=4)
    kept = 2 * config["hidden_size"] * 4  # the norms' weights, and the embedding where it is not divided
    assert found["share_of"] == 4 and row["ranks"] == 2 and list(row["rivals"]) == ["patch", "sdpa"]
    assert abs(row["bytes_of_a_rank"] - models.step_bytes(facts, row["lengths"])) <= kept
    assert "each GPU with the share of one of 4" in sections.ranks(found)


def test_a_share_is_of_more_gpus_and_divides_the_shape(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "4")
    for argv in (["--share-of", "2"], ["--share-of", "8", "--rivals", "one_patch"]):
        with pytest.raises(SystemExit):
            ranks_bench.main(["--shape", "tiny", "--device", "cpu", "--out", str(tmp_path), *argv])
    said = capsys.readouterr().err
    assert "--share-of is at least the number of processes" in said and "unknown rivals one_patch" in said
    with pytest.raises(ValueError, match="num_key_value_heads of this shape cannot be divided among 8 GPUs"):
        models.with_share(models.SHAPES["tiny"][1] | {"intermediate_size": 64, "num_attention_heads": 8}, ranks=4, of=8)


def test_the_benchmark_needs_torchrun(capsys, tmp_path):
    with pytest.raises(SystemExit):
        ranks_bench.main(["--shape", "tiny", "--out", str(tmp_path)])
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_share_of_a_gpu_is_its_part_of_weights_and_heads(ranks):
    whole, share = (explain("8b", gpu="h200", ranks=n) for n in (1, ranks))
    model_type, config = SHAPES["8b"]
    meta = hf.model_on_meta(hf.make_config(model_type, **config), torch.bfloat16)
    # Older Transformers does not divide embeddings.
    undivided = ("norm",) if "model.embed_tokens" in meta.tp_plan else ("norm", "embed")
    kept = sum(p.nbytes for name, p in meta.named_parameters() if any(word in name for word in undivided))
    assert share.facts.weight_bytes == (whole.facts.weight_bytes - kept) // ranks + kept
    assert share.step.kv_bytes * ranks == whole.step.kv_bytes
    assert share.facts.num_heads * ranks == 32 and share.facts.num_kv_heads * ranks == 8
    assert f"one of {ranks} GPUs" in str(share)


def test_heads_that_cannot_be_divided_are_refused():
    with pytest.raises(ValueError, match="8 KV heads, which cannot be divided among 3 ranks"):
        explain("8b", gpu="h200", ranks=3)
