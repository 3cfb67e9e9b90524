"""Compares every model of the installed Transformers that uses the attention interface with eager: equal, refused, or wrong.

    python tests/matrix.py                       # all of them, on the CPU; `make matrix`
    python tests/matrix.py llama Qwen3ForCausalLM --out /tmp/some.json
    python tests/matrix.py --shapes --device cuda --processes 4             # real kernels and graphs, IEEE products

Each model is tiny and random (`every_model`), in fp32. The expected result is eager's. A cell is one way of running the model
with this package: only its attention, each cache, patch() with the recorded graph, streaming. Logits of every step are compared
up to the effect of rounding on this model (`Truth`), and tokens if eager's choice is clear by more than that. A refusal counts if
the package raised it on purpose, and the remedies that it names are tried.
"""

import argparse
import contextlib
import json
import multiprocessing
import re
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from unittest import mock

import every_model
import fake_graph
import model_inputs
import torch
import transformers
from models import PADDINGS, draw_weights
from transformers import DynamicCache

import hf_fastattn
from hf_fastattn import hf
from hf_fastattn.attention import refuse
from hf_fastattn.patches.calls import unpadded
from hf_fastattn.patches.fused import experts, subclass
from hf_fastattn.patches.fused import norms as fuse
from hf_fastattn.patches.graphs import graphs

PACKAGE = str(Path(hf_fastattn.__file__).parent)
NEW = 10  # tokens
WIDE = 256  # a streaming window that hides nothing
EPS = torch.finfo(torch.float32).eps
SECONDS = 240  # for one model
INTERNAL = ("spans must be",)  # messages for authors of kernels, which users of models must not see
EQUAL, REFUSED, WRONG, ABSENT = "equal", "refused", "WRONG", "absent"


# One model of each shape of attention, with the property that distinguishes it.
SHAPES = {
    "Qwen3ForCausalLM": "grouped heads, normed q and k",
    "OPTForCausalLM": "learned positions, q scaled beforehand",
    "Qwen2ForCausalLM@windows": "windows in some layers",
    "Gemma2ForCausalLM": "softcap",
    "GptOssForCausalLM": "sink logits",
    "Gemma3ForConditionalGeneration": "pictures seen in both directions",
    "Gemma4ForCausalLM": "layers of several head sizes",
    "Gemma4ForCausalLM@shared_kv": "layers that share K and V",
    "PaliGemmaForConditionalGeneration": "a prefix seen in both directions",
    "Phi3ForCausalLM@longrope": "a cache dropped behind long prompts",
    "DeepseekV3ForCausalLM": "values narrower than keys",
    "DeepseekV32ForCausalLM": "a top-k of keys",
    "Llama4ForCausalLM": "chunks",
    "Qwen3NextForCausalLM": "linear attention in some layers",
    "MllamaForCausalLM": "layers that text alone leaves out",
    "Qwen2_5_VLForConditionalGeneration": "positions in three dimensions",
    "GitForCausalLM": "text attention in its own code, and vision that uses the interface",
    "BertForMaskedLM": "an encoder",
    "BartForConditionalGeneration": "an encoder-decoder",
    "BigBirdPegasusForConditionalGeneration": "an encoder that adds the mask itself",
    "T5ForConditionalGeneration": "a position bias",
    "LongT5ForConditionalGeneration": "a class without sdpa",
    "DiffusionGemmaForBlockDiffusion": "a canvas that sees all of the prompt",
}


@dataclass
class Cell:
    """result: equal, refused, WRONG, or absent if eager cannot run this. said: the messages of the package, or the error."""

    result: str
    path: str = ""
    said: list[str] = field(default_factory=list)
    graph: str = ""


class Disagreement(Exception):
    """The numbers or tokens differ from eager's."""


# ---- running and comparing ----


@torch.no_grad()
def forward(model, inputs: dict) -> torch.Tensor:
    torch.manual_seed(0)  # some begin with random noise
    out = model(**inputs)
    return next(out[name] for name in ("logits", "last_hidden_state") if out.get(name) is not None).float()


