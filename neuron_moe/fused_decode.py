"""Switches of decode in one launch, as NxD has them."""

from dataclasses import dataclass, fields
from typing import Any

import torch

from neuron_moe.errors import attributes_of, names_its_keys, refuse
from neuron_moe.spec import as_dtype

_WITHOUT_EFFECT = {
    "router_topk_kernel_enabled": "routing is a kernel",
    "expert_mlp_kernel_enabled": "experts are a kernel",
    "shared_mlp_kernel_enabled": "shared experts are part of the fused launch",
    "norm_topk_prob": "affinities are normalised where the layer is configured",
    "is_mxfp4_compute": "no MXFP4 is multiplied",
    "router_mm_dtype": "routing is computed in float32",
}


@names_its_keys
@dataclass(frozen=True)
class MoEFusedTKGConfig:
    """NxD's switches of the fused decode kernel; None leaves the choice to `choose_path`."""

    quantized: bool
    moe_fused_kernel_enabled: bool | None = None
    router_topk_kernel_enabled: bool | None = None
    expert_mlp_kernel_enabled: bool | None = None
    shared_mlp_kernel_enabled: bool | None = None
    norm_topk_prob: bool = False
    is_mxfp4_compute: bool | None = None
    router_mm_dtype: torch.dtype | str = torch.float32

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "router_mm_dtype", as_dtype("router_mm_dtype", self.router_mm_dtype)
        )

    @classmethod
    def of(cls, config: Any) -> "MoEFusedTKGConfig":
        """Return ours for ours or for NxD's."""
        if isinstance(config, cls):
            return config
        return cls(**attributes_of("tkg_config", cls, config))

    def check(self, *, has_shared: bool, normalizes: bool) -> None:
        """Raise ValueError for switches that backend='nki' cannot follow.

        Args:
            has_shared: the layer has shared experts.
            normalizes: router or experts divide the K affinities by their sum.
        """
        refuse(
            (
                (
                    self.is_mxfp4_compute,
                    "is_mxfp4_compute=True: Trainium 2 multiplies no MXFP4. Leave it None:"
                    " pack_weights() keeps MXFP4 weights in 8 bits without loss.",
                ),
                (
                    self.router_topk_kernel_enabled is False
                    or self.expert_mlp_kernel_enabled is False,
                    "router_topk_kernel_enabled=False or expert_mlp_kernel_enabled=False with"
                    " backend='nki', which is these kernels. Leave them None, or use"
                    " backend='torch'.",
                ),
                (
                    self.shared_mlp_kernel_enabled and not has_shared,
                    "shared_mlp_kernel_enabled=True: the layer has no shared experts. Leave it"
                    " None.",
                ),
                (
                    self.shared_mlp_kernel_enabled and self.moe_fused_kernel_enabled is False,
                    "shared_mlp_kernel_enabled=True, moe_fused_kernel_enabled=False: only the fused"
                    " kernel computes shared experts. Leave one of them None.",
                ),
                (
                    self.norm_topk_prob and not normalizes,
                    "norm_topk_prob=True: neither the router renormalises nor the experts"
                    " (normalize_top_k_affinities). Set it where the layer is configured.",
                ),
            )
        )

    def remarks(self, backend: str) -> tuple[str, ...]:
        """Return a sentence for each switch that was set and changes nothing."""
        why = _WITHOUT_EFFECT
        if backend != "nki":
            names = [field.name for field in fields(self)]
            why = dict.fromkeys(names, f"switches kernels, backend={backend!r} has none")
        defaults = MoEFusedTKGConfig(quantized=False)
        return tuple(
            f"{name}={getattr(self, name)}: {reason}"
            for name, reason in why.items()
            if getattr(self, name) != getattr(defaults, name)
        )
