"""A decode step in one kernel, from the norm to the shared experts, beside the torch backend."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from neuron_moe import GroupLimitedRouter, MoE, MoEFusedTKGConfig, RouterTopK
from neuron_moe.backends.nki.decode import MODES
from neuron_moe.backends.nki.routed_plan import norm_of
from neuron_moe.models.layers import RMSNorm
from neuron_moe.plan import Forms, Step
from neuron_moe.train.balance import update_selection_bias
from nki_kernels.common.formula import ExpertFormula
from nki_kernels.prefill import matrix_shapes
from tests.neuron_moe.nki_cases import (
    GPT_OSS,
    LLAMA4,
    SEPARATE,
    SILU,
    H,
    assert_as_right,
    build,
    watch_launches,
)

SHARED = {"intermediate_size": 48, "num_shared_experts": 1, "hidden_act": "silu"}
LAYERS: dict[str, dict[str, Any]] = {
    "gpt-oss": {"mlp": GPT_OSS, "norm": True},
    "gpt-oss-without-norm": {"mlp": GPT_OSS},
    "llama4": {
        "mlp": LLAMA4,
        "norm": True,
        "router": lambda: RouterTopK(16, 1, H, act_fn="sigmoid", dtype=torch.bfloat16),
        "shared": SHARED,
    },
    "qwen3": {
        "mlp": SILU,
        "norm": True,
        "router": lambda: RouterTopK(32, 8, H, renormalize=True),
    },
    "qwen3-next": {
        "mlp": SILU,
        "norm": True,
        "router": lambda: RouterTopK(32, 10, H, renormalize=True),
        "shared": {**SHARED, "is_gated": True},
    },
    "deepseek-v3": {
        "mlp": SILU,
        "norm": True,
        "router": lambda: GroupLimitedRouter(
            32, 4, H, 4, 2, renormalize=True, routed_scaling_factor=2.5
        ),
        "shared": {**SHARED, "num_shared_experts": 2, "fused_gate_up_projection": True},
    },
}


def layers(name: str, **options: Any) -> list[MoE]:
    """Return the layer on nki, on torch, and on torch in float32."""
    made = {**LAYERS[name], **options}
    mlp = made.pop("mlp")
    return [
        build("nki", mlp, {}, torch.bfloat16, **made),
        build("torch", mlp, {}, torch.bfloat16, **made),
        build("torch", mlp, {}, torch.float32, **made),
    ]


def check(nki: MoE, bf16: MoE, exact: MoE, shape: tuple[int, int], **options: Any) -> None:
    hidden = torch.randn(*shape, H).bfloat16()
    with torch.no_grad():
        wanted = exact(hidden.float(), **options).output
        ours, theirs = (layer(hidden, **options).output for layer in (nki, bf16))
    assert_as_right(ours, theirs, wanted)


@pytest.mark.parametrize("batch", [1, 3, 64, 200])
@pytest.mark.parametrize("name", LAYERS)
def test_one_kernel_is_as_right_as_torch(name: str, batch: int) -> None:
    nki, bf16, exact = layers(name)
    assert nki.explain("decode", batch).decision.kernel == "nki.decode_layer"
    check(nki, bf16, exact, (batch, 1))


def test_a_speculation_window_is_one_kernel_too() -> None:
    nki, bf16, exact = layers("gpt-oss")
    assert nki.explain("speculation", 10).decision.kernel == "nki.decode_layer"
    check(nki, bf16, exact, (2, 5), is_speculative_decoding=True)


@pytest.mark.parametrize("batch", [1, 2, 16, 64])
def test_explain_names_the_mode_that_the_kernel_is_compiled_for(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = watch_launches(monkeypatch)
    nki = layers("gpt-oss")[0]
    shown = nki.explain("decode", batch)
    with torch.no_grad():
        nki(torch.randn(batch, 1, H).bfloat16())
    compiled = [args["config"].moe.mode for _, args in launches]
    assert [MODES[shown.decision.path]] == compiled
    assert f"plan: {compiled[0]} mode" in str(shown)
    assert "cost model of decode_layer" in str(shown)


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-next"])
def test_weights_laid_out_for_decode_give_the_same(name: str) -> None:
    nki, bf16, exact = layers(name)
    nki.expert_mlps.pack_weights(for_decode=True)
    assert "laid out for decode" in str(nki.explain("decode", 3))
    check(nki, bf16, exact, (3, 1))


def test_a_residual_and_the_choices_are_returned() -> None:
    nki, bf16, _ = layers("deepseek-v3", return_expert_index=True)
    hidden, residual = torch.randn(2, 5, 1, H).bfloat16()
    for layer in (nki, bf16):
        layer.enable_load_counters()
    with torch.no_grad():
        ours, theirs = (layer(hidden, residual=residual) for layer in (nki, bf16))
    assert torch.equal(ours.residual, theirs.residual)
    assert torch.equal(ours.expert_index, theirs.expert_index)
    assert torch.equal(nki.expert_load, bf16.expert_load)


def write_in_place(layer: MoE) -> None:
    torch.manual_seed(8)
    for parameter in layer.parameters():
        changed = parameter.detach() + 0.1 * torch.randn(parameter.shape)
        with torch.no_grad():
            parameter.copy_(changed.bfloat16())


def move_the_selection_bias(layer: MoE) -> None:
    load_E = torch.arange(layer.router.num_experts)
    update_selection_bias(layer.router, load_E, rate=5.0)  # so far that it decides


def write_through_data(layer: MoE) -> None:
    for parameter in layer.parameters():
        parameter.data.mul_(-0.5)
    layer.weights_changed()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3-next", write_in_place),
        ("deepseek-v3", move_the_selection_bias),
        ("qwen3-next", write_through_data),
    ],
)
def test_changed_weights_are_seen(name: str, change: Callable[[MoE], None]) -> None:
    made = layers(name)
    if change is write_through_data:
        made[0].expert_mlps.pack_weights(for_decode=True)
    check(*made, (3, 1))
    for layer in made:
        change(layer)
    check(*made, (3, 1))


def test_a_layer_that_ran_can_be_pickled_and_copied() -> None:
    nki, *_ = layers("deepseek-v3")
    hidden = torch.randn(3, 1, H).bfloat16()
    with torch.no_grad():
        wanted = nki(hidden).output
        for again in (pickle.loads(pickle.dumps(nki)), copy.deepcopy(nki)):
            assert torch.equal(again(hidden).output, wanted)


def test_training_without_a_gradient_raises() -> None:
    nki, *_ = layers("gpt-oss")
    for shape in ((3, 1), (1, 9)):
        with pytest.raises(ValueError, match=r"backend='nki'.* has no gradient"):
            nki.train()(torch.randn(*shape, H).bfloat16())
        with torch.no_grad():
            nki(torch.randn(*shape, H).bfloat16())


@pytest.mark.parametrize("switched", ["fused", "separate"])
@pytest.mark.parametrize("tokens", [2, 9, 140])
def test_a_token_that_is_not_a_number_spoils_no_other(switched: str, tokens: int) -> None:
    nki, *_ = layers("gpt-oss", **(SEPARATE if switched == "separate" else {}))
    hidden = torch.randn(tokens, 1, H).bfloat16()
    with torch.no_grad():
        wanted = nki(hidden).output
        hidden[1] = float("nan")
        found = nki(hidden).output
    others = torch.arange(tokens) != 1
    assert found[1].isnan().all()
    assert torch.equal(found[others], wanted[others])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "off": (SEPARATE, "moe_fused_kernel_enabled=False"),
    "logits": ({"return_router_logits": True}, "logits are returned"),
    "normalised": (
        {"mlp": {**GPT_OSS, "normalize_top_k_affinities": True}},
        "affinities are normalised after routing",
    ),
    "shared-activation": (
        {"shared": {**SHARED, "formula": ExpertFormula("gelu", scale=2.0)}},
        "activation='gelu', scale=2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_separate_kernels_run_where_one_cannot_and_explain_says_why(case: str) -> None:
    options, reason = REFUSED[case]
    nki, bf16, exact = layers("gpt-oss", **options)
    shown = nki.explain("decode", 3)
    assert shown.decision.kernel == "nki.decode_moe"
    assert any(note.startswith("not fused:") and reason in note for note in shown.notes)
    check(nki, bf16, exact, (3, 1))


NARROW: dict[str, tuple[torch.dtype, float, str]] = {
    "e4m3": (torch.float8_e4m3fn, 1.0, "float8_e4m3"),
    "e4m3-above-240": (torch.float8_e4m3fn, 448.0, "bfloat16"),
    "e5m2": (torch.float8_e5m2, 1.0, "float8_e5m2"),
    "int8": (torch.int8, 60.0, "bfloat16"),
}


def narrow_shared_experts(layer: MoE, dtype: torch.dtype, largest: float) -> None:
    """Turn the matrices of shared experts into 8 bits, the largest number of each as given."""
    shared = layer.shared_experts
    for linear in (shared.gate_proj, shared.up_proj, shared.down_proj):
        wide = linear.weight.detach()
        codes = (wide / wide.abs().max() * largest).to(dtype)
        linear.weight = nn.Parameter(codes, requires_grad=False)
    layer.weights_changed()


@pytest.mark.parametrize("shape", [(16, 1), pytest.param((1, 70), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("name", NARROW)
def test_shared_experts_in_8_bits_are_computed_in_the_kernel(
    name: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, largest, read_as = NARROW[name]
    made = layers("qwen3-next")
    for layer in made:
        narrow_shared_experts(layer, dtype, largest)
    launches = watch_launches(monkeypatch)
    check(*made, shape)
    (kernel, args), is_decode = launches[0], shape[1] == 1
    assert kernel == ("decode_layer" if is_decode else "prefill_layer")
    config = args["config"]
    assert read_as == (config.form.shared_format if is_decode else config.shared.weight_format)


def test_shared_experts_are_the_operands_of_one_expert() -> None:
    nki = layers("gpt-oss", shared=SHARED)[0]
    (launch,) = nki.plan(Step("prefill", 70)).launches()
    names = ("shared_gate_up", "shared_down")
    shapes = tuple(tuple(launch.operands[name].shape) for name in names)
    assert shapes == matrix_shapes(launch.records["config"].shared)


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.bfloat16, 40960), (torch.float8_e5m2, 49152)], ids=str
)
def test_wide_shared_experts_are_read_by_parts(
    dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {**SHARED, "intermediate_size": width}
    made = layers("gpt-oss", shared=shared)
    if dtype is not torch.bfloat16:
        for layer in made:
            narrow_shared_experts(layer, dtype, 1.0)
    launches = watch_launches(monkeypatch)
    check(*made, (1, 70))
    assert [kernel for kernel, _ in launches] == ["prefill_layer"]
    assert launches[0][1]["config"].shared.loop.by_parts


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_shared_experts_in_another_type_are_computed_beside_the_kernel(phase: str) -> None:
    nki, *_ = layers("gpt-oss", shared=SHARED)
    nki.shared_experts.to(torch.float16)
    shown = nki.explain(phase, 40)
    assert not nki.plan(Step(phase, 40)).is_fused
    assert "not fused: shared experts in float16: the kernel reads bfloat16 and 8" in str(shown)


@pytest.mark.parametrize("is_narrow", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_layer_without_numbers_is_explained(is_narrow: bool) -> None:
    nki, *_ = layers("qwen3-next")
    if is_narrow:
        narrow_shared_experts(nki, torch.float8_e5m2, 1.0)
    assert nki.to("meta").explain("decode", 4).decision.kernel == "nki.decode_layer"
    assert nki.explain("prefill", 400).decision.kernel == "nki.prefill_layer"


class OnePlusNorm(RMSNorm):
    """Qwen3-Next's norm, whose weight is what is added to 1."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return ((1 + self.weight.float()) * wide).to(hidden.dtype)


