"""vLLM's reading of switches: `python read_switches.py CALLS.json ANSWERS.json`.

A call is a list of arguments as `serving.vllm_server` gets them. The answers have the `groups` of
switches that vLLM knows, each with its names, what became of each call (None, or the error in a
sentence), and the threads of a rank by the environment that this runs in.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from neuron_moe.serving.vllm_server import read_arguments, sentence, vllm_parser


def _groups() -> dict[str, list[str]]:
    return {
        str(group.title): [action.dest for action in group._group_actions]
        for group in vllm_parser()._action_groups
    }


def _outcome(call: list[str]) -> str | None:
    try:
        read_arguments(call)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the test judges
        return sentence(error)
    return None


def _threads(call: list[str]) -> str:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    config = AsyncEngineArgs.from_cli_args(read_arguments(call)).create_engine_config()
    with OMPProcessManager(config).configure_omp_envs(0, 0):
        return os.environ["OMP_NUM_THREADS"]


if __name__ == "__main__":
    calls: list[list[str]] = json.loads(Path(sys.argv[1]).read_text())
    answers: dict[str, Any] = {
        "groups": _groups(),
        "threads": _threads(calls[0]),
        "outcomes": [_outcome(call) for call in calls],
    }
    Path(sys.argv[2]).write_text(json.dumps(answers))
