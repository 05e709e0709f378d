"""What one call of prepare_data.py has to do, in plain values, and how it differs from former work.

Finds the input and gathers the settings. Writes nothing.
"""

import dataclasses
import hashlib
import math
from argparse import Namespace
from pathlib import Path

from preparing import copies, ray_engine
from preparing.arguments import Options
from preparing.catalog import resolve
from preparing.chunks import CHUNK
from preparing.remote import check_cache
from preparing.sources import Source, find_sources
from tokenizer_bpe import Tokenizer

VAL_FRACTION = 0.1  # of the text is held back for validation,
VAL_BYTES = 20_000_000  # but of large inputs only about this much
NAMED_DIFFERENCES = 3  # at most, in one sentence


class Plan:
    """What one call has to do.

    args: the command line, as arguments.py gives it. out: the prepared folder. options: how records
    become texts. settings: what the bytes written depend on besides the input, as meta.json lists
    it. sources: the input files; empty until standard input is kept. most_bytes: of text, after
    which to stop; infinity for all of it. cache_bytes: that remote files may take on the disk at a
    time.
    """

    def __init__(self, args: Namespace):
        """Find the input and gather the settings.

        Raises InputError and TokenizerError for what the command line names and is not there.
        """
        self.args = args
        self.out = Path(args.out)
        names = (option.name for option in dataclasses.fields(Options))
        self.options = Options(**{name: getattr(args, name) for name in names})
        if self.options.dedupe == "near":
            copies.check_installed()
        self.settings = settings_of(args, self.options)
        self.most_bytes = (args.gigabytes or math.inf) * 1e9
        self.cache_bytes = args.cache_gb * 1e9
        self.reads_stdin = args.input == ["-"]
        self.sources = []
        if not self.reads_stdin:
            self.set_sources(find_sources(resolve(args.input)))
            check_cache(self.sources, self.cache_bytes)
        if args.ray:
            ray_engine.connect(args.ray)

    def set_sources(self, sources: list[Source]) -> None:
        """Take the sources, and the share of validation that follows from their size."""
        self.sources = sources
        if self.settings["val_fraction"] is None:
            size = min(self.input_size, self.most_bytes)
            self.settings["val_fraction"] = min(VAL_FRACTION, VAL_BYTES / size)

    @property
    def input_size(self) -> int:
        """Bytes on disk of all sources."""
        return sum(source.size for source in self.sources)

    @property
    def is_limited(self) -> bool:
        """Whether --gigabytes ends the work."""
        return self.most_bytes < math.inf

    @property
    def total(self) -> float:
        """Where the progress bar ends: bytes of text if --gigabytes limits them, else of files."""
        return self.most_bytes if self.is_limited else self.input_size

    def done(self, text_bytes: int, on_disk: int) -> int:
        """How far it is, of these two numbers of bytes."""
        return text_bytes if self.is_limited else on_disk

    @property
    def text_size(self) -> int:
        """About how many bytes of text there are to prepare."""
        return int(min(sum(source.text_size for source in self.sources), self.most_bytes))

    @property
    def is_small(self) -> bool:
        """Whether there is so little text that no process needs to be started for it."""
        return self.text_size < 2 * CHUNK

    def listed_sources(self) -> list[dict]:
        """The sources as meta.json lists them."""
        return [{"path": source.path, "bytes": source.size} for source in self.sources]


def settings_of(args: Namespace, options: Options) -> dict:
    """What the bytes written depend on besides the input.

    val_fraction is None where it depends on the input. Raises TokenizerError.
    """
    settings = {
        "tokenizer": args.tokenizer,
        "val_fraction": args.val_fraction,
        "text_field": options.text_field,
        "on_error": options.on_error,
        "clean": options.clean,
    }
    if options.encoding:
        settings["encoding"] = options.encoding
    if args.tokenizer == "bpe":
        settings["vocab_size"] = args.vocab_size
        settings["sample_bytes"] = args.sample_bytes
    elif args.tokenizer not in ("char", "gpt2"):
        content = Tokenizer.load(args.tokenizer).to_json()
        settings["tokenizer"] = f"sha256 {hashlib.sha256(content.encode()).hexdigest()}"
    if options.dedupe == "near" or (options.dedupe and not options.clean):
        settings["dedupe"] = options.dedupe
    if options.clean:
        settings["min_chars"] = options.min_chars
        settings["max_char_share"] = options.max_char_share
        settings["min_letters"] = options.min_letters
    if args.gigabytes:
        settings["gigabytes"] = args.gigabytes
    return settings


def differences(former: dict, present: dict) -> str:
    """How former work differs from this one, in words; "" where it does not.

    Both are {"settings": {name: value}, "sources": [{"path", ...}]}.
    """
    was = former["settings"]
    now = present["settings"]
    found = [
        f"{name} was {was.get(name)}, is now {now.get(name)}"
        for name in sorted(was | now)
        if was.get(name) != now.get(name)
    ]
    before = {source["path"]: source for source in former["sources"]}
    after = {source["path"]: source for source in present["sources"]}
    for path in after | before:
        if path not in before:
            found.append(f"{path} is new")
        elif path not in after:
            found.append(f"{path} is gone")
        elif before[path] != after[path]:
            found.append(f"{path} changed")
    if not found and list(before) != list(after):
        found.append("the order of the inputs changed")
    more = len(found) - NAMED_DIFFERENCES
    if more > 0:
        found = [*found[:NAMED_DIFFERENCES], f"and {more:,} more"]
    return "; ".join(found)
