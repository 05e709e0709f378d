"""docs/settings.md, of the settings: python -m tests.settings_page > docs/settings.md"""

from config import SETTINGS, Config

HEAD = """# Settings

These are the settings of `train.py`. A [preset](training.md#presets) has them as `NAME = VALUE`,
and the command line, which overrides it, as `--NAME=VALUE` or `--NAME VALUE`."""


def page():
    """The text of docs/settings.md."""
    lines = [HEAD]
    for name, field in SETTINGS.items():
        meta, default = field.metadata, getattr(Config(), name)
        if meta["section"]:
            lines += ["", f"## {meta['section'].capitalize()}", ""]
            lines += ["| setting | default | meaning |", "|---|---|---|"]
        shown = "" if default is None else f"`{default}`"
        choices = f" ({', '.join(meta['choices'])})" if meta["choices"] else ""
        lines.append(f"| `{name}` | {shown} | {meta['meaning']}{choices} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
