"""Rotary position embedding: plain, linear, dynamic, YaRN and Llama 3, as Hugging Face means it.

YaRN: B. Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models",
arXiv 2309.00071, sections 3.2 (frequencies blended by wavelength) and 3.4 (attention factor).
Llama 3: meta-llama/llama-models, `models/llama3/model.py`, the same idea with another ramp.
Ramps, truncation and defaults are those of transformers' `modeling_rope_utils.py`; the tests
compare with it bit for bit.

Letters: U sequences, S positions, N heads, D head size, d frequencies, D / 2 or fewer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuron_moe.models.hf_config import ConfigReader

# The base grows with a sequence that is longer than the context.
DYNAMIC = "dynamic"
KINDS = ("default", "linear", DYNAMIC, "yarn", "llama3")
# Of Gemma 4 alone, whose reader requests it: what is rotated is in both halves of a head.
PROPORTIONAL = "proportional"
# Of Phi-3.5-MoE alone, whose reader requests it, up to the original context.
LONGROPE = "longrope"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Facts of a rotary embedding.

    Attributes:
        theta: base of the geometric series of frequencies.
        kind: of KINDS, or PROPORTIONAL; this and "linear" read `factor`, "yarn" the fields below up
            to `mscale_all_dim`, DYNAMIC the first two, "llama3" these and the factors of frequency.
        factor: by how much the context grew over `original_max_position_embeddings`.
        beta_fast: rotations over the original context above which a frequency is kept.
        beta_slow: rotations below which a frequency is divided by `factor`.
        truncate: round the ends of the blend outward to whole dimensions.
        attention_factor: scale of cos and sin; None derives it from `factor` and the mscales.
        mscale: with `mscale_all_dim`, another way to state the attention factor (DeepSeek).
        low_freq_factor: rotations over the original context below which a frequency is divided.
        high_freq_factor: rotations above which it is kept.
        is_interleaved: pairs are neighbours, (2i, 2i + 1), not (i, i + D / 2).
        divisors: one for each frequency, where the kind is LONGROPE.
        part: of each head that is rotated, from its front, or of each half of it where the kind is
            PROPORTIONAL; the rest is left as it is.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    is_interleaved: bool = False
    part: float = 1.0
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in (PROPORTIONAL, LONGROPE):
            _check_kind(self.kind)
        if not 1 < self.theta < math.inf:
            raise ValueError(f"rope_theta={self.theta}: must be larger than 1. Correct it.")
        has_context = (
            self.kind in ("default", "linear", PROPORTIONAL, LONGROPE)
            or self.original_max_position_embeddings > 0
        )
        if not 1 <= self.factor < math.inf or not has_context:
            raise ValueError(
                f"factor={self.factor}, original_max_position_embeddings="
                f"{self.original_max_position_embeddings}: {self.kind} needs both to be at least 1."
                " Correct the rope section of config.json."
            )
        if not 0 < self.low_freq_factor <= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor}, high_freq_factor="
                f"{self.high_freq_factor}: must be positive, the first not above the second."
                " Correct the rope section of config.json."
            )
        if not 0 < self.part <= 1:
            raise ValueError(
                f"partial_rotary_factor={self.part}: must be above 0 and not above 1. Correct it."
            )

        for name in ("beta_fast", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(
                    f"{name}={value}: must be positive. Correct the rope section of config.json."
                )
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(
                    f"{name}={value}: must not be negative. Correct the rope section of"
                    " config.json."
                )

    @classmethod
    def from_hf(
        cls,
        reader: ConfigReader,
        *,
        default_theta: float | None = None,
        is_interleaved: bool = False,
        default_part: float | None = None,
        default_section: Mapping[str, Any] | None = None,
        ignored: Sequence[str] = (),
    ) -> "RopeConfig":
        """Read `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (4).

        Args:
            reader: the whole config.json; the three keys above are read from it.
            default_theta: what the architecture takes where neither spelling names a base.
            is_interleaved: how the architecture pairs.
            default_part: of each head that the architecture rotates where `partial_rotary_factor`
                does not say; None is all of it, and refuses that key.
            default_section: what the architecture takes where neither section is there.
            ignored: keys of the section that change nothing for the architecture.

        Raises:
            ValueError: two sections that differ, no base, an unknown key or rope type.
        """
        scaling, parameters = (
            reader.get_section(key) for key in ("rope_scaling", "rope_parameters")
        )
        theta = reader.get_optional("rope_theta", float)
        if scaling and parameters and scaling != parameters:
            raise ValueError(
                f"rope_scaling={scaling!r}, rope_parameters={parameters!r}: the two spellings"
                " disagree. Keep one of them."
            )
        section: Mapping[str, Any] = parameters or scaling or default_section or {}
        fields = ConfigReader(section, "rope_parameters" if parameters else "rope_scaling")
        kind = fields.get_optional("rope_type", str) or fields.get("type", str, "default")
        fields.ignore("type", *ignored)  # transformers 4.55 wrote both names
        theta = _first(fields.get_optional("rope_theta", float), theta, default_theta)
        if theta is None:
            raise ValueError(
                "rope_theta is missing: the base of the rotary embedding is a fact of the"
                " checkpoint. Add it to config.json."
            )
        more = _read_fields(kind, fields, reader.get_optional("max_position_embeddings", int))
        if default_part is not None:
            key = "partial_rotary_factor"
            given = fields.get_optional(key, float), reader.get_optional(key, float)
            more["part"] = next((part for part in given if part is not None), default_part)
        config = cls(theta=theta, kind=kind, is_interleaved=is_interleaved, **more)
        fields.finish()
        return config


def _first(*values: float | None) -> float | None:
    """Return the first value that is given."""
    return next((value for value in values if value is not None), None)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(
            f"rope_type={kind!r}: must be {' or '.join(map(repr, KINDS))}. No other scaling is"
            " implemented; add it to models/rope.py."
        )


def _read_fields(kind: str, fields: ConfigReader, context: int | None) -> dict[str, Any]:
    """Return the fields that a kind reads.

    Args:
        kind: of the section.
        fields: the section.
        context: max_position_embeddings, which transformers takes where the section names none.
    """
    _check_kind(kind)
    original = "original_max_position_embeddings"
    if kind == "default":
        return {}
    if kind == DYNAMIC:  # in transformers too the section does not say the context
        fields.ignore(original)
        return {"factor": fields.get("factor", float), original: context or 0}
    if kind == "linear":
        fields.ignore(original)
        return {"factor": fields.get("factor", float)}
    grown = None  # a null factor is what the context grew by
    if kind == "yarn" and fields.is_null("factor") and context is not None:
        grown = context / max(fields.get(original, int, context), 1)
    found: dict[str, Any] = {"factor": fields.get("factor", float, grown)}
    found[original] = fields.get(original, int, context)
    if kind == "llama3":
        names = "low_freq_factor", "high_freq_factor"
        return {**found, **{name: fields.get(name, float) for name in names}}
    return {
        **found,
        "beta_fast": fields.get("beta_fast", float, 32.0),
        "beta_slow": fields.get("beta_slow", float, 1.0),
        "truncate": fields.get("truncate", bool, True),
        "attention_factor": fields.get_optional("attention_factor", float),
        "mscale": fields.get_optional("mscale", float),
        "mscale_all_dim": fields.get_optional("mscale_all_dim", float),
    }


def rope_frequencies(
    config: RopeConfig, head_size: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, float]:
    """Return inverse frequencies `[D / 2]` float32 in radians, and the scale of cos and sin.

    Those of a DYNAMIC embedding are of sequences within the context.
    """
    exponent_d = torch.arange(0, head_size, 2, device=device).float() / head_size
    wavelength_d = config.theta**exponent_d
    if config.kind in ("default", DYNAMIC):
        return 1.0 / wavelength_d, 1.0
    if config.kind == "linear":
        return 1.0 / wavelength_d / config.factor, 1.0
    if config.kind == PROPORTIONAL:
        rotated = int(config.part * head_size // 2)
        is_rotated_d = torch.arange(head_size // 2, device=device) < rotated
        return is_rotated_d / wavelength_d / config.factor, 1.0
    if config.kind == LONGROPE:
        divisor_d = torch.tensor(config.divisors, device=device)
        return 1.0 / (divisor_d * wavelength_d), _attention_factor(config)
    if config.kind == "llama3":
        return _llama3_frequencies(config, 1.0 / wavelength_d), 1.0
    low, high = _blend_range(config, head_size)
    ramp_d = torch.arange(head_size // 2, dtype=torch.float32, device=device)
    kept_d = 1 - ((ramp_d - low) / (high - low)).clamp(0, 1)
    interpolated_d = 1.0 / (config.factor * wavelength_d)
    return interpolated_d * (1 - kept_d) + (1.0 / wavelength_d) * kept_d, _attention_factor(config)


def rope_tables(config: RopeConfig, head_size: int, positions_US: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin `[U, S, D / 2]` float32 of positions counted within each sequence.

    A DYNAMIC embedding rotates the new tokens of a sequence as its length now requires, and leaves
    the keys that are in the cache as they were, as transformers does for a sequence by itself.
    """
    frequencies, scale = rope_frequencies(config, head_size, positions_US.device)
    if config.kind == DYNAMIC:
        frequencies = _grown_frequencies(config, head_size, positions_US)
    angle_USd = positions_US[..., None].float() * frequencies
    return angle_USd.cos() * scale, angle_USd.sin() * scale


def apply_rope(
    x_USND: Tensor, cos_USd: Tensor, sin_USd: Tensor, *, is_interleaved: bool = False
) -> Tensor:
    """Rotate pairs of every head, in float32; return x's dtype.

    Args:
        x_USND: [U, S, N, D] queries or keys; the first 2d numbers of each head are rotated.
        cos_USd: [U, S, d] from `rope_tables`.
        sin_USd: [U, S, d].
        is_interleaved: pairs are (2i, 2i + 1), not (i, i + d).
    """
    rotated_size = 2 * cos_USd.shape[-1]
    wide = x_USND[..., :rotated_size].float()
    first, second = (wide[..., 0::2], wide[..., 1::2]) if is_interleaved else wide.chunk(2, dim=-1)
    cos, sin = cos_USd[:, :, None], sin_USd[:, :, None]
    halves = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack(halves, dim=-1).flatten(-2) if is_interleaved else torch.cat(halves, -1)
    rotated = rotated.to(x_USND.dtype)
    if rotated_size == x_USND.shape[-1]:
        return rotated
    return torch.cat((rotated, x_USND[..., rotated_size:]), dim=-1)


def _grown_frequencies(config: RopeConfig, head_size: int, positions_US: Tensor) -> Tensor:
    """Return inverse frequencies [U, 1, D / 2] of a base that grows with the sequence."""
    context, factor = config.original_max_position_embeddings, config.factor
    length_U1 = (positions_US.amax(dim=1, keepdim=True) + 1).clamp(min=context)
    growth_U1 = factor * length_U1 / context - (factor - 1)
    base_U11 = config.theta * growth_U1.unsqueeze(2) ** (head_size / (head_size - 2))
    return 1.0 / base_U11 ** (torch.arange(0, head_size, 2, device=base_U11.device) / head_size)


def _llama3_frequencies(config: RopeConfig, frequency_d: Tensor) -> Tensor:
    """Return frequencies kept where fast, divided where slow, and blended between."""
    context, low = config.original_max_position_embeddings, config.low_freq_factor
    wavelength_d = 2 * math.pi / frequency_d
    is_slow_d = wavelength_d > context / low
    scaled_d = torch.where(is_slow_d, frequency_d / config.factor, frequency_d)
    if config.high_freq_factor == low:  # a step, not a division by zero
        return scaled_d
    kept_d = (context / wavelength_d - low) / (config.high_freq_factor - low)
    blended_d = (1 - kept_d) * frequency_d / config.factor + kept_d * frequency_d
    is_fast_d = wavelength_d < context / config.high_freq_factor
    return torch.where(is_slow_d | is_fast_d, scaled_d, blended_d)


def _blend_range(config: RopeConfig, head_size: int) -> tuple[float, float]:
    """Return the dimensions between which frequencies go from kept to interpolated."""
    context, base = config.original_max_position_embeddings, math.log(config.theta)

    def dimension_of(rotations: float) -> float:
        return head_size * math.log(context / (rotations * 2 * math.pi)) / (2 * base)

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    return low, high if high != low else high + 0.001  # a step, not a division by zero


def yarn_growth(factor: float, mscale: float) -> float:
    """Return by how much YaRN lets logits or rotations grow with the context."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _attention_factor(config: RopeConfig) -> float:
    factor, wide = config.factor, config.mscale_all_dim
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and wide:
        return yarn_growth(factor, config.mscale) / yarn_growth(factor, wide)
    return yarn_growth(factor, 1.0)
