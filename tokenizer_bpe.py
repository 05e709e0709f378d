"""Text <-> token ids.

One class for every tokenizer here: byte-level BPE trained on one's own text, GPT-2's own
vocabulary, and plain characters. All are kept as one `tokenizer.json` in the format of Hugging
Face's `tokenizers`, so any tool of the field reads them. `tokenizers` (Rust) trains; `tiktoken`
(Rust) encodes the same ids several times faster. Knows no model and no data set.
"""

import hashlib
import itertools
import json
import os
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken.load import load_tiktoken_bpe, read_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

EOT = "<|endoftext|>"
# How GPT-2 cuts text into words before merging bytes; `tokenizers` has the same expression built
# into its ByteLevel step.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
GPT2_FILE = Path("data/r50k_base.tiktoken")
UNKNOWN = 0xFFFFFFFF  # in a character table: no id


class TokenizerError(ValueError):
    """A tokenizer file or a text that cannot be used, in a sentence for the user."""


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level tokenizer.json, as GPT-2
    chose them.
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


class Tokenizer:
    """A tokenizer as its tokenizer.json describes it.

    kind: "bpe" or "char". vocab_size: number of ids, end-of-text included. eot_id: the id of
    <|endoftext|>.
    """

    def __init__(self, description: dict, source: str = "tokenizer.json"):
        """description: the parsed tokenizer.json; source: its name, for errors. Raises
        TokenizerError if it is of a kind unknown here.
        """
        self.description = description
        try:
            vocab = description["model"]["vocab"]
            special = {t["content"]: t["id"] for t in description["added_tokens"]}
        except (KeyError, TypeError):
            raise TokenizerError(
                f"{source} is not a tokenizer.json of the `tokenizers` library: it has no"
                " model.vocab or no added_tokens"
            ) from None
        if EOT not in special:
            raise TokenizerError(f"{source} has no {EOT} token; documents could not be told apart")
        self.eot_id = special[EOT]
        self.ids = vocab | special
        self.vocab_size = max(self.ids.values()) + 1
        self.pattern = pattern = _word_pattern(description, source)
        self.composes = bool(
            description.get("normalizer")
        )  # text to Unicode's NFC first, as Qwen does
        self.kind = "bpe" if pattern else "char"
        if self.kind == "bpe":
            self._init_bpe(vocab, special, pattern, source)
        else:
            self._init_char({c: i for c, i in vocab.items() if c != EOT})

    def _init_bpe(self, vocab, special, pattern, source):
        to_byte = byte_alphabet()
        try:
            ranks = {
                bytes(to_byte[c] for c in token): i
                for token, i in vocab.items()
                if token not in special
            }
        except KeyError as error:
            raise TokenizerError(
                f"{source} is not byte-level: a token of its vocabulary holds {error}, which stands"
                " for no byte"
            ) from None
        if any(bytes([b]) not in ranks for b in range(256)):
            raise TokenizerError(
                f"{source} lacks single bytes in its vocabulary, so some text could not be encoded;"
                " train with the whole byte alphabet"
            )
        self._tiktoken = tiktoken.Encoding(
            "tokenizer.json", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )

    def _init_char(self, vocab):
        codes = np.array([ord(c) for c in vocab], dtype=np.int64)
        ids = np.array(list(vocab.values()), dtype=np.uint32)
        self._char_to_id = np.full(int(codes.max(initial=0)) + 2, UNKNOWN, dtype=np.uint32)
        self._char_to_id[codes] = ids
        self._id_to_text = [""] * self.vocab_size
        for c, i in vocab.items():
            self._id_to_text[i] = c
        self._id_to_text[self.eot_id] = EOT

    # -- making one
    # ---------------------------------------------------------------------------------------------------

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int = 32000, show_progress: bool = False
    ) -> "Tokenizer":
        """Byte-level BPE from an iterator of texts; id 0 is <|endoftext|>, the 256 bytes follow,
        then the merges in order.

        vocab_size: at least 257. Raises TokenizerError when the texts do not support that many
        merges, with the largest size that they do.
        """
        if vocab_size < 257:
            raise TokenizerError(
                f"vocab_size = {vocab_size}: byte-level BPE needs at least 257, the 256 bytes and"
                f" {EOT}"
            )
        hf = HFTokenizer(models.BPE())
        hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        hf.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[EOT],
            initial_alphabet=alphabet,
            show_progress=show_progress,
        )
        hf.train_from_iterator(texts, trainer)
        got = hf.get_vocab_size()
        if got < vocab_size:
            better = max(
                257, 1 << (got // 4).bit_length()
            )  # pairs that occur a few times teach a model nothing
            raise TokenizerError(
                f"the text supports a vocabulary of {got:,} only, not {vocab_size:,}: use"
                f" --vocab_size {min(better, got)}, say, or --tokenizer char, or more text"
            )
        return cls(json.loads(hf.to_str()))

    @classmethod
    def characters(cls, chars: Iterable[str]) -> "Tokenizer":
        """Character level: id 0 is <|endoftext|>, then each character of `chars` in code-point
        order.
        """
        vocab = {EOT: 0} | {c: i for i, c in enumerate(sorted(set(chars)), start=1)}
        hf = HFTokenizer(models.BPE(vocab=vocab, merges=[]))
        hf.decoder = decoders.Fuse()
        hf.add_special_tokens([AddedToken(EOT, special=True, normalized=False)])
        return cls(json.loads(hf.to_str()))

    @classmethod
    def gpt2(cls) -> "Tokenizer":
        """GPT-2's own vocabulary of 50,257, from data/r50k_base.tiktoken where it lies, else
        downloaded through tiktoken.

        Raises TokenizerError when it can be had neither way, saying which file to put where.
        """
        if not GPT2_FILE.exists():
            try:
                data = read_file(GPT2_URL)
            except Exception as error:  # whatever the network stack of the day raises
                problem = f"GPT-2's vocabulary could not be downloaded ({type(error).__name__})"
                raise TokenizerError(
                    f"{problem}. Where there is a network, fetch\n  {GPT2_URL}\nand put it at"
                    f" {GPT2_FILE.absolute()}"
                ) from None
            GPT2_FILE.parent.mkdir(parents=True, exist_ok=True)
            partial = GPT2_FILE.with_name(f".{GPT2_FILE.name}.{os.getpid()}")
            partial.write_bytes(data)
            os.replace(partial, GPT2_FILE)
        found = hashlib.sha256(GPT2_FILE.read_bytes()).hexdigest()
        if found != GPT2_SHA256:
            raise TokenizerError(
                f"{GPT2_FILE} is not the file it should be: sha256 {found}, expected {GPT2_SHA256};"
                f" download {GPT2_URL} again"
            )
        return cls(_byte_level(**_vocab_and_merges(load_tiktoken_bpe(str(GPT2_FILE)))))

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """From a tokenizer.json, or a folder that holds one, or GPT-2's vocab.json and merges.txt.
        Raises TokenizerError if there is none or it is not usable.
        """
        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        vocab, merges = path.with_name("vocab.json"), path.with_name("merges.txt")
        try:
            if (
                path.name == "tokenizer.json"
                and not path.exists()
                and vocab.exists()
                and merges.exists()
            ):
                path = vocab
                pairs = [
                    tuple(line.split(" "))
                    for line in merges.read_text(encoding="utf-8").split("\n")
                    if line and not line.startswith("#version")
                ]
                description = _byte_level(json.loads(vocab.read_text(encoding="utf-8")), pairs)
            else:
                description = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise TokenizerError(f"no tokenizer at {path}") from None
        except Exception as error:  # tokenizers' own errors have no type of theirs
            raise TokenizerError(f"{path} cannot be read as a tokenizer: {error}") from None
        return cls(description, str(path))

    def save(self, path: str | Path) -> str:
        """Write the tokenizer.json; returns its sha256, the tokenizer's identity."""
        text = self.to_json()
        Path(path).write_text(text, encoding="utf-8", newline="\n")
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """The content of tokenizer.json."""
        return json.dumps(self.description, ensure_ascii=False, indent=1) + "\n"

    def same_as(self, other: "Tokenizer") -> bool:
        """Whether both give every text the same ids, whatever else their files say."""
        return (self.ids, self.pattern, self.composes) == (other.ids, other.pattern, other.composes)

    # -- using it
    # -----------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, uint32 [tokens]. <|endoftext|> in the text is text like any other.

        Raises TokenizerError for a character that a character-level tokenizer has never seen, and
        for half a surrogate pair.
        """
        if self.composes:
            text = unicodedata.normalize("NFC", text)
        try:
            if self.kind == "bpe":
                return self._tiktoken.encode_to_numpy(text, disallowed_special=())
            return np.concatenate(
                [self._encode_chars(text, at) for at in range(0, len(text), 1 << 20)]
                or [np.zeros(0, np.uint32)]
            )
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text holds half a surrogate pair at character {error.start}, which is no"
                " valid Unicode"
            ) from None

    def _encode_chars(self, text, start):
        """Ids of a million characters from `start`: blocks that stay in the processor's cache are
        several times faster than one pass.
        """
        block = text[start : start + (1 << 20)]
        codes = (
            np.frombuffer(block.encode("latin-1"), np.uint8)
            if block.isascii()
            else np.frombuffer(block.encode("utf-32-le"), np.uint32)
        )
        ids = self._char_to_id.take(
            codes, mode="clip"
        )  # its last entry is unknown, so every larger code is too
        unknown = ids == UNKNOWN
        if unknown.any():
            at = start + int(unknown.argmax())
            raise TokenizerError(
                f"the character {text[at]!r} (U+{ord(text[at]):04X}) at position {at} is not among"
                f" the {self.vocab_size - 1} characters of this tokenizer"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that are not valid UTF-8 come out as U+FFFD. Raises
        TokenizerError for an id beyond the vocabulary.
        """
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise TokenizerError(f"token id {i} is outside the vocabulary of {self.vocab_size}")
        if self.kind == "char":
            return "".join(self._id_to_text[i] for i in ids)
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 bytes of token ids: what to collect when tokens come one by one and may end
        inside a character.
        """
        if self.kind == "char":
            return self.decode(ids).encode()
        return self._tiktoken.decode_bytes(list(ids))


def _word_pattern(description: dict, source: str) -> str | None:
    """The regular expression that cuts text into words before merging, or None for character level.

    Raises TokenizerError for tokenizers that do more than byte-level BPE: they could not be encoded
    faithfully.
    """
    model = description["model"]
    normalizer = (description.get("normalizer") or {"type": None})["type"]
    if model.get("type", "BPE") != "BPE" or normalizer not in (None, "NFC"):
        raise TokenizerError(
            f"{source} is not plain byte-level BPE (model {model.get('type')}, normalizer"
            f" {normalizer}); train one with prepare_data.py"
        )
    pre = description.get("pre_tokenizer")
    if (
        pre is None
        and not normalizer
        and not model.get("merges")
        and all(len(t) == 1 or t == EOT for t in model["vocab"])
    ):
        return None
    steps = pre.get("pretokenizers", [pre]) if pre else []
    kinds = [s.get("type") for s in steps]
    if (
        kinds == ["ByteLevel"]
        and steps[0].get("use_regex", True)
        and not steps[0].get("add_prefix_space")
    ):
        return GPT2_PATTERN
    if kinds == ["Split", "ByteLevel"]:
        split, level = steps
        isolates = (
            "Regex" in split.get("pattern", {})
            and split.get("behavior") == "Isolated"
            and not split.get("invert")
        )
        if isolates and not level.get("use_regex", True) and not level.get("add_prefix_space"):
            return split["pattern"]["Regex"]
    raise TokenizerError(
        f"{source} cuts text in a way that is not supported here"
        f" ({', '.join(map(str, kinds)) or 'no pre-tokenizer'}); use a byte-level BPE without"
        " prefix space"
    )


def _byte_level(vocab: dict[str, int], merges: list[tuple[str, str]]) -> dict:
    """The content of a tokenizer.json for GPT-2's vocabulary and merges."""
    hf = HFTokenizer(models.BPE(vocab=vocab, merges=merges))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens([AddedToken(EOT, special=True, normalized=False)])
    return json.loads(hf.to_str())


def _vocab_and_merges(ranks: dict[bytes, int]) -> dict:
    """tiktoken's ranks as the vocabulary and merges of tokenizer.json: each token was made of the
    two parts that BPE, stopped just before its rank, leaves of it.
    """
    to_char = {b: c for c, b in byte_alphabet().items()}
    as_text = {token: "".join(to_char[b] for b in token) for token in ranks}
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pair_ranks = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            at = min(range(len(pair_ranks)), key=pair_ranks.__getitem__)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((as_text[parts[0]], as_text[parts[1]]))
    return {"vocab": {as_text[token]: rank for token, rank in ranks.items()}, "merges": merges}


def safe_cut(text: str, limit: int) -> int:
    """Where to cut `text`, at or before `limit`, so that encoding the two parts gives the same ids
    as encoding the whole.

    After a line break between two characters that are not white space, before a space between two
    letters, or before a Chinese or Japanese punctuation mark after a letter: there GPT-2's
    expression, and those of GPT-4, Llama 3 and Qwen, begin a new word whatever stands further away.
    0 where there is no such place.
    """
    end = limit
    while end > 0:  # look back in strides, nearest first
        start = max(0, end - (4096 if end == limit else 65536))
        cuts = [
            m.end() for m in _CUT.finditer(text, start, min(end + 1, len(text))) if m.end() <= end
        ]
        if cuts:
            return cuts[-1]
        end = start
    return 0


_CUT = re.compile(r"(?<=\S)\n(?=\S)|(?<=[^\W\d_])(?= [^\W\d_])|(?<=[^\W\d_])(?=[。，！？、；：])")
