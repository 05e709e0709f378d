"""Texts that need no file of one's own: Python's standard library, tiny Shakespeare, a catalogue.

Knows where they come from. What becomes of them is the same as of any file.
"""

import http.client
import sysconfig
import urllib.request
from pathlib import Path

from formats.files import sha256, write_text
from preparing.catalog import CATALOG
from preparing.errors import InputError

SHAKESPEARE = "shakespeare"  # the INPUT that stands for the file below
SHAKESPEARE_FILE = Path("data/shakespeare.txt")
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
NOT_IN_STDLIB = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "__pycache__",
}


def resolve(inputs: list[str]) -> list[str]:
    """INPUT arguments with paths for what they name. Raises InputError when it cannot be had."""
    if not inputs:
        return standard_library()
    if inputs == [SHAKESPEARE] and not Path(SHAKESPEARE).exists():
        return [shakespeare()]
    return [_address(given) for given in inputs]


def _address(given):
    """Where the text of a name lies; anything else as it is."""
    if given in CATALOG and not Path(given).exists():
        return CATALOG[given].address
    return given


def standard_library() -> list[str]:
    """The sources of the Python that runs this.

    Without its tests, its tables of character sets and its help pages.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for path in root.rglob("*.py"):
        left_out = NOT_IN_STDLIB.intersection(path.relative_to(root).parts)
        if path.stat().st_size and not left_out:
            paths.append(path.as_posix())
    return sorted(paths)


def shakespeare() -> str:
    """The path of the tiny Shakespeare file, downloaded if need be.

    Raises InputError when it cannot be had, or is not the file it should be.
    """
    path = SHAKESPEARE_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as reply:
                write_text(path, reply.read().decode())
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
            reason = getattr(error, "reason", error)
            raise InputError(
                f"tiny Shakespeare could not be downloaded ({reason}). Where there is a network,"
                f" fetch\n  {SHAKESPEARE_URL}\nand put it at {path.absolute()}, or give the file as"
                " INPUT"
            ) from None
    if sha256(path) != SHAKESPEARE_SHA256:
        raise InputError(
            f"{path} is not the file it should be, its sha256 is not {SHAKESPEARE_SHA256}; delete"
            f" it and fetch {SHAKESPEARE_URL} again"
        )
    return path.as_posix()
