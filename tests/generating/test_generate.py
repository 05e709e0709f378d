"""generate.py: text from any checkpoint, knowing only its folder."""

import contextlib
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
from tests.conftest import ROOT, fails_clearly, run_script
from tokenizer_bpe import Tokenizer


def generate(checkpoint, *arguments, stdin=""):
    """Run generate.py; returns the finished process."""
    return run_script("generate.py", "--checkpoint", checkpoint, *arguments, stdin=stdin)


@pytest.mark.parametrize("kind", ["char_run", "bpe_run"])
def test_a_seed_gives_the_same_text_from_a_run_or_its_step(kind, request):
    folder = request.getfixturevalue(kind)
    arguments = ["--prompt", "The name", "--max_new_tokens", 40, "--num_samples", 4, "--seed"]
    run = generate(folder, *arguments, 3)
    step = generate(run_folder.find(folder), *arguments, 3)
    assert run.returncode == 0 and run.stdout.startswith("The name") and len(run.stdout) > 20
    assert run.stdout == step.stdout != generate(folder, *arguments, 4).stdout
    assert "tokens seen, validation loss" in run.stderr


def test_several_samples_of_greedy_text_are_the_same(bpe_run):
    greedy = ["--prompt", "The", "--num_samples", 3, "--temperature", 0, "--max_new_tokens", 8]
    texts = generate(bpe_run, *greedy).stdout.rstrip("\n").split("---\n")
    assert len(texts) == 3 and len({text.rstrip("\n") for text in texts}) == 1


@pytest.mark.parametrize(("piped", "prompt"), [("The first\nline\n", "The first\nline"), ("", "")])
def test_a_prompt_comes_from_standard_input_without_its_last_line_break(bpe_run, piped, prompt):
    result = generate(bpe_run, "--max_new_tokens", 5, "--json", stdin=piped)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["prompt"] == prompt
    begins = "an empty prompt: the model begins a document" in result.stderr
    assert begins == (not piped)


def test_json_has_a_line_for_each_continuation(bpe_run):
    prompts = ["--prompt", "The", "--prompt", "A longer prompt", "--num_samples", 2]
    result = generate(bpe_run, *prompts, "--json", "--max_new_tokens", 12)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["The"] * 2 + ["A longer prompt"] * 2
    tokenizer = Tokenizer.load(run_folder.find(bpe_run))
    for line in lines:
        assert line["ended"] in ("length", "end of text")
        assert line["tokens"] == len(line["ids"]) <= 12
        assert line["tokens_per_second"] > 0 and line["first_token_s"] > 0
        assert tokenizer.decode(line["ids"]).startswith(line["text"])


def test_a_prompt_beyond_the_context_is_cut_with_a_note(char_run):
    result = generate(char_run, "--prompt", "The name of " * 30, "--max_new_tokens", 40)
    assert result.returncode == 0 and result.stdout.startswith("The name of The")
    assert "the model sees the last 32, its context" in result.stderr


def on_a_terminal(*command):
    """The bytes that a command writes to a terminal."""
    master, slave = os.openpty()
    with subprocess.Popen([sys.executable, *map(str, command)], cwd=ROOT, stdout=slave) as process:
        os.close(slave)
        written = b""
        with contextlib.suppress(OSError):  # EIO once the process has ended
            while data := os.read(master, 4096):
                written += data
    os.close(master)
    assert process.returncode == 0
    return written


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_a_terminal_shows_control_sequences_and_a_pipe_gets_them(bpe_run):
    title = "a\x1b]0;title\x07b\x9bc\td"
    command = ["generate.py", "--checkpoint", bpe_run, "--max_new_tokens", "1"]
    written = on_a_terminal(*command, "--prompt", title)
    assert b"\x1b" not in written and b"\x07" not in written and b"\xc2\x9b" not in written
    assert "a\u241b]0;title\u2407b\ufffdc" in written.decode()
    assert "a\x1b]0;title\x07b\x9bc" in run_script(*command, "--prompt", title).stdout
    json_line = run_script(*command, "--prompt", title, "--json").stdout.splitlines()[0]
    assert json.loads(json_line)["prompt"] == title


COMMANDS = {
    "a text": "generate.py --checkpoint {run} --prompt The --max_new_tokens 300",
    "no prompt": "generate.py --checkpoint {run} --max_new_tokens 3 < /dev/null",
    "help": "generate.py --help",
    "a tool": "-m tools.evaluate {run}",
}


