"""Small right kernels with one piece changed: a fault is caught or reported, a twin is not.

A kernel is text with pieces `<name=right>`. FAULTS has for each piece what makes it wrong, with the
error or the kind of finding that must tell; TWINS has what leaves it right.
"""

from __future__ import annotations

import linecache
import re
from typing import Any

import numpy as np
import pytest

import nki_sim

X = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((128, 256)).astype(np.float32)
INDEX = np.where(np.arange(32) % 5 == 2, -1, np.arange(32)[::-1] * 3).astype(np.int32)[:, None]
COUNT = np.full((1, 1), 3, np.int32)

KERNELS: dict[str, tuple[str, int, tuple[Any, ...]]] = {
    "matmul": (
        """
        x_sb = nl.ndarray((<rows=128>, <m=64>), <xtype=nl.float32>)
        w_sb = nl.ndarray((128, <n=256>), nl.float32)
        nisa.dma_copy(<xto=x_sb>, a)
        <load=nisa.dma_copy(w_sb, b)>
        sum_ps = nl.ndarray((<out=64>, 256), <sumtype=nl.float32>, buffer=<memory=nl.psum>)
        nisa.nc_matmul(sum_ps, <stationary=x_sb>, <moving=w_sb>, accumulate=<accumulate=False>)
        y_sb = nl.ndarray((64, 256), <ytype=nl.float32>)
        nisa.tensor_copy(<to=y_sb>, <from=sum_ps>)
        y = nl.ndarray((64, 256), nl.float32, buffer=<ymemory=nl.shared_hbm>)
        nisa.dma_copy(<ywhere=y>, y_sb)
        return <returned=y>
        """,
        1,
        (X, W),
    ),
    "exchange": (
        """
        core = nl.program_id(0)
        own, other = nl.ndarray((64, 64), nl.float32), nl.ndarray((64, 64), nl.float32)
        shared = nl.ndarray((128, 64), nl.float32, buffer=<memory=nl.shared_hbm>)
        y = nl.ndarray((128, 64), nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(own, a[64 * core : 64 * core + 64])
        nisa.dma_copy(shared[<write=64 * core : 64 * core + 64>], own)
        <barrier=nisa.core_barrier(shared, (0, 1))>
        nisa.dma_copy(other, shared[<read=64 - 64 * core : 128 - 64 * core>])
        <after=pass>
        nisa.sendrecv(<sent=own>, other, <to=1 - core>, <from=1 - core>, <pipe=0>)
        nisa.tensor_tensor(own, own, other, nl.add)
        nisa.dma_copy(y[<out=64 * core : 64 * core + 64>], own)
        return y
        """,
        2,
        (X,),
    ),
    "gather": (
        """
        i_sb = nl.ndarray((<count=32>, 1), <itype=nl.int32>)
        <load=nisa.dma_copy(i_sb, b)>
        rows = nl.ndarray((32, 64), nl.float32)
        <fill=nisa.memset(rows, 0.0)>
        source = a.ap([[64, 32], [1, <width=64>]], <offset=vector_offset=i_sb>)
        nisa.dma_copy(<to=rows>, source, oob_mode=nisa.oob_mode.<oob=skip>)
        order = nl.ndarray((32, 1), nl.int32)
        nisa.iota(order, [[0, 1]], offset=<first=31>, channel_multiplier=<step=-1>)
        y = nl.ndarray((32, 64), nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(y.ap([[64, 32], [1, 64]], vector_offset=order), rows)
        return y
        """,
        1,
        (X, INDEX),
    ),
    "capacity": (
        """
        held = [nl.ndarray((128, <wide=512>), nl.float32) for _ in range(<tiles=100>)]
        for tile in held:
            nisa.memset(tile, 1.0)
        banks = [
            nl.ndarray((128, <columns=512>), nl.float32, buffer=nl.psum) for _ in range(<banks=8>)
        ]
        for tile, bank in zip(held, banks):
            nisa.nc_matmul(bank[:, 0:512], tile[:, 0:128], tile[:, 0:512])
        total = nl.ndarray((128, 512), nl.float32)
        nisa.memset(total, 0.0)
        for tile in held:
            nisa.tensor_tensor(total, total, tile[:, 0:512], nl.add)
        for bank in banks:
            nisa.tensor_tensor(total, total, bank[:, 0:512], nl.add)
        y = nl.ndarray((128, 512), nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(y, total)
        return y
        """,
        1,
        (X,),
    ),
    "places": (
        """
        one = nl.ndarray((<rows=64>, 64), nl.float32, address=<one=(0, 0)>)
        two = nl.ndarray((64, 64), nl.float32, address=<two=(0, 256)>)
        sum_ps = nl.ndarray((64, 64), nl.float32, buffer=nl.psum, address=<bank=(0, 2048)>)
        nisa.dma_copy(one[0:64], a[0:64])
        nisa.dma_copy(two, a[64:128])
        nisa.tensor_tensor(two, <left=one[0:64]>, two, nl.add)
        nisa.tensor_copy(sum_ps, <shifted=one[0:64]>)
        nisa.tensor_copy(<half=two[0:32, 0:32]>, <other=two[32:64, 0:32]>)
        nisa.tensor_tensor(two, two, <summed=sum_ps>, nl.add)
        y = nl.ndarray((64, 64), nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(y, two)
        return y
        """,
        1,
        (X,),
    ),
    "loop": (
        """
        count_sb = nl.ndarray((1, 1), <ctype=nl.int32>)
        <load=nisa.dma_copy(count_sb, b)>
        iterations = nisa.scalar_load(<loaded=count_sb>)
        total = nl.ndarray((1, 64), nl.float32)
        <zero=nisa.memset(total, 0.0)>
        seen = []
        def body(i):
            row = nl.ndarray((1, 64), nl.float32)
            nisa.dma_copy(row, a.ap([[64, 1], [1, 64]], scalar_offset=<at=i>, indirect_dim=0))
            <inside=pass>
            nisa.tensor_tensor(total, total, <row=row>, nl.add)
            return <result=None>
        nl.fori_loop(<lower=0>, <upper=iterations>, body<by=>)
        <later=pass>
        y = nl.ndarray((1, 64), nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(y, total)
        return y
        """,
        1,
        (X, COUNT),
    ),
}

