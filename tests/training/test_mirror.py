"""The mirror of a run: uploads that are killed or fail, empty machines, reading from it."""

import contextlib
import os
import secrets
import shutil
import signal
import threading
import time

import pytest
import torch

import training.saver
from config import Config
from formats import address, run_folder
from formats.address import AddressError
from formats.mirror import Mirror
from formats.pretrained import resolve
from formats.run_folder import CheckpointError
from tests.conftest import ROOT, ok, run_script, train_command, trained
from tests.torture import torture
from tests.training.conftest import small_run
from tests.training.store import Store
from training import RunError
from training.optimizer import reserve_state
from training.start import fetch_from_mirror, find_start


@pytest.fixture(scope="module")
def store():
    """An S3 store with a bucket."""
    with Store() as store:
        yield store


@pytest.fixture(autouse=True)
def well_again(store):
    """After each test the store is as fast and reliable as before."""
    yield
    store.slow_s = store.failing = 0


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Tries that follow each other at once."""
    monkeypatch.setattr(address, "PAUSES", (0.01, 0.01, 0.01))


@pytest.fixture(params=["s3://bucket", "a folder"])
def place(request, tmp_path):
    """An address, or a folder, for the mirrors of this test."""
    if request.param == "a folder":
        return str(tmp_path / "disk")
    return f"{request.param}/{tmp_path.name}"


def save(run, *steps):
    """Steps of a run as a trainer leaves them, with the settings and a log."""
    run.mkdir(parents=True, exist_ok=True)
    for step in steps:
        if not (run / run_folder.LOG).exists():
            run_folder.write_config(run, Config().recorded(), secrets.token_hex(8))
        run_folder.append_log(run, {"step": step, "loss": 1 / step})
        model = {"w": torch.full((1000,), float(step))}
        run_folder.save(run, {"step": step}, model, {}, "{}")


def upload(run, place):
    """Bring a run's copy up to date; the mirror."""
    mirror = Mirror(f"{place}/{run.name}")
    mirror.update(run)
    return mirror


@contextlib.contextmanager
def lacking(path):
    """The body, which fails for want of this file."""
    path.rename(path.with_suffix(".away"))
    with pytest.raises(FileNotFoundError):
        yield
    path.with_suffix(".away").rename(path)


def fetch(run, place, **settings):
    """Fetch as a start with a mirror does; returns the steps that are there then."""
    settings = Config(mirror=place, checkpoint_dir=str(run), **settings)
    print(*fetch_from_mirror(settings, run), sep="\n")
    return [run_folder.step_of(folder) for folder in run_folder.steps(run)]


def test_kills_in_uploads_lose_nothing_with_the_disk_or_without(tmp_path, char_data, store):
    torture(char_data, tmp_path, kills=2, steps=28, store=store)


def test_a_mirror_keeps_what_the_folder_keeps(tmp_path, place):
    run = tmp_path / "run"
    for step in (1, 2, 3, 4, 5):
        save(run, step)
        if step == 2:
            run_folder.write_best(run, 2, 0.5)
        run_folder.rotate(run, 2, best=2)
        mirror = upload(run, place)
    assert list(mirror.steps()) == mirror.whole() == [2, 4, 5]
    assert fetch(tmp_path / "empty" / "run", place) == [2, 5]
    assert run_folder.read_log(tmp_path / "empty" / "run") == run_folder.read_log(run)


def test_a_run_that_went_back_replaces_what_it_saves_again_and_only_that(tmp_path, place):
    run, mirror = tmp_path / "run", Mirror(f"{place}/run")
    save(run, 1, 2, 3)
    with lacking(run / "step_00000001/optimizer.pt"):
        mirror.update(run)
    assert mirror.whole() == [2, 3]  # the newest come first
    mirror.update(run)
    for step in (2, 3):
        shutil.rmtree(run / run_folder.step_name(step))
    run_folder.save(run, {"step": 2}, {"w": torch.zeros(9)}, {}, "{}")
    with lacking(run / "step_00000002/tokenizer.json"):
        mirror.update(run)
    assert mirror.whole() == [1, 3]
    mirror.update(run)
    assert mirror.whole() == [1, 2, 3]  # until there is a newer one
    copy = mirror.fetch(2, tmp_path / "copy")
    assert (copy / "model.pt").read_bytes() == (run / "step_00000002/model.pt").read_bytes()


