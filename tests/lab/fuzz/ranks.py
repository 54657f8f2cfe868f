"""Ranks of which one fails: the others name it in time, or compute the right numbers.

An attack runs in a session of its own, so that a process that it leaves behind is seen.

Axes: B sequences, S positions, H hidden.
"""

import contextlib
import multiprocessing
import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK
from neuron_moe.parallel import CollectiveError, ParallelConfig, parallel_state
from neuron_moe.sharded.sharding import shard_state_dict
from neuron_moe.tools.ranks import RankError, run_on_ranks

LIMIT_S = 30.0
SLACK_S = 6.0  # forking, building groups and layers on busy cores
ENDS = ("kill", "stop", "raise", "leave")  # the victim is gone
DIFFERS = ("tokens", "mask", "phase", "option", "dtype", "width", "weights")  # it disagrees
HARMLESS = ("late", "slow")
OPTIONS: tuple[dict[str, Any], ...] = (
    {"normalize_top_k_affinities": True},
    {"early_expert_affinity_modulation": True},
    {"hidden_act": "gelu"},
    {"reduce_dtype": torch.bfloat16},
    {"compat": "nxd"},
    {"act_fn": "sigmoid"},
    {"top_k": 3},
)
NUM_EXPERTS, H, INTERMEDIATE = 12, 16, 24
BATCH, SEQ = 4, 6
CALLS = 4
ROUNDING = 1e-5  # of the largest output: float32 sums in another order


@dataclass(frozen=True)
class Attack:
    """One group of ranks, and what happens to one of them.

    Attributes:
        seed: of everything drawn.
        config: how the layer is spread.
        is_launched: started by the command line's launcher, not one by one.
        fault: what the victim does.
        victim: its rank.
        call: in which call of the layer; -1 before the layer is built, -2 before the groups are,
            CALLS after the last one.
        is_inside: in the middle of the call, not before it.
        option: what the victim builds its layer with.
        timeout_s: of a collective.
    """

    seed: int
    config: ParallelConfig
    is_launched: bool
    fault: str
    victim: int
    call: int
    is_inside: bool
    option: dict[str, Any]
    timeout_s: float

    def __str__(self) -> str:
        sizes = {name: value for name, value in self.config.to_dict().items() if value is not None}
        where = "inside" if self.is_inside else "before"
        how = "launched" if self.is_launched else "started"
        return (
            f"seed {self.seed}: {self.fault} {self.option or ''} of rank {self.victim}, {where}"
            f" call {self.call}, {how} with {sizes}, timeout {self.timeout_s}"
        )

    def is_now(self, rank: int, call: int, *, is_inside: bool) -> bool:
        """Say whether it is time for the fault."""
        place = (self.victim, self.call, self.is_inside)
        return place == (rank, call, is_inside)


