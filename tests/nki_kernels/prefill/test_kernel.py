"""The prefill kernel against the formula, in every plan, format and option."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_kernels.common.formula import Limits, limits
from nki_kernels.common.weight_formats import split_parts
from nki_kernels.prefill import (
    BLOCK_SIZES,
    best_parts,
    check_blockwise_moe,
    cost_blockwise_moe,
    stored_parts,
)
from nki_kernels.prefill.memory import sbuf_bytes
from nki_sim import SimOptions
from tests.nki_kernels.drawing import GPT_OSS, SITU, recode
from tests.nki_kernels.prefill.cases import Prefill, config_of, sized
from tests.nki_kernels.traces import measured_cost

# max |error| of a kernel over that of the torch backend, both in bfloat16 against float64: the
# kernel rounds no more often, but the largest of many errors is a matter of luck.
WORST_FACTOR = 1.15
RMS_FACTOR = 1.02

CASES = {
    name: sized(name, **more)
    for name, more in {
        "T64-H192-I40-E4-K2-B32": {},
        "T500-H256-I192-E3-K2-by-parts-of-both-axes": {
            "routing": "zipf",
            "options": {"scaling": "pre"},
            "loop": {"in_parts": 2, "out_parts": 2, "h_parts": 2, "weight_buffers": 2},
        },
        "T200-H256-I96-E8-K2": {},
        "T130-H320-I180-E4-K4-gpt-oss": {"has_bias": True, "options": GPT_OSS},
        "T70-H2880-I360-E4-K2-B64-gpt-oss": {"has_bias": True, "options": GPT_OSS},
        "T80-H192-I45-E4-K4-B32-gpt-oss": {"has_bias": True, "options": GPT_OSS},
        "T600-H64-I4-E2-K1-B1024": {},
        "T300-H128-I128-E3-K1-B256-pre": {"options": {"scaling": "pre"}},
        "T150-H128-I256-E4-K2-post-tiles": {"options": {"scaling": "post", "stores": "tiles"}},
        "T90-H704-I524-E3-K2-B64-uneven-axes": {"has_bias": True},
        "T1-H128-I64-E8-K4-one-token": {},
        "T257-H192-I60-E5-K1-B512-gelu": {"options": {"activation": "gelu"}},
        "T150-H192-I60-E4-K2-B64-swish": {
            "options": {"activation": "sigmoid", "gates_itself": True, "scale": 1.3}
        },
        "T150-H192-I60-E4-K2-B64-swish-clamped-bias": {
            "has_bias": True,
            "options": {**GPT_OSS, "scale": 0.5},
        },
        "T150-H128-I96-E4-K2-B64-scaled-sigmoid-bias": {
            "has_bias": True,
            "options": {"activation": "sigmoid", "scale": 2.0},
        },
        "T90-H128-I64-E4-K2-B64-gelu-tanh": {"options": {"activation": "gelu_tanh", "scale": 0.7}},
        "T60-H128-I60-E4-K2-B64-relu2": {"options": {"activation": "relu2"}},
        "T150-H128-I260-E4-K2-B64-relu2-no-gate": {
            "options": {"activation": "relu2", "has_gate": False}
        },
        "T60-H128-I60-E4-K2-B64-leaky-relu": {
            "has_bias": True,
            "options": {"activation": "leaky_relu", "scale": 0.7},
        },
        "T60-H128-I60-E4-K2-B64-situ": {"has_bias": True, "options": SITU},
        "T150-H192-I60-E4-K1-B64-silu-no-gate-bias-pre": {
            "has_bias": True,
            "options": {
                "has_gate": False,
                "scaling": "pre",
                "up_limits": limits(-1.0, 1.0),
                "scale": 1.5,
            },
        },
        "T150-H192-I60-E4-K2-B64-tanh-no-gate-e4m3": {
            "options": {
                "activation": "tanh",
                "has_gate": False,
                "weight_format": "float8_e4m3",
                "has_scales": True,
            }
        },
        "T100-H128-I64-E4-K2-lnc1": {"options": {"num_cores": 1}},
        "T100-H128-I64-E4-K2-dynamic": {"options": {"loop_plan": "dynamic"}},
        "T100-H128-I64-E4-K2-B64-static": {
            "options": {"loop_plan": "static", "shard_plan": "block"}
        },
        "T400-H128-I64-E4-K2-B64-dynamic-skip": {
            "options": {"loop_plan": "dynamic", "skip_weights": True}
        },
        "T300-H192-I60-E4-K2-B64-halves-skip-bias": {
            "has_bias": True,
            "options": {
                **GPT_OSS,
                "loop_plan": "dynamic",
                "shard_plan": "block",
                "in_halves": True,
                "skip_weights": True,
            },
        },
        "T300-H128-I64-E4-K2-B64-static-skip-e4m3": {
            "options": {
                "loop_plan": "static",
                "shard_plan": "block",
                "skip_weights": True,
                "weight_format": "float8_e4m3",
                "has_scales": True,
                "scaling": "post",
            }
        },
        "T600-H128-I96-E2-K2-sorted-skip-pre": {
            "options": {"skip_weights": True, "scaling": "pre", "largest_work_tile": 2}
        },
        "T140-H128-I96-E4-K2-B64-intermediate": {
            "has_bias": True,
            "options": {"shard_plan": "intermediate", "scaling": "post"},
        },
        "T140-H128-I262-E4-K2-B64-intermediate-uneven": {"options": {"shard_plan": "intermediate"}},
        "T140-H128-I96-E4-K2-B64-intermediate-static": {
            "options": {"shard_plan": "intermediate", "loop_plan": "static"}
        },
        "T140-H192-I60-E4-K2-B64-hidden": {"options": {"shard_plan": "hidden"}},
        "T300-H320-I36-E3-K2-B32-hidden-gpt-oss": {
            "has_bias": True,
            "options": {**GPT_OSS, "shard_plan": "hidden"},
        },
        "T140-H256-I131-E3-K2-B64-hidden-uneven": {"options": {"shard_plan": "hidden"}},
        "T400-H256-I130-E3-K1-B64-hidden-pre": {
            "has_bias": True,
            "options": {**GPT_OSS, "shard_plan": "hidden", "scaling": "pre"},
        },
        "T140-H128-I40-E4-K2-B64-hidden-pre-no-gate": {
            "options": {"shard_plan": "hidden", "scaling": "pre", "has_gate": False}
        },
        "T200-H256-I96-E4-K2-B64-hidden-static-e4m3-post": {
            "options": {
                "shard_plan": "hidden",
                "loop_plan": "static",
                "weight_format": "float8_e4m3",
                "has_scales": True,
                "scaling": "post",
                "stores": "tiles",
            }
        },
        "T120-H256-I128-E4-K2-B64-e4m3-rows": {
            "options": {"weight_format": "float8_e4m3", "has_scales": True}
        },
        "T120-H256-I120-E4-K2-B64-e5m2-bias": {
            "has_bias": True,
            "options": {**GPT_OSS, "weight_format": "float8_e5m2", "has_scales": True},
        },
        "T90-H128-I64-E4-K2-B64-e4m3-post": {
            "options": {"weight_format": "float8_e4m3", "has_scales": True, "scaling": "post"}
        },
    }.items()
}
ROUTINGS = ("balanced", "uniform", "zipf", "one-expert", "empty-experts")


def assert_exact(problem: Prefill, run: nki_sim.Run) -> None:
    """Assert results as close to the formula in float64 as the torch backend's, and the size."""
    expected = problem.expected_slots()
    error = np.abs(problem.slots_of(run) - expected)
    allowed = np.abs(problem.torch_slots() - expected)
    assert error.max() <= WORST_FACTOR * allowed.max()
    assert np.sqrt((error**2).mean()) <= RMS_FACTOR * np.sqrt((allowed**2).mean())
    assert run.sbuf_peak_bytes <= sbuf_bytes(problem.config())


