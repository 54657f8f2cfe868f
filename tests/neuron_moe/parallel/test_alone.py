"""A test that forks ranks runs alone where there is a GPU, and passes or fails as it does there."""

from pathlib import Path

import pytest
import torch

from tests.conftest import ALONE, run_alone
from tests.ranks import cuda_devices


@pytest.mark.long
def test_a_test_in_a_process_of_its_own_passes_and_fails_as_it_does(tmp_path: Path) -> None:
    source = (
        f"import os\ndef test_good(): assert '{ALONE}' in os.environ\ndef test_bad(): assert 1 == 2"
    )
    (tmp_path / "test_pair.py").write_text(source)
    run_alone("test_pair.py::test_good", tmp_path)
    with pytest.raises(pytest.fail.Exception, match="assert 1 == 2"):
        run_alone("test_pair.py::test_bad", tmp_path)


@pytest.mark.parametrize(
    ("shown", "is_there", "count"),
    [(None, True, 2), ("", True, 0), ("1", True, 1), ("0,1", True, 2), (None, False, 0)],
)
def test_a_gpu_counts_where_torch_may_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str | None, is_there: bool, count: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert cuda_devices(tmp_path) == count
