"""What a backend decided for a step of a layer: the value that runs, and that `explain()` prints.

A plan is made once for a step and kept until a weight changes: the path, what the kernels are
compiled for, and the operands in the order in which they take them. Reasons are composed when
somebody reads them.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from neuron_moe.device import is_captured, is_captured_by_dynamo, is_traced
from neuron_moe.explain import Explanation, explain_path
from neuron_moe.paths import Decision, Workload
from neuron_moe.router import Router, Routing
from neuron_moe.shared_experts import SharedExperts
from neuron_moe.spec import DEFAULT_BLOCK_SIZE, ExpertSpec, Tuning
from neuron_moe.weights.expert_weights import ExpertWeights, LocalRouting
from neuron_moe.weights.narrow import NarrowMatrices

T = TypeVar("T")
_MOST_PLANS = 256


class Step(NamedTuple):
    """What is asked of a layer.

    Attributes:
        phase: one of paths.PHASES.
        tokens: T of all ranks, which decides the path.
        has_padding: a padding mask is given.
        is_part: the tokens are parts of sequences, other ranks hold the others.
        rows: tokens that reach this rank's experts; 0: all T.
    """

    phase: str
    tokens: int
    has_padding: bool = False
    is_part: bool = False
    rows: int = 0

    def static(self) -> "Step":
        """Return the step with sizes that are plain integers, for a graph of its own each."""
        return self._replace(tokens=operator.index(self.tokens), rows=operator.index(self.rows))


def phase_of(num_tokens: int, batch_size: int) -> str:
    """Return the phase of sequences by their length."""
    seq_len = num_tokens // batch_size if batch_size else 0
    return "decode" if seq_len == 1 else "prefill"


class FusedOutput(NamedTuple):
    """What a plan that computes the whole layer gives.

    Attributes:
        output_TH: a partial sum of this rank, in float32 or rounded; with the residual if
            `adds_input`.
        index_TK: int32 experts of the model, if the layer requested them.
    """

    output_TH: Tensor
    index_TK: Tensor | None


class Forms:
    """Forms of weights that several plans share, made once each; gone when a weight changes."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def get(self, name: str, make: Callable[[], T]) -> T:
        """Return the form of that name; `make` it if there is none."""
        if name not in self._kept:
            self._kept[name] = make()
        kept: T = self._kept[name]
        return kept

    def fixed(self) -> "Forms":
        """Return these forms for a graph that is being captured: none are made any more."""
        forms = _FixedForms()
        forms._kept = self._kept
        return forms


class _FixedForms(Forms):
    """Forms made before a graph is captured, where weights have no numbers."""

    def get(self, name: str, make: Callable[[], T]) -> T:
        """Return the form of that name.

        Raises:
            RuntimeError: there is none.
        """
        if name not in self._kept:
            raise RuntimeError(
                f"{name}: weights are laid out before a graph is captured, not in it. Call"
                " prepare(phase, tokens) of the layer first, with the sizes of the step."
            )
        return super().get(name, make)


@dataclass(frozen=True, eq=False)
class LayerParts:
    """What a backend plans with: a layer as one rank holds it in one phase.

    Attributes:
        spec: sizes and formula of the experts.
        weights: the experts of this rank.
        tuning: how kernels should go about it.
        num_experts: physical experts of all ranks.
        first_expert: number of this rank's first among them; as data ([] int32) where one graph
            serves all ranks.
        compat: rule table of the path, see `paths.choose_path`.
        router: of the layer; None for experts on their own.
        norm: in front of router and experts, or None.
        shared: shared experts of this rank, or None.
        returns_routing: choices are wanted from a plan for the whole layer.
        why_apart: why one launch cannot compute the whole layer, '' if it may.
        fuses_decode: False: decode is never one launch; True: a step that cannot be is refused.
        needs_quantized: plain expert weights are refused in decode.
        adds_input: the residual stream comes in and goes out, and no sum over ranks comes after
            the launch.
        remarks: sentences for `explain()` about what was requested and changes nothing.
        forms: where forms of the weights are kept.
    """

    spec: ExpertSpec
    weights: ExpertWeights
    tuning: Tuning
    num_experts: int
    first_expert: int | Tensor = 0
    compat: str | None = None
    router: Router | None = None
    norm: nn.Module | None = None
    shared: SharedExperts | None = None
    returns_routing: bool = False
    why_apart: str = "experts on their own"
    fuses_decode: bool | None = None
    needs_quantized: bool = False
    adds_input: bool = False
    remarks: tuple[str, ...] = ()
    forms: Forms = field(default_factory=Forms)

    def expert_form(self, name: str, make: Callable[[], T]) -> T:
        """Return a form of this rank's experts, made once; phases may hold others, or other parts.

        Args:
            name: of the form.
            make: makes it.
        """
        weights = self.weights
        held = (self.first_expert, weights.num_experts, weights.down_bias_scale)
        return self.forms.get(f"{name} of {held}", make)

    def workload(self, step: Step) -> Workload:
        """Return the sizes that decide how a step is computed, at the block size requested."""
        return Workload(
            step.phase,
            step.tokens,
            self.spec.top_k,
            self.num_experts,
            self.weights.num_experts,
            self.tuning.block_size or DEFAULT_BLOCK_SIZE,
            self.spec.capacity_factor,
        )


