"""Prints how training goes, one line at a time, and keeps the lines as the loss curve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.train import Progress

# Shares of right tokens by skill are printed with every so many lines.
SKILLS_EVERY = 4
SHORT = {"loss": ".4f", "right": ".4f", "balance": ".3f", "gradient": ".2f", "tokens_per_s": ",.0f"}


def report(progress: Progress, figures: dict[str, Any]) -> None:
    """Appends the figures to the curve and prints them."""
    entry = {"step": progress.steps, "tokens": progress.tokens, "elapsed_s": round(progress.elapsed_s, 1)}
    progress.curve.append(entry | {name: _rounded(value) for name, value in figures.items()})
    words = [f"step {progress.steps}", f"{progress.tokens / 1e6:.1f} Mtok", f"{progress.elapsed_s:.0f} s"]
    words += [f"{name} {figures[name]:{form}}" for name, form in SHORT.items()]
    words += ["drafts " + " ".join(f"{x:.3f}" for x in figures["draft_right"])]
    print(", ".join(words), flush=True)
    if len(progress.curve) % SKILLS_EVERY == 0:
        print("  " + " ".join(f"{skill} {right:.3f}" for skill, right in figures["skills"].items()), flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: round(x, 4) for name, x in value.items()}
    return [round(x, 4) for x in value] if isinstance(value, list) else round(value, 4)
