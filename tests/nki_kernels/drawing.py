"""What cases of all kernels share."""

from dataclasses import fields
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from neuron_moe.quantize import decode_mxfp4, recode_mxfp4_to_fp8
from neuron_moe.weights import ExpertWeights
from nki_kernels.common.formula import ExpertFormula, limits

GPT_OSS: dict[str, Any] = {
    "activation": "sigmoid",
    "gates_itself": True,
    "scale": 1.702,
    "up_offset": 1.0,
    "gate_limits": limits(None, 7.0),
    "up_limits": limits(-7.0, 7.0),
}
SITU: dict[str, Any] = {
    "activation": "sigmoid",
    "gates_itself": True,
    "gate_softcap": 0.7,  # so low that they act
    "up_softcap": 1.1,
}


class Case(Protocol):
    """A problem of a kernel."""

    def config(self) -> Any:
        """Return what the kernel is compiled for, or raise ValueError."""


def is_taken(case: Case) -> bool:
    """Say whether the kernel takes a case that was drawn."""
    try:
        case.config()
    except ValueError:
        return False
    return True


def make_records(kinds: tuple[type, ...], values: dict[str, Any]) -> list[Any]:
    """Return a record of each kind that values make, by the names of their fields."""
    names = [{entry.name for entry in fields(kind)} for kind in kinds]
    known = set().union(*names)
    assert set(values) <= known, set(values) - known
    return [
        kind(**{name: value for name, value in values.items() if name in mine})
        for kind, mine in zip(kinds, names, strict=True)
    ]


def torch_weights(case: Any, formula: ExpertFormula) -> ExpertWeights:
    """Return the weights of a case as the torch backend takes them, in bfloat16."""

    def narrow(values: Any) -> Tensor | None:
        return (
            None if values is None else torch.from_numpy(np.asarray(values, np.float32)).bfloat16()
        )

    parts = (case.gate_up, case.down, case.gate_up_bias, case.down_bias)
    return ExpertWeights(*map(narrow, parts), formula)  # type: ignore[arg-type]


def recode(
    rng: np.random.Generator, shape: tuple[int, int, int], scope: str = "channel"
) -> tuple[Any, Any, Any]:
    """Return e5m2 codes [E, in, out], scales and values of a random MXFP4 weight."""
    experts, inputs, outputs = shape
    blocks = torch.from_numpy(
        rng.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
    )
    exponents = rng.integers(115, 125, (experts, outputs, inputs // 32)).astype(np.uint8)
    recoded = recode_mxfp4_to_fp8(blocks, torch.from_numpy(exponents), scope=scope)
    codes = recoded.codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e5m2)
    values = decode_mxfp4(blocks, torch.from_numpy(exponents), torch.float32).numpy()
    scale = recoded.scale.numpy()[..., 0]
    assert np.array_equal(codes.astype(np.float32) * scale[..., None], values)
    return np.ascontiguousarray(codes.transpose(0, 2, 1)), scale, values.transpose(0, 2, 1)
