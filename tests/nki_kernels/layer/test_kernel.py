"""prefill_layer against its formula: norm, ranks, broken tokens, the four launches, its cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_sim
from nki_kernels.combine import CombineDims
from nki_kernels.common.costs import KernelCost
from nki_kernels.common.formula import ExpertFormula, RouterFormula
from nki_kernels.common.weight_formats import split_parts
from nki_kernels.decode import LayerArrays, LayerForm, decode_layer_ref
from nki_kernels.index import BlockDims, index_blocks_ref
from nki_kernels.layer import (
    PrefillLayerConfig,
    check_prefill_layer,
    cost_prefill_layer,
    make_shared_config,
    prefill_layer,
    shared_work_tiles,
)
from nki_kernels.prefill import (
    ExpertSizes,
    LoopFit,
    PlanRequest,
    PrefillWork,
    make_config,
    stored_parts,
    work_tile_dims,
    work_tiles_of,
)
from nki_kernels.route import RouterConfig
from nki_sim import SimOptions
from nki_sim.language import api as nl
from tests.nki_kernels.traces import measured_cost

BF16 = ml_dtypes.bfloat16
ROUNDING = 0.01  # of the largest output: slots and inner activations are bfloat16
TOP2 = RouterFormula(top_k=2, renormalize=True)
TOP8 = RouterFormula(top_k=8, renormalize=True)
GROUPED = RouterFormula(
    top_k=4, act_fn="sigmoid", has_selection_bias=True, n_group=4, topk_group=2, renormalize=True
)
GLM = RouterFormula(top_k=8, act_fn="sigmoid", has_selection_bias=True, renormalize=True)
OPTIONS = {
    "core-1-first": SimOptions(start_core=1),
    "preempted": SimOptions(preempt=0.3, seed=4),
    "zero-filled": SimOptions(fill=0),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer on one rank; N experts of all ranks, E of this one from `first` on."""

    T: int = 40
    H: int = 256
    I: int = 64  # noqa: E741  the axis letter
    N: int = 8
    E: int = 8
    first: int = 0
    B: int = 32
    router: RouterFormula = TOP2
    has_norm: bool = True
    has_residual: bool = False
    returns_routing: bool = True
    num_cores: int = 2
    scaling: str = "none"
    broken: tuple[int, ...] = ()
    shared: int = 0  # width of shared experts
    gated: bool = False  # which a gate scales
    narrow: str = "bfloat16"  # format of their weights
    parts: tuple[int, int] | None = None  # in which these are
    fit: LoopFit | None = None
    columns: int = 0  # of the last sum
    missing: str = "skip"

    def config(self) -> PrefillLayerConfig:
        """Return what the kernel is compiled for."""
        blocks = -(-self.T * self.router.top_k // self.B) + self.E
        work = PrefillWork(self.B, blocks * self.B, self.T, self.num_cores, self.scaling)
        experts = make_config(
            ExpertFormula(),
            ExpertSizes(self.H, self.I, self.E),
            work,
            PlanRequest(fit=self.fit, missing=self.missing),
        )
        router = RouterConfig(
            self.router,
            self.N,
            self.H,
            has_norm=self.has_norm,
            num_cores=self.num_cores,
            marks_broken=True,
            has_gate=self.gated,
        )
        shared = None
        if self.shared:
            sizes = ExpertSizes(self.H, self.shared, 1, self.narrow)
            shared = make_shared_config(ExpertFormula(), sizes, self.T, experts)
            if self.parts:
                slots = -(-self.T // shared.tile_rows) * shared.tile_rows
                whole = PrefillWork(shared.tile_rows, slots, self.T, self.num_cores, stores="tiles")
                request = PlanRequest(weight_parts=self.parts)
                shared = make_config(ExpertFormula(), sizes, whole, request)
        out = CombineDims(
            nl.float32,
            True,
            self.missing,
            has_spoils=True,
            has_residual=self.has_residual,
            has_shared=shared is not None,
            has_gate=self.gated,
        )
        dims = BlockDims(self.E, self.B, blocks)
        return PrefillLayerConfig(
            router,
            dims,
            work_tile_dims(experts),
            experts,
            out,
            self.returns_routing,
            shared,
            columns=self.columns,
        )


CASES = {
    "one-tile": Case(),
    "one-token": Case(T=1),
    "two-tiles-a-core": Case(T=300, H=128),
    "no-norm": Case(has_norm=False, H=320),
    "residual": Case(has_residual=True, T=70),
    "one-core": Case(num_cores=1, T=150, has_residual=True),
    "rank-of-four": Case(N=16, E=4, first=8, T=90),
    "few-here": Case(router=TOP8, N=16, E=2, first=4, T=1600, H=128, broken=(0, 1599)),
    "front": Case(router=TOP8, N=16, E=2, first=4, T=300, H=128, broken=(0, 299), columns=2),
    "folds": Case(router=TOP8, N=16, E=4, T=300, H=128, columns=1),
    "folds-behind-pieces": Case(
        router=TOP8, N=16, E=4, T=300, H=128, broken=(7,), columns=1, B=128
    ),
    "folds-spare": Case(router=TOP8, N=16, E=8, T=190, H=128, columns=2, missing="spare"),
    "folds-residual": Case(
        router=TOP8, N=8, T=130, H=128, columns=3, has_residual=True, shared=32, broken=(3,)
    ),
    "folds-one-core": Case(router=TOP8, N=12, T=140, H=128, columns=1, num_cores=1),
    "folds-of-one-token": Case(router=TOP8, T=1, columns=1, returns_routing=False),
    "folds-scaled-inputs": Case(T=40, columns=1, scaling="pre"),
    # A core has one token more than the lists have places for an expert, the other core none.
    "room-of-one-core": Case(router=TOP2, N=256, E=64, first=128, T=129),
    "more-experts-than-partitions": Case(N=130, E=130, B=64, T=2),
    "16-of-896": Case(router=replace(GLM, top_k=16), N=896, E=896, H=64, I=16, T=9),
    "22-of-512": Case(router=replace(GLM, top_k=22), N=512, E=512, H=64, I=16, T=9),
    "groups": Case(router=GROUPED, N=16, E=16, T=33),
    "one-choice": Case(router=RouterFormula(top_k=1, act_fn="sigmoid"), T=130),
    "scaled-inputs": Case(
        router=RouterFormula(top_k=1, act_fn="sigmoid"), T=200, scaling="pre", broken=(7,)
    ),
    "shared-scaled-inputs": Case(
        router=RouterFormula(top_k=1, act_fn="sigmoid"),
        T=200,
        scaling="pre",
        broken=(7,),
        shared=64,
    ),
    "broken-tokens": Case(T=130, N=16, E=8, first=4, broken=(0, 64, 129), has_residual=True),
    "all-broken": Case(T=3, broken=(0, 1, 2)),
    "no-routing-returned": Case(returns_routing=False),
    "whole-rows": Case(T=820, H=128, E=6, N=6, B=128),
    "whole-rows-broken": Case(T=600, H=128, E=4, N=4, B=128, broken=(0, 599)),
    "whole-rows-one-core": Case(T=300, H=128, B=128, E=4, N=4, num_cores=1),
    "whole-rows-scaled-inputs": Case(
        router=RouterFormula(top_k=1, act_fn="sigmoid"),
        T=560,
        H=128,
        E=2,
        N=2,
        B=256,
        scaling="pre",
    ),
    "shared": Case(T=150, shared=96),
    "shared-residual-broken": Case(T=90, shared=32, has_residual=True, broken=(0, 63, 89)),
    "shared-one-core": Case(T=20, shared=64, num_cores=1, has_norm=False),
    "shared-one-token": Case(T=1, shared=64),
    "shared-e4m3": Case(T=40, shared=64, narrow="float8_e4m3"),
    "shared-by-parts": Case(T=40, H=512, shared=256, parts=(2, 2)),
    "shared-too-wide": Case(T=33, H=1024, shared=5120, gated=True),
    "shared-e5m2": Case(T=300, shared=96, narrow="float8_e5m2", broken=(7,)),
    "gated-e4m3": Case(T=90, shared=32, gated=True, narrow="float8_e4m3", has_residual=True),
    "gated": Case(T=300, H=192, shared=64, gated=True),
    "gated-residual-broken": Case(
        T=90, shared=32, gated=True, has_residual=True, broken=(0, 63, 89), N=16
    ),
    "gated-broken": Case(T=70, shared=32, gated=True, broken=(0, 63, 69), has_norm=False),
    "gated-one-core": Case(T=20, shared=64, gated=True, num_cores=1),
}


def draw_arrays(case: Case) -> LayerArrays:
    """Return the arrays of a case, drawn."""
    rng = np.random.default_rng(case.T + case.H)
    hidden = rng.normal(size=(case.T, case.H))
    hidden[list(case.broken)] = np.nan

    def draw(*shape: int) -> Any:
        return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(BF16)

    bias = rng.normal(size=case.N).astype(np.float32)
    return LayerArrays(
        hidden_TH=hidden.astype(BF16),
        router_weight_NH=np.ascontiguousarray(draw(case.H, case.N).T),
        gate_up_EH2I=draw(case.E, case.H, 2 * case.I),
        down_EIH=draw(case.E, case.I, case.H),
        norm_weight_H=(1 + 0.1 * rng.normal(size=case.H)).astype(BF16) if case.has_norm else None,
        selection_bias_N=bias if case.router.has_selection_bias else None,
        residual_TH=hidden.astype(BF16) if case.has_residual else None,
        shared=tuple(
            np.ascontiguousarray(draw(*shape).T.astype(case.narrow))
            for shape in ((case.H, case.shared), (case.H, case.shared), (case.shared, case.H))
        )
        if case.shared
        else None,
        shared_gate_H=(2 * draw(case.H, 1))[:, 0] if case.gated else None,
    )


def _run(case: Case, arrays: LayerArrays, options: SimOptions) -> nki_sim.Run:
    config = case.config()
    check_prefill_layer(config)
    operands = operands_of(case, arrays, config)
    return nki_sim.run(prefill_layer, lnc=case.num_cores, options=options, **operands)


def operands_of(case: Case, arrays: LayerArrays, config: PrefillLayerConfig) -> dict[str, Any]:
    """Return the kernel's operands by name."""

    def row(vector: Any) -> Any:
        return None if vector is None else vector.reshape(1, -1)

    return {
        "hidden": arrays.hidden_TH,
        "router_weight": arrays.router_weight_NH,
        "gate_up": arrays.gate_up_EH2I,
        "down": arrays.down_EIH,
        "first_expert": np.array([[case.first]], np.int32),
        "config": config,
        "norm_weight": row(arrays.norm_weight_H),
        "selection_bias": row(arrays.selection_bias_N),
        "residual": arrays.residual_TH,
        **_shared_operands(arrays, config),
    }


def _shared_operands(arrays: LayerArrays, config: PrefillLayerConfig) -> dict[str, Any]:
    if arrays.shared is None or config.shared is None:
        return {}
    gate_IH, up_IH, down_HI = arrays.shared
    names = ("shared_work_expert", "shared_work_row_tiles", "shared_iterations")
    gate_up = np.ascontiguousarray(np.concatenate([gate_IH, up_IH]).T)[None]
    down = np.ascontiguousarray(down_HI.T)[None]
    if config.shared.loop.by_parts:
        in_parts, out_parts = stored_parts(config.shared)
        gate_up, down = split_parts(gate_up, in_parts, 2), split_parts(down, out_parts)
    return {
        "shared_gate_up": gate_up,
        "shared_down": down,
        **dict(zip(names, shared_work_tiles(config.shared), strict=True)),
        "shared_gate": None if arrays.shared_gate_H is None else arrays.shared_gate_H[None],
    }


def _expected(case: Case, arrays: LayerArrays) -> Any:
    drawn = {entry.name: getattr(arrays, entry.name) for entry in fields(arrays)}
    wide = {
        name: tuple(matrix.astype(np.float64) for matrix in value)
        if name == "shared"
        else value.astype(np.float64)
        for name, value in drawn.items()
        if value is not None
    }
    return decode_layer_ref(
        LayerArrays(**wide),
        case.router,
        ExpertFormula(),
        LayerForm(case.has_norm),
        first_expert=case.first,
        rounds_to=BF16,
        scaling="pre" if case.scaling == "pre" else "post",
    )


def is_counted(name: str) -> bool:
    """Say whether a case costs what it is said to cost to the byte, and not about that."""
    roughly = ("folds-behind-pieces", "folds-spare", "whole-rows", "whole-rows-scaled-inputs")
    return name not in roughly and not (CASES[name].shared and CASES[name].broken)


LONGER = (
    "two-tiles-a-core",
    "groups",
    "shared-one-core",
    "shared-e5m2",
    "gated-e4m3",
    "shared-too-wide",
    "more-experts-than-partitions",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONGER)) for name in CASES]
)
def test_layer_equals_the_formula(name: str) -> None:
    case = CASES[name]
    arrays = draw_arrays(case)
    run = _run(case, arrays, SimOptions())
    expected = _expected(case, arrays)
    outputs = run.outputs if case.returns_routing else (run.outputs, None, None)
    whole = np.setdiff1d(np.arange(case.T), case.broken)
    assert np.isnan(outputs[0][list(case.broken)]).all()
    scale = np.abs(expected.output_TH[whole]).max(initial=0.0)
    error = np.abs(outputs[0][whole] - expected.output_TH[whole]).max(initial=0.0)
    assert error <= ROUNDING * scale
    if case.returns_routing:
        np.testing.assert_array_equal(outputs[2][whole], expected.index_TK[whole])
        # A normalised number may round the other way than in the formula.
        np.testing.assert_allclose(outputs[1][whole], expected.affinities_TK[whole], rtol=2e-3)
        if is_counted(name):
            assert _counted(case, run) == measured_cost(run.trace)


