"""Plant one fault in one of our kernels: the simulator must name its line, or the result be wrong.

Where instructions remain that a compiler could run, only the formula can tell: such a fault must
change the result. The kernel without the fault, on the same input, must give neither.
"""

import importlib.util
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

import nki_sim
from neuron_moe.blocks import num_blocks
from nki_kernels.combine import CombineDims, combine, combine_ref
from nki_kernels.common.formula import limits
from nki_kernels.index import BlockDims, index_blocks, index_blocks_ref
from nki_sim.launch import Kernel
from tests.golden.traces import plain
from tests.nki_kernels.combine import test_kernel as combine_tests
from tests.nki_kernels.decode.cases import GPT_OSS, Decode
from tests.nki_kernels.index import test_kernel as index_tests
from tests.nki_kernels.prefill.cases import Prefill

ROOT = Path(__file__).parents[3]
# Work tiles without rows compute with what nobody wrote; slots of padding are returned unwritten.
ALLOWED = {"uninitialized", "output"}
HOLDERS = ("nki_kernels", "tests")  # modules that may hold functions of kernels
TOLERANCE = 0.02  # of the largest element: bfloat16 inside
# How to launch, what comes of it, the formula's result, and by how much of its largest they differ.
Trial = tuple[Callable[[], nki_sim.Run], Callable[[nki_sim.Run], Any], Any, float]


@dataclass(frozen=True)
class Fault:
    """One edit of a kernel of ours.

    Attributes:
        trial: one of TRIALS.
        file: below nki_kernels.
        old: text of it, once there.
        new: what takes its place.
        finds: classes of error or kinds of finding, one of which is told, if anything is.
        at: text of the line to be named, in any file of ours; several with | between.
    """

    trial: str
    file: str
    old: str
    new: str
    finds: str = ""
    at: str = ""


def prefill(rng: random.Random, **given: Any) -> Trial:
    """Return a prefill of random size."""
    tokens = rng.choice(given.pop("tokens", (380, 450, 520)))
    options = given.pop("options", {})
    case = Prefill(
        tokens,
        192,
        given.pop("width", rng.choice((60, 96))),
        given.pop("experts", 9),
        2,
        given.pop("block_size", 32),
        seed=rng.randrange(99),
        options=options,
        **given,
    )
    return case.launch, case.slots_of, case.expected_slots(), TOLERANCE


def decode(rng: random.Random, **given: Any) -> Trial:
    """Return a decode of random size."""
    tokens = rng.choice((6, 16, 33))
    case = Decode(tokens, 192, given.pop("width", 60), 7, 2, seed=rng.randrange(99), **given)
    return case.launch, lambda run: run.outputs.astype(np.float64), case.expected(), TOLERANCE


def index(rng: random.Random) -> Trial:
    """Return an index of random size, in which some choices have no expert."""
    T, K, E, B = rng.choice((260, 301)), rng.choice((2, 3)), rng.choice((7, 12)), 32
    chosen = index_tests.draw(T, K, E, 0.1)
    dims = BlockDims(E, B, num_blocks(T, K, E, B))
    expected = index_blocks_ref(chosen, E, B, dims.num_blocks)
    return (
        lambda: nki_sim.run(index_blocks, chosen, dims, lnc=2),
        lambda run: _flat(run.outputs),
        _flat(expected),
        0.0,
    )


def _flat(outputs: Any) -> Any:
    return np.concatenate([np.asarray(output, np.float64).reshape(-1) for output in outputs])


def combined(rng: random.Random) -> Trial:
    """Return a combine of random size, in which some choices have no expert."""
    T, K = rng.choice((130, 200)), rng.choice((2, 3))
    arrays = combine_tests.draw(T, K, 128, 2, 0.3, combine_tests.BF16)
    dims = CombineDims(combine_tests.nl.float32, True)
    return (
        lambda: nki_sim.run(combine, *arrays, dims, lnc=2),
        lambda run: run.outputs.astype(np.float64),
        combine_ref(*arrays),
        TOLERANCE,
    )


