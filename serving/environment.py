"""The environment in which vLLM's processes behave on a machine that others use too."""

import os

from neuron_moe.errors import check_positive_int


def server_environment(ranks: int, threads: int = 1) -> dict[str, str]:
    """Return the variables to start vLLM with.

    Threads that wait for each other on cores that others use cost far more than they bring, so
    that each rank has one unless more are asked for.

    Args:
        ranks: processes of a model.
        threads: of each rank.

    Raises:
        ValueError: there are fewer cores than ranks and threads need.
    """
    check_positive_int("threads", threads)
    variables = {
        "HF_HUB_OFFLINE": "1",  # a folder is served: nothing is fetched
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "neuron_moe",
    }
    if ranks > 1:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = _cores_of_ranks(ranks, threads)
    return variables


def _cores_of_ranks(ranks: int, threads: int) -> str:
    """Return the cores of each rank, as vLLM wants them."""
    cores = sorted(os.sched_getaffinity(0))
    if ranks * threads > len(cores):
        raise ValueError(
            f"ranks={ranks} x threads={threads}: must be at most the {len(cores)} cores of this"
            " machine. Lower --tp, --ep or --threads."
        )
    runs = [cores[rank * threads : (rank + 1) * threads] for rank in range(ranks)]
    return "|".join(",".join(map(str, run)) for run in runs)
