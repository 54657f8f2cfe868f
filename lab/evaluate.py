"""neuron-moe evaluate: what each weight format costs, in bits per byte of held-out text.

    neuron-moe evaluate --model tiny_gpt_oss [--bf16 FOLDER] [--check]

Computes the loss of a GPT-OSS checkpoint with its experts in each format, by our model and, with
--check, by transformers on the same files:

    mxfp4   the checkpoint as it is; each implementation decodes it by itself
    e5m2    its MXFP4 codes re-coded as fp8 e5m2 with power-of-two scales: the same values
    e4m3    its values quantised to fp8 e4m3 in Trainium's range, one scale per expert and channel
    bf16    the weights before quantisation, which are not shipped: give their folder with --bf16,
            or see what was recorded when they were at hand (evaluation.json in the model's folder)

Texts are JSON lines with "domain" and "text"; every sample starts with the start token, and every
token after it is predicted. Arithmetic is float32, so that only the weights differ.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from lab.routing.texts import HELD_OUT_FILE, read_texts
from neuron_moe.checkpoint import open_checkpoint
from neuron_moe.errors import check_positive_int
from neuron_moe.models.loader import load_model, read_config
from neuron_moe.models.shipped import TINY_NAME, checkpoint_folder
from neuron_moe.models.text import TextCodec
from neuron_moe.quantize import (
    E5M2,
    decode_mxfp4,
    dequantize_fp8,
    quantize_fp8,
    recode_mxfp4_to_fp8,
)
from neuron_moe.tools.console import fitting_threads, format_table, progress_bar, tell_json
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.reference import check_installed

RECORD_FILE = "evaluation.json"
_BATCH = 8
_IMPLEMENTATIONS = "ours - transformers"  # ends the names of such differences
_COLOURS = ("#2a6fb0", "#c8501e", "#3a8f3a", "#6f4fb0")
Logits = Callable[[Tensor], Tensor]


def expert_values(blocks: Tensor, scales: Tensor, weight_format: str) -> Tensor:
    """Return what an MXFP4 expert weight is worth in another format.

    Args:
        blocks: [E, out, G, 16] uint8.
        scales: [E, out, G] uint8.
        weight_format: "e5m2" or "e4m3".

    Returns:
        [E, 32 G, out] float32, the layout of an unquantised GPT-OSS checkpoint.
    """
    if weight_format == "e5m2":
        return dequantize_fp8(recode_mxfp4_to_fp8(blocks, scales, E5M2), torch.float32).mT
    values_EIO = decode_mxfp4(blocks, scales, dtype=torch.float32).mT
    return dequantize_fp8(quantize_fp8(values_EIO), torch.float32)


def write_variant(folder: Path, out: Path, weight_format: str) -> None:
    """Write an MXFP4 checkpoint with the values of another expert format, unquantised, in float32.

    Args:
        folder: the MXFP4 checkpoint.
        out: an empty folder.
        weight_format: "e5m2" or "e4m3".
    """
    checkpoint = open_checkpoint(folder)
    tensors = {}
    for name in checkpoint.tensors:
        if name.endswith("_blocks"):
            weight = name.removesuffix("_blocks")
            scales = checkpoint.read(weight + "_scales")
            tensors[weight] = expert_values(checkpoint.read(name), scales, weight_format)
        elif not name.endswith("_scales"):
            tensors[name] = checkpoint.read(name).float()
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = read_config(folder)
    config.pop("quantization_config", None)
    config["dtype"] = "float32"
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@torch.inference_mode()
def losses_of(logits_of: Logits, samples: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return the loss of every sample in bits.

    Args:
        logits_of: token ids [U, S] -> logits [U, S, V]; causal.
        samples: token ids; the first of each is given, the others are predicted.

    Returns:
        [samples] float64.
    """
    bits = np.zeros(len(samples))
    by_length = sorted(range(len(samples)), key=lambda index: len(samples[index]))
    for first in range(0, len(samples), _BATCH):
        batch = by_length[first : first + _BATCH]
        longest = max(len(samples[index]) for index in batch)
        # Padded on the right: no token that counts can see it.
        rows = [[*samples[index], *[0] * (longest - len(samples[index]))] for index in batch]
        ids_US = torch.tensor(rows)
        logs_USV = logits_of(ids_US)[:, :-1].double().log_softmax(-1)
        nats_US = -logs_USV.gather(2, ids_US[:, 1:, None])[..., 0]
        for index, nats_S in zip(batch, nats_US, strict=True):
            bits[index] = float(nats_S[: len(samples[index]) - 1].sum()) / math.log(2)
    return bits