@torch.no_grad()
def generate(model, inputs: dict, **options):
    """(new tokens, logits of each step)."""
    torch.manual_seed(0)
    asked = {"max_new_tokens": NEW, "do_sample": False, "suppress_tokens": list(every_model.SPECIAL)}
    out = model.generate(**inputs, **asked, output_logits=True, return_dict_in_generate=True, **options)
    steps = torch.stack(out.logits).float()
    return out.sequences[:, -len(steps) :], steps


class Truth:
    """The results of eager for one model and padding, and the tolerance for rounding in another computation.

    tolerance: 32 times the effect of the last bit of every weight, at least 64 units of rounding at the scale of the logits, and
    never as large as the effect of a wrong mask.
    """

    def __init__(self, model, inputs: dict, generates: bool):
        self.inputs = inputs
        self.logits = forward(model, inputs)
        self.live = inputs.get("attention_mask")
        if "decoder_input_ids" in inputs or self.live is None or self.live.shape != self.logits.shape[:2]:
            self.live = torch.ones(self.logits.shape[:2], dtype=torch.long, device=self.logits.device)
        live = self.logits[self.live.bool()]
        if not live.isfinite().all():
            raise ArithmeticError("eager's own logits are not finite")
        self.scale = live.abs().max().item()
        with _last_bits_changed(model):
            noise = (forward(model, inputs) - self.logits)[self.live.bool()].abs().max().item()
        self.tolerance = min(max(32 * noise, 64 * EPS * self.scale), 0.01 * self.scale)
        self.tokens, self.steps = generate(model, inputs) if generates else (None, None)

    def check_forward(self, logits: torch.Tensor, expected: torch.Tensor | None = None) -> None:
        error = (logits - (self.logits if expected is None else expected))[self.live.bool()].abs().max().item()
        if not error <= self.tolerance:
            raise Disagreement(f"logits differ {self._by(error)}")

    def _by(self, error: float) -> str:
        return f"by {error:.2g} (scale {self.scale:.2g}, rounding allows {self.tolerance:.1g})"

    def check_tokens(self, found) -> None:
        tokens, steps = found
        if tokens.shape != self.tokens.shape:
            raise Disagreement(f"tokens have shape {tuple(tokens.shape)}, eager's {tuple(self.tokens.shape)}")
        for row in range(len(tokens)):
            for step in range(tokens.shape[1]):
                a, b = self.steps[step, row], steps[step, row]
                error = (a - b).abs().max().item()
                if not error <= self.tolerance:
                    raise Disagreement(f"logits of new token {step}, row {row}, differ {self._by(error)}")
                if tokens[row, step] != self.tokens[row, step]:
                    best = a.clone()
                    best[list(every_model.SPECIAL)] = float("-inf")
                    first, second = best.topk(2).values.tolist()
                    if first - second > 2 * self.tolerance:
                        raise Disagreement(f"new token {step}, row {row}, is another")
                    break  # a tie: the texts differ from here on


@contextlib.contextmanager
def _last_bits_changed(model):
    generator = torch.Generator().manual_seed(2)
    kept = [(p, p.detach().clone()) for p in model.parameters()]
    try:
        for p, _ in kept:
            signs = torch.randint(0, 2, p.shape, generator=generator).to(p.device) * 2 - 1
            p.data.mul_(1 + EPS * signs)
        yield
    finally:
        for p, before in kept:
            p.data.copy_(before)


