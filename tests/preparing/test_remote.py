"""Text by name and by address: the real layouts, real servers on loopback, bad networks."""

import os

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
from tests.preparing.hub import Hub
from tests.preparing.hubs import begin, fetch, layout, write_rows

pytest.importorskip("pyarrow.parquet")
pytest.importorskip("fsspec")
BIG = [text * 20 + str(n) for n, text in enumerate(DOCUMENTS * 2)]  # 5 MB


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
def test_every_name_is_prepared_from_its_repository(tmp_path, tokenizer, name):
    expected = layout(tmp_path / "hub")[name]
    with Hub(tmp_path / "hub") as hub:
        result = ok(fetch(hub, name, tokenizer=tokenizer, val_fraction=0, out=tmp_path / "out"))
    assert documents(tmp_path / "out") == expected
    assert CATALOG[name].licence in result.stderr


def test_the_names_stand_in_the_help():
    assert ",".join(CATALOG) in "".join(ok(prepare(help=True)).stdout.split())


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
    torture.wait_for(tmp_path / "two/.partial/progress.json", process)
    process.kill()
    process.communicate()
    hub.bytes_a_second = 0
    ok(fetch(hub, "hf://datasets/ORG/NAME", workers=3, out=tmp_path / "two", **flags))
    assert sha(tmp_path / "one") == sha(tmp_path / "two")


def test_what_changed_at_the_source_while_a_run_was_stopped_is_named(tmp_path, tokenizer, hub):
    out = tmp_path / "out"
    second = hub.folder / "ORG/NAME/1.jsonl"
    data = second.read_bytes()
    hub.bytes_a_second = 1_500_000
    process = begin(hub, "hf://datasets/ORG/NAME", tokenizer=tokenizer, out=out, workers=1)
    torture.wait_for(out / ".partial/progress.json", process)
    process.kill()
    end(process)
    second.write_bytes(data.replace(b"Document", b"document"))  # of the same size
    result = fetch(hub, "hf://datasets/ORG/NAME", tokenizer=tokenizer, out=out)
    fails_clearly(result, "unfinished work", "differs from", "NAME/1.jsonl on", "--overwrite")


def test_bad_input_is_named(tmp_path, tokenizer, hub):
    def fails(given, *words, status=2, **flags):
        flags = {"tokenizer": tokenizer, "out": tmp_path / "out"} | flags
        fails_clearly(fetch(hub, given, **flags), *words, status=status)

    fails("", "an INPUT is empty")
    fails("finweb-edu", "no such file or folder: finweb-edu", "did you mean fineweb-edu?")
    fails("hf://datasets/ORG/OTHER", "hf://datasets/ORG/OTHER is not there, or not open to you")
    fails("hf://datasets/ORG/NAME/none/*.parquet", "no .txt, .jsonl or .parquet file")
    fails(f"{hub.address}/datasets/ORG/NAME/resolve/main/no.txt", "no.txt is not there")
    fails("hf://datasets/ORG/NAME", "does not hold", "at least --cache_gb 0.01", cache_gb=0.001)
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
def test_a_full_disk_is_named(tmp_path, tokenizer, hub):
    import resource

    def limit_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, 1_500_000))

    words = command("hf://datasets/ORG/NAME", tokenizer=tokenizer, out=tmp_path / "out")
    environment = os.environ | hub.environment
    limited = start(words, env=environment, preexec_fn=limit_files)
    advice = ("--cache_gb", "the same command continues")
    fails_clearly(end(limited), "File too large", *advice, status=1)


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
