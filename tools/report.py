"""What runs did, at a glance: one self-contained page with curves, tables and samples, and the
curves as PNG beside it.

    python -m tools.report checkpoints/RUN [checkpoints/RUN2 ...] [--out FILE.html]

The page holds its pictures and needs neither scripts nor the internet. Curves are those of
charts.py, numbers those of history.py.
"""

import argparse
import base64
import math
import os
import sys
import time
from html import escape
from pathlib import Path

from tools.history import History, HistoryError, read
from training import terminal

ROWS, SHOWN = (
    30,
    8,
)  # lines of a table, and evaluations whose samples are shown; of more, evenly spread ones

STYLE = """
:root { color-scheme: light; --ink: #1d2330; --dim: #5d6574; --line: #dfe3ea; --soft: #f5f7fa; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 28px 24px 48px; font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--ink); background: #fff; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 10px; }
h3 { font-size: 15px; margin: 20px 0 8px; overflow-wrap: anywhere; }
p { margin: 6px 0; } .dim { color: var(--dim); } .note { background: #fff6e5; border-left: 4px solid #E69F00; padding: 8px 12px; }
img { display: block; max-width: 100%; height: auto; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px; margin: 20px 0; }
.tile { background: var(--soft); border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 21px; line-height: 1.3; font-weight: 650; white-space: nowrap; } .tile span { font-size: 13px; color: var(--dim); }
.x input { position: absolute; opacity: 0; } .x picture { display: none; }
.x label { display: inline-block; padding: 3px 12px; margin: 0 4px 8px 0; border: 1px solid var(--line); border-radius: 14px; font-size: 13px; cursor: pointer; }
.x input:checked + label { background: var(--ink); color: #fff; border-color: var(--ink); } .x input:focus-visible + label { outline: 3px solid #56B4E9; }
.small { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 14px; margin-top: 14px; } .small img { width: 100%; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--dim); font-weight: 500; vertical-align: bottom; } tr.best td { font-weight: 650; }
th:first-child, td:first-child, table.words td, table.words th { text-align: left; }
table.words td { white-space: normal; overflow-wrap: anywhere; vertical-align: top; } table.words td:first-child { white-space: nowrap; }
.answers { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 250px), 1fr)); gap: 10px; }
.answers div { background: var(--soft); border-radius: 8px; padding: 10px 12px; min-width: 0; } .answers p { font-size: 13px; margin: 0 0 4px; }
pre { margin: 0; font: 12.5px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.columns { columns: 330px; column-gap: 36px; font-size: 13.5px; } .columns span { color: var(--dim); overflow-wrap: normal; }
.columns p { display: flex; justify-content: space-between; gap: 14px; margin: 0; break-inside: avoid; overflow-wrap: anywhere; border-bottom: 1px solid var(--line); padding: 2px 0; }
@media (max-width: 640px) { body { padding: 18px 14px 32px; } h1 { font-size: 23px; } .tile b { font-size: 17px; } .x img { width: 100%; }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(105px, 1fr)); } .tile { padding: 8px 10px; } table { font-size: 11.5px; } th, td { padding-right: 6px; white-space: normal; }
  table.progress :is(th, td):is(:nth-child(5), :nth-child(7)) { display: none; } }
@media (min-width: 641px) { .narrow { display: none; } }
@media print { body { max-width: none; } .x label { display: none; } .x input:checked + label { display: inline-block; } }
"""


def number(value, digits: int = 4) -> str:
    """A number for a table: digits behind the point, nothing where there is none."""
    return "" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def short(value: float | None) -> str:
    """A large number in few characters: 134.6M."""
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value is not None and value >= size:
            return (
                f"{value / size:.3g}{name}" if value / size < 1000 else f"{value / size:,.0f}{name}"
            )
    return "" if value is None else f"{value:,.0f}"


