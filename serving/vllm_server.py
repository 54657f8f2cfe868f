"""The process of vLLM's server: `python -m neuron_moe.serving.vllm_server OURS -- THEIRS`.

OURS are arguments of vLLM's that `neuron-moe serve` settles, THEIRS what the user gave for it.
"""

import sys
from collections.abc import Sequence
from typing import Any

from neuron_moe.serving.lifetime import end_with_parent
from neuron_moe.serving.switches import check_settled

MODULE = "neuron_moe.serving.vllm_server"
REFUSED = 2  # the exit status, as of a parser that does not know a switch


def main(argv: Sequence[str]) -> int:
    """Serve until a signal; return the exit status: REFUSED with one sentence about a switch."""
    end_with_parent()
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    try:
        args = read_arguments(argv)
    except Exception as error:  # noqa: BLE001  vLLM refuses settings with errors of every kind
        sys.stderr.write(f"{sentence(error)}\n")
        return REFUSED
    uvloop.run(run_server(args))
    return 0


def read_arguments(argv: Sequence[str]) -> Any:
    """Return vLLM's reading of the arguments.

    Raises:
        ValueError: a switch that our model does not take; vLLM's own refusals are of every kind.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
    from vllm.logger import configure_logging_from_args

    parser = vllm_parser()
    split = list(argv).index("--") if "--" in argv else len(argv)
    ours, theirs = list(argv[:split]), list(argv[split + 1 :])
    given = parser.parse_args([*ours, *theirs])
    check_settled(given, parser.parse_args(ours))
    configure_logging_from_args(given)
    validate_parsed_serve_args(given)
    AsyncEngineArgs.from_cli_args(given).create_engine_config()  # refuses; the server's is another
    return given


def vllm_parser() -> Any:
    """Return what reads the arguments of vLLM's server."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    usage = "neuron-moe serve ... -- OPTIONS, of `vllm serve --help=all`"  # theirs fills screens
    return make_arg_parser(FlexibleArgumentParser(prog="vLLM", usage=usage))


def sentence(error: Exception) -> str:
    """Return what an error says, without the frame in which pydantic puts it."""
    if hasattr(error, "errors"):
        parts = error.errors(include_url=False)
        return " ".join(each["msg"].removeprefix("Value error, ") for each in parts)
    return str(error)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
