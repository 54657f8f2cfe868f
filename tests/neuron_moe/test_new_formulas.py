"""Layers of newer families, whose formulas are new: torch, cuda and nki equal transformers' layer.

Limits and caps are so low that they act. Kimi-K3, of which transformers has no class, is put
together here from its words. Further families, whole and through the kernels: tests/models.
"""

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.inkling import modeling_inkling as inkling
from transformers.models.laguna import modeling_laguna as laguna
from transformers.models.longcat_flash import modeling_longcat_flash as longcat
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.phimoe import modeling_phimoe as phimoe

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, SharedExperts
from neuron_moe.latent import Latent
from neuron_moe.router import Router
from neuron_moe.spec import ExpertFormula, LatentSpec, RouterFormula, RouterSpec
from nki_kernels.common.formula import limits
from tests.rows import thinned
from tests.tolerances import relative_error

H, I, E, K, L, V, T = 128, 48, 8, 3, 64, 20, 12  # noqa: E741  the axis letters
RELU2 = ExpertFormula("relu2", has_gate=False)
CLAMPED = ExpertFormula(gate_limits=limits(None, 0.8), up_limits=limits(-0.8, 0.8))
SITU = ExpertFormula("sigmoid", gates_itself=True, gate_softcap=0.7, up_softcap=1.3)
SIZES: dict[str, Any] = {
    "hidden_size": H,
    "moe_intermediate_size": I,
    "intermediate_size": I,
    "num_experts": E,
    "num_local_experts": E,
    "n_routed_experts": E,
    "num_experts_per_tok": K,
    "hidden_act": "silu",
    "mlp_bias": False,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "_experts_implementation": "eager",
}


class Layer(NamedTuple):
    """Our router, experts and what is beside them; theirs, and its weights under our names."""

    router: RouterFormula
    formula: ExpertFormula
    theirs: nn.Module
    weights: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    shared: ExpertFormula | None = None
    shared_width: int = I
    spec: Mapping[str, float] = MappingProxyType({})
    latent: LatentSpec | None = None
    experts: int = E


def biased(**terms: Any) -> RouterFormula:
    usual = {"top_k": K, "act_fn": "sigmoid", "has_selection_bias": True, "renormalize": True}
    return RouterFormula(**{**usual, **terms})


