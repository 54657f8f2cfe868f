"""The NumPy reference of prefill against the formula, expert by expert."""

import numpy as np
import pytest

from nki_kernels.common.expert_reference import inner
from nki_kernels.common.formula import ExpertFormula
from nki_kernels.common.weight_formats import split_parts
from nki_kernels.prefill import blockwise_moe_ref, stored_parts
from tests.nki_kernels.prefill.cases import config_of


def test_biases_are_added() -> None:
    random = np.random.default_rng(0)
    hidden_SH, expert_S = random.normal(size=(6, 8)), np.array([0, 1, 1, 2, 0, 1])
    first, down = random.normal(size=(3, 8, 10)), random.normal(size=(3, 5, 8))
    first_bias, down_bias = random.normal(size=(3, 10)), random.normal(size=(3, 8))
    formula = ExpertFormula()
    found = blockwise_moe_ref(
        hidden_SH,
        expert_S,
        first,
        down,
        formula,
        gate_up_bias_E2I=first_bias,
        down_bias_EH=down_bias,
    )
    for row, expert in enumerate(expert_S):
        projected = hidden_SH[row] @ first[expert] + first_bias[expert]
        expected = inner(formula, projected) @ down[expert] + down_bias[expert]
        np.testing.assert_allclose(found[row], expected, rtol=1e-12)


def test_columns_that_parts_do_not_divide_are_refused() -> None:
    weight = np.zeros((1, 2, 12), np.float32)
    with pytest.raises(ValueError, match=r"parts=4: must divide the 6 columns"):
        split_parts(weight, 4, 2)


def test_cores_that_split_i_share_the_parts_of_gate_and_up() -> None:
    sizes = {"H": 256, "I": 256, "E": 2, "block_size": 128, "num_slots": 256, "num_tokens": 128}
    plan = {**sizes, "stores": "rows", "shard_plan": "intermediate", "num_cores": 2}
    assert stored_parts(config_of(**plan, weight_parts=(2, 1))) == (2, 1)
    for parts in ((1, 2), (3, 2), (0, 2), (2, 0)):
        with pytest.raises(ValueError, match=rf"weight_parts=\({parts[0]}, {parts[1]}\): must be"):
            config_of(**plan, weight_parts=parts)
