"""Kill prepare_data.py at any time and run it again: nothing is lost, nothing is mixed."""

import json
import os
import random
import signal
import time

import pytest

from formats.data_folder import read_meta
from tests.conftest import conversations, fails_clearly, prose, run_script, write_conversations
from tests.preparing.conftest import DOCUMENTS, command, end, ok, prepare, sha, start, write
from tokenizer_bpe import EOT

STATUS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}


def heed_ctrl_c():
    """A test suite in the background of a shell has it ignored, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_continues_to_the_same_bytes(tmp_path, stop):
    dice = random.Random(int(stop))
    texts = [dice.choice(DOCUMENTS) * 3 + str(n) for n in range(6000)]
    write(tmp_path / "a.jsonl.gz", "jsonl.gz", [*texts, texts[0]])
    long = prose() * 20
    (tmp_path / "b.txt").write_text(f"{long}\n{EOT}\n{long}", newline="\n")
    write_conversations(tmp_path / "c.jsonl", conversations(1500))
    inputs = (tmp_path / "a.jsonl.gz", tmp_path / "c.jsonl", tmp_path / "b.txt")
    flags = {"clean": True, "vocab_size": 2000, "sample_bytes": 2e6}
    ok(prepare(*inputs, workers=2, out=tmp_path / "whole", **flags))
    killed = tmp_path / "killed"
    continued = 0
    for run in range(5):
        process = start(
            command(*inputs, workers=1 + run % 3, out=killed, **flags),
            start_new_session=True,
            preexec_fn=heed_ctrl_c,
        )
        if run == 0:
            time.sleep(0.5 + dice.random())  # not before Python has begun
        elif run < 4:
            wait_for_progress(killed, process)
            time.sleep(dice.random() / 20)
        if run < 4:
            process.send_signal(stop)
        _, errors = process.communicate(timeout=100)
        continued += "continuing after" in errors
        if process.returncode == 0:
            continue
        assert process.returncode == STATUS[stop], errors
        # A signal that comes while it starts ends it without a word.
        assert not errors or "the same command continues" in errors or stop == signal.SIGKILL
        assert "Traceback" not in errors, errors
    assert process.returncode == 0 and continued
    assert sha(killed) == sha(tmp_path / "whole")
    assert "train.mask.bin" in sha(killed)
    assert not (killed / ".partial").exists()
    report = json.loads((killed / "cleaning.json").read_text())
    assert report["exact duplicates"]["documents"] == 1


def wait_for_progress(out, process):
    """Wait until a run has recorded more than it began with, or has ended."""
    journal = out / ".partial/progress.json"
    before = journal.read_bytes() if journal.exists() else None
    while process.poll() is None:
        if journal.exists() and journal.read_bytes() != before:
            return
        time.sleep(0.01)


@pytest.mark.skipif(os.name != "posix", reason="limits the size of files")
def test_a_full_disk_keeps_what_is_finished(tmp_path, tokenizer, large):
    import resource

    def limit_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, 4_000_000))

    limited = start(
        command(large, tokenizer=tokenizer, out=tmp_path / "out"), preexec_fn=limit_files
    )
    fails_clearly(end(limited), "File too large", "the same command continues", status=1)
    ok(prepare(large, tokenizer=tokenizer, out=tmp_path / "out"))
    ok(prepare(large, tokenizer=tokenizer, out=tmp_path / "other"))
    assert sha(tmp_path / "out") == sha(tmp_path / "other")


def test_a_run_that_stopped_at_broken_text_continues_without_it(tmp_path, tokenizer, large):
    with open(large, "ab") as file:
        file.write(b"caf\xe9\n")
    stopped = prepare(large, tokenizer=tokenizer, out=tmp_path / "out")
    fails_clearly(stopped, "a.txt is not UTF-8", "--on_error skip")
    for name in ("out", "whole"):
        ok(prepare(large, tokenizer=tokenizer, on_error="skip", out=tmp_path / name))
    assert sha(tmp_path / "out") == sha(tmp_path / "whole")


def test_replacing_a_dataset_keeps_it_until_the_new_one_is_finished(tmp_path, tokenizer, large):
    out = tmp_path / "out"
    ok(prepare(large, out=out, tokenizer=tokenizer))
    ok(prepare(large, out=out, tokenizer=tokenizer, clean=True, overwrite=True))
    before = sha(out)
    process = start(command(large, out=out, tokenizer="char", overwrite=True))
    while not (out / ".partial/train.bin").exists():
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert sha(out) == before
    ok(prepare(large, out=out, tokenizer="char", overwrite=True))
    assert read_meta(out).tokenizer["kind"] == "char"
    assert not [p for p in out.iterdir() if p.name == "cleaning.json"]


@pytest.mark.parametrize("moved", [[], ["train.bin"], ["train.bin", "val.bin", "tokenizer.json"]])
@pytest.mark.parametrize("journal", [True, False])
def test_a_kill_while_the_files_are_moved_to_their_place_is_made_good(
    tmp_path, tokenizer, moved, journal
):
    write(tmp_path / "a.txt", "txt", DOCUMENTS)
    out = tmp_path / "out"
    ok(prepare(tmp_path / "a.txt", tokenizer=tokenizer, out=out))
    before = sha(out)
    work = out / ".partial"
    work.mkdir()
    if journal:  # they go before the files are moved
        (work / "progress.json").write_text("{}")
        (work / "plan.json").write_text("{}")
    for name in ("train.bin", "val.bin", "tokenizer.json", "meta.json"):
        if name not in moved:
            (out / name).rename(work / name)
    leftovers = [out / name for name in ("val.mask.bin", "cleaning.json")]
    if not moved:  # of the dataset that is replaced, whose meta.json goes first
        for path in leftovers:
            path.touch()
    result = ok(prepare(tmp_path / "a.txt", tokenizer=tokenizer, out=out))
    assert "finished already" in result.stdout
    assert sha(out) == before and not work.exists()
    assert not any(path.exists() for path in leftovers)


def test_a_kill_after_the_files_are_moved_does_not_mislead_what_replaces_them(tmp_path, tokenizer):
    write(tmp_path / "a.txt", "txt", DOCUMENTS)
    out = tmp_path / "out"
    (out / ".partial").mkdir(parents=True)
    (out / ".partial" / "lock").touch()
    stop_at = "import shutil, os; shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), 9); "
    words = command(tmp_path / "a.txt", tokenizer=tokenizer, out=out)
    run = f"import sys, runpy; {stop_at} sys.argv = {words[1:]!r}; "
    run += "runpy.run_path('prepare_data.py', run_name='__main__')"
    assert end(start([words[0], "-c", run])).returncode == -signal.SIGKILL
    assert (out / "meta.json").exists() and (out / ".partial").exists()
    before = sha(out)
    ok(prepare(tmp_path / "a.txt", tokenizer=tokenizer, out=out, overwrite=True))
    assert sha(out) == before


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_unfinished_tokens_that_have_changed_are_noticed(tmp_path, tokenizer, large, damage):
    flags = {"tokenizer": tokenizer, "out": tmp_path / "out"}
    process = start(command(large, **flags))
    wait_for_progress(tmp_path / "out", process)
    process.kill()
    process.communicate()
    path = tmp_path / "out/.partial/train.bin"
    data = bytearray(path.read_bytes())
    tokens = json.loads((path.parent / "progress.json").read_text())["tokens"]["train"]
    assert tokens > 1000
    data[1000] ^= 1
    path.write_bytes(data if damage == "changed" else data[: 2 * tokens - 1])
    fails_clearly(prepare(large, **flags), "train.bin is not what it was", status=1)


def test_other_text_of_the_same_size_on_standard_input_is_noticed(tmp_path, tokenizer, large):
    flags = {"tokenizer": tokenizer, "out": tmp_path / "out"}
    text = large.read_text()
    process = start(command("-", **flags))
    process.stdin.write(text)
    process.stdin.close()
    process.stdin = None
    wait_for_progress(tmp_path / "out", process)
    process.kill()
    process.communicate()
    result = run_script(*command("-", **flags)[1:], stdin=text.replace("the", "eth"))
    fails_clearly(result, "unfinished work on other input")


def test_two_runs_do_not_share_a_folder(tmp_path, tokenizer, large):
    flags = {"tokenizer": tokenizer, "out": tmp_path / "out"}
    first = start(command(large, **flags))
    while not (tmp_path / "out/.partial/plan.json").exists() and first.poll() is None:
        time.sleep(0.01)
    second = prepare(large, **flags)
    ok(end(first))
    fails_clearly(second, "another run is preparing", status=1)
