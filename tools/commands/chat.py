"""neuron-moe chat: talk with a checkpoint, turn by turn, through its chat template.

    neuron-moe chat --model DIR --system "Answer in one sentence."

A line is a message; the model knows all that was said before. An empty line starts afresh, the end
of the input (Ctrl-D) ends the chat. On a terminal Ctrl-C ends an answer, and a message that cannot
be answered is left out.
"""

import argparse
import sys

from neuron_moe.models.generation import GenerationOptions
from neuron_moe.models.language_model import Prompting, load
from neuron_moe.tools.console import fitting_threads, progress_bar
from neuron_moe.tools.models import DTYPES, add_checkpoint_option, checkpoint_of
from neuron_moe.tools.parsers import Parser


def main(argv: list[str] | None = None) -> int:
    """Answer line after line; return the exit status."""
    args = _parser().parse_args(argv)
    folder = checkpoint_of(args)
    # What no message can change shows before minutes of loading.
    GenerationOptions(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed
    )
    Prompting(folder).encode_chat("Hello", args.system)
    with fitting_threads(folder), progress_bar("loading") as progress:
        model = load(folder, dtype=DTYPES[args.dtype], backend=args.backend, progress=progress)
    said: list[dict[str, str]] = []
    with fitting_threads(folder):
        while (message := _read_line()) is not None:
            if not message:
                said.clear()
                continue
            said.append({"role": "user", "content": message})
            try:
                answer = model.chat(
                    said,
                    system=args.system,
                    on_text=lambda piece: print(piece, end="", flush=True),
                    max_new_tokens=args.max_new_tokens,
                    temperature=args.temperature,
                    seed=args.seed + len(said),
                )
            except (ValueError, KeyboardInterrupt) as error:
                if not sys.stdin.isatty():
                    raise
                said.pop()
                print(
                    f"\n{str(error) or 'interrupted'}\nThis message is left out.", file=sys.stderr
                )
                continue
            print("\n")
            said.append({"role": "assistant", "content": answer})
    return 0


def _read_line() -> str | None:
    """Return the next message without white space around it; None at the end of the input."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    line = sys.stdin.readline()
    return line.strip() if line else None


def _parser() -> argparse.ArgumentParser:
    parser = Parser("chat", __doc__)
    add_checkpoint_option(parser)
    parser.add_argument("--system", metavar="TEXT", help="message of the system, before all others")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="default: 512")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (default)"
    )
    parser.more.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--backend", default="torch", help="torch (default), nki or cuda, on a GPU")
    parser.more.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16"
    )
    return parser
