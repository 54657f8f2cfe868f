"""Modules that stand for the Neuron SDK, so that NxD and NxDI can be imported on any machine.

Both import torch_xla, torch_neuronx, the compiler and nkilib at the top of their files and use very
little of them on a CPU. A name that is missing here is an object that can be subclassed and called,
and whose every attribute is such an object; the few whose value matters are in `_VALUES`.
"""

import contextlib
import enum
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

ROOTS = (
    "torch_xla",
    "torch_neuronx",
    "libneuronxla",
    "neuronxcc",
    "nkilib",
    "nki",
    "boto3",
    "botocore",
    "awscrt",
    "s3transfer",
    "tenacity",
    "torchvision",
)


class BlockShardStrategy(enum.Enum):
    """nkilib's names and values."""

    HI_LO = 0
    PING_PONG = 1


class _StandInType(type):
    """A class that has every name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(name)


def _stand_in(name: str) -> Any:
    return _StandInType(name, (), {"__init__": _accept, "__call__": _decorate})


def _accept(self: Any, *args: Any, **kwargs: Any) -> None:
    pass


def _decorate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Serve as a decorator with arguments."""
    return args[0] if len(args) == 1 and callable(args[0]) else self


def _rms_norm_apply(x: torch.Tensor, weight: torch.Tensor, eps: float, *_: Any) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


class RmsNorm:
    """torch_neuronx's fused norm, as a formula."""

    apply = staticmethod(_rms_norm_apply)


class CollectivesConfig:
    """Who sends to whom in ring attention: nobody."""

    def __init__(self, replica_groups: list[list[int]]) -> None:
        self.rank_src_tgt_pairs: dict[int, list[int]] = {
            rank: [] for group in replica_groups for rank in group
        }


def xla_hlo_call(function: Any) -> Any:
    """Stand for a marker of the compiler: give what was taken."""
    return lambda *args: args[0] if len(args) == 1 else args


_VALUES: dict[str, dict[str, Any]] = {
    "torch_xla.core.xla_model": {
        "REDUCE_SUM": "sum",
        "REDUCE_MAX": "max",
        "REDUCE_MIN": "min",
        "get_ordinal": lambda: dist.get_rank() if dist.is_initialized() else 0,
        "xrt_world_size": lambda: dist.get_world_size() if dist.is_initialized() else 1,
    },
    "torch_neuronx": {"__version__": "2.9"},
    "torch_neuronx.utils": {"get_platform_target": lambda: "trn2"},
    "torch_neuronx.utils.utils": {"get_platform_target": lambda: "trn2"},
    "torch_neuronx.xla_impl.base": {"xla_hlo_call": xla_hlo_call},
    "torch_neuronx.experimental.profiler.v2_x.custom_op_name": {
        "hlo_debug": lambda **_: contextlib.nullcontext()
    },
    "torch_neuronx.xla_impl.ops": {"RmsNorm": RmsNorm},
    "neuronxcc.nki._pre_prod_kernels.collectives": {"CollectivesConfig": CollectivesConfig},
    "nkilib.core.moe.moe_cte.moe_cte_utils": {"BlockShardStrategy": BlockShardStrategy},
}


class _StandInModule(ModuleType):
    """A module that has every name; a package, so that anything can be imported below it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _stand_in(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in ROOTS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for name, value in _VALUES.get(module.__name__, {}).items():
            setattr(module, name, value)


def install() -> None:
    """Answer imports of the SDK's packages that nothing else answers; the simulator answers nki."""
    importlib.import_module("nki_kernels.provided")
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    # Named in annotations; the real one comes with torch_neuronx's shared library.
    vars(torch.classes)["neuron"] = _StandInModule("torch.classes.neuron")
