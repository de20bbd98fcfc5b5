"""The HTTP application: routes over one served model. Nothing here decides; each route parses, calls, answers.

Bodies are read and checked by `schema`, not by the framework, so that every refusal has OpenAI's shape; the framework
gives routing and `/docs`, for which the schemas are published under the names of their structs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from deltaserve.core.errors import EngineDeadError, RequestError
from deltaserve.core.types import BLOCK
from deltaserve.engine.info import EngineStats, RequestRecord
from deltaserve.server import errors
from deltaserve.server.anthropic import count_tokens, prepare_message
from deltaserve.server.anthropic_input import CountTokensRequest, MessagesRequest
from deltaserve.server.blocks import BlockAnswer, block_events, whole_blocks
from deltaserve.server.chat import prepare_chat, render
from deltaserve.server.completions import prepare_completion
from deltaserve.server.errors import BodyTooLargeError, MediaTypeError
from deltaserve.server.keys import ApiKeys
from deltaserve.server.metrics import CONTENT_TYPE
from deltaserve.server.options import SESSION_HEADERS
from deltaserve.server.responses import prepare_response
from deltaserve.server.responses_input import ResponsesRequest
from deltaserve.server.sampling import check_token_ids
from deltaserve.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse,
)
from deltaserve.server.served import Served
from deltaserve.server.stream import EventStream, unless_disconnected
from deltaserve.server.writer import Answer, encode, events, whole

MAX_BODY_BYTES = 64 << 20
PAGE = Path(__file__).parent / "page"
PAGE_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
BODIES = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
)
NO_ONE_LISTENS = 499

Body = TypeVar("Body", bound=msgspec.Struct)
Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(served: Served) -> FastAPI:
    """All routes of the server."""
    app = FastAPI(title="Deltaserve", version=served.version, redoc_url=None)
    errors.install(app)
    _add_generation(app, served)
    _add_agents(app, served)
    _add_tokens(app, served)
    _add_models(app, served)
    _add_operation(app, served)
    _add_cache(app, served)
    for file in PAGE.iterdir():
        path = "/" if file.name == "index.html" else f"/page/{file.name}"
        app.add_api_route(path, _page(file), methods=["GET", "HEAD"], include_in_schema=False)
    _publish_schemas(app)
    if served.api_keys:
        app.add_middleware(ApiKeys, keys=served.api_keys)
    return app


def _add_generation(app: FastAPI, served: Served) -> None:
    @_post(app, "/v1/chat/completions", ChatRequest)
    async def chat_completions(request: Request) -> Response:
        """An assistant's message for a conversation."""
        body = await _read(request, ChatRequest)
        return await _answer(request, await prepare_chat(served, body), bool(body.stream))

    @_post(app, "/v1/completions", CompletionRequest)
    async def completions(request: Request) -> Response:
        """A continuation of one or several prompts."""
        body = await _read(request, CompletionRequest)
        return await _answer(request, await prepare_completion(served, body), bool(body.stream))


def _add_agents(app: FastAPI, served: Served) -> None:
    @_post(app, "/v1/responses", ResponsesRequest)
    async def responses(request: Request) -> Response:
        """What a model thinks, says and calls next, as OpenAI's items."""
        body = await _read(request, ResponsesRequest)
        return await _answer_in_blocks(request, await prepare_response(served, body), bool(body.stream))

    @_post(app, "/v1/messages", MessagesRequest)
    async def messages(request: Request) -> Response:
        """What a model thinks, says and calls next, as Anthropic's content blocks."""
        body = await _read(request, MessagesRequest)
        return await _answer_in_blocks(request, await prepare_message(served, body), bool(body.stream))

    @_post(app, "/v1/messages/count_tokens", CountTokensRequest)
    async def message_tokens(request: Request) -> Response:
        """How many tokens the prompt of a message has."""
        answer = await count_tokens(served, await _read(request, CountTokensRequest))
        return Response(answer, media_type="application/json")


