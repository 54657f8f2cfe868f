"""Change single lines of the code and see whether a test notices: `make mutants`.

    python -m tests.mutants --count 30 --seed 7 --processes 2

Runs the suite once to learn which tests run which line. Then samples places where one operator,
condition, call or constant can be changed, makes each change in a copy of the tree, runs the
tests of that line, quickest first, and prints the survivors. Tests that run out of time count as
ones that noticed.
"""

import argparse
import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import Queue
from typing import TypeVar

from tests.mutants.covering import Covering, run_under_coverage, test_files
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.places import ROOT, Mutant, all_mutants
from tests.mutants.trying import fails

BUDGET_S = 40.0  # of tests for one mutant, as long as they take without it
FIRST_S = 6.0  # of them, run on their own: most mutants end here
TOLD = 20  # mutants between two lines that say how far it is
SKIPPED = shutil.ignore_patterns(".*", "__pycache__", "out")
Item = TypeVar("Item")
Result = TypeVar("Result")


def is_noticed(mutant: Mutant, tests: dict[str, float], tree: Path) -> bool:
    """Run tests, given with their seconds, in a copy of the tree; say whether one failed."""
    target = tree / mutant.path
    before = target.read_bytes()
    target.write_text(mutant.source(), encoding="utf-8")
    first = quick(tests)
    rest = {test: tests[test] for test in tests if test not in first}
    try:
        failing = next((part for part in (first, rest) if part and fails(part, tree)), None)
    finally:
        target.write_bytes(before)
    # Tests that fail together without the mutant, too, tell nothing.
    return failing is not None and not fails(failing, tree)


def quick(tests: dict[str, float]) -> dict[str, float]:
    """Return the first of the tests, as many as run on their own before the others."""
    first: dict[str, float] = {}
    for test, seconds in tests.items():
        if first and sum(first.values()) + seconds > FIRST_S:
            break
        first[test] = seconds
    return first


def in_copies(
    work: Callable[[Item, Path], Result], items: Iterable[Item], trees: list[Path]
) -> Iterator[tuple[Item, Result]]:
    """Do work on items, each in a copy of the tree of its own; give what ends first first."""
    free: Queue[Path] = Queue()
    for tree in trees:
        free.put(tree)

    def lend(item: Item) -> tuple[Item, Result]:
        tree = free.get()
        try:
            return item, work(item, tree)
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as pool:
        for done in as_completed([pool.submit(lend, item) for item in items]):
            yield done.result()


def learn(files: list[str], data: Path, trees: list[Path]) -> None:
    """Run files of tests under `coverage` into a new folder."""
    started = time.monotonic()

    def work(file: str, tree: Path) -> None:
        run_under_coverage(file, tree, data / file.replace("/", "-"))

    for _ in in_copies(work, files, trees):
        pass
    say(f"{len(files)} files of tests run in {time.monotonic() - started:.0f} s")


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)  # noqa: T201


def main(argv: list[str] | None = None) -> int:
    """Try mutants, print the survivors; return 1 if more than one in twenty survives."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=30, help="mutants to try (default: 30)")
    parser.add_argument("--seed", type=int, help="of the sample; default: a fresh one, printed")
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--tests", default="", help="files of tests whose path contains this")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="tests at a time")
    parser.add_argument("--coverage", type=Path, help="keep what tests run here, or read it")
    args = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(1 << 30) if args.seed is None else args.seed
    places = [mutant for mutant in all_mutants() if args.only in str(mutant.path)]
    chosen = sample(places, args.count, random.Random(seed))
    say(f"seed {seed}: {len(chosen)} of {len(places)} mutants")
    with tempfile.TemporaryDirectory() as folder:
        trees = [
            Path(shutil.copytree(ROOT, Path(folder) / str(n), ignore=SKIPPED, symlinks=True))
            for n in range(args.processes)
        ]
        data = args.coverage or Path(folder) / "coverage"
        if not data.exists():
            learn([file for file in test_files() if args.tests in file], data, trees)
        covering = Covering(data.iterdir(), chosen)
        say(f"{len(covering.seconds)} tests pass, {len(covering.failed)} do not")
        for test in covering.failed:
            say(f"fails without a mutant: {test}")
        killed = attack(chosen, covering, trees)
    say(f"{killed} of {len(chosen)} mutants noticed ({killed / max(1, len(chosen)):.1%})")
    return int((len(chosen) - killed) * 20 > len(chosen))


def sample(places: list[Mutant], count: int, rng: random.Random) -> list[Mutant]:
    """Draw mutants, but for those that are known to change nothing."""
    known = {(path, old, new) for path, old, new, _ in EQUIVALENT}
    drawn = rng.sample(places, len(places))
    kept = (mutant for mutant in drawn if (str(mutant.path), *mutant.lines) not in known)
    return list(itertools.islice(kept, count))


def attack(chosen: list[Mutant], covering: Covering, trees: list[Path]) -> int:
    """Try each mutant and print those that survive; return how many were noticed."""
    tests = {mutant: covering.order(mutant, BUDGET_S) for mutant in chosen}
    killed = 0

    def work(mutant: Mutant, tree: Path) -> bool:
        return bool(tests[mutant]) and is_noticed(mutant, tests[mutant], tree)

    for number, (mutant, noticed) in enumerate(in_copies(work, chosen, trees), 1):
        killed += noticed
        if not noticed:
            say(f"survived {len(tests[mutant])} tests: {mutant}")
        if number % TOLD == 0:
            say(f"{number} of {len(chosen)} tried, {killed} noticed")
    return killed


if __name__ == "__main__":
    raise SystemExit(main())
