"""What a request says its answer must be: structured output, bad words, a thinking budget. Checked before it runs.

| field                                                   | the answer is                                         |
| ------------------------------------------------------- | ----------------------------------------------------- |
| response_format {type: json_object}                     | a JSON object                                         |
| response_format {type: json_schema, json_schema: {...}} | JSON that fits `schema`, whether `strict` or not      |
| structured_outputs {json: schema as object or text}     | the same                                              |
| structured_outputs {json_object: true}                  | a JSON object                                         |
| structured_outputs {regex: pattern}                     | a full match                                          |
| structured_outputs {choice: [text, ...]}                | one of the texts                                      |
| structured_outputs {grammar: text}                      | a sentence of the grammar, in Lark's notation or GBNF |

The grammar holds for what comes after the thinking. Where the request has tools that may be called, a call is as good
an answer; where one must be called, `response_format` has nothing to hold and `structured_outputs` is refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from deltaserve.core.errors import RequestError, shown
from deltaserve.core.types import GrammarRule, SamplingParams, Thinking
from deltaserve.engine.admission import check_grammar
from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.grammar.compiler import GrammarError, choice_text, json_schema_text, lark_text, regex_text
from deltaserve.server.errors import NotOfferedError
from deltaserve.server.parsers.marks import CALL, THINK, THINK_END
from deltaserve.server.parsers.reasoning import State
from deltaserve.server.schema import ChatRequest, CompletionRequest, StructuredOutputs
from deltaserve.server.served import Served
from deltaserve.server.tool_choice import ToolPlan

MAX_BAD_WORDS = 1024
MAX_CHOICES = 1024
MAX_COMPILE_S = 10.0  # of waiting; what costs more is refused by its size, so this is for what nobody foresaw
KINDS = ("json", "json_object", "regex", "choice", "grammar")
ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class _Source:
    """A grammar that is not yet made; `field` is where the client wrote it."""

    field: str
    make: Callable[[], str]


async def constrain(
    served: Served,
    request: ChatRequest | CompletionRequest,
    params: SamplingParams,
    state: State = State.ANSWER,
    plan: ToolPlan | None = None,
) -> SamplingParams:
    """The params with what the request says of its answer, which begins in `state`. Raises RequestError."""
    source = _source(request, plan)
    exit_id = served.tokenizer.token_to_id(CALL) if plan is not None and plan.reads_calls else None
    rule = None
    if source is not None:
        rule = GrammarRule(await _compiled(served, source), () if exit_id is None else (exit_id,))
    budget = _thinking_budget(served, request)
    is_thinking = state is not State.ANSWER and (rule is not None or budget is not None)
    params = replace(
        params,
        bad_words=_bad_words(request.bad_words, served.tokenizer),
        grammar=rule,
        thinking=_thinking(served.tokenizer, state, budget) if is_thinking else None,
    )
    check_grammar(params)
    return params


def _source(request: ChatRequest | CompletionRequest, plan: ToolPlan | None) -> _Source | None:
    formatted = None if request.response_format is None else _from_format(request.response_format)
    outputs = None if request.structured_outputs is None else _from_outputs(request.structured_outputs)
    if formatted is not None and outputs is not None:
        raise RequestError("structured_outputs and response_format exclude each other", "structured_outputs")
    if plan is None or not plan.opening:
        return formatted or outputs
    if outputs is not None:
        raise RequestError("structured_outputs excludes a tool_choice that makes a call", "structured_outputs")
    return None


def _from_format(form: dict[str, Any]) -> _Source | None:
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _Source("response_format", lambda: json_schema_text(ANY_OBJECT))
    if kind == "structural_tag":
        raise NotOfferedError("response_format structural_tag is not offered; use json_schema", "response_format.type")
    if kind != "json_schema":
        sentence = f"response_format.type must be text, json_object or json_schema, not {shown(kind)}"
        raise RequestError(sentence, "response_format.type")
    field = "response_format.json_schema"
    named = form.get("json_schema")
    if not isinstance(named, dict):
        raise RequestError(f"{field} must be an object with the schema, not {shown(named)}", field)
    schema = named.get("schema")
    if not isinstance(schema, dict):
        raise RequestError(f"{field}.schema must be a JSON schema, an object, not {shown(schema)}", f"{field}.schema")
    return _Source(f"{field}.schema", lambda: json_schema_text(schema))


def _from_outputs(outputs: StructuredOutputs) -> _Source:
    given = [name for name in KINDS if getattr(outputs, name) not in (None, False)]
    if outputs.structural_tag is not None:
        field = "structured_outputs.structural_tag"
        raise NotOfferedError(f"{field} is not offered; use json, regex, choice or grammar", field)
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise RequestError(f"structured_outputs takes one of {', '.join(KINDS)}, not {found}", "structured_outputs")
    return _Source(f"structured_outputs.{given[0]}", _maker(outputs, given[0]))


def _maker(outputs: StructuredOutputs, kind: str) -> Callable[[], str]:
    if kind in ("json", "json_object"):
        schema = ANY_OBJECT if outputs.json is None else _schema(outputs.json)
        blanks, pattern = not outputs.disable_any_whitespace, outputs.whitespace_pattern
        return lambda: json_schema_text(schema, has_blanks=blanks, blank_pattern=pattern)
    if outputs.regex is not None:
        regex = outputs.regex
        return lambda: regex_text(regex)
    if outputs.grammar is not None:
        grammar = outputs.grammar
        return lambda: lark_text(grammar)
    choices = outputs.choice or []
    if not 1 <= len(choices) <= MAX_CHOICES:
        sentence = f"structured_outputs.choice takes 1 to {MAX_CHOICES} texts, not {len(choices)}"
        raise RequestError(sentence, "structured_outputs.choice")
    return lambda: choice_text(choices)


def _schema(given: str | dict[str, Any]) -> dict[str, Any]:
    field = "structured_outputs.json"
    try:
        schema = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} is not valid JSON: {error}", field) from None
    if not isinstance(schema, dict):
        raise RequestError(f"{field} must be a JSON schema, an object, not {shown(schema)}", field)
    return schema


async def _compiled(served: Served, source: _Source) -> str:
    """The grammar's text, tried out; the engine compiles it again, on its side.

    One thread does all of it, so that costly ones wait for each other and not for the threads that tokenise.
    """
    grammars = served.grammars
    if grammars is None:
        raise NotOfferedError(f"{source.field} is not offered by this server", source.field)

    def compiled() -> str:
        text = source.make()
        grammars.check(text)
        return text

    try:
        work = asyncio.get_running_loop().run_in_executor(served.grammar_thread, compiled)
        return await asyncio.wait_for(work, MAX_COMPILE_S)
    except TimeoutError:
        raise RequestError(f"{source.field} takes more than {MAX_COMPILE_S:g} s to compile", source.field) from None
    except GrammarError as error:
        raise RequestError(f"{source.field} cannot be used: {error}", source.field) from None


def _thinking_budget(served: Served, request: ChatRequest | CompletionRequest) -> int | None:
    budget = request.thinking_token_budget
    if budget is None:
        return None
    if isinstance(request, CompletionRequest) or not served.formats.has_thinking:
        sentence = "thinking_token_budget needs a chat, and a model whose thinking is read (--reasoning-parser)"
        raise RequestError(sentence, "thinking_token_budget")
    return budget


def _thinking(tokenizer: Tokenizer, state: State, budget: int | None) -> Thinking:
    end_id = tokenizer.token_to_id(THINK_END)
    if end_id is None:
        sentence = f"this checkpoint has no token {THINK_END}; switch thinking off to use this field"
        raise RequestError(sentence, "response_format" if budget is None else "thinking_token_budget")
    return Thinking(end_id, tokenizer.token_to_id(THINK), state in (State.OPENED, State.THINKING), budget)


def _bad_words(words: list[str] | None, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, both at the start of a text and after a space."""
    words = words or []
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(f"bad_words takes at most {MAX_BAD_WORDS} words, not {len(words)}", "bad_words")
    sequences: dict[tuple[int, ...], None] = {}
    for place, word in enumerate(words):
        bare = word.lstrip(" ")
        if not bare:
            raise RequestError(f"bad_words[{place}] must hold more than spaces", f"bad_words[{place}]")
        sequences |= dict.fromkeys(tuple(tokenizer.encode(text)) for text in (bare, f" {bare}"))
    return tuple(sequences)
