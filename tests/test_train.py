"""train.py: the parts of a step, and whole runs as a user starts them."""

import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import hardware
from config import Config
from formats import run_folder
from model import GPT, GPTConfig
from tests.conftest import ROOT, fails_clearly, run_script
from training import profiling
from training.optimizer import make_optimizer, optimizer_step
from training.schedule import learning_rate_at
from training.step import compile_or_not, forward_backward
from training.terminal import duration

SMALL = [
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=32",
    "--block_size=32",
    "--batch_size=8",
    "--compile=False",
    "--device=cpu",
    "--eval_interval=10",
    "--eval_batches=2",
    "--log_interval=5",
    "--warmup_steps=5",
    "--learning_rate=3e-3",
    "--report_minutes=0",
]


def train_small(data, folder, *more, **options):
    """Train a small model; returns the finished process."""
    return run_script(
        "train.py", f"--data_dir={data}", f"--checkpoint_dir={folder}", *SMALL, *more, **options
    )


def losses(folder):
    """{step: loss} and {step: val_loss} of a run's log."""
    log = run_folder.read_log(folder)
    return {r["step"]: r["loss"] for r in log if "loss" in r}, {
        r["step"]: r["val_loss"] for r in log if "val_loss" in r
    }


# -- the parts of a step --------------------------------------------------------------------------


def test_the_learning_rate_warms_up_and_ends_at_its_minimum():
    c = Config(learning_rate=1.0, min_lr=0.1, warmup_steps=10)
    rates = [learning_rate_at(step, 100, c) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0) and max(rates) <= 1.0
    assert rates[-1] == pytest.approx(0.1) and rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate_at(99, 100, Config(learning_rate=1.0, warmup_steps=10)) == pytest.approx(
        0.1
    )
    assert learning_rate_at(0, 1, Config(warmup_steps=0)) > 0


def test_wsd_is_constant_and_then_falls_in_a_straight_line_to_nothing():
    c = Config(learning_rate=1.0, warmup_steps=10, lr_schedule="wsd", decay_fraction=0.4)
    rates = [learning_rate_at(step, 100, c) for step in range(100)]
    assert rates[9:60] == [1.0] * 51 and rates[4] == 0.5 and rates[99] == 0.0
    assert rates[79] == pytest.approx(0.5)


def test_weight_decay_falls_on_matrices_only():
    model = GPT(GPTConfig(50, 8, 1, 2, 16))
    decayed, plain = make_optimizer(
        model, Config(weight_decay=0.3), torch.device("cpu")
    ).param_groups
    assert decayed["weight_decay"] == 0.3 and all(p.dim() == 2 for p in decayed["params"])
    assert plain["weight_decay"] == 0.0 and all(p.dim() == 1 for p in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_the_second_moment_can_be_given_in_tokens():
    for batch_size in (8, 64):
        c = Config(batch_size=batch_size, block_size=512, beta2_tokens=1e6)
        beta2 = make_optimizer(GPT(GPTConfig(50, 8, 1, 2, 16)), c, torch.device("cpu")).defaults[
            "betas"
        ][1]
        assert beta2 ** (1e6 / (batch_size * 512)) == pytest.approx(0.5)


def one_step(micro_batch=8, grad_clip=1.0, poison=False, scaled=False):
    """A model after one step on fixed data, the loss and the norm."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, 16, 2, 2, 32))
    optimizer = make_optimizer(model, Config(), torch.device("cpu"))
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    data = torch.randint(50, (8, 17), generator=torch.Generator().manual_seed(1))
    loss = forward_backward(
        model,
        data[:, :-1],
        data[:, 1:],
        micro_batch,
        lambda: hardware.autocast(torch.device("cpu"), torch.float32),
        scaler,
    )
    if poison:
        model.wte.weight.grad[3, 3] = math.nan
    return model, loss, optimizer_step(model, optimizer, scaler, 1e-2, grad_clip)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_accumulation_changes_nothing_but_the_memory(micro_batch):
    whole, loss, norm = one_step()
    parts, loss_parts, norm_parts = one_step(micro_batch)
    torch.testing.assert_close((loss, norm), (loss_parts, norm_parts), rtol=1e-5, atol=1e-6)
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scaled", [False, True])
def test_clipping_is_that_of_torch(scaled):
    ours, _, norm = one_step(grad_clip=0.1, scaled=scaled)
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, 16, 2, 2, 32))
    data = torch.randint(50, (8, 17), generator=torch.Generator().manual_seed(1))
    model(data[:, :-1], data[:, 1:]).backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item() == pytest.approx(
        norm.item(), rel=1e-4
    )
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == d], "weight_decay": w}
        for d, w in ((2, 0.1), (1, 0.0))
    ]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)).step()
    for p, q in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_a_gradient_that_is_no_number_never_reaches_the_weights():
    torch.manual_seed(0)
    before = GPT(GPTConfig(50, 16, 2, 2, 32)).state_dict()
    model, _, norm = one_step(poison=True)
    assert not norm.isfinite()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_durations_as_people_say_them():
    assert [duration(s) for s in (42.2, 61, 3599, 7800)] == [
        "42 s",
        "1 min 1 s",
        "59 min 59 s",
        "2 h 10 min",
    ]


# -- whole runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(char_data, tmp_path_factory):
    """A small run of 40 steps, with dropout and samples."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    result = train_small(
        char_data, folder, "--max_steps=40", "--dropout=0.1", "--sample_prompts=The "
    )
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


