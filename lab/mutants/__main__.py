"""Change single lines of the code and see whether a test notices: `make mutants`.

    python -m lab.mutants --count 30 --seed 7 --processes 2

Runs the suite once to learn which tests run which line. Then samples places where one operator,
condition, call or constant can be changed, makes each change in a copy of the tree, runs the
tests of that line, quickest first, and prints the survivors as they come. Tests that run out of
time count as ones that noticed. A test that fails without the change, too, is named and left out.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import TypeVar

from lab.mutants.covering import Covering, run_under_coverage, test_files
from lab.mutants.equivalent import EQUIVALENT
from lab.mutants.places import ROOT, Mutant, all_mutants
from lab.mutants.trying import OutOfTimeError, run_tests

BUDGET_S = 200.0  # of tests for one mutant, as long as they take without it
FIRST_S = 6.0  # of them, run on their own: most mutants end here
PART_S = 40.0  # of them, run in one process after that: what hangs is known soon
TOLD = 20  # mutants between two lines that say how far it is
SLOWEST = 5  # files of tests that are named with their times
SKIPPED = shutil.ignore_patterns(".*", "__pycache__", "out")
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Attack:
    """Mutants that are tried, and what came of them.

    Attributes:
        tests: of each mutant, with their seconds.
        deadline: of the monotonic clock.
        seed: of the sample.
        file: where what came of them is kept, and read if it is there.
        unsound: tests that failed without a mutant, alone or after others.
        noticed, survived: the mutants that were tried.
    """

    tests: dict[Mutant, dict[str, float]]
    deadline: float
    seed: int = 0
    file: Path | None = None
    unsound: set[str] = field(default_factory=set)
    noticed: list[Mutant] = field(default_factory=list)
    survived: list[Mutant] = field(default_factory=list)

    def run(self, trees: list[Path]) -> None:
        """Try the mutants that are left until the deadline and print those that survive."""
        tried = {*self.noticed, *self.survived}
        left = [mutant for mutant in self.tests if mutant not in tried]
        for mutant, noticed in in_copies(self._is_noticed, left, trees):
            if noticed is None:
                continue
            (self.noticed if noticed else self.survived).append(mutant)
            if not noticed:
                say(f"survived {len(self._sound(mutant))} tests: {mutant}")
            if self.tried % TOLD == 0:
                say(f"{self.tried} of {len(self.tests)} tried, {len(self.noticed)} noticed")
            self.save()

    def resume(self) -> None:
        """Read what came of mutants of the same sample before."""
        if self.file is None or not self.file.exists():
            return
        before = json.loads(self.file.read_text())
        if before["seed"] != self.seed:
            raise ValueError(f"{self.file}: of seed {before['seed']}, not {self.seed}. Move it.")
        survived = {(entry["path"], entry["line"], entry["new"]) for entry in before["survived"]}
        for mutant in self.tests:
            if str(mutant) in before["noticed_mutants"]:
                self.noticed.append(mutant)
            elif (str(mutant.path), mutant.line, mutant.lines[1]) in survived:
                self.survived.append(mutant)
        self.unsound.update(before["unsound"])

    @property
    def tried(self) -> int:
        """How many mutants were tried."""
        return len(self.noticed) + len(self.survived)

    def save(self) -> None:
        """Write what came of the mutants, if a file was named."""
        if self.file is None:
            return
        survived = [
            {
                "path": str(mutant.path),
                "line": mutant.line,
                "old": mutant.lines[0],
                "new": mutant.lines[1],
                "tests": self._sound(mutant),
            }
            for mutant in self.survived
        ]
        result = {
            "seed": self.seed,
            "tried": self.tried,
            "noticed": len(self.noticed),
            "unsound": sorted(self.unsound),
            "survived": survived,
            "noticed_mutants": [str(mutant) for mutant in self.noticed],
        }
        self.file.write_text(json.dumps(result, indent=1) + "\n")

    def _sound(self, mutant: Mutant) -> list[str]:
        return [test for test in self.tests[mutant] if test not in self.unsound]

    def _is_noticed(self, mutant: Mutant, tree: Path) -> bool | None:
        """Say whether a test fails with the mutant and not without it; None if time is up."""
        if time.monotonic() > self.deadline:
            return None
        with contextlib.suppress(OutOfTimeError):
            while failing := self._failing(mutant, tree):
                without = run_tests(failing, tree, self.deadline)
                if without.passed:
                    return True
                unsound = without.begun[-1:] or list(failing)
                self.unsound.update(unsound)
                what = "does not end" if without.is_stuck else "fails"
                say(f"{what} without a mutant after {len(without.begun) - 1} others: {unsound}")
            return False
        return None

    def _failing(self, mutant: Mutant, tree: Path) -> dict[str, float]:
        """Return the tests up to the first that fails with the mutant, none if all pass."""
        target = tree / mutant.path
        before = target.read_bytes()
        target.write_text(mutant.source(), encoding="utf-8")
        seconds = self.tests[mutant]
        sound = {test: seconds[test] for test in self._sound(mutant)}
        try:
            for part in parts_of(sound):
                outcome = run_tests(part, tree, self.deadline)
                if not outcome.passed:
                    return {test: seconds[test] for test in outcome.begun} or part
        finally:
            target.write_bytes(before)
        return {}


def parts_of(tests: dict[str, float]) -> Iterator[dict[str, float]]:
    """Give tests in order, as many at a time as run in one process: few first, then more."""
    part: dict[str, float] = {}
    limit_s = FIRST_S
    for test, seconds in tests.items():
        if part and sum(part.values()) + seconds > limit_s:
            yield part
            part, limit_s = {}, PART_S
        part[test] = seconds
    if part:
        yield part


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


def learn(files: list[str], data: Path, trees: list[Path], deadline: float) -> None:
    """Run files of tests under `coverage` into a new folder."""
    started = time.monotonic()
    seconds: dict[str, float] = {}

    def work(file: str, tree: Path) -> None:
        begun = time.monotonic()
        if begun < deadline:
            run_under_coverage(file, tree, folder_of(file, data), deadline - begun)
        seconds[file] = time.monotonic() - begun

    for _ in in_copies(work, files, trees):
        pass
    say(f"{len(files)} files of tests run in {time.monotonic() - started:.0f} s")
    for file in sorted(files, key=seconds.__getitem__)[-SLOWEST:]:
        say(f"    {seconds[file]:4.0f} s {file}")


def copy_of_tree(tree: Path) -> Path:
    """Copy the tree, with the folders that are installed inside neuron_moe linked to there."""
    shutil.copytree(ROOT, tree, ignore=SKIPPED)
    for name in ("configs", "models", "serving", "tools"):
        (tree / "neuron_moe" / name).symlink_to(tree / name)
    return tree


def folder_of(file: str, data: Path) -> Path:
    """Return where is kept what a file of tests runs."""
    return data / file.replace("/", "-")


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Try mutants, print the survivors; return 1 if more than one in twenty survives."""
    args = parse(argv)
    deadline = time.monotonic() + args.seconds
    seed = random.SystemRandom().randrange(1 << 30) if args.seed is None else args.seed
    places = [mutant for mutant in all_mutants() if args.only in str(mutant.path)]
    if args.again:
        chosen = survivors(places, args.again)
    else:
        chosen = sample(places, args.count, random.Random(seed))
    say(f"seed {seed}: {len(chosen)} of {len(places)} mutants")
    with tempfile.TemporaryDirectory() as folder:
        trees = [copy_of_tree(Path(folder) / str(n)) for n in range(args.processes)]
        data = args.coverage or Path(folder) / "coverage"
        files = [file for file in test_files() if re.search(args.tests, file)]
        learn([file for file in files if not folder_of(file, data).exists()], data, trees, deadline)
        covering = Covering(data.iterdir(), chosen)
        say(f"{len(covering.seconds)} tests pass, {len(covering.failed)} do not")
        for test in covering.failed:
            say(f"fails without a mutant: {test}")
        tests = {mutant: covering.order(mutant, BUDGET_S) for mutant in chosen}
        attack = Attack(tests, deadline, seed, args.results, set(covering.failed))
        attack.resume()
        attack.run(trees)
    attack.save()
    noticed, tried = len(attack.noticed), attack.tried
    say(f"{noticed} of {tried} mutants noticed ({noticed / max(1, tried):.1%})")
    return int((tried - noticed) * 20 > tried)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=30, help="mutants to try (default: 30)")
    parser.add_argument("--seed", type=int, help="of the sample; default: a fresh one, printed")
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--tests", default="", help="files of tests whose path this finds")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="tests at a time")
    parser.add_argument(
        "--coverage", type=Path, help="keep what tests run here; read what is there"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop then, and count")
    parser.add_argument(
        "--results", type=Path, help="write what came of the mutants here; go on from what is there"
    )
    parser.add_argument("--again", type=Path, help="try the survivors of such results instead")
    return parser.parse_args(argv)


def sample(places: list[Mutant], count: int, rng: random.Random) -> list[Mutant]:
    """Draw mutants, but for those that are known to change nothing."""
    known = {(path, old, new) for path, old, new, _ in EQUIVALENT}
    drawn = rng.sample(places, len(places))
    kept = (mutant for mutant in drawn if (str(mutant.path), *mutant.lines) not in known)
    return list(itertools.islice(kept, count))


def survivors(places: list[Mutant], results: Path) -> list[Mutant]:
    """Return the mutants that survived before, wherever their lines are now."""
    entries = json.loads(results.read_text())["survived"]
    wanted = {(entry["path"], entry["old"], entry["new"]) for entry in entries}
    known = {(path, old, new) for path, old, new, _ in EQUIVALENT}
    return [mutant for mutant in places if (str(mutant.path), *mutant.lines) in wanted - known]


if __name__ == "__main__":
    raise SystemExit(main())
