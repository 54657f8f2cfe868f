"""neuron-moe chip TARGET: what a machine with a chip settles, of `tools/chip` and `lab/chip`."""

from neuron_moe.tools.chip.artifacts import keep_artifacts
from neuron_moe.tools.menu import Menu

MENU = Menu(
    "neuron-moe chip",
    "target",
    {
        "compile": ("chip.compile", "does every kernel of a plan compile; no device is needed"),
        "check": ("lab.chip.check", "does every kernel compile, compute and keep its time"),
    },
    {
        "calibrate": (
            "lab.chip.calibrate",
            "measure the coefficients of the simulator (or rehearse it: --against sim:SEED)",
        ),
        "bench": ("lab.chip.bench", "the prefill and decode tables with times of the chip"),
        "fallbacks": ("lab.chip.fallbacks", "what NKI leaves open, and what doing without costs"),
        "rehearse": (
            "lab.chip.rehearse",
            "calibrate against many simulated chips that nobody knows",
        ),
    },
)


def main(argv: list[str] | None = None) -> int:
    """Run a target; return its exit status."""
    keep_artifacts()
    return MENU.main(argv)
