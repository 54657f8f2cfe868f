"""In which form each step multiplies rows with expert matrices on a CPU.

The forms give the same numbers up to rounding; which is fastest hangs on the machine, the sizes,
the dtype and the number of tokens.

| form | one expert product is | takes the matrices |
| --- | --- | --- |
| packed | oneDNN's product with a matrix in its own layout | packed |
| padded | the same, of four rows or more | packed |
| plain | rows times matrix, expert by expert | transposed |
| transposed | matrix times rows, expert by expert | transposed |
| grouped | torch's grouped_mm over all experts at once | transposed |
| batched | a batched product of one row each, with gathered matrices | transposed |
| compiled | a C++ function over all experts at once, where there is a compiler | transposed |
| straight | rows times matrix, expert by expert | straight |
| parallel_X | as form X, experts side by side, each on threads of its own | as form X |

All matrices have the shape [in, out]. Straight ones are in memory so, transposed ones as [out, in];
which of the two a matrix library reads faster hangs on machine and dtype (measured).

A server may register kernels of its own, forms besides; see `backends.custom_kernels`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from neuron_moe.weights.packed import PackedMatrices
from neuron_moe.weights.stamps import Stamp

PARALLEL = "parallel_"
COMPILED = "compiled"
AT_ONCE_FORMS = ("grouped", "batched", COMPILED)  # one call for all experts
PACKED_FORMS = ("packed", "padded", f"{PARALLEL}packed")
TRANSPOSED_FORMS = (
    "plain",
    "transposed",
    "grouped",
    "batched",
    COMPILED,
    f"{PARALLEL}plain",
    f"{PARALLEL}transposed",
    f"{PARALLEL}grouped",
)
STRAIGHT_FORMS = ("straight", f"{PARALLEL}straight")
FORMS = PACKED_FORMS + TRANSPOSED_FORMS + STRAIGHT_FORMS
MEASURED = "measured"
BUCKETS = (1, 4, 16, 32, 128, 512)
"""Most tokens of a step for which a form is chosen together; the last one holds beyond, too."""

Compute = Callable[[Tensor, Any], Tensor]
"""Returns [T, H] of hidden states [T, H] and a `LocalRouting` in which no choice is missing."""


def bucket_of(tokens: int) -> int:
    """Return the bucket of a step of `tokens` tokens."""
    return next((bucket for bucket in BUCKETS if tokens <= bucket), BUCKETS[-1])


@dataclass(frozen=True, eq=False)
class ProductForms:
    """The form of each step, by its number of tokens.

    Attributes:
        by_bucket: one of FORMS, or of a custom kernel, for each of BUCKETS.
        reasons: why, one sentence for each of BUCKETS.
        packed: a second copy of the matrices, where some steps take them packed and some not.
        compute: a custom kernel with its copy of the matrices, where some steps take it.
        made_from: the weights of these copies, by which one sees whether they changed since.
    """

    by_bucket: Mapping[int, str]
    reasons: Mapping[int, str]
    packed: tuple[PackedMatrices, PackedMatrices] | None = None
    compute: Compute | None = field(default=None, repr=False)
    made_from: Stamp | None = field(default=None, repr=False)

    @classmethod
    def fixed(cls, form: str) -> "ProductForms":
        """Return one form for every step."""
        return cls(dict.fromkeys(BUCKETS, form), dict.fromkeys(BUCKETS, "fixed by an option"))

    @classmethod
    def custom(cls, name: str, compute: Compute) -> "ProductForms":
        """Return a custom kernel for every step."""
        return replace(cls.fixed(name), compute=compute)

    @property
    def wants_packed(self) -> bool:
        """Whether some step takes packed matrices."""
        return any(form in PACKED_FORMS for form in self.by_bucket.values())

    @property
    def wants_plain(self) -> bool:
        """Whether some step takes matrices that are not packed."""
        return any(form in TRANSPOSED_FORMS + STRAIGHT_FORMS for form in self.by_bucket.values())

    @property
    def wants_transposed(self) -> bool:
        """Whether some step takes transposed matrices."""
        return any(form in TRANSPOSED_FORMS for form in self.by_bucket.values())

    def of(self, tokens: int) -> str:
        """Return the form of a step."""
        return self.by_bucket[bucket_of(tokens)]

    def why(self, tokens: int) -> str:
        """Return why a step takes its form."""
        return self.reasons[bucket_of(tokens)]

    def run(self, experts: slice) -> "ProductForms":
        """Return the same for a run of the experts, which a custom kernel does not compute."""
        if self.packed is None:
            return replace(self, compute=None)
        first, down = (matrices.run(experts) for matrices in self.packed)
        return replace(self, packed=(first, down), compute=None)
