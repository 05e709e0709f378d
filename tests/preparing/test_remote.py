"""Text by name and by address: the real layouts, real servers on loopback, bad networks."""

import os
import time

import pytest

from formats.data_folder import read_meta
from preparing.catalog import CATALOG
from preparing.sources import Source
from preparing.tokenizers import sources_to_sample
from tests.conftest import fails_clearly
from tests.preparing import torture
from tests.preparing.conftest import (
    DOCUMENTS,
    command,
    documents,
    end,
    ok,
    prepare,
    sha,
    start,
    write,
)
from tests.preparing.hub import Faults, Hub
from tests.preparing.hubs import CHAT, as_jsonl, begin, fetch, layout, write_rows

pytest.importorskip("pyarrow.parquet")
pytest.importorskip("fsspec")
BIG = [text * 20 + str(n) for n, text in enumerate(DOCUMENTS * 2)]  # 5 MB


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    """All repositories of the catalogue, and what each name should give."""
    root = tmp_path_factory.mktemp("hub")
    return root, layout(root)


@pytest.fixture
def hub(tmp_path):
    """A hub with one repository: two files of 2.5 MB."""
    root = tmp_path / "hub"
    for n in (0, 1):
        (root / "ORG/NAME").mkdir(parents=True, exist_ok=True)
        write(root / f"ORG/NAME/{n}.jsonl", "jsonl", BIG[n::2])
    with Hub(root) as hub:
        yield hub


@pytest.mark.parametrize("name", CATALOG)
def test_every_name_is_prepared_from_its_repository(tmp_path, tokenizer, repositories, name):
    root, expected = repositories
    with Hub(root) as hub:
        result = ok(fetch(hub, name, tokenizer=tokenizer, val_fraction=0, out=tmp_path / "out"))
        read = [path for path, count in hub.asked.items() if "/resolve/" in path]
    assert documents(tmp_path / "out") == expected[name]
    assert len(read) == len(read_meta(tmp_path / "out").sources)
    assert CATALOG[name].licence in result.stderr


def test_the_names_stand_in_the_help():
    assert ",".join(CATALOG) in "".join(ok(prepare(help=True)).stdout.split())


def test_conversations_of_parquet_read_as_those_of_json_lines(tmp_path, tokenizer):
    rows = [{"messages": CHAT * n, "source": "x"} for n in (1, 2, 3)]
    write_rows(tmp_path / "a.parquet", rows)
    as_jsonl(tmp_path / "a.jsonl", rows)
    for kind in ("parquet", "jsonl"):
        out = tmp_path / kind
        ok(prepare(tmp_path / f"a.{kind}", tokenizer=tokenizer, val_fraction=0, out=out))
    assert sha(tmp_path / "parquet") == sha(tmp_path / "jsonl")


def test_a_remote_folder_gives_what_a_local_one_does(tmp_path, hub):
    flags = {"vocab_size": 600, "sample_bytes": 1e5}
    ok(prepare(hub.folder / "ORG/NAME", tokenizer="char", out=tmp_path / "local"))
    ok(fetch(hub, "hf://datasets/ORG/NAME", tokenizer="char", out=tmp_path / "remote"))
    assert sha(tmp_path / "local") == sha(tmp_path / "remote")
    assert not (tmp_path / "remote/.partial").exists()
    result = ok(fetch(hub, "hf://datasets/ORG/NAME/**.jsonl", out=tmp_path / "bpe", **flags))
    assert "trained on" in result.stdout
    web = f"{hub.address}/datasets/ORG/NAME/resolve/main/"
    inputs = [f"{web}{n}.jsonl?download=true" for n in (0, 1)]
    ok(fetch(hub, *inputs, tokenizer="char", out=tmp_path / "web"))
    assert sha(tmp_path / "local") == sha(tmp_path / "web")
    for key in ("abc", "def"):
        inputs = [f"{web}{n}.jsonl?token={key}" for n in (0, 1)]
        result = ok(fetch(hub, *inputs, tokenizer="char", out=tmp_path / "keys"))
        expected = [f"{web}{n}.jsonl?token=..." for n in (0, 1)]
        assert [source["path"] for source in read_meta(tmp_path / "keys").sources] == expected
    assert "is finished already" in result.stdout


