"""Cold = cached: an answer from a cached prefix is the answer from nothing.

| part      | how the prefix comes into the cache                                  | where               |
| --------- | -------------------------------------------------------------------- | ------------------- |
| whole     | the same prompt, asked before                                        | everywhere          |
| branching | another prompt with the same beginning                               | everywhere          |
| turns     | earlier turns of a chat whose template drops their thoughts          | with a template     |
| chunked   | as whole, prompts cut into chunks of 64 and 192 tokens               | engine              |
| evicted   | as whole, with pools so small that other prompts push prefixes out   | engine              |
"""

from __future__ import annotations

from collections.abc import Sequence

from deltaserve.core.types import BLOCK
from deltaserve.verify.ask import Answer, Ask, greedy
from deltaserve.verify.book import Book
from deltaserve.verify.lab import Lab
from deltaserve.verify.prompts import num_common, user
from deltaserve.verify.target import Message, Session, Setup, Tally, ask_alone

NUM_TURNS = 4
TURN_TOKENS = 40
SLACK = 2 * BLOCK - 1  # of a reusable prefix, tokens that a hit may leave out
BRANCH_POINTS = (66, 128, 191)
GROUP = 2


def check_cached(lab: Lab, book: Book) -> None:
    """One engine for what needs no setting, and one for each other part."""
    with lab.session() as session:
        _check_whole(lab, book, session, "whole", lab.asks())
        _check_branches(lab, book, session)
        _check_turns(lab, book, session)
    if not lab.is_engine:
        for part in ("chunked", "evicted"):
            book.skip_part(part, "a client cannot change the server's settings; give a model directory")
        return
    for chunk in (BLOCK,) if lab.is_quick else (BLOCK, 3 * BLOCK):
        with lab.session(Setup(chunk=chunk)) as session:
            _check_whole(lab, book, session, f"in chunks of {chunk}", lab.some_asks())
    _check_evicted(lab, book)


def _check_whole(lab: Lab, book: Book, session: Session, part: str, asks: Sequence[Ask]) -> None:
    """Every prompt twice: all together to fill the cache, then one by one."""
    salt = lab.writer.salt("cached")
    salted = [ask.salted(salt) for ask in asks]
    lab.compare_all(book, f"{part}, first time", asks, session.ask(salted))
    again = ask_alone(session, salted)
    lab.compare_all(book, f"{part}, again", asks, again)
    num_possible = sum(len(ask.prompt_ids) > BLOCK for ask in asks)
    book.event(f"hits, {part}", count_hits(again), at_least=(num_possible + 1) // 2)


def _check_branches(lab: Lab, book: Book, session: Session) -> None:
    """Four prompts that part from each other at one point, in turn: from the third on the point itself is known."""
    for index, point in enumerate(BRANCH_POINTS):
        salt = lab.writer.salt("branch")
        trunk = lab.writer.recall(point + 100).prompt_ids[:point]
        prompts = [trunk + lab.writer.recall(80 + 20 * branch).prompt_ids for branch in range(4)]
        asks = [lab.ask(prompt, 12, 2 * branch + index) for branch, prompt in enumerate(prompts)]
        answers = ask_alone(session, [ask.salted(salt) for ask in asks])
        lab.compare_all(book, f"branching at {point}", asks, answers)
        book.event(f"tokens hit by later branches at {point}", sum(answer.num_cached for answer in answers[2:]))


def _check_turns(lab: Lab, book: Book, session: Session) -> None:
    """A chat with thoughts, whose template leaves earlier thoughts out: each turn parts from the path of the last."""
    if not lab.writer.has_chat:
        return book.skip_part("turns", "there is no chat template")
    salt = lab.writer.salt("turns")
    messages: list[Message] = []
    seen: list[tuple[int, ...]] = []
    for turn in range(NUM_TURNS):
        messages.append(user(lab.writer.text(12) + " What is in the text?"))
        prompt = tuple(lab.target.render(messages, enable_thinking=True, preserve_thinking=False))
        ask = greedy(prompt, TURN_TOKENS, ignore_eos=False, skip_special_tokens=False)
        answer = session.ask([ask.salted(salt)])[0]
        book.compare(f"turn {turn} of {len(prompt)} tokens", lab.cold([ask])[0], answer)
        reusable = max((num_common(prompt, path) for path in seen), default=0)
        detail = f"{answer.num_cached} of {reusable} reusable tokens were cached"
        book.expect(f"turn {turn} hits all but {SLACK} reusable tokens", answer.num_cached >= reusable - SLACK, detail)
        seen.append(prompt + answer.token_ids)
        messages.append(_said(answer.text))
    return None


def _check_evicted(lab: Lab, book: Book) -> None:
    """Pairs of prompts, each asked twice, in pools that hold little more than one pair."""
    asks = lab.some_asks()
    with lab.session(tight_pools(asks)) as session:
        tally = Tally(session)
        num_hits = 0
        for start in range(0, len(asks), GROUP):
            group = asks[start : start + GROUP]
            lab.compare_all(book, "evicted, first time", group, session.ask(group))
            answers = session.ask(group)
            lab.compare_all(book, "evicted, again", group, answers)
            num_hits += count_hits(answers)
        book.event("hits, evicted", num_hits, at_least=len(asks) // 3)
        book.event("pages and snapshots evicted", tally.count("pages_evicted", "snapshots_evicted"), at_least=len(asks))


def tight_pools(asks: Sequence[Ask], host_pages: int = 0) -> Setup:
    """Rows for a pair, pages for the longest of all and a little more, and hardly a snapshot beyond those of rows."""
    longest = max(num_pages(ask) for ask in asks)
    return Setup(rows=GROUP, num_pages=longest + 3, num_snapshots=GROUP, host_pages=host_pages, chunk=2 * BLOCK)


def num_pages(ask: Ask) -> int:
    """Pages of prompt and answer."""
    return -(-(len(ask.prompt_ids) + (ask.params.max_tokens or 0)) // BLOCK)


def count_hits(answers: Sequence[Answer]) -> int:
    return sum(answer.num_cached > 0 for answer in answers)


def _said(text: str) -> Message:
    """An answer as the next request sends it back."""
    text = text.removesuffix("<|im_end|>")
    thought, mark, content = text.partition("</think>")
    return {"role": "assistant", "content": content.strip() if mark else "", "reasoning_content": thought.strip()}
