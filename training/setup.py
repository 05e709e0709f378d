"""What a run is set up from: the data's tokenizer, the prompts, the model's shape, and whether a
checkpoint and the settings are of one run.

Functions of settings and plain values; each says what does not fit, in a sentence.
"""

from dataclasses import fields
from pathlib import Path

from config import Config, ConfigError
from formats import files
from formats.run_folder import CheckpointError
from model import GPTConfig
from tokenizer_bpe import Tokenizer, TokenizerError
from training.dataset import DataError, Meta


def load_tokenizer(data_dir: str, meta: Meta) -> Tokenizer:
    """The tokenizer of a prepared folder. Raises DataError if it is not the one that made the data."""
    path = Path(data_dir) / meta.tokenizer["file"]
    tokenizer = Tokenizer.load(path)
    if files.sha256(path) != meta.tokenizer["sha256"]:
        raise DataError(
            f"{path} is not the tokenizer that made {data_dir}: its checksum is not the one in"
            " meta.json; copy the right one there, or prepare the data again"
        )
    return tokenizer


def encode_prompts(tokenizer: Tokenizer, prompts: list[str]) -> list[list[int]]:
    """Token ids of sample_prompts, before a run begins. Raises ConfigError for one that the
    tokenizer cannot encode.
    """
    try:
        return [tokenizer.encode(prompt).tolist() or [tokenizer.eot_id] for prompt in prompts]
    except TokenizerError as error:
        raise ConfigError(
            f"sample_prompts = {prompts}: {error}; choose others, or --sample_prompts=[]"
        ) from None


def model_config(config: Config, meta: Meta, vocab_size: int | None = None) -> GPTConfig:
    """The model's shape for these settings and data. Large vocabularies are rounded up to a
    multiple of 64, as tensor cores like it (GPT-2's 50,257 becomes 50,304); the ids so added are
    never sampled. vocab_size: that of the weights started from, kept as it is, since new rows
    would take probability from the trained ones.
    """
    vocab_size = vocab_size or (
        meta.vocab_size if meta.vocab_size <= 1024 else -(-meta.vocab_size // 64) * 64
    )
    shape = {f.name: getattr(config, f.name) for f in fields(GPTConfig) if f.name != "vocab_size"}
    try:
        return GPTConfig(vocab_size=vocab_size, **shape)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_same(saved: dict, now: dict, folder: Path) -> None:
    """Raises CheckpointError listing every way in which shape, data or seed differ from what a
    checkpoint was made with.
    """
    differences = []
    for part, values in now.items():
        pairs = values.items() if isinstance(values, dict) else [(None, values)]
        for name, value in pairs:
            was = saved[part].get(name, value) if name else saved[part]
            if was != value and name != "dropout":
                differences.append(
                    f"  {f'{part} {name}' if name else part}: {was} in the checkpoint, {value} now"
                )
    if differences:
        raise CheckpointError(
            f"{folder} cannot be continued with these settings; set them back, or choose another"
            " checkpoint_dir:\n" + "\n".join(differences)
        )


def changes(saved: dict, now: dict) -> str:
    """A table of the settings that a resumed run changes; empty if there are none."""
    rows = [
        (name, str(saved[name]), str(value))
        for name, value in now.items()
        if name in saved
        and saved[name] != value
        and name not in ("resume", "checkpoint_dir", "dry_run")
    ]
    if not rows:
        return ""
    return (
        "\n".join(f"{a:18}{b:>24}{c:>24}" for a, b, c in [("changed", "checkpoint", "now"), *rows])
        + "\n"
    )