def test_a_sample_of_remote_text_takes_a_few_files_evenly_spread():
    def sampled(count, megabytes, protocol="hf://"):
        found = [Source(f"{protocol}{n}", "parquet", "", megabytes << 20, 0) for n in range(count)]
        return [found.index(source) for source in sources_to_sample(found, 100_000_000)]

    assert sampled(40, 300) == [0, 13, 26]  # 900 of 12,000 MB
    assert sampled(14, 2000) == [0]
    assert sampled(3, 1) == [0, 1, 2]
    assert sampled(40, 300, protocol="") == list(range(40))


def test_a_connection_that_stalls_is_given_up(tmp_path, tokenizer, hub):
    hub.faults = Faults(stall=0.3, stall_seconds=5, seed=3)
    ok(fetch(hub, "hf://datasets/ORG/NAME", tokenizer=tokenizer, out=tmp_path / "out"))
    assert len(documents(tmp_path / "out")) == len(BIG)


def test_a_bad_network_and_kills_change_nothing(tmp_path):
    outcomes = torture.torture(tmp_path, runs=1, seed=1021)
    assert len(outcomes) == 1


def test_gigabytes_end_with_a_document_whatever_interrupts(tmp_path, hub, tokenizer):
    flags = {"tokenizer": tokenizer, "gigabytes": 0.003, "val_fraction": 0, "clean": True}
    ok(prepare(hub.folder / "ORG/NAME", workers=1, out=tmp_path / "one", **flags))
    sizes = [len(text.encode()) for text in documents(tmp_path / "one")]
    assert sum(sizes) >= 3_000_000 > sum(sizes[:-1])
    hub.bytes_a_second = 1_000_000
    process = begin(hub, "hf://datasets/ORG/NAME", workers=3, out=tmp_path / "two", **flags)
    journal = tmp_path / "two/.partial/progress.json"
    while not journal.exists() and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    hub.bytes_a_second = 0
    ok(fetch(hub, "hf://datasets/ORG/NAME", workers=3, out=tmp_path / "two", **flags))
    assert sha(tmp_path / "one") == sha(tmp_path / "two")
    flags["gigabytes"] = 1
    result = ok(prepare(hub.folder / "ORG/NAME", out=tmp_path / "all", **flags))
    assert "only" in result.stderr and "GB of text" in result.stderr


def test_the_cache_stays_within_its_bound(tmp_path, tokenizer):
    root = tmp_path / "hub"
    for n in range(6):
        (root / "ORG/NAME").mkdir(parents=True, exist_ok=True)
        write(root / f"ORG/NAME/{n}.jsonl", "jsonl", BIG[n::6])
    sizes = [path.stat().st_size for path in (root / "ORG/NAME").iterdir()]
    limit = 2.2 * max(sizes) / 1e9
    out = tmp_path / "out"
    most = 0
    with Hub(root, bytes_a_second=1_500_000) as hub:
        address = "hf://datasets/ORG/NAME"
        small = fetch(hub, address, tokenizer=tokenizer, cache_gb=limit / 3, out=out)
        fails_clearly(small, "--cache_gb", "does not hold", "give at least")
        process = begin(hub, address, tokenizer=tokenizer, cache_gb=limit, out=out)
        while process.poll() is None:
            held = 0
            for path in (out / ".partial/cache").glob("*"):
                try:
                    held += path.stat().st_size
                except FileNotFoundError:
                    continue
            most = max(most, held)
            time.sleep(0.01)
        ok(end(process))
    assert 0 < most <= limit * 1e9
    assert len(documents(out)) == len(BIG)


def test_what_changed_at_the_source_is_named(tmp_path, tokenizer, hub):
    out = tmp_path / "out"
    address = "hf://datasets/ORG/NAME"
    second = hub.folder / "ORG/NAME/1.jsonl"
    data = second.read_bytes()
    changed = data.replace(b"Document", b"document")  # of the same size
    hub.bytes_a_second = 1_500_000
    process = begin(hub, address, tokenizer=tokenizer, out=out)
    while process.poll() is None and not any("/resolve/" in path for path in hub.asked):
        time.sleep(0.01)
    second.write_bytes(changed)
    fails_clearly(end(process), "NAME/1.jsonl changed at its source")
    second.write_bytes(data)
    process = begin(hub, address, tokenizer=tokenizer, out=out, workers=1)
    while process.poll() is None and not (out / ".partial/progress.json").exists():
        time.sleep(0.01)
    process.kill()
    end(process)
    second.write_bytes(changed)
    hub.bytes_a_second = 0
    result = fetch(hub, address, tokenizer=tokenizer, out=out)
    fails_clearly(result, "unfinished work", "differs from", "NAME/1.jsonl on", "--overwrite")
    second.write_bytes(data)
    ok(fetch(hub, address, tokenizer=tokenizer, out=out))
    assert len(documents(out)) == len(BIG)


