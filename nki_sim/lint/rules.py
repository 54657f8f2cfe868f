"""The rules of the kernel dialect, as data for :mod:`nki_sim.lint.linter`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Severity = Literal["error", "warning"]
Dialect = Literal["0.7", "0.6", "house"]
DIALECTS: Final[tuple[Dialect, ...]] = ("0.7", "0.6", "house")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the dialects; a severity of None means that a dialect accepts the construct.

    `tracer` is for NKI 0.7, which lets Python run the kernel; `parser` for NKI 0.6, which reads it;
    `house` for kernels that are to pass in both, and are easy to read.
    """

    id: str
    construct: str
    why: str
    accepted: str
    tracer: Severity | None = None
    parser: Severity | None = "error"
    house: Severity | None = "error"

    def severity(self, dialect: Dialect) -> Severity | None:
        """How bad it is in a dialect."""
        return {"0.7": self.tracer, "0.6": self.parser, "house": self.house}[dialect]


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One place in a file that breaks one rule."""

    path: str
    line: int
    column: int
    rule: str
    severity: Severity
    construct: str
    why: str
    accepted: str

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.line}:{self.column}: {self.severity} {self.rule} "
            f"{self.construct}: {self.why}. {self.accepted}"
        )


_RULE_LIST = (
    Rule("NKI000", "syntax error", "the file is no Python", "Correct it first.", tracer="error"),
    Rule("NKI001", "try", "kernels have no exceptions", "Check arguments on the host."),
    Rule(
        "NKI002",
        "raise",
        "kernels have no exceptions",
        "Use assert with a message, or check on the host.",
    ),
    Rule("NKI003", "del", "names and elements cannot be deleted", "Let the name go out of scope."),
    Rule(
        "NKI004",
        "global or nonlocal",
        "a kernel must be a pure function",
        "Pass the value as an argument.",
        tracer="warning",
    ),
    Rule("NKI005", "import", "imports belong to the module", "Import at the top of the file."),
    Rule(
        "NKI006",
        "lambda",
        "there are no anonymous functions",
        "Use a named function of the module.",
    ),
    Rule("NKI007", "comprehension", "it is not in the grammar", "Use a for loop with append()."),
    Rule(
        "NKI008",
        "generator",
        "generators and coroutines do not exist",
        "Use a for loop over a list or range.",
    ),
    Rule("NKI009", "match", "it is not in the grammar", "Use if / elif / else."),
    Rule(
        "NKI010",
        "starred expression",
        "arguments and displays cannot be unpacked",
        "Write each element out.",
    ),
    Rule(
        "NKI011",
        "decorator",
        "only staticmethod, dataclass and nki.jit are known",
        "Call the wrapper on the host instead.",
    ),
    Rule(
        "NKI012",
        "loop else",
        "for-else and while-else are rejected",
        "Keep a flag and test it after the loop.",
    ),
    Rule("NKI013", "operator @", "the matrix product is no operator", "Use nisa.nc_matmul."),
    Rule("NKI014", "*args or **kwargs", "signatures have a fixed arity", "Name each parameter."),
    Rule(
        "NKI015",
        "positional- or keyword-only marker",
        "the signature grammar has neither / nor *",
        "Use ordinary parameters.",
    ),
    Rule("NKI016", "is", "identity is not defined for kernel values", "Compare with == or !=."),
    Rule(
        "NKI017",
        "is None",
        "identity is unsupported since 0.3; the parser reads it as ==",
        "Write == None, or decide on the host.",
        parser="warning",
    ),
    Rule(
        "NKI018",
        "in a chained comparison",
        "membership may not be chained",
        "Split the comparison with and.",
    ),
    Rule(
        "NKI019",
        "in",
        "membership runs over compile-time values only and is easy to misread for a tensor",
        "Compare with ==, or decide on the host.",
        parser=None,
    ),
    Rule(
        "NKI020",
        "assignment expression",
        "it is not in the grammar",
        "Assign in a statement of its own.",
    ),
    Rule(
        "NKI021",
        "base class",
        "classes inherit from NKIObject, Enum or NamedTuple and nothing else",
        "Derive from NKIObject and hold the other object as a field.",
    ),
    Rule(
        "NKI022",
        "with",
        "only `with nl.no_reorder():` is known, with one item and no name",
        "Call the function directly.",
    ),
    Rule(
        "NKI023",
        "unknown built-in",
        "the front end does not know this function",
        "Write the loop out.",
    ),
    Rule(
        "NKI024",
        "inner function",
        "functions are defined in the module, except the body of a fori_loop or while_loop",
        "Move it to the module and pass what it needs.",
    ),
    Rule(
        "NKI025",
        "jump out of a dynamic loop",
        "break, continue and return cannot leave a loop that runs on the device",
        "Put the condition in the loop's register.",
    ),
    Rule(
        "NKI026",
        "dynamic loop inside no_reorder",
        "a fixed order cannot span a loop that runs on the device",
        "Put no_reorder inside the loop body.",
        tracer="error",
    ),
    Rule(
        "NKI027",
        "dictionary key",
        "keys are strings",
        "Use a string key, or a list for integer keys.",
    ),
    Rule(
        "NKI028",
        "integer constant",
        "compile-time integers have 32 bits",
        "Split it, or use a float.",
    ),
    Rule("NKI029", "constant", "only None, bool, int, float and str exist", "Use one of these."),
    Rule("NKI030", "nested class", "classes are defined in the module", "Move it to the module."),
    Rule(
        "NKI031",
        "set",
        "the containers are tuple, list and dict",
        "Use a list or a dict with string keys.",
    ),
    Rule(
        "NKI032",
        "tuple target in for",
        "the guide shows a single loop variable only",
        "Loop over range(len(...)) and index.",
        parser=None,
    ),
    Rule(
        "NKI033",
        "dynamic_range",
        "NKI 0.7 has it no more, 0.6 deprecates it",
        "Use nl.fori_loop with a body function.",
        tracer="error",
        parser="warning",
    ),
    Rule(
        "NKI034",
        "statement",
        "it is not in the grammar",
        "Use the statements of the language guide.",
    ),
    Rule(
        "NKI035",
        "expression",
        "it is not in the grammar",
        "Use the expressions of the language guide.",
    ),
    Rule(
        "NKI036",
        "NumPy call",
        "it runs once, on the host, while the kernel is compiled, and cannot take a tensor",
        "Compute it on the host and pass it as an argument, or use nki.isa.",
        tracer="warning",
        parser="warning",
    ),
    Rule(
        "NKI037",
        "mutable default",
        "one list or dict would be shared by all calls, and keeps what an earlier one left in it",
        "Use None, or a tuple.",
        tracer="warning",
        parser="warning",
    ),
    Rule(
        "NKI038",
        "condition on a value of the device",
        "Python decides while the kernel is compiled, before there are values",
        "Use a mask (nisa.tensor_scalar), nl.while_loop or a bound of nl.fori_loop; compare with "
        "None to ask whether it is there.",
        tracer="error",
    ),
    Rule(
        "NKI039",
        "value of the device as a number of Python",
        "there is no number while the kernel is compiled",
        "Give it to nl.fori_loop as a bound, or to .ap() as scalar_offset.",
        tracer="error",
    ),
    Rule(
        "NKI040",
        "operator on a value of the device",
        "tensors and registers have none; scalars have +, - and *",
        "Use nisa.tensor_tensor, nisa.tensor_scalar or an NkiScalar.",
        tracer="error",
    ),
    Rule(
        "NKI041",
        "result of a loop body",
        "a body of fori_loop returns nothing, one of while_loop the register of its condition",
        "Keep results in a tensor made before the loop.",
        tracer="error",
    ),
    Rule(
        "NKI042",
        "Python state changed in a loop body",
        "the body is traced once, so the change takes effect once",
        "Keep what changes between iterations in a tensor or register.",
        tracer="error",
        parser=None,
    ),
    Rule(
        "NKI043",
        "step of a loop",
        "it must be a positive int known at compile time",
        "Scale the counter inside the body.",
        tracer="error",
        parser=None,
    ),
    Rule(
        "NKI044",
        "name given twice in a loop body",
        "names of instructions are unique in a body",
        "Put a number into the name, or leave it out.",
        tracer="error",
        parser=None,
    ),
    Rule(
        "NKI045",
        "scalar_store of a number of Python",
        "it takes an NkiScalar; the device would store nothing",
        "Use nisa.memset.",
        tracer="error",
        parser=None,
    ),
    Rule(
        "NKI046",
        "coroutine, or a kernel that yields",
        "calling it runs nothing, so nothing is traced",
        "Use a plain function that returns its tensors.",
        tracer="error",
        parser=None,
    ),
    Rule(
        "NKI047",
        "name of an older dialect",
        "it is of {dialect}, gone since NKI {gone}",
        "Use {instead}.",
        tracer="error",
    ),
    Rule(
        "NKI048",
        "module of an older dialect",
        "it is of {dialect}, gone since NKI {gone}",
        "Use {instead}.",
        tracer="warning",
        parser="warning",
    ),
)
RULES = {rule.id: rule for rule in _RULE_LIST}
