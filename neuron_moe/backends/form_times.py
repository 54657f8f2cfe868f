"""How fast this machine multiplies experts in each form: a short measurement, kept in a file.

A sample of a layer's experts gets rows as a step of each size would give them, and runs the code
that the layer runs, in turns with the other forms and on other experts than the run before, after
an operation on all threads, as a router is. A form's time is the median of its runs but the first;
one that is far behind runs no more. All sizes of a layer together take about MOST_SECONDS beside
the layouts of the sample, and nothing where the file knows the machine and the layer. The file is
replaced as a whole, so that processes may share it; of two that measure at once, either may be
kept.
"""

import contextlib
import json
import logging
import platform
import secrets
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from neuron_moe.backends import compiled_products
from neuron_moe.backends.chosen_experts import chosen_experts
from neuron_moe.backends.custom_kernels import custom_kernels_for
from neuron_moe.weights.expert_weights import ExpertWeights, LocalRouting
from neuron_moe.weights.linear import laid
from neuron_moe.weights.packed import PackedMatrices, is_packing_available
from neuron_moe.weights.product_forms import (
    BUCKETS,
    COMPILED,
    FORMS,
    PACKED_FORMS,
    STRAIGHT_FORMS,
    ProductForms,
)

MOST_SECONDS = 5.0
CACHE_FILE = "product_forms.json"
LINEAR_ROWS = (1, 256)
_PARTS, _PART_BYTES = 4, 32 << 20  # of a dense projection, larger than the caches together
_SAMPLE_EXPERTS = 32
_SAMPLE_BYTES = 1 << 30  # of which a run reads a part; beyond the caches of large machines
_SAMPLE_OPERATIONS = 2e9  # multiplications of a run beyond which fewer experts are sampled
_EXPERTS_PER_THREAD = 2  # that are sampled at least, or experts side by side leave threads idle
_ELEMENTS_BEFORE = 1 << 20
_MOST_RUNS = 15
_FAR_BEHIND = (5.0, 2.0, 1.3)  # times the fastest, after so many runs, that end the others' turns
_LOG = logging.getLogger(__name__)

Times = Mapping[int, Mapping[str, float]]
"""Seconds of a run of the sample, by bucket and form."""


@dataclass(frozen=True)
class Sample:
    """What is measured for one bucket.

    Attributes:
        experts: how many.
        rows: of each.
    """

    experts: int
    rows: int


def form_times(weights: ExpertWeights, top_k: int, num_experts: int) -> Times:
    """Return the times of each form, from the file or measured now.

    Args:
        weights: plain ones on the CPU.
        top_k: K.
        num_experts: E of the model.
    """
    key = _key(weights, top_k, num_experts)
    return kept_times(key, BUCKETS, lambda: measure(weights, top_k, num_experts))


def linear_times(weight_nk: Tensor) -> Times:
    """Return the times of a dense projection with LINEAR_ROWS rows, by form.

    Args:
        weight_nk: [out, in] on the CPU; a run of its rows stands for all of them.
    """
    sizes = "x".join(map(str, weight_nk.shape))
    forms = " ".join(linear_forms(weight_nk))
    key = f"{machine()}; linear {sizes} {_name(weight_nk.dtype)}; {forms}"
    return kept_times(key, LINEAR_ROWS, lambda: _measure_linear(weight_nk))


def linear_forms(weight_nk: Tensor) -> list[str]:
    """Return the forms in which this machine can multiply with a dense projection."""
    dtype, forms = weight_nk.dtype, ["plain"]
    if weight_nk.device.type == "cpu" and dtype in PackedMatrices.DTYPES:
        forms += ["packed"] * is_packing_available(dtype)
        forms += [COMPILED] * (not compiled_products.why_not())
    return forms


def kept_times(key: str, buckets: Iterable[int], measure: Callable[[], Times]) -> Times:
    """Return what the file knows under a key; else measure it and add it."""
    path = cache_path()
    found = read_times(path).get(key)
    if found is not None and set(found) == set(buckets) and all(found.values()):
        return found
    new = measure()
    write_times(path, {key: new})
    return new


