"""Text <-> token ids.

One class for every tokenizer here: byte-level BPE trained on one's own text or taken from others,
as GPT-2, Qwen3, Llama 3 and SmolLM2 have it, and plain characters. All are kept as one
`tokenizer.json` in the format of Hugging Face's `tokenizers`, so any tool of the field reads them.
`tokenizers` (Rust) trains; `tiktoken` (Rust) encodes the same ids several times faster, where text
is cut into words by one of KNOWN_PATTERNS and merged in the order of the ids. Special tokens are
never found in a text.
"""

import functools
import itertools
import json
import re
import threading
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers
from tiktoken.load import load_tiktoken_bpe
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from command_line import UserError

EOT = "<|endoftext|>"
# The names under which files of others have it. Where a file has none of them, the configs next to
# it name another token.
END_NAMES = (EOT, "<|end_of_text|>")
CONFIGS = ("tokenizer_config.json", "generation_config.json", "config.json")
# How GPT-2 cuts text into words before merging bytes. The ByteLevel step of `tokenizers` has the
# same expression built in.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The same after the step `Digits`, which sets each digit apart: white space before a digit is as at
# the end of a text.
DIGITS_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
# That of Qwen, of Llama 3 with digits in groups of up to three, of Qwen 3.5 with combining marks in
# words, such as the vowel signs of Hindi, and of GPT-4o.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN35_PATTERN = QWEN2_PATTERN.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(
    r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}"
)
GPT4O_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# They match all of a text, and mean the same to tiktoken and to `tokenizers`.
KNOWN_PATTERNS = {
    GPT2_PATTERN,
    DIGITS_PATTERN,
    QWEN2_PATTERN,
    LLAMA3_PATTERN,
    QWEN35_PATTERN,
    GPT4O_PATTERN,
}
WHOLE = r"[\s\S]+"  # takes a text as one word
# Steps that cut text into words and leave nothing out.
CUTTING = {"Split", "Digits", "Punctuation", "ByteLevel"}
# The added tokens that llama.cpp takes for control tokens although tokenizer.json does not call
# them special. All others, such as Qwen3's <think> and the runs of spaces of Phi-2, are text.
CONTROL = re.compile(r"<\|.*\|>|<｜.*｜>|<pad>|<mask>", re.DOTALL)
GPT2_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
GPT2_FILE = Path("data/r50k_base.tiktoken")
LONG_WORD = 1 << 16  # characters of a word that is encoded whole in a text of a million blanks
UNKNOWN = 0xFFFFFFFF  # in a table of characters: no id
OTHER = "choose another tokenizer, or train one with prepare_data.py"
MAKING = threading.Lock()  # Python 3.12 would make one `_library` in each thread, of 150 MB
# The places at which text may be cut, see safe_cut.
CUT = re.compile(
    r"(?<=\S)\n(?=[^\s/])|(?<=[^\W_])\n(?=/)|"
    r"(?<=[^\W\d_])(?= [^\W\d_])|(?<=[^\W\d_])(?=[。，！？、；：])"
)


class TokenizerError(UserError):
    """A tokenizer file or a text that cannot be used."""


def _alphabet():
    """{byte: character}: the printable character that GPT-2 writes for each byte.

    The byte itself where it is printable; the other bytes have the rest, in order.
    """
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(char): char for char in characters if ord(char) < 256}
    others = [byte for byte in range(256) if byte not in own]
    return own | dict(zip(others, characters[len(own) :], strict=True))


ALPHABET = _alphabet()


def spell(data: bytes) -> str:
    """Bytes in the characters in which a byte-level tokenizer.json writes them."""
    return data.decode("latin-1").translate(ALPHABET)


