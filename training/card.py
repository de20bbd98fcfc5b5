"""Writes the model card of `models/tiny` from what training and evaluation recorded.

    python -m training.card models/tiny --training progress.json --scores scores.json [more.json ...]

Later score files win. Nothing in the card's tables is written by hand.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).parent / "card.md"
Json = dict[str, Any]

WHAT = {
    "needle_4096": "recall of a word, 4,096 tokens, depths 10, 50 and 90 %",
    "needle_16384": "recall of a word, 16,384 tokens, the same depths",
    "tool_call": "one tool call, name and all arguments",
    "tool_calls": "two calls in one answer",
    "tool_result": "a sentence from a tool's result",
    "tool_none": "saying that no tool fits",
    "objects": "JSON object of a flat schema",
    "sums_thinking": "sums with thinking",
    "sums": "sums without",
    "copy": "copying a text",
    "where": "recall of a few sentences",
    "facts": "simple facts, asked in new words",
    "deltaserve": "about Deltaserve, asked in new words",
    "chat": "small talk and general questions, in new words",
    "unknown": "saying what it does not know",
    "mixed": "the last answer of a mixed chat",
    "lists": "sorting, counting, choosing from lists",
    "system": "following a system prompt",
    "story": "a story, asked in new words",
    "code": "small Python functions",
}


FIGURES = {
    "acceptance": "tokens per step with 3 drafts, greedy, held-out chats",
    "perplexity": "perplexity",
    "perplexity of fp8": "perplexity of the FP8 export (blocks of 128 x 128)",
    "perplexity of nvfp4": "perplexity of the NVFP4 export",
}


def score_table(scores: Json) -> str:
    """Markdown rows of the skills that were scored, in the order above."""
    rows = ["| skill | cases | exact | right |", "| --- | ---: | ---: | ---: |"]
    for name, what in WHAT.items():
        if name in scores:
            found = scores[name]
            rows.append(f"| {what} | {found['count']} | {found['exact']:.0%} | {found['right']:.0%} |")
    return "\n".join(rows)


def figure_table(scores: Json) -> str:
    """Markdown rows of the single figures: acceptance, perplexities."""
    rows = ["| figure | value |", "| --- | ---: |"]
    rows += [f"| {what} | {scores[name]:.4g} |" for name, what in FIGURES.items() if name in scores]
    return "\n".join(rows)


def training_line(record: Json) -> str:
    """Steps, tokens and time."""
    progress = record["progress"]
    steps, millions = f"{progress['steps']:,} steps", f"{progress['tokens'] / 1e6:,.0f} million tokens"
    return f"{steps}, {millions}, {progress['elapsed_s'] / 60:.0f} minutes in {progress['slices']} slices"


def shape_line(record: Json) -> str:
    return ", ".join(f"{name} {value}" for name, value in record["shape"].items())


def card(record: Json, scores: Json) -> str:
    """The whole card."""
    parts = {"training": training_line(record), "shape": shape_line(record)}
    tables = {"scores": score_table(scores), "figures": figure_table(scores)}
    return TEMPLATE.read_text("utf-8").format(**parts, **tables)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--training", type=Path, required=True)
    parser.add_argument("--scores", type=Path, nargs="+", required=True)
    parsed = parser.parse_args(arguments)
    scores: Json = {}
    for path in parsed.scores:
        scores |= json.loads(path.read_text("utf-8"))
    record = json.loads(parsed.training.read_text("utf-8"))
    (parsed.directory / "README.md").write_text(card(record, scores), "utf-8")


if __name__ == "__main__":
    main()
