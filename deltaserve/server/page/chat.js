// The chat page: one conversation, its settings and its keys.

import { AnswerView, make } from "/page/answer.js";
import { watchEngine } from "/page/engine.js";
import { KeyError } from "/page/request.js";
import { ask } from "/page/stream.js";

const ENDINGS = { length: "cut at the token limit", abort: "aborted by the server" };
const find = (id) => document.getElementById(id);
const [log, input, composer, send, settings] = ["log", "input", "composer", "send", "settings"].map(find);

let messages = [];
let running = null; // AbortController of the answer being written

function requestBody() {
  const values = Object.fromEntries(new FormData(settings));
  const system = values.system.trim() ? [{ role: "system", content: values.system }] : [];
  const body = { messages: [...system, ...messages] };
  for (const name of ["temperature", "max_tokens", "seed"]) if (values[name] !== "") body[name] = Number(values[name]);
  if (values.thinking) body.chat_template_kwargs = { enable_thinking: values.thinking === "on" };
  return body;
}

async function answer() {
  const conversation = messages;
  const view = new AnswerView(log);
  running = new AbortController();
  send.textContent = "Stop";
  try {
    await follow(view, running.signal);
  } catch (error) {
    if (error.name === "AbortError") view.finish(null, "stopped");
    else view.fail(error);
    if (error instanceof KeyError) askForKey();
  }
  keep(view, conversation);
  running = null;
  send.textContent = "Send";
}

async function follow(view, signal) {
  let usage = null;
  let ending = "";
  for await (const chunk of ask(requestBody(), signal)) {
    usage = chunk.usage ?? usage;
    for (const choice of chunk.choices) {
      view.add(choice.delta);
      ending = ENDINGS[choice.finish_reason] ?? ending;
    }
  }
  view.finish(usage, ending);
}

// What was answered belongs to the conversation; a message without any answer goes back into the input.
function keep(view, conversation) {
  if (view.content || view.reasoning) {
    const thought = view.reasoning ? { reasoning_content: view.reasoning } : {};
    conversation.push({ role: "assistant", content: view.content, ...thought });
  } else {
    const { content } = conversation.pop();
    if (!input.value && conversation === messages) setInput(content);
  }
}

function setInput(text) {
  input.value = text;
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

function submit() {
  const content = input.value.trim();
  if (!content || running) return;
  messages.push({ role: "user", content });
  log.append(make("article", "user", content));
  setInput("");
  answer();
}

function newChat() {
  running?.abort();
  messages = [];
  log.replaceChildren();
  input.focus();
}

function toggleSettings() {
  settings.hidden = !settings.hidden;
  find("settings-button").setAttribute("aria-expanded", String(!settings.hidden));
  (settings.hidden ? input : settings.elements[0]).focus();
}

function askForKey() {
  if (settings.hidden) toggleSettings();
  settings.elements.api_key.focus();
}

function toggleTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const theme = (document.documentElement.dataset.theme ?? system) === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = localStorage.theme = theme;
}

function restore() {
  if (localStorage.theme) document.documentElement.dataset.theme = localStorage.theme;
  for (const [name, value] of Object.entries(JSON.parse(localStorage.settings ?? "{}")))
    if (settings.elements[name]) settings.elements[name].value = value;
}

composer.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) running.abort();
  else submit();
});
input.addEventListener("input", () => setInput(input.value));
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => {
  const shortcut = event.altKey && { KeyN: newChat, KeyS: toggleSettings }[event.code];
  if (event.key === "Escape") running?.abort();
  if (shortcut) {
    event.preventDefault();
    shortcut();
  }
});
settings.addEventListener("submit", (event) => event.preventDefault());
settings.addEventListener("change", () => {
  localStorage.settings = JSON.stringify(Object.fromEntries(new FormData(settings)));
});
find("new").addEventListener("click", newChat);
find("settings-button").addEventListener("click", toggleSettings);
find("theme").addEventListener("click", toggleTheme);

restore();
watchEngine(find("engine"), find("model"));
