"""training/recorder.py: answers to sample_prompts, and a terminal that takes nothing."""

import contextlib
import re
import subprocess

import pytest
import torch

import config as settings
from config import ConfigError
from formats import run_folder
from model import GPT, GPTConfig
from tests.conftest import prepare, run_code, train_command
from tests.training.conftest import small_run, start
from tokenizer_bpe import Tokenizer
from training.recorder import (
    NEW_TOKENS,
    Recorder,
    answer_prompts,
    samples,
)
from training.setup import without_unknown_characters


def test_the_same_weights_give_the_same_answers_and_training_goes_on():
    torch.manual_seed(1)
    model = GPT(GPTConfig(257, 32, 1, 1, 16, dropout=0.5)).train()
    prompts = ["The", "", "A"]
    first, second = (
        answer_prompts(model, Tokenizer.train([], 257), prompts, 1, contextlib.nullcontext)
        for _ in range(2)
    )
    assert first == second
    assert [answer["prompt"] for answer in first] == prompts
    assert all(0 < len(answer["text"]) <= NEW_TOKENS for answer in first)
    assert model.training


def test_only_a_prompt_that_was_typed_has_to_be_of_known_characters(tmp_path, capsys):
    tokenizer = Tokenizer.characters("абв once")
    preset = tmp_path / "mine.py"
    preset.write_text("sample_prompts = ['Once', 'once', 'аб']\n", encoding="utf-8")
    config = settings.load([str(preset)])
    assert without_unknown_characters(config, tokenizer).sample_prompts == ["once", "аб"]
    said = capsys.readouterr().out
    assert said.startswith("sample_prompts: 'Once': ")
    assert "U+004F" in said
    typed = settings.load([str(preset), "--sample_prompts=Once"])
    with pytest.raises(ConfigError, match="choose another, or '--sample_prompts=\\[\\]'"):
        without_unknown_characters(typed, tokenizer)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Bylo jednou\tjedno království. ", r"\S+\s\S+\s\S+"),
        ("从前有一座山，山里有一座庙。", "..."),
        ("Anna\nBert\n", r"\w+"),  # commands show it, and do not span lines
        ("Li\n<|endoftext|>\n", "Li"),
    ],
)
def test_the_prompt_of_a_preset_is_in_the_language_of_the_text(tmp_path, text, shown):
    (tmp_path / "text.txt").write_text(100 * text, encoding="utf-8")
    data = prepare(tmp_path / "text.txt", tmp_path / "data", "--tokenizer=char")
    (prompt,) = small_run(data, tmp_path / "run", "--sample_prompts=None").config.sample_prompts
    assert prompt in 100 * text
    assert re.fullmatch(shown, prompt)


def test_a_preset_has_no_prompt_for_conversations_or_without_validation(chat_data, tmp_path):
    (tmp_path / "text.txt").write_text("Some text. " * 100)
    data = prepare(tmp_path / "text.txt", tmp_path / "data", "--tokenizer=char", "--val_fraction=0")
    for folder in (chat_data, data):
        run = small_run(folder, tmp_path / f"run_{folder.name}", "--sample_prompts=None")
        assert run.config.sample_prompts == []


def test_samples_cannot_move_the_cursor():
    escapes = {"prompt": "a\tb", "text": "\x1b[31m\rc\n\nd\u2028e"}
    text = samples([escapes, {"prompt": "Z", "text": "\u00e9" * 200}])
    assert text.splitlines()[:4] == ["  | a   b?[31m?c", "  |", "  | d?e", "  |"]
    assert max(map(len, text.splitlines())) <= 124
    assert text.count("\u00e9") == 200


def test_samples_show_the_blanks_and_joiners_of_all_scripts():
    for words in ("\u3000\u3000第一章", "می\u200cروم", "ශ්\u200dරී", "ខ្មែរ\u200bខ្មែរ", "5\u00a0000"):
        assert samples([{"prompt": words, "text": ""}]) == f"  | {words}"


def test_records_that_the_disk_does_not_take_are_written_later(char_data, tmp_path, capsys):
    recorder = Recorder(small_run(char_data, tmp_path))
    (tmp_path / "log.jsonl").mkdir()
    for number in (1, 2):
        recorder.record({"number": number})
    (tmp_path / "log.jsonl").rmdir()
    recorder.record({"number": 3})
    assert [record["number"] for record in run_folder.read_log(tmp_path)] == [1, 2, 3]
    assert capsys.readouterr().err.count("cannot be written to") == 1
    (tmp_path / "log.jsonl").unlink()
    (tmp_path / "log.jsonl").mkdir()
    recorder.record({"number": 4})
    (tmp_path / "log.jsonl").rmdir()
    recorder.close()
    assert [record["number"] for record in run_folder.read_log(tmp_path)] == [4]


def test_a_run_whose_disk_takes_no_output_continues(char_data, tmp_path):
    code = (
        "import os, runpy, sys; full = os.open('/dev/full', os.O_WRONLY)\n"
        "os.dup2(full, 1); os.dup2(full, 2); runpy.run_path('train.py', run_name='__main__')"
    )
    command = train_command(char_data, tmp_path, "--max_steps=20")
    assert run_code(code, *command[1:]).returncode == 0
    assert run_folder.read_state(tmp_path / "step_00000020")["step"] == 20


def test_a_mistake_that_nobody_reads_has_its_exit_status(char_data, tmp_path):
    process = start(char_data, tmp_path, "--batch_size=0", stdin=subprocess.DEVNULL)
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=300) == 2
