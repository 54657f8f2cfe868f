"""A model as one graph of torch.compile: what is around attention and experts is joined.

Attention is vLLM's operator already, and so are dense projections where it computes them. Experts,
recurrences, attention to entries and projections in a form of our own become operators that a graph
calls by number: they choose their form at run time. Norms, rotary embedding, routers and residuals
around them become few kernels.
There is a graph for prefill and one for decode, for any number of tokens, and one for a single
token, into which a custom kernel for experts goes as it is.

Letters: T tokens, H hidden, K choices, E experts.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from neuron_moe.device import is_captured
from neuron_moe.experts import RoutedExperts
from neuron_moe.models.attention import StateView
from neuron_moe.models.compressed_attention import CompressedAttention
from neuron_moe.models.decoder import DecoderModel, Tokens
from neuron_moe.models.delta_net import Inputs, Recurrent
from neuron_moe.models.dense_forms import OwnLinear
from neuron_moe.moe import MoE
from neuron_moe.plan import Plan, Step
from neuron_moe.router import Routing
from neuron_moe.serving.static_decode import many_graphs
from neuron_moe.weights.expert_weights import ExpertWeights, LocalRouting
from neuron_moe.weights.product_forms import FORMS, Compute

_library: Any = torch.library.Library("neuron_moe", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("linear(Tensor rows, int number, int size) -> Tensor")
_library.define("experts(Tensor rows, Tensor affinities, Tensor index, int number) -> Tensor")
_library.define(
    "recur(Tensor mixed, Tensor log_decay, Tensor rate, int number, int heads, int size) -> Tensor"
)
_library.define(
    "attend(Tensor hidden, Tensor places, Tensor cos, Tensor sin, int number) -> Tensor"
)
_INPUTS = ("ids_T", "places_T", "phase")  # of a graph
_hidden: dict[int, Callable[..., Tensor]] = {}
_numbers = itertools.count()


def _hide(call: Callable[..., Tensor]) -> int:
    """Return the number by which graphs call something that they do not look into."""
    number = next(_numbers)
    _hidden[number] = call
    return number


def _linear(rows: Tensor, number: int, size: int) -> Tensor:
    return _hidden[number](rows)


def _experts(rows: Tensor, affinities: Tensor, index: Tensor, number: int) -> Tensor:
    return _hidden[number](rows, affinities, index)


def _recur(
    mixed: Tensor, log_decay: Tensor, rate: Tensor, number: int, heads: int, size: int
) -> Tensor:
    return _hidden[number](mixed, log_decay, rate)


def _recur_fake(mixed: Tensor, _decay: Tensor, _rate: Tensor, _: int, *answer: int) -> Tensor:
    return mixed.new_empty((*mixed.shape[:2], *answer), dtype=torch.float32)


def _attend(hidden: Tensor, places: Tensor, cos: Tensor, sin: Tensor, number: int) -> Tensor:
    return _hidden[number](hidden, places, cos, sin)


_library.impl("linear", _linear, "CPU")
_library.impl("attend", _attend, "CPU")
_library._register_fake("attend", lambda hidden, *_: torch.empty_like(hidden))
_library.impl("recur", _recur, "CPU")
_library._register_fake("recur", _recur_fake)
_library.impl("experts", _experts, "CPU")
_library._register_fake("linear", lambda rows, _, size: rows.new_empty((*rows.shape[:-1], size)))
_library._register_fake("experts", lambda rows, *_: torch.empty_like(rows, dtype=torch.float32))


@dataclass(frozen=True, eq=False)
class JoinedPlan(Plan):
    """A step of any number of tokens in a graph: the experts look for their plan when they run.

    Attributes:
        number: of the experts.
        compute_one: what computes them for a single token, where a graph may look into it.
    """

    number: int
    compute_one: Compute | None

    @property
    def path(self) -> str:
        """Chosen at run time."""
        return "at run time"

    def route(self, hidden_TH: Tensor) -> Routing:
        """Route T tokens."""
        assert self.parts.router is not None
        routing: Routing = self.parts.router(hidden_TH)
        return routing

    def experts(self, hidden_NH: Tensor, routing: LocalRouting) -> Tensor:
        """Return [N, H] float32."""
        if self.compute_one is not None and hidden_NH.shape[0] == 1:
            return self.compute_one(hidden_NH, routing).float()
        chosen = routing.expert_affinities_TK, routing.expert_index_TK
        output_NH: Tensor = torch.ops.neuron_moe.experts(hidden_NH, *chosen, self.number)
        return output_NH


def _join_experts(moe: MoE) -> None:
    """Let graphs compute a layer but its experts."""
    plan_of, experts = moe.plan, moe.expert_mlps
    plans: dict[tuple[str, int], Plan] = {}
    joined: dict[str, Plan] = {}
    scales_input = experts.spec.scales_input

    for phase in ("prefill", "decode"):

        def compute(rows: Tensor, affinities: Tensor, index: Tensor, phase: str = phase) -> Tensor:
            key = phase, rows.shape[0]
            if key not in plans:
                plans[key] = plan_of(Step(*key))
            return plans[key].experts(rows, LocalRouting(index, affinities, scales_input)).float()

        one = plan_of(Step(phase, 1))
        compute_one = None if scales_input else _custom(one.parts.weights)
        joined[phase] = JoinedPlan(one.step, one.decision, one.parts, _hide(compute), compute_one)

    def plan(step: Step) -> Plan:
        return joined[step.phase] if is_captured() else plan_of(step)

    moe.plan = plan  # type: ignore[method-assign]
    _count_in_place(experts)


def _custom(weights: ExpertWeights) -> Compute | None:
    """Return the kernel that a server registered, where it was chosen for a single token."""
    forms = weights.product_forms
    return None if forms is None or forms.of(1) in FORMS else forms.compute


def _count_in_place(experts: RoutedExperts) -> None:
    """Let a graph count the load of experts too, if it is counted."""
    load_E = experts.expert_load_E
    if load_E is None:
        return

    def record_load(index_TK: Tensor) -> None:
        index_P = index_TK.flatten().long()
        load_E.index_add_(0, index_P.clamp(min=0), (index_P >= 0).long())

    experts.record_load = record_load  # type: ignore[method-assign]


def _hide_linear(linear: OwnLinear) -> None:
    number, size = _hide(linear.forward), linear.out_features

    def forward(hidden: Tensor) -> Tensor:
        output: Tensor = torch.ops.neuron_moe.linear(hidden, number, size)
        return output

    linear.forward = forward  # type: ignore[method-assign]


def _hide_recurrence(layer: Recurrent) -> None:
    core, answer = layer.core, layer.answer
    number = _hide(lambda *parts: core(layer, Inputs(*parts), None))

    def recur(_layer: Recurrent, inputs: Inputs, _view: StateView | None) -> Tensor:
        answered: Tensor = torch.ops.neuron_moe.recur(*inputs[:3], number, *answer)
        return answered

    layer.core = recur


def _hide_entries(layer: CompressedAttention) -> None:
    core = layer.core

    def compute(hidden: Tensor, places: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return core(layer, hidden, Tokens(places, (cos, sin), None), None)

    number = _hide(compute)

    def attend(_layer: CompressedAttention, hidden: Tensor, tokens: Tokens, _view: None) -> Tensor:
        out: Tensor = torch.ops.neuron_moe.attend(hidden, tokens.places_US, *tokens.rope, number)
        return out

    layer.core = attend


def _guards_of_inputs(guards: Sequence[Any]) -> list[bool]:
    """Say which conditions of a graph are looked at before each step: not those on the model.

    A served model stays as it was when its graphs were captured.
    """
    return [
        not guard.name or guard.name in _INPUTS  # no name: of the process, and of shapes
        for guard in guards
    ]


def _own_code(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the same function with code of its own, to which torch.compile ties its graphs.

    Of two models in a process, neither can take the other's.
    """
    code, known = function.__code__.replace(), function.__globals__
    return FunctionType(code, known, closure=function.__closure__)


