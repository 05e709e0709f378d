"""How a conversation reads as text: the one form that data, generation and exports share.

    User: Hello?

    Assistant: Good day.

Every turn ends with a blank line.
"""

from tokenizer_bpe import EOT

REPLY = "Assistant:"  # what a prompt ends with, so that the model answers
STOP = "\n\nUser:"  # where an answer ends, if not with the document
# The speakers by the names that data sets have for them, in lower case.
SPEAKERS = dict.fromkeys(("system", "developer"), "System")
SPEAKERS |= dict.fromkeys(("user", "human", "prompter", "customer"), "User")
SPEAKERS |= dict.fromkeys(
    ("assistant", "gpt", "chatgpt", "bot", "chatbot", "model", "ai"), "Assistant"
)
CONTENT = ("content", "value", "text")  # the names of a message's text

# The same in the template languages of those who run exported models: Jinja (transformers, GGUF)
# and Go's text/template (Ollama).
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] | trim }}\n\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
OLLAMA_TEMPLATE = (
    '{{ range .Messages }}{{ if eq .Role "user" }}User: {{ .Content }}\n\n'
    '{{ else if eq .Role "assistant" }}Assistant: {{ .Content }}\n\n'
    '{{ else if eq .Role "system" }}System: {{ .Content }}\n\n{{ end }}{{ end }}Assistant:'
)


class ConversationError(ValueError):
    """Messages that are no conversation, in words for the user."""


def turns_of(messages: list[dict]) -> list[str]:
    """A conversation's text in parts: speaker and message, turn by turn.

    messages: [{"role", "content"}], or as ShareGPT has them [{"from", "value"}]. No token of a
    usual BPE crosses from one part to the next: a message begins with a space, and ends with a
    blank line. Raises ConversationError.
    """
    parts = []
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
                f"has the role {role!r:.40}, which is none of {known}; rename it"
            )
        if isinstance(content, list) and all(isinstance(part, dict) for part in content):
            texts = [part.get("text") for part in content]  # as OpenAI has it
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
        if not isinstance(content, str):
            raise ConversationError(f"has a message of the role {role!r} without a text")
        parts += [f"{SPEAKERS[name]}:", f" {content.strip().removesuffix(EOT).rstrip()}\n\n"]
    return parts


def format_chat(messages: list[dict]) -> str:
    """A conversation as text, [{"role", "content"}]. For the next answer, add REPLY to it."""
    return "".join(turns_of(messages))
