"""neuron-moe check: run kernels against their references.

`neuron-moe check kernels` runs ours and `neuron-moe check vendor` the vendor's kernel library on
the simulator; each target is a module with `main(argv) -> int`.
"""

import importlib
import sys

TARGETS = {
    "kernels": (
        "check.kernels",
        "our kernels against the formula in float64, over a file of cases",
    ),
    "vendor": (
        "check.vendor",
        "the vendor's kernels, from a checkout of their library, on nki_sim",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one target; return its exit status (2 for a usage error)."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        rows = [f"  {name:<10}{text}" for name, (_, text) in TARGETS.items()]
        print(
            "\n".join(
                [
                    "usage: neuron-moe check TARGET [options]",
                    "",
                    *rows,
                    "",
                    "TARGET --help tells its options.",
                ]
            )
        )
        return 0 if args else 2
    if args[0] not in TARGETS:
        print(
            f"neuron-moe check: no target {args[0]!r}. Targets: {', '.join(TARGETS)}.",
            file=sys.stderr,
        )
        return 2
    module = importlib.import_module(f"neuron_moe.tools.{TARGETS[args[0]][0]}")
    return int(module.main(args[1:]))
