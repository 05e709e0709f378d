"""A preset and a command line -> values in the types of a table of settings.

Knows how a value is written, checked and explained; config/__init__.py has the settings.
"""

import ast
import codecs
import dataclasses
import difflib
import math
import re
import traceback
import typing
from dataclasses import Field
from pathlib import Path
from types import ModuleType, NoneType

# What nanoGPT calls some settings.
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
YES_OR_NO = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
KINDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: 'a list of texts, as in \'["Once", "To be"]\'',
    NoneType: "None",
}


class ConfigError(ValueError):
    """A setting that cannot be used, in a sentence for the user."""


def setting(default, meaning: str, choices=None, low=None, section=None):
    """A field of a table: its default, its meaning for --help, and the values it takes.

    choices: the only texts. low: the smallest number. section: the heading before it in --help.
    """
    metadata = {"meaning": meaning, "choices": choices, "low": low, "section": section}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def kinds_of(field: Field) -> tuple[type, ...]:
    """The types that a setting takes: (int, NoneType) for `int | None`."""
    return typing.get_args(field.type) or (field.type,)


def describe(field: Field) -> str:
    """What a setting takes, in words."""
    words = dict(KINDS)
    if field.metadata["choices"]:
        words[str] = ", ".join(field.metadata["choices"])
    text = " or ".join(words[kind] for kind in kinds_of(field))
    if field.metadata["low"] is not None:
        text += f", at least {field.metadata['low']}"
    return text


def parse(field: Field, text: str):
    """The value of a text from the command line; `convert` checks it."""
    kinds = kinds_of(field)
    if text == "None":
        return None
    if bool in kinds:
        return YES_OR_NO.get(text.lower(), text)
    if list in kinds and not text.startswith("["):
        return [text]
    if str in kinds:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def convert(field: Field, value, where: str):
    """`value` in the type of a setting. Raises ConfigError where it does not fit."""
    kinds, choices, low = kinds_of(field), field.metadata["choices"], field.metadata["low"]
    if float in kinds and type(value) is int:
        value = float(value)
    if int in kinds and type(value) is float and value.is_integer():
        value = int(value)
    fits = type(value) in kinds
    if type(value) is list:
        fits = fits and all(type(item) is str for item in value)
    if type(value) is str and choices:
        fits = fits and value in choices
    if type(value) in (int, float) and low is not None:
        fits = fits and low <= value < math.inf
    if not fits:
        raise ConfigError(f"{where}: {field.name} = {value!r}, but it takes {describe(field)}")
    return value


def read_argument(arg: str, table: dict[str, Field]) -> tuple[str, object]:
    """Name and value of `--key=value`, or of a bare `--key`, which means True.

    Raises ConfigError.
    """
    where = "the command line"
    key, equals, text = arg[2:].partition("=")
    name = key.replace("-", "_")
    check_name(name, table, where)
    if not equals and bool not in kinds_of(table[name]):
        raise ConfigError(f"{where}: --{name} has no value; write --{name}=VALUE")
    value = parse(table[name], text) if equals else True
    return name, convert(table[name], value, where)


def read_preset(path: Path, table: dict[str, Field]) -> dict:
    """The assignments of a preset, {name: value}. Raises ConfigError.

    A relative path counts from here, or else from the folder of train.py.
    """
    installed = Path(__file__).parent.parent / path
    if not path.exists() and installed.exists():
        path = installed
    if not path.exists():
        names = [preset.name for preset in presets()]
        near = difflib.get_close_matches(f"{path.stem}.py", names, 1)
        hint = f"did you mean config/{near[0]}?" if near else f"config/ has {', '.join(names)}"
        raise ConfigError(f"no preset {path}; {hint}")
    if path.suffix != ".py":
        raise ConfigError(f"{path}: a preset is a Python file of assignments, as config/demo.py is")
    assigned = {"__name__": path.stem, "__file__": str(path)}
    try:
        data = path.read_bytes()
        utf_16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as PowerShell writes
        source = data.decode("utf-16" if utf_16 else "utf-8-sig")
        exec(compile(source, str(path), "exec"), assigned)
    except Exception as error:  # a preset is a program, and may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines, why = [f.lineno for f in frames if f.filename == str(path)], error
        if isinstance(error, SyntaxError):
            lines, why = [error.lineno or 1], error.msg
        where = f"{path}, line {lines[0]}" if lines else path
        raise ConfigError(f"{where}: {type(error).__name__}: {why}") from None
    # The last line that begins with a name is the one that set it.
    lines = {re.match(r"\s*(\w*)", line)[1]: n for n, line in enumerate(source.splitlines(), 1)}
    values = {}
    for name, value in assigned.items():
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        where = f"{path}, line {lines.get(name, '?')}"
        check_name(name, table, where)
        values[name] = convert(table[name], value, where)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.AnnAssign) or node.value:
            continue
        name = ast.unparse(node.target)
        if name not in assigned:
            raise ConfigError(f"{path}, line {node.lineno}: it sets nothing; write {name} = VALUE")
    return values


def check_name(name: str, table: dict[str, Field], where: str) -> None:
    """Raises ConfigError, with the nearest real setting, unless `name` is one."""
    if name in table:
        return
    if name == "vocab_size":
        raise ConfigError(
            f"{where}: vocab_size comes from the data; python prepare_data.py --vocab_size sets it"
        )
    near = [NANOGPT[name]] if name in NANOGPT else difflib.get_close_matches(name, table, 1, 0.65)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"{where}: no setting is called {name!r}{hint} (python train.py --help lists all)"
    )


def presets() -> list[Path]:
    files = Path(__file__).parent.glob("*.py")
    return sorted(path for path in files if path.name not in ("__init__.py", "loader.py"))


def help_text(table: dict[str, Field], defaults) -> str:
    """All settings, their defaults and meanings, as train.py --help prints them.

    defaults: an object with the default of each as an attribute.
    """
    lines = ["usage: python train.py [config/PRESET.py] [--key=value ...]"]
    for name, field in table.items():
        if field.metadata["section"]:
            lines += ["", f"{field.metadata['section']}:"]
        choices = field.metadata["choices"]
        line = f"  --{name}={getattr(defaults, name)}".ljust(36) + f" {field.metadata['meaning']}"
        lines.append(line + f" ({', '.join(choices)})" if choices else line)
    return "\n".join(lines)
