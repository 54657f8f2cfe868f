"""Dense weights of the native form over ranks: tokens, what each rank holds, bytes."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from neuron_moe.backends.nki import launch, operators
from neuron_moe.checkpoint import unique_parameters
from neuron_moe.configs import load_config
from neuron_moe.configs.deployments import load_deployments
from neuron_moe.models.dense_parts import DenseSplit
from neuron_moe.models.deployment import Deployment
from neuron_moe.models.generation import GenerationOptions, generate
from neuron_moe.models.loader import load_model
from neuron_moe.models.shipped import TINY_NAME
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.config import ParallelConfig
from neuron_moe.serving.neuron_model import NeuronMoeNativeForCausalLM
from neuron_moe.serving.options import ServingOptions
from tests.models.families import FAMILIES, write_checkpoint
from tests.neuron_moe import nki_hop
from tests.ranks import start_ranks, values_of
from tests.repo.source import ROOT
from tests.rows import thinned
from tests.serving import stand_ins
from tests.serving.conftest import Folders, own_tokens
from tests.serving.stand_in_runner import Runner, native_class

SLOW = pytest.mark.slow
PROMPTS = [list(range(3, 8)), list(range(10, 63)), list(range(40, 70))]
WAIT_S = 1800.0  # for ranks that capture graphs beside other work
SERVED = ("gpt_oss_120b", "llama4_maverick", "qwen3_235b_a22b", "qwen3_5_397b_a17b")
# Nothing divides by four ranks: 3 query heads for each of 2 key/value heads, odd widths and rows.
ODD = {
    "num_attention_heads": 6,
    "hidden_size": 96,
    "head_dim": 32,
    "vocab_size": 301,
    "intermediate_size_mlp": 97,
    "shared_expert_intermediate_size": 50,
    "linear_num_value_heads": 6,
    "linear_num_key_heads": 2,
}


def _odd(name: str, folder: Path) -> Path:
    """Write a checkpoint of a family with axes that four ranks do not divide."""
    known = FAMILIES[name].config()
    sizes = {key: size for key, size in ODD.items() if key in known}
    if "mlp_only_layers" in known:
        sizes["intermediate_size"] = 97
    write_checkpoint(FAMILIES[name].config(**sizes), folder, seed=3)
    return folder


def _mesh(size: int, ep_degree: int) -> tuple[Any, Any]:
    """Return this rank's row and column of a mesh whose rows, as the plugin's of 8 x 8, are no runs
    of ranks.
    """
    if ep_degree in (1, size):
        return None, None
    ranks = torch.arange(size).view(-1, ep_degree).t()
    mine = [
        group
        for runs in (ranks, ranks.t())
        for run in runs.tolist()
        if (group := dist.new_group(run)) and dist.get_rank() in run
    ]
    return mine[0], mine[1]


def _serve(folder: Path, size: int, ep_degree: int, captures: bool = False) -> list[Any]:
    """Return the tokens and the graphs of each rank."""

    def serve(rank: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            group = stand_ins.GroupCoordinator(size, rank, dist.group.WORLD)
            stand_ins.stand_in(patch, group, ep_degree, mesh=_mesh(size, ep_degree))
            runner = Runner(folder, torch.float32, captures=captures, trims=True, samples=captures)
            if captures:
                runner.warm_up()
            return runner.generate(PROMPTS, 6), runner.codes

    return values_of(start_ranks(size, serve, timeout_s=WAIT_S))


@pytest.mark.parametrize(
    "name",
    [
        "llama4-maverick",
        "minimax_m2",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in (
                "qwen3_moe-sliding-dense-layers",
                "qwen2_moe-sliding-dense-layers",
                "olmoe-limited-normalised",
                "ernie4_5_moe",
                "dbrx",
                "qwen3_5_moe",
                "qwen3_next",
                "phimoe",
            )
        ),
    ],
)
def test_four_ranks_whose_axes_do_not_divide_give_the_same_tokens(
    name: str, tmp_path: Path
) -> None:
    folder = _odd(name, tmp_path)
    expected = own_tokens(folder, PROMPTS, 6)
    assert _serve(folder, 4, 1) == [(expected, [])] * 4


@pytest.mark.parametrize("layout", thinned([(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)], 3), ids=str)
@pytest.mark.parametrize(
    "name",
    [
        TINY_NAME,
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in (
                "qwen3_moe-sliding-dense-layers",
                "qwen3_5_moe",
                "llama4-maverick",
                "glm4_moe",
                "step3p5",
                "laguna",
            )
        ),
    ],
)
def test_ranks_give_the_same_tokens(name: str, layout: tuple[int, int], folder_of: Folders) -> None:
    folder = folder_of(name)
    expected = own_tokens(folder, PROMPTS, 6)
    assert _serve(folder, *layout) == [(expected, [])] * layout[0]


@pytest.mark.long
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", thinned(["qwen3_moe", TINY_NAME, "llama4-maverick"], 3, SLOW))
def test_ranks_capture_one_graph_for_each_bucket(name: str, size: int, folder_of: Folders) -> None:
    folder = folder_of(name)
    expected = own_tokens(folder, PROMPTS, 6)
    served = _serve(folder, size, 1, captures=True)
    assert [tokens for tokens, _ in served] == [expected] * size
    codes = served[0][1]
    assert len(codes) == 4
    assert [each for _, each in served] == [codes] * size, "a graph knows its rank"


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "ep_degree"),
    [
        pytest.param(1, 1, id="one", marks=SLOW),
        pytest.param(2, 1, id="tp2"),
        pytest.param(2, 2, id="ep2", marks=SLOW),
    ],
)
@pytest.mark.parametrize(
    "name", ["qwen3_5_moe", *thinned(["qwen3_moe", TINY_NAME, "llama4-maverick"], 3, SLOW)]
)
def test_graphs_with_kernels_alone_give_the_tokens_of_generate(
    name: str, size: int, ep_degree: int, folder_of: Folders
) -> None:
    # In bfloat16 ranks sum in another order: no two tokens nearly tie after these prompts.
    spans = ((200, 224), (70, 90)) if name == TINY_NAME else ((10, 40), (60, 70))
    folder, prompts = folder_of(name), [list(range(*span)) for span in spans]
    model: Any = load_model(folder, dtype=torch.bfloat16, backend="nki")
    with torch.inference_mode():
        expected = generate(model, prompts, GenerationOptions(max_new_tokens=3)).token_ids

    def serve(rank: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            group = stand_ins.GroupCoordinator(size, rank, dist.group.WORLD)
            stand_ins.stand_in(patch, group, ep_degree)
            patch.setattr(launch, "_LOWERED", operators.lowered(nki_hop.wrap_nki))
            options = {"backend": "nki", "block_size": 32}
            runner = Runner(folder, torch.bfloat16, options=options, captures=True, trims=True)
            return runner.generate(prompts, 3), runner.codes, runner.operators

    served = values_of(start_ranks(size, serve, timeout_s=WAIT_S))
    assert [tokens for tokens, *_ in served] == [expected] * size
    _, codes, found = served[0]
    assert len(codes) == 2  # of prefill and of decode
    assert all(each[1:] == (codes, found) for each in served), "a graph knows its rank"
    own = {each for each in found if not each.startswith(("aten.", "prims.", "<built-in"))}
    collectives = {each for each in own if each.startswith("_c10d_functional.")}
    assert own - collectives == {"nki_kernel_wrapper"}
    kinds = ("all_reduce", "all_gather_into_tensor", "wait_tensor")
    assert collectives == {f"_c10d_functional.{kind}.default" for kind in kinds[: 3 * (size > 1)]}


@contextmanager
def _rank(folder: Path, config: ParallelConfig, rank: int) -> Iterator[NeuronMoeNativeForCausalLM]:
    """Make the model of a rank, without weights."""
    with parallel_state.as_rank(config, rank):
        yield native_class(folder)(folder, torch.bfloat16, ServingOptions())


@pytest.mark.parametrize(
    "config", [ParallelConfig(tp=4, ep=1), ParallelConfig(tp=1, ep=4)], ids=["tp4", "ep4"]
)
def test_no_rank_holds_the_whole_of_a_dense_weight(
    config: ParallelConfig, folder_of: Folders
) -> None:
    folder = folder_of("llama4-maverick")
    whole = dict(load_model(folder).named_parameters())
    for rank in range(4):
        with _rank(folder, config, rank) as model:
            for name, parameter in model.model.named_parameters():
                is_whole = "norm" in name or "router" in name or name.endswith("o_proj.bias")
                # Two key/value heads are on two ranks each.
                parts = 1 if is_whole else 2 if ".k_proj." in name or ".v_proj." in name else 4
                assert parameter.numel() * parts == whole[name].numel(), name


def test_tokens_of_a_vocabulary_in_unlike_parts_are_not_sampled_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins.stand_in(monkeypatch)
    with (
        pytest.raises(ValueError, match="vocab_size=301 must divide by the 2 ranks"),
        parallel_state.as_rank(ParallelConfig(tp=2), 0),
    ):
        Runner(_odd("minimax_m2", tmp_path), torch.float32, samples=True)


def test_ranks_that_key_heads_do_not_divide_by_are_refused(folder_of: Folders) -> None:
    words = "tensor_parallel_size=3: must divide num_key_value_heads=2, .* Use 2"
    folder = folder_of("qwen3_moe")
    with pytest.raises(ValueError, match=words), _rank(folder, ParallelConfig(tp=3), 0):
        pass


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(40, 8, 64), (40, 8, 16), (64, 4, 64), (6, 2, 4), (48, 8, 8), (8, 8, 4), (3, 1, 4)],
)
@pytest.mark.parametrize(
    ("name", "of_heads"),
    [
        ("self_attn.q_proj.weight", (1, 0)),
        ("self_attn.k_proj.bias", (0, 1)),
        ("mlp.up_proj.weight", ()),
    ],
)
def test_parts_of_all_ranks_are_the_whole_and_of_the_counted_shape(
    heads: int, kv_heads: int, size: int, name: str, of_heads: tuple[int, ...]
) -> None:
    total = 4 * (of_heads[0] * heads + of_heads[1] * kv_heads) if of_heads else 101
    seen = []
    for rank in range(size):
        split = DenseSplit(size=size, heads=heads, kv_heads=kv_heads, rank=rank)
        part = split.part(name, (total, 2))
        assert part is not None
        assert len(part.indices) == split.shape(name, (total, 2))[0]
        seen += list(part.indices)[: part.real]
        held = part.clear(torch.ones(len(part.indices), 2))
        assert held.sum() == 2 * part.real
    copies = max(1, size // kv_heads) if name.endswith("bias") else 1
    assert sorted(seen) == sorted(list(range(total)) * copies)
    assert [*range(total)] == sorted(set(seen))


def test_query_heads_stay_with_their_key_heads() -> None:
    for rank in range(16):
        split = DenseSplit(size=16, heads=40, kv_heads=8, rank=rank)
        part = split.own_heads
        assert {head // 5 for head in part.indices} == set(split.own_kv_heads)


def _held(name: str, config: ParallelConfig, folder: Path) -> dict[str, int]:
    """Return a rank's bytes of routed experts and of the rest, of a token in the cache, and of a
    sequence where layers are recurrent.
    """
    (folder / "config.json").write_text(json.dumps(load_config(name)))
    held = {"routed experts": 0, "rest": 0}
    with _rank(folder, config, config.model_size - 1) as served:
        for parameter, tensor in unique_parameters(served.model).items():
            is_routed = ".expert_mlps." in parameter
            held["routed experts" if is_routed else "rest"] += tensor.nbytes
        spec = served.get_kv_spec()
    held["token"] = sum(
        2 * each.num_kv_heads * each.head_size * each.dtype.itemsize for each in spec.layers
    )
    held["sequence"] = sum(
        prod(shape) * dtype.itemsize
        for each in spec.recurrent_layers or []
        for shape, dtype in zip(each.shapes, each.dtypes, strict=True)
    )
    return held


@pytest.mark.parametrize("name", SERVED)
def test_a_rank_holds_what_compile_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins.stand_in(monkeypatch)
    values = {**load_deployments("trn2_48xlarge")[name], "quantization": "bf16"}
    deployment = Deployment.read(values, model=name, machine="trn2.48xlarge")
    said = deployment.memory()
    held = _held(name, ParallelConfig(tp=deployment.tp, ep=deployment.ep), tmp_path)
    assert held["routed experts"] == said.weights["routed experts"]
    assert held["routed experts"] + held["rest"] == sum(said.weights.values())
    assert held["token"] * deployment.batch * deployment.max_length == said.kv_cache
    # Pages of states are float32, the inputs of convolutions included.
    states = held["sequence"] * deployment.batch
    assert states == pytest.approx(said.state, rel=0.04)
    together = sum(said.weights.values()) + said.kv_cache
    assert together + states == pytest.approx(together + said.state, rel=0.02)


@pytest.mark.parametrize("name", SERVED)
def test_the_page_tells_what_a_rank_holds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins.stand_in(monkeypatch)
    page = (ROOT / "docs" / "serving.md").read_text()
    (row,) = re.findall(rf"^\| {name} \|(.*)\|$", page, re.MULTILINE)
    shown = [float(cell) for cell in row.split("|")]
    held, batch = _held(name, ParallelConfig(tp=1, ep=64), tmp_path), int(shown[2])
    cache = batch * (held["token"] * 8192 + held["sequence"])
    found = [held["routed experts"], held["rest"], cache]
    gib = [size / (1 << 30) for size in (*found, sum(found))]
    assert shown == [*(round(size, 2) for size in gib[:2]), batch, *(round(g, 2) for g in gib[2:])]
