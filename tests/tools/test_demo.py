"""tools/demo.py as a visitor meets it: in a real browser, over HTTP, and started wrongly."""

import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
import torch

from tests.conftest import ROOT, fails_clearly, reciting, run_script, trained
from tools import demo

ODD = "_a_ & *b* `c` 😀"  # a name that Markdown would take for more than a name


@pytest.fixture(scope="module")
def folder(tmp_path_factory, char_data):
    """A working folder with runs under checkpoints/: one is trained, two recite."""
    folder = tmp_path_factory.mktemp("demo")
    runs = folder / "checkpoints"
    reciting(runs / "chat", "User: Hi\n\nAssistant: Hello.\n\nUser: Bye", masks={})
    reciting(runs / ODD, "The import of it")
    trained(char_data, runs / "char", "--max_steps=20")
    return folder


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    """The address of the page, served with a proxy set and a temporary folder gradio of others."""
    temporary = tmp_path_factory.mktemp("temporary")
    (temporary / "gradio").write_text("as good as another user's folder")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with subprocess.Popen(
        [sys.executable, "-m", "tools.demo", "--port", str(port), "--device", "cpu"],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "ALL_PROXY": "socks5://127.0.0.1:9"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), line
        yield line.split()[0]
        process.terminate()


@pytest.fixture
def page(browser, url):
    """The page, opened. Afterwards nothing was asked of the internet, and no script failed."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(120_000)  # milliseconds: the machine may be busy
    asked, failed = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto(url)
    page.get_by_role("button", name="Generate").wait_for()
    yield page
    page.close()
    assert [address for address in asked if not address.startswith((url, "data:", "blob:"))] == []
    assert failed == []


def click_generate(page, prompt, *models):
    """Choose models, type a prompt, and click."""
    chosen = page.get_by_label("models: one, or two to compare")
    while page.get_by_role("button", name="Remove").count():
        page.get_by_role("button", name="Remove").first.click()
    for name in models:
        chosen.click()
        page.get_by_role("option", name=name, exact=True).click()
        chosen.blur()
    page.get_by_label("prompt", exact=True).fill(prompt)
    page.get_by_role("button", name="Generate").click()


def generate(page, prompt, *models):
    """The texts that models write to a prompt, once all of them is there."""
    click_generate(page, prompt, *models)
    finished = re.compile(r"^\d+ tokens, [\d,]+ tokens/s, (?!\.\.\.)")
    page.get_by_text(finished).nth(len(models) - 1).wait_for()
    boxes = ("model 1", "model 2")[: len(models)]
    return [page.get_by_label(box, exact=True).input_value() for box in boxes]


def test_choose_type_generate_and_see_text_of_two_models(page):
    (alone,) = generate(page, "The import", "checkpoints/char")
    page.get_by_text("5,120 tokens seen, validation loss").first.wait_for()
    assert alone.startswith("The import")
    assert len(alone) > 100
    first, second = generate(page, "The import", "checkpoints/char", f"checkpoints/{ODD}")
    assert first == alone  # the same seed
    assert second == "The import of it"
    page.get_by_text(f"checkpoints/{ODD}/step_00000001: ").wait_for()


def test_a_character_never_seen_is_named_and_the_page_goes_on(page):
    model = "checkpoints/char/step_00000020"
    click_generate(page, "snow ☃", model)
    page.get_by_text("U+2603").first.wait_for()
    assert all(generate(page, "", model))


def test_a_model_of_conversations_replies_and_stops(page):
    assert generate(page, "Hi", "checkpoints/chat") == ["Hello."]
    page.get_by_text(", stop").first.wait_for()


def test_the_stop_texts_of_a_chat_do_not_end_the_text_of_the_other_model(folder, tmp_path):
    script = "User: Hi\n\nUser: Bye"
    reciting(tmp_path / "script", script)
    runs = [str(folder / "checkpoints/chat"), str(tmp_path / "script")]
    *_, shown = demo.generate(torch.device("cpu"), "User: Hi", runs, 200, 0, 0, 1, 1, 1)
    assert shown[2] == script


# Of CONTROLS, in their order; top-k of 1 leaves no choice.
@pytest.mark.parametrize(
    ("values", "text", "ended"),
    [
        ((200, 0, 0, 1, 1, 1), "The import of it", "end of text"),
        ((3, 0, 0, 1, 1, 1), "The im", "stopped at the limit"),
        ((200, 60, 1, 1, 1, 1), "The import of it", "end of text"),
        ((200, 60, 0, 0.001, 1, 1), "The import of it", "end of text"),
    ],
)
def test_each_slider_reaches_the_text(folder, values, text, ended):
    run = str(folder / "checkpoints" / ODD)
    *_, shown = demo.generate(torch.device("cpu"), "The", [run], *values)
    assert shown[0] == text
    assert f", {ended}\n" in shown[1]


def test_seed_and_repetition_penalty_reach_the_text(folder):
    def written(penalty, seed):
        run, values = str(folder / "checkpoints" / ODD), (20, 10, 0, 1, penalty, seed)
        *_, shown = demo.generate(torch.device("cpu"), "The", [run], *values)
        return shown[0]

    assert len({written(1, 1), written(1, 2), written(2, 1)}) == 3


def test_the_newest_run_is_offered_first_with_its_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, step in (("old", 1), ("new", 1), ("new", 2)):
        reciting(tmp_path / "checkpoints" / name, "The", step)
    os.utime(tmp_path / "checkpoints/old", (1, 1))
    new, old = (f"checkpoints/{name}" for name in ("new", "old"))
    steps = [f"{new}/step_00000002", f"{new}/step_00000001"]
    assert demo.choices() == [new, *steps, old, f"{old}/step_00000001"]


def test_without_a_model_the_page_asks_for_one():
    *_, shown = demo.generate(torch.device("cpu"), "The", [], 5, 0, 0, 1, 1, 1)
    assert shown[1] == "choose a model"


def test_a_run_that_began_again_in_its_folder_is_loaded_again(tmp_path):
    values = {name: default for name, (_, _, default, _, _) in demo.CONTROLS.items()}
    values |= {"temperature": 0, "max_new_tokens": 8}
    for text in ("The first run", "The other run"):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        reciting(tmp_path / "run", text)
        *_, (written, _) = demo.write(torch.device("cpu"), str(tmp_path / "run"), "The", values)
        assert text.startswith(written)


def test_other_websites_and_uploads_are_refused(url):
    def answer(path, data=None, **headers):
        request = urllib.request.Request(f"{url}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code

    assert answer("/config") == 200
    assert answer("/config", Host="localhost:7860") == 200
    assert answer("/config", Host="attacker.example") == 400
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    file = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'
    file += b"a" * 100_000 + b"\r\n--x--\r\n"
    assert answer("/gradio_api/upload", file, **form) == 413


def test_a_port_in_use_and_no_checkpoint_are_sentences(url, folder, tmp_path):
    port = url.rpartition(":")[2]
    fails_clearly(
        run_script("-m", "tools.demo", "--port", port, "--device", "cpu", cwd=folder),
        f"port {port} is in use",
        "--port",
    )
    fails_clearly(run_script("-m", "tools.demo", cwd=tmp_path), "no checkpoint under checkpoints/")
