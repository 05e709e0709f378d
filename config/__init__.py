"""Every setting of a training run: its name, type, default and meaning, and how presets and the
command line change it.

A preset is a Python file of plain assignments (`learning_rate = 3e-4`); the command line overrides
it (`--learning_rate=1e-4`). A name or a value that makes no sense is an error, never ignored.
"""

import ast
import dataclasses
import difflib
import json
import sys
import typing
from dataclasses import dataclass
from pathlib import Path


class ConfigError(ValueError):
    """A setting that cannot be used, in a sentence for the user."""


def setting(default, meaning, choices=None, low=None):
    """A field of Config with its meaning for --help, and what values it takes (`low`: the
    smallest).
    """
    make = (
        {"default_factory": lambda: list(default)}
        if isinstance(default, list)
        else {"default": default}
    )
    return dataclasses.field(**make, metadata={"meaning": meaning, "choices": choices, "low": low})


@dataclass
class Config:
    """The settings of one run. None stands for "derived from the others", as the meaning says."""

    # data and run
    data_dir: str = setting(
        "data/python_stdlib", "prepared folder to train on, as prepare_data.py writes it"
    )
    data_location: str = setting(
        "auto",
        "where the tokens lie while training: on the GPU when they fit, else in RAM, else"
        " memory-mapped",
        ["auto", "gpu", "ram", "mmap"],
    )
    checkpoint_dir: str | None = setting(
        None, "folder of this run, anywhere; None: checkpoints/ and the preset's name"
    )
    resume: str = setting(
        "auto",
        "auto: continue the run in checkpoint_dir if there is one; must: only continue; never: only"
        " start anew",
        ["auto", "must", "never"],
    )
    profile: bool = setting(
        False,
        "after a few steps, time the parts of some: a table, and a Chrome trace in checkpoint_dir",
    )
    dry_run: bool = setting(
        False, "print what the run will take in memory, disk, hours and money; write nothing"
    )
    # model
    init_from: str | None = setting(
        None,
        "weights to start from: a run, a step of one, or a local folder in Hugging Face's GPT-2"
        " format; the shape, where not given, is theirs",
    )
    arch: str = setting(
        "gpt2",
        "gpt2; or qwen3: RMSNorm, QK norm, rotary positions and SwiGLU, no biases",
        ["gpt2", "qwen3"],
    )
    n_layer: int = setting(12, "layers", low=1)
    n_head: int = setting(12, "attention heads a layer; must divide n_embd", low=1)
    n_embd: int = setting(768, "width of the model", low=1)
    block_size: int = setting(1024, "context: tokens a sequence", low=1)
    bias: bool = setting(True, "biases in Linear and LayerNorm, as in GPT-2; qwen3 has none")
    dropout: float = setting(
        0.0, "dropout probability; 0 unless the data is seen many times", low=0
    )
    tie_weights: bool = setting(
        True, "one matrix for the token embedding and the output head, as in GPT-2"
    )
    n_inner: int | None = setting(
        None,
        "width of the MLP; None: 4 x n_embd, with qwen3 8/3 of it up to a multiple of 32",
        low=1,
    )
    n_kv_head: int | None = setting(
        None,
        "heads of keys and values, each shared by a group of queries (qwen3); None: n_head",
        low=1,
    )
    head_dim: int | None = setting(None, "width of a head (qwen3); None: n_embd / n_head", low=1)
    rope_theta: float = setting(
        10_000.0, "base of the wavelengths of rotary positions (qwen3)", low=1
    )
    zero_init: bool = setting(
        False,
        "begin with zero projections onto the residual stream, and a zero head if it is untied",
    )
    # optimisation
    optimizer: str = setting(
        "adamw",
        "adamw; or muon: Muon on the matrices of the blocks, AdamW without decay on the rest",
        ["adamw", "muon"],
    )
    batch_size: int = setting(
        32, "sequences an optimiser step, over all accumulation and all GPUs", low=1
    )
    micro_batch_size: int | None = setting(
        None,
        "sequences in a GPU's memory at once; must divide batch_size; None: all of them",
        low=1,
    )
    learning_rate: float = setting(3e-4, "peak learning rate", low=0)
    min_lr: float | None = setting(
        None, "learning rate at the end; None: a tenth of learning_rate, or 0 with wsd", low=0
    )
    lr_schedule: str = setting(
        "cosine",
        "after the warm-up: cosine, or wsd: constant, then a straight line down",
        ["cosine", "wsd"],
    )
    decay_fraction: float = setting(0.5, "share of the steps in which wsd decays", low=0)
    warmup_steps: int = setting(200, "steps of linear warm-up", low=0)
    muon_lr: float = setting(
        0.02, "peak learning rate of Muon's matrices; learning_rate is then that of the rest", low=0
    )
    muon_momentum: float = setting(0.95, "Muon's momentum", low=0)
    weight_decay: float = setting(0.1, "decoupled weight decay, on matrices only", low=0)
    beta1: float = setting(0.9, "AdamW's momentum", low=0)
    beta2: float = setting(0.95, "AdamW's second-moment decay a step", low=0)
    beta2_tokens: float | None = setting(
        None,
        "the same as a half-life in tokens, which holds for any batch_size; overrides beta2",
        low=1,
    )
    grad_clip: float = setting(1.0, "largest gradient norm; 0: no clipping", low=0)
    epochs: float = setting(1.0, "passes over the training data", low=0)
    max_steps: int | None = setting(None, "optimiser steps in all; overrides epochs", low=1)
    # looking, logging, saving
    eval_interval: int = setting(500, "steps between evaluations; 0: only at the end", low=0)
    eval_batches: int = setting(
        20,
        "batches of batch_size in an evaluation, always the same windows; 0: the whole validation"
        " split",
        low=0,
    )
    log_interval: int = setting(10, "steps between log lines", low=1)
    save_interval: int = setting(
        1000,
        "steps between checkpoints; evaluations, signals and the end save too; 0: only those",
        low=0,
    )
    save_minutes: float = setting(
        15.0, "minutes between checkpoints, whatever the steps; 0: only by steps", low=0
    )
    keep_last: int = setting(
        2, "newest checkpoints kept; the best by validation loss is kept besides", low=1
    )
    sample_prompts: list[str] = setting(
        [], "prompts answered at each evaluation, into log and terminal"
    )
    report_minutes: float = setting(
        1.0,
        "minutes between drawings of report.html at evaluations; the end draws it too (needs"
        " matplotlib); 0: none",
        low=0,
    )
    tensorboard: bool = setting(False, "also write the curves for TensorBoard, to the run's folder")
    wandb: str | None = setting(
        None,
        "also send the curves to this Weights & Biases project; without network or account they"
        " stay in the run's folder",
    )
    max_bad_steps: int = setting(
        10,
        "steps in a row whose loss or gradient is no number, all skipped, before the run stops",
        low=1,
    )
    # budget
    cost_per_hour: float = setting(
        0.0, "price of the machine an hour, in any unit; the log then shows what was spent", low=0
    )
    max_cost: float | None = setting(None, "stop with a save when this much is spent", low=0)
    max_hours: float | None = setting(
        None, "stop with a save after this many hours, over all starts of the run", low=0
    )
    # machine
    device: str = setting("auto", "auto, cuda, cuda:1, mps or cpu")
    dtype: str = setting(
        "auto",
        "precision of the matrix products; auto: the fastest that the device has",
        ["auto", "bfloat16", "float16", "float32"],
    )
    compile: bool | None = setting(
        None,
        "torch.compile the model; where that fails the run goes on without; None: unless a short"
        " run on a CPU would not repay it",
    )
    seed: int = setting(1337, "initial weights, data order and dropout all follow from it", low=0)

    given = (
        frozenset()
    )  # no setting: the names that preset and command line set, which init_from must not contradict


