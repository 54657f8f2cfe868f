"""neuron-moe serve: an OpenAI-compatible server for a checkpoint, vLLM with our model in it.

    neuron-moe serve --model tiny_gpt_oss --port 8000

Loopback alone unless --host says otherwise. Everything behind `--` goes to vLLM as it stands. Our
counters (expert load, paths) are among those at /metrics. With --ask it streams an answer and ends.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from neuron_moe.serving.client import Server, complete
from neuron_moe.serving.lifetime import ask_to_end, running
from neuron_moe.serving.options import BACKENDS, VLLM_FORM, ServingOptions
from neuron_moe.serving.server import (
    DTYPES,
    SHUTDOWN_TIMEOUT_S,
    ServerSettings,
    check_alive,
    check_vllm,
    free_port,
    server_command,
    wait_until_ready,
)
from neuron_moe.tools.models import add_checkpoint_option, checkpoint_of
from neuron_moe.tools.parsers import Parser
from neuron_moe.weights.product_forms import FORMS, MEASURED

ANSWER_TOKENS = 48
_POLL_S = 0.2


class _Stopped(Exception):
    """A signal asked the server to end.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal; return the exit status."""
    given = sys.argv[1:] if argv is None else argv
    parser = _parser()
    split = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:split])
    settings = ServerSettings(
        folder=checkpoint_of(args),
        name=args.name or args.model.name or args.model.resolve().name,
        host=args.host,
        port=args.port,
        dtype=args.dtype,
        tp=args.tp,
        ep=args.ep,
        threads=args.threads,
        max_model_len=args.max_model_len,
        cache_mib=args.cache_mib,
        shutdown_timeout=args.shutdown_timeout,
        options=ServingOptions(
            expert_parallel_size=args.ep,
            backend=args.backend,
            product_form=args.product_form,
            metrics=True,
            joins=args.compile,
        ),
        more=given[split + 1 :],
    )
    settings = replace(settings, port=free_port(args.host, args.port))
    command = server_command(settings)  # refuses what the model cannot be before vLLM is requested
    variables = settings.environment()
    check_vllm()
    if not args.verbose:
        variables["VLLM_LOGGING_LEVEL"] = "ERROR"
    return _serve(settings, command, variables, args.ask)


def _serve(
    settings: ServerSettings, command: list[str], variables: dict[str, str], question: str | None
) -> int:
    print(f"neuron-moe serve: starting vLLM for {settings.folder} ...", flush=True)
    try:
        with _signals_raise(), running(command, variables) as process:
            try:
                return _attend(settings, process, question)
            except _Stopped as stopped:
                if stopped.number == signal.SIGTERM and settings.shutdown_timeout:
                    print(
                        f"neuron-moe serve: answers in flight have {settings.shutdown_timeout} s;"
                        " a second signal ends them",
                        flush=True,
                    )
                    ask_to_end(process, settings.shutdown_timeout)
                raise
    except _Stopped:
        print("neuron-moe serve: stopped", flush=True)
        # At once: all is over, and on a loaded machine taking torch down costs seconds.
        os._exit(0)


def _attend(
    settings: ServerSettings, process: subprocess.Popen[bytes], question: str | None
) -> int:
    """Tell when a server is ready; return when it has answered a question, if there is one."""
    started = time.monotonic()
    wait_until_ready(process, settings.host, settings.port)
    print(
        f"neuron-moe serve: ready at http://{settings.host}:{settings.port}/v1, model"
        f" {settings.name}, after {time.monotonic() - started:.0f} s",
        flush=True,
    )
    if question is not None:
        _ask(settings, question)
        return 0
    while True:
        check_alive(process)
        time.sleep(_POLL_S)


def _ask(settings: ServerSettings, question: str) -> None:
    """Print a prompt and, as it comes, its continuation."""
    print(question, end="", flush=True)
    server = Server(settings.host, settings.port, settings.name)
    answer = complete(server, question, ANSWER_TOKENS, lambda text: print(text, end="", flush=True))
    print(f"\n\n{len(answer.token_ids)} tokens in {answer.total_s:.2f} s  [measured]", flush=True)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn SIGTERM and Ctrl-C into an exception while the context lasts; the first two of them."""
    seen: list[int] = []

    def stop(signalled: int, _frame: FrameType | None) -> None:
        seen.append(signalled)
        if len(seen) <= 2:
            raise _Stopped(signalled)

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("serve", __doc__)
    add_checkpoint_option(parser)
    parser.more.add_argument("--name", help="what requests call it (default: the folder's name)")
    parser.more.add_argument(
        "--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only"
    )
    parser.add_argument("--port", type=int, default=8000, help="0 for any (default: 8000)")
    parser.add_argument(
        "--tp", type=int, default=1, help="ranks that split each expert (default: 1)"
    )
    parser.add_argument(
        "--ep", type=int, default=1, help="ranks that split the experts (default: 1)"
    )
    parser.more.add_argument("--threads", type=int, default=1, help="of each rank (default: 1)")
    parser.add_argument("--backend", choices=BACKENDS, default="torch", help="default: torch")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    parser.add_argument(
        "--max-model-len",
        type=int,
        help="longest prompt and answer together (default: the model's own, at most 4096)",
    )
    parser.more.add_argument(
        "--cache-mib",
        type=int,
        help="MiB of the cache in each rank (default: for eight of the longest sequences)",
    )
    parser.more.add_argument(
        "--product-form",
        default=MEASURED,
        help=f"how a CPU multiplies with experts: {MEASURED} (default), {VLLM_FORM} or"
        f" {', '.join(FORMS)}",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="join norms, routers and the like by torch.compile: starts later, then runs faster",
    )
    parser.more.add_argument(
        "--shutdown-timeout",
        type=int,
        default=SHUTDOWN_TIMEOUT_S,
        help="seconds that answers in flight may take after SIGTERM; Ctrl-C waits for none"
        f" (default: {SHUTDOWN_TIMEOUT_S})",
    )
    parser.add_argument("--ask", metavar="TEXT", help="stream one continuation of it, then end")
    parser.more.add_argument("--verbose", action="store_true", help="show all of vLLM's messages")
    return parser
