"""colab.ipynb as Colab runs it, with a folder for the Drive: killed while it trains, and again."""

import os
import re
import sys
import threading
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from formats import run_folder, run_log
from tests.conftest import ROOT, SMALL

NOTEBOOK = ROOT / "colab.ipynb"
FIELD = re.compile(r"^(\w+) = .*  # @param ", re.MULTILINE)
OFTEN = ["--eval_interval=500", "--save_interval=50", "--log_interval=50"]
# What the notebook asks of Colab: its Drive and its uploads.
COLAB = {
    "drive": "def mount(path):\n    assert path == '/content/drive'\n",
    "files": (
        "import os, shutil\n\ndef upload():\n"
        "    shutil.copy(os.environ['TEST_UPLOAD'], 'topics.txt')\n"
        "    return {'topics.txt': b''}\n"
    ),
}


@pytest.fixture
def machine(tmp_path, text_file):
    """A Colab machine with the code on it: the folder that notebooks begin in, its environment."""
    content = tmp_path / "content"
    code = content / "gpt2_code"
    code.mkdir(parents=True)
    for path in ROOT.iterdir():
        if path.name not in ("data", "checkpoints"):
            (code / path.name).symlink_to(path)
    for name, text in COLAB.items():
        path = tmp_path / "packages/google/colab" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path / "packages"),
        "TEST_UPLOAD": str(text_file),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    return content, environment


def opened(**values):
    """The notebook with other values in its fields."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        for name in values.keys() & set(FIELD.findall(cell.source)):
            field = re.compile(rf"^{name} = .*?(  # @param )", re.MULTILINE)
            value = f"{name} = {values.pop(name)!r}"
            cell.source = field.sub(lambda found, v=value: v + found[1], cell.source)
    assert not values
    return notebook


def said(notebook, name):
    """What a cell printed."""
    cell = next(cell for cell in notebook.cells if cell.id == name)
    return "".join(output.get("text", "") for output in cell.outputs)


def test_a_command_that_fails_stops_the_notebook():
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        lines = [line.strip() for line in cell.source.splitlines()]
        commands = sum(line.startswith("!python") for line in lines)
        assert lines.count("stop_if_failed()") >= commands, cell.id


@pytest.mark.skipif(sys.platform != "linux", reason="Colab runs Linux")
def test_the_notebook_goes_on_after_a_kill_and_does_all_that_it_promises(machine, tmp_path):
    content, environment = machine
    home = tmp_path / "drive" / "first"
    fields = {
        "project": str(home),
        "preset": "config/shakespeare_char.py",
        "more_settings": " ".join([*SMALL, *OFTEN, "--max_steps=100000"]),  # it is killed before
        "prompt": "The name's",
        "max_new_tokens": 20,
    }
    place = {"metadata": {"path": str(content)}}
    first = NotebookClient(opened(**fields), timeout=300, resources=place)
    killer = threading.Thread(target=kill_kernel_while_training, args=(home / "run",))
    killer.start()
    with pytest.raises(DeadKernelError):
        first.execute(env=environment)
    killer.join()
    last = run_folder.step_of(run_folder.steps(home / "run")[-1])
    end = last + 200
    data = (home / "data/train.bin").stat()

    fields["more_settings"] = " ".join([*SMALL, *OFTEN, f"--max_steps={end}"])
    notebook = opened(**fields)
    NotebookClient(notebook, timeout=300, resources=place).execute(env=environment)
    assert (home / "data/train.bin").stat() == data
    assert "micro-batch" in said(notebook, "plan")
    assert "cost" in said(notebook, "plan")
    assert f"continues at step {last}" in said(notebook, "train")
    assert f"finished: {end:,} steps" in said(notebook, "train")
    steps = [r["step"] for r in run_log.read(home / "run") if "loss" in r]
    assert steps == sorted(set(steps))
    assert steps[-1] == end
    report = next(cell for cell in notebook.cells if cell.id == "report").outputs[-1]
    assert "image/svg" in report.data["text/html"]
    assert "The name's" in said(notebook, "write")
    assert (home / "exported/first/model.safetensors").exists()
    assert (home / "exported/first.gguf").exists()


def kill_kernel_while_training(folder):
    """Kill the notebook's kernel and what it started, as a lost machine, once a step is saved."""
    for _ in range(20_000):
        if run_folder.steps(folder):
            break
        time.sleep(0.01)
    for kernel in psutil.Process().children():
        if "ipykernel_launcher" in " ".join(kernel.cmdline()):
            lost = [kernel, *kernel.children(recursive=True)]
            for process in lost:
                process.kill()
            psutil.wait_procs(lost)
