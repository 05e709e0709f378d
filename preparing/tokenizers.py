"""Obtaining the tokenizer that --tokenizer asks for: trained, collected, or taken from elsewhere.

tokenizer_bpe.py knows how a tokenizer works.
"""

import itertools
import math
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator

import regex  # comes with tiktoken

from command_line import plural, si
from formats.files import write_text
from preparing.chunks import Chunk, Options, Position, together
from preparing.documents import documents_of
from preparing.engines import begin, result_of
from preparing.sources import Source
from preparing.summary import Progress
from preparing.work_folder import TEXT_BYTES, WorkFolder
from tokenizer_bpe import GPT2_PATTERN, QWEN35_PATTERN, Tokenizer

LARGEST_DEFAULT = 32000
# Default size of a BPE vocabulary: {bytes of text, at most: ids}. With more ids on a small text, a
# model has few tokens to learn each from, and predicts it worse (docs/experiments.md).
VOCAB_SIZES = {10e6: 1024, 100e6: 4096, 2e9: 16384, math.inf: LARGEST_DEFAULT}
# A text gets at least this many ids for each of the characters that make up this share of it;
# Chinese help pages have 800 of them, and a mixed text 3,000.
IDS_PER_CHARACTER = 4
COMMON = 0.99
# But not more than this many times the ids for its size: 300 kB of Chinese would get 16,384.
MOST_MORE = 4
# Combining marks belong to words in a text with a larger share of them: Hindi has 0.3, and Japanese
# help pages 0.002, after their symbols.
MANY_MARKS = 0.01
COUNTED = 100_000  # of the characters of each chunk, evenly spaced
# Runs of one kind of character, such as letters, are split after this many for training, whose time
# grows with the square of a word's length.
LONG_WORD = 1024
ONE_KIND = regex.compile(r"[\p{L}\p{M}]*|\p{N}*|\s*|[^\s\p{L}\p{N}]*")
# Remote files for the sample may take this many times its size; a single file may take more.
FETCHED_SAMPLES = 10


def obtain_tokenizer(work: WorkFolder) -> tuple[Tokenizer, str]:
    """The tokenizer and, in words, where it came from. Saves it in the working folder.

    Raises TokenizerError and InputError.
    """
    asked = work.plan.tokenizer
    if work.tokenizer.exists():
        return Tokenizer.load(work.tokenizer), "as the run before made it"
    if asked == "bpe":
        # In a thread, so that Ctrl-C does not wait for it.
        tokenizer, origin = result_of(begin(train_tokenizer, work))
    elif asked == "char":
        found = all_characters(work)
        tokenizer, origin = Tokenizer.characters(found), plural(len(found), "different character")
    else:
        tokenizer, origin = work.given_tokenizer or Tokenizer.gpt2(), asked
    write_text(work.tokenizer, tokenizer.to_json())
    return tokenizer, origin


# -- a BPE


def train_tokenizer(work: WorkFolder) -> tuple[Tokenizer, str]:
    """Train a byte-level BPE on an evenly spread sample; returns it and, in words, the sample."""
    plan = work.plan
    share = work.text_size / work.settings[TEXT_BYTES]  # below 1 if --gigabytes asks for less
    sources = sources_to_sample(work.sources, plan.sample_bytes, share)
    size = sum(source.size for source in sources)
    with Progress(size, "sampling") as bar:
        chunks = _watched(work.read(sources, Position()), bar)
        sample = spread_sample(checked(chunks, plan.options), plan.sample_bytes)
    if not any(texts_of(sample, plan.options)):
        return Tokenizer.characters(""), "no text"  # the caller says why nothing is left
    size = sum(part.size for part in sample)
    described = si(size, "B")
    print(f"training the tokenizer on {described} ...", file=sys.stderr, flush=True)
    characters = count_characters(sample, plan.options)
    tokenizer = Tokenizer.train(
        texts_of(sample, plan.options),
        plan.vocab_size or default_vocab_size(work.text_size, characters),
        fewer=not plan.vocab_size,
        show_progress=sys.stderr.isatty(),
        pattern=word_pattern(characters),
    )
    return tokenizer, f"trained on {described} spread over the input"


