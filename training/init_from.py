"""Whether the weights of init_from fit the settings and the data of a run; their shape."""

import dataclasses
from shlex import quote

from config import Config
from formats.pretrained import Pretrained
from formats.run_folder import CheckpointError
from model import GPTConfig
from tokenizer_bpe import Tokenizer

FREE = ("dropout",)  # of GPTConfig: no property of trained weights


def check_fits(weights: Pretrained, settings: Config, tokenizer: Tokenizer) -> None:
    """Raises CheckpointError where the settings or the data are for another model.

    Settings that were given must not ask for another shape; a shorter context is fine, as the first
    positions are kept. tokenizer: the data's.
    """
    check_tokenizer(weights, settings.data_dir, tokenizer)
    differences = []
    for name, trained in dataclasses.asdict(weights.config).items():
        if name in FREE or name not in settings.given:
            continue
        now = getattr(settings, name)
        shorter = name == "block_size" and now < trained
        if now != trained and not shorter:
            differences.append(f"  {name}: {trained} in the weights, {now} in the settings")
    if differences:
        raise CheckpointError(
            f"init_from = {weights.path} has another shape; leave out these settings to take its"
            " own (block_size may be shorter), or start from scratch:\n" + "\n".join(differences)
        )


def check_tokenizer(weights: Pretrained, data_dir: str, tokenizer: Tokenizer) -> None:
    """Raises CheckpointError where the weights were trained with another tokenizer than the data's.

    Without a tokenizer among the weights, their vocabulary has to fit: it may be padded a little.
    """
    padding = weights.config.vocab_size - tokenizer.vocab_size
    fits = 0 <= padding < 64
    if weights.tokenizer:
        fits = weights.tokenizer.same_as(tokenizer)
    if not fits:
        how = f"{tokenizer.vocab_size:,} ids against {weights.config.vocab_size:,}"
        if padding == 0:
            how = "other tokens for the same ids"
        theirs = quote(weights.path.as_posix())
        raise CheckpointError(
            f"{data_dir} has another tokenizer than the weights of {weights.path} ({how});"
            " prepare the text with theirs:\n"
            f"  python prepare_data.py TEXT --tokenizer {theirs} --out data/NAME"
        )


def fill_shape(settings: Config, shape: GPTConfig) -> None:
    """Set the shape settings that were not given to those of `shape`."""
    for name, value in dataclasses.asdict(shape).items():
        if hasattr(settings, name) and name not in settings.given and name not in FREE:
            setattr(settings, name, value)