def _add_tokens(app: FastAPI, served: Served) -> None:
    @_post(app, "/tokenize", TokenizeRequest)
    async def tokenize(request: Request) -> Response:
        """The token ids of a text, or of a rendered conversation."""
        body = await _read(request, TokenizeRequest)
        served.resolve_name(body.model)
        ids = await _token_ids(served, body)
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": served.limits.max_model_len, "tokens": ids}
        answer["token_strs"] = [served.tokenizer.id_to_token(i) for i in ids] if body.return_token_strs else None
        return _json(answer)

    @_post(app, "/detokenize", DetokenizeRequest)
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special ones included."""
        body = await _read(request, DetokenizeRequest)
        served.resolve_name(body.model)
        ids = check_token_ids(body.tokens, served.limits.vocab_size, "tokens")
        return _json({"prompt": served.tokenizer.decode(ids, skip_special_tokens=False)})


def _add_models(app: FastAPI, served: Served) -> None:
    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        """The served model under each of its names."""
        return _json({"object": "list", "data": [_card(served, name) for name in served.names]})

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        """One of them."""
        return _json(_card(served, served.resolve_name(name)))


def _add_operation(app: FastAPI, served: Served) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_model=None)
    async def health() -> Response:
        """200 while the engine lives, else 503."""
        if not served.engine.is_alive:
            raise EngineDeadError("the engine has stopped")
        return Response()

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return _json({"version": served.version})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(served.metrics.exposition(await _stats(served)), media_type=CONTENT_TYPE)

    @app.get("/stats", response_model=None)
    async def stats() -> Response:
        """The engine's figures as JSON, for people and for the page."""
        return _json({"model": served.names[0], "alive": served.engine.is_alive} | _figures(await _stats(served)))


def _add_cache(app: FastAPI, served: Served) -> None:
    @app.post("/reset_prefix_cache", response_model=None)
    async def reset_prefix_cache() -> Response:
        """Forget every cached prefix; running requests keep what they use."""
        await served.engine.reset_prefix_cache()
        return _json({"message": "the prefix cache is empty"})

    @app.get("/debug/requests", response_model=None)
    async def requests() -> Response:
        """How the latest requests met the prefix cache, oldest first."""
        return _json({"requests": [_record(record) for record in await served.engine.records()]})


def _post(app: FastAPI, path: str, kind: type[msgspec.Struct]) -> Callable[[Endpoint], Endpoint]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return app.post(path, response_model=None, openapi_extra={"requestBody": body})


async def _read(request: Request, kind: type[Body]) -> Body:
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise MediaTypeError(f"the content type must be application/json, not {media_type}")
    parts, size_bytes = [], 0
    async for part in request.stream():
        parts.append(part)
        size_bytes += len(part)
        if size_bytes > MAX_BODY_BYTES:
            raise BodyTooLargeError(f"the body exceeds {MAX_BODY_BYTES} bytes")
    body = parse(kind, b"".join(parts))
    if isinstance(body, GenerationRequest) and body.session_id is None:
        body.session_id = next(filter(None, map(request.headers.get, SESSION_HEADERS)), None)
    return body


async def _answer(request: Request, answer: Answer, is_stream: bool) -> Response:
    if is_stream:
        return EventStream(events(answer))
    return await _whole(request, whole(answer))


async def _answer_in_blocks(request: Request, answer: BlockAnswer, is_stream: bool) -> Response:
    if is_stream:
        return EventStream(block_events(answer), answer.form)
    return await _whole(request, whole_blocks(answer))


async def _whole(request: Request, work: Coroutine[Any, Any, bytes]) -> Response:
    body = await unless_disconnected(request.receive, work)
    return Response(status_code=NO_ONE_LISTENS) if body is None else Response(body, media_type="application/json")


async def _token_ids(served: Served, body: TokenizeRequest) -> tuple[int, ...]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if body.prompt is None:
        return (await render(served, body)).ids
    return await served.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)


async def _stats(served: Served) -> EngineStats | None:
    try:
        return await served.engine.stats()
    except EngineDeadError:
        return None


def _figures(stats: EngineStats | None) -> dict[str, Any]:
    return {} if stats is None else asdict(stats)


def _record(record: RequestRecord) -> dict[str, Any]:
    met = record.cache
    return {
        "id": record.request_id,
        "prompt_tokens": met.num_prompt,
        "cached_tokens": met.num_cached,
        "matched_tokens": met.num_matched,
        "restored_tokens": met.num_restored,
        "note": met.note,
    }


def _card(served: Served, name: str) -> dict[str, Any]:
    synthetic = served.synthetic_acceptance
    return {
        "id": name,
        "object": "model",
        "created": served.created_s,
        "owned_by": "deltaserve",
        "root": served.root,
        "parent": None,
        "max_model_len": served.limits.max_model_len,
        "block_size": BLOCK,  # prefixes are hashed and resumed in units of so many tokens
    } | ({} if synthetic is None else {"synthetic_acceptance_length": synthetic})


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")


def _page(file: Path) -> Callable[[], Awaitable[Response]]:
    content = file.read_bytes()

    async def page() -> Response:
        return Response(content, media_type=PAGE_TYPES[file.suffix], headers=PAGE_HEADERS)

    return page


def _publish_schemas(app: FastAPI) -> None:
    """Put the structs into /openapi.json, where the routes refer to them."""
    _, components = msgspec.json.schema_components(BODIES, ref_template="#/components/schemas/{name}")
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        document.setdefault("components", {}).setdefault("schemas", {}).update(components)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