OPERAND, LANGUAGE, UNWRITTEN = "IllegalOperand", "LanguageError", "UninitializedRead"
BOUNDS, RACE, WAITS, FULL = "OutOfBounds", "RaceError", "DeadlockError", "CapacityError"

# kernel: piece: what makes it wrong: what must tell
FAULTS: dict[str, dict[str, dict[str, str]]] = {
    "matmul": {
        "rows": {"129": FULL, "127": OPERAND},
        "m": {"63": OPERAND, "65": OPERAND},
        "n": {"255": OPERAND, "257": OPERAND},
        "xtype": {"nl.bfloat16": OPERAND, "nl.int32": OPERAND},
        "xto": {"x_sb[0:64]": OPERAND, "x_sb[1:129]": OPERAND},
        "load": {
            "pass": UNWRITTEN,
            "nisa.dma_copy(w_sb[0:127], b[0:127])": UNWRITTEN,
            "nisa.dma_copy(w_sb[:, 1:256], b[:, 1:256])": UNWRITTEN,
            "nisa.dma_copy(w_sb[:, ::2], b[:, ::2])": UNWRITTEN,
        },
        "out": {"63": OPERAND, "129": FULL},
        "sumtype": {"nl.int32": OPERAND},
        "memory": {"nl.sbuf": OPERAND, "nl.private_hbm": OPERAND},
        "stationary": {"x_sb[0:64]": OPERAND, "w_sb": OPERAND, "a": OPERAND},
        "moving": {"b": OPERAND, "w_sb[0:64]": OPERAND, "sum_ps": OPERAND},
        "accumulate": {"True": "AccumulateError"},
        "to": {"y_sb[0:32]": OPERAND, "y_sb[:, 0:255]": OPERAND, "b": OPERAND},
        "from": {"x_sb": OPERAND, "a": OPERAND},
        "ymemory": {"nl.private_hbm": OPERAND, "nl.sbuf": OPERAND},
        "ywhere": {"y[0:63]": OPERAND, "y[1:65]": OPERAND, "y[:, 0:255]": OPERAND},
        "returned": {"y_sb": OPERAND, "sum_ps": OPERAND},
    },
    "exchange": {
        "memory": {"nl.private_hbm": "uninitialized"},
        "write": {"0:64": RACE, "63 * core : 63 * core + 64": RACE},
        "barrier": {
            "pass": RACE,
            "nisa.core_barrier(shared, (0, 1)) if core else None": WAITS,
            "nisa.core_barrier(shared, (0,))": OPERAND,
            "nisa.core_barrier(shared, (0, 2))": OPERAND,
        },
        "read": {"65 - 64 * core : 129 - 64 * core": OPERAND},
        "after": {
            "nisa.dma_copy(shared[64 * core : 64 * core + 64], other)": RACE,
            "nisa.dma_copy(y[0:64], other)": RACE,
        },
        "sent": {"own[0:32]": OPERAND, "other": OPERAND},
        "to": {"core": "DivergenceError", "2": OPERAND},
        "from": {"core": "DivergenceError"},
        "out": {"0:64": "race", "32 * core : 32 * core + 64": RACE},
    },
    "gather": {
        "count": {"31": OPERAND, "33": OPERAND},
        "itype": {"nl.float32": OPERAND, "nl.int8": OPERAND},
        "load": {"pass": UNWRITTEN, "nisa.dma_copy(i_sb[0:16], b[0:16])": UNWRITTEN},
        "fill": {"pass": UNWRITTEN, "nisa.memset(rows[:, 0:63], 0.0)": UNWRITTEN},
        "width": {"63": OPERAND, "65": OPERAND},
        "offset": {"vector_offset=b": OPERAND},
        "to": {"rows[:, 0:32]": OPERAND, "rows[0:16]": OPERAND},
        "oob": {"error": BOUNDS},
        "first": {"32": BOUNDS, "30": BOUNDS},
        "step": {"1": BOUNDS, "0": "scatter"},
    },
    "capacity": {
        "wide": {"600": FULL},
        "tiles": {"120": FULL},
        "columns": {"513": FULL},
        "banks": {"9": FULL},
    },
    "places": {
        "rows": {"63": OPERAND, "129": FULL},
        "one": {"(0, 4)": "OverlapError", "(16, 0)": OPERAND, "(0, 212984)": FULL},
        "two": {"(0, 252)": "OverlapError", "(0, -4)": FULL, "(32, 252)": OPERAND},
        "bank": {"(0, 16384)": FULL, "(0, 2040)": FULL},
        "left": {"one[0:32]": OPERAND, "sum_ps": UNWRITTEN},
        "shifted": {"one[1:65]": OPERAND, "one[0:63]": OPERAND},
        "half": {
            "two[1:33, 0:32]": OPERAND,
            "two[8:40, 0:32]": OPERAND,
            "two[32:64, 16:48]": "OverlapError",
        },
        "summed": {"sum_ps[0:32]": OPERAND},
    },
    "loop": {
        "ctype": {"nl.float32": OPERAND, "nl.uint32": OPERAND},
        "load": {"pass": UNWRITTEN},
        "loaded": {"a[0:1, 0:1]": OPERAND},
        "zero": {"pass": UNWRITTEN},
        "at": {"i * 64": BOUNDS},
        "inside": {
            "seen.append(1); nisa.memset(total, 0.0) if seen[1:] else None": LANGUAGE,
            "nisa.memset(total, float(i))": LANGUAGE,
            "seen.append(row) if i > 1 else None": LANGUAGE,
        },
        "result": {"i": LANGUAGE},
        "upper": {"total": OPERAND, "iterations > 1": LANGUAGE, "count_sb == 3": LANGUAGE},
        "by": {", 0": LANGUAGE, ", iterations": LANGUAGE},
        "later": {"range(iterations)": LANGUAGE, "nisa.scalar_store(count_sb, 3)": OPERAND},
    },
}

