"""Where one piece of one line can be changed, and to what."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Mutants are made in routing, experts, parallel, quantize, kernels and simulator, where results are
# computed: not in what prices, plans, watches or reports.
ROOMS = (
    "neuron_moe/router.py",
    "neuron_moe/choices.py",
    "neuron_moe/experts.py",
    "neuron_moe/activations.py",
    "neuron_moe/blocks.py",
    "neuron_moe/moe.py",
    "neuron_moe/shared_experts.py",
    "neuron_moe/backends/chosen_experts.py",
    "neuron_moe/backends/torch_backend.py",
    "neuron_moe/backends/nki",
    "neuron_moe/dispatch",
    "neuron_moe/parallel/collectives.py",
    "neuron_moe/parallel/hybrid.py",
    "neuron_moe/parallel/placement.py",
    "neuron_moe/parallel/shard.py",
    "neuron_moe/sharded/sharding.py",
    "neuron_moe/quantize",
    "neuron_moe/weights",
    "nki_kernels",
    "nki_sim/isa",
    "nki_sim/machine",
)
# What estimates time, and how the host serves memory and threads.
PRICES = (
    "cost.py",
    "costs.py",
    "fit.py",
    "layer_cost.py",
    "candidates.py",
    "roofline.py",
    "times.py",
    "host_memory.py",
    "host_threads.py",
    "huge_pages.py",
)
# How much is worked on, or kept.
AT_ONCE = re.compile(
    "CHUNK|of_chunk|POOL|_MAX_GEOMETRIES|_MAX_BOXES|_FEW_ROWS|_LARGEST_DRAWN|parts_per_thread"
    "|_ROWS_PER_RUN"
)
# Calls and functions that only time, tell, or guard what nobody writes.
SILENT = re.compile(
    "facts|setflags|MemoryRange|Error$|IllegalOperand|OutOfBounds|UninitializedRead|describe|label|"
    "__str__|__repr__|notes|explain|_ns$",
    re.IGNORECASE,
)
_BESIDE = ("strict", "daemon", "indent", "copy", "repr")  # arguments
OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}


@dataclass(frozen=True)
class Mutant:
    """One changed piece of one line; columns count bytes, as `ast` does.

    Attributes:
        path: of the file, in the tree.
        line: its number.
        begin, end: columns of what is replaced.
        text: what stands there instead.
        runs_once: the line runs while its file is imported.
    """

    path: Path
    line: int
    begin: int
    end: int
    text: str
    runs_once: bool = False

    def source(self) -> str:
        """Return the file with the change."""
        lines = (ROOT / self.path).read_bytes().splitlines(keepends=True)
        old = lines[self.line - 1]
        lines[self.line - 1] = old[: self.begin] + self.text.encode() + old[self.end :]
        return b"".join(lines).decode()

    @property
    def lines(self) -> tuple[str, str]:
        """The line before and after the change, without indentation."""
        old = (ROOT / self.path).read_text().splitlines()[self.line - 1].strip()
        return old, self.source().splitlines()[self.line - 1].strip()

    def __str__(self) -> str:
        old, new = self.lines
        return f"{self.path}:{self.line}\n    - {old}\n    + {new}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Give the mutants of a file: each an operator, condition, call or constant of one line."""
    source = (ROOT / path).read_bytes()
    lines, tree = source.splitlines(), ast.parse(source)
    inside = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    }
    for node in _nodes(tree):
        for place, text in _changes(node, lines):
            yield Mutant(path, *place, text, place[0] not in inside)


def all_mutants() -> list[Mutant]:
    """Return every mutant of the rooms."""
    found: list[Mutant] = []
    for room in ROOMS:
        whole = ROOT / room
        files = sorted(whole.rglob("*.py")) if whole.is_dir() else [whole]
        for file in [file for file in files if file.name not in PRICES]:
            found += mutants_of(file.relative_to(ROOT))
    return found


