"""Arguments of functions."""

import ast
from collections.abc import Iterator

import pytest

from tests.repo import source
from tests.repo.source import PACKAGES, Function

MOST_ARGUMENTS = 10
MOST_STAGE_ARGUMENTS = 8
# Signatures that are another's: NxD's, the vendor's instructions and language.
MIRRORS = (
    "neuron_moe.moe.MoE.__init__",
    "neuron_moe.nxd_compat",
    "nki_sim.isa",
    "nki_sim.language",
    "nki_sim.collectives",
)
DEVICE_NAMES = {"nisa", "nl", "ncc"}  # as kernel files call the vendor's modules


@pytest.mark.parametrize("package", PACKAGES)
def test_public_functions_take_few_arguments(package: str) -> None:
    wrong = [
        f"{len(arguments)} {function.place}"
        for function in source.functions(package)
        if function.is_public and not _is_mirror(function) and not _is_entry(function)
        if len(arguments := function.arguments) > MOST_ARGUMENTS
    ]
    assert not wrong, "\n".join(wrong)


def test_kernels_compile_for_few_constants() -> None:
    wrong = []
    for function in source.functions("nki_kernels"):
        if _is_entry(function):
            constants = [each for each in function.arguments if not _is_tensor(each)]
            if len(constants) > MOST_ARGUMENTS:
                wrong.append(f"{len(constants)} {function.place}")
    assert not wrong, "\n".join(wrong)


def test_stages_on_the_device_take_few_arguments() -> None:
    wrong = [
        f"{len(function.arguments)} {function.place}"
        for function in _stages()
        if len(function.arguments) > MOST_STAGE_ARGUMENTS
    ]
    assert not wrong, "\n".join(wrong)


def test_stages_and_entries_are_found() -> None:
    entries = {each.name for each in source.functions("nki_kernels") if _is_entry(each)}
    assert {"router_topk", "index_blocks", "blockwise_moe", "decode_moe", "combine"} <= entries
    assert len(list(_stages())) > 50


def _is_mirror(function: Function) -> bool:
    place = f"{function.module.name}.{function.name}."
    return place.startswith(tuple(f"{each}." for each in MIRRORS))


def _is_entry(function: Function) -> bool:
    """Say whether it is a kernel that is launched: its tensors are operands, not arguments."""
    return any(each.split("(")[0] in ("nki.jit", "jit") for each in function.decorators)


def _is_tensor(argument: ast.arg) -> bool:
    """Say whether an argument of a kernel is an operand: those are not annotated by a class of ours
    or of Python.
    """
    written = "" if argument.annotation is None else ast.unparse(argument.annotation)
    return any(word in written for word in ("Tensor", "ndarray", "Any")) or not written


def _stages() -> Iterator[Function]:
    """Yield functions that issue instructions, entries left out."""
    for function in source.functions("nki_kernels"):
        called = {
            node.func.value.id
            for node in ast.walk(function.node)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        }
        if called & DEVICE_NAMES and not _is_entry(function):
            yield function
