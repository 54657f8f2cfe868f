"""neuron-moe demo: the main job on a small GPT-OSS checkpoint, checked against transformers.

    neuron-moe demo

Takes the checkpoint that ships with the package, or makes one with random weights in the published
format, MXFP4 experts and tokenizer included. Generates from a batch of prompts, says which path ran
in each phase and why, compares tokens and logits with transformers on the same files, and draws
expert load and padding.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from neuron_moe.models.expert_load import LoadRecorder, moe_layers
from neuron_moe.models.generation import GenerationOptions, pad_left
from neuron_moe.models.loader import load_model
from neuron_moe.models.sample_checkpoint import TEXT, make_checkpoint
from neuron_moe.models.shipped import checkpoint_folder, shipped_checkpoint
from neuron_moe.models.text import TextCodec
from neuron_moe.tools.commands.generate import generate_and_explain
from neuron_moe.tools.console import (
    fitting_threads,
    format_bytes,
    print_json_line,
    progress_bar,
    weight_file_bytes,
)
from neuron_moe.tools.parsers import Parser
from neuron_moe.tools.pictures import draw_expert_load, draw_padding
from neuron_moe.tools.reference import (
    Deviation,
    Reference,
    check_installed,
    count_equal,
    deviation,
)
from neuron_moe.weights.product_forms import MEASURED

PROMPTS_FILE = "demo_prompts.json"
# Lengths differ, so the batch is padded; the last one leaves the sliding window of 128 tokens.
PROMPTS = [
    "Once upon a time",
    "The router reads the hidden state, scores every expert and",
    "1, 2, 3, 4, 5,",
    "def main() ->",
    TEXT.strip().replace("\n", " ")[:700],
]
FLOAT32_TOLERANCE = 1e-4  # of the largest logit; the two sum in another order, no more


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the comparison with transformers found; all measured.

    Attributes:
        tokens_equal: greedy float32 tokens that agree, up to the first difference of each prompt.
        tokens_total: all of them.
        float32: our float32 logits against transformers' float32.
        bfloat16: our bfloat16 logits against transformers' float32.
        reference_bfloat16: transformers' bfloat16 logits against its own float32.
    """

    tokens_equal: int
    tokens_total: int
    float32: Deviation
    bfloat16: Deviation
    reference_bfloat16: Deviation

    @property
    def is_good(self) -> bool:
        """Whether all tokens agree and float32 logits differ by rounding only."""
        near = self.float32.largest <= FLOAT32_TOLERANCE * self.float32.scale
        return near and self.tokens_equal == self.tokens_total


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return 0 if ours and transformers agree, else 1."""
    args = _parser().parse_args(argv)
    check_installed()
    began = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    folder, origin = find_checkpoint(args.model, args.out)
    size = format_bytes(weight_file_bytes(folder))
    print(f"checkpoint  {folder}: {origin}, {size} of weights  [measured]\n")
    with fitting_threads(folder):
        return _run(args, folder, origin, began)


def _run(args: argparse.Namespace, folder: Path, origin: str, began: float) -> int:
    codec = TextCodec(folder)
    texts = read_prompts(folder)
    prompts = [codec.encode(text) for text in texts]
    options = GenerationOptions(
        max_new_tokens=args.max_new_tokens,
        stop_token_ids=codec.stop_token_ids,
        pad_token_id=codec.pad_token_id,
    )
    with progress_bar("loading, float32") as progress:
        model = load_model(folder, dtype=torch.float32, progress=progress, product_form=MEASURED)
    answers, explanations = _show_generation(model, prompts, texts, codec, options)
    pictures = draw_pictures(model, prompts, answers, args.out)
    print("comparing with transformers on the same files ...\n")
    outcome = compare(folder, model, prompts, answers, options)
    seconds = time.perf_counter() - began
    print(_table(outcome, pictures, seconds))
    if args.json:
        print_json_line(
            "demo",
            model=str(folder),
            origin=origin,
            kind="measured",
            is_good=outcome.is_good,
            **asdict(outcome),
            pictures=[str(path) for path in pictures],
            explain=explanations,
            seconds=seconds,
        )
    return 0 if outcome.is_good else 1


def find_checkpoint(wanted: Path | None, out: Path) -> tuple[Path, str]:
    """Return the folder to use and where it comes from: the given one, the shipped one, or made."""
    if wanted is not None:
        return checkpoint_folder(wanted), "given"
    shipped = shipped_checkpoint()
    if shipped is not None:
        return shipped, "shipped, trained on real text"
    made = make_checkpoint(out / "checkpoint")
    return made, "made now, random weights, so its words mean nothing"


def read_prompts(folder: Path) -> list[str]:
    """Return the prompts that come with a checkpoint, else some of our own."""
    path = folder / PROMPTS_FILE
    if not path.is_file():
        return PROMPTS
    texts = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{path}: must be a JSON list of strings. Correct or remove it.")
    return texts


def compare(
    folder: Path,
    model: nn.Module,
    prompts: list[list[int]],
    answers: list[list[int]],
    options: GenerationOptions,
) -> Outcome:
    """Compare with transformers: greedy tokens in float32, logits of the whole texts in both.

    Tokens are compared in float32: in bfloat16 two tokens can be equally likely within rounding,
    and either choice is right. Logits are compared on the same text, prompt and answer, so that an
    early difference cannot hide a later one.
    """
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    ids_US, real_US = pad_left(whole, options.pad_token_id)
    with progress_bar("transformers, bfloat16"):
        reference = Reference(folder)
        theirs_bf16 = reference.logits(ids_US, real_US)
    with progress_bar("transformers, float32"):
        reference.widen()
        exact = reference.logits(ids_US, real_US)
        their_answers = reference.generate(
            prompts, options.max_new_tokens, options.stop_token_ids, options.pad_token_id
        )
    with progress_bar("loading, bfloat16") as progress:
        narrow = load_model(folder, dtype=torch.bfloat16, progress=progress)
    with torch.inference_mode():
        ours_fp32 = model(ids_US, real_US=real_US)
        ours_bf16 = narrow(ids_US, real_US=real_US)
    equal, total = count_equal(answers, their_answers)
    return Outcome(
        equal,
        total,
        deviation(ours_fp32, exact, real_US),
        deviation(ours_bf16, exact, real_US),
        deviation(theirs_bf16, exact, real_US),
    )


def draw_pictures(
    model: nn.Module, prompts: list[list[int]], answers: list[list[int]], out: Path
) -> list[Path]:
    """Route prompts and answers once more with counters on; draw load and padding."""
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    ids_US, real_US = pad_left(whole, 0)
    with LoadRecorder(model) as loads, torch.inference_mode():
        model(ids_US, real_US=real_US, last_only=True)
        load_LE = loads.take()
    tokens = int(real_US.sum())
    padding = [
        layer.explain("prefill", tokens, tokens_per_expert=load.tolist()).padding_by_block_size
        for layer, load in zip(moe_layers(model), load_LE, strict=True)
    ]
    top_k = moe_layers(model)[0].router.top_k
    return [
        draw_expert_load(
            load_LE.numpy(),
            out / "expert_load.png",
            title=f"Expert load, {tokens} tokens x {top_k} experts, prompts and answers [measured]",
        ),
        draw_padding(
            padding,
            out / "padding_overhead.png",
            title=f"Padding of the blockwise path, {tokens} tokens x {top_k} of"
            f" {load_LE.shape[1]} experts",
        ),
    ]


def _show_generation(
    model: nn.Module,
    prompts: list[list[int]],
    texts: list[str],
    codec: TextCodec,
    options: GenerationOptions,
) -> tuple[list[list[int]], list[dict[str, object]]]:
    """Generate for the batch and for one prompt alone; print texts, times and paths."""
    done = [0]
    with progress_bar("generating") as progress:

        def count(_row: int, _token: int) -> None:
            done[0] += 1
            progress(done[0], len(prompts) * options.max_new_tokens)

        explanations, result = generate_and_explain(model, prompts, options, count)
    for text, ids in zip(texts, result.token_ids, strict=True):
        shown = text if len(text) <= 70 else "... " + text[-66:]
        print(f"  {shown!r}\n    -> {codec.decode(ids)!r}")
    new = sum(map(len, result.token_ids))
    print(
        f"\nprefill of {sum(map(len, prompts))} tokens {result.prefill_s:.2f} s,"
        f" {new} new tokens {result.prefill_s + result.decode_s:.2f} s in all  [measured]\n"
    )
    # A single sequence decodes along another path than a batch: show that one as well.
    alone, _ = generate_and_explain(model, prompts[:1], options)
    explanations += [explanation for explanation in alone if explanation.phase == "decode"]
    for explanation in explanations:
        print(f"{explanation}\n")
    return result.token_ids, [explanation.to_dict() for explanation in explanations]


def _table(outcome: Outcome, pictures: list[Path], seconds: float) -> str:
    """Return the closing table: what was found, all of it measured."""
    exact, ours, theirs = outcome.float32, outcome.bfloat16, outcome.reference_bfloat16
    rows = [
        f"tokens equal to transformers: {outcome.tokens_equal}/{outcome.tokens_total}"
        "  (greedy, float32)",
        f"largest logit difference, fp32: {exact.largest:.2e}"
        f"  (largest logit {exact.scale:.3g}, rms {exact.rms:.1e})",
        f"largest logit difference, bf16: {ours.largest:.2e}"
        f"  (rms {ours.rms:.1e}; transformers bf16: {theirs.largest:.2e}, rms {theirs.rms:.1e})",
        f"likeliest token kept by bf16: {ours.same_choice:.1%}"
        f"  (transformers bf16: {theirs.same_choice:.1%})",
        "all logits against transformers fp32, text for text  [measured]",
        *(f"picture: {path}" for path in pictures),
        f"time: {seconds:.1f} s  [measured]",
        "result: equal" if outcome.is_good else "result: DIFFERENT",
    ]
    width = max(map(len, rows))
    edge = "+" + "-" * (width + 2) + "+"
    return "\n".join([edge, *(f"| {row:<{width}} |" for row in rows), edge])


def _parser() -> argparse.ArgumentParser:
    parser = Parser("demo", __doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="folder to write to (default: out/demo)"
    )
    parser.add_argument("--model", type=Path, help="take this checkpoint instead")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="default: 48")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser
