"""A block size set at any door is the one that the kernel of each bucket is launched with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from neuron_moe import BlockwiseMatmulConfig
from neuron_moe.backends.nki import launch
from neuron_moe.models.shipped import TINY_NAME
from neuron_moe.nxd_compat import initialize_moe_module, initialize_moe_module_v1
from neuron_moe.tuned import TunedModel, TunedPlans
from tests.neuron_moe.test_nxd_hazards import inference_config
from tests.neuron_moe.test_tuned import CHOICE, H, I
from tests.serving import stand_ins
from tests.serving.conftest import Folders
from tests.serving.stand_in_runner import Runner

BUCKETS = ((32, 64), (64, 32))  # tokens, and slots of a block


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.stand_in(monkeypatch)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which each launch of prefill adds its block size."""
    sizes: list[int] = []
    call = launch._call

    def note(kernel: Any, num_cores: int, arguments: dict[str, Any]) -> Any:
        dims = getattr(arguments.get("config"), "dims", None)
        if dims is not None:
            sizes.append(dims.block_size)
        return call(kernel, num_cores, arguments)

    monkeypatch.setattr(launch, "_call", note)
    return sizes


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of plans, one a bucket."""
    path = tmp_path_factory.mktemp("tuned") / "tuned.yaml"
    plans = [replace(CHOICE, tokens=tokens, block_size=size) for tokens, size in BUCKETS]
    TunedModel(model="m", tp=1, ep=1, lnc=2, plans=TunedPlans(prefill=tuple(plans))).write(path, "")
    return path


def run(config: BlockwiseMatmulConfig, *, is_first: bool = False) -> None:
    """Build a layer as NxDI does, in its first way for Mixtral and DBRX; run it in each bucket."""
    given = inference_config(blockwise_matmul_config=config)
    given.hidden_size, given.intermediate_size, given.hidden_act = H, I, "silu"
    if is_first:
        layer = initialize_moe_module_v1(given, 8, 2, H, I, "silu", backend="nki")
    else:
        layer = initialize_moe_module(given, backend="nki")
    layer = layer.to(torch.bfloat16)
    with torch.no_grad():
        for tokens, _ in BUCKETS:
            layer(torch.zeros(1, tokens, H, dtype=torch.bfloat16))


@pytest.mark.parametrize("is_first", [False, True], ids=["moe_v2", "moe"])
@pytest.mark.parametrize("size", [32, 64])
def test_of_nxdis_blockwise_matmul_config(size: int, is_first: bool, launched: list[int]) -> None:
    run(BlockwiseMatmulConfig(block_size=size), is_first=is_first)
    assert launched == [size] * len(BUCKETS)


def test_of_our_file_per_bucket(tuned: Path, launched: list[int]) -> None:
    run(BlockwiseMatmulConfig.from_tuned(tuned))
    assert launched == [size for _, size in BUCKETS]


@pytest.mark.long
@pytest.mark.parametrize("option", ["block_size", "tuned"])
def test_of_the_options_of_a_server(
    option: str, tuned: Path, folder_of: Folders, launched: list[int]
) -> None:
    value = {"block_size": 128, "tuned": str(tuned)}[option]
    runner = Runner(
        folder_of(TINY_NAME), torch.bfloat16, options={"backend": "nki", option: value}, trims=True
    )
    layers = len(runner.specs)
    for tokens, size in BUCKETS:
        launched.clear()
        runner.generate([list(range(3, 3 + tokens - 4))], 1)
        assert launched == [128 if option == "block_size" else size] * layers


def test_a_file_that_is_none_is_refused(tmp_path: Path, folder_of: Folders) -> None:
    path = tmp_path / "tuned.yaml"
    path.write_text("model: m\n")
    with pytest.raises(ValueError, match="tuned model"):
        Runner(folder_of(TINY_NAME), torch.bfloat16, options={"backend": "nki", "tuned": str(path)})
