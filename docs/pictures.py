"""Draw docs/killed.svg: a training run that is killed with SIGKILL and continued.

    python -m docs.pictures

It shows the lines that the run printed, and the checksums of its weights and of those of a run that
was left alone.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
STEPS, KILLED_AT = 60, 30
SETTINGS = [f"--max_steps={STEPS}", "--save_interval=10", "--eval_interval=20", "--compile=False"]
SHOWN = re.compile(r"step \d+ of|^run |^finished|^checkpoints ")
LINE, LEFT, WIDTH = 19, 14, 860  # pixels


def train(arguments: list[str], kill_at: int | None = None) -> list[str]:
    """Run train.py; its lines that are shown. kill_at: SIGKILL once this step is reported."""
    words = [sys.executable, "train.py", *arguments]
    pipe = subprocess.PIPE
    lines = []
    with subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        for line in process.stdout:
            if SHOWN.search(line):
                lines.append(
                    re.sub(r", epoch.*?(validation loss [\d.]+).*", r": \1", line.rstrip())
                )
            step = re.match(r"step (\d+) of", line)
            if kill_at and step and int(step[1]) >= kill_at:
                process.kill()
                break
    return lines


def killed_run() -> list[str]:
    """What a terminal shows of a run that is killed and continued, and of one that is not."""
    with tempfile.TemporaryDirectory() as folder:
        killed, whole = f"{folder}/killed", f"{folder}/whole"
        start = ["config/demo.py", *SETTINGS]
        shown = f"--max_steps={STEPS} --checkpoint_dir=checkpoints/killed"
        lines = [f"$ python train.py config/demo.py {shown}"]
        lines += train([*start, f"--checkpoint_dir={killed}"], KILLED_AT)
        lines += ["Killed                                    # kill -9, in another terminal"]
        lines += ["$ python train.py checkpoints/killed", *train([killed])]
        train([*start, f"--checkpoint_dir={whole}"])
        lines += ["$ sha256sum checkpoints/*/step_*60/model.pt"]
        for run in (killed, whole):
            content = Path(run, f"step_{STEPS:08}", "model.pt").read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            lines.append(f"{digest[:40]}...  checkpoints/{Path(run).name}/step_{STEPS:08}/model.pt")
    return [line.replace(folder, "checkpoints") for line in lines]


def terminal(lines: list[str]) -> str:
    """An SVG of lines that appear one after the other; commands are green, SIGKILL red."""
    height = LINE * (len(lines) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
        "<style>text { font: 13px monospace; fill: #d4d4d4; white-space: pre;"
        " animation: appear 0.2s backwards } @keyframes appear { from { opacity: 0 } }</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="6" fill="#1e1e1e"/>',
    ]
    for n, line in enumerate(lines):
        color = {"$": "#8ae234", "K": "#ef2929"}.get(line[:1], "#d4d4d4")
        style = f"fill: {color}; animation-delay: {0.6 * n:.1f}s"
        at = f'x="{LEFT}" y="{LINE * (n + 1)}"'
        parts.append(f'<text {at} style="{style}">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    (ROOT / "docs/killed.svg").write_text(terminal(killed_run()))