def counted(count: int, thing: str) -> str:
    """1 save, 2 saves."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def duration(seconds: float | None) -> str:
    """Seconds as people say them."""
    return "" if seconds is None or not math.isfinite(seconds) else terminal.duration(seconds)


def spread(items: list, count: int) -> list:
    """At most `count` of the items, evenly spread, the first and the last among them."""
    return (
        items
        if len(items) <= count
        else [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
    )


def table(head: list[str], rows: list[list[str]], kind: str = "", best: int | None = None) -> str:
    """A table in HTML; cells are text. best: the row to stand out."""
    cells = "".join(
        f"<tr{' class=best' if n == best else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for n, row in enumerate(rows)
    )
    return (
        '<div class="scroll"><table'
        f' class="{kind}"><thead><tr>{"".join(f"<th>{escape(h)}</th>" for h in head)}</tr></thead><tbody>{cells}</tbody></table></div>'
    )


def image(svg: bytes) -> str:
    """An SVG as an address that holds it: a document of its own, so that names in one picture do
    not meet those of another.
    """
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def summary(run: History) -> str:
    """What a run is, in a sentence."""
    start, config = run.start, run.config
    size = f"{short(start['parameters'])} parameters, " if start.get("parameters") else ""
    shape = (
        f"{config['n_layer']} layers x {config['n_embd']}, context {config['block_size']}"
        if {"n_layer", "n_embd", "block_size"} <= config.keys()
        else ""
    )
    step, total = int(run.columns["step"][-1]), run.total_steps
    done = (
        f"finished after {step:,} steps"
        if total and step >= total
        else f"at step {step:,}" + (f" of {total:,}" if total else "")
    )
    parts = [
        size + shape,
        f"trained on {config.get('data_dir', 'unknown data')}",
        start.get("device", ""),
        start.get("dtype", ""),
        done,
    ]
    return " \u00b7 ".join(part for part in parts if part)


def figures(run: History) -> list[tuple[str, str]]:
    """The key figures of a run as (name, value), those that are known."""
    best, speed, mfu = run.best or {}, run.median("tokens_per_second"), run.median("mfu")
    seconds, tokens = run.last("elapsed_s"), run.last("tokens")
    known = [
        (f"best validation loss, step {best.get('step', 0):,}", number(best.get("val_loss"))),
        ("perplexity", number(math.exp(min(best["val_loss"], 700)), 2) if best else ""),
        ("bits per byte", number(best.get("bits_per_byte"), 3)),
        (
            "training tokens" + (f", {run.last('epoch'):.2f} epochs" if run.last("epoch") else ""),
            short(tokens),
        ),
        ("training time" + (f", {run.starts} starts" if run.starts > 1 else ""), duration(seconds)),
        ("tokens a second, median", number(speed, 0)),
        ("MFU, median", f"{mfu:.1%}" if mfu else ""),
        ("cost, in the unit of cost_per_hour", number(run.last("cost"), 2)),
    ]
    return [(name, value) for name, value in known if value]


def curves(runs: list[History], nats: bool) -> str:
    """The losses, to be seen against steps, tokens, time or cost, and the smaller curves; for a
    phone's width drawn apart.
    """
    from tools import charts

    axes = charts.axes_of(runs)
    first = "step" if "step" in axes else next(iter(axes))
    shown = "".join(f"#x-{name}:checked ~ .{name} {{ display: block; }}" for name in axes)
    inputs, pictures = "", ""
    for name, label in axes.items():
        inputs += (
            '<input type="radio" name="x"'
            f' id="x-{name}"{" checked" if name == first else ""}><label'
            f' for="x-{name}">{escape(label.split(",")[0].removeprefix("training "))}</label>'
        )
        draw = lambda ax, name=name: charts.draw_losses(ax, runs, name, nats)  # noqa: E731
        wide, narrow = image(charts.svg(draw, 11.4, 4.6)), image(charts.svg(draw, 3.7, 3.5))
        pictures += (
            f'<picture class="{name}"><source media="(max-width: 640px)" srcset="{narrow}"><img'
            f' alt="losses against {escape(label)}" src="{wide}"></picture>'
        )
    small = "".join(
        f'<img alt="{escape(charts.SMALL[c])} against steps"'
        f' src="{image(charts.svg(lambda ax, c=c: charts.draw_small(ax, runs, c), 3.7, 2.4))}">'
        for c in charts.small_columns(runs)
    )
    return (
        f'<style>{shown}</style><div class="x">{inputs}{pictures}</div><div'
        f' class="small">{small}</div>'
    )


def progress_table(run: History) -> str:
    """The table by epoch, or by evaluation."""
    by, rows = run.rows()
    shown, best = (
        spread(rows, ROWS),
        min(
            (r for r in rows if r["val_loss"] is not None),
            key=lambda r: r["val_loss"],
            default=None,
        ),
    )
    if best and best not in shown:
        shown = sorted([*shown, best], key=lambda r: r["step"])
    costs = run.last("cost")
    head = ["epoch", "step"] if by == "epoch" else ["step", "epoch"]
    head += [
        "training loss",
        "validation loss",
        "perplexity",
        "bits per byte",
        "seconds a step",
        "training time",
    ] + (["cost"] if costs else [])
    lines = []
    for r in shown:
        epoch = (
            f"{r['epoch']:.0f}"
            if by == "epoch" and abs(r["epoch"] - round(r["epoch"])) < 0.02
            else number(r["epoch"], 2)
        )
        val = r["val_loss"]
        perplexity = number(math.exp(min(val, 700)), 2) if val is not None else ""
        lines.append(
            [
                *([epoch, f"{r['step']:,.0f}"] if by == "epoch" else [f"{r['step']:,.0f}", epoch]),
                number(r["loss"]),
                number(val),
                perplexity,
                number(r["bits_per_byte"], 3),
                number(r["seconds_a_step"], 3),
                duration(r["elapsed_s"]),
            ]
            + ([number(r["cost"], 2)] if costs else [])
        )
    note = (
        f"<p class=dim>{len(shown)} of {len(rows):,} rows, evenly spread.</p>"
        if len(shown) < len(rows)
        else ""
    )
    if not run.evaluations:
        note += (
            "<p class=note>This run has no evaluations: it has not come to the first one"
            " (eval_interval), or its data has no validation split (prepare_data.py"
            " --val_fraction).</p>"
        )
    note += "<p class='dim narrow'>Perplexity and seconds a step are shown on a wider screen.</p>"
    return table(head, lines, "progress", shown.index(best) if best else None) + note


def samples(run: History) -> str:
    """The same prompts, answered at one evaluation after the other."""
    if not run.samples:
        return "<p class=dim>No samples: set sample_prompts, and each evaluation answers them.</p>"
    records, losses, out = (
        spread(run.samples, SHOWN),
        {e["step"]: e["val_loss"] for e in run.evaluations},
        "",
    )
    for prompt in dict.fromkeys(s["prompt"] for r in records for s in r["samples"]):
        answers = ""
        for record in records:
            loss = (
                f", validation loss {losses[record['step']]:.3f}"
                if record["step"] in losses
                else ""
            )
            for answer in (s for s in record["samples"] if s["prompt"] == prompt):
                answers += (
                    "<div><p class=dim>step"
                    f" {record['step']:,}{loss}</p><pre><b>{visible(prompt)}</b>{visible(answer['text'])}</pre></div>"
                )
        out += (
            f"<h3>\u201c{visible(prompt) or '(nothing)'}\u201d</h3><div"
            f' class="answers">{answers}</div>'
        )
    more = (
        f"<p class=dim>{len(records)} of {len(run.samples):,} evaluations; all are in"
        f" {escape(str(run.folder / 'log.jsonl'))}.</p>"
        if len(records) < len(run.samples)
        else ""
    )
    return out + more


def visible(text: str) -> str:
    """Text for HTML; characters that nobody can see are shown as a dot."""
    return escape("".join(c if c.isprintable() or c in "\n\t" else "\u00b7" for c in text))


def happenings(run: History) -> str:
    """Starts, saves, halvings and skipped steps in a table, the newest last."""
    rows = [
        (step, "skipped", f"{counted(n, 'step')}: loss or gradients were no numbers")
        for step, n in run.skipped()
    ]
    for e in run.events:
        if e["event"] == "start":
            what = [
                str(e.get("at", ""))[:16].replace("T", " "),
                e.get("device"),
                e.get("dtype"),
                e.get("torch") and f"torch {e['torch']}",
            ]
            rows.append(
                (e["step"], "continued" if e["step"] else "started", ", ".join(filter(None, what)))
            )
        elif e["event"] == "out of memory":
            what = (
                f"{e['micro_batch']} sequences"
                if "micro_batch" in e
                else f"{e.get('eval_micro_batch')} sequences in evaluations"
            )
            rows.append(
                (e["step"], "out of memory", f"from here on {what} at once; the batch stays")
            )
    rows.sort(key=lambda row: row[0])
    saves = run.saves()
    note = (
        f"<p class=dim>{counted(len(saves), 'save')}"
        + (f", the last at step {saves[-1]:,}" if saves else "")
        + f"; {counted(len(run.resumes()), 'resume')}.</p>"
    )
    return (
        table(
            ["step", "what", ""],
            [[f"{step:,}", what, more] for step, what, more in spread(rows, ROWS)],
            "words",
        )
        if rows
        else ""
    ) + note


def settings(run: History) -> str:
    """Settings, data, hardware and versions, two to a line where there is room."""
    start = {
        k: v
        for k, v in run.start.items()
        if k in ("device", "dtype", "torch", "python", "parameters")
    }
    data = run.start.get("data", {})
    facts = {f"data: {k}": v for k, v in data.items() if k in ("tokenizer", "vocab_size")} | {
        f"data: {split} tokens": n for split, n in data.get("tokens", {}).items()
    }
    values = {**run.config, **{f"run: {k}": v for k, v in start.items()}, **facts}
    words = {
        name: (
            f"{value:,}"
            if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000
            else str(value)
        )
        for name, value in values.items()
    }
    return (
        '<div class="columns">'
        + "".join(
            f"<p><span>{escape(name)}</span> {escape(text)}</p>" for name, text in words.items()
        )
        + "</div>"
    )


def comparison(runs: list[History], nats: bool) -> str:
    """The key figures of several runs, and the settings in which they differ."""
    names = dict.fromkeys(name.split(",")[0] for run in runs for name, _ in figures(run))
    names = [name for name in names if nats or name not in ("best validation loss", "perplexity")]
    rows = [
        [
            run.name,
            *(
                {name.split(",")[0]: value for name, value in figures(run)}.get(name, "")
                for name in names
            ),
        ]
        for run in runs
    ]
    keys = [
        key
        for key in dict.fromkeys(k for run in runs for k in run.config)
        if key != "checkpoint_dir"
        and len({str(run.config[key]) for run in runs if key in run.config}) > 1
    ]
    differing = table(
        ["setting", *(run.name for run in runs)],
        [[key, *(str(run.config.get(key, "not recorded")) for run in runs)] for key in keys],
        "words",
    )
    differing = differing if keys else "<p class=dim>None: the runs have the same settings.</p>"
    rows = [
        [name, *values] for name, *values in zip(["", *names], *rows, strict=True)
    ]  # a column a run
    return table(rows[0], rows[1:]) + "<h2>Settings in which they differ</h2>" + differing


def page(runs: list[History], title: str, nats: bool) -> str:
    """The whole page."""
    single = runs[0] if len(runs) == 1 else None
    head = f"<h1>{escape(title)}</h1>"
    if single:
        tiles = "".join(
            f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
            for name, value in figures(single)
        )
        head += f'<p class="dim">{escape(summary(single))}</p><div class="tiles">{tiles}</div>'
    else:
        head += "".join(
            f"<p class=dim><b>{escape(run.name)}</b>: {escape(summary(run))}</p>" for run in runs
        )
    if not nats:
        where = "; ".join(f"{run.name}: {run.config.get('data_dir', 'unknown')}" for run in runs)
        head += (
            f"<p class=note>These runs were evaluated on different data ({escape(where)}). A loss"
            " in nats a token depends on the tokenizer, so they are compared in bits per byte"
            " only; and where the validation texts differ, even those tell as much about the texts"
            " as about the models.</p>"
        )
    parts = [
        head,
        "<h2>Losses</h2>" if nats else "<h2>Validation, in bits per byte</h2>",
        curves(runs, nats),
    ]
    parts += [f"<h2>The runs beside each other</h2>{comparison(runs, nats)}"] if not single else []
    for run in runs:
        of = "" if single else f": {escape(run.name)}"
        parts.append(
            "<h2>By"
            f" {'epoch' if run.rows()[0] == 'epoch' else 'evaluation'}{of}</h2>{progress_table(run)}"
        )
        parts.append(f"<h2>What it wrote on the way{of}</h2>{samples(run)}")
        parts.append(f"<h2>What happened{of}</h2>{happenings(run)}")
        parts.append(f"<h2>Settings, data, machine{of}</h2>{settings(run)}")
    folders = " ".join(str(run.folder) for run in runs)
    foot = (
        f"<p class=dim style='margin-top:40px'>Drawn {time.strftime('%Y-%m-%d %H:%M')} by python -m"
        f" tools.report {escape(folders)}</p>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}{foot}</body></html>\n"
    )


def write(folders: list[Path], out: Path) -> None:
    """Write the page, and the curves beside it as PNG; each appears whole. Raises HistoryError for
    a run of which nothing can be shown.
    """
    from tools import charts

    runs = [read(folder) for folder in folders]
    nats = len({run.data for run in runs}) == 1
    *names, last = (run.name for run in runs)
    title = (
        f"{', '.join(names)} and {last}"
        if 0 < len(names) < 4
        else last
        if not names
        else f"{len(runs)} runs"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    html, png = (out.with_name(f".{out.stem}{suffix}.partial") for suffix in (".html", ".png"))
    html.write_text(page(runs, title, nats), encoding="utf-8")
    charts.png(png, runs, title, nats)
    os.replace(html, out)
    os.replace(png, out.with_suffix(".png"))


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.report",
        description=(
            "Curves, tables and samples of one or several runs as one page, and the curves as PNG."
        ),
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a run's folder, such as checkpoints/demo; several are laid over each other",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help=(
            "default: report.html in the run's folder; of several runs, in the present one. The PNG"
            " gets the same name"
        ),
    )
    parser.add_argument(
        "--background", action="store_true", help="with the lowest priority, as train.py calls it"
    )
    args = parser.parse_args(argv)
    if args.background and hasattr(os, "nice"):
        os.nice(19)
    out = args.out or (args.runs[0] / "report.html" if len(args.runs) == 1 else Path("report.html"))
    if out.suffix != ".html":
        parser.error(f"--out {out}: the name must end in .html")
    write(args.runs, out)
    print(f"{out} and {out.with_suffix('.png').name}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except HistoryError as error:
        print(f"tools.report: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"tools.report: {error}", file=sys.stderr)
        sys.exit(1)
    except ImportError as error:
        print(f"tools.report: {error.name} is missing; pip install {error.name}", file=sys.stderr)
        sys.exit(1)
