"""Every number of a chip has a name, a unit and a source."""

import dataclasses

import pytest

from nki_sim import hardware
from nki_sim.hardware import CHIPS, TRN2, Hardware, Provenance

CHIP_IDS = list(CHIPS)
NUMBERS = [field.name for field in dataclasses.fields(Hardware) if field.name != "name"]


@pytest.mark.parametrize("name", CHIP_IDS)
def test_every_number_says_where_it_comes_from(name: str) -> None:
    chip = CHIPS[name]
    for number in NUMBERS:
        source = chip.provenance(number)
        assert source.kind in ("documented", "measured", "assumed"), number
        assert source.source, number


def test_the_kinds_of_source_partition_the_numbers() -> None:
    kinds = ("documented", "measured", "assumed")
    found = [name for kind in kinds for name in TRN2.fields_of_kind(kind)]
    assert sorted(found) == sorted(NUMBERS)


def test_what_was_fitted_on_trn2_is_an_assumption_on_trn3() -> None:
    assert hardware.TRN3.provenance("dma_run_ns").kind == "assumed"
    assert hardware.TRN3.provenance("vector_clock_ghz") == Provenance("documented", "ARCH3")


def test_an_unknown_number_is_refused() -> None:
    with pytest.raises(KeyError, match="dma_speed"):
        TRN2.provenance("dma_speed")


@pytest.mark.parametrize("alias", ["trn2", "gen3"])
def test_chips_are_found_by_name_and_generation(alias: str) -> None:
    assert hardware.find(alias) is TRN2


def test_an_unknown_chip_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"chip='tpu': unknown\. Use one of trn1, trn2, trn3"):
        hardware.find("tpu")


@pytest.mark.parametrize(
    ("number", "factor", "expected"),
    [
        ("dma_run_ns", 2.0, 64.0),
        ("scalar_issue_cycles", 0.5, 50),
        ("tile_issue_cycles", 0.01, 1),
        ("stationary_reuse_skips_load", 2.0, 0),
    ],
    ids=["float", "int", "int-floor", "switch"],
)
def test_a_number_can_be_varied(number: str, factor: float, expected: float) -> None:
    varied = TRN2.varied(number, factor)
    assert getattr(varied, number) == expected
    assert dataclasses.replace(varied, **{number: getattr(TRN2, number)}) == TRN2


def test_only_numbers_can_be_varied() -> None:
    with pytest.raises(ValueError, match=r"field='name': holds 'trn2'\. Vary a number"):
        TRN2.varied("name", 2.0)


def test_peaks_agree_with_the_published_ones() -> None:
    assert TRN2.bf16_flops_per_ns == pytest.approx(78_643, rel=1e-4)
    assert TRN2.dma_bytes_per_ns == pytest.approx(435, rel=1e-3)
