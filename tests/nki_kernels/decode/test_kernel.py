"""The decode kernel against the formula, in both modes, every split, format and option."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nki_kernels.common.formula import limits
from nki_kernels.decode.config import (
    DecodeSizes,
    bias_is_inside,
    bias_quadrants,
    weighs_inner,
)
from nki_kernels.decode.cost import cost_decode_moe
from nki_kernels.decode.fit import sbuf_bytes
from nki_kernels.decode.options import make_decode_config
from nki_sim import SimOptions
from tests.nki_kernels.decode.cases import Decode, records, sized
from tests.nki_kernels.drawing import GPT_OSS, SITU, recode
from tests.nki_kernels.no_skips import forbid_skips
from tests.nki_kernels.traces import measured_cost

# max |error| of the kernel over that of the torch backend, both in bfloat16 against float64: the
# kernel rounds no more often, but the largest of many errors is a matter of luck.
WORST_FACTOR = 1.25
RMS_FACTOR = 1.05

SELECTIVE, ALL = {"mode": "selective"}, {"mode": "all"}
CASES = {
    name: sized(name, **more)
    for name, more in {
        "T1-H128-I64-E8-K2": {},
        "T3-H64-I16-E512-K22": {"options": SELECTIVE},
        "T2-H64-I16-E896-K16": {"options": SELECTIVE},
        "T2-H192-I60-E8-K4-leaky-relu": {
            "has_bias": True,
            "options": {"activation": "leaky_relu"},
        },
        "T2-H192-I60-E8-K4-situ": {"has_bias": True, "options": SITU},
        "T1-H192-I60-E8-K4-gpt-oss": {"has_bias": True, "options": GPT_OSS},
        "T1-H128-I64-E4-K4-one-of-3-ranks": {"ranks": 3, "rank": 1},
        "T1-H128-I64-E8-K1-pre": {"options": {"scaling": "pre"}},
        "T2-H128-I48-E7-K3": {"options": SELECTIVE},
        "T3-H2880-I90-E4-K2-gpt-oss": {"has_bias": True, "options": {**GPT_OSS, **SELECTIVE}},
        "T2-H304-I17-E5-K2-one-element-over": {"options": SELECTIVE},
        "T4-H192-I45-E5-K10": {"ranks": 3, "rank": 2, "options": SELECTIVE},
        "T5-H704-I140-E3-K2-uneven-axes": {"has_bias": True, "options": SELECTIVE},
        "T4-H128-I131-E3-K2-uneven-rows": {"options": {"layout": "ehi"}},
        "T8-H128-I64-E9-K2-all": {"options": ALL},
        "T9-H192-I64-E24-K2-all-gpt-oss": {"has_bias": True, "options": {**GPT_OSS, **ALL}},
        "T16-H128-I64-E11-K4-selective": {"options": SELECTIVE},
        "T16-H128-I300-E5-K2-none": {"options": {"scaling": "none"}},
        "T12-H128-I64-E1-K2-one-of-4-experts": {"ranks": 4, "rank": 3, "options": SELECTIVE},
        "T6-H128-I64-E1-K1-all": {"options": ALL},
        "T6-H128-I64-E8-K2-pre-clamps-without-0": {
            "options": {
                "scaling": "pre",
                "gate_limits": limits(0.5, None),
                "up_offset": 1.0,
                **SELECTIVE,
            }
        },
        "T33-H192-I60-E3-K2-pre-gpt-oss": {
            "ranks": 2,
            "rank": 1,
            "has_bias": True,
            "options": {**GPT_OSS, "scaling": "pre", **SELECTIVE},
        },
        "T64-H256-I40-E21-K8": {"options": SELECTIVE},
        "T100-H320-I64-E6-K2-gelu-all": {"options": {"activation": "gelu", **ALL}},
        "T128-H128-I96-E13-K3": {"options": SELECTIVE},
        "T200-H192-I60-E5-K2-gpt-oss": {"has_bias": True, "options": {**GPT_OSS, **SELECTIVE}},
        "T256-H1088-I64-E3-K1-all": {"options": ALL},
        "T130-H2048-I20-E3-K2-six-banks-of-sums": {"options": SELECTIVE},
        "T256-H1536-I16-E3-K2-six-banks-of-sums": {"options": ALL},
        "T256-H2048-I256-E1-K1-lnc1-packed-two-chunks-in-a-group": {
            "num_cores": 1,
            "options": {"layout": "packed", **SELECTIVE},
        },
        "T40-H128-I64-E4-K2-lnc1": {"num_cores": 1, "options": SELECTIVE},
        "T16-H128-I64-E3-K2-lnc1-all": {"num_cores": 1, "options": ALL},
        "T7-H128-I64-E4-K2-bfloat16": {"options": {"output_dtype": "bfloat16", **SELECTIVE}},
    }.items()
}
ROUTINGS = ("balanced", "uniform", "zipf", "one-expert", "empty-experts", "no-hit")


def check(problem: Decode, options: SimOptions | None = None) -> None:
    """Assert a result as close to the formula as the torch backend's, cost and size as counted."""
    run, config = problem.launch(options), problem.config()
    expected = problem.expected()
    error = np.abs(run.outputs.astype(np.float64) - expected)
    reference = problem.torch_output()
    if config.output_dtype == "bfloat16":
        reference = reference.astype(run.outputs.dtype).astype(np.float64)
    allowed = np.abs(reference - expected)
    assert error.max() <= WORST_FACTOR * allowed.max()
    assert np.sqrt((error**2).mean()) <= RMS_FACTOR * np.sqrt((allowed**2).mean())
    assert measured_cost(run.trace) == cost_decode_moe(config, problem.touched())
    assert run.sbuf_peak_bytes <= sbuf_bytes(config)


