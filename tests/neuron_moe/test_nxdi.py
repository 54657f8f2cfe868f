"""NxDI's way in: its two builders, its configuration objects as JSON, and install()."""

import inspect
import json
import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from neuron_moe import (
    BlockwiseMatmulConfig,
    ExpertMLPsV2,
    MoE,
    RoutedExpertsMLPOpsConfig,
    RouterConfig,
    RouterTopK,
)
from neuron_moe.nxd_compat import (
    ExpertMLPs,
    RouterSinkhorn,
    destroy_moe_model_parallel,
    get_expert_parallel_rank_from_global_rank,
    get_experts_for_expert_parallel_rank,
    get_moe_ep_group,
    get_moe_tp_ep_group,
    init_tensor_expert_parallel_moe_process_groups,
    initialize_moe_module,
    initialize_moe_module_v1,
    install,
    is_installed,
    load_balancing_loss_func,
    uninstall,
)
from tests.neuron_moe.parallel.conftest import run_ranks  # noqa: F401  a fixture
from tests.neuron_moe.test_nxd_hazards import (
    OAI,
    E,
    H,
    I,
    K,
    config,
    inference_config,
    layer,
    tokens,
)

PACKAGE = "neuronx_distributed_inference"


def same_weights(built: MoE, wanted: MoE) -> MoE:
    state = {
        name: value for name, value in wanted.state_dict().items() if not name.startswith("rmsnorm")
    }
    built.load_state_dict(state, strict=False)
    return built


def test_the_second_builder_reads_the_neuron_configuration() -> None:
    keys = {key: OAI[key] for key in OAI if key != "hidden_act"}
    given = inference_config(
        **keys,
        normalize_top_k_affinities=False,
        return_router_logits=True,
        return_expert_index=True,
        router_config=RouterConfig("sigmoid"),
    )
    given.hidden_act, given.n_shared_experts = "sigmoid", 2
    built = initialize_moe_module(
        given, rmsnorm=nn.RMSNorm(H), init_tkg_module=True, router_bias=True, experts_bias=True
    )
    assert not built.training
    assert (built.router.act_fn, built.router.bias, built.router.dtype) == (
        "sigmoid",
        True,
        torch.float32,
    )
    formula = built.expert_mlps.spec.formula
    assert (formula.gates_itself, formula.up_offset, formula.scale) == (True, 1.0, 1.702)
    assert formula.has_gate_up_bias
    assert built.shared_experts is not None
    assert built.shared_experts.spec.intermediate_size == 2 * I
    assert built.rmsnorm is not None
    found = built(tokens(2, 4), residual=tokens(2, 4))
    assert [x.dtype for x in found] == [torch.float32, torch.float32, torch.int64, torch.float32]
    assert found[-1] is found.residual
    assert found[-2] is found.expert_index


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [((1, 160), "prefill_layer"), ((1, 48), "decode_layer"), ((4, 1), "decode_layer")],
    ids=["prefill", "short-prefill", "decode"],
)
def test_nxdis_defaults_run_through_the_kernels(shape: tuple[int, int], kernel: str) -> None:
    given = inference_config(torch_dtype=torch.bfloat16)
    given.hidden_size, given.intermediate_size = 128, 64
    nki = initialize_moe_module(given, backend="nki")
    exact = initialize_moe_module(given)
    exact.load_state_dict(nki.state_dict())
    x = torch.randn(*shape, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    phase = "decode" if shape[1] == 1 else "prefill"
    shown = nki.explain(phase, shape[0] * shape[1])
    assert shown.decision.kernel == f"nki.{kernel}"
    assert "use_index_calc_kernel=False" in str(shown)
    with torch.no_grad():
        found, wanted = nki(x)[0].float(), exact(x)[0].float()
    assert (found - wanted).pow(2).mean() < 1e-4 * wanted.pow(2).mean()


def test_the_first_builder_reads_its_arguments() -> None:
    given = inference_config(capacity_factor=1.0)
    built = initialize_moe_module_v1(given, E, K, H, I, "silu")
    wanted = layer(config(normalize_top_k_affinities=True, capacity_factor=1.0))
    with torch.no_grad():
        found = same_weights(built, wanted)(tokens(1, 48))
    assert len(found) == 1
    torch.testing.assert_close(found[0], wanted(tokens(1, 48))[0])


def test_the_first_experts_are_the_second_ones() -> None:
    wanted = layer(config(**OAI, bias=True)).expert_mlps
    keys = {key: value for key, value in OAI.items() if key != "hidden_act"}
    first = ExpertMLPs(E, K, H, I, "sigmoid", True, None, bias=True, block_size=16, **keys)
    first.load_state_dict(wanted.state_dict())
    assert first.spec == wanted.spec
    assert first.tuning.block_size == 16
    assert ExpertMLPs(E, K, H, I, "silu", True, None).blockwise_matmul_config.leaves_block_size


def test_every_argument_of_the_first_experts_is_passed_on() -> None:
    taken = {"init_method"}  # input_layer_init_method of the configuration
    for each in (RoutedExpertsMLPOpsConfig, BlockwiseMatmulConfig, ExpertMLPsV2):
        taken |= set(inspect.signature(each).parameters)
    assert set(inspect.signature(ExpertMLPs).parameters) <= taken
    sizes = (4, 2, 16, 8, "silu", True, None)
    built = ExpertMLPs(*sizes, bias=True, skip_dma_weight=True, dtype=torch.bfloat16)
    assert (built.config.bias, built.blockwise_matmul_config.skip_dma_weight) == (True, True)
    assert (built.dtype, built.blockwise_matmul_config.leaves_block_size) == (torch.bfloat16, True)


@pytest.mark.parametrize("factor", [0, -1.0])
def test_nxds_capacity_of_zero_and_below_computes_every_choice(factor: float) -> None:
    built = layer(config(capacity_factor=factor))
    assert built.expert_mlps.spec.capacity_factor is None
    assert f"capacity_factor={factor}" in str(built.explain("prefill", 48))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("is_mxfp4_compute", True),
        ("is_intermediate_dim_shuffled", True),
    ],
)
def test_keys_that_cannot_be_honoured_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{key}={value}"):
        initialize_moe_module(inference_config(**{key: value}))


