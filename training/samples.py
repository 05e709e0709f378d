"""What the model makes of sample_prompts, at each evaluation."""

import torch

from generating import decode
from hardware import out_of_memory
from model import GPT
from tokenizer_bpe import Tokenizer

NEW_TOKENS = 64


def answer_prompts(
    model: GPT, tokenizer: Tokenizer, prompts: list[tuple[str, list[int]]], seed: int, cast
) -> list[dict]:
    """[{"prompt", "text"}] for prompts and their token ids; none where memory does not suffice.

    The answers differ between evaluations by the weights alone. cast: makes an autocast context.
    """
    model.eval()
    try:
        answers = []
        for prompt, ids in prompts:
            with cast():
                new = complete(model, ids, seed, tokenizer.vocab_size, tokenizer.eot_id)
            answers.append({"prompt": prompt, "text": tokenizer.decode(new)})
        return answers
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        print("\nno memory for sample_prompts; training goes on", flush=True)
        return []
    finally:
        model.train()


def complete(model: GPT, prompt: list[int], seed: int, vocab_size: int, eot_id: int) -> list[int]:
    """The ids that follow those of a prompt, up to the end of the text."""
    generator = torch.Generator(model.wte.weight.device).manual_seed(seed)
    settings = {"temperature": 0.8, "top_k": 50, "vocab_size": vocab_size, "generator": generator}
    new = []
    for (next_id,) in decode.generate(model, [prompt], NEW_TOKENS, **settings):
        if next_id == eot_id:
            break
        new.append(next_id)
    return new
