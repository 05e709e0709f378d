"""What a GPU would be given to do: one graph for training and evaluation, and how much it moves."""

import json
import os
import sys

import pytest
import torch

import config
from benchmarks import fake_device
from tests.conftest import ROOT, SMALL, run_script
from training.setup import build

MISSING = fake_device.missing()


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--arch=qwen3", "--tie_weights=False", "--optimizer=muon"],
        ["--activation_checkpointing=True"],
    ],
    ids=["gpt2", "qwen3", "low memory"],
)
def test_the_whole_model_is_one_graph_compiled_once(char_data, tmp_path, more):
    c = config.load([f"--data_dir={char_data}", f"--checkpoint_dir={tmp_path}", *SMALL, *more])
    trainer, graphs = build(c).trainer, []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    # fullgraph: a graph break is an error
    trainer.forward = torch.compile(
        trainer.state.model, backend=backend, dynamic=False, fullgraph=True
    )
    for _ in range(2):
        trainer.step()
        trainer.evaluate(interrupted=lambda: False)
    assert len(graphs) == 1


def test_a_build_for_cuda_is_no_fake_device(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert fake_device.missing().startswith("PyTorch is built for CUDA here")


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize(
    ("preset", "gigabytes", "kernels"),
    [
        ("config/gpt2_small.py", 39, 560),
        ("config/gpt2_small_modern.py", 42, 450),
    ],
)
def test_a_step_moves_no_more_than_it_did(preset, gigabytes, kernels, tmp_path):
    command = ["-m", "benchmarks.lowering", "--preset", preset, "--gpu", "H200"]
    paths = os.pathsep.join([str(ROOT), *sys.path])  # where triton may lie
    result = run_script(*command, PYTHONPATH=paths, BENCHMARK_RESULTS=str(tmp_path))
    assert result.returncode == 0, result.stderr
    step = json.loads((tmp_path / "lowering_step.json").read_text())[preset]["H200"]
    elementwise = step["all but products, attention and optimizer"]
    assert elementwise["gigabytes"] < gigabytes and step["step"]["kernels"] < kernels
