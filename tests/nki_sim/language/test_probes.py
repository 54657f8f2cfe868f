"""Sixty small programs that say what NKI 0.7 is: thirty run and are clean, thirty are refused.

Each is of one fact about the language of October 2026, by which it is found. A refusal names who
must notice: the simulator when it runs the program ("run"), or the linter by a rule ("NKI038").
"""

from __future__ import annotations

import importlib.util
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nki_sim
from nki_sim import LanguageError, NkiValidationError, SimOptions
from nki_sim.lint.linter import lint_file
from nki_sim.lint.rules import Finding

HEADER = """\
import nki
import nki.isa as nisa
import nki.language as nl

def load(x):
    tile = nl.ndarray(x.shape, nl.int32)
    nisa.dma_copy(tile, x)
    return tile

def save(tile):
    out = nl.ndarray(tile.shape, nl.int32, buffer=nl.shared_hbm)
    nisa.dma_copy(out, tile)
    return out

def cell(value=0):
    tile = nl.ndarray((1, 1), nl.int32)
    nisa.memset(tile, value)
    return tile

def bump(tile, by=1):
    nisa.tensor_scalar(tile, tile, nl.add, by)

"""
X = np.array([[3, 1, 4, 1]], np.int32)


@dataclass(frozen=True)
class Probe:
    """A program: its body, what it gives for x = [[3, 1, 4, 1]] or who refuses it, and what stands
    before the kernel.
    """

    body: str
    gives: Any
    before: str = ""