@dataclass(frozen=True, eq=False)
class Plan(ABC):
    """How one step of a layer is computed on one rank.

    Attributes:
        step: what it is for.
        decision: path and kernel, with reasons on demand; `decision.work` has the sizes.
        parts: of the layer.
    """

    step: Step
    decision: Decision
    parts: LayerParts

    @property
    def path(self) -> str:
        """One of paths.PATHS."""
        return self.decision.path

    @property
    def is_fused(self) -> bool:
        """Whether `layer` computes router, experts and shared experts at once."""
        return False

    @property
    def has_norm(self) -> bool:
        """Whether `layer` or `enter` computes the norm too; else they take normalised tokens."""
        return False

    @property
    def adds_input(self) -> bool:
        """Whether `layer` adds its input to what it gives."""
        return False

    def launches(self, own_tokens: int | None = None) -> tuple[Any, ...]:
        """Return the launches of kernels that compute the step; none where torch computes it.

        Args:
            own_tokens: that this rank routes, where others route theirs; default: all.
        """
        return ()

    def prepare(self) -> None:
        """Put weights in the form that runs, as the first run would."""
        self.launches()

    @abstractmethod
    def route(self, hidden_TH: Tensor) -> Routing:
        """Route tokens."""

    def enter(self, hidden_TH: Tensor) -> tuple[Tensor, Routing]:
        """Return tokens as experts take them, normalised if `has_norm`, and their routing."""
        return hidden_TH, self.route(hidden_TH)

    @abstractmethod
    def experts(self, hidden_NH: Tensor, routing: LocalRouting) -> Tensor:
        """Return [N, H], the partial sums of this rank's experts for N rows, in float32 or already
        rounded to the rows' dtype.
        """

    def layer(self, hidden_TH: Tensor, is_real_T: Tensor | None = None) -> FusedOutput:
        """Compute the whole layer, where `is_fused`; with padding if the step has it."""
        raise NotImplementedError(f"{self.decision.kernel}: computes experts only.")

    def notes(self) -> tuple[str, ...]:
        """Return what else a user should know."""
        return ()

    def chosen(self) -> dict[str, Any]:
        """Return what the kernels are compiled for, as far as it was a choice."""
        return {}

    def changes(self) -> tuple[str, ...]:
        """Say how to get another plan, an entry for each choice."""
        return ()

    def explain(self, tokens_per_expert: list[int] | None = None) -> Explanation:
        """Say what runs, why, and what its padding costs.

        Args:
            tokens_per_expert: a recorded load of this rank, for the actual padding.
        """
        return explain_path(
            self.decision,
            tokens_per_expert=tokens_per_expert,
            notes=(*self.notes(), *self.parts.tuning.remarks, *self.parts.remarks),
            suggests_size=self.suggests_block_size,
            chosen=self.chosen(),
            changes=self.changes(),
        )

    @property
    def suggests_block_size(self) -> bool:
        """Whether a better block size by rows alone is worth a note."""
        return True


def kept_note(tuning: Tuning) -> tuple[str, ...]:
    """Return what training keeps of the experts, if that was requested."""
    if tuning.save_percent is None:
        return ()
    return (f"training keeps {tuning.save_percent} % of the first projections' results",)


class _Seen(NamedTuple):
    """A weight where it was found, and how its numbers were then."""

    owner: dict[str, Any]
    name: str
    weight: object
    numbers: Tensor
    version: int
    place: int


class PlannedModule(nn.Module):
    """A module that computes by plans, and keeps them.

    Attributes:
        num_changes: assignments so far of what plans may depend on.
    """

    num_changes: int
    _unplanned: frozenset[str] = frozenset()  # attributes on which no plan depends

    def __init__(self) -> None:
        super().__init__()
        self._plans = PlanCache()
        self.register_load_state_dict_post_hook(_forget_plans)  # type: ignore[no-untyped-call]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set, and count what plans may depend on."""
        if name not in self._unplanned:
            self.__dict__["num_changes"] = self.__dict__.get("num_changes", 0) + 1
        super().__setattr__(name, value)

    def plan(self, step: Step) -> Plan:
        """Return how a step is computed here; the very object that runs it."""
        if is_captured_by_dynamo() and self._plans_ahead:
            step = step.static()
            self._make_ready(*step)
            return self._plans.in_graphs.find(step)
        if is_captured():
            return self._make(step, self._plans.forms.fixed())
        return self._find(step)

    @torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]  # runs in a capture
    def _make_ready(self, *sizes: Any) -> int:
        """Make the launches of a step's plan, for graphs, too."""
        plan = self._find(Step(*sizes))
        plan.prepare()
        for launch in plan.launches():
            launch.prepare()
        self._plans.in_graphs.keep(plan)
        return 0

    def _find(self, step: Step) -> Plan:
        return self._plans.find(step, self._settings_of_plans(), self._planned_with, self._make)

    @property
    def _plans_ahead(self) -> bool:
        """Whether a graph that is captured meets plans that are made."""
        raise NotImplementedError

    def _settings_of_plans(self) -> object:
        """Return what plans depend on but weights, to be compared with what it was."""
        return self.num_changes

    def _planned_with(self) -> Iterable[nn.Module | None]:
        """Return the modules whose weights plans depend on."""
        return (self,)

    def _make(self, step: Step, forms: Forms) -> Plan:
        """Make the plan of a step, given where forms of the weights are kept."""
        raise NotImplementedError