def test_a_mirror_that_fails_half_the_time_or_for_a_while_is_caught_up_with(
    char_data, tmp_path, store, capsys
):
    where = f"s3://bucket/{tmp_path.name}"
    settings = char_data, tmp_path / "run", f"--mirror={where}", "--keep_last=2"
    run = small_run(*settings)
    reserve_state(run.optimizer)
    saver = run.saver
    for step, share in enumerate((0, 1, 0.5, 0.5, 1), start=1):
        store.failing = share
        run.counters.step = step
        saver.save(run.step, run.snapshot)
        saver.wait()
        store.failing = 0
        if step == 2:
            assert capsys.readouterr().err.count("is not up to date") == 1
        newest = saver.mirror.fetch(max(saver.mirror.whole()), tmp_path / "look")
        assert run_folder.read_state(newest)
    assert store.failed > 10
    saver = small_run(*settings).saver
    saver.begin()
    saver.wait()
    assert list(saver.mirror.steps()) == [4, 5]
    run_folder.write_config(tmp_path, Config().recorded(), "another run's id")
    Mirror(saver.mirror.address).folder.put(tmp_path / "config.json", "config.json")
    saver.save(6, run.snapshot)
    saver.wait()
    assert "holds another run than" in capsys.readouterr().err


def test_a_mirror_that_hangs_holds_the_end_of_a_run_only_so_long(
    char_data, tmp_path, store, monkeypatch, capsys
):
    monkeypatch.setattr(training.saver, "LAST_UPLOAD_S", 1)
    run = small_run(char_data, tmp_path / "run", f"--mirror=s3://bucket/{tmp_path.name}")
    store.slow_s = 5
    store.arrived.clear()
    run.counters.step = 1
    run.saver.save(run.step, run.snapshot)
    store.arrived.wait()
    began = time.monotonic()
    run.counters.step = 2
    run.saver.mark_best(2, 2.5)
    run.saver.finish(2, run.snapshot)
    assert run_folder.best_of(run.folder) == 2
    run.saver.mark_best(2, 1.5)
    run.saver.close()
    assert time.monotonic() - began < 4
    assert "is not up to date: the upload timed out" in capsys.readouterr().err
    assert run_folder.latest(run.folder)[1]["step"] == 2
    assert run_folder.read_best(run.folder)["val_loss"] == 1.5


def test_one_ctrl_c_ends_the_last_upload(char_data, tmp_path, store, monkeypatch, capsys):
    monkeypatch.setattr(training.saver, "LAST_UPLOAD_S", 3)  # its thread ends with the tests
    run = small_run(char_data, tmp_path / "run", f"--mirror=s3://bucket/{tmp_path.name}")
    run.counters.step = 1
    run.saver.finish(1, run.snapshot)
    store.slow_s = 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the loop, which took it for a request, is over
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run.saver.close()
    assert time.monotonic() - began < 1
    said = capsys.readouterr().err
    assert "not up to date: the upload was interrupted" in said
    assert "the same command, uploads what is missing" in said


def test_a_start_goes_on_with_the_newest_step_of_either_place(tmp_path, place, capsys):
    run, empty = tmp_path / "run", tmp_path / "empty" / "run"
    save(run, 1, 2)
    upload(run, place)
    assert fetch(empty, place) == [2]
    save(run, 3)
    upload(run, place)
    assert fetch(empty, place, dry_run=True) == [2]
    in_the_way = empty / ".step_00000003.partial"
    in_the_way.touch()
    with pytest.raises(FileExistsError):
        fetch(empty, place)
    assert run_folder.read_log(empty) == run_folder.read_log(run)  # which comes first
    in_the_way.unlink()
    assert fetch(empty, place) == [2, 3]
    (empty / "step_00000003" / "model.pt").write_bytes(b"damaged")
    assert fetch(empty, place) == [2, 3]
    assert "model.pt is damaged" in capsys.readouterr().out
    assert list(empty.glob("damaged_step_00000003_*"))
    run_folder.read_state(empty / "step_00000003")
    save(empty, 4)
    assert fetch(empty, place) == [2, 3, 4]