@pytest.mark.parametrize(
    "order",
    ["core-1-first", *(pytest.param(each, marks=pytest.mark.long) for each in list(OPTIONS)[1:])],
)
def test_no_order_of_cores_changes_a_bit(order: str) -> None:
    case = Case(T=200, H=128, N=16, E=8, first=4, broken=(3, 150))
    arrays = draw_arrays(case)
    first, other = (_run(case, arrays, each).outputs[0] for each in (SimOptions(), OPTIONS[order]))
    np.testing.assert_array_equal(first, other)


def test_an_expert_that_many_choose_takes_further_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = RouterFormula(top_k=2, act_fn="sigmoid", has_selection_bias=True)
    case = Case(T=300, H=128, N=16, E=16, router=crowded, broken=(3, 290))
    arrays = draw_arrays(case)
    bias = np.zeros(case.N, np.float32)
    bias[[4, 9]] = 9.0  # whom all tokens choose: 150 of each core, five row tiles
    arrays = replace(arrays, selection_bias_N=bias)
    at_once = _run(case, arrays, SimOptions())
    np.testing.assert_array_equal(np.sort(at_once.outputs[2][5]), [4, 9])
    for places, passes in ((5, 1), (3, 2), (2, 3)):
        monkeypatch.setattr("nki_kernels.index.token_lists._FLOOR", places * case.E)
        run = _run(case, arrays, SimOptions(start_core=places % 2))
        np.testing.assert_array_equal(run.outputs[0], at_once.outputs[0])
        assert not {each.kind for each in run.findings} - {"uninitialized", "output"}
        assert _counted(case, run, num_passes=passes) == measured_cost(run.trace)


