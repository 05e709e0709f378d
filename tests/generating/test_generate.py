"""generate.py: text from any checkpoint, knowing only its folder."""

import io
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch

from formats import files, pretrained, run_folder
from formats.conversation import PLAIN
from generate import explain, main
from generating import terminal
from generating.terminal import parse_args
from generating.text import Completion
from tests.conftest import ROOT, fails_clearly, ok, reciting, run_script
from tests.formats.conftest import saved, small_gpt2, small_llama, small_qwen3
from tests.generating.test_chat import ends, on_a_terminal
from tokenizer_bpe import EOT, Tokenizer
from tools import export


def generate(checkpoint, *arguments, stdin=""):
    """Run generate.py; returns the finished process."""
    return run_script("generate.py", "--checkpoint", checkpoint, *arguments, stdin=stdin)


@pytest.mark.parametrize("kind", ["char_run", "bpe_run"])
def test_a_seed_gives_the_same_texts_from_a_run_or_its_step(kind, request):
    folder = request.getfixturevalue(kind)
    arguments = ["--prompt", "The name", "--max_new_tokens", 40, "--num_samples", 4, "--seed"]
    run = ok(generate(folder, *arguments, 3))
    texts = run.stdout.split("\n---\n")
    assert len(texts) == 4
    assert all(text.startswith("The name") for text in texts)
    assert generate(run_folder.find(folder), *arguments, 3).stdout == run.stdout
    assert generate(folder, *arguments, 4).stdout != run.stdout
    assert "tokens seen, validation loss" in run.stderr


@pytest.mark.skipif(os.name == "nt", reason="Python changes the line ends that it is given")
def test_a_prompt_comes_from_standard_input_without_its_last_line_break(bpe_run):
    typed = "\ufeffThe first\nline\n\r\n"
    result = ok(generate(bpe_run, "--max_new_tokens", 5, "--json", stdin=typed))
    assert json.loads(result.stdout)["prompt"] == "The first\nline\n"
    assert "an empty prompt" not in result.stderr


def test_json_has_a_line_for_each_continuation(reciting_run, capsys):
    prompts = ["--prompt=The", "--prompt=The quick", "--num_samples=2", "--max_new_tokens=9"]
    main(["--checkpoint", str(reciting_run), *prompts, "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line.pop("tokens_per_second") > 0 for line in lines)
    step = run_folder.find(reciting_run)
    encode = Tokenizer.load(step).encode
    short, long = (
        {
            "checkpoint": step.as_posix(),
            "prompt": prompt,
            "text": text,
            "ended": ended,
            "tokens": len(text),
            "ids": encode(text).tolist(),
        }
        for prompt, text, ended in (
            ("The", REST[:9], "length"),
            ("The quick", ", brown!", "end of text"),
        )
    )
    assert lines == [short, short, long, long]


def test_the_speed_is_that_of_all_continuations_until_the_last(byte_tokenizer, capsys):
    completions = [Completion("", byte_tokenizer, 9, []) for _ in range(2)]
    for completion, ids in zip(completions, ([5, 5], [5, 5, 5]), strict=True):
        for second, next_id in enumerate(ids, 1):
            completion.add(next_id, float(second))
    terminal.note_speed(completions)
    assert capsys.readouterr().err == "[5 tokens, 1.7 tokens/s]\n"


def test_a_text_is_printed_as_it_grows_one_below_the_other(byte_tokenizer, monkeypatch):
    pipe = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, line_buffering=True, newline=""))
    first, second = (Completion(prompt, byte_tokenizer, 2, []) for prompt in ("a", "x"))
    printed = []

    def growing():
        for letters in ("by", "cz"):
            for completion, letter in zip((first, second), letters, strict=True):
                completion.add(byte_tokenizer.encode(letter)[0], 1.0)
            yield [first, second]
            printed.append(pipe.getvalue())

    terminal.stream(growing(), chat=False)
    assert printed == [b"ab", b"abc\n---\nxyz"]


