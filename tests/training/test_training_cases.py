"""What scores are made of: right answers, held out, where they say they are; and how answers are judged."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from training.cases import DEPTHS, NEEDLE, SKILLS, Case, cases, heldout_examples
from training.data import Source
from training.draw import Draw, is_heldout
from training.encoder import shared_encoder
from training.evaluate import score
from training.tasks import facts, objects, sums, tools

TOKENIZER = Path(__file__).parents[2] / "models" / "tiny" / "tokenizer.json"


class Scripted:
    """Answers that are given beforehand."""

    def __init__(self, answers: list[str]) -> None:
        self.given = answers

    def answers(self, prompts: Sequence[list[int]], max_new_tokens: int) -> list[str]:
        assert len(prompts) == len(self.given)
        return self.given


@pytest.mark.parametrize("sign", ["+", "-", "*"])
def test_steps_of_a_sum_are_right(sign: str) -> None:
    draw = Draw("train", 1)
    for _ in range(300):
        high = 99 if sign == "*" else 10 ** draw.between(1, 4) - 1
        a, b = draw.between(0, high), draw.between(0, high)
        lines = sums.steps(a, b, sign)
        assert int(lines[-1].split(" = ")[-1]) == sums.result(a, b, sign) == eval(f"{a} {sign} {b}")
        for line in lines:
            question, _, found = line.partition(" = ")
            if found:
                ones, tens = int(found.split()[-1]), int(found.split()[0]) if " " in found else 0
                expected = eval(question)
                assert expected == (ones - 10 * tens if sign == "-" else ones + 10 * tens)


def test_no_question_has_two_answers() -> None:
    answers: dict[str, str] = {}
    for fact in (*facts.facts(), *facts.sayings("chat"), *facts.sayings("deltaserve")):
        for question in fact.questions:
            assert answers.setdefault(facts.bare(question), fact.answer) == fact.answer, question


@pytest.mark.parametrize("skill", ["facts", "chat", "deltaserve"])
def test_wordings_that_are_held_out_are_never_trained(skill: str) -> None:
    heldout, source = facts.questions(heldout=True), Source(Draw("train", 4), 300)
    assert len(heldout) > 300
    for _ in range(2000):
        for turn in source.conversation(skill).turns:
            assert turn.role != "user" or facts.bare(turn.text) not in heldout
    first = cases(TOKENIZER, skill, 50, seed=1)
    assert sum(any(question in case.prompt.lower() for question in heldout) for case in first) >= 45


def test_arguments_of_calls_stand_in_the_request() -> None:
    draw = Draw("train", 2)
    for _ in range(300):
        tool = draw.pick(tools.some_tools(draw))
        request = tools.request(draw, tool)
        schema = json.loads(tool.json())["function"]["parameters"]
        assert list(request.call.arguments) == schema["required"]
        for name, value in request.call.arguments.items():
            shown = value if isinstance(value, str) else json.dumps(value)
            assert shown in request.text
            kind = schema["properties"][name]["type"]
            assert type(value) is {"string": str, "integer": int, "number": float, "boolean": bool}[kind]
            assert value in schema["properties"][name].get("enum", [value])


def test_invented_tools_belong_to_one_split() -> None:
    train, heldout = Draw("train", 1), Draw("heldout", 1)
    for _ in range(200):
        assert not is_heldout(tools.invented_tool(train).name)
        assert is_heldout(tools.invented_tool(heldout).name)


def test_objects_follow_their_schema() -> None:
    draw = Draw("train", 3)
    for _ in range(100):
        asked, answered = objects.object_exchange(draw)
        found = json.loads(answered.text)
        _, brace, rest = asked.text.partition('{"type": "object"')
        if not brace:
            continue
        schema, _ = json.JSONDecoder().raw_decode(brace + rest)
        assert list(found) == schema["required"]
        for name, value in found.items():
            assert value in schema["properties"][name].get("enum", [value])


@pytest.mark.parametrize("skill", SKILLS)
def test_examples_end_with_the_turn(skill: str) -> None:
    encode = shared_encoder(str(TOKENIZER))
    for prompt, answer in heldout_examples(TOKENIZER, skill, 3):
        assert encode.tokenizer.decode(prompt, skip_special_tokens=False).endswith(("<think>\n", "</think>\n\n"))
        assert answer[-1] == encode.tokenizer.token_to_id("<|im_end|>")
        assert len(answer) > 1


def test_thinking_cases_think() -> None:
    assert all("</think>" in case.answer for case in cases(TOKENIZER, "sums_thinking", 5))
    assert not any("</think>" in case.answer for case in cases(TOKENIZER, "sums", 5))


def test_needles_lie_where_they_should() -> None:
    encode = shared_encoder(str(TOKENIZER))
    found = cases(TOKENIZER, NEEDLE, 6, context=2000)
    for index, case in enumerate(found):
        word = case.answer.removesuffix(".").rpartition(" is ")[2]
        depths = [at.start() / len(case.prompt) for at in re.finditer(re.escape(word), case.prompt)]
        assert min(abs(depth - DEPTHS[index % len(DEPTHS)]) for depth in depths) < 0.06
        assert 1800 < len(encode(case.prompt)) + len(encode(case.answer)) < 2000


def test_exact_and_right_are_counted_apart() -> None:
    found = [
        Case("sums_thinking", "<|im_start|>", "1 + 1 + 0 = 0 2\n2\n</think>\n\n1 + 1 = 2."),
        Case("sums_thinking", "<|im_start|>", "1 + 2 + 0 = 0 3\n3\n</think>\n\n1 + 2 = 3."),
        Case("objects", "<|im_start|>", '{"age": 4, "name": "Ida"}'),
        Case("objects", "<|im_start|>", '{"age": 4}'),
    ]
    answers = [found[0].answer, "I guess.\n</think>\n\n1 + 2 = 3.", '{"name": "Ben", "age": 5}', '{"age": "4"}']
    result = score(Scripted(answers), TOKENIZER, found, 10)  # type: ignore[arg-type]
    assert (result["count"], result["exact"], result["right"]) == (4, 0.25, 0.75)
    assert result["wrong"]["answer"] == answers[1]
