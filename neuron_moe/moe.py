"""MoE: a router, routed experts, and shared experts beside them."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from neuron_moe.backends import ChoosesBlocks, TellsPlan
from neuron_moe.backends.block import FusesDecode
from neuron_moe.config import MoEFusedTKGConfig
from neuron_moe.dispatch import (
    FEW_TOKEN_PATHS,
    PHASES,
    Decision,
    Explanation,
    Workload,
    explain_path,
)
from neuron_moe.errors import check_choice, check_instance, check_positive_int, names_its_keys
from neuron_moe.experts import ExpertMLPsV2
from neuron_moe.fused import FusedDecode
from neuron_moe.parallel.collectives import as_collectives
from neuron_moe.parallel.hybrid import DECODE_PHASES
from neuron_moe.parallel.layer import LayerOutput, ParallelLayer, TokenBatch
from neuron_moe.parallel.shuffle import build_shuffle
from neuron_moe.routing import RouterBase, Routing
from neuron_moe.shared_experts import SharedExperts


class MoEOutput(NamedTuple):
    """What `MoE.forward` returns; the first field is the layer's output.

    Attributes:
        output: the shape and dtype of the input.
        router_logits: [T, E] float32, if the layer was built with return_router_logits.
        expert_index: [T, K] int32, if built with return_expert_index.
        residual: input + residual, if a residual was passed.
    """

    output: Tensor
    router_logits: Tensor | None = None
    expert_index: Tensor | None = None
    residual: Tensor | None = None


@names_its_keys
class MoE(nn.Module):
    """One MoE layer, with NxD's constructor arguments.

    Args:
        router: chooses experts for each token.
        expert_mlps: the routed experts.
        shared_experts: experts every token takes, or None.
        rmsnorm: norm in front of router and experts, or None.
        sequence_parallel_enabled: the input is this rank's part of each sequence, parts of
            different length allowed; the router sees the own tokens only.
        sequence_dimension: axis that sequence parallelism splits (default 1 of [B, S, H]; 0 for
            [S, B, H]).
        return_router_logits: return the logits.
        return_expert_index: return the choices.
        token_shuffle_group_size: ranks that exchange tokens at random first, and back at the end;
            1 is none.
        token_shuffle_seed: seed of that exchange.
        tensor_model_parallel_group: ranks over which outputs are summed, all that hold experts;
            default: those of `parallel_state`.
        init_tkg_module: NxD's fused decode module; here `choose_path` picks the kernel.
        tkg_config: its switches.
        reduce_dtype: dtype of the sum over ranks; None is that of the hidden states.

    Raises:
        ValueError: router and experts disagree on a size, or groups do not fit together.
    """

    def __init__(
        self,
        router: RouterBase,
        expert_mlps: ExpertMLPsV2,
        shared_experts: SharedExperts | None = None,
        rmsnorm: nn.Module | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        return_router_logits: bool = False,
        return_expert_index: bool = False,
        token_shuffle_group_size: int = 1,
        token_shuffle_seed: int | None = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
        init_tkg_module: bool = False,
        tkg_config: MoEFusedTKGConfig | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_instance("router", router, RouterBase)
        check_instance("expert_mlps", expert_mlps, ExpertMLPsV2)
        if sequence_dimension not in (None, 0, 1):
            raise ValueError(
                f"sequence_dimension={sequence_dimension!r}: must be 1 for [B, S, H] or 0 for"
                " [S, B, H]. Leave it out for [B, S, H]."
            )
        for name in ("num_experts", "top_k", "hidden_size"):
            ours, theirs = getattr(router, name), getattr(expert_mlps.config, name)
            if ours != theirs:
                raise ValueError(
                    f"{name}: the router has {ours}, the experts have {theirs}."
                    " Build both from the same sizes."
                )
        if shared_experts is not None and shared_experts.hidden_size != router.hidden_size:
            raise ValueError(
                f"hidden_size: the router has {router.hidden_size}, the shared experts have"
                f" {shared_experts.hidden_size}. Build both from the same sizes."
            )
        check_positive_int("token_shuffle_group_size", token_shuffle_group_size)
        self.router = router
        self.expert_mlps = expert_mlps
        self.shared_experts = shared_experts
        self.rmsnorm = rmsnorm
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.return_router_logits = return_router_logits
        self.return_expert_index = return_expert_index
        self.token_shuffle_group_size = token_shuffle_group_size
        self.token_shuffle_seed = token_shuffle_seed
        self.tensor_model_parallel_group = tensor_model_parallel_group
        self.init_tkg_module = init_tkg_module
        self.tkg_config = tkg_config
        given = tensor_model_parallel_group
        self.parallel = ParallelLayer(
            router,
            expert_mlps,
            shared_experts,
            model=None if given is None else as_collectives(given, "model"),
            reduce_dtype=reduce_dtype,
        )
        self.shuffle = build_shuffle(token_shuffle_group_size, token_shuffle_seed)
        self._fused = FusedDecode(self, tkg_config)

    def forward(
        self,
        hidden_states: Tensor,
        padding_mask: Tensor | None = None,
        is_speculative_decoding: bool = False,
        residual: Tensor | None = None,
        *,
        phase: str | None = None,
    ) -> MoEOutput:
        """Compute the layer.

        Args:
            hidden_states: [B, S, H]; S = 1 is decode.
            padding_mask: [B, S], nonzero for real tokens; the others get no routed expert. With
                sequence parallelism the own part or all of it.
            is_speculative_decoding: S > 1 tokens of a verification window, dispatched like decode.
            residual: [B, S, H] added to the input first; the sum is returned as the last field.
            phase: 'decode' tells a sequence parallel layer that these are tokens of a decode step,
                not its part of a prompt; None decides by S.
        """
        check_instance("hidden_states", hidden_states, Tensor)
        if hidden_states.ndim != 3:
            raise ValueError(
                f"hidden_states: shape {tuple(hidden_states.shape)} must be [B, S, H]. Add the"
                f" batch axis."
            )
        if residual is not None:
            if check_instance("residual", residual, Tensor).shape != hidden_states.shape:
                raise ValueError(
                    f"residual: shape {tuple(residual.shape)} must be that of hidden_states,"
                    f" {tuple(hidden_states.shape)}. Expand it first if that is meant."
                )
            hidden_states = hidden_states + residual
            residual = hidden_states.clone()
        if is_speculative_decoding:
            phase = "speculation"
        if self._runs_fused(hidden_states, padding_mask, phase):
            step = phase or "decode"
            fused = self._fused.run(hidden_states.reshape(-1, hidden_states.shape[-1]), step)
            output = fused.output_TH.view(hidden_states.shape)
            return MoEOutput(output, None, fused.index_TK, residual)
        normed = hidden_states if self.rmsnorm is None else self.rmsnorm(hidden_states)
        hidden_TH = normed.reshape(-1, normed.shape[-1])
        is_part = self.sequence_parallel_enabled and phase is None
        axis = self.sequence_dimension if is_part and self.sequence_dimension is not None else 1
        if padding_mask is not None:
            check_instance("padding_mask", padding_mask, Tensor)
            if not is_part and padding_mask.shape[1:] != hidden_states.shape[1:2]:
                raise ValueError(
                    f"padding_mask: shape {tuple(padding_mask.shape)} must be [B, S] of"
                    f" hidden_states {tuple(hidden_states.shape)}. Reshape or transpose it."
                )
        batch = TokenBatch(hidden_TH, normed.shape[1 - axis], padding_mask, phase, is_part)
        output_TH, routing = self._run(batch, is_batch_first=axis == 1)
        return MoEOutput(
            output_TH.view(normed.shape),
            routing.router_logits_TE if self.return_router_logits else None,
            routing.expert_index_TK if self.return_expert_index else None,
            residual,
        )

    def _runs_fused(
        self, hidden_states: Tensor, padding_mask: Tensor | None, phase: str | None
    ) -> bool:
        """Say whether one kernel computes these tokens."""
        num_tokens = hidden_states.shape[:2].numel()
        if phase is None and hidden_states.shape[1] == 1 and not self.sequence_parallel_enabled:
            phase = "decode"
        if phase not in DECODE_PHASES or not num_tokens:
            return False
        if not isinstance(self.expert_mlps.backend, FusesDecode):
            return False
        has_padding = padding_mask is not None
        return not self._fused.refusal(phase, num_tokens, has_padding=has_padding)

    def _run(self, batch: TokenBatch, is_batch_first: bool) -> LayerOutput:
        if not is_batch_first:  # parts of [S, B, H] are whole runs of tokens already
            batch = replace(batch, batch_size=1)
        if self.shuffle is None:
            return self.parallel.run(batch)
        shuffled, order = self.shuffle.forth(batch)
        output_TH, routing = self.parallel.run(shuffled)
        return LayerOutput(
            self.shuffle.back(output_TH, order),
            Routing(*(self.shuffle.back(part, order) for part in routing)),
        )

    def weights_changed(self) -> None:
        """Tell that weights were changed through `.data`; see `ExpertMLPsV2.weights_changed`."""
        self.expert_mlps.weights_changed()

    def enable_load_counters(self, enabled: bool = True) -> None:
        """Count tokens per expert from now on (off by default); read `expert_load`."""
        self.expert_mlps.enable_load_counters(enabled)

    @property
    def expert_load(self) -> Tensor | None:
        """[E] int64 tokens each expert got since the counters were enabled, or None."""
        load: Tensor | None = self.expert_mlps.expert_load_E
        return load

    def explain(
        self, phase: str, tokens: int, *, tokens_per_expert: list[int] | None = None
    ) -> Explanation:
        """Say which path would run, why, and what its padding costs.

        Args:
            phase: 'prefill', 'decode' or 'speculation'.
            tokens: T.
            tokens_per_expert: load of each expert of this rank, for the actual padding; default:
                the counters, if enabled. An empty list leaves it out.

        Returns:
            An explanation; print it, or read its fields.
        """
        check_choice("phase", phase, PHASES)
        experts = self.expert_mlps
        num_local = len(experts.local_experts(phase))
        if tokens_per_expert and (
            len(tokens_per_expert) != num_local or min(tokens_per_expert) < 0
        ):
            raise ValueError(
                f"tokens_per_expert: {len(tokens_per_expert)} counts from {min(tokens_per_expert)}"
                f" on, must be {num_local}, one for each expert of this rank, and none negative."
                " Pass what `expert_load` counted."
            )
        work = experts.workload(phase, tokens)
        if tokens_per_expert is None:
            tokens_per_expert = experts.local_load(phase)
        decision = experts.choose_path(phase, tokens)
        backend = experts.backend
        if isinstance(backend, FusesDecode) and decision.path in FEW_TOKEN_PATHS:
            return self._explain_step(phase, work, decision, tokens_per_expert)
        notes: tuple[str, ...] = ()
        if isinstance(backend, TellsPlan):
            weights = experts.weights(phase)
            notes = backend.notes(decision.path, work, weights, experts.scales_input)
        return explain_path(
            work,
            decision,
            tokens_per_expert=tokens_per_expert,
            notes=notes,
            suggests_size=not isinstance(backend, ChoosesBlocks),
        )

    def _explain_step(
        self,
        phase: str,
        work: Workload,
        decision: Decision,
        tokens_per_expert: list[int] | None,
    ) -> Explanation:
        """Explain a step that one kernel computes, or why it does not."""
        experts, refusal = self.expert_mlps, self._fused.refusal(phase, work.tokens)
        backend = experts.backend
        notes: tuple[str, ...] = ()
        if not refusal and isinstance(backend, FusesDecode):
            decision = self._fused.decide(phase, work.tokens)
            notes = backend.block_notes(self._fused.describe(phase), work.tokens, decision.path)
        elif isinstance(backend, TellsPlan):
            told = backend.notes(decision.path, work, experts.weights(phase), experts.scales_input)
            notes = (*told, f"not fused: {refusal}")
        return explain_path(work, decision, tokens_per_expert=tokens_per_expert, notes=notes)
