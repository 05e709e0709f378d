"""What runs did, at a glance: one self-contained page, and the curves as PNG beside it.

    python -m tools.report checkpoints/RUN [checkpoints/RUN2 ...] [--out FILE.html]

The page holds its pictures and needs neither scripts nor the internet. Curves are those of
charts.py, words and numbers those of page.py; templates/report.html.j2 lays them out.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import argparse
import base64
import os
import time
from pathlib import Path
from typing import NamedTuple

from formats import files
from formats.address import protocol_of, run_here
from tools import command
from tools.history import History, HistoryError, read
from tools.page import page_of

WIDE, NARROW, SMALL = (11.4, 4.6), (3.7, 3.5), (3.7, 2.4)  # inches; narrow: for a phone


class LossPicture(NamedTuple):
    """The losses against a column, drawn for a wide page and for a phone.

    label: what the x axis is; tab: the same in a word or two; first: shown at first.
    """

    column: str
    label: str
    tab: str
    first: bool
    wide: str
    narrow: str


class SmallPicture(NamedTuple):
    """One of the small curves."""

    title: str
    image: str


def address(svg: bytes) -> str:
    """An SVG as an address that holds it.

    So it is a document of its own, and names in one picture do not meet those of another.
    """
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def loss_pictures(runs: list[History], nats: bool) -> list[LossPicture]:
    """The losses against each of steps, tokens, time and cost that all runs have counted."""
    from tools import charts

    pictures = []
    for column, label in charts.axes_of(runs).items():
        wide = charts.svg(*WIDE, charts.draw_losses, runs, column, nats)
        narrow = charts.svg(*NARROW, charts.draw_losses, runs, column, nats)
        picture = LossPicture(
            column=column,
            label=label,
            tab=label.split(",")[0].removeprefix("training "),
            first=not pictures,
            wide=address(wide),
            narrow=address(narrow),
        )
        pictures.append(picture)
    return pictures


def small_pictures(runs: list[History]) -> list[SmallPicture]:
    """The curves beside the losses."""
    from tools import charts

    pictures = []
    for column in charts.small_columns(runs):
        svg = charts.svg(*SMALL, charts.draw_small, runs, column)
        pictures.append(SmallPicture(charts.SMALL_TITLES[column], address(svg)))
    return pictures


def promise_picture(run: Path) -> str | None:
    """What tools.scaling promised of a run, beside how it went; None where it promised nothing."""
    from tools import charts, scaling_picture, scaling_study

    found = scaling_study.behind(run)
    if not found:
        return None
    return address(charts.svg(*WIDE, scaling_picture.draw_promise, found, run))


def write(folders: list[Path], out: Path) -> None:
    """Write the page, and the curves beside it as PNG; each appears whole.

    Raises HistoryError for a run of which nothing can be shown.
    """
    runs = [read(folder) for folder in folders]
    from tools import charts, rendering  # takes a second: after what may be wrong with the runs

    page = page_of(runs)
    promise = promise_picture(runs[0].folder) if len(runs) == 1 else None
    html = rendering.render(
        "report.html.j2",
        page=page,
        losses=loss_pictures(runs, page.nats),
        small=small_pictures(runs),
        promise=promise,
        drawn=time.strftime("%Y-%m-%d %H:%M"),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with files.whole(out.with_suffix(".png")) as partial:
        charts.write_png(partial, runs, page.title, page.nats)
    files.write_text(out, html)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; `out` is set."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.report",
        usage="python -m tools.report RUN [RUN ...] ... (--help lists all)",
        description=(
            "Curves, tables and samples of one or several runs as one page, and the curves as PNG."
        ),
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run's folder, such as checkpoints/demo, or its address in a mirror; several are"
        " laid over each other",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help=(
            "default: report.html in the run's folder; of several runs, and of an address, in the"
            " present one. The PNG gets the same name"
        ),
    )
    parser.add_argument(
        "--background", action="store_true", help="with the lowest priority, as train.py calls it"
    )
    args = parser.parse_args(argv)
    if not args.out:
        alone = len(args.runs) == 1 and not protocol_of(args.runs[0])
        folder = Path(args.runs[0]) if alone else Path()
        args.out = folder / "report.html"
    if args.out.suffix != ".html":
        parser.error(f"--out {args.out}: the name must end in .html")
    return args


def main(argv: list[str]) -> None:
    """The command line's work."""
    args = parse_args(argv)
    if args.background and hasattr(os, "nice"):
        os.nice(19)
    write([run_here(run) for run in args.runs], args.out)
    print(f"{args.out} and {args.out.with_suffix('.png').name}")


if __name__ == "__main__":
    command.run("tools.report", main, mistakes=(HistoryError,))
