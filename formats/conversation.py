"""How a conversation reads: the form that data, generation and exports share.

    User: Hello?

    Assistant: Good day.

Every turn ends with a blank line. Where a tokenizer has ChatML's markers, each of them one id:

    <|im_start|>user
    Hello?<|im_end|>
    <|im_start|>assistant
    Good day.<|im_end|>

A message that spells a marker is text: it gets the ids of its letters. Knows neither where messages
come from nor which tokens a loss counts.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizer_bpe import EOT, Tokenizer

START, END = "<|im_start|>", "<|im_end|>"  # ChatML's markers
ASSISTANT = "assistant"
# The speakers by the names that data sets have for them, in lower case.
SPEAKERS = dict.fromkeys(("system", "developer"), "system")
SPEAKERS |= dict.fromkeys(("user", "human", "prompter", "customer"), "user")
SPEAKERS |= dict.fromkeys((ASSISTANT, "gpt", "chatgpt", "bot", "chatbot", "model", "ai"), ASSISTANT)
SPEAKERS |= dict.fromkeys(("tool", "function"), "tool")  # what a program answers
CONTENT = ("content", "value", "text")  # the names of a message's text
CALLS = ("tool_calls", "function_call")  # of a message that is more than text


class ConversationError(ValueError):
    """Messages that are not a conversation, in words for the user."""


class Turn(NamedTuple):
    """What one speaker says. speaker: system, user, assistant or tool."""

    speaker: str
    message: str


@dataclass(frozen=True)
class Form:
    """How turns read for the models of a tokenizer.

    turn: the parts of one; {name} and {Name} are the speaker, {message} is what it says. The part
    after the message ends a reply, in PLAIN the first of the next turn. opening: how many parts
    come before the message; a prompt ends with those of the assistant. stop: texts that end a
    reply, if neither end-of-text nor a marker does. chat_template, ollama_template: the form in the
    languages of those who run exported models: Jinja (transformers, GGUF) and Go's text/template.
    markers: the ids of the parts that are not text.
    """

    turn: tuple[str, ...]
    opening: int
    stop: tuple[str, ...]
    chat_template: str
    ollama_template: str
    markers: dict[str, int] = dataclasses.field(default_factory=dict)

    def parts(self, turns: list[Turn]) -> list[str | int]:
        """A conversation in parts, those of `turn` for each turn: texts, and ids of markers."""
        return [part for turn in turns for part in self._parts_of(turn)]

    def runs(self, turns: list[Turn], reply: bool = False) -> list[str | int]:
        """A conversation as texts, each of which is encoded as one, and ids of markers.

        reply: with what begins the assistant's next turn.
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
        """The token ids that the assistant's next reply continues. Raises TokenizerError."""
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
    chat_template=(
        "{% for message in messages %}"
        "{{ message['role'] | capitalize }}: {{ message['content'] | trim }}\n\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    ollama_template=(
        '{{ range .Messages }}{{ if eq .Role "user" }}User: {{ .Content }}\n\n'
        '{{ else if eq .Role "assistant" }}Assistant: {{ .Content }}\n\n'
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
    """The form of conversations for a tokenizer: ChatML with its ids if it has the markers."""
    markers = {text: tokenizer.specials.get(text) for text in (START, END)}
    # Where a marker ends documents, too, one with several turns would be several.
    if not {None, tokenizer.eot_id}.isdisjoint(markers.values()):
        return PLAIN
    return dataclasses.replace(CHATML, markers=markers)


def turns_of(messages: Sequence[dict]) -> list[Turn]:
    """The turns of a conversation, their messages without the blanks around them.

    messages: [{"role", "content"}], or as ShareGPT has them [{"from", "value"}]. Raises
    ConversationError.
    """
    turns = []
    for message in messages:
        try:
            role = message["role"] if "role" in message else message["from"]
            content = next((message[name] for name in CONTENT if name in message), None)
        except (TypeError, KeyError):
            raise ConversationError('is not a list of {"role": ..., "content": ...}') from None
        name = str(role).strip().lower()
        if name not in SPEAKERS:
            known = ", ".join(SPEAKERS)
            raise ConversationError(
                f"has the role {role!r:.40}, which is not one of {known}; rename it"
            )
        if calls := next(filter(message.get, CALLS), None):
            raise ConversationError(
                f"has a message with {calls}, which is not text; write the call into its content"
                f" and remove {calls}"
            )
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):
            texts = [part.get("text") for part in content]  # as OpenAI has it
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(content, str):
            raise ConversationError(f"has a message of the role {role!r} without a text")
        turns.append(Turn(SPEAKERS[name], content.strip().removesuffix(EOT).rstrip()))
    return turns
