"""benchmarks/gpu.py, which `make gpu` runs: a part of it, on a CPU with the smallest of models."""

import json

from tests.conftest import run_script


def test_a_part_runs_and_what_it_measured_is_kept(tmp_path):
    command = ("-m", "benchmarks.gpu", "rates", "--device=cpu", "--tiny")
    result = run_script(*command, BENCHMARK_RESULTS=str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    (folder,) = tmp_path.glob("gpu_*_tiny")
    assert json.loads((folder / "parts.json").read_text())["rates"]["status"] == "done"
    assert json.loads((folder / "rates_cpu.json").read_text())["figures"]["copy, TB/s"] > 0