def renamed(names: dict[str, str]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return what gives theirs under our names; experts are transposed."""

    def rename(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, weight in theirs.items():
            for old, new in {**USUAL, **names}.items():
                if name.startswith(old):
                    name = new + name.removeprefix(old)
            found[name] = weight.mT.contiguous() if ".mlp_op." in name else weight
        return found

    return rename


USUAL = {
    "gate.weight": "router.linear_router.weight",
    "gate.e_score": "router.e_score",
    "experts.gate_up_proj": "expert_mlps.mlp_op.gate_up_proj.weight",
    "experts.up_proj": "expert_mlps.mlp_op.up_proj.weight",
    "experts.down_proj": "expert_mlps.mlp_op.down_proj.weight",
}


def deepseek_v4(kind: str) -> Layer:
    config = {**SIZES, "scoring_func": "sqrtsoftplus", "swiglu_limit": 0.8, "vocab_size": V}
    config |= {"routed_scaling_factor": 1.5, "mlp_layer_types": [kind]}
    is_hash = kind == "hash_moe"
    router = biased(
        act_fn="sqrtsoftplus", has_selection_bias=not is_hash, routed_scaling_factor=1.5
    )
    theirs = deepseek.DeepseekV4SparseMoeBlock(SimpleNamespace(**config), 0)
    spec = {"table_size": V} if is_hash else {}
    table = {"gate.tid2eid": "router.expert_table"}
    return Layer(router, CLAMPED, theirs, renamed(table), CLAMPED, spec=spec)


def nemotron_h(latent: int | None) -> Layer:
    config = {**SIZES, "mlp_hidden_act": "relu2", "moe_latent_size": latent}
    config |= {"moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5}
    theirs = nemotron.NemotronHMoE(SimpleNamespace(**config))
    names = {"fc1_latent_proj": "latent.into", "fc2_latent_proj": "latent.out_of"}
    space = None if latent is None else LatentSpec(hidden_size=H, latent_size=latent)
    router = biased(routed_scaling_factor=2.5)
    return Layer(router, RELU2, theirs, renamed(names), RELU2, 40, latent=space)


def longcat_flash() -> Layer:
    config = {**SIZES, "expert_ffn_hidden_size": I, "zero_expert_num": 4}
    config |= {"routed_scaling_factor": 6.0, "router_bias": False}
    theirs = longcat.LongcatFlashMoE(SimpleNamespace(**config))
    usual = renamed({"router.classifier": "router.linear_router"})

    def weights(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        return usual({**theirs, "experts.gate_up_proj": theirs["experts.gate_up_proj"][:E]})

    router = RouterFormula(K, has_selection_bias=True, routed_scaling_factor=6.0)
    return Layer(router, ExpertFormula(), theirs, weights, spec={"num_identity": 4})


class KimiK3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = deepseek.DeepseekV4TopKRouter(
            SimpleNamespace(**SIZES, scoring_func="sigmoid", routed_scaling_factor=1.0)
        )
        self.gate_up = nn.Parameter(torch.empty(E, 2 * I, L))
        self.down = nn.Parameter(torch.empty(E, L, I))
        self.into, self.out_of = nn.Linear(H, L, bias=False), nn.Linear(L, H, bias=False)
        self.norm_weight = nn.Parameter(torch.empty(L))
        self.first, self.second = nn.Linear(H, 80, bias=False), nn.Linear(40, H, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Experts in a latent, a norm of their sum, SiTU everywhere."""
        flat = hidden.reshape(-1, H)
        _, weights, index = self.gate(flat)
        latent = self.into(flat)
        first = torch.einsum("tl,tkil->tki", latent, self.gate_up[index])
        outputs = torch.einsum("tki,tkli->tkl", situ(first), self.down[index])
        summed = (outputs * weights.unsqueeze(2)).sum(1)
        routed = self.out_of(F.rms_norm(summed, (L,), self.norm_weight, 1e-5))
        return (routed + self.second(situ(self.first(flat)))).view(hidden.shape)


def situ(first: Tensor) -> Tensor:
    gate, up = first.chunk(2, -1)
    return 0.7 * torch.tanh(gate / 0.7) * torch.sigmoid(gate) * 1.3 * torch.tanh(up / 1.3)


def kimi_k3() -> Layer:
    names = {
        "gate_up": "expert_mlps.mlp_op.gate_up_proj.weight",
        "down": "expert_mlps.mlp_op.down_proj.weight",
        "into": "latent.into",
        "out_of": "latent.out_of",
        "norm_weight": "latent.norm_weight",
        "first": "shared_experts.gate_up_proj",
        "second": "shared_experts.down_proj",
    }
    space = LatentSpec(hidden_size=H, latent_size=L, norm_eps=1e-5)
    return Layer(biased(), SITU, KimiK3(), renamed(names), SITU, 40, latent=space)


def inkling_moe() -> Layer:
    """Shared experts are two more that a large bias always chooses."""
    config = {**SIZES, "n_shared_experts": 2, "route_scale": 8.0}
    theirs = inkling.InklingMoE(SimpleNamespace(**config))

    def weights(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
        names = [f"shared_experts.{part}_proj" for part in ("gate", "up")]
        first = torch.cat([theirs[name] for name in names], dim=1)
        both_EHI = torch.cat([theirs["experts.down_proj"], theirs["shared_experts.down_proj"]])
        bias_E = theirs["gate.e_score_correction_bias"]
        return {
            "router.linear_router.weight": theirs["gate.weight"],
            "router.e_score_correction_bias": torch.cat([bias_E, torch.full((2,), 1e3)]),
            "expert_mlps.mlp_op.gate_up_proj.weight": torch.cat(
                [theirs["experts.gate_up_proj"], first]
            ).mT,
            "expert_mlps.mlp_op.down_proj.weight": both_EHI.mT * theirs["gate.global_scale"],
        }

    router = biased(top_k=K + 2, routed_scaling_factor=8.0)
    return Layer(router, ExpertFormula(), theirs, weights, experts=E + 2)


def phi_3_5() -> Layer:
    config = {**SIZES, "num_experts_per_tok": 2, "router_jitter_noise": 0.3}
    theirs = phimoe.PhimoeSparseMoeBlock(SimpleNamespace(**config, input_jitter_noise=0.0)).eval()
    names = renamed({"router": "router.linear_router"})
    return Layer(RouterFormula(2), ExpertFormula(), theirs, names, spec={"mixer_jitter": 0.3})


def laguna_capped() -> Layer:
    config = {**SIZES, "moe_router_logit_softcapping": 1.5, "moe_routed_scaling_factor": 2.5}
    config |= {"shared_expert_intermediate_size": I}
    theirs = laguna.LagunaSparseMoeBlock(SimpleNamespace(**config))
    router = biased(routed_scaling_factor=2.5)
    shared = ExpertFormula()
    return Layer(router, shared, theirs, renamed({}), shared, spec={"logit_softcap": 1.5})


LAYERS: dict[str, Callable[[], Layer]] = {
    "deepseek-v4": lambda: deepseek_v4("moe"),
    "deepseek-v4-hash": lambda: deepseek_v4("hash_moe"),
    "nemotron-3-super": lambda: nemotron_h(L),
    "nemotron-3-nano": lambda: nemotron_h(None),
    "kimi-k3": kimi_k3,
    "longcat-flash": longcat_flash,
    "inkling": inkling_moe,
    "phi-3.5": phi_3_5,
    "laguna": laguna_capped,
}


def build(layer: Layer, backend: str, dtype: torch.dtype) -> MoE:
    """Return our layer with their weights."""
    hidden = H if layer.latent is None else layer.latent.latent_size
    sizes = {"num_experts": layer.experts, "top_k": layer.router.top_k, "hidden_size": hidden}
    config = RoutedExpertsMLPOpsConfig(
        **sizes,
        intermediate_size=I,
        hidden_act="silu",
        glu_mlp=layer.formula.has_gate,
        formula=layer.formula,
    )
    spec = RouterSpec(num_experts=layer.experts, hidden_size=H, formula=layer.router, **layer.spec)
    state = layer.weights(dict(layer.theirs.state_dict()))
    shared = None
    if layer.shared is not None:
        shared = SharedExperts(
            *(H, layer.shared_width, 1, "silu", dtype),
            fused_gate_up_projection="shared_experts.gate_up_proj.weight" in state,
            formula=layer.shared,
        )
    built = MoE(
        Router(spec),
        ExpertMLPsV2(config, dtype=dtype, backend=backend),
        shared,
        latent=None if layer.latent is None else Latent(layer.latent, dtype=dtype),
    )
    built.load_state_dict(state)
    return built.eval().requires_grad_(False)


def draw(name: str) -> tuple[Layer, Tensor, Tensor]:
    """Return a layer with weights that bfloat16 has, tokens and their ids."""
    torch.manual_seed(len(name))
    layer = LAYERS[name]()
    with torch.no_grad():
        for key, weight in layer.theirs.state_dict().items():
            if weight.is_floating_point():
                is_scale = "norm" in key or "scale" in key
                weight.normal_(float(is_scale), 0.2).copy_(weight.bfloat16())
            else:
                weight.copy_(torch.randint(E, weight.shape))  # twice the same, here and there
    return layer, torch.randn(2, T // 2, H).bfloat16().float(), torch.randint(V, (2, T // 2))


def run(layer: nn.Module, hidden: Tensor, ids: Tensor, is_hash: bool) -> Tensor:
    return layer(hidden, ids) if is_hash else layer(hidden)


@pytest.mark.parametrize("name", thinned(LAYERS, 4))
@torch.no_grad()
def test_torch_and_cuda_equal_transformers_in_float32(name: str) -> None:
    layer, hidden, ids = draw(name)
    expected = run(layer.theirs, hidden, ids, name.endswith("hash"))
    backends = ["torch"] if os.environ.get("TRITON_INTERPRET") != "1" else ["torch", "cuda"]
    for backend in backends:
        ours = build(layer, backend, torch.float32)
        for tokens, each in ((hidden, ids), (hidden[:, :1], ids[:, :1])):  # prefill, decode
            found = ours(tokens, token_ids=each)[0]
            assert relative_error(found, expected[:, : tokens.shape[1]]) < 1e-5, backend


@pytest.mark.long
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_nki_is_as_near_as_bfloat16_can_be(name: str) -> None:
    layer, hidden, ids = draw(name)
    expected = run(layer.theirs, hidden, ids, name.endswith("hash"))
    ours = build(layer, "nki", torch.bfloat16)
    for tokens, each in ((hidden, ids), (hidden[:, :1], ids[:, :1])):
        found = ours(tokens.bfloat16(), token_ids=each)[0].double()
        truth = expected[:, : tokens.shape[1]].double()
        assert (found - truth).norm() < 2e-2 * truth.norm()
    shown = str(ours.explain("decode", 2))
    for part, is_there in (
        ("a table of token ids", layer.spec.get("table_size")),
        ("identity experts", layer.spec.get("num_identity")),
        ("router: torch, which computes sparsemixer", layer.spec.get("mixer_jitter")),
        ("router: torch, which caps logits", layer.spec.get("logit_softcap")),
        ("latents", layer.latent),
    ):
        assert (part in shown) == bool(is_there)


@pytest.mark.parametrize(
    ("formula", "top_k", "message"),
    [
        (ExpertFormula("silu", gates_itself=True), 2, "hidden_act='silu', gates_itself=True"),
        (ExpertFormula(), 33, "top_k=33: must be 1 to 32"),
    ],
)
def test_what_no_kernel_computes_is_refused_when_the_layer_is_built(
    formula: ExpertFormula, top_k: int, message: str
) -> None:
    sizes = {"num_experts": 40, "top_k": top_k, "hidden_size": H, "intermediate_size": I}
    config = RoutedExpertsMLPOpsConfig(**sizes, hidden_act="silu", glu_mlp=True, formula=formula)
    router = Router(RouterSpec(num_experts=40, hidden_size=H, formula=RouterFormula(top_k=top_k)))
    MoE(router, ExpertMLPsV2(config))
    with pytest.raises(ValueError, match=message):
        MoE(router, ExpertMLPsV2(config, dtype=torch.bfloat16, backend="nki"))


def test_terms_that_contradict_each_other_are_refused_by_name() -> None:
    formula = RouterFormula(top_k=2, has_selection_bias=True)
    with pytest.raises(ValueError, match="table_size=9: a table chooses"):
        RouterSpec(num_experts=8, hidden_size=H, formula=formula, table_size=9)
    with pytest.raises(ValueError, match=r"mixer_jitter=0.1, .*: sparsemixer chooses two experts"):
        RouterSpec(num_experts=8, hidden_size=H, formula=formula, mixer_jitter=0.1)
    mixer = RouterSpec(num_experts=8, hidden_size=H, formula=RouterFormula(2), mixer_jitter=0.1)
    with pytest.raises(ValueError, match=r"mixer_jitter=0.1: sparsemixer trains by sampling"):
        Router(mixer)(torch.zeros(3, H))
    with pytest.raises(ValueError, match="num_identity=-1: must be a whole number"):
        RouterSpec(num_experts=8, hidden_size=H, formula=formula, num_identity=-1)
    with pytest.raises(ValueError, match="gate_softcap=4: caps a gate"):
        SharedExperts(H, I, 1, "silu", formula=ExpertFormula(gate_softcap=4.0))
    spec = RouterSpec(num_experts=8, hidden_size=H, formula=RouterFormula(2), table_size=9)
    with pytest.raises(ValueError, match="token_ids: a table of 9 token ids"):
        Router(spec)(torch.zeros(3, H))
