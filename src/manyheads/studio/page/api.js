// Questions to the studio. A newer question of the same kind takes the place of an older one.

export class Trouble extends Error {}

export class Api {
  #running = new Map();

  async models() {
    return answer(await fetch("api/models"));
  }

  // `kind` names the question for which only the last answer counts; null lets all be answered.
  async ask(name, body, kind = name) {
    const control = this.#begin(kind);
    try {
      return await answer(await send(name, body, control.signal));
    } finally {
      this.#end(kind, control);
    }
  }

  // Calls `each` with every line as it comes.
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
          const told = JSON.parse(line);
          if (told.error) throw new Trouble(told.error);
          each(told);
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
  let told = null;
  try {
    told = await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("The studio gave no answer: is it still running in its terminal?");
  }
  if (!response.ok) throw new Trouble(told.error ?? `The studio said ${response.status}.`);
  return told;
}

// Whether an error only says that nobody waits any more.
export function dropped(error) {
  return error.name === "AbortError";
}

export function sentence(error) {
  return error instanceof Trouble ? error.message : "The studio cannot be reached: is it still running?";
}
