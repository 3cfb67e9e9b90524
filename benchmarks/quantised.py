"""A decode step of one model with weights in 16 bits and quantised by other packages, under patch() and in stock generate().

    python -m benchmarks.quantised                                          # an 8B model, every scheme that is installed
    python -m benchmarks.quantised --layers 8 --only bf16,bnb-nf4,ao-int4   # a quarter of its layers and of its vocabulary

The weights are random, the same for each scheme, and quantised by Transformers' from_pretrained(). "uncaptured" is patch() with
graph=False. The floor is the bytes of the stored weights that a step reads and of live K and V, divided by 4.5 TB/s.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import BitsAndBytesConfig, TorchAoConfig

from hf_fastattn import hf
from hf_fastattn.patches import patch

from . import families
from .grid import pairs, row_lengths
from .models import SHAPES, Subject, dtype_for
from .results import check_names, command, conditions, find_device, listed, need_gpu, progress
from .runs import make_prompt, run, twin

CASES = ["1x512", "8x512"]


def _bnb(**options: Any) -> Callable[[], Any]:
    return lambda: BitsAndBytesConfig(**options)


def _ao(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: TorchAoConfig(getattr(importlib.import_module("torchao.quantization"), name)(**options))


_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}

# name: (package, quantization_config)
SCHEMES: dict[str, tuple[str, Callable[[], Any]]] = {
    "bf16": ("torch", lambda: None),
    "bnb-nf4": ("bitsandbytes", _bnb(**_NF4)),
    "bnb-nf4-double": ("bitsandbytes", _bnb(**_NF4, bnb_4bit_use_double_quant=True)),
    "bnb-int8": ("bitsandbytes", _bnb(load_in_8bit=True, llm_int8_threshold=0.0)),
    "bnb-int8-outliers": ("bitsandbytes", _bnb(load_in_8bit=True)),
    "ao-int4": ("torchao", _ao("Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d")),
    "ao-int8": ("torchao", _ao("Int8WeightOnlyConfig")),
    "ao-fp8": ("torchao", _ao("Float8WeightOnlyConfig")),
    "ao-int8-dynamic": ("torchao", _ao("Int8DynamicActivationInt8WeightConfig")),
    "ao-fp8-dynamic": ("torchao", _ao("Float8DynamicActivationFloat8WeightConfig")),
}
INSTALLED = [name for name, (package, _) in SCHEMES.items() if importlib.util.find_spec(package)]


def quantised(source: hf.PreTrainedModel, scheme: str, device: torch.device) -> hf.PreTrainedModel:
    """A model with the weights of `source`, quantised on the device. Raises ValueError if no layer can be."""
    options = {"config": source.config, "dtype": source.dtype, "device_map": {"": str(device)}}
    config = SCHEMES[scheme][1]()
    model = type(source).from_pretrained(None, state_dict=source.state_dict(), quantization_config=config, **options)
    if config is not None and not any(w.kind for w in hf.weights(model)):
        raise ValueError(f"{scheme} has left all layers as they were: it does not support their shapes.")
    return model.eval()


def measure(subject: Subject, scheme: str, case: str, args: argparse.Namespace, device: torch.device) -> dict:
    """One row: that of families.measure(), and milliseconds of a token without graphs."""
    row = families.measure(subject, case, args, device, profiled=False)
    prompt = make_prompt(row["lengths"], subject.text_config.vocab_size, device)
    model = twin(subject.model, subject.model.config._attn_implementation)
    with patch(model, "lean", graph=False):
        run(model, prompt, args.stock_tokens)
        row["uncaptured_ms"] = run(model, prompt, args.stock_tokens).ms
    weights = hf.weights(subject.model)
    kinds = sorted({w.kind for w in weights if w.kind})
    return row | {"scheme": scheme, "kinds": kinds, "weight_bytes": sum(w.bytes for w in weights)}


def line(row: dict) -> str:
    """The line of the log for a row."""
    size = f"{row['weight_bytes'] / 1e9:.2f} GB"
    return f"{row['scheme']} ({size}): {families.line(row)}; uncaptured {row['uncaptured_ms']:.2f}"


def scaled(config: dict, layers: int | None) -> dict:
    """The configuration with so many layers, and a vocabulary that is as much smaller."""
    if layers is None:
        return config
    return config | {"num_hidden_layers": layers, "vocab_size": config["vocab_size"] * layers // config["num_hidden_layers"]}


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks.quantised") -> int:
    """Measure the chosen schemes. Returns 0, or 1 if a row failed or there was no time for it."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8b", choices=SHAPES, help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="number of layers, with a vocabulary in proportion; default: the shape's")
    parser.add_argument("--only", type=listed, default=INSTALLED, help=f"of {', '.join(SCHEMES)}; default: those installed")
    families.add_step_options(parser, ",".join(CASES), (256, 1024), tokens=24)
    args = parser.parse_args(argv)
    args.unchecked, cases = False, args.cases or CASES
    check_names(parser, args.only, SCHEMES, "schemes")
    need_gpu(parser, args, [args.shape], pairs(cases, args.padded))
    device = find_device(args.device)
    longest = max(max(row_lengths(case, args.padded)) for case in cases) + args.tokens + 64
    model_type, config = SHAPES[args.shape]
    config = scaled(config, args.layers) | {"max_position_embeddings": max(config["max_position_embeddings"], longest)}
    head = {"conditions": conditions(device, families.METHOD) | versions(), "shape": args.shape, "config": config}
    head["layers"] = config["num_hidden_layers"]
    results = families.begin(parser, args, "quantised", command(prog, argv), device, head)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # a warning for each 8-bit product in bf16
    torch.manual_seed(0)
    source = hf.random_model(model_type, dtype_for(device), device, **config)
    known = {(row["scheme"], row["case"]) for row in results.data["rows"]}
    for scheme in progress(args.only, "quantised", "scheme"):
        families.measure_cases(
            results,
            scheme,
            [case for case in cases if (scheme, case) not in known],
            lambda scheme=scheme: Subject(args.shape, quantised(source, scheme, device), "random", config),
            lambda subject, case, scheme=scheme: measure(subject, scheme, case, args, device),
            line,
            device,
            reserve=2,
        )
    return families.end(results)


def versions() -> dict[str, str]:
    """The versions of the packages of quantised weights that are installed."""
    names = sorted({package for package, _ in SCHEMES.values()} - {"torch"})
    return {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)}


if __name__ == "__main__":
    sys.exit(main())