def test_bad_input_is_named(tmp_path, tokenizer, hub):
    def fails(given, *words, status=2, **flags):
        flags = {"tokenizer": tokenizer, "out": tmp_path / "out"} | flags
        fails_clearly(fetch(hub, given, **flags), *words, status=status)

    fails("", "an INPUT is empty")
    fails("finweb-edu", "no such file or folder: finweb-edu", "did you mean fineweb-edu?")
    fails("hf://datasets/ORG/OTHER", "hf://datasets/ORG/OTHER is not there, or not open to you")
    fails("hf://datasets/ORG/NAME/none/*.parquet", "no .txt, .jsonl or .parquet file")
    fails(f"{hub.address}/datasets/ORG/NAME/resolve/main/no.txt", "no.txt is not there")
    fails("ftp://host/file.txt", "ftp:// is not among", "s3://")
    fails("gs://bucket/file.txt", "python -m pip install gcsfs")
    hub.gated.add("ORG/NAME")
    fails("hf://datasets/ORG/NAME", "not open to you", "accept its terms", "HF_TOKEN")
    hub.gated.clear()
    words = command("hf://datasets/ORG/NAME", tokenizer=tokenizer, out=tmp_path / "out")
    environment = os.environ | hub.environment | {"HF_TOKEN": "hf_wrong"}
    fails_clearly(end(start(words, env=environment)), "401 Unauthorized", "HF_TOKEN")
    write_rows(hub.folder / "ORG/TABLE/a.parquet", [{"body": "text", "id": 1}])
    fails("hf://datasets/ORG/TABLE", "has no column 'text'; it has body, id", "--text_field")
    hub.ranges = False
    web = f"{hub.address}/datasets/ORG/NAME/resolve/main/0.jsonl"
    fails(web, "no parts of it", "curl -LO")
    hub.ranges = True
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9"}
    fails_clearly(end(start(words, env=environment)), "cannot be reached", "network", status=1)
    assert not (tmp_path / "out/.partial/progress.json").exists()


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files")
def test_a_full_disk_keeps_what_is_finished(tmp_path, tokenizer, hub):
    import resource

    def limit_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, 1_500_000))

    words = command("hf://datasets/ORG/NAME", tokenizer=tokenizer, out=tmp_path / "out")
    environment = os.environ | hub.environment
    limited = start(words, env=environment, preexec_fn=limit_files)
    fails_clearly(
        end(limited), "File too large", "--cache_gb", "the same command continues", status=1
    )
    ok(end(start(words, env=environment)))
    assert len(documents(tmp_path / "out")) == len(BIG)


def test_s3(tmp_path, tokenizer, monkeypatch):
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    _, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        import boto3

        store = boto3.client("s3")
        store.create_bucket(Bucket="texts")
        for n in (0, 1):
            write(tmp_path / f"{n}.jsonl.gz", "jsonl.gz", BIG[n::2])
            store.upload_file(str(tmp_path / f"{n}.jsonl.gz"), "texts", f"deep/{n}.jsonl.gz")
        inputs = [tmp_path / f"{n}.jsonl.gz" for n in (0, 1)]
        ok(prepare(*inputs, tokenizer=tokenizer, out=tmp_path / "local"))
        ok(prepare("s3://texts/**.jsonl.gz", tokenizer=tokenizer, out=tmp_path / "remote"))
        assert sha(tmp_path / "local") == sha(tmp_path / "remote")
        out = tmp_path / "out"
        fails_clearly(
            prepare("s3://none/*.txt", tokenizer=tokenizer, out=out), "no .txt", "at s3://none"
        )
    finally:
        server.stop()
