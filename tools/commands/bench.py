"""neuron-moe bench TARGET: benchmarks, one module of `tools/bench` each."""

from neuron_moe.tools.menu import Menu

MENU = Menu(
    "neuron-moe bench",
    "target",
    {
        "cpu": ("bench.cpu", "one MoE layer on this CPU beside that of transformers (measured)"),
        "generate": (
            "bench.generate",
            "a checkpoint on this CPU, ours beside transformers' generate (measured)",
        ),
        "gpu": ("bench.gpu", "experts of one layer on an NVIDIA GPU beside torch's (measured)"),
        "host": ("bench.host", "host time of one layer call, launches stubbed out (measured)"),
        "load": ("bench.load", "memory and bytes read while a rank's weights stream (measured)"),
        "sim": ("bench.sim", "overhead of the simulator per instruction (measured)"),
        "serve": ("bench.serve", "our class in vLLM beside vLLM's own, over HTTP (measured)"),
        "wire": ("bench.wire", "bytes on the wire of one MoE layer over ranks (measured)"),
        "prefill": (
            "bench.prefill",
            "MoE prefill kernels beside the vendor's and the roofline (simulated)",
        ),
        "decode": (
            "bench.decode",
            "MoE decode kernels beside the vendor's and the HBM bound (simulated)",
        ),
        "anchors": (
            "bench.anchors",
            "published times of the chip beside both corners of the clock (simulated)",
        ),
    },
)
main = MENU.main
