"""The form of a conversation as text, shared by data, generation and exports.

    User: Hello?

    Assistant: Good day.

Every turn ends with a blank line. If the tokenizer has ChatML's markers, one id each, the form is:

    <|im_start|>user
    Hello?<|im_end|>
    <|im_start|>assistant
    Good day.<|im_end|>

A marker spelled out in a message is encoded as ordinary text. Knows neither where messages come
from nor which tokens count in the loss.
"""

import dataclasses
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizer_bpe import EOT, Tokenizer

START, END = "<|im_start|>", "<|im_end|>"  # ChatML's markers
# In a template of others: what it puts before a conversation without a system message.
DEFAULT_SYSTEM = re.compile(r"<\|im_start\|>system(?:\n|\\n)([^'\"{}]+)<\|im_end\|>")
ASSISTANT = "assistant"
# {name of a role in data sets, in lower case: our speaker}.
SPEAKERS = dict.fromkeys(("system", "developer"), "system")
SPEAKERS |= dict.fromkeys(("user", "human", "prompter", "customer"), "user")
SPEAKERS |= dict.fromkeys((ASSISTANT, "gpt", "chatgpt", "bot", "chatbot", "model", "ai"), ASSISTANT)
SPEAKERS |= dict.fromkeys(("tool", "function"), "tool")  # output of a program
CONTENT = ("content", "value", "text")  # fields that hold a message's text
# Fields of a message that is more than its text.
BESIDE = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


class ConversationError(ValueError):
    """Messages that do not form a conversation; the message is for the user."""


class Turn(NamedTuple):
    """One message. speaker: system, user, assistant or tool."""

    speaker: str
    message: str


@dataclass(frozen=True)
class Form:
    """How the models of a tokenizer see conversations.

    turn: the parts of one turn, where {name} or {Name} is the speaker. The part after the message
    ends a reply; in PLAIN, that is the first part of the next turn. opening: how many parts come
    before the message; a prompt ends with these, for the assistant. stop: texts that end a reply,
    where neither end-of-text nor a marker does. chat_template, ollama_template: the same form for
    exported models, in Jinja (transformers, GGUF) and in Go's text/template. markers: {part: id} of
    the parts that are not text.
    """

    turn: tuple[str, ...]
    opening: int
    stop: tuple[str, ...]
    chat_template: str
    ollama_template: str
    markers: dict[str, int] = dataclasses.field(default_factory=dict)

    def parts(self, turns: list[Turn]) -> list[str | int]:
        """A conversation as the parts of each turn: texts, and ids of markers."""
        return [part for turn in turns for part in self._parts_of(turn)]

    def runs(self, turns: list[Turn], reply: bool = False) -> list[str | int]:
        """A conversation as texts, each to be encoded in one call, and ids of markers.

        reply: also append the opening of an assistant's turn.
        """
        parts = self.parts(turns)
        if reply:
            parts += self._parts_of(Turn(ASSISTANT, ""))[: self.opening]
        runs = []
        for kind, group in itertools.groupby(parts, type):
            found = list(group)
            runs += ["".join(found)] if kind is str else found
        return runs

    def prompt(self, turns: list[Turn], tokenizer: Tokenizer) -> list[int]:
        """The token ids of the prompt for the assistant's next reply. Raises TokenizerError."""
        ids = []
        for run in self.runs(turns, reply=True):
            ids += [run] if isinstance(run, int) else tokenizer.encode(run).tolist()
        return ids

    def _parts_of(self, turn):
        values = {"name": turn.speaker, "Name": turn.speaker.capitalize(), "message": turn.message}
        markers = self.markers
        return [markers[part] if part in markers else part.format(**values) for part in self.turn]


PLAIN = Form(
    turn=("{Name}:", " {message}\n\n"),
    opening=1,
    stop=("\n\nUser:",),
    chat_template=(  # a method, as minja lacks the filter: OpenVINO GenAI and onnxruntime-genai
        "{% for message in messages %}"
        "{{ message['role'].capitalize() }}: {{ message['content'] | trim }}\n\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    ollama_template=(
        '{{ range .Messages }}{{ if eq .Role "user" }}User: {{ .Content }}\n\n'
        '{{ else if eq .Role "assistant" }}Assistant:'
        # Ollama returns and gets back a reply as it was generated: with the space before it and,
        # where the text ended, the blank line after it. Go's templates cannot trim.
        '{{ if ne (printf "%.1s" .Content) " " }} {{ end }}{{ .Content }}'
        '{{ if ne (slice (printf "  %s" .Content) (len .Content)) "\\n\\n" }}\n\n{{ end }}'
        '{{ else if eq .Role "system" }}System: {{ .Content }}\n\n'
        '{{ else if eq .Role "tool" }}Tool: {{ .Content }}\n\n{{ end }}{{ end }}Assistant:'
    ),
)
CHATML = Form(
    turn=(START, "{name}\n", "{message}", END, "\n"),
    opening=2,
    stop=(),
    chat_template=(
        "{% for message in messages %}"
        f"{START}{{{{ message['role'] }}}}\n{{{{ message['content'] | trim }}}}{END}\n"
        "{% endfor %}"
        f"{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
    ),
    ollama_template=(
        f"{{{{ range .Messages }}}}{START}{{{{ .Role }}}}\n{{{{ .Content }}}}{END}\n"
        f"{{{{ end }}}}{START}assistant\n"
    ),
)


def form_of(tokenizer: Tokenizer) -> Form:
    """The form for a tokenizer: ChatML if it has the markers, else PLAIN."""
    markers = {text: tokenizer.specials.get(text) for text in (START, END)}
    # If a marker also ended documents, a conversation of several turns would be several documents.
    if not {None, tokenizer.eot_id}.isdisjoint(markers.values()):
        return PLAIN
    return dataclasses.replace(CHATML, markers=markers)


def turns_of(messages: Sequence[dict]) -> list[Turn]:
    """The turns of a conversation, with their messages stripped.

    messages: [{"role", "content"}], or [{"from", "value"}] as in ShareGPT. Raises
    ConversationError.
    """
    turns = []
    for message in messages:
        try:
            role = message["role"] if "role" in message else message["from"]
            content = next((message[name] for name in CONTENT if name in message), None)
        except (TypeError, KeyError):
            raise ConversationError(
                'is not a list of {"role": ..., "content": ...}; docs/other-programs.md has'
                " commands that make text of chats and of other lists"
            ) from None
        name = str(role).strip().lower()
        if name not in SPEAKERS:
            known = ", ".join(SPEAKERS)
            raise ConversationError(
                f"has the role {role!r:.40}, which is not one of {known}; rename it, or make text"
                " of the chat with a command of docs/other-programs.md"
            )
        if beside := next(filter(message.get, BESIDE), None):
            raise ConversationError(
                f"has a message with {beside}, which is not in its text; write it into the content,"
                f" a thought as <think>...</think>, and remove {beside}"
            )
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):
            texts = [part.get("text") for part in content]  # OpenAI's format
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(content, str):
            raise ConversationError(f"has a message of the role {role!r} without a text")
        turns.append(Turn(SPEAKERS[name], content.strip().removesuffix(EOT).rstrip()))
    return turns
