// A chat request and the stream of events that answers it.

import { KeyError, request } from "/page/request.js";

// Yields the objects of a body of server-sent events.
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// Yields chunks; throws an Error with the server's sentence, also for a failure in the middle.
export async function* ask(body, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  }).catch((error) => {
    if (error.name === "AbortError" || error instanceof KeyError) throw error;
    throw new Error("the server does not answer");
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  for await (const event of readEvents(response.body)) {
    if (event.error) throw new Error(event.error.message);
    yield event;
  }
}