class Tokenizer:
    """A tokenizer as its tokenizer.json describes it.

    kind: "bpe" or "char". vocab_size: number of ids, end-of-text included. eot, eot_id: the token
    that ends a text, usually <|endoftext|>. specials: the ids of the added tokens, by their text.
    ordinary: those of them that are text like any other; encode() gives none of the rest.
    texts: the UTF-8 bytes of each id that has any. is_for_library: whether `tokenizers` encodes all
    texts, as tiktoken might give other ids.
    """

    def __init__(
        self, description: dict, source: str = "tokenizer.json", eos: str | int | None = None
    ):
        """description: the parsed tokenizer.json; source: its name, for errors.

        eos: the token or id that ends a text if the description has none of END_NAMES. Raises
        TokenizerError if it is of a kind unknown here.
        """
        try:
            model = description["model"]
            vocab = model["vocab"]
            specials = {token["content"]: token["id"] for token in description["added_tokens"]}
        except (KeyError, TypeError):
            raise TokenizerError(
                f"{source} is not a tokenizer.json of the `tokenizers` library: it has no"
                " model.vocab or no added_tokens"
            ) from None
        self.pattern = _word_pattern(description, source)
        self.specials = specials
        self.eot = _end_of_text(model, specials, eos, source)
        self.eot_id = specials[self.eot]
        added = description["added_tokens"]
        names = {token["content"] for token in added if not token.get("special", True)}
        self.ordinary = {name for name in names if not CONTROL.fullmatch(name)} - {self.eot}
        self._spelled = re.compile("|".join(map(re.escape, sorted(self.ordinary))))
        if self.eot not in END_NAMES:  # `tokenizers` reads over it
            description = description | {"model": model | {"end_of_text": self.eot}}
        # A post-processor may put tokens around each text, which is not done here. transformers
        # saves the length to which it cut texts last; programs in Rust obey the file.
        around = dict.fromkeys(("post_processor", "truncation", "padding"))
        self.description = description | around
        self.ids = vocab | specials
        self.vocab_size = max(self.ids.values()) + 1
        # The bytes that a vocabulary lacks, as it would spell them, with ids that no token has.
        missing = sorted(set(ALPHABET.values()) - (vocab.keys() - specials.keys()))
        self.lacking = {char: self.vocab_size + n for n, char in enumerate(missing)}
        # True if text is brought to Unicode's NFC first, as Qwen does.
        self.composes = _normalizer(description) is not None
        self.is_for_library = False
        self.kind = "bpe" if self.pattern else "char"
        if self.pattern:
            _check_options(model, source)
            is_known = self.pattern in KNOWN_PATTERNS
            self.is_for_library = not (is_known and _merges_by_ids(model, specials))
            tokens = {token: vocab[token] for token in vocab.keys() - specials.keys()}
            self._ranks = _ranks_of(tokens | self.lacking, source)
            texts = {n: data for data, n in self._ranks.items() if n < self.vocab_size}
            if not self.is_for_library:
                self._tiktoken = _byte_pairs(self._ranks, specials, self.pattern)
        else:
            texts = {n: token.encode() for token, n in vocab.items()}
            characters = {ord(token): n for token, n in vocab.items() if token != EOT}
            # Code point -> id. The last entry stays unknown, and serves all larger code points.
            self._table = np.full(max(characters, default=0) + 2, UNKNOWN, np.uint32)
            self._table[list(characters)] = list(characters.values())
        self.texts = texts | {n: token.encode() for token, n in specials.items()}

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        fewer: bool = False,
        show_progress: bool = False,
        pattern: str = GPT2_PATTERN,
    ) -> "Tokenizer":
        """Byte-level BPE from texts: id 0 is <|endoftext|>, the 256 bytes follow, then the merges.

        vocab_size: at least 257. fewer: whether fewer will do. pattern: one of KNOWN_PATTERNS.
        Raises TokenizerError when the texts do not support that many merges, with the largest size
        that they do.
        """
        hf = _byte_level(models.BPE(), pattern)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[EOT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=show_progress,
        )
        hf.train_from_iterator(texts, trainer)
        found = hf.get_vocab_size()
        if found < vocab_size and not fewer:
            # Pairs that occur a few times teach a model nothing: a power of two well below.
            better = 1 << (found // 4).bit_length()
            smaller = f"--vocab_size {better}, say, or " if better > 257 else ""
            raise TokenizerError(
                f"the text supports --vocab_size {found} at most, not {vocab_size}: use {smaller}"
                "--tokenizer char, or more text"
            )
        return cls(_description(hf))

    @classmethod
    def characters(cls, chars: Iterable[str]) -> "Tokenizer":
        """Character level: id 0 is <|endoftext|>, then each of `chars` in code-point order."""
        vocab = {EOT: 0} | {char: i for i, char in enumerate(sorted(set(chars)), start=1)}
        hf = tokenizers.Tokenizer(models.BPE(vocab, []))
        hf.decoder = decoders.Fuse()
        return cls(_description(hf))

    @classmethod
    def gpt2(cls) -> "Tokenizer":
        """GPT-2's own vocabulary of 50,257: from data/r50k_base.tiktoken, else downloaded.

        Raises TokenizerError when it can be had neither way, saying which file to put where.
        """
        place = str(GPT2_FILE) if GPT2_FILE.exists() else GPT2_URL
        try:
            ranks = load_tiktoken_bpe(place, expected_hash=GPT2_SHA256)
        except Exception as error:  # whatever the network stack of the day raises
            raise TokenizerError(
                f"GPT-2's vocabulary cannot be read from {place} ({type(error).__name__}). Where"
                f" there is a network, fetch\n  {GPT2_URL}\nand put it at {GPT2_FILE.absolute()}"
            ) from None
        return cls(_description(_byte_level(models.BPE(*_vocab_and_merges(ranks)))))

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """From a tokenizer.json, or a folder with one.

        Raises TokenizerError if there is none or it is not usable.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "tokenizer.json"
        try:
            description = json.loads(path.read_text(encoding="utf-8"))
            tokenizer = cls(description, str(path), _eos_in(path.parent))
            tokenizer.encode("")  # raises the errors of `tokenizers` here, if it encodes all texts
            return tokenizer
        except TokenizerError:
            raise
        except FileNotFoundError:
            hint = ""
            if path.with_name("vocab.json").exists():
                hint = (
                    "; transformers writes it, for you to copy it there:\n"
                    f"  AutoTokenizer.from_pretrained({str(path.parent)!r}).save_pretrained('OUT')"
                )
            raise TokenizerError(f"no tokenizer at {path}{hint}") from None
        except (UnicodeDecodeError, json.JSONDecodeError):
            raise TokenizerError(
                f"{path} is not a tokenizer.json; give that file of the model, or its folder. If"
                " git cloned it, git lfs pull fetches its content"
            ) from None
        except Exception as error:  # tokenizers' own errors have no type, and values may have any
            raise TokenizerError(f"{path} cannot be read as a tokenizer: {error}") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json(), encoding="utf-8", newline="\n")

    def to_json(self) -> str:
        return json.dumps(self.description, ensure_ascii=False, indent=1) + "\n"

    def same_as(self, other: "Tokenizer") -> bool:
        """True if both give every text the same ids, whatever else their files say."""
        mine = (self.ids, self.ordinary, self.pattern, self.composes)
        return mine == (other.ids, other.ordinary, other.pattern, other.composes)

    def spells_ordinary(self, text: str) -> bool:
        """True if a text spells an ordinary added token; then `tokenizers` encodes it."""
        return bool(self.ordinary and self._spelled.search(text))

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, uint32 [tokens]. <|endoftext|> in the text is text like any other.

        Raises TokenizerError for a character that the vocabulary cannot spell, and for a lone
        surrogate.
        """
        try:
            if self.composes:
                text = composed(text)
            if self.kind == "char":
                return self._encode_characters(text)
            if self.is_for_library or self.spells_ordinary(text):
                return self._encode_by_library(text)
            ids = self._encode_words(text)
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text holds a lone surrogate at character {error.start}, which is not Unicode"
            ) from None
        if self.lacking and ids.max(initial=0) >= self.vocab_size:
            raise self._unknown_byte(text)
        return ids

    def _encode_by_library(self, text):
        """The ids that `tokenizers` gives a text, of which it leaves out what has no ids."""
        text.encode()  # raises the error of a lone surrogate
        with MAKING:
            library = _library(self)
        ids = np.array(library.encode(text, add_special_tokens=False).ids, np.uint32)
        if self.lacking and self.decode_bytes(ids) != text.encode():
            raise self._unknown_byte(text)
        return ids

    def _unknown_byte(self, text):
        """The TokenizerError for the first character of a text that has a byte of `lacking`."""
        for at, char in enumerate(text):
            for byte in char.encode():
                if ALPHABET[byte] in self.lacking:
                    return TokenizerError(
                        f"the character {char!r} (U+{ord(char):04X}) at position {at} has no ids:"
                        f" the vocabulary of this tokenizer lacks the byte 0x{byte:02X}"
                    )

    def _encode_characters(self, text):
        """The ids of a text, uint32 [characters]. Raises TokenizerError for an unknown one."""
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        ids = self._table.take(codes, mode="clip")
        unknown = ids == UNKNOWN
        if unknown.any():
            at = int(unknown.argmax())
            raise TokenizerError(
                f"the character {text[at]!r} (U+{ord(text[at]):04X}) at position {at} is not among"
                f" the {self.vocab_size - 1} characters of this tokenizer"
            )
        return ids

    def _encode_words(self, text):
        """The ids of a text; if tiktoken's expressions give up, word by word.

        And such words in parts, of which equal ones are encoded once: whole, a million blanks take
        more than a second.
        """
        try:
            return self._tiktoken(text)
        except UnicodeEncodeError:
            raise
        except ValueError:  # a million blanks in a row
            import regex  # comes with tiktoken

            encode = functools.cache(_byte_pairs(self._ranks, self.specials, WHOLE))
            words = regex.findall(self.pattern, text)
            starts = ((word, at) for word in words for at in range(0, len(word), LONG_WORD))
            return np.concatenate([encode(word[at : at + LONG_WORD]) for word, at in starts])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that are not valid UTF-8 come out as U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 bytes of token ids.

        Collect them if tokens come one by one: a token may end inside a character.
        """
        return b"".join(self.texts[int(i)] for i in ids)  # also of a tensor


def _ranks_of(tokens, source):
    """{bytes: id} of byte-level tokens. Raises TokenizerError if they are not."""
    to_byte = {char: byte for byte, char in ALPHABET.items()}
    if others := sorted(set().union(*tokens) - to_byte.keys()):
        raise TokenizerError(
            f"{source} is not byte-level: its vocabulary has the character {others[0]!r}, which"
            f" spells no byte; {OTHER}"
        )
    return {bytes(map(to_byte.get, token)): n for token, n in tokens.items()}


def _byte_pairs(ranks, specials, pattern):
    """tiktoken's function from a text to its ids, none of which are special."""
    # Without special tokens, it would look for an empty text, which takes half of the time again.
    encoding = tiktoken.Encoding(
        "tokenizer.json", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials
    )
    return functools.partial(encoding.encode_to_numpy, disallowed_special=())


