"""Decoder layers whose kernels are nodes of a captured graph."""

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from neuron_moe.models.decoder import DecoderLayer, DecoderModel
from neuron_moe.models.generation import pad_left
from neuron_moe.models.loader import load_model
from neuron_moe.spec import Tuning
from tests.models.families import write_checkpoint
from tests.models.test_families_nki import ALL, PROMPTS, SIZES

KERNELS = {
    "prefill": {"prefill_layer"},
    "decode": {"decode_layer"},
}
NAMES = ("gpt_oss", "llama4-scout")


class Case(NamedTuple):
    """A sparse layer, and what it was given in a run of its model."""

    layer: DecoderLayer
    inputs: tuple[Any, ...]


def copied(values: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, values)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Case]:
    """The first sparse layer of each model in prefill and decode; its weights not laid out yet."""
    found = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp(name)
        write_checkpoint({**ALL[name].config(**SIZES), "num_hidden_layers": 2}, folder, seed=0)
        seen: list[tuple[Any, ...]] = []
        run_model(load_model(folder), seen)
        layer = first_sparse(load_model(folder, backend="nki", tuning=Tuning(block_size=32)))
        for phase, inputs in zip(("prefill", "decode"), seen, strict=True):
            found[name, phase] = Case(layer, inputs)
    return found


def first_sparse(model: Any) -> DecoderLayer:
    return next(layer for layer in model.layers if layer.is_sparse)


@torch.inference_mode()
def run_model(model: Any, seen: list[tuple[Any, ...]]) -> None:
    """Keep what its first sparse layer gets in prefill, and in one decode step."""
    assert isinstance(model, DecoderModel)
    first_sparse(model).register_forward_pre_hook(lambda _, inputs: seen.append(copied(inputs)))
    ids_US, real_US = pad_left(PROMPTS, 0)
    cache = model.new_cache(len(PROMPTS), ids_US.shape[1] + 1)
    model(ids_US, real_US=real_US, cache=cache)
    model(ids_US[:, -1:], cache=cache)


def prepared(case: Case, phase: str) -> tuple[Any, ...]:
    """Lay out weights for the step; return its inputs as ordinary tensors."""
    hidden_USH, tokens, _ = case.inputs
    num_tokens = hidden_USH.shape[0] * hidden_USH.shape[1]
    case.layer.moe.prepare(phase, num_tokens, has_padding=tokens.real_US is not None)
    return copied(case.inputs)


def export(case: Case, phase: str) -> torch.export.ExportedProgram:
    return torch.export.export(case.layer, prepared(case, phase), strict=False)


def test_weights_are_laid_out_before_a_graph_is_captured(
    cases: dict[tuple[str, str], Case],
) -> None:
    case = cases["gpt_oss", "decode"]
    case.layer.moe.weights_changed()
    with pytest.raises(RuntimeError, match=r"Call prepare\(phase, tokens\)"):
        torch.export.export(case.layer, copied(case.inputs), strict=False)


@pytest.mark.parametrize("phase", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_has_kernels_and_tensor_operations_only(
    name: str, phase: str, cases: dict[tuple[str, str], Case]
) -> None:
    program = export(cases[name, phase], phase)
    kernels = set()
    for node in program.graph.nodes:
        target = str(node.target)
        if node.op == "call_function":
            assert target.split(".")[0] in ("aten", "neuron_moe") or "getitem" in target, node
            assert "nonzero" not in target, node
            assert "_local_scalar_dense" not in target, node
        if target.startswith("neuron_moe."):
            kernels.add(target.split(".")[1])
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor):
                assert all(isinstance(size, int) for size in value.shape), node
    assert kernels == KERNELS[phase]


@pytest.mark.parametrize("phase", KERNELS)
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_computes_what_the_layer_does(
    name: str, phase: str, cases: dict[tuple[str, str], Case]
) -> None:
    case = cases[name, phase]
    program = export(case, phase)
    ours, theirs = copied(case.inputs), copied(case.inputs)
    assert torch.equal(program.module()(*ours), case.layer(*theirs))
    for one, other in zip(ours[2].tensors, theirs[2].tensors, strict=True):
        assert torch.equal(one, other)


RUNNER = """
import sys, torch
import neuron_moe.backends.nki, neuron_moe.models.decoder
for folder in sys.argv[1:]:
    program = torch.export.load(f"{folder}/layer.pt2")
    inputs, wanted = torch.load(f"{folder}/values.pt", weights_only=False)
    assert torch.equal(program.module()(*inputs), wanted), folder
"""


@pytest.mark.long
def test_a_saved_graph_runs_in_a_fresh_process(
    cases: dict[tuple[str, str], Case], tmp_path: Path
) -> None:
    folders = []
    for (name, phase), case in cases.items():
        folder = tmp_path / f"{name}-{phase}"
        folder.mkdir()
        torch.export.save(export(case, phase), folder / "layer.pt2")
        inputs = copied(case.inputs)
        torch.save((inputs, case.layer(*copied(inputs))), folder / "values.pt")
        folders.append(str(folder))
    subprocess.run([sys.executable, "-c", RUNNER, *folders], check=True)
