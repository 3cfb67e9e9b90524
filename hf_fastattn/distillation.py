"""distill(): learn the maps with which linear attention has the weights of a model's softmax, and load a model that has them.

Source: Zhang et al., "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry" (2024), section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import hf
from .attention.linear import NAME, LinearMap, teaching
from .caches.linear import check_kinds
from .kernels.checks import is_count
from .kernels.linear_attention import MAPS, features, weights
from .patches.graphs.state import MARK

LEARNED = "hedgehog"


def cross_entropy(q: torch.Tensor, k: torch.Tensor, scale: float, learned: LinearMap) -> torch.Tensor:
    """The loss of a layer: the cross entropy between the causal softmax weights and those of its map, of each query, in nats.

    q (batch, num_heads, tokens, head_dim), k (batch, num_kv_heads, tokens, head_dim). The mean over rows, heads and queries.
    Its least value is the entropy of the softmax.
    """
    q, k = q.float(), k.float()
    found = weights(features(LEARNED, q, scale, learned.query, True), features(LEARNED, k, scale, learned.key))
    scores = scale * (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    target = scores.masked_fill(later, -torch.inf).softmax(-1)
    return -(target * found.clamp(min=1e-12).log()).sum(-1).mean()


def distill(
    model: hf.PreTrainedModel,
    texts: Iterable[str | torch.Tensor],
    map: str = LEARNED,
    *,
    tokenizer: Callable[..., Any] | None = None,
    tokens: int = 256,
    epochs: int = 1,
    learning_rate: float = 0.01,
) -> list[float]:
    """Learn the map of each layer from the softmax of the model itself, and let "linear" attention of this model use it.

    texts: strings, for which `tokenizer` is needed, or ids, int64 (rows, tokens) without padding; each is one step of Adam, cut
    to `tokens` tokens: the weights of all pairs of tokens are compared. map: "hedgehog", the one map with weights. The weights
    of the model do not change. They can be trained afterwards, with attn_implementation="linear", which has gradients.

    Changes the model: each attention layer gets a module `linear_map`, which save_pretrained() saves, and the configuration
    linear_map="hedgehog". Returns the loss of each step, the mean over layers, in nats (`cross_entropy`).

    Raises ValueError or TypeError for a map without weights, a patched model, layers with windows or states, and no texts.
    """
    if map != LEARNED:
        others = ", ".join(name for name in MAPS if name != LEARNED)
        raise ValueError(
            f"distill() learns the map {LEARNED!r}; got {map!r}. {others} have no weights: set model.config.linear_map to one."
        )
    if MARK in vars(model):
        raise ValueError("This model is patched, and distill() changes its modules. Call hf_fastattn.unpatch(model) before.")
    for name, value in (("tokens", tokens), ("epochs", epochs)):
        if not is_count(value) or value < 1:
            raise ValueError(f"{name} must be an integer, at least 1; got {value!r}.")
    check_kinds(model.config)
    if isinstance(texts, str | Mapping):
        raise TypeError(f"distill() takes a list of texts; got a {type(texts).__name__}. Put one text into a list.")
    given = [_ids(text, tokenizer)[:, :tokens].to(model.device) for text in texts]
    if not given:
        raise ValueError("distill() got no texts. Pass strings with tokenizer=, or ids (rows, tokens).")
    losses: list[float] = []
    made: list[Any] = []  # modules that have got a map
    of_step: list[torch.Tensor] = []

    def create(module: Any, q: torch.Tensor, k: torch.Tensor, scale: float) -> None:
        if not hasattr(module, "linear_map"):
            module.linear_map = LinearMap(q.shape[1], k.shape[1], q.shape[3])
            made.append(module)
        module.linear_map.to(q.device, torch.float32)

    def teach(module: Any, q: torch.Tensor, k: torch.Tensor, scale: float) -> None:
        with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
            loss = cross_entropy(q.detach(), k.detach(), scale, module.linear_map)
            loss.backward()
        of_step.append(loss.detach())

    with torch.inference_mode(False), _running_linear(model, made), torch.no_grad():
        with teaching(create):
            model.base_model(given[0][:, :1], use_cache=False)  # without the head, whose result nothing needs
        maps: list[LinearMap] = [module for module in model.modules() if isinstance(module, LinearMap)]
        optimizer = torch.optim.Adam([weight for each in maps for weight in each.parameters()], lr=learning_rate)
        with teaching(teach):
            for ids in (ids for _ in range(epochs) for ids in given):
                of_step.clear()
                model.base_model(ids, use_cache=False)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(torch.stack(of_step).mean()))
    for each in maps:
        each.to(model.dtype)
    model.config.get_text_config(decoder=True).linear_map = LEARNED
    return losses


def load_distilled(
    folder: str | Path, *, dtype: torch.dtype | str = "auto", device: torch.device | str = "cpu"
) -> hf.PreTrainedModel:
    """The model that distill() has changed and save_pretrained(folder) saved, in eval mode.

    Transformers' from_pretrained() reports the weights of the maps as unexpected and drops them; this reads them afterwards.
    Raises ValueError for a folder that cannot be loaded or has no such weights.
    """
    from safetensors import safe_open

    model, found = hf.load_model(folder, dtype=dtype, device=device), 0
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dict)
                path, _, part = name.rpartition(".")
                if not path.endswith(".linear_map") or part not in ("query", "key"):
                    continue
                module: Any = model.get_submodule(path.removesuffix(".linear_map"))
                at = next(module.parameters())
                if not hasattr(module, "linear_map"):
                    module.linear_map = LinearMap(0, 0, 0)
                weight = tensors.get_tensor(name).to(at.device, model.dtype)
                setattr(module.linear_map, part, torch.nn.Parameter(weight))
                found += 1
    if not found:
        raise ValueError(f"{folder} has no weights of linear maps. Call hf_fastattn.distill(model, texts), and save that model.")
    return model


def _ids(text: object, tokenizer: Callable[..., Any] | None) -> torch.Tensor:
    if isinstance(text, str):
        if tokenizer is None:
            raise TypeError("distill() got a string and no tokenizer. Pass tokenizer=, or ids of dtype int64, (rows, tokens).")
        text = tokenizer(text, return_tensors="pt")["input_ids"]
    if not isinstance(text, torch.Tensor) or text.dtype != torch.int64 or text.dim() != 2 or not text.numel():
        raise TypeError(f"Texts are strings, or ids of dtype int64 and shape (rows, tokens); got {text!r:.100}.")
    return text


@contextmanager
def _running_linear(model: hf.PreTrainedModel, made: list[Any]) -> Iterator[None]:
    """A context in which the model runs "linear", in eval mode. made: modules whose maps are removed after an error."""
    before, training = model.config._attn_implementation, [module for module in model.modules() if module.training]
    hf.set_attention(model, NAME)
    model.eval()
    try:
        yield
    except BaseException:
        for module in made:
            del module.linear_map
        raise
    finally:
        hf.set_attention(model, before)
        for module in training:
            module.training = True
