// A line of engine figures, from /stats every two seconds while the page is in sight.

import { KeyError, request } from "/page/request.js";

const EVERY_MS = 2000;
let last = null; // output tokens and time at the last look

function percent(share) {
  return `${(100 * share).toFixed(0)} %`;
}

function figures(stats, nowMs) {
  const used = stats.num_pages ? 1 - stats.num_available_pages / stats.num_pages : 0;
  const hits = stats.cache.num_looked_up ? stats.cache.num_hit / stats.cache.num_looked_up : 0;
  const rate = last ? (stats.num_output_tokens - last.tokens) / ((nowMs - last.ms) / 1000) : 0;
  last = { tokens: stats.num_output_tokens, ms: nowMs };
  const waiting = stats.num_waiting ? `, ${stats.num_waiting} waiting` : "";
  const running = `${stats.num_running} running${waiting} · ${rate.toFixed(0)} tokens/s`;
  return `${running} · memory ${percent(used)} · cached ${percent(hits)} of prompts`;
}

async function look(line, model) {
  try {
    const stats = await (await request("/stats")).json();
    model.textContent = stats.model;
    line.classList.toggle("dead", !stats.alive);
    line.textContent = stats.alive ? figures(stats, performance.now()) : "the engine has stopped";
  } catch (error) {
    line.classList.add("dead");
    line.textContent = error instanceof KeyError ? error.message : "the server does not answer";
  }
}

export async function watchEngine(line, model) {
  if (!document.hidden) await look(line, model);
  setTimeout(() => watchEngine(line, model), EVERY_MS);
}