FIELDS = {f.name: f for f in dataclasses.fields(Config)}
TYPES = typing.get_type_hints(Config)
# What nanoGPT calls some of them.
NANOGPT = {
    "out_dir": "checkpoint_dir",
    "dataset": "data_dir",
    "max_iters": "max_steps",
    "warmup_iters": "warmup_steps",
    "eval_iters": "eval_batches",
    "lr_decay_iters": "max_steps",
    "gradient_accumulation_steps": "micro_batch_size",
    "wandb_project": "wandb",
}


def load(argv: list[str]) -> Config:
    """The settings for a command line: `[PRESET.py] [--key=value ...]`. Raises ConfigError; prints
    the settings and exits for --help.
    """
    if "--help" in argv or "-h" in argv:
        print(help_text())
        sys.exit(0)
    config, presets = Config(), [Path(a) for a in argv if not a.startswith("--")]
    if len(presets) > 1:
        raise ConfigError(
            f"{presets[0]} and {presets[1]}: a run takes one preset (settings are given as"
            " --key=value)"
        )
    for preset in presets:
        values = read_preset(preset)
        for name, (value, where) in values.items():
            setattr(config, name, convert(name, value, where))
        config.given |= values.keys()
    for arg in argv:
        if arg.startswith("--"):
            name, given, text = arg[2:].partition("=")
            name = name.replace("-", "_")
            check_name(name, "the command line")
            if not given and base_type(name) is not bool:
                raise ConfigError(f"--{name} has no value; write --{name}={example(name)}")
            setattr(config, name, parse(name, text if given else "True", f"--{name}"))
            config.given |= {name}
    if config.checkpoint_dir is None:
        config.checkpoint_dir = f"checkpoints/{presets[0].stem if presets else 'run'}"
    check(config)
    return config


