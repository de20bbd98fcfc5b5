"""Prompts are built as the template builds them: what is common to two of them is what a prefix cache can share."""

from __future__ import annotations

from deltaserve.bench.conversation import (
    IM_END,
    MARKERS,
    NEWLINE,
    THINK,
    TOOL_RESPONSE,
    Message,
    Part,
    Role,
    Text,
    Words,
    num_tokens,
    prompt_parts,
    reply_parts,
)

SYSTEM_PROMPT = Message(Role.SYSTEM, (Text(0, Part.BASE, 30),))
QUESTION = Message(Role.USER, (Text(1, Part.TURN, 9),))
CALL = Message(Role.ASSISTANT, (Text(3, Part.OUTPUT, 5),), thinking=Text(2, Part.OUTPUT, 7))
RESULTS = Message(Role.TOOL, (Text(4, Part.TURN, 11), Text(5, Part.TURN, 12)))
ANSWER = Message(Role.ASSISTANT, (Text(7, Part.OUTPUT, 6),), thinking=Text(6, Part.OUTPUT, 8))
NEXT = Message(Role.USER, (Text(8, Part.TURN, 4),))


def _prompt(*messages: Message) -> tuple[int, ...]:
    return Words().ids(prompt_parts(messages))


def test_a_loop_of_tool_calls_continues_prompt_and_answer_word_for_word() -> None:
    first = _prompt(SYSTEM_PROMPT, QUESTION)
    written = first + Words().ids(reply_parts(CALL))
    second = _prompt(SYSTEM_PROMPT, QUESTION, CALL, RESULTS)
    assert written[-1] == IM_END and second[: len(written)] == written
    assert second.count(TOOL_RESPONSE) == 2 and second.count(MARKERS.user[0]) == 2


def test_the_next_user_message_takes_all_thinking_of_the_loop_away() -> None:
    loop = _prompt(SYSTEM_PROMPT, QUESTION, CALL, RESULTS)
    after = _prompt(SYSTEM_PROMPT, QUESTION, CALL, RESULTS, ANSWER, NEXT)
    assert loop.count(THINK) == 2 and after.count(THINK) == 1
    num_common = next(at for at, (left, right) in enumerate(zip(loop, after, strict=False)) if left != right)
    assert num_common == len(_prompt(SYSTEM_PROMPT, QUESTION)) - 2, "up to where the call's thinking began"


def test_lengths_are_known_without_writing() -> None:
    pieces = prompt_parts((SYSTEM_PROMPT, QUESTION, CALL, RESULTS))
    assert num_tokens(pieces) == len(Words().ids(pieces))
    assert num_tokens(reply_parts(ANSWER)) == len(Words().ids(reply_parts(ANSWER))) == 8 + 3 + 6 + 1


def test_texts_of_different_numbers_differ_at_once_and_have_their_length() -> None:
    words = Words()
    texts = [words.ids([Text(number, Part.TURN, 5)]) for number in (0, 1, 4096, 4096**2)]
    assert len({text[:4] for text in texts}) == 4
    assert len(words.ids([Text(1, Part.BASE, 200_001)])) == 200_001
    assert not set(texts[0]) & {IM_END, NEWLINE, *MARKERS.user}
