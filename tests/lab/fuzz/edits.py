"""Random sequences of what people do to the weights of a layer, beside a layer that stays plain.

After each step outputs agree, and so do gradients where both have them and the state dict. A step
that cannot be honoured raises, and then leaves the layer as it was; nothing is lost in silence.
"""

import copy
import pickle
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from neuron_moe import ExpertMLPsV2, MoE, RoutedExpertsMLPOpsConfig, RouterTopK
from neuron_moe.weights.product_forms import FORMS

E, K, H, I = 6, 2, 64, 64  # noqa: E741
DTYPES = {"torch": torch.float32, "nki": torch.bfloat16}
TOLERANCE = {"torch": 1e-4, "nki": 2e-2}
STEPS = 8


class Pair(NamedTuple):
    """The layer that is prepared in all ways, and its plain twin."""

    layer: MoE
    twin: MoE
    rng: random.Random


def _matrices(moe: MoE) -> list[nn.Module]:
    op = moe.expert_mlps.mlp_op
    return [op.first, op.down_proj]


def _drawn(pair: Pair, like: Tensor) -> Tensor:
    """Return numbers that 8 bits hold, so that no form rounds them."""
    generator = torch.Generator().manual_seed(pair.rng.randrange(1 << 30))
    return _short(torch.randn(like.shape, generator=generator) / 8).to(like.dtype)


def _short(values: Tensor) -> Tensor:
    return values.to(torch.float8_e5m2).float()


def _pack(pair: Pair) -> None:
    pair.layer.expert_mlps.pack_weights()


def _lay_out(pair: Pair) -> None:
    pair.layer.expert_mlps.pack_weights(for_decode=True)


def _settle(pair: Pair) -> None:
    pair.layer.expert_mlps.settle_forms(pair.rng.choice([f for f in FORMS if f != "compiled"]))


def _unpack(pair: Pair) -> None:
    pair.layer.expert_mlps.unpack_weights()


def _scale_in_place(pair: Pair) -> None:
    number = pair.rng.randrange(2)
    for moe in (pair.layer, pair.twin):  # the one that may refuse comes first
        with torch.no_grad():
            _matrices(moe)[number].weight.mul_(0.5)


def _fill(pair: Pair) -> None:
    for moe in (pair.layer, pair.twin):
        with torch.no_grad():
            _matrices(moe)[1].weight.fill_(0.125)


def _copy_data(pair: Pair) -> None:
    number = pair.rng.randrange(2)
    values = _drawn(pair, _matrices(pair.twin)[number].weight)
    for moe in (pair.layer, pair.twin):
        _matrices(moe)[number].weight.data.copy_(values)
        moe.weights_changed()


def _assign_data(pair: Pair) -> None:
    new = [_drawn(pair, linear.weight) for linear in _matrices(pair.twin)]
    for moe in (pair.layer, pair.twin):
        for linear, values in zip(_matrices(moe), new, strict=True):
            linear.weight.data = values.clone()


def _assign_parameter(pair: Pair) -> None:
    number = pair.rng.randrange(2)
    values = _drawn(pair, _matrices(pair.twin)[number].weight)
    for moe in (pair.layer, pair.twin):
        _matrices(moe)[number].weight = nn.Parameter(values.clone())


def _load(pair: Pair) -> None:
    state = {name: _drawn(pair, value) for name, value in pair.twin.state_dict().items()}
    assign = pair.rng.random() < 0.5
    for moe in (pair.layer, pair.twin):
        moe.load_state_dict({k: v.clone() for k, v in state.items()}, assign=assign)


def _load_own(pair: Pair) -> None:
    pair.layer.load_state_dict(pair.layer.state_dict())


def _train(pair: Pair) -> None:
    """Take an optimizer's step, where the layer lets one; it is the same up to rounding."""
    for moe in (pair.layer, pair.twin):
        optimizer = torch.optim.SGD(moe.parameters(), lr=1e-3)
        moe(_hidden(pair, 3, moe))[0].float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, other in zip(pair.layer.parameters(), pair.twin.parameters(), strict=True):
        assert _near(one, other, 1e-5), "an optimizer's step differs"
    pair.twin.load_state_dict(pair.layer.state_dict())


