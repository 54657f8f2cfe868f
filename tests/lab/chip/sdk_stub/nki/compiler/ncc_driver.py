"""Stands for what is behind the compiler of kernels; leaves a program, and a dump if requested."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nki import note


@dataclass
class CompileOptions:
    """As of NKI 0.6."""

    target: str
    lnc: int = 1
    output_path: str = ""
    artifacts_dir: str = ""
    neuronx_cc_args: tuple[str, ...] = ()
    enable_device_dump: bool = False


def compile_bir_to_neff(
    opts: CompileOptions,
    bir: Any,
    input_arrays: list[Any],
    argument_names: list[str],
    output_arg_names: list[str],
) -> Any:
    """Leave a program."""
    hidden = [name for name in os.environ if name.startswith("VLLM_NEURON_CPU_")]
    note("neff", kernel=bir.kernel, target=opts.target, inputs=argument_names, hidden=hidden)
    Path(opts.output_path).write_text(bir.kernel)
    if "--internal-print-after=lower_sync" in opts.neuronx_cc_args:
        for core in range(opts.lnc):
            folder = Path(opts.artifacts_dir, f"nc0{core}", "sg00")
            folder.mkdir(parents=True)
            text = Path(os.environ["SDK_STUB_DUMP"]).read_text()
            (folder / "bir_debug.42.after-lower_sync.json").write_text(text)
    return json
