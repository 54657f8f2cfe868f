"""neuron-moe compare: where a model parts from a reference, layer by layer.

    neuron-moe compare --model FOLDER --reference transformers --picture far.png

The reference is another checkpoint of the same sizes, such as the one that was converted, or
`transformers`, which reads the same files. It runs in float32, which is taken as exact, and in
bfloat16, which says what rounding alone does. The first layer that is more than 1.5 times as far
from exact as that, on the exact input, is named. All three run layer by layer, with the weights of
one layer in memory. The exit status is 1 where a layer is over, 0 where none is.

Columns: largest difference, root mean square and cosine of the whole model up to there; the same
root mean square of the reference in bfloat16; that of the stage alone on the exact input, and what
it is allowed; tokens that go to other experts (those of the reference), and by what score at most.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neuron_moe.backends import BACKENDS
from neuron_moe.errors import check_positive_int
from neuron_moe.models.layerwise import LayerwiseModel
from neuron_moe.models.loader import find_model_file, read_config
from neuron_moe.models.shipped import checkpoint_folder
from neuron_moe.tools.compare.divergence import Models, Row, compare_layers, first_over
from neuron_moe.tools.compare.picture import draw_divergence
from neuron_moe.tools.compare.transformers_model import TransformersModel
from neuron_moe.tools.console import format_table, print_json_line, progress_bar
from neuron_moe.tools.models import DTYPES, add_checkpoint_option, checkpoint_of
from neuron_moe.tools.parsers import Parser

TRANSFORMERS = "transformers"
REFERENCE_DTYPES = (torch.float32, torch.bfloat16)
NUM_SEQUENCES = 4


def main(argv: list[str] | None = None) -> int:
    """Compare, print; return the exit status."""
    args = _parser().parse_args(argv)
    models, vocab_size = _open(args)
    ids_US = _read_ids(args.prompt_ids, args.tokens, vocab_size)
    with progress_bar("comparing") as progress:
        rows = compare_layers(models, ids_US, progress)
    over = first_over(rows)
    title = f"{args.model} in {args.dtype} against {args.reference}"
    if args.picture is not None:
        draw_divergence(rows, args.picture, title=f"{title}, {ids_US.numel()} tokens [measured]")
    status = 0 if over is None else 1
    if not args.json:
        print(f"{title}, {ids_US.numel()} tokens  [measured]\n")
        print(format_table(_table(rows)))
        print(f"\n{_verdict(over)}")
        return status
    print_json_line(
        "compare",
        model=str(args.model),
        reference=str(args.reference),
        dtype=args.dtype,
        backend=args.backend,
        tokens=ids_US.numel(),
        kind="measured",
        within_rule=over is None,
        first_over=None if over is None else over.name,
        layers=[_as_json(row) for row in rows],
        picture=None if args.picture is None else str(args.picture),
    )
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser("compare", __doc__)
    add_checkpoint_option(parser)
    parser.add_argument(
        "--reference", required=True, help=f"folder of another checkpoint, or {TRANSFORMERS}"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the model")
    parser.add_argument("--backend", choices=BACKENDS, default="torch", help="of its experts")
    parser.add_argument("--prompt-ids", help="token ids such as 1,2,3; random ones by default")
    parser.add_argument(
        "--tokens", type=int, default=32, help=f"of each of {NUM_SEQUENCES} random sequences"
    )
    parser.add_argument("--picture", type=Path, help="PNG to draw the distances into")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")
    return parser


def _open(args: argparse.Namespace) -> tuple[Models, int]:
    """Return the runs, and how many tokens there are to choose from."""
    folder = checkpoint_of(args)
    ours = LayerwiseModel(folder, DTYPES[args.dtype], backend=args.backend)
    exact: Any
    rounded: Any
    if args.reference == TRANSFORMERS:
        routers = ours
        exact, rounded = (TransformersModel(folder, dtype) for dtype in REFERENCE_DTYPES)
    else:
        other = checkpoint_folder(args.reference)
        exact, rounded = (LayerwiseModel(other, dtype) for dtype in REFERENCE_DTYPES)
        routers = exact
        _check_family(folder, other)
        _check_sizes(ours.config, exact.config)
    models = Models(
        ours=ours,
        exact=exact,
        rounded=rounded,
        our_router=ours.read_router,
        exact_router=routers.read_router,
    )
    return models, ours.config.vocab_size


def _check_family(folder: Path, reference: Path) -> None:
    """Raise ValueError where two checkpoints are read by different model files."""
    own, other = (read_config(each)["model_type"] for each in (folder, reference))
    if find_model_file(own) is not find_model_file(other):
        raise ValueError(
            f"model_type={own!r} of the model, {other!r} of the reference: layers of two families"
            " compute different things. Pass a reference of the same family, or 'transformers'."
        )


def _check_sizes(ours: Any, theirs: Any) -> None:
    """Raise ValueError where two checkpoints cannot be compared."""
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        own, other = getattr(ours, name), getattr(theirs, name)
        if own != other:
            raise ValueError(
                f"{name}={own} of the model, {other} of the reference: must agree, so that layers"
                " can be compared. Pass a reference of the same architecture."
            )


def _read_ids(text: str | None, tokens: int, vocab_size: int) -> Tensor:
    """Return the token ids to run, [U, S]."""
    if text is None:
        check_positive_int("tokens", tokens)
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, vocab_size, (NUM_SEQUENCES, tokens), generator=generator)
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(
            f"prompt-ids={text!r}: must be whole numbers with commas between, such as 1,2,3."
        ) from error
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise ValueError(
            f"prompt-ids holds {outside[0]}: must be below vocab_size={vocab_size}. Correct it."
        )
    return torch.tensor([ids])


def _table(rows: list[Row]) -> list[list[str]]:
    head = ["stage", "max", "rms", "cosine", "reference's rms", "alone", "allowed", "flips"]
    table = [[*head, "margin", ""]]
    for row in rows:
        margin = row.flips.largest_margin
        table.append(
            [
                row.name,
                f"{row.drift.largest:.2e}",
                f"{row.drift.rms:.2e}",
                f"{row.drift.cosine:.6f}",
                f"{row.rounded_drift.rms:.2e}",
                f"{row.alone_rms:.2e}",
                f"{row.allowed_rms:.2e}",
                f"{row.flips.num_tokens} ({row.rounded_flips.num_tokens})",
                "-" if margin is None else f"{margin:.1e}",
                "over" if row.exceeds else "",
            ]
        )
    return table


def _verdict(over: Row | None) -> str:
    if over is None:
        return "every stage is within 1.5 times what rounding does to the reference"
    what = f"layer {over.name}" if over.name.isdigit() else over.name
    found = f"{over.alone_rms:.2e} on the exact input, allowed {over.allowed_rms:.2e}"
    return f"first over: {what}, {found}"


def _as_json(row: Row) -> dict[str, Any]:
    values = asdict(row)
    for key in ("drift", "rounded_drift", "flips", "rounded_flips"):
        values[key] = getattr(row, key)._asdict()
    return values
