"""NxD's quantised MoE layer on a CPU against ours, both turned by NxD's own `quantize.convert`.

    python -m tests.nxd.quantized [--ranks 4] [--case NAME]

needs NxD's and NxDI's sources on the path (the SDK's other packages are stood in for) and
transformers 4. State dicts are quantised by NxD's functions, cut by NxD's sharder and loaded with
strict=True. Where NxD's layer cannot compute a scheme, as prefill with a scale for all experts, it
gets the same scales for each expert, on one rank. "kernels" is backend="nki" in the simulator,
against the torch backend with the same codes, as a share of the largest number. NxDI's models are
built by its own `DecoderModelInstance`, with our layer and with its own, and logits are compared.
Prints a line for each row and, last, one JSON object.
"""

import argparse
import functools
import importlib
import json
import sys
import tempfile
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.nxd import cases
from tests.nxd.cases import CASES, Case, build, draw_weights
from tests.nxd.compare import (
    CANNOT,
    SHAPES,
    Degrees,
    alone,
    difference,
    groups_of,
    load_nxd,
    run,
)
from tests.nxd.compare import LAYOUTS as LAYOUTS_OF_LAYERS
from tests.ranks import start_ranks, values_of

NAMES = ("plain", "gpt-oss", "llama4", "no gate")
SCHEMES = (
    "per_channel_symmetric",
    "expert_wise_per_channel_symmetric",
    "per_tensor_symmetric",
)
BY_EXPERT = SCHEMES[1]
CODES = {"f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
LIMIT = 1e-5
LIMITS = {"kernels": 2e-2}  # bfloat16
TIMEOUT_S = 600.0
MODELS = {  # family, scheme, modules_to_not_convert
    "Llama 4": ("llama4", BY_EXPERT, ["self_attn", "router", "shared_expert", "lm_head"]),
    # o_proj: NxD's codes of it cannot be built on a CPU with two ranks
    "Mixtral, plain experts": (
        "mixtral",
        SCHEMES[0],
        ["block_sparse_moe", "mlp", "o_proj", "lm_head"],
    ),
}
LAYOUTS = {**LAYOUTS_OF_LAYERS, 2: {"TP2": ((2, 1), (2, 1)), "EP2": ((1, 2), (1, 2))}}
MODEL_LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    1: {"TP1": {}},
    2: {"TP2": {}, "TP2, moe_ep_degree=2": {"moe_ep_degree": 2}},
}


@dataclass
class Row:
    """What one layer or model gave in one layout.

    Attributes:
        layout: how ranks are cut.
        case: of CASES, or a model's name.
        scheme: NxD's quantisation type.
        codes: NxD's name of the dtype.
        shape: of SHAPES, "kernels" or "logits".
        error: largest difference; of "kernels" and "logits" as a share of the largest number.
        against: whose result it was compared with.
        dtypes: of the experts' first weight and scale, and their shapes on this rank.
    """

    layout: str
    case: str
    scheme: str
    codes: str
    shape: str
    error: float
    against: str
    dtypes: str


def quantised(weight: Tensor, scheme: str, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return codes and scale of [E, in, out] by NxD's own functions."""
    from neuronx_distributed.quantization import quantization_utils as utils

    if scheme == SCHEMES[0]:
        found, scale = utils.quantize_fp8_per_channel(weight, codes, channel_axis=2)
        return found, scale
    if scheme == SCHEMES[2]:
        found, scale = utils.quantize_fp8_per_tensor(weight, codes)
        return found, scale.reshape(1)
    pairs = [utils.quantize_fp8_per_channel(each, codes, channel_axis=1) for each in weight]
    return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])


def state_of(case: Case, scheme: str, codes: torch.dtype) -> dict[str, Tensor]:
    """Return the layer's state dict with quantised experts."""
    state = draw_weights(case)
    for name in [name for name in state if "_proj.weight" in name and "mlp_op" in name]:
        state[name], state[name.replace(".weight", ".scale")] = quantised(
            state[name], scheme, codes
        )
    return state


