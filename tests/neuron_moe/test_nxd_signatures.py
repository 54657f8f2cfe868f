"""Signatures and defaults are NxD's; each difference is listed here with its reason.

`nxd_api.json` holds the facts of NxD 0.18.0 and NxDI 0.9.0: names, order and defaults, by module.
"""

import fnmatch
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from neuron_moe import nxd_compat
from neuron_moe.nxd_compat import BlockShardStrategy, BlockwiseMatmulConfig, GLUType
from neuron_moe.parallel import parallel_state

API: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "nxd_api.json").read_text())
WORDS = {
    "torch": torch,
    "GLUType": GLUType,
    "BlockShardStrategy": BlockShardStrategy,
    "BlockwiseMatmulConfig": BlockwiseMatmulConfig,
    "DEFAULT_BLOCK_SIZE": 512,
    "DEFAULT_LNC_SIZE": 2,
    "DEFAULT_SKIP_MODE": (False, False),
}
# Pattern of differences, as the test prints them -> why. The first that fits counts.
REASONS: dict[str, str] = {
    "*.device: default None, NxD's torch.device('cpu')": "None is torch's default device, so that"
    " `with torch.device('meta')` holds",
    "ExpertMLPsV2.__init__.blockwise_matmul_config: default None, *": "None is the default"
    " configuration; NxD's default is one object that every layer shares",
    "BlockwiseMatmulConfig.__init__.*: default *, NxD's none": "keys left out keep the default of"
    " from_kwargs, which equals NxD's",
    "RouterBase: absent": "abstract; router.Router is the base here",
    "RouterBase.*": "abstract; router.Router is the base here",
    "GroupLimitedRouter.noaux_tc_top_k: absent": "router.route computes it",
    "ExpertMLPsV2.forward_*: absent": "a path is a plan of a backend, not a method of the layer",
    "ExpertMLPsV2.get_block*: absent": "blocks.build_block_mapping",
    "ExpertMLPsV2.torch_blockwise_matmul_inference: absent": "backends.torch_backend",
    "ExpertMLPsV2.generate_*: absent": "replicas are parallel.placement's",
    "ExpertMLPsV2.allocate_token_blocks: absent": "replicas are parallel.placement's",
    "ExpertMLPsV2.*expert_affinities*: absent": "affinities are k-wide, settled in select()",
    "ExpertMLPsV2.get_*mask*: absent": "choices are k-wide, settled in select()",
    "ExpertMLPsV2.mask_padding_tokens: absent": "choices.drop_padding",
    "ExpertMLPsV2.setup_all_experts: absent": "a step of a path",
    "ExpertMLPsV2.use_index_calc_kernel: absent": "a plan decides",
    "ExpertMLPsV2.initialize_mlp_op: absent": "the constructor does it",
    "ExpertMLPsV2.validate_routed_experts_configs: absent": "a configuration checks itself",
    "RoutedExpertsMLPOpsConfig.bincount_2d: absent": "replicas are parallel.placement's",
    "SharedExperts.forward.seq_len: default 0, NxD's none": "not needed here",
    "SharedExperts.get_split_indices: absent": "a slice of static bounds",
    "create_spmd_ranks: absent": "ExpertMLPsV2.preshard_hook writes the same keys",
    "duplicate_and_replace_prefixes: absent": "ExpertMLPsV2.preshard_hook writes the same keys",
    "can_use_find_index_kernel: absent": "the index kernel here takes any number of tokens",
    "get_kernel_activation_func_id: absent": "a number of NxD's kernels",
    "ACTFunc*: absent": "a number of NxD's kernels",
    "modules.moe.experts Experts: absent": "weights.experts.Experts, which the layer builds",
    "ColumnParallelLinearTransposed*: absent": "the state dict is not transposed",
    "RowParallelLinearTransposed*: absent": "the state dict is not transposed",
    "modules.moe.blockwise *: absent": "calls NxD's kernels; ours are plans of backends.nki",
    "modules.moe.token_shuffling *: absent": "training; dispatch.shuffle for inference",
    "modules.moe.moe_fused_tkg* *: absent": "fused decode is one plan of the layer",
    "modules.moe.moe_parallel_layers *: absent": "weights.linear; instances of BaseParallelLinear"
    " where NxD is loaded",
    "modules.moe.moe_config_validator *: absent": "constructors check their arguments",
    "modules.moe.nki_import *: absent": "kernels import nki as they stand",
    "rmsg: absent": "a prefix of log lines",
    "initialize_model_parallel.*": "ours builds the groups of an MoE and nothing of training",
    "get_*_group.as_list: absent": "ranks of all groups are training's",
}