TRIALS: dict[str, Callable[[random.Random], Trial]] = {
    "prefill": prefill,
    "prefill with biases": lambda rng: prefill(
        rng, has_bias=True, options={**GPT_OSS, "up_limits": limits(-0.5, 0.5)}
    ),
    "prefill, dynamic": lambda rng: prefill(rng, options={"loop_plan": "dynamic"}),
    "prefill, short tiles": lambda rng: prefill(
        rng, tokens=(300, 320), experts=4, block_size=128, options={"tells_short": True}
    ),
    "prefill, rows alone": lambda rng: prefill(rng, loop={"piece_rows": 1}),
    "prefill, in parts of H": lambda rng: prefill(rng, loop={"h_parts": 2}),
    "prefill, hidden split": lambda rng: prefill(
        rng, width=rng.choice((129, 131)), options={"shard_plan": "hidden"}
    ),
    "decode": lambda rng: decode(rng, options={"mode": "selective"}),
    "decode with biases": lambda rng: decode(
        rng, has_bias=True, options={**GPT_OSS, "mode": "selective"}
    ),
    "decode in iterations": lambda rng: decode(
        rng, options={"mode": "selective", "weight_buffers": 2}
    ),
    "decode by halves": lambda rng: decode(
        rng, width=192, options={"mode": "selective", "chunks": 1, "parts": 2}
    ),
    "decode of all": lambda rng: decode(rng, options={"mode": "all"}),
    "index": index,
    "combine": combined,
}
TABLES, STAGES = "prefill/buffers.py", "prefill/stages.py"
WORK_TILES, APART, LOADS = "prefill/kernel.py", "prefill/exchange.py", "prefill/loads.py"
LIST, ITERATIONS, OUT, ENDS = (
    "decode/list.py",
    "decode/iterations.py",
    "decode/out.py",
    "decode/ends.py",
)
MAPPING, INVERSE, COMBINE = "index/kernel.py", "index/slot_inverse.py", "combine/kernel.py"
E, RACE = "UninitializedRead uninitialized", "RaceError race"
OPERAND, ADDS = "IllegalOperand", "AccumulateError"
SPLIT = "prefill, hidden split"
FAULTS: dict[str, Fault] = {
    # Prefill: what waits for what.
    "counter-not-set": Fault(
        "prefill", TABLES, "    nisa.memset(dst=b.counter, value=0)\n", "", E, "_sb, src=entry"
    ),
    "ahead-not-set": Fault("prefill", TABLES, "    nisa.memset(dst=b.ahead, value=2)\n", "", E),
    "rows-of-padding-not-set": Fault(
        "prefill",
        TABLES,
        "        nisa.memset(dst=gathered_sb, value=0.0, engine=nisa.engine.vector)",
        "        pass",
        E,
    ),
    "steps-of-two": Fault(
        "prefill",
        TABLES,
        "dst=b.one, value=1)",
        "dst=b.one, value=2)",
        "OutOfBounds output",
        "nisa.tensor_copy|output = nl.ndarray",
    ),
    "both-cores-take-one-lane": Fault(
        "prefill", WORK_TILES, "else nl.program_id(0)\n", "else 0\n", RACE
    ),
    "first-tile-not-turned": Fault(
        "prefill",
        WORK_TILES,
        "        turn_rows(config, b, following, 0, config.tile_rows)\n    # This work tile",
        "        pass\n    # This work tile",
        E,
        "nisa.",
    ),
    "first-rows-not-gathered": Fault(
        "prefill",
        WORK_TILES,
        "    gather_rows(config, b, x, share, 0, 0)\n    start_scales",
        "    start_scales",
        E,
        "nisa.",
    ),
    "next-work-tile-not-looked-up": Fault(
        "prefill",
        WORK_TILES,
        "    look_ahead(config, b, s)\n    gather",
        "    gather",
        E,
        "nisa.",
    ),
    "gathered-before-it-is-looked-up": Fault(
        "prefill",
        WORK_TILES,
        "    start_work_tiles(config, b)\n    gather_rows(config, b, x, share, 0, 0)\n",
        "    gather_rows(config, b, x, share, 0, 0)\n    start_work_tiles(config, b)\n",
        E,
        "nisa.",
    ),
    "next-weights-not-loaded": Fault(
        "prefill",
        WORK_TILES,
        "        _load_part(config, b, x, share, s, part + config.loop.weight_buffers)",
        "        pass",
        E,
        "nisa.nc_matmul",
    ),
    "weights-of-this-expert-again": Fault(
        "prefill",
        WORK_TILES,
        "share, b.expert[work_tile], s, step)",
        "share, b.expert[s], s, step)",
        E,
        "nisa.",
    ),
    "one-buffer-of-ids-for-all-tiles": Fault(
        "prefill",
        LOADS,
        "[0 : config.tile_rows, j : j + 1], s, j)",
        "[0 : config.tile_rows, 0:1], s, j)",
    ),
    # Prefill: products, slices and types.
    "first-product-adds": Fault(
        "prefill",
        STAGES,
        "moving=turned_sb[0:depth, of_all, 0:R],\n                accumulate=of_all > 0,",
        "moving=turned_sb[0:depth, of_all, 0:R],\n                accumulate=True,",
        ADDS,
        "nisa.nc_matmul",
    ),
    "every-product-starts": Fault(
        "prefill",
        STAGES,
        "moving=turned_sb[0:depth, of_all, 0:R],\n                accumulate=of_all > 0,",
        "moving=turned_sb[0:depth, of_all, 0:R],\n                accumulate=False,",
        ADDS,
        "nisa.nc_matmul",
    ),
    "gate-for-up": Fault(
        "prefill",
        STAGES,
        "projected[0:rows, projected.shape[1] - 1, 0:R]",
        "projected[0:rows, 0, 0:R]",
        ADDS,
        "nisa.nc_matmul",
    ),
    "row-less-of-the-inner-tile": Fault(
        "prefill",
        STAGES,
        "[0:depth, t, 0:R],\n                moving=b.down[buffer][0:depth, t, begin:end]",
        "[0 : depth - 1, t, 0:R],\n                moving=b.down[buffer][0 : depth - 1, t, begin:end]",
    ),
    "partitions-differ": Fault(
        "prefill",
        STAGES,
        "moving=b.down[buffer][0:depth, t, begin:end]",
        "moving=b.down[buffer][0 : depth - 1, t, begin:end]",
        OPERAND,
        "nisa.nc_matmul",
    ),
    "columns-left-in-psum": Fault(
        "prefill",
        STAGES,
        "        copy_alternating(outer_sb, rows_ps, turn + 1)",
        "        copy_alternating(outer_sb[:, 1:], rows_ps[:, 1:], turn + 1)",
        E + " output",
    ),
    "pieces-stored-by-the-first-tile": Fault(
        "prefill", STAGES, "place = j * count + piece", "place = piece", "output", "pieces.ap"
    ),
    "stored-by-the-first-tile": Fault(
        "prefill, rows alone",
        STAGES,
        "vector_offset=b.out_row[s][0:computed, j : j + 1]",
        "vector_offset=b.out_row[s][0:computed, 0:1]",
        "output",
        "output = nl.ndarray",
    ),
    "bias-of-the-other-projection": Fault(
        "prefill with biases",
        STAGES,
        "operands.append(b.gate_up_bias[buffer][0:rows, half,",
        "operands.append(b.gate_up_bias[buffer][0:rows, 1 - half,",
    ),
    "clamp-without-offset": Fault(
        "prefill with biases",
        STAGES,
        "operands.append(clamps.upper + offset)",
        "operands.append(clamps.upper)",
    ),
    "one-iteration-less": Fault(
        "prefill, dynamic",
        WORK_TILES,
        "nl.fori_loop(0, iterations, two_work_tiles)",
        "nl.fori_loop(1, iterations, two_work_tiles)",
        "output",
        "output = nl.ndarray",
    ),
    "iterations-not-loaded": Fault(
        "prefill, dynamic",
        TABLES,
        "    nisa.dma_copy(dst=b.iterations, src=lists.class_iterations)\n",
        "",
        E,
        "register_load",
    ),
    # Prefill with the hidden axis split.
    "parts-not-exchanged": Fault(
        SPLIT, APART, "        _exchange(config, b, s, j)\n", "", E, "data2=b.other[buffer]"
    ),
    "sent-to-itself": Fault(
        SPLIT,
        APART,
        "send_to_rank=other",
        "send_to_rank=nl.program_id(0)",
        "DivergenceError DeadlockError",
        "nisa.sendrecv",
    ),
    "own-part-twice": Fault(SPLIT, APART, "data2=b.other[buffer]", "data2=own_sb"),
    "tail-not-set": Fault(
        SPLIT, APART, "            nisa.memset(dst=own_sb, value=0.0)", "            pass", E
    ),
    # Index.
    "missing-tokens-not-set": Fault(
        "index", MAPPING, "        nisa.memset(dst=index_sb, value=-1)", "        pass", E
    ),
    "wanted-not-set": Fault(
        "index", MAPPING, "        nisa.memset(dst=wanted_sb, value=-2.0)", "        pass", E
    ),
    "a-token-before-itself": Fault(
        "index",
        MAPPING,
        "compare_columns(ones_sb, nl.greater)",
        "compare_columns(ones_sb, nl.greater_equal)",
    ),
    "tokens-of-the-other-core-not-added": Fault(
        "index",
        MAPPING,
        "        nisa.tensor_tensor(dst=start_sb, data1=start_sb, data2=other_sb, op=nl.add)",
        "        pass",
    ),
    "sums-begin-anew": Fault(
        "index",
        INVERSE,
        "marked[term], moving, accumulate or term > 0)",
        "marked[term], moving, False)",
        ADDS,
        "nisa.nc_matmul",
    ),
    "counts-not-exchanged": Fault(
        "index",
        INVERSE,
        "        nisa.sendrecv(src=own_sb, dst=other_sb, send_to_rank=other, recv_from_rank=other, pipe_id=0)",
        "        pass",
        E,
    ),
    "pairs-one-too-high": Fault(
        "index",
        INVERSE,
        "dst=pair_sb, data=_add_other(own_sb), op0=nl.add, operand0=-1.0)",
        "dst=pair_sb, data=_add_other(own_sb), op0=nl.add, operand0=0.0)",
    ),
    "a-row-less-stored": Fault(
        "index",
        INVERSE,
        "rows = min(end_row, whole) - first_row\n",
        "rows = min(end_row, whole) - first_row - 1\n",
        "output",
    ),
    # Combine.
    "sum-begins-anew": Fault(
        "combine",
        COMBINE,
        "accumulate=index + term > 0",
        "accumulate=term > 0",
        ADDS,
        "nisa.nc_matmul",
    ),
    "missing-slots-not-set": Fault(
        "combine",
        COMBINE,
        "                nisa.memset(dst=slot_sb, value=0.0, engine=nisa.engine.vector)\n",
        "",
        E,
        "nisa.nc_matmul",
    ),
    "half-of-the-columns": Fault(
        "combine",
        COMBINE,
        "dst=target_sb[:, half:width], src=total_ps[:, half:width]",
        "dst=target_sb[:, half : width - 1], src=total_ps[:, half : width - 1]",
        E + " output",
    ),
    "second-part-is-the-first": Fault(
        "combine", COMBINE, "operand0=part * num_slots", "operand0=(part - 1) * num_slots"
    ),
    "weight-of-the-first-choice": Fault(
        "combine", COMBINE, "terms = diagonals[index // num_parts]", "terms = diagonals[0]"
    ),
    "indices-never-skipped": Fault(
        "combine", COMBINE, ", oob_mode=nisa.oob_mode.skip", "", "OutOfBounds", "nisa.dma_copy"
    ),
    # Decode.
    "sums-not-set": Fault(
        "decode", "decode/kernel.py", "    start_sums(config, sums)\n    run", "    run", ADDS
    ),
    "weights-of-the-list-not-set": Fault(
        "decode", LIST, "    nisa.memset(dst=table_sb, value=0.0)\n", "", E
    ),
    "no-padding-of-choices": Fault(
        "decode",
        LIST,
        "            nisa.memset(dst=local_sb, value=_NO_EXPERT)",
        "            pass",
        E,
    ),
    "numbers-from-0": Fault(
        "decode",
        LIST,
        "                operand0=1.0,\n            )\n        return local",
        "                operand0=0.0,\n            )\n        return local",
    ),
    "down-weights-not-loaded": Fault(
        "decode",
        ITERATIONS,
        "            _load_item_out(config, b, x, pipeline, begin + turn - config.parts)",
        "            pass",
        E,
    ),
    "column-of-the-first-entry": Fault(
        "decode",
        ITERATIONS,
        "column = pipeline.column + entry * pipeline.step",
        "column = pipeline.column",
        E,
        "nisa.",
    ),
    "experts-not-looked-up": Fault(
        "decode in iterations",
        ITERATIONS,
        "        _copy_entries(config, b.experts[0:1, 0:count], routing.list_sb, position, first)",
        "        pass",
        E,
        "nisa.",
    ),
    "weights-of-an-iteration-not-loaded": Fault(
        "decode in iterations",
        ITERATIONS,
        "            _load_item_in(config, b, x, pipeline, begin + turn)",
        "            pass",
        E,
        "nisa.",
    ),
    "parts-not-exchanged-between-cores": Fault(
        "decode by halves",
        "decode/stages.py",
        "        nisa.tensor_tensor(dst=sum_sb, data1=own_ps, data2=sum_sb, op=nl.add)",
        "        nisa.tensor_copy(dst=sum_sb, src=own_ps)",
    ),
    "sums-of-one-core": Fault(
        "decode",
        ENDS,
        "data1=own_sb, data2=received_sb, op=nl.add",
        "data1=own_sb, data2=own_sb, op=nl.add",
    ),
    "halves-change-places": Fault(
        "decode",
        ENDS,
        "src=sums.total_sb[0:rows, low:high, theirs : theirs + size]",
        "src=sums.total_sb[0:rows, low:high, first : first + size]",
    ),
    "pipes-differ": Fault(
        "decode",
        ENDS,
        "pipe_id=0",
        "pipe_id=core",
        "DivergenceError DeadlockError",
        "nisa.sendrecv",
    ),
    "both-cores-store-all-rows": Fault(
        "decode",
        ENDS,
        "        first = core * (T - size)\n        # Of",
        "        first = 0\n        # Of",
        RACE,
        "nisa.dma_copy",
    ),
    "bias-not-added": Fault(
        "decode with biases",
        OUT,
        "            _multiply_bias(config, b, bank_ps, group, tile, begin, True)",
        "            pass",
    ),
    "sums-in-bfloat16": Fault(
        "prefill",
        TABLES,
        "config.tile_rows), nl.float32, nl.psum\n",
        "config.tile_rows), nl.bfloat16, nl.psum\n",
        OPERAND,
        "nisa.nc_matmul",
    ),
    "same-part-of-h-again": Fault(
        "prefill, in parts of H", LOADS, "(h_part * count + begin) * step", "begin * step"
    ),
    "one-place-for-sums-of-all-tiles": Fault(
        "prefill, in parts of H",
        STAGES,
        "b.inner_ps[j * config.i_axis.count + tile]",
        "b.inner_ps[tile]",
        ADDS,
        "nisa.nc_matmul",
    ),
    "list-of-all-not-set": Fault(
        "decode of all", LIST, "    nisa.memset(dst=table_sb, value=0.0)\n", "", E
    ),
    "wrong-tile-is-short": Fault(
        "prefill, short tiles", "prefill/config.py", "if 2 * j + 1 == size", "if 2 * j + 3 == size"
    ),
}


