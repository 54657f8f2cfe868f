"""Expert products by a small C++ function, compiled once on the machine that runs it.

One call multiplies the rows of all experts of a step, on the threads that torch has already: it is
linked to no OpenMP of its own but takes the one in the process. Where there is no C++ compiler,
or the library does not load, the form `compiled` does not exist; nothing else changes.

The library is in the user's cache folder under a name that says source, compiler and processor,
so that a home directory may be shared by different machines.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from neuron_moe.weights.huge_pages import request_huge_pages

SOURCE = Path(__file__).with_suffix(".cpp")
DTYPES = (torch.float32, torch.bfloat16)
_COMPILE = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-c")
_LINK = ("-shared",)  # without -fopenmp: a second OpenMP would start threads of its own
_MOST_SECONDS = 120.0
_TILES = 32  # rows, inputs and outputs that the tiles of a processor take at once
_FEW_ROWS = 4  # of an expert on average, below which reading is the limit and transposing costs
_LOG = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return the folder that the system keeps for caches of this user and project."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "neuron-moe"


@functools.cache
def why_not() -> str:
    """Return why there are no compiled products on this machine; empty if there are."""
    try:
        _library()
    except (OSError, subprocess.SubprocessError) as error:
        _LOG.debug("compiled products: %s", error)
        return str(error)
    return ""


def refuse_if_missing() -> None:
    """Raise ValueError where the form cannot be."""
    if why_not():
        raise ValueError(
            f"form='compiled': {why_not()}. Install a C++ compiler, or use form='measured'."
        )


def can_multiply(rows_nk: Tensor, matrices_Ekn: Tensor) -> bool:
    """Say whether `multiply` takes these: a dtype it knows, and matrices stored as [out, in]."""
    num_inputs, num_outputs = matrices_Ekn.shape[1:]
    return (
        matrices_Ekn.dtype in DTYPES
        and rows_nk.dtype in DTYPES
        and rows_nk.device.type == matrices_Ekn.device.type == "cpu"
        and matrices_Ekn.stride() == (num_inputs * num_outputs, 1, num_inputs)
        and not why_not()
    )


def multiply(
    rows_nk: Tensor,
    matrices_Ekn: Tensor,
    bias_En: Tensor | None,
    experts: Sequence[int],
    counts: Sequence[int],
    out_nk: Tensor | None = None,
) -> Tensor:
    """Return rows [n, in] times the matrices of their experts, and their biases, [n, out] float32.

    There is no gradient.

    Args:
        rows_nk: one expert after the other.
        matrices_Ekn: [E, in, out], see `can_multiply`.
        bias_En: [E, out] or None.
        experts: number of each.
        counts: rows of each.
        out_nk: [n, out] float32 without gaps, where the result is to be; None makes one.
    """
    rows_nk = rows_nk.detach().to(matrices_Ekn.dtype).contiguous()
    bias_En = None if bias_En is None else bias_En.detach().to(matrices_Ekn.dtype).contiguous()
    num_inputs, num_outputs = matrices_Ekn.shape[1:]
    if out_nk is None:
        shape = (rows_nk.shape[0], num_outputs)
        out_nk = request_huge_pages(rows_nk.new_empty(shape, dtype=torch.float32))
    starts = (0, *accumulate(counts))
    transposed_starts, transposed = _memory_for_tiles(matrices_Ekn, counts)
    name = str(matrices_Ekn.dtype).removeprefix("torch.")
    function = getattr(_library(), f"multiply_{name}")
    sizes = (len(experts), num_inputs, num_outputs)
    function(
        *map(_place, (rows_nk, matrices_Ekn, bias_En, out_nk)),
        *map(_numbers, (experts, starts, transposed_starts)),
        _place(transposed),
        *(ctypes.c_int64(size) for size in sizes),
        ctypes.c_int(torch.get_num_threads()),
    )
    return out_nk


def linear(rows_nk: Tensor, weight_mk: Tensor, bias_m: Tensor | None = None) -> Tensor:
    """Return what `torch.nn.functional.linear` does of rows [n, in], [n, out] in their dtype.

    Args:
        rows_nk: float32 or bfloat16 on the CPU.
        weight_mk: [out, in] without gaps, in one of DTYPES.
        bias_m: [out] or None.
    """
    matrix_1km = weight_mk.unsqueeze(0).transpose(1, 2)
    bias_1m = None if bias_m is None else bias_m.unsqueeze(0)
    output_nm = multiply(rows_nk, matrix_1km, bias_1m, [0], [rows_nk.shape[0]])
    return output_nm.to(rows_nk.dtype)


def _place(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _numbers(values: Sequence[int] | None) -> object:
    """Return them as C reads them; several times as fast as by a tensor."""
    return None if values is None else (ctypes.c_int64 * len(values))(*values)


def _memory_for_tiles(
    matrices_Ekn: Tensor, counts: Sequence[int]
) -> tuple[Sequence[int] | None, Tensor | None]:
    """Return where each expert's transposed rows begin, and their memory; None: no tiles."""
    _, num_inputs, num_outputs = matrices_Ekn.shape
    is_whole = num_inputs % _TILES == num_outputs % _TILES == 0
    if matrices_Ekn.dtype != torch.bfloat16 or not is_whole or not _library().has_tiles():
        return None, None
    if sum(counts) < _FEW_ROWS * len(counts):
        return None, None
    starts = (0, *accumulate(-(-count // _TILES) * _TILES for count in counts))
    transposed = matrices_Ekn.new_empty((starts[-1], num_inputs))
    return starts, request_huge_pages(transposed)


@functools.cache
def _library() -> ctypes.CDLL:
    """Return the library, compiled now if the cache has none.

    Raises:
        OSError: no compiler, or what it made does not load.
        subprocess.SubprocessError: it failed, or took too long.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler named c++ (nor in CXX)")
    path = cache_folder() / f"products-{_key(compiler)}.so"
    if not _is_whole(path):
        _build(compiler, path)
    _check_owner(path)
    library = ctypes.CDLL(str(path))
    for dtype in DTYPES:
        getattr(library, f"multiply_{str(dtype).removeprefix('torch.')}").restype = None
    return library


def _is_whole(path: Path) -> bool:
    """Say whether a library is there as it was built: loading a part of one ends the process."""
    try:
        return _digest_path(path).read_text(encoding="utf-8") == _digest(path)
    except OSError:
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest_path(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _check_owner(path: Path) -> None:
    """Raise PermissionError unless this user alone can write a file and its folder."""
    for each in (path, path.parent):
        found = each.stat()
        by_others = 0o002 if found.st_gid == os.getgid() else 0o022
        if found.st_uid != os.getuid() or found.st_mode & by_others:
            raise PermissionError(
                f"{each}: belongs to another user, or others may write to it, so it is not loaded."
                " Remove it, or set XDG_CACHE_HOME to a folder of your own"
            )


def _key(compiler: str) -> str:
    """Return what the library hangs on, as a short hash."""
    version = _run([compiler, "--version"])
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    processor = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    parts = [SOURCE.read_text(encoding="utf-8"), *_COMPILE, version, platform.machine()]
    return hashlib.sha256("\n".join([*parts, *sorted(processor)]).encode()).hexdigest()[:16]


def _build(compiler: str, path: Path) -> None:
    """Compile beside the place and move there as a whole: other processes may build, too."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    part = beside.with_name(f"{beside.name}.o")
    try:
        _run([compiler, *_COMPILE, str(SOURCE), "-o", str(part)])
        _run([compiler, *_LINK, str(part), "-o", str(beside)])
        beside.chmod(0o755)
        digest = _digest(beside)
        beside.replace(path)
        beside.write_text(digest, encoding="utf-8")
        beside.replace(_digest_path(path))
    finally:
        for left in (beside, part):
            left.unlink(missing_ok=True)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_MOST_SECONDS, check=False
    )
    if done.returncode:
        raise OSError(f"{' '.join(command[:2])} ... failed: {done.stderr.strip()[-300:]}")
    return done.stdout
