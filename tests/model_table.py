"""Writes the table of models in docs/ from the results of `matrix.py` for each version of Transformers.

    python tests/model_table.py build/matrix-newest.json build/matrix-oldest.json

writes docs/models-<version>.json for each, with the paddings of a way combined, and docs/models.md from all of them.
"""

import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
COLUMNS = {"attention": "lean", "cache": "preallocated", "patch()": "patch", "graph": "patch", "streaming": "streaming"}
INTRODUCTION = """\
<!-- Written by `make matrix`; do not edit. -->

# Models

**Yes**: `hf_fastattn.patch(model)`, with decode steps as graphs. **Partly**: the attention kernels run, but `patch()` refuses the
model, or its steps run without a graph. **No**: load the model without `attn_implementation`.

{popular}

`hf-fastattn explain MODEL` says the same of a checkpoint, from its configuration, unless it has recurrent states or latent
attention. Another model is found by its class (`architectures` in `config.json`) in the table. Bloom, MPT and Falcon, whose
attention is not Transformers' interface, run under `patch()` ([ALiBi](guides/patch.md#alibi)).

## All models

Each model class of Transformers that uses the attention interface is compared with
`eager`, as a tiny random model on the CPU in fp32: without padding, with padding on the left, with holes and, if the model takes
one, with an image. Prompts are longer than windows. `make matrix` fails if a result is WRONG.

- attention: what `lean` runs. kernel: a kernel of this package; dense: torch's masked attention, with a warning.
- cache: `PreallocatedCache`. patch(): `hf_fastattn.patch(model)`. graph: whether its decode steps are captured. fused: the
  modules that it fuses on a GPU, besides linear layers (mixture: of experts). streaming: `patch(model, "streaming", window=256)`.
- [n]: see message n [below](#messages), a reason or a warning.

"""
# What people look for, and its class.
POPULAR = {
    "Llama 2, 3": "LlamaForCausalLM",
    "Llama 4": "Llama4ForCausalLM",
    "Mistral 7B, Nemo": "MistralForCausalLM",
    "Mixtral": "MixtralForCausalLM",
    "Mistral Small 3": "Mistral3ForConditionalGeneration",
    "Qwen 2, 2.5": "Qwen2ForCausalLM",
    "Qwen 3": "Qwen3ForCausalLM",
    "Qwen 3, mixtures (30B-A3B)": "Qwen3MoeForCausalLM",
    "Qwen 3 Next": "Qwen3NextForCausalLM",
    "Qwen 3.5, 3.6": "Qwen3_5ForConditionalGeneration",
    "Qwen 2.5 VL": "Qwen2_5_VLForConditionalGeneration",
    "Gemma 2": "Gemma2ForCausalLM",
    "Gemma 3": "Gemma3ForConditionalGeneration",
    "Gemma 4": "Gemma4ForConditionalGeneration",
    "Phi 3, 4": "Phi3ForCausalLM",
    "DeepSeek V3, R1": "DeepseekV3ForCausalLM",
    "GPT-OSS": "GptOssForCausalLM",
    "GLM 4.5, 4.6": "Glm4MoeForCausalLM",
    "Nemotron-H": "NemotronHForCausalLM",
    "BERT": "BertForMaskedLM",
    "T5": "T5ForConditionalGeneration",
}
ORDER = ("WRONG", "refused", "absent", "equal")
FIGURES = re.compile(r" by [-.\de]+ \(scale .*?\)")  # of a difference from eager; they depend on the machine
LINE = re.compile(r" \[\S+:\d+\]$")  # of a file, at the end of a message; it changes with the file


def put_together(row: dict) -> dict:
    """One model: its ways, each with the paddings that are equal, refused with a message, or wrong."""
    out = {key: row[key] for key in ("name", "model_type", "kind", "unset", "unbuilt", "eager_cannot", "fused") if row.get(key)}
    if "unbuilt" in out:
        out["unbuilt"] = LINE.sub("", out["unbuilt"])
    if "eager_cannot" in out:
        out["eager_cannot"] = {padding: LINE.sub("", reason) for padding, reason in out["eager_cannot"].items()}
    ways: dict[str, dict] = {}
    for name, cell in row["cells"].items():
        way, _, padding = name.rpartition(".") if "." in name else (name, "", "all")
        found = ways.setdefault(way, {})
        said = cell["said"] if cell["result"] == "WRONG" else [FIGURES.sub("", sentence) for sentence in cell["said"]]
        if cell["result"] == "equal":
            found.setdefault("equal", []).append(padding)
            for sentence in said:
                found.setdefault("said", {}).setdefault(sentence, []).append(padding)
        else:
            found.setdefault(cell["result"], {}).setdefault(" | ".join(said), []).append(padding)
        if cell["path"] != "stock":
            found.setdefault("path", {}).setdefault(cell["path"], []).append(padding)
        if cell["graph"]:
            found.setdefault("graph", {}).setdefault(cell["graph"], []).append(padding)
    return {**out, "ways": ways}


class Notes:
    """Numbered messages, without the name of the model, so that equal messages have one number."""

    def __init__(self):
        self.numbers: dict[str, int] = {}

    def number(self, sentence: str, model: dict) -> int:
        stem = re.split(r"For[A-Z]|LMHead|Decoder$|Model$", model["name"])[0]
        general = re.sub(rf"\b{re.escape(stem)}\w*(?:\.generate\(\))?", "The model", sentence)
        general = re.sub(r"\b\d+\b", "…", re.sub(r"\([\d, ]+\)", "(…)", general))
        return self.numbers.setdefault(general, len(self.numbers) + 1)

    def marks(self, sentences: list[str], model: dict) -> str:
        """The numbers of these messages, each once."""
        return "".join(f"[{number}]" for number in dict.fromkeys(self.number(sentence, model) for sentence in sentences))


