"""neuron-moe bench TARGET: benchmarks, one file per target."""

import importlib
import sys

TARGETS = {
    "cpu": ("bench.cpu", "one MoE layer on this CPU beside that of transformers (measured)"),
    "wire": ("bench.wire", "bytes on the wire of one MoE layer over ranks (measured)"),
    "decode": (
        "bench.decode",
        "MoE decode kernels beside the vendor's and the HBM bound (simulated)",
    ),
    "prefill": (
        "bench.prefill",
        "MoE prefill kernels beside the vendor's and the roofline (simulated)",
    ),
    "host": ("bench.host", "host time of one layer call, kernel launches stubbed out (measured)"),
    "sim": ("bench.sim", "overhead of the simulator per instruction (measured)"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark; return its exit status."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help") or args[0] not in TARGETS:
        lines = [f"  {name:<8} {text}" for name, (_, text) in TARGETS.items()]
        if args and args[0] not in ("-h", "--help"):
            print(f"neuron-moe bench: no target {args[0]!r}.", file=sys.stderr)
        print("\n".join(["usage: neuron-moe bench TARGET [options]", "", *lines]))
        return 0 if args and args[0] in ("-h", "--help") else 2
    module = importlib.import_module(f"neuron_moe.tools.{TARGETS[args[0]][0]}")
    return int(module.main(args[1:]))
