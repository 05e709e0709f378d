"""How records of the input become texts, as the command line chose. Reads and cleans nothing."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Options:
    """How records become texts.

    The three rules at the end drop documents; they are applied after the characters are cleaned.
    Shares are of the characters that are not white space.
    """

    text_field: str | None = None  # None: "text", else "messages"
    on_error: str = "stop"  # stop, skip the document, or replace broken bytes by U+FFFD
    encoding: str | None = None  # of .txt and .jsonl; None: UTF-8
    clean: bool = False
    dedupe: str | None = None  # copies are dropped: exact ones, or near ones too
    min_chars: int = 20  # shorter documents are dropped
    max_char_share: float = 0.5  # dropped when a single character makes up more
    min_letters: float = 0.4  # dropped when letters and digits make up less

    def text_column(self, names: Iterable[str]) -> str:
        """The field or column with the text: the one asked for, else text, else messages."""
        if self.text_field:
            return self.text_field
        if "messages" in names and "text" not in names:
            return "messages"
        return "text"
