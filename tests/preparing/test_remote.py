"""Text by name and by address: the real layouts, real servers on loopback, bad networks."""

import contextlib
import os
import re
import time

import boto3
import pyarrow.parquet
import pytest

from command_line import quote, si
from formats.data_folder import read_meta
from preparing import InputError
from preparing.sources import CATALOG, Source, find_sources
from preparing.tokenizers import sources_to_sample
from tests.conftest import fails_clearly, ok, run_code
from tests.preparing.conftest import (
    DOCUMENTS,
    documents,
    end,
    files_up_to,
    kill_midway,
    prepare,
    sha,
    start,
    write,
)
from tests.preparing.hub import Hub
from tests.preparing.torture import torture
from tests.training.store import Store

# Of the real repositories: the first and the last file that are read, and another.
LAYOUTS = {
    "fineweb-edu": [
        "HuggingFaceFW/fineweb-edu/sample/10BT/000_00000.parquet",
        "HuggingFaceFW/fineweb-edu/sample/10BT/013_00000.parquet",
        "HuggingFaceFW/fineweb-edu/data/CC-MAIN-2024-51/000_00000.parquet",
    ],
    "openwebtext": [
        "Skylion007/openwebtext/plain_text/train-00000-of-00080.parquet",
        "Skylion007/openwebtext/plain_text/train-00079-of-00080.parquet",
        "Skylion007/openwebtext/README.md",
    ],
    "tinystories": [
        "roneneldan/TinyStories/data/train-00000-of-00004-2d5a1467fff1081b.parquet",
        "roneneldan/TinyStories/data/train-00003-of-00004-d243063613e5a057.parquet",
        "roneneldan/TinyStories/data/validation-00000-of-00001-869c898b519ad725.parquet",
    ],
    "wikipedia-en": [
        "wikimedia/wikipedia/20231101.en/train-00000-of-00041.parquet",
        "wikimedia/wikipedia/20231101.en/train-00040-of-00041.parquet",
        "wikimedia/wikipedia/20231101.de/train-00000-of-00020.parquet",
    ],
    "smoltalk": [
        "HuggingFaceTB/smoltalk/data/all/train-00000-of-00009.parquet",
        "HuggingFaceTB/smoltalk/data/all/train-00008-of-00009.parquet",
        "HuggingFaceTB/smoltalk/data/all/test-00000-of-00001.parquet",
    ],
    "climbmix": [
        "karpathy/climbmix-400b-shuffle/shard_00000.parquet",
        "karpathy/climbmix-400b-shuffle/shard_00999.parquet",
        "karpathy/climbmix-400b-shuffle/shard_06542.parquet",
    ],
}
BIG = [text * 20 + str(n) for n, text in enumerate(DOCUMENTS * 2)]  # 5 MB


@pytest.fixture
def hub(tmp_path):
    """A hub with one repository: two files of 2.5 MB."""
    folder = tmp_path / "hub/ORG/NAME"
    folder.mkdir(parents=True)
    for n in (0, 1):
        write(folder / f"{n}.jsonl", "jsonl", BIG[n::2])
    with Hub(tmp_path / "hub") as hub:
        yield hub


def fetch(hub, *inputs, **flags):
    """Run prepare_data.py to its end with this hub."""
    return end(start(*inputs, hub=hub, **flags))


@pytest.mark.parametrize("name", CATALOG)
def test_every_name_is_prepared_from_its_repository(tmp_path, flags, name):
    for file, text in zip(LAYOUTS[name], DOCUMENTS, strict=False):
        row = {"text": text, "id": "1"}
        if name == "smoltalk":
            row = {"messages": [{"role": "user", "content": text}]}
        path = tmp_path / "hub" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    with Hub(tmp_path / "hub") as hub:
        result = ok(fetch(hub, name, val_fraction=0, **flags))
    turn = "User: {}\n\n" if name == "smoltalk" else "{}"
    assert documents(tmp_path / "out") == [turn.format(text) for text in DOCUMENTS[:2]]
    assert CATALOG[name].license in result.stderr


def test_a_remote_folder_gives_what_a_local_one_does(tmp_path, hub):
    ok(prepare(hub.folder / "ORG/NAME", tokenizer="char", out=tmp_path / "local"))
    ok(fetch(hub, "hf://datasets/ORG/NAME", tokenizer="char", out=tmp_path / "remote"))
    assert sha(tmp_path / "local") == sha(tmp_path / "remote")
    assert not (tmp_path / "remote/.partial").exists()


FIND = """
import sys
from preparing import InputError
from preparing.sources import find_sources
for given in sys.argv[1:]:
    try:
        print(*[source.path.rpartition("/")[2] for source in find_sources([given])])
    except InputError as error:
        print(error)
"""