LOOP_GIVES = [[4]]
SCALAR_WRAPS = Probe(
    "t = cell(100000)\nn = nisa.scalar_load(t)\nnisa.scalar_store(t, n * 100000)\nreturn save(t)",
    [[1410065408]],
)
RUNS = {
    # Python at trace time.
    "the kernel is run by Python, so comprehensions are ordinary code": Probe(
        "t = load(x)\n[bump(t[:, k:k+1]) for k in range(4)]\nreturn save(t)", [[4, 2, 5, 2]]
    ),
    "functions without names are as good as others at trace time": Probe(
        "t = load(x)\nadd = lambda tile: bump(tile)\nadd(t)\nreturn save(t)", [[4, 2, 5, 2]]
    ),
    "generators are named among what is new": Probe(
        "t = load(x)\nfor view in parts(t):\n    bump(view)\nreturn save(t)",
        [[4, 2, 5, 2]],
        "def parts(t):\n    for k in range(4):\n        yield t[:, k:k+1]\n",
    ),
    "classes may inherit from any class": Probe(
        "return save(Second(load(x)).step())",
        [[5, 3, 6, 3]],
        "class First:\n    def __init__(self, t):\n        self.t = t\n    def step(self):\n"
        "        bump(self.t)\n        return self.t\n"
        "class Second(First):\n    def step(self):\n        super().step()\n"
        "        return super().step()\n",
    ),
    "inner functions see the names around them": Probe(
        "t = load(x)\ndef twice():\n    bump(t)\n    bump(t)\ntwice()\nreturn save(t)",
        [[5, 3, 6, 3]],
    ),
    "exceptions are raised and caught while tracing": Probe(
        "t = load(x)\ntry:\n    raise ValueError('no')\nexcept ValueError:\n    bump(t)\n"
        "return save(t)",
        [[4, 2, 5, 2]],
    ),
    "calls may unpack lists and mappings": Probe(
        "t = load(x)\nbump(*[t], **{'by': 2})\nreturn save(t)", [[5, 3, 6, 3]]
    ),
    "a match statement decides on what is known at trace time": Probe(
        "t = load(x)\nmatch x.shape:\n    case (1, n):\n        bump(t, n)\nreturn save(t)",
        [[7, 5, 8, 5]],
    ),
    "an assignment may stand in an expression": Probe(
        "t = load(x)\nif (n := x.shape[1]) > 2:\n    bump(t, n)\nreturn save(t)", [[7, 5, 8, 5]]
    ),
    "modules may be imported inside a kernel": Probe(
        "import math\nt = load(x)\nbump(t, math.isqrt(4))\nreturn save(t)", [[5, 3, 6, 3]]
    ),
    "loops over known values have their else": Probe(
        "t = load(x)\nfor k in range(2):\n    pass\nelse:\n    bump(t)\nreturn save(t)",
        [[4, 2, 5, 2]],
    ),
    "any container may be tested for membership at trace time": Probe(
        "t = load(x)\nif x.shape[1] in {4, 8}:\n    bump(t)\nreturn save(t)", [[4, 2, 5, 2]]
    ),
    "a helper may be wrapped by any decorator": Probe(
        "t = load(x)\nbump(t, width(4))\nreturn save(t)",
        [[7, 5, 8, 5]],
        "import functools\n@functools.cache\ndef width(n):\n    return n\n",
    ),
    "== between objects of the user's classes is that of Python, identity unless defined": Probe(
        "a, b = Box(1), Box(1)\nt = load(x)\nbump(t, 1 if a == b else 2)\nreturn save(t)",
        [[5, 3, 6, 3]],
        "class Box(nl.NKIObject):\n    value: int\n",
    ),
    "an assertion about shapes is decided while tracing": Probe(
        "assert x.shape == (1, 4), 'four'\nreturn save(load(x))", X.tolist()
    ),
    "whether an argument was given is known at trace time": Probe(
        "t = load(x)\nbump(t, 1 if bias is None else 2)\nreturn save(t)", [[4, 2, 5, 2]]
    ),
    "min and max act on trace-time numbers": Probe(
        "t = load(x)\nbump(t[:, 0:min(2, x.shape[1])])\nreturn save(t)", [[4, 2, 4, 1]]
    ),
    # Loops.
    "a for over known values is unrolled": Probe(
        "t = load(x)\nfor k in range(0, 4, 2):\n    bump(t[:, k:k+1])\nreturn save(t)",
        [[4, 1, 5, 1]],
    ),
    "a while on a known condition is unrolled": Probe(
        "t, k = load(x), 0\nwhile k < 3:\n    bump(t)\n    k += 1\nreturn save(t)", [[6, 4, 7, 4]]
    ),
    "fori_loop runs its body from lower below upper": Probe(
        "t = cell()\ndef body(i):\n    bump(t)\nnl.fori_loop(0, 4, body)\nreturn save(t)",
        LOOP_GIVES,
    ),
    "the step is a positive int known at trace time": Probe(
        "t = cell()\ndef body(i):\n    bump(t)\nnl.fori_loop(1, 8, body, step=2)\nreturn save(t)",
        LOOP_GIVES,
    ),
    "a register may bound it; the counter is a register then": Probe(
        "t, end = cell(), nisa.register_alloc()\nnisa.register_load(end, x[0:1, 2:3])\n"
        "def body(i):\n    assert isinstance(i, nisa.VirtualRegister)\n    bump(t)\n"
        "nl.fori_loop(0, end, body)\nreturn save(t)",
        LOOP_GIVES,
    ),
    "a scalar and sums of it may bound it": Probe(
        "t = cell()\nn = nisa.scalar_load(x[0:1, 1:2])\ndef body(i):\n    bump(t)\n"
        "nl.fori_loop(0, n * 3 + 1, body)\nreturn save(t)",
        LOOP_GIVES,
    ),
    "without a register among the bounds the counter is an NkiScalar": Probe(
        "t = cell()\ndef body(i):\n    assert isinstance(i, nisa.NkiScalar)\n    bump(t)\n"
        "nl.fori_loop(0, 4, body)\nreturn save(t)",
        LOOP_GIVES,
    ),
    "the counter, and arithmetic on it, is an offset of an access pattern in HBM": Probe(
        "t = cell()\ndef body(i):\n    one = nl.ndarray((1, 1), nl.int32)\n"
        "    nisa.dma_copy(one, x.ap([[4, 1], [1, 1]], scalar_offset=i + 1, indirect_dim=1))\n"
        "    nisa.tensor_tensor(t, t, one, nl.add)\nnl.fori_loop(0, 2, body)\nreturn save(t)",
        [[5]],
    ),
    "a body may hold a no_reorder": Probe(
        "t = cell()\ndef body(i):\n    with nl.no_reorder():\n        bump(t)\n"
        "nl.fori_loop(0, 4, body)\nreturn save(t)",
        LOOP_GIVES,
    ),
    "while_loop goes on until the register that its body returns is zero": Probe(
        "t, left = cell(), cell(4)\nr = nisa.register_alloc(left)\ndef body(r):\n    bump(t)\n"
        "    bump(left, -1)\n    nisa.register_load(r, left)\n    return r\n"
        "nl.while_loop(r, body)\nreturn save(t)",
        LOOP_GIVES,
    ),
    # Scalars.
    "products of 32-bit scalars wrap: 100000 * 100000 gives 1410065408": SCALAR_WRAPS,
    "scalars have minus with one operand and with an int on either side": Probe(
        "t = cell(5)\nn = nisa.scalar_load(t)\nnisa.scalar_store(t, 1 - -n)\nreturn save(t)", [[6]]
    ),
    "scalar_load and scalar_store take int64 elements as well": Probe(
        "wide = nl.ndarray((1, 1), nl.int64, buffer=nl.private_hbm)\n"
        "nisa.dma_copy(wide, x[0:1, 0:1])\nn = nisa.scalar_load(wide)\n"
        "nisa.scalar_store(wide, n + 1)\nt = cell()\nnisa.dma_copy(t, wide)\nreturn save(t)",
        [[4]],
    ),
}

