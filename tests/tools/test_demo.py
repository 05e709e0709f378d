"""tools/demo.py as a visitor meets it: in a real browser, over HTTP, and started wrongly."""

import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from tests.conftest import ROOT, fails_clearly, run_script, train_small


@pytest.fixture(scope="module")
def folder(tmp_path_factory, char_data, bpe_data, chat_data):
    """A working folder with a run on each kind of data under checkpoints/."""
    folder = tmp_path_factory.mktemp("demo")
    for name, data in (("chat", chat_data), ("char", char_data), ("bpe", bpe_data)):
        result = train_small(
            data, folder / "checkpoints" / name, "--max_steps=20", "--sample_prompts=The name"
        )
        assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def served(folder):
    """The page's address and its process, while it is served."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "tools.demo", "--port", str(port), "--device", "cpu"]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), line
        yield line.split()[0], process
        process.terminate()


@pytest.fixture(scope="module")
def url(served):
    """The address of the page, while it is served."""
    return served[0]


@pytest.fixture
def page(browser, url):
    """The page, opened. Afterwards nothing was asked of the internet, and no script failed."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    asked, failed = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto(url)
    page.locator("#go").wait_for()
    yield page
    page.close()
    assert (
        not [address for address in asked if not address.startswith((url, "data:", "blob:"))]
        and not failed
    )


def written(page, box):
    """The text in a box, once all of it is there."""
    speed = page.locator(f"#speed_{box}").get_by_text(
        re.compile(r"^\d+ tokens, [\d,]+ tokens/s(?!.*\.\.\.)")
    )
    speed.wait_for(timeout=30_000)
    return page.locator(f"#text_{box} textarea").input_value()


def choose(page, box, name):
    """Choose a checkpoint."""
    page.get_by_role("option").first.wait_for(state="hidden")  # of a list that is just closing
    page.locator(f"#{box} input").click()
    page.get_by_role("option", name=name, exact=True).click()


def test_choose_type_generate_and_see_text_of_two_models(page):
    choose(page, "first", "char: step 20 (best or newest)")
    page.get_by_text("context 32 tokens, 5,120 tokens seen, validation loss").first.wait_for()
    page.locator("#prompt textarea").fill("The import")
    page.locator("#go").click()
    alone = written(page, "first")
    assert (
        alone.startswith("The import")
        and len(alone) > 100
        and not page.locator("#text_second").is_visible()
    )
    choose(page, "second", "bpe: step 20")
    page.locator("#go").click()
    page.locator("#text_second").wait_for()
    assert (
        written(page, "second").startswith("The import") and written(page, "first") == alone
    )  # the same seed


def test_an_example_becomes_the_prompt(page):
    page.get_by_text("The name", exact=True).click()
    page.wait_for_function("document.querySelector('#prompt textarea').value == 'The name'")


def test_a_character_never_seen_is_named_and_the_page_goes_on(page):
    choose(page, "first", "char: step 20")
    page.locator("#prompt textarea").fill("snow ☃")
    page.locator("#go").click()
    page.get_by_text("U+2603").first.wait_for()
    page.locator("#prompt textarea").fill("")
    page.locator("#go").click()
    assert written(page, "first")


def test_a_request_out_of_bounds_is_refused(url):
    from gradio_client import Client

    client = Client(url, verbose=False)

    def ask(first="checkpoints/bpe", max_new_tokens=5, temperature=0):
        settings = (max_new_tokens, temperature, 0, 1, 1, 1)
        return client.predict(first, "none", "The " * 50, *settings, api_name="/generate")

    for wrong, words in (
        ({"max_new_tokens": 10**9}, "maximum value 1000"),
        ({"temperature": -1}, "minimum value 0"),
        ({"first": "../../etc"}, "not in the list of choices"),
    ):
        with pytest.raises(Exception, match=re.escape(words)):
            ask(**wrong)
    text, *_ = ask()
    assert text.startswith("The The")
    reply, *_ = ask(first="checkpoints/chat")
    assert "The The" not in reply


def test_other_websites_and_uploads_are_refused(url):
    def answer(path, host=None, data=None):
        headers = {"Host": host or url.removeprefix("http://")}
        headers["Content-Type"] = "multipart/form-data; boundary=x"
        request = urllib.request.Request(f"{url}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code

    assert answer("/config") == answer("/config", "localhost:7860") == 200
    assert answer("/config", "attacker.example") == 400
    file = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\n'
    assert answer("/gradio_api/upload", data=file + b"a" * 100_000 + b"\r\n--x--\r\n") == 413


def test_a_port_in_use_and_no_checkpoint_are_sentences(url, folder, tmp_path):
    port = url.rpartition(":")[2]
    fails_clearly(
        run_script("-m", "tools.demo", "--port", port, "--device", "cpu", cwd=folder),
        f"port {port} is in use",
        "--port",
    )
    fails_clearly(run_script("-m", "tools.demo", cwd=tmp_path), "no checkpoint under checkpoints/")