@contextmanager
def format_folders(folder: Path, bf16: Path | None) -> Iterator[dict[str, Path]]:
    """Give a checkpoint folder for each format; those that are made are removed at the end."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = {} if bf16 is None else {"bf16": bf16}
        folders["mxfp4"] = folder
        for weight_format in ("e5m2", "e4m3"):
            made = Path(scratch) / weight_format
            made.mkdir()
            write_variant(folder, made, weight_format)
            folders[weight_format] = made
        yield folders


def our_logits(folder: Path) -> Logits:
    """Return our model of a checkpoint as a function, in float32."""
    model = load_model(folder, dtype=torch.float32)
    return lambda ids_US: model(ids_US)


def their_logits(folder: Path) -> Logits:
    """Return transformers' model of a checkpoint as a function, in float32.

    It decodes MXFP4 to bfloat16, which holds every MXFP4 value; widening changes nothing.
    """
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    )
    model = model.float().eval()
    return lambda ids_US: model(ids_US).logits


def draw_differences(
    differences: Mapping[str, NDArray[np.float64]], path: Path, *, title: str
) -> None:
    """Draw how per-sample losses differ: between formats, and between implementations.

    Args:
        differences: by name, [samples] bits per byte; a panel for each of the two, if it has any.
        path: PNG to write.
        title: says what was measured.
    """
    formats = {name: values for name, values in differences.items() if _IMPLEMENTATIONS not in name}
    others = {name: values for name, values in differences.items() if name not in formats}
    panels = [
        (draw, found) for draw, found in ((_draw_signed, formats), (_draw_sizes, others)) if found
    ]
    figure = Figure(figsize=(7.5, 0.6 + 2.9 * len(panels)), dpi=110, layout="constrained")
    for axes, (draw, found) in zip(
        figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True
    ):
        draw(axes, found)
        axes.set_ylabel("samples")
        axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_signed(axes: Axes, differences: Mapping[str, NDArray[np.float64]]) -> None:
    """Draw differences about zero; those that are zero throughout are described in words."""
    widest = max(float(np.abs(values).max()) for values in differences.values()) or 1e-12
    for (name, values), colour in zip(differences.items(), _COLOURS, strict=False):
        if not values.any():
            axes.plot([], [], color=colour, label=f"{name}: none on any sample")
            continue
        axes.hist(
            values,
            bins=41,
            range=(-widest, widest),
            histtype="step",
            linewidth=1.5,
            color=colour,
            label=f"{name}: mean {values.mean():+.1e}",
        )
    axes.axvline(0, color="#333333", linewidth=0.8)
    axes.set_xlabel("difference of the loss, bits per byte [measured]")


def _draw_sizes(axes: Axes, differences: Mapping[str, NDArray[np.float64]]) -> None:
    """Draw how large differences are, whatever their sign, on a logarithmic axis."""
    bins = np.geomspace(1e-10, 1e-2, 41).tolist()
    for number, (name, values) in enumerate(differences.items()):
        sizes = np.clip(np.abs(values), bins[0], bins[-1])
        # Lines may be on each other: the first ones are drawn wider.
        axes.hist(
            sizes,
            bins=bins,
            histtype="step",
            linewidth=1.5 * (len(differences) - number),
            color=_COLOURS[number % len(_COLOURS)],
            label=name,
        )
    axes.set_xscale("log")
    axes.set_xlabel("size of the difference, bits per byte [measured]")


def summarise(
    bits: Mapping[tuple[str, str], NDArray[np.float64]],
    domains: Sequence[str],
    num_bytes: NDArray[np.int64],
) -> dict[str, dict[str, Any]]:
    """Turn losses into bits per byte of each format.

    Args:
        bits: by (format, "ours" or "transformers"), the loss of each sample in bits.
        domains: the domain of each sample.
        num_bytes: UTF-8 bytes of each sample.

    Returns:
        By format: ours, by_domain, and where transformers was run, transformers and
        relative_difference.
    """
    summary: dict[str, dict[str, Any]] = {}
    of_domain = {name: np.array([d == name for d in domains]) for name in dict.fromkeys(domains)}
    for (weight_format, who), values in bits.items():
        row = summary.setdefault(weight_format, {})
        row[who] = float(values.sum() / num_bytes.sum())
        if who == "ours":
            row["by_domain"] = {
                name: float(values[here].sum() / num_bytes[here].sum())
                for name, here in of_domain.items()
            }
        else:
            row["relative_difference"] = abs(row["ours"] / row["transformers"] - 1)
    return summary


def read_recorded_bf16(folder: Path) -> dict[str, Any] | None:
    """Return the bf16 loss that was recorded beside a checkpoint, or None where none was.

    Returns:
        ours and transformers: bits per byte of bf16; mxfp4: of MXFP4 in the same run; samples.
    """
    path = folder / RECORD_FILE
    if not path.is_file():
        return None
    record = json.loads(path.read_text(encoding="utf-8"))
    formats = record["formats"]
    return {
        "kind": "recorded",
        "samples": record["samples"],
        "ours": formats["bf16"]["ours"],
        "transformers": formats["bf16"]["transformers"],
        "mxfp4": formats["mxfp4"]["ours"],
    }


def main(argv: list[str] | None = None) -> int:
    """Evaluate; return 0, or 1 if e5m2 differs from MXFP4 or ours from transformers by 0.1 %."""
    args = _parser().parse_args(argv)
    if args.check:
        check_installed()
    if args.samples is not None:
        check_positive_int("--samples", args.samples)
    folder = checkpoint_folder(args.model)
    texts = read_texts(args.texts or folder / HELD_OUT_FILE)
    chosen = [(domain, text) for domain in texts for text in texts[domain][: args.samples]]
    codec = TextCodec(folder)
    samples = [codec.encode(text) for _, text in chosen]
    domains = [domain for domain, _ in chosen]
    num_bytes = np.array([len(text.encode()) for _, text in chosen])
    bits: dict[tuple[str, str], NDArray[np.float64]] = {}
    sides = {"ours": our_logits} | ({"transformers": their_logits} if args.check else {})
    with (
        format_folders(folder, args.bf16) as folders,
        fitting_threads(folder),
        progress_bar("computing losses") as progress,
    ):
        for weight_format, variant in folders.items():
            for side, logits_of in sides.items():
                progress(len(bits), len(folders) * len(sides))
                bits[weight_format, side] = losses_of(logits_of(variant), samples)
    summary = summarise(bits, domains, num_bytes)
    e5m2_is_mxfp4 = bool((bits["e5m2", "ours"] == bits["mxfp4", "ours"]).all())
    picture = args.out / "loss_differences.png"
    title = f"{folder.name}, {len(samples)} held-out samples, loss of each"
    draw_differences(_differences(bits, num_bytes), picture, title=title)
    _print_table(summary, e5m2_is_mxfp4)
    agrees = all(row.get("relative_difference", 0.0) < 1e-3 for row in summary.values())
    record = {
        "model": folder.name,
        "kind": "measured",
        "unit": "bits per byte",
        "samples": len(samples),
        "bytes": int(num_bytes.sum()),
        "tokens": sum(len(sample) - 1 for sample in samples),
        "formats": summary,
        "e5m2_identical_to_mxfp4": e5m2_is_mxfp4,
        "agrees_with_transformers": agrees if args.check else None,
    }
    (args.out / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")
    recorded = read_recorded_bf16(folder) if args.bf16 is None else None
    if recorded is not None:
        print(
            f"bf16, recorded on {recorded['samples']} samples, not measured now:"
            f" {recorded['ours']:.5f} (mxfp4 on the same: {recorded['mxfp4']:.5f})"
        )
    tell_json(args.json, "evaluate", **record, recorded_bf16=recorded, picture=str(picture))
    return 0 if agrees and e5m2_is_mxfp4 else 1


def _differences(
    bits: Mapping[tuple[str, str], NDArray[np.float64]], num_bytes: NDArray[np.int64]
) -> dict[str, NDArray[np.float64]]:
    """Return each format against the first, and ours against transformers, in bits per byte."""
    formats = list(dict.fromkeys(weight_format for weight_format, _ in bits))
    base = formats[0]
    differences = {
        f"{weight_format} - {base}": (bits[weight_format, "ours"] - bits[base, "ours"]) / num_bytes
        for weight_format in formats[1:]
    }
    for weight_format in formats:
        if (weight_format, "transformers") in bits:
            gap = bits[weight_format, "ours"] - bits[weight_format, "transformers"]
            differences[f"{weight_format}: {_IMPLEMENTATIONS}"] = gap / num_bytes
    return differences


def _print_table(summary: Mapping[str, Mapping[str, Any]], e5m2_is_mxfp4: bool) -> None:
    domains = list(next(iter(summary.values()))["by_domain"])
    base = summary["mxfp4"]["ours"]
    checked = any("transformers" in row for row in summary.values())
    head = ["experts", *domains, "all", "to mxfp4"]
    table = [[*head, "transformers", "apart"] if checked else head]
    for weight_format, row in summary.items():
        cells = [weight_format, *(f"{row['by_domain'][domain]:.4f}" for domain in domains)]
        cells += [f"{row['ours']:.5f}", f"{row['ours'] / base - 1:+.3%}"]
        if checked:
            cells += [f"{row['transformers']:.5f}", f"{row['relative_difference']:.1e}"]
        table.append(cells)
    print("held-out loss, bits per byte  [measured]")
    print(format_table(table))
    print(f"e5m2 re-coding identical to mxfp4 on every sample: {'yes' if e5m2_is_mxfp4 else 'NO'}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser("evaluate", __doc__)
    parser.add_argument("--model", default=TINY_NAME, help="MXFP4 checkpoint, or tiny_gpt_oss")
    parser.add_argument("--bf16", type=Path, help="the checkpoint before quantisation")
    parser.add_argument("--texts", type=Path, help="JSON lines; default: the checkpoint's held-out")
    parser.add_argument("--samples", type=int, help="samples a domain; default: all")
    parser.add_argument("--check", action="store_true", help="compare with transformers")
    parser.add_argument("--out", type=Path, default=Path("out/evaluate"), help="for the picture")
    parser.add_json_option()
    return parser
