"""Shared by the tests of training: runs in this process, in another, and in several."""

import contextlib
import shlex

import pytest
import torch

import config
from formats import pretrained, run_folder
from tests import warm_start
from tests.conftest import ROOT, prepare, prose, start_script, train_command
from training.setup import build

# A run whose losses do not depend on how many processes it has.
EXACT = shlex.split(
    "--dtype=float32 --eval_batches=0 --log_interval=1 --learning_rate=1e-3 --min_lr=1e-3"
)
# train.py in a fork, where PyTorch has read CXX already.
WITH_ITS_COMPILER = """
import os, runpy, torch
torch._inductor.config.cpp.cxx = (None, os.environ["CXX"])
runpy.run_path("train.py", run_name="__main__")
"""
# What differs between runs in a log.
CLOCKS = ("elapsed_s", "running_s", "tokens_per_second", "peak_memory_gb", "cost")


@pytest.fixture(scope="session")
def little_data(tmp_path_factory):
    """So little text, at character level, that 40 steps come to a second epoch."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "little.txt").write_text(prose()[:8000], "utf-8")
    return prepare(folder / "little.txt", folder / "little", "--tokenizer", "char")


def small_run(data, folder, *more):
    """A Run of the small settings in this process, its folder made."""
    run = build(config.load(train_command(data, folder, *more)[1:]))
    run.folder.mkdir(parents=True, exist_ok=True)
    return run


def start(data, folder, *more, launcher=(), **options):
    """Begin training a small model, as start_script does. launcher: the words before train.py."""
    return start_script([*launcher, *train_command(data, folder, *more)], **options)


def torchrun(processes):
    """The words after `python` that launch a script in so many processes."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


@contextlib.contextmanager
def ranks(processes, *command):
    """The processes of one run, by rank: each `python *command` in a fork, as torchrun starts it.

    Where one fails, nothing ends the others. In the end all are killed.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    given |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    given |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # torchrun keeps the store, as this does
    started = []
    for rank in map(str, range(processes)):
        own = given | {"RANK": rank, "LOCAL_RANK": rank}
        started.append(warm_start.Process(command, ROOT, variables=own))
    try:
        yield started
    finally:
        for process in started:
            process.kill()


def run_ranks(processes, *command):
    """Run so many processes of one run to their end; returns them by rank."""
    with ranks(processes, *command) as started:
        return [process.complete(timeout=300) for process in started]


def train_on(processes, data, folder, *more):
    """Train a small model on that number of processes, which must succeed; returns the first."""
    ended = run_ranks(processes, *train_command(data, folder, *EXACT, *more))
    assert not any(result.returncode or result.stderr for result in ended), ended
    assert not any(result.stdout for result in ended[1:])  # only one prints
    return ended[0]


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
