"""Collecting what is wrong with a checkpoint, so that one message names all of it."""

from pathlib import Path

_MAX_LISTED = 8  # problems of one kind that a message lists before it counts the rest


class Problems:
    """What is wrong with a checkpoint, by kind.

    Args:
        path: the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_kind: dict[str, list[str]] = {}

    def add(self, kind: str, text: str) -> None:
        """Note one problem."""
        self.by_kind.setdefault(kind, []).append(text)

    def raise_if_any(self) -> None:
        """Raise a ValueError that lists them, if there are any."""
        if not self.by_kind:
            return
        count = sum(map(len, self.by_kind.values()))
        lines = [
            f"{self.path}: {count} problem{'s' if count > 1 else ''}; every tensor must be used "
            "and every parameter filled."
        ]
        for kind, texts in self.by_kind.items():
            lines += [f"  {kind}: {text}" for text in texts[:_MAX_LISTED]]
            if len(texts) > _MAX_LISTED:
                lines.append(f"  {kind}: and {len(texts) - _MAX_LISTED} more")
        lines.append(
            "Check that config.json belongs to these weights, and download them again if it does."
        )
        raise ValueError("\n".join(lines))
