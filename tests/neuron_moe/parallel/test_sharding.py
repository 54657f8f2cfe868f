"""A rank reads its slices, and only those, straight from a checkpoint, and saves them."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK, SharedExperts
from neuron_moe.checkpoint import open_checkpoint
from neuron_moe.checkpoint.load import unique_parameters
from neuron_moe.models.loader import load_model
from neuron_moe.models.sample_checkpoint import make_checkpoint
from neuron_moe.parallel import CollectiveError, ParallelConfig, parallel_state
from neuron_moe.parallel.placement import ExpertPlacement
from neuron_moe.sharded import load
from neuron_moe.sharded.load import load_sharded, save_sharded, shard_checkpoint
from neuron_moe.sharded.sharding import shard_state_dict, sharding_of
from tests.models.conftest import tiny_config

E, H, I = 8, 16, 24  # noqa: E741  the axis letters of the project


def build(*, fused: bool = False, placement: ExpertPlacement | None = None) -> MoE:
    config = RoutedExpertsMLPOpsConfig(E, H, I, 2, "silu", True, bias=True)
    shared = SharedExperts(H, I, 1, "silu", fused_gate_up_projection=fused)
    return MoE(RouterTopK(E, 2, H), ExpertMLPsV2(config, placement=placement), shared)


def whole_state(fused: bool = False) -> dict[str, Tensor]:
    state = build(fused=fused).state_dict()
    return {name: torch.randn(tensor.shape) for name, tensor in state.items()}


def test_a_rank_holds_its_experts_and_its_gate_slice_before_its_up_slice() -> None:
    whole = whole_state()
    with parallel_state.as_rank(ParallelConfig(tp=2, ep=4), rank=5):  # tp_rank 1, ep_rank 2
        model = build()
        mine = shard_state_dict(model, whole)
    experts, half = slice(4, 6), slice(12, 24)
    gate_up = whole["expert_mlps.mlp_op.gate_up_proj.weight"][experts]
    expected = {
        "expert_mlps.mlp_op.gate_up_proj.weight": torch.cat(
            [gate_up[..., :I][..., half], gate_up[..., I:][..., half]], -1
        ),
        "expert_mlps.mlp_op.gate_up_proj.bias": torch.cat(
            [
                whole["expert_mlps.mlp_op.gate_up_proj.bias"][experts, :I][:, half],
                whole["expert_mlps.mlp_op.gate_up_proj.bias"][experts, I:][:, half],
            ],
            -1,
        ),
        "expert_mlps.mlp_op.down_proj.weight": whole["expert_mlps.mlp_op.down_proj.weight"][
            experts, half
        ],
        "expert_mlps.mlp_op.down_proj.bias": whole["expert_mlps.mlp_op.down_proj.bias"][experts],
        "router.linear_router.weight": whole["router.linear_router.weight"],
        "shared_experts.gate_proj.weight": whole["shared_experts.gate_proj.weight"][half],
        "shared_experts.up_proj.weight": whole["shared_experts.up_proj.weight"][half],
        "shared_experts.down_proj.weight": whole["shared_experts.down_proj.weight"][:, half],
    }
    assert mine.keys() == expected.keys() == model.state_dict().keys()
    for name, tensor in expected.items():
        assert torch.equal(mine[name], tensor), name
        assert model.state_dict()[name].shape == tensor.shape, name


def test_the_parts_of_all_ranks_make_the_whole_once() -> None:
    whole = {name: torch.zeros_like(tensor) for name, tensor in whole_state(fused=True).items()}
    config = ParallelConfig(tp=4, ep=2)
    for rank in range(8):
        with parallel_state.as_rank(config, rank):
            sharding = sharding_of(build(fused=True))
        for name, tensor in whole.items():
            if "router" in name or name.endswith("down_proj.bias"):
                continue  # whole on every tensor parallel rank
            selection = sharding(name, tuple(tensor.shape))
            grid = torch.meshgrid(*(torch.tensor(list(i)) for i in selection), indexing="ij")
            tensor[grid] += 1.0
    for name, tensor in whole.items():
        copies = 2.0 if name.startswith("shared_experts") else 1.0
        if "router" not in name and not name.endswith("down_proj.bias"):
            assert torch.equal(tensor, torch.full_like(tensor, copies)), name


def test_replicas_repeat_the_rows_of_their_expert() -> None:
    placement = ExpertPlacement((0, 1, 2, 3, 7, 4, 5, 6, 7, 0), 2, E)
    whole = whole_state()
    with parallel_state.as_rank(ParallelConfig(ep=2), rank=1):
        mine = shard_state_dict(build(placement=placement), whole)
    name = "expert_mlps.mlp_op.down_proj.weight"
    assert torch.equal(mine[name], whole[name][[4, 5, 6, 7, 0]])


CONFIGS = {
    "tp2 ep2": ParallelConfig(tp=2, ep=2),
    "ep4 all-to-all": ParallelConfig(ep=4, strategy="all_to_all"),
    "hybrid": ParallelConfig(tp=1, ep=4, decode_moe_tp=4, decode_moe_ep=1),
}


def test_a_model_over_4_ranks_gives_the_logits_of_one(run_ranks: Any, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "whole", tiny_config(), seed=1)
    tokens = torch.randint(0, 300, (2, 9), generator=torch.Generator().manual_seed(2))

    def logits(model: Any) -> list[Tensor]:
        with torch.no_grad():
            cache = model.new_cache(2, 10)
            return [model(tokens, cache=cache), model(tokens[:, :1], cache=cache)]

    def compare(rank: int) -> list[str]:
        wanted = logits(load_model(folder, dtype=torch.float32))
        problems = []
        for name, config in CONFIGS.items():
            parallel_state.initialize_model_parallel(config=config, watch=False)
            model = load_model(folder, dtype=torch.float32)
            target = tmp_path / name
            save_sharded(model, target)
            again = load_model(folder, dtype=torch.float32)
            for tensor in again.parameters():
                tensor.zero_()
            load_sharded(again, target)
            for found, phase in zip([*logits(model), *logits(again)], "pdpd", strict=True):
                reference = wanted["pd".index(phase)]
                error = float((found - reference).abs().max() / reference.abs().max())
                if error > 1e-5:
                    problems.append(f"{name} {phase}: {error:.1e}")
            parallel_state.destroy_model_parallel()
        return problems

    assert run_ranks(4, compare) == [[]] * 4


def test_one_process_shards_for_all_ranks(tmp_path: Path) -> None:
    from neuron_moe.models import gpt_oss
    from neuron_moe.models.loader import read_config

    folder = make_checkpoint(tmp_path / "whole", tiny_config(), seed=1)
    model_config = gpt_oss.Config.from_hf(read_config(folder))
    config = CONFIGS["hybrid"]
    written = shard_checkpoint(
        lambda: gpt_oss.Model(model_config, dtype=torch.bfloat16),
        open_checkpoint(folder),
        gpt_oss.weight_map(model_config),
        config,
        tmp_path / "sharded",
    )
    assert [path.name for path in written] == [
        f"rank-{rank:05d}-of-00004.safetensors" for rank in range(4)
    ]
    with parallel_state.as_rank(config, 2):
        direct = load_model(folder)
        model = load_model(folder)
        load_sharded(model, tmp_path / "sharded")
    state = unique_parameters(direct)
    assert any("mlp_op_tkg" in name for name in state)
    for name, tensor in unique_parameters(model).items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize(
    ("layout", "rank", "placement", "message"),
    [
        ((1, 4), 1, None, "sharded for tp=2, must be tp=1"),
        (
            (2, 2),
            1,
            ExpertPlacement((7, 6, 5, 4, 3, 2, 1, 0), 2, E),
            r"holds experts 0-3, slice 1 of 2, the model needs exp",
        ),
        ((2, 2), 3, None, "rank-00003-of-00004"),
        (None, 0, None, "this process has no rank"),
    ],
    ids=["layout", "placement", "no file", "no rank"],
)
def test_a_sharded_checkpoint_that_does_not_fit_is_refused(
    tmp_path: Path,
    layout: tuple[int, int] | None,
    rank: int,
    placement: ExpertPlacement | None,
    message: str,
) -> None:
    with parallel_state.as_rank(ParallelConfig(tp=2, ep=2), 1):
        save_sharded(build(), tmp_path)
    here = nullcontext()
    if layout is not None:
        here = parallel_state.as_rank(ParallelConfig(tp=layout[0], ep=layout[1]), rank)
    error = FileNotFoundError if rank == 3 else ValueError
    with here, pytest.raises(error, match=message):
        load_sharded(build(placement=placement), tmp_path)


def test_a_sharded_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    with parallel_state.as_rank(ParallelConfig(tp=2, ep=2), 1):
        save_sharded(build(), tmp_path)
        index = json.loads((tmp_path / "sharded.json").read_text())
        (tmp_path / "sharded.json").write_text(json.dumps({**index, "format": 7}))
        with pytest.raises(ValueError, match="format=7 must be 1"):
            load_sharded(build(), tmp_path)


def save_all(folder: Path, config: ParallelConfig, value: float) -> None:
    for rank in range(config.model_size):
        with parallel_state.as_rank(config, rank):
            save_sharded(filled(value), folder)


def filled(value: float) -> MoE:
    layer = build()
    with torch.no_grad():
        for parameter in (*layer.parameters(), *layer.buffers()):
            parameter.fill_(value)
    return layer


def test_files_of_two_saves_are_not_loaded_by_any_rank(tmp_path: Path) -> None:
    config = ParallelConfig(ep=2)
    save_all(tmp_path, config, 1.0)
    save_all(tmp_path, config, 2.0)
    with parallel_state.as_rank(config, 0):
        save_sharded(filled(3.0), tmp_path)
    for rank in range(2):
        with (
            parallel_state.as_rank(config, rank),
            pytest.raises(ValueError, match=r"rank-00001.*of save .*a save did not finish"),
        ):
            load_sharded(filled(0.0), tmp_path)
    with parallel_state.as_rank(config, 1):
        save_sharded(filled(3.0), tmp_path)
        layer = filled(0.0)
        load_sharded(layer, tmp_path)
    assert float(layer.router.linear_router.weight.detach().min()) == 3.0


@pytest.mark.parametrize("when", ["while it writes", "after it wrote"])
def test_a_rank_that_dies_in_a_save_leaves_the_one_before_or_a_refusal(
    run_ranks: Any, tmp_path: Path, when: str
) -> None:
    def die(*_: object, **__: object) -> None:
        os._exit(1)

    def run(rank: int) -> list[str]:
        parallel_state.initialize_model_parallel(1, expert_model_parallel_size=2, watch=False)
        save_sharded(filled(1.0), tmp_path)
        if rank == 1 and when == "while it writes":
            mock.patch.object(load, "save_file", die).start()
        elif rank == 1:
            mock.patch.object(os, "replace", die).start()
        with pytest.raises(CollectiveError, match="save_sharded"):
            save_sharded(filled(2.0), tmp_path)
        return []

    assert run_ranks(2, run, raw=True)[0] == ("ok", [])
    for rank in range(2):
        with parallel_state.as_rank(ParallelConfig(ep=2), rank):
            layer = filled(0.0)
            if when == "while it writes":
                load_sharded(layer, tmp_path)
                assert {float(each.detach().min()) for each in layer.parameters()} == {1.0}
            else:
                with pytest.raises(ValueError, match=r"rank-00000.*a save did not finish"):
                    load_sharded(layer, tmp_path)


def test_a_rank_that_cannot_write_stops_the_save_of_all(run_ranks: Any, tmp_path: Path) -> None:
    def run(rank: int) -> str:
        parallel_state.initialize_model_parallel(1, expert_model_parallel_size=2, watch=False)
        if rank == 1:
            mock.patch.object(load, "save_file", side_effect=OSError("disk full")).start()
        with pytest.raises((OSError, RuntimeError)) as caught:
            save_sharded(filled(2.0), tmp_path)
        return str(caught.value)

    first, second = run_ranks(2, run)
    assert "rank 1 could not write its part (OSError: disk full)" in first
    assert second == "disk full"
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_was_made_up_cannot_communicate() -> None:
    with (
        parallel_state.as_rank(ParallelConfig(tp=2, ep=2), 1),
        pytest.raises(RuntimeError, match="only made up"),
    ):
        build()(torch.randn(1, 3, H))
