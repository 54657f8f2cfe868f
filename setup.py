"""Name the packages: four folders at the top of the tree are installed inside `neuron_moe`.

Where each of them lies stands in pyproject.toml (`package-dir`).
"""

from setuptools import find_namespace_packages, setup

TOP = ["neuron_moe*", "nki_kernels*", "nki_sim*"]
# What an installation of nki_sim alone leaves in its folder.
LEFT = ["nki_sim.build*", "nki_sim.nki_sim.egg-info*"]
INSIDE = ["configs*", "models*", "serving*", "tools*"]

setup(
    packages=[
        *find_namespace_packages(include=TOP, exclude=LEFT),
        *(f"neuron_moe.{name}" for name in find_namespace_packages(include=INSIDE)),
    ]
)
