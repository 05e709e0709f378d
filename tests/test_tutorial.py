"""docs/tutorial.md: what it tells a reader to type, in order, with little text and few steps."""

import re
import shlex
import subprocess

from tests.conftest import LLAMA_CPP, ROOT, ok, run_script

FENCE = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SMALL = ["--n_embd=64", "--block_size=64", "--eval_batches=2", "--device=cpu", "--compile=False"]


def run(line, clone, max_steps, text_file):
    """Run a command of the page, shortened; returns what it printed."""
    program, *words = shlex.split(line, comments=True)
    if program in ("pip", "make"):  # the tests have the packages
        return ""
    if program == "node":
        if not (LLAMA_CPP / "node_modules").exists():
            return ""
        command = ["bash", "-c", line]
        done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=300)
    else:
        if "--vocab_size" in words:
            words += [text_file, "--vocab_size=512"]
        if words[0] == "train.py":
            words += [*SMALL, f"--max_steps={max_steps}"]
        done = run_script(*words, cwd=clone, stdin="What does shutil.copy do?\n")
    return ok(done).stdout


def test_the_tutorial_works_from_its_first_command_to_its_last(tmp_path, text_file):
    printed = []
    for path in ROOT.iterdir():  # the code and nothing else, as a new clone has it
        if path.name not in ("data", "checkpoints", "exported"):
            (tmp_path / path.name).symlink_to(path)
    for kind, text in FENCE.findall((ROOT / "docs/tutorial.md").read_text(encoding="utf-8")):
        if kind == "python":
            (tmp_path / "data/conversations.py").write_text(text, encoding="utf-8")
            continue
        for line in text.splitlines():  # each start of a run trains on from the one before
            printed.append(run(line, tmp_path, len(printed), text_file))
    assert "continues at step" in "".join(printed)
    assert (tmp_path / "checkpoints/tutorial/report.html").exists()
    assert (tmp_path / "exported/chat.gguf").exists()
