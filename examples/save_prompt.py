"""Process a long prompt once, save its K and V to a file, and continue from the file later.

python examples/save_prompt.py [MODEL [FILE]]
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_fastattn

# CACHE is the name of a model's argument: "cache", and before Transformers 5.24 "past_key_values".
from hf_fastattn.hf import CACHE

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
file = Path(sys.argv[2] if len(sys.argv) > 2 else Path(tempfile.gettempdir()) / "prompt.safetensors")
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="lean", device_map="auto").eval()
manual = tokenizer("Rules of the house. " + "Be brief, and be right. " * 40, return_tensors="pt").to(model.device)

cache = hf_fastattn.PreallocatedCache(model)
with torch.no_grad():
    model(**manual, **{CACHE: cache})
cache.save(file, model)
print(f"{cache.get_seq_length()} tokens in {file}, {file.stat().st_size / 1e6:.1f} MB")

for question in ("What is the first rule?", "And the second?"):
    prompt = torch.cat([manual["input_ids"], tokenizer(question, return_tensors="pt").input_ids.to(model.device)], 1)
    loaded = hf_fastattn.PreallocatedCache.load(file, model)  # one copy for each conversation
    tokens = model.generate(prompt, **{CACHE: loaded}, max_new_tokens=12, do_sample=False)
    again = model.generate(prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True)
    print(repr(answer), "- as from the whole prompt:", tokens.tolist() == again.tolist())
