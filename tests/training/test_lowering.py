"""What a GPU would be given to do: one graph for training and evaluation, and which kernels."""

import json
import os
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import config
from benchmarks.fake_device import missing
from tests.conftest import ROOT, SMALL, run_script
from training.setup import build

FORMS = [
    pytest.param([], id="gpt2"),
    pytest.param(["--arch=qwen3", "--tie_weights=False", "--optimizer=muon"], id="qwen3"),
    pytest.param(["--activation_checkpointing=True"], id="low memory"),
]


class NoReads(TorchDispatchMode):
    """An operation whose result Python reads, for which it waits for a GPU, is an error."""

    reads = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket.__name__ not in self.reads
        return function(*args, **(kwargs or {}))


def make_trainer(data, folder, more):
    c = config.load([f"--data_dir={data}", f"--checkpoint_dir={folder}", *SMALL, *more])
    return build(c).trainer


@pytest.mark.parametrize("more", FORMS)
def test_the_whole_model_is_one_graph_compiled_once(char_data, tmp_path, more):
    trainer, graphs = make_trainer(char_data, tmp_path, more), []

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


@pytest.mark.parametrize("more", FORMS)
def test_a_step_reads_nothing_from_the_device(char_data, tmp_path, more):
    trainer = make_trainer(char_data, tmp_path, more)
    trainer.step()
    with NoReads():
        trainer.step()


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize(
    ("preset", "gigabytes"),
    [("config/gpt2_small.py", 41.5), ("config/gpt2_small_modern.py", 45.0)],
)
def test_kernels_for_a_gpu_compile_and_move_no_more_than_they_did(preset, gigabytes, tmp_path):
    command = ["-m", "benchmarks.lowering", "--preset", preset, "--gpu", "H200"]
    paths = os.pathsep.join([str(ROOT), *sys.path])  # where triton may be
    result = run_script(*command, PYTHONPATH=paths, BENCHMARK_RESULTS=str(tmp_path))
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "lowering_step_cpu.json").read_text())[preset]["H200"]
    assert found["elementwise"]["gigabytes"] < gigabytes
    assert found["compiled"] > 20
    assert found["faults"] == []