def in_bash(command, then, run):
    """A command of COMMANDS with what bash does with its output, which Python buffers."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    line = f"{sys.executable} {COMMANDS[command].format(run=run)} {then}"
    return subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=buffered, capture_output=True, text=True, timeout=300
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["a text", "a tool"])
def test_a_full_disk_is_a_sentence(bpe_run, command):
    result = in_bash(command, "> /dev/full", bpe_run)
    fails_clearly(result, "No space left on device", status=1)
    assert "Exception" not in result.stderr


@pytest.mark.skipif(os.name == "nt", reason="needs bash")
def test_a_closed_standard_input_is_an_empty_prompt(bpe_run):
    result = in_bash("no prompt", "<&-", bpe_run)
    assert result.returncode == 0 and "an empty prompt" in result.stderr, result.stderr


@pytest.mark.skipif(os.name == "nt", reason="needs bash")
def test_standard_input_that_is_no_text_is_a_sentence(bpe_run):
    fails_clearly(in_bash("no prompt", r"< <(printf '\xff')", bpe_run), "no text in UTF-8", "0xff")


@pytest.mark.skipif(os.name == "nt", reason="needs bash")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("reader", ["true", "head -c 3"])
def test_the_reader_of_a_pipe_may_leave(bpe_run, command, reader):
    result = in_bash(command, f"| {reader}; exit ${{PIPESTATUS[0]}}", bpe_run)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr
    assert "BrokenPipe" not in result.stderr


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
    del state["sha256"]
    (step / "state.json").write_text(json.dumps(state | {"sha256": run_folder.fingerprint(state)}))
    fails_clearly(generate(step, "--prompt", "x"), "model.pt cannot be loaded")
    assert not (tmp_path / "was_here").exists()


def test_a_loaded_model_is_the_saved_one(bpe_run):
    model, _, state = load_model(run_folder.find(bpe_run), torch.device("cpu"))
    tied = model.lm_head.weight is model.wte.weight
    assert tied == model.config.tie_weights == state["model"]["tie_weights"]
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], ["--temperature", "at least 0"]),
        (["--temperature", "nan"], ["--temperature", "at least 0"]),
        (["--top_p", "1.1"], ["--top_p", "at least 0 and at most 1"]),
        (["--start=The"], ["--start=The", "--prompt TEXT"]),
        (["--top_k", "-1"], ["--top_k", "at least 0"]),
        (["--num_samples", "0"], ["--num_samples", "at least 1"]),
        (["--max_new_tokens", "many"], ["--max_new_tokens", "many"]),
        (["--repetition_penalty", "0"], ["--repetition_penalty", "at least 0.01"]),
        (["--system", "Be brief."], ["--chat"]),
        (["--promt=x"], ["--promt=x", "--prompt TEXT"]),
        (["Once upon a time"], ["Once upon a time", "--prompt"]),
    ],
)
def test_a_mistake_is_a_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as end:
        parse_args(arguments)
    message = capsys.readouterr().err
    assert end.value.code == 2 and all(word in message for word in words)
    assert len(message.splitlines()) == 2  # the usage is one of them


def test_a_missing_device_or_checkpoint_is_a_sentence(bpe_run, tmp_path):
    fails_clearly(generate(bpe_run, "--prompt", "x", "--device", "cuda:9"), "cuda:9")
    fails_clearly(generate(tmp_path), f"no checkpoint at {tmp_path}")
    fails_clearly(generate(tmp_path / "none"), "does not exist")
    result = run_script(ROOT / "generate.py", "--prompt", "x", cwd=tmp_path)
    fails_clearly(result, "no checkpoint under checkpoints/", "python train.py")


def test_an_unknown_character_names_itself(char_run, bpe_run):
    fails_clearly(generate(char_run, "--prompt", "snow ☃"), "'☃'", "U+2603")
    result = generate(bpe_run, "--prompt", "snow ☃", "--max_new_tokens", 3)
    assert result.returncode == 0 and result.stdout.startswith("snow ☃")


def test_a_damaged_checkpoint_is_named(bpe_run, tmp_path):
    step = shutil.copytree(run_folder.find(bpe_run), tmp_path / "step_00000001")
    data = bytearray((step / "model.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (step / "model.pt").write_bytes(data)
    fails_clearly(generate(step), "model.pt is damaged")
    shutil.copytree(run_folder.find(bpe_run), tmp_path / "step_00000009")
    fails_clearly(generate(step), f"the run also has {tmp_path / 'step_00000009'}")
