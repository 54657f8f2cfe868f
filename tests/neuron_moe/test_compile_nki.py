"""torch.compile and strict export of layers on the kernels: one graph a step, the bits of eager."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from neuron_moe import MoE
from neuron_moe.backends.nki import operators
from nki_kernels.combine import combine
from tests.neuron_moe.nki_cases import GPT_OSS, LLAMA4, SEPARATE, SILU, H, build

SHARED = {"intermediate_size": 48, "num_shared_experts": 1, "hidden_act": "silu"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt-oss": (GPT_OSS, {"norm": True}),
    "llama4-shared": (LLAMA4, {"top_k": 1, "shared": SHARED, "norm": True}),
    "index": (SILU, {"return_expert_index": True}),
    "separate": (GPT_OSS, {**SEPARATE, "norm": True}),
    "separate-shared": (SILU, {**SEPARATE, "shared": SHARED}),
}
STEPS = {"decode": 4, "prefill": 300, "short": 80}


@pytest.fixture(autouse=True)
def _from_the_start() -> Any:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=64), torch.no_grad():
        yield
    torch._dynamo.reset()


def _layer(name: str) -> MoE:
    mlp, options = CASES[name]
    return build("nki", mlp, {}, torch.bfloat16, **options)


def _tokens(step: str, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    shape = (STEPS[step], 1, H) if step == "decode" else (1, STEPS[step], H)
    return torch.randn(shape).bfloat16()


def _prepare(layer: MoE, step: str, *, has_padding: bool = False) -> None:
    phase = "decode" if step == "decode" else "prefill"
    layer.prepare(phase, STEPS[step], has_padding=has_padding)


def _assert_same(found: Any, wanted: Any) -> None:
    for one, other in zip(_parts(found), _parts(wanted), strict=True):
        assert torch.equal(one, other)


def _parts(output: Any) -> list[Tensor]:
    parts = output if isinstance(output, tuple) else (output,)
    return [part for part in parts if part is not None]


@pytest.mark.parametrize(
    ("name", "is_prepared"),
    [
        ("gpt-oss", False),
        ("separate-shared", True),
        *(pytest.param(name, False, marks=pytest.mark.long) for name in CASES if name != "gpt-oss"),
    ],
)
def test_a_step_is_one_graph_with_the_bits_of_eager(name: str, is_prepared: bool) -> None:
    layer = _layer(name)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    for number, step in enumerate(STEPS, 1):
        wanted = layer(_tokens(step))
        if is_prepared:
            _prepare(layer, step)
        _assert_same(compiled(_tokens(step)), wanted)
        assert counters["stats"]["unique_graphs"] == number
    for step in STEPS:  # that others were prepared compiles nothing anew
        _assert_same(compiled(_tokens(step, 1)), layer(_tokens(step, 1)))
    assert counters["stats"]["unique_graphs"] == len(STEPS)


@pytest.mark.parametrize("options", [{}, SEPARATE], ids=["fused", "separate"])
def test_padding_is_masked_in_a_graph(options: dict[str, Any]) -> None:
    layer = build("nki", GPT_OSS, {}, torch.bfloat16, **options)
    mask = (torch.arange(STEPS["short"]) % 3 != 0)[None]
    wanted = layer(_tokens("short"), padding_mask=mask)
    _prepare(layer, "short", has_padding=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    _assert_same(compiled(_tokens("short"), padding_mask=mask), wanted)


def test_packed_weights_are_read_in_a_graph() -> None:
    layer = _layer("gpt-oss")
    layer.expert_mlps.pack_weights(for_decode=True)
    wanted = layer(_tokens("decode"))
    _prepare(layer, "decode")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    _assert_same(compiled(_tokens("decode")), wanted)


@pytest.mark.parametrize("loads", [True, False], ids=["loaded", "in-place"])
@pytest.mark.parametrize("name", ["gpt-oss", "separate"])
def test_a_graph_has_the_weights_of_the_day(name: str, loads: bool) -> None:
    layer = _layer(name)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    before = compiled(_tokens("decode"))
    if loads:
        layer.load_state_dict({key: value * 2 for key, value in layer.state_dict().items()})
    else:
        for weight in layer.parameters():
            weight.data.mul_(2)
        layer.weights_changed()
    found = compiled(_tokens("decode"))
    assert not torch.equal(_parts(found)[0], _parts(before)[0])
    _assert_same(found, layer(_tokens("decode")))


@pytest.mark.long
def test_sizes_that_change_are_graphs_of_their_own() -> None:
    layer = _layer("gpt-oss")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for tokens in (33, 40, 47):
        rows = torch.randn(1, tokens, H).bfloat16()
        _assert_same(compiled(rows), layer(rows))


def test_experts_alone_are_a_graph_too() -> None:
    experts = _layer("gpt-oss").expert_mlps
    rows, affinities = torch.randn(40, H).bfloat16(), torch.rand(40, 2)
    index = torch.stack([torch.arange(40) % 4, torch.full((40,), 5)], 1)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True, dynamic=False)
    before = compiled(rows, affinities, index, 40)
    _assert_same(before, experts(rows, affinities, index, 40))
    experts.load_state_dict({key: value * 2 for key, value in experts.state_dict().items()})
    found = compiled(rows, affinities, index, 40)
    assert not torch.equal(found, before)
    _assert_same(found, experts(rows, affinities, index, 40))


@pytest.mark.parametrize("name", ["gpt-oss", "separate-shared"])
@pytest.mark.parametrize("step", ["decode", "short"])
def test_strict_export_gives_the_graph_too(name: str, step: str) -> None:
    layer = _layer(name)
    wanted = layer(_tokens(step))
    _prepare(layer, step)
    program = torch.export.export(layer, (_tokens(step),), strict=True)
    _assert_same(program.module()(_tokens(step)), wanted)


def test_a_kernel_of_text_is_the_kernel() -> None:
    given: list[Any] = []
    operators.lowered(given.append)
    signatures = {kernel.__name__: inspect.signature(kernel) for kernel in given}
    assert tuple(signatures) == operators.NAMES
    assert signatures["combine"] == inspect.signature(combine.func)


def test_a_compiler_of_static_shapes_takes_one_size_after_another() -> None:
    def static(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        assert not [x for x in inputs if isinstance(x, torch.SymInt)]
        sizes = [n.meta["example_value"].shape for n in graph.graph.nodes if n.op == "placeholder"]
        assert all(is_concrete_int(size) for shape in sizes for size in shape)
        return graph.forward

    layer = _layer("gpt-oss")
    compiled = torch.compile(layer, backend=static, fullgraph=True)
    for tokens in (33, 40, 300):
        rows = torch.randn(1, tokens, H).bfloat16()
        _assert_same(compiled(rows), layer(rows))
