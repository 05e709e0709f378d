"""The benchmarks: the parts of `make gpu` run, each alone, and are shown with their aims."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import PARTS, Part
from benchmarks.ladder import sequences
from benchmarks.time_to_loss import seconds_of_training, seconds_to
from formats import files
from tests.conftest import ROOT, fails_clearly, run_script


def test_the_parts_run_and_their_results_are_kept_and_shown(tmp_path, capsys):
    out = tmp_path / "gpu.json"
    command = ["--device=cpu", "--tiny", "--data", str(tmp_path), "--out", str(out)]
    assert gpu.main(["plan", "gpt2_small_fast", *command]) == 0
    found = json.loads(out.read_text())
    assert [part["status"] for part in found["parts"].values()] == ["done"] * 2
    assert found["parts"]["plan"]["results"]["plan_gpt2_small_cpu"]["rows"]
    capsys.readouterr()
    gpu.main(["--report", str(out)])
    shown = capsys.readouterr().out
    assert "memory off by" in shown and "share outside the three parts" in shown
    assert "not run" in shown  # the others


def test_a_part_that_fails_or_takes_too_long_stops_no_other(tmp_path, monkeypatch, capsys):
    notice = "compiling ... failed; training goes on without it."
    # A process of its own holds the pipe of the slow one.
    slow = (
        "import subprocess, sys, time; print(1, flush=True);"
        " subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    )
    parts = [
        Part("broken", f"-c 'print({json.dumps(notice)}); raise SystemExit(3)'", 1, {}),
        Part("slow", f'-c "{slow}"', 0.05, {}),
        Part("whole", "-c 'print(2)'", 1, {}),
    ]
    monkeypatch.setattr(gpu, "PARTS", parts)
    out = tmp_path / "gpu.json"
    begun = time.monotonic()
    assert gpu.main(["--device=cpu", "--out", str(out)]) == 1
    assert time.monotonic() - begun < 50
    found = json.loads(out.read_text())["parts"]
    statuses = {name: part["status"] for name, part in found.items()}
    assert statuses == {"broken": "failed", "slow": "cut", "whole": "done"}
    assert found["broken"]["notices"] == [notice]
    assert found["slow"]["end"][0] == "1" and "cut off after" in found["slow"]["end"][1]
    # Once more: what is done is not done again, what is named is.
    parts.append(Part("new", "-c 'print(3)'", 1, {}))
    capsys.readouterr()
    assert gpu.main(["--device=cpu", "--out", str(out), "--minutes", "0.6"]) == 1
    shown = capsys.readouterr().out
    # What was not tried yet comes before what failed.
    assert "whole: python" not in shown and shown.index("new: ") < shown.index("broken: ")
    assert gpu.main(["whole", "--device=cpu", "--out", str(out)]) == 0
    assert "whole: python" in capsys.readouterr().out


def test_a_report_of_a_file_that_is_none_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "list.json").write_text("[]")
    for name in ("list.json", "missing.json"):
        with pytest.raises(SystemExit, match=f"{name} is not there, or not what"):
            gpu.main(["--report", str(tmp_path / name)])


def test_a_mistake_in_the_settings_of_a_benchmark_is_a_sentence():
    for setting, word in (("--nonsense=1", "'nonsense'"), ("--data_dir=nowhere", "nowhere holds")):
        fails_clearly(run_script("-m", "benchmarks.throughput", setting), word)
    fails_clearly(
        run_script("-m", "benchmarks.rates", "--device=cpu", "--nonsense=1"), "'nonsense'"
    )
    found = run_script("-m", "benchmarks.generate", "--nanogpt", "nowhere")
    fails_clearly(found, "nowhere is no checkout of nanoGPT")
    none = run_script("-m", "benchmarks.generate", "--rounds", "0")
    fails_clearly(none, "argument --rounds: 0: it must be a whole number of at least 1")


def test_a_pytest_that_broke_down_is_no_success():
    assert gpu.of_tests(["2 failed, 30 passed in 4.10s"])["tests failed"] == 2
    assert gpu.of_tests(["30 passed, 2 errors in 4.10s"])["tests failed"] == 2
    assert gpu.of_tests(["python: No module named pytest"]) == {}


def test_what_another_pytorch_did_or_was_cut_is_done_again():
    known = {"status": "done", "torch": torch.__version__}
    assert gpu.is_done(known) and not gpu.is_done(None)
    assert not gpu.is_done(known | {"torch": "2.10.0"})
    assert not gpu.is_done(known | {"status": "cut"})


def test_parts_that_compare_with_nanogpt_take_a_checkout(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "PARTS", [Part("theirs", "-c 'print(1)' {nanogpt}", 1, {})])
    out = ["--device=cpu", "--out", str(tmp_path / "gpu.json")]
    assert gpu.main(out) == 0 and "theirs: python" not in capsys.readouterr().out
    (tmp_path / "train.py").touch()
    assert gpu.main([*out, "--nanogpt", str(tmp_path)]) == 0
    assert f"theirs: python -c 'print(1)' {tmp_path}" in capsys.readouterr().out


def test_the_process_that_starts_the_parts_asks_nothing_of_cuda(tmp_path, monkeypatch):
    def context(*_):
        raise AssertionError("this takes memory of the GPU")

    for name in ("is_available", "_lazy_init", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, context)
    monkeypatch.setattr(gpu, "PARTS", [Part("one", "-c 'print(1)'", 1, {})])
    assert gpu.main(["--device=cpu", "--out", str(tmp_path / "gpu.json")]) == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_call_that_is_ended_leaves_what_the_part_had(tmp_path, signum):
    out = tmp_path / "gpu.json"
    words = ["-m", "benchmarks.gpu", "rates", "--device=cpu", "--tiny", "--out", str(out)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment)

    def part():
        return (files.read_json(out, parts=dict) or {"parts": {}})["parts"].get("rates", {})

    while process.poll() is None and not part().get("results", {}).get("rates_cpu"):
        time.sleep(0.05)
    process.send_signal(signum)
    assert process.wait(20) == (143 if signum == signal.SIGTERM else -signum)
    assert part()["status"] == "cut" and part()["results"]["rates_cpu"]["figures"]
    if signum == signal.SIGTERM:
        deadline = time.monotonic() + 10
        while any(is_of(tmp_path, path) for path in Path("/proc").glob("[0-9]*/environ")):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def is_of(folder, environ):
    """Whether a process was started with a folder for its temporary files."""
    with contextlib.suppress(OSError):
        return f"TMPDIR={folder}".encode() in environ.read_bytes()


def test_each_aim_is_a_bound():
    for part in PARTS:
        for aim in part.aims.values():
            assert gpu.verdict(0.0, aim) in ("met", "MISSED")
    assert gpu.verdict(0.54, ">= 0.55") == "MISSED"
    assert gpu.verdict(43.0, "<= 43") == "met"


def test_the_ladder_begins_with_what_the_gpu_has_memory_for():
    for gigabytes, count in ((150, 64), (85, 64), (42, 32), (24, 16), (15.8, 8), (4, 1)):
        assert sequences(gigabytes * 1e9) == count


def test_nanogpts_time_counts_compilation_but_no_evaluation():
    lines = [
        (5, "number of parameters: 0.03M"),
        (10, "step 0: train loss 4.2, val loss 4.2"),
        (40, "iter 0: loss 4.2, time 35000ms, mfu -100.00%"),
        (41, "iter 1: loss 4.1, time 1000ms, mfu -100.00%"),
        (42, "iter 2: loss 4.0, time 1000ms, mfu -100.00%"),
        (50, "step 3: train loss 3.9, val loss 3.9"),
        (51, "iter 3: loss 3.9, time 9000ms, mfu -100.00%"),
    ]
    assert seconds_of_training(lines) == 30 + 1 + 1 + 1


def test_the_time_to_a_loss_is_read_off_the_line_between_evaluations():
    curve = [(0.0, 4.0), (10.0, 3.0), (20.0, 2.0)]
    assert seconds_to(curve, 2.5) == 15.0
    assert seconds_to(curve, 5.0) == 0.0
    assert seconds_to(curve, 1.0) == float("inf")
