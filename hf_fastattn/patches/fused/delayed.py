"""Merges the additions and norms of a decode graph that follow each other, also after a sum over ranks, the rotation of queries
and keys with their norms and with the append of K and V, linear layers with an activation or a product with a number, and the
choice of experts with their first launch.

The launch of an addition or a norm is delayed until the next operation. If that is an addition or a norm of its result, both are
one launch (`kernels.decode.residual`), which may begin with a sigmoid and a product with it. The launch of a rotation is delayed
until its keys are appended (`kernels.decode.rope`). The launch of a linear layer, or of several together, is delayed until the
next operation. If that is an activation of the first result, or its product with a number, both are one launch
(`kernels.decode.linear`). The launch of a choice of experts is delayed until they run (`kernels.decode.experts`). Before any
other operation what is delayed runs. So the model's own code decides what is computed, in every family, and all its results are
stored.

Operations of torch are seen by a dispatch mode, except in `launch.unseen`, and launches of this package by `launch.before`.
Kernels that others launch without an operation of torch are not seen. Therefore only models that consist of modules of torch and
Transformers' model files run in this mode, and of quantised layers whose kernels are operations of torch (bitsandbytes, torchao).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_leaves

from ... import hf
from ...kernels import HAS_TRITON, mixture
from ...kernels.host import gpu, launch
from . import subclass

if TYPE_CHECKING:
    from ...kernels.decode import all_reduce, linear, residual, rope, route
    from ...kernels.spec import KV

_FROM = (
    *("torch.nn.modules.", "transformers.models.", "transformers.activations", "bitsandbytes.nn.modules"),
    "hf_fastattn.attention.linear",  # whose modules have weights alone
)
_WEIGHTS = ("torchao.", "bitsandbytes.nn.modules")  # classes of tensors
_LAUNCHERS = (torch.nn.modules.conv._ConvNd, torch.nn.RNNBase)  # in models with kernels of other packages
_aten = torch.ops.aten
_READ_NOTHING = {  # views, and allocations
    *(_aten.view.default, _aten._unsafe_view.default, _aten.unsqueeze.default, _aten.squeeze.dim),
    *(_aten.transpose.int, _aten.t.default, _aten.slice.Tensor, _aten.select.int, _aten.expand.default, _aten.alias.default),
    *(_aten.detach.default, _aten.permute.default, _aten.split.Tensor, _aten.empty.memory_format, _aten.empty_like.default),
    *(_aten.empty_strided.default, _aten.new_empty.default),
}
_ACTIVATIONS = {  # by operation and approximation
    (_aten.relu.default, "none"): "relu",
    (_aten.silu.default, "none"): "silu",
    (_aten.gelu.default, "none"): "gelu",
    (_aten.gelu.default, "tanh"): "gelu_tanh",
}


@contextlib.contextmanager
def merged(model: torch.nn.Module, shared: bool = False) -> Iterator[None]:
    """A context in which the additions and norms of a model that are fused are merged. shared: also if ranks share the model."""
    if not qualifies(model, shared):
        yield
        return
    with _Delayed() as delayed:
        try:
            yield
        finally:
            delayed.flush()


def qualifies(model: torch.nn.Module, shared: bool = False) -> bool:
    """Whether a model has fused modules, and only modules whose launches are seen."""
    from .states import mixer

    modules = list(model.modules())
    # The convolution of a fused linear layer only has weights, or its launches are in `apart`.
    ours = {id(child) for module in modules if mixer in subclass.fuses_of(type(module)) for child in module.children()}
    return (
        HAS_TRITON
        and any(map(subclass.is_fused, modules))
        and subclass.run_known_code(modules)
        and all(_is_seen(each, shared) and (id(each) in ours or not isinstance(each, _LAUNCHERS)) for each in modules)
    )


def _is_seen(module: torch.nn.Module, shared: bool) -> bool:
    """Whether a module runs the code of its class, which torch or a model file of Transformers defines, and is not compiled.

    shared: whether it may have a forward() of tensor parallelism around that.
    """
    if not type(module).__module__.startswith(_FROM):
        return False
    tensors = (*module._parameters.values(), *module._buffers.values())
    tensors = tuple(map(hf.local, tensors)) if shared else tensors
    if not all(t is None or _is_plain(t) or type(t).__module__.startswith(_WEIGHTS) for t in tensors):
        return False
    own = "forward" in vars(module) and not (shared and subclass.runs_forward_of_ranks(module))
    return not own and getattr(module, "_compiled_call_impl", None) is None


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """A context in which this thread delays nothing, for code with launches that are not seen."""
    mode = _thread.mode
    if mode is None:
        yield
        return
    mode.flush()
    outer = launch.thread.before, launch.thread.watched, mode.append.thread.instead
    launch.thread.before = mode.append.thread.instead = _thread.mode = None
    launch.thread.watched = mode.delays = False
    try:
        yield
    finally:
        launch.thread.before, launch.thread.watched, mode.append.thread.instead = outer
        _thread.mode, mode.delays = mode, True


class _Thread(threading.local):
    mode: _Delayed | None = None


_thread = _Thread()


def current() -> _Delayed | None:
    """The mode of this thread, while it is active."""
    return _thread.mode


def _is_plain(x: torch.Tensor) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter)


def _is_norm(chain: Any) -> bool:
    """Whether a chain is a norm alone."""
    return chain is not None and chain.before is not None and chain.peers is None and chain.scaled is None and not chain.sums


class _Delayed(_python_dispatch.TorchDispatchMode):
    """Delays additions, products with a number, norms, rotations, linear layers and the choice of experts."""

    def __init__(self) -> None:
        from ...kernels.decode import append, linear
        from ...kernels.decode import residual as kernel

        super().__init__()  # type: ignore[no-untyped-call]
        self.kernel, self.append, self.linear = kernel, append, linear
        self.delays = True  # except in `apart`
        self.chain: residual.Chain | None = None
        self.first: residual.Chain | None = None  # a norm alone, which the chain does not read
        self.sigmoid: tuple[torch.Tensor, torch.Tensor] | None = None  # its logits and result; then there is no chain
        self.rotation: rope.Rotation | None = None  # then there is no chain
        self.layers: linear.Layers | route.Choice | None = None  # then there is no rotation, and no chain that they read

    def __enter__(self) -> _Delayed:
        self.outer = launch.thread.before, launch.thread.watched, self.append.thread.instead, _thread.mode
        launch.thread.before, self.append.thread.instead, _thread.mode = self._before, self._append, self
        launch.thread.watched = not _python_dispatch._get_current_dispatch_mode_stack()  # other modes see all operations
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        launch.thread.before, launch.thread.watched, self.append.thread.instead, _thread.mode = self.outer
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.delays or func in _READ_NOTHING or (func is _aten.reshape.default and args[0].is_contiguous()):
            return func(*args, **kwargs)
        after = self._with_layers(func, args, kwargs)
        if after is not None:
            return after
        if len(args) == 2 and not kwargs and subclass.has_kernels(args[0]):
            if func is _aten.add.Tensor and isinstance(args[1], torch.Tensor) and subclass.has_kernels(args[1]):
                if self.kernel.fits(*args):
                    return self._add(*args)
            elif func is _aten.mul.Tensor and type(args[1]) in (int, float) and self.kernel.fits(args[0]):
                return self._mul(*args)
            elif func is _aten.mul.Tensor and (gated := self._gated(*args)) is not None:
                return gated
        elif func is _aten.sigmoid.default and subclass.has_kernels(args[0]) and self.kernel.fits(args[0]):
            self.flush()
            self.sigmoid = args[0], torch.empty_like(args[0])
            return self.sigmoid[1]
        self._before(tree_leaves((args, kwargs)))
        return func(*args, **kwargs)

    def _add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self._ends_in(b):
            a, b = b, a
        if not self._ends_in(a) or self.chain is None or len(self.chain.sums) == 2 or self._has(b):
            self.flush()
            self.chain = self.kernel.Chain(a)
        self.chain = self.chain._replace(sums=(*self.chain.sums, (b, torch.empty_like(a))))
        return self.chain.out

    def _mul(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        if not self._ends_in(x) or self.chain is None or self.chain.sums or self.chain.scaled is not None:
            self.flush()
            self.chain = self.kernel.Chain(x)
        self.chain = self.chain._replace(factor=float(factor), scaled=torch.empty_like(x))
        return self.chain.out

    def _gated(self, a: torch.Tensor, b: object) -> torch.Tensor | None:
        """The product with the delayed sigmoid, which has an element for each one or each row; None if neither is it."""
        if self.sigmoid is None or not isinstance(b, torch.Tensor) or not subclass.has_kernels(b):
            return None
        if gpu.storage_of(a) == gpu.storage_of(b):
            return None
        gate, x = self.sigmoid[1], b if a is self.sigmoid[1] else a
        fits = gate.shape in (x.shape, (*x.shape[:-1], 1)) and (gate.dtype, gate.device) == (x.dtype, x.device)
        if not (a is gate or b is gate) or not fits or not self.kernel.fits(x):
            return None
        chain, self.sigmoid = self.kernel.Chain(x, gate=self.sigmoid), None
        self.chain = chain._replace(scaled=torch.empty_like(x))
        return self.chain.out

    def linears(self, x: torch.Tensor, weights: linear.Tensors, biases: linear.Tensors = ()) -> linear.Tensors | None:
        """linear.linears, delayed."""
        with launch.unseen(x):
            self.layers = layers = self.linear.prepared(x, weights, biases)
        return None if layers is None else layers.outs

    def _with_layers(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The result of an operation in the launch of the delayed linear layers; None if they had to run without it."""
        layers, self.layers = self.layers, None
        if layers is None:
            return None
        then = self._operation(func, args, kwargs)
        if (
            then is not None
            and isinstance(layers, self.linear.Layers)
            and subclass.has_kernels(args[0])
            and layers.gives(args[0])
        ):
            after = torch.empty_like(args[0])
            if layers.launch_with(then, after):
                return after
        layers.launch()
        return None

    def _operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> linear.Then | None:
        """An operation of torch as one that linear layers can compute of their result, or None."""
        if func is _aten.mul.Tensor:
            return self.linear.Then("mul", factor=float(args[1])) if type(args[1]) in (int, float) else None
        name = _ACTIVATIONS.get((func, kwargs.get("approximate", "none")))
        return None if name is None else self.linear.Then(name)

    def _launch_layers(self) -> None:
        layers, self.layers = self.layers, None
        if layers is not None:
            layers.launch()

    def sum_over_ranks(self, x: torch.Tensor, peers: all_reduce.Peers) -> None:
        """Replace x by its sum over ranks, delayed."""
        self.flush()
        self.chain = self.kernel.Chain(x, peers=peers)

    def route(self, logits: torch.Tensor, *args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """route.route, delayed."""
        from ...kernels.decode import route

        self._before((logits,))
        self.layers = choice = route.prepared(logits, *args, **options)
        return None if choice is None else (choice.scores, choice.experts)

    def experts(
        self, x: torch.Tensor, experts: torch.Tensor, scores: torch.Tensor, weights: mixture.Weights, layout: mixture.Layout
    ) -> torch.Tensor | None:
        """experts.run, together with the delayed choice of these experts."""
        from ...kernels.decode import experts as kernel
        from ...kernels.decode import route

        delayed, choice = self.layers, None
        if isinstance(delayed, route.Choice) and delayed.is_for(experts, scores, weights.gate_up.shape[0]):
            self.layers, choice = None, delayed
        out = kernel.run(x, experts, scores, weights, layout, choice)
        if out is None:
            self.layers = delayed
        return out

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, *options: Any
    ) -> torch.Tensor | None:
        """rms_norm.run, delayed or together with the delayed operations."""
        from ...kernels.decode import rms_norm

        self._launch_layers()
        norm = self.kernel.Normed(weight, bias, eps, options, self._empty_like(x))
        if not self.kernel.fits_norm(x, norm):
            return rms_norm.run(x, weight, bias, eps, *options)
        chain = self.chain
        if chain is not None and self._ends_in(x) and chain.peers is not None and chain.out is chain.x:
            self.chain = chain._replace(before=norm)  # an addition may follow
            return norm.out
        if chain is not None and self._ends_in(x) and not _is_norm(chain):
            self.chain = None
            self.kernel.run(chain, norm)
            return norm.out
        if x.dim() == 4 and self.first is None and _is_norm(chain) and not self._has(x):  # of queries, then of keys
            self.first, self.chain = chain, None
        else:
            self.flush()
        self.chain = self.kernel.Chain(x, norm)
        return norm.out

    def rotate(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rotation: tuple[bool, bool, bool, bool, bool],
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """rope.run, together with the delayed norms of the queries and keys. Its launch is delayed until K is appended."""
        from ...kernels.decode import rope

        self._launch_layers()
        chains, delayed = (self.first, self.chain), None
        if all(map(_is_norm, chains)) and not self._has(cos) and not self._has(sin):
            norms = [rope.Normed(chain.x, *chain.before) for chain in chains if chain is not None and chain.before is not None]
            self.first = self.chain = None
            delayed = rope.rotation(q, k, cos, sin, rotation, norms)
            if delayed is None:
                self.first, self.chain = chains
        if delayed is None:
            self.flush()
            with launch.unseen():
                delayed = rope.rotation(q, k, cos, sin, rotation)
        self.rotation = delayed
        return None if delayed is None else delayed.out

    def _empty_like(self, x: torch.Tensor) -> torch.Tensor:
        """An allocation, for which nothing that is delayed has to run."""
        delayed, (self.first, self.chain) = (self.first, self.chain), (None, None)
        with launch.unseen():
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.first, self.chain = delayed
        return out

    def _ends_in(self, x: torch.Tensor) -> bool:
        """Whether x is the result of the chain."""
        out = None if self.chain is None else self.chain.out  # x may have it in another shape, of the same rows
        if out is None or not x.is_contiguous():  # heads that are transposed are other rows at the same address
            return False
        return (gpu.address_of(x), x.numel(), x.shape[-1]) == (gpu.address_of(out), out.numel(), out.shape[-1])

    def _has(self, x: torch.Tensor) -> bool:
        """Whether x reads a result that is not computed yet."""
        outs: list[torch.Tensor | None] = []
        for chain in (self.first, self.chain):
            if chain is not None:
                summed = chain.x if chain.peers is not None else None
                outs += [summed, chain.before and chain.before.out, chain.gate and chain.gate[1], chain.scaled]
                outs += [out for _, out in chain.sums]
        return any(out is not None and gpu.storage_of(out) == gpu.storage_of(x) for out in outs)

    def _append(self, kv: KV, k: torch.Tensor, v: torch.Tensor, slot: torch.Tensor, live: torch.Tensor | None) -> bool:
        """append.append in the launch of the delayed rotation; False if k is not its result or each token has its own slot."""
        rotation = self.rotation
        if rotation is None or slot.dim() == 2 or not rotation.appends(k, v):
            return False
        self.rotation = None
        rotation.launch(kv, v, slot, live)
        return True

    def _before(self, tensors: Iterable[object]) -> None:
        """Before an operation on these tensors. Norms of heads wait for the rotation, beyond operations on other tensors."""
        self._launch_layers()
        chains = [chain for chain in (self.first, self.chain) if chain is not None]
        ours = {gpu.storage_of(t) for chain in chains for t in (chain.x, chain.out)}
        apart = all(_is_norm(chain) and chain.x.dim() == 4 for chain in chains)
        apart = apart and all(_is_plain(t) and gpu.storage_of(t) not in ours for t in tensors if isinstance(t, torch.Tensor))
        if self.rotation is not None or self.sigmoid is not None or (chains and not apart):
            self.flush()

    def flush(self) -> None:
        """Launch what is delayed."""
        self._launch_layers()
        first, chain, rotation, sigmoid = self.first, self.chain, self.rotation, self.sigmoid
        self.first = self.chain = self.rotation = self.sigmoid = None
        if sigmoid is not None:
            torch.sigmoid(sigmoid[0], out=sigmoid[1])
        if rotation is not None:
            rotation.launch()
        if first is not None:
            self.kernel.run(first)
        if chain is None:
            return
        alone = chain.peers is None and chain.before is None and chain.gate is None
        if alone and chain.scaled is not None and not chain.sums:
            torch.mul(chain.x, chain.factor, out=chain.scaled)
        elif alone and chain.scaled is None and len(chain.sums) == 1:
            ((other, out),) = chain.sums
            torch.add(chain.x, other, out=out)
        else:
            self.kernel.run(chain)