def is_ours(error: BaseException) -> bool:
    """Whether the package raised this on purpose: the last frame is one of its `raise` statements."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if str(error).startswith(INTERNAL):
        return False
    return frame.filename.startswith(PACKAGE) and _lines(frame.filename)[frame.lineno - 1].strip().startswith("raise")


@cache
def _lines(file: str) -> list[str]:
    return Path(file).read_text(encoding="utf-8").splitlines()


def describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    known = [f for f in frames if "/transformers/models/" in f.filename or f.filename.startswith(PACKAGE)]
    where = (known or frames)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} [{Path(where.filename).name}:{where.lineno}]"


def attempt(run) -> Cell:
    """The cell of run(), which raises Disagreement if numbers differ, and returns further fields of the cell."""
    refuse.warn_once.cache_clear()
    counted, facts = {}, {}
    with warnings.catch_warnings(record=True, action="always") as heard:
        try:
            with hf_fastattn.count_calls() as counted:
                facts = run() or {}
            cell = Cell(EQUAL)
        except Disagreement as error:
            cell = Cell(WRONG, said=[str(error)])
        except Exception as error:
            cell = Cell(REFUSED, said=[" ".join(str(error).split())]) if is_ours(error) else Cell(WRONG, said=[describe(error)])
    kinds = {name.rpartition(".")[2] for name, count in counted.items() if count}
    cell.path = "+".join(sorted("dense" if kind == "dense" else "kernel" for kind in kinds)) if kinds else "stock"
    if kinds >= {"prefill", "decode"}:
        cell.path = cell.path.replace("kernel+kernel", "kernel")
    ours = dict.fromkeys(" ".join(str(w.message).split()) for w in heard if _is_our_warning(w))
    cell.said += [sentence for sentence in ours if sentence not in cell.said]
    cell.graph = facts.get("graph", "")
    return cell


def _is_our_warning(warning) -> bool:
    text = str(warning.message)
    ours = (
        "attn_implementation=",
        ".generate() ",
        " are not replaced, as ",
        "The caches of hf_fastattn keep",
    )  # at the line of the user
    return warning.filename.startswith(PACKAGE) or any(words in text for words in ours)


def must_run_ours(cell: Cell) -> Cell:
    """An accepted backend must have been called, and the dense path must have caused a warning."""
    if cell.result == EQUAL and cell.path == "stock":
        return Cell(WRONG, cell.path, ["accepted, and never called: the backend is silently ignored", *cell.said], cell.graph)
    if cell.result == EQUAL and "dense" in cell.path and not cell.said:
        return Cell(WRONG, cell.path, ["the dense path ran without a word"], cell.graph)
    return cell


# ---- the cells ----


def cells_of(model, truths: dict, generates: bool) -> dict[str, Cell]:
    """All cells of one model, by "<way>.<padding>"."""
    cells: dict[str, Cell] = {}
    hf.set_attention(model, "lean")
    for padding, truth in truths.items():
        cell = must_run_ours(attempt(lambda truth=truth: truth.check_forward(forward(model, truth.inputs))))
        cells[f"forward.{padding}"] = judge_like_sdpa(cell, model, truth)
    if not generates:
        hf.set_attention(model, "eager")
        return cells
    for padding, truth in truths.items():
        cells[f"lean.{padding}"] = must_run_ours(attempt(lambda truth=truth: truth.check_tokens(generate(model, truth.inputs))))
    hf.set_attention(model, _default(model))
    for padding, truth in truths.items():
        cell = attempt(lambda truth=truth: truth.check_tokens(_over(hf_fastattn.PreallocatedCache, model, truth)))
        cells[f"preallocated.{padding}"] = judge_like_stock(cell, model, truth)
    hf.set_attention(model, "eager")
    cells |= _patched(model, truths, "patch")
    cells |= _patched(model, truths, "streaming", backend="streaming", window=WIDE)
    return cells


def judge_like_sdpa(cell: Cell, model, truth) -> Cell:
    """The expected result is sdpa's if eager misreads a mask that the model made dense, or sees later tokens without a mask."""
    if cell.result != WRONG:
        return cell
    if cell.path != "dense" and (_is_causal(model, "eager", truth) or not _is_causal(model, "sdpa", truth)):
        return cell
    hf.set_attention(model, "lean")
    found = attempt(lambda: _with_stock(model, "sdpa", truth, forward(model, truth.inputs)))
    if found.result != EQUAL:
        return cell
    return Cell(EQUAL, cell.path, [*cell.said[1:], "equal to sdpa; eager itself is wrong in this model"])


