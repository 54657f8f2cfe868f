"""Where the name of a checkpoint leads: to a folder, the shipped model, or the hub's cache.

The cache is the one that every tool of Hugging Face fills and reads (HF_HOME, HF_HUB_CACHE).
"""

import re
from pathlib import Path

from neuron_moe.configs import find_config

TINY_NAME = "tiny_gpt_oss"
# What of a repository is read here: weights, configurations, tokenizer, chat template.
READ_FILES = ["*.safetensors", "*.json", "*.jinja"]
OTHER_FILES = ["*/*", "consolidated*"]  # the same weights once more, in the form of their makers
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def shipped_checkpoint() -> Path | None:
    """Return the folder of the shipped checkpoint, or None where the package has none."""
    folder = Path(__file__).resolve().parent / TINY_NAME
    return folder if (folder / "config.json").is_file() else None


def find_checkpoint(name: Path | str) -> Path | None:
    """Return the folder that a name means, without a network; None where there is none.

    Args:
        name: a folder, the shipped checkpoint's name, or an id such as "openai/gpt-oss-20b" of
            which the hub's cache holds a copy.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if str(name) == TINY_NAME:
        return shipped_checkpoint()
    return _cached(str(name)) if _HUB_ID.fullmatch(str(name)) else None


def checkpoint_folder(name: Path | str, *, download: bool = False) -> Path:
    """Return the folder that a name means, as `find_checkpoint` does.

    Args:
        name: of the checkpoint.
        download: fetch an id of the hub that the cache does not hold, or holds in part.

    Raises:
        FileNotFoundError: there is nothing of that name; the message says how to get it.
        OSError: it cannot be downloaded.
        ValueError: it is no name.
    """
    if not isinstance(name, str | Path):
        raise ValueError(f"model={name!r}: must be a folder or an id, as a str or a Path.")
    is_id = _HUB_ID.fullmatch(str(name)) is not None and not Path(name).expanduser().exists()
    if download and is_id:
        return _download(str(name))
    folder = find_checkpoint(name)
    if folder is not None:
        return folder
    if Path(name).suffix == ".gguf":
        raise FileNotFoundError(
            f"model={name}: a GGUF file of llama.cpp, which is not read here. Take the model it was"
            " made of, with *.safetensors: its id is usually the same without -GGUF."
        )
    if Path(name).expanduser().is_file():
        raise FileNotFoundError(
            f"model={name}: is a file, must be a folder with config.json and *.safetensors. Pass"
            f" the folder that it is in: {Path(name).parent}"
        )
    if is_id:
        raise FileNotFoundError(
            f"model={name}: there is no such folder, and the hub's cache does not hold it. Download"
            f" it with --download (load(..., download=True)), or with: hf download {name}"
        )
    if (found := find_config(str(name))) is not None:
        raise FileNotFoundError(
            f"model={name}: there is no such folder; of {found} the configuration is shipped, which"
            " inspect, plan and compile take, and no weights. Pass the folder of a checkpoint, or"
            " its id on Hugging Face."
        )
    known = f", {TINY_NAME}, which is shipped," if shipped_checkpoint() is not None else ""
    raise FileNotFoundError(
        f"model={name}: there is no such folder. Pass the folder of a checkpoint{known} or the id"
        " of one on Hugging Face, such as openai/gpt-oss-20b."
    )


def _cached(name: str) -> Path | None:
    """Return the snapshot of a repository in the hub's cache, as far as it was downloaded."""
    from huggingface_hub import try_to_load_from_cache  # half a second

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # an id that cannot be, such as a--b
        return None
    return Path(found).parent if isinstance(found, str) else None


def _download(name: str) -> Path:
    """Fetch what the cache does not hold of a repository."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, allow_patterns=READ_FILES, ignore_patterns=OTHER_FILES))
    except (HfHubHTTPError, OSError, ValueError) as error:
        why = " ".join(str(error).split())
        raise OSError(
            f"model={name}: cannot be downloaded: {why} Check the id and the network; for a gated"
            " model accept its terms on its page, then run: hf auth login"
        ) from error