def test_a_damaged_step_of_the_mirror_is_passed_over(tmp_path, place, capsys):
    run, empty = tmp_path / "run", tmp_path / "empty" / "run"
    save(run, 1, 2)
    upload(run, place)
    there = Mirror(f"{place}/run").folder
    (run / "step_00000002" / "model.pt").write_bytes(b"damaged")
    there.put(run / "step_00000002" / "model.pt", "step_00000002/model.pt")
    there.remove("step_00000001/optimizer.pt")
    assert fetch(empty, place) == []
    said = capsys.readouterr().out
    assert "model.pt is damaged" in said
    assert "optimizer.pt is missing" in said
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):
        find_start(Config(mirror=place, checkpoint_dir=str(empty)), None, None)


def test_a_step_of_a_later_version_in_the_mirror_is_not_passed_over(tmp_path, place, monkeypatch):
    run, empty = tmp_path / "run", tmp_path / "empty" / "run"
    save(run, 1)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "FORMAT", 2)
        save(run, 2)
    upload(run, place)
    with pytest.raises(CheckpointError, match="a later version of this program saved"):
        fetch(empty, place)
    assert not run_folder.steps(empty)


def test_another_run_in_the_mirror_is_left_alone(tmp_path, place):
    save(tmp_path / "a" / "run", 1)
    save(tmp_path / "b" / "run", 2)
    upload(tmp_path / "a" / "run", place)
    with pytest.raises(CheckpointError, match="holds another run"):
        fetch(tmp_path / "b" / "run", place)
    with pytest.raises(CheckpointError, match="resume = never"):
        fetch(tmp_path / "c" / "run", place, resume="never")
    with pytest.raises(CheckpointError, match="holds another run"):
        upload(tmp_path / "b" / "run", place)
    assert Mirror(f"{place}/run").whole() == [1]


def test_an_empty_folder_continues_the_run_of_the_mirror_only_with_its_settings_and_data(
    char_data, tmp_path, place
):
    run, machine, other = (tmp_path / name / "run" for name in ("first", "second", "third"))
    save(run, 1)
    run_folder.write_config(run, Config(muon_lr=0.01).recorded(), "first id")
    upload(run, place)
    assert fetch(machine, place, muon_lr=0.01, max_steps=9, keep_last=5, device="cpu") == [1]
    assert run_folder.run_id(machine) == "first id"
    with pytest.raises(CheckpointError, match=r"(?s)=must.*muon_lr: 0.01 in the mirror, 0.02"):
        fetch(other, place)
    assert not other.exists()
    assert fetch(other, place, resume="must") == [1]
    save(run, 2)
    upload(run, place)
    assert fetch(machine, place) == [1, 2]
    settings = Config(init_from="base", n_layer=30, n_head=3)  # as the weights have
    run_folder.write_config(run, settings.recorded(), "first id")
    run_folder.save(run, {"step": 3, "data": {"vocab_size": 5}}, {}, {}, "{}")
    upload(run, place)
    more = {"init_from": "base", "n_layer": 2, "given": {"n_layer"}, "data_dir": str(char_data)}
    words = "change:\n  n_layer: 30 in the mirror, 2 now\n  data: other vocab_size than in the"
    with pytest.raises(CheckpointError, match=words):
        fetch(tmp_path / "fourth" / "run", place, **more)


def test_a_mirror_without_settings_is_fetched_for_a_run_that_starts_from_weights(tmp_path, place):
    save(tmp_path / "run", 1)
    (tmp_path / "run/config.json").unlink()
    upload(tmp_path / "run", place)
    assert fetch(tmp_path / "machine" / "run", place, init_from="checkpoints/base") == [1]


@pytest.mark.parametrize("damaged", ["32", None, [], {"a": 1}, 1e300])
def test_damaged_settings_of_a_mirror_are_not_compared(tmp_path, place, damaged):
    save(tmp_path / "run", 1)
    settings = Config(init_from="checkpoints/base").recorded() | {"block_size": damaged}
    run_folder.write_config(tmp_path / "run", settings, "first id")
    upload(tmp_path / "run", place)
    assert fetch(tmp_path / "machine" / "run", place, init_from="checkpoints/base") == [1]


def test_runs_that_share_a_name_and_the_begin_of_a_log_are_told_apart_by_their_ids(tmp_path, place):
    run, other = tmp_path / "first" / "run", tmp_path / "second" / "run"
    save(run, 1)
    run_folder.write_config(run, Config().recorded(), "first id")
    upload(run, place)
    shutil.copytree(run, other)
    save(other, 2)
    run_folder.new_id_for_a_copy(other)
    for use in (fetch, upload):
        with pytest.raises(CheckpointError, match="holds another run"):
            use(other, place)
    assert upload(run, place).whole() == [1]


