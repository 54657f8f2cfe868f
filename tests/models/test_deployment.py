"""Deployments: every shipped one is possible, and what is not names the nearest that is."""

from typing import Any

import pytest

from neuron_moe.configs import config_names
from neuron_moe.configs.deployments import deployment_names, load_deployments
from neuron_moe.models.deployment import Deployment

MACHINES = {"trn2_3xlarge": "trn2.3xlarge", "trn2_48xlarge": "trn2.48xlarge"}
SHIPPED = [(file, model) for file in deployment_names() for model in load_deployments(file)]
# The largest are read in the default run too seldom to be worth their time.
FAST = ("ernie_4_5_21b_a3b", "gpt_oss_20b", "qwen3_30b_a3b", "mixtral_8x7b")


def test_every_machine_has_a_file_and_every_model_a_machine() -> None:
    assert deployment_names() == sorted(MACHINES)
    assert set(load_deployments("trn2_48xlarge")) == set(config_names())
    assert set(load_deployments("trn2_3xlarge")) < set(config_names())


@pytest.mark.parametrize(
    ("file", "model"),
    [
        pytest.param(*pair, id="-".join(pair), marks=() if pair[1] in FAST else pytest.mark.slow)
        for pair in SHIPPED
    ],
)
def test_a_shipped_deployment_is_possible(file: str, model: str) -> None:
    values = load_deployments(file)[model]
    deployment = Deployment.read(values, model=model, machine=MACHINES[file])
    cores = {"trn2_3xlarge": 4, "trn2_48xlarge": 64}[file]
    assert deployment.parallel.model_size == cores


def read(**changes: Any) -> Deployment:
    values = {**load_deployments("trn2_3xlarge")["gpt_oss_20b"], **changes}
    kept = {key: value for key, value in values.items() if value is not None}
    return Deployment.read(kept, model="gpt_oss_20b", machine="trn2.3xlarge")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "typo": ({"quantisation": "bf16"}, "quantisation.*Did you mean 'quantization'"),
    "missing": ({"max_length": None}, "max_length is missing"),
    "bucket typo": (
        {"buckets": [{"token": 512, "block_size": 128}]},
        "token.*Did you mean 'tokens",
    ),
    "no bucket": ({"buckets": []}, r"buckets=\[\]: must be one or more lengths"),
    "bucket order": (
        {"buckets": [{"tokens": 512, "block_size": 64}, {"tokens": 128, "block_size": 64}]},
        r"buckets=\[512, 128\]: must be one or more lengths, in rising order",
    ),
    "bucket too long": (
        {"max_length": 1024, "buckets": [{"tokens": 2048, "block_size": 64}]},
        "2048 tokens must not exceed max_length=1024. Use 1024",
    ),
    "block size": ({"buckets": [{"tokens": 512, "block_size": 130}]}, "block_size=130: .*Use 128"),
    "format": ({"quantization": "mxfp4"}, "quantization='mxfp4': must be one of"),
    "ranks": ({"tp": 16}, "need .* ranks.* The nearest that works is tp=4, ep=1"),
    "heads": ({"tp": 3, "ep": 1}, "tp=3.* The nearest that works is tp=[24], ep="),
    "experts": ({"tp": 1, "ep": 3}, "ep=3.* The nearest that works is tp=1, ep=[24]"),
    "memory": (
        {"tp": 1, "ep": 1, "quantization": "bf16"},
        r"a rank needs \d+\.\d GiB, must be at most 21\.6\. The nearest that works is tp=",
    ),
    "cache": ({"batch": 4096, "max_length": 131072}, r"must be at most 21\.6.* is batch=8\."),
    "no memory": (
        {"batch": 1 << 14, "max_length": 1 << 22},
        "No single change makes trn2.3xlarge hold it: quantise",
    ),
    "zero": ({"batch": 0}, "batch=0"),
    "word": ({"tp": "4"}, "tp='4'"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        read(**changes)


def test_a_machine_and_a_model_must_be_known() -> None:
    values = load_deployments("trn2_3xlarge")["gpt_oss_20b"]
    with pytest.raises(
        ValueError, match=r"instance='trn2\.3xlarg': .*Did you mean 'trn2\.3xlarge'"
    ):
        Deployment.read(values, model="gpt_oss_20b", machine="trn2.3xlarg")
    with pytest.raises(ValueError, match=r"'gpt_oss_20': not shipped\. Did you mean 'gpt_oss_20b'"):
        Deployment.read(values, model="gpt_oss_20", machine="trn2.3xlarge")
    with pytest.raises(ValueError, match="deployments='trn2': not shipped"):
        load_deployments("trn2")


def test_the_rest_of_a_model_is_cut_over_all_ranks_as_in_nxdi() -> None:
    values = load_deployments("trn2_48xlarge")["gpt_oss_120b"]
    deployment = Deployment.read(values, model="gpt_oss_120b", machine="trn2.48xlarge")
    parallel = deployment.parallel
    assert (parallel.tp, parallel.ep) == (64, 1)
    assert (parallel.prefill.tp, parallel.prefill.ep) == (4, 16)
    # One query head and a copy of a key and a value head of 64 numbers each, and the output's rows.
    held = 4 * 64 * 2880 + (64 + 64 + 64 + 2880) + 1
    assert deployment.memory().weights["attention"] == 36 * held * 2


WAYS_OUT = {
    "format": ("deepseek_v3", "trn2.48xlarge", {"quantization": "bf16"}, "quantization='e4m3'"),
    "batch": ("gpt_oss_120b", "trn2.48xlarge", {"batch": 2048}, "batch=256"),
    "machine": ("gpt_oss_120b", "trn2.3xlarge", {"ep": 1}, "tp=4, ep=16 on trn2.48xlarge"),
}


@pytest.mark.parametrize("case", WAYS_OUT)
def test_what_does_not_fit_names_the_smallest_change_and_that_fits(case: str) -> None:
    model, machine, changes, wanted = WAYS_OUT[case]
    values = {**load_deployments("trn2_48xlarge")[model], **changes}
    with pytest.raises(ValueError, match=f"The nearest that works is {wanted}."):
        Deployment.read(values, model=model, machine=machine)
    where = wanted.partition(" on ")[2] or machine
    change = dict(part.split("=") for part in wanted.partition(" on ")[0].split(", "))
    read = {name: text.strip("'") if "'" in text else int(text) for name, text in change.items()}
    assert Deployment.read({**values, **read}, model=model, machine=where).memory().fits
