"""A backend of your own in one file: an attention function, one call to register it, and a check of its result.

python examples/third_party_backend.py [MODEL]
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import hf_fastattn
from hf_fastattn.kernels import reference
from hf_fastattn.kernels.spec import KV


def attend(q, kv, spec, spans=None, *, sink_logits=None, **options):
    """q (batch, num_heads, q_len, head_dim), K and V (batch, num_kv_heads, kv_len, head_dim) -> q's shape.

    spec has scale, causal, window and softcap; spans gives the keys that each row may attend to. Here the reference
    runs one query head at a time, in place of your kernel.
    """
    k, v = kv.plain()
    group = q.shape[1] // k.shape[1]
    heads = [
        reference.attention(
            q[:, h : h + 1],
            KV(k[:, h // group : h // group + 1], v[:, h // group : h // group + 1]),
            spec,
            spans,
            sink_logits=None if sink_logits is None else sink_logits[h : h + 1],
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
mask[1, :5] = 0  # left padding: the mask function is registered too

expected = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
model.set_attn_implementation("by_head")
with hf_fastattn.count_calls() as calls:
    found = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
print("the tokens of sdpa:", found.tolist() == expected.tolist(), dict(calls))
