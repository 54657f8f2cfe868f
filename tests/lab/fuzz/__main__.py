"""Attack with many seeds on all cores: python -m tests.lab.fuzz torch nki --count 1000 --jobs 16

Prints what is wrong with each seed that finds something, and a line of counts for each attack.
"""

import argparse
import logging
import math
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

from neuron_moe.errors import check_positive_int
from tests.lab.fuzz.attacks import ATTACKS

_scratch = tempfile.TemporaryDirectory()


def main(argv: list[str] | None = None) -> int:
    """Run the attacks; return 1 if one of them found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.fuzz", description=__doc__)
    parser.add_argument("attacks", nargs="+", choices=list(ATTACKS))
    parser.add_argument("--count", type=int, default=100, help="seeds of each (default: 100)")
    parser.add_argument("--seed", type=int, help="the first one; default: a fresh one")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a seed may take")
    parser.add_argument("--seconds", type=float, default=math.inf, help="time for each attack")
    options = parser.parse_args(argv)
    check_positive_int("--count", options.count)
    check_positive_int("--jobs", options.jobs)
    found = 0
    for name in options.attacks:
        first = options.seed
        if first is None:
            first = random.SystemRandom().randrange(1 << 40)
        started = time.monotonic()
        attack = partial(_attack, name, options.limit)
        seeds = range(first, first + options.count)
        tried, problems = _run(attack, seeds, options.jobs, started + options.seconds)
        seconds = time.monotonic() - started
        _tell(
            f"{name}: {tried} seeds from {first}, {problems} with a problem,"
            f" {seconds:.0f} s, {options.jobs} processes"
        )
        found += problems
    return 1 if found else 0


def _run(attack: Callable[[int], str], seeds: range, jobs: int, deadline: float) -> tuple[int, int]:
    """Print the problems of seeds, spread over processes; return how many seeds and problems."""
    tried, found = 0, 0
    chunk = max(1, min(16, len(seeds) // (4 * jobs)))
    with ProcessPoolExecutor(jobs, initializer=_prepare) as pool:
        for problem in pool.map(attack, seeds, chunksize=chunk):
            tried += 1
            if problem:
                found += 1
                _tell(problem)
            if time.monotonic() > deadline:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    return tried, found


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _prepare() -> None:
    global _scratch
    _scratch = tempfile.TemporaryDirectory()
    torch.set_num_threads(1)
    logging.getLogger("neuron_moe").setLevel(logging.ERROR)


def _attack(name: str, limit_s: float, seed: int) -> str:
    def give_up(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"not done after {limit_s:g} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        problem = ATTACKS[name](seed, Path(_scratch.name))
        return f"{name}: {problem}" if problem else ""
    except Exception as error:  # noqa: BLE001  what the attack looks for
        return f"{name}: seed {seed}: {type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    raise SystemExit(main())
