"""What a GPU would be given to do: one graph for training and evaluation, and no pauses."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.training.conftest import small_run
from train import training_step, validation_loss

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


@pytest.mark.parametrize("more", FORMS)
def test_the_whole_model_is_one_graph_compiled_once(char_data, tmp_path, more):
    run, graphs = small_run(char_data, tmp_path, *more), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    options = {"backend": backend, "dynamic": False, "fullgraph": True}  # no graph break
    run.compiled = run.ddp = torch.compile(run.model, **options)
    for _ in range(2):
        training_step(run)
        validation_loss(run, lambda: False)
    assert len(graphs) == 1


@pytest.mark.parametrize("more", [*FORMS, ["--dropout=0.1"], ["--loss_on=assistant"]])
def test_a_step_reads_nothing_from_the_device(chat_data, tmp_path, more):
    run = small_run(chat_data, tmp_path, *more)
    training_step(run)
    with NoReads():
        training_step(run)
