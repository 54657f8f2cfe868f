"""The rules of the kernel dialect, as data for :mod:`nki_sim.lint.linter`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]
Dialect = Literal["parser", "house"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the dialect; a severity of None means that the dialect accepts the construct."""

    id: str
    construct: str
    why: str
    accepted: str
    parser: Severity | None = "error"
    house: Severity | None = "error"


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
    Rule("NKI000", "syntax error", "the file is no Python", "Correct it first."),
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
        "it is deprecated and goes away with the parser front end",
        "Use nl.fori_loop with a body function.",
        parser="warning",
        house=None,
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
        parser="warning",
    ),
    Rule(
        "NKI037",
        "mutable default",
        "one list or dict would be shared by all calls, and keeps what an earlier one left in it",
        "Use None, or a tuple.",
        parser="warning",
    ),
)
RULES = {rule.id: rule for rule in _RULE_LIST}
