"""NxD's shared experts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from neuron_moe import shared_experts
from neuron_moe.activations import HIDDEN_ACTIVATIONS, activation_of
from neuron_moe.errors import WeightError, check_choice, check_positive_int, names_its_keys
from neuron_moe.nxd_compat.loading import prepare_shared
from neuron_moe.nxd_compat.sharder import mark_shared
from neuron_moe.parallel.collectives import as_collectives
from neuron_moe.spec import ExpertFormula, SharedSpec, as_dtype
from neuron_moe.weights.checks import before_load


@names_its_keys
class SharedExperts(shared_experts.SharedExperts):
    """down(act(gate(x)) * up(x)), with NxD's arguments.

    Args:
        hidden_size: H.
        intermediate_size: width of one shared expert.
        num_shared_experts: I = intermediate_size * num_shared_experts.
        hidden_act: one of HIDDEN_ACTIVATIONS; no effect beside a formula.
        dtype: dtype of the weights, or its name.
        tensor_model_parallel_group: ranks that split I; the output is then a partial sum. Default:
            the tensor parallel ranks of `parallel_state`. `parallel_state.get_world_group()` splits
            I over all ranks of the model.
        reduce_dtype: of a sum over ranks that is the layer's here: `MoE(reduce_dtype=...)`; no
            effect.
        fused_gate_up_projection: one matrix for gate and up.
        sequence_parallel_enabled: weights are whole on each rank, which computes its own tokens;
            ranks with the same tokens compute a slice of I each.
        transpose_weights: no effect; the state dict stays as above, NxD's before its hook, and
            kernels lay weights out themselves.
        is_gated: scale each token by sigmoid(shared_expert_gate(x)) (Qwen2-MoE, Qwen3-Next).
        formula: what they compute, if not down(act(gate(x)) * up(x)); not in NxD.
        device: where the weights live.

    Attributes:
        presharded: as of `ExpertMLPsV2`.
        remarks: sentences for `explain()` about what was requested and changes nothing.
    """

    presharded: bool | None = None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_shared_experts: int,
        hidden_act: str,
        dtype: torch.dtype | str = torch.float32,
        tensor_model_parallel_group: ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = torch.float32,
        fused_gate_up_projection: bool = False,
        sequence_parallel_enabled: bool = False,
        transpose_weights: bool = False,
        *,
        is_gated: bool = False,
        formula: ExpertFormula | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        for name, value in (
            ("hidden_size", hidden_size),
            ("intermediate_size", intermediate_size),
            ("num_shared_experts", num_shared_experts),
        ):
            check_positive_int(name, value)
        act = check_choice("hidden_act", hidden_act, HIDDEN_ACTIVATIONS)
        spec = SharedSpec(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size * num_shared_experts,
            formula=formula or ExpertFormula(activation_of(act)),
            is_fused=fused_gate_up_projection,
            is_gated=is_gated,
        )
        group = tensor_model_parallel_group
        super().__init__(
            spec,
            group=None if group is None else as_collectives(group, "shared experts"),
            whole_on_each_rank=sequence_parallel_enabled,
            dtype=as_dtype("dtype", dtype),
            device=device,
        )
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_shared_experts = num_shared_experts
        self.hidden_act = act
        self.reduce_dtype = reduce_dtype
        self.fused_gate_up_projection = fused_gate_up_projection
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.transpose_weights = transpose_weights
        self.remarks = _remarks(reduce_dtype, transpose_weights)
        mark_shared(self)
        before_load(self, _before_load)

    def preshard_hook(self, model_state_dict: dict[str, Any], prefix: str) -> None:
        """Prepare the whole model's state dict for NxD's sharder; no number changes.

        Raises:
            WeightError: NxD's own hook has rewritten it before, see `presharded`.
        """
        mark_shared(self)
        problem = self._prepare(model_state_dict, prefix.removesuffix("weight"))
        if problem:
            raise WeightError(problem)

    def _prepare(self, state: dict[str, Any], prefix: str) -> str:
        is_transposed = self.transpose_weights
        return prepare_shared(self, state, prefix, self.presharded, is_transposed=is_transposed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SharedExperts":
        """Move or cast; parameters that are new are marked for NxD's sharder again."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        mark_shared(self)
        return self


def _before_load(shared: SharedExperts, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Put what NxD saved into the form that is loaded, or say why not."""
    problem = shared._prepare(state_dict, prefix)
    if problem:
        raise WeightError(problem)


def _remarks(reduce_dtype: torch.dtype | None, transpose_weights: bool) -> tuple[str, ...]:
    """Return a sentence for each argument that was set and changes nothing."""
    cases = (
        (
            reduce_dtype not in (None, torch.float32),
            f"reduce_dtype={reduce_dtype}: shared experts are summed with the routed ones",
        ),
        (
            transpose_weights,
            "transpose_weights=True: the state dict keeps [I, H] and [H, I]",
        ),
    )
    return tuple(text for applies, text in cases if applies)