class _Ready:
    """Plans that `torch.compile` may meet, each an attribute by the name of its step.

    A dict would not do: all graphs would be compiled anew whenever another step is added.
    """

    def keep(self, plan: Plan) -> None:
        """Keep a plan, whose launches are made."""
        setattr(self, _attribute_of(plan.step), plan)

    def find(self, step: Step) -> Plan:
        """Return the plan of a step."""
        found: Plan = getattr(self, _attribute_of(step))
        return found


def _attribute_of(step: Step) -> str:
    return "_".join(str(each) for each in step)


class PlanCache:
    """Plans by step, and forms of weights, until a weight is changed, moved or replaced.

    Seen is every change but one in place behind autograd's back (`weight.data.copy_(...)`), after
    which `clear` must be called. While `torch.export` captures a graph, plans are made of the forms
    there are; `torch.compile` meets plans in `in_graphs`, and looks at no weight: there a change is
    seen only after `clear`, which makes graphs be captured anew.
    """

    def __init__(self) -> None:
        self.clear()
        self._settings: object = None

    def __getstate__(self) -> dict[str, object]:
        return {}  # plans stay behind when a module is copied or saved

    def __setstate__(self, _state: dict[str, object]) -> None:
        self.__init__()  # type: ignore[misc]

    def clear(self) -> None:
        """Forget everything."""
        self._plans: dict[Step, Plan] = {}
        self._seen: tuple[_Seen, ...] | None = None
        self.forms = Forms()
        self.in_graphs = _Ready()

    def find(
        self,
        step: Step,
        settings: object,
        modules: Callable[[], Iterable[nn.Module | None]],
        make: Callable[[Step, Forms], Plan],
    ) -> Plan:
        """Return the plan of a step; `make` it if there is none, or what it depends on changed.

        Args:
            step: what is asked.
            settings: compared with those of the last call.
            modules: returns those whose weights the plan depends on.
            make: makes a plan, given where forms of these weights are kept.
        """
        if self._seen is not None and self._settings == settings and _is_unchanged(self._seen):
            found = self._plans.get(step)
            if found is not None:
                return found
        else:
            self.clear()
            self._seen, self._settings = _look_at(modules()), settings
        plan = make(step, self.forms)
        if self._seen is not None:
            if len(self._plans) == _MOST_PLANS:  # steps of ever other sizes: forget the oldest
                del self._plans[next(iter(self._plans))]
            self._plans[step] = plan
        return plan


def _forget_plans(module: PlannedModule, _keys: object) -> None:
    """Forget the plans that a module keeps when it has loaded weights: graphs look at none."""
    module._plans.clear()


def _look_at(modules: Iterable[nn.Module | None]) -> tuple[_Seen, ...] | None:
    """Return the weights of some modules as they are; None if they cannot be compared later."""
    parts = [part for module in modules if module is not None for part in module.modules()]
    if any(is_traced(each[-1]) for part in parts for each in _weights_of(part)):
        return None  # what is made of them is a part of the graph, not of this process
    try:
        return tuple(
            _Seen(owner, name, weight, numbers, _version(numbers), numbers.data_ptr())
            for part in parts
            for owner, name, weight, numbers in _weights_of(part)
        )
    except RuntimeError:  # tensors without memory, such as those of a tracer
        return None


def _weights_of(part: nn.Module) -> Iterator[tuple[dict[str, Any], str, object, Tensor]]:
    """Yield where each weight of a module is found, the weight, and the tensor of its numbers."""
    for owner in (part._parameters, part._buffers):  # a selection bias is a buffer
        for name, tensor in owner.items():
            if tensor is not None:
                yield owner, name, tensor, tensor
    packed = part.__dict__.get("packed")
    if isinstance(packed, NarrowMatrices):
        yield part.__dict__, "packed", packed, packed.codes_Ekn


def _is_unchanged(seen: tuple[_Seen, ...]) -> bool:
    for owner, name, weight, numbers, version, place in seen:
        if owner.get(name) is not weight:
            return False
        if numbers.data_ptr() != place or (version >= 0 and numbers._version != version):
            return False
    return True


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; -1 for those of inference mode, which do not
    count.
    """
    return -1 if tensor.is_inference() else tensor._version
