"""Whatever is drawn under a schema fits it; whatever fits can be said; what cannot be honoured is refused early."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from deltaserve.engine.tokenizer import Tokenizer, grammar_vocabulary
from deltaserve.grammar import compiler
from deltaserve.grammar.compiler import (
    GrammarError,
    Grammars,
    Vocabulary,
    choice_text,
    json_schema_text,
    lark_text,
    regex_text,
)
from tests.grammar.goldens import GOLDENS, REFUSED
from tests.grammar.sampling import sample, spell, unchanged

VOCAB_SIZE = 4096
TINY = Path(__file__).parents[2] / "models" / "tiny"


def fits(value: object, schema: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).is_valid(value)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(lambda: grammar_vocabulary(tokenizer, VOCAB_SIZE))


@pytest.mark.parametrize("name", GOLDENS)
def test_twenty_samples_fit_the_schema(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    schema = GOLDENS[name][0]
    text = json_schema_text(schema)
    for seed in range(20):
        answer = json.loads(sample(grammars.matcher(text), tokenizer, seed))
        assert fits(answer, schema), answer


@pytest.mark.parametrize("name", GOLDENS)
def test_what_fits_can_be_said_and_what_does_not_cannot(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    """Also pretty-printed. In any split into tokens that the masks allow."""
    schema, fitting, others = GOLDENS[name]
    text = json_schema_text(schema)
    for value in fitting:
        assert fits(value, schema)
        for indent in (None, 2):
            written = json.dumps(value, ensure_ascii=False, indent=indent)
            assert spell(grammars.matcher(text), tokenizer, written), written
    for value in others:
        assert not fits(value, schema)
        assert not spell(grammars.matcher(text), tokenizer, json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize(("schema", "word"), REFUSED, ids=[word for _, word in REFUSED])
def test_schemas_that_are_refused(grammars: Grammars, schema: dict[str, Any], word: str) -> None:
    with pytest.raises(GrammarError, match=word):
        grammars.check(json_schema_text(schema))


@pytest.mark.parametrize(
    "make",
    [
        lambda: regex_text("(a"),
        lambda: regex_text("(?=a)b"),
        lambda: regex_text("(a{1000}){1000}"),
        lambda: regex_text("(" * 20_000 + "a" + ")" * 20_000),
        lambda: regex_text(r"[^\s\S]"),
        lambda: lark_text(""),
        lambda: lark_text("start: absent"),
        lambda: lark_text("start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
        lambda: lark_text("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
        lambda: lark_text('start: "a"' + " " * 200_000),
        lambda: lark_text("start: A\nA: " + " & ".join(f"/.*{letter}.*/" for letter in "abcdefghijkl")),
        lambda: lark_text('start: %json {"type": "object"}'),
        lambda: choice_text(["\ud800"]),
    ],
)
def test_other_grammars_that_are_refused(grammars: Grammars, make: Any) -> None:
    with pytest.raises(GrammarError) as found:
        grammars.check(make())
    assert 0 < len(str(found.value)) < 400


def test_a_schema_too_deep_for_the_library_is_refused(grammars: Grammars) -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"anyOf": [schema]}
    with pytest.raises(GrammarError):
        grammars.check(json_schema_text(schema))


@pytest.mark.parametrize(
    ("text", "said", "unsaid"),
    [
        (regex_text("[0-9]{3}-x?"), ["123-", "123-x"], ["12-", "123-xx", ""]),
        (regex_text("(?s).*"), ["", "a\nb", "é😀"], []),
        (choice_text(["yes", "no, never", 'a "b"\n\\']), ["yes", "no, never", 'a "b"\n\\'], ["ye", "no", "yes!"]),
        (choice_text(["x", "x y"]), ["x", "x y"], ["x ", "y"]),
        (choice_text(["<|im_end|>"]), ["<|im_end|>"], [""]),
        (lark_text('start: "a" b*\nb: "," /[0-9]+/'), ["a", "a,1,22"], ["a,", "b"]),
        (lark_text('root ::= "(" root ")" | "x"'), ["x", "((x))"], ["((x)", "()"]),
    ],
    ids=["regex", "anything", "choice", "prefixes", "marks", "lark", "gbnf"],
)
def test_texts_of_other_grammars(
    grammars: Grammars, tokenizer: Tokenizer, text: str, said: list[str], unsaid: list[str]
) -> None:
    for answer in said:
        assert spell(grammars.matcher(text), tokenizer, answer), answer
    for answer in unsaid:
        assert not spell(grammars.matcher(text), tokenizer, answer), answer


def test_white_space_cannot_go_on_for_ever(grammars: Grammars, tokenizer: Tokenizer) -> None:
    (space,), (brace,) = tokenizer.encode(" "), tokenizer.encode("{")
    for has_blanks, num_spaces in ((True, 1), (False, 0)):
        matcher = grammars.matcher(json_schema_text({"type": "object"}, has_blanks=has_blanks))
        assert matcher.accept(brace)
        assert [matcher.accept(space) for _ in range(2)].count(True) == num_spaces


def test_a_pattern_of_the_clients_own_for_white_space(grammars: Grammars, tokenizer: Tokenizer) -> None:
    text = json_schema_text({"type": "array", "items": {"type": "integer"}}, blank_pattern="[ ]{3}")
    assert spell(grammars.matcher(text), tokenizer, "[1,   2]")
    assert not spell(grammars.matcher(text), tokenizer, "[1, 2]")


def test_added_tokens_are_no_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Neither a mark of the chat nor an id without a token is part of a string."""
    matcher = grammars.matcher(regex_text("(?s).+"))
    mask_V = matcher.mask()
    assert not mask_V[sorted(tokenizer.added_ids)].any() and not mask_V[tokenizer.vocab_size :].any()
    assert mask_V.sum() > 3000


