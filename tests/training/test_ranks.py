"""Several processes that train one run, started by torchrun: two and four, over gloo."""

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
from tests.conftest import ROOT, SMALL, fails_clearly, losses, run_script, train_small
from tests.training.test_limits import BIG
from training import distributed
from training.step import compile_layers, data_parallel

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
    """Train a small model on that number of processes."""
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


def test_when_a_process_dies_the_others_save_what_they_have(char_data, tmp_path):
    process, pids = start(3, char_data, tmp_path / "run", "--batch_size=24")
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


# torch._dynamo comes with the first optimiser, and has Triton with it in PyTorch's build for CUDA.
LIMITED = (
    "import os, sys, resource, train, torch._dynamo; used ="
    " int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize();"
    " os.environ['RANK'] == '1' and resource.setrlimit(resource.RLIMIT_AS,"
    " (used + 430_000_000,) * 2); train.main(sys.argv[1:])"
)


def test_out_of_memory_in_one_process_ends_all_and_the_same_command_goes_on(char_data, tmp_path):
    (tmp_path / "limited.py").write_text(LIMITED)
    more = [*BIG, "--batch_size=128", f"--data_dir={char_data}"]
    free = run_script("train.py", f"--checkpoint_dir={tmp_path / 'free'}", *more)
    assert free.returncode == 0, free.stderr
    command = [tmp_path / "limited.py", f"--checkpoint_dir={tmp_path / 'tight'}", *more]
    micro_batch = 64
    while (tight := torchrun(2, *command, timeout=120)).returncode:
        micro_batch //= 2
        assert micro_batch, tight.stderr
        one_message(tight, "out of memory", f"it continues with {micro_batch},", status=1)
        assert (
            json.loads((tmp_path / "tight/memory.json").read_text())["micro_batch"] == micro_batch
        )
    assert micro_batch < 64 and f"micro-batches of {micro_batch} sequences" in tight.stdout
    assert same(losses(tmp_path / "free"), losses(tmp_path / "tight"))


def test_without_torchrun_its_variables_are_named():
    result = run_script("train.py", "--help", WORLD_SIZE="2")
    fails_clearly(result, "WORLD_SIZE is set, but not RANK, LOCAL_RANK", "torchrun")


def test_compiled_processes_have_the_losses_of_one(char_data, tmp_path, alone):
    result = train_on(2, char_data, tmp_path / "run", "--max_steps=50", "--compile=True")
    assert result.returncode == 0 and "failed" not in result.stdout, (result.stdout, result.stderr)
    assert same(losses(tmp_path / "run"), alone)


@pytest.mark.gpu
def test_gradients_averaged_in_bfloat16_train_as_well(char_data, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    more = ["--max_steps=50", "--device=cuda"]
    for dtype in ("float32", "bfloat16"):
        result = train_on(2, char_data, tmp_path / dtype, *more, f"--allreduce_dtype={dtype}")
        assert result.returncode == 0, result.stderr
    (training, validation), (exact, exact_validation) = (
        losses(tmp_path / dtype) for dtype in ("bfloat16", "float32")
    )
    assert training[1] == pytest.approx(exact[1], abs=1e-4)  # the loss itself is not rounded
    assert max(abs(training[step] - exact[step]) for step in exact) < 0.02
    assert validation[50] == pytest.approx(exact_validation[50], abs=0.01)
    assert training != exact


def test_a_step_sends_no_rotary_table():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = GPT(GPTConfig(50, 8, 1, 2, 16, arch="qwen3"))
        assert model.rotary is not None
        assert not data_parallel(compile_layers(model), "float32").will_sync_module_buffers()
    finally:
        dist.destroy_process_group()


def test_muon_split_has_the_losses_of_one_process(char_data, tmp_path):
    more = ["--optimizer=muon", "--max_steps=20", "--arch=qwen3"]
    for count in (1, 2):
        result = train_on(count, char_data, tmp_path / str(count), *more)
        assert result.returncode == 0, result.stderr
    assert same(losses(tmp_path / "1"), losses(tmp_path / "2"))


def test_what_memory_one_process_remembers_counts_for_all(tmp_path):
    code = """
        import json, os, pathlib, sys, config, hardware
        from training import distributed
        from training.memory import MicroBatch
        distributed.init()
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"  # torchrun says 1
        folder = pathlib.Path(sys.argv[1], str(distributed.rank))
        c, device = config.Config(batch_size=16), hardware.open_device("cpu", "float32")
        sizes = MicroBatch(c, device, folder)
        if distributed.is_main:
            folder.mkdir()
            known = sizes.to_json() | {"micro_batch": 4}
            (folder / "memory.json").write_text(json.dumps(known))
        sizes = MicroBatch(c, device, folder)
        print(distributed.gather(sizes.size), flush=True)
        distributed.exit_process(0)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(code))
    result = torchrun(2, tmp_path / "script.py", tmp_path, OMP_NUM_THREADS="1")
    assert result.stdout.split("\n")[0] == "[4.0, 4.0]", result.stderr


@pytest.mark.gpu
def test_a_process_that_sees_one_gpu_takes_it(monkeypatch):
    if torch.cuda.device_count() > 1:
        pytest.skip("this process sees several")
    assert hardware.find_device("auto", 3) == torch.device("cuda", 0)


@pytest.mark.gpu
def test_signals_are_heard_while_a_gpu_is_waited_for(monkeypatch):
    monkeypatch.setattr(distributed, "world_size", 2)
    heard = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(time.monotonic()))
    try:
        torch.cuda._sleep(4_000_000_000)  # about two seconds
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        distributed.synchronize(torch.device("cuda"))
        assert heard and time.monotonic() - heard[0] > 0.5
    finally:
        signal.signal(signal.SIGALRM, before)


def one_message(result, *words, status):
    """Assert that torchrun's processes ended with `status`, and just one of them said why.

    The last lines of torchrun say it too.
    """
    ours, _, torchruns = result.stderr.partition("torch/distributed/elastic")
    assert re.search(rf"exitcode\s*:\s*{status} ", torchruns), result.stderr
    assert "Traceback" not in ours, result.stderr
    for said in (ours, torchruns.partition("Root Cause")[2]):
        assert said.count("train.py: ") == 1, result.stderr
        assert all(word in said for word in words), result.stderr


def test_an_error_is_said_once(char_data, tmp_path):
    one_message(
        train_on(2, char_data, tmp_path / "run", "--batch_size=7"),
        "batch_size = 7 cannot be shared by 2 processes",
        "is 8",
        status=2,
    )
    assert not (tmp_path / "run").exists()


def test_processes_must_have_the_same_settings(char_data, tmp_path):
    (tmp_path / "other.py").write_text(
        "import os, sys, train; train.main([*sys.argv[1:], '--seed=' + os.environ['RANK']])"
    )
    files = (f"--data_dir={char_data}", f"--checkpoint_dir={tmp_path / 'run'}")
    result = torchrun(2, tmp_path / "other.py", *files, *EXACT)
    one_message(result, "do not see the same settings", status=1)


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
    one_message(result, "nodata holds no prepared data", status=2)
