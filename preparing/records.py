"""Records: the rows of .csv, .tsv, .json and .parquet files, and which of their fields hold text.

Rows are yielded as (place, row). place: file and row or line, for messages. row: {column: value},
of Parquet for the columns that may hold the text, or an InputError if it cannot be read. A byte
that is not UTF-8 is a lone surrogate here (surrogateescape); documents.py reports it.
"""

import csv
import itertools
import json
import re
from collections import Counter, deque
from collections.abc import Collection, Iterator
from typing import TextIO

from command_line import plural
from formats.conversation import BESIDE, CONTENT
from formats.files import few
from preparing import InputError
from preparing.chunks import CHUNK_BYTES, Options

SHOWN_CHARS = 40  # of each field's name in a message
TEXT = "text"
PARENT = "parent_id"  # the record that a message answers, as in OpenAssistant's data
CONVERSATIONS = ("messages", "conversations", "conversation")
# Names of question and answer in Alpaca, Dolly and others.
ASKED = ("instruction", "prompt", "question", "query")
ABOUT = ("input", "context")  # what the question is about; may be empty
ANSWERED = ("output", "response", "completion", "answer")
SYSTEM = ("system", "system_prompt")  # what precedes a conversation
HISTORY = "history"  # earlier questions and answers, in pairs, as in LLaMA-Factory's form of Alpaca
LONGEST_RECORD = 256 << 20  # bytes of a JSON line, or characters of a cell
SEPARATORS = ",\t;|"
# Within a cell, neither doubled nor after a backslash: Excel would have put the cell in quotes.
LONE_QUOTE = re.compile(r'(?<=[^\t"\n\\])"(?=[^\t"\r\n])')
NO_SEPARATOR = "\x1f"  # for a table with one column: a character that no text contains
SPACES = re.compile(r"\s*")
ARRAY = re.compile(r"\s*\[\s*[{\]]")  # the beginning of an array of objects
SURROGATE = re.compile("[\ud800-\udfff]")
OTHER_ENCODING = (
    "If files are in another encoding, name it: --encoding cp1252 (Western), cp1251 (Cyrillic),"
    " cp1256 (Arabic), gb18030 (Chinese) or big5hkscs (Taiwan, Hong Kong), cp949 (Korean), cp932"
    " (Japanese: Shift JIS) or euc-jp (on Unix), or utf-16"
)
RENAME = (
    "rename a question and its answer to question and answer, or make text of several fields with"
    " a command of docs/other-programs.md"
)
SPREADSHEET = re.compile(r'"?sep=([^"\r\n])"?\s*')  # Excel's line that names the separator


# -- fields


def fields_of(names: Collection[str], text_field: str | None) -> list[str]:
    """The fields of a record, or columns of a table, that hold the text; empty if none does.

    text_field: the user's choice, which is then the only one. If no name matches exactly, case is
    ignored, so Question matches, unless there is a QUESTION too.
    """
    if text_field:
        return [text_field] if text_field in names else []
    if fields := _known_fields(names):
        return fields
    counts = Counter(map(str.lower, names))
    written = {name.lower(): name for name in names if counts[name.lower()] == 1}
    return [written[name] for name in _known_fields(written)]


def _known_fields(names):
    fields = [name for name in (TEXT, *CONVERSATIONS) if name in names]
    asked, about, answered = (_first(names, group) for group in (ASKED, ABOUT, ANSWERED))
    if asked and answered:
        fields += [asked, about, answered, *(name for name in (HISTORY, *BESIDE) if name in names)]
    if fields == [TEXT]:
        fields += [PARENT] if PARENT in names else []
    elif fields:
        fields.append(_first(names, SYSTEM))
    return [name for name in fields if name]


def text_of(record: dict, text_field: str | None) -> tuple[str, object]:
    """The field that holds a record's text: (name, value). A conversation is a list of messages.

    Skips empty fields if another one has the text. Raises InputError if no field can hold text.
    """
    fields = fields_of(record, text_field)
    if not fields:
        names = shown(list(record)) or "nothing"
        raise InputError(
            f"no field {text_field or TEXT!r}, there is {names}; name the text's field with"
            f" --text_field, {RENAME}"
        )
    known = {name if text_field else name.lower(): record[name] for name in fields}
    if TEXT in known and _repeats_exchange(known):
        del known[TEXT]
    filled = [name for name, value in known.items() if value]
    name = _first(filled, (text_field, TEXT, *CONVERSATIONS))
    if name:
        value = known[name]
        if isinstance(value, str) and name != TEXT:
            value = _conversation(name, value)
    elif _first(filled, ASKED):
        name, value = _first(filled, ASKED), _exchange(known, filled)
    else:
        return fields[0], record[fields[0]]
    system = _first(filled, SYSTEM)
    if system and isinstance(value, list):
        value = [{"role": "system", "content": known[system]}, *value]
    return name, value


