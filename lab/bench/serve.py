"""neuron-moe bench serve: `neuron-moe serve` beside vLLM's own implementation of the same model.

    neuron-moe bench serve --clients 1 4

Two servers of one checkpoint on this CPU: vLLM with our class, as `serve --compile` starts it, and
vLLM with its own, which compiles by itself. Both are up all the time and are asked in turns, so
that load from outside hits them alike. Each client requests one answer after the other; rates are
answer tokens a second of all clients together. At the end it tells the peak memory of both. Without
--model it is a random Qwen3-MoE of 1.2 GB.
"""

import argparse
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from lab.bench.averages import half_quartile_range
from lab.bench.serve_sample import make_qwen3_moe
from neuron_moe.backends.form_times import processor
from neuron_moe.errors import check_positive_int
from neuron_moe.models.loader import read_config
from neuron_moe.models.shipped import checkpoint_folder
from neuron_moe.serving.client import Server, complete
from neuron_moe.serving.lifetime import running
from neuron_moe.serving.options import ServingOptions
from neuron_moe.serving.server import (
    DTYPES,
    ServerSettings,
    check_vllm,
    free_port,
    server_command,
    wait_until_ready,
)
from neuron_moe.tools.console import format_table, tell_json
from neuron_moe.tools.parsers import Parser

OURS, THEIRS = "ours", "vllm"
SAMPLE = "qwen3_moe_sample"
HOST = "127.0.0.1"
_IDLE_S = 1.5  # after which a server that has nothing to do no longer looks for work all the time