# kernel: piece: what leaves it right
TWINS: dict[str, dict[str, tuple[str, ...]]] = {
    "matmul": {
        "xto": ("x_sb[0:128]", "x_sb[:, 0:64]", "x_sb.reshape((128, 8, 8)).reshape((128, 64))"),
        "load": (
            "nisa.dma_copy(w_sb[0:64], b[0:64]); nisa.dma_copy(w_sb[64:128], b[64:128])",
            "nisa.dma_copy(w_sb[:, ::2], b[:, ::2]); nisa.dma_copy(w_sb[:, 1::2], b[:, 1::2])",
            "nisa.memset(w_sb, 0.0); nisa.dma_copy(w_sb[0:127], b[0:127])",
        ),
        "out": ("64",),
        "stationary": ("x_sb[:, 0:64]", "x_sb[0:128]"),
        "moving": ("w_sb[:, 0:256]",),
        "accumulate": ("None",),
        "ytype": ("nl.bfloat16", "nl.float16"),
        "to": ("y_sb[0:64]", "y_sb.reshape((64, 16, 16))"),
        "from": ("sum_ps[:, :]",),
        "ywhere": ("y[0:64]", "y[...]"),
        "returned": ("(y,)", "[y]"),
    },
    "exchange": {
        "read": ("0:64", "64 * core : 64 * core + 64", "32:96"),
        "barrier": (
            "nisa.core_barrier(shared, (1, 0))",
            "nisa.core_barrier(shared, [0, 1])",
            "nisa.core_barrier(own, (0, 1))",
            "nisa.core_barrier(shared, (0, 1)); nisa.core_barrier(shared, (0, 1))",
        ),
        "after": (
            "nisa.core_barrier(shared, (0, 1)); nisa.dma_copy(shared[64 - 64 * core :][0:64], own)",
            "nisa.dma_copy(y[64 * core : 64 * core + 64], other)",
            "nisa.tensor_copy(own, other)",
        ),
        "sent": ("own[0:64]",),
    },
    "gather": {
        "fill": ("nisa.memset(rows, 7.0)", "nisa.dma_copy(rows, a[0:32])"),
        "to": ("rows[0:32]", "rows[:, 0:64]"),
        "step": ("-1",),
        "load": (
            "nisa.memset(i_sb, 0)",
            "nisa.iota(i_sb, [[0, 1]], offset=96, channel_multiplier=1)",
        ),
    },
    "capacity": {"tiles": ("9", "102"), "banks": ("1", "7"), "columns": ("512",)},
    "places": {
        "one": ("(0, 512)", "(64, 256)"),
        "two": ("(64, 0)", "(0, 212728)"),
        "bank": ("(0, 0)", "(0, 14336)"),
        "half": ("two[32:64, 0:32]",),
    },
    "loop": {
        "upper": ("3", "iterations + 2", "iterations * 2"),
        "lower": ("1", "iterations"),
        "by": (", 2",),
        "inside": ("nisa.tensor_scalar(row, row, nl.multiply, 2.0)",),
        "at": ("i + 1", "0"),
        "later": ("nisa.scalar_store(count_sb, iterations)",),
    },
}


