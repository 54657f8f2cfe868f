"""The environment in which vLLM's processes behave on a machine that others use too."""

import os

from neuron_moe.errors import check_positive_int

_BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def server_environment(ranks: int, threads: int = 1) -> dict[str, str]:
    """Return the variables to start vLLM with.

    Threads that wait for each other on cores that others use cost far more than they gain, so
    that each rank has one unless more are requested. None is bound to a core, unless the caller's
    environment says so: two servers would be bound to the same ones, and vLLM's own choice takes
    all cores of a socket.

    Args:
        ranks: processes of a model.
        threads: of each rank.

    Raises:
        ValueError: there are fewer cores than ranks and threads need.
    """
    check_positive_int("threads", threads)
    cores = len(os.sched_getaffinity(0))
    if ranks * threads > cores:
        raise ValueError(
            f"ranks={ranks} x threads={threads}: must be at most the {cores} cores of this"
            " machine. Lower --tp, --ep or --threads."
        )
    return {
        "HF_HUB_OFFLINE": "1",  # a folder is served: nothing is fetched
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "neuron_moe",
        _BINDING: os.environ.get(_BINDING, "nobind"),
    }
