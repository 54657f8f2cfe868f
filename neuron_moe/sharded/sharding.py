"""Which part of every parameter a rank holds, read off the modules themselves.

One rule for each kind of parameter, in the form `neuron_moe.checkpoint` reads: for every axis the
indices wanted. So a rank reads its slice out of safetensors files before anything is stacked.

| parameter | whole | this rank |
| --- | --- | --- |
| experts, gate_up_proj | [E, H, 2I] | its experts; its gate columns, then its up columns |
| experts, up_proj | [E, H, I] | its experts; its columns |
| experts, down_proj | [E, I, H] | its experts; its rows |
| their biases | [E, 2I], [E, I], [E, H] | its experts; columns as above; all of H |
| shared experts, gate and up | [I, H], [2I, H] | its rows; of a fused matrix gate, then up |
| shared experts, down_proj | [H, I] | its columns |
| everything else | | all |

Axes: E physical experts of all ranks, H hidden, I intermediate.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from neuron_moe.checkpoint.lazy import Indices, Selection, everything, take
from neuron_moe.experts import RoutedExperts
from neuron_moe.parallel.shard import ExpertShard
from neuron_moe.shared_experts import SharedExperts
from neuron_moe.weights.experts import Experts
from nki_kernels.common.formula import num_projections

Rule = Callable[[tuple[int, ...]], Selection]


@dataclass(frozen=True)
class ModuleSharding:
    """The rules of the parameters of one model on this rank.

    Args:
        rules: by parameter name; a parameter without one is whole.
        sources: the name in the whole model of a parameter that is a second copy.
        layout: what this rank holds of each sharded module, in words.
    """

    rules: Mapping[str, Rule]
    sources: Mapping[str, str]
    layout: Mapping[str, str]

    def __call__(self, name: str, shape: tuple[int, ...]) -> Selection:
        """Return the indices this rank holds of a parameter of that whole shape."""
        rule = self.rules.get(name)
        return everything(shape) if rule is None else rule(shape)

    def source_of(self, name: str) -> str:
        """Return the parameter of the whole model that fills this one."""
        return self.sources.get(name, name)


def sharding_of(model: nn.Module) -> ModuleSharding:
    """Collect the rules of a model that was built for one rank."""
    rules: dict[str, Rule] = {}
    sources: dict[str, str] = {}
    layout: dict[str, str] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, RoutedExperts):
            for name, experts in module.named_children():
                if not isinstance(experts, Experts):
                    continue
                here = _experts_here(module, experts.shard)
                layout[prefix + name] = f"experts {_as_text(here)}, {_slice(experts.shard)}"
                for parameter, rule in _expert_rules(experts, here):
                    rules[f"{prefix}{name}.{parameter}"] = rule
                    if name != "mlp_op":
                        sources[f"{prefix}{name}.{parameter}"] = f"{prefix}mlp_op.{parameter}"
        elif isinstance(module, SharedExperts):
            layout[path] = _slice(module.shard)
            rules.update((prefix + name, rule) for name, rule in _shared_rules(module))
    names = model.state_dict().keys()
    sources = {name: source for name, source in sources.items() if name in names}
    return ModuleSharding(rules, sources, layout)


def shard_state_dict(model: nn.Module, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cut the state dict of the whole model for the rank `model` was built for.

    Raises:
        ValueError: a tensor is missing.
    """
    sharding = sharding_of(model)
    state = {}
    for name in model.state_dict():
        source = sharding.source_of(name)
        if source not in whole:
            raise ValueError(f"{source}: the whole state dict must hold it. Check the prefix.")
        tensor = whole[source]
        state[name] = take(tensor, sharding(name, tuple(tensor.shape))).contiguous()
    return state


def _as_text(here: Indices) -> str:
    if isinstance(here, range):
        return f"{here.start}-{here.stop - 1}"
    return ", ".join(map(str, here))


def _slice(shard: ExpertShard) -> str:
    return f"slice {shard.tp_rank} of {shard.tp_size}"


def _experts_here(mlps: RoutedExperts, shard: ExpertShard) -> Indices:
    """Return the experts of a shard, as an index into the checkpoint's experts."""
    here = shard.local_experts(mlps.num_physical)
    return here if mlps.placement is None else mlps.placement.physical[here.start : here.stop]


def _expert_rules(experts: Experts, here: Indices) -> Iterator[tuple[str, Rule]]:
    shard, halves = experts.shard, num_projections(experts.formula)

    def first_weight(shape: tuple[int, ...]) -> Selection:
        return here, range(shape[1]), columns(shape[2], halves, shard)

    def first_bias(shape: tuple[int, ...]) -> Selection:
        return here, columns(shape[1], halves, shard)

    def down_weight(shape: tuple[int, ...]) -> Selection:
        return here, columns(shape[1], 1, shard), range(shape[2])

    def down_bias(shape: tuple[int, ...]) -> Selection:
        return here, range(shape[1])

    yield f"{experts.first_name}.weight", first_weight
    yield f"{experts.first_name}.bias", first_bias
    yield "down_proj.weight", down_weight
    yield "down_proj.bias", down_bias


def _shared_rules(shared: SharedExperts) -> Iterator[tuple[str, Rule]]:
    shard = shared.shard

    def rows(halves: int) -> Rule:
        return lambda shape: (columns(shape[0], halves, shard), range(shape[1]))

    yield "gate_up_proj.weight", rows(2)
    yield "gate_proj.weight", rows(1)
    yield "up_proj.weight", rows(1)
    yield "down_proj.weight", lambda shape: (range(shape[0]), columns(shape[1], 1, shard))


def columns(size: int, halves: int, shard: ExpertShard) -> Indices:
    """Return this rank's part of an axis that holds `halves` equal parts one after the other.

    Of gate and up in one matrix a rank takes its slice of each (NxD's partition stride 2), not a
    run of the whole: a run would be all gate on some ranks and all up on others.
    """
    if shard.tp_size == 1:
        return range(size)
    width = size // halves
    here = shard.columns(width)
    return here if halves == 1 else tuple(h * width + i for h in range(halves) for i in here)
