"""Options take effect: each sampling option changes what it should change and fixes what it should fix.

Every check is a question whose answer the option decides, so that an option that is accepted and ignored shows.
Questions are asked all at once: an option that reaches a neighbour's row in the batch shows as well.

| option              | asked                                              | must be                               |
| ------------------- | -------------------------------------------------- | ------------------------------------- |
| temperature 0       | twice, before and after everything else            | one answer                            |
| seed                | six seeds at temperature 2, each twice             | pairs equal, not all six              |
| top_k, top_p, min_p | at temperature 2, leaving the likeliest token only | the greedy answer                     |
| logit_bias          | -100 on the first greedy token; +100 on another    | gone; there at every place            |
| stop_token_ids      | the third greedy token                             | the end at its first place, by `stop` |
| stop                | a piece of the greedy text                         | the text before it                    |
| min_tokens          | every place biased to a stop token                 | the end right after the minimum       |
| max_tokens          | 1, 2, 5                                            | so many tokens, by `length`           |
| repetition_penalty  | a huge one                                         | no token twice                        |
| presence, frequency | 2 each, where the greedy answer repeats itself     | fewer repetitions                     |
| logprobs            | 2; of the prompt                                   | two each; one for every prompt token  |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from deltaserve.verify.ask import NUM_TOP, Answer, Ask, greedy
from deltaserve.verify.book import Book
from deltaserve.verify.compare import Level, compare
from deltaserve.verify.lab import Lab
from deltaserve.verify.target import Session

NUM_TOKENS = 12
NUM_SEEDS = 6
HOT = 2.0
MIN_TOKENS = 5
NUM_LOOPED = 24
MAX_TOKENS = (1, 2, 5)
FILTERS: dict[str, float] = {"top_k": 1, "top_p": 1e-6, "min_p": 1.0}
PLAIN_TEXT = re.compile(r"(?<=.)[!-~]{1,3}")  # not at the very start, where nothing would be left

Verify = Callable[[Sequence[Answer]], str]
Same = Callable[[Answer, Sequence[Answer]], str]


@dataclass(frozen=True, slots=True)
class Check:
    """`verify` gives what is wrong with the answers to `asks`, in words; empty if nothing is."""

    name: str
    asks: tuple[Ask, ...]
    verify: Verify


def check_options(lab: Lab, book: Book) -> None:
    """A greedy answer first; then every check at once, made from it; then the same greedy question again."""
    base = greedy(lab.writer.noise(40), NUM_TOKENS)
    with lab.session() as session:
        plain = session.ask([base])[0]
        if plain.error is not None:
            return book.expect("a greedy answer", False, plain.error)
        checks = _checks(book, lab, base, plain)
        _run(book, session, checks)
        book.compare("the same greedy answer afterwards", plain, session.ask([base])[0])
    return None


def _run(book: Book, session: Session, checks: Sequence[Check]) -> None:
    answers = iter(session.ask([ask for check in checks for ask in check.asks]))
    for check in checks:
        mine = [next(answers) for _ in check.asks]
        wrong = next((answer.error for answer in mine if answer.error is not None), None) or check.verify(mine)
        book.expect(check.name, not wrong, wrong)


def _checks(book: Book, lab: Lab, base: Ask, plain: Answer) -> list[Check]:
    same = partial(_same, lab.level)
    found = [
        *_chance(base, plain, same),
        *_bias(base, plain),
        *_ends(base, plain, same),
        *_penalties(lab),
        *_logprobs(base),
    ]
    stop = _stop(base, plain, same)
    if stop is None:
        book.skip_part("stop", f"there is no plain text in the answer {plain.text!r}")
        return found
    return [*found, stop]


def _chance(base: Ask, plain: Answer, same: Same) -> list[Check]:
    """Seeds, and filters that leave only the likeliest token."""
    hot = base.with_params(temperature=HOT)
    seeded = tuple(hot.with_params(seed=seed) for seed in range(NUM_SEEDS))
    return [
        Check("temperature 0 twice", (base, base), partial(same, plain)),
        Check("seeds", seeded + seeded, _seeds_decide),
        *(
            Check(f"{name} {value:g} at temperature {HOT:g}", (hot.with_params(**{name: value}),), partial(same, plain))
            for name, value in FILTERS.items()
        ),
    ]


def _bias(base: Ask, plain: Answer) -> list[Check]:
    first = plain.token_ids[0]
    other = next(token_id for token_id in base.prompt_ids if token_id not in plain.token_ids)
    return [
        Check(
            "logit_bias -100",
            (base.with_params(logit_bias={first: -100.0}),),
            lambda got: f"token {first} is still there" if first in got[0].token_ids else "",
        ),
        Check(
            "logit_bias +100",
            (base.with_params(logit_bias={other: 100.0}),),
            lambda got: "" if set(got[0].token_ids) == {other} else f"tokens {got[0].token_ids}, not only {other}",
        ),
    ]


def _ends(base: Ask, plain: Answer, same: Same) -> list[Check]:
    """What ends an answer, and where."""
    stop_id = plain.token_ids[2]
    stopped = _cut(plain, plain.token_ids.index(stop_id) + 1, "stop")
    forced = base.with_params(logit_bias={stop_id: 100.0}, stop_token_ids=(stop_id,))
    return [
        Check("stop_token_ids", (base.with_params(stop_token_ids=(stop_id,)),), partial(same, stopped)),
        Check("a stop token at once", (forced,), lambda got: _count("tokens", len(got[0].token_ids), 1)),
        Check(
            f"min_tokens {MIN_TOKENS}",
            (forced.with_params(min_tokens=MIN_TOKENS),),
            lambda got: _count("tokens", len(got[0].token_ids), MIN_TOKENS + 1),
        ),
        *(
            Check(
                f"max_tokens {count}",
                (base.with_params(max_tokens=count),),
                partial(same, _cut(plain, count, "length")),
            )
            for count in MAX_TOKENS
        ),
    ]


def _stop(base: Ask, plain: Answer, same: Same) -> Check | None:
    """A piece of the text; None if it has none that could be one."""
    piece = PLAIN_TEXT.search(plain.text)
    if piece is None:
        return None
    before = plain.text[: plain.text.index(piece[0])]

    def verify(got: Sequence[Answer]) -> str:
        text, reason = got[0].text, got[0].finish_reason
        is_right = text == before and reason == "stop"
        return "" if is_right else f"text {text!r} by {reason!r} instead of {before!r} by 'stop'"

    return Check("stop", (base.with_params(stop=(piece[0],)),), verify)


def _penalties(lab: Lab) -> list[Check]:
    """On prompts that repeat a few tokens over and over, as does what follows them."""
    looped = [greedy(lab.writer.noise(4) * 12, NUM_LOOPED) for _ in range(3)]
    strict = tuple(ask.with_params(repetition_penalty=1000.0) for ask in looped)
    damped = tuple(ask.with_params(presence_penalty=2.0, frequency_penalty=2.0) for ask in looped)
    return [
        Check("repetition_penalty 1000", strict, _no_token_twice),
        Check("presence and frequency penalty 2", (*looped, *damped), _fewer_repetitions),
    ]


def _logprobs(base: Ask) -> list[Check]:
    num_prompt = len(base.prompt_ids)
    return [
        Check("logprobs 2", (base,), lambda got: _two_each(got[0])),
        Check(
            "prompt_logprobs",
            (base.with_params(prompt_logprobs=1),),
            lambda got: _count("prompt logprobs", got[0].num_prompt_logprobs, num_prompt),
        ),
    ]


def _same(level: Level, reference: Answer, got: Sequence[Answer]) -> str:
    verdicts = [compare(reference, answer, level) for answer in got]
    return next((verdict.detail for verdict in verdicts if not verdict.passed), "")


def _cut(answer: Answer, num_tokens: int, reason: str) -> Answer:
    """Its beginning, ended for this reason."""
    tokens, tops = answer.token_ids[:num_tokens], answer.tops[:num_tokens]
    return replace(answer, token_ids=tokens, tops=tops, finish_reason=reason)


def _seeds_decide(got: Sequence[Answer]) -> str:
    first, second = got[:NUM_SEEDS], got[NUM_SEEDS:]
    unequal = [seed for seed in range(NUM_SEEDS) if first[seed].token_ids != second[seed].token_ids]
    if unequal:
        return f"seeds {unequal} gave other tokens the second time"
    return "" if len({answer.token_ids for answer in first}) > 1 else f"{NUM_SEEDS} seeds gave the same tokens"


def _no_token_twice(got: Sequence[Answer]) -> str:
    repeated = [answer.token_ids for answer in got if len(set(answer.token_ids)) < len(answer.token_ids)]
    return f"a token came twice: {repeated[0]}" if repeated else ""


def _fewer_repetitions(got: Sequence[Answer]) -> str:
    half = len(got) // 2
    before, after = (sum(len(set(answer.token_ids)) for answer in part) for part in (got[:half], got[half:]))
    return "" if after > before else f"{after} distinct tokens with penalties, {before} without"


def _two_each(answer: Answer) -> str:
    wrong = [top for top in answer.tops if len(top) < NUM_TOP]
    return f"{len(wrong)} tokens have fewer than {NUM_TOP} alternatives" if wrong or not answer.tops else ""


def _count(name: str, count: int, wanted: int) -> str:
    return "" if count == wanted else f"{count} {name} instead of {wanted}"
