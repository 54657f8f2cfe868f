"""The cuda backend as people run it in training: checkpoints that recompute, torch.compile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.kernels import NO_TRITON, OLDEST_TRITON

pytest.importorskip("triton", minversion=OLDEST_TRITON, reason=NO_TRITON)

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK
from neuron_moe.tools import cli
from tests.rows import thinned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E, K, H, I = 4, 2, 32, 32  # noqa: E741


def build(save_percent: int | None = None) -> MoE:
    torch.manual_seed(0)
    config = RoutedExpertsMLPOpsConfig(E, H, I, K, "silu", True)
    experts = ExpertMLPsV2(config, backend="cuda", save_percent=save_percent)
    return MoE(RouterTopK(E, K, H, act_fn="softmax"), experts).to(DEVICE)


def run(layer: MoE, call: Callable[[Tensor], Tensor], tokens: int) -> list[Tensor]:
    """Return the output, and the gradients of input and weights."""
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(1, tokens, H, generator=generator).to(DEVICE).requires_grad_()
    layer.zero_grad()
    output = call(hidden)
    output.square().sum().backward()
    gradients = [hidden.grad, *(parameter.grad for parameter in layer.parameters())]
    return [output.detach(), *(each.clone() for each in gradients if each is not None)]


@pytest.mark.parametrize("save_percent", [None, 50])
@pytest.mark.parametrize("reentrant", thinned([False, True], 2))
def test_checkpoints_that_recompute_give_the_same(
    reentrant: bool, save_percent: int | None
) -> None:
    layer = build(save_percent)
    expected = run(layer, lambda hidden: layer(hidden)[0], 20)
    again: Any = lambda hidden: checkpoint(  # noqa: E731
        lambda x: layer(x)[0], hidden, use_reentrant=reentrant
    )
    for found, wanted in zip(run(layer, again, 20), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.long
@pytest.mark.parametrize(
    ("dynamic", "trains"),
    [
        (None, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((None, False), (True, False), (True, True))
        ),
    ],
)
def test_one_graph_serves_several_numbers_of_tokens(dynamic: bool | None, trains: bool) -> None:
    layer = build()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (16, 24, 40):
        if trains:
            wanted = run(layer, lambda hidden: layer(hidden)[0], tokens)
            found = run(layer, lambda hidden: compiled(hidden)[0], tokens)
        else:
            hidden = torch.randn(1, tokens, H, device=DEVICE)
            with torch.no_grad():
                wanted, found = [layer(hidden)[0]], [compiled(hidden)[0]]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the compiled kernels")
def test_the_interpreter_refuses_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    layer = build().bfloat16()
    with pytest.raises(ValueError, match="interpreter multiplies bfloat16 wrongly"):
        layer(torch.randn(1, 4, H).bfloat16())
    words = ["generate", "--model", "tiny_gpt_oss", "--backend", "cuda", "--prompt", "a"]
    assert cli.main(words) == 2
    assert "float32 or float16" in capsys.readouterr().err


@pytest.mark.long
def test_the_command_runs_a_model_on_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--model", "tiny_gpt_oss", "--dtype", "float32", "--json"]
    words += ["--max-new-tokens", "1", "--prompt", "def main"]
    printed = []
    for backend in ("cuda", "torch"):
        assert cli.main([*words, "--backend", backend]) == 0
        printed.append(capsys.readouterr().out.split('"token_ids"')[1].split("]")[0])
    assert printed[0] == printed[1]
    assert cli.main([*words, "--backend", "cuda", "--ep", "2"]) == 2
