"""From a request's fields to RequestOptions: what it asks of scheduler and cache. None of it changes a token.

| field         | meaning                                                                                            |
| ------------- | -------------------------------------------------------------------------------------------------- |
| `priority`    | lower goes first; equal ones in order of arrival (vLLM's)                                          |
| `cache_salt`  | prefixes are shared only with requests of the same salt; not empty (vLLM's)                        |
| `session_id`  | the turns of one conversation, which keep their states longest; the header `x-session-id` says the |
|               | same, and the field wins                                                                           |
| `speculative` | false: no drafts for this request, where the server drafts at all                                  |
"""

from __future__ import annotations

from deltaserve.core.errors import RequestError
from deltaserve.core.types import RequestOptions
from deltaserve.engine.admission import check_options
from deltaserve.server.schema import GenerationRequest

# Ours, that of routers in front of several servers, and that of an agent; the first that is there counts.
SESSION_HEADERS = ("x-session-id", "x-dynamo-session-id", "x-claude-code-session-id")


def request_options(request: GenerationRequest) -> RequestOptions:
    """Raises RequestError naming the field."""
    if request.cache_salt == "":
        raise RequestError("cache_salt must not be empty; leave it out", "cache_salt")
    return check_options(
        RequestOptions(
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            session_id=request.session_id,
            use_drafts=request.speculative is not False,
        )
    )
