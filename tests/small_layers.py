"""Tiny models of each family, the launches of their code, and the guide's table of the norms and rotations that patch() fuses.

`python tests/small_layers.py` prints the table.
"""

from collections import Counter
from itertools import product
from pathlib import Path

import torch
from models import tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_fastattn import hf
from hf_fastattn.kernels.host import launch

TABLE = Path(__file__).parent.parent / "docs" / "guides" / "patch.md"
MHA, HEAD = {"num_key_value_heads": 4}, {"head_dim": 16}
FAMILIES: dict[str, dict] = {
    **{name: {} for name in ("llama", "qwen2", "smollm3", "granite", "olmo2", "gpt_neox")},
    **dict.fromkeys(("qwen3", "glm4", "ernie4_5", "gemma2", "gemma3_text", "cohere2"), HEAD),
    "phi3": {"partial_rotary_factor": 0.5},
    "gpt_oss": {**HEAD, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi": MHA,
    "opt": {**MHA, "ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0},
}
ONLY_IN_TABLE: dict[str, dict] = {
    **{name: {} for name in ("mistral", "mixtral", "olmo3", "cohere", "starcoder2", "stablelm", "nemotron", "nanochat")},
    **dict.fromkeys(("qwen3_moe", "helium"), HEAD),
    "gemma4_text": {**HEAD, "global_head_dim": 32, "vocab_size_per_layer_input": 128},
}
NO_LAUNCH = {"view", "_unsafe_view", "transpose", "unsqueeze", "slice", "expand", "t", "alias", "detach", "select", "split"}
NO_LAUNCH |= {"empty", "empty_like", "split_with_sizes", "permute", "squeeze", "new_empty", "as_strided", "unbind"}
NO_LAUNCH |= {"fill_", "ones_like", "is_nonzero"}  # tests fill new tensors with NaN


def small_model(family: str, device: torch.device | str = "cpu") -> PreTrainedModel:
    return tiny(family, device=device, **{**FAMILIES, **ONLY_IN_TABLE}[family])


class Launches(TorchDispatchMode):
    """Counts operations of torch that launch a kernel, and launches of this package."""

    def __enter__(self):
        self.count, self.inside, self.call = Counter(), False, launch.Launch.__call__

        def counted(start, *tensors):
            self.count[start.kernel.fn.__name__] += 1
            self.inside = True  # the interpreter's own operations
            try:
                self.call(start, *tensors)
            finally:
                self.inside = False

        launch.Launch.__call__ = counted
        return super().__enter__()

    def __exit__(self, *error):
        launch.Launch.__call__ = self.call
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not self.inside and name not in NO_LAUNCH:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def table() -> str:
    """Families by the norms and the rotation that patch() fuses."""
    rows: dict[tuple[str, str], list[str]] = {}
    for family in sorted({**FAMILIES, **ONLY_IN_TABLE}):
        model = small_model(family)
        norms = {norm_in_words(module): None for module in model.modules() if "norm" in type(module).__name__.lower()}
        rotations = {rotation_in_words(module): None for module in model.modules() if hf.is_attention(module)}
        rows.setdefault(("; ".join(sorted(norms)), "; ".join(sorted(rotations))), []).append(f"`{family}`")
    lines = ["| model_type | norms | rotation |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {', '.join(families)} | {norms} | {turn} |" for (norms, turn), families in rows.items())])


def norm_in_words(module: torch.nn.Module) -> str:
    norm = hf.norm_of(module)
    if norm is None:
        return "not replaced"
    weight = {"": "weight", "fp32": "1 + weight", "rounded": "1 + weight in 16 bits"}[norm.one]
    words = "LayerNorm" if norm.centred else "RMSNorm"
    if not any(norm.has):
        return f"{words} without weight"
    return words + (", " if norm.late else ", rounded, ") + f"times {weight}" + ", plus bias" * norm.has[1]


def rotation_in_words(module: torch.nn.Module) -> str:
    found = {
        hf.rotation_of(functions, 64, width, torch.float16, dtype)
        for functions in hf.rotations_in(type(module).forward).values()
        for width, dtype in product((64, 32), (torch.float16, torch.float32))
    } - {None}
    if not found:
        forward, _ = hf.without_renaming(type(module).forward)
        return "not replaced" if "position_embeddings" in forward.__code__.co_varnames else "none"
    pairs = {"2i with 2i + 1" if rotation.interleaved else "i with i + D/2" for rotation in found}
    return " or ".join(sorted(pairs)) + (", in float32" if all(rotation.late for rotation in found) else "")


if __name__ == "__main__":
    print(table())
