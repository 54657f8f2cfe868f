"""Who computes a layer's experts in `bench gpu`: ours, torch's grouped products, other people's.

Other people's code is run where it is installed, from its own packages or from folders on
PYTHONPATH; nothing of it is here. Each gets the same weights in its own layout.

Axes: E experts, I intermediate, H hidden, T tokens, K choices a token, P = T * K pairs.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from neuron_moe import ExpertMLPsV2, RoutedExpertsMLPOpsConfig
from neuron_moe.backends.chosen_experts import grouped_mm
from neuron_moe.plan import Step


class Shape(NamedTuple):
    """One layer's experts."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int


class Inputs(NamedTuple):
    """What a layer's experts get."""

    hidden_TH: Tensor
    affinities_TK: Tensor
    index_TK: Tensor


class Weights(NamedTuple):
    """Of all experts, gates before ups."""

    first_EHI: Tensor
    down_EIH: Tensor


class Bound(NamedTuple):
    """A peer with its inputs.

    Attributes:
        run: computes the output, [T, H].
        wanted: what gets gradients; none of a peer without a backward pass.
    """

    run: Callable[[], Tensor]
    wanted: list[Tensor]


class Peer:
    """Experts of one layer.

    Attributes:
        needs: module that must be installed; None needs nothing.
        has_gradient: whether it has a backward pass.
        waits: whether it waits for the device, so that no graph can be captured.
    """

    needs: str | None = None
    has_gradient = True
    waits = False

    def __init__(self, shape: Shape, weights: Weights) -> None:
        self.shape = shape
        self.parameters = [nn.Parameter(each) for each in self.lay_out(weights)]

    def lay_out(self, weights: Weights) -> list[Tensor]:
        """Return the weights in the layout of this peer."""
        return [*weights]

    def bind(self, inputs: Inputs) -> Bound:
        """Return how it computes these inputs; what a router would have handed over is ready."""
        if not self.has_gradient:
            return Bound(lambda: self.compute(*(each.detach() for each in inputs)), [])
        wanted = [inputs.hidden_TH, inputs.affinities_TK, *self.parameters]
        return Bound(lambda: self.compute(*inputs), wanted)

    def compute(self, hidden_TH: Tensor, affinities_TK: Tensor, index_TK: Tensor) -> Tensor:
        """Return [T, H]."""
        raise NotImplementedError


class Ours(Peer):
    """The cuda backend of this library."""

    def __init__(self, shape: Shape, weights: Weights, save_percent: int | None) -> None:
        super().__init__(shape, weights)
        config = RoutedExpertsMLPOpsConfig(
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            hidden_act="silu",
            glu_mlp=True,
        )
        first, down = self.parameters
        self.layer = ExpertMLPsV2(
            config, dtype=first.dtype, device="meta", backend="cuda", save_percent=save_percent
        )
        self.layer.get_submodule("mlp_op.gate_up_proj").weight = first
        self.layer.get_submodule("mlp_op.down_proj").weight = down

    def compute(self, hidden_TH: Tensor, affinities_TK: Tensor, index_TK: Tensor) -> Tensor:
        """Return [T, H]."""
        plan = self.layer.plan(Step("prefill", hidden_TH.shape[0]))
        return self.layer.compute(plan, hidden_TH, index_TK, affinities_TK)


