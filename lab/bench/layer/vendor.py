"""The vendor's chain of kernels for a layer's prefill: router, index, experts with their sum.

router_topk, find_nonzero_indices, indexed_flatten, then the fastest of the variants of `bench
prefill`, which add up a token's experts themselves, or for up to 128 tokens moe_tkg, which needs no
index; of shared experts, the library's dense MLP. What would be unfair to the chain is left out of
it: the norm, the gate of shared experts and the sum with them, what a graph computes between the
launches (offsets of blocks, experts of blocks), groups and selection biases, which its router has
not; and the router's hidden states lie in whichever of its two layouts is faster, turned for
nothing.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

import nki_sim
from lab.bench.comparison.attempts import Attempt, fastest
from lab.bench.decode.cases import ROUTERS
from lab.bench.prefill.vendor import OPTIONS, with_lists
from lab.bench.prefill.vendor_index import FULL, UNFIT, first_line, parts_of
from lab.check.vendor_cases.library import VendorLibrary
from lab.check.vendor_cases.moe_prefill import CORES
from neuron_moe.shared_experts import SharedExperts
from neuron_moe.tools.timing import layers
from neuron_moe.tools.timing.layers import Model
from nki_kernels.common.chip import PARTITIONS
from nki_sim.time.estimate import Estimate

ROUTER_TOKENS = 2048  # the most that router_topk is meant for; more are several launches
BF16 = ml_dtypes.bfloat16
ROUTER, EXPERTS, MLP = "router_topk", "moe", "mlp"  # launches; the last for shared experts
_ACTIVATIONS = {"silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU_Tanh_Approx"}
_ROUTER_LAYOUTS = {"H_T": 0, "T_H": 1}
_TILINGS = ("use_tkg_gate_up_proj_column_tiling", "use_tkg_down_proj_column_tiling")
Times = dict[str, dict[str, float]]  # microseconds of each launch, by corner


class ChainError(ValueError):
    """A kernel of the chain does not run with these sizes."""


def whole_layer(name: str) -> Model:
    """Return the layer of a shipped configuration as `bench prefill` has it."""
    return next(m for m in layers.MODELS if name.startswith(m.name.replace("-", "_")))


def rank_layer(name: str, tp: int, ep: int) -> Model:
    """Return the layer on a rank.

    Args:
        name: of the model, a shipped configuration.
        tp: ranks that split an expert.
        ep: ranks that split the experts.
    """
    whole = whole_layer(name)
    return replace(whole, tp=tp, I=whole.I * whole.tp // tp, E=whole.E // ep)


def chain_parts(
    attempts: Sequence[Attempt], index: Mapping[str, Estimate]
) -> tuple[str, dict[str, float]]:
    """Return the fastest variant with its lists, and the time of each launch.

    Args:
        attempts: at the variants.
        index: of the launches that list tokens.

    Raises:
        ChainError: none runs.
    """
    best = fastest(with_lists(attempts, index))
    if best is None:
        raise ChainError("; ".join(f"{each.name}: {each.why}" for each in attempts))
    (alone,) = (each.us for each in attempts if each.name == best.name)
    size = next((word for word in best.name.split() if word.startswith("B=")), None)
    lists = {} if size is None else parts_of(size, index)
    return best.name, {**{name: time.us for name, time in lists.items()}, EXPERTS: alone or 0.0}


def around_times(
    library: VendorLibrary,
    model: Model,
    num_tokens: int,
    shared: SharedExperts | None,
    corners: Sequence[str],
) -> Times:
    """Return the time of the router's launches and of shared experts, by corner.

    Args:
        library: the user's checkout.
        model: the whole layer.
        num_tokens: T.
        shared: this rank's share of the shared experts, or None.
        corners: of the clock.

    Raises:
        ChainError: a kernel does not run with these sizes.
    """
    router = _route(library, model, num_tokens, corners)
    found = {corner: {ROUTER: us} for corner, us in router.items()}
    if shared is not None:
        for corner, us in _every_token(library, shared, num_tokens, corners).items():
            found[corner][MLP] = us
    return found


def _every_token(
    library: VendorLibrary, shared: SharedExperts, num_tokens: int, corners: Sequence[str]
) -> dict[str, float]:
    """Return the time of shared experts: a dense MLP of all tokens."""
    H, width = shared.spec.hidden_size, shared.width
    specs = {
        "hidden_tensor": (1, num_tokens, H),
        "gate_proj_weights_tensor": (H, width),
        "up_proj_weights_tensor": (H, width),
        "down_proj_weights_tensor": (width, H),
    }
    operands = {name: nki_sim.TensorSpec(shape, "bfloat16") for name, shape in specs.items()}
    activation = library.enum("ActFnType", _ACTIVATIONS[shared.spec.formula.activation])
    return _time(corners, MLP, _mlp_kernel(library), OPTIONS, activation_fn=activation, **operands)


def _route(
    library: VendorLibrary,
    model: Model,
    num_tokens: int,
    corners: Sequence[str],
    most: int = ROUTER_TOKENS,
) -> dict[str, float]:
    """Return the time of the router's launches, in the faster layout of hidden states."""
    rows = min(num_tokens, most)
    try:
        ways = [_route_once(library, model, rows, layout, corners) for layout in _ROUTER_LAYOUTS]
    except ChainError:  # wide tokens leave room for fewer
        if rows <= PARTITIONS:
            raise
        return _route(library, model, num_tokens, corners, rows // 2)
    launches = -(-num_tokens // rows)
    return {corner: launches * min(way[corner] for way in ways) for corner in corners}


def _route_once(
    library: VendorLibrary, model: Model, rows: int, layout: str, corners: Sequence[str]
) -> dict[str, float]:
    router, rng = ROUTERS[model.name], np.random.default_rng(0)
    H, E, K = -(-model.H // 128) * 128, model.E, model.K
    x_TH = rng.standard_normal((rows, H)).astype(BF16)
    weight_HE = (rng.standard_normal((H, E)) / H**0.5).astype(BF16)
    return _time(
        corners,
        ROUTER,
        library.get("core.router_topk.router_topk", "router_topk"),
        x=x_TH if layout == "T_H" else np.ascontiguousarray(x_TH.T),
        w=weight_HE,
        w_bias=np.zeros((1, E), BF16) if router.get("has_bias") else None,
        router_logits=np.zeros((rows, E), BF16),
        expert_affinities=np.zeros((rows, E), BF16),
        expert_index=np.zeros((rows, K), np.uint32),
        act_fn=library.enum("RouterActFnType", router["act_fn"].upper()),
        k=K,
        x_hbm_layout=_ROUTER_LAYOUTS[layout],
        x_sb_layout=0,
        router_pre_norm=not router.get("act_over_topk", False),
        norm_topk_prob=bool(router.get("renormalize")),
        shard_on_tokens=True,
    )


def _time(
    corners: Sequence[str],
    name: str,
    kernel: Any,
    options: nki_sim.SimOptions = FULL,
    **arguments: Any,
) -> dict[str, float]:
    """Return the time of a launch, by corner."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the library prints advice
            run = nki_sim.run(kernel, lnc=CORES, options=options, **arguments)
    except UNFIT as error:
        raise ChainError(f"{name}: {type(error).__name__}: {first_line(error)}") from error
    return dict.fromkeys(corners, run.timeline.total_us)


def _mlp_kernel(library: VendorLibrary) -> Any:
    """Return the library's entry point or, where that file does not compile, what it would do.

    The release of April 2026 has an indentation error in core/mlp/mlp.py; the two kernels behind it
    are intact.
    """
    try:
        return library.get("core.mlp.mlp", "mlp")
    except SyntaxError:
        pass
    nl = library.nl
    parameters = "core.mlp.mlp_parameters"
    make = library.get(parameters, "MLPParameters")
    validate = library.get(parameters, "validate_mlp_arguments")
    is_decode = library.get(parameters, "is_mlp_tkg")
    decode = library.get("core.mlp.mlp_tkg.mlp_tkg", "mlp_tkg")
    prefill = library.get("core.mlp.mlp_cte.mlp_cte", "mlp_cte")
    manager = library.get("core.utils.allocator", "SbufManager")
    logger = library.get("core.utils.logging", "Logger")

    def mlp(hidden_tensor: Any, store_fused_add_result: bool = False, **rest: Any) -> Any:
        tiling = dict.fromkeys(_TILINGS, True)
        params = make(
            hidden_tensor=hidden_tensor,
            store_fused_add_result=store_fused_add_result,
            **(tiling | rest),
        )
        validate(params)
        sbm = manager(0, 200 * 1024, logger("mlp"))
        sbm.set_name_prefix("mlp_")
        names = ["output_tensor_hbm", "output_stored_add_tensor_hbm"][: 1 + store_fused_add_result]
        shape, dtype = hidden_tensor.shape, hidden_tensor.dtype
        outs = [nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm, name=name) for name in names]
        added = outs[1] if store_fused_add_result else None
        if is_decode(params):
            return decode(params, outs[0], added, sbm=sbm)
        prefill(params, outs[0], added)
        return outs

    return mlp
