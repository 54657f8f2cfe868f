"""neuron-moe check TARGET: kernels against their references, one module of `tools/check` each."""

from neuron_moe.tools.menu import Menu

MENU = Menu(
    "neuron-moe check",
    "target",
    {
        "kernels": (
            "check.kernels",
            "our kernels against the formula in float64, over a file of cases",
        ),
        "vendor": (
            "check.vendor",
            "the vendor's kernels, from a checkout of their library, on nki_sim",
        ),
        "precedent": (
            "check.precedent",
            "which uses of instructions in a kernel, ours or yours, no public kernel shows",
        ),
    },
)
main = MENU.main
