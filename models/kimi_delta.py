"""Kimi Delta Attention as Kimi-Linear and Kimi-K3 have it: gates are made of small latents.

Letters: those of `delta_net`.
Source: transformers, `models/kimi_linear/modular_kimi_linear.py`; arXiv 2510.26692.
"""

import torch
from torch import Tensor, nn

from neuron_moe.checkpoint import Rule, concat_mixed
from neuron_moe.models.channel_delta import MIXED, ChannelDeltaAttention
from neuron_moe.models.delta_net import DeltaNetSizes


class KimiDeltaAttention(ChannelDeltaAttention):
    """The delta rule by channels, with gates made of small latents.

    Attributes:
        whole: projections to latents that heads share.
    """

    whole: tuple[str, ...] = ("f_a_proj", "g_a_proj")

    def __init__(self, sizes: DeltaNetSizes, eps: float, dtype: torch.dtype) -> None:
        super().__init__(sizes, eps, dtype, dtype, (1, 1, sizes.num_key_heads, 1))
        size, latent = sizes.hidden_size, sizes.key_size
        width = sizes.num_key_heads * latent
        self.f_a_proj, self.g_a_proj = (
            nn.Linear(size, latent, bias=False, dtype=dtype) for _ in range(2)
        )
        self.f_b_proj, self.g_b_proj = (
            nn.Linear(latent, width, bias=False, dtype=dtype) for _ in range(2)
        )

    def steps(self, hidden_USH: Tensor) -> Tensor:
        """Return what decays are made of, [U, S, N * D]."""
        made: Tensor = self.f_b_proj(self.f_a_proj(hidden_USH))
        return made

    def gates(self, hidden_USH: Tensor) -> Tensor:
        """Return the logits of the gates of what is answered, [U, S, N * V]."""
        made: Tensor = self.g_b_proj(self.g_a_proj(hidden_USH))
        return made


def delta_rules(theirs: str, ours: str) -> list[Rule]:
    """Return the rules of a layer that keeps a memory."""
    kept = [f"{gate}_{half}_proj.weight" for gate in "fg" for half in "ab"]
    pairs = {name: name for name in (*kept, "b_proj.weight", "dt_bias")}
    pairs |= {"o_proj.weight": "out_proj.weight", "o_norm.weight": "norm_weight"}
    pairs |= {f"{name[0]}_proj.weight": f"{name}_proj.weight" for name in MIXED}
    taps = tuple(f"{theirs}{name[0]}_conv1d.weight" for name in MIXED)
    return [
        *(Rule(theirs + key, ours + name) for key, name in pairs.items()),
        Rule(taps, ours + "conv_weight", concat_mixed),
        Rule(theirs + "A_log", ours + "A_log", is_exact=True),
    ]
