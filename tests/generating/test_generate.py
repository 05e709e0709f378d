"""generate.py: text from any checkpoint, knowing only its folder."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from formats import files, run_folder
from generating.arguments import parse_args
from generating.load import load_model
from generating.terminal import side_by_side
from tests.conftest import ROOT, fails_clearly, run_script
from tokenizer_bpe import Tokenizer


def generate(*arguments, stdin=""):
    """Run generate.py; returns the finished process."""
    return run_script("generate.py", *arguments, stdin=stdin)


@pytest.mark.parametrize("kind", ["char_run", "bpe_run"])
def test_a_seed_gives_the_same_text_and_a_run_or_a_step_will_do(kind, request):
    folder = request.getfixturevalue(kind)
    arguments = ["--prompt", "The name", "--max_new_tokens", 40, "--num_samples", 4, "--seed", 3]
    run, step = (
        generate("--checkpoint", folder, *arguments),
        generate("--checkpoint", run_folder.find(folder), *arguments),
    )
    assert run.returncode == 0 and run.stdout.startswith("The name") and len(run.stdout) > 20
    assert run.stdout == step.stdout != generate("--checkpoint", folder, *arguments[:-1], 4).stdout
    assert "tokens seen, validation loss" in run.stderr


def test_samples_and_greedy_text(bpe_run):
    result = generate(
        "--checkpoint",
        bpe_run,
        "--prompt",
        "The",
        "--num_samples",
        3,
        "--temperature",
        0,
        "--max_new_tokens",
        8,
    )
    texts = result.stdout.rstrip("\n").split("---\n")
    assert len(texts) == 3 and len({t.rstrip("\n") for t in texts}) == 1


def test_an_empty_prompt_starts_a_document_and_says_so(bpe_run):
    result = generate("--checkpoint", bpe_run, "--max_new_tokens", 5)
    assert (
        result.returncode == 0 and "an empty prompt: the model begins a document" in result.stderr
    )


def test_prompts_come_from_files_and_standard_input(bpe_run, tmp_path):
    (tmp_path / "prompt.txt").write_text("The first\nline\n", newline="\n")
    arguments = ["--checkpoint", bpe_run, "--max_new_tokens", 5, "--seed", 1]
    file = generate(*arguments, "--prompt_file", tmp_path / "prompt.txt")
    piped, dash = (
        generate(*arguments, *more, stdin="The first\nline\n")
        for more in ([], ["--prompt_file", "-"])
    )
    assert file.stdout.startswith("The first\nline") and file.stdout == piped.stdout == dash.stdout
    (tmp_path / "prompt.txt").write_bytes(b"abc\xff")
    fails_clearly(
        generate(*arguments, "--prompt_file", tmp_path / "prompt.txt"),
        "prompt.txt",
        "not text in UTF-8",
        "byte 3 is 0xff",
    )


def test_json_has_a_line_for_each_continuation(bpe_run):
    result = generate(
        "--checkpoint",
        bpe_run,
        "--prompt",
        "The",
        "--prompt",
        "A longer prompt",
        "--num_samples",
        2,
        "--json",
        "--max_new_tokens",
        12,
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == [
        "The",
        "The",
        "A longer prompt",
        "A longer prompt",
    ]
    tokenizer = Tokenizer.load(run_folder.find(bpe_run))
    for line in lines:
        assert (
            line["ended"] in ("length", "end of text")
            and line["tokens"] == len(line["ids"]) <= 12
            and line["tokens_per_second"] > 0
            and line["first_token_s"] > 0
        )
        assert tokenizer.decode(line["ids"]).startswith(line["text"])


def test_checkpoints_answer_side_by_side(bpe_run):
    steps = [bpe_run / f"step_{n:08d}" for n in (10, 20)]
    result = generate(
        "--checkpoint",
        steps[0],
        "--checkpoint",
        steps[1],
        "--prompt",
        "The",
        "--temperature",
        0,
        "--max_new_tokens",
        20,
    )
    titles = result.stdout.splitlines()
    rule = next(n for n, line in enumerate(titles) if set(line) == set("-| "))
    assert "step_00000010" in "".join(
        line.split("|")[0].strip() for line in titles[:rule]
    ) and "step_00000020" in "".join(line.split("|")[1].strip() for line in titles[:rule])
    assert [part.strip()[:3] for part in titles[rule + 1].split("|")[:2]] == ["The", "The"]


def test_columns_have_one_width_and_lose_nothing():
    lines = side_by_side(["a", "b"], ["one\n\n\ttwo " + "word " * 40, "three"]).splitlines()
    assert (
        lines[0].startswith("a")
        and lines[2].startswith("one")
        and lines[2].endswith("| three")
        and lines[4].startswith("    two")
    )
    assert "".join(line.split("|")[0] for line in lines).count("word") == 40


def test_a_prompt_beyond_the_context_is_cut_and_said(char_run):
    result = generate(
        "--checkpoint", char_run, "--prompt", "The name of " * 30, "--max_new_tokens", 40
    )
    assert (
        result.returncode == 0
        and "the model sees the last 32 of them" in result.stderr
        and result.stdout.startswith("The name of The")
    )


def test_the_reader_of_a_pipe_may_leave(bpe_run):
    command = (
        f"{sys.executable} generate.py --checkpoint {bpe_run} --prompt The --max_new_tokens 3000 |"
        " head -c 30"
    )
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
    )
    assert (
        result.stdout.startswith("The")
        and "Traceback" not in result.stderr
        and "BrokenPipe" not in result.stderr
    )


def test_a_pickle_that_would_run_code_is_refused(bpe_run, tmp_path):
    step = shutil.copytree(run_folder.find(bpe_run), tmp_path / "step_00000001")

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was_here"),)

    torch.save({"wte.weight": Evil()}, step / "model.pt")
    state = json.loads((step / "state.json").read_text())
    state["files"]["model.pt"] = {
        "bytes": (step / "model.pt").stat().st_size,
        "sha256": files.sha256(step / "model.pt"),
    }
    (step / "state.json").write_text(json.dumps(state | {"sha256": run_folder.fingerprint(state)}))
    fails_clearly(generate("--checkpoint", step, "--prompt", "x"), "model.pt cannot be loaded")
    assert not (tmp_path / "was_here").exists()


def test_a_loaded_model_is_the_saved_one(bpe_run):
    model, _, state = load_model(run_folder.find(bpe_run), torch.device("cpu"))
    assert (
        (model.lm_head.weight is model.wte.weight)
        == model.config.tie_weights
        == state["model"]["tie_weights"]
    )
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], ["--temperature", "0 or more"]),
        (["--top_p", "0"], ["--top_p", "above 0"]),
        (["--num_samples", "0"], ["--num_samples", "at least 1"]),
        (["--max_new_tokens", "many"], ["--max_new_tokens", "many"]),
        (["--repetition_penalty", "0"], ["--repetition_penalty", "above 0"]),
        (["--stop", ""], ["--stop", "not empty"]),
        (["--prompt_file", "nowhere.txt"], ["nowhere.txt", "No such file"]),
    ],
)
def test_a_mistake_is_a_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as end:
        parse_args(arguments)
    message = capsys.readouterr().err
    assert end.value.code == 2 and all(word in message for word in words)


def test_no_such_device(bpe_run):
    fails_clearly(
        generate("--checkpoint", bpe_run, "--prompt", "x", "--device", "cuda:9"), "cuda:9"
    )


def test_no_such_checkpoint(tmp_path):
    (tmp_path / "something.txt").write_text("x")
    fails_clearly(generate("--checkpoint", tmp_path), "something.txt")
    fails_clearly(generate("--checkpoint", tmp_path / "none"), "does not exist")
    result = run_script(ROOT / "generate.py", "--prompt", "x", cwd=tmp_path)
    fails_clearly(result, "no checkpoint under checkpoints/", "python train.py")


def test_an_unknown_character_names_itself(char_run, bpe_run):
    fails_clearly(generate("--checkpoint", char_run, "--prompt", "snow ☃"), "'☃'", "U+2603")
    result = generate("--checkpoint", bpe_run, "--prompt", "snow ☃", "--max_new_tokens", 3)
    assert result.returncode == 0 and result.stdout.startswith("snow ☃")


def test_a_damaged_checkpoint_is_named(bpe_run, tmp_path):
    step = shutil.copytree(run_folder.find(bpe_run), tmp_path / "step_00000001")
    data = bytearray((step / "model.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (step / "model.pt").write_bytes(data)
    fails_clearly(generate("--checkpoint", step), "model.pt", "checksum")