def draw(seed: int) -> Attack:
    """Return the attack of a seed."""
    rng = random.Random(f"ranks {seed}")
    size = rng.choice([2, 3, 4])
    tp = rng.choice([parts for parts in (1, 2, 3, 4) if size % parts == 0])
    sizes: dict[str, Any] = {"tp": tp, "ep": size // tp}
    is_launched = rng.random() < 0.4
    if not is_launched:
        sizes |= rng.choice([{}, {}, {"sp": True}, {"dp": size // tp}])
        sizes["strategy"] = rng.choice(["replicate", "all_to_all"])
        if rng.random() < 0.4:
            sizes |= {"decode_moe_tp": size // tp, "decode_moe_ep": tp}
    fault = rng.choice(rng.choice([ENDS, ENDS, DIFFERS, HARMLESS]))
    is_inside = fault in ("kill", "stop", "raise", "slow") and rng.random() < 0.5
    calls = range(CALLS)
    if fault in ("option", "dtype", "width", "weights"):
        calls = range(1)
    elif fault in ENDS or fault in HARMLESS:
        calls = range(-1, CALLS) if fault == "leave" else range(-2, CALLS + 1)
    return Attack(
        seed=seed,
        config=ParallelConfig(**sizes),
        is_launched=is_launched,
        fault=fault,
        victim=rng.randrange(size),
        call=rng.choice(range(CALLS) if is_inside else calls),
        is_inside=is_inside,
        option=rng.choice(OPTIONS) if fault == "option" else {},
        timeout_s=4.0,
    )


def _build(option: dict[str, Any], config: ParallelConfig, dtype: torch.dtype, width: int) -> MoE:
    mlp = {"hidden_act": "silu"} | option
    top_k, act_fn = mlp.pop("top_k", 2), mlp.pop("act_fn", "softmax")
    reduce_dtype, compat = mlp.pop("reduce_dtype", None), mlp.pop("compat", None)
    spec = RoutedExpertsMLPOpsConfig(
        NUM_EXPERTS, width, INTERMEDIATE, top_k, glu_mlp=True, bias=True, **mlp
    )
    experts = ExpertMLPsV2(spec, sequence_parallel_enabled=config.sp, compat=compat, dtype=dtype)
    return MoE(
        RouterTopK(NUM_EXPERTS, top_k, width, act_fn=act_fn, dtype=dtype),
        experts,
        sequence_parallel_enabled=config.sp,
        reduce_dtype=reduce_dtype,
    ).eval()


class _PlantedError(RuntimeError):
    """What a victim raises."""


class _Rank:
    """What one rank does: some calls of a layer, each compared with the whole layer's result."""

    def __init__(self, attack: Attack, rank: int) -> None:
        self.attack = attack
        self.rank = rank
        self.call = -1

    def run(self) -> str:
        """Return what is wrong with the results; '' if nothing is."""
        attack, config = self.attack, self.attack.config
        generator = torch.Generator().manual_seed(attack.seed)
        with parallel_state.as_rank(ParallelConfig(sp=config.sp), 0):
            whole = _build({}, ParallelConfig(sp=config.sp), torch.float32, H)
        for parameter in (*whole.parameters(), *whole.buffers()):
            parameter.data = torch.rand(parameter.shape, generator=generator) * 0.6 - 0.3
        calls = [torch.randn(BATCH, SEQ, H, generator=generator) for _ in range(CALLS)]
        calls[2:] = [hidden[:, :1] for hidden in calls[2:]]
        with parallel_state.as_rank(ParallelConfig(sp=config.sp), 0):
            wanted = [whole(hidden)[0] for hidden in calls]
        if _break(attack, self.rank, -1):
            return ""
        layer = self._layer(whole)
        compute = ExpertMLPsV2.compute

        def breaking(experts: ExpertMLPsV2, *args: Any) -> Tensor:
            _break(attack, self.rank, self.call, is_inside=True)
            return compute(experts, *args)

        with mock.patch.object(ExpertMLPsV2, "compute", breaking):
            for self.call, (hidden, right) in enumerate(zip(calls, wanted, strict=True)):
                if _break(attack, self.rank, self.call):
                    return ""
                found = self._call(layer, hidden)
                error = float((found - self._mine(right)).abs().max()) if found.numel() else 0.0
                if not error <= ROUNDING * float(right.abs().max()):
                    return f"rank {self.rank}: call {self.call} is off by {error:.1e}"
        _break(attack, self.rank, CALLS)
        return ""

    def _layer(self, whole: MoE) -> MoE:
        attack, is_odd = self.attack, self.rank == self.attack.victim
        odd_dtype = torch.bfloat16 if attack.fault == "dtype" else torch.float32
        layer = _build(
            attack.option if is_odd else {},
            attack.config,
            odd_dtype if is_odd else torch.float32,
            H * 2 if is_odd and attack.fault == "width" else H,
        )
        if not is_odd or attack.fault not in ("width", "option"):
            layer.load_state_dict(shard_state_dict(layer, whole.state_dict()))
        if is_odd and attack.fault == "weights":
            layer.router.linear_router.weight.data.neg_()
        return layer

    def _mine(self, hidden_BSH: Tensor) -> Tensor:
        """Return the part of this rank of the tokens of all."""
        config = self.attack.config
        size = config.model_size
        if config.sp and hidden_BSH.shape[1] > 1:
            return hidden_BSH.tensor_split(size, dim=1)[self.rank]
        if config.dp > 1:
            return hidden_BSH.tensor_split(config.dp, dim=0)[self.rank * config.dp // size]
        return hidden_BSH

    def _call(self, layer: MoE, hidden_BSH: Tensor) -> Tensor:
        attack = self.attack
        mine = self._mine(hidden_BSH).to(layer.expert_mlps.dtype)
        is_odd = attack.is_now(self.rank, self.call, is_inside=False)
        phase = "decode" if attack.config.sp and hidden_BSH.shape[1] == 1 else None
        mask = None
        if is_odd and attack.fault == "phase":
            phase = "speculation" if phase is None else None
        if is_odd and attack.fault == "tokens":
            mine = mine[:-1]
        if is_odd and attack.fault == "mask":
            mask = torch.ones(mine.shape[:2])
            mask[0, 0] = 0
        if is_odd and attack.fault == "width":
            mine = torch.cat([mine, mine], dim=-1)
        output: Tensor = layer(mine, mask, phase=phase)[0]
        return output


def _break(attack: Attack, rank: int, call: int, *, is_inside: bool = False) -> bool:
    """Do what the fault is, if it is time; say whether this rank leaves early."""
    if not attack.is_now(rank, call, is_inside=is_inside):
        return False
    if attack.fault in HARMLESS:
        time.sleep(0.6 * attack.timeout_s)
    if attack.fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if attack.fault == "kill" else signal.SIGSTOP)
    if attack.fault == "raise":
        raise _PlantedError("planted")
    return attack.fault == "leave"


@contextlib.contextmanager
def _breaking(attack: Attack) -> Iterator[None]:
    """Break before the groups are built, if that is when."""
    build = parallel_state.initialize_model_parallel

    def breaking(*args: Any, **kwargs: Any) -> Any:
        _break(attack, dist.get_rank(), -2)
        return build(*args, **kwargs)

    with mock.patch.object(parallel_state, "initialize_model_parallel", breaking):
        yield


def _work(attack: Attack) -> str:
    torch.manual_seed(0)
    with torch.inference_mode():
        return _Rank(attack, dist.get_rank()).run()


def _started(attack: Attack, rank: int, port: int, pipe: Any) -> None:
    """Be one rank; tell through a pipe how it ended."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    size = attack.config.world_size
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size)
        dist.barrier()  # nobody breaks while another still connects
        with _breaking(attack):
            parallel_state.initialize_model_parallel(
                config=attack.config, timeout_s=attack.timeout_s
            )
        ending = _work(attack)
    except Exception as error:  # noqa: BLE001  judged by the parent
        ending = _said(error)
    pipe.send(ending)
    os._exit(0)


def _said(error: BaseException) -> str:
    suspects = getattr(error, "suspects", None)
    return f"{type(error).__name__} {suspects}: {error}"


def _start_all(attack: Attack) -> list[str]:
    """Start the ranks; return how each ended, '' for well."""
    context = multiprocessing.get_context("fork")
    port = _free_port()
    children = []
    for rank in range(attack.config.world_size):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_started, args=(attack, rank, port, theirs))
        child.start()
        theirs.close()
        children.append((child, ours))
    deadline = time.monotonic() + LIMIT_S + SLACK_S
    endings = []
    for rank, (_, pipe) in enumerate(children):
        patience = 0.5 if rank == attack.victim and attack.fault == "stop" else LIMIT_S + SLACK_S
        ready = pipe.poll(max(0.0, min(patience, deadline - time.monotonic())))
        try:
            endings.append(pipe.recv() if ready else "no answer")
        except EOFError:
            endings.append("gone")
    if attack.fault == "stop":
        children[attack.victim][0].kill()
    return endings


def _launch(attack: Attack) -> list[str]:
    """Run the ranks as the command line does; return how rank 0 ended."""
    config, work = attack.config, partial(_work, attack)
    try:
        with _breaking(attack):
            return [run_on_ranks(config.tp, config.ep, work, timeout_s=attack.timeout_s)]
    except (RankError, CollectiveError, ValueError, _PlantedError) as error:
        return [_said(error)]


def _lead(attack: Attack, pipe: Any) -> None:
    os.setsid()
    torch.set_num_threads(1)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # what gloo and the launcher's children print
    pipe.send((_launch if attack.is_launched else _start_all)(attack))
    os._exit(0)


def attack_ranks(seed: int, *, timeout_s: float = 4.0) -> str:
    """Run the ranks of a seed; say what is wrong with how they end."""
    attack = replace(draw(seed), timeout_s=timeout_s)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    leader = context.Process(target=_lead, args=(attack, theirs))
    leader.start()
    theirs.close()
    assert leader.pid is not None
    endings = ["no answer"]
    with contextlib.suppress(EOFError):
        is_leader_stopped = attack.is_launched and attack.victim == 0 and attack.fault == "stop"
        if ours.poll(3.0 if is_leader_stopped else LIMIT_S + SLACK_S):
            endings = ours.recv()
    problem = _judge(attack, endings)
    left = _wait_for_the_rest(leader.pid, attack)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    leader.kill()
    leader.join()
    if not problem and left:
        problem = f"leaves {len(left)} processes behind"
    return f"{attack}: {problem}" if problem else ""


def _wait_for_the_rest(session: int, attack: Attack) -> list[int]:
    """Return the processes of a session that do not end by themselves in time."""
    deadline = time.monotonic() + LIMIT_S
    spared = {session} if attack.is_launched and attack.victim == 0 else set()
    while (left := _alive(session) - spared) and time.monotonic() < deadline:
        time.sleep(0.1)
    return sorted(left)


def _alive(session: int) -> set[int]:
    """Return the processes of a session, but for those that ended and wait to be collected."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.add(int(path.parent.name))
    return found


def _judge(attack: Attack, endings: list[str]) -> str:
    """Say what is wrong with how ranks ended."""
    if attack.is_launched and attack.victim == 0 and attack.fault in ("kill", "stop"):
        return ""  # nobody is left to say it; that the others end is seen by their processes
    if len(endings) < (1 if attack.is_launched else attack.config.world_size):
        return f"ends with {endings}"
    if attack.is_launched:
        survivors = endings
    else:
        survivors = [text for rank, text in enumerate(endings) if rank != attack.victim]
    if attack.fault in HARMLESS:
        wrong = [text for text in endings if text]
        return f"a harmless fault ends with {wrong[0]}" if wrong else ""
    is_even = attack.config.world_size == 2 and attack.fault in DIFFERS  # either is the odd one
    culprit = r"[01]" if is_even else str(attack.victim)
    if "planted" in "".join(survivors) and attack.victim == 0:
        return ""  # this process raised it
    named = rf"rank {culprit}\b(?! of)(: | and )|rank {culprit} of \d: |\({culprit},\)"
    wrong = [text for text in survivors if not re.search(named, text)]
    if wrong and not _may_differ(attack):
        return f"ends with {wrong[0] or 'nothing said'!r}"
    return ""


def _may_differ(attack: Attack) -> bool:
    """Say whether the others may end well: a rank that goes after the last call, or whose tokens
    are its own.
    """
    if attack.call == CALLS and not attack.is_launched:
        return True
    is_apart = attack.config.dp > 1 or (attack.config.sp and attack.call < CALLS // 2)
    return attack.fault in ("tokens", "mask") and is_apart


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