def test_a_mirror_replaces_nothing_that_no_run_wrote(tmp_path):
    save(tmp_path / "run", 1)
    model = tmp_path / "disk" / "run" / "config.json"
    model.parent.mkdir(parents=True)
    model.write_text('{"model_type": "gpt2", "n_layer": 3}')
    with pytest.raises(CheckpointError, match=r"holds config.json, which no run wrote"):
        fetch(tmp_path / "empty" / "run", str(tmp_path / "disk"))
    for use in (fetch, upload):
        with pytest.raises(CheckpointError, match=r"holds config.json, which no run wrote"):
            use(tmp_path / "run", str(tmp_path / "disk"))
    assert [path.name for path in model.parent.iterdir()] == ["config.json"]
    assert model.read_text() == '{"model_type": "gpt2", "n_layer": 3}'


def test_a_mirror_that_cannot_be_read_ends_only_a_run_that_may_lie_there(tmp_path, store, capsys):
    save(tmp_path / "run", 1)
    store.failing = 1
    assert fetch(tmp_path / "run", "s3://bucket/x") == [1]
    assert "Continuing from" in capsys.readouterr().err
    with pytest.raises(RunError, match="start again later"):
        fetch(tmp_path / "none", "s3://bucket/x")
    store.failing = 0
    with pytest.raises(RunError, match="bucket does not exist"):
        fetch(tmp_path / "none", "s3://nowhere/x")
    with pytest.raises(AddressError, match="Install adlfs"):
        fetch(tmp_path / "none", "az://container/x")


def test_what_was_trained_elsewhere_is_read_from_the_address(char_data, tmp_path):
    run, where = tmp_path / "run", f"s3://bucket/{tmp_path.name}"
    settings = ["--max_steps=20", f"--mirror={where}"]
    trained(char_data, run, *settings)
    prompt = ["--prompt", "The", "--max_new_tokens", 20, "--device", "cpu", "--seed", 1]
    here = run_script("generate.py", "--checkpoint", run, *prompt)
    shutil.rmtree(run)
    generate = (ROOT / "generate.py", "--checkpoint", f"{where}/run", *prompt)
    there = ok(run_script(*generate, cwd=tmp_path))
    assert there.stdout == here.stdout
    assert "fetching" in there.stderr
    tune = train_command(char_data, tmp_path / "tuned", f"--init_from={where}/run", "--max_steps=1")
    tuned = run_script(ROOT / "train.py", *tune[1:], cwd=tmp_path)  # it keeps what it fetches there
    assert "the weights of" in tuned.stdout, tuned.stderr
    again = trained(char_data, run, *settings)
    assert "already finished, at step 20" in again.stdout


def test_a_run_that_was_fetched_is_not_fetched_again(tmp_path, store, monkeypatch, capsys):
    where = f"s3://bucket/{tmp_path.name}"
    save(tmp_path / "run", 1, 2)
    run_folder.write_best(tmp_path / "run", 1, 0.5)
    upload(tmp_path / "run", where)
    monkeypatch.chdir(tmp_path)
    copy = resolve(f"{where}/run")
    assert "fetching" in capsys.readouterr().err
    assert copy.name == "step_00000001"  # the best
    assert (copy.parent / "best.json").exists()
    assert (copy.parent / "log.jsonl").exists()
    assert resolve(f"{where}/run") == copy
    assert not capsys.readouterr().err
    steps = [copy]
    for step in (2, 3):
        save(tmp_path / "run", step)
        run_folder.write_best(tmp_path / "run", step, 0.5 / step)
        upload(tmp_path / "run", where)
        steps.append(resolve(f"{where}/run"))
    assert run_folder.steps(copy.parent) == steps[-2:]  # another reader may have the one before
    run_folder.save(tmp_path / "run", {"step": 3}, {"w": torch.zeros(9)}, {}, "{}")
    upload(tmp_path / "run", where)
    again = resolve(f"{where}/run")  # of a run that went back
    assert (again / "model.pt").read_bytes() == (
        tmp_path / "run/step_00000003/model.pt"
    ).read_bytes()
    with pytest.raises(CheckpointError, match="no checkpoint at s3://bucket/none"):
        resolve("s3://bucket/none")
