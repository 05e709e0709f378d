"""generate.py --chat: a session on a terminal, and the prompts of a conversation."""

import os
import sys

import pexpect
import pytest

from generating.terminal import note_dropped, shown
from generating.text import Completion, Conversation
from model import GPT, GPTConfig
from tests.conftest import ROOT, ok, reciting, run_script


def on_a_terminal(*arguments):
    """generate.py on a pseudo-terminal, as a person sees it."""
    command = ["generate.py", *map(str, arguments)]
    variables = os.environ | {"TERM": "dumb", "LC_ALL": "C.UTF-8"}
    return pexpect.spawn(
        sys.executable, command, timeout=120, cwd=ROOT, env=variables, encoding="utf-8"
    )


def ends(terminal):
    """It ends by itself, without an error."""
    terminal.expect(pexpect.EOF)
    assert terminal.wait() == 0


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_a_session_goes_on_after_mistakes_and_interruptions(char_run):
    terminal = on_a_terminal("--checkpoint", char_run, "--max_new_tokens", 4000)
    terminal.expect_exact("\r\n> ")
    terminal.sendline("The name")
    terminal.expect_exact("The name\r\n")
    terminal.sendintr()  # Ctrl-C
    terminal.expect_exact("\r\n> ")
    terminal.sendline("snow ☃")
    terminal.expect_exact("U+2603")
    terminal.expect_exact("\r\n> ")
    terminal.sendline("/new")  # a command in a chat alone
    terminal.expect(r"/new\r\n/new.")
    terminal.sendintr()
    terminal.expect_exact("\r\n> ")
    terminal.sendeof()  # Ctrl-D
    ends(terminal)


def test_a_chat_stops_at_the_users_turn_remembers_and_starts_again(tmp_path):
    turns = "User: Hi\n\nAssistant: Hello.\n\nUser: You?\n\nAssistant: Fine.\n\nUser: Bye"
    run = reciting(tmp_path, f"System: Be kind.\n\n{turns}", masks={})
    ask = ["generate.py", "--checkpoint", run, "--chat", "--system=Be kind.", "--max_new_tokens=40"]
    # Replies come from positions: only after all that was said before is each of them whole.
    result = ok(run_script(*ask, stdin="Hi\nYou?\n\n/new\nHi\n"))
    assert result.stdout == "Hello.\nFine.\nHello.\n"
    assert "not trained on conversations" not in result.stderr
    assert "/new" in result.stderr
    assert "left out" not in result.stderr


def test_a_chat_takes_a_system_message_and_warns_of_a_model_without_conversations(bpe_run):
    ask = ["generate.py", "--checkpoint", bpe_run, "--prompt", "Hi", "--max_new_tokens=2"]
    replied = run_script(*ask, "--system=Be brief.", "--chat", "--json")
    assert '"prompt": "System: Be brief.\\n\\nUser: Hi\\n\\nAssistant:"' in replied.stdout
    assert "was not trained on conversations" in replied.stderr
    assert "conversations" not in run_script(*ask).stderr


def test_a_reply_is_shown_without_the_blanks_around_it(byte_tokenizer):
    reply = Completion("User: Hi\n\nAssistant:", byte_tokenizer, 9, [])
    for next_id in byte_tokenizer.encode(" Hello\n\n"):
        reply.add(next_id, 1.0)
    assert shown(reply, chat=True) == "Hello"
    assert shown(reply, chat=False).endswith(" Hello\n\n")


SAID = [
    {"role": "user", "content": " Hi. "},
    {"role": "assistant", "content": " Hello! "},
    {"role": "user", "content": " How? "},
]
LONG = [{"role": "user", "content": "long " * 50}]
LEFT_OUT = "[1 old turn left out: a chat fills at most half of the context]\n"
WHOLE = "User: Hi.\n\nAssistant: Hello!\n\nUser: How?\n\nAssistant:"


@pytest.mark.parametrize(
    ("system", "messages", "context", "prompt", "note"),
    [
        (None, SAID, 2 * len(WHOLE), WHOLE, ""),  # just half of the context
        ("Be brief.", SAID, 256, f"System: Be brief.\n\n{WHOLE}", ""),
        (None, SAID, 2 * len(WHOLE) - 2, "User: How?\n\nAssistant:", LEFT_OUT),
        ("Be brief.", SAID, 100, "System: Be brief.\n\nUser: How?\n\nAssistant:", LEFT_OUT),
        (None, LONG, 64, f"User: {'long ' * 50}".rstrip() + "\n\nAssistant:", ""),
    ],
)
def test_a_prompt_is_what_prepared_data_has_without_its_oldest_turns(
    byte_tokenizer, system, messages, context, prompt, note, capsys
):
    model = GPT(GPTConfig(258, context, 1, 1, 8))
    conversation = Conversation(model, byte_tokenizer, system)
    conversation.messages = messages[:-1]
    assert byte_tokenizer.decode(conversation.prompt(messages[-1]["content"])) == prompt
    note_dropped(conversation)
    assert capsys.readouterr().err == note


def test_a_chat_forgets_the_reasoning_of_earlier_replies(byte_tokenizer):
    conversation = Conversation(GPT(GPTConfig(258, 256, 1, 1, 8)), byte_tokenizer)
    conversation.remember("Hi.", "<think>\nA greeting.\n</think>\n\nHello!")
    assert byte_tokenizer.decode(conversation.prompt("How?")) == WHOLE
