"""The backward kernel of blockwise prefill."""

from typing import Any

import numpy as np
import torch

from neuron_moe.tools.check.vendor_cases.block_plan import num_blocks, plan_blocks
from neuron_moe.tools.check.vendor_cases.case import Case, Job, Limits, scaled_note, seed_of
from neuron_moe.tools.check.vendor_cases.inputs import Draw, dtype_of
from neuron_moe.tools.check.vendor_cases.library import VendorLibrary
from neuron_moe.tools.check.vendor_cases.references import run_reference

PARAMETERS = "experimental.moe.bwd.moe_bwd_parameters"


def build(case: Case, library: VendorLibrary, limits: Limits) -> Job:
    """Build a backward case: forward checkpoints are computed here, gradients by the vendor's
    reference.
    """
    H, width, E = case.need("hidden"), case.need("intermediate"), case.need("experts")
    K, B = case.need("top_k"), case.need("block_size")
    wanted = case.need("tokens")
    T = limits.tokens(
        wanted,
        lambda rows: num_blocks(rows, K, E, B) * B * 8.0 * H * width,
        step=256,
        least=min(wanted, 512),
    )
    dtype = dtype_of(case.get("dtype", "bfloat16"))
    skip_token = bool(case.get("skip_mode", 0) & 1)
    draw = Draw(seed_of(case))
    plan = plan_blocks(draw, T, K, E, B, num_blocks(T, K, E, B), skip_token)
    rows = T if skip_token else T + 1
    hidden_TH = draw.uniform((rows, H), 0.0, 1.0, dtype)
    affinities_TE = draw.uniform((rows, E), 0.0, 1.0, dtype)
    affinities_TE[:T] *= plan.mask_TE.astype(dtype)
    grad_TH = draw.uniform((rows, H), -1.0, 1.0, dtype)
    if not skip_token:
        for padded in (hidden_TH, affinities_TE, grad_TH):
            padded[T] = 0
    inputs: dict[str, Any] = {
        "hidden_states": hidden_TH,
        "expert_affinities_masked": affinities_TE.reshape(-1, 1),
        "gate_up_proj_weight": draw.uniform((E, H, 2, width), -0.1, 0.1, dtype),
        "down_proj_weight": draw.uniform((E, width, H), -0.1, 0.1, dtype),
    }
    biases = None
    if case.get("bias"):
        biases = (
            draw.uniform((E, 2, width), -0.1, 0.1, dtype),
            draw.uniform((E, H), -0.1, 0.1, dtype),
        )
    limits_4 = case.get("clamp_limits") or [None] * 4
    activation = library.get(PARAMETERS, "ActFnType")[case.get("act_fn", "SiLU")]
    gate_up, down = _checkpoints(
        inputs,
        plan.token_position_to_id,
        plan.block_to_expert,
        B,
        biases,
        limits_4,
        case.get("act_fn", "SiLU"),
    )
    inputs |= {
        "gate_up_proj_act_checkpoint_T": gate_up.astype(dtype),
        "down_proj_act_checkpoint": down.astype(dtype),
        "token_position_to_id": plan.token_position_to_id,
        "block_to_expert": plan.block_to_expert,
        "output_hidden_states_grad": grad_TH,
        "block_size": B,
        "skip_dma": library.get(PARAMETERS, "SkipMode")(skip_token, False),
        "compute_dtype": getattr(library.nl, case.get("dtype", "bfloat16")),
        "is_tensor_update_accumulating": K != 1,
        "clamp_limits": library.get(PARAMETERS, "ClampLimits")(*limits_4),
        "bias": biases is not None,
        "activation_type": activation,
    }
    names = [
        "hidden_states_grad",
        "expert_affinities_masked_grad",
        "gate_up_proj_weight_grad",
        "down_proj_weight_grad",
    ]
    if biases is not None:
        names += ["gate_and_up_proj_bias_grad", "down_proj_bias_grad"]

    def reference() -> dict[str, np.ndarray]:
        function = library.test(
            "integration.nkilib.experimental.moe.test_bwmm_bwd_common", "blockwise_mm_bwd_torch_ref"
        )
        return run_reference(function, inputs)

    return Job(
        kernel=library.get("experimental.moe.bwd.blockwise_mm_backward", "blockwise_mm_bwd"),
        cores=2,
        inputs=inputs,
        reference=reference,
        outputs=names,
        select={
            "hidden_states_grad": lambda grads: grads[:T],
            "expert_affinities_masked_grad": lambda grads: grads[: T * E],
        },
        note=scaled_note("T", wanted, T),
    )


def _checkpoints(
    inputs: dict[str, Any],
    ids: np.ndarray,
    block_to_expert: np.ndarray,
    block_size: int,
    biases: tuple[np.ndarray, np.ndarray] | None,
    limits: list[float | None],
    act_fn: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Return what the forward pass would have saved: clamped gate and up [N, 2, I, B], down
    results [N, B, H].
    """
    hidden = torch.from_numpy(inputs["hidden_states"].astype(np.float32))
    hidden = torch.cat([hidden, torch.zeros(1, hidden.shape[1])])
    gate_up_weight, down_weight = inputs["gate_up_proj_weight"], inputs["down_proj_weight"]
    _, H, _, width = gate_up_weight.shape
    blocks = block_to_expert.size
    gate_up = np.empty((blocks, 2, width, block_size), dtype=np.float32)
    down = np.empty((blocks, block_size, H), dtype=np.float32)
    slope = 1.0 if act_fn == "SiLU" else 1.702
    up_high, up_low, gate_high, gate_low = limits
    for block, expert in enumerate(block_to_expert):
        rows = hidden[
            torch.from_numpy(ids[block * block_size : (block + 1) * block_size].astype(np.int64))
        ]
        weight = torch.from_numpy(gate_up_weight[expert].astype(np.float32)).reshape(H, 2 * width)
        gate, up = (rows @ weight).reshape(-1, 2, width).unbind(1)
        if biases is not None:
            gate = gate + torch.from_numpy(biases[0][expert, 0].astype(np.float32))
            up = up + torch.from_numpy(biases[0][expert, 1].astype(np.float32))
        if gate_high is not None or gate_low is not None:
            gate = torch.clamp(gate, gate_low, gate_high)
        if up_high is not None or up_low is not None:
            up = torch.clamp(up, up_low, up_high)
        result = (gate * torch.sigmoid(slope * gate) * up) @ torch.from_numpy(
            down_weight[expert].astype(np.float32)
        )
        if biases is not None:
            result = result + torch.from_numpy(biases[1][expert].astype(np.float32))
        gate_up[block, 0], gate_up[block, 1] = gate.T.numpy(), up.T.numpy()
        down[block] = result.numpy()
    return gate_up, down
