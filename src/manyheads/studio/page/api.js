// Requests to the studio, and their errors. A newer request of the same kind aborts the older one.

import { h } from "./dom.js";
import { say, translateFilled } from "./language.js";

export class ApiError extends Error {}

export class Api {
  #running = new Map();

  async models() {
    return answer(await fetch("api/models"));
  }

  async kindsProgress() {
    return answer(await fetch("api/kinds_progress"));
  }

  // Only the last request of a `kind` is answered; null is no kind.
  async ask(name, body, kind = name) {
    const control = this.#begin(kind);
    try {
      return await answer(await send(name, body, control.signal));
    } finally {
      this.#end(kind, control);
    }
  }

  // Calls `each` with every line as it arrives.
  async stream(name, body, each) {
    const control = this.#begin(name);
    try {
      const response = await send(name, body, control.signal);
      if (!response.ok) await answer(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) {
          const value = JSON.parse(line);
          if (value.error) throw new ApiError(translateFilled(value.error));
          each(value);
        }
      }
    } finally {
      this.#end(name, control);
    }
  }

  stop(kind) {
    this.#running.get(kind)?.abort();
  }

  stopAll() {
    for (const control of this.#running.values()) control.abort();
  }

  #begin(kind) {
    const control = new AbortController();
    if (kind !== null) {
      this.stop(kind);
      this.#running.set(kind, control);
    }
    return control;
  }

  #end(kind, control) {
    if (this.#running.get(kind) === control) this.#running.delete(kind);
  }
}

function send(name, body, signal) {
  const headers = { "content-type": "application/json" };
  return fetch(`api/${name}`, { method: "POST", headers, body: JSON.stringify(body), signal });
}

async function answer(response) {
  let value = null;
  try {
    value = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(say`The studio did not answer: is it still running?`);
  }
  if (!response.ok) throw new ApiError(value.error ? translateFilled(value.error) : say`The studio answered with status ${response.status}.`);
  return value;
}

// Whether an error only means that the request was aborted.
export function wasAborted(error) {
  return error.name === "AbortError";
}

export function errorMessage(error) {
  return error instanceof ApiError ? error.message : say`The studio cannot be reached: is it still running?`;
}

let fading = 0;

export function showError(sentence) {
  const place = document.getElementById("error");
  const close = h("button", { type: "button", class: "plain", on: { click: () => (place.hidden = true) } }, say`Close`);
  place.replaceChildren(h("span", {}, sentence), close);
  place.hidden = false;
  clearTimeout(fading);
  fading = setTimeout(() => (place.hidden = true), 12000);
}