def read_preset(path: Path) -> dict:
    """The assignments of a preset as {name: (value, where)}. Raises ConfigError for a missing or
    broken file or an unknown name.
    """
    try:
        code = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        there = sorted(
            p.as_posix() for p in Path(__file__).parent.glob("*.py") if p.stem != "__init__"
        )
        near = difflib.get_close_matches(path.name, [Path(p).name for p in there], 1)
        hint = (
            f"did you mean config/{near[0]}?"
            if near
            else "presets here: " + ", ".join("config/" + Path(p).name for p in there)
        )
        raise ConfigError(f"no preset {path}; {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    values, lines, line = {}, {}, "?"
    try:
        for statement in ast.parse(code, str(path)).body:
            line = statement.lineno
            exec(compile(ast.Module([statement], []), str(path), "exec"), values)
            lines |= dict.fromkeys(values.keys() - lines.keys(), line)
    except Exception as error:
        line = error.lineno if isinstance(error, SyntaxError) else line
        raise ConfigError(f"{path}, line {line}: {type(error).__name__}: {error}") from None
    settings = {}
    for name, value in values.items():
        if not name.startswith("_") and not isinstance(value, type(sys)):
            where = f"{path}, line {lines[name]}"
            check_name(name, where)
            settings[name] = (value, where)
    return settings


def check_name(name: str, where: str) -> None:
    """Raises ConfigError, with the nearest real setting, unless `name` is one."""
    if name not in FIELDS:
        near = (
            [NANOGPT[name]] if name in NANOGPT else difflib.get_close_matches(name, FIELDS, 1, 0.5)
        )
        raise ConfigError(
            f"{where}: no setting is called {name!r}"
            + (f"; did you mean {near[0]!r}?" if near else "")
            + " (python train.py --help lists all)"
        )


def parse(name: str, text: str, where: str):
    """The value of a setting from the text of a command line."""
    kind = base_type(name)
    if text == "None":
        return convert(name, None, where)
    try:
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
                text.lower()
            ]
        if kind is int:
            return convert(
                name,
                int(text) if text.lstrip("+-").replace("_", "").isdigit() else float(text),
                where,
            )
        if kind is float:
            return convert(name, float(text), where)
        if kind is list:
            return convert(name, json.loads(text) if text.startswith("[") else [text], where)
    except (KeyError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{where}={text}: {name} takes {describe(name)}") from None
    return convert(name, text, where)


def convert(name: str, value, where: str):
    """`value` in the type of the setting. Raises ConfigError where it does not fit."""
    kind, choices, low = (
        base_type(name),
        FIELDS[name].metadata["choices"],
        FIELDS[name].metadata["low"],
    )
    if value is None and type(None) in typing.get_args(TYPES[name]):
        return None
    if (
        kind is float
        and type(value) is int
        or kind is int
        and type(value) is float
        and value.is_integer()
    ):
        value = kind(value)  # 1 for 1.0, 2e5 for 200000
    fits = type(value) is kind and (kind is not list or all(isinstance(v, str) for v in value))
    if (
        not fits
        or (choices and value not in choices)
        or (low is not None and not low <= value < float("inf"))
    ):
        raise ConfigError(f"{where}: {name} = {value!r}, but it takes {describe(name)}")
    return value


def check(config: Config) -> None:
    """Raises ConfigError where settings contradict each other."""
    micro = config.micro_batch_size
    if micro and config.batch_size % micro:
        fits = max(
            m for m in range(1, min(micro, config.batch_size) + 1) if config.batch_size % m == 0
        )
        raise ConfigError(
            f"micro_batch_size = {micro} does not divide batch_size = {config.batch_size}; the next"
            f" smaller that does is {fits}"
        )
    if config.arch == "qwen3" and config.bias and "bias" in config.given:
        raise ConfigError(
            "bias = True, but arch = qwen3 has no biases; leave bias out, or take arch = gpt2"
        )
    if config.beta1 >= 1 or config.beta2 >= 1:
        raise ConfigError(f"beta1 = {config.beta1}, beta2 = {config.beta2}: both must be below 1")
    if config.seed >= 2**32:
        raise ConfigError(f"seed = {config.seed}: it must be below 2**32")
    if not config.checkpoint_dir or Path(config.checkpoint_dir).is_file():
        raise ConfigError(
            f"checkpoint_dir = {config.checkpoint_dir!r}: it must be a folder, there or to be made"
        )
    if (config.min_lr or 0) > config.learning_rate:
        raise ConfigError(
            f"min_lr = {config.min_lr} is above learning_rate = {config.learning_rate}; min_lr ="
            " None takes a tenth of it"
        )
    if config.decay_fraction > 1:
        raise ConfigError(
            f"decay_fraction = {config.decay_fraction}: it is a share of the steps, at most 1"
        )
    if config.optimizer == "muon" and not config.learning_rate:
        raise ConfigError(
            "optimizer = muon needs a learning_rate above 0: the schedule of muon_lr follows it"
        )
    if config.max_cost is not None and not config.cost_per_hour:
        raise ConfigError(
            f"max_cost = {config.max_cost} needs cost_per_hour, the price of the machine an hour"
        )
    if not config.max_steps and not config.epochs:
        raise ConfigError("epochs = 0 and no max_steps: nothing to train")


def base_type(name: str) -> type:
    """int for a setting declared `int | None`, list for `list[str]`, and so on."""
    kind = TYPES[name]
    kind = (
        next((t for t in typing.get_args(kind) if t is not type(None)), kind)
        if type(None) in typing.get_args(kind)
        else kind
    )
    return typing.get_origin(kind) or kind


def describe(name: str) -> str:
    """What a setting takes, in words."""
    kind, meta = base_type(name), FIELDS[name].metadata
    if meta["choices"]:
        return "one of " + ", ".join(meta["choices"])
    words = {
        bool: "True or False",
        int: "a whole number",
        float: "a number",
        str: "a text",
        list: 'a list of texts, as in \'["Once", "To be"]\'',
    }[kind]
    return (
        words
        + (f" of at least {meta['low']}" if meta["low"] is not None else "")
        + (" or None" if type(None) in typing.get_args(TYPES[name]) else "")
    )


def example(name: str) -> str:
    """A value to show in an error message."""
    default = FIELDS[name].default
    return "VALUE" if default in (None, dataclasses.MISSING) else str(default)


def help_text() -> str:
    """All settings, their defaults and meanings, as train.py --help prints them."""
    lines = [
        "usage: python train.py [config/PRESET.py] [--key=value ...]",
        "",
        "settings, their defaults and meanings:",
    ]
    for name, field in FIELDS.items():
        default = [] if field.default is dataclasses.MISSING else field.default
        choices = f" ({', '.join(field.metadata['choices'])})" if field.metadata["choices"] else ""
        lines.append(f"  --{name}={default}".ljust(36) + f" {field.metadata['meaning']}{choices}")
    return "\n".join(lines)
