"""neuron-moe bench generate: a whole checkpoint on this CPU, ours beside transformers' generate.

    neuron-moe bench generate --make

Both continue the same random prompt greedily, in this process and in turns, so that load from
outside hits them alike. Prefill is the time to the first token, decode from the first to the last;
transformers counts as the fastest of its implementations of experts, in each phase by itself.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from lab.bench.averages import half_quartile_range
from neuron_moe.backends.form_times import processor
from neuron_moe.checkpoint import save_checkpoint, unique_parameters
from neuron_moe.errors import check_choice, check_positive_int
from neuron_moe.models.generation import Decoder, GenerationOptions, generate
from neuron_moe.models.loader import build_model, find_model_file, load_model, read_config
from neuron_moe.tools.console import format_table, progress_bar, tell_json
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.reference import Reference
from neuron_moe.weights.product_forms import MEASURED

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_VARIANCE_KEPT = 3**0.5  # a uniform draw in +-sqrt(3 / n) has variance 1 / n


class Speed(NamedTuple):
    """One continuation.

    Attributes:
        prefill_s: from the call to the first token.
        decode_s: from the first token to the last.
        token_ids: new tokens.
    """

    prefill_s: float
    decode_s: float
    token_ids: list[int]


@dataclass(frozen=True)
class Task:
    """What both continue.

    Attributes:
        prompt: token ids.
        new_tokens: how many are requested; no token stops earlier.
    """

    prompt: list[int]
    new_tokens: int

    def rates(self, speeds: list[Speed], phase: str) -> list[float]:
        """Return tokens a second of each continuation in a phase."""
        if phase == "prefill":
            return [len(self.prompt) / speed.prefill_s for speed in speeds]
        return [(self.new_tokens - 1) / speed.decode_s for speed in speeds]


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table; return the exit status."""
    args = _parser().parse_args(argv)
    check_choice("--dtype", args.dtype, DTYPES)
    for name in ("layers", "prompt_tokens", "new_tokens", "repeats"):
        check_positive_int(f"--{name.replace('_', '-')}", getattr(args, name))
    if args.new_tokens < 2:
        raise ValueError("--new-tokens 1: must be at least 2. Decode starts at the second token.")
    folder = args.model
    if args.make:
        make_checkpoint(folder, {**QWEN3_30B, "num_hidden_layers": args.layers})
    stream = torch.Generator().manual_seed(args.seed)
    vocab_size = int(read_config(folder)["vocab_size"])
    prompt = torch.randint(vocab_size, (args.prompt_tokens,), generator=stream).tolist()
    task = Task(prompt, args.new_tokens)
    runs = load_both(folder, DTYPES[args.dtype], args.product_form, args.implementations)
    speeds = measure(task, runs, args.repeats)
    rows = [row_of(task, speeds, phase) for phase in ("prefill", "decode")]
    _print_table(rows)
    same = speeds["ours"][0].token_ids == speeds[args.implementations[0]][0].token_ids
    tell_json(
        args.json,
        "bench generate",
        kind="measured",
        model=str(folder),
        processor=processor(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        dtype=args.dtype,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        repeats=args.repeats,
        same_tokens=same,
        rows=rows,
    )
    return 0


def make_checkpoint(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a checkpoint with random bf16 weights, if the folder has none."""
    if (folder / "config.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    model_file = find_model_file(config["model_type"])
    model_config = model_file.Config.from_hf(config)
    with torch.device("meta"):
        model: torch.nn.Module = model_file.Model(model_config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    with torch.no_grad(), progress_bar("drawing weights") as progress:
        parameters = list(model.parameters())
        for number, parameter in enumerate(parameters):
            if parameter.ndim > 1:
                bound = _VARIANCE_KEPT / parameter.shape[-1] ** 0.5
                parameter.uniform_(-bound, bound)
            else:
                parameter.fill_(1.0)
            progress(number + 1, len(parameters))
    with progress_bar("writing weights"):
        weight_map = model_file.weight_map(model_config)
        save_checkpoint(unique_parameters(model), weight_map, folder, variant="separate")
    # Last: a folder with it is complete.
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2), encoding="utf-8")


def load_both(
    folder: Path, dtype: torch.dtype, form: str, implementations: list[str]
) -> dict[str, Callable[[Task], Speed]]:
    """Return what continues a prompt: ours, and transformers in each implementation."""
    build_model(folder)  # refuses first what is not a checkpoint of ours
    reference = Reference(folder)
    if dtype == torch.float32:
        reference.widen()
    model = load_model(folder, dtype=dtype, product_form=form)
    runs: dict[str, Callable[[Task], Speed]] = {"ours": partial(_run_ours, model)}
    return runs | {name: partial(_run_theirs, reference, name) for name in implementations}


def measure(
    task: Task, runs: Mapping[str, Callable[[Task], Speed]], repeats: int
) -> dict[str, list[Speed]]:
    """Return what was measured for each, in turns after one warm-up each."""
    warm_up = Task(task.prompt, 2)
    speeds: dict[str, list[Speed]] = {name: [] for name in runs}
    with progress_bar("generating") as progress:
        for run in runs.values():
            run(warm_up)
        for number in range(repeats):
            for name, run in runs.items():
                speeds[name].append(run(task))
            progress(number + 1, repeats)
    return speeds


def row_of(task: Task, speeds: Mapping[str, list[Speed]], phase: str) -> dict[str, Any]:
    """Return tokens a second of a phase, ours and of each implementation, and the ratio."""
    rates = {name: task.rates(each, phase) for name, each in speeds.items()}
    medians = {name: statistics.median(each) for name, each in rates.items()}
    fastest = max((name for name in rates if name != "ours"), key=lambda name: medians[name])
    return {
        "phase": phase,
        "tokens_per_s": medians,
        "spread_tokens_per_s": {name: half_quartile_range(each) for name, each in rates.items()},
        "fastest": fastest,
        "ratio_to_fastest": medians["ours"] / medians[fastest],
    }


def _run_ours(model: torch.nn.Module, task: Task) -> Speed:
    times = [time.perf_counter()]
    options = GenerationOptions(max_new_tokens=task.new_tokens)
    result = generate(
        cast(Decoder, model),
        [task.prompt],
        options,
        lambda _row, _token: times.append(time.perf_counter()),
    )
    return Speed(times[1] - times[0], times[-1] - times[1], result.token_ids[0])


def _run_theirs(reference: Reference, implementation: str, task: Task) -> Speed:
    times = [time.perf_counter()]
    token_ids = reference.stream(
        task.prompt,
        task.new_tokens,
        lambda: times.append(time.perf_counter()),
        implementation=implementation,
    )
    return Speed(times[1] - times[0], times[-1] - times[1], token_ids)


def _print_table(rows: list[dict[str, Any]]) -> None:
    names = list(rows[0]["tokens_per_s"])
    table = [["tokens/s", *names, "fastest", "ratio"]]
    for row in rows:
        cells = [
            f"{row['tokens_per_s'][name]:.1f} ± {row['spread_tokens_per_s'][name]:.1f}"
            for name in names
        ]
        table.append([row["phase"], *cells, row["fastest"], f"{row['ratio_to_fastest']:.2f}"])
    print(f"median ± half the quartile range, {processor()}, {torch.get_num_threads()} threads")
    print(format_table(table))


def _parser() -> argparse.ArgumentParser:
    parser = Parser("bench generate", __doc__)
    parser.add_json_option()
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    parser.add_argument(
        "--make",
        action="store_true",
        help="if there is none, write one of Qwen3-30B-A3B's layer sizes with random weights",
    )
    parser.add_argument("--layers", type=int, default=4, help="with --make (default: 4)")
    parser.add_argument("--dtype", default="bf16", help="bf16 (default) or fp32")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="default: 512")
    parser.add_argument("--new-tokens", type=int, default=64, help="default: 64")
    parser.add_argument("--repeats", type=int, default=5, help="timed continuations (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompt (default: 0)")
    parser.add_argument("--product-form", default=MEASURED, help="default: measured")
    parser.add_argument(
        "--implementations", nargs="+", default=["eager", "grouped_mm"], help="of transformers"
    )
    return parser