def test_one_affinity_cannot_be_normalised() -> None:
    given = inference_config()
    given.num_experts_per_tok = 1
    with pytest.raises(ValueError, match="normalize_top_k_affinities=True with top_k=1"):
        initialize_moe_module(given)


def test_only_what_is_asked_for_is_in_the_tuple() -> None:
    plain = layer()(tokens(1, 4))
    assert len(plain) == 1
    assert plain.output is plain[0]
    assert (plain.router_logits, plain.expert_index, plain.residual) == (None, None, None)
    index_only = layer(return_expert_index=True)(tokens(1, 4))
    assert index_only[-1] is index_only.expert_index
    assert index_only[-1].dtype == torch.int64


def test_a_router_may_give_dense_affinities() -> None:
    class Dense(RouterTopK):
        def forward(self, hidden_states: torch.Tensor) -> Any:
            found = super().forward(hidden_states)
            index = found.expert_index_TK.long()
            dense = torch.zeros_like(found.router_logits_TE)
            return found._replace(
                expert_affinities_TK=dense.scatter(1, index, found.expert_affinities_TK)
            )

    wanted = layer()
    built = MoE(Dense(E, K, H), wanted.expert_mlps)
    built.router.load_state_dict(wanted.router.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(built(tokens(1, 48))[0], wanted(tokens(1, 48))[0])


def test_attributes_that_models_touch_are_there() -> None:
    built = layer()
    assert (built.tensor_parallel_group, built.moe_fused_tkg, built.ep_enabled) == (
        None,
        None,
        False,
    )
    assert built.shuffle_permutation is None
    assert built.expert_mlps.return_bias is False
    assert built.expert_mlps.moe_tensor_model_parallel_group is None
    assert built.expert_mlps.moe_expert_model_parallel_group is None
    assert built.expert_mlps.get_mlp_op() is built.expert_mlps.mlp_op
    assert (built.router.dtype, built.router.bias) == (torch.float32, False)
    assert built.router.apply_act_fn_over_topk is False


def written_by_nxdi(value: Any) -> Any:
    """Return what NxDI's JSON writer makes of an object: attributes all the way down."""
    if isinstance(value, dict):
        return {key: written_by_nxdi(each) for key, each in value.items()}
    if inspect.isclass(value):
        return {"__module__": value.__module__, "__name__": value.__name__}
    if hasattr(value, "__dict__"):
        return written_by_nxdi(vars(value))
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"block_size": 512},
        {"block_size": 256, "block_sharding_strategy": "PING_PONG", "skip_dma_token": True},
        {"blockwise_nki_autograd_cls": ExpertMLPsV2, "num_static_blocks": 4},
    ],
)
def test_configurations_survive_nxdis_json(keys: dict[str, Any]) -> None:
    tuning = BlockwiseMatmulConfig.from_kwargs(**keys)
    read = json.loads(json.dumps(written_by_nxdi(tuning)))
    again = BlockwiseMatmulConfig.from_kwargs(**read, skip_dma={"skip_token": False})
    assert again == tuning
    assert again.leaves_block_size == tuning.leaves_block_size == ("block_size" not in keys)
    router = RouterConfig("sigmoid", torch.bfloat16)
    assert RouterConfig(**json.loads(json.dumps(written_by_nxdi(router)))) == router


