"""Random layers and the shipped model give what they gave, bit for bit; see tests/golden/layers."""

import pytest

from tests.golden import layers
from tests.golden.layer_cases import BACKENDS, case_names

GOLDEN = layers.read()
IS_EXACT = GOLDEN["machine"] == layers.machine()
EVERY = {"torch": 5, "nki": 8}  # cases of the long run; of these the default run takes every third


def wrong(names: list[str]) -> list[str]:
    found = [layers.differences(name, GOLDEN["layers"][name], IS_EXACT) for name in names]
    return [line for lines in found for line in lines]


def test_every_case_is_recorded() -> None:
    names = [name for backend in BACKENDS for name in case_names(backend)]
    assert list(GOLDEN["layers"]) == names
    assert layers.FILE.stat().st_size < 62_000


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sample_of_layers_gives_what_it_gave(backend: str) -> None:
    assert wrong(case_names(backend)[:: 3 * EVERY[backend]]) == []


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_larger_sample_of_layers_gives_what_it_gave(backend: str) -> None:
    assert wrong(case_names(backend)[:: EVERY[backend]]) == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_all_layers_give_what_they_gave(backend: str) -> None:
    assert wrong(case_names(backend)) == []


def test_a_change_is_found() -> None:
    name = case_names("torch")[3]
    first = GOLDEN["layers"][name][0]
    changed = [first.replace(first.split(":")[1], "0" * 16), *GOLDEN["layers"][name][1:]]
    assert layers.differences(name, changed, True)
    number = first.split(":")[3]
    changed = [first.replace(number, str(2 * float(number))), *GOLDEN["layers"][name][1:]]
    assert layers.differences(name, changed, False)


@pytest.mark.slow
@pytest.mark.parametrize("how", layers.TOKENS)
def test_the_shipped_model_says_what_it_said(how: str) -> None:
    if not IS_EXACT and "float32" not in how:
        pytest.skip("written on another kind of machine, whose bfloat16 products may differ")
    assert layers.tokens(*layers.TOKENS[how]) == GOLDEN["tokens"][how]
