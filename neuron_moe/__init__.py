"""neuron-moe: Mixture-of-Experts inference modules that run, verify and tune anywhere.

from neuron_moe import MoE, RouterTopK, ExpertMLPsV2, RoutedExpertsMLPOpsConfig

The names are those of `neuron_moe.public`, which is imported when one of them is requested: torch
takes seconds, and the command line answers `--help` without it. `load` stands above them, in
`neuron_moe.models.language_model`: a checkpoint, ready to answer.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from neuron_moe.models.language_model import load as load
    from neuron_moe.public import *  # noqa: F403
else:

    def __getattr__(name):
        # `from neuron_moe import moe` asks here before it looks for the module of that name.
        if importlib.util.find_spec(f"neuron_moe.{name}") is not None:
            return importlib.import_module(f"neuron_moe.{name}")
        if name == "load":
            return importlib.import_module("neuron_moe.models.language_model").load
        return getattr(importlib.import_module("neuron_moe.public"), name)

    def __dir__():
        return sorted({*globals(), "load", *importlib.import_module("neuron_moe.public").__all__})
