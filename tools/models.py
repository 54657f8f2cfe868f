"""Models by any of their names: ours, other spellings, Hugging Face ids, paths."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from neuron_moe.checkpoint import Checkpoint, open_checkpoint
from neuron_moe.configs import config_names, find_config, load_config
from neuron_moe.models.hf_config import read_json_object
from neuron_moe.models.loader import CONFIG_FILE, parse_config, read_config
from neuron_moe.models.shipped import checkpoint_folder, find_checkpoint
from neuron_moe.tools.parsers import DETAILS, Parser

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CHECKPOINT_HELP = "folder of the checkpoint, or its id on Hugging Face"
MODEL_HELP = (
    "folder, config.json or the name of a published model"
    f"{DETAILS}, in any spelling: {', '.join(config_names())}"
)


def add_checkpoint_option(parser: Parser, text: str = CHECKPOINT_HELP) -> None:
    """Add --model and --download, which `checkpoint_of` reads."""
    parser.add_argument("--model", type=Path, required=True, help=text)
    add_download_option(parser)


def add_download_option(parser: Parser) -> None:
    """Add --download."""
    parser.more.add_argument(
        "--download", action="store_true", help="fetch what the hub's cache does not hold of it"
    )


def checkpoint_of(args: argparse.Namespace) -> Path:
    """Return the folder of the checkpoint that a command line names, of a model that is read here.

    Raises:
        FileNotFoundError: there is none, or it has no config.json.
        OSError: it cannot be downloaded.
        ValueError: it is of no model that is read here, or its config.json is wrong.
    """
    folder = checkpoint_folder(args.model, download=args.download)
    parse_config(read_config(folder), folder / CONFIG_FILE)
    return folder


def read_model(
    name: Path | str, *, download: bool = False
) -> tuple[dict[str, Any], Checkpoint | None]:
    """Return config.json and, where weights are beside it, the checkpoint.

    Args:
        name: a checkpoint as `find_checkpoint` knows them, a config.json, or any name of a shipped
            configuration.
        download: fetch an id of the hub that is none of them.

    Raises:
        FileNotFoundError: there is nothing of that name; the message lists what is shipped.
        ValueError: a file that is not as it must be.
    """
    path = Path(name)
    if path.is_file() and path.suffix != ".gguf":
        return read_json_object(path), None
    folder = find_checkpoint(path)
    if folder is None and not download and (found := find_config(str(name))) is not None:
        return load_config(found), None
    try:
        folder = folder or checkpoint_folder(path, download=download)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error} Published ones: {', '.join(config_names())}.") from None
    has_weights = any(folder.glob("*.safetensors"))
    return read_config(folder), open_checkpoint(folder) if has_weights else None


def model_among(known: Iterable[str]) -> Callable[[str], str]:
    """Return what turns any name of a model into the one in a list, for `type=` of an option.

    A name that is none of them stays, for the option's choices to refuse.
    """
    by_config = {find_config(each): each for each in known}
    by_config.pop(None, None)

    def choose(name: str) -> str:
        return by_config.get(find_config(name), name)

    return choose
