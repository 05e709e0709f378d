"""What the tools share: how a command ends, a table, and how a template is filled in.

Imports no PyTorch: a report does without it.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import startup
from formats import files
from formats.address import AddressError
from formats.data_folder import DataError


def run(name: str, main: Callable[[list[str]], None], mistakes: tuple = ()) -> None:
    """Call main with the command line, and end the process with its exit status.

    mistakes: errors of this tool that exit with 2, as DataError and AddressError do.
    """
    startup.end()
    sys.exit(startup.run(name, main, (AddressError, DataError, *mistakes), explain))


def explain(error: BaseException) -> str | None:
    """The sentence for a failure that is not a mistake, if it has one."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is missing; pip install {error.name} -c constraints.txt"
    if isinstance(error, OSError):
        return files.error_message(error)
    hardware = sys.modules.get("hardware")  # of a tool that computes
    if hardware and hardware.out_of_memory(error):
        return "out of memory; end other programs that use it, or use a smaller model"
    return None


def perplexity(loss: float) -> float:
    """exp(loss) of a loss in nats per token; infinite if it exceeds what a float holds."""
    return math.exp(loss) if loss < 700 else math.inf


def number(value: float) -> str:
    """A number with two decimals; from a million on in three digits, as 5.22e+173."""
    return f"{value:,.2f}" if value < 1e6 else f"{value:.2e}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in characters: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for first, *others in [head, *rows]:
        cells = map(str.rjust, others, widths[1:])
        lines.append("   ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def render(template: str, **values) -> str:
    """The file templates/TEMPLATE filled in; in one for HTML every value is escaped."""
    import jinja2  # comes with torch

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        undefined=jinja2.StrictUndefined,  # a misspelled name is an error, not an empty place
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(values)
