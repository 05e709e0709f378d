"""Text from the Jinja2 templates of templates/, given plain values.

A name that ends in .html.j2 is HTML: every value in it is escaped by the engine, and nothing else
has to. Jinja2 comes with torch.
"""

from pathlib import Path

import jinja2

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=jinja2.select_autoescape(["html.j2"]),
    undefined=jinja2.StrictUndefined,  # a misspelt name is an error, not an empty place
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(template: str, /, **values) -> str:
    """The file templates/TEMPLATE filled in with these values."""
    return TEMPLATES.get_template(template).render(values)
