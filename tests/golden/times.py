"""Simulated times of our kernels: rows of `bench prefill` and `bench decode` that run quickly.

    python -m tests.golden.times --check    simulates all rows again, about 20 s

The times below are those of docs/results, and what a change of structure must not change.
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
IN_ORDER = (("in-order", "packed"), ("in-order", None))  # older rows of prefill name no layout


@dataclass(frozen=True)
class Row:
    """A row of a benchmark, and the times of our kernels.

    Attributes:
        bench: prefill or decode.
        model: name of the model.
        size: T of prefill, B of decode.
        routing: name of the routing.
        times_us: of prefill; of decode, of the experts alone and of the fused layer.
        format: of decode weights.
    """

    bench: str
    model: str
    size: int
    routing: str
    times_us: tuple[float, ...]
    format: str = "bf16"

    def __str__(self) -> str:
        return f"{self.bench}-{self.model}-{self.size}-{self.routing}-{self.format}"


ROWS = (
    Row("prefill", "gpt-oss-120b", 128, "uniform", (1178.634,)),
    Row("prefill", "gpt-oss-20b", 128, "skewed", (309.855,)),
    Row("prefill", "llama4-scout", 128, "uniform", (373.625,)),
    Row("prefill", "llama4-maverick", 128, "skewed", (366.123,)),
    Row("prefill", "qwen3-30b", 128, "uniform", (258.773,)),
    Row("prefill", "mixtral-8x7b", 128, "uniform", (512.185,)),
    Row("prefill", "gpt-oss-20b", 1024, "skewed", (696.564,)),
    Row("prefill", "llama4-scout", 1024, "skewed", (530.783,)),
    Row("prefill", "qwen3-30b", 1024, "skewed", (532.753,)),
    Row("prefill", "mixtral-8x7b", 1024, "skewed", (1118.601,)),
    Row("decode", "gpt-oss-120b", 4, "uniform", (153.970, 159.564)),
    Row("decode", "gpt-oss-20b", 64, "zipf", (206.095, 211.924), "fp8"),
    Row("decode", "llama4-maverick", 1, "uniform", (13.264, 19.634), "fp8"),
    Row("decode", "qwen3-30b", 16, "zipf", (137.689, 142.465)),
    Row("decode", "deepseek-v3", 4, "uniform", (143.080, 153.011), "fp8"),
    Row("decode", "mixtral-8x7b", 1, "uniform", (131.523, 136.272)),
)
SHORT = (ROWS[2], ROWS[12])


def simulated_us(row: Row) -> tuple[float, ...]:
    """Simulate a row again, through the command line."""
    size = "--tokens" if row.bench == "prefill" else "--batches"
    arguments = ["bench", row.bench, "--only", "ours", "--models", row.model]
    arguments += [size, str(row.size), "--routings", row.routing]
    arguments += ["--corner", "in-order", "--layout", "packed", "--json"]
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
    """Return our times of a row, the experts' first; names of kernels do not matter."""
    size = "T" if row.bench == "prefill" else "B"
    mine = [
        entry
        for entry in found
        if (entry["model"], entry[size], entry["routing"], entry.get("format", "bf16"))
        == (row.model, row.size, row.routing, row.format)
        and (entry.get("corner", "in-order"), entry.get("layout")) in IN_ORDER
    ]
    mine.sort(key=lambda entry: entry.get("kernel") != "decode_moe")
    return tuple(float(entry["ours_us"]) for entry in mine)


def differences(rows: Iterable[Row]) -> Iterator[str]:
    """Simulate rows; yield a sentence for each whose time is another."""
    for row in rows:
        found = simulated_us(row)
        if not is_same(row, found):
            yield f"{row}: {row.times_us} us are now {found}"


def is_same(row: Row, times_us: tuple[float, ...]) -> bool:
    """Say whether times are those of a row, to one part in a thousand."""
    return len(times_us) == len(row.times_us) and all(
        abs(new - old) <= ALLOWED * old for old, new in zip(row.times_us, times_us, strict=True)
    )


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
