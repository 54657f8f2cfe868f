"""Models by any of their names: ours, other spellings, Hugging Face ids, paths."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from neuron_moe.checkpoint import Checkpoint, open_checkpoint
from neuron_moe.configs import config_names, find_config, load_config
from neuron_moe.models.hf_config import read_json_object
from neuron_moe.models.loader import read_config
from neuron_moe.models.shipped import checkpoint_folder
from neuron_moe.tools.parsers import DETAILS

MODEL_HELP = (
    "folder, config.json or the name of a published model"
    f"{DETAILS}, in any spelling: {', '.join(config_names())}"
)


def read_model(name: Path | str) -> tuple[dict[str, Any], Checkpoint | None]:
    """Return config.json and, where weights lie beside it, the checkpoint.

    Args:
        name: a checkpoint's folder, a config.json, or any name of a shipped configuration.

    Raises:
        FileNotFoundError: there is nothing of that name; the message lists what is shipped.
        ValueError: a file that is not as it must be.
    """
    path = Path(name)
    if path.is_file():
        return read_json_object(path), None
    found = None if path.is_dir() else find_config(str(name))
    if found is not None:
        return load_config(found), None
    try:
        folder = checkpoint_folder(path)
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