def test_a_run_learns_and_leaves_what_the_design_says(finished):
    folder, out = finished
    loss, val = losses(folder)
    assert list(loss) == list(range(5, 41, 5)) and list(val) == [10, 20, 30, 40]
    assert val[40] < val[10] < math.log(100)
    log = run_folder.read_log(folder)
    line = next(r for r in log if "loss" in r)
    assert set(line) >= {
        "step",
        "tokens",
        "epoch",
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_second",
        "mfu",
        "elapsed_s",
    }
    assert line["tokens"] == 5 * 8 * 32 and line["mfu"] is None
    samples = [r["samples"] for r in log if "samples" in r]
    assert len(samples) == 4 and samples[0][0]["prompt"] == "The " and samples[0][0]["text"]
    assert json.loads((folder / "config.json").read_text())["dropout"] == 0.1
    assert sorted(p.name for p in folder.iterdir() if p.name != ".lock") == [
        "best.json",
        "config.json",
        "log.jsonl",
        "step_00000030",
        "step_00000040",
    ]
    assert sorted(p.name for p in (folder / "step_00000040").iterdir()) == [
        "model.pt",
        "optimizer.pt",
        "state.json",
        "tokenizer.json",
    ]
    state = run_folder.read_state(folder / "step_00000040")
    assert (
        state["step"] == 40
        and state["tokens"] == 40 * 8 * 32
        and state["files"]["model.pt"]["sha256"]
    )
    for words in (
        "parameters",
        "256 tokens = 8 x 32",
        "40 steps",
        "an epoch",
        str(folder),
        "bits per byte",
        "python generate.py --checkpoint",
    ):
        assert words in out
    assert "\r" not in out


def test_weights_bear_no_prefix_of_a_wrapper(finished):
    assert {
        k.split(".")[0] for k in run_folder.load_tensors(finished[0] / "step_00000040" / "model.pt")
    } == {"wte", "wpe", "h", "ln_f", "lm_head"}


def test_a_finished_run_says_so_and_changes_nothing(finished, char_data):
    folder, _ = finished
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.name != ".lock"}
    result = train_small(
        char_data, folder, "--max_steps=40", "--dropout=0.1", "--sample_prompts=The "
    )
    assert result.returncode == 0 and "finished already" in result.stdout
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.name != ".lock"} == before


