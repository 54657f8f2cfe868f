"""TorchNeuron: our operators by torch's own check, and graphs for a back end that is static.

The back end stands for `torch.compile(backend="neuron")`: it takes no symbolic size, no operator of
ours, and no kernel but by the operator of `wrap_nki`.
"""

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from neuron_moe import MoE
from neuron_moe.backends.nki import launch, operators
from neuron_moe.plan import Step
from tests.neuron_moe import nki_hop
from tests.neuron_moe.nki_cases import GPT_OSS, SEPARATE, H, build

STEPS = {"decode": (4, 1), "prefill": (1, 160)}
FORMS: dict[str, dict[str, Any]] = {"fused": {}, "separate": SEPARATE}
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
)


@pytest.fixture(autouse=True)
def _from_the_start() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def _layer(form: str) -> MoE:
    torch.manual_seed(0)
    return build("nki", GPT_OSS, {}, torch.bfloat16, norm=True, **FORMS[form])


def _tokens(step: str) -> torch.Tensor:
    return torch.randn(*STEPS[step], H, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", STEPS)
def test_operators_pass_torchs_own_check(
    step: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, seen = _layer(form), list[tuple[str, tuple[Any, ...]]]()
    call = launch._call

    def note(kernel: Any, num_cores: int, arguments: dict[str, Any]) -> Any:
        texts = {
            key: operators.record_text(value) if is_dataclass(value) else value
            for key, value in arguments.items()
        }
        seen.append((operators.name_of(kernel), (num_cores, *texts.values())))
        return call(kernel, num_cores, arguments)

    with monkeypatch.context() as patch:
        patch.setattr(launch, "_call", note)
        layer(_tokens(step))
    assert seen
    for name, arguments in seen:
        operator = getattr(torch.ops.neuron_moe, name).default
        # Slots that blockwise_moe does not use are left as they were, NaN here, equal to nothing.
        checks = CHECKS[:-1] if name == "blockwise_moe" else CHECKS
        torch.library.opcheck(operator, arguments, test_utils=checks)


@pytest.mark.parametrize("registers", [False, True], ids=["wrap_nki", "nki_op"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", STEPS)
def test_a_static_back_end_gets_kernels_alone(
    step: str, form: str, registers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, targets = _layer(form), list[str]()
    wanted = layer(_tokens(step)).output
    lowered = operators.lowered(nki_hop.wrap_nki, nki_hop.nki_op if registers else None)
    monkeypatch.setattr(launch, "_LOWERED", lowered)

    def neuron(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        assert all(is_concrete_int(size) for x in inputs for size in x.shape)
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=neuron), fullgraph=True)
    assert torch.equal(compiled(_tokens(step)).output, wanted)
    phase, tokens = ("decode", 4) if step == "decode" else ("prefill", 160)
    launches = layer.plan(Step(phase, tokens)).launches()
    assert targets.count("nki_kernel_wrapper") == len(launches)
    assert (len(launches) == 1) == (form == "fused")
    assert not [each for each in targets if each.startswith("neuron_moe")]