@functools.cache  # no attribute: a pickled one, as Ray sends it, would find special tokens
def _library(tokenizer):
    """The same tokenizer of `tokenizers`; it finds no added tokens but the ordinary ones."""
    description = tokenizer.description
    added = [
        token | {"special": token["content"] not in tokenizer.ordinary}
        for token in description["added_tokens"]
    ]
    hf = tokenizers.Tokenizer.from_str(json.dumps(description | {"added_tokens": added}))
    hf.encode_special_tokens = True
    return hf


def _check_options(model, source):
    """Raises TokenizerError if merging needs more than the bytes of a word."""
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    used = [f"{name} {model[name]!r}" for name in options if model.get(name)]
    if used:
        raise TokenizerError(f"{source} has {used[0]}, which is not supported here; {OTHER}")


def _merges_by_ids(model, specials):
    """True if merging by ids, as tiktoken does, is merging by `merges`, as `tokenizers` does."""
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    made = ["".join(pair) for pair in pairs]
    expected = {token for token in model["vocab"] if len(token) > 1} - specials.keys()
    ids = [model["vocab"].get(token, -1) for token in made]
    # Several merges may make the same token, as in Llama 3's file.
    in_order = all(first <= second for first, second in itertools.pairwise(ids))
    return in_order and expected <= set(made)


