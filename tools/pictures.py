"""Pictures of expert load and padding, drawn from numbers that somebody else computed.

Letters: L MoE layers, E experts.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from neuron_moe.blocks import PaddingOverhead

WORST, EXPECTED, ACTUAL = "#9a9a9a", "#2a6fb0", "#c8501e"


def draw_expert_load(load_LE: NDArray[np.int64], path: Path, *, title: str) -> Path:
    """Draw the load of each expert of each layer against the mean of its layer.

    Args:
        load_LE: [L, E] tokens an expert got.
        path: PNG to write.
        title: says what was run, and that the numbers are measured.
    """
    num_layers, num_experts = load_LE.shape
    share_LE = load_LE / np.maximum(load_LE.mean(axis=1, keepdims=True), 1e-9)
    figure = Figure(figsize=(max(7.0, 0.3 * num_experts + 3), 1.8 + 0.42 * num_layers), dpi=120)
    axes = figure.add_subplot()
    image = axes.imshow(
        share_LE, cmap="Blues", vmin=0, vmax=max(2.0, share_LE.max()), aspect="auto"
    )
    axes.set_xlabel("expert")
    axes.set_ylabel("MoE layer")
    axes.set_yticks(range(num_layers))
    axes.set_xticks(range(0, num_experts, max(1, num_experts // 16)))
    for layer, shares in enumerate(share_LE):
        text = f"busiest {shares.max():.2f} x, idle {int((shares == 0).sum())}"
        axes.text(num_experts - 0.3, layer, text, va="center", fontsize=8)
    bar = figure.colorbar(image, ax=axes, pad=1.6 / figure.get_figwidth())
    bar.set_label("load / mean of the layer")
    axes.set_title(title, fontsize=10, loc="left")
    return save_figure(figure, path, bbox_inches="tight")


def draw_padding(
    layers: Sequence[Mapping[int, PaddingOverhead]], path: Path, *, title: str
) -> Path:
    """Draw the padding overhead of the blockwise path against the block size.

    Args:
        layers: for each MoE layer, the overhead at each block size; `actual` is set.
        path: PNG to write.
        title: says for how many tokens.
    """
    sizes = sorted(layers[0])
    worst = [layers[0][size].worst for size in sizes]
    expected = [layers[0][size].expected for size in sizes]
    actual = np.array([[layer[size].actual for size in sizes] for layer in layers], dtype=float)
    figure = Figure(figsize=(7.0, 4.4), dpi=120)
    axes = figure.add_subplot()
    axes.plot(sizes, worst, "--", color=WORST, label="every routing covered, static N [computed]")
    axes.plot(sizes, expected, "o-", color=EXPECTED, label="uniform routing, mean [computed]")
    axes.plot(
        sizes, actual.mean(axis=0), "s-", color=ACTUAL, label="this run, mean of layers [measured]"
    )
    axes.fill_between(sizes, actual.min(axis=0), actual.max(axis=0), color=ACTUAL, alpha=0.2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("block size (token slots)")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylabel("padding slots / slots with a token")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.legend(fontsize=8)
    axes.set_title(title, fontsize=10, loc="left")
    return save_figure(figure, path, bbox_inches="tight")


def draw_save_percent(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> Path:
    """Draw time and memory of training against save_percent, a line for each shape.

    Args:
        rows: of `bench gpu`; taken are ours, at the tokens and the routing of the first.
        path: PNG to write.
        title: says on which machine.
    """
    where = [rows[0][field] for field in ("T", "routing")]
    mine = [
        row
        for row in rows
        if "save_percent=" in row["peer"] and [row["T"], row["routing"]] == where
    ]
    figure = Figure(figsize=(9.0, 3.6), dpi=120)
    numbers = (("fwd_bwd_ms", "forward and backward, ms"), ("peak_gib", "peak memory, GiB"))
    for number, (field, label) in enumerate(numbers, 1):
        axes = figure.add_subplot(1, 2, number)
        for shape in dict.fromkeys(row["shape"] for row in mine):
            points = sorted(
                (int(row["peer"].split("=")[1]), row[field])
                for row in mine
                if row["shape"] == shape
            )
            axes.plot(*zip(*points, strict=True), marker="o", label=shape)
        axes.set_xlabel("save_percent")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.suptitle(title, fontsize=10)
    return save_figure(figure, path, bbox_inches="tight")


def draw_training(records: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> Path:
    """Draw the loss of a run and the busiest expert of each layer, over its steps.

    Args:
        records: lines of train.jsonl; those without a step are left out.
        path: PNG to write.
        title: says what was trained, and on which machine.
    """
    lines = [record for record in records if "step" in record]
    steps = [line["step"] for line in lines]
    figure = Figure(figsize=(9.0, 3.6), dpi=120)
    axes = figure.add_subplot(1, 2, 1)
    axes.plot(steps, [line["loss_nats"] for line in lines])
    axes.set_ylabel("loss of the batch, nats a token")
    axes.set_xlabel("step")
    axes = figure.add_subplot(1, 2, 2)
    for layer, shares in enumerate(zip(*(line["busiest_expert"] for line in lines), strict=True)):
        axes.plot(steps, shares, label=f"layer {layer}", linewidth=1.0)
    axes.set_ylabel("busiest expert / mean")
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    return save_figure(figure, path, bbox_inches="tight")


def save_figure(figure: Figure, path: Path, **options: Any) -> Path:
    """Write a figure, by matplotlib's options; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, **options)
    return path
