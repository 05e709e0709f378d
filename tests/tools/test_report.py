"""tools/report.py: what a run's page holds, how it looks in a real browser, what may be missing."""

import base64
import html
import itertools
import json
import math
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from command_line import duration
from formats import run_folder
from formats.data_folder import read_meta
from tests.conftest import SMALL, fails_clearly, ok, run_code, run_script, trained
from tools.report import History, answers, losses_at_the_end, main, names_of, plot, read_history

# A name and a text that would break a page, a picture or a legend which took them as they are.
ODD = "_a&'$}$ 😀 مرحبا"
ODD_TEXT = (
    "</pre></script><img src=x onerror=fail()>&amp; \x00 \u202eمرحبا 😀\n  two  'blanks'\t\"tab\""
)


@pytest.fixture(scope="module")
def runs(char_data, bpe_data, tmp_path_factory):
    """Real runs with prompts and a price: `char` was resumed, `bpe` has another tokenizer.

    `ODD` is `char` with another learning rate in its settings.
    """
    folder = tmp_path_factory.mktemp("runs")
    said = ["--cost_per_hour=8", '--sample_prompts=["The ", "A <b> & "]', "--log_interval=1"]
    for data, steps in ((char_data, 20), (char_data, 60), (bpe_data, 40)):
        trained(data, folder / data.name, f"--max_steps={steps}", *said)
    log = run_folder.read_log(folder / "char")
    for record in log:
        for sample in record.get("samples", []):
            sample["text"] = ODD_TEXT
    odd = edited(folder / "char", folder / ODD, lambda _: log)
    settings = json.loads((odd / "config.json").read_text()) | {"learning_rate": 1e-3}
    (odd / "config.json").write_text(json.dumps(settings))
    return folder


def report(*arguments):
    """What the tool does with a command line; returns the page's text."""
    main([str(argument) for argument in arguments])
    pages = [path for path in arguments if str(path).endswith(".html")]
    page = pages[0] if pages else arguments[0] / "report.html"
    return page.read_text(encoding="utf-8")


def edited(run, folder, edit):
    """A copy of a run, with the records of its log as edit(log) returns them."""
    shutil.copytree(run, folder)
    run_folder.write_log(folder, edit(run_folder.read_log(run)))
    return folder


# -- what it holds --------------------------------------------------------------------------------


def test_the_page_has_the_numbers_of_the_log(runs, char_data, tmp_path):
    def a_minute_a_step(log):
        for record in log:
            step = record["step"]
            record |= {"elapsed_s": 60 * step} if "elapsed_s" in record else {}
            if "loss" in record:
                record |= {"tokens_per_second": 1e3 * step, "mfu": step / 100, "cost": step / 10}
        return log

    folder = edited(runs / "char", tmp_path / "slow", a_minute_a_step)
    page = report(folder, "--out", tmp_path / "new" / "run.html")
    assert (tmp_path / "new" / "run.png").read_bytes()[:4] == b"\x89PNG"
    assert "step 60 of 60</p>" in page  # it was 20 at first
    log = run_folder.read_log(folder)
    evaluations = [record for record in log if "val_loss" in record]
    best = min(evaluations, key=lambda r: r["val_loss"])
    meta = read_meta(char_data)
    val, windows = meta.splits["val"], (meta.splits["train"].tokens - 32) // 32
    bits = best["val_loss"] / math.log(2) * val.tokens / val.text_bytes
    figures = re.findall(r"<div><b>(.*?)</b><span>(.*?)</span>", page)
    assert {name: value for value, name in figures} == {
        "best validation loss": f"{best['val_loss']:.4f}",
        "perplexity": f"{math.e ** best['val_loss']:.2f}",
        "bits per byte": f"{bits:.3f}",
        "training tokens": "15.4k",  # 60 x 8 x 32
        "training time": "1 h 0 min",
        "tokens per second, median": "30,500",
        "MFU, median": "30.5%",
        "cost": "6.00",
    }
    for record in evaluations:
        step, loss = record["step"], record["val_loss"]
        since = [r["loss"] for r in log if "loss" in r and step - 10 < r["step"] <= step]
        cells = [f"{step}", f"{step * 8 / windows:.2f}", f"{np.mean(since):.4f}", f"{loss:.4f}"]
        cells += [f"{record['bits_per_byte']:.3f}", duration(60 * step)]
        assert re.search(r"\s*".join(f"<td>{cell}</td>" for cell in cells), page)
    rates = plot([read_history(folder, "run")], "minutes").axes[1]
    assert rates.get_lines()[0].get_xdata().tolist() == list(range(1, 61))
    *_, last = (record["samples"] for record in log if "samples" in record)
    assert last[1]["text"][:8].strip().splitlines()[0] in html.unescape(page)
    assert "A &lt;b&gt; &amp; " in page


@pytest.fixture(scope="module")
def two_runs(runs):
    """The page of two runs, a file."""
    page = runs / "two.html"
    report(runs / "char", runs / ODD, "--out", page)
    return page


