"""A server's URL: what a client can see. Prompts go as token ids to /v1/completions, one connection a request.

The server is taken as it is: no setting can be changed, no request pushed out, so a gate that needs that is skipped.
Cold answers come from cache salts that nobody has used; counters from /stats.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from deltaserve.core.errors import ConfigError
from deltaserve.core.types import SamplingParams
from deltaserve.verify.ask import Answer, Ask, Top
from deltaserve.verify.book import SkippedError
from deltaserve.verify.compare import GAPS, Level
from deltaserve.verify.http_client import Http, RefusedError
from deltaserve.verify.target import AS_IT_IS, TOGETHER, About, Counters, Message, Session, Setup, Traffic, flatten

MAX_IN_FLIGHT = 128
WATCH_S = 0.01
AS_JSON = frozenset(("stop", "stop_token_ids", "logit_bias", "allowed_token_ids"))  # as JSON wants them, below
NO_FIELDS = frozenset(("bad_words", "thinking", "grammar"))  # a body says these otherwise, and no gate asks for them


class HttpTarget:
    """`url` is the server's root, such as http://localhost:8000."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises ConfigError where no server of ours answers, or one whose answers mean nothing."""
        self._http = Http(url, api_key)
        card = self._http.model_card()
        drafts = self._http.stats().get("drafts") or {}
        if card.get("synthetic_acceptance_length") is not None:
            raise ConfigError(
                f"{url} accepts drafts by a schedule (synthetic acceptance), so its text means nothing; verify a "
                "server without rejection_sample_method synthetic"
            )
        self._model = str(card["id"])
        self.about = About(
            name=f"server at {url}",
            model=self._model,
            max_model_len=int(card["max_model_len"]),
            vocab_size=int(card.get("vocab_size", 0)),
            level=Level(GAPS["bfloat16"]),
            is_engine=False,
            has_draft_head=bool(drafts.get("verified_by_position")),
            num_drafts=len(drafts.get("verified_by_position") or ()),
            facts={"url": url, "version": self._http.get("/version").get("version")},
        )

    @contextmanager
    def session(self, setup: Setup = AS_IT_IS) -> Iterator[Session]:
        if setup != AS_IT_IS:
            raise SkippedError("a client cannot change the server's settings; give a model directory")
        yield HttpSession(self._http, self._model)

    def encode(self, text: str) -> list[int]:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return [int(token_id) for token_id in self._http.post("/tokenize", body)["tokens"]]

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._http.post("/detokenize", {"model": self._model, "tokens": list(token_ids)})["prompt"])

    def render(self, messages: Sequence[Message], **template_kwargs: Any) -> list[int]:
        body = {"model": self._model, "messages": list(messages), "chat_template_kwargs": template_kwargs}
        try:
            return [int(token_id) for token_id in self._http.post("/tokenize", body)["tokens"]]
        except RefusedError as error:
            raise SkippedError(f"the server renders no chat: {error}") from error

    def close(self) -> None:
        """Nothing is kept open."""


class HttpSession:
    """See verify.target.Session."""

    def __init__(self, http: Http, model: str) -> None:
        self._http = http
        self._model = model

    def ask(self, asks: Sequence[Ask], traffic: Traffic = TOGETHER) -> list[Answer]:
        if not traffic.is_plain:
            raise SkippedError("a client cannot steer the server's steps; give a model directory")
        pool = ThreadPoolExecutor(min(len(asks), MAX_IN_FLIGHT) or 1)
        try:
            with self._watching(traffic):
                return list(pool.map(self._complete, asks))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C waits for no answer

    def counters(self) -> Counters:
        return flatten(self._http.stats())

    def reset_cache(self) -> None:
        try:
            self._http.post("/reset_prefix_cache", {})
        except RefusedError as error:
            raise SkippedError(f"the server does not reset its prefix cache: {error}") from error

    @contextmanager
    def _watching(self, traffic: Traffic) -> Iterator[None]:
        """While requests run, `watch` sees the counters every few milliseconds."""
        if traffic.watch is None:
            yield
            return
        watch, is_over = traffic.watch, threading.Event()

        def look() -> None:
            while not is_over.wait(WATCH_S):
                watch(self.counters())

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _complete(self, ask: Ask) -> Answer:
        try:
            answer = self._http.post("/v1/completions", completion_body(ask, self._model))
        except RefusedError as error:
            return Answer(error=str(error))
        return read_answer(answer)


def completion_body(ask: Ask, model: str) -> dict[str, Any]:
    """Every field is written out, so that no default of the server counts."""
    params = ask.params
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(ask.prompt_ids),
        "cache_salt": ask.salt or None,
        "stop": list(params.stop) or None,
        "stop_token_ids": list(params.stop_token_ids),
        "logit_bias": {str(token_id): bias for token_id, bias in params.logit_bias.items()} or None,
        "allowed_token_ids": list(params.allowed_token_ids) or None,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if not ask.use_drafts:
        body["speculative"] = False
    names = (name for name in SamplingParams.__dataclass_fields__ if name not in AS_JSON | NO_FIELDS)
    return body | {name: getattr(params, name) for name in names}


def read_answer(answer: dict[str, Any]) -> Answer:
    """Of a body of /v1/completions with one choice."""
    choice = answer["choices"][0]
    details = answer["usage"].get("prompt_tokens_details") or {}
    logprobs = choice.get("logprobs") or {}
    return Answer(
        token_ids=tuple(choice["token_ids"]),
        tops=tuple(_top(entry) for entry in logprobs.get("top_logprobs") or ()),
        text=choice["text"],
        finish_reason=choice["finish_reason"] or "",
        num_cached=details.get("cached_tokens") or 0,
        num_prompt_logprobs=len(choice.get("prompt_logprobs") or ()),
    )


def _top(entry: dict[str, float] | None) -> Top:
    """From {"token_id:5": -0.1, ...}, likeliest first."""
    pairs = [(int(name.removeprefix("token_id:")), logprob) for name, logprob in (entry or {}).items()]
    return tuple(sorted(pairs, key=lambda pair: -pair[1]))
