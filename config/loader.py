"""A preset, a run's folder or a command line -> values in the types of a table of settings.

Knows how a value is written, checked and explained; config/__init__.py has the settings.
"""

import argparse
import ast
import contextlib
import dataclasses
import json
import os
import re
import reprlib
import runpy
import traceback
import typing
from collections.abc import Iterable
from dataclasses import Field
from pathlib import Path
from types import ModuleType, NoneType

from command_line import LOGIN, UserError, near, our_file, our_tool, place, quote, unquoted

# Names in nanoGPT and in other programs, and what to write here.
OTHERS = {
    "lr": "learning_rate",
    "out": "checkpoint_dir",
    "output_dir": "checkpoint_dir",
    "out_dir": "checkpoint_dir",
    "dataset": "data_dir",
    "max_iters": "max_steps",
    "lr_decay_iters": "max_steps",
    "warmup_iters": "warmup_steps",
    "eval_iters": "eval_batches",
    "gradient_accumulation_steps": "batch_size / micro_batch_size; set micro_batch_size",
    "wandb_log": "wandb = PROJECT",
    "wandb_project": "wandb = PROJECT",
    "wandb_run_name": "the last folder of checkpoint_dir",
    "decay_lr": "min_lr = learning_rate, for a constant rate",
    "backend": "device",
    "config": f"a word without --, as in python {our_file('train.py')} config/demo.py",
    "eval_only": f"python {our_tool('evaluate')} RUN --data DATA",
    "always_save_checkpoint": "save_interval",
    "vocab_size": f"python {our_file('prepare_data.py')} --vocab_size N, as it comes from the data",
    # nanochat's
    "num_iterations": "max_steps",
    "max_seq_len": "block_size",
    "depth": "n_layer",
    "device_batch_size": "micro_batch_size",
    "total_batch_size": "batch_size, in sequences",
    "eval_every": "eval_interval",
    "save_every": "save_interval",
    # Those of transformers' Trainer, and of PyTorch's old launcher and DeepSpeed's.
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "eval_steps": "eval_interval",
    "save_steps": "save_interval",
    "save_total_limit": "keep_last",
    "logging_steps": "log_interval",
    "max_seq_length": "block_size",
    "max_grad_norm": "grad_clip",
    "bf16": "dtype",
    "fp16": "dtype",
    "model_name_or_path": "init_from",
    "resume_from_checkpoint": "the command of the first start, which continues the run",
    "local_rank": f"a variable that torchrun sets; write torchrun {our_file('train.py')} ...",
}
# Values of nanoGPT's init_from that are not weights here.
NANOGPT_STARTS = ("scratch", "resume", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
RECORDED = '"checkpoint_dir"'  # is in each config.json that a run wrote, and in no other program's
# What a setting of each type takes; the limits are those of its table.
KINDS = {
    bool: "True or False",
    int: "a whole number from {low:,} to {high:,}",
    float: "a number from {low:,} to {high:,}",
    str: "a text that is not empty",
    list: "a list of texts, as in \"['Once', 'To be']\"",
    NoneType: "None",
}


class ConfigError(UserError):
    """A setting that cannot be used."""


def setting(default, meaning: str, low=0, high=10**9, choices=None, section=None, place=False):
    """A field of a table: its default, its meaning for --help, and the values it takes.

    low, high: the smallest and largest number. choices: the only texts. section: the heading before
    it in --help. place: it is a path or an address.
    """
    metadata = {"meaning": meaning, "low": low, "high": high}
    metadata |= {"choices": choices, "section": section, "place": place}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def kinds_of(field: Field) -> tuple[type, ...]:
    """The types that a setting takes: (int, NoneType) for `int | None`."""
    return typing.get_args(field.type) or (field.type,)


def describe(field: Field) -> str:
    """The values that a setting takes, in words."""
    if field.metadata["choices"]:
        return ", ".join(field.metadata["choices"])
    words = " or ".join(KINDS[kind] for kind in kinds_of(field))
    return words.format(**field.metadata)


def parse(field: Field, text: str):
    """The value of a text from the command line; `convert` checks it."""
    kinds, word = kinds_of(field), unquoted(text)
    if word == "None" or (word == "none" and NoneType in kinds):
        return None
    if str in kinds and NoneType in kinds and word.capitalize() in ("True", "False"):
        return word.capitalize() == "True"  # no name: whoever writes it means a switch
    if str in kinds:
        return text if field.metadata["place"] else word
    if list in kinds and not word.startswith("["):
        return [text]
    try:
        value = ast.literal_eval(word.capitalize() if bool in kinds else word)
    except (ValueError, SyntaxError):
        return text
    return text if isinstance(value, tuple) else value  # as 1,000


def convert(field: Field, value, where: str | Path):
    """`value`, as a preset may compute it, in the type of a setting.

    Raises ConfigError if it does not fit.
    """
    kinds, limits = kinds_of(field), field.metadata
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if getattr(value, "ndim", None) == 0:
        value = value.item()  # a number of NumPy or PyTorch
    if type(value) is tuple and list in kinds:
        value = list(value)
    if float in kinds and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if int in kinds and type(value) is float and value.is_integer():
        value = int(value)
    fits = type(value) in kinds
    if fits and limits["choices"]:
        fits = value in limits["choices"]
    if fits and type(value) is str:
        fits = bool(value.strip())
    if fits and type(value) is list:
        fits = all(type(item) is str for item in value)
    if fits and type(value) in (int, float):
        fits = limits["low"] <= value <= limits["high"]
    if not fits:
        shown = reprlib.repr(value)
        raise ConfigError(f"{where}: {field.name} = {shown}, but it must be {describe(field)}")
    if limits["place"] and value is not None:
        return placed(value, f"{where}: {field.name}")
    return value


def fitting(values: dict, table: dict[str, Field]) -> dict:
    """The settings among `values` that fit their types, as a damaged file may hold others."""
    found = {}
    for name in values.keys() & table.keys():
        with contextlib.suppress(ConfigError):
            found[name] = convert(table[name], values[name], "")
    return found


def placed(text: str, where: str) -> str:
    """The path or address that a text means. Raises ConfigError."""
    try:
        return place(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{where}: {error}") from None


# -- where the values come from --------------------------------------------------------------------


def read_arguments(argv: list[str], table: dict[str, Field]) -> tuple[dict, Path | None]:
    """The settings on a command line, {name: value}, and the preset or run that it names.

    A setting is `--key=value`, `--key value` or `key=value`; a bare `--key` means True. Raises
    ConfigError.
    """
    where, values, others, words = "the command line", {}, [], list(argv)
    if "=" in words:
        raise ConfigError(f"{where}: write --NAME=VALUE without blanks around the =")
    while words:
        word = words.pop(0)
        if not word.startswith("-") and (not re.match(r"\w+=", word) or os.path.exists(word)):
            others.append(word)
            continue
        name, equals, text = word.lstrip("-").partition("=")
        check_names([name], table, where)
        if not equals and words and is_value(words[0], table[name]):
            text = words.pop(0)
        elif not equals and bool in kinds_of(table[name]):
            text = "True"
        if not text.strip():
            raise ConfigError(f"{where}: --{name} has no value; write --{name}=VALUE")
        values[name] = convert(table[name], parse(table[name], text), where)
    if len(others) > 1:
        raise ConfigError(
            f"a run takes one preset, not {others[0]} and {others[1]}; a value with blanks needs"
            " quotes around it"
        )
    return values, Path(placed(others[0], where)) if others else None


def is_value(word: str, field: Field) -> bool:
    """True if the word after `--key` is its value.

    The one after a switch may be a preset, a run or another setting; "no" and "0" are none of them.
    """
    if bool in kinds_of(field) and (re.search(r"[-./\\=]", word) or os.path.exists(word)):
        return False
    return not word.startswith("--")


def find_preset(path: Path) -> Path:
    """The file of a preset; a relative path counts from here, or else from the folder of train.py.

    Raises ConfigError, with the nearest preset.
    """
    for file in (path, Path(__file__).parent.parent / path):
        if file.suffix == ".py" and file.exists():
            return file
    if path.exists():
        raise ConfigError(
            f"{path} is not a preset, which is a Python file of NAME = VALUE, as config/laptop.py"
        )
    names = [preset.stem for preset in presets()]
    meant = near(path.name.removeprefix("config.").removesuffix(".py"), names)
    hint = f"config/ has {', '.join(names)}"
    if meant:
        hint = "did you mean " + " or ".join(f"config/{name}.py" for name in meant) + "?"
    run = Path("checkpoints", path.stem)
    if (run / "config.json").exists():  # of a preset that is gone, as by git pull
        hint += f"\nTo continue its run:\n  python {our_file('train.py')} {quote(run.as_posix())}"
    raise ConfigError(f"there is no preset or run {path}; {hint}")


def read_preset(path: Path, table: dict[str, Field]) -> dict:
    """The assignments of a preset, {name: value}. Raises ConfigError."""
    path = find_preset(path)
    try:
        source = path.read_bytes()
        if b"\0" in source:  # as PowerShell's > and Notepad's "Unicode" write it
            raise ConfigError("its encoding is UTF-16; save it as UTF-8")
        for node in ast.walk(ast.parse(source, path)):
            if isinstance(node, ast.AnnAssign) and node.value is None:
                line = f"line {node.lineno} sets nothing; write NAME = VALUE instead of NAME: VALUE"
                raise ConfigError(line)
        assigned = runpy.run_path(str(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (Exception, SystemExit) as error:  # a preset is a program, and may raise anything
        stack = traceback.extract_tb(error.__traceback__)
        lines = [f"line {frame.lineno}: " for frame in stack if frame.filename == str(path)]
        line = lines[-1] if lines else ""  # SyntaxError names it in its text
        raise ConfigError(f"{path}: {line}{type(error).__name__}: {error}") from None
    values = {}
    for name, value in assigned.items():
        is_helper = name not in table and (callable(value) or isinstance(value, ModuleType))
        if not name.startswith("_") and not is_helper:
            values[name] = value
    if not values:
        raise ConfigError(
            f"{path} sets nothing; write NAME = VALUE, outside of classes and functions"
        )
    check_names(values, table, path)
    return {name: convert(table[name], value, path) for name, value in values.items()}


def read_run(folder: Path, table: dict[str, Field]) -> dict:
    """The settings that a run recorded, {name: value}, with its folder. Raises ConfigError.

    Leaves out settings of older versions that are gone, and those of a single start. Without its
    config.json, as where only a step was copied, the newest step knows them.
    """
    if (folder / "state.json").exists():
        raise ConfigError(f"{folder} is one step of a run; the run is {folder.parent}")
    path, values = folder / "config.json", {}
    if not path.exists():
        path = max(folder.glob("step_*/state.json"), default=path)
    if not path.exists():
        data = "data/NAME"
        if (folder / "meta.json").exists():
            data = quote(folder.as_posix())
        raise ConfigError(
            f"{folder} is not the folder of a run: it has no config.json. A new run takes a"
            f" preset:\n  python {our_file('train.py')} config/laptop.py --data_dir={data}"
        )
    try:
        text = path.read_text(encoding="utf-8")
        recorded = json.loads(text) if RECORDED in text else {}
        for name, value in recorded.get("settings", recorded).items():
            if name in table:
                values[name] = convert(table[name], value, path)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{folder} is not the folder of a run: its {path.name} cannot be read ({error})"
        ) from None
    if not values:
        raise ConfigError(
            f"{folder} is not the folder of a run: train.py did not write its config.json. If it"
            " holds weights in Hugging Face's format, a run of its own can start from them:\n"
            f"  python {our_file('train.py')} config/finetune.py"
            f" --init_from={quote(folder.as_posix())}"
        )
    return values | {"checkpoint_dir": str(folder), "resume": "auto", "profile": False}


def check_names(names: Iterable[str], table: dict[str, Field], where: str | Path) -> None:
    """Raises ConfigError, with the nearest real setting for each, unless all names are settings."""
    unknown = []
    for name in names:
        if name in table:
            continue
        meant = near(name, table)
        hint = f"; did you mean {' or '.join(map(repr, meant))}?" if meant else ""
        if name in OTHERS:
            hint = f"; here it is {OTHERS[name]}"
        unknown.append(f"no setting is called {name!r}{hint}")
    if unknown:
        text = "\n  ".join(unknown)
        raise ConfigError(f"{where}: {text} (python {our_file('train.py')} --help lists all)")


def presets() -> list[Path]:
    files = Path(__file__).parent.glob("*.py")
    return sorted(path for path in files if path.name not in ("__init__.py", "loader.py"))


def help_text(table: dict[str, Field], defaults) -> str:
    """All settings, their defaults and meanings, as train.py --help prints them.

    defaults: an object with the default of each as an attribute.
    """
    lines = [
        "usage: python train.py [config/PRESET.py | checkpoints/RUN] [--NAME=VALUE ...]",
        "--NAME VALUE works too. Each setting is shown with its default, if it has one.",
    ]
    for name, field in table.items():
        if section := field.metadata["section"]:
            lines += ["", f"{section}:"]
        default, meaning = getattr(defaults, name), field.metadata["meaning"]
        shown = name if default is None else f"{name}={default}"
        if field.metadata["choices"]:
            meaning += f" ({describe(field)})"
        lines.append(f"  {f'--{shown}':34} {meaning}")
    return "\n".join(lines)


# -- settings that contradict each other -----------------------------------------------------------


def check(c) -> None:
    """Raises ConfigError if settings contradict each other. c: a Config."""
    run, mirror, start = Path(c.checkpoint_dir), c.mirror or "", c.init_from or ""
    if (c.min_lr or 0) > c.learning_rate:
        raise ConfigError(f"min_lr = {c.min_lr} is above learning_rate = {c.learning_rate}")
    if c.embedding_lr is not None and c.tie_weights and c.arch != "gpt2":
        raise ConfigError(
            f"embedding_lr would also be the rate of the output matrix, with arch = {c.arch} and"
            " tie_weights = True; set embedding_lr = None, or train with tie_weights = False"
        )
    if c.max_cost is not None and c.cost_per_hour == 0:
        raise ConfigError(
            f"max_cost = {c.max_cost} needs cost_per_hour, the price of the machine per hour"
        )
    if run.is_file() or "://" in c.checkpoint_dir:
        raise ConfigError(
            f"checkpoint_dir = {c.checkpoint_dir}: it must be a folder of this machine; mirror ="
            " s3://bucket/runs copies each save to an address"
        )
    if (run / "meta.json").exists() or (run / "state.json").exists():
        raise ConfigError(
            f"checkpoint_dir = {run} holds prepared data or one step of a run; choose another"
        )
    copy = Path(re.sub(r"^(file|local)://(/(?=\w:))?", "", mirror), run.resolve().name)
    if mirror and copy.resolve() == run.resolve():
        raise ConfigError(
            f"mirror = {mirror}: the copy of this run would be the run itself; choose a folder on"
            " another disk, or an address"
        )
    if re.match("https?://", mirror) or Path(mirror).is_file():
        raise ConfigError(
            f"mirror = {mirror}: it must be a folder, or an address that can be written to, as"
            " s3://bucket/runs"
        )
    if LOGIN.search(mirror) or LOGIN.search(start):
        raise ConfigError(
            "a login in mirror or init_from would be recorded in the run's files; give it in the"
            " environment (AWS_ACCESS_KEY_ID, HF_TOKEN, ...)"
        )
    if start in NANOGPT_STARTS:
        raise ConfigError(
            f"init_from = {start}: leave it out to train new weights, and to continue a run;"
            " GPT-2's weights are at hf://openai-community/gpt2, gpt2-medium, gpt2-large, gpt2-xl"
        )