def shown(names: list) -> str:
    """Field names for a message, cut short: without a header, they may be long texts."""
    return few([repr(str(name)[:SHOWN_CHARS]) for name in names])


def _first(names, wanted):
    return next((name for name in wanted if name in names), None)


def _repeats_exchange(known):
    """True if the text repeats a question and ends with its answer, as in the Hub's Alpaca.

    Or if it has all messages of a conversation in their order, as a chat template writes them.
    """
    text, said = known[TEXT], known.get(_first(known, CONVERSATIONS))
    said = _parsed(said) if isinstance(said, str) else said
    if isinstance(said, list) and len(said) > 1 and all(isinstance(m, dict) for m in said):
        parts = [next((m[name] for name in CONTENT if name in m), None) for m in said]
        ending = ""
    else:
        parts = [known.get(_first(known, group)) for group in (ASKED, ANSWERED)]
        ending = parts[-1]
    if not all(part and isinstance(part, str) for part in (text, *parts)):
        return False
    at = 0
    for part in map(str.strip, parts):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return text.endswith(ending)


def _exchange(record, filled):
    """A question, its context and its answer, as a conversation; TRL has lists of messages."""
    parts = [_first(filled, group) for group in (ASKED, ABOUT, ANSWERED)]
    values = [record[name] for name in parts if name]
    if all(isinstance(value, list) for value in values):
        return list(itertools.chain(*values))
    for name in filter(None, parts):
        if not isinstance(record[name], str):
            raise InputError(f"{name!r} is {record[name]!s:.40}, not a text")
    asked, about, answer = (record[name] if name else "" for name in parts)
    pairs = [*_history(record.get(HISTORY)), (f"{asked}\n\n{about}", answer)]
    said = zip(itertools.cycle(("user", "assistant")), itertools.chain(*pairs), strict=False)
    messages = [{"role": role, "content": text} for role, text in said if text]
    messages[-1] |= {name: record[name] for name in BESIDE if record.get(name)}
    return messages


def _history(value):
    """The pairs of texts in the field HISTORY, which a table holds as JSON text."""
    pairs = value or []
    if isinstance(pairs, str):
        pairs = _parsed(pairs)
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        raise InputError(f"{HISTORY!r} is {value!s:.40}, not a list of pairs of texts")
    return pairs


def _conversation(name, text):
    """Parse a conversation that a table holds as JSON text; returns other text as it is."""
    messages = _parsed(text) if text.lstrip().startswith("[") else None
    if messages and isinstance(messages, list) and isinstance(messages[0], dict):
        return messages
    if name in CONVERSATIONS:
        raise InputError(f"{name!r} is {text!r:.40}, not a list of messages, in JSON or as it is")
    return text


def columns_of(name: str, columns: list[str], options: Options, advice: str = "") -> list[str]:
    """The columns of a table that may hold the text. Raises InputError if there is none.

    advice: added to the message.
    """
    wanted = fields_of(columns, options.text_field)
    if not wanted and SURROGATE.search("".join(columns)):
        raise InputError(
            f"{name}: its first line is not {options.encoding or 'UTF-8'}. {OTHER_ENCODING}"
        )
    if not wanted:
        raise InputError(
            f"{name} has no column {options.text_field or 'text'!r}; it has {shown(columns)}: name"
            f" one with --text_field, {RENAME}{advice}"
        )
    for column in wanted:
        if columns.count(column) > 1:
            raise InputError(
                f"{name} has {columns.count(column)} columns {column!r}; rename all but one"
            )
    return wanted


# -- separated values


class _Lines:
    """An iterator over lines that can put back those that an attempt to read a row consumed."""

    def __init__(self, text):
        self.text = text
        self.number = 0  # of the attempt's first line, from 0
        self.taken = []
        self.waiting = deque()

    def __iter__(self):
        return self

    def __next__(self):
        line = self.waiting.popleft() if self.waiting else next(self.text)
        self.taken.append(line)
        return line

    def peek(self) -> str:
        """The next line, without consuming it; "" at the end."""
        if not self.waiting:
            self.waiting.extend(itertools.islice(self.text, 1))
        return self.waiting[0] if self.waiting else ""

    def keep(self, count: int) -> None:
        """Keep the first `count` lines taken, and put the others back. Begins a new attempt."""
        self.number += count
        self.waiting.extendleft(reversed(self.taken[count:]))
        self.taken.clear()


