"""neuron-moe convert: store a checkpoint in another format, cut it for ranks, or merge it again.

    neuron-moe convert --model DIR --to e4m3 --out OUT
    neuron-moe convert --model DIR --to e5m2 --tp 8 --ep 4 --out RANKS
    neuron-moe convert --model RANKS --to bf16 --out MERGED

Formats: bf16; mxfp4 (GPT-OSS under its own names, others as compressed-tensors names it); e4m3 and
e5m2 with a scale for each output channel, within the range of Trainium 2; fp8_blocks, the blocks of
128 x 128 of DeepSeek-V3. fp8_blocks stores every linear layer so, the others only the experts.
Memory holds a few copies of one expert's matrix. Interrupted, it goes on when called again with the
same options.
"""

import argparse
from pathlib import Path
from typing import Any

from neuron_moe.models.conversion import FORMATS, Conversion, ConversionOptions, LayerError, convert
from neuron_moe.tools.console import (
    format_bytes,
    format_table,
    print_json_line,
    progress_bar,
    weight_file_bytes,
)
from neuron_moe.tools.models import add_checkpoint_option, checkpoint_of
from neuron_moe.tools.parsers import Parser


def main(argv: list[str] | None = None) -> int:
    """Convert, print the errors by layer; return the exit status."""
    args = _parser().parse_args(argv)
    options = ConversionOptions(
        to=args.to,
        layout=args.layout,
        tp=args.tp,
        ep=args.ep,
        ranks=None if args.ranks is None else _read_ranks(args.ranks),
        max_shard_mib=args.max_shard_mib,
    )
    source = checkpoint_of(args)
    with progress_bar(f"converting to {args.to}", unit="bytes") as progress:
        result = convert(source, args.out, options, progress=progress)
    _print_result(result, args, weight_file_bytes(source))
    if args.json:
        print_json_line("convert", **_report(result, args))
    return 0


def _read_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks that a text such as "0-7" or "3" names."""
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal():
        raise ValueError(f"--ranks={text}: must be a rank or a run of them, such as 3 or 0-7.")
    return tuple(range(int(first), int(last or first) + 1))


def _print_result(result: Conversion, args: argparse.Namespace, source_bytes: int) -> None:
    rows = [("", "weights", "changed", "relative error", "largest")]
    for layer, error in result.errors.items():
        share = error.changed / max(error.values, 1)
        rows.append(
            (
                layer,
                str(error.values),
                f"{share:.1%}",
                f"{error.relative:.3e}",
                f"{error.largest:.3g}",
            )
        )
    print(f"{args.model} to {args.to}: what is stored beside what was read\n")
    print(format_table(rows))
    total = sum((Path(file).stat().st_size for file in result.files), 0)
    print("\nrelative error: root mean square over that of the weights  [measured]")
    if result.resumed:
        print(f"went on after {result.resumed} parameters that were done")
    print(
        f"{args.out}: {len(result.files)} files, {format_bytes(total)}; the source has"
        f" {format_bytes(source_bytes)}"
    )


def _report(result: Conversion, args: argparse.Namespace) -> dict[str, Any]:
    whole = LayerError()
    for error in result.errors.values():
        whole.add(error)
    return {
        "kind": "measured",
        "model": str(args.model),
        "to": args.to,
        "out": str(args.out),
        "tp": args.tp,
        "ep": args.ep,
        "files": [file.name for file in result.files],
        "resumed_parameters": result.resumed,
        "lossless": whole.changed == 0,
        "relative_error": whole.relative,
        "layers": [
            {
                "layer": layer,
                "values": error.values,
                "changed": error.changed,
                "relative_error": error.relative,
                "largest_error": error.largest,
            }
            for layer, error in result.errors.items()
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = Parser("convert", __doc__)
    add_checkpoint_option(parser)
    parser.add_argument("--to", required=True, choices=FORMATS, help="number format to write")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--layout", help="storage form, separate or fused (default: as published in this format)"
    )
    parser.add_argument("--tp", type=int, help="write a file for each rank: tensor-parallel ranks")
    parser.add_argument("--ep", type=int, help="the same: expert-parallel ranks")
    parser.add_argument("--ranks", help="write these ranks only, such as 0-7 (default: all)")
    parser.add_argument(
        "--max-shard-mib", type=int, default=4096, help="largest file in MiB (default: 4096)"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser
