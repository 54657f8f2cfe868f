"""The measuring half of `neuron-moe bench host`: a process that answers requests, one a line.

It runs as a script with the checkout that PYTHONPATH names, perhaps an old one, so it imports
nothing of `neuron_moe.tools` and builds layers with NxD's signatures alone. Times are processor
time of the calling thread, torch with one thread: what else the machine does counts for nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import neuron_moe
import nki_sim
from neuron_moe import (
    ExpertMLPsV2,
    MoE,
    RoutedExpertsMLPOpsConfig,
    RouterTopK,
)

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 512, 512, 32, 4
PREFILL_TOKENS, DECODE_TOKENS = 1024, 4
CASES = ("prefill", "prefill 8-bit", "fused prefill", "fused decode", "decode")
WARM_UPS = 5
PACKAGE = Path(neuron_moe.__file__).parent


@dataclass(slots=True)
class Stub:
    """Stands in for `nki_sim.run`: simulates each launch once, then returns what that one gave.

    Attributes:
        run: the simulator's function.
        case: whose launches come now.
        kept: results by case, kernel and shapes of the operands.
        launches: calls since the last reset.
        seconds: spent in here since then, which is no time of the host's.
    """

    run: Callable[..., Any]
    case: str = ""
    kept: dict[Any, Any] = field(default_factory=dict)
    launches: int = 0
    seconds: float = 0.0

    def __call__(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a launch."""
        start = time.thread_time()
        shapes = tuple(getattr(value, "shape", None) for value in (*args, *kwargs.values()))
        key = (self.case, kernel, shapes)
        if key not in self.kept:
            self.kept[key] = self.run(kernel, *args, **kwargs)
        found = self.kept[key]
        self.launches += 1
        self.seconds += time.thread_time() - start
        return found

    def reset(self) -> None:
        """Count anew."""
        self.launches, self.seconds = 0, 0.0


def build_layer(case: str) -> MoE:
    """Return a small layer like GPT-OSS's on backend nki, with the weights of a case."""
    torch.manual_seed(0)
    config = RoutedExpertsMLPOpsConfig(
        EXPERTS,
        HIDDEN,
        INTERMEDIATE,
        TOP_K,
        "sigmoid",
        True,
        bias=True,
        glu_type="swiglu",
        hidden_act_scaling_factor=1.702,
        hidden_act_bias=1.0,
        gate_clamp_upper_limit=7.0,
        up_clamp_upper_limit=7.0,
        up_clamp_lower_limit=-7.0,
    )
    layer = MoE(
        RouterTopK(EXPERTS, TOP_K, HIDDEN, bias=True, apply_act_fn_over_topk=True),
        ExpertMLPsV2(config, dtype=torch.bfloat16, backend="nki"),
        return_router_logits=not case.startswith("fused"),  # which one launch keeps on chip
    ).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.uniform_(-0.1, 0.1)
            if parameter.ndim == 3:
                parameter.copy_(_mxfp4_values(parameter.shape))
    if case == "prefill 8-bit":
        layer.expert_mlps.pack_weights()
    return layer


def _mxfp4_values(shape: Sequence[int]) -> Tensor:
    """Return [E, in, out] numbers that MXFP4 holds exactly, 32 of a column with one scale."""
    experts, rows, columns = shape
    levels = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)) / 64
    codes = levels[torch.randint(8, (experts, rows // 32, 32, columns))]
    signs = torch.randint(2, codes.shape) * 2 - 1
    scales = torch.randint(-2, 1, (experts, rows // 32, 1, columns)).float().exp2()
    return (codes * signs * scales).reshape(experts, rows, columns)


class Probe:
    """One layer call of a case, with launches stubbed out.

    Args:
        case: one of CASES.
        stub: what stands in for `nki_sim.run` now.
    """

    def __init__(self, case: str, stub: Stub) -> None:
        self.case = case
        self.stub = stub
        self.layer = build_layer(case)
        tokens = PREFILL_TOKENS if "prefill" in case else DECODE_TOKENS
        shape = (1, tokens, HIDDEN) if "prefill" in case else (tokens, 1, HIDDEN)
        self.hidden_BSH = torch.randn(shape).to(torch.bfloat16)
        self.expected_BSH = self.call().clone()
        for _ in range(WARM_UPS):
            self.call()

    @torch.no_grad()
    def call(self) -> Tensor:
        """Run the layer once; return its output."""
        self.stub.case = self.case
        output: Tensor = self.layer(self.hidden_BSH).output
        return output

    def measure(self, repeats: int) -> dict[str, Any]:
        """Return milliseconds of each of some calls without the stub's, and the stub's share.

        Raises:
            RuntimeError: a call gave something else than the simulated one.
        """
        times_ms, stub_ms = list[float](), list[float]()
        for _ in range(WARM_UPS):  # the other checkout's turn left the caches to its code
            self.call()
        for _ in range(repeats):
            self.stub.reset()
            start = time.thread_time()
            self.call()
            spent = time.thread_time() - start
            times_ms.append((spent - self.stub.seconds) * 1e3)
            stub_ms.append(self.stub.seconds * 1e3)
        launches = self.stub.launches
        if not torch.equal(self.call(), self.expected_BSH):
            raise RuntimeError("the layer's output differs from its first one: it keeps a state.")
        return {"times_ms": times_ms, "stub_ms": stub_ms, "launches": launches}

    def walk(self) -> list[tuple[str, str, str]]:
        """Return the switches of file of one call: from, to, and the function entered.

        A call of a function counts whose file is another one of the package than that of the
        nearest caller inside the package; a return does not. Kernels and simulator are outside.
        """
        found: list[tuple[str, str, str]] = []

        def note(frame: FrameType, event: str, arg: object) -> None:
            file = _file_of(frame) if event == "call" else ""
            if file:
                caller = _nearest_caller(frame)
                if caller and caller != file:
                    found.append((caller, file, frame.f_code.co_qualname))

        sys.setprofile(note)
        try:
            self.call()
        finally:
            sys.setprofile(None)
        return found


def _file_of(frame: FrameType) -> str:
    """Return a function's file inside the package, "" outside of it and for its tools."""
    path = frame.f_code.co_filename
    root = f"{PACKAGE}/"
    if not path.startswith(root) or path.startswith(f"{root}tools/"):
        return ""
    return path.removeprefix(root)


def _nearest_caller(frame: FrameType) -> str:
    """Return the file of the innermost caller inside the package, "" if there is none."""
    caller = frame.f_back
    while caller is not None:
        if file := _file_of(caller):
            return file
        caller = caller.f_back
    return ""


def main() -> int:
    """Answer requests until the input ends: with times where `repeats` is given, else a walk."""
    torch.set_num_threads(1)
    stub = Stub(nki_sim.run)
    nki_sim.run = stub  # type: ignore[assignment]
    probes: dict[str, Probe] = {}
    print(json.dumps({"package": str(PACKAGE)}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        case = request["case"]
        if case not in probes:
            probes[case] = Probe(case, stub)
        probe = probes[case]
        answer = probe.measure(request["repeats"]) if "repeats" in request else probe.walk()
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
