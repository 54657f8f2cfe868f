"""The small trained checkpoint that comes with the package, found wherever it is installed."""

from pathlib import Path

TINY_NAME = "tiny_gpt_oss"


def shipped_checkpoint() -> Path | None:
    """Return the folder of the shipped checkpoint, or None where the package has none."""
    folder = Path(__file__).resolve().parent / TINY_NAME
    return folder if (folder / "config.json").is_file() else None


def checkpoint_folder(name: Path | str) -> Path:
    """Return the folder a `--model` option means: a path, or the name of the shipped checkpoint.

    Raises:
        FileNotFoundError: there is no such folder, and it is not the shipped one.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    shipped = shipped_checkpoint()
    if str(name) == TINY_NAME and shipped is not None:
        return shipped
    known = f", or {TINY_NAME}, which is shipped" if shipped is not None else ""
    raise FileNotFoundError(
        f"model={name}: there is no such folder. Pass the folder of a checkpoint{known}."
    )