BODY = "t = cell()\n"
IF_ELEMENT = Probe("t = load(x)\nif t[0, 0]:\n    bump(t)\nreturn save(t)", "run NKI038")
IF_TENSOR = Probe("t = load(x)\nif t:\n    bump(t)\nreturn save(t)", "run NKI038")
IF_REGISTER = Probe(
    "t, r = load(x), nisa.register_alloc(1)\nif r:\n    bump(t)\nreturn save(t)", "run NKI038"
)
IF_SCALAR = Probe(
    "t = cell(1)\nn = nisa.scalar_load(t)\nif n:\n    bump(t)\nreturn save(t)", "run NKI038"
)
DYNAMIC_RANGE = Probe(
    "t = cell()\nfor i in nl.dynamic_range(4):\n    bump(t)\nreturn save(t)", "run NKI033"
)
REFUSED = {
    # Conditions.
    "no version has conditions on tensors: values do not exist while tracing": IF_ELEMENT,
    "a tensor is no condition, not even a whole one": IF_TENSOR,
    "a tensor cannot be negated in Python either": Probe(
        "t = load(x)\nif not t:\n    bump(t)\nreturn save(t)", "run NKI038"
    ),
    "a comparison of a tensor with a number is no condition either": Probe(
        "t = load(x)\nif t[0, 0] > 2:\n    bump(t)\nreturn save(t)", "run NKI038"
    ),
    "an assertion acts on trace-time values only": Probe(
        "t = load(x)\nassert t[0, 0], 'zero'\nreturn save(t)", "run NKI038"
    ),
    "a conditional expression takes no tensor": Probe(
        "t = load(x)\nbump(t, 1 if t[0, 0] else 2)\nreturn save(t)", "run NKI038"
    ),
    "`and` takes no tensor, as it asks its first operand": Probe(
        "t = load(x)\nu = t and x\nreturn save(u)", "run NKI038"
    ),
    "a register in an if raises": IF_REGISTER,
    "a Python while on a register is gone; while_loop is its successor": Probe(
        "t, r = load(x), nisa.register_alloc(1)\nwhile r:\n    bump(t)\nreturn save(t)",
        "run NKI038",
    ),
    "a scalar is known to the device only": IF_SCALAR,
    "comparing 32-bit scalars is traced, but nothing takes the outcome": Probe(
        "t = cell(1)\nn = nisa.scalar_load(t)\nif n > 0:\n    bump(t)\nreturn save(t)", "run NKI038"
    ),
    "the body is traced once, so its counter is no number": Probe(
        "t = cell()\ndef body(i):\n    if i:\n        bump(t)\nnl.fori_loop(0, 4, body)\n"
        "return save(t)",
        "run NKI038",
    ),
    # Numbers.
    "int() of a register raises": Probe(
        "t, r = load(x), nisa.register_alloc(1)\nbump(t, int(r))\nreturn save(t)", "run NKI039"
    ),
    "range() of a register raises": Probe(
        "t, r = load(x), nisa.register_alloc(1)\nfor k in range(r):\n    bump(t)\nreturn save(t)",
        "run NKI039",
    ),
    "min acts on trace-time values": Probe(
        "t = load(x)\nbump(t, min(t[0, 0], 2))\nreturn save(t)", "run NKI039"
    ),
    "a tensor cannot be gone through in Python": Probe(
        "t = load(x)\nfor row in t:\n    bump(row)\nreturn save(t)", "run NKI039"
    ),
    "operators between tensors do not exist; instructions compute": Probe(
        "t = load(x)\nu = t + t\nreturn save(u)", "run NKI040"
    ),
    "registers have no arithmetic, scalars do": Probe(
        "t, r = load(x), nisa.register_alloc(1)\nnl.fori_loop(0, r + 1, print)\nreturn save(t)",
        "run NKI040",
    ),
    "scalars have +, - and * and no division": Probe(
        "t = cell(6)\nn = nisa.scalar_load(t)\nnisa.scalar_store(t, n // 2)\nreturn save(t)",
        "run NKI040",
    ),
    "both sides of a sum of scalars have one type": Probe(
        "t = cell(6)\nwide = nl.ndarray((1, 1), nl.int64, buffer=nl.private_hbm)\n"
        "nisa.dma_copy(wide, x[0:1, 0:1])\n"
        "n = nisa.scalar_load(t) + nisa.scalar_load(wide)\nnisa.scalar_store(t, n)\n"
        "return save(t)",
        "run",
    ),
    # Loops.
    "for over dynamic_range is gone": DYNAMIC_RANGE,
    "a fori body returns nothing": Probe(
        "t = cell()\ndef body(i):\n    bump(t)\n    return t\nnl.fori_loop(0, 4, body)\n"
        "return save(t)",
        "run NKI041",
    ),
    "a while body returns its next condition": Probe(
        "t, r = cell(), nisa.register_alloc(1)\ndef body(r):\n    bump(t)\n"
        "nl.while_loop(r, body)\nreturn save(t)",
        "run NKI041",
    ),
    "Python variables rebound in a body take effect once, as it is traced once": Probe(
        "t, n = cell(), 0\ndef body(i):\n    nonlocal n\n    n += 1\n    bump(t, n)\n"
        "nl.fori_loop(0, 4, body)\nreturn save(t)",
        "run NKI042",
    ),
    "a list that grows in a body grows once": Probe(
        "t, seen = cell(), []\ndef body(i):\n    seen.append(1)\n    bump(t, len(seen))\n"
        "nl.fori_loop(0, 4, body)\nreturn save(t)",
        "run NKI042",
    ),
    "a tensor made in a body cannot be used outside": Probe(
        "made = []\ndef body(i):\n    made.append(cell(1))\nnl.fori_loop(0, 1, body)\n"
        "return save(made[0])",
        "run NKI042",
    ),
    "no loop of the device stands inside no_reorder": Probe(
        "t = cell()\ndef body(i):\n    bump(t)\nwith nl.no_reorder():\n"
        "    nl.fori_loop(0, 4, body)\nreturn save(t)",
        "run NKI026",
    ),
    "the step is no register": Probe(
        "t, by = cell(), nisa.register_alloc(2)\ndef body(i):\n    bump(t)\n"
        "nl.fori_loop(0, 4, body, step=by)\nreturn save(t)",
        "run NKI043",
    ),
    "bounds have 32 bits": Probe(
        "t = cell()\nwide = nl.ndarray((1, 1), nl.int64, buffer=nl.private_hbm)\n"
        "nisa.dma_copy(wide, x[0:1, 0:1])\nn = nisa.scalar_load(wide)\ndef body(i):\n"
        "    bump(t)\nnl.fori_loop(0, n, body)\nreturn save(t)",
        "run",
    ),
    "scalar_store refuses a number of Python: the tracer would store nothing": Probe(
        "t = cell()\nnisa.scalar_store(t, 3)\nreturn save(t)", "run NKI045"
    ),
}


