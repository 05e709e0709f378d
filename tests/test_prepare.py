"""prepare_data.py as a user runs it: formats, splits, cleaning, interruptions, bad input. Real
files, real processes.
"""

import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import pyzstd

from formats.data_folder import read_meta
from tests.conftest import ROOT, fails_clearly, prose
from tokenizer_bpe import EOT, Tokenizer

DOCUMENTS = [f"Document {n}. " + prose()[n * 700 : n * 700 + 600].strip() for n in range(200)]


def start(*arguments, **options):
    """Begin prepare_data.py; returns the process."""
    command = [sys.executable, "prepare_data.py", *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def end(process, text=None):
    """Give a process `text` as standard input and wait for it."""
    output, errors = process.communicate(text, timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def prepare(*arguments, text=None):
    """Run prepare_data.py to its end."""
    return end(start(*arguments), text)


def ok(result):
    assert result.returncode == 0, result.stderr
    return result


def sha(folder):
    return [
        hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("train.bin", "val.bin", "tokenizer.json")
    ]


def documents(folder):
    """The texts of both splits, as decoded from the files."""
    meta, tokenizer = read_meta(folder), Tokenizer.load(folder)
    texts = []
    for split in meta.splits.values():
        ids = np.fromfile(folder / split.file, meta.dtype)
        ends = np.flatnonzero(ids == tokenizer.eot_id)
        assert len(ends) == split.documents
        texts += [
            tokenizer.decode(part[part != tokenizer.eot_id])
            for part in np.split(ids, ends + 1)[:-1]
        ]
    return texts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A small tokenizer, which most tests encode with."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    Tokenizer.train([prose()], 600).save(path)
    return path


@pytest.fixture
def large(tmp_path):
    """A file of 60 documents, 12 MB."""
    path = tmp_path / "a.txt"
    path.write_text((prose() + f"\n{EOT}\n") * 60, newline="\n")
    return path


def write(path, format, texts):
    """`texts` as a file of the given format."""
    kind, _, packing = format.partition(".")
    if kind == "parquet":
        import pyarrow

        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=37)
        return
    lines = (
        [json.dumps({"text": text}) for text in texts]
        if kind == "jsonl"
        else [text + (f"\n{EOT}" if n + 1 < len(texts) else "") for n, text in enumerate(texts)]
    )
    data = "\n".join(lines).encode()
    path.write_bytes({"": lambda d: d, "gz": gzip.compress, "zst": pyzstd.compress}[packing](data))


@pytest.mark.parametrize(
    "format", ["txt", "jsonl", "txt.gz", "jsonl.gz", "txt.zst", "jsonl.zst", "parquet"]
)
def test_every_format_gives_the_same_documents(tmp_path, tokenizer, format):
    pytest.importorskip("pyarrow.parquet")
    write(tmp_path / f"a.{format}", format, DOCUMENTS)
    ok(prepare(tmp_path / f"a.{format}", "--tokenizer", tokenizer, "--out", tmp_path / "out"))
    got = documents(tmp_path / "out")
    assert sorted(text.removesuffix("\n") if "txt" in format else text for text in got) == sorted(
        DOCUMENTS
    )


def test_conversations_are_written_with_the_documented_template(tmp_path, tokenizer):
    messages = [
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Good day. "},
    ]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"messages": messages, "n": n}) for n in range(3))
    )
    ok(
        prepare(
            tmp_path / "a.jsonl",
            "--tokenizer",
            tokenizer,
            "--val_fraction",
            0,
            "--out",
            tmp_path / "out",
        )
    )
    assert documents(tmp_path / "out") == ["User: Hello?\n\nAssistant: Good day.\n\n"] * 3


