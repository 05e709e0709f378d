"""generate.py: text from any checkpoint, knowing only its folder."""

import json
import os
import select
import shutil
import subprocess
import sys
import time

import pytest
import torch

from formats import files, run_folder
from generate import parse_args, side_by_side
from generating.chat import conversation
from generating.load import load_model
from generating.text import complete
from model import GPT, GPTConfig
from tests.conftest import ROOT, fails_clearly, run_script
from tokenizer_bpe import Tokenizer


def train(data, folder):
    """A barely trained run."""
    shape = [
        "--n_layer=1",
        "--n_head=2",
        "--n_embd=32",
        "--block_size=32",
        "--batch_size=4",
        "--compile=False",
    ]
    result = run_script(
        "train.py",
        f"--data_dir={data}",
        f"--checkpoint_dir={folder}",
        *shape,
        "--max_steps=20",
        "--eval_interval=10",
        "--eval_batches=2",
    )
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def char_run(tmp_path_factory, char_data):
    """One at character level."""
    return train(char_data, tmp_path_factory.mktemp("runs") / "char")


@pytest.fixture(scope="module")
def bpe_run(tmp_path_factory, bpe_data):
    """One with a byte-level BPE."""
    return train(bpe_data, tmp_path_factory.mktemp("runs") / "bpe")


def generate(*arguments, stdin=""):
    """Run generate.py; returns the finished process."""
    return subprocess.run(
        [sys.executable, "generate.py", *map(str, arguments)],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )


@pytest.mark.parametrize("kind", ["char_run", "bpe_run"])
def test_a_seed_gives_the_same_text_and_a_run_or_a_step_will_do(kind, request):
    run_folder = request.getfixturevalue(kind)
    arguments = ["--prompt", "The name", "--max_new_tokens", 40, "--num_samples", 4, "--seed", 3]
    run, step = (
        generate("--checkpoint", run_folder, *arguments),
        generate("--checkpoint", run_folder.find(run_folder), *arguments),
    )
    assert run.returncode == 0 and run.stdout.startswith("The name") and len(run.stdout) > 20
    assert (
        run.stdout == step.stdout != generate("--checkpoint", run_folder, *arguments[:-1], 4).stdout
    )
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


class Terminal:
    """generate.py on a pseudo-terminal, as a person sees it."""

    def __init__(self, *arguments):
        import fcntl
        import pty
        import termios

        self.handle, child = pty.openpty()
        command = [sys.executable, "generate.py", *map(str, arguments)]
        own = {
            "start_new_session": True,
            "preexec_fn": lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        }  # so that Ctrl-C reaches it
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=child,
            stdout=child,
            stderr=child,
            env=os.environ | {"TERM": "dumb", "LC_ALL": "C.UTF-8"},
            **own,
        )
        os.close(child)
        self.unread = ""

    def until(self, words, timeout=30):
        """Read until `words` came; returns what came before them."""
        end = time.monotonic() + timeout
        while words not in self.unread:
            assert select.select([self.handle], [], [], max(0, end - time.monotonic()))[0], (
                self.unread
            )
            self.unread += os.read(self.handle, 1024).decode(errors="replace")
        got, self.unread = self.unread.split(words, 1)
        return got

    def type(self, text):
        """Keys pressed."""
        os.write(self.handle, text.encode())


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_a_session_goes_on_after_mistakes_and_interruptions(char_run):
    terminal = Terminal("--checkpoint", char_run, "--max_new_tokens", 4000)
    terminal.until("\r\n> ")
    terminal.type("The name\n")
    terminal.until("The name\r\n")
    terminal.type("\x03")
    terminal.until("\r\n> ")
    terminal.type("snow ☃\n")
    terminal.until("U+2603")
    terminal.until("\r\n> ")
    terminal.type("\x04")
    assert terminal.process.wait(10) == 0


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_a_chat_begins_anew_when_asked(bpe_run):
    terminal = Terminal("--checkpoint", bpe_run, "--chat", "--max_new_tokens", 10, "--seed", 1)
    terminal.until("\r\n> ")
    replies = []
    for line in ("The name", "/new", "The name"):
        terminal.type(line + "\n")
        replies.append(terminal.until("\r\n> ").replace(line, "", 1).split("\r\n[")[0])
    assert replies[0].strip("\r\n") == replies[2].strip("\r\n")
    terminal.type("\x04")
    assert terminal.process.wait(10) == 0


