"""neuron-moe trace: record which experts a text chooses, and say what follows for prefill.

    neuron-moe trace --model tiny_gpt_oss

Reads texts with a domain each from a file of JSON lines ({"domain": ..., "text": ...}), runs them
through the model in prefill, and writes one routing trace for each domain (models/routing_trace.py)
and a heat map of the load. Prints the skew, and what `explain()` says of the busiest layer: path,
block size and the padding that this load causes.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from neuron_moe import MoE
from neuron_moe.errors import check_positive_int
from neuron_moe.explain import BLOCK_SIZES
from neuron_moe.models.expert_load import moe_layers
from neuron_moe.models.loader import load_model
from neuron_moe.models.routing_trace import RoutingTrace, record_routing
from neuron_moe.models.shipped import TINY_NAME, checkpoint_folder
from neuron_moe.models.text import TextCodec
from neuron_moe.tools.console import format_table, print_json_line

HELD_OUT_FILE = "heldout.jsonl"
_PREFILL_TOKENS = 1024


def read_texts(path: Path) -> dict[str, list[str]]:
    """Read JSON lines with "domain" and "text"; return the texts of each domain, in order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not such an object.
    """
    texts: defaultdict[str, list[str]] = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: must be JSON, but {error}.") from error
            if not isinstance(record, dict) or not {"domain", "text"} <= record.keys():
                raise ValueError(
                    f"{path}, line {number}: must be a JSON object with domain and text."
                )
            texts[record["domain"]].append(record["text"])
    if not texts:
        raise ValueError(f"{path}: holds no text. Give JSON lines with domain and text.")
    return dict(texts)


def cut_sequences(
    texts: Sequence[str], codec: TextCodec, most_tokens: int, longest: int
) -> list[list[int]]:
    """Return the texts' tokens, each text cut to `longest`, `most_tokens` in all."""
    sequences: list[list[int]] = []
    left = most_tokens
    for text in texts:
        tokens = codec.encode(text)[: min(longest, left)]
        if not tokens:
            break
        sequences.append(tokens)
        left -= len(tokens)
    return sequences


