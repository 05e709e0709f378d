"""colab.ipynb as Colab runs it, with a folder for the Drive: killed, run again, another text."""

import json
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

from formats import run_folder
from tests.conftest import ROOT, SMALL, wait_until

NOTEBOOK = ROOT / "colab.ipynb"
FIELD = re.compile(r"^(\w+) = .*  # @param ", re.MULTILINE)
OFTEN = ["--eval_interval=500", "--save_interval=50", "--log_interval=50"]
# What the notebook asks of Colab: its Drive and its uploads.
COLAB = {
    "drive": "def mount(path):\n    assert path == '/content/drive'\n",
    "files": (
        "import os, shutil\n\ndef upload():\n"
        "    shutil.copytree(os.environ['CHOSEN'], '.', dirs_exist_ok=True)\n"
        "    return dict.fromkeys(os.listdir(os.environ['CHOSEN']), b'')\n"
    ),
}


@pytest.fixture
def machine(tmp_path, text_file):
    """A Colab machine with the code on it: the folder that notebooks begin in, its environment.

    Who is asked for an upload chooses the files of the folder CHOSEN.
    """
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
    (tmp_path / "chosen").mkdir()
    shutil.copy(text_file, tmp_path / "chosen")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path / "packages"),
        "CHOSEN": str(tmp_path / "chosen"),
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
    """What a cell printed, and the sentence with which it stopped."""
    cell = next(cell for cell in notebook.cells if cell.id == name)
    return "".join(output.get("text", "") + output.get("evalue", "") for output in cell.outputs)


def test_a_command_that_fails_stops_the_notebook():
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        lines = [line.strip() for line in cell.source.splitlines()]
        commands = sum(line.startswith("!python") for line in lines)
        assert lines.count("stop_if_failed()") >= commands, cell.id


@pytest.mark.parametrize("name", ["train.py", "prepare_data.py"])
def test_a_script_does_not_run_within_a_notebook_which_would_end_with_it(machine, name):
    content, environment = machine
    script = f"gpt2_code/{name}"
    source = f"%run {script} config/demo.py"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    place = {"metadata": {"path": str(content)}}
    client = NotebookClient(notebook, timeout=300, resources=place, allow_errors=True)
    (cell,) = client.execute(env=environment).cells
    told = "".join(output.get("text", "") for output in cell.outputs)
    assert f"{script} needs a process of its own: in a notebook write !python {script} " in told
    assert cell.outputs[-1].ename == "SystemExit"


@pytest.mark.skipif(os.name == "nt", reason="notebooks stop programs in another way there")
def test_a_run_in_a_notebook_saves_after_stop_as_the_page_says(machine, tmp_path, char_data):
    content, environment = machine
    typed = "!COMMAND; true"
    assert f"With `{typed}` in place of `!COMMAND` it saves" in (ROOT / "docs/safety.md").read_text(
        encoding="utf-8"
    )
    run = tmp_path / "run"
    # A step takes longer than Jupyter waits.
    words = ["python train.py config/shakespeare_char.py"]
    words += [f"--data_dir={char_data}", f"--checkpoint_dir={run}"]
    words += ["--n_layer=4", "--n_embd=256", "--batch_size=8", "--block_size=256"]
    words += ["--log_interval=1", "--compile=False", "--max_steps=99"]
    kernel, client = start_new_kernel(cwd=content / "gpt2_code", env=environment)
    try:
        client.execute(typed.replace("COMMAND", " ".join(words)))
        process = kernel.provisioner.process
        wait_until(process, lambda: any("loss" in line for line in run_folder.read_log(run)))
        kernel.interrupt_kernel()
        wait_until(process, lambda: run_folder.steps(run))
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


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
    begun = opened(**fields)
    for cell in begun.cells:  # the second start runs these
        cell.source = re.sub("(?m)^!.*(--dry_run|pip install)", "!true ", cell.source)
    first = NotebookClient(begun, timeout=300, resources=place)
    killer = threading.Thread(target=kill_kernel_while_training, args=(home / "run",), daemon=True)
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
    steps = [r["step"] for r in run_folder.read_log(home / "run") if "loss" in r]
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


@pytest.fixture
def run_cell(machine, tmp_path):
    """run_cell(name, **fields) runs a cell in one kernel; returns what it says, and what it shows.

    The project is the folder "drive" of tmp_path.
    """
    content, environment = machine
    client = NotebookClient(
        opened(),
        timeout=300,
        resources={"metadata": {"path": str(content / "gpt2_code")}},
        allow_errors=True,
    )

    def run(name, **fields):
        client.nb = opened(**fields)
        index = next(n for n, cell in enumerate(client.nb.cells) if cell.id == name)
        client.execute_cell(client.nb.cells[index], index)
        return said(client.nb, name)

    with client.setup_kernel(env=environment):
        run("place", project=str(tmp_path / "drive"))
        yield run


@pytest.mark.skipif(sys.platform != "linux", reason="Colab runs Linux")
def test_another_text_is_prepared_or_a_sentence_says_how(run_cell, tmp_path):
    chosen, drive = tmp_path / "chosen", tmp_path / "drive"
    (chosen / "topics.txt").rename(tmp_path / "topics.txt")

    def text(**fields):
        options = fields.pop("more_options", "")
        return run_cell("text", more_options=f"--tokenizer char {options}", **fields)

    def prepared():
        return json.loads((drive / "data/meta.json").read_text())["sources"]

    # An upload that is canceled, or brings no text, is asked for again.
    assert "stopped: no file was uploaded; run this cell again" in text()
    (chosen / "notes.md").write_text("# Notes")
    assert "holds no .txt" in text()
    (chosen / "story.txt").write_text("It was a calm day.\n" * 40)
    assert "1 .md" in text()  # as skipped
    (story,) = prepared()
    assert story["path"].endswith("drive/texts/story.txt")

    # Prepared text stays until --overwrite replaces it.
    (chosen / "story.txt").write_text("Another day.\n" * 40)
    again = text()
    assert "uploaded before" in again
    assert "--overwrite in more_options" in again
    assert "is finished already" in again
    refused = text(source=str(tmp_path / "topics.txt"), gigabytes=1e-5)
    assert "other input or settings" in refused
    assert "another project in cell 1, and other options go into more_options" in refused
    assert prepared() == [story]
    (chosen / "story.txt").rename(tmp_path / "story.txt")
    assert "holds no .txt" in text(more_options="--overwrite")
    assert prepared() == [story]
    assert (drive / "texts/story.txt").exists()
    (tmp_path / "story.txt").rename(chosen / "other.txt")
    text(more_options="--overwrite")
    (other,) = prepared()
    assert other["path"].endswith("drive/texts/other.txt")
    text(more_options="--overwrite", source=str(tmp_path / "topics.txt"))
    (topics,) = prepared()
    assert topics["path"] == str(tmp_path / "topics.txt")
