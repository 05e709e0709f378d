"""benchmarks/gpu.py, which `make gpu` runs: a part of it, on a CPU with the smallest of models."""

import json

from tests.conftest import SMALL, run_script


def test_a_part_runs_and_what_it_measured_is_kept(char_data, tmp_path):
    settings = (*SMALL, f"--data_dir={char_data}", "--n_layer=1", "--block_size=16")
    result = run_script("-m", "benchmarks.gpu", "rates", *settings, BENCHMARK_RESULTS=str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    (folder,) = tmp_path.glob("gpu_*")
    assert json.loads((folder / "parts.json").read_text())["rates"]["status"] == "done"
    assert json.loads((folder / "rates_cpu.json").read_text())["figures"]["copy, TB/s"] > 0
    assert "| rates_cpu: copy, TB/s |" in result.stdout
