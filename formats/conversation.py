"""How a conversation reads as text: the one form that data, generation and exports share.

    User: Hello?

    Assistant: Good day.

Every turn ends with a blank line.
"""

REPLY = "Assistant:"  # what a prompt ends with, so that the model answers
STOP = "\n\nUser:"  # where an answer ends, if not with the document

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


def turns_of(messages: list[dict]) -> list[str]:
    """A conversation's text in parts: speaker and message, turn by turn.

    messages: [{"role", "content"}]. No token of a usual BPE crosses from one part to the next: a
    message begins with a space, and ends with a blank line.
    """
    parts = []
    for message in messages:
        parts.append(f"{message['role'].capitalize()}:")
        parts.append(f" {message['content'].strip()}\n\n")
    return parts


def format_chat(messages: list[dict]) -> str:
    """A conversation as text, [{"role", "content"}]. For the next answer, add REPLY to it."""
    return "".join(turns_of(messages))
