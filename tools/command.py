"""Shared by the tools: exit statuses, tables and templates.

Does not import PyTorch, which a report does not need.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import startup
from command_line import our_file
from formats import files


def run(name: str, main: Callable[[list[str]], None]) -> None:
    """Call main with the command line, and end the process with its exit status."""
    startup.end()
    sys.exit(startup.run(name, main, explain))


def explain(error: BaseException) -> str | None:
    """The sentence for an error that is no UserError; None if there is no better one."""
    if isinstance(error, ModuleNotFoundError):
        constraints = our_file("constraints.txt")
        return f"{error.name} is missing; pip install {error.name} -c {constraints}"
    if isinstance(error, OSError):
        return files.error_message(error)
    hardware = sys.modules.get("hardware")  # imported only by tools that run a model
    if hardware and hardware.out_of_memory(error):
        return "out of memory; end other programs that use it, or use a smaller model"
    return None


def perplexity(loss: float) -> float:
    """exp(loss) for a loss in nats per token; infinite if it would overflow."""
    return math.exp(loss) if loss < 700 else math.inf


def number(value: float) -> str:
    """A number with two decimals; from a million on with three digits, such as 5.22e+173."""
    return f"{value:,.2f}" if value < 1e6 else f"{value:.2e}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A plain-text table; the first column is left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for first, *others in [head, *rows]:
        cells = map(str.rjust, others, widths[1:])
        lines.append("   ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def render(template: str, **values) -> str:
    """Fill in the file templates/TEMPLATE; values in HTML templates are escaped."""
    import jinja2  # comes with torch

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        undefined=jinja2.StrictUndefined,  # a misspelled name is an error, not ""
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(values)