def csv_rows(name: str, kind: str, text: Iterator[str], options: Options) -> Iterator[tuple]:
    """The rows of comma-separated values, or values with another separator.

    The header line decides the separator. A quoted cell may contain line breaks, and quotes that
    are doubled or escaped by a backslash. In tab-separated files, most of which do not use quoting,
    a quote is an ordinary character if it is not closed within its row, or if the next line has the
    tabs of a row and the file does not begin with quotes as Excel writes them. Raises InputError
    for an unusable header.
    """
    csv.field_size_limit(LONGEST_RECORD)
    lines = _Lines(text)
    first = next(lines, "")
    said = SPREADSHEET.fullmatch(first)
    while said or (first and not first.strip()):
        lines.keep(1)
        first = next(lines, "")
        if said:
            break
    separator = said[1] if said else _separator(first, kind, options)
    header = _names(first, separator)
    advice = ". If these are not names, begin with a line of names"
    columns_of(name, header, options, advice)
    lines.keep(1)
    form = {
        "delimiter": separator if len(header) > 1 else NO_SEPARATOR,
        "skipinitialspace": f"{separator} " in first,
        "strict": True,
    }
    others = {"quoting": csv.QUOTE_NONE} if separator == "\t" else {"escapechar": "\\"}
    readers = [csv.reader(lines, **form), csv.reader(lines, **form | others)]
    by_rules = form["delimiter"] == "\t" and _quotes_by_rules(lines, readers[0], len(header))
    while True:
        cells = _next_row(lines, readers, len(header), by_rules)
        place = f"{name}, line {lines.number + 1:,}"
        if cells is None:
            return
        lines.keep(1 if isinstance(cells, InputError) else len(lines.taken))
        if isinstance(cells, InputError):
            yield place, cells
        elif cells:  # [] is an empty line
            yield place, dict(zip(header, cells, strict=True))


def _quotes_by_rules(lines, reader, width):
    """True if a table's first rows, of about CHUNK_BYTES, have quotes, all of them as Excel's."""
    size = read = 0
    try:
        while size < CHUNK_BYTES and (cells := next(reader, None)) is not None:
            if len(cells) not in (0, width) and len(lines.taken) > read + 1:
                return False
            read = len(lines.taken)
            size += sum(map(len, cells))
        quoted = any('"' in line for line in lines.taken)
        return quoted and not any(LONE_QUOTE.search(line) for line in lines.taken)
    except csv.Error:
        return False
    finally:
        lines.keep(0)


def _next_row(lines, readers, width, by_rules):
    """The cells of the next row, [] for an empty line, an InputError, or None at the end.

    by_rules: whether a table with tabs has quotes as Excel writes them. The row's lines are
    afterwards in lines.taken.
    """
    problem = None
    for reader in readers:
        lines.keep(0)
        try:
            cells = next(reader)
        except StopIteration:
            return None
        except csv.Error:
            problem = problem or InputError(
                "a quote is open, or there is text after a closed one; within quotes, write each"
                " quote twice"
            )
            continue
        if len(cells) in (0, width):
            if not _swallows(lines, cells, reader.dialect.delimiter, by_rules):
                return cells
            found = "a quote is open, and the next row is within it"
        else:
            found = _misfit(len(cells), width, reader.dialect.delimiter)
        problem = problem or InputError(found)
    return problem


def _misfit(count, width, separator):
    """The message for a row of `count` cells where the header has `width`."""
    found = f"a row of {plural(count, 'cell')}, where the header has {width:,}; "
    if count > width:
        return found + f"put cells that hold {separator!r} in quotes"
    return found + f"put cells with line breaks in quotes, and {separator!r} after empty ones"


def _swallows(lines, cells, separator, by_rules):
    """True if a row of several lines is probably several rows, the first with an unclosed quote.

    The sign is a row number in the first cell that goes on counting in the other lines and in the
    line after them. In tab-separated files it is enough that the second line has as many cells,
    unless by_rules.
    """
    others = list(filter(str.strip, lines.taken))[1:]
    if len(cells) < 2 or not others or others[0].count(separator) < len(cells) - 1:
        return False
    if separator == "\t" and not by_rules:
        return True
    if not cells[0].isdecimal():
        return False
    if lines.peek().strip():
        others.append(lines.peek())
    digits = len(cells[0])
    return all(
        line.startswith(f"{number:0{digits}}{separator}")
        for number, line in enumerate(others, int(cells[0]) + 1)
    )


