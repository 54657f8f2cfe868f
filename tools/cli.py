"""neuron-moe: one command, one file per subcommand.

A subcommand is a module of this folder with `main(argv) -> int`; it is imported only when it is
called, so that
`neuron-moe --help` is instant and a missing optional package hurts only the command that needs it.
"""

import difflib
import importlib
import sys

SUBCOMMANDS = {
    "demo": (
        "commands.demo",
        "make a small GPT-OSS checkpoint, generate, compare with transformers",
    ),
    "generate": ("commands.generate", "generate text from a checkpoint"),
    "inspect": ("commands.inspect", "architecture, sizes and memory per rank of a checkpoint"),
    "bench": ("commands.bench", "benchmarks: cpu, host, sim, wire, prefill, decode"),
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
    "check": ("commands.check", "run kernels against their references: kernels, vendor"),
}


def usage() -> str:
    """Return the overview of all subcommands."""
    width = max(len(name) for name in SUBCOMMANDS)
    rows = [f"  {name:<{width}}  {text}" for name, (_, text) in SUBCOMMANDS.items()]
    return "\n".join(
        ["usage: neuron-moe COMMAND [options]", "", *rows, "", "COMMAND --help tells its options."]
    )


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; return its exit status (2 for a usage error)."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version":
        from neuron_moe import __version__

        print(f"neuron-moe {__version__}")
        return 0
    name, rest = args[0], args[1:]
    if name not in SUBCOMMANDS:
        near = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        print(f"neuron-moe: no command {name!r}.{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"neuron_moe.tools.{SUBCOMMANDS[name][0]}")
    try:
        return int(module.main(rest))
    except (ValueError, OSError) as error:
        print(f"neuron-moe {name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
