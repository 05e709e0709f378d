"""Prompts -> their continuations as text, as they grow.

Knows a model and its tokenizer; no files and no terminal.
"""

import codecs
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from generating import decode
from model import GPT
from tokenizer_bpe import Tokenizer


@dataclass
class Completion:
    """One continuation as it grows.

    text: whole characters only, and nothing that may turn out to be a stop text. ids: its tokens.
    ended: why it is finished, "end of text", "stop" or "length"; empty until then. first_s,
    seconds: from the start to its first and to its last token.
    """

    prompt: str
    text: str = ""
    ids: list[int] = field(default_factory=list)
    ended: str = ""
    first_s: float = 0.0
    seconds: float = 0.0


def complete(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: list[str],
    max_new_tokens: int,
    stop: Sequence[str] = (),
    seed: int | None = None,
    **settings,
) -> Iterator[list[Completion]]:
    """Continue each prompt; yields all Completions, the same list, each time that they have grown.

    An empty prompt is the start of a document. stop: texts that end a continuation, themselves left
    out. seed: None draws other tokens each time. settings: as in decode.generate. Raises
    TokenizerError for a prompt that the tokenizer cannot encode.
    """
    started = time.perf_counter()
    prompt_ids = [tokenizer.encode(prompt).tolist() or [tokenizer.eot_id] for prompt in prompts]
    growing = [Growing(prompt, tokenizer, max_new_tokens, stop) for prompt in prompts]
    completions = [row.completion for row in growing]
    settings["vocab_size"] = tokenizer.vocab_size
    settings["generator"] = seeded_generator(model.wte.weight.device, seed)
    for next_ids in decode.generate(model, prompt_ids, max_new_tokens, **settings):
        seconds = time.perf_counter() - started
        for row, next_id in zip(growing, next_ids, strict=True):
            if not row.completion.ended:
                row.add(next_id, seconds)
        yield completions
        if all(completion.ended for completion in completions):
            return


def complete_text(
    model: GPT, tokenizer: Tokenizer, prompt: str, max_new_tokens: int, **settings
) -> str:
    """The continuation of one prompt, once it is whole. settings: as in `complete`.

    A character that is cut off at the end comes out as U+FFFD.
    """
    *_, (completion,) = complete(model, tokenizer, [prompt], max_new_tokens, **settings)
    return tokenizer.decode(completion.ids)


def seeded_generator(device: torch.device, seed: int | None) -> torch.Generator:
    """Random numbers that follow from the seed; without one, others each time."""
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


class Growing:
    """A Completion to which tokens are added, and what it takes to turn them into text."""

    def __init__(self, prompt: str, tokenizer: Tokenizer, max_new_tokens: int, stop: Sequence[str]):
        self.completion = Completion(prompt)
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.stop = stop
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.decoded = ""  # all whole characters, also those not shown yet

    def add(self, next_id: int, seconds: float) -> None:
        """Add a token. seconds: since the start."""
        completion = self.completion
        completion.seconds = seconds
        if not completion.first_s:
            completion.first_s = seconds
        if next_id == self.tokenizer.eot_id:
            self.finish("end of text")
            return
        completion.ids.append(next_id)
        self.decoded += self.decoder.decode(self.tokenizer.decode_bytes([next_id]))
        stop_at = self.find_stop()
        if stop_at is not None:
            self.finish("stop", stop_at)
        elif len(completion.ids) == self.max_new_tokens:
            self.finish("length")
        else:
            held_back = may_become(self.decoded, self.stop)
            completion.text = self.decoded[: len(self.decoded) - held_back]

    def find_stop(self) -> int | None:
        """Where the first stop text begins; None where there is none."""
        shown = len(self.completion.text)  # holds none, nor the beginning of one
        found = [self.decoded.find(text, shown) for text in self.stop]
        return min((at for at in found if at >= 0), default=None)

    def finish(self, why: str, end: int | None = None) -> None:
        """Show the text up to `end`, a number of characters, and say why it ended."""
        self.completion.text = self.decoded[:end]
        self.completion.ended = why


def may_become(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop text."""
    lengths = [
        length
        for stop_text in stop
        for length in range(1, len(stop_text))
        if text.endswith(stop_text[:length])
    ]
    return max(lengths, default=0)
