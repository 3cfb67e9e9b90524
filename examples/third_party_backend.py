"""A backend of your own in one file: an attention function, one call to register it, and a check that it is right.

python examples/third_party_backend.py [MODEL]
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import hf_fastattn
from hf_fastattn.kernels import reference


def attend(q, k, v, spans=None, **options):
    """q (batch, num_heads, q_len, head_dim), k and v (batch, num_kv_heads, kv_len, head_dim) -> q's shape.

    spans says what each row may attend to; options are scale, causal, window, softcap and sink_logits. Here the specification
    runs one query head at a time; your kernel goes in its place.
    """
    group = q.shape[1] // k.shape[1]
    sinks = options.pop("sink_logits", None)
    heads = [
        reference.attention(
            q[:, h : h + 1],
            k[:, h // group : h // group + 1],
            v[:, h // group : h // group + 1],
            spans,
            sink_logits=None if sinks is None else sinks[h : h + 1],
            **options,
        )
        for h in range(q.shape[1])
    ]
    return torch.cat(heads, 1)


hf_fastattn.register(hf_fastattn.Backend(name="by_head", summary="plain torch, one head at a time", prefill=attend))

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
ids = torch.randint(3, 256, (2, 12), generator=torch.Generator().manual_seed(0))
mask = torch.ones_like(ids)
mask[1, :5] = 0  # left padding: the mask function was registered too

expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
model.set_attn_implementation("by_head")
with hf_fastattn.count_calls() as calls:
    found = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
print("the tokens of sdpa:", found.tolist() == expected.tolist(), dict(calls))
