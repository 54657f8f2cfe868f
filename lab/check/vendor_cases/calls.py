"""Calls of the vendor's kernels that no case of `check vendor` has: run to see what they use.

Sizes and options are small ones of the library's own tests; floats are drawn, nothing is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np

import nki_sim
from lab.check.vendor_cases.inputs import Draw
from lab.check.vendor_cases.library import VendorLibrary
from nki_sim.collectives import ReplicaGroup

BF16: Final = np.dtype(ml_dtypes.bfloat16)
F16: Final = np.dtype(np.float16)
F32: Final = np.dtype(np.float32)
# What a compiler may forgive, and results that nobody looks at.
OPTIONS: Final = nki_sim.SimOptions(
    target="trn2",
    capacity="off",
    overlap="report",
    races="report",
    accumulate="report",
    scatter="report",
    uninitialized="off",
    fill=0,
)


def calls(library: VendorLibrary) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names of kernels, and what runs each."""
    draw = Draw(0)

    def kernel(place: str, lnc: int, **inputs: Any) -> tuple[str, Callable[[], Any]]:
        def run() -> Any:
            found = library.get(
                *place.split(":")
            )  # an import may ask for a package that is missing
            return nki_sim.run(found, lnc=lnc, options=OPTIONS, **inputs)

        return place.split(":")[1], run

    def floats(*shape: int, dtype: Any = BF16) -> Any:
        return draw.uniform(shape, 0.0, 1.0, dtype)

    rows = {"input_a": floats(256, 512), "input_b": floats(256, 512)}
    number = np.array([[2]], np.int32)
    yield kernel(
        "experimental.dynamic_shapes.dynamic_elementwise_add:dynamic_elementwise_add",
        2,
        num_m_tiles=number,
        **rows,
    )
    yield kernel(
        "core.max.cascaded_max:cascaded_max", 2, input_tensor=floats(1, 1, 3168, dtype=F32)
    )
    words = floats(8, 1, 3168, dtype=F32)
    yield "topk", partial(nki_sim.run, partial(_topk, library), words, lnc=2, options=OPTIONS)
    keys = {"k_prior": floats(4, 1, 128, 1024), "v_prior": floats(4, 1, 1024, 128)}
    yield (
        "attention_tkg",
        partial(
            nki_sim.run,
            partial(_attention_tkg, library),
            q=floats(128, 32),
            k_active=floats(128, 4),
            v_active=floats(4, 1, 1, 128),
            mask=np.ones((1024, 4, 8, 1), np.uint8),
            lnc=2,
            options=OPTIONS,
            **keys,
        ),
    )
    conv, names = "experimental.conv.conv1d:conv1d", ("x_in", "filters", "bias")
    for shapes, act in (
        (((1, 32, 50), (8, 32, 64), (64,)), "GELU"),
        (((1, 48, 60), (7, 48, 96)), "SiLU"),
    ):
        arrays = {
            name: floats(*shape, dtype=F32) for name, shape in zip(names, shapes, strict=False)
        }
        act_fn = library.enum("ActFnType", act)
        yield kernel(conv, 2, stride=1, padding=(3, 3), dilation=1, activation_fn=act_fn, **arrays)
    yield kernel(
        "experimental.conv.depthwise_conv1d:depthwise_conv1d_implicit_gemm",
        2,
        img_ref=floats(1, 16, 1, 512),
        filter_ref=floats(16, 1, 1, 64),
        feature_group_count=16,
    )
    turned = {"cos": floats(32, 1, 16), "sin": floats(32, 1, 16)}
    for relayout in (True, False):
        yield kernel(
            "core.embeddings.rope:RoPE",
            2,
            x_in=floats(64, 1, 1, 16),
            lnc_shard=True,
            contiguous_layout=relayout,
            relayout_in_sbuf=relayout,
            **turned,
        )
    heads = {"q": floats(1, 8, 128, 128), "k": floats(1, 2, 128, 128)}
    yield kernel(
        "core.embeddings.rope_hf:rope_hf",
        1,
        q_out=np.zeros_like(heads["q"]),
        k_out=np.zeros_like(heads["k"]),
        cos=floats(1, 128, 128),
        sin=floats(1, 128, 128),
        **heads,
    )
    norm = {"gamma": floats(1, 3072, dtype=F16), "beta": floats(1, 3072, dtype=F16)}
    for shard_on_h in (True, False):
        yield kernel(
            "core.subkernels.layernorm_tkg:layernorm_tkg",
            2,
            input=floats(4, 1, 3072, dtype=F16),
            output=np.zeros((128, 4, 24), F16),
            shard_on_h=shard_on_h,
            **norm,
        )
    logits = floats(32, 4096)
    targets = np.arange(32, dtype=np.int32)
    loss = {
        "logits_hbm": logits,
        "targets_hbm": targets,
        "positions_per_batch": 8,
        "chunk_size": 2048,
    }
    place = "experimental.loss.cross_entropy"
    yield kernel(f"{place}:cross_entropy_forward", 2, **loss)
    state = floats(32, dtype=BF16)
    yield kernel(f"{place}:cross_entropy_backward", 2, lse_state_hbm=state, **loss)
    place = "core.output_projection.output_projection_cte.output_projection_cte"
    weight = {"weight": floats(512, 1024), "bias": floats(1, 1024)}
    yield kernel(f"{place}:output_projection_cte", 2, attention=floats(1, 4, 128, 256), **weight)
    place = "core.output_projection.output_projection_tkg"
    for turns in (False, True):
        yield kernel(
            f"{place}:output_projection_tkg",
            2,
            attention=floats(128, 2, 4, 1),
            TRANSPOSE_OUT=turns,
            **weight,
        )
    parts = ("q_ref", "k_ref", "v_ref", "o_ref", "dy_ref")
    heads = {name: floats(1, 2, 128, 512) for name in parts}
    for mixed in (False, True):
        yield kernel(
            "core.attention.attention_bwd:attention_bwd",
            2,
            lse_ref=floats(1, 2, 128, 4, dtype=F32),
            use_causal_mask=True,
            mixed_precision=mixed,
            **heads,
        )
    yield from _of_ranks(library, floats)