def test_folders_globs_and_standard_input(tmp_path, tokenizer):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    write(tmp_path / "in" / "b.txt", "txt", DOCUMENTS[:50])
    write(tmp_path / "in" / "deep" / "a.jsonl.gz", "jsonl.gz", DOCUMENTS[50:])
    (tmp_path / "in" / "picture.png").write_bytes(b"\x89PNG\xff")
    ok(prepare(tmp_path / "in", "--tokenizer", tokenizer, "--out", tmp_path / "folder"))
    assert [s["path"].split("/")[-1] for s in read_meta(tmp_path / "folder").sources] == [
        "b.txt",
        "a.jsonl.gz",
    ]
    assert len(documents(tmp_path / "folder")) == 200
    ok(
        prepare(
            tmp_path / "in" / "**" / "*.jsonl.gz",
            "--tokenizer",
            tokenizer,
            "--out",
            tmp_path / "glob",
        )
    )
    assert sorted(documents(tmp_path / "glob")) == sorted(DOCUMENTS[50:])
    text = gzip.decompress((tmp_path / "in/deep/a.jsonl.gz").read_bytes()).decode()
    ok(
        prepare(
            "-",
            "--stdin_format",
            "jsonl",
            "--tokenizer",
            tokenizer,
            "--out",
            tmp_path / "stdin",
            text=text,
        )
    )
    assert sha(tmp_path / "stdin") == sha(tmp_path / "glob")