def skew(load_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the busiest expert's load over the mean of its layer, [L]."""
    busiest: NDArray[np.float64] = load_LE.max(axis=1) / load_LE.mean(axis=1)
    return busiest


def padding_rows(moe: MoE, trace: RoutingTrace, tokens: int) -> list[dict[str, Any]]:
    """Return what explain() says of each layer for a prefill of the trace's first tokens.

    Args:
        moe: any layer of the model; all have the same sizes.
        trace: the recorded choices.
        tokens: T of the prefill; at most those of the trace.

    Returns:
        For each layer the path, the block size it would use, and the padding at each block size:
        worst and expected (computed) and actual (from the trace).
    """
    rows = []
    for layer, load_E in enumerate(trace.load_LE(last=tokens)):
        told = moe.explain("prefill", tokens, tokens_per_expert=load_E.tolist())
        rows.append(
            {
                "layer": layer,
                "path": told.path,
                "block_size": told.block_size,
                "busiest_over_mean": float(load_E.max() / load_E.mean()),
                "padding": {
                    size: {
                        "worst": padding.worst,
                        "expected": padding.expected,
                        "actual": padding.actual,
                    }
                    for size, padding in told.padding_by_block_size.items()
                },
            }
        )
    return rows


def draw_domains(traces: Mapping[str, RoutingTrace], path: Path, *, title: str) -> None:
    """Draw the load of every expert, a panel a layer, a row a domain, against the layer's mean.

    Args:
        traces: by domain.
        path: PNG to write.
        title: says what was run; the numbers are measured.
    """
    loads_DLE = np.stack([trace.load_LE() for trace in traces.values()]).astype(np.float64)
    share_DLE = loads_DLE / loads_DLE.mean(axis=2, keepdims=True)
    num_layers = share_DLE.shape[1]
    figure = Figure(figsize=(9.0, 1.1 + 1.15 * num_layers), dpi=110, layout="constrained")
    panels = figure.subplots(num_layers, 1, sharex=True, squeeze=False)[:, 0]
    norm = PowerNorm(0.6, vmin=0, vmax=float(share_DLE.max()))
    for layer, axes in enumerate(panels):
        image = axes.imshow(share_DLE[:, layer], cmap="magma_r", norm=norm, aspect="auto")
        axes.set_yticks(range(len(traces)), list(traces), fontsize=7)
        busiest = share_DLE[:, layer].max()
        axes.set_title(f"layer {layer}: busiest {busiest:.1f} x mean", fontsize=8, loc="left")
    panels[-1].set_xlabel("expert")
    figure.colorbar(image, ax=list(panels), label="load / mean of the layer [measured]")
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(argv: list[str] | None = None) -> int:
    """Record, write and report; return 0."""
    args = _parser().parse_args(argv)
    for name in ("tokens", "longest"):
        check_positive_int(f"--{name}", getattr(args, name))
    folder = checkpoint_folder(args.model)
    texts = read_texts(args.texts or folder / HELD_OUT_FILE)
    codec, model = TextCodec(folder), load_model(folder)
    layers = moe_layers(model)
    traces = {}
    for domain, domain_texts in texts.items():
        sequences = cut_sequences(domain_texts, codec, args.tokens, args.longest)
        traces[domain] = record_routing(model, sequences)
        args.out.mkdir(parents=True, exist_ok=True)
        traces[domain].save(args.out / f"{domain}.npz")
    picture = args.out / "load.png"
    draw_domains(traces, picture, title=f"{folder.name}: tokens per expert, by layer and domain")
    rows = {
        domain: padding_rows(layers[0], trace, min(_PREFILL_TOKENS, trace.num_tokens))
        for domain, trace in traces.items()
    }
    _report(traces, rows, layers[0])
    print_json_line(
        "trace",
        model=folder.name,
        kind="measured",
        tokens={domain: trace.num_tokens for domain, trace in traces.items()},
        busiest_over_mean={
            domain: [round(float(value), 3) for value in skew(trace.load_LE())]
            for domain, trace in traces.items()
        },
        prefill_padding={domain: _mean_padding(rows[domain]) for domain in rows},
        out=str(args.out),
        picture=str(picture),
    )
    return 0


def _report(
    traces: Mapping[str, RoutingTrace], rows: Mapping[str, list[dict[str, Any]]], moe: MoE
) -> None:
    num_layers = len(next(iter(rows.values())))
    print("busiest expert over the mean of its layer, by domain  [measured]")
    table = [["domain", "tokens", *(f"layer {layer}" for layer in range(num_layers))]]
    for domain, trace in traces.items():
        shares = [f"{share:.2f}" for share in skew(trace.load_LE())]
        table.append([domain, str(trace.num_tokens), *shares])
    print(format_table(table) + "\n")
    domain, layer = max(
        ((domain, layer) for domain in rows for layer in range(num_layers)),
        key=lambda at: rows[at[0]][at[1]]["busiest_over_mean"],
    )
    trace = traces[domain]
    tokens = min(_PREFILL_TOKENS, trace.num_tokens)
    load_E = trace.load_LE(last=tokens)[layer]
    print(f"explain() of the most uneven prefill, {domain}, layer {layer}:")
    print(moe.explain("prefill", tokens, tokens_per_expert=load_E.tolist()))
    print(
        "\npadding by block size, mean of layers: worst and uniform [computed], actual [measured]"
    )
    table = [["block size", "worst", "uniform", *rows]]
    for size in BLOCK_SIZES:
        first = next(iter(rows.values()))[0]["padding"][size]
        actual = [_mean_padding(rows[domain])[size] for domain in rows]
        padding = [first["worst"], first["expected"], *actual]
        table.append([str(size), *(f"{share:.0%}" for share in padding)])
    print(format_table(table))


def _mean_padding(layers: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the actual padding at each block size, mean of the layers."""
    return {
        size: round(float(np.mean([layer["padding"][size]["actual"] for layer in layers])), 4)
        for size in BLOCK_SIZES
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="neuron-moe trace", description=__doc__)
    parser.add_argument("--model", default=TINY_NAME, help="checkpoint folder, or tiny_gpt_oss")
    parser.add_argument("--texts", type=Path, help="JSON lines; default: the checkpoint's held-out")
    parser.add_argument("--out", type=Path, default=Path("out/trace"), help="folder to write")
    parser.add_argument("--tokens", type=int, default=4096, help="most tokens a domain")
    parser.add_argument("--longest", type=int, default=1024, help="most tokens a sequence")
    return parser
