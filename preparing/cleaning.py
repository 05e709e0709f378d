"""Cleaning a document: correct its characters, drop it if it is noise, and report both.

Works on one text at a time. copies.py finds copies.
"""

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufdd0-\ufdef\ufeff\ufffe\uffff]")
EXAMPLES = 3  # documents that the report shows for each rule
EXAMPLE_CHARS = 100  # characters of each
# The three rules by which a document is noise. The shares are of what is not white space.
MIN_CHARS = 20
MAX_CHAR_SHARE = 0.5
MIN_LETTERS = 0.4
SAMPLE_CHARS = 500  # characters of a document on which its share of letters and digits is judged


@dataclass
class CleaningReport:
    """Counts and examples of the documents that were left out or corrected.

    rules: {rule: {"documents", "bytes", "examples"}}, as cleaning.json has it.
    """

    rules: dict[str, dict] = field(default_factory=dict)

    def add(self, rule: str, documents: int, size: int, examples: list[str]) -> None:
        """Count the documents and bytes that a rule left out."""
        counts = self.rules.setdefault(rule, {"documents": 0, "bytes": 0, "examples": []})
        counts["documents"] += documents
        counts["bytes"] += size
        for example in examples[: EXAMPLES - len(counts["examples"])]:
            counts["examples"].append(example[:EXAMPLE_CHARS])

    def merge(self, other: "CleaningReport") -> None:
        for rule, counts in other.rules.items():
            self.add(rule, counts["documents"], counts["bytes"], counts["examples"])


RULES = {  # in the order in which they are applied
    "line ends other than \\n": lambda text: text.replace("\r\n", "\n").replace("\r", "\n"),
    "broken encoding": lambda text: text.replace("\ufffd", ""),  # bytes that were no UTF-8
    "not in NFC": lambda text: unicodedata.normalize("NFC", text),
    "control characters": lambda text: CONTROL.sub("", text),  # all but tab and line feed
}


def clean(text: str, report: CleaningReport) -> str:
    """Text after each of RULES."""
    for rule, correct in RULES.items():
        corrected = correct(text)
        if corrected != text:
            removed = len(text.encode()) - len(corrected.encode())
            report.add(rule, 1, removed, [text])
        text = corrected
    return text


def noise(text: str) -> str:
    """The rule by which a document is noise, or "".

    The share of letters and digits is judged on about SAMPLE_CHARS characters, evenly spaced.
    """
    if len(text) < MIN_CHARS:
        return f"shorter than {MIN_CHARS} characters"
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
    """True for letters and digits, and for marks, such as the vowels of Burmese and Hindi."""
    return char.isalnum() or unicodedata.category(char)[0] == "M"