@pytest.fixture(autouse=True)
def todays_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NKI_COMPILER_FRONTEND", raising=False)


def write(probe: Probe, folder: Path) -> Path:
    """Write a program to a file."""
    kernel = "@nki.jit\ndef kernel(x, bias=None):\n" + textwrap.indent(probe.body, "    ")
    path = folder / "probe.py"
    path.write_text(f"{HEADER}{probe.before}\n{kernel}\n", encoding="utf-8")
    return path


def run(path: Path, options: SimOptions | None = None) -> Any:
    """Run the kernel of a file; return what it gives."""
    nki_sim.provide()
    spec = importlib.util.spec_from_file_location("probe", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return nki_sim.run(module.kernel, X.copy(), options=options).outputs.tolist()


def errors(findings: list[Finding]) -> set[str]:
    return {finding.rule for finding in findings if finding.severity == "error"}


@pytest.mark.parametrize("fact", RUNS)
def test_what_the_tracer_takes_runs_and_is_clean(fact: str, tmp_path: Path) -> None:
    path = write(RUNS[fact], tmp_path)
    assert run(path) == RUNS[fact].gives
    assert errors(lint_file(path)) == set()


@pytest.mark.parametrize("fact", REFUSED)
def test_what_the_tracer_refuses_is_refused_with_a_way_out(fact: str, tmp_path: Path) -> None:
    path = write(REFUSED[fact], tmp_path)
    with pytest.raises(NkiValidationError) as caught:
        run(path)
    assert caught.value.location.startswith(f"{path}:")
    assert errors(lint_file(path)) == set(REFUSED[fact].gives.split()) - {"run"}


def test_a_condition_names_the_way_out(tmp_path: Path) -> None:
    for probe in (IF_ELEMENT, IF_TENSOR, IF_REGISTER, IF_SCALAR):
        with pytest.raises(LanguageError, match=r"condition known at compile time.*nl\.while_loop"):
            run(write(probe, tmp_path))


def test_in_nki_0_6_a_tensor_is_there_and_its_element_is_no_condition(tmp_path: Path) -> None:
    options = SimOptions(nki="0.6")
    assert run(write(IF_TENSOR, tmp_path), options) == [[4, 2, 5, 2]]
    assert run(write(DYNAMIC_RANGE, tmp_path), options) == LOOP_GIVES
    for probe in (IF_ELEMENT, IF_REGISTER):
        path = write(probe, tmp_path)
        assert "NKI038" in errors(lint_file(path, dialect="0.6"))
        with pytest.raises(LanguageError, match="condition known at compile time"):
            run(path, options)
    with pytest.raises(LanguageError, match="registers in NKI"):
        run(write(SCALAR_WRAPS, tmp_path), options)


def test_the_vendors_variable_chooses_the_front_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(DYNAMIC_RANGE, tmp_path)
    for name in ("custom", "parser"):
        monkeypatch.setenv("NKI_COMPILER_FRONTEND", name)
        assert run(path) == LOOP_GIVES
    monkeypatch.setenv("NKI_COMPILER_FRONTEND", "tracer")
    with pytest.raises(LanguageError, match="expected nl"):
        run(path)
    monkeypatch.setenv("NKI_COMPILER_FRONTEND", "new")
    with pytest.raises(ValueError, match="NKI_COMPILER_FRONTEND='new'"):
        run(path)


@pytest.mark.parametrize("rule", ["NKI044", "NKI046"])
def test_what_only_the_linter_sees(rule: str, tmp_path: Path) -> None:
    body, kernel = {
        "NKI044": (
            "t = cell()\ndef body(i):\n    for k in range(2):\n"
            "        nisa.memset(t, k, name='fill')\nnl.fori_loop(0, 2, body)\nreturn save(t)",
            "",
        ),
        "NKI046": ("yield load(x)", "async def helper(x):\n    nisa.memset(x, 0)\n"),
    }[rule]
    found = lint_file(write(Probe(body, "", kernel), tmp_path))
    assert errors(found) == {rule}
