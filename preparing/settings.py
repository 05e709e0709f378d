"""What the bytes written depend on, and how that differs from what it was before.

Compares and names. What follows from a difference is for the job to say.
"""

import hashlib
from argparse import Namespace

from preparing.options import Options
from tokenizer_bpe import Tokenizer

NAMED_DIFFERENCES = 3  # at most, in one sentence


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
    if args.shard:
        settings["shard"] = "{}/{}".format(*args.shard)
    return settings


def differences(former: dict, present: dict) -> str:
    """What differs between former work and this one, in words; "" where nothing does.

    Both are {"settings": {name: value}, "sources": [{"path", ...}]}.
    """
    found = _changed_settings(former["settings"], present["settings"])
    found += _changed_sources(former["sources"], present["sources"])
    more = len(found) - NAMED_DIFFERENCES
    if more > 0:
        found = [*found[:NAMED_DIFFERENCES], f"and {more:,} more"]
    return "; ".join(found)


def _changed_settings(former, present):
    """One phrase for each setting that differs."""
    return [
        f"{name} was {former.get(name)}, is now {present.get(name)}"
        for name in sorted(former | present)
        if former.get(name) != present.get(name)
    ]


def _changed_sources(former, present):
    """One phrase for each source that differs, or else for their order."""
    before = {source["path"]: source for source in former}
    now = {source["path"]: source for source in present}
    found = [f"{path} is new" for path in now if path not in before]
    found += [f"{path} is gone" for path in before if path not in now]
    for path, source in now.items():
        if path in before and source != before[path]:
            found.append(f"{path} changed{_in_its_tag(before[path], source)}")
    if not found and list(before) != list(now):
        found.append("the order of the inputs changed")
    return found


def _in_its_tag(former, present):
    """How the tag of a remote file differs, in words."""
    if former.get("tag") == present.get("tag"):
        return ""
    return f" at its source (its ETag or the like was {former['tag']}, is {present['tag']})"