def lines_of_use(mutant: Mutant) -> set[int]:
    """Return the lines of its file whose result hangs on a mutant.

    That is its own line; or those of functions that name what it defines, if it runs only once: a
    constant, a default of a field or an argument.
    """
    if not mutant.runs_once:
        return {mutant.line}
    tree = ast.parse((ROOT / mutant.path).read_bytes())
    names = _defined_at(mutant.line, tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    used = {
        node.lineno
        for function in functions
        for statement in function.body
        for node in ast.walk(statement)
        if (isinstance(node, ast.Name) and node.id in names)
        or (isinstance(node, ast.Attribute) and node.attr in names)
    }
    return used | {
        line
        for function in functions
        if function.name in names
        for line in range(function.body[0].lineno, (function.end_lineno or 0) + 1)
    }


def _defined_at(line: int, tree: ast.AST) -> set[str]:
    """Return the names of the innermost definition around a line outside functions' bodies."""
    names: set[str] = set()
    for node in ast.walk(tree):  # what is inside comes later
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or 0):
            continue
        if isinstance(node, ast.Assign):
            names = {name.id for name in node.targets if isinstance(name, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = {node.target.id}
        elif isinstance(node, ast.FunctionDef):
            names = {node.name}
    return names


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Give a node and what is in it, but for what changes no result.

    That is decorators, what messages are made of, facts for the clock, how strict a zip is, how a
    thread ends, how a file is indented, whether a conversion may copy, how much is worked on at
    once and the bound of it, -1 where it stands for the rest, and the step of an axis of one
    element.
    """
    if isinstance(node, ast.FunctionDef) and SILENT.search(node.name):
        return
    yield node
    decorators = getattr(node, "decorator_list", [])
    for child in ast.iter_child_nodes(node):
        call = child.value if isinstance(child, ast.Expr) else child
        is_silent = isinstance(call, ast.Call) and SILENT.search(ast.unparse(call.func))
        is_strict = isinstance(child, ast.keyword) and child.arg in _BESIDE
        is_step = isinstance(node, ast.List) and node.elts[:1] == [child] and _ends_in_one(node)
        is_rest = isinstance(child, ast.UnaryOp) and ast.unparse(child) == "-1"
        is_text = isinstance(child, ast.JoinedStr | ast.Raise)
        is_size = _is_size(child) or _is_bound(child)
        if is_silent or is_strict or is_step or is_rest or is_text or is_size:
            continue
        if child not in decorators:
            yield from _nodes(child)


def _is_size(node: ast.AST) -> bool:
    """Say whether it names how much is worked on at once."""
    if isinstance(node, ast.Assign):
        return bool(AT_ONCE.search(ast.unparse(node.targets[0])))
    return isinstance(node, ast.AnnAssign) and bool(AT_ONCE.search(ast.unparse(node.target)))


def _is_bound(node: ast.AST) -> bool:
    """Say whether it compares something with how much is worked on at once."""
    return isinstance(node, ast.Compare) and bool(AT_ONCE.search(ast.unparse(node)))


def _ends_in_one(pattern: ast.List) -> bool:
    """Say whether it is [step, 1], an axis of an access pattern."""
    return len(pattern.elts) == 2 and ast.unparse(pattern.elts[1]) == "1"


def _changes(node: ast.AST, lines: list[bytes]) -> Iterator[tuple[tuple[int, int, int], str]]:
    """Give (line, first column, column after) and the new text of each change of a node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        new = not node.value if isinstance(node.value, bool) else node.value + 1
        yield from _whole(node, str(new))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield from _whole(node, "pass")
    elif isinstance(node, ast.If | ast.IfExp) and not _is_bound(node.test):
        for place, _ in _whole(node.test, ""):
            line, begin, end = place
            yield place, f"(not ({lines[line - 1][begin:end].decode()}))"
    elif isinstance(node, ast.BinOp):
        yield from _between(node.op, node.left, node.right, lines)
    elif isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            yield from _between(operator, left, right, lines)
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from _between(node.op, left, right, lines)


def _whole(node: ast.expr | ast.stmt, text: str) -> Iterator[tuple[tuple[int, int, int], str]]:
    if node.lineno == node.end_lineno and node.end_col_offset is not None:
        yield (node.lineno, node.col_offset, node.end_col_offset), text


def _between(
    operator: ast.AST, left: ast.expr, right: ast.expr, lines: list[bytes]
) -> Iterator[tuple[tuple[int, int, int], str]]:
    if type(operator) not in OPERATORS or left.end_lineno != right.lineno:
        return
    old, new = OPERATORS[type(operator)]
    between = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
    if left.end_col_offset is not None and (place := between.find(old.encode())) >= 0:
        begin = left.end_col_offset + place
        yield (right.lineno, begin, begin + len(old)), new
