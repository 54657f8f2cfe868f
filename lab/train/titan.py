"""Our layer as torchtitan's MoE: built from its configuration, saved under its names.

    model_config = torchtitan.models.qwen3.model_registry("debugmodel_moe").model
    use_neuron_moe(model_config, save_percent=0)    # then train with torchtitan as ever

State dicts have torchtitan's names and layouts, so that its adapters write and read Hugging Face
checkpoints; its load balancing hook finds bias and load where it looks for them. Expert parallelism
is ours (docs/parallel.md), over ranks whose tokens differ.

    python -m lab.train.titan --steps 20    # its Qwen3, small, with its layers and with ours
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.models.common.moe import MoE as TitanMoE
from torchtitan.protocols.module import Module

from neuron_moe import (
    ExpertMLPsV2,
    GroupLimitedRouter,
    MoE,
    RoutedExpertsMLPOpsConfig,
    RouterTopK,
    SharedExperts,
)
from neuron_moe.tools.parsers import Parser

_EXPERTS = "routed_experts.inner_experts."
_GATE_UP, _DOWN = "expert_mlps.mlp_op.gate_up_proj.weight", "expert_mlps.mlp_op.down_proj.weight"
_SAME = {  # torchtitan's name: ours
    "router.gate.weight": "router.linear_router.weight",
    "router.gate.bias": "router.linear_router.bias",
    "expert_bias_E": "router.e_score_correction_bias",
    "shared_experts.w1.weight": "shared_experts.gate_proj.weight",
    "shared_experts.w3.weight": "shared_experts.up_proj.weight",
    "shared_experts.w2.weight": "shared_experts.down_proj.weight",
}


class NeuronMoE(Module):
    """A layer of ours where torchtitan has its own: [T, H] to [T, H]."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanMoE.Config):
        """Fields of torchtitan's, and how our experts run."""

        backend: str = "torch"
        save_percent: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.load_balance_coeff = config.load_balance_coeff
        self.moe = _build(config)
        if self.load_balance_coeff is not None:
            self.moe.enable_load_counters(training_only=True)
        self.register_state_dict_post_hook(_rename_saved)
        self.register_load_state_dict_pre_hook(_rename_given)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Return the layer's output."""
        output: Tensor = self.moe(hidden_TH.unsqueeze(0))[0]
        return output.squeeze(0)

    @property
    def expert_bias_E(self) -> Tensor | None:
        """The selection bias itself."""
        return self.moe.router.e_score_correction_bias

    @property
    def tokens_per_expert_E(self) -> Tensor | None:
        """The counted load itself; a token that is computed again counts once."""
        return self.moe.expert_mlps.expert_load_E

    def _init_self_parameters(self) -> None:
        """Draw the weights that torchtitan's own layer would draw."""
        with torch.device("meta"):
            theirs = TitanMoE(self.config)
        theirs.to_empty(device=next(self.parameters()).device).init_states()
        given = theirs.state_dict()
        _rename_given(self, given, "")
        for name, mine in self.moe.state_dict().items():
            value = given.get(f"moe.{name}", torch.zeros(mine.shape))
            if isinstance(mine, DTensor):
                value = distribute_tensor(
                    value, mine.device_mesh, mine.placements, src_data_rank=None
                )
            mine.copy_(value)


def use_neuron_moe(
    model_config: Any, *, backend: str = "torch", save_percent: int | None = None
) -> None:
    """Let a model's configuration build our layers instead of torchtitan's, in place.

    Raises:
        ValueError: it has no MoE layers.
    """
    found = [*model_config.traverse(TitanMoE.Config)]
    for place, config, owner, name in found:
        if type(config) is not TitanMoE.Config:
            raise ValueError(
                f"{place}: is built by {type(config).__qualname__}, whose formula is its own. Leave"
                " this model with torchtitan's layers."
            )
        same = {field.name: getattr(config, field.name) for field in fields(config)}
        setattr(owner, name, NeuronMoE.Config(**same, backend=backend, save_percent=save_percent))
    if not found:
        raise ValueError("model_config: has no MoE layers. Take a MoE flavour of the model.")


