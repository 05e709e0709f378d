"""Texts by name: a table of the Hugging Face hub's, tiny Shakespeare, Python's standard library.

Repositories and files are those of the hub's own file lists and cards, as public code quotes them;
sizes are rounded, and estimates where the comment says so.
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
    collection. download, text: about how many GB its files and its text take.
    """

    repository: str
    files: str
    licence: str
    download: float
    text: float

    @property
    def address(self) -> str:
        return f"hf://datasets/{self.repository}/{self.files}"


CATALOG = {
    # Card: config sample-10BT is sample/10BT/*. 14 files, 000_00000.parquet to 013_00000.parquet,
    # the last of 540,632,672 bytes, ten others of 21,520,368,509 together. Estimates: three more
    # like those, and 4.6 bytes of text a token.
    "fineweb-edu": Corpus(
        repository="HuggingFaceFW/fineweb-edu",
        files="sample/10BT/*.parquet",
        licence="ODC-By 1.0",
        download=28.5,
        text=46,
    ),
    # Card: 24,193,092,408 bytes to download, 39,769,491,688 of text in 8,013,769 rows.
    "openwebtext": Corpus(
        repository="Skylion007/openwebtext",
        files="plain_text/train-*.parquet",
        licence="CC0 1.0",
        download=24.2,
        text=39.8,
    ),
    # 4 files, such as data/train-00000-of-00004-2d5a1467fff1081b.parquet, of about 249 MB. An
    # estimate: the size of the text.
    "tinystories": Corpus(
        repository="roneneldan/TinyStories",
        files="data/train-*.parquet",
        licence="CDLA-Sharing 1.0",
        download=1.0,
        text=1.9,
    ),
    # Card: 41 files, 20231101.en/train-00000-of-00041.parquet and so on, 11,630,929,031 bytes to
    # download, 20,200,062,385 of text in 6,407,814 rows.
    "wikipedia-en": Corpus(
        repository="wikimedia/wikipedia",
        files="20231101.en/train-*.parquet",
        licence="CC BY-SA 3.0 and GFDL",
        download=11.6,
        text=20.2,
    ),
    # 9 files, data/all/train-00000-of-00009.parquet and so on; the first has at most 328 MB.
    # 1,043,917 rows. Estimates: both sizes. Card: "All the new datasets (Smol-Magpie-Ultra,
    # Smol-contraints, Smol-rewrite, Smol-summarize) are licensed under Apache 2.0. For the existing
    # public datasets, please refer to the original dataset for the license".
    "smoltalk": Corpus(
        repository="HuggingFaceTB/smoltalk",
        files="data/all/train-*.parquet",
        licence="Apache 2.0 and, of older parts, others (its card)",
        download=2.1,
        text=3.9,
    ),
    # nvidia/Nemotron-ClimbMix as text, shuffled: 6,543 files, shard_00000.parquet to
    # shard_06542.parquet, the last one nanochat's validation text; here the first 1,000. Estimates
    # from the script that made them: 250 million characters and 100 MB a file. The licence is that
    # of nvidia's card, "for research and development only".
    "climbmix": Corpus(
        repository="karpathy/climbmix-400b-shuffle",
        files="shard_00*.parquet",
        licence="CC BY-NC 4.0, NOT FOR COMMERCIAL USE",
        download=100,
        text=250,
    ),
}


def table() -> str:
    """The catalogue in lines, for --help."""
    lines = ["texts by name, from the Hugging Face hub:"]
    for name, corpus in CATALOG.items():
        lines.append(
            f"  {name:13} {corpus.text:4g} GB, {corpus.download:4g} GB to fetch; {corpus.licence};"
            f" {corpus.repository}: {corpus.files}"
        )
    return "\n".join(lines)


def standard_library() -> list[str]:
    """The sources of the Python that runs this, without tests, character sets and help pages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        path.as_posix()
        for path in root.rglob("*.py")
        if path.stat().st_size and not NOT_IN_STDLIB.search(f"/{path.relative_to(root).as_posix()}")
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