def by_expert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same numbers with a scale for each channel of each expert."""
    found = dict(state)
    for name in state:
        if name.endswith(".scale"):
            weight = state[name.replace(".scale", ".weight")]
            shape = (weight.shape[0], 1, weight.shape[2])
            scale = state[name].reshape(-1, 1, state[name].shape[-1])
            found[name] = scale.expand(shape).contiguous()
    return found


def convert(layer: Any, scheme: str, codes: torch.dtype, left_out: list[str] | None = None) -> Any:
    """Turn a layer as NxDI does."""
    from neuronx_distributed.quantization import quantization_config as config
    from neuronx_distributed.quantization.quantize import convert as nxds_convert

    q_config = {
        **config.get_default_per_channel_custom_qconfig_dict(),
        "quantization_type": config.QuantizationType(scheme),
        "quantized_dtype": config.QuantizedDtype(codes),
    }
    return nxds_convert(
        layer,
        q_config=q_config,
        inplace=True,
        modules_to_not_convert=left_out or ["shared_experts"],
    )


def load(nxd: Any, layer: Any, state: Mapping[str, Tensor]) -> Any:
    """Send the whole state dict through NxD's hooks and sharder, and load it."""
    whole = dict(state)
    size = nxd.parallel_state.get_tensor_model_parallel_size()
    nxd.trace.get_sharded_checkpoint(whole, layer, dist.get_rank(), size)
    is_meta = any(parameter.is_meta for parameter in layer.parameters())
    layer.load_state_dict(whole, strict=True, assign=is_meta)
    return layer


def without_numbers(layer: Any) -> Any:
    """Drop NxD's experts' numbers: on a CPU it cannot draw codes where experts are split."""
    for name, child in layer.expert_mlps.named_children():
        if name.startswith("mlp_op"):
            child.to("meta")
    return layer


def compare_rank(
    nxd: Any, layout: Mapping[str, tuple[Degrees, Degrees]], names: list[str]
) -> list[Row]:
    """Compare on this rank; every rank calls it."""
    size = dist.get_world_size()
    nxd.parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=size, skip_collective_init=True
    )
    own, rows = alone(), []
    for label, degrees in layout.items():
        groups = groups_of(nxd, *degrees)
        for name in names:
            for scheme in SCHEMES:
                for codes in CODES:
                    rows += _rows(nxd, label, name, scheme, codes, groups, own)
    if size == 1:
        rows += [_kernels(nxd, name, codes) for name in names for codes in CODES]
        rows += [_left_out(nxd, name, own) for name in names]
    nxd.parallel_state.destroy_model_parallel()
    return rows


def _rows(
    nxd: Any,
    label: str,
    name: str,
    scheme: str,
    codes: str,
    groups: Mapping[str, Any],
    own: Mapping[str, Any],
) -> list[Row]:
    from neuron_moe import nxd_compat

    case, whole = CASES[name], nxd.parallel_state.get_tensor_model_parallel_group()
    state = state_of(case, scheme, CODES[codes])
    ours = load(nxd, convert(build(nxd_compat, case, groups, whole), scheme, CODES[codes]), state)
    rows = []
    for shape, sizes in SHAPES.items():
        found, error, against = run(ours, case, sizes), float("inf"), "nothing"
        ways = (
            ("NxD", groups, whole, scheme, state),
            ("NxD, scales for each expert", groups, whole, BY_EXPERT, by_expert(state)),
            (
                "NxD on one rank, scales for each expert",
                own,
                own["tensor_model_parallel_group"],
                BY_EXPERT,
                by_expert(state),
            ),
        )
        for who, their_groups, their_whole, their_scheme, their_state in ways:
            given = {**their_groups, "is_prefill": sizes[1] > 1}
            if who == "NxD" and groups.get("enabled_hybrid_sharding") and case.experts.get("bias"):
                continue  # NxD divides decode's copy of a down bias by the ranks of both phases
            try:
                theirs = without_numbers(build(nxd, case, given, their_whole))
                theirs = convert(theirs, their_scheme, CODES[codes])
                wanted = run(load(nxd, theirs, their_state), case, sizes)
            except CANNOT:
                continue
            error, against = difference(found, wanted), who
            break
        rows.append(Row(label, name, scheme, codes, shape, error, against, _dtypes(ours)))
    return rows