@pytest.mark.parametrize("kind", ["one-plus", "layer-norm"])
def test_a_norm_that_only_looks_like_an_rmsnorm_stays_outside(kind: str) -> None:
    made = layers("gpt-oss")
    for layer in made:
        dtype = layer.rmsnorm.weight.dtype
        norm = OnePlusNorm(H, 1e-5, dtype) if kind == "one-plus" else nn.LayerNorm(H, dtype=dtype)
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 1.5, H).bfloat16())
        layer.rmsnorm = norm
    shown = str(made[0].explain("decode", 3))
    assert "one kernel: router, routed experts\n" in shown
    assert "before it: rmsnorm, another norm than" in shown
    check(*made, (3, 1))
    for layer in made:
        layer.take_frame(layer.rmsnorm)
    assert "residual" not in str(made[0].explain("decode", 3))
    check(*made, (3, 1))


@pytest.mark.parametrize("name", ["gpt-oss", "gpt-oss-without-norm", "qwen3-next"])
@pytest.mark.parametrize("shape", [(1, 1), (64, 1), (2, 9)], ids=str)
def test_the_frame_of_a_decoder_layer_is_taken(name: str, shape: tuple[int, int]) -> None:
    made, plain = layers(name), layers(name)
    norm = RMSNorm(H, 1e-5, torch.bfloat16)
    for layer in made:
        layer.take_frame(copy.deepcopy(norm).to(layer.expert_mlps.mlp_op.down_proj.weight.dtype))
    shown = str(made[0].explain("decode", 3))
    assert "one kernel: rmsnorm, router, routed experts" in shown
    assert ", residual\n" in shown
    check(*made, shape)
    hidden = torch.randn(*shape, H).bfloat16()
    for frame, alone in ((made[1], plain[1]), (made[2], plain[2])):
        x = hidden.to(frame.expert_mlps.mlp_op.down_proj.weight.dtype)
        alone.rmsnorm = None
        with torch.no_grad():
            wanted = x + alone(norm.to(x.dtype)(x)).output
            assert torch.equal(frame(x).output, wanted)


