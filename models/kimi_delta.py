"""Kimi Delta Attention: a memory of the sequence in which each number of a key fades by itself.

Letters: those of `delta_net`.
Source: transformers, `models/kimi_linear/modular_kimi_linear.py`; arXiv 2510.26692.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neuron_moe.checkpoint import Rule
from neuron_moe.models.attention import StateView
from neuron_moe.models.decoder import Tokens
from neuron_moe.models.delta_net import DeltaLayer, DeltaNetSizes, Inputs
from neuron_moe.models.layers import unit_rms


class KimiDeltaAttention(DeltaLayer):
    """Projections, latents of two gates and a norm around an exchangeable recurrence.

    Attributes:
        whole: projections to latents that heads share.
    """

    whole = ("f_a_proj", "g_a_proj")

    def __init__(self, sizes: DeltaNetSizes, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes, self.eps = sizes, eps
        size, heads, latent = sizes.hidden_size, sizes.num_key_heads, sizes.key_size
        width = heads * latent

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype)

        self.query_proj, self.key_proj, self.value_proj = (linear(size, width) for _ in range(3))
        self.f_a_proj, self.g_a_proj = (linear(size, latent) for _ in range(2))
        self.f_b_proj, self.g_b_proj = (linear(latent, width) for _ in range(2))
        self.b_proj, self.out_proj = linear(size, heads), linear(width, size)
        taps = torch.zeros(3, width, 1, sizes.conv_width, dtype=dtype)
        self.query_conv, self.key_conv, self.value_conv = map(nn.Parameter, taps)
        self.dt_bias = nn.Parameter(torch.zeros(width, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.zeros(1, 1, heads, 1, dtype=torch.float32))
        self.norm_weight = nn.Parameter(torch.ones(latent, dtype=dtype))

    @property
    def conv_weight(self) -> Tensor:  # type: ignore[override]
        """The taps of queries, keys and values, [C, 1, W]."""
        return torch.cat([self.query_conv, self.key_conv, self.value_conv])

    def forward(self, hidden_USH: Tensor, tokens: Tokens, view: StateView | None) -> Tensor:
        """Return the attention output `[U, S, H]`; arguments as in `DecoderLayer`."""
        parts = (self.query_proj, self.key_proj, self.value_proj)
        mixed_USC = torch.cat([part(hidden_USH) for part in parts], dim=-1)
        step = self.f_b_proj(self.f_a_proj(hidden_USH)).float() + self.dt_bias
        heads = (*hidden_USH.shape[:2], -1, self.sizes.key_size)
        log_decay_USND = self.log_decay(step.view(heads))
        rate_USN = self.b_proj(hidden_USH).float().sigmoid()
        inputs = Inputs(mixed_USC, log_decay_USND, rate_USN, tokens.real_US)
        normed_USNV = unit_rms(self.core(self, inputs, view), self.eps) * self.norm_weight.float()
        gate_USNV = self.gate(hidden_USH).float().view(heads).sigmoid()
        out_USH: Tensor = self.out_proj((normed_USNV * gate_USNV).flatten(2).to(hidden_USH.dtype))
        return out_USH

    def log_decay(self, step_USND: Tensor) -> Tensor:
        """Return the logarithm of how much of each number of a key stays, [U, S, N, D]."""
        return -self.A_log.exp() * F.softplus(step_USND)

    def gate(self, hidden_USH: Tensor) -> Tensor:
        """Return what a sigmoid makes the gates of, [U, S, N * D]."""
        logits: Tensor = self.g_b_proj(self.g_a_proj(hidden_USH))
        return logits


def delta_rules(theirs: str, ours: str) -> list[Rule]:
    """Return the rules of a layer that keeps a memory."""
    kept = [f"{gate}_{half}_proj.weight" for gate in "fg" for half in "ab"]
    pairs = {name: name for name in (*kept, "b_proj.weight", "dt_bias")}
    pairs |= {"o_proj.weight": "out_proj.weight", "o_norm.weight": "norm_weight"}
    for name in ("query", "key", "value"):
        pairs |= {f"{name[0]}_proj.weight": f"{name}_proj.weight"}
        pairs |= {f"{name[0]}_conv1d.weight": f"{name}_conv"}
    rules = [Rule(theirs + key, ours + name) for key, name in pairs.items()]
    return [*rules, Rule(theirs + "A_log", ours + "A_log", is_exact=True)]
