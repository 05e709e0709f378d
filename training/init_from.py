"""Whether the weights of init_from fit the settings and the data of a run; their shape."""

import dataclasses

from config import Config
from formats.pretrained import Pretrained
from formats.run_folder import CheckpointError
from model import GPTConfig
from tokenizer_bpe import Tokenizer

FREE = ("dropout",)  # of GPTConfig: no property of trained weights


def check_fits(weights: Pretrained, settings: Config, tokenizer: Tokenizer) -> None:
    """Raises CheckpointError where the run is about another model or another tokenizer.

    Settings that were given must not ask for another shape. A shorter context is no contradiction;
    a longer one is: its positions were never trained. tokenizer: the data's.
    """
    check_tokenizer(weights, settings.data_dir, tokenizer)
    differences = []
    for name, trained in dataclasses.asdict(weights.config).items():
        if name in FREE or name not in settings.given:
            continue
        now = getattr(settings, name)
        difference = f"  {name}: {trained} in the weights, {now} in the settings"
        if name != "block_size" and now != trained:
            differences.append(difference)
        if name == "block_size" and now > trained:
            differences.append(f"{difference} (a shorter context would do)")
    if differences:
        raise CheckpointError(
            f"init_from = {weights.path} has another shape; leave out these settings to take its"
            " own, or start from nothing:\n" + "\n".join(differences)
        )


def check_tokenizer(weights: Pretrained, data_dir: str, tokenizer: Tokenizer) -> None:
    """Raises CheckpointError where the weights know another tokenizer than the data's."""
    prepare = (
        "prepare the text with the weights' own:\n  python prepare_data.py TEXT --tokenizer"
        f" {weights.path} --out data/NAME"
    )
    if weights.tokenizer and not weights.tokenizer.same_as(tokenizer):
        here, there = (f"{t.kind} of {t.vocab_size:,}" for t in (tokenizer, weights.tokenizer))
        raise CheckpointError(
            f"{data_dir} was made with another tokenizer ({here}) than the weights of"
            f" {weights.path} ({there}), so its ids mean other text to them; {prepare}"
        )
    padding = weights.config.vocab_size - tokenizer.vocab_size
    likely_another = padding >= 64 and not weights.tokenizer
    if padding < 0 or likely_another:
        raise CheckpointError(
            f"{data_dir} has a vocabulary of {tokenizer.vocab_size:,}, the weights of"
            f" {weights.path} one of {weights.config.vocab_size:,}; {prepare}"
        )


def fill_shape(settings: Config, shape: GPTConfig) -> None:
    """Set the shape settings that were not given to those of `shape`."""
    for name, value in dataclasses.asdict(shape).items():
        if hasattr(settings, name) and name not in settings.given and name not in FREE:
            setattr(settings, name, value)
