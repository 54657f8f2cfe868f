"""What a case is, what a run of it needs, and how an output is judged."""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class Skipped(Exception):
    """The case cannot be run here; the text says why."""


# Other spellings of a parameter that case files use.
ALIASES = {
    "lnc": ("lnc_degree", "vnc_degree", "vnc"),
    "tokens": ("T",),
    "hidden": ("H", "hidden_dim", "hidden_size"),
    "intermediate": ("I",),
    "experts": ("expert", "E"),
    "top_k": ("k", "K"),
    "batch": ("bs", "batch_size"),
    "seqlen": ("seq_len", "S"),
    "act_fn": ("act_fn_type", "activation_fn", "hidden_act_fn"),
    "affinity_scaling_mode": ("scale_mode", "expert_affinities_scaling_mode"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of a case file."""

    id: str
    kernel: str
    variant: str
    platform: str
    params: dict[str, Any]
    rtol: float
    atol: float

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> "Case":
        """Read one entry of the `cases` list; only id, kernel and params must be there."""
        missing = [key for key in ("id", "kernel", "params") if key not in entry]
        if missing:
            raise ValueError(
                f"case {entry.get('id', entry)!r}: lacks {', '.join(missing)}. Add the keys."
            )
        return cls(
            id=str(entry["id"]),
            kernel=str(entry["kernel"]),
            variant=str(entry.get("variant", "")),
            platform=str(entry.get("platform", "trn2")),
            params=dict(entry["params"]),
            rtol=float(entry.get("rtol", 2e-2)),
            atol=float(entry.get("atol", 1e-5)),
        )

    def get(self, name: str, default: Any = None) -> Any:
        """Return a parameter, or the default where the case does not state it."""
        for spelling in (name, *ALIASES.get(name, ())):
            if spelling in self.params:
                return self.params[spelling]
        return default

    def need(self, name: str) -> Any:
        """Return a parameter; skip the case if it is not stated."""
        value = self.get(name)
        if value is None:
            raise Skipped(f"parameter {name!r} is missing from the case")
        return value

    def cores(self, default: int = 2) -> int:
        """Return the physical cores of the launch."""
        return int(self.get("lnc") or default)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one case may cost; tokens are reduced until it fits.

    Attributes:
        macs: multiply-accumulates of the kernel's matmuls.
        input_bytes: bytes of all input arrays.
    """

    macs: float = 2.5e10
    input_bytes: float = 3.0e9

    def tokens(
        self,
        wanted: int,
        macs: Callable[[int], float],
        step: int = 1,
        least: int = 1,
        input_bytes: Callable[[int], float] = lambda tokens: 0.0,
    ) -> int:
        """Halve a token count until work and inputs fit; the result is a multiple of `step`, and at
        least `least`.
        """
        tokens = wanted
        while tokens > least and (
            macs(tokens) > self.macs or input_bytes(tokens) > self.input_bytes
        ):
            smaller = max(least, tokens // 2 // step * step)
            if smaller <= 0 or smaller == tokens:
                break
            tokens = smaller
        return tokens


@dataclasses.dataclass(slots=True, kw_only=True)
class Job:
    """A kernel, its inputs and its reference.

    Attributes:
        kernel: the vendor's kernel, or a function of ours that calls it.
        cores: physical cores of the launch (1 or 2).
        inputs: arguments by name; arrays are NumPy.
        reference: returns the expected outputs by name.
        outputs: names the kernel's results in order, by default the reference's order.
        select: per output, what part is compared (padding rows are left out).
        split: turns the kernel's outputs by name into the compared ones, None if they are the same.
        note: what differs from the case as listed, "" if nothing.
        refusal: why the kernel must refuse this case, "" if it must run.
        mx_headroom: the simulator's option of that name.
    """

    kernel: Any
    cores: int
    inputs: dict[str, Any]
    reference: Callable[[], dict[str, np.ndarray]]
    outputs: Sequence[str] | None = None
    select: dict[str, Callable[[np.ndarray], np.ndarray]] = dataclasses.field(default_factory=dict)
    split: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None
    note: str = ""
    refusal: str = ""
    mx_headroom: int = 1


def seed_of(case: Case) -> int:
    """Return the seed of a case: the same for the same parameters, whatever the identifier.

    A parameter `seed` is the seed itself, so that another way to compute has the same inputs.
    """
    if "seed" in case.params:
        return int(case.params["seed"])
    return zlib.crc32(
        repr((case.kernel, case.variant, sorted(case.params.items(), key=str))).encode()
    )


def scaled_note(name: str, wanted: int, used: int) -> str:
    """Say that a size was reduced."""
    return "" if wanted == used else f"{name} {wanted} -> {used} to fit"


def difference(actual: np.ndarray, expected: np.ndarray, rtol: float, atol: float) -> str:
    """Return why two arrays disagree, or "" if every element is within atol + rtol * max|expected|.

    The maximum is over all finite expected elements; finiteness must match element by element.
    """
    if actual.shape != expected.shape:
        return f"shape {actual.shape}, expected {expected.shape}"
    if actual.size == 0:
        return ""
    if rtol == 0.0 and atol == 0.0 and expected.dtype.kind in "iub":
        wrong = np.count_nonzero(actual.astype(np.int64) != expected.astype(np.int64))
        return f"{wrong} of {actual.size} integers differ" if wrong else ""
    got = actual.astype(np.float32)
    want = expected.astype(np.float32)
    finite = np.isfinite(want)
    mismatched = np.count_nonzero(np.isfinite(got) != finite)
    if mismatched:
        return f"{mismatched} of {got.size} elements finite on one side only"
    if not finite.any():
        return ""
    scale = float(np.abs(want[finite]).max())
    error = np.abs(got[finite] - want[finite])
    bound = atol + rtol * scale
    worst = float(error.max())
    if worst <= bound:
        return ""
    count = int(np.count_nonzero(error > bound))
    share = worst / max(scale, 1e-30)
    return (
        f"{count} of {got.size} elements off, worst {worst:.3g} = {share:.3g} of the maximum, "
        f"allowed {bound:.3g}"
    )