def _entry(model: dict, column: str, notes: Notes) -> str:
    """The cell of one column for one model."""
    way = model["ways"].get(COLUMNS[column]) or (model["ways"].get("forward") if column == "attention" else None)
    if way is None:
        return "-"
    result = next(result for result in ORDER if result in way)
    sentences = [sentence for each in ("WRONG", "refused", "absent") for sentence in way.get(each, {})]
    marks = notes.marks(sentences, model)
    if result == "WRONG":
        return "**WRONG** " + marks
    if "equal" not in way:
        return ("not tested " if result == "absent" else "refused ") + marks
    word = "yes"
    if column == "attention":
        paths = "+".join(way.get("path", {}))
        word = "dense" if "dense" in paths and "kernel" not in paths else "kernel, dense" if "dense" in paths else "kernel"
    if column == "graph":
        said = [text.partition(": ")[2] for text in way.get("graph", {}) if ": " in text]
        word = "yes" if any(", 0 replayed" not in text for text in way.get("graph", {})) else "no"
        marks = notes.marks(said, model)
    return f"{word} {marks}".strip()


def popular(models: dict[str, dict]) -> list[str]:
    """The table of the models that people look for: yes, partly or no, and why."""
    lines = ["| model | class | runs | why not |", "|---|---|---|---|"]
    for said, name in POPULAR.items():
        if name not in models:
            continue
        model, notes = models[name], Notes()
        runs, reason = "yes", ""
        attention, patched = (_entry(model, column, notes) for column in ("attention", "patch()"))
        if not attention.startswith("kernel"):
            runs = "no"
        elif patched == "-":
            runs, reason = "partly", "An encoder-decoder or no decoder: attention alone."
        elif not patched.startswith("yes") or _entry(model, "graph", notes).startswith("no"):
            runs = "partly"
        if runs != "yes":
            reason = reason or _escaped(max(notes.numbers, key=notes.numbers.get)).replace("The model", "it", 1)
        lines.append(f"| {said} | {name} | {runs} | {reason} |")
    return lines


def markdown(documents: list[dict]) -> str:
    """The table of all versions: one row per model, for the newest version; differences in older versions are added."""
    notes, newest = Notes(), documents[0]
    by_version = [{model["name"]: model for model in document["models"]} for document in documents]
    lines = INTRODUCTION.replace("{popular}", "\n".join(popular(by_version[0]))).splitlines()
    versions = " and ".join(document["transformers"] for document in documents)
    built = [model for model in newest["models"] if "unbuilt" not in model]
    lines += [f"Transformers {versions}; {len(built)} models on the newest.", ""]
    for document in documents:
        unset = ", ".join(model["name"] for model in document["models"] if model.get("unset"))
        if unset:
            said = (
                f"On {document['transformers']}, `set_attn_implementation()` changes nothing in a loaded {unset}, whatever the "
            )
            said += "name, without an error. The table has their results with `from_pretrained(attn_implementation=...)`."
            lines += [said, ""]
    columns = [*list(COLUMNS)[:4], "fused", "streaming"]
    lines += ["| model | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 1)]
    for name in sorted(set().union(*by_version)):
        models = [models.get(name) for models in by_version]
        if all(model is None or "unbuilt" in model for model in models):
            continue
        cells = []
        for column in columns:
            said = [None if m is None or "unbuilt" in m else _cell(m, column, notes) for m in models]
            first = said[0] if said[0] is not None else "-"
            of = zip(said, documents, strict=True)
            cells.append(" / ".join([first, *(f"{text} on {d['transformers']}" for text, d in of if text not in (None, first))]))
        missing = [d["transformers"] for m, d in zip(models, documents, strict=True) if m is None]
        lines.append(f"| {name}{' (not in ' + ', '.join(missing) + ')' if missing else ''} | " + " | ".join(cells) + " |")
    lines += ["", "## Messages", ""]
    lines += [f"{number}. {_escaped(sentence)}" for sentence, number in notes.numbers.items()]
    lines += ["", "## Not built", ""]
    for document, models in zip(documents, by_version, strict=True):
        lines += [f"- {document['transformers']}: {n}: {_escaped(m['unbuilt'])}" for n, m in models.items() if "unbuilt" in m]
    return "\n".join(lines) + "\n"


def _cell(model: dict, column: str, notes: Notes) -> str:
    if column == "fused":
        if not model["ways"].get("patch", {}).get("equal"):  # patch() refuses the model
            return "-"
        return ", ".join(f"{count} {what if count > 1 else what[:-1]}" for what, count in model.get("fused", {}).items()) or "-"
    return _entry(model, column, notes)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main(files: list[str]) -> None:
    DOCS.mkdir(exist_ok=True)
    documents = []
    for file in files:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        document = {"transformers": found["transformers"], "models": [put_together(row) for row in found["models"]]}
        documents.append(document)
        target = DOCS / f"models-{found['transformers']}.json"
        rows = ",\n".join(json.dumps(model, sort_keys=True) for model in document["models"])
        target.write_text(f'{{"transformers": "{found["transformers"]}", "models": [\n{rows}\n]}}\n', encoding="utf-8")
    (DOCS / "models.md").write_text(markdown(documents), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