MAKES_ANOTHER: dict[str, Callable[[MoE], MoE]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda moe: pickle.loads(pickle.dumps(moe)),
}
ACTIONS: dict[str, Callable[[Pair], None]] = {
    "pack": _pack,
    "settle": _settle,
    "unpack": _unpack,
    "scale": _scale_in_place,
    "fill": _fill,
    "copy_data": _copy_data,
    "assign_data": _assign_data,
    "assign_parameter": _assign_parameter,
    "load": _load,
    "load_own": _load_own,
    "train": _train,
}
OF_BACKEND = {
    "torch": set(ACTIONS),
    "nki": set(ACTIONS) - {"settle", "train"},
}


def _hidden(pair: Pair, seed: int, moe: MoE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, 5, H, generator=generator)
    return hidden.to(_matrices(moe)[0].weight.dtype)


def _build(backend: str, seed: int) -> MoE:
    torch.manual_seed(seed)
    config = RoutedExpertsMLPOpsConfig(E, H, I, K, "silu", True)
    dtype = DTYPES[backend]
    moe = MoE(RouterTopK(E, K, H), ExpertMLPsV2(config, backend=backend, dtype=dtype)).eval()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(_short(parameter))
    return moe


def _difference(pair: Pair, tolerance: float, *, gradients: bool) -> str:
    """Say where outputs, gradients of the input and state dicts differ; '' where nowhere."""
    found = []
    for moe in (pair.layer, pair.twin):
        hidden = _hidden(pair, 7, moe)
        if not gradients:
            with torch.no_grad():
                found.append((moe(hidden)[0], None))
            continue
        hidden.requires_grad_()
        moe.requires_grad_(False)
        try:
            output = moe(hidden)[0]
            (gradient,) = torch.autograd.grad(output.float().pow(2).sum(), hidden)
        finally:
            moe.requires_grad_(True)
        found.append((output.detach(), gradient))
    for name, one, other in zip(("output", "gradient"), *found, strict=True):
        if one is not None and not _near(one, other, tolerance):
            return f"{name}s differ"
    states = (pair.layer.state_dict(), pair.twin.state_dict())
    wrong = [name for name in states[1] if not torch.equal(states[0][name], states[1][name])]
    return f"state dicts differ in {wrong}" if wrong else ""


def _near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    return bool((one.float() - other.float()).abs().max() <= tolerance * other.float().abs().max())


def attack_edits(seed: int, backend: str) -> str:
    """Draw a sequence; return what is wrong, '' if nothing."""
    rng = random.Random(seed)
    layer = _build(backend, seed)
    pair = Pair(layer, copy.deepcopy(layer), rng)
    if backend != "torch":
        twin = _build("torch", seed).to(DTYPES[backend])
        twin.load_state_dict(layer.state_dict())
        pair = Pair(layer, twin, rng)
    done = []
    for _ in range(STEPS):
        name = rng.choice(sorted(OF_BACKEND[backend] | MAKES_ANOTHER.keys()))
        done.append(name)
        if name in MAKES_ANOTHER:
            pair = pair._replace(layer=MAKES_ANOTHER[name](pair.layer))
        else:
            before = {key: value.clone() for key, value in pair.twin.state_dict().items()}
            try:
                ACTIONS[name](pair)
            except (RuntimeError, ValueError) as error:
                done[-1] += f" ({type(error).__name__})"
                pair.layer.zero_grad()
                if name == "fill":  # seen at the next use: only other numbers end that
                    pair.layer.load_state_dict(before)
                pair.twin.load_state_dict(before)
        try:
            wrong = _difference(pair, TOLERANCE[backend], gradients=backend == "torch")
        except (RuntimeError, ValueError) as error:
            if name != "fill" or "written to" not in str(error):
                raise AssertionError(f"seed {seed}: {done}") from error
            done[-1] += " (seen)"
            for moe in (pair.layer, pair.twin):
                for linear in _matrices(moe):
                    values = torch.full_like(linear.weight, 0.25)
                    linear.weight = nn.Parameter(values)
            continue
        if wrong:
            return f"seed {seed}: after {', '.join(done)}: {wrong}"
    return ""