def test_json_is_whole_on_a_terminal_that_lacks_its_characters(byte_tokenizer, monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), "cp1252", "backslashreplace")
    monkeypatch.setattr(sys, "stdout", screen)
    completion = Completion("Привет é 😀", byte_tokenizer, 1, [])
    completion.add(byte_tokenizer.eot_id, 1.0)
    terminal.show_json("run", [completion])
    assert json.loads(screen.buffer.getvalue())["prompt"] == "Привет é 😀"


def test_a_run_means_its_best_step_at_an_address_too(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = reciting(tmp_path / "run", "The best.", step=1)
    reciting(run, "The newest.", step=2)
    for address in (run, run.as_uri()):
        assert continuation(address, capsys)[0] == " newest."  # it was never evaluated
    run_folder.write_best(run, 1, 0.5)
    for address in (run, run.as_uri()):
        assert continuation(address, capsys)[0] == " best."
    assert "validation loss 0.5000" in summary(run, capsys)
    assert "validation loss" not in summary(run / "step_00000002", capsys)


def summary(run, capsys):
    """What is noted about a checkpoint."""
    main(["--checkpoint", str(run), "--prompt=The", "--max_new_tokens=1"])
    return capsys.readouterr().err


def continuation(run, capsys, *options):
    """(text, why it ended) of the continuation of "The"."""
    main(["--checkpoint", str(run), "--prompt", "The", "--json", *options])
    line = json.loads(capsys.readouterr().out)
    return line["text"], line["ended"]


REST = " quick, brown!"
ANY = [
    "--temperature=60",
    "--top_k=0",
    "--max_new_tokens=16",
]  # of tokens nearly as likely


@pytest.mark.parametrize(
    ("options", "text", "ended"),
    [
        ([], REST, "end of text"),
        (["--max_new_tokens=4"], " qui", "length"),
        (["--stop=brown"], " quick, ", "stop"),
        (["--stop=brown", "--stop=ui"], " q", "stop"),
        ([*ANY, "--top_k=1"], REST, "end of text"),
        ([*ANY, "--top_p=0.001"], REST, "end of text"),
        (["--temperature=0"], REST, "end of text"),
    ],
)
def test_each_option_reaches_the_text(reciting_run, capsys, options, text, ended):
    assert continuation(reciting_run, capsys, *options) == (text, ended)


def test_a_temperature_and_a_seed_reach_the_text(reciting_run, capsys):
    texts = [continuation(reciting_run, capsys, *ANY, f"--seed={seed}")[0] for seed in (0, 0, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][:5] != REST[:5]
    unseeded = {continuation(reciting_run, capsys, *ANY) for _ in range(2)}
    assert len(unseeded) == 2


def changed(run, folder, where, value):
    """A run in `folder` that is like another but for one weight of its head, and for dropout."""
    weights = pretrained.load(run)
    weights.tensors["lm_head.weight"][where] = value
    weights.state["model"]["dropout"] = 0.9  # in training alone
    run_folder.save(folder, weights.state, weights.tensors, {}, weights.tokenizer.to_json())
    return folder


def test_a_dtype_reaches_the_weights(reciting_run, tmp_path, capsys):
    # After "The ", "#" is nearly as likely as "q", and in bfloat16 as likely.
    run = changed(reciting_run, tmp_path, (3, 3), 0.999)
    greedy = ["--temperature=0", "--max_new_tokens=2"]
    assert continuation(run, capsys, *greedy, "--dtype=float32")[0] == " q"
    assert continuation(run, capsys, *greedy, "--dtype=bfloat16")[0] == " #"


def test_a_model_that_computes_nan_writes_nothing_and_a_note(reciting_run, tmp_path, capsys):
    run = changed(reciting_run, tmp_path, (78, 15), torch.nan)
    main(["--checkpoint", str(run), "--prompt=The", "--temperature=0"])
    shown = capsys.readouterr()
    assert shown.out == "The\n"
    assert "the model computed NaN; try --dtype float32" in shown.err
    assert continuation(run, capsys) == ("", "NaN")


def test_a_repetition_penalty_reaches_the_text(tmp_path, capsys):
    run = reciting(tmp_path, "The Thehehehe")
    assert continuation(run, capsys)[0] == " Thehehehe"
    text, _ = continuation(run, capsys, "--repetition_penalty=1e9")
    assert text[0] == " "
    assert text[1:5] != "Theh"


def test_the_defaults_are_those_of_the_help():
    assert vars(parse_args([])) == {
        "checkpoint": None,
        "prompts": None,
        "chat": False,
        "system": None,
        "num_samples": 1,
        "max_new_tokens": 200,
        "temperature": 0.8,
        "top_k": 200,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "stop": [],
        "dtype": "auto",
        "json": False,
        "device": "auto",
    }


def test_a_line_break_in_a_stop_text_is_written_as_in_code_or_as_it_is():
    assert parse_args([r"--stop=\nUser:", "--stop=\n"]).stop == ["\nUser:", "\n"]


def test_a_special_token_in_a_prompt_is_noted(reciting_run, capsys):
    main(["--checkpoint", str(reciting_run), "--prompt", f"The{EOT}", "--max_new_tokens=1"])
    assert f"[{EOT} in a prompt is text; an empty prompt begins" in capsys.readouterr().err


def test_a_blank_at_the_end_of_a_prompt_is_noted(bpe_run, char_run, capsys):
    for run, prompt, noted in (
        (bpe_run, "The ", True),
        (bpe_run, "The", False),
        (bpe_run, "    ", False),  # as code is indented
        (char_run, "The ", False),
    ):
        main(["--checkpoint", str(run), "--prompt", prompt, "--max_new_tokens=1"])
        assert ("[a prompt ends in a blank; leave it out" in capsys.readouterr().err) == noted


def test_a_prompt_beyond_the_context_is_cut_with_a_note(reciting_run, capsys):
    prompts = ["a" * 36, "a" * 37]
    main(["--checkpoint", str(reciting_run), *(f"--prompt={prompt}" for prompt in prompts)])
    shown = capsys.readouterr()
    assert [text[:37] for text in shown.out.split("\n---\n")][1] == prompts[1]
    assert shown.err.count("its context") == 1
    assert "the prompt has 37 tokens; the model sees the last 36, its context" in shown.err


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_a_terminal_shows_control_sequences_and_a_pipe_gets_them(bpe_run):
    title = "a\x1b]0;title\x07b\x9bc\td"
    command = ["generate.py", "--checkpoint", bpe_run, "--max_new_tokens=1", "--prompt", title]
    terminal = on_a_terminal(*command[1:-1], f"{title}\re")  # of a line break of Windows
    terminal.expect_exact("a\u241b]0;title\u2407b\ufffdc")
    terminal.expect_exact("de")
    ends(terminal)
    assert title in run_script(*command).stdout
    assert json.loads(run_script(*command, "--json").stdout)["prompt"] == title


COMMANDS = {
    "a text": "generate.py --checkpoint {run} --prompt The --max_new_tokens 300",
    "help": "prepare_data.py --help",
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


def test_an_empty_standard_input_is_an_empty_prompt(bpe_run):
    result = ok(generate(bpe_run, "--max_new_tokens", 3))
    assert "an empty prompt" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="needs a fork")
@pytest.mark.parametrize("more", [[], ["--chat"]])
def test_standard_input_that_is_no_text_is_a_sentence(bpe_run, more):
    result = generate(bpe_run, *more, "--max_new_tokens", 3, stdin="\udcff")
    fails_clearly(result, "not text in UTF-8", "0xff")


@pytest.mark.skipif(os.name == "nt", reason="needs bash")
@pytest.mark.parametrize("command", ["a text", "help"])
def test_the_reader_of_a_pipe_may_leave(bpe_run, command):
    result = ok(in_bash(command, "| true; exit ${PIPESTATUS[0]}", bpe_run))
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr


def test_memory_that_runs_out_is_a_sentence():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**50)
    assert "try fewer --num_samples" in explain(error.value)


def test_a_missing_device_or_checkpoint_is_a_sentence(bpe_run, tmp_path):
    fails_clearly(generate(bpe_run, "--prompt", "x", "--device", "cuda:9"), "cuda:9")
    fails_clearly(generate("nosuch://run", "--prompt", "x"), "nosuch://run cannot be opened")
    result = run_script(ROOT / "generate.py", "--prompt", "x", cwd=tmp_path)
    fails_clearly(result, "no checkpoint under checkpoints/", "train.py config/demo.py")


def test_a_damaged_checkpoint_is_named(bpe_run, tmp_path):
    step = shutil.copytree(run_folder.find(bpe_run), tmp_path / "step_00000001")
    other = shutil.copytree(step, tmp_path / "step_00000009")
    (step / "model.pt").write_bytes(b"")
    fails_clearly(generate(step), "model.pt is damaged", f"the run also has {other.as_posix()}")


# -- folders in Hugging Face's format --------------------------------------------------------------


@pytest.fixture(scope="module")
def reciting_folder(reciting_run, tmp_path_factory):
    """The run as tools.export writes it, whose texts end with "w", too; a copy is a test's own."""
    folder = tmp_path_factory.mktemp("hf") / "recites"
    export.main([str(reciting_run), "--out", str(folder)])
    tokenizer = Tokenizer.load(folder)
    ends = [int(tokenizer.encode(letter)[0]) for letter in ("z", "w")]
    files.write_json(folder / "generation_config.json", {"eos_token_id": ends})
    return folder


def test_a_folder_of_hugging_face_says_what_it_is_and_ends_where_it_says(
    reciting_folder, tmp_path, capsys
):
    line = f"[{reciting_folder}: 35,892 parameters, gpt2]"
    assert line in summary(reciting_folder, capsys).splitlines()
    assert continuation(reciting_folder, capsys) == (" quick, bro", "end of text")
    folder = shutil.copytree(reciting_folder, tmp_path / "hf")
    for content in ('{"eos_token_id": null}', ""):
        (folder / "generation_config.json").write_text(content)
        assert continuation(folder, capsys) == (REST, "end of text")  # <|endoftext|>


@pytest.mark.parametrize("make", [small_gpt2, small_qwen3, small_llama])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_of_transformers_continues_as_transformers_does(
    make, tied, bpe_data, tmp_path, capsys
):
    theirs = make(tied)
    folder = saved(theirs, tmp_path / "hf", eos_token_id=None)
    shutil.copy(bpe_data / "tokenizer.json", folder)
    options = ["--temperature=0", "--max_new_tokens=12", "--dtype=float32", "--json"]
    main(["--checkpoint", str(folder), "--prompt=The name", *options])
    written = json.loads(capsys.readouterr().out)["ids"]
    prompt = torch.tensor(Tokenizer.load(folder).encode("The name").tolist())[None]
    whole = theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=511)
    assert written == whole[0, prompt.size(1) :].tolist()


