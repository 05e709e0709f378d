"""generate.py: text from any checkpoint, knowing only its folder."""
import json

import pytest

import checkpoint
from tests.conftest import fails_clearly, run_script


@pytest.fixture(scope="module", params=["char", "bpe"])
def run_folder(request, tmp_path_factory, char_data, bpe_data):
    """A barely trained run of either tokenizer."""
    folder = tmp_path_factory.mktemp("runs") / request.param
    data = {"char": char_data, "bpe": bpe_data}[request.param]
    shape = ["--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=4", "--compile=False"]
    result = run_script("train.py", f"--data_dir={data}", f"--checkpoint_dir={folder}", *shape, "--max_steps=20", "--eval_interval=10", "--eval_batches=2")
    assert result.returncode == 0, result.stderr
    return folder


def generate(*arguments):
    """Run generate.py; returns the finished process."""
    return run_script("generate.py", *arguments)


def test_a_seed_gives_the_same_text_and_a_run_or_a_step_will_do(run_folder):
    arguments = ["--prompt", "The name", "--max_new_tokens", 40, "--seed", 3]
    run, step = generate("--checkpoint", run_folder, *arguments), generate("--checkpoint", checkpoint.find(run_folder), *arguments)
    assert run.returncode == 0 and run.stdout.startswith("The name") and len(run.stdout) > 20
    assert run.stdout == step.stdout != generate("--checkpoint", run_folder, *arguments[:-1], 4).stdout
    assert "tokens seen, validation loss" in run.stderr


def test_samples_and_greedy_text(run_folder):
    result = generate("--checkpoint", run_folder, "--prompt", "The", "--num_samples", 3, "--temperature", 0, "--max_new_tokens", 8)
    texts = result.stdout.rstrip("\n").split("---\n")
    assert len(texts) == 3 and len({t.rstrip("\n") for t in texts}) == 1


def test_without_a_prompt_it_starts_a_document(run_folder):
    assert generate("--checkpoint", run_folder, "--max_new_tokens", 5).returncode == 0


@pytest.mark.parametrize(("arguments", "words"), [
    (["--temperature", "-1"], ["--temperature", "0 or more"]),
    (["--top_p", "0"], ["--top_p", "above 0"]),
    (["--num_samples", "0"], ["--num_samples", "at least 1"]),
    (["--max_new_tokens", "many"], ["--max_new_tokens", "many"]),
    (["--device", "cuda:9"], ["cuda:9"]),
])  # fmt: skip
def test_a_mistake_is_a_sentence(run_folder, arguments, words):
    fails_clearly(generate("--checkpoint", run_folder, *arguments), *words)


def test_no_such_checkpoint(tmp_path):
    (tmp_path / "something.txt").write_text("x")
    fails_clearly(generate("--checkpoint", tmp_path), "something.txt")
    fails_clearly(generate("--checkpoint", tmp_path / "none"), "does not exist")
    result = run_script(checkpoint.Path(checkpoint.__file__).parent / "generate.py", cwd=tmp_path)
    fails_clearly(result, "no checkpoint under checkpoints/", "python train.py")


def test_an_unknown_character_names_itself(run_folder):
    kind = json.loads((checkpoint.find(run_folder) / "state.json").read_text())
    result = generate("--checkpoint", run_folder, "--prompt", "snow ☃", "--max_new_tokens", 3)
    if kind["model"]["vocab_size"] == 512:
        assert result.returncode == 0 and result.stdout.startswith("snow ☃")
    else:
        fails_clearly(result, "'☃'", "U+2603")


def test_a_damaged_checkpoint_is_named(run_folder, tmp_path):
    import shutil

    step = shutil.copytree(checkpoint.find(run_folder), tmp_path / "step_00000001")
    data = bytearray((step / "model.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (step / "model.pt").write_bytes(data)
    fails_clearly(generate("--checkpoint", step), "model.pt", "checksum")
