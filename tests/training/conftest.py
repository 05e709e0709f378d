"""Shared by the tests of training: runs in this process, in another, and in several."""

import shlex
import subprocess
import sys
import time

import pytest
import torch

import config
from formats import pretrained, run_folder
from tests.conftest import ROOT, prepare, prose, run_script, train_command
from training.setup import build

# A run whose losses do not depend on how many processes it has.
EXACT = shlex.split(
    "--dtype=float32 --eval_batches=0 --log_interval=1 --learning_rate=1e-3 --min_lr=1e-3"
)
CLOCKS = ("elapsed_s", "tokens_per_second", "cost")  # what differs between runs in a log


@pytest.fixture(scope="session")
def little_data(tmp_path_factory):
    """So little text, at character level, that 40 steps come to a second epoch."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "little.txt").write_text(prose()[:8000])
    return prepare(folder / "little.txt", folder / "little", "--tokenizer", "char")


def small_run(data, folder, *more):
    """A Run of the small settings in this process, its folder made."""
    run = build(config.load(train_command(data, folder, *more)[1:]))
    run.folder.mkdir(parents=True, exist_ok=True)
    return run


def start(data, folder, *more, launcher=(), **options):
    """Begin training a small model, in a launcher if one is given; returns the process."""
    command = [sys.executable, *launcher, *train_command(data, folder, *more)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes | options)


def wait_until(process, condition):
    """Wait until something holds, or the process has ended."""
    while process.poll() is None and not condition():
        time.sleep(0.01)


def torchrun(processes):
    """The words after `python` that launch a script in so many processes."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def train_on(processes, data, folder, *more):
    """Train a small model on that number of processes; returns torchrun's, which must succeed."""
    result = run_script(*torchrun(processes), *train_command(data, folder, *EXACT, *more))
    assert result.returncode == 0, result.stderr
    return result


def assert_same_losses(one, other):
    """Assert that losses and validation losses of two runs, losses(RUN), agree to 1e-4."""
    for found, expected in zip(one, other, strict=True):
        assert found == pytest.approx(expected, abs=1e-4, rel=0)


def last_weights(run):
    """The tensors of a run's newest checkpoint."""
    return pretrained.load_tensors(run_folder.steps(run)[-1] / "model.pt")


def log_without_clocks(run):
    """The records of a run's log that must not depend on where it was stopped."""
    records = [record for record in run_folder.read_log(run) if "event" not in record]
    return [{k: v for k, v in record.items() if k not in CLOCKS} for record in records]


def assert_same_end(whole, stopped):
    """Assert that two runs ended in the same log and the same weights, bit for bit."""
    expected, found = log_without_clocks(whole), log_without_clocks(stopped)
    lacking = [record for record in expected if record not in found]
    more = [record for record in found if record not in expected]
    assert expected == found, f"the logs differ: {lacking} missing, {more} more, of {len(found)}"
    expected, found = last_weights(whole), last_weights(stopped)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