@pytest.mark.parametrize("seed", range(5))
def test_rolling_back(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    """At every place: go on at random, also over the end, take it back; the mask is as before."""
    rng, schema = random.Random(seed), GOLDENS["array_of_objects"][0]
    matcher = grammars.matcher(json_schema_text(schema))
    for token_id in tokenizer.encode('[{"k": "a", "n": 1.25}, {"k": "b", "n": -3}]'):
        with unchanged(matcher):
            num_told = 0
            for _ in range(rng.randrange(1, 6)):
                allowed = np.flatnonzero(matcher.mask())
                num_told += matcher.accept(int(rng.choice(allowed)))
            matcher.rollback(num_told)
        assert matcher.accept(token_id)


def test_a_token_outside_the_language_changes_nothing(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(regex_text("ab"))
    with unchanged(matcher):
        assert not matcher.accept(tokenizer.encode("x")[0])


def test_matchers_of_one_grammar_are_apart(grammars: Grammars, tokenizer: Tokenizer) -> None:
    text = regex_text("[ab]{4}")
    first, second = grammars.matcher(text), grammars.matcher(text)
    with unchanged(second):
        assert first.accept(tokenizer.encode("a")[0])


def test_grammars_are_compiled_once_and_the_oldest_go(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_COMPILED", 2)
    grammars, compiled = Grammars(lambda: grammar_vocabulary(tokenizer, VOCAB_SIZE)), []
    compile_one = grammars._compile
    monkeypatch.setattr(Grammars, "_compile", lambda self, text: compiled.append(text) or compile_one(text))
    a, b, c = regex_text("a"), regex_text("b"), regex_text("(")
    for text in (a, b, a, c, c, a, b):
        try:
            grammars.check(text)
        except GrammarError:
            assert text == c
    assert compiled == [a, b, c, b]


def test_the_vocabulary_is_read_once_and_ahead_if_wanted(tokenizer: Tokenizer) -> None:
    loads: list[int] = []
    grammars = Grammars(lambda: loads.append(1) or grammar_vocabulary(tokenizer, VOCAB_SIZE))  # type: ignore[func-returns-value]
    assert not loads
    grammars.prepare()
    assert loads == [1]
    grammars.check(regex_text("a"))
    grammars.prepare()
    assert loads == [1]


def test_without_an_end_of_sequence_there_are_no_grammars(tokenizer: Tokenizer) -> None:
    grammars = Grammars(lambda: Vocabulary([b"a", b"b"], frozenset(), (), tokenizer.encode))
    grammars.prepare()
    with pytest.raises(GrammarError, match="end-of-sequence"):
        grammars.check(regex_text("a"))
