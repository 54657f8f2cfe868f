"""neuron-moe inspect --explain: how a MoE layer computes a step, why, and how to change that.

    neuron-moe inspect --explain --model qwen3_30b_a3b --tp 8 --tokens 64

Reads no weights: a config.json says what the layer is. The plan is the one that the layer would run
on a rank of --tp x --ep; with --tuned, the one of a file of `neuron-moe tune`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from neuron_moe.errors import check_positive_int
from neuron_moe.models.rank_layer import RankLayer
from neuron_moe.paths import PHASES
from neuron_moe.spec import DEFAULT_LNC_SIZE, Tuning
from neuron_moe.tools.console import print_json_line
from neuron_moe.tools.models import MODEL_HELP, read_model
from neuron_moe.tools.parsers import Parser
from neuron_moe.tuned import DECODE_MODES, TunedPlans, read_tuned


def main(argv: list[str] | None = None) -> int:
    """Explain; return the exit status."""
    args = _parser().parse_args(argv)
    check_positive_int("--tokens", args.tokens)
    raw_config, _ = read_model(Path(args.model))
    tuned, title = TunedPlans(), f"{args.model}, TP {args.tp} x EP {args.ep}"
    if args.tuned is not None:
        found = read_tuned(args.tuned)
        found.check(str(args.tuned), tp=args.tp, ep=args.ep, lnc=args.lnc)
        tuned, title = found.plans, f"{title}, tuned as {found.model}"
    tuning = Tuning(
        block_size=args.block_size,
        num_cores=args.lnc,
        decode_mode=args.decode_mode,
        tuned=tuned,
        features=args.features,
    )
    layer = RankLayer(
        raw_config, args.model, tp=args.tp, ep=args.ep, backend=args.backend, tuning=tuning
    )
    explanation = layer.plan(args.phase, args.tokens).explain()
    print(f"{title}, backend {args.backend}\n{explanation}")
    if args.json:
        print_json_line(
            "explain",
            model=args.model,
            tp=args.tp,
            ep=args.ep,
            backend=args.backend,
            **explanation.to_dict(),
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser("inspect --explain", __doc__)
    parser.add_argument("--model", required=True, help=MODEL_HELP)
    parser.add_argument("--phase", choices=PHASES, default="prefill", help="default: prefill")
    parser.add_argument("--tokens", type=int, required=True, help="of a step")
    parser.add_argument("--backend", choices=("nki", "torch"), default="nki", help="default: nki")
    parser.add_argument("--tp", type=int, default=1, help="ranks that split an expert")
    parser.add_argument("--ep", type=int, default=1, help="ranks that split the experts")
    parser.add_argument("--lnc", type=int, default=DEFAULT_LNC_SIZE, help="cores a rank, 1 or 2")
    parser.add_argument("--block-size", type=int, help="slots of a block; default: the backend's")
    parser.add_argument("--decode-mode", choices=("auto", *DECODE_MODES), default="auto")
    parser.add_features_option()
    parser.add_argument("--tuned", type=Path, metavar="FILE", help="written by neuron-moe tune")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser
