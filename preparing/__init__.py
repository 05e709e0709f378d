"""The parts of prepare_data.py: text files -> token files. Nothing here imports torch.

arguments makes the plan of a command line, and work_folder has the folder in which it is carried
out. sources finds the files, foreign knows what is not text, and remote fetches those that are
elsewhere. readers reads them in chunks, records has the rows of tables, and documents turns these
into texts, cleaned or not. tokenizers obtains a tokenizer; encoder encodes, in threads or on a
cluster, by engines; writer writes the tokens in order, to training or validation as split says.
summary describes the finished dataset.
"""

import importlib


class InputError(ValueError):
    """Input that cannot be used. The command ends with status 2."""


class PrepareError(RuntimeError):
    """A failure while running; what was finished before is kept. The command ends with status 1."""


def plural(count: int, noun: str) -> str:
    """A number of things, such as 1 file or 1,000 files."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def bytes_in_words(size: float) -> str:
    """Bytes in words, such as 4.9 kB or 12,345.7 MB."""
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"


def need(what: str, package: str) -> None:
    """Raises InputError if a package that `what` needs is missing, or cannot be imported."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise InputError(
            f"{what} needs {package} ({error}); run\n  python -m pip install {package}"
        ) from None
