"""Prompts -> their continuations as text, as they grow.

Knows a model and its tokenizer; no files and no terminal.
"""

import codecs
import time
from dataclasses import dataclass, field

import torch

from generating import decode
from model import GPT
from tokenizer_bpe import Tokenizer


@dataclass
class Completion:
    """One continuation as it grows. text: whole characters only, and nothing that may turn out to
    be a stop text. ids: its tokens. ended: why it is finished, "end of text", "stop" or
    "length"; empty until then. first_s, seconds: from the start to its first and last token.
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
    stop: list[str] = (),
    seed: int | None = None,
    **settings,
):
    """Continue each prompt; yields the same list of Completions, one a prompt, every time that they
    have grown.

    An empty prompt is the start of a document. stop: texts that end a continuation, themselves left
    out. settings: as in decode.generate. Raises TokenizerError for a prompt that the tokenizer
    cannot encode.
    """
    started = time.perf_counter()
    ids = [tokenizer.encode(prompt).tolist() or [tokenizer.eot_id] for prompt in prompts]
    generator = torch.Generator(model.wte.weight.device)
    generator.manual_seed(seed) if seed is not None else generator.seed()
    rows = [Completion(prompt) for prompt in prompts]
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in prompts]
    decoded = [""] * len(prompts)
    for new in decode.generate(
        model, ids, max_new_tokens, vocab_size=tokenizer.vocab_size, generator=generator, **settings
    ):
        for n, (row, next_id) in enumerate(zip(rows, new, strict=True)):
            if row.ended:
                continue
            row.seconds = time.perf_counter() - started
            row.first_s = row.first_s or row.seconds
            if next_id == tokenizer.eot_id:
                row.text, row.ended = decoded[n], "end of text"
                continue
            row.ids.append(next_id)
            decoded[n] += decoders[n].decode(tokenizer.decode_bytes([next_id]))
            found = [
                at for at in (decoded[n].find(text, len(row.text)) for text in stop) if at >= 0
            ]
            if found:
                row.text, row.ended = decoded[n][: min(found)], "stop"
            elif len(row.ids) == max_new_tokens:
                row.text, row.ended = decoded[n], "length"
            else:
                row.text = decoded[n][: len(decoded[n]) - may_become(decoded[n], stop)]
        yield rows
        if all(row.ended for row in rows):
            return


def may_become(text: str, stop: list[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop text."""
    return max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
