"""Expert products by a C++ function: the same numbers, or none where it cannot be."""

import hashlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from neuron_moe import ExpertMLPsV2, RoutedExpertsMLPOpsConfig
from neuron_moe.backends import compiled_products, form_times
from neuron_moe.backends.chosen_experts import chosen_experts
from neuron_moe.weights.expert_weights import LocalRouting

needs_compiler = pytest.mark.skipif(
    bool(compiled_products.why_not()), reason="no C++ compiler on this machine"
)
# Few rows, for which a matrix is read in order, and more than stay in the cache.
EXPERTS, COUNTS = (7, 1, 3, 4, 0, 5, 8), (1, 5, 18, 130, 2, 3, 4)
SIZES = {
    "whole": (64, 128),
    "odd": (67, 33),
    "small": (3, 2),
    "odd-vectors": (56, 36),
    "one-piece-more": (96, 65),
    "tiles": (160, 224),
}
EXACT = {torch.float32: 1e-6, torch.bfloat16: 1e-5}  # bfloat16 products are exact in float32


def make(dtype: torch.dtype, sizes: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [n, in], matrices [E, in, out] stored as [out, in], and biases."""
    num_inputs, num_outputs = sizes
    matrices_Enk = (torch.randn(9, num_outputs, num_inputs) / num_inputs**0.5).to(dtype)
    rows_nk = torch.randn(sum(COUNTS), num_inputs).to(dtype)
    return rows_nk, matrices_Enk.transpose(1, 2), torch.randn(9, num_outputs).to(dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", compiled_products.DTYPES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_products_are_those_of_float64(
    dtype: torch.dtype, sizes: tuple[int, int], has_bias: bool, num_threads: int
) -> None:
    rows_nk, matrices_Ekn, bias_En = make(dtype, sizes)
    expected = torch.cat(
        [
            rows.double() @ matrices_Ekn[expert].double() + bias_En[expert].double() * has_bias
            for rows, expert in zip(torch.split(rows_nk, COUNTS), EXPERTS, strict=True)
        ]
    )
    assert compiled_products.can_multiply(rows_nk, matrices_Ekn)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        product = compiled_products.multiply(
            rows_nk, matrices_Ekn, bias_En if has_bias else None, EXPERTS, COUNTS
        )
    finally:
        torch.set_num_threads(before)
    assert product.dtype == torch.float32
    assert float((product - expected).abs().max()) <= EXACT[dtype] * float(expected.abs().max())


@needs_compiler
def test_callers_on_several_threads_get_their_own_results() -> None:
    rows_nk, matrices_Ekn, _ = make(torch.float32, (64, 128))
    expected = compiled_products.multiply(rows_nk, matrices_Ekn, None, EXPERTS, COUNTS)
    results: list[Tensor] = []

    def call() -> None:
        results.extend(
            compiled_products.multiply(rows_nk, matrices_Ekn, None, EXPERTS, COUNTS)
            for _ in range(20)
        )

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 60
    assert all(torch.equal(result, expected) for result in results)


def build() -> ExpertMLPsV2:
    config = RoutedExpertsMLPOpsConfig(8, 32, 16, 2, "silu", True)
    return ExpertMLPsV2(config).eval()


@needs_compiler
def test_what_it_cannot_multiply_is_multiplied_otherwise() -> None:
    rows_nk, matrices_Ekn, _ = make(torch.float32, (64, 128))
    assert not compiled_products.can_multiply(rows_nk, matrices_Ekn.contiguous())
    assert not compiled_products.can_multiply(rows_nk.double(), matrices_Ekn.double())
    layer, hidden_TH = build(), torch.randn(5, 32, requires_grad=True)
    chosen = LocalRouting(torch.arange(10).view(5, 2).int() % 8, torch.rand(5, 2))
    plain_TH = chosen_experts(hidden_TH, chosen, layer.weights(), "plain")
    layer.settle_forms("compiled")
    with torch.no_grad():
        compiled_TH = chosen_experts(hidden_TH, chosen, layer.weights())
    torch.testing.assert_close(compiled_TH, plain_TH)
    chosen_experts(hidden_TH, chosen, layer.weights()).sum().backward()
    (expected,) = torch.autograd.grad(plain_TH.sum(), hidden_TH)
    assert hidden_TH.grad is not None
    torch.testing.assert_close(hidden_TH.grad, expected)
    layer.double()
    wider = chosen._replace(expert_affinities_TK=chosen.expert_affinities_TK.double())
    out_TH = chosen_experts(hidden_TH.double(), wider, layer.weights(), "compiled")
    torch.testing.assert_close(out_TH.float(), plain_TH)


@pytest.fixture
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and nothing remembered before or after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for remembered in (compiled_products.why_not, compiled_products._library):
        remembered.cache_clear()
    yield tmp_path / "neuron-moe"
    for remembered in (compiled_products.why_not, compiled_products._library):
        remembered.cache_clear()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the library, compiled once for the tests that spoil a copy."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        compiled_products._library.cache_clear()
        compiled_products._library()
    return folder / "neuron-moe"


@needs_compiler
def test_it_is_compiled_once_for_a_machine(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled_products.why_not() == ""
    files = sorted(anew.iterdir())  # the library and its digest: nothing else is left there
    assert [path.suffix for path in files] == [".sha256", ".so"]
    compiled_products._library.cache_clear()

    def build(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiled_products, "_build", build)
    compiled_products._library()
    assert sorted(anew.iterdir()) == files


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "no digest"])
def test_a_damaged_library_is_built_again(anew: Path, compiled: Path, damage: str) -> None:
    shutil.copytree(compiled, anew)
    (library,), (digest,) = anew.glob("*.so"), anew.glob("*.sha256")
    if damage == "no digest":
        digest.unlink()
    else:
        library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])
    compiled_products._library.cache_clear()
    compiled_products._library()
    assert digest.read_text() == hashlib.sha256(library.read_bytes()).hexdigest()


@needs_compiler
@pytest.mark.parametrize("which", ["file", "folder"])
def test_a_library_that_others_may_write_to_is_not_loaded(
    anew: Path, compiled: Path, which: str
) -> None:
    shutil.copytree(compiled, anew)
    (library,) = anew.glob("*.so")
    (library if which == "file" else anew).chmod(0o777)
    compiled_products._library.cache_clear()
    assert "others may write to it" in compiled_products.why_not()


COMPILERS = {"none": None, "fails": "#!/bin/sh\nexit 1\n", "makes-nothing": "#!/bin/sh\nexit 0\n"}


@pytest.mark.parametrize("compiler", COMPILERS)
def test_without_a_compiler_there_is_no_such_form(
    compiler: str, anew: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, script = tmp_path / "c++", COMPILERS[compiler]
    if script is not None:
        path.write_text(script)
        path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    assert compiled_products.why_not()
    with pytest.raises(ValueError, match=r"form='compiled': .*Install a C\+\+ compiler"):
        build().settle_forms("compiled")
    layer = build()
    layer.settle_forms()
    assert "compiled" not in form_times._forms_here()
    assert "compiled" not in layer.weights().product_forms.by_bucket.values()
    assert not list(anew.glob("*.so"))


NARROWER = {"-march=x86-64": "sse2", "-march=haswell": "avx2"}


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("processor", NARROWER)
def test_processors_with_narrower_vectors_give_the_same(
    processor: str, anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_info = Path("/proc/cpuinfo")
    if not cpu_info.exists() or NARROWER[processor] not in cpu_info.read_text().split():
        pytest.skip(f"this processor has no {NARROWER[processor]}")
    options = [processor if it == "-march=native" else it for it in compiled_products._COMPILE]
    monkeypatch.setattr(compiled_products, "_COMPILE", tuple(options))
    for dtype in compiled_products.DTYPES:
        for sizes in SIZES.values():
            test_products_are_those_of_float64(dtype, sizes, True, 2)
    assert len(list(anew.glob("*.so"))) == 1
