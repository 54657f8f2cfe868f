"""NxDI's own builder traces its models with our layer: `ModelBuilder`'s calls, in order.

    python -m tests.nxd.build_models [--model NAME]

needs NxD's and NxDI's sources on the path (the SDK's other packages are stood in for) and
transformers 4. The place of torch_xla's tracer is taken by fake tensors: they record every
operation, and no number can be read. Prints a line for each model and layout, and, last, one JSON
object.
"""

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tests.nxd.models import CLASSES, EXTRA, MODELS, write_checkpoint
from tests.nxd.stand_ins import install as install_stand_ins
from tests.nxd.traced import Wire
from tests.recorded import Kernels

RANKS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP4": {},
    "TP4, parts": {"sequence_parallel_enabled": True},
    "EP4": {"moe_tp_degree": 1, "moe_ep_degree": 4},
    "TP2 x EP2, parts": {
        "moe_tp_degree": 2,
        "moe_ep_degree": 2,
        "sequence_parallel_enabled": True,
    },
}
QUANTISED = {  # Llama 4's, as NxDI reads them
    "quantized": True,
    "quantized_checkpoints_path": "unread",
    "quantization_type": "expert_wise_per_channel_symmetric",
    "quantization_dtype": "f8e4m3",
    "modules_to_not_convert": ["self_attn", "router", "shared_expert", "lm_head"],
}
LENGTHS = (192, 256)
BLOCK_SIZE = 64  # NxDI has 512 by itself


class Tracer:
    """Stands for `torch_neuronx.xla_impl.trace`: calls what is to be traced with fake tensors.

    Attributes:
        traces: inputs' shapes and collectives of each graph.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.traces: list[dict[str, Any]] = []

    def generate_hlo(self, func: Any, example_inputs: Any, *_: Any, **__: Any) -> Any:
        """Trace one graph."""
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        convert = fake.from_tensor
        state = {
            name: convert(x.detach())
            for name, x in (*func.named_parameters(), *func.named_buffers())
        }
        inputs = pytree.tree_map_only(torch.Tensor, convert, tuple(example_inputs))
        self.wire.is_dry, self.wire.calls = True, []
        kernels = Kernels()
        with fake, kernels, torch.no_grad():
            torch.func.functional_call(func, state, inputs)
        self.traces.append(
            {
                "tokens": list(inputs[0].shape),
                "calls": self.wire.calls,
                "kernels": kernels.names,
                "block_sizes": sorted(set(kernels.block_sizes)),
                "codes": sum(x.dtype == torch.float8_e4m3fn for x in state.values()),
            }
        )

        class Artifacts:
            """What the builder keeps of a graph."""

            class metaneff:
                """Names of the graph's operands."""

                @staticmethod
                def SerializeToString() -> bytes:
                    """Return nothing."""
                    return b""

        return Artifacts()


def application(name: str, folder: Path, keys: Mapping[str, Any]) -> Any:
    """Return NxDI's application object, as `compile` hands it over."""
    import importlib

    from tests.nxd.models import _read_config

    file, kind_name = CLASSES[name]
    kind = getattr(
        importlib.import_module(f"neuronx_distributed_inference.models.{file}"), kind_name
    )
    config_kind = kind.get_config_cls()
    neuron = config_kind.get_neuron_config_cls()(
        batch_size=1,
        seq_len=LENGTHS[-1],
        max_context_length=LENGTHS[-1],
        enable_bucketing=True,
        context_encoding_buckets=list(LENGTHS),
        token_generation_buckets=[LENGTHS[-1]],
        tp_degree=RANKS,
        blockwise_matmul_config={"block_size": BLOCK_SIZE},
        attn_kernel_enabled=False,  # of theirs, which fake tensors cannot enter
        torch_dtype=torch.bfloat16,
        **keys,
    )
    config = config_kind(neuron, load_config=_read_config(name, folder), **EXTRA.get(name, {}))
    config = config.text_config if name == "llama4" else config
    return kind(str(folder), config)


def trace(builder: Any) -> None:
    """Do what `ModelBuilder.trace` does up to the compiler."""
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed.trace.mock_torchdist import mock_distributed

    with mock_distributed(world_size=builder.world_size):
        torch.distributed.init_process_group("xla", rank=0, world_size=builder.world_size)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=builder.tp_degree,
            pipeline_model_parallel_size=builder.pp_degree,
            expert_model_parallel_size=builder.ep_degree,
            skip_collective_init=True,
            lnc_size=builder.logical_nc_config,
        )
        parallel_state.set_aot_mode(True)
        try:
            if builder.init_custom_process_group_fn:
                builder.init_custom_process_group_fn()
            for key in builder.model_collection:
                builder._generate_hlo(key)
        finally:
            from neuronx_distributed.modules.moe import moe_process_group

            moe_process_group.destroy_moe_model_parallel()
            parallel_state.set_aot_mode(False)
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    """Trace; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.nxd.build_models", description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS, metavar="NAME")
    parser.add_argument("--own", action="store_true", help="with NxDI's own layer")
    args = parser.parse_args(argv)
    install_stand_ins()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch_neuronx.xla_impl.trace as place

    wire = Wire()
    wire.install()
    import neuronx_distributed.trace.model_builder  # noqa: F401

    from neuron_moe import nxd_compat

    rows = []
    with tempfile.TemporaryDirectory() as folders:
        for name in args.model or list(MODELS):
            folder = Path(folders) / name
            folder.mkdir()
            write_checkpoint(name, folder)
            layouts = dict(LAYOUTS)
            if name == "llama4":
                layouts |= {f"{key}, codes": {**LAYOUTS[key], **QUANTISED} for key in LAYOUTS}
            for layout, keys in layouts.items():
                if not args.own:
                    nxd_compat.install(backend="nki")
                try:
                    tracer = Tracer(wire)
                    place.generate_hlo = tracer.generate_hlo
                    trace(application(name, folder, keys).get_builder())
                finally:
                    nxd_compat.uninstall()
                rows.append({"model": name, "layout": layout, "traces": tracer.traces})
                shown = [f"{each['tokens']} {each['kernels'][:3]}" for each in tracer.traces]
                print(f"{name} {layout}: {'; '.join(shown)}")  # noqa: T201
    print(json.dumps({"kind": "measured", "rows": rows}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
