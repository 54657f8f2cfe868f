"""NxD's routers."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from neuron_moe.errors import names_its_keys
from neuron_moe.router import Router
from neuron_moe.spec import RouterFormula, RouterSpec

_TINY = 1e-8


class NxdRouter(Router):
    """A router that remembers what was set of sequence parallelism; `MoE` compares it.

    Attributes:
        sequence_parallel_enabled: this rank routes its own part of the sequence.
        sequence_dimension: axis that sequence parallelism splits.
        tensor_model_parallel_group: ranks that share the sequence.
        store_transposed_weights: NxD keeps a second weight for its decode kernel; here nothing.
        remarks: sentences for `explain()` about what was requested and changes nothing.
    """

    sequence_parallel_enabled: bool = False
    sequence_dimension: int | None = None
    tensor_model_parallel_group: ProcessGroup | None = None
    store_transposed_weights: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.linear_router.weight.dtype

    @property
    def bias(self) -> bool:
        """Whether the linear layer has a bias."""
        return self.spec.formula.has_bias

    @property
    def apply_act_fn_over_topk(self) -> bool:
        """Whether act_fn is applied to the chosen logits only."""
        return self.spec.formula.act_over_topk


@names_its_keys
class RouterTopK(NxdRouter):
    """Top-k routing with NxD's arguments (GPT-OSS, Llama4, Qwen3-MoE, Mixtral, DBRX), and four
    more.

    Args:
        num_experts: E.
        top_k: K.
        hidden_size: H.
        sequence_parallel_enabled: this rank routes its own part of the sequence; the layer decides,
            and refuses a router that says yes where it says no.
        sequence_dimension: axis that sequence parallelism splits, as the layer has it.
        dtype: dtype of the weights, or its name; arithmetic is float32.
        device: where the weights live.
        bias: the linear layer has a bias.
        tensor_model_parallel_group: ranks that share the sequence, as the layer has them.
        act_fn: 'softmax' or 'sigmoid'.
        apply_act_fn_over_topk: apply act_fn to the chosen logits only.
        jitter_eps: multiplies the input by U(1 - eps, 1 + eps) while training.
        store_transposed_weights: no effect; the kernels here read [E, H].
        selection_bias: float32 bias of the choice, `e_score_correction_bias` (not in NxD).
        renormalize: divide the K affinities by their sum (not in NxD, which does it in
            ExpertMLPsV2).
        renormalize_eps: added to that sum.
        routed_scaling_factor: multiplies the affinities.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
        bias: bool = False,
        tensor_model_parallel_group: ProcessGroup | None = None,
        act_fn: str = "softmax",
        apply_act_fn_over_topk: bool = False,
        jitter_eps: float = 0.0,
        store_transposed_weights: bool = False,
        *,
        selection_bias: bool = False,
        renormalize: bool = False,
        renormalize_eps: float = 1e-20,
        routed_scaling_factor: float = 1.0,
    ) -> None:
        formula = RouterFormula(
            top_k=top_k,
            act_fn=act_fn,
            act_over_topk=apply_act_fn_over_topk,
            has_bias=bias,
            has_selection_bias=selection_bias,
            renormalize=renormalize,
            renormalize_eps=renormalize_eps,
            routed_scaling_factor=routed_scaling_factor,
        )
        spec = RouterSpec(num_experts=num_experts, hidden_size=hidden_size, formula=formula)
        super().__init__(spec, dtype=dtype, device=device, jitter_eps=jitter_eps)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.tensor_model_parallel_group = tensor_model_parallel_group
        self.store_transposed_weights = store_transposed_weights
        if store_transposed_weights:
            self.remarks = ("store_transposed_weights=True: the kernels here read [E, H]",)


