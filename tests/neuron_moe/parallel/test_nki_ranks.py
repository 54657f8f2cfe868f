"""Layers on the nki backend spread over gloo ranks: the sums of the ranks are the whole layer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from neuron_moe.parallel import ParallelConfig, parallel_state
from neuron_moe.sharded.sharding import shard_state_dict
from tests.neuron_moe.nki_cases import GPT_OSS, SILU, H, build, watch_launches
from tests.tolerances import rms_error

SHARED = {"intermediate_size": 64, "num_shared_experts": 1, "hidden_act": "silu"}
WORLD = {**SHARED, "over_all_ranks": True}
# layout, shared experts, kernel of a decode step
CASES: dict[str, tuple[ParallelConfig, dict[str, Any] | None, str]] = {
    "ep4": (ParallelConfig(ep=4), None, "nki.decode_layer"),
    "ep4-shared": (ParallelConfig(ep=4), SHARED, "nki.decode_moe"),
    "ep4-shared-over-all": (ParallelConfig(ep=4), WORLD, "nki.decode_layer"),
    "tp2-shared": (ParallelConfig(tp=2), SHARED, "nki.decode_layer"),
    "ep4-all-to-all": (ParallelConfig(ep=4, strategy="all_to_all"), None, "nki.decode_moe"),
    "ep2-decode-tp2": (
        ParallelConfig(ep=2, decode_moe_tp=2, decode_moe_ep=1),
        None,
        "nki.decode_layer",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_add_up_to_the_whole_layer(name: str, run_ranks: Callable[..., list[Any]]) -> None:
    config, given, kernel = CASES[name]
    shared = None if given is None else dict(given)
    over_all = shared is not None and shared.pop("over_all_ranks", False)
    whole = build("torch", GPT_OSS, {}, torch.bfloat16, 4, shared=shared, norm=True)
    steps = [torch.randn(*shape, H).bfloat16() for shape in ((1, 1), (6, 1), (2, 20))]
    with torch.no_grad():
        wanted = [whole(hidden).output for hidden in steps]

    def work(_rank: int) -> tuple[str, list[Any]]:
        parallel_state.initialize_model_parallel(config=config)
        if over_all:
            shared["tensor_model_parallel_group"] = parallel_state.get_world_group()
        layer = build("nki", GPT_OSS, {}, torch.bfloat16, 4, shared=shared, norm=True)
        layer.load_state_dict(shard_state_dict(layer, whole.state_dict()))
        with torch.no_grad():
            found = [layer(hidden).output.float().numpy() for hidden in steps]
        shown = layer.explain("decode", 1).decision.kernel
        parallel_state.destroy_model_parallel()
        return shown, found

    for shown, found in run_ranks(config.model_size, work):
        assert shown == kernel
        for ours, theirs in zip(found, wanted, strict=True):
            error = rms_error(torch.from_numpy(ours), theirs)
            assert error <= 0.01 * theirs.float().square().mean().sqrt().item()


PARTS: dict[str, tuple[ParallelConfig, dict[str, Any] | None, bool]] = {  # shared; padding
    "tp2": (ParallelConfig(tp=2), None, False),
    "ep4-padded": (ParallelConfig(ep=4), None, True),
    "tp2-shared": (ParallelConfig(tp=2), SHARED, False),
    "ep2-all-to-all": (ParallelConfig(ep=2, strategy="all_to_all"), None, False),
}


@pytest.mark.parametrize("name", PARTS)
def test_ranks_with_parts_of_a_sequence_take_two_launches(
    name: str, run_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, shared, has_padding = PARTS[name]
    in_parts: dict[str, Any] = {"sequence_parallel_enabled": True, "sequence_dimension": 1}
    whole = build("torch", SILU, {}, torch.bfloat16, 4, shared=shared, norm=True)
    hidden = torch.randn(2, 96, H).bfloat16()
    hidden[1, 60, 3] = torch.inf
    mask = torch.ones(2, 96)
    mask[0, 50:] = 0 if has_padding else 1
    given = mask if has_padding else None
    with torch.no_grad():
        wanted = whole(hidden, padding_mask=given).output

    def work(rank: int) -> tuple[list[str], Any]:
        parallel_state.initialize_model_parallel(config=config)
        layer = build("nki", SILU, {}, torch.bfloat16, 4, shared=shared, norm=True, **in_parts)
        layer.load_state_dict(shard_state_dict(layer, whole.state_dict()))
        launches = watch_launches(monkeypatch)
        with torch.no_grad():
            found = layer(_part(hidden, rank, config), padding_mask=given).output
        parallel_state.destroy_model_parallel()
        return [kernel for kernel, _ in launches], found.float().numpy()

    results = run_ranks(config.model_size, work)
    for rank, (launches, found) in enumerate(results):
        assert launches == ["router_topk", "prefill_layer"]
        ours, theirs = torch.from_numpy(found), _part(wanted, rank, config).float()
        is_broken = theirs.isnan().any(-1)
        assert torch.equal(ours.isnan().all(-1), is_broken)
        error = rms_error(ours[~is_broken], theirs[~is_broken])
        assert error <= 0.01 * theirs[~is_broken].square().mean().sqrt().item()
    assert sum(int(_part(wanted, rank, config).isnan().any()) for rank in range(len(results))) == 1


def _part(whole: torch.Tensor, rank: int, config: ParallelConfig) -> torch.Tensor:
    """Return a rank's part of [B, S, H]."""
    return whole.chunk(config.model_size, dim=1)[rank].contiguous()
