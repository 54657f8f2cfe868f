"""Our layer where NxD traces one rank's graph for all ranks: NxD's own `mock_distributed`.

    python -m tests.nxd.traced [--backend nki] [--case NAME]

needs NxD's and NxDI's sources on the path (the SDK's other packages are stood in for) and
transformers 4. Four processes each stand in the place of rank 0, as NxD's builder does, and hold
what NxD's sharder cuts for their own rank. The stand-in collectives of torch_xla carry out over
gloo what they are called with, and keep a record. Compared are

- outputs with those of the same layer on one rank,
- the record of every rank with that of rank 0, for one graph serves all,
- the record with that of NxD's own layer, built and called alike,
- a run with fake tensors, in which Python can read no number.

Prints a line for each case and, last, one JSON object.
"""

import argparse
import json
import logging
import math
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.nxd import cases
from tests.nxd.cases import CASES, Case, build, draw_weights
from tests.nxd.stand_ins import install as install_stand_ins
from tests.ranks import start_ranks, values_of

RANKS = 4
LAYOUTS = {"TP4": (4, 1), "EP4": (1, 4), "TP2 x EP2": (2, 2)}
SHAPES = {"prefill": (1, 320), "decode": (8, 1)}
LIMITS = {"torch": 1e-5, "nki": 2e-2}  # float32; bfloat16
OF_KERNELS = ("plain", "gpt-oss", "gpt-oss, norm, residual", "llama4", "padding")
TIMEOUT_S = 3600.0  # of all rows, on two busy cores
# What NxD raises for what it cannot do, or not with what stands for its kernels.
CANNOT = (RuntimeError, AssertionError, NotImplementedError, IndexError, AttributeError, TypeError)
Call = tuple[str, list[list[int]], list[int]]


class Wire:
    """Stands for torch_xla's collectives: carries them out over gloo, and keeps a record.

    Attributes:
        calls: kind, mesh and shape of each call.
        is_dry: nothing is sent; outputs have the right shape.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.is_dry = False
        self.groups: dict[str, Any] = {}

    def install(self) -> None:
        """Take the place of torch_xla's functions."""
        import torch_xla.core.xla_model as xm

        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            setattr(xm, name, getattr(self, name))

    def _group(self, mesh: list[list[int]]) -> Any:
        key = json.dumps(mesh)
        if key not in self.groups:
            made = {tuple(row): dist.new_group(row) for row in mesh}
            self.groups[key] = next(made[row] for row in made if dist.get_rank() in row)
        return self.groups[key]

    def _note(self, kind: str, mesh: Any, x: Tensor) -> None:
        self.calls.append((kind, [list(map(int, row)) for row in mesh], list(x.shape)))

    def all_reduce(self, op: str, tensors: list[Tensor], *, groups: Any, **_: Any) -> list[Tensor]:
        """Sum in place."""
        for x in tensors:
            self._note(f"all_reduce {op}", groups, x)
            if not self.is_dry:
                dist.all_reduce(x, group=self._group(groups))
        return tensors

    def all_gather(
        self, x: Tensor, *, dim: int, groups: Any, output: Any = None, **_: Any
    ) -> Tensor:
        """Join along an axis."""
        self._note("all_gather", groups, x)
        parts = [torch.zeros_like(x) for _ in groups[0]]
        if not self.is_dry:
            dist.all_gather(parts, x.contiguous(), group=self._group(groups))
        joined = torch.cat(parts, dim)
        return joined if output is None else output.copy_(joined)

    def reduce_scatter(
        self,
        *,
        reduce_type: str,
        input: Tensor,  # torch_xla's name
        scatter_dim: int,
        groups: Any,
        output: Any = None,
        **_: Any,
    ) -> Tensor:
        """Sum, and keep the own part of an axis."""
        self._note(f"reduce_scatter {reduce_type}", groups, input)
        total = input.clone()
        place = 0
        if not self.is_dry:
            dist.all_reduce(total, group=self._group(groups))
            place = next(row.index(dist.get_rank()) for row in groups if dist.get_rank() in row)
        part = total.chunk(len(groups[0]), scatter_dim)[place].contiguous()
        return part if output is None else output.copy_(part)