def check(problem: Prefill, options: SimOptions | None = None) -> None:
    """Assert exact results, and the cost as counted: bytes and columns are those of the trace."""
    run, config = problem.launch(options), problem.config()
    assert_exact(problem, run)
    cost = cost_blockwise_moe(config, problem.work_tiles(config), problem.slots)
    assert cost == measured_cost(run.trace)


@pytest.mark.parametrize("name", list(CASES))
def test_every_slot_is_as_exact_as_the_torch_backend(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_is_computed(routing: str) -> None:
    check(Prefill(300, 128, 64, 6, 2, routing=routing))


@pytest.mark.parametrize("name", ["T200-H256-I96-E8-K2", "T140-H192-I60-E4-K2-B64-hidden"])
@pytest.mark.parametrize("start_core", [0, 1])
def test_the_order_of_the_cores_does_not_matter(start_core: int, name: str) -> None:
    problem = CASES[name]
    check(problem, SimOptions(start_core=start_core, preempt=0.2, seed=3))


def test_unwritten_memory_does_not_matter() -> None:
    problem = CASES["T64-H192-I40-E4-K2-B32"]
    nan, zero = (problem.launch(SimOptions(fill=fill)) for fill in (0xFF, 0x00))
    assert np.array_equal(problem.slots_of(nan), problem.slots_of(zero))


@pytest.mark.parametrize("scaling", ["none", "pre", "post"])
def test_entries_of_later_work_tiles_come_after_the_first(
    scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nki_kernels.prefill.config._FIRST_ENTRIES", 8)
    check(Prefill(300, 128, 64, 6, 2, 64, options={"scaling": scaling}))


PARTS = {
    name: sized(name, **more)
    for name, more in {
        "T150-H128-I256-E3-K2-B64-one-buffer": {"loop": {"weight_buffers": 1}},
        "T150-H192-I60-E3-K2-B64-one-buffer-bias": {
            "has_bias": True,
            "options": GPT_OSS,
            "loop": {"weight_buffers": 1},
        },
        "T150-H128-I256-E3-K2-B64-2-parts": {"loop": {"weight_buffers": 1, "in_parts": 2}},
        "T150-H128-I256-E3-K2-B64-4-parts-bias": {
            "has_bias": True,
            "options": GPT_OSS,
            "loop": {"weight_buffers": 1, "in_parts": 4, "out_parts": 2, "outer_buffers": 4},
        },
        "T150-H128-I384-E3-K2-B64-3-parts-e4m3-post": {
            "loop": {"in_parts": 3, "out_parts": 2, "outer_buffers": 5},
            "options": {"weight_format": "float8_e4m3", "has_scales": True, "scaling": "post"},
        },
        "T150-H128-I512-E3-K2-B64-by-4-parts-bias": {
            "has_bias": True,
            "options": {**GPT_OSS, "weight_parts": (4, 1)},
        },
        "T150-H512-I512-E3-K2-B64-by-2-and-2-parts-of-halves": {
            "options": {"weight_parts": (4, 2), "shard_plan": "intermediate"}
        },
        "T150-H512-I256-E3-K2-B64-by-4-parts-e4m3-no-gate": {
            "options": {
                "weight_parts": (4, 2),
                "has_gate": False,
                "weight_format": "float8_e4m3",
                "has_scales": True,
            }
        },
        "T600-H128-I256-E3-K2-B64-2-parts-few-rows": {"loop": {"in_parts": 2, "row_buffers": 2}},
        "T150-H128-I512-E3-K2-B64-2-parts-of-a-half": {
            "loop": {"in_parts": 2, "row_buffers": 3, "classes": (3, 2, 1)},
            "options": {"shard_plan": "intermediate"},
        },
        "T300-H512-I256-E3-K2-B64-2-parts-of-h": {"loop": {"h_parts": 2}},
        "T300-H512-I192-E3-K2-B64-4-parts-of-h-no-gate-bias": {
            "has_bias": True,
            "options": {"has_gate": False},
            "loop": {"h_parts": 4},
        },
        "T150-H512-I384-E3-K2-B64-2-parts-of-h-in-3-e4m3": {
            "loop": {"in_parts": 3, "h_parts": 2, "out_parts": 2, "outer_buffers": 5},
            "options": {"weight_format": "float8_e4m3", "has_scales": True, "scaling": "post"},
        },
        "T300-H256-I256-E3-K2-B64-2-parts-of-h-in-2-bias": {
            "has_bias": True,
            "options": GPT_OSS,
            "loop": {"in_parts": 2, "h_parts": 2},
        },
        "T150-H512-I512-E3-K2-B64-4-parts-of-h-of-a-half-by-parts": {
            "loop": {"h_parts": 4},
            "options": {"weight_parts": (4, 2), "shard_plan": "intermediate"},
        },
        "T600-H128-I256-E3-K2-B64-rows-by-themselves": {"loop": {"piece_rows": 1}},
        "T150-H128-I512-E3-K2-B64-rows-by-themselves-of-a-half": {
            "loop": {"piece_rows": 1},
            "options": {"shard_plan": "intermediate"},
        },
        "T300-H512-I256-E3-K2-rows-by-themselves-of-half-the-columns": {
            "loop": {"piece_rows": 1},
            "options": {"shard_plan": "hidden"},
        },
        "T300-H128-I256-E5-K2-pieces-of-64": {"loop": {"piece_rows": 64}},
        "T300-H512-I256-E3-K2-B64-2-parts-of-h-e5m2": {
            "loop": {"h_parts": 2, "out_parts": 2},
            "options": {"weight_format": "float8_e5m2", "has_scales": True, "scaling": "post"},
        },
        "T600-H128-I256-E3-K2-B64-one-buffer-of-first-rows": {"loop": {"first_buffers": 1}},
        "T300-H512-I256-E3-K2-B64-one-buffer-of-first-rows-in-halves": {
            "loop": {"first_buffers": 1},
            "options": {"shard_plan": "hidden"},
        },
    }.items()
}


@pytest.mark.parametrize("name", list(PARTS))
def test_buffers_do_not_change_the_result(name: str) -> None:
    check(PARTS[name])


def test_big_experts_get_smaller_buffers() -> None:
    def parts_of(H: int, I: int) -> tuple[int, int]:  # noqa: E741
        loop = Prefill(64, H, I, 1, 1).config().loop
        return loop.in_parts, loop.h_parts

    assert parts_of(2880, 360)[0] == 1  # GPT-OSS, 8 ranks
    in_parts, h_parts = parts_of(5120, 512)  # Llama 4 Scout, 16 ranks
    assert in_parts == 1 < h_parts
    assert min(parts_of(4096, 1792)) > 1  # Mixtral, 8 ranks


def test_weights_that_do_not_fit_had_best_lie_in_parts() -> None:
    sizes = {"E": 8, "block_size": 128, "num_slots": 128 * 24, "num_tokens": 1024}
    whole = config_of(H=2880, I=360, **sizes)
    assert best_parts(whole) == (1, 1)
    cut = config_of(H=4096, I=1792, **sizes)  # Mixtral, 8 ranks
    parts = best_parts(cut)
    assert parts == (7, 4)  # the fastest of six simulated
    fitted = config_of(H=4096, I=1792, weight_parts=parts, **sizes)
    assert stored_parts(fitted) == parts


def test_parts_are_columns_in_order() -> None:
    weight = np.arange(2 * 3 * 8).reshape(2, 3, 8)
    cut = split_parts(weight, 2, halves=2)
    assert cut[1, 0].tolist() == weight[1][:, [0, 1, 4, 5]].tolist()
    assert cut[1, 1].tolist() == weight[1][:, [2, 3, 6, 7]].tolist()
    with pytest.raises(ValueError, match="parts=3: must divide the 8 columns"):
        split_parts(weight, 3)


REFUSED: dict[str, dict[str, Any]] = {
    r"I=0: must be at least 1": {"I": 0},
    r"E=0: must be at least 1": {"E": 0},
    r"block_size=384: must be one of": {"block_size": 384},
    r"num_slots=200: must be a positive multiple of block_size": {"num_slots": 200},
    r"num_cores=3: must be 1 or 2": {"num_cores": 3},
    r"weight_format='int8': must be one of bfloat16": {"weight_format": "int8"},
    r"activation='mish': must be one of silu": {"activation": "mish"},
    r"scaling='late': must be one of none": {"scaling": "late"},
    r"stores='all': must be one of tiles": {"stores": "all"},
    r"loop_plan='fast': must be one of sorted": {"loop_plan": "fast"},
    r"shard_plan='expert': must be one of balanced": {"shard_plan": "expert"},
    r"has_scales=True: bfloat16 weights have none": {"has_scales": True},
    r"I=45: must be a multiple of 2": {"shard_plan": "intermediate", "I": 45},
    r"has_gate=False: there is no gate": {"has_gate": False, "up_offset": 1.0},
    r"gates_itself=True, activation='gelu', has_gate=True: .* Use activation='sigmoid'": {
        "gates_itself": True,
        "activation": "gelu",
    },
    r"gates_itself=True, activation='sigmoid', has_gate=False: the kernel has gates": {
        "gates_itself": True,
        "activation": "sigmoid",
        "has_gate": False,
    },
    r"in_halves=True, shard_plan='balanced': only blocks are": {"in_halves": True},
    r"skip_weights=True: experts with": {"H": 4096, "I": 4096, "skip_weights": True},
    r"weight_parts: \(3, 1\) for a core": {"weight_parts": (3, 1)},
    r"weight_parts=\(3, 1\): must be positive, a multiple of the cores": {
        "weight_parts": (3, 1),
        "shard_plan": "intermediate",
    },
    r"shard_plan='hidden': experts": {"H": 8192, "I": 4096, "shard_plan": "hidden"},
    r"skip_weights=True, shard_plan='hidden': two work tiles are in flight": {
        "shard_plan": "hidden",
        "skip_weights": True,
    },
    r"largest_work_tile=0: must be at least 1": {"largest_work_tile": 0},
    r"H=0: must be a positive multiple of 64": {"H": 0},
    r"H=65: must be a positive multiple of 64": {"H": 65},
    r"num_slots=0: must be a positive multiple of block_size": {"num_slots": 0},
    r"num_slots=64: must be a positive multiple of block_size": {"num_slots": 64},
    r"num_cores=0: must be 1 or 2": {"num_cores": 0},
    r"missing='zero': must be one of skip": {"missing": "zero"},
    r"has_gate=False: there is no gate to clamp \(\(None, 7.0\)\)": {
        "has_gate": False,
        "gate_limits": Limits(has_upper=True, upper=7.0),
    },
    r"weight_parts=\(0, 1\): must be positive": {"weight_parts": (0, 1)},
    r"weight_parts=\(1, 0\): must be positive": {"weight_parts": (1, 0)},
    r"weight_parts=\(2, 1\): must be positive, .*\(1, 1\) with 'hidden'": {
        "weight_parts": (2, 1),
        "shard_plan": "hidden",
    },
    r"missing='spare', skip_weights=True: weights": {
        "missing": "spare",
        "skip_weights": True,
        "H": 4096,
        "I": 4096,
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_run_is_refused_by_name(message: str) -> None:
    sizes = {"H": 128, "I": 64, "E": 4, "block_size": 128, "num_slots": 512, "num_tokens": 128}
    with pytest.raises(ValueError, match=message):
        config_of(**{**sizes, **REFUSED[message]})


def test_limits_are_reached() -> None:
    least = config_of(
        H=64,
        I=1,
        E=1,
        block_size=BLOCK_SIZES[0],
        num_slots=BLOCK_SIZES[0],
        num_tokens=1,
        num_cores=1,
        largest_work_tile=1,
    )
    assert (least.H, least.I, least.E, least.num_tiles, least.num_cores) == (64, 1, 1, 1, 1)
    sizes = {"H": 128, "I": 45, "E": 4, "block_size": 128, "num_slots": 512, "num_tokens": 128}
    halves = config_of(**{**sizes, "I": 46, "shard_plan": "intermediate"})
    assert halves.shard.splits_i
    alone = config_of(**sizes, shard_plan="intermediate", num_cores=1)  # nothing to split
    assert not alone.shard.splits_i
    assert config_of(**sizes, shard_plan="block", in_halves=True).loop.in_halves


def test_operands_that_do_not_fit_the_configuration_are_refused() -> None:
    problem = CASES["T64-H192-I40-E4-K2-B32"]
    config = problem.config()
    good = {
        "hidden": problem.hidden_TH,
        "gate_up": problem.gate_up_codes,
        "down": problem.down_codes,
        "slots": problem.slots,
    }
    check_blockwise_moe(config, problem.work_tiles(config), good)
    for name, bad, message in (
        ("hidden", problem.hidden_TH[:, :64], r"hidden \[64, 64\]: must be \[64, 192\]"),
        ("hidden", problem.hidden_TH.astype(np.float32), r"hidden float32: must be bfloat16"),
        ("gate_up", problem.gate_up_codes[:2], r"gate_up \[2, 192, 80\]: must be \[4, 192, 80\]"),
        ("slots", problem.slots[:-32], r"slots \[\d+\]: must be"),
        ("down_bias", problem.slots, r"down_bias: not expected"),
    ):
        with pytest.raises(ValueError, match=message):
            check_blockwise_moe(config, problem.work_tiles(config), {**good, name: bad})
    work_tiles = problem.work_tiles(config)
    fewer = work_tiles._replace(work_row_tiles_CVG=work_tiles.work_row_tiles_CVG[:, :-1])
    with pytest.raises(ValueError, match=r"work tiles \[.*\]: must be \[.*\]. Use work_tiles_of"):
        check_blockwise_moe(config, fewer, good)
    with pytest.raises(ValueError, match="gate_up: missing"):
        check_blockwise_moe(config, problem.work_tiles(config), {"hidden": problem.hidden_TH})


def test_mxfp4_weights_run_as_float8_without_loss() -> None:
    options = {**GPT_OSS, "weight_format": "float8_e5m2", "has_scales": True}
    problem = Prefill(120, 128, 64, 4, 2, 64, has_bias=True, options=options)
    rng = np.random.default_rng(5)
    problem.gate_up_codes, problem.gate_up_scale, problem.gate_up = recode(rng, (4, 128, 128))
    problem.down_codes, problem.down_scale, problem.down = recode(rng, (4, 64, 128))
    check(problem)