def _is_causal(model, name: str, truth) -> bool:
    """Whether later tokens do not change the earlier outputs of the model."""
    ids = truth.inputs.get("input_ids")
    if ids is None:
        return False
    last = ids[:, -1:]
    other = {**truth.inputs, "input_ids": torch.cat([ids[:, :-1], torch.where(last == 5, 6, 5)], 1)}
    before = model.config._attn_implementation
    try:
        hf.set_attention(model, name)
        changed = (forward(model, truth.inputs) - forward(model, other))[:, :-1][truth.live[:, :-1].bool()]
    except ValueError:  # no such attention in this model
        return False
    finally:
        hf.set_attention(model, before)
    return changed.abs().max().item() <= truth.tolerance


def judge_like_stock(cell: Cell, model, truth) -> Cell:
    """Some models cannot use any cache that the caller passes; then the cell is absent."""
    if cell.result != WRONG:
        return cell
    before = model.config._attn_implementation
    if before not in ("eager", "sdpa"):
        hf.set_attention(model, "eager")
    stock = attempt(lambda: truth.check_tokens(generate(model, truth.inputs, **{hf.CACHE: DynamicCache(config=model.config)})))
    hf.set_attention(model, before)
    if stock.result == EQUAL:
        return cell
    return Cell(ABSENT, cell.path, ["Transformers' own DynamicCache fails too if it is passed: " + stock.said[0]])


# ---- remedies: a message only recommends what works ----


def remedies(model, truths: dict, cells: dict[str, Cell]) -> dict[str, Cell]:
    """For each remedy that a refusal names, whether it works."""
    said = " ".join(sentence for cell in cells.values() if cell.result == REFUSED for sentence in cell.said)
    first, truth = next(iter(truths.items()))
    tried: dict[str, Cell] = {}
    for name in dict.fromkeys(re.findall(r'"(eager|sdpa)"', said)):
        tried[f"remedy.{name}"] = attempt(lambda name=name: _with_stock(model, name, truth))
    if "without attn_implementation" in said:
        tried["remedy.without_attn_implementation"] = _by_default(model, truth)
    if "cache=None, graph=False" in said and truth.tokens is not None:
        tried |= _patched(model, {first: truth}, "remedy.patch_without_cache", cache=None, graph=False)
    for window in dict.fromkeys(re.findall(r"window of at most (-?\d+)", said)):
        tried["remedy.narrower_window"] = attempt(lambda window=window: _streams(model, truth, window=int(window)))
    if "clamp_positions=True" in said:
        run = lambda: truth.check_tokens(_streams(model, truth, window=WIDE, clamp_positions=True))  # noqa: E731
        tried["remedy.clamp_positions"] = attempt(run)
    for name, cell in cells.items():  # advice that was already followed
        if cell.result == REFUSED and name.startswith(("streaming", "rolling")) and 'patch(model, "streaming"' in cell.said[0]:
            tried[f"remedy.{name}"] = cell
    for name, cell in tried.items():
        if cell.result == REFUSED and not name.startswith(("remedy.patch_without_cache", "remedy.narrower")):  # said of all
            tried[name] = Cell(WRONG, cell.path, ["a remedy that a sentence recommends is refused: " + cell.said[0]])
    return tried


def _by_default(model, truth) -> Cell:
    """Transformers' own choice; if it differs from eager, the error is not in this package."""
    name = _default(model)
    cell = attempt(lambda: _with_stock(model, name, truth))
    if cell.result == WRONG and name != "eager" and cell.said[0].startswith("logits"):
        return Cell(ABSENT, cell.path, [f"Transformers' own choice, {name}, is not equal either: {cell.said[0]}"])
    return cell


def _default(model) -> str:
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def _with_stock(model, name: str, truth, expected: torch.Tensor | None = None) -> None:
    before = model.config._attn_implementation
    try:
        hf.set_attention(model, name)
        truth.check_forward(forward(model, truth.inputs), expected)
    finally:
        hf.set_attention(model, before)


def _streams(model, truth, **options):
    with hf_fastattn.patch(model, "streaming", **options):
        found = generate(model, truth.inputs)
    return None if options["window"] < WIDE else found


def _over(cache: type, model, truth):
    return generate(model, truth.inputs, **{hf.CACHE: cache(model)})


