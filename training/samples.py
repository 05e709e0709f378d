"""The answers to sample_prompts, at each evaluation."""

from dataclasses import replace

from config import Config, ConfigError
from generating.text import complete
from model import GPT
from tokenizer_bpe import Tokenizer, TokenizerError

NEW_TOKENS = 64


def without_unknown_characters(config: Config, tokenizer: Tokenizer) -> Config:
    """The settings with those of sample_prompts that the tokenizer can encode; prints the others.

    The prompts of a preset are in English, and a text at character level may lack its letters.
    Raises ConfigError for one on the command line.
    """
    known = []
    for prompt in config.sample_prompts:
        try:
            tokenizer.encode(prompt)
            known.append(prompt)
        except TokenizerError as error:
            problem = f"sample_prompts: {prompt!r}: {error}"
            if "sample_prompts" in config.typed:
                raise ConfigError(f"{problem}; choose another, or --sample_prompts=[]") from None
            print(f"{problem}; the run goes without it. --sample_prompts=TEXT sets another")
    return replace(config, sample_prompts=known)


def answer_prompts(
    model: GPT, tokenizer: Tokenizer, prompts: list[str], seed: int, cast
) -> list[dict]:
    """[{"prompt", "text"}] for each prompt.

    The same weights give the same answers. cast: makes an autocast context.
    """
    settings = {"seed": seed, "temperature": 0.8, "top_k": 50}
    answers = []
    model.eval()
    for prompt in prompts:
        with cast():
            *_, (answer,) = complete(model, tokenizer, [prompt], NEW_TOKENS, **settings)
        answers.append({"prompt": prompt, "text": answer.text})
    model.train()
    return answers