@pytest.mark.parametrize(
    "value", [np.nan, *(pytest.param(each, marks=pytest.mark.long) for each in (np.inf, -np.inf))]
)
def test_a_broken_token_changes_no_other(value: float) -> None:
    case = Case(T=150, H=128, has_norm=False)
    arrays = draw_arrays(case)
    before = _run(case, arrays, SimOptions()).outputs[0]
    hidden = arrays.hidden_TH.copy()
    hidden[17, 5] = value
    after = _run(case, replace(arrays, hidden_TH=hidden), SimOptions()).outputs[0]
    assert np.isnan(after[17]).all()
    others = np.arange(150) != 17
    # Its choices take no slots: rows of other tokens move to other places of a tile.
    np.testing.assert_array_equal(after[others], before[others])


@pytest.mark.parametrize("name", ["two-tiles-a-core", "shared-residual-broken", "scaled-inputs"])
def test_padding_chooses_no_routed_expert_and_changes_no_other(name: str) -> None:
    case = replace(CASES[name], has_residual=False)
    arrays, config = draw_arrays(case), case.config()
    operands = operands_of(case, arrays, config)
    whole_TH = nki_sim.run(prefill_layer, lnc=case.num_cores, **operands).outputs[0]
    is_real_T = np.arange(case.T) % 7 < 4
    is_real_T[: case.T // 3] = True
    operands["config"] = replace(config, has_padding=True)
    operands["is_real"] = is_real_T.astype(np.int32)[:, None]
    run = nki_sim.run(prefill_layer, lnc=case.num_cores, **operands)
    output_TH = run.outputs[0]
    np.testing.assert_array_equal(output_TH[is_real_T], whole_TH[is_real_T])
    padding = np.setdiff1d(np.arange(case.T)[~is_real_T], case.broken)
    if case.shared:
        assert output_TH[padding].any(1).all()
        assert (output_TH[padding] != whole_TH[padding]).any(1).all()
    else:
        assert not output_TH[padding].any()
    if not case.broken:
        index_TK = np.where(is_real_T[:, None], run.outputs[2], -1)
        make = partial(replace, has_padding=True)
        assert cost_of(case, index_TK, make=make) == measured_cost(run.trace)


def _counted(case: Case, run: nki_sim.Run, num_passes: int = 1) -> KernelCost:
    """Return what a run, which returned its routing, is said to cost."""
    return cost_of(case, np.asarray(run.outputs[2]), num_passes)


def cost_of(
    case: Case,
    index_TK: Any,
    num_passes: int = 1,
    make: Callable[[PrefillLayerConfig], PrefillLayerConfig] = lambda config: config,
) -> KernelCost:
    """Return what a launch that chose these experts of all ranks is said to cost.

    Args:
        case: of the launch.
        index_TK: the choices.
        num_passes: over its pairs.
        make: makes what it is compiled for of what the case's own launch is.
    """
    config = make(case.config())
    index_TK = index_TK - case.first
    index_TK[list(case.broken)] = -1
    index_TK = np.where((index_TK >= 0) & (index_TK < case.E), index_TK, -1).astype(np.int32)
    mapping = index_blocks_ref(index_TK, case.E, case.B, config.dims.num_blocks)
    slots = mapping.token_position_to_id
    lists = work_tiles_of(config.experts, slots, mapping.block_to_expert)
    return cost_prefill_layer(config, lists, slots, num_passes=num_passes)


@pytest.mark.long
def test_matrices_of_shared_experts_lie_by_parts_where_cores_do_not_hold_halves() -> None:
    base = Case().config().experts
    for sizes, parts in (
        (ExpertSizes(1024, 512, 1), (1, 1)),
        (ExpertSizes(5120, 1024, 1), (4, 4)),
        (ExpertSizes(5120, 1024, 1, "float8_e4m3"), (1, 1)),
    ):
        for num_tokens in (128, 512):  # whatever the tokens
            found = make_shared_config(ExpertFormula(), sizes, num_tokens, base)
            assert stored_parts(found) == parts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"router": {"marks_broken": False}}, "would spread to others"),
        ({"router": {"returns_logits": True}}, "they stay on chip"),
        ({"router": {"hidden_dtype": "float32"}}, "experts take bfloat16"),
        ({"out": {"has_spoils": False}}, "would spread to others"),
        ({"out": {"has_shared": True}}, "Give both or none"),
        ({"out": {"has_gate": True}}, "computes the gate that the sum multiplies"),
        ({"router": {"has_gate": True}, "out": {"has_gate": True}}, "and shared experts, or none"),
    ],
)
def test_what_stages_cannot_agree_on_is_refused(
    change: dict[str, dict[str, Any]], message: str
) -> None:
    config = Case().config()
    parts = {name: replace(getattr(config, name), **fields) for name, fields in change.items()}
    with pytest.raises(ValueError, match=message):
        check_prefill_layer(replace(config, **parts))
