"""Helpers for the tests of preparing: prepare_data.py as a user runs it, and real documents."""

import csv
import gzip
import hashlib
import io
import json
import subprocess
import sys

import numpy as np
import pytest

from formats.data_folder import read_meta
from preparing.chunks import Options, Position
from preparing.cleaning import CleaningReport
from preparing.documents import documents_of
from preparing.readers import read_chunks
from preparing.sources import find_sources
from tests.conftest import prose, run_script, start_script, wait_until
from tokenizer_bpe import EOT, Tokenizer

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

DOCUMENTS = [f"Document {n}. " + prose()[n * 700 : n * 700 + 600].strip() for n in range(200)]


def command(*inputs, **flags):
    """What prepares, as the words after `python`; a flag that is True has no value."""
    words = ["prepare_data.py", *map(str, inputs)]
    for name, value in flags.items():
        words.append(f"--{name}")
        if value is not True:
            words.append(str(value))
    return words


def start(*inputs, hub=None, variables=(), text="", options=(), **flags):
    """Begin prepare_data.py with `text` as standard input; returns the process.

    hub: takes the place of the real one. options: of start_script.
    """
    variables = (hub.environment if hub else {}) | dict(variables)
    return start_script(command(*inputs, **flags), text, variables, **dict(options))


def end(process):
    """Wait for a process."""
    output, errors = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def wait_for_progress(process, out):
    """Wait until a run has recorded more than it began with, or has ended."""
    journal = out / ".partial/progress.json"
    before = journal.read_bytes() if journal.exists() else None
    wait_until(process, lambda: journal.exists() and journal.read_bytes() != before)


def kill_midway(process, out):
    """Kill a run after a record of how far it is."""
    wait_for_progress(process, out)
    process.kill()
    process.communicate()


def files_up_to(size):
    """A preexec_fn for a process that may write no file above `size` bytes."""
    import resource  # which Windows lacks

    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def prepare(*inputs, text="", **flags):
    """Run prepare_data.py to its end, with `text` as standard input."""
    return run_script(*command(*inputs, **flags), stdin=text)


def sha(folder):
    """Checksums of the files that must not depend on how they were made."""
    paths = [*sorted(folder.glob("*.bin")), folder / "tokenizer.json"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def documents(folder):
    """The texts of both splits, as decoded from the files."""
    meta = read_meta(folder)
    tokenizer = Tokenizer.load(folder)
    texts = []
    for split in meta.splits.values():
        ids = np.fromfile(folder / split.file, meta.dtype)
        ends = np.flatnonzero(ids == tokenizer.eot_id)
        assert len(ends) == split.documents
        for part in np.split(ids, ends + 1)[:-1]:
            texts.append(tokenizer.decode(part[part != tokenizer.eot_id]))
    return texts


def read(path, content=None, **options):
    """The texts of a file's documents, and the report. content: text or bytes to write first."""
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    sources, options = find_sources([str(path)]), Options(**options)
    texts, report = [], CleaningReport()
    for chunk in read_chunks(sources, Position(), options, lambda n: sources[n].path):
        found, left_out = documents_of(chunk, options)
        texts += [document.text for document in found]
        report.merge(left_out)
    return texts, report.rules


def write(path, format, texts):
    """`texts` as a file of the given format."""
    kind, _, packing = format.partition(".")
    if kind == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=100)
        return
    if kind == "jsonl":
        data = "\n".join(json.dumps({"text": text}) for text in texts).encode()
    elif kind == "json":
        data = json.dumps([{"n": n, "text": text} for n, text in enumerate(texts)]).encode()
    elif kind in ("csv", "tsv"):
        table = io.StringIO(newline="")
        rows = csv.writer(table, delimiter="\t" if kind == "tsv" else ",")
        rows.writerows([["n", "text"], *enumerate(texts)])
        data = table.getvalue().encode("utf-8-sig")
    else:
        data = f"\n{EOT}\n".join(texts).encode()
    if packing == "gz":
        data = gzip.compress(data)
    elif packing == "zst":
        data = zstd.compress(data)
    path.write_bytes(data)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """The path of a small tokenizer, which most tests encode with."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    Tokenizer.train([prose()], 600).save(path)
    return path


@pytest.fixture
def flags(tmp_path, tokenizer):
    """What most commands are given: this tokenizer, and the folder `out`."""
    return {"tokenizer": tokenizer, "out": tmp_path / "out"}


def write_documents(path, count):
    """A file of so many documents, 200 kB each."""
    path.write_text((prose() + f"\n{EOT}\n") * count, "utf-8", newline="\n")
    return path


@pytest.fixture
def medium(tmp_path):
    """A file of 5 MB, more than is read whole before it is split."""
    return write_documents(tmp_path / "a.txt", 24)


@pytest.fixture
def large(tmp_path):
    """A file of 12 MB, which takes so long that a run can be stopped in it."""
    return write_documents(tmp_path / "a.txt", 60)
