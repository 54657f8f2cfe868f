"""What NxD's `quantize.convert` makes of our experts; NxD's table is stood in for."""

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from neuron_moe import ExpertMLPsV2, MoE
from neuron_moe.backends.nki.prefill import _traced_terms
from neuron_moe.errors import WeightError
from neuron_moe.nxd_compat import initialize_moe_module
from neuron_moe.nxd_compat.nxd import NXD_QUANTIZED
from neuron_moe.nxd_compat.quantized import (
    BY_EXPERT,
    PER_CHANNEL,
    PER_TENSOR,
    QuantizedExpertLinear,
)
from neuron_moe.quantize import E4M3_NEURON, QuantizedWeight, dequantize_fp8, quantize_fp8
from nki_kernels.common.weight_formats import bias_terms, three_terms
from tests.neuron_moe.test_nxd_hazards import E, H, I, config, inference_config, layer, tokens

Q_CONFIG = {"quantization_type": BY_EXPERT, "quantized_dtype": torch.float8_e4m3fn}
MATRICES = tuple(f"expert_mlps.mlp_op.{name}_proj." for name in ("gate_up", "down"))


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[type, Any]:
    module, found = ModuleType(NXD_QUANTIZED), dict[type, Any]()
    vars(module)["DEFAULT_QUANT_MODULE_MAPPINGS"] = found
    monkeypatch.setitem(sys.modules, NXD_QUANTIZED, module)
    return found


def prepare(built: MoE, state: dict[str, Tensor]) -> ExpertMLPsV2:
    """Call the hook of NxD's sharder."""
    experts = built.expert_mlps
    assert isinstance(experts, ExpertMLPsV2)
    experts.preshard_hook(dict(state), "expert_mlps.weight")
    return experts


def convert(built: MoE, table: dict[type, Any], **changes: Any) -> MoE:
    """Swap the experts' modules as NxD does."""
    for experts in (part for name, part in built.named_modules() if name.endswith("mlp_op")):
        for name, child in [*experts.named_children()]:
            form = table[type(child)]
            experts._modules[name] = form.from_float(child, q_config={**Q_CONFIG, **changes})
    return built


def quantised(state: dict[str, Tensor], scheme: str = BY_EXPERT) -> dict[str, Tensor]:
    found = dict(state)
    for name in MATRICES:
        both = quantize_fp8(state[f"{name}weight"], E4M3_NEURON, scheme)
        found[f"{name}weight"], found[f"{name}scale"] = both.codes, both.scale
    return found


def decoded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    found = dict(state)
    for name in MATRICES:
        both = QuantizedWeight(state[f"{name}weight"], found.pop(f"{name}scale"))
        found[f"{name}weight"] = dequantize_fp8(both, torch.float32)
    return found


@pytest.mark.parametrize("scheme", [PER_TENSOR, PER_CHANNEL, BY_EXPERT])
@pytest.mark.parametrize("count", [1, 40])
def test_codes_compute_what_the_decoded_weights_do(
    table: dict[type, Any], scheme: str, count: int
) -> None:
    plain = layer(config())
    state = quantised(plain.state_dict(), scheme)
    built = convert(layer(config()), table, quantization_type=scheme)
    built.load_state_dict(state, strict=True)
    plain.load_state_dict(decoded(state), strict=True)
    x = tokens(1, count)
    torch.testing.assert_close(built(x)[0], plain(x)[0])
    for name, value in built.state_dict().items():
        assert torch.equal(value.float(), state[name].float())
        assert value.dtype == state[name].dtype


