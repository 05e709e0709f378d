"""Shared by the tests of training: runs in this process, in another, and in several."""

import shlex
import subprocess
import sys
import time

import pytest
import torch

import config
from formats import run_folder
from tests.conftest import ROOT, SMALL, prepare, prose, run_script
from training.setup import build

# A run whose losses do not depend on how many processes it has.
EXACT = SMALL + shlex.split(
    "--dtype=float32 --eval_batches=0 --log_interval=1 --learning_rate=1e-3 --min_lr=1e-3"
    " --input_noise=0.1"
)


@pytest.fixture(scope="session")
def little_data(tmp_path_factory):
    """So little text, at character level, that 40 steps come to a second epoch: noise begins."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "little.txt").write_text(prose()[:8000])
    return prepare(folder / "little.txt", folder / "little", "--tokenizer", "char")


def small_run(data, folder, *more):
    """A Run of the small settings in this process, its folder made."""
    run = build(config.load([f"--data_dir={data}", f"--checkpoint_dir={folder}", *SMALL, *more]))
    run.folder.mkdir(parents=True, exist_ok=True)
    return run


def start(data, folder, *more, before=(), **options):
    """Begin training a small model, `before` the words of its command; returns the process."""
    where = [f"--data_dir={data}", f"--checkpoint_dir={folder}"]
    command = [*before, sys.executable, "train.py", *where, *SMALL, *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes, **options)


def wait_until(process, condition):
    """Wait until something holds, or the process has ended."""
    while process.poll() is None and not condition():
        time.sleep(0.01)


def torchrun(processes, *command):
    """Run `torchrun COMMAND` to its end; returns the CompletedProcess."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return run_script(*launcher, *command)


def train_on(processes, data, folder, *more):
    """Train a small model on that number of processes; returns torchrun's, which must succeed."""
    where = [f"--data_dir={data}", f"--checkpoint_dir={folder}"]
    result = torchrun(processes, "train.py", *where, *EXACT, *more)
    assert result.returncode == 0, result.stderr
    return result


def same_losses(one, other):
    """True if the losses and validation losses of two runs, losses(RUN), agree to 1e-4."""
    for found, expected in zip(one, other, strict=True):
        if found.keys() != expected.keys():
            return False
        if any(abs(found[step] - expected[step]) >= 1e-4 for step in found):
            return False
    return True


def last_weights(run):
    """The tensors of a run's newest checkpoint."""
    return run_folder.load_tensors(run_folder.steps(run)[-1] / "model.pt")


def same_weights(one, other):
    """True if the newest checkpoints of two runs hold the same tensors, bit for bit."""
    a, b = last_weights(one), last_weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
