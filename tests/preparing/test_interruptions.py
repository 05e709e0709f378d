"""Kill prepare_data.py at any time and run it again: nothing is lost, nothing is mixed."""

import contextlib
import json
import os
import random
import re
import signal
import threading
import time

import pytest

import prepare_data
from formats.data_folder import read_meta
from formats.files import read_checked, read_text, write_checked
from preparing import InputError, writer
from preparing.arguments import parse
from preparing.chunks import Position
from preparing.work_folder import WorkFolder
from tests.conftest import conversations, fails_clearly, ok, prose, wait_until, write_conversations
from tests.power_cut import lay, power_cuts
from tests.preparing.conftest import (
    DOCUMENTS,
    end,
    files_up_to,
    kill_midway,
    prepare,
    sha,
    start,
    wait_for_progress,
    write,
)
from tokenizer_bpe import EOT

STATUS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Inputs of three kinds, settings for them, and the folder that comes of both."""
    folder, dice = tmp_path_factory.mktemp("mixed"), random.Random(1)
    texts = [dice.choice(DOCUMENTS) * 3 + str(n) for n in range(4000)]
    write(folder / "a.jsonl.gz", "jsonl.gz", [*texts, texts[0]])
    long = prose() * 14
    (folder / "b.txt").write_text(f"{long}\n{EOT}\n{long}", "utf-8", newline="\n")
    write_conversations(folder / "c.jsonl", conversations(1500))
    small = folder / "small"
    small.mkdir()
    for n, text in enumerate(DOCUMENTS):
        write(small / f"{n}.txt", "txt", [text])
    inputs = (folder / "a.jsonl.gz", folder / "c.jsonl", small, folder / "b.txt")
    flags = {"clean": True, "vocab_size": 1000, "sample_bytes": 5e5}
    ok(prepare(*inputs, workers=2, out=folder / "whole", **flags))
    return inputs, flags, folder / "whole"


@pytest.mark.parametrize(
    "stops",
    [[signal.SIGKILL] * 3, [signal.SIGINT, signal.SIGTERM, signal.SIGINT]],
    ids=["killed", "stopped"],
)
def test_a_stopped_run_continues_to_the_same_bytes(tmp_path, mixed, stops):
    (inputs, flags, whole), dice = mixed, random.Random(int(stops[0]))
    killed = tmp_path / "killed"
    said = ""
    for run, stop in enumerate(stops):
        workers = 1 + run % 3
        process = start(*inputs, workers=workers, out=killed, **flags)
        if run == 0:
            wait_until(process, killed.exists)
            time.sleep(dice.random())
        else:
            wait_for_progress(process, killed)
            time.sleep(dice.random() / 20)
        process.send_signal(stop)
        _, errors = process.communicate(timeout=300)
        said += errors
        assert process.returncode in (0, STATUS[stop]), errors
        assert "Traceback" not in errors, errors
        if process.returncode and stop != signal.SIGKILL:
            assert "the same command continues" in errors
    result = ok(prepare(*inputs, out=killed, **flags))
    assert "continuing after" in said + result.stderr
    assert sha(killed) == sha(whole)
    assert "train.mask.bin" in sha(killed)
    assert not (killed / ".partial").exists()
    report = json.loads((killed / "cleaning.json").read_text("utf-8"))
    assert report["exact duplicates"]["documents"] == 1


def test_a_stop_while_the_tokenizer_trains_has_its_status(tmp_path, large):
    """Its threads are in a package's own code, which aborts where Python ends them."""
    process = start(large, options={"own_python": True}, vocab_size=2000, out=tmp_path / "out")
    assert any("training the tokenizer" in line for line in process.stderr)
    process.terminate()
    result = end(process)
    assert result.returncode == 143, result.stderr
    assert result.stderr.startswith("prepare_data.py: stopped; ")


