"""tools/report.py: what a run's page holds, how it looks in a real browser, what may be missing."""

import functools
import html
import json
import shutil

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from formats import run_log
from tests.conftest import fails_clearly, run_script, train_small
from tools import charts, history

LINE = {
    "tokens": 0,
    "epoch": 0.0,
    "loss": 4.0,
    "lr": 3e-4,
    "grad_norm": 1.0,
    "tokens_per_second": 1e5,
    "mfu": 0.4,
    "bad_steps": 0,
    "elapsed_s": 0.0,
    "cost": None,
}


@pytest.fixture(scope="module")
def runs(char_data, bpe_data, tmp_path_factory):
    """Real runs, with prompts and a price.

    `char` was continued once, `other` has another learning rate, `bpe` learnt from other tokens.
    """
    folder = tmp_path_factory.mktemp("runs")
    for name, data, steps, more in (
        ("char", char_data, 20, []),
        ("char", char_data, 60, []),
        ("other", char_data, 40, ["--learning_rate=1e-3"]),
        ("bpe", bpe_data, 40, []),
    ):
        result = train_small(
            data,
            folder / name,
            f"--max_steps={steps}",
            "--cost_per_hour=8",
            '--sample_prompts=["The ", "A <b> & "]',
            "--log_interval=1",
            *more,
        )
        assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def eventful(runs, tmp_path_factory):
    """`char` with memory that ran out and skipped steps in its log, as training writes them."""
    folder = tmp_path_factory.mktemp("eventful") / "eventful"
    shutil.copytree(runs / "char", folder)
    lines = read_log(folder)
    for line in lines:
        if "bad_steps" in line and line["step"] > 30:
            line["bad_steps"] = 2
    at = next(i for i, line in enumerate(lines) if line["step"] == 10)
    spent = {"elapsed_s": lines[at]["elapsed_s"], "cost": None}
    lines.insert(at, {"step": 10, "event": "out of memory", "micro_batch": 4} | spent)
    write_log(folder, lines)
    return folder


def report(*arguments):
    """Run tools.report; returns the page's text."""
    result = run_script("-m", "tools.report", *arguments)
    assert result.returncode == 0, result.stderr
    pages = [path for path in arguments if str(path).endswith(".html")]
    page = pages[0] if pages else arguments[0] / "report.html"
    return page.read_text(encoding="utf-8")


