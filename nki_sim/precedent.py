"""Which uses of instructions public kernels show, and which of another kernel they do not.

Nobody can say from here what the vendor's compiler takes; but kernels that run on chips are public,
and the simulator runs them. A `Recorder` watches runs and keeps their uses. A use is one aspect of
an instruction: its engine with the memories of its operands, their types, its operation, an
argument, how many levels an access pattern has, what an offset is read from, how data move, that it
stands in a dynamic loop; or an aspect of a loop, such as what one iteration leaves to the next.
Sizes are no part of it. Where a use has levels, one with more has not been seen in one with fewer.

`Table` is what was recorded of public kernels, by source; `precedents.json` beside this file is
shipped. "No public precedent" does not mean illegal: nobody showed that it works.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from nki_sim import trace as tr
from nki_sim.dtypes import DType
from nki_sim.isa.operators import Operator
from nki_sim.machine import NkiTensor, VirtualRegister
from nki_sim.machine.geometry import joined_dims
from nki_sim.machine.system import watching

TABLE: Final = Path(__file__).with_name("precedents.json")
LOOP: Final = "dynamic loop"
INSTRUCTION: Final = "instruction"
_OF_LOOPS: Final = ("from iteration to iteration", "from loop to loop", "cores", "iterations")
_COMPUTES: Final = ("vector", "scalar", "gpsimd")
_WRITTEN: Final = ("dst", "reduce_res")
_ELSEWHERE: Final = ("name", "engine", "dge_mode", "oob_mode")  # other aspects have these arguments


class Use(NamedTuple):
    """One aspect of an instruction, or of a dynamic loop.

    Attributes:
        op: the instruction, or LOOP.
        kind: which aspect.
        value: what it is, in words.
    """

    op: str
    kind: str
    value: str


class Place(NamedTuple):
    """A source line of a kernel."""

    kernel: str
    file: str
    line: int


# What the documentation or the vendor's tracker says of uses, in our words: instruction, what
# stands in kind and value, and the sentence with its reference. The first that fits is shown.
_REMARKS: Final = (
    (
        "dma_transpose",
        "out of range",
        "valid and invalid indices in one transposing gather abort the DMA and leave the device"
        " hanging until it is reset (aws-neuron-sdk issue 1390, open)",
    ),
    (
        "dma_copy",
        "scalar_offset",
        "the descriptor generators' limits on shapes are published nowhere; a copy was refused as"
        " 'Invalid Shape for Scalar DGE' (aws-neuron-sdk issue 1253, closed)",
    ),
    (
        LOOP,
        "left by dma",
        "NKI 0.4 fixed races between what a dynamic loop's body and what stands before it access"
        " (release notes); no page says what may be under way from iteration to iteration",
    ),
    ("max8", "psum", "the page names no memory (nki.isa.max8)"),
    ("nc_find_index8", "psum", "the page names no memory (nki.isa.nc_find_index8)"),
    (
        "nc_match_replace8",
        "types",
        "the page says nothing of a destination of another type (nki.isa.nc_match_replace8)",
    ),
    (
        "gpsimd engine",
        "of integers",
        "int32 operands go to GpSimd by default; which operators it has for them is listed nowhere"
        " (nki.isa.tensor_tensor)",
    ),
    (
        "tensor_copy",
        "scalar_offset",
        "dynamic accesses of SBUF crashed the compiler (aws-neuron-sdk issue 1373, closed: fixed"
        " in SDK 2.32)",
    ),
)


# What the documentation says outright, in our words: instruction, kind, what the value is, most
# levels, and the sentence with its page. The instruction and the value are regular expressions.
_ENGINES: Final = "(vector|scalar|gpsimd) engine"
_DOCUMENTED: Final = (
    (
        _ENGINES,
        "pattern",
        "(to|from) .*",
        3,
        "an instruction walks up to three free dimensions (nki-aps)",
    ),
    ("nc_matmul|nc_transpose|sendrecv", "pattern", ".*", 3, "the same (nki-aps)"),
    (
        _ENGINES,
        "types",
        "ALU (from|to) .*",
        0,
        "any type comes in and goes out, float32 between (nki.isa.activation, tensor_scalar)",
    ),
    (
        "vector engine",
        "operator",
        "(add|subtract|multiply|minimum|maximum|bitwise_and|.*equal|less|greater)"
        " of (integers|floats|integers and floats)",
        0,
        "in the table of math operators; bitvec ones run on Vector (nki.api.shared, tensor_scalar)",
    ),
    (
        "gpsimd engine",
        "operator",
        "(add|subtract|multiply|.*equal|less|greater|power) of (floats|integers and floats)",
        0,
        "arithmetic operators run on Vector or GpSimd (nki.isa.tensor_tensor, nki.api.shared)",
    ),
    (
        "gpsimd engine",
        "operator",
        "(add|subtract) of integers",
        0,
        "GpSimd has native arithmetic of int32 (nki.isa.tensor_tensor)",
    ),
    (
        "scalar engine",
        "operator",
        "(add|multiply) of (floats|integers and floats)",
        0,
        "Scalar has multiply, add, and one behind the other (nki.isa.tensor_scalar)",
    ),
    ("scalar engine", "operator", "relu of floats", 0, "an activation function (nki.api.shared)"),
    (
        "scalar engine",
        "operator",
        "softplus of floats",
        0,
        "an activation function (nki.language.softplus)",
    ),
    (
        _ENGINES,
        "place",
        "in a dynamic loop",
        1,
        "a body is compiled once, whatever it issues (nki-loops)",
    ),
    (
        "tensor_copy",
        "instruction",
        "on (vector|scalar|gpsimd)",
        0,
        "copies run on Vector, Scalar or GpSimd (nki.isa.tensor_copy)",
    ),
    (
        "tensor_scalar|tensor_tensor",
        "instruction",
        "on (vector|scalar|gpsimd)",
        0,
        "runs on Vector or GpSimd, tensor_scalar on Scalar too (nki.isa.tensor_scalar,"
        " nki.isa.tensor_tensor)",
    ),
    (
        "activation|activation_reduce|scalar_tensor_tensor|tensor_copy|tensor_scalar"
        "|tensor_scalar_reduce|tensor_tensor|tensor_reduce",
        "operand",
        ".* in (sbuf|psum)",
        0,
        "operands are in SBUF or PSUM (page of the instruction)",
    ),
    (
        "tensor_copy",
        "types",
        ".*",
        0,
        "types may differ: an intermediate cast to float32 (nki.isa.tensor_copy)",
    ),
    (
        "tensor_copy",
        "offset",
        "src in sbuf, scalar_offset of (a register|int32 in sbuf)",
        3,
        "an index of int32 offsets a pattern of SBUF (nki-scalar, nki.language.fori_loop)",
    ),
    (
        "tensor_copy_predicated",
        "types",
        "dst (.*), src \\1, predicate uint(8|16|32)",
        0,
        "predicates are uint8, uint16 or uint32 (nki.isa.tensor_copy_predicated)",
    ),
    ("iota", "types", "dst .*", 0, "integers are cast to any type (nki.isa.iota)"),
    (
        "nc_matmul",
        "types",
        "dst float32, stationary (float8_.*|bfloat16|float16), moving (float8_.*|bfloat16|float16)",
        0,
        "stationary and moving may differ in type, but for float32 (nki.isa.nc_matmul)",
    ),
    (
        "nc_matmul",
        "argument",
        "(accumulate|is_stationary_onezero|is_moving_onezero)=(True|False)",
        0,
        "accumulate=False overwrites PSUM, True adds; onezero is a hint (nki.isa.nc_matmul)",
    ),
    ("nc_matmul|nc_transpose", "place", "in a dynamic loop", 1, "the same (nki-loops)"),
    (
        "nc_match_replace8",
        "types",
        "dst float32, data float32, vals float32",
        0,
        "dst_idx is optional (nki.isa.nc_match_replace8)",
    ),
    (
        "nc_n_gather",
        "types",
        "dst (.*), data \\1, indices uint32",
        0,
        "data of any type, indices of uint32 (nki.isa.nc_n_gather)",
    ),
    (
        "sendrecv",
        "types",
        "src (.*), dst \\1",
        0,
        "both have the same type, any (nki.isa.sendrecv)",
    ),
    (
        "dma_copy",
        "transfer",
        "hwdge on (sync|scalar)",
        0,
        "engine names the queue of hwdge: sync or scalar (nki.isa.dma_copy)",
    ),
    (
        "dma_copy",
        "transfer",
        "(swdge|hwdge), (src|dst) by (scalar|vector)(, skip)?(, in a dynamic loop)?",
        0,
        "both generators take run-time addresses, and leave out what is out of bounds with"
        " oob_mode.skip (nki.isa.dma_copy)",
    ),
    ("dma_copy", "types", "dst (.*), src \\1", 0, "any type (nki.isa.dma_copy)"),
    (
        LOOP,
        "iterations",
        "none",
        0,
        "a loop is like one over range(lower, upper, step) (nki.language.fori_loop)",
    ),
    (
        LOOP,
        "from (iteration to iteration|loop to loop)",
        "left by (vector|scalar|gpsimd|dma and read) in sbuf, .*",
        0,
        "state is carried through SBUF, and what a body writes persists after the loop"
        " (nki.language.fori_loop)",
    ),
)


def documented(use: Use, levels: int = 0) -> str:
    """Return what the documentation says of a use, with its page; "" if nothing outright."""
    for op, kind, value, most, sentence in _DOCUMENTED:
        fits = re.fullmatch(op, use.op) and re.fullmatch(kind, use.kind)
        if fits and re.fullmatch(value, use.value) and levels <= most:
            return sentence
    return ""


# Recording.


class Recorder:
    """Keeps the uses of every run that it watches; see `recording`.

    Attributes:
        uses: where each use stands, and with how many levels there.
        runs: how many kernels were run to their end.
    """

    def __init__(self) -> None:
        self.uses: defaultdict[Use, dict[Place, int]] = defaultdict(dict)
        self.runs = 0
        self._kernel = ""
        self._seen: set[Any] = set()

    def begun(self, kernel: str) -> None:
        """Note which kernel the next instructions are of."""
        self._kernel = kernel
        self._seen.clear()

    def issued(
        self, core: Any, op: str, defaults: Mapping[str, Any], given: Mapping[str, Any], result: Any
    ) -> None:
        """Note an instruction.

        Args:
            core: that issued it, in its trace as the last line says.
            op: its name.
            defaults: of all its parameters, in their order.
            given: its arguments, dynamic offsets not yet read.
            result: what it returned; an instruction that is none in the trace has no handle.
        """
        handle = getattr(result, "handle", None)
        row = core.trace.row(handle) if type(handle) is int else None
        facts = None if row is None else core.trace.facts[row[tr.FACTS]]
        line = core.here() if row is None else core.line
        seen = op, line, core.loop_depth, facts, _signature(given)
        if seen in self._seen:
            return
        self._seen.add(seen)
        engine = "" if row is None else tr.ENGINE_NAMES[row[tr.ENGINE]]
        place = Place(self._kernel, *core.trace.lines[line])
        depth, is_shortened = core.loop_depth, bool(core.options.most_iterations)
        for use, levels in _aspects(op, engine, defaults, given, facts, depth, is_shortened):
            self._note(use, levels, place)

    def ended(self, trace: tr.Trace) -> None:
        """Note what the dynamic loops of a run say as a whole."""
        self.runs += 1
        for use, levels, line in _loop_aspects(trace):
            self._note(use, levels, Place(self._kernel, *trace.lines[line]))

    def _note(self, use: Use, levels: int, place: Place) -> None:
        places = self.uses[use]
        places[place] = max(levels, places.get(place, 0))


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record the uses of every kernel that is run while the context lasts."""
    recorder = Recorder()
    with watching(recorder):
        yield recorder


