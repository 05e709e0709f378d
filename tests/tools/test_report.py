"""tools/report.py: what a run's page holds, how it looks in a real browser, what may be missing."""

import html
import itertools
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from formats import run_log
from tests.conftest import ROOT, SMALL, fails_clearly, run_script, train_small
from tools.report import History, compare_ends, plot, read_history

START = {
    "step": 0,
    "event": "start",
    "at": "2026-01-02T03:04:05+0000",
    "torch": "2.13.0",
    "processes": 1,
    "device": "cpu, 1 threads",
    "dtype": "float32",
    "python": "3.12.0",
    "parameters": 43_904,
    "total_steps": 300_000,
    "data": {
        "tokenizer": "bpe",
        "vocab_size": 512,
        "tokens": {"train": 84_534},
        "sha256": {"train": "00"},
    },
    "elapsed_s": 0.0,
    "cost": None,
}
LINE = {
    "tokens": 0,
    "epoch": 0.0,
    "loss": 4.0,
    "lr": 3e-4,
    "grad_norm": 1.0,
    "tokens_per_second": 1e5,
    "mfu": 0.4,
    "bad_steps": 0,
}
SHAPE = {"n_layer": 2, "n_embd": 32, "block_size": 32, "data_dir": "data/made"}


@pytest.fixture(scope="module")
def runs(char_data, bpe_data, tmp_path_factory):
    """Real runs with prompts and a price: `char` was resumed, `bpe` has another tokenizer.

    `other` is `char` with another learning rate in its settings.
    """
    folder = tmp_path_factory.mktemp("runs")
    for name, data, steps in (
        ("char", char_data, 20),
        ("char", char_data, 60),
        ("bpe", bpe_data, 40),
    ):
        result = train_small(
            data,
            folder / name,
            f"--max_steps={steps}",
            "--cost_per_hour=8",
            '--sample_prompts=["The ", "A <b> & "]',
            "--log_interval=1",
        )
        assert result.returncode == 0, result.stderr
    shutil.copytree(folder / "char", folder / "other")
    settings = json.loads((folder / "char/config.json").read_text()) | {"learning_rate": 1e-3}
    (folder / "other/config.json").write_text(json.dumps(settings))
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
    records = [START]
    for n in range(1, steps + 1):
        spent = {"elapsed_s": 2.0 * n, "cost": n / 900}
        values = {"tokens": 327_680 * n, "epoch": n / 8545, "loss": 3 + 7 / n**0.3}
        records.append({"step": 10 * n} | LINE | values | spent | columns)
        if evaluations and n % (steps // evaluations) == 0:
            losses = {"val_loss": 3 + 7.2 / n**0.3, "bits_per_byte": 1.0}
            records.append({"step": 10 * n} | losses | spent)
    run_log.write(folder, records)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


# -- what it holds --------------------------------------------------------------------------------


def test_the_page_has_the_numbers_of_the_log(runs, tmp_path):
    page = report(runs / "char", "--out", tmp_path / "new" / "run.html")
    assert (tmp_path / "new" / "run.png").read_bytes()[:4] == b"\x89PNG"
    log = run_log.read(runs / "char")
    evaluations = [record for record in log if "val_loss" in record]
    best = min(evaluations, key=lambda r: r["val_loss"])
    assert f"<b>{best['val_loss']:.4f}</b>" in page
    assert f"{best['bits_per_byte']:.3f}" in page
    for record in evaluations:
        assert f"<td>{record['val_loss']:,.4f}</td>" in page
    since = [r["loss"] for r in log if "loss" in r and 10 < r["step"] <= 20]
    assert f"<td>{np.mean(since):.4f}</td>" in page
    last = [r["samples"] for r in log if "samples" in r][-1]
    assert last[1]["text"][:8].strip().splitlines()[0] in html.unescape(page)
    assert "A &lt;b&gt; &amp; " in page


def test_several_runs_are_compared_with_the_settings_that_differ(runs, tmp_path):
    page = report(runs / "char", runs / "other", "--out", tmp_path / "both.html")
    assert "char, other" in page and "different data" not in page
    assert "<td>learning_rate</td><td>0.003</td><td>0.001</td>" in page


def test_runs_on_different_data_are_compared_in_bits_per_byte_only(runs, tmp_path):
    page = report(runs / "char", runs / "bpe", "--out", tmp_path / "both.html")
    assert "different data" in page and "only bits per byte" in page
    comparison = page[page.index("<h2>Comparison</h2>") :]
    assert "in bits per byte: char: " in comparison
    assert "perplexity" not in comparison
    assert "nats a token" not in comparison


# -- how far apart runs end ------------------------------------------------------------------------


def ending_at(name, loss, seconds=100.0, **settings):
    """A run of 1,000 tokens with one loss throughout, evaluated halfway and at the end."""
    log = [START]
    for part in (0.5, 1):
        spent = {"tokens": 1000 * part, "elapsed_s": seconds * part}
        log.append({"step": 10 * part, "val_loss": loss, "bits_per_byte": loss} | spent)
    return History(name, settings, log)


def test_the_ends_of_runs_are_compared_over_the_same_tokens_and_the_same_seconds():
    first, second = ending_at("a", 3.0, lr=1), ending_at("b", 2.5, seconds=200.0, lr=2)
    second.log[-1]["val_loss"] = 2.0
    of_tokens, of_seconds = compare_ends([first, second])
    assert of_tokens.startswith("After 1k tokens of training, in nats a token: a: 3.0000.")
    assert "b: 1.0000 less." in of_tokens
    assert of_seconds.startswith("After 1 min 40 s") and "b: 0.5000 less." in of_seconds
    assert "another --seed" in of_tokens


@pytest.mark.parametrize("loss, words", [(2.6, "larger"), (2.95, "not larger")])
def test_a_difference_of_settings_is_compared_with_the_spread_of_seeds(loss, words):
    seeds = [ending_at(f"a{seed}", 3 + seed / 10, lr=1, seed=seed) for seed in (0, 1)]
    sentence, _ = compare_ends([*seeds, ending_at("b", loss, lr=2, seed=0)])
    assert "a0, a1: 3.0500." in sentence
    assert f"b: {3.05 - loss:.4f} less, {words} than the spread of seeds." in sentence
    assert "a0, a1 differ only in their seed; their spread is 0.1000." in sentence


def test_a_run_not_yet_evaluated_is_not_compared():
    early = ending_at("b", 2.0)
    del early.log[1:]
    assert compare_ends([ending_at("a", 3.0), early]) == []


# -- how it looks ---------------------------------------------------------------------------------

# In the browser: boxes that overlap, text that is cut, pictures that are missing.
LAYOUT = """() => {
    const find = (selectors) => [...document.querySelectorAll(selectors)];
    const start = (element, length) => element.outerHTML.slice(0, length);
    const separate = find(
        'h1, h2, h3, .tiles > div, .x label, .scroll, .answers > div, .columns p, p.dim'
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
    const cut = find('.tiles > div, pre, .columns p')
        .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => start(e, 80));
    const images = [...document.images].filter(i => i.offsetParent);
    const broken = images.filter(i => !(i.complete && i.naturalWidth)).length;
    const wide = document.documentElement.scrollWidth;
    return {wide, overlaps, cut, broken, images: images.length};
}"""


def test_in_a_browser_nothing_overlaps_nothing_is_cut_and_nothing_is_loaded(
    browser, runs, tmp_path
):
    report(runs / "char", "--out", tmp_path / "one.html")
    report(runs / "char", runs / "other", "--out", tmp_path / "two.html")
    for width, name in itertools.product((1366, 390), ("one.html", "two.html")):
        tab = browser.new_page(viewport={"width": width, "height": 800})
        asked, problems = [], []
        tab.on("request", lambda request: asked.append(request.url[:60]))  # noqa: B023
        tab.on("console", lambda message: problems.append(message.text))  # noqa: B023
        tab.goto((tmp_path / name).as_uri())
        layout = tab.evaluate(LAYOUT)
        assert layout.pop("wide") <= width
        assert layout == {"overlaps": [], "cut": [], "broken": 0, "images": 1}
        assert not problems
        assert all(url.startswith(("file:", "data:")) for url in asked)
        losses = tab.locator(".x img:visible")
        before = losses.get_attribute("src")
        tab.get_by_text("tokens", exact=True).first.click()
        assert losses.count() == 1 and losses.get_attribute("src") != before
        tab.close()


# -- what is missing or broken --------------------------------------------------------------------


def test_resumes_and_skipped_steps_are_marked(tmp_path):
    run = read_history(made_run(tmp_path / "run", 5, bad_steps=2))
    run.log.append(START | {"step": 30, "tokens": 327_680 * 3})
    legend = plot([run], "tokens").axes[0].get_legend()
    names = {text.get_text() for text in legend.get_texts()}
    assert {"resume", "skipped steps (NaN)"} <= names


def test_a_long_log_makes_no_large_page(tmp_path):
    page = report(made_run(tmp_path / "long", 30_000, 3000))
    assert len(page) < 2_000_000


def test_a_run_without_evaluations_whose_log_is_cut_in_mid_line(tmp_path):
    folder = made_run(tmp_path / "run", 50, mfu=None, cost=None, grad_norm=None)
    log = folder / "log.jsonl"
    log.write_bytes(log.read_bytes()[:-40] + b"\xff\xfe")
    page = report(folder)
    assert "no evaluations" in page and "step 490 of 300,000" in page
    assert "nan" not in page.split("base64")[0]


def test_every_loss_may_be_nan(tmp_path):
    assert "no evaluations" in report(made_run(tmp_path / "bad", 30, loss=None))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["empty"], "empty is not a run that has logged its start and a step"),
        (["none"], "runs next to it: empty, run"),
        (["run", "--out", "x.png"], "must end in .html"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(tmp_path, arguments, words):
    made_run(tmp_path / "run", 3)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/log.jsonl").write_text('{"step": 0, "event": "start"}\n')
    fails_clearly(run_script("-m", "tools.report", *arguments, cwd=tmp_path), words)


def test_a_missing_matplotlib_is_named(tmp_path):
    run = made_run(tmp_path / "run", 3)
    result = without_matplotlib("runpy.run_module('tools.report', run_name='__main__')", run)
    fails_clearly(result, "matplotlib is missing; pip install matplotlib", status=1)


def without_matplotlib(code, *arguments):
    """Run code with arguments where matplotlib is not installed."""
    code = f"import runpy, sys; sys.modules['matplotlib'] = None; {code}"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_run_without_matplotlib_advises_what_works(char_data, tmp_path):
    where = [f"--data_dir={char_data}", f"--checkpoint_dir={tmp_path / 'run'}"]
    run = "sys.argv[0] = 'train.py'; runpy.run_path('train.py', run_name='__main__')"
    result = without_matplotlib(run, *where, *SMALL, "--max_steps=20")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"  python -m tools.evaluate {tmp_path / 'run'}"