class Joined:
    """`forward_tokens` of a model as graphs, all of which `capture` captures; else as it was."""

    def __init__(self, forward_tokens: Callable[..., Tensor], compiler: str) -> None:
        options: dict[str, Any] = {"guard_filter_fn": _guards_of_inputs}
        if compiler == "inductor":
            options |= dict.fromkeys(("size_asserts", "nan_asserts", "alignment_asserts"), False)
        step = _own_code(
            lambda ids_T, places_T, phase: forward_tokens(ids_T, places_T, phase=phase)
        )
        self._graphs: Any = torch.compile(
            step, backend=compiler, fullgraph=True, dynamic=True, options=options
        )

    def capture(self) -> None:
        """Capture the graphs of several tokens in each phase, and of one token, always decode.

        Inputs are as a server's: allocated outside of inference mode, which graphs tell apart.
        """
        for tokens, phase in ((2, "prefill"), (2, "decode"), (1, "decode")):
            ids_T = torch.zeros(tokens, dtype=torch.int32)
            places_T = torch.zeros(tokens, dtype=torch.int64)
            constants = torch._dynamo.config.patch(specialize_int=True, specialize_float=True)
            with torch.inference_mode(), many_graphs(), constants:
                self._graphs(ids_T, places_T, phase)

    def __call__(self, input_ids_T: Tensor, places_T: Tensor, *, phase: str) -> Tensor:
        """Return [T, H]; arguments as of `forward_tokens`."""
        with torch.compiler.set_stance("eager_on_recompile"):
            hidden_TH: Tensor = self._graphs(input_ids_T, places_T, phase)
        return hidden_TH


def join(model: DecoderModel, compiler: str) -> Joined:
    """Return `forward_tokens` of a model as graphs, not captured yet.

    Args:
        model: filled, for inference, its attention a server's operator.
        compiler: backend of torch.compile.
    """
    for module in list(model.modules()):
        if isinstance(module, MoE):
            _join_experts(module)
        elif isinstance(module, OwnLinear):
            _hide_linear(module)
        elif isinstance(module, Recurrent):
            _hide_recurrence(module)
        elif isinstance(module, CompressedAttention):
            _hide_entries(module)
    return Joined(model.forward_tokens, compiler)