def test_a_folder_with_a_template_was_trained_on_conversations(reciting_folder, tmp_path, capsys):
    folder = shutil.copytree(reciting_folder, tmp_path / "hf")

    def noted():
        main(["--checkpoint", str(folder), "--chat", "--prompt=The", "--max_new_tokens=1"])
        return "not trained on conversations" in capsys.readouterr().err

    assert noted()
    files.write_json(folder / "tokenizer_config.json", {"chat_template": PLAIN.chat_template})
    assert not noted()
    files.write_json(folder / "tokenizer_config.json", {"chat_template": "[INST]..."})
    assert noted()  # it knows another form
    older = PLAIN.chat_template.replace(".capitalize()", " | capitalize")
    (folder / "chat_template.jinja").write_text(older)
    assert not noted()


def test_a_folder_without_its_own_tokenizer_is_a_sentence(reciting_folder, bpe_data, tmp_path):
    folder = shutil.copytree(reciting_folder, tmp_path / "hf")
    shutil.copy(bpe_data / "tokenizer.json", folder)
    fails_clearly(generate(folder, "--prompt", "x"), "tokenizer of another model: 512 ids")
    (folder / "tokenizer.json").unlink()
    fails_clearly(generate(folder, "--prompt", "x"), f"{folder} has no tokenizer.json", "copy")
