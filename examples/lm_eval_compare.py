"""Show that nothing else changes: the same examples with sdpa and with lean, compared pair by pair.

python examples/lm_eval_compare.py [MODEL [EXAMPLES]]

The tasks here need no network. Any of lm-eval's will do: tasks=["hellaswag", "gsm8k"].
"""

import sys

import hf_fastattn

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
limit = int(sys.argv[2]) if len(sys.argv) > 2 else 10

found = hf_fastattn.evaluate(
    name,
    backends=["sdpa", "eager", "lean"],  # the first is what the others are compared with
    tasks=["fastattn_choice", "fastattn_needle"],
    limit=limit,
    decode_tokens=32,  # and so many tokens of a text, given one by one through the cache
)
print(found)
raise SystemExit(0 if found.passed else 1)
