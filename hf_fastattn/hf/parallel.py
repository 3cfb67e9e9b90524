"""Transformers' tensor parallelism: which ranks share a model, and what each of them holds."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .llama import is_embedding, parameters_of
from .models import has_latents, layer_shapes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_MODULE = "transformers.distributed.tensor_parallel"  # the file of the forwards that shared layers get
_INNER = "original_forward"  # the name by which they call the layer's own
_KEYS = ("k_proj", "qkv_proj", "query_key_value")  # the layers of a plan that compute keys
_STYLE = "self"  # the name by which they call their style
_HEAD = "_hf_fastattn_head"


def tensor_parallel_mesh(model: object) -> DeviceMesh | None:
    """The ranks that share this model by tensor parallelism, as a mesh of one dimension; None if it is on one rank."""
    mesh: DeviceMesh | None = getattr(model, "_device_mesh", None)
    if mesh is None or num_ranks(model) < 2:
        return None
    return mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh


def is_mesh(value: object) -> bool:
    """Whether it is a DeviceMesh, which does not change. Its tensors are on the host, and no step reads them."""
    return type(value).__module__ == "torch.distributed.device_mesh"


def num_ranks(model: object) -> int:
    """The number of ranks that share this model by tensor parallelism; 1 if it is on one rank."""
    return getattr(model, "_tp_size", None) or 1


def is_stage(model: object) -> bool:
    """Whether this rank has only some layers of the model, by pipeline parallelism."""
    return getattr(model, "_pp_stage", None) is not None


def is_shared(model: PreTrainedModel | PreTrainedConfig) -> bool:
    """Whether ranks share this model, or the model of this configuration, by tensor parallelism."""
    config = model if isinstance(model, PreTrainedConfig) else model.config
    asked = getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1
    return asked > 1 or tensor_parallel_mesh(model) is not None


def local_kv_heads(model: PreTrainedModel, ranks: int | None = None) -> list[int]:
    """The number of KV heads of each layer on one of so many ranks, by default the model's own. Raises ValueError if they cannot
    be divided."""
    other = ', or patch(kv_sharding="sequence")' if ranks is None else ""
    ranks = num_ranks(model) if ranks is None else ranks
    heads = [shape.num_kv_heads for shape in layer_shapes(model.config)]
    if ranks < 2 or not _divided(model, *_KEYS):
        return heads  # every rank holds all of them
    if uneven := [count for count in heads if count % ranks]:
        raise ValueError(
            f"{type(model).__name__} has {uneven[0]} KV heads, which cannot be divided among {ranks} ranks. Use a number of "
            f"ranks that divides {uneven[0]}{other}."
        )
    return [count // ranks for count in heads]


def _divided(model: PreTrainedModel, *names: str) -> bool:
    """Whether the plan of the model divides the output of a layer of one of these names among the ranks."""
    plan = getattr(model, "tp_plan", None) or {}
    return any(name.rpartition(".")[2] in names and style == "colwise" for name, style in plan.items())


def heads_of_ranks(model: PreTrainedModel) -> tuple[int, bool]:
    """How the plan of a model divides its heads: (number of consecutive ranks that need the same KV heads, 1 if each rank has its
    own; whether every rank computes all query and KV heads).

    Raises ValueError if each query head and its KV head cannot be on one rank, and for latent attention.
    """
    name, ranks = type(model).__name__, num_ranks(model)
    if has_latents(model.config):
        raise ValueError(
            f"{name} has latent attention: its own code computes K and V from all that a cache holds. Leave out kv_sharding=."
        )
    if not _divided(model, *_KEYS):
        if _divided(model, "q_proj"):
            raise ValueError(f"The plan of {name} divides queries among ranks, and not keys. Leave out kv_sharding=.")
        return 1, True
    found = set()
    for shape in layer_shapes(model.config):
        queries, keys = shape.num_heads, shape.num_kv_heads
        if queries % ranks or (keys % ranks and ranks % keys):
            raise ValueError(
                f"{name} has {queries} query heads and {keys} KV heads, which cannot be divided among {ranks} ranks so that each "
                "has the KV heads of its query heads. Use another number of ranks."
            )
        found.add(max(1, ranks // keys))
    copies = found.pop()
    adapted = [module.base_layer for module in _kv_projections(model) if hasattr(module, "base_layer")]
    why = None
    if found or (copies > 1 and not _has_equal_heads(model)):
        why = "differ from layer to layer"
    elif copies > 1 and _divided(model, *_KEYS[1:]):
        why = "are computed together with its queries"
    elif copies > 1 and any(map(computes_part, adapted)):
        why = "are computed with adapters (of PEFT)"
    if why is not None:
        raise ValueError(f"The KV heads of {name} {why}, and {ranks} ranks are more than KV heads. Use fewer ranks.")
    return copies, False


def _has_equal_heads(model: PreTrainedModel) -> bool:
    """Whether all layers have as many KV heads as the configuration says. (MiMo-V2 has twice as many in some layers.)"""
    sizes = {shape.num_kv_heads * size for shape in layer_shapes(model.config) for size in (shape.head_dim, shape.value_dim)}
    return all(module.out_features in sizes for module in _kv_projections(model) if computes_part(module))


def _kv_projections(model: PreTrainedModel) -> list[Any]:
    """The layers that compute keys or values, and no more."""
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] in ("k_proj", "v_proj")]


class _Head:
    """One of `WholeHeads`. parts: the copies of its weight and bias. fused: the forward() that reads them, if there is one."""

    def __init__(self, module: Any, copies: int, mesh: DeviceMesh):
        self.module, self.group, self.ranks = module, mesh.get_group(), mesh.size()
        self.width = module.out_features * copies // self.ranks
        self.first = mesh.get_local_rank() // copies * self.width
        self.before = vars(module)["forward"]
        self.after = self._gathering()
        self.fused: Callable[..., Any] | None = None
        self.parts: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        vars(self.after)[_HEAD] = self

    def _gathering(self) -> Callable[[torch.Tensor], torch.Tensor]:
        from torch.distributed.tensor import Partial, Replicate

        gathers = type(_cell(self.before, _STYLE))(output_layouts=Replicate(), use_local_output=False)
        gathered, first, width = _with_cell(self.before, _STYLE, gathers), self.first, self.width

        def forward(x: torch.Tensor) -> torch.Tensor:
            # The gradient is the sum of those of all ranks, each of which uses some columns.
            out: torch.Tensor = gathered(x).to_local(grad_placements=[Partial()])
            return out[..., first : first + width]

        return forward

    def refresh(self) -> None:
        """Copy the weights, again into the same memory: graphs have its address."""
        with torch.inference_mode(False), torch.no_grad():
            weight, bias = (self._whole(name, old) for name, old in zip(("weight", "bias"), self.parts, strict=True))
        self.parts = weight, bias

    def _whole(self, name: str, old: torch.Tensor | None) -> torch.Tensor | None:
        part = local(self.module._parameters.get(name))
        if part is None:
            return None
        found = part.new_empty(self.ranks * part.shape[0], *part.shape[1:])
        torch.distributed.all_gather([*found.chunk(self.ranks)], part.detach().contiguous(), group=self.group)
        new = found[self.first : self.first + self.width]
        same = old is not None and (old.dtype, old.device, old.shape) == (new.dtype, new.device, new.shape)
        return old.copy_(new) if same and old is not None else new.clone()

    def restore(self) -> None:
        if vars(self.module).get("forward") is self.after:
            vars(self.module)["forward"] = self.before
        self.parts, self.fused = (None, None), None
        vars(self.after).pop(_HEAD, None)


def _head_of(module: torch.nn.Module) -> _Head | None:
    forward = vars(module).get("forward")
    head: _Head | None = getattr(forward, _HEAD, None)  # functools.wraps copies it to a forward() of others
    return head if head is not None and (forward is head.after or forward is head.fused) else None


class WholeHeads:
    """The key and value projections of a model with fewer KV heads than ranks: each returns the heads of the rank, not a part.

    In decode graphs they compute with copies of the weights that other ranks hold, as of the last `refresh`; other forwards
    gather the results. copies: as `heads_of_ranks` returns it.
    """

    def __init__(self, model: PreTrainedModel, copies: int):
        mesh: Any = tensor_parallel_mesh(model)
        self._heads = [_Head(each, copies, mesh) for each in _kv_projections(model) if copies > 1 and computes_part(each)]
        for head in self._heads:
            vars(head.module)["forward"] = head.after

    def __len__(self) -> int:
        return len(self._heads)

    def refresh(self) -> None:
        """Copy the weights, of the projections whose copies are read. All ranks must call it."""
        for head in self._heads:
            if head.fused is not None:
                head.refresh()

    def restore(self) -> None:
        """Undo it, except for layers whose forward() others have changed since."""
        while self._heads:
            self._heads.pop().restore()


def parts_of(module: torch.nn.Module) -> tuple[Any, Any]:
    """The weight and the bias with which this rank computes its part of a layer's result; None for what the layer lacks. No
    weight if one of them is not a parameter."""
    found = parameters_of(module, "weight", "bias")
    if found is None:
        return None, None
    if (head := _head_of(module)) is not None:
        return head.parts
    weight, bias = found
    return (local(weight), local(bias)) if computes_part(module) else (weight, bias)


def is_divided(model: PreTrainedModel, name: str) -> bool:
    """Whether tensor parallelism divides the parameter of this name among the ranks."""
    plan = getattr(model, "tp_plan", None) or {}
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    module, _, last = generic.rpartition(".")
    style = plan.get(generic) or plan.get(module) or ""
    whole = style.startswith("rowwise") and last == "bias"
    return style.startswith(("colwise", "rowwise", "embedding", "packed")) and not whole


def _cell(forward: Any, name: str) -> Any:
    """The object that a forward() of tensor parallelism has under this name; None for other functions."""
    code = getattr(forward, "__code__", None)
    if code is None or forward.__module__ != _MODULE or name not in code.co_freevars:
        return None
    return forward.__closure__[code.co_freevars.index(name)].cell_contents


def inner_forward(module: torch.nn.Module) -> types.FunctionType | None:
    """The forward() of a shared layer's class, which computes with the tensors of this rank; None for other layers.

    Tensor parallelism gives such a layer an instance's own forward(), which communicates before or after it calls this one. A
    projection of `WholeHeads` has no other.
    """
    if (head := _head_of(module)) is not None:
        after = head.after
        return (lambda self, x: after(x)) if vars(module)["forward"] is after else None  # type: ignore[return-value]  # a function
    inner = _cell(vars(module).get("forward"), _INNER)
    own = isinstance(inner, types.MethodType) and inner.__self__ is module and inner.__func__ is type(module).forward
    return inner.__func__ if own else None


def with_inner(forward: types.FunctionType, inner: Callable[..., Any]) -> types.FunctionType:
    """The forward() of a shared layer, with another function in the place of `inner_forward`."""
    if (head := vars(forward).get(_HEAD)) is None:
        return _with_cell(forward, _INNER, inner)

    def run(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = inner(x)
        return out

    vars(run)[_HEAD] = head
    head.fused = run
    return run  # type: ignore[return-value]  # a function


def _with_cell(forward: types.FunctionType, changed: str, value: object) -> types.FunctionType:
    """A copy of a function that has another object under this name."""
    cells = zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True)
    closure = tuple(types.CellType(value) if name == changed else cell for name, cell in cells)
    made = types.FunctionType(forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, closure)
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def computes_part(module: torch.nn.Module) -> bool:
    """Whether a shared layer returns the product of its whole input and the part of the weight on this rank, and no more."""
    if _head_of(module) is not None:
        return True
    style = _cell(vars(module).get("forward"), _STYLE)
    return (
        type(style).__name__ == "ColwiseParallel"
        and style.use_local_output
        and getattr(style.output_layouts, "dim", None) == -1
        and not getattr(module, "_hf_quantized_needs_local_tp", False)
    )


def collective_of(module: torch.nn.Module) -> str | None:
    """The collective whose result a shared layer returns; None for other layers.

    "sum": of the products of all ranks, to which the bias is added. "experts": of the results of the experts. "gather": of the
    columns of all ranks. "lookup": the sum of the embeddings that the ranks find in their rows.
    """
    style = _cell(vars(module).get("forward"), _STYLE)
    kind = type(style).__name__
    if kind == "MoeExpertsParallel":
        return None if "output_source" in vars(module)["forward"].__code__.co_freevars else "experts"  # it may be no sum
    replicated = type(getattr(style, "output_layouts", None)).__name__ == "Replicate"
    if getattr(module, "_hf_quantized_needs_local_tp", False) or not getattr(style, "use_local_output", False):
        return None
    if isinstance(module, torch.nn.Linear) and replicated:
        return {"RowwiseParallel": "sum", "ColwiseParallel": "gather"}.get(kind)
    if not (is_embedding(type(module).forward) and isinstance(module, torch.nn.Embedding) and module.max_norm is None):
        return None
    by_rows = kind == "RowwiseParallel" or (kind == "EmbeddingParallel" and style.shard_dim == 0)
    return "lookup" if by_rows else None


def with_collective(
    forward: types.FunctionType, run: Callable[[torch.Tensor], torch.Tensor | None], adds_bias: bool
) -> types.FunctionType:
    """The forward() of a linear layer with a collective, which first calls run(product on this rank).

    run: returns the result of the collective, or None; then that of Transformers runs. adds_bias: whether the bias is added to
    the result.
    """
    style = _cell(forward, _STYLE)

    class Style(type(style)):  # type: ignore[misc]  # the class depends on Transformers
        def transform_output_post_forward(self, module: torch.nn.Module, output: Any, mesh: Any) -> Any:
            found = parameters_of(module, "bias") if adds_bias else (None,)
            total = None if found is None else run(output)
            if found is None or total is None:
                return style.transform_output_post_forward(module, output, mesh)
            bias = local(found[0])
            return total if bias is None else total + bias

    Style.__name__ = type(style).__name__
    ours = Style.__new__(Style)
    ours.__dict__.update(vars(style))
    return _with_cell(forward, _STYLE, ours)


def is_shard(tensor: object) -> bool:
    """Whether this is a DTensor. Its class is not imported: that takes time, and a torch without distributed has none."""
    return type(tensor).__name__ == "DTensor"


def local(tensor: Any) -> Any:
    """The part of a DTensor on this rank; other objects unchanged."""
    return tensor.to_local() if is_shard(tensor) else tensor
