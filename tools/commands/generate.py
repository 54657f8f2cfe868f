"""neuron-moe generate: continue one prompt or several with a checkpoint.

    neuron-moe generate --model tiny_gpt_oss --prompt "1 And it came to pass"
    neuron-moe generate --model DIR --prompt-file question.txt --chat --explain

With --ep or --tp the experts are split over that many ranks, processes of this machine.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from neuron_moe.errors import check_positive_int
from neuron_moe.explain import Explanation
from neuron_moe.models.expert_load import LoadRecorder, moe_layers
from neuron_moe.models.generation import Decoder, Generation, GenerationOptions, generate
from neuron_moe.models.language_model import load
from neuron_moe.models.loader import build_model
from neuron_moe.models.text import TextStream
from neuron_moe.parallel import parallel_state
from neuron_moe.parallel.config import ParallelConfig
from neuron_moe.parallel.failure import DEFAULT_TIMEOUT_S, START_TIMEOUT_S
from neuron_moe.plan import Step
from neuron_moe.spec import Tuning
from neuron_moe.tools.console import fitting_threads, print_json_line, progress_bar
from neuron_moe.tools.models import DTYPES, add_checkpoint_option, checkpoint_of
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.prompts import (
    Prompts,
    add_prompt_options,
    read_prompts,
    read_texts,
)
from neuron_moe.tools.ranks import check_num_processes, run_on_ranks
from neuron_moe.tuned import DECODE_MODES
from neuron_moe.weights.product_forms import FORMS, MEASURED


def main(argv: list[str] | None = None) -> int:
    """Load, generate, print; return the exit status."""
    args = _parser().parse_args(argv)
    for name in ("tp", "ep"):
        check_positive_int(f"--{name}", getattr(args, name))
    folder = checkpoint_of(args)
    texts = read_texts(args)
    if args.tp * args.ep > 1:
        if args.backend == "cuda":
            raise ValueError(
                f"--backend cuda with --tp {args.tp} --ep {args.ep}: this command takes one GPU."
                " Use --backend torch for ranks, or one rank."
            )
        _check_ranks(args, folder)
    # Simulated kernels take as long as their rank's load makes them.
    timeout_s = START_TIMEOUT_S if args.backend == "nki" else DEFAULT_TIMEOUT_S
    run_on_ranks(args.tp, args.ep, lambda: _run(args, folder, texts), timeout_s=timeout_s)
    return 0


def _check_ranks(args: argparse.Namespace, folder: Path) -> None:
    """Raise ValueError, before any process is started, where the ranks do not fit the model."""
    check_num_processes(args.tp, args.ep)
    with parallel_state.as_rank(ParallelConfig(tp=args.tp, ep=args.ep), 0):
        build_model(folder, dtype=DTYPES[args.dtype], backend=args.backend)


def _run(args: argparse.Namespace, folder: Path, texts: list[str]) -> None:
    """Do what one rank does."""
    prompts = read_prompts(args, folder, texts)
    options = GenerationOptions(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        stop_token_ids=prompts.stop_token_ids,
        pad_token_id=prompts.pad_token_id,
    )
    with fitting_threads(folder):
        _generate(args, folder, prompts, options)


def _generate(
    args: argparse.Namespace, folder: Path, prompts: Prompts, options: GenerationOptions
) -> None:
    prompt_ids = [prompt.token_ids for prompt in prompts.prompts]
    with progress_bar("loading") as progress:
        model = load(
            folder,
            dtype=DTYPES[args.dtype],
            backend=args.backend,
            progress=progress,
            product_form=args.product_form if args.backend == "torch" else None,
            tuning=None if args.decode_mode == "auto" else Tuning(decode_mode=args.decode_mode),
        ).model
    if args.backend == "nki":
        _warn_of_simulator()
    printer = _Printer(prompts)
    explanations: list[Explanation] = []
    steps = 1 if len(prompt_ids) == 1 else args.max_new_tokens  # one answer shows itself
    with _layer_bar(model, steps):
        if args.explain:
            explanations, result = generate_and_explain(model, prompt_ids, options, printer.push)
        else:
            result = generate(cast(Decoder, model), prompt_ids, options, printer.push)
    printer.finish(result)
    device = device_times(model, prompt_ids, result) if args.backend == "nki" else {}
    _report(args, folder, prompts, result, explanations, device)


def _report(
    args: argparse.Namespace,
    folder: Path,
    prompts: Prompts,
    result: Generation,
    explanations: list[Explanation],
    device: dict[str, float],
) -> None:
    summary = summarize([prompt.token_ids for prompt in prompts.prompts], result)
    for phase in ("prefill", "decode"):
        print(
            f"{phase:<8} {summary[f'{phase}_tokens']} tokens in {summary[f'{phase}_s']:.3f} s,"
            f" {summary[f'{phase}_tokens_per_s']:.1f} tokens/s  [measured]"
        )
    for phase, us in device.items():
        print(f"{phase:<8} MoE kernels of a step on the device: {us:,.0f} us  [simulated]")
    for explanation in explanations:
        print(f"\n{explanation}")
    if not args.json:
        return
    answers = [
        {
            "prompt": prompt.text,
            "prompt_ids": prompt.token_ids,
            "text": None if prompts.codec is None else prompts.codec.decode(ids),
            "token_ids": ids,
            "finish_reason": reason,
        }
        for prompt, ids, reason in zip(
            prompts.prompts, result.token_ids, result.finish_reasons, strict=True
        )
    ]
    names = ("dtype", "backend", "tp", "ep", "max_new_tokens", "temperature", "top_p", "seed")
    print_json_line(
        "generate",
        model=str(folder),
        config={name: getattr(args, name) for name in (*names, "chat", "product_form")},
        answers=answers,
        times={"kind": "measured", **summary},
        device_us={"kind": "simulated", **device},
        explain=[explanation.to_dict() for explanation in explanations],
    )


def device_times(
    model: torch.nn.Module, prompts: list[list[int]], result: Generation
) -> dict[str, float]:
    """Return the simulated microseconds of the MoE kernels of a step on this rank, by phase.

    Choices are drawn, all experts alike; layers of the same plan are timed once. On a chip, and for
    weights that the simulator does not time, there is nothing.
    """
    from neuron_moe.backends.nki.times import draw_choices, simulate_plan
    from nki_kernels import IS_SIMULATED

    steps = {"prefill": len(prompts) * max(map(len, prompts))}
    if result.num_decode_steps:
        steps["decode"] = len(prompts)
    layers = moe_layers(model)
    if not IS_SIMULATED or not layers:
        return {}
    found = {}
    for phase, tokens in steps.items():
        plan = layers[0].plan(Step(phase, tokens))
        router = layers[0].router
        index_TK = draw_choices(tokens, router.num_experts, router.top_k)
        found[phase] = len(layers) * sum(each.us for each in simulate_plan(plan, index_TK))
    return found


def _warn_of_simulator() -> None:
    from nki_kernels import IS_SIMULATED

    if IS_SIMULATED:
        print(
            "backend nki: no Neuron SDK here, so every instruction of the kernels runs on the"
            " simulator. Expect a few tokens per second of small models, and to wait for others.",
            file=sys.stderr,
        )


@contextmanager
def _layer_bar(model: torch.nn.Module, steps: int) -> Iterator[None]:
    """Show how many MoE layers were computed of those of the first `steps` steps.

    Text follows after these: the bar is gone by then, and costs nothing any more.
    """
    layers = moe_layers(model)
    done = 0
    with ExitStack() as shown:
        progress = shown.enter_context(progress_bar("computing"))

        def count(*_: object) -> None:
            nonlocal done
            done += 1
            if done < steps * len(layers):
                progress(done, steps * len(layers))
            else:
                shown.close()

        for layer in layers:
            shown.callback(layer.register_forward_hook(count).remove)
        yield


def generate_and_explain(
    model: torch.nn.Module,
    prompts: list[list[int]],
    options: GenerationOptions,
    on_token: Any = None,
) -> tuple[list[Explanation], Generation]:
    """Generate, and explain the first MoE layer in each phase with the load it really had.

    Returns:
        The explanations of prefill and (if there was a decode step) of decode, and the generation.
    """
    after_prefill: list[torch.Tensor] = []
    with LoadRecorder(model) as loads:

        def watch(row: int, token: int) -> None:
            if not after_prefill:  # the first token comes right after the prompt pass
                after_prefill.append(loads.take())
            if on_token is not None:
                on_token(row, token)

        result = generate(cast(Decoder, model), prompts, options, watch)
    layer = moe_layers(model)[0]
    tokens = len(prompts) * max(len(prompt) for prompt in prompts)
    phase = "prefill" if tokens > len(prompts) else "decode"
    load = after_prefill[0][0][list(layer.expert_mlps.local_experts(phase))].tolist()
    explanations = [layer.explain(phase, tokens, tokens_per_expert=load)]
    if result.num_decode_steps:
        # The load of many steps is no load of one: the actual padding stays open here.
        explanations.append(layer.explain("decode", len(prompts), tokens_per_expert=[]))
    return explanations, result


def summarize(prompts: list[list[int]], result: Generation) -> dict[str, Any]:
    """Return token counts and times in seconds; the first token belongs to prefill."""
    prefill_tokens = sum(len(prompt) for prompt in prompts)
    decode_tokens = sum(len(ids) - 1 for ids in result.token_ids)
    return {
        "prefill_tokens": prefill_tokens,
        "prefill_s": result.prefill_s,
        "prefill_tokens_per_s": prefill_tokens / result.prefill_s,
        "decode_tokens": decode_tokens,
        "decode_s": result.decode_s,
        "decode_tokens_per_s": decode_tokens / result.decode_s,
    }


class _Printer:
    """Print one answer as it comes; several ones when they are complete."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._is_alone = len(prompts.prompts) == 1
        self._has_begun = False
        first = prompts.prompts[0]
        self._stream = (
            TextStream(prompts.codec, first.token_ids)
            if self._is_alone and prompts.codec is not None
            else None
        )

    def push(self, _row: int, token_id: int) -> None:
        """Print what a token adds to the only answer, behind its prompt.

        The prompt waits for the first token: before it, a progress bar owns the line.
        """
        if not self._is_alone:
            return
        if self._stream is not None:
            text = self._stream.push(token_id)
        else:
            text = f",{token_id}" if self._has_begun else str(token_id)
        if not self._has_begun:
            text = self._prompts.prompts[0].shown + text
        self._has_begun = True
        print(text, end="", flush=True)

    def finish(self, result: Generation) -> None:
        """Print what is left."""
        if self._is_alone:
            print(("" if self._stream is None else self._stream.finish()) + "\n")
            return
        prompts = self._prompts.prompts
        for number, (prompt, ids) in enumerate(zip(prompts, result.token_ids, strict=True)):
            print(f"[{number + 1}] {prompt.shown}{self._prompts.show(ids)}\n")


def _parser() -> argparse.ArgumentParser:
    parser = Parser("generate", __doc__)
    add_checkpoint_option(parser)
    add_prompt_options(parser)
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default: 64")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)"
    )
    parser.more.add_argument("--top-p", type=float, default=1.0, help="default: 1, all tokens")
    parser.more.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--backend", default="torch", help="torch (default), nki or cuda, on a GPU")
    parser.more.add_argument(
        "--decode-mode",
        choices=("auto", *DECODE_MODES),
        default="auto",
        help="experts that decode reads with --backend nki (default: auto, by the cost model)",
    )
    parser.add_argument(
        "--ep", type=int, default=1, help="ranks that split the experts (default: 1)"
    )
    parser.add_argument(
        "--tp", type=int, default=1, help="ranks that split each expert (default: 1)"
    )
    parser.more.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16"
    )
    parser.more.add_argument(
        "--product-form",
        default=MEASURED,
        help=f"how a CPU multiplies with experts: {MEASURED} (default) or {', '.join(FORMS)}",
    )
    parser.add_argument(
        "--explain", action="store_true", help="say which path ran in each phase, and why"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser
