"""A preset and a command line -> values in the types of a table of settings.

Knows how a value is written, checked and explained. Which settings there are is in
config/__init__.py.
"""

import ast
import dataclasses
import difflib
import json
import math
import typing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

NOT_PRESETS = ("__init__.py", "loader.py")
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
}


class ConfigError(ValueError):
    """A setting that cannot be used, in a sentence for the user."""


def setting(default, meaning: str, choices: list[str] | None = None, low: float | None = None):
    """A field of a table: its default, its meaning for --help, and what values it takes.

    choices: the only values, where there are few; of a bool, those beside True and False. low: the
    smallest value.
    """
    metadata = {"meaning": meaning, "choices": choices, "low": low}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """One line of the table. kind: of KINDS. optional: whether it takes None too."""

    name: str
    kind: type
    optional: bool
    default: object
    meaning: str
    choices: list[str] | None
    low: float | None

    def describe(self) -> str:
        """What it takes, in words."""
        if self.choices and self.kind is not bool:
            return "one of " + ", ".join(self.choices)
        words = KINDS[self.kind]
        if self.choices:
            words += " or " + " or ".join(self.choices)
        if self.low is not None:
            words += f" of at least {self.low}"
        if self.optional:
            words += " or None"
        return words

    def parse(self, text: str):
        """A value from the text of a command line, yet to be checked by `convert`.

        Raises ConfigError for a text that is none of its kind.
        """
        if text == "None":
            return None
        if self.choices and text in self.choices:
            return text
        try:
            if self.kind is bool:
                return YES_OR_NO[text.lower()]
            if self.kind is list:
                return json.loads(text) if text.startswith("[") else [text]
            return whole_number(text) if self.kind is int else self.kind(text)
        except (KeyError, ValueError):
            raise ConfigError(
                f"--{self.name}={text}: {self.name} takes {self.describe()}"
            ) from None

    def convert(self, value, where: str):
        """`value` in the type of the setting. Raises ConfigError where it does not fit."""
        if value is None and self.optional:
            return None
        if self.kind is float and type(value) is int:
            value = float(value)
        if self.kind is int and type(value) is float and value.is_integer():
            value = int(value)
        fits = type(value) is self.kind
        if fits and self.kind is list:
            fits = all(isinstance(item, str) for item in value)
        if self.choices and (self.kind is not bool or not fits):
            fits = value in self.choices
        if fits and self.low is not None:
            fits = self.low <= value < math.inf
        if not fits:
            raise ConfigError(f"{where}: {self.name} = {value!r}, but it takes {self.describe()}")
        return value


def whole_number(text: str) -> int | float:
    """The number in a text; a float where it is written as one, like 2e5. Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def settings_of(table: type) -> dict[str, Setting]:
    """What a dataclass made of `setting` fields declares, by name, in its order."""
    settings = {}
    for field in dataclasses.fields(table):
        default = [] if field.default is dataclasses.MISSING else field.default
        kind, optional = field.type, False
        if type(None) in typing.get_args(kind):  # int | None
            kind, optional = typing.get_args(kind)[0], True
        kind = typing.get_origin(kind) or kind  # list, of list[str]
        settings[field.name] = Setting(field.name, kind, optional, default, **field.metadata)
    return settings


def read_argument(arg: str, settings: dict[str, Setting]) -> tuple[str, object]:
    """Name and value of `--key=value`, or of a bare `--key`, which means True.

    Raises ConfigError.
    """
    key, equals, text = arg[2:].partition("=")
    name = key.replace("-", "_")
    check_name(name, settings, "the command line")
    known = settings[name]
    if not equals:
        if known.kind is not bool:
            example = "VALUE" if known.default in (None, []) else known.default
            raise ConfigError(f"--{name} has no value; write --{name}={example}")
        text = "True"
    return name, known.convert(known.parse(text), f"--{name}")


def read_preset(path: Path, settings: dict[str, Setting]) -> dict:
    """The assignments of a preset, {name: value}.

    A relative path is looked for here, then beside train.py. Raises ConfigError for a missing or
    broken file, a line that is no assignment, an unknown name, or a value that does not fit.
    """
    if path.suffix != ".py":
        raise ConfigError(
            f"{path}: a preset is a Python file of assignments, as config/demo.py is (n_layer = 6)"
        )
    beside = Path(__file__).parent.parent / path
    if not path.exists() and beside.exists():
        path = beside
    try:
        code = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no preset {path}; {presets_like(path)}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error}") from None
    assigned, lines = {}, {}  # of each name: its value, and the last line that assigned it
    line = "?"
    try:
        for statement in ast.parse(code, str(path)).body:
            line = statement.lineno
            if not may_stand_in_a_preset(statement):
                written = ast.unparse(statement).splitlines()[0]
                raise ConfigError(
                    f"a preset's lines are assignments (n_layer = 6), and {written!r} is none"
                )
            before = dict(assigned)
            exec(compile(ast.Module([statement], []), str(path), "exec"), assigned)
            for name, value in assigned.items():
                if name not in before or before[name] is not value:
                    lines[name] = line
    except Exception as error:  # a preset is a program, and may raise anything
        if isinstance(error, SyntaxError):
            line = error.lineno
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"{path}, line {line}: {kind}{error}") from None
    values = {}
    for name, value in assigned.items():
        if not name.startswith("_") and not isinstance(value, ModuleType):
            where = f"{path}, line {lines[name]}"
            check_name(name, settings, where)
            values[name] = settings[name].convert(value, where)
    return values


def may_stand_in_a_preset(statement: ast.stmt) -> bool:
    """Whether it is an assignment, an import or a docstring: `n_layer: 2` would set nothing."""
    match statement:
        case ast.Assign() | ast.AugAssign() | ast.Import() | ast.ImportFrom():
            return True
        case ast.AnnAssign(value=ast.expr()) | ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def presets_like(path: Path) -> str:
    """What to type instead of a preset that is not there."""
    names = [p.name for p in presets()]
    near = difflib.get_close_matches(path.name, names, 1)
    if near:
        return f"did you mean config/{near[0]}?"
    return "presets here: " + ", ".join(f"config/{name}" for name in names)


def presets() -> list[Path]:
    """The presets that come with the project, by name."""
    files = Path(__file__).parent.glob("*.py")
    return sorted(path for path in files if path.name not in NOT_PRESETS)


def check_name(name: str, settings: dict[str, Setting], where: str) -> None:
    """Raises ConfigError, with the nearest real setting, unless `name` is one."""
    if name in settings:
        return
    near = (
        [NANOGPT[name]] if name in NANOGPT else difflib.get_close_matches(name, settings, 1, 0.65)
    )
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"{where}: no setting is called {name!r}{hint} (python train.py --help lists all)"
    )


def help_text(settings: dict[str, Setting]) -> str:
    """All settings, their defaults and meanings, as train.py --help prints them."""
    lines = [
        "usage: python train.py [config/PRESET.py] [--key=value ...]",
        "",
        "settings, their defaults and meanings:",
    ]
    for name, known in settings.items():
        line = f"  --{name}={known.default}".ljust(36) + f" {known.meaning}"
        if known.choices:
            line += f" ({', '.join(known.choices)})"
        lines.append(line)
    return "\n".join(lines)
