"""Load a model with an attention backend by its name, generate, and print what ran.

python examples/from_pretrained.py [MODEL]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_fastattn  # adds the names "lean", "split_kv", "fa2", ... to Transformers

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="lean", device_map="auto").eval()
inputs = tokenizer("Attention is", return_tensors="pt").to(model.device)

with hf_fastattn.count_calls() as calls:
    tokens = model.generate(**inputs, max_new_tokens=20, do_sample=False)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
print(dict(calls))

model.set_attn_implementation("sdpa")  # and back
same = model.generate(**inputs, max_new_tokens=20, do_sample=False)
print("the tokens of sdpa:", same.tolist() == tokens.tolist())