def _dtypes(layer: Any) -> str:
    first = layer.expert_mlps.mlp_op.first
    tensors = (first.weight, *([first.scale] if hasattr(first, "scale") else []))
    return ", ".join(f"{str(x.dtype)[6:]} {list(x.shape)}" for x in tensors)


def _kernels(nxd: Any, name: str, codes: str) -> Row:
    """Compare the kernels with the torch backend."""
    from neuron_moe import nxd_compat

    case, found = CASES[name], []
    small = cases.H, cases.I, cases.BLOCK_SIZE
    cases.H, cases.I, cases.BLOCK_SIZE = 128, 512, 128  # sizes that kernels take
    try:
        stream = torch.Generator().manual_seed(1)
        for backend in ("torch", "nki"):
            layer = build(nxd_compat, case, {}, None, backend=backend).to(torch.bfloat16)
            layer = convert(layer, BY_EXPERT, CODES[codes])
            layer = load(nxd, layer, state_of(case, BY_EXPERT, CODES[codes]))
            with torch.no_grad():
                found.append(
                    [
                        layer(torch.randn(*size, cases.H, generator=stream).bfloat16())[0].float()
                        for size in ((1, 320), (8, 1))
                    ]
                )
            stream.manual_seed(1)
    finally:
        cases.H, cases.I, cases.BLOCK_SIZE = small
    error = max(float((x - y).abs().max() / y.abs().max()) for y, x in zip(*found, strict=True))
    return Row("1 process", name, BY_EXPERT, codes, "kernels", error, "torch", _dtypes(layer))


def _left_out(nxd: Any, name: str, own: Mapping[str, Any]) -> Row:
    """Compare experts that modules_to_not_convert leaves plain."""
    from neuron_moe import nxd_compat

    case, group, found = CASES[name], own["tensor_model_parallel_group"], []
    for api in (nxd_compat, nxd):
        layer = build(api, case, own, group)
        layer = convert(layer, BY_EXPERT, CODES["f8e4m3"], ["expert_mlps", "shared_experts"])
        found.append(run(load(nxd, layer, draw_weights(case)), case, SHAPES["T = 48"]))
        if api is nxd_compat:
            dtypes = _dtypes(layer)
    return Row("1 process", name, "left out", "", "T = 48", difference(*found), "NxD", dtypes)


def write_model(name: str, folder: Path) -> None:
    """Write a checkpoint and its quantised form.

    Llama 4's experts are quantised as NxDI's script does those of a published one; else it is
    NxDI's `generate_quantized_state_dict`.
    """
    from tests.nxd.models import write_checkpoint

    family, scheme, left_out = MODELS[name]
    plain, narrow = folder / "plain", folder / "narrow"
    plain.mkdir(parents=True)
    narrow.mkdir()
    write_checkpoint(family, plain)
    (path,) = plain.glob("*.safetensors")
    if family == "llama4":
        state = load_file(path)
        for key in [key for key in state if key.endswith(("experts.gate_up_proj", "down_proj"))]:
            state[key], state[f"{key}.scale"] = quantised(state[key], scheme, CODES["f8e4m3"])
    else:
        keys = types.SimpleNamespace(
            quantization_type=scheme, quantization_dtype="f8e4m3", modules_to_not_convert=left_out
        )
        config = types.SimpleNamespace(neuron_config=keys)
        state = _class_of(family).generate_quantized_state_dict(str(plain), config)
    save_file({key: x.contiguous() for key, x in state.items()}, narrow / path.name)