@pytest.mark.parametrize("name", list(CASES))
def test_every_token_is_as_exact_as_the_torch_backend(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("options", [SELECTIVE, ALL], ids=["selective", "all"])
def test_a_long_bias_lies_on_several_partitions(
    options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Decode(5, 1024, 32, 5, 2, has_bias=True, options=options)
    whole = problem.launch()
    monkeypatch.setattr("nki_kernels.decode.config._MAX_ROW", 512)
    assert bias_quadrants(problem.config()) == 4
    check(problem)
    assert np.array_equal(problem.launch().outputs, whole.outputs)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["selective", "all"])
def test_a_hidden_axis_of_32768_with_biases_fits(mode: str) -> None:
    problem = Decode(2, 32768, 32, 2, 1, has_bias=True, options={"mode": mode})
    run, config = problem.launch(SimOptions(mode="indices")), problem.config()
    assert measured_cost(run.trace) == cost_decode_moe(config, problem.touched())
    assert run.sbuf_peak_bytes <= sbuf_bytes(config)


@pytest.mark.long
@pytest.mark.parametrize(
    ("T", "H", "I", "parts"),
    [(64, 7168, 128, 0), (85, 5376, 64, 0), (85, 4096, 512, 2)],
    ids=["just-room", "no-room", "parts"],
)
def test_scales_of_inputs_lie_beside_columns_where_there_is_room(
    T: int,
    H: int,
    I: int,  # noqa: E741
    parts: int,
) -> None:
    plan = {"chunks": 1, "parts": parts} if parts else {}
    options = {**GPT_OSS, **SELECTIVE, "scaling": "pre", **plan}
    check(Decode(T, H, I, 2, 1, has_bias=True, options=options))


@pytest.mark.parametrize("mode", ["selective", "all"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_is_computed(routing: str, mode: str) -> None:
    check(Decode(24, 128, 64, 7, 2, ranks=2, rank=1, routing=routing, options={"mode": mode}))


@pytest.mark.parametrize("mode", ["selective", "all"])
@pytest.mark.parametrize("scaling", ["post", "pre"])
def test_a_token_that_is_not_a_number_stays_alone(scaling: str, mode: str) -> None:
    problem = Decode(6, 128, 32, 8, 2, options={"mode": mode, "scaling": scaling})
    expected = problem.launch().outputs
    problem.affinities_TK[2] = np.nan
    problem.hidden_TH[4] = np.nan
    outputs = problem.launch().outputs
    others = [0, 1, 3, 5]
    assert np.array_equal(outputs[others], expected[others])
    assert np.isnan(outputs[[2, 4]]).all()


@pytest.mark.parametrize("T", [1, 2, 17])
def test_a_rank_without_a_hit_writes_zeros(T: int) -> None:
    problem = Decode(T, 128, 64, 5, 2, ranks=2, rank=1, routing="no-hit", options=SELECTIVE)
    assert not problem.launch().outputs.any()


@pytest.mark.parametrize("start_core", [0, 1])
@pytest.mark.parametrize(
    "name",
    ["T16-H128-I64-E11-K4-selective", "T8-H128-I64-E9-K2-all", "T20-H256-I256-E11-K2-parts-halves"],
)
def test_the_order_of_the_cores_does_not_matter(name: str, start_core: int) -> None:
    check((CASES | PLANS)[name], SimOptions(start_core=start_core, preempt=0.2, seed=3))


@pytest.mark.parametrize("E", [1, 2, 3, 5])
@pytest.mark.parametrize("T", [1, 4, 40])
def test_unwritten_memory_does_not_matter(E: int, T: int) -> None:
    problem = Decode(T, 128, 64, E, 1, ranks=2, options=SELECTIVE)
    nan, zero = (problem.launch(SimOptions(fill=fill)).outputs for fill in (0xFF, 0x00))
    assert np.array_equal(nan, zero)


REFUSED: dict[str, dict[str, Any]] = {
    "T=0: must be 1 to 256": {"T": 0},
    "T=257: must be 1 to 256": {"T": 257},
    "H=48: must be a multiple of 16, at least 64": {"H": 48},
    "H=72: must be a multiple of 16": {"H": 72},
    "I=0: must be at least 1": {"I": 0},
    "E=0: must be 1 to 1024": {"E": 0},
    "E=1025: must be 1 to 1024": {"E": 1025, "num_experts": 1025},
    "num_experts=3: must be at least E=4": {"num_experts": 3},
    "K=0: must be 1 to 32": {"K": 0},
    "K=33: must be 1 to 32": {"K": 33, "num_experts": 33},
    "K=9: must be .* at most num_experts": {"K": 9},
    "num_cores=0: must be 1 or 2": {"num_cores": 0},
    "num_cores=3: must be 1 or 2": {"num_cores": 3},
    "mode='some': must be one of auto": {"mode": "some"},
    "shard='tokens': must be one of auto": {"shard": "tokens"},
    "format='int8': must be one of bfloat16": {"format": "int8"},
    "layout='eih': must be one of ehi": {"layout": "eih"},
    "activation='swish', .*: the decode kernel has .*silu": {"activation": "swish"},
    "activation='gelu', scale=1.702, .* scale 1": {"activation": "gelu", "scale": 1.702},
    "scale=1.5, .*scale 1 or 1.702": {"activation": "sigmoid", "gates_itself": True, "scale": 1.5},
    "activation='silu', .*gates_itself=True with": {"gates_itself": True},
    "has_gate=False, .* Compute other experts with blockwise_moe": {"has_gate": False},
    "scaling='late': must be one of post": {"scaling": "late"},
    "chunks=3: packed weights have 1": {"layout": "packed", "chunks": 3},
    "down_scale='channel': bfloat16 weights have none": {"down_scale": "channel"},
    "has_scales=True, .*: bfloat16 weights have none": {"has_scales": True},
    "down_scale='row': must be one of none": {"down_scale": "row"},
    "output_dtype='float16': must be one of float32": {"output_dtype": "float16"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_run_is_refused_by_name(message: str) -> None:
    sizes = {"T": 4, "H": 128, "I": 64, "E": 4, "K": 2, "num_experts": 8, "num_cores": 2}
    change = REFUSED[message]
    options = {key: value for key, value in change.items() if key not in sizes}
    sizes |= {key: value for key, value in change.items() if key in sizes}
    with pytest.raises(ValueError, match=message):
        make_decode_config(DecodeSizes(**sizes), *records(options))


@pytest.mark.parametrize(
    "sizes",  # T, H, I, E, K, experts of all ranks, cores
    [
        (1, 64, 1, 1, 1, 1, 1),
        (256, 64, 1, 1, 1, 1, 2),
        (1, 80, 1, 1, 1, 1, 2),
        (1, 64, 1, 1024, 1, 1024, 2),
        (1, 64, 1, 1, 32, 32, 2),
    ],
)
def test_limits_are_reached(sizes: tuple[int, ...]) -> None:
    config = make_decode_config(DecodeSizes(*sizes), *records({}))
    assert sizes[:5] == (config.T, config.H, config.I, config.E, config.K)


E4M3 = {"format": "float8_e4m3", "has_scales": True}
E5M2 = {"format": "float8_e5m2", "has_scales": True}
PLANS = {
    name: sized(name, **more)
    for name, more in {
        "T20-H128-I96-E5-K2-chunks": {"options": {**SELECTIVE, "chunks": 3}},
        "T20-H192-I120-E5-K2-chunks-all-bias": {
            "has_bias": True,
            "options": {**GPT_OSS, **ALL, "chunks": 2},
        },
        "T40-H128-I64-E13-K2-four-weight-buffers": {"options": {**SELECTIVE, "weight_buffers": 4}},
        "T9-H128-I64-E23-K2-eight-weight-buffers-all": {"options": {**ALL, "weight_buffers": 8}},
        "T6-H128-I96-E7-K2-intermediate": {"options": {**SELECTIVE, "shard": "intermediate"}},
        "T1-H192-I120-E7-K3-intermediate-one-token": {
            "has_bias": True,
            "options": {**GPT_OSS, "shard": "intermediate", "chunks": 4, "weight_buffers": 4},
        },
        "T30-H128-I96-E7-K2-intermediate-all": {
            "options": {**ALL, "shard": "intermediate", "chunks": 6}
        },
        "T5-H128-I96-E7-K2-intermediate-one-rank-of-two": {
            "ranks": 2,
            "options": {**SELECTIVE, "shard": "intermediate"},
        },
        "T20-H128-I64-E15-K2-iterations-of-two": {"options": {**SELECTIVE, "weight_buffers": 2}},
        "T20-H128-I64-E15-K2-iterations-of-four-one-core": {
            "num_cores": 1,
            "options": {**SELECTIVE, "weight_buffers": 4},
        },
        "T20-H128-I64-E13-K2-iterations-of-four-e4m3-channel": {
            "num_cores": 1,
            "options": {**E4M3, "down_scale": "channel", **SELECTIVE, "weight_buffers": 4},
        },
        "T9-H128-I64-E21-K2-iterations-of-four-all": {"options": {**ALL, "weight_buffers": 4}},
        "T20-H128-I96-E13-K2-iterations-whose-chunks-change-buffers": {
            "options": {**SELECTIVE, "chunks": 3, "weight_buffers": 4}
        },
        "T20-H384-I384-E13-K2-iterations-whose-parts-change-buffers": {
            "options": {**SELECTIVE, "chunks": 1, "parts": 3, "weight_buffers": 4}
        },
        "T20-H256-I256-E11-K2-parts-halves": {
            "options": {**SELECTIVE, "chunks": 1, "parts": 2, "weight_buffers": 2}
        },
        "T1-H512-I512-E8-K1-parts-one-token-halves": {
            "has_bias": True,
            "options": {**GPT_OSS, "chunks": 1, "parts": 4},
        },
        "T20-H640-I640-E5-K2-parts-uneven-halves-bias": {
            "has_bias": True,
            "options": {**GPT_OSS, **SELECTIVE, "chunks": 1, "parts": 2},
        },
        "T20-H640-I384-E5-K2-parts-odd": {
            "has_bias": True,
            "options": {**GPT_OSS, **SELECTIVE, "chunks": 1, "parts": 3},
        },
        "T9-H512-I512-E7-K2-parts-of-chunks": {
            "options": {**SELECTIVE, "chunks": 2, "parts": 2, "weight_buffers": 4}
        },
        "T6-H256-I512-E5-K2-parts-intermediate": {
            "options": {**SELECTIVE, "shard": "intermediate", "chunks": 2, "parts": 2}
        },
        "T20-H256-I256-E5-K2-parts-all-e4m3-channel": {
            "options": {**E4M3, "down_scale": "channel", **ALL, "chunks": 1, "parts": 2}
        },
        "T20-H512-I512-E5-K2-parts-e5m2-expert-pre": {
            "has_bias": True,
            "options": {
                **GPT_OSS,
                **E5M2,
                "down_scale": "expert",
                "scaling": "pre",
                **SELECTIVE,
                "chunks": 1,
                "parts": 4,
            },
        },
        "T130-H2048-I256-E3-K2-parts-sums-in-sbuf": {
            "options": {**SELECTIVE, "chunks": 1, "parts": 2}
        },
        "T20-H256-I96-E5-K2-e4m3-channel": {
            "options": {**E4M3, "down_scale": "channel", **SELECTIVE}
        },
        "T20-H704-I140-E3-K2-e4m3-channel-bias-uneven": {
            "has_bias": True,
            "options": {**E4M3, "down_scale": "channel", **ALL},
        },
        "T20-H192-I60-E5-K2-e5m2-expert": {
            "has_bias": True,
            "options": {**GPT_OSS, **E5M2, "down_scale": "expert", **SELECTIVE},
        },
        "T200-H192-I60-E3-K2-e5m2-expert-pre": {
            "has_bias": True,
            "options": {**GPT_OSS, **E5M2, "down_scale": "expert", "scaling": "pre", **SELECTIVE},
        },
    }.items()
}
PACKED = {
    name: sized(name, **more)
    for name, more in {
        "T4-H256-I1024-E4-K2-e4m3-channel-more-chunks-than-weight-buffers": {
            "options": {**E4M3, "down_scale": "channel"}
        },
        "T2-H144-I129-E16-K8-e4m3-channel-two-weight-buffers": {
            "options": {**E4M3, "down_scale": "channel", "weight_buffers": 2}
        },
        "T1-H128-I48-E12-K9-one-core": {"num_cores": 1},
        "T1-H128-I256-E12-K10-intermediate": {"options": {"shard": "intermediate"}},
        "T1-H128-I48-E16-K16": {},
        "T1-H192-I360-E8-K4-gpt-oss": {"has_bias": True, "options": GPT_OSS},
        "T1-H128-I512-E8-K1-intermediate": {"options": {"shard": "intermediate"}},
        "T1-H256-I128-E4-K1-joined-pre": {"options": {"scaling": "pre"}},
        "T20-H256-I64-E5-K1-joined-e4m3": {
            "has_bias": True,
            "options": {**E4M3, "down_scale": "channel", **SELECTIVE},
        },
        "T20-H2880-I90-E3-K2-gpt-oss": {"has_bias": True, "options": {**GPT_OSS, **SELECTIVE}},
        "T5-H704-I300-E3-K2-uneven-axes": {"has_bias": True, "options": SELECTIVE},
        "T20-H256-I150-E5-K2-e4m3-channel": {
            "has_bias": True,
            "options": {**E4M3, "down_scale": "channel", **SELECTIVE},
        },
        "T20-H192-I45-E5-K2-e5m2-expert": {
            "has_bias": True,
            "options": {**GPT_OSS, **E5M2, "down_scale": "expert", **SELECTIVE},
        },
        "T130-H256-I256-E5-K2-e5m2-expert-all": {
            "options": {**E5M2, "down_scale": "expert", **ALL}
        },
        "T40-H128-I512-E5-K2-intermediate": {"options": {**SELECTIVE, "shard": "intermediate"}},
    }.items()
}


@pytest.mark.parametrize("name", list(PLANS))
def test_splits_buffers_and_formats_do_not_change_the_result(name: str) -> None:
    check(PLANS[name])


@pytest.mark.parametrize("name", list(PACKED))
def test_packed_weights_give_the_same_result(name: str) -> None:
    problem = PACKED[name]
    check(replace(problem, options={**problem.options, "layout": "packed"}))


ROWS = {
    "T65": Decode(65, 304, 60, 5, 2, options=SELECTIVE),
    "T96-lnc1": Decode(96, 128, 64, 5, 2, num_cores=1, options=SELECTIVE),
    "T128-gpt-oss": Decode(128, 320, 150, 5, 2, has_bias=True, options={**GPT_OSS, **SELECTIVE}),
    "T70-bias-without-a-spare-row": Decode(
        70, 192, 128, 5, 2, has_bias=True, options={**GPT_OSS, **SELECTIVE}
    ),
    "T100-three-banks": Decode(100, 1088, 130, 5, 2, has_bias=True, options=SELECTIVE),
    "T128-many-banks": Decode(128, 5120, 32, 3, 1, options={**SELECTIVE, "scaling": "pre"}),
    "T90-e5m2-expert": Decode(
        90, 320, 64, 5, 2, has_bias=True, options={**E5M2, **SELECTIVE, "down_scale": "expert"}
    ),
    "T80-intermediate": Decode(80, 128, 256, 5, 2, options={**ALL, "shard": "intermediate"}),
    "T66-one-expert": Decode(66, 256, 128, 4, 1, routing="one-expert", options=SELECTIVE),
}


@pytest.mark.parametrize("layout", ["ehi", "packed"])
@pytest.mark.parametrize("name", list(ROWS))
def test_many_tokens_are_summed_in_rows(name: str, layout: str) -> None:
    problem = replace(ROWS[name], options={**ROWS[name].options, "layout": layout})
    config = problem.config()
    assert config.gives_rows
    has_spare_row = layout == "packed" and name in ("T128-gpt-oss", "T100-three-banks")
    assert bias_is_inside(config) == has_spare_row
    check(problem)


def test_channel_scales_keep_sums_turned() -> None:
    problem = Decode(100, 128, 64, 5, 2, options={**E4M3, "down_scale": "channel"})
    assert not problem.config().gives_rows
    check(problem)


ALONE = {
    "dynamic": Decode(5, 192, 60, 8, 3, ranks=2, rank=1, options=SELECTIVE),
    "dynamic-parts": Decode(
        20, 256, 256, 9, 3, ranks=2, options={**SELECTIVE, "chunks": 1, "parts": 2}
    ),
    "many": Decode(40, 128, 64, 50, 3, options=SELECTIVE),
    "gpt-oss-packed": Decode(
        9, 192, 60, 17, 3, has_bias=True, options={**GPT_OSS, **SELECTIVE, "layout": "packed"}
    ),
    "no-hit": Decode(2, 128, 64, 4, 2, ranks=3, routing="no-hit", options=SELECTIVE),
    "all": Decode(8, 128, 64, 37, 3, options={"mode": "all"}),
}


@pytest.mark.parametrize("name", ALONE)
def test_iterations_leave_out_no_load(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_skips(monkeypatch)
    check(ALONE[name])


@pytest.mark.parametrize("layout", ["ehi", "packed"])
@pytest.mark.parametrize("scope", ["expert", "channel"])
def test_mxfp4_weights_run_as_float8_without_loss(scope: str, layout: str) -> None:
    options = {**GPT_OSS, **E5M2, "down_scale": scope, "layout": layout, **SELECTIVE}
    problem = Decode(12, 128, 64, 4, 2, has_bias=True, options=options)
    rng = np.random.default_rng(5)
    codes, scale, values = recode(rng, (4, 128, 128), "channel")
    problem.gate_up_codes, problem.gate_up_scale, problem.gate_up = codes, scale, values
    codes, scale, values = recode(rng, (4, 64, 128), scope)
    problem.down_codes, problem.down_scale, problem.down = codes, scale, values
    check(problem)


CLAMPS = {
    (None, 7.0): False,
    (None, 0.5): False,
    (None, 0.0): False,
    (None, -0.5): True,
    (-2.0, None): False,
    (0.0, None): False,
    (0.5, None): True,
    (-1.0, 1.0): False,
}


@pytest.mark.parametrize("clamps", CLAMPS)
def test_inner_activations_are_weighed_where_clamps_move_zero(
    clamps: tuple[float | None, float | None],
) -> None:
    options = {"scaling": "pre", "gate_limits": limits(*clamps)}
    assert weighs_inner(Decode(6, 128, 64, 8, 2, options=options).config()) == CLAMPS[clamps]