def test_the_split_keeps_copies_together_and_does_not_depend_on_their_place(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", "jsonl", DOCUMENTS + DOCUMENTS[::-1])
    ok(
        prepare(
            tmp_path / "a.jsonl",
            "--tokenizer",
            tokenizer,
            "--val_fraction",
            0.3,
            "--out",
            tmp_path / "out",
        )
    )
    meta, coder = read_meta(tmp_path / "out"), Tokenizer.load(tokenizer)
    sides = [
        set(coder.decode(np.fromfile(tmp_path / "out" / s.file, meta.dtype)).split(EOT)) - {""}
        for s in meta.splits.values()
    ]
    assert not sides[0] & sides[1] and sides[0] | sides[1] == set(DOCUMENTS)
    assert 0.15 < len(sides[1]) / 200 < 0.45


def test_a_single_document_is_split_at_its_end(tmp_path):
    text = prose() * 12  # more than one piece
    (tmp_path / "a.txt").write_text(text, newline="\n")
    result = ok(prepare(tmp_path / "a.txt", "--tokenizer", "char", "--out", tmp_path / "out"))
    coder = Tokenizer.load(tmp_path / "out")
    train, val = (
        coder.decode(np.fromfile(tmp_path / "out" / f"{name}.bin", np.uint16))
        for name in ("train", "val")
    )
    assert train + val == text + EOT and 0.099 < len(val) / len(text) < 0.101
    assert "the last 10% of the text" in result.stdout
    for words in ("bytes a token", "of them occur", "MB/s", "all processes together", "begins"):
        assert words in result.stdout


def test_workers_do_not_change_the_bytes(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text((prose() + f"\n{EOT}\n") * 10 + prose() * 15, newline="\n")
    write(tmp_path / "b.jsonl.gz", "jsonl.gz", DOCUMENTS * 20)
    for workers in (1, 3):
        ok(
            prepare(
                tmp_path / "a.txt",
                tmp_path / "b.jsonl.gz",
                "--clean",
                "--vocab_size",
                1000,
                "--workers",
                workers,
                "--out",
                tmp_path / str(workers),
            )
        )
    assert sha(tmp_path / "1") == sha(tmp_path / "3")


def heed_ctrl_c():
    """A test suite in the background of a shell has it ignored, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_continues_to_the_same_bytes(tmp_path, stop):
    random.seed(int(stop))
    texts = [random.choice(DOCUMENTS) * 3 + str(n) for n in range(8000)]
    write(tmp_path / "a.jsonl.gz", "jsonl.gz", texts)
    (tmp_path / "b.txt").write_text(
        prose() * 40 + f"\n{EOT}\n" + prose() * 40, newline="\n"
    )  # a long document and its copy
    arguments = (
        tmp_path / "a.jsonl.gz",
        tmp_path / "b.txt",
        "--clean",
        "--vocab_size",
        2000,
        "--sample_bytes",
        2e6,
        "--compress",
    )
    ok(prepare(*arguments, "--workers", 2, "--out", tmp_path / "whole"))
    kills, continued, wait = 0, 0, 0.3
    while True:
        process = start(
            *arguments,
            "--workers",
            1 + kills % 3,
            "--out",
            tmp_path / "killed",
            start_new_session=True,
            preexec_fn=heed_ctrl_c,
        )
        try:
            _, errors = process.communicate(timeout=wait)
        except subprocess.TimeoutExpired:
            process.send_signal(stop)
            _, errors = process.communicate(timeout=20)
        continued += "continuing after" in errors
        if process.returncode == 0:
            break
        assert (
            process.returncode
            == {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}[stop]
        ), errors
        assert (
            stop == signal.SIGKILL
            or "the same command continues" in errors
            and "Traceback" not in errors
        )
        kills, wait = kills + 1, wait + random.random() * 0.7
    assert kills > 2 and continued
    assert sha(tmp_path / "killed") == sha(tmp_path / "whole")
    assert not (tmp_path / "killed" / ".partial").exists()
    assert (
        json.loads((tmp_path / "killed" / "cleaning.json").read_text())["exact duplicates"][0] == 1
    )


def test_a_finished_dataset_is_kept_and_changes_are_named(tmp_path, tokenizer):
    write(tmp_path / "a.txt", "txt", DOCUMENTS)
    arguments = (tmp_path / "a.txt", "--out", tmp_path / "out")
    ok(prepare(*arguments, "--tokenizer", tokenizer))
    before = (tmp_path / "out/meta.json").read_bytes()
    assert "finished already" in ok(prepare(*arguments, "--tokenizer", tokenizer)).stdout
    fails_clearly(
        prepare(*arguments, "--tokenizer", tokenizer, "--val_fraction", 0.5),
        "val_fraction was 0.1, is now 0.5",
        "--overwrite",
    )
    fails_clearly(
        prepare(*arguments, "--tokenizer", "char"),
        "tokenizer was sha256",
        "is now char",
        "--overwrite",
    )
    with open(tmp_path / "a.txt", "a") as file:
        file.write("more")
    fails_clearly(prepare(*arguments, "--tokenizer", tokenizer), "a.txt changed", "--overwrite")
    assert (tmp_path / "out/meta.json").read_bytes() == before
    ok(prepare(*arguments, "--tokenizer", "char", "--overwrite"))
    assert read_meta(tmp_path / "out").tokenizer["kind"] == "char"


def test_cleaning_and_its_report(tmp_path, tokenizer):
    noise = {
        "shorter than 20 characters": "too short",
        "one character is more than 50%": "=" * 90 + "heading",
        "fewer than 40% letters and digits": "?!*&%$#@ a" * 10,
    }
    texts = [
        *DOCUMENTS[:20],
        *noise.values(),
        *DOCUMENTS[:5],
        "Cafe\u0301 with a bell \x07 and\r\nsome more\ufffd text to keep here",
    ]
    write(tmp_path / "a.jsonl", "jsonl", texts)
    result = ok(
        prepare(
            tmp_path / "a.jsonl", "--clean", "--tokenizer", tokenizer, "--out", tmp_path / "out"
        )
    )
    assert sorted(documents(tmp_path / "out")) == sorted(
        [*DOCUMENTS[:20], "Café with a bell  and\nsome more text to keep here"]
    )
    report = json.loads((tmp_path / "out" / "cleaning.json").read_text())
    for rule, example in noise.items():
        assert report[rule] == [1, len(example), [example[:100]]] and rule in result.stdout
    assert (
        report["exact duplicates"][:2] == [5, sum(len(t.encode()) for t in DOCUMENTS[:5])]
        and len(report["exact duplicates"][2]) == 3
    )
    assert (
        report["not in NFC"][:2] == [1, 1]
        and report["control characters"][:2] == [1, 1]
        and report["broken encoding"][:2] == [1, 3]
    )
    ok(
        prepare(
            tmp_path / "a.jsonl",
            "--clean",
            "--min_chars",
            5,
            "--max_char_share",
            1,
            "--min_letters",
            0,
            "--tokenizer",
            tokenizer,
            "--out",
            tmp_path / "mild",
        )
    )
    assert len(documents(tmp_path / "mild")) == 24


def test_compressed_copies_and_verify(tmp_path, tokenizer):
    write(tmp_path / "a.txt", "txt", DOCUMENTS)
    ok(
        prepare(
            tmp_path / "a.txt", "--tokenizer", tokenizer, "--compress", "--out", tmp_path / "out"
        )
    )
    assert (
        gzip.decompress((tmp_path / "out/train.bin.gz").read_bytes())
        == (tmp_path / "out/train.bin").read_bytes()
    )
    assert (
        "is good: train.bin.gz, train.bin, val.bin.gz, val.bin"
        in ok(prepare("--verify", tmp_path / "out")).stdout
    )
    shutil.copytree(tmp_path / "out", tmp_path / "sent", ignore=shutil.ignore_patterns("*.bin"))
    assert "is good: train.bin.gz, val.bin.gz" in ok(prepare("--verify", tmp_path / "sent")).stdout
    data = bytearray((tmp_path / "out/train.bin").read_bytes())
    data[1000] ^= 1
    (tmp_path / "out/train.bin").write_bytes(data)
    fails_clearly(prepare("--verify", tmp_path / "out"), "train.bin is damaged", status=1)
    (tmp_path / "out/train.bin").write_bytes(data[:-2])
    fails_clearly(prepare("--verify", tmp_path / "out"), "cut off", status=1)


def test_shards_in_order_are_the_whole(tmp_path):
    (tmp_path / "in").mkdir()
    for n in range(5):
        write(tmp_path / "in" / f"{n}.txt", "txt", DOCUMENTS[n * 40 : n * 40 + 40])
    fails_clearly(prepare(tmp_path / "in", "--shard", "1/2"), "--tokenizer_only")
    ok(prepare(tmp_path / "in", "--vocab_size", 600, "--tokenizer_only", "--out", tmp_path / "out"))
    with_it = ("--tokenizer", tmp_path / "out" / "tokenizer.json", "--val_fraction", 0.2)
    for shard in ("1/3", "2/3", "3/3"):
        ok(prepare(tmp_path / "in", *with_it, "--shard", shard, "--out", tmp_path / "out"))
    ok(prepare(tmp_path / "in", *with_it, "--out", tmp_path / "whole"))
    for name in ("train.bin", "val.bin"):
        assert (
            b"".join((tmp_path / "out" / f"shard-{n}-of-3" / name).read_bytes() for n in (1, 2, 3))
            == (tmp_path / "whole" / name).read_bytes()
        )
    assert (
        read_meta(tmp_path / "out").splits["train"].tokens
        == read_meta(tmp_path / "whole").splits["train"].tokens
    )
    assert "is good" in ok(prepare("--verify", tmp_path / "out")).stdout
    fails_clearly(
        prepare(tmp_path / "in", *with_it, "--shard", "1/9", "--out", tmp_path / "x"),
        "only 5 files",
    )


def test_bad_input_is_named(tmp_path, tokenizer):
    def fails(*words, options=(), status=2):
        fails_clearly(
            prepare(*inputs, "--tokenizer", tokenizer, "--out", tmp_path / "out", *options),
            *words,
            status=status,
        )

    bad = tmp_path / "bad.txt"
    inputs = [bad]
    fails("no such file", "bad.txt")
    bad.write_bytes(b"")
    fails("bad.txt is empty")
    bad.write_bytes(b" \n\n ")
    fails("only white space")
    bad.write_bytes(b"x" * 1_500_000 + b"caf\xe9" + b"y" * 100)
    fails("bad.txt is not UTF-8", "offset 1,500,003", "--on_error")
    bad.write_bytes(gzip.compress(b"text"))
    inputs = [tmp_path / "bad.jsonl"]
    for line, words in (
        (b'{"text": "x"', ["not valid JSON"]),
        (b'{"body": 1}', ["no field 'text'", "'body'", "--text_field"]),
        (b'{"text": 1}', ["is a int, not a text"]),
        (b"[]", ["not an object"]),
        (b'{"text": "\xff"}', ["not UTF-8 at byte offset 28"]),
    ):
        inputs[0].write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
        fails("bad.jsonl, line 3", *words)
    inputs[0].write_bytes(b'{"text": "\\ud83d"}\n')
    fails("surrogate")
    for packing, name in ((gzip.compress, "cut.txt.gz"), (pyzstd.compress, "cut.jsonl.zst")):
        inputs = [tmp_path / name]
        inputs[0].write_bytes(packing(json.dumps({"text": prose()}).encode())[:-100])
        fails(name, "cut off or damaged")
    inputs = [tmp_path / "cut.parquet"]
    inputs[0].write_bytes(b"PAR1 no table")
    fails("cut.parquet cannot be read as parquet")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"x")
    inputs = [tmp_path / "pictures"]
    fails("holds no .txt, .jsonl or .parquet", "1 .png")
    inputs = [tmp_path / "*.csv"]
    fails("no file matches")
    inputs = []
    fails("--workers: 0", options=["--workers", 0])
    fails("--shard: 3/2", options=["--shard", "3/2"])
    inputs = [tmp_path / "good.txt"]
    inputs[0].write_text(prose()[:5000])
    fails_clearly(
        prepare(*inputs, "--vocab_size", 32000, "--out", tmp_path / "out"),
        "supports a vocabulary of",
        "--vocab_size",
    )
    fails_clearly(prepare(*inputs, "--vocab_size", 100, "--out", tmp_path / "out"), "at least 257")
    other = tmp_path / "other.json"
    Tokenizer.characters("abc").save(other)
    fails_clearly(
        prepare(*inputs, "--tokenizer", other, "--out", tmp_path / "out"),
        "good.txt",
        "is not among the 3 characters",
    )
    fails("no tokenizer at", options=["--tokenizer", tmp_path / "none.json"])


def test_on_error_skip_and_replace(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(
        b"good document one\n<|endoftext|>\nbad caf\xe9 here\n<|endoftext|>\ngood document two\n"
    )
    ok(
        prepare(
            tmp_path / "a.txt",
            "--tokenizer",
            tokenizer,
            "--on_error",
            "skip",
            "--val_fraction",
            0,
            "--out",
            tmp_path / "skip",
        )
    )
    assert documents(tmp_path / "skip") == ["good document one\n", "good document two\n"]
    ok(
        prepare(
            tmp_path / "a.txt",
            "--tokenizer",
            tokenizer,
            "--on_error",
            "replace",
            "--val_fraction",
            0,
            "--out",
            tmp_path / "replace",
        )
    )
    assert documents(tmp_path / "replace")[1] == "bad caf\ufffd here\n"
    (tmp_path / "b.jsonl").write_text('{"text": "good document"}\n{broken\n{"other": 1}\n')
    result = ok(
        prepare(
            tmp_path / "b.jsonl",
            "--tokenizer",
            tokenizer,
            "--on_error",
            "skip",
            "--val_fraction",
            0,
            "--out",
            tmp_path / "lines",
        )
    )
    assert (
        documents(tmp_path / "lines") == ["good document"]
        and "unusable records: 2 documents" in result.stdout
    )


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files")
def test_a_full_disk_keeps_what_is_finished(tmp_path, tokenizer, large):
    import resource

    arguments = (large, "--tokenizer", tokenizer, "--out", tmp_path / "out")
    limited = start(
        *arguments,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000)),
    )
    fails_clearly(end(limited), "File too large", "the same command continues", status=1)
    ok(prepare(*arguments))
    ok(prepare(large, "--tokenizer", tokenizer, "--out", tmp_path / "other"))
    assert sha(tmp_path / "out") == sha(tmp_path / "other")


def test_the_death_of_a_worker_is_reported_and_costs_nothing(tmp_path, tokenizer, large):
    arguments = (large, "--tokenizer", tokenizer, "--workers", 2, "--out", tmp_path / "out")
    process, workers = start(*arguments), []
    while not workers:
        workers = [
            p
            for p in psutil.Process(process.pid).children()
            if "spawn_main" in " ".join(p.cmdline())
        ]
    workers[0].kill()
    fails_clearly(end(process), "a worker process died", "fewer --workers", status=1)
    ok(prepare(*arguments))
    ok(prepare("--verify", tmp_path / "out"))


def test_replacing_a_dataset_keeps_it_until_the_new_one_is_finished(tmp_path, tokenizer, large):
    arguments = [large, "--out", tmp_path / "out", "--tokenizer"]
    ok(prepare(*arguments, tokenizer))
    ok(prepare(*arguments, tokenizer, "--clean", "--compress", "--overwrite"))
    before = sha(tmp_path / "out")
    process = start(*arguments, "char", "--overwrite")
    while not (tmp_path / "out/.partial/train.bin").exists():
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert sha(tmp_path / "out") == before
    ok(prepare(*arguments, "char", "--overwrite"))
    assert read_meta(tmp_path / "out").tokenizer["kind"] == "char"
    assert not [
        p for p in (tmp_path / "out").iterdir() if p.suffix == ".gz" or p.name == "cleaning.json"
    ]


def test_two_runs_do_not_share_a_folder(tmp_path, tokenizer, large):
    arguments = (large, "--tokenizer", tokenizer, "--out", tmp_path / "out")
    first = start(*arguments)
    while not (tmp_path / "out/.partial/plan.json").exists() and first.poll() is None:
        time.sleep(0.01)
    second = prepare(*arguments)
    ok(end(first))
    fails_clearly(second, "another run is preparing", status=1)