def _signature(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells instructions of one line apart, as far as their uses go."""
    return tuple([(name, _signature_of(item)) for name, item in given.items() if name != "name"])


def _signature_of(value: Any) -> Any:
    if type(value) is NkiTensor:
        space, dynamic = value._alloc.space, value._dynamic
        offset = None
        if dynamic is not None:
            offset = dynamic.kind, _signature_of(dynamic.index)
        return space, value.dtype, value.shape, value.strides, offset
    if isinstance(value, list | tuple):
        return tuple([_signature_of(item) for item in value])
    return _word(value)


def _aspects(
    op: str,
    engine: str,
    defaults: Mapping[str, Any],
    given: Mapping[str, Any],
    facts: Any,
    depth: int,
    is_shortened: bool,
) -> Iterator[tuple[Use, int]]:
    """Yield the uses of an instruction with their levels.

    Vector, Scalar and GpSimd have one way to read and write whatever the instruction, and one ALU
    that takes and gives any type: there patterns, types, operators and loops are uses of the
    engine.
    """
    who = f"{engine} engine" if engine in _COMPUTES else op
    tensors: list[tuple[str, NkiTensor]] = []
    operators: list[str] = []
    for name, default in defaults.items():
        value = given.get(name, default)
        items = value if isinstance(value, list | tuple) else (value,)
        found = [(name, item) for item in items if type(item) is NkiTensor]
        tensors += found
        if isinstance(value, Operator):
            operators.append(value.name)
        elif found or name in _ELSEWHERE or _is_size(value):
            continue
        elif name in given and _word(value) != _word(default):
            yield Use(op, "argument", f"{name}={_word(value)}"), 0
    yield Use(op, INSTRUCTION, f"on {engine}"), 0
    for words in dict.fromkeys(f"{name} in {_memory(item)}" for name, item in tensors):
        yield Use(op, "operand", words), 0
    if operators and who != op:
        for name, item in tensors:
            yield Use(who, "types", f"ALU {_direction(name)} {item.dtype}"), 0
    else:
        words = ", ".join(dict.fromkeys(f"{name} {item.dtype}" for name, item in tensors))
        yield Use(op, "types", words), 0
    integers = [item.dtype.is_integer for _, item in tensors]
    numbers = "integers" if all(integers) else "integers and floats" if any(integers) else "floats"
    for name in operators:
        yield Use(who, "operator", f"{name} of {numbers}"), 0
    for name, item in tensors:
        yield _pattern(op, who, name, item)
    for words in _transfer(facts, tensors, given, depth, is_shortened):
        yield Use(op, "transfer", words), 0
    if depth:
        yield Use(who, "place", "in a dynamic loop"), depth


def _pattern(op: str, who: str, name: str, item: NkiTensor) -> tuple[Use, int]:
    """Return how an operand is walked, or what moves it."""
    skip = 0 if item._alloc.space == tr.HBM else 1
    shape, strides = item.shape[skip:], item.strides[skip:]
    levels = joined_dims(shape, strides)
    dynamic = item._dynamic
    if dynamic is not None:
        words = f"{name} in {_memory(item)}, {dynamic.kind}_offset of {_source(dynamic)}"
        return Use(op, "offset", words), levels
    words = f"{name if who == op else _direction(name)} {_memory(item)}"
    steps = [step for size, step in zip(shape, strides, strict=True) if size > 1]
    if 0 in steps:
        words += ", repeated"
    if steps and steps[-1] not in (0, 1):
        words += ", strided"
    return Use(who, "pattern", words), levels


def _direction(name: str) -> str:
    return "to" if name in _WRITTEN else "from"


def _source(dynamic: Any) -> str:
    index = dynamic.index
    if type(index) is NkiTensor:
        return f"{index.dtype} in {_memory(index)}"
    return "a register"


def _transfer(
    facts: Any,
    tensors: Sequence[tuple[str, NkiTensor]],
    given: Mapping[str, Any],
    depth: int,
    is_shortened: bool,
) -> Iterator[str]:
    """Yield how a DMA moves data, in words. Iterations that are left out may skip some indices."""
    if not isinstance(facts, tr.DmaFacts):
        return
    moved = dict.fromkeys(f"{n} by {t._dynamic.kind}" for n, t in tensors if t._dynamic is not None)
    by = "".join(f", {one}" for one in moved)
    yield f"{tr.SPACE_NAMES[facts.src_space]} to {tr.SPACE_NAMES[facts.dst_space]}, {facts.dge}{by}"
    if facts.queue:
        yield f"{facts.dge} on {facts.queue}"
    if not moved:
        return
    skips = _word(given.get("oob_mode")) == "skip"
    if depth:
        yield f"{facts.dge}{by}{', skip' if skips else ''}, in a dynamic loop"
    if skips:
        yield f"{facts.dge}{by}, skip"
    may_skip = is_shortened and skips and depth and facts.indirect_rows > 1
    if may_skip or 0 < facts.skipped_rows < facts.indirect_rows:
        yield f"{facts.dge}{by}, some indices out of range"


def _memory(tensor: NkiTensor) -> str:
    return tr.SPACE_NAMES[tensor._alloc.space]


def _is_size(value: Any) -> bool:
    """Say whether an argument is a number, or several."""
    if isinstance(value, list | tuple):
        return all(_is_size(item) for item in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _word(value: Any) -> str:
    """Return a word for an argument."""
    if isinstance(value, VirtualRegister):
        return "a register"
    if value is None or isinstance(value, bool | int | float | str | DType):
        return str(value)
    return str(getattr(value, "name", type(value).__name__))


# Dynamic loops.

_Area = tuple[int, int, int, int]


@dataclass
class _Written:
    """A range of on-chip memory, who wrote it, the iterations of loops in which it did, and whether
    it was read in one of them, so that nothing of it was under way at its end.
    """

    memory: tr.MemoryRange
    engine: int
    iterations: tuple[tuple[int, int], ...]
    area: _Area
    is_read: bool = False


@dataclass
class _Walk:
    """Where the walk through the trace of one core is."""

    iterations: list[tuple[int, int]] = field(default_factory=list)
    bodies: list[set[int]] = field(default_factory=list)  # by number of loop, its lines
    begins: list[int] = field(default_factory=list)  # likewise, the line of the loop itself
    written: defaultdict[int, list[_Written]] = field(default_factory=lambda: defaultdict(list))


def _loop_aspects(trace: tr.Trace) -> Iterator[tuple[Use, int, int]]:
    """Yield uses of dynamic loops, their levels, and the ids of source lines."""
    if not any(
        isinstance(fact, tr.ControlFacts) and fact.kind == "loop_begin" for fact in trace.facts
    ):
        return
    rows = trace.columns().tolist()
    operands, first = (ids.tolist() for ids in trace.operand_ids())
    walks: defaultdict[tuple[int, int], _Walk] = defaultdict(_Walk)
    for number, row in enumerate(rows):
        walk, facts = walks[row[tr.RANK], row[tr.CORE]], trace.facts[row[tr.FACTS]]
        if isinstance(facts, tr.ControlFacts) and facts.kind.startswith("loop"):
            yield from _step(walk, facts.kind, row[tr.LINE])
            continue
        for loop, _ in walk.iterations:
            walk.bodies[loop].add(row[tr.LINE])
        start, middle = first[number], first[number] + row[tr.NUM_READS]
        reads, writes = operands[start:middle], operands[middle : first[number + 1]]
        if isinstance(facts, tr.MatmulFacts) and facts.accumulates:
            reads = reads + writes
        if walk.iterations:
            for value, kind in _kept(walk, row[tr.ENGINE], [trace.ranges[k] for k in reads], trace):
                yield Use(LOOP, kind, value), 0, row[tr.LINE]
        for memory in (trace.ranges[k] for k in writes):
            if trace.storages[memory.storage].space != tr.HBM:
                known = walk.written[memory.storage]
                new = _Written(memory, row[tr.ENGINE], tuple(walk.iterations), _area(memory))
                known[:] = [one for one in known if not _covers(new, one)]
                known.append(new)
    yield from _differing(list(walks.values()))


def _step(walk: _Walk, kind: str, line: int) -> Iterator[tuple[Use, int, int]]:
    """Follow the marks of a loop."""
    if kind == "loop_begin":
        walk.iterations.append((len(walk.bodies), 0))
        walk.bodies.append(set())
        walk.begins.append(line)
        yield Use(LOOP, "place", "inside another"), len(walk.iterations), line
    elif kind == "loop_iteration":
        loop, iteration = walk.iterations[-1]
        walk.iterations[-1] = loop, iteration + 1
    elif walk.iterations.pop()[1] == 0:
        yield Use(LOOP, "iterations", "none"), 0, line


def _kept(
    walk: _Walk, engine: int, reads: Sequence[tr.MemoryRange], trace: tr.Trace
) -> Iterator[tuple[str, str]]:
    """Yield what an instruction reads of an earlier iteration or of an earlier loop."""
    now, iterations = dict(walk.iterations), tuple(walk.iterations)
    for memory in reads:
        written = walk.written.get(memory.storage)
        if not written:
            continue
        left = [_area(memory)]
        p0, p1, b0, b1 = left[0]
        for one in reversed(written):
            area = q0, q1, c0, c1 = one.area
            if q0 >= p1 or p0 >= q1 or c0 >= b1 or b0 >= c1:
                continue
            one.is_read = one.is_read or one.iterations == iterations
            if not left or not any(_overlap(part, area) for part in left):
                continue  # written over since
            if not one.memory.dims or one.memory == memory:
                left = [rest for part in left for rest in _minus(part, area)]
            if not one.iterations or one.iterations == iterations:
                continue
            space = tr.SPACE_NAMES[trace.storages[memory.storage].space]
            by, to = tr.ENGINE_NAMES[one.engine], tr.ENGINE_NAMES[engine]
            past = " and read" if one.is_read and by == "dma" else ""
            words = f"left by {by}{past} in {space}, read by {to}"
            if any(now.get(loop, iteration) != iteration for loop, iteration in one.iterations):
                yield words, "from iteration to iteration"
            elif not any(loop in now for loop, _ in one.iterations):
                yield words, "from loop to loop"


def _area(memory: tr.MemoryRange) -> _Area:
    return memory.partition_start, memory.partition_end, memory.byte_start, memory.byte_end


def _overlap(one: _Area, other: _Area) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def _minus(area: _Area, taken: _Area) -> list[_Area]:
    """Return what is left of an area, in rectangles of partitions and bytes."""
    if not _overlap(area, taken):
        return [area]
    top, bottom = max(area[0], taken[0]), min(area[1], taken[1])
    parts = [
        (area[0], top, area[2], area[3]),
        (bottom, area[1], area[2], area[3]),
        (top, bottom, area[2], taken[2]),
        (top, bottom, taken[3], area[3]),
    ]
    return [part for part in parts if part[0] < part[1] and part[2] < part[3]]


def _covers(one: _Written, other: _Written) -> bool:
    """Say whether a range holds all of another; one with gaps holds only its like."""
    if one.memory.dims:
        return one.memory == other.memory
    p0, p1, b0, b1 = one.area
    q0, q1, c0, c1 = other.area
    return p0 <= q0 and q1 <= p1 and b0 <= c0 and c1 <= b1


def _differing(walks: Sequence[_Walk]) -> Iterator[tuple[Use, int, int]]:
    """Yield the loops in which one core issues what the other does not."""
    for other in walks[1:]:
        ours = walks[0]
        for number, (body, its) in enumerate(zip(ours.bodies, other.bodies, strict=False)):
            if body and its and body != its:
                words = "instructions that one of the cores does not have"
                yield Use(LOOP, "cores", words), 0, ours.begins[number]


# Comparing.


@dataclass(frozen=True, slots=True)
class Missing:
    """A use without public precedent, where it stands, and what it is."""

    kernel: str
    file: str
    line: int
    what: str


@dataclass
class Table:
    """What public kernels use.

    Attributes:
        sources: of each source its name, its version, and how many runs were recorded.
        uses: by source, the most levels that each use was seen with.
    """

    sources: dict[str, dict[str, Any]] = field(default_factory=dict)
    uses: dict[str, dict[Use, int]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = TABLE) -> Table:
        """Return the table of a file, by default the shipped one.

        Raises:
            ValueError: the file holds no such table.
        """
        try:
            content = json.loads(path.read_text())
            uses = {
                source: {
                    Use(op, kind, value): levels
                    for op, kinds in ops.items()
                    for kind, values in kinds.items()
                    for value, levels in values.items()
                }
                for source, ops in content["uses"].items()
            }
            return cls(content["sources"], uses)
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{path}: is no table of precedents ({error!r}). Write one with"
                " `neuron-moe check precedent --library CHECKOUT --write FILE`."
            ) from None

    def write(self, path: Path) -> None:
        """Write the table, one line for each instruction and kind."""
        uses: dict[str, Any] = {}
        for source, found in self.uses.items():
            for (op, kind, value), levels in sorted(found.items()):
                kinds = uses.setdefault(source, {}).setdefault(op, {})
                kinds.setdefault(kind, {})[value] = levels
        lines = ['{"sources": ' + json.dumps(self.sources, indent=1) + ',\n"uses": {']
        lines.append(",\n".join(_lines_of(source, ops) for source, ops in uses.items()))
        path.write_text("\n".join([*lines, "}}\n"]))

    def add(self, source: str, recorder: Recorder, **about: Any) -> None:
        """Take in what was recorded of the kernels of a source, in place of what was known of it.

        Args:
            source: its name in the table, such as "vendor".
            recorder: that watched them.
            about: what the table says of the source.
        """
        self.sources[source] = about
        found = {use: max(places.values()) for use, places in recorder.uses.items()}
        self.uses[source] = found

    def shown_by(self, source: str, use: Use, levels: int = 0) -> bool:
        """Say whether kernels of a source have a use with as many levels."""
        return self.uses.get(source, {}).get(use, -1) >= levels

    def without(self, recorder: Recorder) -> list[Missing]:
        """Return the uses that no source shows and no page documents, at every line that has one.

        Of an instruction that no source has, nothing else is reported.
        """
        missing = []
        known = {use.op for found in self.uses.values() for use in found}
        for use, places in sorted(recorder.uses.items()):
            if use.op not in known and use.kind not in (INSTRUCTION, *_OF_LOOPS):
                continue
            for place, levels in sorted(places.items()):
                shown = any(self.shown_by(source, use, levels) for source in self.uses)
                if not shown and not documented(use, levels):
                    missing.append(Missing(*place, self._tell(use, levels)))
        return missing

    def counts(self, recorder: Recorder) -> dict[str, Any]:
        """Return the report of a comparison: uses, how many each source shows, and the others."""
        most = {use: max(places.values()) for use, places in recorder.uses.items()}
        shown = {
            source: sum(self.shown_by(source, use, levels) for use, levels in most.items())
            for source in self.uses
        }
        shown["documentation"] = sum(bool(documented(use, levels)) for use, levels in most.items())
        missing = [asdict(one) for one in self.without(recorder)]
        return {"uses": len(most), "sources": shown, "without": missing}

    def report(self, recorder: Recorder) -> list[str]:
        """Return lines about a comparison: how many uses each source shows, and the others, each
        with its first line and how many more it has.
        """
        report = self.counts(recorder)
        known = ", ".join(f"{count} in {source}" for source, count in report["sources"].items())
        lines = [f"{report['uses']} uses, with a precedent: {known}"]
        missing = sorted(self.without(recorder), key=lambda one: one.what)
        for what, found in itertools.groupby(missing, lambda one: one.what):
            first, *others = found
            more = f" and {len(others)} more" if others else ""
            lines.append(f"{Path(first.file).name}:{first.line}{more} ({first.kernel}): {what}")
        return lines

    def _tell(self, use: Use, levels: int) -> str:
        """Say what a use is, what public kernels have instead, and what is known of it."""
        words = f"{use.op}: {use.kind} {use.value}"
        seen = max((found.get(use, -1) for found in self.uses.values()), default=-1)
        known = [
            one.value
            for found in self.uses.values()
            for one in found
            if one[:2] == use[:2] and one != use
        ]
        if seen >= 0:
            words += f", {levels} levels: no public precedent of more than {seen}"
        else:
            near = difflib.get_close_matches(use.value, known, n=1, cutoff=0.0)
            words += ": no public precedent" + (f"; nearest is {near[0]}" if near else "")
        for op, part, sentence in _REMARKS:
            if op == use.op and part in f"{use.kind} {use.value}":
                return f"{words}. {sentence[0].upper()}{sentence[1:]}"
        return words


def _lines_of(source: str, ops: Mapping[str, Any]) -> str:
    """Return the lines of a source in a file: one for each instruction and kind."""
    texts = []
    for op, kinds in ops.items():
        parts = [f"  {json.dumps(kind)}: {json.dumps(values)}" for kind, values in kinds.items()]
        texts.append(f" {json.dumps(op)}: {{\n" + ",\n".join(parts) + "}")
    return f"{json.dumps(source)}: {{\n" + ",\n".join(texts) + "}"
