"""The parts of prepare_data.py: text files -> token files. Nothing here imports torch.

arguments makes the plan of a command line, and work_folder has the folder in which it is carried
out. sources finds the files, catalog those with a name, and remote fetches those that are
elsewhere. readers reads them in chunks; records and cleaning turn these into documents. tokenizers
obtains a tokenizer; encoder encodes, in threads or on a cluster, by ray_engine; writer writes the
tokens in order, without the copies that copies finds. summary describes the finished dataset.
"""

import importlib.util


class InputError(ValueError):
    """Input that cannot be used. The command ends with status 2."""


class PrepareError(RuntimeError):
    """A failure while running; what was finished before is kept. The command ends with status 1."""


def plural(count: int, noun: str) -> str:
    """A number of things, such as 1 file or 1,000 files."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def need(what: str, *packages: str) -> None:
    """Raises InputError where a package is missing that `what` needs."""
    missing = " ".join(name for name in packages if not _is_installed(name))
    if missing:
        raise InputError(f"{what} needs {missing}; run\n  python -m pip install {missing}")


def _is_installed(package):
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:  # of backports, for backports.zstd
        return False
