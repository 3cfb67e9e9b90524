"""Give a text-generation pipeline the backend, a preallocated cache and, on a GPU, a decode graph; then undo all of it.

python examples/patch_pipeline.py [MODEL]
"""

import sys

from transformers import pipeline

import hf_fastattn

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
pipe = pipeline("text-generation", model=name)
prompts = ["Attention is", "The first and the last word of this sentence"]

with hf_fastattn.patch(pipe, "lean") as patched:
    for (answer,) in pipe(prompts, max_new_tokens=20, do_sample=False, batch_size=1):
        print(answer["generated_text"])
    print(patched)  # what was changed, and how the decode steps ran

print("now:", pipe.model.config._attn_implementation)