def _patched(model, truths: dict, way: str, **options) -> dict[str, Cell]:
    before = model.config._attn_implementation
    cells, patches = {}, []
    entering = attempt(lambda: patches.append(hf_fastattn.patch(model, **options)))
    if not patches:
        cells[way] = entering
    else:
        patch = patches[0]
        for padding, truth in [*truths.items(), *([("again", next(iter(truths.values())))] if way == "patch" else [])]:
            cell = attempt(lambda truth=truth: _replayed(model, patch, truth))
            cells[f"{way}.{padding}"] = cell if "replayed" in cell.graph else must_run_ours(cell)
        if way == "streaming":
            first, truth = next(iter(truths.items()))
            cell = attempt(lambda: truth.check_tokens(_over(hf_fastattn.RollingCache, model, truth)))
            cells[f"rolling.{first}"] = judge_like_stock(cell, model, truth)
        patch.undo()
    if model.config._attn_implementation != before:
        hf.set_attention(model, before)
    return cells


def _replayed(model, patch, truth: Truth) -> dict:
    before = patch.captures, patch.replays, patch.uncaptured
    truth.check_tokens(generate(model, truth.inputs))
    captures, replays, uncaptured = patch.captures - before[0], patch.replays - before[1], patch.uncaptured - before[2]
    if not patch.graph:
        return {"graph": "off"}
    if not replays and not patch.reasons:
        raise Disagreement("no step was captured, and no reason was given")
    said = f"{captures} captured, {replays} replayed, {uncaptured} uncaptured"
    return {"graph": said + (f": {patch.reasons[-1]}" if patch.reasons and not replays else "")}


# ---- one model ----


def fused(model) -> dict[str, int]:
    """The numbers of modules that patch() would fuse on a GPU, besides linear layers."""
    with mock.patch.object(subclass, "INTERPRETED", True):
        found, mixtures, routers = fuse.find(model), experts.find(model), experts.find_routers(model)
    kinds = {"norms": found.norms, "rotations": found.layers, "MLPs": found.mlps, "mixtures": mixtures, "routers": routers}
    return {kind: len(modules) for kind, modules in kinds.items() if modules}


def truths_of(model, entry: every_model.Model, device, row: dict) -> tuple[dict[str, Truth], bool]:
    """The results of eager for each kind of input; failures are written to `row`. Moves the model."""
    generates = entry.kind in ("causal", "vision", "multimodal") and not model.config.is_encoder_decoder and model.can_generate()
    inputs: dict[str, dict] = {}
    wanted = [(padding, padding, model_inputs.text) for padding in PADDINGS]
    wanted += [(f"picture_{padding}", padding, model_inputs.with_picture) for padding in PADDINGS[:2]]
    for name, padding, make in wanted:
        try:
            made = make(model, padding)
        except Exception as error:
            row["eager_cannot"][name] = describe(error)
            continue
        if made is not None:
            inputs[name] = _to(device, made)
    model.to(device)
    truths: dict[str, Truth] = {}
    for name in inputs:
        try:
            truths[name] = Truth(model, inputs[name], generates)
        except Exception as error:
            row["eager_cannot"][name] = describe(error)
    if not truths and generates:  # only forward()
        for padding in PADDINGS:
            with contextlib.suppress(Exception):
                truths[padding] = Truth(model, inputs[padding], False)
        generates = False
    if not truths:
        model.cpu()
        for other in model_inputs.others(model):
            with contextlib.suppress(Exception):
                forward(model, other)
                truths["other_inputs"] = Truth(model.to(device), _to(device, other), False)
                return truths, False
    return truths, generates


def _to(device, inputs: dict) -> dict:
    return {name: value.to(device) for name, value in inputs.items()}


