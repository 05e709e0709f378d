"""Cleaning: what --clean corrects in a document, and which documents it leaves out as noise.

The report counts these, and all else that preparing leaves out, replaces or takes for a mistake.
"""

import bisect
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field

EXAMPLES = 3  # documents that the report quotes per rule
EXAMPLE_CHARS = 100  # characters quoted from each
EXAMPLE_BEFORE = 30  # characters quoted before a place
EXAMPLE_AFTER = 60  # and from it on
CONTROL = re.compile(
    r"\x1b\[[\d;?]*[A-Za-z]|"  # a terminal's colors, such as ESC [31m
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ufdd0-\ufdef\ufeff\ufffe\uffff]"
)
# The limits of noise(). The shares are of all characters but white space.
MIN_BYTES = 20  # 20 letters of English, or 7 of Chinese
MAX_CHAR_SHARE = 0.5
MIN_LETTERS = 0.4
SAMPLE_CHARS = 500  # characters of a document in which letters and digits are counted
TYPESET = re.compile("[\ufb00-\ufb06]|\u00ad\n?")
RULES = {  # in the order in which they are applied
    "line ends other than \\n": lambda text: (  # \r\r\n is \r\n that Windows wrote as text
        text.replace("\r\r\n", "\n").replace("\r\n", "\n").replace("\r", "\n")
    ),
    "broken encoding": lambda text: text.replace("\ufffd", ""),  # undecodable bytes
    "not in NFC": lambda text: unicodedata.normalize("NFC", text),
    "ligatures and soft hyphens": lambda text: TYPESET.sub(_as_typed, text),
    "control characters": lambda text: CONTROL.sub("", text),  # all but tab and line feed
}


@dataclass
class CleaningReport:
    """Counts and examples of the documents that were left out, corrected, or kept as mistakes.

    rules: {rule: {"documents", "bytes", "examples"}}, the content of cleaning.json.
    """

    rules: dict[str, dict] = field(default_factory=dict)

    def add(self, rule: str, documents: int, size: int, examples: list[str]) -> None:
        """Count the documents and bytes that a rule left out or corrected."""
        counts = self.rules.setdefault(rule, {"documents": 0, "bytes": 0, "examples": []})
        counts["documents"] += documents
        counts["bytes"] += size
        for example in examples:
            example = example[:EXAMPLE_CHARS]
            if len(counts["examples"]) < EXAMPLES and example not in counts["examples"]:
                counts["examples"].append(example)

    def quote(self, rule: str, text: str, at: int, size: int, documents: int = 1) -> None:
        """As add(), with what a text has around character `at` as the example."""
        self.add(rule, documents, size, [text[max(0, at - EXAMPLE_BEFORE) : at + EXAMPLE_AFTER]])

    def merge(self, other: "CleaningReport") -> None:
        for rule, counts in other.rules.items():
            self.add(rule, counts["documents"], counts["bytes"], counts["examples"])


def _as_typed(found):
    """The letters of a ligature such as ﬁ; nothing for a soft hyphen, which may end a line."""
    return unicodedata.normalize("NFKC", found[0]) if found[0][0] != "\u00ad" else ""


def clean(text: str, report: CleaningReport) -> str:
    """Apply each of RULES to a text."""
    for rule, correct in RULES.items():
        corrected = correct(text)
        if corrected != text:
            removed = len(text.encode()) - len(corrected.encode())
            report.quote(rule, text, first_difference(text, corrected), removed)
        text = corrected
    return text


def first_difference(old: str, new: str) -> int:
    """How many characters two texts have in common at their beginning."""
    return bisect.bisect(range(len(new)), False, key=lambda n: not old.startswith(new[: n + 1]))


def noise(text: str) -> str:
    """Why a document counts as noise, or "" if it does not.

    Letters and digits are counted among about SAMPLE_CHARS evenly spaced characters.
    """
    if len(text.encode()) < MIN_BYTES:
        return f"shorter than {MIN_BYTES} bytes"
    too_few_letters = f"fewer than {MIN_LETTERS:.0%} letters and digits"
    stride = max(1, len(text) // SAMPLE_CHARS)
    sample = "".join(text[::stride].split())
    if not sample:
        return too_few_letters
    commonest, _ = Counter(sample).most_common(1)[0]
    visible = len("".join(text.split()))
    if text.count(commonest) > MAX_CHAR_SHARE * visible:
        return f"one character is more than {MAX_CHAR_SHARE:.0%}"
    if sum(map(_is_letter, sample)) < MIN_LETTERS * len(sample):
        return too_few_letters
    return ""


def _is_letter(char):
    """True for letters, digits and combining marks, such as the vowels of Burmese and Hindi."""
    return char.isalnum() or unicodedata.category(char)[0] == "M"