def test_a_remote_folder_has_the_known_types_and_a_pattern_the_one_it_ends_in(hub):
    folder = hub.folder / "ORG/TABLES"
    folder.mkdir()
    for name in ("a.csv", "b.csv", "README.md"):
        write(folder / name, "txt", DOCUMENTS[:1])
    tables, texts = "hf://datasets/ORG/TABLES", "hf://datasets/ORG/NAME"
    inputs = (f"{tables}/**.csv", tables, f"{tables}/*.tsv", f"{texts}/*.json*", f"{texts}/*")
    result = run_code(FIND, *inputs, **hub.environment)
    named, told, missing, *others = result.stdout.splitlines()
    assert named == "a.csv b.csv"
    words = "but 2 .csv, 1 .md; to read other types, write a pattern in quotes, such as"
    assert f"{words} {quote(f'{tables}/**/*.ENDING')}" in told
    assert told.endswith(f"write {tables}@refs/convert/parquet/**.parquet")
    assert missing.endswith(f"at {tables}/*.tsv, nor any other")
    assert others == ["0.jsonl 1.jsonl"] * 2


def test_what_the_hub_calls_a_data_set_is_explained():
    for given in ("ORG/NAME", "https://huggingface.co/datasets/ORG/NAME/viewer"):
        with pytest.raises(InputError, match=r"is hf://datasets/ORG/NAME\Z"):
            find_sources([given])


def test_a_tokenizer_is_trained_on_the_remote_text_that_is_read(tmp_path, hub):
    flags = {"vocab_size": 600, "gigabytes": 0.001, "out": tmp_path / "out"}
    result = ok(fetch(hub, "hf://datasets/ORG/NAME/**.jsonl", **flags))
    size = (tmp_path / "hub/ORG/NAME/0.jsonl").stat().st_size  # the first of two files
    assert f"trained on {si(size, 'B')} spread" in result.stdout


def test_a_key_in_an_address_is_no_part_of_it(tmp_path, hub, flags):
    web = f"{hub.address}/datasets/ORG/NAME/resolve/main"
    for key in ("abc", "def"):
        inputs = [f"{web}/{n}.jsonl?token={key}" for n in (0, 1)]
        result = ok(fetch(hub, *inputs, **flags))
    assert "is finished already" in result.stdout
    found = [source["path"] for source in read_meta(tmp_path / "out").sources]
    assert found == [f"{web}/{n}.jsonl?token=..." for n in (0, 1)]
    assert len(documents(tmp_path / "out")) == len(BIG)
    login = web.replace("://", "://me:secret@")
    result = fetch(hub, f"{login}/0.jsonl?token=abc", out=tmp_path / "other")
    fails_clearly(result, f"prepare_data.py: {web}/0.jsonl?token=... does not exist, or you have")
    assert not {"secret", "abc"}.intersection(re.findall("[a-z]+", result.stderr))


def test_a_sample_of_remote_text_takes_a_few_files_evenly_spread():
    def sampled(count, megabytes, protocol="hf://", share=1.0):
        found = [Source(f"{protocol}{n}", "parquet", "", megabytes << 20, "") for n in range(count)]
        return [found.index(source) for source in sources_to_sample(found, 100_000_000, share)]

    assert sampled(40, 300) == [0, 13, 26]  # 900 of 12,000 MB
    assert sampled(14, 2000) == [0]
    assert sampled(3, 1) == [0, 1, 2]
    assert sampled(4, 250, share=0.05) == [0]  # as with --gigabytes
    assert sampled(4, 250, share=0.3) == [0, 1]
    assert sampled(40, 300, share=0.5) == [0, 6, 13]
    assert sampled(40, 300, protocol="") == list(range(40))


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_a_bad_network_and_kills_change_nothing(tmp_path):
    torture(tmp_path, runs=1, seed=1021)


def test_gigabytes_end_with_a_document_whatever_interrupts(tmp_path, hub, tokenizer):
    flags = {"tokenizer": tokenizer, "gigabytes": 0.003, "val_fraction": 0, "clean": True}
    ok(prepare(hub.folder / "ORG/NAME", workers=1, out=tmp_path / "one", **flags))
    sizes = [len(text.encode()) for text in documents(tmp_path / "one")]
    assert sum(sizes) >= 3_000_000 > sum(sizes[:-1])
    hub.bytes_a_second = 1_000_000
    process = start("hf://datasets/ORG/NAME", hub=hub, workers=3, out=tmp_path / "two", **flags)
    kill_midway(process, tmp_path / "two")
    hub.bytes_a_second = 0
    ok(fetch(hub, "hf://datasets/ORG/NAME", workers=3, out=tmp_path / "two", **flags))
    assert sha(tmp_path / "one") == sha(tmp_path / "two")


