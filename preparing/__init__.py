"""The parts of prepare_data.py: text files -> token files. Nothing here imports torch.

arguments turns a command line into a plan, and work_folder holds the folder in which it is carried
out. sources finds the files, foreign recognizes those that are not text, and remote downloads
remote ones. readers reads files in chunks, records the rows of tables, and documents turns both
into texts; cleaning corrects them, and mistakes notices what may be wrong with them. tokenizers
obtains a tokenizer; encoder encodes the texts, and engines runs it in threads or on a cluster.
writer writes the tokens in order, and split decides which are for validation. summary describes the
finished dataset.
"""

import importlib

from command_line import UserError


class InputError(UserError):
    """Input that cannot be used."""


class PrepareError(UserError):
    """A failure while running; finished work is kept."""

    status = 1


def need(what: str, package: str) -> None:
    """Raises InputError if the package that `what` needs cannot be imported."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise InputError(
            f"{what} needs {package} ({error}); run\n  python -m pip install {package}"
        ) from None
