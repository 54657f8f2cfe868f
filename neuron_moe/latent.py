"""Routed experts in a narrower space than the layer, and experts that give the token itself.

    z = down x;  y = up norm(sum of experts of z)

Axes: H hidden, L latent.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neuron_moe.activations import at_least_float32
from neuron_moe.dispatch.tokens import Beside
from neuron_moe.parallel.collectives import Collectives, SingleRank
from neuron_moe.spec import LatentSpec
from neuron_moe.weights.checks import refuse_wrong_weights


class Latent(nn.Module):
    """Both projections and the norm between the experts' sum and the second; whole on every rank.

    State dict: `into.weight` [L, H], `out_of.weight` [H, L], and `norm_weight` [L] with a norm.

    Args:
        spec: sizes and epsilon.
        dtype: of the weights.
        device: where they live.
    """

    norm_weight: Tensor | None

    def __init__(
        self,
        spec: LatentSpec,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        sizes = spec.hidden_size, spec.latent_size
        self.into = nn.Linear(*sizes, bias=False, dtype=dtype, device=device)
        self.out_of = nn.Linear(*sizes[::-1], bias=False, dtype=dtype, device=device)
        ones_L = torch.ones(spec.latent_size, dtype=dtype, device=device)
        has_norm = spec.norm_eps is not None
        self.register_parameter("norm_weight", nn.Parameter(ones_L) if has_norm else None)
        refuse_wrong_weights(self)

    def enter(self, x: Tensor) -> Tensor:
        """Return [.., L] of [.., H]."""
        latent: Tensor = self.into(x)
        return latent

    def leave(self, summed: Tensor) -> Tensor:
        """Return [.., H] of the experts' complete sum, over all ranks, [.., L]."""
        if self.norm_weight is not None:
            weight_L = at_least_float32(self.norm_weight)
            wide = F.rms_norm(
                at_least_float32(summed), weight_L.shape, weight_L, self.spec.norm_eps
            )
            summed = wide.to(summed.dtype)
        hidden: Tensor = self.out_of(summed)
        return hidden


class BesideLatents:
    """What is added to the experts' sum, beside the latents of one sum over ranks: [.., L + H].

    Args:
        beside: of H, as `Dispatch.leave` takes it.
        width: L.
    """

    def __init__(self, beside: Beside, width: int) -> None:
        self.group, self.whole_on_each_rank = beside.group, beside.whole_on_each_rank
        self._beside, self._width = beside, width

    def __call__(self, x: Tensor, *, part: tuple[int, int] = (0, 1)) -> Tensor:
        """Return zeros, then what is added."""
        return F.pad(self._beside(x, part=part), (self._width, 0))


class Identities:
    """What identity experts give: a token times the sum of their affinities.

    Args:
        factor_T1: [t, 1] of the own tokens.
    """

    group: Collectives = SingleRank()
    whole_on_each_rank = True

    def __init__(self, factor_T1: Tensor) -> None:
        self._factor_T1 = factor_T1

    def __call__(self, x: Tensor, *, part: tuple[int, int] = (0, 1)) -> Tensor:
        """Return the own tokens' sum, of which the first of several parts is the whole."""
        return (x * (self._factor_T1 if part[0] == 0 else 0.0)).to(x.dtype)