def _measure_linear(weight_nk: Tensor) -> dict[int, dict[str, float]]:
    rows_of_part = max(1, _PART_BYTES // weight_nk[:1].nbytes)
    parts = torch.split(weight_nk[: _PARTS * rows_of_part], rows_of_part)
    times = {}
    with torch.inference_mode():
        wanted = linear_forms(weight_nk)
        packed = PackedMatrices.of_linears(parts) if "packed" in wanted else []
        for rows in LINEAR_ROWS:
            hidden_nk = torch.randn(rows, weight_nk.shape[1]).to(weight_nk.dtype)
            forms = {
                "plain": [partial(functional.linear, hidden_nk, part) for part in parts],
                "packed": [partial(each.multiply, hidden_nk, 0, pads=False) for each in packed],
                COMPILED: [partial(compiled_products.linear, hidden_nk, part) for part in parts],
            }
            calls: dict[str, Callable[[], float]] = {
                form: partial(_time_all, forms[form]) for form in wanted
            }
            times[rows] = _run_in_turns(calls, MOST_SECONDS / 4)
    return times


def _time_all(calls: Iterable[Callable[[], object]]) -> float:
    start = _clock()
    for call in calls:
        call()
    return _clock() - start


def _clock() -> float:
    """Return seconds; with one thread those that it computes, whatever else the machine runs."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def sample_of(bucket: int, weights: ExpertWeights, top_k: int, num_experts: int) -> Sample:
    """Return what stands for a step of `bucket` tokens whose choices are drawn uniformly.

    It has no more experts than `_sampled_experts`.
    """
    local = weights.num_experts
    touched = local * (1.0 - (1.0 - top_k / num_experts) ** bucket)
    rows = max(1, round(bucket * top_k * local / num_experts / touched))
    operations = rows * (weights.gate_up_proj_EHI[0].numel() + weights.down_proj_EIH[0].numel())
    affordable = max(_experts_for_threads(), int(_SAMPLE_OPERATIONS / operations))
    most = min(affordable, _SAMPLE_EXPERTS, _sampled_experts(weights))
    return Sample(max(1, min(round(touched), most)), rows)


def _experts_for_threads() -> int:
    return _EXPERTS_PER_THREAD * torch.get_num_threads()


def _sampled_experts(weights: ExpertWeights) -> int:
    """Return how many experts are laid out for the measurement."""
    bytes_of_all = weights.gate_up_proj_EHI.nbytes + weights.down_proj_EIH.nbytes
    beyond_caches = _SAMPLE_BYTES * weights.num_experts // bytes_of_all
    return min(weights.num_experts, max(_experts_for_threads(), beyond_caches))


def measure(weights: ExpertWeights, top_k: int, num_experts: int) -> dict[int, dict[str, float]]:
    """Return seconds by bucket and form; a form that cannot run here is left out."""
    times = {}
    with torch.inference_mode():
        run = weights.run(slice(0, _sampled_experts(weights)))
        layouts = _layouts(run) | {
            kernel.name: replace(
                run, product_forms=ProductForms.custom(kernel.name, kernel.prepare(run))
            )
            for kernel in custom_kernels_for(weights, num_experts)
        }
        deadline = time.perf_counter() + MOST_SECONDS
        for number, bucket in enumerate(BUCKETS):
            left = (deadline - time.perf_counter()) / (len(BUCKETS) - number)
            sample = sample_of(bucket, weights, top_k, num_experts)
            times[bucket] = _measure_bucket(layouts, sample, left)
    return times


def _layouts(run: ExpertWeights) -> dict[str, ExpertWeights]:
    """Return some experts in the layout of each form."""
    straight, transposed = (
        replace(
            run,
            gate_up_proj_EHI=laid(run.gate_up_proj_EHI, is_transposed=is_transposed),
            down_proj_EIH=laid(run.down_proj_EIH, is_transposed=is_transposed),
            product_forms=None,
        )
        for is_transposed in (False, True)
    )
    packed = _packed(transposed)
    layouts = {form: straight if form in STRAIGHT_FORMS else transposed for form in _forms_here()}
    if packed is None:
        return {form: each for form, each in layouts.items() if form not in PACKED_FORMS}
    return layouts | dict.fromkeys(PACKED_FORMS, packed)


def _forms_here() -> list[str]:
    """Return the forms of this machine: all, or all but the compiled one."""
    return [form for form in FORMS if form != COMPILED or not compiled_products.why_not()]


def _packed(plain: ExpertWeights) -> ExpertWeights | None:
    dtype = plain.down_proj_EIH.dtype
    if dtype not in PackedMatrices.DTYPES or not is_packing_available(dtype):
        return None
    return replace(
        plain,
        packed_gate_up=PackedMatrices(plain.gate_up_proj_EHI),
        packed_down=PackedMatrices(plain.down_proj_EIH),
    )


def _measure_bucket(
    layouts: Mapping[str, ExpertWeights], sample: Sample, seconds: float
) -> dict[str, float]:
    """Run all forms in turns, each on other experts than the run before."""
    any_layout = next(iter(layouts.values()))
    routings = _routings(any_layout.num_experts, sample)  # shared: none finds its matrices cached
    calls = {
        form: _call(weights, form, sample, routings)
        for form, weights in layouts.items()
        if form != "batched" or sample.rows == 1
    }
    return _run_in_turns(calls, seconds)


def _run_in_turns(calls: dict[str, Callable[[], float]], seconds: float) -> dict[str, float]:
    """Return the typical time of each form; those that cannot run are left out."""
    deadline = time.perf_counter() + seconds
    times: dict[str, list[float]] = {}
    running = dict(calls)
    for run in range(_MOST_RUNS + 1):
        for form in list(running):
            try:
                took = running[form]()
            except RuntimeError as error:  # this build of torch has no such product
                _LOG.debug("form %s: %s", form, error)
                del running[form]
                continue
            times.setdefault(form, []).append(took)
        typical = {form: statistics.median(each[1:] or each) for form, each in times.items()}
        limit = _FAR_BEHIND[min(run, len(_FAR_BEHIND) - 1)] * min(typical.values(), default=0.0)
        running = {form: call for form, call in running.items() if typical[form] <= limit}
        if run and time.perf_counter() > deadline:
            break
    return typical


def _call(
    weights: ExpertWeights, form: str, sample: Sample, routings: Iterator[LocalRouting]
) -> Callable[[], float]:
    """Return what runs a sample once and returns its seconds."""
    hidden_TH = torch.randn(sample.rows, weights.gate_up_proj_EHI.shape[1])
    hidden_TH = hidden_TH.to(weights.gate_up_proj_EHI.dtype)
    before = torch.ones(_ELEMENTS_BEFORE)

    def run() -> float:
        routing = next(routings)
        before.add_(1.0)  # on all threads
        start = _clock()
        chosen_experts(hidden_TH, routing, weights, form)
        return _clock() - start

    return run


def _routings(num_experts: int, sample: Sample) -> Iterator[LocalRouting]:
    """Yield routings in which every row takes all experts of the sample, then the next ones."""
    first = 0
    affinities_TK = torch.full((sample.rows, sample.experts), 1.0 / sample.experts)
    while True:
        index_K = (torch.arange(first, first + sample.experts) % num_experts).to(torch.int32)
        yield LocalRouting(index_K.expand(sample.rows, -1), affinities_TK)
        first += sample.experts


def cache_path() -> Path:
    """Return the file, in the folder that the system keeps for caches of this user."""
    return compiled_products.cache_folder() / CACHE_FILE


def read_times(path: Path) -> dict[str, Times]:
    """Return what a file knows; nothing, with a word in the log, where it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            key: {
                int(bucket): {form: float(seconds) for form, seconds in each.items()}
                for bucket, each in times.items()
            }
            for key, times in found.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _LOG.warning("%s: cannot be read (%s), so forms are measured again", path, error)
        return {}


def write_times(path: Path, new: Mapping[str, Times]) -> None:
    """Add to a file, which other processes may be reading or writing."""
    beside = path.with_name(f".{CACHE_FILE}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps({**read_times(path), **new}), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        _LOG.warning("%s: cannot be written (%s), so forms are measured each time", path, error)


def processor() -> str:
    """Return the name of this CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> str:
    """Return what times hang on beside the layer."""
    return f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _key(weights: ExpertWeights, top_k: int, num_experts: int) -> str:
    def sizes(tensor: Tensor) -> str:
        return "x".join(map(str, tensor.shape))

    projections = f"{sizes(weights.gate_up_proj_EHI)} {sizes(weights.down_proj_EIH)}"
    biases = "with" if weights.down_bias_EH is not None else "without"
    dtype = _name(weights.down_proj_EIH.dtype)
    layer = f"{projections} {dtype} {biases} bias, {top_k} of {num_experts}"
    forms = [*_forms_here(), *(kernel.name for kernel in custom_kernels_for(weights, num_experts))]
    return f"{machine()}; {layer}; {' '.join(forms)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