@dataclass(frozen=True)
class Load:
    """What one measurement asks of a server.

    Attributes:
        prompts: token ids, one list for each client.
        new_tokens: of each answer.
    """

    prompts: Sequence[Sequence[int]]
    new_tokens: int

    def rate(self, server: Server) -> float:
        """Return answer tokens a second."""
        started = time.monotonic()
        with ThreadPoolExecutor(len(self.prompts)) as pool:
            answers = pool.map(lambda each: complete(server, each, self.new_tokens), self.prompts)
            tokens = sum(len(answer.token_ids) for answer in answers)
        return tokens / (time.monotonic() - started)


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table; return the exit status."""
    args = _parser().parse_args(argv)
    names = ("prompt_tokens", "new_tokens", "repeats", "threads")
    for name in names:
        check_positive_int(f"--{name.replace('_', '-')}", getattr(args, name))
    for clients in args.clients:
        check_positive_int("--clients", clients)
    check_vllm()
    with tempfile.TemporaryDirectory(prefix="neuron-moe-bench-") as made:
        folder = (
            checkpoint_folder(args.model) if args.model else make_qwen3_moe(Path(made) / SAMPLE)
        )
        rates, peaks = _rates(folder, args)
    rows = [_row(clients, each) for clients, each in rates.items()]
    _print_table(rows)
    text = ", ".join(f"{name} {peak / 2**30:.2f} GiB" for name, peak in peaks.items())
    print(f"peak memory: {text}, ratio {peaks[OURS] / peaks[THEIRS]:.2f}")
    tell_json(
        args.json,
        "bench serve",
        kind="measured",
        model=str(args.model or SAMPLE),
        processor=processor(),
        dtype=args.dtype,
        **{name: getattr(args, name) for name in names},
        rows=rows,
        peak_bytes=peaks,
    )
    return 0


Rates = dict[int, dict[str, list[float]]]
"""Of each server, by number of clients."""


def _rates(folder: Path, args: argparse.Namespace) -> tuple[Rates, dict[str, int]]:
    """Return the rates, and the most memory that each server had."""
    ours = ServerSettings(
        folder=folder,
        name=folder.name,
        port=free_port(HOST, 0),
        dtype=args.dtype,
        threads=args.threads,
        max_model_len=2 * (args.prompt_tokens + args.new_tokens),
        cache_mib=args.cache_mib,
        options=ServingOptions(metrics=True, joins=not args.eager),
        more=args.more,
    )
    theirs = replace(ours, port=free_port(HOST, 0), uses_our_class=False)
    return _measure({OURS: ours, THEIRS: theirs}, args, int(read_config(folder)["vocab_size"]))


def _measure(
    settings: dict[str, ServerSettings], args: argparse.Namespace, vocab_size: int
) -> tuple[Rates, dict[str, int]]:
    """Return the rates, and the most memory that each server had."""
    rates: Rates = {}
    with ExitStack() as stack:
        print(f"starting {' and '.join(settings)} ...", flush=True)
        processes = {}
        for name, each in settings.items():
            variables = each.environment() | {"VLLM_LOGGING_LEVEL": "ERROR"}
            command = server_command(each)
            processes[name] = stack.enter_context(running(command, variables))
        for name, each in settings.items():
            wait_until_ready(processes[name], each.host, each.port)
        draws = torch.Generator().manual_seed(args.seed)
        for clients in args.clients:
            rates[clients] = {name: [] for name in settings}
            for number in range(args.repeats + 1):  # the first round warms up
                # Fresh prompts each round: nothing is found in a cache of prefixes.
                drawn = torch.randint(3, vocab_size, (clients, args.prompt_tokens), generator=draws)
                load = Load(drawn.tolist(), args.new_tokens)
                for name, each in settings.items():
                    time.sleep(_IDLE_S)
                    rate = load.rate(Server(each.host, each.port, each.name))
                    if number:
                        rates[clients][name].append(rate)
                print(f"{clients} clients, round {number} of {args.repeats}", flush=True)
        peaks = {name: _peak_bytes(process.pid) for name, process in processes.items()}
    return rates, peaks


def _peak_bytes(pid: int) -> int:
    """Return the sum of the most memory that each process of a server had, by the kernel's count.

    Libraries count in each process that has them.
    """
    server = psutil.Process(pid)
    pids = [each.pid for each in (server, *server.children(recursive=True))]
    texts = [Path(f"/proc/{each}/status").read_text(encoding="utf-8") for each in pids]
    found = (re.search(r"VmHWM:\s+(\d+) kB", text) for text in texts)
    return sum(int(match[1]) << 10 for match in found if match)


def _row(clients: int, rates: dict[str, list[float]]) -> dict[str, float]:
    """Return medians, spreads and the median of the rounds' ratios."""
    ratios = [own / other for own, other in zip(rates[OURS], rates[THEIRS], strict=True)]
    return {
        "clients": clients,
        **{f"{name}_tokens_per_s": statistics.median(each) for name, each in rates.items()},
        **{f"{name}_spread": _spread(each) for name, each in rates.items()},
        "ratio": statistics.median(ratios),
        "ratio_spread": _spread(ratios),
    }


def _spread(values: Sequence[float]) -> float:
    """Return half the distance between the quartiles as a part of the median."""
    return half_quartile_range(values) / statistics.median(values)


def _print_table(rows: Sequence[dict[str, float]]) -> None:
    lines = [["clients", "ours tokens/s", "+-", "vllm tokens/s", "+-", "ours / vllm", "+-"]]
    for row in rows:
        cells = [f"{row['clients']:.0f}"]
        for name in (OURS, THEIRS):
            cells += [f"{row[f'{name}_tokens_per_s']:.1f}", f"{row[f'{name}_spread']:.0%}"]
        lines.append([*cells, f"{row['ratio']:.2f}", f"{row['ratio_spread']:.0%}"])
    print(format_table(lines, numbers_from=0))


def _parser() -> argparse.ArgumentParser:
    parser = Parser("bench serve", __doc__)
    parser.add_json_option()
    parser.add_argument("--model", type=Path, help="checkpoint (default: a random one)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="at once")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="default: 128")
    parser.add_argument("--new-tokens", type=int, default=32, help="default: 32")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.more.add_argument("--threads", type=int, default=1, help="of each server (default: 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    parser.more.add_argument("--cache-mib", type=int, default=512, help="of each server")
    parser.more.add_argument("--eager", action="store_true", help="ours without --compile")
    parser.more.add_argument("--seed", type=int, default=0, help="of the prompts (default: 0)")
    parser.add_argument("more", nargs="*", help="behind --: passed to both servers")
    return parser
