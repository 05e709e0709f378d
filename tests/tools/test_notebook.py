"""colab.ipynb as Colab runs it, with a folder for the Drive: killed while it trains, and again."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from formats import run_folder, run_log
from tests.conftest import ROOT, SMALL
from tools.notebook import Stopped, run

NOTEBOOK = ROOT / "colab.ipynb"
FIELD = re.compile(r"^(\w+) = .*?(  # @param .*)$", re.MULTILINE)
LENGTH = ["--max_steps=600", "--eval_interval=200", "--save_interval=50", "--log_interval=50"]
# What the notebook asks of Colab: its Drive, its uploads, its secrets.
COLAB = {
    "drive": "def mount(path):\n    assert path == '/content/drive'\n",
    "files": (
        "import os, shutil\n\ndef upload():\n"
        "    shutil.copy(os.environ['TEST_UPLOAD'], 'topics.txt')\n"
        "    return {'topics.txt': b''}\n"
    ),
    "userdata": "def get(name):\n    return {'HF_TOKEN': 'hf_test'}[name]\n",
}


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as publishing asks for; keeps the files that are sent."""

    published: ClassVar = {}

    def log_message(self, *words):
        pass

    def do_GET(self):
        self.reply({"id": "me/first", "sha": "0" * 40, "siblings": []})

    def do_POST(self):
        assert self.headers["Authorization"] == "Bearer hf_test"
        here = f"http://{self.headers['Host']}/me/first"
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            self.reply({"files": [plain | {"path": file["path"]} for file in files]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.published[line["value"]["path"]] = content
            self.reply({"commitUrl": f"{here}/commit/1", "commitOid": "1" * 40})
        else:
            self.reply({"url": here, "name": "me/first"})

    def reply(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def hub():
    """The hub's address, while it answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def machine(tmp_path, text_file):
    """A Colab machine with the code on it: the folder that notebooks begin in, its environment."""
    content = tmp_path / "content"
    content.mkdir()
    (content / "gpt2_code").symlink_to(ROOT)
    for name, code in COLAB.items():
        path = tmp_path / "packages/google/colab" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path / "packages"),
        "TEST_UPLOAD": str(text_file),
        "HF_HOME": str(tmp_path / "hf"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "NO_PROXY": "127.0.0.1",
    }
    return content, environment


def opened(**values):
    """The notebook with other values in its fields."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        for name, _ in FIELD.findall(cell.source):
            if name in values:
                field = re.compile(rf"^{name} = .*?(  # @param )", re.MULTILINE)
                value = f"{name} = {values.pop(name)!r}"
                cell.source = field.sub(lambda found, v=value: v + found[1], cell.source)
    assert not values
    return notebook


def said(notebook, name):
    """What a cell printed."""
    cell = next(cell for cell in notebook.cells if cell.id == name)
    return "".join(output.get("text", "") for output in cell.outputs)


def test_the_notebook_is_small_and_clean():
    text = NOTEBOOK.read_text(encoding="utf-8")
    notebook = json.loads(text)
    nbformat.validate(notebook)
    assert text == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n" and len(text) < 8000
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in code:
        lines = "".join(cell["source"]).splitlines()
        assert cell["outputs"] == [] and cell["execution_count"] is None
        assert lines[0].startswith("# @title ") and len(lines) <= 16
        assert not any("# @param" in line and not FIELD.match(line) for line in lines)


def test_the_notebook_goes_on_after_a_kill_and_does_all_that_it_promises(machine, tmp_path):
    content, environment = machine
    home = tmp_path / "drive" / tmp_path.name
    fields = {
        "project": str(home),
        "vocab_size": 512,
        "preset": "config/shakespeare_char.py",
        "more_settings": " ".join([*SMALL, *LENGTH]),
        "prompt": "The name",
        "max_new_tokens": 20,
        "hub_repository": "me/first",
    }
    place = {"metadata": {"path": str(content)}}
    first = NotebookClient(opened(**fields), timeout=120, resources=place)
    killer = threading.Thread(target=kill_while_training, args=(home / "run",), daemon=True)
    killer.start()
    with pytest.raises(DeadKernelError):
        first.execute(env=environment)
    killer.join(10)
    killed_at = run_folder.step_of(run_folder.steps(home / "run")[-1])
    assert 0 < killed_at < 600
    data = (home / "data/train.bin").stat()

    notebook = opened(**fields)
    with hub() as address:
        endpoint = {"HF_ENDPOINT": address}
        NotebookClient(notebook, timeout=120, resources=place).execute(env=environment | endpoint)
    assert (home / "data/train.bin").stat() == data and "is prepared" in said(notebook, "text")
    assert "memory, GB" in said(notebook, "plan") and "cost" in said(notebook, "plan")
    assert f"continues at step {killed_at}" in said(notebook, "train")
    assert "finished: 600 steps" in said(notebook, "train")
    steps = [r["step"] for r in run_log.read(home / "run") if "loss" in r]
    assert steps == list(range(50, 601, 50))
    report = next(cell for cell in notebook.cells if cell.id == "report").outputs[-1]
    assert "<iframe srcdoc=" in report.data["text/html"] and "svg" in report.data["text/html"]
    assert "The name" in said(notebook, "write")
    (exported,) = (path for path in (home / "exported").iterdir() if path.is_dir())
    assert exported.with_suffix(".gguf").exists()
    assert Hub.published["model.safetensors"] == (exported / "model.safetensors").read_bytes()
    assert not list((ROOT / "data").glob(f"{tmp_path.name}*"))


def kill_while_training(folder):
    """Kill the notebook's kernel and the training that it started, once there is a checkpoint."""
    while not run_folder.steps(folder):
        time.sleep(0.01)
    for process in psutil.Process().children():
        if "ipykernel_launcher" in " ".join(process.cmdline()):
            for child in process.children(recursive=True):
                child.kill()
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="hears of its parent's death on Linux alone")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_cell_and_a_dead_kernel_have_training_save(char_data, tmp_path, stop):
    words = ["train.py", f"--data_dir={char_data}", f"--checkpoint_dir={tmp_path / 'run'}"]
    words += [*SMALL, "--max_steps=1000000", "--eval_interval=0", "--save_interval=0"]
    code = "import signal; signal.signal(2, signal.default_int_handler); "  # as a kernel has it
    code += f"from tools.notebook import run; run(*{words!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while process.poll() is None and not run_log.read(tmp_path / "run")[1:]:
        time.sleep(0.05)
    (training,) = psutil.Process(process.pid).children()
    process.send_signal(stop)
    output, errors = process.communicate(timeout=60)
    if stop == signal.SIGINT:
        assert b"the same command continues" in output and b"train.py was stopped" in errors
    psutil.wait_procs([training], timeout=60)
    assert run_folder.steps(tmp_path / "run")


def test_a_mistake_ends_a_cell_with_its_sentence(capsys, monkeypatch):
    from IPython.core.interactiveshell import InteractiveShell

    with pytest.raises(Stopped, match=r"'n_layr'.*'n_layer'"):
        run("train.py", "--n_layr=2")
    shown = capsys.readouterr().out
    assert shown == "$ python train.py --n_layr=2\n"
    shell = InteractiveShell()
    result = shell.run_cell("from tools.notebook import run; run('train.py', '--n_layr=2')")
    assert isinstance(result.error_in_exec, Stopped)
    shown = capsys.readouterr().out
    assert "n_layr" in shown and "Traceback" not in shown and len(shown.splitlines()) <= 4
