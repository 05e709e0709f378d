"""Several processes that train one run, started by torchrun: two and four, over gloo."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hardware
from formats import run_folder, run_log
from model import GPT, GPTConfig
from tests.conftest import ROOT, SMALL, losses, run_script, train_small
from tests.training.test_limits import BIG
from training import buckets, distributed
from training.step import forward_backward

EXACT = [
    *SMALL,
    "--dtype=float32",
    "--eval_batches=0",
    "--log_interval=1",
    "--learning_rate=1e-3",
    "--min_lr=1e-3",
]


def torchrun(processes, *command, **options):
    """Run `torchrun COMMAND` to its end; returns the CompletedProcess."""
    return run_script(
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        *command,
        **options,
    )


def train_on(processes, data, folder, *more):
    """Train a small model on so many processes."""
    return torchrun(
        processes, "train.py", f"--data_dir={data}", f"--checkpoint_dir={folder}", *EXACT, *more
    )


def start(processes, data, folder, *more):
    """torchrun with an endless run that has begun to log, and the process ids of its ranks."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        "train.py",
        f"--data_dir={data}",
        f"--checkpoint_dir={folder}",
        *EXACT,
    ]
    process = subprocess.Popen(
        [*command, "--max_steps=1000000", "--eval_interval=0", *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and not losses(folder)[0]:
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    pids = {
        int(environment(pid)["RANK"]): int(pid) for pid in children if "RANK" in environment(pid)
    }
    return process, [pids[rank] for rank in sorted(pids)]


def environment(pid):
    """The environment that a process was started with."""
    return dict(
        entry.split("=", 1)
        for entry in Path(f"/proc/{pid}/environ").read_text().split("\0")
        if "=" in entry
    )


@pytest.fixture(scope="module")
def alone(char_data, tmp_path_factory):
    """The losses of 50 steps in one process."""
    folder = tmp_path_factory.mktemp("ranks") / "alone"
    result = run_script(
        "train.py",
        f"--data_dir={char_data}",
        f"--checkpoint_dir={folder}",
        *EXACT,
        "--max_steps=50",
    )
    assert result.returncode == 0, result.stderr
    return losses(folder)


def same(a, b):
    """Whether two runs' losses and validation losses agree to 1e-4."""
    return all(
        x.keys() == y.keys() and all(abs(x[step] - y[step]) < 1e-4 for step in x)
        for x, y in zip(a, b, strict=True)
    )


def test_two_processes_have_the_losses_of_one(char_data, tmp_path, alone):
    result = train_on(2, char_data, tmp_path / "run", "--max_steps=50", "--micro_batch_size=1")
    assert result.returncode == 0, result.stderr
    assert same(losses(tmp_path / "run"), alone)
    # Only one wrote and printed; what is saved bears no wrapper's prefix.
    assert (
        result.stdout.count("finished: 50 steps") == 1
        and "2 x cpu" in result.stdout
        and not result.stderr
    )
    log = run_log.read(tmp_path / "run")
    assert [r["step"] for r in log if "loss" in r] == list(range(1, 51)) and [
        r["processes"] for r in log if r.get("event") == "start"
    ] == [2]
    assert {
        k.split(".")[0]
        for k in run_folder.load_tensors(tmp_path / "run" / "step_00000050" / "model.pt")
    } == {"wte", "wpe", "h", "ln_f", "lm_head"}


def test_a_run_goes_on_with_any_number_of_processes(char_data, tmp_path, alone):
    for processes, steps in ((4, 20), (1, 30), (2, 50)):
        result = train_on(processes, char_data, tmp_path / "run", f"--max_steps={steps}")
        assert result.returncode == 0, result.stderr
    assert "continues at step 30" in result.stdout and same(losses(tmp_path / "run")[:1], alone[:1])


def test_dropout_differs_between_processes_and_resumes_as_it_was(char_data, tmp_path):
    for folder, stops in (("whole", [20]), ("part", [10, 20])):
        for steps in stops:
            result = train_on(
                2, char_data, tmp_path / folder, f"--max_steps={steps}", "--dropout=0.2"
            )
            assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "part")[0] == losses(tmp_path / "whole")[0]
    a, b = (
        run_folder.load_tensors(tmp_path / folder / "step_00000020" / "model.pt")
        for folder in ("whole", "part")
    )
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("whom", ["rank 1", "torchrun"])
def test_a_signal_to_any_process_saves_once_and_all_leave(char_data, tmp_path, whom):
    process, pids = start(2, char_data, tmp_path / "run")
    os.kill(pids[1] if whom == "rank 1" else process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    saved = re.findall(r"SIGTERM: step ([\d,]+) is saved", out)
    assert len(saved) == 1, (out, err)
    step = int(saved[0].replace(",", ""))
    assert [run_folder.step_of(p) for p in run_folder.steps(tmp_path / "run")] == [step]
    assert run_folder.read_state(tmp_path / "run" / f"step_{step:08d}")["step"] == step
    if (
        whom == "rank 1"
    ):  # torchrun names the status of each; where it is itself told to end, it says only that
        assert set(re.findall(r"exitcode\s*:\s*(-?\d+)", err)) == {"143"}, err
    assert 'train.py"' not in err, err  # no traceback of ours: torchrun's own is all there is


@pytest.mark.parametrize("processes", [2, 4])
def test_when_a_process_dies_the_others_save_what_they_have(char_data, tmp_path, processes):
    process, pids = start(processes, char_data, tmp_path / "run")
    os.kill(pids[1], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    step = int(
        re.search(r"a process of the run has ended; step ([\d,]+) is saved", out)[1].replace(
            ",", ""
        )
    )
    assert process.returncode == 1 and 'train.py"' not in err, err
    result = train_small(char_data, tmp_path / "run", "--dtype=float32", f"--max_steps={step + 10}")
    assert result.returncode == 0 and f"continues at step {step:,}" in result.stdout, result.stderr


LIMITED = (
    "import os, sys, resource, train; used = int(open('/proc/self/statm').read().split()[0]) *"
    " resource.getpagesize(); os.environ['RANK'] == '1' and resource.setrlimit(resource.RLIMIT_AS,"
    " (used + 500_000_000,) * 2); train.main(sys.argv[1:])"
)


def test_out_of_memory_in_one_process_halves_in_all_and_changes_nothing_else(char_data, tmp_path):
    (tmp_path / "limited.py").write_text(LIMITED)
    more = [*BIG, "--batch_size=128", f"--data_dir={char_data}"]
    free = run_script("train.py", f"--checkpoint_dir={tmp_path / 'free'}", *more)
    tight = torchrun(2, tmp_path / "limited.py", f"--checkpoint_dir={tmp_path / 'tight'}", *more)
    assert free.returncode == tight.returncode == 0, tight.stderr
    halved = [r["micro_batch"] for r in run_log.read(tmp_path / "tight") if "micro_batch" in r]
    assert halved and halved == [64 >> n for n in range(1, len(halved) + 1)], (
        halved
    )  # said and written once
    assert same(losses(tmp_path / "free"), losses(tmp_path / "tight"))


def scarce(processes, when, data, folder, *more):
    """Train where the last process runs out of memory once; returns the run and what it saw."""
    notes = folder.with_suffix(".json")
    script = (ROOT / "tests/training/scarce.py", when, notes)
    files = (f"--data_dir={data}", f"--checkpoint_dir={folder}")
    result = torchrun(processes, *script, *files, *EXACT, "--max_steps=50", *more)
    assert result.returncode == 0, result.stderr
    return result, json.loads(notes.read_text())


@pytest.mark.parametrize(
    ("processes", "when", "sizes"),
    [
        (2, "backward", {"micro_batch": 2}),
        (4, "backward", {"micro_batch": 1}),
        (2, "evaluation", {"eval_micro_batch": 2}),
    ],
)
def test_out_of_memory_in_mid_run_leaves_none_waiting(
    char_data, tmp_path, alone, processes, when, sizes
):
    """Nor in the middle of a backward whose first buckets are on their way."""
    result, seen = scarce(processes, when, char_data, tmp_path / "run")
    assert result.stdout.count("out of memory with") == 1, result.stdout
    halved = [r for r in run_log.read(tmp_path / "run") if r.get("event") == "out of memory"]
    assert len(halved) == 1 and halved[0].items() >= sizes.items(), halved
    assert when == "evaluation" or seen["sent"] > 1, seen
    assert same(losses(tmp_path / "run"), alone)


def test_a_step_takes_one_message_of_plain_numbers(char_data, tmp_path):
    _, seen = scarce(2, "never", char_data, tmp_path / "run")
    counts = seen["messages"]
    between = [after - before for before, after in itertools.pairwise(counts)]
    evaluations = [10, 20, 30, 40]  # each has its own three
    assert len(between) == 49 and between == [
        4 if n + 1 in evaluations else 1 for n in range(len(between))
    ]


def test_compiled_processes_have_the_losses_of_one(char_data, tmp_path, alone):
    result = train_on(2, char_data, tmp_path / "run", "--max_steps=50", "--compile=True")
    assert result.returncode == 0 and "failed" not in result.stdout, (result.stdout, result.stderr)
    assert same(losses(tmp_path / "run"), alone)


def test_sums_in_bfloat16_train_as_well(char_data, tmp_path, alone):
    result = train_on(
        2, char_data, tmp_path / "run", "--max_steps=50", "--allreduce_dtype=bfloat16"
    )
    assert result.returncode == 0, result.stderr
    (training, validation), (exact, exact_validation) = losses(tmp_path / "run"), alone
    assert training[1] == pytest.approx(exact[1], abs=1e-4)  # the loss itself is not rounded
    assert max(abs(training[step] - exact[step]) for step in exact) < 0.02
    assert validation[50] == pytest.approx(exact_validation[50], abs=0.01)
    assert training != exact


@pytest.mark.parametrize("processes", [2, 4])
def test_muon_shared_out_has_the_losses_of_one_process(char_data, tmp_path, processes):
    more = ["--optimizer=muon", "--max_steps=20"]
    for count in (1, processes):
        result = train_on(count, char_data, tmp_path / str(count), *more)
        assert result.returncode == 0, result.stderr
    assert same(losses(tmp_path / "1"), losses(tmp_path / str(processes)))


def test_buckets_go_during_the_backward_once_it_is_known_to_fit(monkeypatch):
    monkeypatch.setattr(buckets, "SMALLEST", 10_000)
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, 16, 2, 2, 32))
    x, y = torch.randint(50, (2, 4, 16))
    cast, scaler = contextlib.nullcontext, torch.amp.GradScaler("cpu", enabled=False)
    loss = forward_backward(model, x, y, 2, cast, scaler)
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ours, sent = buckets.Buckets(model.parameters(), torch.float32), []
        ours.reserve()
        handle = model.h[0].ln_1.weight.register_hook(lambda gradient: sent.append(ours.count))
        for _ in range(2):
            ours.begin(2)
            total = forward_backward(model, x, y, 2, cast, scaler, ours)
            assert torch.equal(ours.collect(), total) and torch.equal(total, loss)
            for p, gradient in zip(model.parameters(), plain, strict=True):
                assert torch.equal(p.grad, gradient) and p.grad.data_ptr() % 16 == 0
            model.zero_grad()
        handle.remove()
        # In the first micro-batch none; then, but for the first step, most.
        assert sent[:3] == [0, 0, 0] and 1 < sent[3] < len(ours.buckets)
        assert len(ours.buckets) > 5
    finally:
        dist.destroy_process_group()


def test_what_memory_one_process_remembers_all_heed(tmp_path):
    code = """
        import os, torch, config
        from training import distributed
        from training.memory import Memory
        distributed.init()
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"  # torchrun says 1
        known = {"device": "another GPU"}
        for _ in range(2):  # what the first has written, the second time
            memory = Memory(config.Config(), torch.device("cpu"), 8, known, torch.nn.Linear(1, 1))
            if distributed.is_main:
                known = memory.to_json() | {"micro_batch": 4, "eval_micro_batch": 2}
        sizes = [memory.training.size, memory.evaluation.size]
        print(*map(distributed.gather, sizes), flush=True)
        distributed.end(0)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(code))
    result = torchrun(2, tmp_path / "script.py", OMP_NUM_THREADS="1")
    assert result.stdout.split("\n")[0] == "[4.0, 4.0] [2.0, 2.0]", result.stderr


@pytest.mark.gpu
def test_a_process_that_sees_one_gpu_takes_it(monkeypatch):
    if torch.cuda.device_count() > 1:
        pytest.skip("this process sees several")
    assert hardware.find_device("auto", 3) == torch.device("cuda", 0)


@pytest.mark.gpu
def test_signals_are_heard_while_a_gpu_is_waited_for(monkeypatch):
    monkeypatch.setattr(distributed, "world_size", 2)
    heard = []
    monkeypatch.setitem(distributed.told, "signal", 0)
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(time.monotonic()))
    try:
        torch.cuda._sleep(4_000_000_000)  # about two seconds
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        distributed.synchronize(torch.device("cuda"))
        assert heard and time.monotonic() - heard[0] > 0.5
    finally:
        signal.signal(signal.SIGALRM, before)


def one_message(result, *words, status):
    """Assert that torchrun's processes ended with `status`, and just one of them said why."""
    ours = result.stderr.partition("torch/distributed/elastic")[0]
    assert (
        re.search(rf"exitcode\s*:\s*{status} ", result.stderr)
        and result.stderr.count("train.py: ") == 1
        and "Traceback" not in ours
    ), result.stderr
    assert all(word in result.stderr for word in words), result.stderr


def test_an_error_is_said_once(char_data, tmp_path):
    one_message(
        train_on(2, char_data, tmp_path / "run", "--batch_size=7"),
        "batch_size = 7 cannot be shared by 2 processes",
        "is 8",
        status=2,
    )
    assert not (tmp_path / "run").exists()


def test_processes_must_begin_with_the_same_weights(char_data, tmp_path):
    (tmp_path / "other.py").write_text(
        "import os, sys, train; train.main([*sys.argv[1:], '--seed=' + os.environ['RANK']])"
    )
    files = (f"--data_dir={char_data}", f"--checkpoint_dir={tmp_path / 'run'}")
    result = torchrun(2, tmp_path / "other.py", *files, *EXACT)
    one_message(result, "begin with different weights", status=1)


def test_what_fails_in_one_process_ends_all(char_data, tmp_path):
    """The second process reads other data."""
    (tmp_path / "other.py").write_text(
        "import os, sys, train; train.main([a.replace('DATA', 'no' * (os.environ['RANK'] == '1') +"
        " 'data') for a in sys.argv[1:]])"
    )
    (tmp_path / "data").symlink_to(char_data)
    result = torchrun(
        2,
        tmp_path / "other.py",
        f"--data_dir={tmp_path}/DATA",
        f"--checkpoint_dir={tmp_path / 'run'}",
        *EXACT,
    )
    one_message(result, "nodata does not exist", status=2)