def made_run(folder, steps, evaluations=0, **columns):
    """A run's folder with a log in train.py's format of `steps` lines, ten steps apart."""
    folder.mkdir(parents=True)
    records = []
    for n in range(1, steps + 1):
        spent = {"elapsed_s": 2.0 * n, "cost": n / 900}
        values = {"tokens": 327_680 * n, "epoch": n / 8545, "loss": 3 + 7 / n**0.3}
        records.append({"step": 10 * n} | LINE | values | spent | columns)
        if evaluations and n % (steps // evaluations) == 0:
            losses = {"val_loss": 3 + 7.2 / n**0.3, "bits_per_byte": 1.0}
            records.append({"step": 10 * n} | losses | spent)
    write_log(folder, records)
    return folder


def read_log(folder):
    """The records of a run's log."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def write_log(folder, records):
    """Write a run's log anew."""
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


# -- what it holds --------------------------------------------------------------------------------


def test_the_page_tells_the_numbers_of_the_log(runs, tmp_path):
    page = report(runs / "char", "--out", tmp_path / "new" / "run.html")
    assert (tmp_path / "new" / "run.png").read_bytes()[:4] == b"\x89PNG"
    log = run_log.read(runs / "char")
    best = min((r for r in log if "val_loss" in r), key=lambda r: r["val_loss"])
    assert f"<b>{best['val_loss']:.4f}</b>" in page and f"{best['bits_per_byte']:.3f}" in page
    for record in log:
        if "val_loss" in record:
            assert f"<td>{record['val_loss']:,.4f}</td>" in page
    last = [r["samples"] for r in log if "samples" in r][-1]
    assert last[1]["text"][:8].strip().splitlines()[0] in html.unescape(page)
    assert (
        "A &lt;b&gt; &amp; " in page
        and "continued" in page
        and "1 resume." in page
        and "2 starts" in page
        and "cost" in page
    )
    # Nothing to run, nothing to load.
    assert "<script" not in page and "http" not in page.replace("http://www.w3.org", "")


def test_saves_resumes_halvings_and_skipped_steps_are_known(eventful):
    run = history.read(eventful)
    assert (
        run.resumes() == [20]
        and run.saves() == [10, 20, 30, 40, 50, 60]
        and run.skipped() == [(31, 2)]
    )
    page = report(eventful)
    assert (
        "from here on 4 sequences at once" in page
        and "2 steps: NaN or infinite loss or gradients" in page
    )


def test_a_table_by_epoch_when_there_are_several(tmp_path):
    run = history.read(made_run(tmp_path / "epochs", 8545 * 4 // 10, 40, epoch=0.0))
    assert run.rows()[0] == "step"
    folder = made_run(tmp_path / "run", 1000, 40)
    lines = read_log(folder)
    for line in lines:
        if "epoch" in line:
            line["epoch"] = line["step"] / 2500
    write_log(folder, lines)
    by, rows = history.read(folder).rows()
    assert by == "epoch" and [r["epoch"] for r in rows] == pytest.approx([1, 2, 3, 4], abs=0.01)
    in_second = [line["loss"] for line in lines if "loss" in line and 2500 < line["step"] <= 5000]
    at_5000 = next(line for line in lines if line["step"] == 5000 and "val_loss" in line)
    second = rows[1]
    assert second["loss"] == pytest.approx(np.mean(in_second))
    assert second["val_loss"] == pytest.approx(at_5000["val_loss"])
    assert second["seconds_a_step"] == pytest.approx(0.2)
    assert second["elapsed_s"] == pytest.approx(1000)


def test_several_runs_are_laid_over_each_other_with_what_differs(runs, tmp_path):
    page = report(runs / "char", runs / "other", "--out", tmp_path / "both.html")
    assert "char and other" in page and "Settings in which they differ" in page
    assert (
        "<td>learning_rate</td><td>0.003</td><td>0.001</td>" in page
        and "different data" not in page
    )


def test_runs_over_different_data_compare_in_bits_per_byte_only(runs, tmp_path):
    page = report(runs / "char", runs / "bpe", "--out", tmp_path / "both.html")
    assert (
        "different data" in page
        and "bits per byte only" in page
        and "depends on the tokenizer" in page
    )


# -- how it looks ---------------------------------------------------------------------------------

# In the browser: boxes that overlap, text that is cut, pictures that are missing.
LAYOUT = """() => {
    const find = (selectors) => [...document.querySelectorAll(selectors)];
    const start = (element, length) => element.outerHTML.slice(0, length);
    const separate = find(
        'h1, h2, h3, .tile, .x label, img, table, .answers > div, .columns p, p.dim'
    ).filter(e => e.offsetParent && !e.closest('.answers > div > *'));
    const boxes = separate.map(e => [e, e.getBoundingClientRect()]);
    const overlaps = [];
    for (const [a, p] of boxes) {
        for (const [b, q] of boxes) {
            if (a === b || a.contains(b) || b.contains(a)) continue;
            const width = Math.min(p.right, q.right) - Math.max(p.left, q.left);
            const height = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
            if (width > 1 && height > 1) overlaps.push(start(a, 60) + ' / ' + start(b, 60));
        }
    }
    const cut = find('.scroll, .tile, pre, .columns p')
        .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => start(e, 80));
    const images = [...document.images].filter(i => i.offsetParent);
    const broken = images.filter(i => !(i.complete && i.naturalWidth)).length;
    const wide = document.documentElement.scrollWidth;
    return {wide, overlaps, cut, broken, images: images.length};
}"""


@pytest.mark.parametrize("width", [1366, 390])
def test_in_a_browser_nothing_overlaps_nothing_is_cut_and_nothing_is_loaded(
    browser, eventful, runs, tmp_path, width
):
    report(eventful, "--out", tmp_path / "one.html")
    report(runs / "char", runs / "other", "--out", tmp_path / "two.html")
    for name in ("one.html", "two.html"):
        tab = browser.new_page(viewport={"width": width, "height": 800})
        asked, problems = [], []
        tab.on("request", lambda request: asked.append(request.url[:60]))  # noqa: B023
        tab.on("console", lambda message: problems.append(message.text))  # noqa: B023
        tab.goto((tmp_path / name).as_uri())
        layout = tab.evaluate(LAYOUT)
        assert (
            layout["wide"] <= width
            and not layout["overlaps"]
            and not layout["cut"]
            and not layout["broken"]
        ), layout
        # The losses, learning rate, gradient norm, speed; MFU is unknown on a CPU.
        assert layout["images"] == 4 and not problems
        assert all(url.startswith(("file:", "data:")) for url in asked)
        losses = tab.locator("picture:visible img")
        before = losses.evaluate("i => i.currentSrc")
        tab.get_by_text("tokens", exact=True).first.click()
        # Another picture, against tokens; on a phone one that is drawn for it.
        assert losses.count() == 1 and losses.evaluate("i => i.currentSrc") != before
        assert losses.evaluate("i => i.naturalWidth < 500") == (width == 390)
        tab.close()


def unseen_tick_labels(axes):
    """The labels of ticks that lie outside the picture: matplotlib keeps them, and draws none."""
    kept, drawn = set(), set()
    for axis in (axes.xaxis, axes.yaxis):
        for tick in axis.get_major_ticks() + axis.get_minor_ticks():
            kept |= {tick.label1, tick.label2}
        for tick in axis._update_ticks():
            drawn |= {tick.label1, tick.label2}
    return kept - drawn


@pytest.mark.parametrize("size", [(11.4, 4.6), (3.7, 3.5)])
@pytest.mark.parametrize("which", ["eventful", "large", "other"])
def test_labels_on_every_axis_and_none_over_another(eventful, runs, tmp_path, size, which):
    if which == "eventful":
        made = [eventful]
    elif which == "large":
        made = [made_run(tmp_path / "large", 5000, 10)]
    else:
        made = [runs / "char", runs / "other"]
    found = [history.read(folder) for folder in made]
    draws = [functools.partial(charts.draw_losses, runs=found, x=x) for x in charts.axes_of(found)]
    for column in charts.small_columns(found):
        draws.append(functools.partial(charts.draw_small, runs=found, column=column))
    assert len(draws) == (8 if which == "large" else 7)
    for draw in draws:
        with charts.matplotlib.rc_context(charts.STYLE):
            figure = Figure(figsize=size, layout="constrained")
            axes = figure.add_subplot()
            draw(axes)
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
        assert axes.get_xlabel() and axes.get_ylabel()
        renderer = canvas.get_renderer()
        texts = [t for t in figure.findobj(Text) if t.get_text().strip() and t.get_visible()]
        unseen = unseen_tick_labels(axes)
        boxes = [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t not in unseen]
        for n, (text, box) in enumerate(boxes):
            assert (
                box.x0 >= -1
                and box.y0 >= -1
                and box.x1 <= figure.bbox.x1 + 1
                and box.y1 <= figure.bbox.y1 + 1
            ), (text, "is cut")
            assert not [other for other, b in boxes[n + 1 :] if b.overlaps(box)], text


def test_thinning_keeps_every_spike_and_few_points():
    y = np.zeros(1_000_000)
    y[123_456], y[654_321] = 9.0, -9.0
    kept = charts.thin(y)
    assert (
        len(kept) <= charts.POINTS and {123_456, 654_321} <= set(kept) and (np.diff(kept) > 0).all()
    )


# -- what is missing or broken --------------------------------------------------------------------


def test_a_long_log_makes_no_large_page(tmp_path):
    page = report(made_run(tmp_path / "long", 30_000, 3000, epoch=None))
    assert len(page) < 2_000_000 and "of 3,000 rows" in page


def test_a_run_without_evaluations_or_cut_in_mid_line(tmp_path):
    folder = made_run(tmp_path / "run", 50)
    log = folder / "log.jsonl"
    log.write_bytes(
        log.read_bytes()[:-40] + b'{"step": 7, "loss": "x"}\n[1]\n{"step": 8}\n\xff\xfe'
    )
    page = report(folder)
    assert (
        "no evaluations" in page
        and "490" in page
        and history.read(folder).columns["step"][-1] == 490
    )


def test_runs_of_which_nothing_can_be_shown_are_named(runs, tmp_path):
    (tmp_path / "empty").mkdir()
    fails_clearly(run_script("-m", "tools.report", tmp_path / "empty"), "empty has no log.jsonl")
    (tmp_path / "empty" / "log.jsonl").write_text('{"step": 0, "event": "start"}\n')
    fails_clearly(run_script("-m", "tools.report", tmp_path / "empty"), "has logged no step yet")
    fails_clearly(run_script("-m", "tools.report", runs / "none"), "runs with a log", runs / "char")
    fails_clearly(
        run_script("-m", "tools.report", runs / "char", "--out", tmp_path / "x.png"),
        "must end in .html",
    )


def test_every_number_may_be_missing(tmp_path):
    names = ("lr", "grad_norm", "tokens_per_second", "mfu", "tokens", "epoch", "elapsed_s", "cost")
    page = report(made_run(tmp_path / "run", 30, **dict.fromkeys(names)))
    assert "steps" in page and "nan" not in page.split("base64")[0]
    report(made_run(tmp_path / "bad", 30, loss=None))
