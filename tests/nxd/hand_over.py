"""NxDI's own application and configuration classes take what `compile` hands over.

    python -m tests.nxd.hand_over

A plan of each family is built with NxDI, with the SDK's closed packages stood in for; nothing is
compiled. Prints the block size that NxDI holds beside the planned one.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.nxd.stand_ins import install

MODELS = (
    "gpt_oss_20b",
    "qwen3_30b_a3b",
    "mixtral_8x7b",
    "dbrx",
    "llama4_scout",
    "llama4_maverick",
)
SIZES = (128, 256)


def built(name: str, block_size: int) -> dict[str, Any]:
    """Build NxDI's application for a model's plan with one block size."""
    from dataclasses import replace

    from neuron_moe import nxd_compat
    from neuron_moe.models.deployment import Bucket
    from neuron_moe.tools.compile import nxdi
    from neuron_moe.tools.compile.request import find_request

    request = find_request(None, name, [])
    buckets = tuple(
        Bucket(tokens=each.tokens, block_size=block_size) for each in request.deployment.buckets
    )
    deployment = replace(request.deployment, buckets=buckets)
    nxd_compat.install(backend="nki")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(request.raw_config)))
        kind = nxdi._application(str(request.raw_config["model_type"]))
        app = nxdi._build(kind, deployment, Path(folder))
    nxd_compat.uninstall()
    text = getattr(app.config, "text_config", app.config)
    tuning = nxd_compat.BlockwiseMatmulConfig.of(text.neuron_config.blockwise_matmul_config)
    return {
        "model": name,
        "application": kind.__name__,
        "planned": block_size,
        "held": tuning.block_size,
        "ranks": text.neuron_config.tp_degree,
    }


def main() -> None:
    """Print a line of JSON."""
    install()
    rows = [built(name, size) for name in MODELS for size in SIZES]
    print(json.dumps({"rows": rows}))  # noqa: T201


if __name__ == "__main__":
    main()
