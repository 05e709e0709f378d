"""The README.md of exported weights: what the model is, how well it does, how to run it.

Collects what the run has recorded; the words are those of templates/model_card.md.j2.
"""

import math
from dataclasses import asdict
from pathlib import Path

from config import Config
from formats import run_log
from formats.pretrained import Pretrained
from tokenizer_bpe import EOT
from tools import command, history
from training.terminal import duration


def write(out: Path, source: Pretrained, parameters: int, target: str, chat: bool) -> None:
    """Write README.md into `out`, and curve.png where matplotlib is installed.

    source: a step of a run. parameters: of the exported model. target: the name of the folder that
    readers will find. chat: the model was trained on conversations.
    """
    run = source.path.parent
    state = source.state
    settings = asdict(Config()) | state["settings"]  # those that came later have their defaults
    evaluation = run_log.evaluation(run, state["step"])
    text = command.render(
        "model_card.md.j2",
        config=source.config,
        tokenizer=source.tokenizer,
        state=state,
        settings=settings,
        evaluation=evaluation,
        perplexity=math.exp(evaluation["val_loss"]) if evaluation else None,
        parameters=parameters,
        spent=duration(state["progress"]["elapsed_s"]),
        run=run,
        step=source.path,
        target=target,
        prompt=repr((settings["sample_prompts"] or ["The"])[0]),
        chat=chat,
        drawn=draw_curve(run, out / "curve.png"),
        end_of_text=EOT,
    )
    (out / "README.md").write_text(text, encoding="utf-8", newline="\n")


def draw_curve(run: Path, path: Path) -> bool:
    """The run's losses as PNG; False where there are none, or no matplotlib."""
    try:
        from tools import charts

        charts.losses([history.read(run)], "step").savefig(path, dpi=110)
    except (ImportError, history.HistoryError):
        return False
    return True