def test_the_cache_keeps_to_its_size(tmp_path, flags, hub):
    hub.bytes_a_second = 1_500_000
    flags |= {"cache_gb": 0.003}
    process = start("hf://datasets/ORG/NAME", hub=hub, **flags)
    cache, largest = tmp_path / "out/.partial/cache", 0
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError):  # a file that has been read
            largest = max(largest, sum(path.stat().st_size for path in cache.iterdir()))
        time.sleep(0.01)
    assert 0 < largest <= 3_000_000


def test_what_changed_at_the_source_while_a_run_was_stopped_is_named(tmp_path, flags, hub):
    second = hub.folder / "ORG/NAME/1.jsonl"
    write(second, "jsonl", BIG)  # the first record comes after 4 MB
    hub.bytes_a_second = 1_500_000
    kill_midway(start("hf://datasets/ORG/NAME", hub=hub, **flags), tmp_path / "out")
    data = second.read_bytes().replace(b"Document", b"document")  # of the same size
    second.write_bytes(data)
    result = fetch(hub, "hf://datasets/ORG/NAME", **flags)
    fails_clearly(result, "unfinished work", "differs from", "NAME/1.jsonl on", "--overwrite")


def test_a_token_does_not_follow_a_redirect_to_another_host(flags, hub):
    hub.token = "hf_secret"
    with Hub(hub.folder) as elsewhere:
        hub.files_at = elsewhere.address.replace("127.0.0.1", "localhost")
        variables = {"HF_TOKEN": hub.token, "NO_PROXY": "localhost,127.0.0.1"}
        ok(fetch(hub, "hf://datasets/ORG/NAME", variables=variables, **flags))
    assert hub.token in hub.tokens
    assert elsewhere.tokens == {""}


def test_bad_input_is_named(tmp_path, flags, hub):
    def fails(given, *words, status=2, **more):
        fails_clearly(fetch(hub, given, **flags | more), *words, status=status)

    fails("", "argument INPUT: it is empty")
    fails("finweb-edu", "no such file or folder: finweb-edu", "shakespeare, fineweb-edu")
    fails("hf://datasets/ORG/OTHER", "ORG/OTHER does not exist, or you have no access to it")
    fails("hf://datasets/ORG/NAME/none/*.parquet", "no .txt, .jsonl or .parquet file")
    fails(f"{hub.address}/datasets/ORG/NAME/resolve/main/no.txt", "no.txt does not exist")
    fails("hf://datasets/ORG/NAME", "does not hold", "at least --cache_gb 0.01", cache_gb=0.001)
    fails("ftp://host/file.txt", "ftp:// is not among", "s3://")
    fails("gs://bucket/file.txt", "python -m pip install gcsfs")
    hub.gated = True
    fails("hf://datasets/ORG/NAME", "you have no access to it", "accept its terms", "HF_TOKEN")
    hub.gated = False
    wrong = {"HF_TOKEN": "hf_wrong"}
    fails("hf://datasets/ORG/NAME", "401 Unauthorized", "HF_TOKEN", variables=wrong)
    hub.ranges = False
    web = f"{hub.address}/datasets/ORG/NAME/resolve/main/0.jsonl"
    fails(web, "no parts of it", "curl -LO")
    hub.ranges = True
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    fails("hf://datasets/ORG/NAME", "cannot be reached", status=1, variables=nowhere)
    assert not (tmp_path / "out/.partial/progress.json").exists()


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files")
def test_a_full_disk_is_named(flags, hub):
    small = {"preexec_fn": files_up_to(1_500_000)}
    result = fetch(hub, "hf://datasets/ORG/NAME", options=small, **flags)
    advice = ("--cache_gb", "the same command continues")
    fails_clearly(result, "File too large", *advice, status=1)


def test_s3(tmp_path, flags):
    flags |= {"val_fraction": 0}
    with Store():
        store = boto3.client("s3")
        for n in (0, 1):
            write(tmp_path / f"{n}.jsonl.gz", "jsonl.gz", BIG[n::2])
            store.upload_file(str(tmp_path / f"{n}.jsonl.gz"), "bucket", f"deep/{n}.jsonl.gz")
        ok(prepare("s3://bucket/**.jsonl.gz", **flags))
        assert documents(tmp_path / "out") == BIG[0::2] + BIG[1::2]
        fails_clearly(prepare("s3://none/*.txt", **flags), "no .txt", "at s3://none")