def test_a_resumed_run_ends_in_the_same_weights_and_the_same_log(finished, char_data, tmp_path):
    """Stopped by its last step at 23, in the middle of an epoch and between log lines, then
    continued to 40.
    """
    whole, part = finished[0], tmp_path / "part"
    more = ["--dropout=0.1", "--sample_prompts=The ", "--save_interval=23"]
    process = subprocess.Popen(
        [
            sys.executable,
            "train.py",
            f"--data_dir={char_data}",
            f"--checkpoint_dir={part}",
            *SMALL,
            *more,
            "--max_steps=40",
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    while process.poll() is None and not (part / "step_00000023").exists():
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    for step in run_folder.steps(part):
        if run_folder.step_of(step) > 23:
            (step / "state.json").unlink()
    result = train_small(char_data, part, *more, "--max_steps=40")
    assert result.returncode == 0, result.stderr
    assert "continues at step 23" in result.stdout
    assert losses(part) == losses(whole)
    a, b = (
        run_folder.load_tensors(folder / "step_00000040" / "model.pt") for folder in (whole, part)
    )
    assert all(torch.equal(a[k], b[k]) for k in a)
    texts = [
        [r["samples"] for r in run_folder.read_log(folder) if "samples" in r]
        for folder in (whole, part)
    ]
    assert texts[0] == texts[1]


def test_muon_and_the_modern_model_resume_to_the_same_weights(char_data, tmp_path):
    modern = [
        "--optimizer=muon",
        "--lr_schedule=wsd",
        "--arch=qwen3",
        "--zero_init=True",
        "--tie_weights=False",
    ]
    result = train_small(char_data, tmp_path / "whole", *modern, "--max_steps=20")
    assert result.returncode == 0, result.stderr
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "step_00000020")
    result = train_small(char_data, tmp_path / "part", *modern, "--max_steps=20")
    assert result.returncode == 0 and "continues at step 10" in result.stdout, result.stderr
    a, b = (
        run_folder.load_tensors(tmp_path / folder / "step_00000020" / "model.pt")
        for folder in ("whole", "part")
    )
    assert all(torch.equal(a[k], b[k]) for k in a) and losses(tmp_path / "part") == losses(
        tmp_path / "whole"
    )
    result = train_small(
        char_data, tmp_path / "part", *modern, "--max_steps=30", "--optimizer=adamw"
    )
    assert (
        result.returncode == 2 and "optimizer: muon in the checkpoint, adamw now" in result.stderr
    )


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_leaves(char_data, tmp_path, signum, status):
    command = [
        sys.executable,
        "train.py",
        f"--data_dir={char_data}",
        f"--checkpoint_dir={tmp_path / 'run'}",
        *SMALL,
        "--max_steps=100000",
        "--eval_interval=0",
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not losses(tmp_path / "run")[0]:
        pass
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    step = int(re.search(r"step ([\d,]+) is saved", out)[1].replace(",", ""))
    assert run_folder.read_state(tmp_path / "run" / f"step_{step:08d}")["step"] == step and not err


def test_epochs_and_the_position_follow_a_changed_batch_size(char_data, tmp_path):
    assert train_small(char_data, tmp_path / "run", "--max_steps=20").returncode == 0
    result = train_small(
        char_data, tmp_path / "run", "--max_steps=30", "--batch_size=16", "--learning_rate=1e-3"
    )
    assert result.returncode == 0, result.stderr
    last = [r for r in run_folder.read_log(tmp_path / "run") if "loss" in r][-1]
    assert last["tokens"] == (20 * 8 + 10 * 16) * 32 and last["lr"] == pytest.approx(1e-4)


def test_compiled_and_in_bf16_it_learns_the_same(char_data, tmp_path, finished):
    args = [
        "train.py",
        f"--data_dir={char_data}",
        f"--checkpoint_dir={tmp_path / 'run'}",
        *SMALL,
        "--compile=True",
        "--dtype=bfloat16",
        "--max_steps=40",
    ]
    result = run_script(*args)
    assert result.returncode == 0, result.stderr
    assert re.search(r"compiling \.\.\. [\d.]+ s", result.stdout)
    assert losses(tmp_path / "run")[1][40] == pytest.approx(losses(finished[0])[1][40], abs=0.1)


def test_where_compilation_fails_training_goes_on_and_says_why(char_data, tmp_path):
    result = train_small(
        char_data,
        tmp_path / "run",
        "--compile=True",
        "--max_steps=10",
        CXX="/nowhere/c++",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert result.returncode == 0, result.stderr
    assert (
        "compiling ... failed; training goes on without it" in result.stdout
        and losses(tmp_path / "run")[1]
    )


# -- what goes wrong ------------------------------------------------------------------------------


def test_no_data(tmp_path):
    fails_clearly(
        train_small(tmp_path / "none", tmp_path / "run"),
        "none does not exist",
        "python prepare_data.py",
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--n_hed=3"], ["'n_hed'", "'n_head'"]),
        (["--n_head=3"], ["n_head = 3", "n_embd = 32"]),
        (["--device=cuda:7"], ["cuda:7", "device=auto"]),
        (["--device=tpu9"], ["tpu9"]),
        (["--block_size=100000"], ["too few", "block_size"]),
        (["--resume=must"], ["resume = must", "does not exist"]),
        (["--data_location=gpu"], ["data_location = gpu", "cpu"]),
        (["--sample_prompts=snow ☃"], ["sample_prompts", "U+2603"]),
        (["--seed=99999999999999999999"], ["seed", "2**32"]),
        (["--checkpoint_dir="], ["checkpoint_dir"]),
        (["--checkpoint_dir=train.py"], ["checkpoint_dir = 'train.py'", "folder"]),
    ],
)
def test_a_mistake_is_a_sentence_and_writes_nothing(char_data, tmp_path, arguments, words):
    fails_clearly(train_small(char_data, tmp_path / "run", *arguments), *words)
    assert not (tmp_path / "run").exists()


def test_another_shape_or_other_data_lists_every_difference(finished, char_data, bpe_data):
    folder = finished[0]
    fails_clearly(
        train_small(char_data, folder, "--max_steps=50", "--n_layer=3", "--seed=5"),
        "n_layer: 2 in the checkpoint, 3 now",
        "seed: 1337 in the checkpoint, 5 now",
    )
    fails_clearly(train_small(bpe_data, folder, "--max_steps=50"), "tokenizer_sha256", "vocab_size")


def test_never_refuses_to_write_over_a_run(finished, char_data):
    fails_clearly(train_small(char_data, finished[0], "--resume=never"), "already holds a run")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda d: (d / "train.bin").write_bytes((d / "train.bin").read_bytes()[:-100]),
            ["train.bin", "bytes", "cut off"],
        ),
        (lambda d: change_meta(d, dtype="int32"), ["train.bin", "int32", "fits dtype uint16"]),
        (lambda d: change_meta(d, dtype="float32"), ["float32"]),
        (lambda d: change_meta(d, vocab_size=100_000), ["uint16 cannot hold"]),
        (lambda d: change_meta(d, vocab_size=20), ["token id", "vocabulary of 20"]),
        (lambda d: (d / "meta.json").write_text("no json"), ["meta.json is damaged"]),
        (lambda d: (d / "meta.json").write_text("[]"), ["meta.json is damaged"]),
        (lambda d: (d / "val.bin").unlink(), ["val.bin is missing"]),
        (lambda d: (d / "tokenizer.json").unlink(), ["no tokenizer at"]),
        (
            lambda d: (d / "tokenizer.json").write_text((d / "tokenizer.json").read_text() + "\n"),
            ["not the tokenizer that made"],
        ),
        (
            lambda d: np.full((d / "train.bin").stat().st_size // 2, 60000, np.uint16).tofile(
                d / "train.bin"
            ),
            ["token id 60000"],
        ),
    ],
)
@pytest.mark.parametrize("location", ["ram", "mmap"])
def test_damaged_data_is_named(char_data, tmp_path, damage, words, location):
    import shutil

    data = shutil.copytree(char_data, tmp_path / "data")
    damage(data)
    result = train_small(
        data, tmp_path / "run", f"--data_location={location}", "--max_steps=2", "--eval_interval=0"
    )
    fails_clearly(result, *words)
    assert not run_folder.steps(tmp_path / "run")


