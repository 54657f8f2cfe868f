"""Drawn splits of models: experts of one rank through the plan that a layer takes, core by core.

A split is a model, how many ranks share an expert (TP) and share the experts (EP), whether an
all-to-all sends a rank only the tokens that chose its experts (SP) or it has all of them, and a
step. H is an eighth of the model's, so that many tokens fit; other sizes are those of `rank_case`.
Each runs twice, with either core first, and must give the same bits; memory that nobody wrote holds
no numbers.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lab.check.kernel_cases import prefill
from lab.check.kernel_cases.models import DEGREES, LAYERS, ROUTINGS, Layer, rank_case, splits
from lab.check.kernel_cases.verdict import Verdict, join, judge
from lab.check.launcher import launch as launch_kernel
from lab.check.vendor_cases.case import Case, Limits
from neuron_moe.backends.nki.backend import NkiBackend
from neuron_moe.backends.nki.launch import Input
from neuron_moe.plan import LayerParts, Step
from neuron_moe.spec import ExpertSpec, Tuning
from neuron_moe.weights import ExpertWeights
from nki_sim import SimOptions

PHASES = ("decode", "prefill")
NARROWER = 8
H_MULTIPLE = 64
MOST_TOKENS = 256, 600  # of a decode, of a prefill
KERNEL = "split"


def drawn_cases(
    names: Sequence[str], phases: Sequence[str], count: int, seed: int, max_macs: float
) -> list[Case]:
    """Return so many different splits.

    Args:
        names: keys of LAYERS, none for all of them.
        phases: of PHASES.
        count: of cases.
        seed: of the draw.
        max_macs: multiply-accumulates of a case; more only where one token needs more.
    """
    rng, found = random.Random(seed), dict[str, Case]()
    layers = [LAYERS[name] for name in names or LAYERS]
    while len(found) < count:
        layer, tp, ep = rng.choice(layers), rng.choice(DEGREES), rng.choice(DEGREES)
        if splits(layer, tp, ep):
            case = _drawn(rng, rng.choice(phases), layer, (tp, ep), max_macs)
            found[case.id] = case
    return list(found.values())


def _drawn(
    rng: random.Random, phase: str, layer: Layer, split: tuple[int, int], max_macs: float
) -> Case:
    (tp, ep), (few, many), routing = split, MOST_TOKENS, rng.choice(ROUTINGS)
    H = layer.H // NARROWER // H_MULTIPLE * H_MULTIPLE
    tokens = round(few ** rng.random()) if phase == "decode" else rng.randint(2, many)
    is_sent = ep > 1 and rng.random() < 0.5
    narrow = dataclasses.replace(layer, H=H)
    case = rank_case(narrow, tp, ep, routing, max_macs, tokens)
    step = f"{phase} of {case.params['tokens']}"
    name = f"{layer.name}/tp{tp}/ep{ep}{'/sp' if is_sent else ''}/{step}/{routing}"
    params = case.params | {"phase": phase, "is_sent": is_sent}
    variant = f"{case.variant}, H {layer.H} -> {H}"
    return dataclasses.replace(case, id=name, kernel=KERNEL, variant=variant, params=params)


def run(case: Case, limits: Limits) -> Verdict:
    """Compute a split with either core first."""
    problem, note = prefill.build(case, limits)
    actual, simulated_us, kernel = launch(case, problem, start_core=0)
    other, _, _ = launch(case, problem, start_core=1)
    peer = torch.from_numpy(prefill.torch_path(problem))
    rounded = peer.bfloat16().float().numpy()  # as a layer gives it on
    exact = prefill.formula(problem)
    failure = judge("output", actual, exact, rounded, case)
    wrong = int(np.count_nonzero(other.view(np.int32) != actual.view(np.int32)))
    if not failure and wrong:
        failure = f"output: {wrong} elements differ with the other core first"
    return Verdict(failure=failure, note=join(note, kernel), simulated_us=simulated_us)


def launch(case: Case, problem: prefill.Problem, start_core: int) -> tuple[np.ndarray, float, str]:
    """Run the launches of the plan.

    Returns:
        [T, H] float32, zeros for tokens that are not sent; simulated microseconds; the kernels.
    """
    T, K = problem.index_TK.shape
    is_here_T: np.ndarray = np.ones(T, bool)
    if case.need("is_sent"):
        is_here_T = np.asarray((problem.index_TK >= 0).any(1))
    output_TH = np.zeros(problem.hidden_TH.shape, np.float32)
    rows = int(is_here_T.sum())
    if not rows:
        return output_TH, 0.0, "nothing was sent"
    plan = NkiBackend().plan(
        _parts(case, problem), Step(case.need("phase"), T, rows=rows if rows < T else 0)
    )
    model_index_TK = prefill.choices(case, T, case.need("experts"), K)
    is_unscaled = problem.scaling == "NO_SCALE"
    affinities_TK = problem.output_weights_TK if is_unscaled else problem.affinities_TK
    step: dict[str, Any] = {
        "hidden": problem.hidden_TH[is_here_T],
        "index": problem.index_TK[is_here_T],
        "model_index": model_index_TK[is_here_T],
        "affinities": affinities_TK[is_here_T],
    }
    simulated_us, names = 0.0, []
    for each in plan.launches():
        arguments = {
            name: step[value.name] if isinstance(value, Input) else value
            for name, value in each.arguments
        }
        options = SimOptions(start_core=start_core)
        found = launch_kernel(each.kernel, lnc=each.num_cores, options=options, **arguments)
        outputs = found.outputs if isinstance(found.outputs, tuple) else (found.outputs,)
        step |= zip(each.outputs, outputs, strict=True)
        simulated_us += found.us
        names.append(each.name)
    output_TH[is_here_T] = step["output"].float().numpy()
    return output_TH, simulated_us, ", ".join(names)


def _parts(case: Case, problem: prefill.Problem) -> LayerParts:
    """Return the experts of a rank as a layer holds them."""
    weights = problem.weights
    _, I, H = weights.down.shape  # noqa: E741  the axis letter
    spec = ExpertSpec(
        num_experts=case.need("experts"),
        top_k=problem.index_TK.shape[1],
        hidden_size=H,
        intermediate_size=I,
        formula=problem.formula,
        scales_input=problem.scaling == "PRE_SCALE",
    )
    return LayerParts(
        spec,
        ExpertWeights(*weights.rounded(), problem.formula),
        Tuning(num_cores=problem.num_cores),
        num_experts=case.need("experts"),
        first_expert=case.need("E_offset"),
    )