def test_nxds_own_configuration_objects_are_taken() -> None:
    from enum import Enum

    strategy = Enum("BlockShardStrategy", {"HI_LO": 0, "PING_PONG": 1})  # type: ignore[misc]
    theirs = SimpleNamespace(
        **{**vars(BlockwiseMatmulConfig(block_size=64)), "skip_dma": (False, False)}
    )
    theirs.block_sharding_strategy = strategy.PING_PONG  # type: ignore[attr-defined]
    experts = ExpertMLPsV2(SimpleNamespace(**vars(config())), theirs)  # type: ignore[arg-type]
    assert experts.tuning.block_size == 64
    assert experts.blockwise_matmul_config.block_sharding_strategy == "PING_PONG"
    assert experts.spec == layer().expert_mlps.spec


def test_models_assign_to_the_router_configuration() -> None:
    given = RouterConfig.from_kwargs(tp_degree=64, router_topk_nki_kernel_enabled=None)
    given.act_fn, given.dtype = "sigmoid", "bfloat16"
    assert given == RouterConfig("sigmoid", torch.bfloat16)
    with pytest.raises(ValueError, match="Did you mean 'act_fn'"):
        given.act_fun = "softmax"


@pytest.fixture
def nxdi(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Return NxDI's two files and a model that has imported from each, as empty modules."""

    def theirs(*_: Any) -> str:
        return "NxDI's"

    def theirs_v1(*_: Any) -> str:
        return "NxDI's first"

    names = ("modules.moe_v2", "modules.moe", "models.qwen3_moe", "models.mixtral")
    modules = {name: ModuleType(f"{PACKAGE}.{name}") for name in names}
    for name in ("", ".modules", ".models"):
        monkeypatch.setitem(sys.modules, f"{PACKAGE}{name}", ModuleType(f"{PACKAGE}{name}"))
    for (name, module), function in zip(
        modules.items(), (theirs, theirs_v1, theirs, theirs_v1), strict=True
    ):
        vars(module)["initialize_moe_module"] = function
        monkeypatch.setitem(sys.modules, f"{PACKAGE}.{name}", module)
    return modules


def test_install_rebinds_every_model_and_says_so(
    nxdi: dict[str, ModuleType], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="neuron_moe")
    before = {name: vars(module)["initialize_moe_module"] for name, module in nxdi.items()}
    shown = install(backend="torch")
    assert is_installed()
    assert [str(each) for each in shown] == [record.message for record in caplog.records]
    assert {each.module for each in shown} == {f"{PACKAGE}.{name}" for name in nxdi}
    for name in ("models.qwen3_moe", "modules.moe_v2"):
        assert isinstance(vars(nxdi[name])["initialize_moe_module"](inference_config()), MoE)
    first = vars(nxdi["models.mixtral"])["initialize_moe_module"]
    assert isinstance(first(inference_config(), E, K, H, I, "silu"), MoE)
    assert len(install(presharded=True)) == 4
    built = vars(nxdi["models.qwen3_moe"])["initialize_moe_module"](inference_config())
    assert built.presharded is True
    back = uninstall()
    assert not is_installed()
    assert {each.module for each in back} == {each.module for each in shown}
    assert {name: vars(module)["initialize_moe_module"] for name, module in nxdi.items()} == before
    assert uninstall() == ()


def test_a_model_imported_after_install_is_restored_too(
    nxdi: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    late = ModuleType(f"{PACKAGE}.models.late")
    vars(late)["initialize_moe_module"] = vars(nxdi["modules.moe_v2"])["initialize_moe_module"]
    monkeypatch.setitem(sys.modules, late.__name__, late)
    assert late.__name__ in {each.module for each in uninstall()}
    assert vars(late)["initialize_moe_module"]() == "NxDI's"


def test_install_does_without_the_first_form(
    nxdi: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"{PACKAGE}.modules.moe")
    vars(sys.modules[f"{PACKAGE}.modules"])["__path__"] = []
    assert len(install()) == 2
    assert len(uninstall()) == 2


def test_install_without_nxdi_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.modules.moe_v2", None)
    with pytest.raises(ImportError, match=r"modules\.moe_v2: cannot be imported .* Install NxDI"):
        install()
    with pytest.raises(ValueError, match="backend='tpu'"):
        install(backend="tpu")
    assert not is_installed()


def test_moe_private_groups(run_ranks: Any) -> None:  # noqa: F811
    def build(rank: int) -> tuple[list[int], ...]:
        with pytest.raises(RuntimeError, match="init_tensor_expert_parallel"):
            get_moe_ep_group()
        init_tensor_expert_parallel_moe_process_groups(1, 4, 2, 2)
        init_tensor_expert_parallel_moe_process_groups(1, 4, 2, 2)  # nothing new
        with pytest.raises(ValueError, match="groups of 1 x 4 ranks exist"):
            init_tensor_expert_parallel_moe_process_groups(4, 1, 2, 2)
        with pytest.raises(ValueError, match="must divide the 4 processes"):
            init_tensor_expert_parallel_moe_process_groups(3, 1, 2, 2)
        groups = (get_moe_tp_ep_group(), get_moe_ep_group(), get_moe_ep_group(prefill=False))
        places = [get_expert_parallel_rank_from_global_rank(each, groups[1]) for each in range(4)]
        mine = get_experts_for_expert_parallel_rank(places[rank], E, 2)
        found = *(list(dist.get_process_group_ranks(each)) for each in groups), places, mine
        destroy_moe_model_parallel()
        dist.barrier()  # the store of all ranks lives in one of them
        return found

    assert run_ranks(4, build) == [
        ([0, 1], [0, 2], [0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 2, 3]),
        ([0, 1], [1, 3], [0, 1, 2, 3], [0, 0, 1, 1], [0, 1, 2, 3]),
        ([2, 3], [0, 2], [0, 1, 2, 3], [0, 0, 1, 1], [4, 5, 6, 7]),
        ([2, 3], [1, 3], [0, 1, 2, 3], [0, 0, 1, 1], [4, 5, 6, 7]),
    ]


def test_sinkhorns_router_is_an_argmax_and_balances_while_training() -> None:
    router = RouterSinkhorn(E, 1, H)
    with torch.no_grad():
        router.linear_router.weight[0] += 0.3  # of positive tokens all choose expert 0
    hidden = tokens(1, 16 * E).abs()
    found = router.eval()(hidden)
    assert torch.equal(found.expert_index_TK[:, 0].long(), found.router_logits_TE.argmax(1))
    assert not found.expert_index_TK.any()
    balanced = router.train()(hidden)
    assert balanced.expert_index_TK.int().flatten().bincount(minlength=E).max() < 4 * 16
    assert balanced.expert_affinities_TK.requires_grad


def test_an_even_router_has_a_balance_loss_of_one() -> None:
    even = torch.eye(E).repeat(4, 1) * 1e-4
    torch.testing.assert_close(load_balancing_loss_func(even, E, 1), torch.tensor(1.0))
    skewed = torch.zeros(32, E)
    skewed[:, 0] = 50.0
    torch.testing.assert_close(load_balancing_loss_func(skewed, E, 1), torch.tensor(float(E)))