def find(module: str, name: str) -> Any:
    """Return ours of that name, or None."""
    owner: Any = nxd_compat
    if module == "parallel_layers.parallel_state":
        owner = nxd_compat if hasattr(nxd_compat, name) else parallel_state
    if module == "inference.modules.moe":
        name += "_v1"
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return owner


def differences() -> Iterator[str]:
    """Yield a line for each difference between NxD's API and ours."""
    for module, names in API.items():
        prefix = "" if any(names.values()) or module == "modules.moe" else f"{module} "
        for name, parameters in names.items():
            if name.endswith(" keys"):
                yield from _keys(name, parameters)
                continue
            ours = find(module, name)
            if ours is None:
                yield f"{prefix}{name}: absent"
            elif parameters is not None and not inspect.isclass(ours):
                yield from _signature(name, ours, parameters)


def _signature(name: str, ours: Any, parameters: list[list[str]]) -> Iterator[str]:
    found = {
        key: value for key, value in inspect.signature(ours).parameters.items() if key != "self"
    }
    names = [given[0].lstrip("*") for given in parameters]
    for given in parameters:
        key = given[0].lstrip("*")
        if key not in found:
            yield f"{name}.{key}: absent"
            continue
        if given[0] != key:
            continue  # **kwargs of NxD
        theirs = given[1] if len(given) > 1 else None
        yield from _default(f"{name}.{key}", found[key].default, theirs)
    positional = [key for key, value in found.items() if value.kind is value.POSITIONAL_OR_KEYWORD]
    common = [key for key in names if key in found]
    if positional[: len(common)] != [key for key in common if key in positional]:
        yield f"{name}: takes {positional}, NxD's {names}"
    extra = [key for key in positional if key not in names]
    if extra:
        yield f"{name}: takes {extra} by position, NxD's does not"


def _default(where: str, ours: Any, theirs: str | None) -> Iterator[str]:
    has_none = ours is inspect.Parameter.empty
    if theirs is None:
        if not has_none:
            yield f"{where}: default {ours!r}, NxD's none"
        return
    value = eval(theirs, WORDS)
    if has_none or (ours != value and getattr(ours, "value", ours) != getattr(value, "value", 0)):
        yield f"{where}: default {ours!r}, NxD's {theirs}"


def _keys(name: str, keys: list[list[str]]) -> Iterator[str]:
    kind = getattr(nxd_compat, name.split(".", maxsplit=1)[0])
    built = kind.from_kwargs()
    for key, default in keys:
        field = key.removeprefix("router_")
        if not hasattr(built, field):
            yield f"{name}.{key}: absent"
        elif getattr(built, field) != eval(default, WORDS):
            yield f"{name}.{key}: default {getattr(built, field)!r}, NxD's {default}"


def test_every_difference_to_nxds_signatures_has_a_reason() -> None:
    found = list(differences())
    print("\n".join(found))  # noqa: T201  what is different, with pytest -s
    unexplained = [
        line for line in found if not any(fnmatch.fnmatchcase(line, each) for each in REASONS)
    ]
    assert not unexplained, "\n".join(unexplained)


def test_every_reason_is_needed() -> None:
    found = list(differences())
    idle = [each for each in REASONS if not fnmatch.filter(found, each)]
    assert not idle, "\n".join(idle)