def run_model(entry: every_model.Model, variant: str = "", device: str = "cpu", seed: int = 0) -> dict:
    """All results of one model, for JSON."""
    started = time.monotonic()
    row = {"name": entry.name + variant, "model_type": entry.model_type, "kind": entry.kind, "cells": {}}
    try:
        model = every_model.build(entry, variant)
        draw_weights(model, seed)
        model.set_attn_implementation("lean")
        row["unset"] = bool(hf.unset_parts(model))
        hf.set_attention(model, "eager")
        row["attention_classes"] = sorted({type(m).__name__ for m in model.modules() if "Attention" in type(m).__name__})
        row["eager_cannot"] = {}
        truths, generates = truths_of(model, entry, device, row)
        if not truths:
            row["unbuilt"] = "eager cannot run it: " + next(iter(row["eager_cannot"].values()))
            return row
    except Exception as error:
        row["unbuilt"] = describe(error)
        return row
    finally:
        row["seconds"] = round(time.monotonic() - started, 1)
    row["tolerance"] = {padding: [truth.tolerance, truth.scale] for padding, truth in truths.items()}
    row["fused"] = fused(model)
    cells = cells_of(model, truths, generates)
    cells |= remedies(model, truths, cells)
    row["cells"] = {name: vars(cell) for name, cell in cells.items()}
    row["seconds"] = round(time.monotonic() - started, 1)
    return row


def _work(task) -> dict:
    entry, variant, device = task

    def late(*_):
        raise TimeoutError(f"not done after {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        row = run_model(entry, variant, device)
        return _not_by_chance(row, entry, variant, device) if any(map(_is_number, row["cells"].values())) else row
    except Exception as error:
        row = {"name": entry.name + variant, "kind": entry.kind, "model_type": entry.model_type, "cells": {}}
        return row | {"unbuilt": describe(error)}
    finally:
        signal.alarm(0)


def _is_number(cell: dict) -> bool:
    return cell["result"] == WRONG and cell["said"][0].startswith(("logits", "new token"))


def _not_by_chance(row: dict, entry, variant: str, device: str) -> dict:
    """The row with other weights: rounding may change the choice of a router or a top-k, but not for both weights."""
    again = run_model(entry, variant, device, seed=1)["cells"]
    for name, cell in row["cells"].items():
        if _is_number(cell) and again.get(name, cell)["result"] == EQUAL:
            cell |= {"result": EQUAL, "said": ["equal with other weights, where rounding does not choose: " + cell["said"][0]]}
    return row


def _begin(device: str) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if device == "cpu":
        graphs.new_graph, graphs.why_no_graph = fake_graph.RecordedGraph, lambda device: None
        unpadded.TILE = 1  # so that short prompts are read without their padding
    else:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def line(row: dict) -> str:
    if "unbuilt" in row:
        return f"{row['name']}: unbuilt: {row['unbuilt']}"
    counts = Counter(cell["result"] for cell in row["cells"].values())
    text = f"{row['name']}: {', '.join(f'{n} {result}' for result, n in counts.items())} ({row['seconds']} s)"
    for name, cell in row["cells"].items():
        if cell["result"] == WRONG:
            text += f"\n    WRONG {name} [{cell['path']}]: {' | '.join(cell['said'])}"
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="classes or model types; all of them where none is given")
    parser.add_argument("--shapes", action="store_true", help="one model of each shape of attention")
    parser.add_argument("--out", type=Path, help="JSON; models that it holds already are not run again")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    tasks = []
    for entry in every_model.find():
        if args.names and not {entry.name, entry.model_type} & set(args.names):
            continue
        tasks += [(entry, variant, args.device) for variant in every_model.variants(entry)]
    if args.shapes:
        tasks = [task for task in tasks if task[0].name + task[1] in SHAPES]
    rows = json.loads(args.out.read_text())["models"] if args.out and args.out.exists() else []
    done = {row["name"] for row in rows}
    tasks = [task for task in tasks if task[0].name + task[1] not in done]
    with multiprocessing.get_context("fork").Pool(args.processes, _begin, (args.device,)) as pool:
        for row in pool.imap_unordered(_work, tasks):
            rows.append(row)
            print(line(row), flush=True)
            if args.out:
                document = {"transformers": transformers.__version__, "models": sorted(rows, key=lambda row: row["name"])}
                args.out.write_text(json.dumps(document, indent=1))
    wrong = [row["name"] for row in rows if any(cell["result"] == WRONG for cell in row["cells"].values())]
    unbuilt = [row["name"] for row in rows if "unbuilt" in row]
    print(f"{len(rows)} models, {len(unbuilt)} unbuilt, {len(wrong)} with something wrong: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