@dataclass
class Row:
    """What one case gave in one layout.

    Attributes:
        layout: how ranks are cut.
        is_part: with sequence parallelism.
        phase: prefill or decode.
        case: of CASES.
        error: largest difference of the output from that of one rank, as a share of the largest.
        calls: collectives, with mesh and shape.
        fake_calls: the same in a run with fake tensors.
        their_calls: those of NxD's own layer; None where it cannot be called here.
    """

    layout: str
    is_part: bool
    phase: str
    case: str
    error: float
    calls: list[Call]
    fake_calls: list[Call]
    their_calls: list[Call] | None


def load_nxd() -> tuple[types.SimpleNamespace, Wire]:
    """Return NxD's names, and the wire that its collectives call."""
    install_stand_ins()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    wire = Wire()
    wire.install()
    from neuronx_distributed.modules.moe import (
        expert_mlps_v2,
        model,
        moe_configs,
        moe_process_group,
        routing,
        shared_experts,
    )
    from neuronx_distributed.parallel_layers import parallel_state
    from neuronx_distributed.trace import mock_torchdist, trace

    names: dict[str, Any] = {}
    for module in (routing, moe_configs, expert_mlps_v2, shared_experts, model):
        names.update(vars(module))
    names.update(
        parallel_state=parallel_state,
        trace=trace,
        mock=mock_torchdist.mock_distributed,
        moe_groups=moe_process_group,
    )
    return types.SimpleNamespace(**names), wire


@contextmanager
def builder(nxd: Any, tp: int, ep: int) -> Iterator[dict[str, Any]]:
    """Do what ModelBuilder does around a trace; yield the groups of ExpertMLPsV2."""
    state = nxd.parallel_state
    with nxd.mock(world_size=RANKS):
        torch.distributed.init_process_group("xla", rank=0, world_size=RANKS)
        state.initialize_model_parallel(
            tensor_model_parallel_size=RANKS,
            pipeline_model_parallel_size=1,
            expert_model_parallel_size=1,
            skip_collective_init=True,
            lnc_size=2,
        )
        state.set_aot_mode(True)
        groups = {
            "tensor_model_parallel_group": state.get_tensor_model_parallel_group(),
            "expert_model_parallel_group": state.get_expert_model_parallel_group(),
        }
        if ep > 1:
            nxd.moe_groups.init_tensor_expert_parallel_moe_process_groups(tp, ep, tp, ep)
            for phase, is_prefill in (("cte", True), ("tkg", False)):
                for kind, find in (
                    ("tensor", nxd.moe_groups.get_moe_tp_ep_group),
                    ("expert", nxd.moe_groups.get_moe_ep_group),
                ):
                    groups[f"{phase}_{kind}_model_parallel_group"] = find(is_prefill)
        try:
            yield groups
        finally:
            nxd.moe_groups.destroy_moe_model_parallel()
            state.set_aot_mode(False)
            state.destroy_model_parallel()