def test_a_stop_waits_for_no_thread(tmp_path, tokenizer, medium):
    plan = parse([str(medium), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")])
    at_work, go_on = threading.Event(), threading.Event()

    def encode(chunks):
        at_work.set()
        go_on.wait(60)

    def stop():
        at_work.wait()
        os.kill(os.getpid(), signal.SIGUSR1)

    def stopped(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, stopped)
    threading.Thread(target=stop).start()
    began = time.monotonic()
    with (
        pytest.raises(KeyboardInterrupt),
        WorkFolder(plan) as work,
        work.map_text(encode, Position()) as parts,
    ):
        next(parts)
    assert time.monotonic() - began < 30
    go_on.set()
    signal.signal(signal.SIGUSR1, before)


def test_the_summary_does_not_tell_where_a_run_was_stopped(
    tmp_path, tokenizer, monkeypatch, capsys
):
    """After each of its records: within long documents, after copies, after cleaning."""
    texts = [*DOCUMENTS, *DOCUMENTS[:50], "too short", *(f"a bell \x07 {n}" * 3 for n in range(9))]
    write(tmp_path / "a.jsonl", "jsonl", texts)
    book = prose() * 6
    write(tmp_path / "b.txt", "txt", [book, "between", f"again\n{book}", *DOCUMENTS[:20]])
    monkeypatch.setattr(writer, "KNOWN_BYTES", 0)
    monkeypatch.setattr(writer, "SAVE_SECONDS", 0)

    def run(out, stop=None):
        """The summary of a run; "" where it stops after the first record of its own."""

        def write_and_stop(path, values):
            write_checked(path, values)
            if stop:
                raise stop

        monkeypatch.setattr(writer, "write_checked", write_and_stop)
        words = [tmp_path / "a.jsonl", tmp_path / "b.txt", "--tokenizer", "char", "--clean"]
        with contextlib.suppress(KeyboardInterrupt):
            prepare_data.prepare(parse([*map(str, words), "--out", str(out)]))
        said = capsys.readouterr().out.replace(str(out), "")
        return re.sub("(?m)^  time.*$|; .* different characters|; as the run before.*", "", said)

    whole = run(tmp_path / "whole")
    assert "2 documents cut" in whole and "exact duplicates: 70 documents" in whole
    out = tmp_path / "stopped"
    said, stops = "", 0
    while not said and stops < 12:
        said = run(out, KeyboardInterrupt)
        stops += 1
    assert stops > 5
    assert said == whole
    assert sha(out) == sha(tmp_path / "whole")


def test_a_full_disk_keeps_what_is_finished(tmp_path, tokenizer, flags, medium):
    result = end(start(medium, options={"preexec_fn": files_up_to(2_000_000)}, **flags))
    fails_clearly(result, "File too large", "the same command continues", status=1)
    ok(prepare(medium, **flags))
    ok(prepare(medium, tokenizer=tokenizer, out=tmp_path / "other"))
    assert sha(tmp_path / "out") == sha(tmp_path / "other")


def test_a_run_that_stopped_at_broken_text_continues_without_it(tmp_path, tokenizer, monkeypatch):
    """Also after the end of a book has moved to validation, and later text has taken its place."""
    monkeypatch.setattr(writer, "KNOWN_BYTES", 0)
    monkeypatch.setattr(writer, "SAVE_SECONDS", 600)
    write(tmp_path / "a.txt", "txt", [prose() * 6, *DOCUMENTS * 10])
    with open(tmp_path / "a.txt", "ab") as file:
        file.write(b"caf\xe9\n")

    def run(out, *more):
        words = [tmp_path / "a.txt", "--tokenizer", tokenizer, "--out", tmp_path / out, *more]
        prepare_data.prepare(parse([*map(str, words), "--val_fraction=0.3"]))

    with pytest.raises(InputError, match=r"a\.txt: not UTF-8.*--on_error skip"):
        run("out")
    for name in ("out", "whole"):
        run(name, "--on_error", "skip")
    assert sha(tmp_path / "out") == sha(tmp_path / "whole")


def test_replacing_a_dataset_keeps_it_until_the_new_one_is_finished(tmp_path, tokenizer, medium):
    out = tmp_path / "out"
    ok(prepare(medium, out=out, tokenizer=tokenizer))
    ok(prepare(medium, out=out, tokenizer=tokenizer, clean=True, overwrite=True))
    before = sha(out)
    flags = {"out": out, "tokenizer": "char", "overwrite": True, "val_fraction": 0}
    process = start(medium, **flags)
    wait_until(process, (out / ".partial/train.bin").exists)
    process.kill()
    process.communicate()
    assert sha(out) == before
    ok(prepare(medium, **flags))
    assert read_meta(out).tokenizer["kind"] == "char"
    assert not (out / "cleaning.json").exists()


@pytest.mark.parametrize("moved", [[], ["train.bin"], ["train.bin", "val.bin", "tokenizer.json"]])
def test_a_kill_while_the_files_are_moved_to_their_place_is_made_good(tmp_path, tokenizer, moved):
    (tmp_path / "a.txt").write_text(prose()[:100_000], "utf-8")
    out = tmp_path / "out"
    ok(prepare(tmp_path / "a.txt", tokenizer=tokenizer, out=out))
    before = sha(out)
    work = out / ".partial"
    work.mkdir()
    for name in ("train.bin", "val.bin", "tokenizer.json", "meta.json"):
        if name not in moved:
            (out / name).rename(work / name)
    leftovers = [out / name for name in ("val.mask.bin", "cleaning.json")]
    if not moved:
        for path in leftovers:  # of the dataset that is replaced, whose meta.json goes first
            path.touch()
        for name in ("progress.json", "plan.json"):  # which go before the files are moved
            (work / name).write_text("{}")
    result = ok(prepare(tmp_path / "a.txt", tokenizer=tokenizer, out=out))
    assert "finished already" in result.stdout
    assert sha(out) == before
    assert not work.exists()
    assert not any(path.exists() for path in leftovers)


@pytest.mark.parametrize("replaces", [False, True])
def test_after_a_power_cut_data_is_whole_or_absent_and_the_same_command_makes_it(
    tmp_path, replaces
):
    """A text of one document, of which the end moves to the validation split."""
    out, text = tmp_path / "out", tmp_path / "a.txt"
    words = [str(text), "--tokenizer", "char", "--out", str(out)]
    expected = []
    if replaces:
        text.write_text(prose()[3000:5000], "utf-8")
        prepare_data.prepare(parse(words))
        expected.append(sha(out))
        words.append("--overwrite")
    text.write_text(prose()[:3000], "utf-8")
    with power_cuts(out) as disks:
        prepare_data.prepare(parse(words))
    expected.append(sha(out))
    assert len(disks) > 10
    for disk in disks:
        lay(disk, out)
        if (out / "meta.json").exists():
            read_meta(out)
            assert sha(out) in expected
        prepare_data.prepare(parse(words))
        read_meta(out)
        assert sha(out) == expected[-1]


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_unfinished_tokens_that_have_changed_are_noticed(tmp_path, flags, large, damage):
    kill_midway(start(large, **flags), tmp_path / "out")
    path = tmp_path / "out/.partial/train.bin"
    data = bytearray(path.read_bytes())
    tokens = json.loads((path.parent / "progress.json").read_text("utf-8"))["tokens"]["train"]
    assert tokens > 1000
    if damage == "changed":
        data[1000] ^= 1
    else:
        del data[2 * tokens - 1000 :]
    path.write_bytes(data)
    fails_clearly(prepare(large, **flags), "train.bin is not what it was", status=1)


def test_unfinished_work_is_continued_on_the_same_input_and_settings_only(tmp_path, flags, large):
    text = large.read_text("utf-8")
    kill_midway(start("-", text=text, on_error="replace", **flags), tmp_path / "out")
    other = text.replace("the", "eth")  # of the same size
    result = prepare("-", text=other, on_error="replace", **flags)
    fails_clearly(result, "unfinished work on other input", "the input differs from")
    result = prepare("-", text=text, on_error="stop", **flags)
    fails_clearly(result, "on_error was replace, is now stop")
    ok(prepare("-", text="Other text.", overwrite=True, tokenizer="char", out=tmp_path / "out"))
    assert read_meta(tmp_path / "out").tokenizer["kind"] == "char"


def test_unfinished_work_continues_on_a_touched_file_and_not_on_a_changed_one(
    tmp_path, flags, large
):
    process = start(large, **flags)
    plan = tmp_path / "out/.partial/plan.json"
    wait_until(process, lambda: "sha256" in read_text(plan))
    kill_midway(process, tmp_path / "out")
    os.utime(large, (1, 1))
    text = large.read_text("utf-8")
    large.write_text(text.replace("the", "eth"))
    fails_clearly(prepare(large, **flags), "a.txt on, whose content has changed", "--overwrite")
    large.write_text(text)
    assert "continuing after" in ok(prepare(large, **flags)).stderr


def test_unfinished_work_whose_records_are_damaged_or_old_is_not_continued(tmp_path, flags, large):
    kill_midway(start(large, **flags), tmp_path / "out")
    journal, plan = (tmp_path / f"out/.partial/{name}.json" for name in ("progress", "plan"))
    content = plan.read_text("utf-8")
    for damaged in ("", '{"settings": {}, "sources": []}', content.replace("stop", "skip")):
        plan.write_text(damaged)
        fails_clearly(prepare(large, **flags), "plan.json is damaged", "--overwrite")
    plan.unlink()
    fails_clearly(prepare(large, **flags), "plan.json is damaged", "--overwrite")
    plan.write_text(content)
    write_checked(plan, read_checked(plan) | {"code": "after a git pull"})
    fails_clearly(prepare(large, **flags), "prepare_data.py has changed since")
    plan.write_text(content)
    values = json.loads(journal.read_text("utf-8"))
    del values["position"]  # without it, the text would be written twice
    journal.write_text(json.dumps(values))
    assert "continuing" not in ok(prepare(large, **flags)).stderr
    assert read_meta(tmp_path / "out").splits["train"].documents <= 60


def test_the_journal_counts_only_what_is_on_the_disk(tmp_path, tokenizer, monkeypatch):
    reply = {"role": "assistant", "content": "Yes."}
    asked = [{"role": "user", "content": f"{n} {prose()[:20_000]}"} for n in range(250)]
    write_conversations(tmp_path / "a.jsonl", [[message, reply] for message in asked])
    on_disk, counted = {}, []
    fsync = os.fsync

    def synced(descriptor):
        fsync(descriptor)
        stat = os.fstat(descriptor)
        on_disk[stat.st_ino] = stat.st_size

    def written(path, values):
        if path.name == "progress.json":
            sizes = {"hashes.bin": 8 * values["seen"]}
            for name, tokens in values["tokens"].items():
                sizes |= {f"{name}.bin": 2 * tokens, f"{name}.mask.bin": tokens}
            for name, size in sizes.items():
                assert on_disk.get((path.parent / name).stat().st_ino, 0) >= size, name
            counted.append(values["text_bytes"])
        write_checked(path, values)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(writer, "write_checked", written)
    monkeypatch.setattr(writer, "SAVE_SECONDS", 0)
    monkeypatch.setattr(writer, "KNOWN_BYTES", 0)
    words = [tmp_path / "a.jsonl", "--tokenizer", tokenizer, "--dedupe", "--out", tmp_path / "out"]
    prepare_data.prepare(parse([str(word) for word in words]))
    assert len(counted) > 3


def test_two_runs_do_not_share_a_folder(tmp_path, flags, large):
    first = start(large, **flags)
    wait_until(first, (tmp_path / "out/.partial/plan.json").exists)
    second = prepare(large, **flags)
    ok(end(first))
    fails_clearly(second, "another run is preparing", status=1)
