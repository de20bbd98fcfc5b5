// One answer as it grows: thinking folded away, text as Markdown, figures below. Draws at most once a frame.

import { markdown } from "/page/markdown.js";

export function make(name, className = "", text = "") {
  const node = document.createElement(name);
  node.className = className;
  node.textContent = text;
  return node;
}

export function seconds(ms) {
  return `${(ms / 1000).toFixed(1)} s`;
}

export class AnswerView {
  constructor(log) {
    this.log = log;
    this.reasoning = "";
    this.content = "";
    this.startedMs = performance.now();
    this.node = log.appendChild(make("article", "assistant waiting"));
    this.text = this.node.appendChild(make("div", "text"));
    this.note = this.node.appendChild(make("div", "note"));
    log.scrollTop = log.scrollHeight;
  }

  add(delta) {
    this.firstMs ??= performance.now();
    this.reasoning += delta.reasoning_content ?? "";
    this.content += delta.content ?? "";
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = null;
    const follows = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    if (this.reasoning) this.drawThinking();
    this.text.replaceChildren(...markdown(this.content));
    if (follows) this.log.scrollTop = this.log.scrollHeight;
  }

  drawThinking() {
    if (!this.details) {
      this.details = make("details");
      this.summary = this.details.appendChild(make("summary", "", "Thinking…"));
      this.thinking = this.details.appendChild(make("div", "thinking"));
      this.node.insertBefore(this.details, this.text);
    }
    this.thinking.textContent = this.reasoning;
    if (this.content) this.endThinking();
  }

  endThinking() {
    this.thoughtMs ??= performance.now() - this.startedMs;
    this.summary.textContent = `Thought for ${seconds(this.thoughtMs)}`;
  }

  finish(usage, ending) {
    this.draw();
    if (this.details) this.endThinking();
    this.node.classList.remove("waiting");
    this.note.textContent = [...this.figures(usage), ending].filter(Boolean).join(", ");
  }

  figures(usage) {
    if (!usage || this.firstMs === undefined) return [];
    const { completion_tokens: count, prompt_tokens: prompt } = usage;
    const cached = usage.prompt_tokens_details?.cached_tokens;
    const rate = (count - 1) / Math.max((performance.now() - this.firstMs) / 1000, 0.001);
    const first = seconds(this.firstMs - this.startedMs);
    const known = cached ? ` (${cached} cached)` : "";
    return [`${prompt}${known} + ${count} tokens`, `first after ${first}`, `${rate.toFixed(1)} tokens/s`];
  }

  fail(error) {
    this.finish(null, error.message);
    this.note.classList.add("error");
    this.note.setAttribute("role", "alert");
  }
}
