"""The backward kernel of blockwise prefill."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lab.check.vendor_cases.block_mapping import map_blocks, num_blocks
from lab.check.vendor_cases.case import Case, Job, Limits, scaled_note, seed_of
from lab.check.vendor_cases.inputs import Draw, dtype_of
from lab.check.vendor_cases.library import VendorLibrary
from lab.check.vendor_cases.references import run_reference

PARAMETERS = "experimental.moe.bwd.moe_bwd_parameters"
GRADIENTS = (
    "hidden_states_grad",
    "expert_affinities_masked_grad",
    "gate_up_proj_weight_grad",
    "down_proj_weight_grad",
)
BIAS_GRADIENTS = ("gate_and_up_proj_bias_grad", "down_proj_bias_grad")


def build(case: Case, library: VendorLibrary, limits: Limits) -> Job:
    """Build a backward case: forward checkpoints are computed here, gradients by the vendor's
    reference.
    """
    return _BackwardCase(case, library, limits).job()


class _BackwardCase:
    """Sizes, inputs and reference of one backward case."""

    def __init__(self, case: Case, library: VendorLibrary, limits: Limits) -> None:
        self.case, self.library = case, library
        self.H, self.I = case.need("hidden"), case.need("intermediate")
        self.E, self.K, self.B = (case.need(key) for key in ("experts", "top_k", "block_size"))
        wanted = case.need("tokens")
        self.T = limits.tokens(wanted, self._macs, step=256, least=min(wanted, 512))
        self.dtype = dtype_of(case.get("dtype", "bfloat16"))
        self.skip_token = bool(case.get("skip_mode", 0) & 1)
        self.act_fn = case.get("act_fn", "SiLU")
        self.clamp_limits = case.get("clamp_limits") or [None] * 4
        self.draw = Draw(seed_of(case))
        blocks = num_blocks(self.T, self.K, self.E, self.B)
        self.mapping = map_blocks(
            self.draw, self.T, self.K, self.E, self.B, blocks, self.skip_token
        )

    def _macs(self, tokens: int) -> float:
        return float(num_blocks(tokens, self.K, self.E, self.B) * self.B * 8.0 * self.H * self.I)

    def job(self) -> Job:
        """Return the run."""
        inputs, names = self._inputs(), list(GRADIENTS)
        if inputs["bias"]:
            names += BIAS_GRADIENTS
        T, E = self.T, self.E
        return Job(
            kernel=self.library.get(
                "experimental.moe.bwd.blockwise_mm_backward", "blockwise_mm_bwd"
            ),
            cores=2,
            inputs=inputs,
            reference=lambda: self._reference(inputs),
            outputs=names,
            select={
                "hidden_states_grad": lambda grads: grads[:T],
                "expert_affinities_masked_grad": lambda grads: grads[: T * E],
            },
            note=scaled_note("T", self.case.need("tokens"), T),
        )

    def _reference(self, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
        module = "integration.nkilib.experimental.moe.test_bwmm_bwd_common"
        return run_reference(self.library.test(module, "blockwise_mm_bwd_torch_ref"), inputs)

    def _inputs(self) -> dict[str, Any]:
        """Return the kernel's arguments."""
        case, library = self.case, self.library
        hidden_TH, affinities_TE, grad_TH = self._tokens()
        gate_up_EH2I, down_EIH, biases = self._weights()
        gate_up, down = _checkpoints(
            _Forward(hidden_TH, gate_up_EH2I, down_EIH, biases, self.clamp_limits, self.act_fn),
            self.mapping.token_position_to_id,
            self.mapping.block_to_expert,
        )
        return {
            "hidden_states": hidden_TH,
            "expert_affinities_masked": affinities_TE.reshape(-1, 1),
            "gate_up_proj_weight": gate_up_EH2I,
            "down_proj_weight": down_EIH,
            "gate_up_proj_act_checkpoint_T": gate_up.astype(self.dtype),
            "down_proj_act_checkpoint": down.astype(self.dtype),
            "token_position_to_id": self.mapping.token_position_to_id,
            "block_to_expert": self.mapping.block_to_expert,
            "output_hidden_states_grad": grad_TH,
            "block_size": self.B,
            "skip_dma": library.get(PARAMETERS, "SkipMode")(self.skip_token, False),
            "compute_dtype": getattr(library.nl, case.get("dtype", "bfloat16")),
            "is_tensor_update_accumulating": self.K != 1,
            "clamp_limits": library.get(PARAMETERS, "ClampLimits")(*self.clamp_limits),
            "bias": biases is not None,
            "activation_type": library.get(PARAMETERS, "ActFnType")[self.act_fn],
        }

    def _tokens(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return hidden states, affinities and the output's gradient; a last row of zeros stands
        for padding unless tokens are skipped.
        """
        draw, T = self.draw, self.T
        rows = T if self.skip_token else T + 1
        hidden_TH = draw.uniform((rows, self.H), 0.0, 1.0, self.dtype)
        affinities_TE = draw.uniform((rows, self.E), 0.0, 1.0, self.dtype)
        affinities_TE[:T] *= self.mapping.mask_TE.astype(self.dtype)
        grad_TH = draw.uniform((rows, self.H), -1.0, 1.0, self.dtype)
        if not self.skip_token:
            for padded in (hidden_TH, affinities_TE, grad_TH):
                padded[T] = 0
        return hidden_TH, affinities_TE, grad_TH

    def _weights(self) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
        """Return both weights, and both biases if the case has them."""
        E, H, width = self.E, self.H, self.I

        def uniform(*shape: int) -> np.ndarray:
            return self.draw.uniform(shape, -0.1, 0.1, self.dtype)

        gate_up_EH2I, down_EIH = uniform(E, H, 2, width), uniform(E, width, H)
        biases = (uniform(E, 2, width), uniform(E, H)) if self.case.get("bias") else None
        return gate_up_EH2I, down_EIH, biases


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward pass.

    Attributes:
        hidden_TH: [T, H], with or without a row for padding.
        gate_up_EH2I: [E, H, 2, I].
        down_EIH: [E, I, H].
        biases: [E, 2, I] and [E, H], or None.
        limits: up's upper and lower, then gate's.
        act_fn: SiLU or Swish.
    """

    hidden_TH: np.ndarray
    gate_up_EH2I: np.ndarray
    down_EIH: np.ndarray
    biases: tuple[np.ndarray, np.ndarray] | None
    limits: list[float | None]
    act_fn: str

    def gate_and_up(self, rows: torch.Tensor, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both projections of some rows, [n, I] each, clamped."""
        _, H, _, width = self.gate_up_EH2I.shape
        weight = _floats(self.gate_up_EH2I[expert]).reshape(H, 2 * width)
        gate, up = (rows @ weight).reshape(-1, 2, width).unbind(1)
        if self.biases is not None:
            gate = gate + _floats(self.biases[0][expert, 0])
            up = up + _floats(self.biases[0][expert, 1])
        up_high, up_low, gate_high, gate_low = self.limits
        return _clamped(gate, gate_low, gate_high), _clamped(up, up_low, up_high)

    def down(self, gate: torch.Tensor, up: torch.Tensor, expert: int) -> torch.Tensor:
        """Return the expert's output, [n, H], not scaled by affinities."""
        slope = 1.0 if self.act_fn == "SiLU" else 1.702
        result = (gate * torch.sigmoid(slope * gate) * up) @ _floats(self.down_EIH[expert])
        if self.biases is not None:
            result = result + _floats(self.biases[1][expert])
        return result


def _checkpoints(
    forward: _Forward, ids: np.ndarray, block_to_expert: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return what the forward pass would have saved: clamped gate and up [N, 2, I, B], down
    results [N, B, H].
    """
    hidden = _floats(forward.hidden_TH)
    hidden = torch.cat([hidden, torch.zeros(1, hidden.shape[1])])
    _, H, _, width = forward.gate_up_EH2I.shape
    ids_NB = ids.reshape(block_to_expert.size, -1).astype(np.int64)
    blocks, block_size = ids_NB.shape
    gate_up = np.empty((blocks, 2, width, block_size), dtype=np.float32)
    down = np.empty((blocks, block_size, H), dtype=np.float32)
    for block, expert in enumerate(block_to_expert):
        gate, up = forward.gate_and_up(hidden[torch.from_numpy(ids_NB[block])], expert)
        gate_up[block, 0], gate_up[block, 1] = gate.T.numpy(), up.T.numpy()
        down[block] = forward.down(gate, up, expert).numpy()
    return gate_up, down


def _clamped(value: torch.Tensor, lower: float | None, upper: float | None) -> torch.Tensor:
    return value if lower is None and upper is None else torch.clamp(value, lower, upper)


def _floats(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))
