"""generating/chat.py: a session on a terminal, and the prompts of a conversation."""

import os
import select
import subprocess
import sys
import time

import pytest

from generating.chat import reply_prompt
from generating.load import LoadedModel
from generating.terminal import shown
from generating.text import Completion
from model import GPT, GPTConfig
from tests.conftest import ROOT, run_script


class Terminal:
    """generate.py on a pseudo-terminal, as a person sees it."""

    def __init__(self, *arguments):
        import fcntl
        import pty
        import termios

        self.handle, child = pty.openpty()
        command = [sys.executable, "generate.py", *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=child,
            stdout=child,
            stderr=child,
            env=os.environ | {"TERM": "dumb", "LC_ALL": "C.UTF-8"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
        )
        os.close(child)
        self.unread = ""

    def until(self, words):
        """Read until `words` came; returns what came before them."""
        end = time.monotonic() + 120
        while words not in self.unread:
            left = max(0, end - time.monotonic())
            assert select.select([self.handle], [], [], left)[0], self.unread
            self.unread += os.read(self.handle, 1024).decode(errors="replace")
        got, self.unread = self.unread.split(words, 1)
        return got

    def type(self, text):
        """Keys pressed."""
        os.write(self.handle, text.encode())

    def ends(self):
        """Ctrl-D ends it."""
        self.type("\x04")
        assert self.process.wait(60) == 0


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
    terminal.ends()


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_a_chat_starts_again_when_asked(bpe_run):
    terminal = Terminal("--checkpoint", bpe_run, "--chat", "--max_new_tokens", 10, "--seed", 1)
    terminal.until("\r\n> ")
    replies = []
    for line in ("The name", "/new", "The name"):
        terminal.type(line + "\n")
        replies.append(terminal.until("\r\n> ").replace(line, "", 1).split("\r\n[")[0])
    assert replies[0].strip("\r\n") == replies[2].strip("\r\n")
    terminal.ends()


def test_a_chat_takes_a_system_message_and_warns_of_a_model_without_conversations(bpe_run):
    ask = ["generate.py", "--checkpoint", bpe_run, "--prompt", "Hi", "--max_new_tokens=2"]
    replied = run_script(*ask, "--system=Be brief.", "--chat", "--json")
    assert '"prompt": "System: Be brief.\\n\\nUser: Hi\\n\\nAssistant:"' in replied.stdout
    assert "was not trained on conversations" in replied.stderr
    assert "conversations" not in run_script(*ask).stderr


def test_each_piped_line_of_a_chat_is_answered(bpe_run):
    ask = ["generate.py", "--checkpoint", bpe_run, "--chat", "--max_new_tokens=2"]
    result = run_script(*ask, stdin="Hi\nWho are you?\n")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("2 tokens, ") == 2


def test_a_reply_is_shown_without_the_blanks_around_it(byte_tokenizer):
    reply = Completion("User: Hi\n\nAssistant:", byte_tokenizer, 9, [])
    for next_id in byte_tokenizer.encode(" Hello\n\n"):
        reply.add(next_id, 1.0)
    assert shown(reply, chat=True) == "Hello"
    assert shown(reply, chat=False).endswith(" Hello\n\n")


SYSTEM = {"role": "system", "content": "Be brief."}
SAID = [
    {"role": "user", "content": " Hi. "},
    {"role": "assistant", "content": " Hello! "},
    {"role": "user", "content": " How? "},
]
LONG = [{"role": "user", "content": "long " * 50}]
WHOLE = "User: Hi.\n\nAssistant: Hello!\n\nUser: How?\n\nAssistant:"


@pytest.mark.parametrize(
    ("messages", "context", "prompt"),
    [
        (SAID, 256, WHOLE),
        ([SYSTEM, *SAID], 256, f"System: Be brief.\n\n{WHOLE}"),
        (SAID, 64, "User: How?\n\nAssistant:"),
        ([SYSTEM, *SAID], 100, "System: Be brief.\n\nUser: How?\n\nAssistant:"),
        (LONG, 64, f"User: {'long ' * 50}".rstrip() + "\n\nAssistant:"),
    ],
)
def test_a_prompt_is_what_prepared_data_has_without_its_oldest_turns(
    byte_tokenizer, messages, context, prompt
):
    loaded = LoadedModel("name", GPT(GPTConfig(258, context, 1, 1, 8)), byte_tokenizer)
    assert reply_prompt(messages, loaded) == prompt