def test_several_runs_are_compared_with_the_settings_that_differ(two_runs):
    page = two_runs.read_text(encoding="utf-8")
    assert "different data" not in page
    pictures = re.findall(r"data:image/svg\+xml;base64,([^\"]+)", page)
    assert len(pictures) == 3
    assert all(ODD in html.unescape(base64.b64decode(text).decode()) for text in pictures)
    assert "<td>learning_rate</td><td>0.003</td><td>0.001</td>" in page
    assert "<td>n_layer</td>" not in page


def test_runs_in_folders_of_one_name_are_told_apart(runs, tmp_path):
    for seed in (1, 2):
        run = shutil.copytree(runs / "char", tmp_path / f"exp{seed}" / "run")
        settings = json.loads((run / "config.json").read_text()) | {"seed": seed}
        (run / "config.json").write_text(json.dumps(settings))
    twice = [tmp_path / "exp1/run", tmp_path / "exp2/run", tmp_path / "exp2/../exp1/run"]
    page = report(*twice, "--out", tmp_path / "seeds.html")
    assert "<tr><th></th><th>exp1/run</th><th>exp2/run</th></tr>" in page
    assert "<td>seed</td><td>1</td><td>2</td>" in page


def test_a_name_that_is_not_utf_8_can_be_drawn():
    folders = [Path("runs/b\udcffd"), Path("runs/good")]
    assert names_of(folders) == ["b\\xffd", "good"]


def test_runs_on_different_data_are_compared_in_bits_per_byte_only(runs, tmp_path):
    page = report(runs / "char", runs / "bpe", "--out", tmp_path / "both.html")
    assert "only bits per byte are compared" in page
    comparison = page[page.index("<h2>Comparison</h2>") :]
    assert "training, in bits per byte</td>" in comparison
    assert "perplexity" not in comparison
    assert "nats per token" not in comparison


# -- how far apart runs end ------------------------------------------------------------------------


def ending_at(name, loss, seconds=100.0, **settings):
    """A run of 1,000 tokens with one loss throughout, evaluated halfway and at the end."""
    log = [{"step": 0, "total_steps": 10, "data": {"sha256": {}}}]
    for part in (0.5, 1):
        spent = {"tokens": 1000 * part, "elapsed_s": seconds * part}
        log.append({"step": 10 * part, "val_loss": loss, "bits_per_byte": loss} | spent)
    return History(name, settings, log)


def test_the_ends_of_runs_are_compared_over_the_same_tokens_and_the_same_seconds():
    first, second = ending_at("a", 3.0, lr=1), ending_at("b", 2.5, seconds=200.0, lr=2)
    second.log[-1]["val_loss"] = 2.0
    assert losses_at_the_end([first, second]) == {
        "loss after 1k tokens of training, in nats per token": ["3.0000", "2.0000"],
        "loss after 1 min 40 s of training, in nats per token": ["3.0000", "2.5000"],
    }


def test_losses_on_replies_and_on_all_tokens_are_compared_in_bits_per_byte():
    runs = [ending_at(loss_on, 3.0, loss_on=loss_on) for loss_on in ("all", "assistant")]
    (name,) = losses_at_the_end(runs)
    assert name.endswith("in bits per byte")


def test_samples_of_several_runs_are_the_last_with_their_losses():
    runs = [ending_at(name, loss) for name, loss in (("a", 3.0), ("b", 2.0))]
    for run in runs:
        run.log[1]["val_loss"] += 1
        for record in run.log[1:]:
            record["samples"] = [{"prompt": "", "text": f"{record['step']}"}]
    shown = [(sample["run"], sample["text"], sample["val_loss"]) for sample in answers(runs)]
    assert shown == [("a", "10", 3.0), ("b", "10", 2.0)]
    shown = [(sample["text"], sample["val_loss"]) for sample in answers(runs[:1])]
    assert shown == [("5.0", 4.0), ("10", 3.0)]


def test_a_run_not_yet_evaluated_is_not_compared():
    early = ending_at("b", 2.0)
    del early.log[1:]
    assert losses_at_the_end([ending_at("a", 3.0), early]) == {}


# -- how it looks ---------------------------------------------------------------------------------


