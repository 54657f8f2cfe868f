"""In which form each step multiplies rows with expert matrices on a CPU.

The forms give the same numbers up to rounding; which is fastest hangs on the machine, the sizes,
the dtype and the number of tokens.

| form | one expert product is | takes the matrices |
| --- | --- | --- |
| packed | oneDNN's product with a matrix in its own layout | packed |
| padded | the same, of four rows or more | packed |
| plain | rows times matrix, expert by expert | turned |
| turned | matrix times rows, expert by expert | turned |
| grouped | torch's grouped_mm over all experts at once | turned |
| batched | a batched product of one row each, with gathered matrices | turned |
| straight | rows times matrix, expert by expert | straight |
| parallel_X | as form X, experts side by side, each on threads of its own | as form X |

All matrices have the shape [in, out]. Straight ones lie in memory so, turned ones as [out, in];
which of the two a matrix library reads faster hangs on machine and dtype (measured).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from neuron_moe.weights.packed import PackedMatrices
from neuron_moe.weights.stamps import Stamp

PARALLEL = "parallel_"
PACKED_FORMS = ("packed", "padded", f"{PARALLEL}packed")
TURNED_FORMS = (
    "plain",
    "turned",
    "grouped",
    "batched",
    f"{PARALLEL}plain",
    f"{PARALLEL}turned",
    f"{PARALLEL}grouped",
)
STRAIGHT_FORMS = ("straight", f"{PARALLEL}straight")
FORMS = PACKED_FORMS + TURNED_FORMS + STRAIGHT_FORMS
MEASURED = "measured"
BUCKETS = (1, 4, 16, 128, 512)
"""Most tokens of a step for which a form is chosen together; the last one holds beyond, too."""


def bucket_of(tokens: int) -> int:
    """Return the bucket of a step of `tokens` tokens."""
    return next((bucket for bucket in BUCKETS if tokens <= bucket), BUCKETS[-1])


@dataclass(frozen=True, eq=False)
class ProductForms:
    """The form of each step, by its number of tokens.

    Attributes:
        by_bucket: one of FORMS for each of BUCKETS.
        reasons: why, one sentence for each of BUCKETS.
        packed: a second copy of the matrices, where some steps take them packed and some not.
        made_from: the weights of that copy, by which one sees whether they changed since.
    """

    by_bucket: Mapping[int, str]
    reasons: Mapping[int, str]
    packed: tuple[PackedMatrices, PackedMatrices] | None = None
    made_from: Stamp | None = field(default=None, repr=False)

    @classmethod
    def fixed(cls, form: str) -> "ProductForms":
        """Return one form for every step."""
        return cls(dict.fromkeys(BUCKETS, form), dict.fromkeys(BUCKETS, "fixed by an option"))

    @property
    def wants_packed(self) -> bool:
        """Whether some step takes packed matrices."""
        return any(form in PACKED_FORMS for form in self.by_bucket.values())

    @property
    def wants_plain(self) -> bool:
        """Whether some step takes matrices that are not packed."""
        return any(form not in PACKED_FORMS for form in self.by_bucket.values())

    @property
    def wants_turned(self) -> bool:
        """Whether some step takes turned matrices."""
        return any(form in TURNED_FORMS for form in self.by_bucket.values())

    def of(self, tokens: int) -> str:
        """Return the form of a step."""
        return self.by_bucket[bucket_of(tokens)]

    def why(self, tokens: int) -> str:
        """Return why a step takes its form."""
        return self.reasons[bucket_of(tokens)]

    def run(self, experts: slice) -> "ProductForms":
        """Return the same for a run of the experts."""
        if self.packed is None:
            return self
        first, down = (matrices.run(experts) for matrices in self.packed)
        return replace(self, packed=(first, down))