def test_a_frame_is_no_part_of_the_state_dict() -> None:
    layer = layers("gpt-oss-without-norm")[0]
    names = set(layer.state_dict())
    layer.take_frame(RMSNorm(H, 1e-5, torch.bfloat16))
    assert set(layer.state_dict()) == names


class OnlyWeight(RMSNorm):
    """Multiplies with its weight and leaves the row as long as it is."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden


class WithLength(RMSNorm):
    """Returns the row and its length."""

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(hidden), hidden.norm()


class OneOfEachRow(RMSNorm):
    """Returns rows without their last axis."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden)[..., 0]


@pytest.mark.parametrize("kind", [OnlyWeight, WithLength, OneOfEachRow])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_norm_that_returns_something_else_is_none(
    kind: type[RMSNorm], dtype: torch.dtype
) -> None:
    assert norm_of(RMSNorm(4096, 1e-5, dtype), Forms()) is not None
    assert norm_of(kind(4096, 1e-5, dtype), Forms()) is None


class WithoutNumbers(nn.Module):
    """Has a weight or an epsilon, but not both."""

    def __init__(self, weight: torch.Tensor | None, eps: float | None) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps


@pytest.mark.parametrize(
    ("weight", "eps"), [(torch.ones(4), None), (None, 1e-5), (torch.ones(2, 2), 1e-5)]
)
def test_a_norm_without_weight_or_epsilon_is_none(
    weight: torch.Tensor | None, eps: float | None
) -> None:
    assert norm_of(WithoutNumbers(weight, eps), Forms()) is None