def count_characters(chunks: list[Chunk], options: Options) -> Counter:
    """How often each character occurs among about COUNTED characters of each chunk."""
    characters = Counter()
    for chunk in chunks:
        text = "".join(texts_of([chunk], options))
        characters.update(text[:: max(1, len(text) // COUNTED)])
    return characters


def word_pattern(characters: Counter) -> str:
    """The expression that cuts a text into words: GPT-2's, or Qwen 3.5's if it suits the text.

    GPT-2's cuts at each combining mark, and so Hindi at its vowel signs; on other texts it gives
    about as few tokens, and older versions of llama.cpp know it.
    """
    marks = sum(n for char, n in characters.items() if unicodedata.category(char)[0] == "M")
    return QWEN35_PATTERN if marks > MANY_MARKS * characters.total() else GPT2_PATTERN


def default_vocab_size(text_bytes: float, characters: Counter) -> int:
    """By the size of the text; if it has many different characters, up to MOST_MORE times that."""
    by_size = next(ids for most, ids in VOCAB_SIZES.items() if text_bytes <= most)
    found = itertools.accumulate(n for _, n in characters.most_common())
    most = COMMON * characters.total()
    common = sum(n < most for n in found)
    by_characters = 1 << (IDS_PER_CHARACTER * common).bit_length()  # the next power of two
    return max(by_size, min(by_characters, MOST_MORE * by_size, LARGEST_DEFAULT))


def texts_of(chunks: list[Chunk], options: Options) -> Iterator[str]:
    """The text of each document to train on, in parts where words exceed LONG_WORD characters."""
    for chunk in chunks:
        for document in documents_of(chunk, options)[0]:
            yield from without_long_words(document.text)


def without_long_words(text: str) -> Iterator[str]:
    """Split a text so that no part has 2 * LONG_WORD characters of one kind in a row."""
    start = 0
    for at in range(0, len(text) - LONG_WORD, LONG_WORD):
        if ONE_KIND.fullmatch(text, at, at + LONG_WORD):
            yield text[start : at + LONG_WORD]
            start = at + LONG_WORD
    yield text[start:]


def sources_to_sample(sources: list[Source], sample_bytes: int, share: float = 1.0) -> list[Source]:
    """The sources to sample: all if they are local; else a few, evenly spread, to fetch less.

    share: of their bytes, from the first on, that the run will read; no others are fetched.
    """
    if not any(source.is_remote for source in sources):
        return sources
    wanted = share * sum(source.size for source in sources)
    starts = itertools.accumulate((source.size for source in sources), initial=0)
    sources = [source for source, start in zip(sources, starts, strict=False) if start < wanted]
    size = sum(source.size for source in sources)
    count = FETCHED_SAMPLES * sample_bytes * len(sources) // size
    count = max(1, min(count, len(sources)))
    return [sources[n * len(sources) // count] for n in range(count)]


def _watched(chunks, bar):
    """Yield the chunks, and advance the bar after each."""
    for chunk in chunks:
        yield chunk
        bar.to(chunk.end.on_disk)


def checked(chunks, options):
    """Yield the chunks, once the documents of the first are readable. Raises InputError."""
    for chunk in itertools.islice(chunks, 1):
        documents_of(chunk, options)
        yield chunk
    yield from chunks


def spread_sample(chunks: Iterable[Chunk], sample_bytes: int) -> list[Chunk]:
    """Every n-th chunk; n doubles whenever the chunks kept exceed sample_bytes."""
    kept = []
    size = 0
    stride = 1
    for n, chunk in enumerate(chunks):
        if n % stride == 0:
            kept.append(chunk)
            size += chunk.size
        while size > sample_bytes and len(kept) > 1:
            kept = kept[::2]
            size = sum(part.size for part in kept)
            stride *= 2
    return kept


# -- characters


def all_characters(work: WorkFolder) -> set[str]:
    """The distinct characters of the input, as far as --gigabytes lets it be written."""
    found = set()
    size = 0
    options = work.plan.options
    with Progress(work.input_size, "characters") as bar:
        for chunks in together(_watched(work.read(work.sources, Position()), bar)):
            for text in texts_of(chunks, options):
                found.update(text)
                size += len(text.encode())
            # Stop at the end of a document. When copies are dropped, more of the input is needed.
            if size >= work.most_bytes and not chunks[-1].end.inside and not options.dedupe:
                break
    return found
