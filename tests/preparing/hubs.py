"""Stand-ins of the hub for tests: the real repositories' file layouts, with a few small documents.

layout() writes them; the documents that each name should give are what it returns.
"""

import os

import pyarrow
import pyarrow.parquet

from tests.preparing.conftest import DOCUMENTS, command, end, start

CHAT = [
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Good day."},
]
# A row is a paragraph; the second file goes on in the middle of nothing.
FINEWEB = {
    "dump": "CC-MAIN-2024-10",
    "url": "http://example.org",
    "date": "2024-02-21",
    "file_path": "s3://commoncrawl",
    "language": "en",
    "language_score": 0.97,
    "token_count": 120,
    "score": 3.1,
    "int_score": 3,
}


def write_rows(path, rows, **more):
    """Write a parquet file of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7, **more)


def _write_split(folder, names, texts, row):
    """Share texts among the files of a training split."""
    for n, name in enumerate(names):
        part = texts[n * len(texts) // len(names) : (n + 1) * len(texts) // len(names)]
        write_rows(folder / name, [{"text": text} | row for text in part])


def layout(root):
    """Write all repositories of the catalogue under `root`; the documents of each name."""
    other = [{"text": "Of another split, not to be read."}]
    repository = root / "HuggingFaceFW/fineweb-edu"
    names = [f"sample/10BT/{n:03}_00000.parquet" for n in range(14)]
    _write_split(repository, names, DOCUMENTS[:28], {"id": "<urn:uuid:1>"} | FINEWEB)
    write_rows(repository / "data/CC-MAIN-2024-51/000_00000.parquet", other)
    (repository / "README.md").write_text("---\nlicense: odc-by\n---\n")
    repository = root / "Skylion007/openwebtext"
    names = [f"plain_text/train-{n:05}-of-00080.parquet" for n in range(80)]
    _write_split(repository, names, DOCUMENTS[:80], {})
    repository = root / "roneneldan/TinyStories"
    tails = ("2d5a1467fff1081b", "5852b56a2bd28fd9", "a26307300439e943", "d243063613e5a057")
    names = [f"data/train-{n:05}-of-00004-{tail}.parquet" for n, tail in enumerate(tails)]
    _write_split(repository, names, DOCUMENTS[:40], {})
    write_rows(repository / "data/validation-00000-of-00001-869c898b519ad725.parquet", other)
    (repository / "TinyStories-train.txt").write_text("Not to be read.")
    repository = root / "wikimedia/wikipedia"
    names = [f"20231101.en/train-{n:05}-of-00041.parquet" for n in range(41)]
    row = {"id": "12", "url": "https://en.wikipedia.org/wiki/Anarchism", "title": "Anarchism"}
    _write_split(repository, names, DOCUMENTS[:41], row)
    write_rows(repository / "20231101.de/train-00000-of-00020.parquet", other)
    repository = root / "HuggingFaceTB/smoltalk"
    for n in range(9):
        rows = [{"messages": CHAT, "source": "smol-magpie-ultra"}]
        write_rows(repository / f"data/all/train-{n:05}-of-00009.parquet", rows)
    write_rows(repository / "data/all/test-00000-of-00001.parquet", [{"messages": CHAT[:1]}])
    repository = root / "karpathy/climbmix-400b-shuffle"
    _write_split(repository, [f"shard_{n:05}.parquet" for n in range(7)], DOCUMENTS[:28], {})
    write_rows(repository / "shard_06542.parquet", other)
    return {
        "fineweb-edu": DOCUMENTS[:28],
        "openwebtext": DOCUMENTS[:80],
        "tinystories": DOCUMENTS[:40],
        "wikipedia-en": DOCUMENTS[:41],
        "smoltalk": ["User: Hello?\n\nAssistant: Good day.\n\n"] * 9,
        "climbmix": DOCUMENTS[:28],
    }


def begin(hub, *inputs, **flags):
    """Begin prepare_data.py with a hub in the place of the real one."""
    return start(command(*inputs, **flags), env=os.environ | hub.environment)


def fetch(hub, *inputs, **flags):
    """Run prepare_data.py to its end with a hub in the place of the real one."""
    return end(begin(hub, *inputs, **flags))