def _separator(line, kind, options):
    """The separator that splits a header into the most names, preferably with a known text field.

    If the header contains none of SEPARATORS, the usual one for this kind of file.
    """

    def found(separator):
        names = _names(line, separator)
        return bool(fields_of(names, options.text_field)), len(names)

    usual = "\t" if kind == "tsv" else ","
    return max(usual + SEPARATORS, key=found)


def _names(line, separator):
    """The names in a header, without the blanks around them."""
    form = {"delimiter": separator, "skipinitialspace": True, "strict": True}
    try:
        names = next(csv.reader([line], **form), [])
    except csv.Error:  # an unclosed quote
        names = line.split(separator)
    return [name.strip() for name in names]


# -- JSON


def json_rows(name: str, text: TextIO, options: Options) -> Iterator[tuple]:
    """The objects in an array, in the only array inside an object, or one after the other.

    text: a stream. An array is read as far as it is needed; anything else is read as a whole.
    """
    head = text.read(CHUNK_BYTES)
    found = _elements(head, text)
    if not head.lstrip().startswith("["):
        found = _values(head + text.read(), options)
    for number, value in enumerate(found, 1):
        yield f"{name}, row {number:,}", value


def _elements(text, rest):
    """The elements of the array with which a text begins. rest: a stream of what follows."""
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    for number in itertools.count(1):
        while True:
            try:
                at = SPACES.match(text, at).end()
                if text.startswith("]", at):
                    if (text[at + 1 :] + rest.read()).strip():
                        raise ValueError("text after its array; jq -c '.[]' makes lines of several")
                    return
                value, end = decoder.raw_decode(text, at)
                end = SPACES.match(text, end).end()
                if text.startswith((",", "]"), end):
                    break
                problem = "Expecting ',' delimiter"
            except json.JSONDecodeError as error:
                problem = error.msg
            more = rest.read(max(CHUNK_BYTES, len(text) - at))
            if not more:
                raise ValueError(f"{problem}, in row {number:,}")
            text = text[at:] + more
            at = 0
        yield value
        at = end + text.startswith(",", end)


def _values(text, options):
    """The objects in the only array inside an object, or one after the other."""
    values = []
    decoder = json.JSONDecoder()
    at = SPACES.match(text).end()
    while at < len(text):
        value, at = decoder.raw_decode(text, at)
        values.append(value)
        at = SPACES.match(text, at).end()
    if (
        len(values) == 1
        and isinstance(values[0], dict)
        and not fields_of(values[0], options.text_field)
    ):
        lists = [value for value in values[0].values() if _is_table(value)]
        values = lists[0] if len(lists) == 1 else values
    return values


def _is_table(value):
    return isinstance(value, list) and value and isinstance(value[0], dict)


def json_kind(kind: str, head: str) -> str:
    """Whether a .json or .jsonl file is really the other kind; jsonl has one object per line.

    head: the beginning of the file.
    """
    first, _, rest = head.lstrip().partition("\n")
    if kind == "json" and rest.lstrip().startswith("{") and isinstance(_parsed(first), dict):
        return "jsonl"
    if kind == "jsonl" and ARRAY.match(head) and not (rest.strip() and _parsed(first)):
        return "json"
    return kind


def _parsed(text):
    """The value of a JSON text, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# -- Parquet


def parquet_rows(name: str, raw, options: Options) -> Iterator[tuple]:
    """The rows of a Parquet file. Raises InputError if no column holds the text."""
    import pyarrow
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(raw, buffer_size=CHUNK_BYTES, pre_buffer=False)
    wanted = columns_of(name, file.schema_arrow.names, options)
    numbers = itertools.count(1)
    for batch in file.iter_batches(64, columns=wanted, use_threads=False):
        columns = {}
        for column in wanted:
            values = batch.column(column)
            try:
                columns[column] = values.to_pylist()
            except UnicodeDecodeError:
                columns[column] = values.cast(pyarrow.binary()).to_pylist()
        for values in zip(*columns.values(), strict=True):
            yield f"{name}, row {next(numbers):,}", dict(zip(columns, values, strict=True))
