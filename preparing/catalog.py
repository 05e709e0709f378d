"""Texts by name: a table of the Hugging Face hub's, tiny Shakespeare, Python's standard library.

Repositories and files are those of the hub's own file lists and cards, as public code quotes them.
docs/data.md has their sizes.
"""

import http.client
import re
import sysconfig
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from formats.files import sha256, write_text
from preparing import InputError

SHAKESPEARE = "shakespeare"  # the INPUT for the file below
SHAKESPEARE_FILE = Path("data/shakespeare.txt")
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
NOT_IN_STDLIB = re.compile(
    r"/(tests?|idlelib|lib2to3|encodings|pydoc_data|site-packages|dist-packages|__pycache__)/"
)


@dataclass(frozen=True)
class Corpus:
    """A text by name.

    files: the files of its training split, as a glob within the repository. licence: of the
    collection.
    """

    repository: str
    files: str
    licence: str


CATALOG = {
    # Card: config sample-10BT is sample/10BT/*. 14 files, 000_00000.parquet to 013_00000.parquet.
    "fineweb-edu": Corpus("HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet", "ODC-By 1.0"),
    "openwebtext": Corpus("Skylion007/openwebtext", "plain_text/train-*.parquet", "CC0 1.0"),
    # 4 files, such as data/train-00000-of-00004-2d5a1467fff1081b.parquet.
    "tinystories": Corpus("roneneldan/TinyStories", "data/train-*.parquet", "CDLA-Sharing 1.0"),
    # Card: 41 files, 20231101.en/train-00000-of-00041.parquet and so on.
    "wikipedia-en": Corpus(
        "wikimedia/wikipedia", "20231101.en/train-*.parquet", "CC BY-SA 3.0 and GFDL"
    ),
    # 9 files, data/all/train-00000-of-00009.parquet and so on. Card: "All the new datasets
    # (Smol-Magpie-Ultra, Smol-contraints, Smol-rewrite, Smol-summarize) are licensed under Apache
    # 2.0. For the existing public datasets, please refer to the original dataset for the license".
    "smoltalk": Corpus(
        "HuggingFaceTB/smoltalk",
        "data/all/train-*.parquet",
        "Apache 2.0 and, of older parts, others (its card)",
    ),
    # nvidia/Nemotron-ClimbMix as text, shuffled: 6,543 files, shard_00000.parquet to
    # shard_06542.parquet, the last one nanochat's validation text; here the first 1,000. The
    # licence is that of nvidia's card, "for research and development only".
    "climbmix": Corpus(
        "karpathy/climbmix-400b-shuffle",
        "shard_00*.parquet",
        "CC BY-NC 4.0, NOT FOR COMMERCIAL USE",
    ),
}


def standard_library() -> list[str]:
    """The sources of the Python that runs this, without tests, character sets and help pages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        path.as_posix()
        for path in root.rglob("*.py")
        if not NOT_IN_STDLIB.search(f"/{path.relative_to(root).as_posix()}")
    )


def shakespeare() -> str:
    """The path of tiny Shakespeare, downloaded if need be. Raises InputError."""
    path = SHAKESPEARE_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as reply:
                write_text(path, reply.read().decode())
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
            raise InputError(
                f"tiny Shakespeare could not be downloaded ({error}). Where there is a network,"
                f" fetch\n  {SHAKESPEARE_URL}\nand put it at {path.absolute()}"
            ) from None
    if sha256(path) != SHAKESPEARE_SHA256:
        raise InputError(f"{path} is not the file it should be; delete it, to fetch it again")
    return path.as_posix()