def change_meta(folder, **values):
    """Edit meta.json."""
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# -- speed: what may not change, and what is shown ------------------------------------------------


def test_compiled_layers_in_bf16_give_the_loss_and_gradients_of_plain_ones_in_fp32():
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, 300, 2, 2, 64, tie_weights=True))
    x, y = torch.randint(50, (2, 2, 300), generator=torch.Generator().manual_seed(1))
    scaler, cpu = torch.amp.GradScaler("cpu", enabled=False), torch.device("cpu")
    results = []
    for dtype in (torch.float32, torch.bfloat16):

        def cast(dtype=dtype):
            return hardware.autocast(cpu, dtype)

        forward, problem = (
            compile_or_not(model, x, y, cast, scaler) if dtype == torch.bfloat16 else (model, None)
        )
        assert problem is None
        loss = forward_backward(forward, x, y, 2, cast, scaler)
        results.append([loss, *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    assert results[1][0] == pytest.approx(float(results[0][0]), abs=1e-3)
    for plain, compiled in zip(*results, strict=True):
        assert (
            torch.nn.functional.cosine_similarity(plain.flatten(), compiled.flatten(), dim=0) > 0.99
            or plain.norm() < 1e-4
        )


def test_profile_writes_a_table_and_a_trace(char_data, tmp_path):
    result = train_small(char_data, tmp_path / "run", "--max_steps=12", "--profile=True")
    assert result.returncode == 0, result.stderr
    rows = dict(
        re.findall(
            r"^(data|forward|backward|optimizer|other|step) +([\d.]+) ms",
            result.stdout,
            re.MULTILINE,
        )
    )
    assert len(rows) == 6 and sum(
        float(v) for k, v in rows.items() if k != "step"
    ) == pytest.approx(float(rows["step"]), abs=0.1)
    seconds = next(
        r["seconds_a_step"]
        for r in run_folder.read_log(tmp_path / "run")
        if r.get("event") == "profile"
    )
    assert seconds["backward"] > seconds["data"] > 0
    assert "traceEvents" in json.loads((tmp_path / "run" / "trace.json").read_text())


def test_a_trace_of_a_gpu_counts_kernels_to_the_part_that_launched_them():
    def event(name, cat, ts, dur, **args):
        return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "args": args}

    trace = [
        event("ProfilerStep#3", "user_annotation", 0, 100),
        event("forward", "user_annotation", 10, 20),
        event("backward", "user_annotation", 40, 20),
        event("cudaLaunchKernel", "cuda_runtime", 12, 2, correlation=1),
        event("cudaLaunchKernel", "cuda_runtime", 45, 2, correlation=2),
        event("cuLaunchKernel", "cuda_driver", 35, 2, correlation=3),
        event("k1", "kernel", 20, 300, correlation=1),
        event("k3", "kernel", 330, 10, correlation=3),
        event("k2", "kernel", 340, 500, correlation=2),
    ]
    seconds = profiling.read_trace(trace)
    assert (
        seconds["forward"] == pytest.approx(300e-6)
        and seconds["backward"] == pytest.approx(500e-6)
        and seconds["data"] == 0
    )
    assert seconds["other"] == pytest.approx(
        20e-6
    )  # one kernel outside all parts, and the gap before it


def test_a_container_with_fewer_processors_gets_fewer_threads(tmp_path, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(4)
    try:
        for text, threads in (("max 100000", 4), ("250000 100000", 3), ("50000 100000", 1)):
            (tmp_path / "cpu.max").write_text(text + "\n")
            hardware.respect_quota(str(tmp_path / "cpu.max"))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_short_run_on_a_cpu_is_not_compiled():
    assert not hardware.compile_pays(torch.device("cpu"), 8e12) and hardware.compile_pays(
        torch.device("cpu"), 1e15
    )
    assert hardware.compile_pays(torch.device("cuda"), 1)


def test_large_tensors_lie_in_large_pages():
    choice = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not choice.exists() or "[never]" in choice.read_text():
        pytest.skip("this system gives none")
    code = (
        "import hardware, torch; a = torch.ones(1 << 25); print(*(line.split()[1] for line in"
        " open('/proc/self/smaps_rollup') if 'AnonHugePages' in line))"
    )
    assert (
        int(
            subprocess.run(
                [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
            ).stdout
        )
        > 64_000
    )  # kB of 131,072
