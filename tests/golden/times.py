"""Simulated times of our kernels: rows of `bench prefill` and `bench decode` that run quickly.

    python -m tests.golden.times --check    simulates all rows again, about 20 s

What docs/results has of them a change of structure must not change.
"""

import argparse
import contextlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from neuron_moe.tools.cli import main as run_command
from tests.repo.published.results import result

ALLOWED = 1e-3  # relative


@dataclass(frozen=True)
class Row:
    """A row of a benchmark, and the times of our kernels.

    Attributes:
        bench: prefill or decode.
        model: name of the model.
        size: T of prefill, B of decode.
        routing: name of the routing.
        format: of decode weights.
    """

    bench: str
    model: str
    size: int
    routing: str
    format: str = "bf16"

    def __str__(self) -> str:
        return f"{self.bench}-{self.model}-{self.size}-{self.routing}-{self.format}"


ROWS = (
    Row("prefill", "gpt-oss-120b", 128, "uniform"),
    Row("prefill", "gpt-oss-20b", 128, "skewed"),
    Row("prefill", "llama4-scout", 128, "uniform"),
    Row("prefill", "llama4-maverick", 128, "skewed"),
    Row("prefill", "qwen3-30b", 128, "uniform"),
    Row("prefill", "mixtral-8x7b", 128, "uniform"),
    Row("prefill", "gpt-oss-20b", 1024, "skewed"),
    Row("prefill", "llama4-scout", 1024, "skewed"),
    Row("prefill", "qwen3-30b", 1024, "skewed"),
    Row("prefill", "mixtral-8x7b", 1024, "skewed"),
    Row("decode", "gpt-oss-120b", 4, "uniform"),
    Row("decode", "gpt-oss-20b", 64, "zipf", "fp8"),
    Row("decode", "llama4-maverick", 1, "uniform", "fp8"),
    Row("decode", "qwen3-30b", 16, "zipf"),
    Row("decode", "deepseek-v3", 4, "uniform", "fp8"),
    Row("decode", "mixtral-8x7b", 1, "uniform"),
)
SHORT = (ROWS[1], ROWS[11])


def simulated_us(row: Row) -> tuple[float, ...]:
    """Simulate a row again, through the command line."""
    size = "--tokens" if row.bench == "prefill" else "--batches"
    arguments = ["bench", row.bench, "--only", "ours", "--models", row.model]
    arguments += [size, str(row.size), "--routings", row.routing]
    arguments += ["--layout", "packed", "--json"]
    if row.bench == "decode":
        arguments += ["--formats", row.format]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        status = run_command(arguments)
    assert status == 0, printed.getvalue()
    return _times(row, json.loads(printed.getvalue().splitlines()[-1])["rows"])


def published_us(row: Row) -> tuple[float, ...]:
    """Return the times of a row in docs/results."""
    return _times(row, result(f"{row.bench}_trn2")["rows"])


def _times(row: Row, found: Iterable[dict[str, Any]]) -> tuple[float, ...]:
    """Return our times of a row, in decode of the experts alone and of the fused layer."""
    size = "T" if row.bench == "prefill" else "B"
    mine = [
        entry
        for entry in found
        if (entry["model"], entry[size], entry["routing"], entry.get("format", "bf16"))
        == (row.model, row.size, row.routing, row.format)
        and entry["layout"] == "packed"
    ]
    mine.sort(key=lambda entry: entry.get("kernel") != "decode_moe")
    return tuple(float(entry["ours"]["us"]) for entry in mine)


def differences(rows: Iterable[Row]) -> Iterator[str]:
    """Simulate rows; yield a sentence for each whose time is another than the published one."""
    for row in rows:
        published, found = published_us(row), simulated_us(row)
        is_same = len(found) == len(published) and all(
            abs(new - old) <= ALLOWED * old for old, new in zip(published, found, strict=True)
        )
        if not is_same:
            yield f"{row}: {published} us are now {found}"


def main(argv: list[str] | None = None) -> int:
    """Check every row; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.times", description=__doc__)
    parser.add_argument("--check", action="store_true", required=True, help="simulate every row")
    parser.parse_args(argv)
    wrong = list(differences(ROWS))
    report = "\n".join([*wrong, f"{len(ROWS)} rows, {len(wrong)} differences"])
    print(report)  # noqa: T201  a tool
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