def inputs(case: Case, phase: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return fixed tokens and what comes with them."""
    stream = torch.Generator().manual_seed(1)
    shape = SHAPES[phase]
    found = {"hidden_states": torch.randn(*shape, cases.H, generator=stream).to(dtype)}
    if case.masks:
        found["padding_mask"] = (torch.arange(shape[1]) < max(1, shape[1] * 3 // 4)).repeat(
            shape[0], 1
        )
    if case.residual:
        found["residual"] = torch.randn(*shape, cases.H, generator=stream).to(dtype)
    return found


def part_of(found: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return a rank's part of each sequence."""
    return {name: x.chunk(RANKS, 1)[rank] for name, x in found.items()}


def ours(
    nxd: Any, case: Case, groups: dict[str, Any], rank: int, backend: str, *, is_part: bool
) -> Any:
    """Build our layer in the place of rank 0, and load what is cut for a rank."""
    layer = built(
        case, groups, nxd.parallel_state.get_tensor_model_parallel_group(), backend, is_part=is_part
    )
    state = draw_weights(case)
    nxd.trace.get_sharded_checkpoint(state, layer, rank, RANKS)
    layer.load_state_dict(state, strict=True)
    return layer


def built(
    case: Case, groups: dict[str, Any], whole: Any, backend: str, *, is_part: bool = False
) -> Any:
    """Build our layer."""
    from neuron_moe import nxd_compat
    from neuron_moe.backends.torch_backend import TorchBackend

    layer = build(
        nxd_compat,
        case,
        groups,
        whole,
        is_part=is_part,
        backend=TorchBackend(static=True) if backend == "torch" else backend,
    )
    return layer.to(torch.bfloat16) if backend == "nki" else layer


def rows_of_rank(nxd: Any, wire: Wire, names: list[str], backend: str) -> list[dict[str, Any]]:
    """Compare on this rank; every rank calls it."""
    rank, rows = dist.get_rank(), []
    dtype = torch.bfloat16 if backend == "nki" else torch.float32
    for name in names:
        case = CASES[name]
        alone = built(case, {}, None, backend)
        alone.load_state_dict(draw_weights(case), strict=True)
        for layout, (tp, ep) in LAYOUTS.items():
            for is_part in (False, True):
                with builder(nxd, tp, ep) as groups:
                    if is_part and "capacity_factor" in case.experts:
                        check_refusal(nxd, case, groups)
                        continue
                    layer = ours(nxd, case, groups, rank, backend, is_part=is_part)
                    for phase in SHAPES:
                        given = inputs(case, phase, dtype)
                        with torch.no_grad():
                            wanted = alone(**given)[0]
                        if is_part and phase == "prefill":
                            given = part_of(given, rank)
                            wanted = wanted.chunk(RANKS, 1)[rank]
                        found, calls = called(layer, wire, given, phase, is_part=is_part)
                        fake_calls = traced(layer, wire, given, phase, is_part=is_part)
                        their_calls = calls_of_nxd(
                            nxd, wire, case, groups, given, phase, is_part=is_part
                        )
                        error = float((found - wanted).abs().max() / wanted.abs().max())
                        rows.append(
                            asdict(
                                Row(
                                    layout,
                                    is_part,
                                    phase,
                                    name,
                                    error,
                                    calls,
                                    fake_calls,
                                    their_calls,
                                )
                            )
                        )
    return rows


def check_refusal(nxd: Any, case: Case, groups: dict[str, Any]) -> None:
    """Check that a layer which one graph cannot hold is refused by name while it is built."""
    whole = nxd.parallel_state.get_tensor_model_parallel_group()
    with pytest.raises(ValueError, match=r"^capacity_factor="):
        built(case, groups, whole, "torch", is_part=True)


def called(
    layer: Any, wire: Wire, given: dict[str, Tensor], phase: str, *, is_part: bool
) -> tuple[Tensor, list[Call]]:
    """Call a layer; return its output and its collectives."""
    wire.calls = []
    keys: dict[str, Any] = {"phase": "decode"} if is_part and phase == "decode" else {}
    with torch.no_grad():
        found: Tensor = layer(**given, **keys)[0]
    return found, wire.calls


def traced(
    layer: Any, wire: Wire, given: dict[str, Tensor], phase: str, *, is_part: bool
) -> list[Call]:
    """Call a layer with tensors that have no numbers; return its collectives."""
    fake = FakeTensorMode(allow_non_fake_inputs=False)
    state = {name: fake.from_tensor(x.detach()) for name, x in layer.state_dict().items()}
    given = {name: fake.from_tensor(x) for name, x in given.items()}
    keys: dict[str, Any] = {"phase": "decode"} if is_part and phase == "decode" else {}
    wire.is_dry, wire.calls = True, []
    try:
        with fake, torch.no_grad():
            found = torch.func.functional_call(layer, state, kwargs={**given, **keys})[0]
    finally:
        wire.is_dry = False
    assert found.shape == given["hidden_states"].shape
    return wire.calls


def calls_of_nxd(
    nxd: Any,
    wire: Wire,
    case: Case,
    groups: dict[str, Any],
    given: dict[str, Tensor],
    phase: str,
    *,
    is_part: bool,
) -> list[Call] | None:
    """Build NxD's own layer and call it; return its collectives."""
    whole = nxd.parallel_state.get_tensor_model_parallel_group()
    is_part = is_part and phase == "prefill"  # NxDI's decode is not sequence parallel
    wire.is_dry, wire.calls = True, []
    try:
        layer = build(
            nxd, case, {**groups, "is_prefill": phase == "prefill"}, whole, is_part=is_part
        )
        with torch.no_grad():
            layer(**{name: x.float() for name, x in given.items()})
    except CANNOT:
        return None
    finally:
        wire.is_dry = False
    return wire.calls


def kinds_of(calls: list[Call], top_k: int) -> list[tuple[str, list[list[int]], int, int]]:
    """Return kinds, meshes, tokens and widths, in order.

    Left out is what only NxD's way of indexing blocks needs: ranks that divide the work of it and
    join what they found. Where NxD gathers the affinities of all experts, ours are k-wide.
    """
    found = []
    for kind, mesh, shape in calls:
        width = top_k if kind == "all_gather" and shape[-1] == cases.E else shape[-1]
        if kind != "all_reduce max":
            found.append((kind, mesh, math.prod(shape[:-1]), width))
    return sorted(found)


def main(argv: list[str] | None = None) -> int:
    """Compare; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.nxd.traced", description=__doc__)
    parser.add_argument("--backend", choices=LIMITS, default="torch")
    parser.add_argument("--case", action="append", choices=CASES, metavar="NAME")
    args = parser.parse_args(argv)
    if args.backend == "nki":  # sizes and a number of slots that kernels take
        cases.H, cases.I, cases.BLOCK_SIZE = 128, 512, 128
    names = args.case or list(OF_KERNELS if args.backend == "nki" else CASES)
    nxd, wire = load_nxd()
    answers = start_ranks(
        RANKS, lambda _: rows_of_rank(nxd, wire, names, args.backend), timeout_s=TIMEOUT_S
    )
    wrong = unknown = 0
    merged = []
    for rows in zip(*values_of(answers), strict=True):
        first, error = rows[0], max(row["error"] for row in rows)
        is_same = all(row["calls"] == first["calls"] == row["fake_calls"] for row in rows)
        theirs = first["their_calls"]
        top_k = CASES[first["case"]].top_k
        is_nxds = theirs is None or kinds_of(first["calls"], top_k) == kinds_of(theirs, top_k)
        is_right = error <= LIMITS[args.backend] and is_same and is_nxds
        unknown += theirs is None
        wrong += not is_right
        merged.append({**first, "error": error, "is_same": is_same})
        kinds = ", ".join(f"{kind} {shape}" for kind, _, shape in first["calls"])
        where = "parts" if first["is_part"] else "whole"
        print(  # noqa: T201
            f"{'ok' if is_right else 'WRONG':5} {first['layout']:9} {where} {first['phase']:7}"
            f" {error:8.1e} {first['case']}: {kinds}"
        )
    print(  # noqa: T201
        json.dumps(
            {
                "kind": "measured",
                "backend": args.backend,
                "rows": len(merged),
                "wrong": wrong,
                "not_beside_nxd": unknown,
                "largest_difference": max(row["error"] for row in merged),
                "calls": {
                    f"{row['layout']} {row['is_part']} {row['phase']} {row['case']}": row["calls"]
                    for row in merged
                },
            }
        )
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
