"""Continues prompts as text, token by token, and builds the prompts of conversations.

Knows the tokenizer, but not where text comes from or how it is shown.
"""

import codecs
import time
from collections.abc import Collection, Iterator, Sequence

import torch

from formats.conversation import form_of, turns_of
from generating import decode
from model import GPT
from tokenizer_bpe import Tokenizer


class Completion:
    """One continuation as it grows.

    text: without incomplete characters, and without an ending that may become a stop text. ids: its
    tokens. ended: why it is finished: "end of text", "stop", "length", or "NaN" if the logits are
    NaN or infinite; "" until then. seconds: from the start to its last token.
    """

    def __init__(
        self,
        prompt: str,
        tokenizer: Tokenizer,
        max_new_tokens: int,
        stop: Sequence[str],
        end_ids: Collection[int] = (),
    ):
        self.prompt = prompt
        self.text = ""
        self.ids = []
        self.ended = ""
        self.seconds = 0.0
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._stop = stop
        self._end_ids = {tokenizer.eot_id, *end_ids}
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoded = ""  # all complete characters, including those held back

    def add(self, next_id: int, seconds: float) -> None:
        """Add a token. seconds: since the start."""
        self.seconds = seconds
        if next_id in self._end_ids:
            self.text, self.ended = self._decoded, "end of text"
            return
        if next_id == decode.NAN:
            self.text, self.ended = self._decoded, "NaN"
            return
        self.ids.append(next_id)
        self._decoded += self._decoder.decode(self._tokenizer.decode_bytes([next_id]))
        stops = [self._decoded.find(text) for text in self._stop if text in self._decoded]
        if stops:
            self.text, self.ended = self._decoded[: min(stops)], "stop"
        elif len(self.ids) == self._max_new_tokens:
            self.text, self.ended = self._decoded, "length"
        else:
            held_back = begun_stop(self._decoded, self._stop)
            self.text = self._decoded[: len(self._decoded) - held_back]


def begun_stop(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop text."""
    begun = (n for words in stop for n in range(1, len(words)) if text.endswith(words[:n]))
    return max(begun, default=0)


def complete(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[str | list[int]],
    max_new_tokens: int,
    stop: Sequence[str] = (),
    end_ids: Collection[int] = (),
    chat: bool = False,
    seed: int | None = None,
    **settings,
) -> Iterator[list[Completion]]:
    """Continue each prompt; yields the same list of Completions after each token.

    prompts: texts or token ids; an empty prompt is the start of a document. stop: texts that end a
    continuation, which does not include them. end_ids: ids that end one, besides the tokenizer's
    end-of-text. chat: each is a reply, which also ends where the user's turn begins. seed: None for
    different tokens each time. settings: as in decode.generate. Raises TokenizerError for a prompt
    that the tokenizer cannot encode.
    """
    if chat:
        form = form_of(tokenizer)
        stop, end_ids = [*stop, *form.stop], [*end_ids, *form.markers.values()]
    started = time.perf_counter()
    generator = torch.Generator(model.wte.weight.device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    settings |= {"vocab_size": tokenizer.vocab_size, "generator": generator}
    settings["end_ids"] = [tokenizer.eot_id, *end_ids]
    given = [ids_of(tokenizer, prompt) or [tokenizer.eot_id] for prompt in prompts]
    texts = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts]
    completions = [Completion(text, tokenizer, max_new_tokens, stop, end_ids) for text in texts]
    for next_ids in decode.generate(model, given, max_new_tokens, **settings):
        seconds = time.perf_counter() - started
        for completion, next_id in zip(completions, next_ids, strict=True):
            if not completion.ended:
                completion.add(next_id, seconds)
        yield completions
        if all(completion.ended for completion in completions):
            return


def ids_of(tokenizer: Tokenizer, prompt: str | list[int]) -> list[int]:
    """The token ids of a prompt as complete() takes it. Raises TokenizerError."""
    return tokenizer.encode(prompt).tolist() if isinstance(prompt, str) else prompt


class Conversation:
    """The messages to a model and its replies.

    system: the system message, or None. dropped: how many of the oldest turns the last prompt left
    out, each a message and its reply.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer, system: str | None = None):
        self.room = model.config.block_size // 2  # for the prompt; the rest is for the reply
        self.tokenizer = tokenizer
        self.form = form_of(tokenizer)
        self.system = [{"role": "system", "content": system}] if system else []
        self.messages = []  # alternately the user's and the assistant's
        self.dropped = 0

    def prompt(self, line: str) -> list[int]:
        """The token ids of the prompt for a reply to the user's line.

        Drops the oldest turns, but not the system message, if the prompt would take more than half
        of the context.
        """
        messages = [*self.messages, {"role": "user", "content": line}]
        for start in range(0, len(messages), 2):
            turns = turns_of([*self.system, *messages[start:]])
            prompt = self.form.prompt(turns, self.tokenizer)
            self.dropped = start // 2
            if len(prompt) <= self.room:
                break
        return prompt

    def remember(self, line: str, reply: str) -> None:
        """Keep a message and its reply, without its reasoning, as the template of Qwen3 does."""
        said = reply.rpartition("</think>")[2]
        self.messages.append({"role": "user", "content": line})
        self.messages.append({"role": "assistant", "content": said})
