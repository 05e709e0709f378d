"""What `prepare_data.py --dedupe near` finds, what it costs, and what the loss gains by it.

    python -m benchmarks.near_copies [--megabytes 20] [--seeds 3] [--steps 150]

The text is real: sources and documentation of this machine. A third of it are copies planted for
the purpose, in which one, two or five words of a hundred are replaced by others of the same
document. Found are planted copies that were dropped; wrong are other documents that were, though
they share less than half of their runs of five words with each one before them. The loss is that of
a small model on text held back, after as many steps on either folder. Writes
benchmarks/results/near_copies_cpu.json.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks import argument_parser, loss_of, write
from benchmarks.prepare import documents, prepare, run
from formats.data_folder import read_meta
from preparing.near import RUN
from tokenizer_bpe import Tokenizer

SHARES = (0.01, 0.02, 0.05)  # of the words of a copy that are others
HELD_BACK = 10  # of so many documents one is for validation alone
SIZES = (1_000, 50_000)  # bytes of a document that is taken
SHAPE = {"n_head": 4, "n_embd": 256}


@dataclass
class Text:
    """A document. of: the one that it is a copy of; share: that of its words that are others."""

    text: str
    of: str = ""
    share: float | None = None


def main(argv: list[str]) -> None:
    """The command line's work."""
    args = parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        found = Path(temporary, "found")
        texts, speeds = prepare_both(found, args.megabytes)
        result = {"documents": len(texts), "megabytes": args.megabytes} | speeds
        result |= judge(texts, set(kept_texts(found / "near")))
        if args.seeds:
            trained = Path(temporary, "trained")
            prepare_both(trained, args.training_megabytes)
            result["loss"] = {"megabytes": args.training_megabytes, "steps": args.steps}
            result["loss"] |= losses(trained, args.seeds, args.steps)
    for name, value in result.items():
        print(f"{name:24}{value}")
    write("near_copies", torch.device("cpu"), result)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argument_parser("near_copies", __doc__)
    parser.add_argument("--megabytes", type=int, default=20, help="of text, copies included")
    parser.add_argument("--seeds", type=int, default=3, help="trainings a folder; 0: none")
    parser.add_argument("--steps", type=int, default=150, help="of each training")
    parser.add_argument("--training_megabytes", type=int, default=3, help="of text for them")
    return parser.parse_args(argv)


def prepare_both(work: Path, megabytes: int) -> tuple[list[Text], dict]:
    """Prepare a text with both kinds of --dedupe, and what is held back.

    In work/exact, near and held_back. Returns the text's documents, and the speeds.
    """
    work.mkdir()
    texts, held_back = collect(megabytes * 10**6)
    write_texts(work / "held_back.txt", held_back)
    write_texts(work / "text.txt", [text.text for text in texts])
    flags = ["--out", work / "held_back", "--vocab_size", 4096, "--val_fraction", 0.9]
    prepare(work / "held_back.txt", *flags)
    flags = ["--tokenizer", work / "held_back", "--val_fraction", 0]
    speeds = {}
    for dedupe in ("exact", "near"):
        done = prepare(work / "text.txt", *flags, "--dedupe", dedupe, "--out", work / dedupe)
        speeds[f"{dedupe}_mb_s"] = done["tokenising_mb_s"]
    return texts, speeds


def collect(size: int) -> tuple[list[Text], list[str]]:
    """Documents and copies of about `size` bytes in an order of chance; and what is held back."""
    chance = random.Random(1)
    found = [data.decode() for data in documents() if SIZES[0] <= len(data) <= SIZES[1]]
    found = [text.replace("\r\n", "\n").strip() for text in dict.fromkeys(found)]
    chance.shuffle(found)
    texts, held_back, taken = [], [], 0
    for number, text in enumerate(found):
        if taken > size:
            break
        if number % HELD_BACK == 0:
            held_back.append(text)
            continue
        texts.append(Text(text))
        taken += len(text)
        if number % 2:
            share = SHARES[number // 2 % len(SHARES)]
            texts.append(Text(edited(text, share, chance), text, share))
            taken += len(text)
    chance.shuffle(texts)
    return texts, held_back


def edited(text: str, share: float, chance: random.Random) -> str:
    """A copy in which so many of the words are others of the same document."""
    words = text.split(" ")
    for place in chance.sample(range(len(words)), max(1, int(share * len(words)))):
        words[place] = chance.choice(words)
    return " ".join(words)


def write_texts(path: Path, texts: list[str]) -> None:
    """A text file of documents."""
    path.write_text("\n<|endoftext|>\n".join(texts), encoding="utf-8", newline="\n")


def kept_texts(folder: Path) -> Iterator[str]:
    """The documents of a prepared folder's training split."""
    meta, tokenizer = read_meta(folder), Tokenizer.load(folder)
    ids = np.fromfile(folder / "train.bin", meta.dtype)
    for document in np.split(ids, np.flatnonzero(ids == tokenizer.eot_id)):
        yield tokenizer.decode(document[document != tokenizer.eot_id]).strip()


def judge(texts: list[Text], kept: set[str]) -> dict:
    """How many of the planted copies are found, and how many documents are wrongly dropped.

    Of an original and its copy the second is dropped, whichever that is.
    """
    runs = [runs_of(text.text) for text in texts]
    dropped = [n for n, text in enumerate(texts) if text.text.strip() not in kept]
    wrong = 0
    for n in dropped:
        if not any(alike(runs[n], runs[earlier]) > 0.5 for earlier in range(n)):
            wrong += 1
    result = {"dropped": len(dropped), "wrongly_dropped": wrong}
    for share in SHARES:
        copies = [text for text in texts if text.share == share]
        found = sum(not {text.text.strip(), text.of.strip()} <= kept for text in copies)
        result[f"found_with_{share:.0%}_replaced"] = f"{found} of {len(copies)}"
    return result


def runs_of(text: str) -> set[tuple]:
    """Its runs of words."""
    words = text.lower().split()
    return {tuple(words[n : n + RUN]) for n in range(max(1, len(words) - RUN + 1))}


def alike(one: set, other: set) -> float:
    """The share of their elements that both have (Jaccard)."""
    return len(one & other) / len(one | other)


def losses(work: Path, seeds: int, steps: int) -> dict:
    """Nats a token on the text held back, of a small model after training on either folder."""
    rounds = {"exact": [], "near": []}
    for seed in range(1, seeds + 1):
        for dedupe, found in rounds.items():
            found.append(loss_after(work, dedupe, seed, steps))
            print(f"seed {seed}, {dedupe}: {found[-1]}", flush=True)
    return {
        name: {"mean": round(statistics.mean(found), 4), "seeds": found}
        for name, found in rounds.items()
    }


def loss_after(work: Path, dedupe: str, seed: int, steps: int) -> float:
    """The loss after one training."""
    run_dir = work / f"run_{dedupe}_{seed}"
    settings = {"data_dir": work / dedupe, "checkpoint_dir": run_dir, "seed": seed}
    settings |= {"max_steps": steps, "eval_interval": 0, "report_minutes": 0}
    settings |= SHAPE
    run(["train.py", "config/demo.py", *(f"--{name}={value}" for name, value in settings.items())])
    return loss_of(run_dir, work / "held_back", "all")


if __name__ == "__main__":
    main(sys.argv[1:])
