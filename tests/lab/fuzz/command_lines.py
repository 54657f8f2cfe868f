"""Random command lines: each ends with a known status and one sentence, never a traceback."""

import contextlib
import io
import random
from dataclasses import dataclass
from pathlib import Path

from neuron_moe.tools import cli
from tests.lab.fuzz.endings import judge

HUGE = "10" * 20
NUMBERS = ("0", "-1", "1", "3", "1000000", "999999999999", "1e-320", "nan", "inf", "x", "", HUGE)
BAD_NUMBERS = ("0", "-1", "nan", "-inf", "x", "", "1e-320")
SIZES = "H=64,I=64,E=4,K=9,L=1"
TEXTS = ("", "a", "\udcff", "/dev/null", "nowhere", "tiny_gpt_oss", SIZES, "é" * 9)


@dataclass(frozen=True)
class Command:
    """What is drawn for a command.

    Attributes:
        fixed: what it always gets.
        numbers: options with a number.
        texts: options with a text.
        spoilt: options of which one gets a number that cannot be meant, so that nothing long runs.
    """

    fixed: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    spoilt: tuple[str, ...] = ()


COMPARISON = ("--layout", "--library", "--only", "--json", "--vendor-from")
CASES = ("--cases", "--status", "--match", "--json")
COMMANDS: dict[tuple[str, ...], Command] = {
    ("generate",): Command(
        ("--max-new-tokens", "1"),
        ("--tp", "--ep", "--temperature", "--top-p", "--seed"),
        ("--prompt", "--prompt-file", "--prompt-ids", "--system", "--model", "--backend"),
    ),
    ("inspect",): Command((), ("--tp", "--ep"), ("--model",)),
    ("convert",): Command(
        ("--out", "converted"), ("--tp", "--ep", "--max-shard-mib"), ("--model", "--to", "--layout")
    ),
    ("chip", "calibrate"): Command((), (), ("--against", "--json"), ("--rounds",)),
    ("plan",): Command(
        (),
        ("--nodes", "--lnc", "--prefill-tokens", "--decode-tokens"),
        ("--model", "--trace", "--weights", "--instance", "--picture"),
    ),
    ("place",): Command((), ("--ranks", "--extra-experts"), ("--trace", "--picture")),
    ("evaluate",): Command(("--samples", "0"), (), ("--texts", "--model", "--bf16", "--out")),
    ("trace",): Command(("--tokens", "-1"), ("--longest",), ("--texts", "--model", "--out")),
    ("demo",): Command((), (), ("--out", "--model"), ("--max-new-tokens",)),
    ("bench", "sim"): Command((), ("--repeats",), ("--library",), ("--count",)),
    ("bench", "cpu"): Command((), (), ("--models", "--dtypes"), ("--tokens", "--repeats")),
    ("bench", "wire"): Command((), (), ("--picture",), ("--ranks", "--tokens")),
    ("bench", "host"): Command((), (), ("--cases", "--before"), ("--repeats",)),
    ("bench", "prefill"): Command(
        (), ("--jobs",), ("--models", "--routings", *COMPARISON), ("--tokens", "--minutes")
    ),
    ("bench", "decode"): Command(
        (), ("--jobs",), ("--models", "--kernels", *COMPARISON), ("--batches", "--minutes")
    ),
    ("bench", "ranks"): Command(
        (),
        (),
        ("--models", "--splits", "--phases", "--collectives"),
        ("--tokens", "--portions", "--link-rates"),
    ),
    ("bench", "anchors"): Command((), (), ("--library", "--only")),
    ("check", "kernels"): Command(
        ("--max-seconds", "0"),
        ("--max-gmacs", "--seed"),
        ("--models", "--phase", *CASES),
    ),
    ("check", "vendor"): Command(("--max-seconds", "0"), ("--max-gmacs",), ("--library", *CASES)),
    ("prepare_corpus",): Command((), (), ("--out",), ("--vocab-size", "--max-length")),
    ("export_tiny",): Command((), (), ("--run", "--corpus", "--out")),
    ("train_tiny",): Command(
        (), ("--save-every", "--held-out-windows"), ("--corpus", "--out", "--recipe", "--config")
    ),
}


def draw(seed: int) -> list[str]:
    """Return the command line of a seed."""
    rng = random.Random(seed)
    words = rng.choice(sorted(COMMANDS))
    command = COMMANDS[words]
    args = [*words, *command.fixed]
    for options, values in ((command.numbers, NUMBERS), (command.texts, TEXTS)):
        for option in options:
            if rng.random() < 0.4:
                args += [option, rng.choice(values)]
    if command.spoilt:
        args += [rng.choice(command.spoilt), rng.choice(BAD_NUMBERS)]
    return args


def attack_command_line(seed: int, scratch: Path) -> str:
    """Run the command line of a seed in a folder of its own; say what is wrong with its end."""
    args = draw(seed)
    out, err = io.StringIO(), io.StringIO()
    folder = scratch / f"line-{seed}"
    folder.mkdir()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            status = cli.main(args)
        except SystemExit as ending:  # argparse
            status = int(ending.code or 0)
    problem = judge(status, err.getvalue())
    return f"seed {seed}: {args!a}: {problem}" if problem else ""
