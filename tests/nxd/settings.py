"""The settings of `neuron-moe compile` in NxDI's own objects.

    python -m tests.nxd.settings

builds NxDI's application for a small GPT-OSS checkpoint as the hand-over does, and prints, as one
JSON object, the settings that were given, those that NxDI has, and the buckets of its submodels.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from tests.nxd.stand_ins import install as install_stand_ins

CHANGES = (
    "tp=2",
    "ep=2",
    "batch=2",
    "max_length=256",
    'buckets=[{"tokens": 160, "block_size": 64}]',
)


def main() -> int:
    """Build and print; return the exit status."""
    os.environ["NXD_CPU_MODE"] = "1"
    install_stand_ins()
    from neuron_moe import nxd_compat
    from neuron_moe.models.sample_checkpoint import make_checkpoint, sample_config
    from neuron_moe.tools.compile import nxdi
    from neuron_moe.tools.compile.request import find_request

    with tempfile.TemporaryDirectory() as folder:
        # NxDI requests a key that published configurations have.
        make_checkpoint(folder, {**sample_config(), "initial_context_length": 4096})
        deployment = find_request(folder, "trn2.3xlarge", CHANGES).deployment
        kind = nxdi._application("gpt_oss")
        rebound = nxd_compat.install(backend="nki")
        app = nxdi._build(kind, deployment, Path(folder))
    given = nxdi.neuron_settings(deployment)
    found = {name: getattr(app.neuron_config, name, None) for name in given}
    blockwise = found["blockwise_matmul_config"]
    found["blockwise_matmul_config"] = {"block_size": blockwise.block_size}
    found["torch_dtype"] = str(found["torch_dtype"]).removeprefix("torch.")
    buckets = {each.tag: each.neuron_config.buckets for each in app.models}
    report = {"given": given, "found": found, "buckets": buckets, "rebound": len(rebound)}
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
