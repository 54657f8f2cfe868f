"""What the nki backend decides for a step: path, block size, mode, one launch or several."""

from dataclasses import replace

from torch import Tensor

from neuron_moe.backends.nki import decode, layer, prefill, prefill_layer
from neuron_moe.backends.nki.launch import check_capture
from neuron_moe.backends.nki.operands import check_formula, narrow_weights
from neuron_moe.paths import (
    DECODE_PHASES,
    DENSE_STREAM_TOKENS,
    FEW_TOKEN_PATHS,
    Decision,
    Workload,
    decide,
    settle_mode,
)
from neuron_moe.plan import LayerParts, Plan, Step
from neuron_moe.spec import ExpertSpec, RouterSpec
from neuron_moe.weights.expert_weights import Packed
from neuron_moe.weights.laid_out import LaidOut
from neuron_moe.weights.product_forms import ProductForms
from nki_kernels.common.router_choice import check_router_formula

_BLOCKS = "many tokens are computed in blocks"


class NkiBackend:
    """See the package's docstring."""

    name = "nki"
    has_gradient = False
    plans_ahead = True

    def check(self, experts: ExpertSpec, router: RouterSpec) -> None:
        """Raise ValueError for formulas, and numbers of experts, that no kernel has."""
        check_formula(experts.formula)
        if not router.why_torch:
            check_router_formula(router.formula, router.num_classes)

    def plan(self, parts: LayerParts, step: Step) -> Plan:
        """Decide how a step is computed; operands are prepared when it first runs.

        Raises:
            ValueError: what the kernels cannot compute, or a layer that was to be fused cannot.
        """
        check_capture()
        decision = decide(parts.workload(step), self.name, parts.compat)
        in_blocks = ""
        if decision.path in FEW_TOKEN_PATHS:
            in_blocks = _why_in_blocks(parts, step)
        if in_blocks or decision.path not in FEW_TOKEN_PATHS:
            decision = decide(_in_blocks(parts, step), self.name, parts.compat)
        if in_blocks and decision.path in FEW_TOKEN_PATHS:
            decision = settle_mode(decision, "blockwise", in_blocks, "nki.blockwise_moe")
        apart = "experts on their own"
        if parts.router is not None:
            apart = _why_apart(parts, step, decision, in_blocks)
        if not apart:
            return _fused(parts, step, decision)
        if decision.path not in FEW_TOKEN_PATHS:
            return _plan_in_blocks(step, decision, parts, apart)
        return _few_tokens(parts, step, decision, apart)

    def pack(self, first_EHI: Tensor, down_EIH: Tensor) -> tuple[Packed, Packed] | str:
        """Return both matrices as fp8 codes, if no weight loses a bit; else why they stay."""
        return narrow_weights(first_EHI, down_EIH)

    def settle_forms(self, parts: LayerParts, form: str) -> ProductForms | None:
        """Return nothing: a kernel reads its own layout."""
        return None

    def lay_out(self, parts: LayerParts, phase: str) -> LaidOut | None:
        """Return the experts in the layout of a phase's kernel; None if nothing is gained."""
        return decode.lay_out(parts) if phase == "decode" else prefill.lay_out(parts)


def _why_in_blocks(parts: LayerParts, step: Step) -> str:
    """Say why few tokens go through blockwise_moe; '' if they go through the decode kernels.

    Raises:
        ValueError: no kernel has the formula.
    """
    why = decode.why_in_blocks(parts)
    if why or step.phase in DECODE_PHASES:
        return why
    tuning = parts.tuning
    is_asked = tuning.block_size is not None or tuning.shard_plan != "auto"
    tuned = tuning.tuned.for_prefill(step.tokens)
    # A plan that was tuned for long prompts says nothing of short ones.
    if is_asked or (tuned is not None and tuned.tokens <= DENSE_STREAM_TOKENS):
        return "blocks were requested"
    if parts.weights.prefill_copy is not None and parts.weights.decode_copy is None:
        return "weights are stored by parts for blocks, and plain for the decode kernel"
    try:
        decode.decode_config(parts, step.rows or step.tokens)
    except ValueError as error:
        return str(error)
    return ""


