"""Chunked = whole: whatever the token budget of a step, and wherever it cuts a prompt, the answer is the same."""

from __future__ import annotations

from deltaserve.verify.book import Book
from deltaserve.verify.lab import Lab, needs_engine
from deltaserve.verify.target import Counters, Setup, Traffic

BUDGETS = (64, 65, 127, 192)
FEW_BUDGETS = (64, 192)
MOST_DECODED = 8  # tokens that one row computes in a step that is no chunk: itself and seven drafts


def check_chunked(lab: Lab, book: Book) -> None:
    """Without the prefix cache, so that every chunk is computed."""
    needs_engine(lab, "a client cannot set the server's token budget; give a model directory")
    for budget in FEW_BUDGETS if lab.is_quick else BUDGETS:
        asks = [ask for ask in lab.some_asks() if len(ask.prompt_ids) > budget]
        with lab.session(Setup(caching=False, chunk=budget)) as session:
            steps = _Steps(session.counters()["num_computed_tokens"])
            answers = [session.ask([ask], Traffic(watch=steps.watch))[0] for ask in asks]
        lab.compare_all(book, f"budget {budget}", asks, answers)
        sentence = f"a step computed {steps.largest} tokens"
        book.expect(f"budget {budget} is kept", steps.largest <= budget, sentence)
        book.event(f"chunks of {budget} or less", steps.num_chunks, at_least=len(asks))


class _Steps:
    """Sizes of steps, from the engine's count of computed tokens. What a decode step computes is no chunk."""

    def __init__(self, num_computed: float) -> None:
        self.largest = 0
        self.num_chunks = 0
        self._num_computed = int(num_computed)

    def watch(self, counters: Counters) -> None:
        num_computed = int(counters["num_computed_tokens"])
        size, self._num_computed = num_computed - self._num_computed, num_computed
        self.largest = max(self.largest, size)
        self.num_chunks += size > MOST_DECODED
