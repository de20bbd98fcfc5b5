"""The model card says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from training.card import main


def test_card_has_the_scores_of_the_latest_file(tmp_path: Path) -> None:
    record = {
        "shape": {"hidden": 17},
        "progress": {"steps": 1234, "tokens": 56_000_000, "elapsed_s": 600.0, "slices": 2},
    }
    first = {"tool_call": {"count": 50, "exact": 0.5, "right": 0.75}, "perplexity": 1.25}
    second = {"tool_call": {"count": 50, "exact": 0.96, "right": 0.98}, "acceptance": 2.875}
    for name, content in (("progress", record), ("first", first), ("second", second)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    scores = [str(tmp_path / "first.json"), str(tmp_path / "second.json")]
    main([str(tmp_path), "--training", str(tmp_path / "progress.json"), "--scores", *scores])
    card = (tmp_path / "README.md").read_text()
    assert "| 50 | 96% | 98% |" in card
    assert "50%" not in card.replace("50 %", "")
    for part in ("1,234 steps, 56 million tokens, 10 minutes in 2 slices", "hidden 17", "2.875", "1.25", '{"enable_'):
        assert part in card