def _build(config: NeuronMoE.Config) -> MoE:
    router, experts = config.router, config.routed_experts.inner_experts
    common = {
        "renormalize": router.route_norm,
        "routed_scaling_factor": router.route_scale,
    }
    sizes = (config.num_experts, router.top_k, experts.dim)
    ours: RouterTopK | GroupLimitedRouter
    if router.num_expert_groups is None:
        ours = RouterTopK(
            *sizes,
            act_fn=router.score_func,
            selection_bias=config.load_balance_coeff is not None,
            bias=router.gate.bias,
            **common,
        )
    else:
        groups = (router.num_expert_groups, router.num_limited_groups)
        ours = GroupLimitedRouter(*sizes, *groups, **common)
    ours.forces_balance = router._debug_force_load_balance
    routed = ExpertMLPsV2(
        RoutedExpertsMLPOpsConfig(
            config.num_experts, experts.dim, experts.hidden_dim, router.top_k, "silu", True
        ),
        backend=config.backend,
        save_percent=config.save_percent,
    )
    shared = None
    if config.shared_experts is not None:
        shared = SharedExperts(experts.dim, config.shared_experts.w1.out_features, 1, "silu")
    return MoE(ours, routed, shared)


def _rename_saved(
    module: nn.Module, state: dict[str, Any], prefix: str, _local: dict[str, Any]
) -> None:
    ours = {name: state.pop(name) for name in [*state] if name.startswith(f"{prefix}moe.")}
    for theirs, name in _SAME.items():
        is_balanced = getattr(module, "load_balance_coeff", None) is not None
        if f"{prefix}moe.{name}" in ours and (is_balanced or theirs != "expert_bias_E"):
            state[prefix + theirs] = ours[f"{prefix}moe.{name}"]
    gate_EHI, up_EHI = ours[f"{prefix}moe.{_GATE_UP}"].chunk(2, -1)
    down_EIH = ours[f"{prefix}moe.{_DOWN}"]
    for name, weight in (("w1_EFD", gate_EHI), ("w2_EDF", down_EIH), ("w3_EFD", up_EHI)):
        state[prefix + _EXPERTS + name] = weight.transpose(-2, -1)


def _rename_given(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for theirs, name in _SAME.items():
        if prefix + theirs in state:
            state[f"{prefix}moe.{name}"] = state.pop(prefix + theirs)
    names = [prefix + _EXPERTS + name for name in ("w1_EFD", "w3_EFD", "w2_EDF")]
    if all(name in state for name in names):
        here = [*module.moe.expert_mlps.local_experts()]  # of a whole state, this rank's experts
        whole = [state.pop(name) for name in names]
        mine = [each[here] if len(each) > len(here) else each for each in whole]
        gate, up, down = (each.transpose(-2, -1) for each in mine)
        state[f"{prefix}moe.{_GATE_UP}"] = torch.cat([gate, up], -1)
        state[f"{prefix}moe.{_DOWN}"] = down


def small_qwen3() -> Any:
    """Return the configuration of torchtitan's Qwen3, small, with attention for a CPU."""
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = qwen3.model_registry("debugmodel_moe").model
    config.layers = qwen3._build_qwen3_moe_layers(
        n_layers=2,
        dim=config.dim,
        n_heads=4,
        n_kv_heads=4,
        head_dim=64,
        moe_hidden_dim=64,
        num_experts=8,
        top_k=2,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=64, max_context_length=128, theta=10000.0),
    )
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.moe.load_balance_coeff = 1e-3
    return config


def main(argv: list[str] | None = None) -> int:
    """Train both models on the same random tokens; print their losses; return the exit status."""
    parser = Parser("titan", __doc__)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    theirs, ours = small_qwen3(), small_qwen3()
    use_neuron_moe(ours)
    models = []
    for config in (theirs, ours):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = config.build()
        model.to_empty(device="cpu").init_states()
        models.append(model.train())
    steps = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    generator = torch.Generator().manual_seed(1)
    for step in range(args.steps):
        tokens_T = torch.randint(theirs.vocab_size, (65,), generator=generator)
        losses = []
        for model, optimizer in zip(models, steps, strict=True):
            optimizer.zero_grad()
            logits_TV = model(tokens_T[:-1], positions=torch.arange(64))
            loss = nn.functional.cross_entropy(logits_TV.float(), tokens_T[1:])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
        print(f"step {step}: torchtitan's layers {losses[0]:.5f}, ours {losses[1]:.5f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