def test_a_conversation_is_written_as_prepared_data_has_it_and_forgets_its_beginning(
    byte_tokenizer,
):
    said = [
        {"role": role, "content": f" {content} "}
        for role, content in (("user", "Hi."), ("assistant", "Hello!"), ("user", "How?"))
    ]
    model = GPT(GPTConfig(258, 256, 1, 1, 8))
    assert (
        conversation(said, model, byte_tokenizer)
        == "User: Hi.\n\nAssistant: Hello!\n\nUser: How?\n\nAssistant:"
    )
    model = GPT(GPTConfig(258, 64, 1, 1, 8))
    assert conversation(said, model, byte_tokenizer) == "User: How?\n\nAssistant:"
    assert (
        len(conversation([said[0] | {"content": "long " * 50}], model, byte_tokenizer)) > 250
        and len(said) == 3
    )


def says(tokenizer, ids):
    """A model that continues end-of-text with `ids`, greedily: each position's vector is the
    embedding of the token that it predicts.
    """
    model = GPT(
        GPTConfig(
            tokenizer.vocab_size,
            block_size=len(ids) + 2,
            n_layer=1,
            n_head=1,
            n_embd=tokenizer.vocab_size,
            tie_weights=False,
        )
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.ln_f.weight.fill_(1)
        model.lm_head.weight.copy_(torch.eye(tokenizer.vocab_size))
        for position, i in enumerate(ids):
            model.wpe.weight[position, i] = 1
    return model


def pieces(tokenizer, text, **settings):
    """The text as it grew while a model said it, token by token."""
    ids = tokenizer.encode(text).tolist()
    seen = []
    for rows in complete(
        says(tokenizer, [*ids, tokenizer.eot_id]),
        tokenizer,
        [""],
        len(ids) + 5,
        temperature=0,
        **settings,
    ):
        seen.append(rows[0].text)
    return seen, rows[0]


@pytest.fixture(scope="module")
def byte_tokenizer():
    """A BPE that knows little more than bytes."""
    return Tokenizer.train(["the the the"], 258)


def test_characters_come_whole(byte_tokenizer):
    text = "Grüße, 世界 🙂!"
    seen, row = pieces(byte_tokenizer, text)
    assert row.text == text and row.ended == "end of text" and len(seen) > len(text)
    assert all(text.startswith(part) and "\ufffd" not in part for part in seen)
    ids = byte_tokenizer.encode("ab🙂").tolist()
    *_, rows = complete(
        says(byte_tokenizer, ids), byte_tokenizer, [""], len(ids) - 1, temperature=0
    )
    assert rows[0].text == "ab" and rows[0].ended == "length"  # the cut character is left out


def test_stop_texts_are_never_shown_not_even_in_part(byte_tokenizer):
    text = "one\n\nUse\n\nUser: two"
    seen, row = pieces(byte_tokenizer, text, stop=["\n\nUser:", "zzz"])
    assert row.text == "one\n\nUse" and row.ended == "stop"
    assert all(row.text.startswith(part) for part in seen)
    seen, row = pieces(byte_tokenizer, "one\n\nUse", stop=["\n\nUser:"])
    assert (
        row.text == "one\n\nUse" and row.ended == "end of text"
    )  # what was held back comes after all


def test_padded_ids_are_never_written(byte_tokenizer):
    torch.manual_seed(0)
    model = GPT(GPTConfig(320, 64, 1, 2, 32)).eval()
    model.wte.weight.data[258:] *= 50  # the likeliest by far
    for rows in complete(model, byte_tokenizer, ["the"] * 4, 40, seed=1, temperature=2.0):
        assert all(i < 258 for row in rows for i in row.ids)


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
