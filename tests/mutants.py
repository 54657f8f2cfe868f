"""Change single lines of the code and see whether a test notices: `make mutants`.

    python -m tests.mutants --count 30 --seed 7

Samples places where one operator, comparison or constant can be changed, makes the change in a copy
of the tree, runs the tests of that room, and prints the survivors. A test that runs out of time
counts as one that noticed.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIME_LIMIT_S = 240
# Where mutants are made -> the tests that look at it, quickest first.
ROOMS = {
    "neuron_moe/router.py": ("tests/neuron_moe/test_routing.py", "tests/fuzz"),
    "neuron_moe/routing.py": ("tests/neuron_moe/test_routing.py",),
    "neuron_moe/choices.py": ("tests/neuron_moe/test_bad_input.py", "tests/neuron_moe/test_moe.py"),
    "neuron_moe/experts.py": ("tests/neuron_moe/test_moe.py", "tests/fuzz"),
    "neuron_moe/activations.py": ("tests/fuzz", "tests/neuron_moe/test_moe.py"),
    "neuron_moe/blocks.py": ("tests/neuron_moe/test_blocks.py", "tests/neuron_moe/test_moe.py"),
    "neuron_moe/backends/torch_backend.py": ("tests/neuron_moe/test_moe.py", "tests/fuzz"),
    "neuron_moe/backends/nki": ("tests/neuron_moe/test_nki_backend.py", "tests/fuzz"),
    "neuron_moe/shared_experts.py": ("tests/fuzz", "tests/neuron_moe/test_against_transformers.py"),
    "neuron_moe/parallel/strategy.py": ("tests/neuron_moe/parallel",),
    "neuron_moe/parallel/exchange.py": ("tests/neuron_moe/parallel",),
    "neuron_moe/quantize": ("tests/neuron_moe/test_quantize.py",),
    "nki_kernels": ("tests/nki_kernels",),
    "nki_sim/isa": ("tests/nki_sim/isa",),
    "nki_sim/machine": ("tests/nki_sim/machine", "tests/nki_sim/language"),
}
OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.And: ("and", "or"),
    ast.Or: ("or", "and"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed piece of a line; columns count bytes, as `ast` does."""

    path: Path
    line: int
    begin: int
    end: int
    text: str
    tests: tuple[str, ...]

    def source(self) -> str:
        """Return the file with the change."""
        lines = (ROOT / self.path).read_bytes().splitlines(keepends=True)
        old = lines[self.line - 1]
        lines[self.line - 1] = old[: self.begin] + self.text.encode() + old[self.end :]
        return b"".join(lines).decode()

    def __str__(self) -> str:
        old = (ROOT / self.path).read_text().splitlines()[self.line - 1].strip()
        new = self.source().splitlines()[self.line - 1].strip()
        return f"{self.path}:{self.line}\n    - {old}\n    + {new}"


def mutants_of(path: Path, tests: tuple[str, ...]) -> Iterator[Mutant]:
    """Give the mutants of a file: each an operator, a comparison or a constant of one line."""
    source = (ROOT / path).read_bytes()
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.lineno == node.end_lineno:
            if isinstance(node.value, bool | int) and not isinstance(node.value, str):
                new = not node.value if isinstance(node.value, bool) else node.value + 1
                assert node.end_col_offset is not None
                yield Mutant(
                    path, node.lineno, node.col_offset, node.end_col_offset, str(new), tests
                )
            continue
        pairs: list[tuple[ast.AST, ast.expr, ast.expr]] = []
        if isinstance(node, ast.BinOp):
            pairs = [(node.op, node.left, node.right)]
        elif isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            pairs = list(zip(node.ops, operands, operands[1:], strict=False))
        elif isinstance(node, ast.BoolOp):
            pairs = [(node.op, a, b) for a, b in zip(node.values, node.values[1:], strict=False)]
        for operator, left, right in pairs:
            if type(operator) not in OPERATORS or left.end_lineno != right.lineno:
                continue
            old, new_operator = OPERATORS[type(operator)]
            assert left.end_col_offset is not None
            between = lines[right.lineno - 1][left.end_col_offset : right.col_offset]
            if (place := between.find(old.encode())) >= 0:
                begin = left.end_col_offset + place
                yield Mutant(path, right.lineno, begin, begin + len(old), new_operator, tests)


def all_mutants() -> list[Mutant]:
    """Return every mutant of the rooms."""
    found = []
    for room, tests in ROOMS.items():
        whole = ROOT / room
        files = sorted(whole.rglob("*.py")) if whole.is_dir() else [whole]
        for file in files:
            found += mutants_of(file.relative_to(ROOT), tests)
    return found


def is_noticed(mutant: Mutant, tree: Path) -> bool:
    """Run the tests of a mutant in a copy of the tree; say whether one failed."""
    target = tree / mutant.path
    before = target.read_bytes()
    target.write_text(mutant.source(), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tree), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", *mutant.tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, timeout=TIME_LIMIT_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    finally:
        target.write_bytes(before)
    return done.returncode != 0


def main(argv: list[str] | None = None) -> int:
    """Try mutants, print the survivors; return 1 if more than one in twenty survives."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=30, help="mutants to try (default: 30)")
    parser.add_argument("--seed", type=int, help="of the sample; default: a fresh one, printed")
    parser.add_argument("--only", default="", help="files whose path contains this")
    args = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(1 << 30) if args.seed is None else args.seed
    places = [mutant for mutant in all_mutants() if args.only in str(mutant.path)]
    chosen = random.Random(seed).sample(places, min(args.count, len(places)))
    print(f"seed {seed}: {len(chosen)} of {len(places)} mutants")  # noqa: T201
    with tempfile.TemporaryDirectory() as folder:
        skipped = shutil.ignore_patterns(".git", ".venv", "__pycache__", "out")
        tree = Path(shutil.copytree(ROOT, Path(folder) / "tree", ignore=skipped, symlinks=True))
        survivors = [mutant for mutant in chosen if not is_noticed(mutant, tree)]
    for mutant in survivors:
        print(f"survived: {mutant}")  # noqa: T201
    killed = len(chosen) - len(survivors)
    print(f"{killed} of {len(chosen)} mutants noticed ({killed / max(1, len(chosen)):.0%})")  # noqa: T201
    return int(len(survivors) * 20 > len(chosen))


if __name__ == "__main__":
    raise SystemExit(main())
