"""A test that forks ranks runs alone where there is a GPU, and passes or fails as it does there."""

from pathlib import Path

import pytest

from tests.conftest import ALONE, run_alone


@pytest.mark.long
def test_a_test_in_a_process_of_its_own_passes_and_fails_as_it_does(tmp_path: Path) -> None:
    source = (
        f"import os\ndef test_good(): assert '{ALONE}' in os.environ\ndef test_bad(): assert 1 == 2"
    )
    (tmp_path / "test_pair.py").write_text(source)
    run_alone("test_pair.py::test_good", tmp_path)
    with pytest.raises(pytest.fail.Exception, match="assert 1 == 2"):
        run_alone("test_pair.py::test_bad", tmp_path)
