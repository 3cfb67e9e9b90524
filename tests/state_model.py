"""Steps of tests/state.py that change a model's weights, modules and adapters."""

import copy

import torch
from state import action
from torch import nn
from torch.nn.utils import parametrize, prune


def linears(side) -> list[nn.Module]:
    return [module for module in side.model.modules() if type(module) in (nn.Linear, nn.Conv1d)]


def pick(side, variant: int) -> nn.Module:
    """A linear layer or a convolution by number, alternating between early and late ones."""
    found = linears(side)
    return found[(-1 - variant // 2) if variant % 2 else variant // 2]


def noise(shape, seed: int = 7, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Weights


@action(4)
def copy_into_a_weight(side, variant):
    weight = pick(side, variant).weight
    weight.copy_(weight.flip(0).clone())


@action(4)
def replace_a_parameter(side, variant):
    layer = pick(side, variant)
    layer.weight = nn.Parameter(layer.weight.detach().flip(0).clone())


@action(4)
def point_data_elsewhere(side, variant):
    weight = pick(side, 1).weight
    other = weight.detach().roll(1, 0).clone()
    if variant == 0:
        weight.data = other
    elif variant == 1:
        weight.set_(other)
    elif variant == 2:  # other strides over a new storage
        weight.data = other.t().contiguous().t()
    else:  # another part of one storage
        side.scratch["both"] = torch.cat([weight.detach().clone(), other])
        weight.data = side.scratch["both"][len(other) :]


@action(2)
def load_a_state_dict(side, variant):
    with torch.no_grad():
        weights = {name: x.roll(1, -1) if "mlp" in name else x.clone() for name, x in side.model.state_dict().items()}
    side.model.load_state_dict(weights, assign=bool(variant))


@action(2)
def cut_the_vocabulary(side, variant):
    head = side.model.lm_head
    if type(head) is nn.Linear and len(head.weight) > 48:
        head.weight = nn.Parameter(head.weight.detach()[slice(48) if variant else slice(16, 64)])


@action()
def tie_the_head_to_the_embeddings(side, variant):
    side.model.lm_head.weight = side.model.model.embed_tokens.weight


@action(2)
def one_parameter_serves_two_layers(side, variant):
    parts = [getattr(layer, ("mlp", "self_attn")[variant], layer).modules() for layer in side.layers[:2]]
    for one, other in zip(*([m for m in part if type(m) is nn.Linear] for part in parts), strict=False):
        if one.weight.shape == other.weight.shape:
            one.weight = other.weight


@action(3)
def cast(side, variant):
    side.model.to((torch.bfloat16, torch.float16, torch.float32)[variant])
    side.kept.clear()


@action(2)
def change_a_buffer(side, variant):
    rotary = side.model.model.rotary_emb
    if variant:
        rotary.inv_freq = rotary.inv_freq * 0.7
    else:
        rotary.inv_freq.mul_(0.7)


class Minus(nn.Module):
    def forward(self, x):
        return -x


@action(2)
def compute_a_weight(side, variant):
    if variant:
        prune.l1_unstructured(linears(side)[1], "weight", amount=0.5)
    else:
        parametrize.register_parametrization(linears(side)[2], "weight", Minus())


# Modules


class Skip(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 0 * self.inner(x)


class Twice(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


@action(4)
def wrap_a_module(side, variant):
    layer = side.layers[variant % 2]
    kind = Skip if variant < 2 else Twice
    layer.mlp = kind(layer.mlp).eval()

    def undo(side):
        layer = side.layers[variant % 2]
        if isinstance(layer.mlp, (Skip, Twice)):
            layer.mlp = next(layer.mlp.children())

    return undo


@action(4)
def replace_a_module(side, variant):
    layer = side.layers[variant % 2]
    layer.mlp = nn.Identity() if variant < 2 else Minus()


@action(2)
def replace_an_activation(side, variant):
    for module in [module for layer in side.layers for module in layer.mlp.modules()]:
        if "act_fn" in vars(module) or "act_fn" in module._modules:
            vars(module).pop("act_fn", None)
            module._modules.pop("act_fn", None)
            module.act_fn = torch.tanh if variant else nn.ReLU()


@action(2)
def change_a_class(side, variant):
    mlp = side.layers[variant].mlp
    cls = type(mlp)
    mlp.__class__ = type(cls.__name__, (cls,), {"forward": lambda self, x, _f=cls.forward: -_f(self, x)})

    def undo(side):
        mlp = side.layers[variant].mlp
        if type(mlp).__mro__[1] is cls:
            mlp.__class__ = cls

    return undo


@action(2)
def swap_two(side, variant):
    a, b = side.layers[:2]
    if variant == 0:
        a.mlp, b.mlp = b.mlp, a.mlp
    elif len(set(vars(side.model.config).get("layer_types") or ())) < 2:  # else the masks of two kinds are mixed up
        side.layers[0], side.layers[1] = b, a


@action(2)
def remove_a_layer(side, variant):
    if len(side.layers) > 1:
        del side.layers[1]
        if variant:
            side.model.config.num_hidden_layers = 1
            if vars(side.model.config).get("layer_types"):
                side.model.config.layer_types = side.model.config.layer_types[:1]
        _number_states(side)
        side.kept.clear()


@action()
def add_a_layer(side, variant):
    config = side.model.config
    new = copy.deepcopy(side.layers[0])
    new.self_attn.layer_idx, new.self_attn.config = len(side.layers), side.layers[0].self_attn.config
    side.layers.append(new)
    config.num_hidden_layers = len(side.layers)
    if vars(config).get("layer_types"):
        config.layer_types = [*config.layer_types, config.layer_types[0]]
    _number_states(side)
    side.kept.clear()


def _number_states(side):
    """A stock cache of layers with a state and K and V is as long as the configuration says, and does not grow."""
    for index, layer in enumerate(side.layers):
        if hasattr(layer, "mamba"):
            layer.self_attn.layer_idx = layer.mamba.layer_idx = index
            side.model.config.num_hidden_layers = len(side.layers)


# Adapters


@action(2)
def add_an_adapter(side, variant):
    import peft

    torch.manual_seed(variant)
    name = f"adapter{side.scratch.setdefault('adapters', 0)}"
    side.scratch["adapters"] += 1
    targets = ["q_proj", "v_proj"] if variant else ["down_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=64, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    if side.peft is None:
        side.peft = peft.get_peft_model(side.model, config, adapter_name=name)
    else:
        side.peft.add_adapter(name, config)
    side.peft.eval()


@action(3)
def set_an_adapter(side, variant):
    if side.peft is not None and side.peft.peft_config:
        names = list(side.peft.peft_config)
        side.peft.set_adapter(names[variant % len(names)])


@action()
def disable_adapters(side, variant):
    if side.peft is None:
        return None
    context = side.peft.disable_adapter()
    context.__enter__()
    return lambda side: context.__exit__(None, None, None)


@action()
def merge_adapters(side, variant):
    if side.peft is None:
        return None
    side.peft.merge_adapter()
    return lambda side: side.peft.unmerge_adapter() if side.peft is not None else None


@action()
def delete_an_adapter(side, variant):
    if side.peft is not None and len(side.peft.peft_config) > 1:
        side.peft.delete_adapter(next(iter(side.peft.peft_config)))


@action()
def scale_an_adapter(side, variant):
    for module in side.model.modules():
        if hasattr(module, "scaling") and isinstance(module.scaling, dict):
            for name in module.scaling:
                module.scaling[name] *= -1.5


@action()
def unload_adapters(side, variant):
    if side.peft is not None:
        side.peft.unload()
        side.peft = None
        for name in ("disable_adapters", "merge_adapters"):
            side.taking_back.pop(name, None)