def test_in_a_browser_it_fits_the_screen_and_nothing_is_loaded(browser, runs, two_runs, tmp_path):
    report(runs / "char", "--out", tmp_path / "one.html")
    for width, page in itertools.product((1366, 390), (tmp_path / "one.html", two_runs)):
        tab = browser.new_page(viewport={"width": width, "height": 800})
        asked, failed = [], []
        tab.on("request", lambda request: asked.append(request.url[:200]))  # noqa: B023
        tab.on("pageerror", lambda error: failed.append(str(error)))  # noqa: B023
        tab.goto(page.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        losses = tab.locator("img:visible")
        before = losses.get_attribute("src")  # there is one, or this raises
        assert losses.evaluate("image => image.naturalWidth") > 0
        tab.get_by_text("tokens", exact=True).first.click()
        assert losses.get_attribute("src") != before
        if page == two_runs:
            assert tab.title() == f"char, {ODD}"
            shown = ODD_TEXT.replace("\0", "␀")
            assert f"The {shown}" in tab.locator("pre").all_text_contents()
        assert all(url.startswith((tab.url, "data:")) for url in asked)
        assert failed == []
        tab.close()


# -- what is missing or broken --------------------------------------------------------------------


def test_resumes_and_skipped_steps_are_marked(runs):
    run = read_history(runs / "char", "char")
    run.last["bad_steps"] = 2
    legend = plot([run], "tokens").axes[0].get_legend()
    names = {text.get_text() for text in legend.get_texts()}
    assert {"resume", "skipped steps (NaN)"} <= names


def test_a_long_log_makes_no_large_page(runs, tmp_path):
    def long(log):
        start, *steps = (record for record in log if "event" not in record or not record["step"])
        again = []
        for n in range(100):
            for record in steps:
                step = record["step"] + 60 * n
                moved = {"step": step, "tokens": 256 * step, "elapsed_s": 0.1 * step, "lr": 1e-3}
                again.append(record | moved)
        return [start, *again]

    assert len(report(edited(runs / "char", tmp_path / "long", long))) < 1_000_000


def test_a_run_without_evaluations_whose_log_is_cut_in_mid_line(runs, tmp_path):
    def early(log):
        unknown = dict.fromkeys(("mfu", "cost", "grad_norm"))
        return [record | unknown for record in log if record["step"] < 10]

    folder = edited(runs / "bpe", tmp_path / "run", early)
    log = folder / "log.jsonl"
    log.write_bytes(log.read_bytes()[:-40] + b"\xff\xfe")
    page = report(folder)
    assert "no evaluations" in page
    assert "step 8 of 40" in page
    assert "nan" not in page.split("base64")[0]


def test_a_loss_whose_perplexity_no_float_holds_is_shown(runs, tmp_path):
    def blown(log):
        return [r | {"val_loss": 3000.0} if "val_loss" in r else r for r in log]

    page = report(edited(runs / "bpe", tmp_path / "blown", blown))
    assert "<b>3000.0000</b>" in page
    assert "<b>inf</b>" in page


def test_every_loss_may_be_nan(runs, tmp_path):
    def diverged(log):
        return [r | {"loss": None} for r in log if "val_loss" not in r]

    assert "no evaluations" in report(edited(runs / "bpe", tmp_path / "bad", diverged))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["empty"], "empty is not a run that has logged its start and a step"),
        (["none"], "none is not a run that has logged its start and a step; it does not exist"),
        (["."], "has logged its start and a step; it holds runs; give one of them: saved"),
        (["saved/step_00000001"], "step; it is one step of a run; give the run: saved"),
        (["run", "--out", "x.png"], "must end in .html"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(tmp_path, arguments, words):
    for name in ("empty", "run"):
        (tmp_path / name).mkdir()
        run_folder.write_log(tmp_path / name, [{"step": 0, "event": "start", "total_steps": 9}])
        (tmp_path / name / "config.json").write_text('{"n_layer": 2}')
    (tmp_path / "saved" / "step_00000001").mkdir(parents=True)
    (tmp_path / "saved" / "step_00000001" / "state.json").touch()
    fails_clearly(run_script("-m", "tools.report", *arguments, cwd=tmp_path), words)


@pytest.mark.parametrize("name", ["page.html", "page.png"])
def test_what_no_report_wrote_is_not_replaced(runs, tmp_path, name):
    (tmp_path / name).write_text("mine")
    result = run_script("-m", "tools.report", runs / "bpe", "--out", tmp_path / "page.html")
    fails_clearly(result, f"{name} exists already", "--out")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_folder_that_takes_no_page_is_answered_with_out(runs):
    result = run_script("-m", "tools.report", runs / "bpe", "--out", "/proc/no/page.html")
    fails_clearly(result, "/proc/no: ", "; give another --out")


NO_MATPLOTLIB = "import runpy, sys; sys.modules['matplotlib'] = None; "


def test_a_missing_matplotlib_is_named(runs):
    tool = "runpy.run_module('tools.report', run_name='__main__')"
    result = run_code(NO_MATPLOTLIB + tool, runs / "bpe")
    fails_clearly(result, "matplotlib is missing; pip install matplotlib", status=1)


def test_a_run_without_matplotlib_advises_what_works(char_data, tmp_path):
    where = [f"--data_dir={char_data}", f"--checkpoint_dir={tmp_path / 'run'}"]
    script = "runpy.run_path('train.py', run_name='__main__')"
    result = ok(run_code(NO_MATPLOTLIB + script, *where, *SMALL, "--max_steps=20"))
    assert result.stdout.splitlines()[-1] == f"  python -m tools.evaluate {tmp_path / 'run'}"
