"""neuron-moe: one command, one file per subcommand.

A subcommand is a module of `tools/commands` (or `tools/train`) with `main(argv) -> int`, imported
only when it is called, so that `neuron-moe --help` is instant and a missing optional package hurts
only the command that needs it.
"""

import sys

from neuron_moe.tools.commands import bench, check
from neuron_moe.tools.menu import Menu

SUBCOMMANDS = {
    "demo": (
        "commands.demo",
        "make a small GPT-OSS checkpoint, generate, compare with transformers",
    ),
    "generate": ("commands.generate", "generate text from a checkpoint"),
    "inspect": ("commands.inspect", "architecture, sizes and memory per rank of a checkpoint"),
    "bench": ("commands.bench", f"benchmarks: {', '.join(bench.MENU.entries)}"),
    "place": ("commands.place", "place experts on ranks by recorded load (EPLB)"),
    "plan": ("commands.plan", "the fastest layout of the experts on a Trn2 machine, and why"),
    "evaluate": (
        "commands.evaluate",
        "held-out loss by weight format, ours and transformers",
    ),
    "trace": (
        "commands.trace",
        "which experts a text chooses; skew and padding that follow",
    ),
    "prepare_corpus": ("train.prepare_corpus", "fetch and tokenise the corpus of the small model"),
    "train_tiny": ("train.train_tiny", "train the small GPT-OSS model"),
    "export_tiny": ("train.export_tiny", "turn a training run into the shipped MXFP4 checkpoint"),
    "check": (
        "commands.check",
        f"run kernels against their references: {', '.join(check.MENU.entries)}",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; return its exit status (2 for a usage error)."""
    args = sys.argv[1:] if argv is None else argv
    if args and args[0] == "--version":
        from neuron_moe import __version__

        print(f"neuron-moe {__version__}")
        return 0
    try:
        return Menu("neuron-moe", "command", SUBCOMMANDS).main(args)
    except (ValueError, OSError) as error:
        print(f"neuron-moe {args[0]}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
