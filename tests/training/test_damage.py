"""Each file of a prepared folder and of a run, damaged: every use ends well or in a sentence."""

import json
import random
import shutil

import pytest
import torch

from command_line import UserError
from formats import pretrained, run_folder
from generating.load import open_checkpoint
from preparing.summary import verify
from tests.training.conftest import small_run

STEP = "run/step_00000020"
FILES = [f"data/{name}" for name in ("meta.json", "tokenizer.json", "train.bin", "val.bin")]
FILES += [f"run/{name}" for name in ("best.json", "log.jsonl", "config.json")]
FILES += [f"{STEP}/{name}" for name in (*run_folder.FILES, "state.json")]


def damages(content, dice):
    """A file that is cut, emptied or changed; of JSON, also with values of other types."""
    yield from (b"", content[: len(content) // 2], bytes(len(content)))
    at = dice.randrange(len(content))
    yield content[:at] + bytes([content[at] ^ 1 << dice.randrange(7)]) + content[at + 1 :]
    try:
        values = json.loads(content)
    except ValueError:
        return
    yield b"[]"
    for name in dice.sample(sorted(values), min(3, len(values))):
        others = {key: value for key, value in values.items() if key != name}
        yield json.dumps(others).encode()
        yield json.dumps(others | {name: dice.choice([None, "x", -1, [], {}])}).encode()


def attempt(use, *arguments):
    """What a use returns; None where it ends in a sentence for the user."""
    try:
        return use(*arguments)
    except UserError as error:
        assert len(str(error)) < 1000
        return None


def continued(folder):
    """The weights of the run as it goes on."""
    run = small_run(folder / "data", folder / "run", "--max_steps=20")
    run.saver.begin()
    run.saver.wait()
    return run.step, run.model.state_dict()


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_never_used_and_never_ends_in_a_traceback(
    bpe_data, bpe_run, tmp_path, name
):
    dice, trained = random.Random(name), {}
    for step in run_folder.steps(bpe_run):
        trained[run_folder.step_of(step)] = pretrained.load_tensors(step / "model.pt")
    for source, copy in ((bpe_data, "data"), (bpe_run, "run")):
        shutil.copytree(source, tmp_path / "whole" / copy)
    best = f", validation loss {run_folder.read_best(bpe_run)['val_loss']:.4f}"
    for content in damages((tmp_path / "whole" / name).read_bytes(), dice):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
        (folder / name).write_bytes(content)
        if name.startswith("data"):
            attempt(verify, folder / "data")
        elif loaded := attempt(open_checkpoint, folder / "run", torch.device("cpu")):
            weight = loaded.model.wte.weight
            assert torch.equal(weight, trained[loaded.source.state["step"]]["wte.weight"])
            assert loaded.summary.partition(" tokens seen")[2] in ("", best)
        if went_on := attempt(continued, folder):
            step, weights = went_on
            assert all(torch.equal(weights[key], value) for key, value in trained[step].items())
        shutil.rmtree(folder)
