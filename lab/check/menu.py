"""neuron-moe check TARGET: kernels against their references, one module of `lab/check` each."""

from neuron_moe.tools.menu import Menu

MENU = Menu(
    "neuron-moe check",
    "target",
    {
        "kernels": (
            "lab.check.kernels",
            "our kernels against the formula in float64, over a file of cases",
        ),
        "vendor": (
            "lab.check.vendor",
            "the vendor's kernels, from a checkout of their library, on nki_sim",
        ),
        "precedent": (
            "lab.check.precedent",
            "which uses of instructions in a kernel, ours or yours, no public kernel shows",
        ),
    },
)
main = MENU.main