def _end_of_text(model, specials, eos, source):
    """The added token that ends a text. Raises TokenizerError if none is known."""
    by_id = {n: token for token, n in specials.items()}
    for name in (model.get("end_of_text"), *END_NAMES, by_id.get(eos, eos)):
        if name in specials:
            return name
    raise TokenizerError(
        f"{source} has no {EOT}, and no config next to it says which token ends a text; write"
        f' {{"eos_token": "..."}} with one of its added tokens to {CONFIGS[0]} there, or {OTHER}'
    )


def _eos_in(folder):
    """The token, or its id, that ends a text according to the configs in a folder, or None."""
    for name in CONFIGS:
        values = _read_config(folder / name)
        eos = values.get("eos_token") or values.get("eos_token_id")
        if isinstance(eos, dict):
            eos = eos.get("content")
        if isinstance(eos, list):  # what ends a text is the first
            eos = next(iter(eos), None)
        if isinstance(eos, str | int):
            return eos
    return None


def _read_config(path):
    """The values of a config; {} if there is none, or none that can be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _word_pattern(description, source):
    """The expression that cuts text into words before merging, or None for character level.

    Of several steps, their description, which is none of KNOWN_PATTERNS.

    Raises TokenizerError for tokenizers that do more than byte-level BPE: they could not be encoded
    faithfully.
    """
    model = description["model"]
    normalizer = _normalizer(description)
    pre = description.get("pre_tokenizer")
    steps = pre.get("pretokenizers", [pre]) if pre else []
    if model.get("type", "BPE") == "BPE" and normalizer in (None, "NFC"):
        characters_only = all(len(token) == 1 or token == EOT for token in model["vocab"])
        if pre is None and not normalizer and not model.get("merges") and characters_only:
            return None
        if _keep_all(steps):
            return _known_pattern(steps) or json.dumps(steps, ensure_ascii=False)
    kinds = [str(step.get("type")) for step in steps]
    found = "not plain byte-level BPE without prefix space"
    falls_back = model.get("byte_fallback") and "ByteLevel" not in kinds
    if falls_back or model.get("type") == "Unigram" or "Metaspace" in kinds:
        found = "a SentencePiece tokenizer, not byte-level BPE"
    raise TokenizerError(
        f"{source} is {found} (model {model.get('type')}, normalizer {normalizer}, pre-tokenizer"
        f" {', '.join(kinds) or None}); choose a model with byte-level BPE, such as SmolLM2,"
        " Qwen3, Llama 3 or GPT-2, or train a tokenizer with prepare_data.py, and begin with new"
        " weights"
    )


def _keep_all(steps):
    """True if steps cut text into words, and into bytes once, without a change of the text.

    A step may remove what a known expression leaves, which is nothing, as OLMo 2 has it.
    """
    kinds = [step.get("type") for step in steps]
    if kinds.count("ByteLevel") != 1 or not CUTTING.issuperset(kinds):
        return False
    for step in steps:
        removes = step.get("behavior") == "Removed"
        if removes and step.get("invert") and step["pattern"].get("Regex") in KNOWN_PATTERNS:
            removes = False
        if removes or step.get("add_prefix_space"):
            return False
    return True


def _known_pattern(steps):
    """The one expression that does what the steps do, or None."""
    match [{"use_regex": True, "invert": False} | step for step in steps]:
        case [{"type": "ByteLevel", "use_regex": True}]:
            return GPT2_PATTERN
        case [{"type": "Digits", "individual_digits": True}, {"use_regex": True}]:
            return DIGITS_PATTERN
        case [
            {"pattern": {"Regex": found}, "behavior": "Isolated", "invert": False}
            | {"pattern": {"Regex": found}, "behavior": "Removed"},
            {"use_regex": False},
        ]:
            return found


def _normalizer(description):
    """The kind of the normalizer, also of one alone in a sequence; None if there is none."""
    step = description.get("normalizer") or {}
    if step.get("type") == "Sequence" and len(step["normalizers"]) < 2:
        step = next(iter(step["normalizers"]), {})
    return step.get("type")


def _byte_level(model, pattern=GPT2_PATTERN):
    """A tokenizer of `tokenizers` that cuts text into words, and reads their bytes."""
    hf = tokenizers.Tokenizer(model)
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern != GPT2_PATTERN:  # which that step has built in
        words = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        into_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        hf.pre_tokenizer = pre_tokenizers.Sequence([words, into_bytes])
    hf.decoder = decoders.ByteLevel()
    return hf


def _description(hf):
    """The content of its tokenizer.json, with <|endoftext|>."""
    hf.add_special_tokens([EOT])
    return json.loads(hf.to_str())


def _vocab_and_merges(ranks):
    """tiktoken's {token: rank}, in this order, as vocabulary and merges of a tokenizer.json.

    Each token was made of the two parts that BPE, stopped just before its rank, leaves of it.
    """
    merges = []
    for token, rank in ranks.items():
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pair_ranks = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            at = min(range(len(pair_ranks)), key=pair_ranks.__getitem__)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(tuple(map(spell, parts)))
    return {spell(token): rank for token, rank in ranks.items()}, merges


def composed(text: str) -> str:
    """A text in NFC, as `tokenizers` has it, which knows fewer marks than Python.

    Raises UnicodeEncodeError if it has to ask `tokenizers` about a lone surrogate.
    """
    is_composed = unicodedata.is_normalized("NFC", text)  # fast
    return text if is_composed else normalizers.NFC().normalize_str(text)


def safe_cut(text: str, limit: int) -> int:
    """The last place at or before `limit` to cut `text` into two parts that encode as the whole.

    After a line break between two characters that are not white space, but before a slash only if
    the first is a letter or digit; before a space between two letters, or before a Chinese or
    Japanese punctuation mark after a letter: there each of KNOWN_PATTERNS begins a new word
    whatever comes further away. 0 if there is no such place.
    """
    return max((match.end() for match in CUT.finditer(text, 0, limit + 1)), default=0)