def changed(kernel: str, piece: str = "", value: str = "") -> Any:
    """Return a kernel with one piece changed, as a function whose lines messages can show."""
    text, count = re.subn(rf"<{piece}=[^>]*>", lambda _: value, KERNELS[kernel][0])
    assert count == bool(piece), (kernel, piece)
    body = re.sub(r"<\w+=([^>]*)>", r"\1", text)
    parameters = "ab"[: len(KERNELS[kernel][2])]
    source = f"def kernel({', '.join(parameters)}):\n" + "\n".join(
        line[4:] for line in body.splitlines()
    )
    name = f"{kernel}-{piece}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names: dict[str, Any] = {"nl": nki_sim.language.api, "nisa": nki_sim.isa}
    exec(compile(source, name, "exec"), names)
    return names["kernel"]


def shown(kernel: str, piece: str = "", value: str = "") -> set[str]:
    """Run a kernel; return the error, or the kinds of findings."""
    _, lnc, arrays = KERNELS[kernel]
    try:
        run = nki_sim.run(changed(kernel, piece, value), *arrays, lnc=lnc)
    except nki_sim.NkiValidationError as error:
        return {type(error).__name__}
    return {finding.kind for finding in run.findings}


def rows(table: Any) -> list[tuple[str, str, str]]:
    return [(k, p, value) for k, pieces in table.items() for p in pieces for value in pieces[p]]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_as_it_stands_is_right(kernel: str) -> None:
    assert shown(kernel) == set()


@pytest.mark.parametrize(("kernel", "piece", "value"), rows(FAULTS))
def test_a_fault_is_caught_or_reported(kernel: str, piece: str, value: str) -> None:
    assert FAULTS[kernel][piece][value] in shown(kernel, piece, value)


@pytest.mark.parametrize(("kernel", "piece", "value"), rows(TWINS))
def test_a_twin_is_left_alone(kernel: str, piece: str, value: str) -> None:
    assert shown(kernel, piece, value) == set()