def test_moves_casts_and_copies_keep_the_codes(table: dict[type, Any]) -> None:
    built = convert(layer(config()), table)
    built.load_state_dict(quantised(built_state()), strict=True)
    moved = copy.deepcopy(built).to(torch.bfloat16)
    moved.expert_mlps.unpack_weights()
    first = moved.expert_mlps.mlp_op.first
    assert (first.weight.dtype, first.scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert first.matrices.dtype == torch.bfloat16
    x = tokens(1, 8)
    found = moved(x.bfloat16())[0].float()
    torch.testing.assert_close(found, built(x)[0], rtol=0.05, atol=0.05)


def built_state() -> dict[str, Tensor]:
    return layer(config()).state_dict()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("quantization_type", "blockwise_symmetric", "quantization_type='blockwise_symmetric'"),
        ("quantized_dtype", torch.int8, "quantization_dtype: .*torch.int8.*modules_to_not_convert"),
        ("quantized_dtype", torch.uint16, "quantization_dtype: .*torch.uint16"),
        ("quantization_per_channel_axis", 1, "quantization_per_channel_axis"),
    ],
)
def test_what_experts_do_not_compute_with_is_refused(
    table: dict[type, Any], key: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        convert(layer(config()), table, **{key: value})


def test_shared_experts_are_refused(table: dict[type, Any]) -> None:
    given = inference_config(quantized=True)
    given.n_shared_experts = 1
    shared = initialize_moe_module(given).shared_experts
    assert shared is not None
    with pytest.raises(ValueError, match="'shared_experts' in modules_to_not_convert"):
        table[type(shared.down_proj)].from_float(shared.down_proj, q_config=Q_CONFIG)


def test_a_state_dict_that_does_not_fit_is_refused(table: dict[type, Any]) -> None:
    state, name = quantised(built_state()), f"{MATRICES[0]}weight"
    plain, built = layer(config()), convert(layer(config()), table)
    with pytest.raises(WeightError, match=f"{name}: .*not quantised"):
        prepare(plain, state)
    loud = state[name].clone()
    loud.view(torch.uint8)[0, 0, 0] = 0x7E  # 448
    missing = {key: value for key, value in state.items() if not key.endswith("up_proj.scale")}
    for wrong, message in (
        ({**state, name: built_state()[name]}, "torch.float32 must be torch.float8_e4m3fn"),
        ({**state, name: loud}, "above 240"),
        (missing, "no scale"),
    ):
        with pytest.raises(WeightError, match=message):
            prepare(built, wrong)


def test_nxds_sharder_finds_how_scales_are_cut(table: dict[type, Any]) -> None:
    for scheme, dim, is_by_expert in (
        (PER_TENSOR, -1, False),
        (PER_CHANNEL, 2, False),
        (BY_EXPERT, 2, True),
    ):
        built = convert(layer(config()), table, quantization_type=scheme)
        op = prepare(built, quantised(built_state(), scheme)).mlp_op
        first, down = op.first, op.down_proj
        assert isinstance(first, QuantizedExpertLinear)
        assert isinstance(down, QuantizedExpertLinear)
        marks: Any = first.scale
        assert marks.partition_dim == dim
        assert marks.tensor_model_parallel == (dim == 2)
        assert marks.partition_stride == 2
        assert not vars(down.scale)["tensor_model_parallel"]
        shapes: dict[str, tuple[int, ...]] = {PER_TENSOR: (1,), PER_CHANNEL: (1, 1, H)}
        assert tuple(down.scale.shape) == shapes.get(scheme, (E, 1, H))
        assert tuple(first.weight.shape) == (E, H, 2 * I)
        assert (first.scale.shape[0] == E) == is_by_expert


def test_a_graph_splits_scales_into_the_terms_that_the_kernels_read() -> None:
    stream = torch.Generator().manual_seed(0)
    scale, bias = torch.rand(3, 7, generator=stream), torch.randn(3, 7, generator=stream)
    scale[0, 0] = bias[0, 0] = bias[1, 1] = 0
    for found, wanted in (
        (_traced_terms(scale), three_terms(scale.numpy())),
        (_traced_terms(bias, scale), bias_terms(bias.numpy(), scale.numpy())),
    ):
        assert torch.equal(found.view(torch.int16), torch.from_numpy(wanted.view("int16")))


def test_a_graph_without_numbers_is_traced(table: dict[type, Any]) -> None:
    built = convert(layer(config()), table)
    built.load_state_dict(quantised(built_state()), strict=True)
    x = tokens(1, 8)
    exported = torch.export.export(built, (x,), strict=False)
    torch.testing.assert_close(exported.module()(x)[0], built(x)[0])
