"""A tiny model and a byte tokenizer, as a folder for from_pretrained(), and small tasks of lm-eval; nothing is downloaded."""

from pathlib import Path

from models import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_fastattn.evaluation.harness import PACK

SPECIAL = ["<pad>", "<s>", "</s>"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, left-padded."""
    symbols = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **special, padding_side="left", chat_template=TEMPLATE)


def model(**own):
    """A tiny Llama with as many tokens as there are bytes."""
    return tiny("llama", **{"vocab_size": 320, "max_position_embeddings": 2048, "eos_token_id": 2, **own})


def save(folder: Path, **own) -> Path:
    model(**own).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tasks(folder: Path) -> Path:
    """The folder with a task of the package for each type of request, with few and short examples."""
    needle = 'characters: 250\n  examples: 3\ngeneration_kwargs:\n  until: ["."]\n  max_gen_toks: 7\n  do_sample: false'
    small = {"text": "characters: 300\n  examples: 2", "choice": "examples: 3\n  facts: 4", "needle": needle}
    for name, its in small.items():
        text = f"include: {PACK}/fastattn_{name}.yaml\ntask: small_{name}\ntag: small\nmetadata:\n  version: 1\n  {its}\n"
        (folder / f"{name}.yaml").write_text(text)
    return folder