def model_rows(name: str, folder: Path) -> list[Row]:
    """Compare a model on this rank; every rank calls it."""
    from neuron_moe import nxd_compat

    rows, size = [], dist.get_world_size()
    family, scheme, left_out = MODELS[name]
    for label, degrees in MODEL_LAYOUTS[size].items():
        keys: dict[str, Any] = {
            "tp_degree": size,
            "quantized": True,
            "quantized_checkpoints_path": str(folder / "narrow"),
            "quantization_type": scheme,
            "quantization_dtype": "f8e4m3",
            "modules_to_not_convert": left_out,
        }
        wanted = _generated(family, folder / "plain", keys, is_ours=False)[1]
        nxd_compat.install()
        try:
            app, found = _generated(family, folder / "plain", {**keys, **degrees}, is_ours=True)
        finally:
            nxd_compat.uninstall()
        error = float((found - wanted).abs().max() / wanted.abs().max())
        layer = next(x for x in app.models[0].model.modules() if isinstance(x, nxd_compat.MoE))
        rows.append(Row(label, name, scheme, "f8e4m3", "logits", error, "NxDI", _dtypes(layer)))
    return rows


def _class_of(family: str) -> Any:
    from tests.nxd.models import CLASSES

    file, name = CLASSES[family]
    return getattr(importlib.import_module(f"neuronx_distributed_inference.models.{file}"), name)


def _generated(
    family: str, folder: Path, keys: Mapping[str, Any], *, is_ours: bool
) -> tuple[Any, Tensor]:
    """Build as NxDI does for a chip, load as it does on a CPU, and generate."""
    from neuronx_distributed_inference.models.model_wrapper import DecoderModelInstance

    from tests.nxd.models import run_once

    kind = _class_of(family)
    model_cls = kind._model_cls

    def built(config: Any) -> Any:
        instance = DecoderModelInstance(model_cls, config)
        instance.load_module()
        return instance.module

    kind._model_cls = staticmethod(built)
    try:
        app, logits, _ = run_once(family, folder, keys, is_ours=is_ours)
    finally:
        kind._model_cls = model_cls
    return app, logits


def main(argv: list[str] | None = None) -> int:
    """Compare; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.nxd.quantized", description=__doc__)
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), action="append")
    parser.add_argument("--case", action="append", choices=[*NAMES, *MODELS], metavar="NAME")
    args = parser.parse_args(argv)
    names = args.case or [*NAMES, *MODELS]
    layers = [name for name in names if name not in MODELS]
    models = [name for name in names if name in MODELS]
    nxd = load_nxd()
    import neuronx_distributed.quantization.quantize  # noqa: F401  as NxDI has, before a layer

    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in models:
            write_model(name, Path(folder) / name)
        for size in args.ranks or (1, 2, 4):
            tasks = [functools.partial(compare_rank, nxd, LAYOUTS[size], layers)] if layers else []
            if size in MODEL_LAYOUTS:
                tasks += [functools.partial(model_rows, x, Path(folder) / x) for x in models]
            for task in tasks:
                answers = start_ranks(size, lambda _: task(), timeout_s=TIMEOUT_S)  # noqa: B023
                rows = zip(*values_of(answers), strict=True)
                found += [max(row, key=lambda each: each.error) for row in rows]
    wrong = [row for row in found if not row.error <= LIMITS.get(row.shape, LIMIT)]
    for row in found:
        print(  # noqa: T201
            f"{'WRONG' if row in wrong else 'ok':5} {row.layout:21} {row.shape:8} {row.error:8.1e}"
            f" {row.case:15} {row.scheme} {row.codes}, against {row.against}: {row.dtypes}"
        )
    summary = {
        "rows": len(found),
        "wrong": len(wrong),
        "largest": {
            name: max((row.error for row in found if row.shape in shapes), default=None)
            for name, shapes in (
                ("layers", SHAPES),
                ("kernels", ("kernels",)),
                ("models", ("logits",)),
            )
        },
        "against": {
            who: sum(row.against == who for row in found)
            for who in sorted({row.against for row in found})
        },
    }
    print(json.dumps(summary))  # noqa: T201
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