@contextmanager
def planted(fault: Fault, folder: Path, name: str) -> Iterator[None]:
    """Run with the fault: functions of the changed file stand wherever the old ones did."""
    source = (ROOT / "nki_kernels" / fault.file).read_text()
    assert source.count(fault.old) == 1, (name, source.count(fault.old))
    path = folder / f"own_{re.sub(r'[^a-z]', '_', name)}.py"
    path.write_text(source.replace(fault.old, fault.new), encoding="utf-8")
    module = "nki_kernels." + fault.file.removesuffix(".py").replace("/", ".")
    with pytest.MonkeyPatch.context() as patch:
        faulty = load(path, patch)
        old = {
            id(value): key
            for key, value in vars(sys.modules[module]).items()
            if isinstance(value, FunctionType | Kernel) and value.__module__ == module
        }
        for holder in [entry for name, entry in sys.modules.items() if name.startswith(HOLDERS)]:
            for key, value in list(vars(holder).items()):
                if id(value) in old:
                    patch.setattr(holder, key, vars(faulty)[old[id(value)]])
        yield


def load(path: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    """Import a file under its own name, as long as the patch lasts."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


def observe(trial: Trial) -> tuple[list[tuple[str, str]], bool]:
    """Run a kernel; return (kind, text) of what is told, and whether the result is right."""
    launch, result_of, expected, tolerance = trial
    try:
        run = launch()
    except nki_sim.NkiValidationError as error:
        return [(type(error).__name__, str(error))], False
    told = [(finding.kind, f"{finding.location}: {finding.text}") for finding in run.findings]
    difference = np.abs(result_of(run) - expected)
    is_right = bool((difference <= tolerance * np.abs(expected).max()).all())
    return told, is_right


def attack_own_kernel(seed: int, folder: Path) -> str:
    """Plant the fault of a seed; say what nobody noticed, or what the twin is blamed for."""
    name = list(FAULTS)[seed % len(FAULTS)]
    fault = FAULTS[name]
    trial = TRIALS[fault.trial](random.Random(f"own kernel {seed}"))
    known, is_right = observe(trial)
    if not is_right or any(kind not in ALLOWED for kind, _ in known):
        return f"{name} (seed {seed}): the twin is blamed: {known}, right: {is_right}"
    with planted(fault, folder, name):
        told, is_right = observe(trial)
        sentences = {plain(text) for _, text in known}
        told = [(kind, text) for kind, text in told if plain(text) not in sentences]
        for kind, text in told:
            named = "\n".join(_lines(text))
            if kind in fault.finds.split() and any(at in named for at in fault.at.split("|")):
                return ""
    if not is_right and all(kind in ALLOWED for kind, _ in told):
        return ""
    return f"{name} (seed {seed}): right: {is_right}, told: {told}"


def _lines(text: str) -> Iterator[str]:
    """Give the source lines that a text names."""
    for path, line in re.findall(r"(\S+\.py):(\d+)", text):
        yield Path(path).read_text().splitlines()[int(line) - 1]
