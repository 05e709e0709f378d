"""Where a record has its text: in which fields, and how they make a conversation."""

import contextlib
from collections.abc import Collection

from formats.files import few, parse_json
from preparing import InputError

SHOWN_CHARS = 40  # of each name that a message shows
TEXT = "text"
CONVERSATIONS = ("messages", "conversations", "conversation")
# A question and its answer, as Alpaca, Dolly and others name them.
ASKED = ("instruction", "prompt", "question")
ABOUT = ("input", "context")  # what the question is about; may be empty
ANSWERED = ("output", "response", "completion", "answer")
SYSTEM = ("system", "system_prompt")  # what precedes a conversation


def fields_of(names: Collection[str], text_field: str | None) -> list[str]:
    """Those of a record's fields, or a table's columns, that hold its text. Empty if none does.

    text_field: the only one, where the user names it.
    """
    if text_field:
        return [text_field] if text_field in names else []
    fields = [name for name in (TEXT, *CONVERSATIONS) if name in names]
    asked, about, answered = (_first(names, group) for group in (ASKED, ABOUT, ANSWERED))
    if asked and answered:
        fields += [asked, about, answered]
    if fields and fields != [TEXT]:
        fields.append(_first(names, SYSTEM))
    return [name for name in fields if name]


def text_of(record: dict, text_field: str | None) -> tuple[str, object]:
    """The name of the field with the text, and its value: of a conversation the list of messages.

    An empty field gives way to the next one. Raises InputError for a record without such a field.
    """
    fields = fields_of(record, text_field)
    if not fields:
        names = shown(list(record)) or "nothing"
        raise InputError(
            f"no field {text_field or TEXT!r}, there is {names}; name the text's field with"
            " --text_field"
        )
    filled = [name for name in fields if record[name]]
    name = _first(filled, (text_field, TEXT, *CONVERSATIONS))
    if name:
        value = record[name]
        if isinstance(value, str) and name != TEXT:
            value = _parsed(name, value)
    elif not text_field and _first(filled, ASKED):
        name, value = _first(filled, ASKED), _exchange(record, filled)
    else:
        return fields[0], record[fields[0]]
    system = _first(filled, SYSTEM)
    if system and isinstance(value, list):
        value = [{"role": "system", "content": record[system]}, *value]
    return name, value


def shown(names: list) -> str:
    """Names of fields for a sentence, of which each may be a text where a header is missing."""
    return few([repr(str(name)[:SHOWN_CHARS]) for name in names])


def _first(names, wanted):
    return next((name for name in wanted if name in names), None)


def _exchange(record, filled):
    """A question, with what it is about, and its answer as a conversation."""
    parts = [_first(filled, group) for group in (ASKED, ABOUT, ANSWERED)]
    for name in filter(None, parts):
        if not isinstance(record[name], str):
            raise InputError(f"{name!r} is {record[name]!s:.40}, not a text")
    asked, about, answer = (record[name] if name else "" for name in parts)
    question = {"role": "user", "content": f"{asked}\n\n{about}"}
    return [question, {"role": "assistant", "content": answer}] if answer else [question]


def _parsed(name, text):
    """The conversation that a text in JSON is, as tables have it; else the text."""
    messages = None
    if text.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            messages = parse_json(text)
    if messages and isinstance(messages, list) and isinstance(messages[0], dict):
        return messages
    if name in CONVERSATIONS:
        raise InputError(f"{name!r} is {text!r:.40}, not a list of messages, in JSON or as it is")
    return text