def _in_blocks(parts: LayerParts, step: Step) -> Workload:
    """Return the sizes of a step, with the block size that runs."""
    tuning = parts.tuning
    work = parts.workload(step)
    tuned = tuning.tuned.for_prefill(step.tokens)
    if tuned is not None:
        return replace(work, block_size=tuned.block_size)
    if tuning.block_size is None and tuning.shard_plan == "auto":
        best = prefill.rank(parts, step)[0]
        work = replace(work, block_size=int(best.block_size))
    return work


def _why_apart(parts: LayerParts, step: Step, decision: Decision, in_blocks: str) -> str:
    """Say why a step of a layer takes several launches; '' if it takes one.

    Raises:
        ValueError: one launch was requested and cannot be, or quantised weights and they are not.
    """
    is_decode = step.phase in DECODE_PHASES
    if is_decode and parts.needs_quantized and parts.weights.packed_down is None:
        raise ValueError(
            "quantized=True: the expert weights are plain. Load fp8 codes with their scale,"
            " call pack_weights() for those of an MXFP4 checkpoint, or set quantized=False."
        )
    if parts.fuses_decode is False:
        return "moe_fused_kernel_enabled=False"
    reason = in_blocks or _BLOCKS
    if decision.path in FEW_TOKEN_PATHS:
        reason = layer.why_apart(parts, step)
    if reason and parts.fuses_decode and is_decode:
        raise ValueError(
            f"moe_fused_kernel_enabled=True: {reason.rstrip('.')}. Leave it None, which takes the"
            " fused kernel where it can run."
        )
    return reason


def _plan_in_blocks(step: Step, decision: Decision, parts: LayerParts, apart: str) -> Plan:
    """Return the plan of a step in blocks: of one launch where that can be."""
    if parts.router is None or parts.fuses_decode is False:
        return _experts_in_blocks(step, decision, parts, "" if parts.router is None else apart)
    fused = replace(decision, kernel="nki.prefill_layer")
    plan = prefill_layer.PrefillLayerPlan(step, fused, parts)
    apart = plan.why_apart()
    return _experts_in_blocks(step, decision, parts, apart) if apart else plan


def _experts_in_blocks(step: Step, decision: Decision, parts: LayerParts, apart: str) -> Plan:
    """Return the plan of experts in one launch where that can be, the router in one in front."""
    plan = prefill.PrefillPlan(step, decision, parts, apart)
    if plan.given_config is None:
        return plan
    return replace(plan, decision=replace(decision, kernel="nki.prefill_layer"))


def _fused(parts: LayerParts, step: Step, decision: Decision) -> Plan:
    """Return the plan of one launch, in the mode that its cost model takes.

    It differs from that of the experts alone: weights load while the kernel still routes.
    """
    asked = _asked_mode(parts, step)
    if asked is not None:
        decision = settle_mode(decision, *asked, "nki.decode_layer")
    elif parts.compat is None:
        config = layer.layer_config(parts, step, None)
        reason = f"cost model of decode_layer: {config.moe.reason}"
        decision = settle_mode(decision, decode.path_of(config.moe), reason, "nki.decode_layer")
    config = layer.layer_config(parts, step, decision.path)
    return layer.LayerPlan(step, replace(decision, kernel="nki.decode_layer"), parts, config)


def _few_tokens(parts: LayerParts, step: Step, decision: Decision, apart: str) -> Plan:
    """Return the plan of decode_moe, in the mode that its cost model takes."""
    asked = _asked_mode(parts, step)
    if asked is not None:
        decision = settle_mode(decision, *asked, "nki.decode_moe")
    elif parts.compat is None:
        config = decode.decode_config(parts, step.tokens)
        reason = f"cost model of decode_moe: {config.reason}"
        decision = settle_mode(decision, decode.path_of(config), reason, "nki.decode_moe")
    config = decode.decode_config(parts, step.rows or step.tokens, decision.path)
    return decode.DecodePlan(step, decision, parts, config, apart)


def _asked_mode(parts: LayerParts, step: Step) -> tuple[str, str] | None:
    """Return the decode mode that was requested or tuned, and why; None leaves it open."""
    mode = parts.tuning.decode_mode
    if mode != "auto":
        return mode, f"decode_mode={mode!r} was requested"
    tuned = parts.tuning.tuned.for_decode(step.tokens)
    if tuned is not None:
        return tuned.mode, f"tuned for up to {tuned.tokens} tokens"
    return None
