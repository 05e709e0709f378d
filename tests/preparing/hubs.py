"""Stand-ins of the hub for tests: the real repositories' file layouts, with small documents."""

import pyarrow
import pyarrow.parquet

from tests.preparing.conftest import DOCUMENTS

CHAT = [
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Good day."},
]
STORIES = ("2d5a1467fff1081b", "5852b56a2bd28fd9", "a26307300439e943", "d243063613e5a057")
# Name -> repository, the files that are read, and others in it.
LAYOUTS = {
    "fineweb-edu": (
        "HuggingFaceFW/fineweb-edu",
        [f"sample/10BT/{n:03}_00000.parquet" for n in range(14)],
        ["data/CC-MAIN-2024-51/000_00000.parquet"],
    ),
    "openwebtext": (
        "Skylion007/openwebtext",
        [f"plain_text/train-{n:05}-of-00080.parquet" for n in range(80)],
        [],
    ),
    "tinystories": (
        "roneneldan/TinyStories",
        [f"data/train-{n:05}-of-00004-{tail}.parquet" for n, tail in enumerate(STORIES)],
        ["data/validation-00000-of-00001-869c898b519ad725.parquet", "TinyStories-train.txt"],
    ),
    "wikipedia-en": (
        "wikimedia/wikipedia",
        [f"20231101.en/train-{n:05}-of-00041.parquet" for n in range(41)],
        ["20231101.de/train-00000-of-00020.parquet"],
    ),
    "smoltalk": (
        "HuggingFaceTB/smoltalk",
        [f"data/all/train-{n:05}-of-00009.parquet" for n in range(9)],
        ["data/all/test-00000-of-00001.parquet"],
    ),
    "climbmix": (
        "karpathy/climbmix-400b-shuffle",
        [f"shard_{n:05}.parquet" for n in range(7)],
        ["shard_06542.parquet"],
    ),
}


def write_rows(path, rows, **more):
    """Write a parquet file of rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7, **more)


def layout(root, name):
    """Write the repository of a name in the catalogue under `root`; the documents that it gives."""
    repository, names, others = LAYOUTS[name]
    for n, file in enumerate(names):
        row = {"messages": CHAT} if name == "smoltalk" else {"text": DOCUMENTS[n], "id": str(n)}
        write_rows(root / repository / file, [row])
    for file in others:
        write_rows(root / repository / file, [{"text": "Not to be read."}])
    if name == "smoltalk":
        return ["User: Hello?\n\nAssistant: Good day.\n\n"] * len(names)
    return DOCUMENTS[: len(names)]
