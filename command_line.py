"""What people type -> what they mean: paths, numbers, names that are nearly right.

For the settings and for the options of all programs; and errors, and how messages name our files
and numbers.
Knows no setting and no option.
"""

import argparse
import difflib
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

# A character that a console lacks, as startup.set_up_streams lets it be shown.
ESCAPE = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U000[0-9a-f]{5})")
EMPTY = "it is empty; is a variable in it not set?"
# A user and password before the host of an address; what hf:// has there is a revision.
LOGIN = re.compile(r"(?<!\bhf)://[^/?#\s]*@")
# Credentials in the query of an address.
KEY = re.compile(
    r"([?&](?:[^=&#\s]*[-_])?(?:\w*token|sig|signature|\w*secret|pass|passwd|password|pwd|auth|"
    r"credentials?|(?:api|access|secret)[-_]?key)=)[^&#\s]*",
    re.IGNORECASE,
)


def place(text: str) -> str:
    """A path or address as shells, notebooks and presets leave it -> one that can be opened.

    Quotes and blanks around it go, unless something has that name, and ~ becomes the home folder,
    which shells leave in --key=~/value. A name that exists may be typed as a console that
    lacks its characters shows it, such as caf\\xe9. Raises ArgumentTypeError if only blanks are
    left, as after an empty variable, and for a home folder that does not exist.
    """
    found = text if os.path.lexists(text) else unquoted(text)
    if os.name != "nt" or re.match(r"~([\\/]|$)", found):  # there, ~c would be C:\Users\c
        found = os.path.expanduser(found)
    unescaped = ESCAPE.sub(lambda escape: chr(int(escape[0][2:], 16)), found)
    if not os.path.lexists(found) and os.path.lexists(unescaped):
        found = unescaped
    if not found:
        raise argparse.ArgumentTypeError(EMPTY)
    if found.startswith("~") and Path(found).parent != Path() and not os.path.lexists(found):
        home = Path(found).parts[0]
        raise argparse.ArgumentTypeError(f"{text}: there is no home folder {home} here")
    return found


def local_path(text: str) -> Path:
    """As `place`, for what is never at an address. Raises ArgumentTypeError for one, too."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{without_credentials(text)}: it must be a path on this machine"
        )
    return Path(place(text))


def word(text: str) -> str:
    """A text without the quotes and blanks around it. Raises ArgumentTypeError for an empty one."""
    text = unquoted(text)
    if not text:
        raise argparse.ArgumentTypeError(EMPTY)
    return text


def unquoted(text: str) -> str:
    """A text without blanks around it, and without one pair of quotes."""
    text = text.strip()
    if len(text) > 1 and text[0] + text[-1] in ("''", '""', "‘’", "“”"):
        text = text[1:-1].strip()
    return text


def without_credentials(text: str) -> str:
    """A text without the credentials of the addresses in it, to be shown or recorded."""
    return KEY.sub(r"\1...", LOGIN.sub("://", text)) if "://" in text else text


def number(kind: Callable, low: float, high: float = math.inf, least: str = "") -> Callable:
    """A type for argparse: finite numbers of a kind from `low` to `high`. least: `low` in words."""

    def number(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or value == math.inf:
            limit = f" and at most {high}" if high < math.inf else ""
            what = "a whole number" if kind is int else "a number"
            bound = least or f"of at least {low}"
            raise argparse.ArgumentTypeError(f"{text}: it must be {what} {bound}{limit}")
        return value

    return number


count = number(int, 1)
positive = number(float, 1e-6, least="above 0")


def near(name: str, known: Iterable[str]) -> list[str]:
    """The known names that may be meant: up to three that begin alike, else the most similar.

    The known ones are in lower case.
    """
    name = name.lower()
    alike = [other for other in known if other.startswith(name) or name.startswith(other)]
    return alike[:3] or difflib.get_close_matches(name, known, 1, 0.65)


class UserError(ValueError):
    """An error whose message is for the user: startup.run prints it, without a traceback.

    status: the exit status; 2 for what the user can correct, 1 for a failure while running.
    """

    status = 2


class Parser(argparse.ArgumentParser):
    """Accepts no abbreviations, and answers an unknown word with what may be meant.

    others: names that other programs have for its options, {"model": "checkpoint"}. text: the
    option for a text that comes without one.
    """

    def __init__(self, *args, others: dict[str, str] | None = None, text: str = "", **more):
        super().__init__(*args, allow_abbrev=False, **more)
        self.others, self.text = others or {}, text

    def parse_args(self, args=None, namespace=None):
        values, unknown = self.parse_known_intermixed_args(args, namespace)
        if unknown:
            self.error(f"unknown {unknown[0]}{self.hint(unknown[0])}")
        return values

    def hint(self, word: str) -> str:
        """What may be meant by a word that is not an argument."""
        if not word.startswith("-"):
            if self.text:
                return f"; write --{self.text} {quote(word)}"
            return "; a value with blanks needs quotes around it"
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        known = [option.removeprefix("--") for option in self._option_string_actions]
        meant = [self.others[name]] if name in self.others else near(name, known)
        return f"; did you mean {' or '.join(f'--{name}' for name in meant)}?" if meant else ""

    def error(self, message: str):
        """End with a sentence below the usage."""
        if message.endswith("expected one argument"):
            message += "; one that begins with a dash is written --option=-value"
        message = message.replace("ignored explicit argument", "it takes no value, but is given")
        super().error(message)


# -- our files, as they are typed ------------------------------------------------------------------


def quote(text: str, windows: bool = os.name == "nt") -> str:
    """A word as it is typed in a shell. Windows' cmd knows double quotes alone."""
    if not windows:
        return shlex.quote(text)
    path = text.replace("\\", "/")
    return text if shlex.quote(path) == path else f'"{text}"'


def our_file(file: str) -> str:
    """A file of this checkout as it is typed here: with its folder, unless that is the current one.

    file: such as train.py.
    """
    path = Path(__file__).parent / file
    is_here = Path(file).exists() and Path(file).resolve() == path.resolve()
    return file if is_here else quote(path.as_posix())


def our_tool(name: str) -> str:
    """What follows `python` to start a tool here: only this checkout finds it as a module."""
    file = f"tools/{name}.py"
    return f"-m tools.{name}" if our_file(file) == file else our_file(file)


# -- numbers in words ------------------------------------------------------------------------------


def plural(count: int, noun: str) -> str:
    """A count and its noun, such as "1 file" or "1,000 files"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """Seconds as 42 s, 3 min 5 s or 2 h 10 min."""
    s = round(seconds)
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60} s"
    return f"{s // 3600:,} h {s % 3600 // 60} min"


def si(number: float, unit: str) -> str:
    """A number in the largest unit that it reaches: 23.5 EFLOP, 1.62 GB, 450 kB."""
    for prefix, factor in zip("EPTGMk", (1e18, 1e15, 1e12, 1e9, 1e6, 1e3), strict=True):
        if number >= 0.9995 * factor:
            return f"{number / factor:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}"


def short(value: float) -> str:
    """A count in three digits: 134,612,000 as 135M, 2.5e9 as 2.5B."""
    return si(value, "").replace("G", "B").replace(" ", "")
