"""What our kernels use, launch by launch, kept in a file so that a run that was stopped goes on.

A launch is left out where an earlier one of its *class* entered every dynamic loop. Launches are of
one class where kernel, cores, settled configuration and operands agree in all that is no number,
and numbers agree up to 16; larger ones only in whether they exceed 128 and 512 and are whole tiles
of these: more experts, tokens or tiles repeat what a kernel issues. Loops run two iterations
(`SimOptions.most_iterations`). `--all` runs every launch.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import nki_kernels
import nki_sim
from lab.check.chip_cases import SMALL
from lab.check.kernel_cases.decode_models import decode_model_cases
from lab.check.kernel_cases.models import LAYERS, model_cases
from lab.check.kernels import NO_LIMITS, run_case, sample
from neuron_moe.backends.nki import features
from neuron_moe.backends.nki.times import TIMES_ONLY, plan_runs, routed_choices
from neuron_moe.configs import config_names
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.plan import Step
from neuron_moe.spec import Tuning
from neuron_moe.tools.models import read_model
from neuron_moe.tools.timing.layers import MODELS, Model, choose_experts
from neuron_moe.tools.timing.plans import experts_parts, in_stages, plan_of
from nki_kernels.index import index_blocks
from nki_sim.errors import UninitializedRead, UnknownValue
from nki_sim.precedent import Place, Recorder, Use, recording
from nki_sim.trace import CORE, FACTS, RANK, ControlFacts, Trace

CHIP: Final = "trn2"
_TUNING: Final = Tuning()
# Tokens of the steps of the published tables.
_TOKENS: Final = {"decode": (1, 4, 16, 64, 128), "prefill": (128, 1024, 8192)}
# Of `--quick`: model, ranks that split an expert, phase, tokens.
_QUICK: Final = (
    ("gpt_oss_120b", 8, "decode", 16),
    ("gpt_oss_120b", 8, "prefill", 1024),
    ("qwen3_30b_a3b", 8, "decode", 16),
    ("qwen3_30b_a3b", 8, "prefill", 1024),
    ("llama4_scout", 16, "decode", 4),
    ("mixtral_8x7b", 8, "decode", 4),
    ("deepseek_v3", 16, "decode", 16),
)
_MACS: Final = 5e9  # of a case of the open matrix, as `check kernels` has it
_SPLITS: Final = ((8, 1), (1, 8))  # ranks that split an expert, and those that share experts
_STEPS: Final = (("decode", 16), ("prefill", 512))  # of every published model
_EXACT: Final = 16
_TILES: Final = (128, 512)
_SHORT: Final = {"most_iterations": 2, "uninitialized": "report"}

Run = Callable[[Callable[..., Any]], Any]
"""Runs kernels of ours by a function that takes the arguments of `nki_sim.run`."""


def our_runs(tuning: Tuning = _TUNING, *, is_quick: bool = False) -> Iterator[tuple[str, Run]]:
    """Yield names of runs of our kernels with plans of a tuning, and what runs each: layers of all
    published models, cases of `chip check` and of the open matrix, experts of published tables.
    """
    layers: Iterable[tuple[str, int, int, str, int]] = (
        (model, *split, *step) for split in _SPLITS for step in _STEPS for model in config_names()
    )
    if is_quick:
        layers = ((model, tp, 1, phase, tokens) for model, tp, phase, tokens in _QUICK)
    for model, tp, ep, phase, tokens in layers:
        for in_one in (True, False):
            form = "one launch" if in_one else "stages"
            name = f"{model} TP{tp} EP{ep}, {phase} of {tokens}, {form}"
            yield name, partial(_run_layer, model, tp, ep, phase, tokens, in_one, tuning)
    for phase in () if is_quick else _TOKENS:
        for tokens, experts in itertools.product(_TOKENS[phase], MODELS):
            fp8 = "e5m2" if experts.name.startswith("gpt-oss") else "e4m3"
            formats = ("bf16", fp8) if phase == "decode" else ("bf16",)
            for weights, layout in itertools.product(formats, ("plain", "packed")):
                name = f"experts of {experts.name} TP{experts.tp}, {phase} of {tokens}, {weights}"
                run = partial(_run_experts, experts, Step(phase, tokens), weights, layout, tuning)
                yield f"{name} {layout}", run
    matrix = (
        [] if is_quick else [*model_cases(list(LAYERS), _MACS), *decode_model_cases(list(LAYERS))]
    )
    for case in (*SMALL, *sample(matrix)):
        asked = {**case_params(tuning), **case.params}
        yield case.id, partial(_run_case, replace(case, params=asked))


def case_params(tuning: Tuning) -> dict[str, str]:
    """Return how the kernels of a case are to go about it, as parameters of the case."""
    return {"iterations": features.prefill_request(tuning).iterations}


def _run_case(case: Any, run: Callable[..., Any]) -> None:
    """Run a case with its numbers, whole."""
    with recording() as recorder:
        found = run_case(case, NO_LIMITS)
    run.note(case.id, recorder)  # type: ignore[attr-defined]
    if found.outcome != "passed":
        raise ValueError(found.reason)


def _run_layer(
    model: str,
    tp: int,
    ep: int,
    phase: str,
    tokens: int,
    in_one: bool,
    tuning: Tuning,
    run: Callable[..., Any],
) -> None:
    raw_config, _ = read_model(model)
    layer = RankLayer(raw_config, model, tp=tp, ep=ep, backend="nki", tuning=tuning)
    plan = layer.plan(phase, tokens, in_one=in_one)
    options = replace(TIMES_ONLY, target=CHIP)
    for _ in plan_runs(plan, routed_choices(plan), options=options, run=run):
        pass  # who records has seen it


def _run_experts(
    model: Model,
    step: Step,
    weights: str,
    layout: str,
    tuning: Tuning,
    run: Callable[..., Any],
) -> None:
    """Run the experts of a published row, in one launch and in stages."""
    parts = experts_parts(model, step, layout=layout, weight_format=weights)
    tuning = replace(parts.tuning, features=tuning.features)
    plan = plan_of(replace(parts, tuning=tuning), step)
    index_TK = choose_experts("skewed", step.tokens, model.E, model.K)
    options = replace(TIMES_ONLY, target=CHIP)
    for each in (plan, in_stages(plan)) if plan.chosen().get("block_size") else (plan,):
        for _ in plan_runs(each, index_TK, options=options, run=run):
            pass


# Classes of launches.


def class_of(kernel: Any, cores: int, arguments: Mapping[str, Any]) -> str:
    """Return what launches of one class share, as a digest; see the head of this file."""
    classes = [(name, _class(value)) for name, value in sorted(arguments.items())]
    return hashlib.sha256(repr((_name(kernel), cores, classes)).encode()).hexdigest()[:16]


def _class(value: Any) -> Any:
    if isinstance(value, bool | str | float | Enum) or value is None:
        return repr(value)
    if isinstance(value, int):
        if value <= _EXACT:
            return value
        return tuple([(value > tile, value % tile == 0) for tile in _TILES])
    if is_dataclass(value) and not hasattr(value, "dtype"):
        named = [(each.name, _class(getattr(value, each.name))) for each in fields(value)]
        return type(value).__name__, named
    if isinstance(value, tuple | list):
        return [key for key, _ in itertools.groupby([_class(item) for item in value])]
    if hasattr(value, "shape"):
        return str(value.dtype), [_class(int(size)) for size in value.shape]
    return repr(value)


def _name(kernel: Any) -> str:
    return str(getattr(kernel, "__name__", "kernel"))


# Running and keeping.


class UsesFile:
    """A file of launches and what they used, a line each; several processes may add to it.

    Args:
        path: of the file; made when the first launch is noted.
        tuning: of the plans.
        is_all: whether launches of a class that was seen run, too.

    Attributes:
        of: fingerprint of these, the kernels and the simulator; lines of others do not count.
    """

    def __init__(self, path: Path, tuning: Tuning, *, is_all: bool = False) -> None:
        self.path, self.tuning, self.is_all = path, tuning, is_all
        folders = [Path(file).parent for file in (nki_kernels.__file__, nki_sim.__file__)]
        texts = [file.read_text() for f in folders for file in sorted(f.rglob("*.py"))]
        text = repr((tuning.features, is_all, texts))
        self.of = hashlib.sha256(text.encode()).hexdigest()[:16]

    def lines(self) -> list[dict[str, Any]]:
        """Return what was noted, but for a line that was not written to its end."""
        if not self.path.exists():
            return []
        whole = self.path.read_text().split("\n")[:-1]
        return [line for line in map(json.loads, whole) if line["of"] == self.of]

    def add(self, **line: Any) -> None:
        """Note something."""
        text = json.dumps({"of": self.of, **line}) + "\n"
        handle = os.open(self.path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)

    def recorder(self) -> Recorder:
        """Return all that was used, as if one recorder had watched."""
        together = Recorder()
        for line in self.lines():
            if "uses" not in line:
                continue
            together.runs += 1
            for op, kind, value, levels, *place in line["uses"]:
                known = together.uses[Use(op, kind, value)]
                known[Place(*place)] = max(levels, known.get(Place(*place), 0))
        return together


@dataclass
class _Launches:
    """Runs launches, those that tell something new with few iterations, and notes their uses."""

    file: UsesFile

    def __post_init__(self) -> None:
        self.idle: dict[str, set[int]] = {}
        for line in self.file.lines():
            self._see(line)

    def _see(self, line: Mapping[str, Any]) -> None:
        if "class" in line:
            idle = set(line["idle"])
            self.idle[line["class"]] = self.idle.get(line["class"], idle) & idle

    def __call__(self, kernel: Any, *, lnc: int, options: Any, **arguments: Any) -> Any:
        """Run a launch as `nki_sim.run`, or leave it out; return its run, or None."""
        name = class_of(kernel, lnc, arguments)
        if not self.file.is_all and self.idle.get(name, {0}) == set():
            if kernel is index_blocks:  # what comes behind it needs its lists
                return nki_sim.run(kernel, lnc=lnc, options=options, **arguments)
            return None
        run = None
        with recording() as recorder:
            if options.mode == "indices" and not self.file.is_all:
                short = replace(options, **_SHORT)
                with contextlib.suppress(UnknownValue, UninitializedRead):
                    run = nki_sim.run(kernel, lnc=lnc, options=short, **arguments)
            if run is None:
                run = nki_sim.run(kernel, lnc=lnc, options=options, **arguments)
        line = {"class": name, "idle": sorted(_idle_loops(run.trace))}
        self._see(line)
        self.note(_name(kernel), recorder, **line)
        return run

    def note(self, name: str, recorder: Recorder, **more: Any) -> None:
        """Keep what a launch used."""
        uses = [
            (*use, levels, *place)
            for use, places in recorder.uses.items()
            for place, levels in places.items()
        ]
        self.file.add(launch=name, **more, uses=uses)


def _idle_loops(trace: Trace) -> set[int]:
    """Return the loops, numbered as a core comes to them, that no core entered."""
    rows = trace.columns()
    begun: dict[tuple[int, int], list[bool]] = {}
    for row in rows.tolist():
        facts = trace.facts[row[FACTS]]
        if isinstance(facts, ControlFacts) and facts.kind in ("loop_begin", "loop_iteration"):
            entered = begun.setdefault((row[RANK], row[CORE]), [])
            if facts.kind == "loop_begin":
                entered.append(False)
            else:
                entered[-1] = True
    cores = list(begun.values())
    most = max(map(len, cores), default=0)
    return {k for k in range(most) if not any(k < len(core) and core[k] for core in cores)}


def record_ours(file: UsesFile, jobs: int, *, is_quick: bool) -> int:
    """Run what the file has not yet, in so many processes; return how many runs there are."""
    done = {line["run"] for line in file.lines() if "run" in line}
    runs = list(our_runs(file.tuning, is_quick=is_quick))
    left = [(name, run) for name, run in runs if name not in done]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for number, (name, why) in enumerate(pool.map(partial(_one, file), left), 1):
            reason = f": {why}" if why else ""
            print(f"{number} of {len(left)}: {name}{reason}", file=sys.stderr)
    return len(runs)


def _one(file: UsesFile, named: tuple[str, Run]) -> tuple[str, str]:
    """Run one and note it as done; return its name, and why it failed."""
    (name, run), why = named, ""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run(_Launches(file))
    except Exception as error:  # noqa: BLE001  one that fails must not end all
        first = (str(error).strip().splitlines() or [""])[0]
        why = f"{type(error).__name__}: {first}"
    file.add(run=name, failed=why)
    return name, why