def _topk(library: VendorLibrary, inp: Any) -> Any:
    """Launch top-k as its host program does, which names the cores itself."""
    return library.get("core.topk.rotational_topk", "topk")[2](inp, 64)


def _attention_tkg(library: VendorLibrary, q: Any, k_active: Any, **inputs: Any) -> Any:
    """Call decode attention as part of a kernel, with an output and memory to work in."""
    nl, isa = library.nl, library.nki.isa
    place = "core.attention.attention_tkg"
    config = library.get(f"{place}_utils", "AttnTKGConfig")(
        bs=4,
        q_head=8,
        s_active=1,
        curr_sprior=1024,
        full_sprior=1024,
        d_head=128,
        qk_in_sb=True,
    )
    manager = library.get("core.utils.allocator", "create_auto_alloc_manager")()
    manager.open_scope()
    out = nl.ndarray((4, 8, 128, 1), dtype=q.dtype, buffer=nl.shared_hbm)
    operands = {"q": q, "k_active": k_active}
    for name, value in operands.items():
        operands[name] = nl.ndarray(value.shape, dtype=value.dtype, buffer=nl.sbuf)
        isa.dma_copy(operands[name], value)
    inputs |= operands
    library.get(place, "attention_tkg")(out=out, cfg=config, sbm=manager, **inputs)
    manager.close_scope()
    return out


def _of_ranks(
    library: VendorLibrary, floats: Callable[..., Any]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield kernels that exchange between four ranks."""
    group, place = ReplicaGroup([[0, 1, 2, 3]]), "experimental.collectives"

    def on_ranks(module: str, name: str, lnc: int, names: tuple[str, ...], **options: Any) -> Any:
        found = library.get(f"{place}.{module}", name)
        shape = (512, 64) if "inp" in names else (512, 512)
        ranks = [{one: floats(*shape) for one in names} | options for _ in range(4)]
        return name, partial(nki_sim.run_ranks, found, ranks, lnc=lnc, options=OPTIONS)

    options: dict[str, Any] = {"replica_groups": group, "tp_degree": 4}
    yield on_ranks("sb2sb_allgather", "allgather_sb2sb_tiled", 2, ("inp",), **options)
    for in_hbm in (True, False):
        options = {"tp_degree": 4, "num_groups": 1, "force_hbm_cc": in_hbm}
        yield on_ranks("fg_allgather", "fine_grained_allgather", 1, ("lhs",), **options)
        yield on_ranks("fgcc", "allgather_compute_matmul", 2, ("lhs", "rhs"), **options)