class ThreeAxesNorm(RMSNorm):
    """A norm that takes [B, S, H] only, as NxDI's GPT-OSS has one."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        assert hidden.ndim == 3
        return super().forward(hidden)


def test_a_norm_is_tried_as_the_layer_calls_it() -> None:
    made = layers("gpt-oss")
    for layer in made:
        norm = ThreeAxesNorm(H, 1e-5, layer.rmsnorm.weight.dtype)
        norm.load_state_dict(layer.rmsnorm.state_dict())
        layer.rmsnorm = norm
    assert made[0].explain("decode", 3).decision.kernel == "nki.decode_layer"
    check(*made, (3, 1))


def test_a_step_with_padding_is_one_launch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    nki, bf16, exact = layers("gpt-oss")
    mask = torch.tensor([[1], [0], [1]])
    launches = watch_launches(monkeypatch)
    check(nki, bf16, exact, (3, 1), padding_mask=mask)
    check(nki, bf16, exact, (3, 1))
    assert [name for name, _ in launches] == ["decode_layer", "decode_layer"]


def switches(**values: Any) -> dict[str, Any]:
    return {"tkg_config": MoEFusedTKGConfig(quantized=False, **values)}


def test_a_fused_kernel_that_is_asked_for_and_cannot_run_raises() -> None:
    nki, *_ = layers("gpt-oss", **switches(moe_fused_kernel_enabled=True))
    hidden = torch.randn(2, 1, H).bfloat16()
    with torch.no_grad():
        nki(hidden)
        nki(torch.randn(1, 9, H).bfloat16())  # prefill goes through blocks as ever
        nki(hidden, padding_mask=torch.ones(2, 1))
    asked = switches(moe_fused_kernel_enabled=True)
    nki, *_ = layers("gpt-oss", **asked, return_router_logits=True)
    with pytest.raises(ValueError, match="moe_fused_kernel_enabled=True: logits are returned"):
        nki.explain("decode", 3)


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "mx": ({"is_mxfp4_compute": True}, "is_mxfp4_compute=True: Trainium 2"),
    "router": ({"router_topk_kernel_enabled": False}, "router_topk_kernel_enabled=False"),
    "experts": ({"expert_mlp_kernel_enabled": False}, "expert_mlp_kernel_enabled=False"),
    "no-shared": ({"shared_mlp_kernel_enabled": True}, "the layer has no shared experts"),
    "norm": ({"norm_topk_prob": True}, "norm_topk_prob=True: neither the router"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictory_switches_raise_when_the_layer_is_built(case: str) -> None:
    values, message = CONTRADICTIONS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        build("nki", GPT_OSS, {}, torch.bfloat16, **switches(**values))
    build("torch", GPT_OSS, {}, torch.bfloat16, **switches(**values))


def test_a_dtype_of_routing_is_told_to_have_no_effect() -> None:
    layer = build("nki", GPT_OSS, {}, torch.bfloat16, **switches(router_mm_dtype=torch.bfloat16))
    shown = "router_mm_dtype=torch.bfloat16: routing is computed in float32"
    assert shown in str(layer.explain("decode", 3))


def test_weights_that_should_be_quantized_and_are_not_raise() -> None:
    nki, *_ = layers("gpt-oss", tkg_config=MoEFusedTKGConfig(quantized=True))
    with torch.no_grad(), pytest.raises(ValueError, match="quantized=True: the expert weights"):
        nki(torch.randn(2, 1, H).bfloat16())
    for linear in nki.expert_mlps.mlp_op.children():
        linear.weight.data = linear.weight.data.to(torch.float8_e5m2).bfloat16()
    nki.expert_mlps.pack_weights()
    with torch.no_grad():
        nki(torch.randn(2, 1, H).bfloat16())


def test_shared_experts_need_the_fused_kernel_if_a_kernel_is_asked_for() -> None:
    asked = switches(shared_mlp_kernel_enabled=True, moe_fused_kernel_enabled=False)
    with pytest.raises(ValueError, match="only the fused kernel computes shared experts"):
        build("nki", GPT_OSS, {}, torch.bfloat16, shared=SHARED, **asked)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * name.startswith(("gpt-oss", "qwen3")))
        for name in LAYERS
    ],
)
def test_a_prompt_is_as_right_as_torch(name: str) -> None:
    nki, bf16, exact = layers(name)
    shown = nki.explain("prefill", 180)
    assert shown.decision.kernel == "nki.prefill_layer"
    assert ("shared experts" in str(shown)) == (nki.shared_experts is not None)
    check(nki, bf16, exact, (2, 90))


@pytest.mark.parametrize("name", [pytest.param("gpt-oss", marks=pytest.mark.long), "deepseek-v3"])
def test_a_prompt_is_one_launch_and_equals_several(name: str) -> None:
    nki, *_ = layers(name)
    apart, *_ = layers(name, **SEPARATE)
    assert nki.explain("prefill", 140).decision.kernel == "nki.prefill_layer"
    shown = str(apart.explain("prefill", 140))
    assert "not fused: moe_fused_kernel_enabled=False" in shown
    hidden = torch.randn(1, 140, H).bfloat16()
    with torch.no_grad():
        one, several = nki(hidden).output.float(), apart(hidden).output.float()
    # Where the normalised tokens are rounded differs by a bit at most.
    assert (one - several).abs().max() <= 2**-6 * several.abs().max()


def test_dropped_choices_keep_a_prompt_in_several_launches() -> None:
    plain = {"mlp": {**GPT_OSS, "capacity_factor": 1.0}}
    nki, *_ = layers("gpt-oss", **plain)
    shown = nki.explain("prefill", 60)
    assert shown.path == "capacity"
    assert "not fused: choices beyond the capacity are dropped" in str(shown)


@pytest.mark.parametrize("shared", [None, SHARED])
@pytest.mark.parametrize("shape", [(2, 80), (40, 1)], ids=["prefill", "decode"])
def test_padding_is_told_apart_in_the_launch(
    shape: tuple[int, int], shared: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nki, bf16, _ = layers("gpt-oss", shared=shared, return_expert_index=True)
    hidden, mask = torch.randn(*shape, H).bfloat16(), torch.ones(shape)
    mask[0, : shape[1] // 3 + 1], mask[-1, -3:] = 0, 0
    launches = watch_launches(monkeypatch)
    for layer in (nki, bf16):
        layer.enable_load_counters()
    with torch.no_grad():
        found, wanted = (layer(hidden, padding_mask=mask) for layer in (nki, bf16))
    assert [name for name, _ in launches] == ["prefill_layer" if shape[1] > 1 else "decode_layer"]
    assert torch.equal(found.expert_index, wanted.expert_index)
    assert torch.equal(nki.expert_load, bf16.expert_load)
    torch.testing.assert_close(found.output.float(), wanted.output.float(), rtol=0.05, atol=0.02)
    assert found.output[mask == 0].any().item() is (shared is not None)
