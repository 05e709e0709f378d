"""The answers to sample_prompts, at each evaluation."""

from config import ConfigError
from generating.text import complete
from model import GPT
from tokenizer_bpe import Tokenizer, TokenizerError

NEW_TOKENS = 64


def check_prompts(tokenizer: Tokenizer, prompts: list[str]) -> None:
    """Raises ConfigError for one of sample_prompts that the tokenizer cannot encode."""
    try:
        for prompt in prompts:
            tokenizer.encode(prompt)
    except TokenizerError as error:
        raise ConfigError(
            f"sample_prompts = {prompts}: {error}; choose others, or --sample_prompts=[]"
        ) from None


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