class GroupedMM(Peer):
    """The plain pipeline of torch operations around `torch._grouped_mm`."""

    def compute(self, hidden_TH: Tensor, affinities_TK: Tensor, index_TK: Tensor) -> Tensor:
        """Return [T, H]."""
        first_EHI, down_EIH = self.parameters
        top_k = index_TK.shape[1]
        order_P = index_TK.flatten().argsort(stable=True)
        counts = torch.zeros(first_EHI.shape[0], dtype=torch.int32, device=hidden_TH.device)
        ones_P = torch.ones_like(index_TK).flatten()
        ends_E = counts.scatter_add(0, index_TK.flatten().long(), ones_P).cumsum(0).int()
        gate_up = grouped_mm(hidden_TH[order_P // top_k], first_EHI, offs=ends_E)
        gate, up = gate_up.chunk(2, dim=-1)
        rows_PH = grouped_mm(functional.silu(gate) * up, down_EIH, offs=ends_E)
        home_PH = torch.empty_like(rows_PH).index_copy(0, order_P, rows_PH)
        return torch.bmm(
            affinities_TK.unsqueeze(1).to(rows_PH.dtype), home_PH.view(*index_TK.shape, -1)
        ).squeeze(1)


class Transformers(Peer):
    """Qwen3MoeExperts of Hugging Face transformers, its implementation 'grouped_mm'."""

    needs = "transformers.models.qwen3_moe.modeling_qwen3_moe"

    def __init__(self, shape: Shape, weights: Weights) -> None:
        super().__init__(shape, weights)
        models = importlib.import_module("transformers.models.qwen3_moe")
        config = models.Qwen3MoeConfig(
            num_experts=shape.num_experts,
            num_experts_per_tok=shape.top_k,
            hidden_size=shape.hidden_size,
            moe_intermediate_size=shape.intermediate_size,
            experts_implementation="grouped_mm",
        )
        with torch.device("meta"):
            self.experts = importlib.import_module(self.needs).Qwen3MoeExperts(config)
        self.experts.gate_up_proj, self.experts.down_proj = self.parameters

    def lay_out(self, weights: Weights) -> list[Tensor]:
        """Return [E, 2I, H] and [E, H, I]."""
        return [each.transpose(1, 2).contiguous() for each in weights]

    def compute(self, hidden_TH: Tensor, affinities_TK: Tensor, index_TK: Tensor) -> Tensor:
        """Return [T, H]."""
        found: Tensor = self.experts(hidden_TH, index_TK.long(), affinities_TK.to(hidden_TH.dtype))
        return found


class ScatterMoE(Peer):
    """ScatterMoE's GLUMLP."""

    needs = "scattermoe.mlp"
    waits = True

    def __init__(self, shape: Shape, weights: Weights) -> None:
        super().__init__(shape, weights)
        sizes = (shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k)
        with torch.device("meta"):
            self.experts = importlib.import_module(self.needs).GLUMLP(*sizes)
        self.experts.experts.weight, self.experts.output_experts.weight = self.parameters

    def lay_out(self, weights: Weights) -> list[Tensor]:
        """Return [E, 2I, H], ups before gates, and [E, H, I]."""
        first_EIH, down_EHI = (each.transpose(1, 2) for each in weights)
        gate, up = first_EIH.chunk(2, dim=1)
        return [torch.cat([up, gate], dim=1), down_EHI.contiguous()]

    def compute(self, hidden_TH: Tensor, affinities_TK: Tensor, index_TK: Tensor) -> Tensor:
        """Return [T, H]."""
        found: Tensor = self.experts(hidden_TH, affinities_TK.to(hidden_TH.dtype), index_TK.long())
        return found


class Liger(Transformers):
    """LigerFusedMoEFunction of Liger-Kernel."""

    needs = "liger_kernel.ops.fused_moe"
    waits = True

    def __init__(self, shape: Shape, weights: Weights) -> None:
        Peer.__init__(self, shape, weights)
        self.apply = importlib.import_module(self.needs).LigerFusedMoEFunction.apply

    def compute(self, hidden_TH: Tensor, affinities_TK: Tensor, index_TK: Tensor) -> Tensor:
        """Return [T, H]."""
        found: Tensor = self.apply(
            hidden_TH, *self.parameters, index_TK, affinities_TK.to(hidden_TH.dtype)
        )
        return found


class MoMoE(Peer):
    """MoEFunction of MoMoE, which keeps everything (save_percent=100)."""

    needs = "momoe.momoe"

    def __init__(self, shape: Shape, weights: Weights) -> None:
        super().__init__(shape, weights)
        self.apply = importlib.import_module(self.needs).MoEFunction.apply

    def lay_out(self, weights: Weights) -> list[Tensor]:
        """Return [E, H, 2I], ups before gates, and [E, I, H]."""
        gate, up = weights.first_EHI.chunk(2, dim=2)
        return [torch.cat([up, gate], dim=2), weights.down_EIH]

    def bind(self, inputs: Inputs) -> Bound:
        """Return how it computes these inputs, its dense mask and scores ready."""
        index_TK = inputs.index_TK.long()
        size = (index_TK.shape[0], self.shape.num_experts)
        zeros_TE = torch.zeros(size, device=index_TK.device)
        mask_ET = zeros_TE.int().scatter(1, index_TK, 1).t().contiguous()
        scores_TE = zeros_TE.scatter(1, index_TK, inputs.affinities_TK.detach())
        scores_ET = scores_TE.t().requires_grad_()

        def run() -> Tensor:
            found: tuple[Tensor, Any] = self.apply(
                inputs.hidden_TH[None], *self.parameters, mask_ET, scores_ET, self.shape.top_k, 100
            )
            return found[0][0]

        return Bound(run, [inputs.hidden_TH, scores_ET, *self.parameters])


class SonicMoE(Peer):
    """SonicMoE's two projections, on its own kernels."""

    needs = "sonicmoe.functional"
    on_quack = False

    def __init__(self, shape: Shape, weights: Weights) -> None:
        super().__init__(shape, weights)
        _narrow_quack()
        self.functional: Any = importlib.import_module(self.needs)
        self.switches: Any = importlib.import_module("sonicmoe.functional.utils")
        self.activation = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU

    def lay_out(self, weights: Weights) -> list[Tensor]:
        """Return [E, 2I, H], gates and ups in turn, and [E, H, I]."""
        first_EIH, down_EHI = (each.transpose(1, 2) for each in weights)
        both = torch.stack(first_EIH.chunk(2, dim=1), dim=2)
        return [both.flatten(1, 2), down_EHI.contiguous()]

    def compute(self, hidden_TH: Tensor, affinities_TK: Tensor, index_TK: Tensor) -> Tensor:
        """Return [T, H]."""
        library, (num_tokens, top_k) = self.functional, index_TK.shape
        self.switches._IS_USING_QUACK_GEMM = self.on_quack
        stream = torch.cuda.current_stream().cuda_stream
        first, down = (each.permute(1, 2, 0) for each in self.parameters)
        _, ends_E = library.count_cumsum(index_TK.view(-1), self.shape.num_experts, do_cumsum=True)
        ends_E, *metadata = library.TC_topk_router_metadata(index_TK, ends_E, top_k)
        rows, before = library._UpProjection.apply(
            hidden_TH,
            first,
            None,
            ends_E,
            num_tokens * top_k,
            top_k,
            stream,
            *metadata,
            False,
            self.activation,
            False,
        )
        found: Tensor = library._DownProjection.apply(
            rows,
            before,
            down,
            None,
            affinities_TK,
            ends_E,
            num_tokens,
            top_k,
            stream,
            *metadata,
            False,
            self.activation,
        )
        return found


class SonicMoEOnQuACK(SonicMoE):
    """SonicMoE on QuACK's grouped products, of whose tiles two are tried."""

    on_quack = True


def _narrow_quack() -> None:
    """Let QuACK choose of two tiles; of all it would choose for minutes a shape.

    It counts when SonicMoE is first imported, which imports QuACK on its own kernels too.
    """
    configs: Any = importlib.import_module("quack.gemm_config")
    tiles = [
        configs.GemmConfig(128, 192, True, 2, 1),
        configs.GemmConfig(128, 256, False, 2, 1),
    ]
    configs.get_all_configs = lambda *_, **__: tiles


class TritonKernels(Peer):
    """matmul_ogs of triton_kernels; its top-k of ready logits is in the time."""

    needs = "triton_kernels.matmul_ogs"
    has_gradient = False

    def __init__(self, shape: Shape, weights: Weights) -> None:
        super().__init__(shape, weights)
        from lab.bench.gpu_swiglu import swiglu

        self.products = importlib.import_module(self.needs)
        self.routing = importlib.import_module("triton_kernels.routing").routing
        specs = self.products.FnSpecs("plain_swiglu", swiglu, ())
        self.activation = self.products.FusedActivation(specs, (), 2)

    def lay_out(self, weights: Weights) -> list[Tensor]:
        """Return [E, H, 2I], gates and ups in turn, and [E, I, H]."""
        both = torch.stack(weights.first_EHI.chunk(2, dim=2), dim=3)
        return [both.flatten(2, 3), weights.down_EIH]

    def bind(self, inputs: Inputs) -> Bound:
        """Return how it computes these inputs from logits that choose and weigh the same."""
        hidden_TH, affinities_TK, index_TK = (each.detach() for each in inputs)
        size = (index_TK.shape[0], self.shape.num_experts)
        logits_TE = torch.full(size, -40.0, device=index_TK.device)
        logits_TE.scatter_(1, index_TK.long(), affinities_TK.float().log())
        first, down = (each.detach() for each in self.parameters)

        def run() -> Tensor:
            data, gather, scatter = self.routing(logits_TE, self.shape.top_k)
            rows = self.products.matmul_ogs(
                hidden_TH, first, None, data, gather_indx=gather, fused_activation=self.activation
            )
            found: Tensor = self.products.matmul_ogs(
                rows, down, None, data, scatter_indx=scatter, gammas=data.gate_scal
            )
            return found

        return Bound(run, [])


PEERS: dict[str, type[Peer]] = {
    "grouped_mm": GroupedMM,
    "transformers": Transformers,
    "triton_kernels": TritonKernels,
    "sonicmoe": SonicMoE,
    "sonicmoe on quack": SonicMoEOnQuACK,
    "momoe": MoMoE,
    "scattermoe": ScatterMoE,
    "liger": Liger,
}


def is_installed(name: str) -> bool:
    """Say whether a peer can run here."""
    needs = PEERS[name].needs
    return needs is None or importlib.util.find_spec(needs.partition(".")[0]) is not None
