"""Compare the answers of sdpa and of lean to the same examples, pair by pair.

python examples/lm_eval_compare.py [MODEL [EXAMPLES]]

The tasks here need no network. Any task of lm-eval can be used: tasks=["hellaswag", "gsm8k"].
"""

import sys

import hf_fastattn

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
limit = int(sys.argv[2]) if len(sys.argv) > 2 else 10

found = hf_fastattn.evaluate(
    name,
    backends=["sdpa", "eager", "lean"],  # the others are compared with the first
    tasks=["fastattn_choice", "fastattn_needle"],
    limit=limit,
    decode_tokens=32,  # tokens of a text for decode perplexity, one by one through the cache
)
print(found)
raise SystemExit(0 if found.passed else 1)