@names_its_keys
class RouterSinkhorn(NxdRouter):
    """Top-1 routing with NxD's arguments: while training, choices are balanced by Sinkhorn's
    iterations; else the largest logit is chosen.

    Args:
        num_experts: E.
        top_k: must be 1.
        hidden_size: H.
        act_fn: 'softmax' or 'sigmoid'.
        sequence_parallel_enabled: as of `RouterTopK`.
        sequence_dimension: as of `RouterTopK`.
        dtype: dtype of the weights, or its name; arithmetic is float32.
        device: where the weights live.
        sinkhorn_iterations: of the balancing; None: 30.
        sinkhorn_tol: no effect, as in NxD.
    """

    DEFAULT_SINKHORN_ITERS = 30

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        act_fn: str = "sigmoid",
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
        sinkhorn_iterations: int | None = None,
        sinkhorn_tol: float | None = None,
    ) -> None:
        if top_k != 1:
            raise NotImplementedError(f"top_k={top_k}: must be 1, as in NxD. Use RouterTopK.")
        formula = RouterFormula(top_k=1, act_fn=act_fn)
        spec = RouterSpec(num_experts=num_experts, hidden_size=hidden_size, formula=formula)
        super().__init__(spec, dtype=dtype, device=device)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        given = sinkhorn_iterations
        self.sinkhorn_iterations = self.DEFAULT_SINKHORN_ITERS if given is None else given
        self.sinkhorn_tol = sinkhorn_tol
        if sinkhorn_tol is not None:
            self.remarks = (f"sinkhorn_tol={sinkhorn_tol}: the iterations are of a fixed number",)

    def get_router_logits(self, hidden_states: Tensor) -> Tensor:
        """Return [T, E] float32 logits, rounded to the router's dtype as NxD's are.

        One expert a token takes the whole weight: NxD's choices are kept, ties of rounding too.
        """
        return super().get_router_logits(hidden_states).to(self.dtype).float()

    def choose(self, logits_TE: Tensor) -> Tensor | None:
        """Return the balanced choices [T, 1] while training."""
        if not self.training:
            return super().choose(logits_TE)
        with torch.no_grad():
            shares_TE = self._sinkhorn(logits_TE.float(), self.sinkhorn_iterations)
            return shares_TE.argmax(-1, keepdim=True)

    @staticmethod
    def _sinkhorn(cost: Tensor, num_iters: int, tol: float | None = None) -> Tensor:
        """Return [T, E] shares: exp(cost) with rows and columns scaled in turn, so that each token
        gives 1 / T and each expert takes 1 / E of the whole; arguments as of NxD's.
        """
        if num_iters == 0:
            return cost
        shares_TE = (cost - cost.amax(-1, keepdim=True)).exp()  # a row's scale is free
        num_tokens, num_experts = shares_TE.shape
        of_expert_E = shares_TE.new_ones(num_experts)
        of_token_T1 = shares_TE.new_ones(num_tokens, 1)
        for _ in range(num_iters):
            of_token_T1 = 1 / num_tokens / ((shares_TE * of_expert_E).sum(1, keepdim=True) + _TINY)
            of_expert_E = 1 / num_experts / ((shares_TE * of_token_T1).sum(0) + _TINY)
        return shares_TE * of_token_T1 * of_expert_E


@names_its_keys
class GroupLimitedRouter(NxdRouter):
    """Group-limited sigmoid routing without auxiliary loss (DeepSeek-V3), with NxD's arguments and
    more.

    Args:
        num_experts: E.
        top_k: K.
        hidden_size: H.
        n_group: equal groups the experts are split in.
        topk_group: groups a token may choose from.
        sequence_parallel_enabled: as of `RouterTopK`.
        sequence_dimension: as of `RouterTopK`.
        dtype: dtype of the weights, or its name; arithmetic is float32.
        device: where the weights live.
        tensor_model_parallel_group: as of `RouterTopK`.
        jitter_eps: multiplies the input by U(1 - eps, 1 + eps) while training.
        renormalize: divide the K affinities by their sum + renormalize_eps (the published gate
            does).
        renormalize_eps: 1e-20, as published.
        routed_scaling_factor: 2.5 for DeepSeek-V3.
        out_of_group_fill: -inf, with which an expert outside the chosen groups never wins, or NxD's
            0.0, with which it beats an expert inside whose biased score is negative.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        n_group: int,
        topk_group: int,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype | str = torch.float32,
        device: torch.device | str | None = None,
        tensor_model_parallel_group: ProcessGroup | None = None,
        jitter_eps: float = 0.0,
        *,
        renormalize: bool = False,
        renormalize_eps: float = 1e-20,
        routed_scaling_factor: float = 1.0,
        out_of_group_fill: float = float("-inf"),
    ) -> None:
        formula = RouterFormula(
            top_k=top_k,
            act_fn="sigmoid",
            has_selection_bias=True,
            n_group=n_group,
            topk_group=topk_group,
            out_of_group_fill=out_of_group_fill,
            renormalize=renormalize,
            renormalize_eps=renormalize_eps,
            routed_scaling_factor=routed_scaling_factor,
        )
        spec = RouterSpec(num_experts=num_experts, hidden_size=hidden_size, formula=formula)
        super().__init__(spec, dtype=dtype, device=device, jitter_eps=jitter_eps)
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension
        self.tensor_model_parallel_group = tensor_model_parallel_group
