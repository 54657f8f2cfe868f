"""Text in and out: a checkpoint's tokenizer, and the tokens that end its texts."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from neuron_moe.models.hf_config import ConfigReader, read_json_object

TOKENIZER_FILE = "tokenizer.json"
_CONTEXT_TOKENS = 8  # of the prompt that are decoded along with the first token of the answer
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what the first bytes of a longer character decode to


class TextCodec:
    """Encode prompts and decode answers as the checkpoint in a folder does.

    Attributes:
        stop_token_ids: from generation_config.json, else from config.json.
        pad_token_id: filler of left padding; 0 where the checkpoint names none.
    """

    def __init__(self, folder: Path | str) -> None:
        path = Path(folder) / TOKENIZER_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: there is no tokenizer. Copy tokenizer.json of the model into its folder."
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"{path}: must be a tokenizer, but {error}. Download it again."
            ) from error
        self.stop_token_ids, self.pad_token_id = special_tokens(folder)

    def encode(self, text: str, *, is_template: bool = False) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            text: of the prompt.
            is_template: a chat template made it, so the tokens that start a text are in it already.

        Raises:
            ValueError: the prompt gives no token.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"prompt={text!a}: must be UTF-8 text, but character {error.start} is a loose byte."
                " Check the encoding of the terminal or file."
            ) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=not is_template).ids
        if not ids:
            raise ValueError(f"prompt={text!r}: must give at least one token. Write some text.")
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        text: str = self._tokenizer.decode(list(token_ids))
        return text


class TextStream:
    """Turn tokens into text as they come; hold a character back until all its bytes are there.

    Each step decodes the tokens since the last certain one before the previous step, not the whole
    text, so a step costs the same however long the answer is.

    Args:
        codec: of the checkpoint.
        prompt_ids: what the text continues; a tokenizer may write a word differently after it.
    """

    def __init__(self, codec: TextCodec, prompt_ids: Sequence[int] = ()) -> None:
        self._codec = codec
        self._window = list(prompt_ids[-_CONTEXT_TOKENS:])
        self._shown = len(self._window)  # tokens of the window whose text was returned

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is certain now and was not returned before."""
        self._window.append(token_id)
        before, after = self._texts()
        if after.endswith(UNFINISHED):
            return ""
        self._window, self._shown = self._window[self._shown :], len(self._window) - self._shown
        return after[len(before) :]

    def finish(self) -> str:
        """Return what is left, broken characters included."""
        before, after = self._texts()
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        """Return the text of the window up to what was returned, and of all of it."""
        return self._codec.decode(self._window[: self._shown]), self._codec.decode(self._window)


def special_tokens(folder: Path | str) -> tuple[tuple[int, ...], int]:
    """Return stop tokens and padding token; generation_config.json wins, as in transformers."""
    stop: tuple[int, ...] = ()
    pad: int | None = None
    for name in ("config.json", "generation_config.json"):
        path = Path(folder) / name
        if not path.is_file():
            if path.exists() or path.is_symlink():
                raise ValueError(
                    f"{path}: must be a file, but is a folder or a link to nothing. Delete it, or"
                    " download it again."
                )
            continue
        whole = ConfigReader(read_json_object(path), str(path))
        text = ConfigReader(whole.get_section("text_config"), f"{path}: text_config")
        for reader in (text, whole):  # what the whole says holds
            stop = reader.get_ints("eos_token_id", "token id") or stop
            found = reader.get_optional("pad_token_id", int)
            pad = pad if found is None else found
    return stop, 0 if pad is None else pad
