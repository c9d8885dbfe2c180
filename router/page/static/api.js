// Client of this endpoint. Uses no DOM except the page's address.

import { EventSplitter } from "./sse.js";

/** The endpoint returned an error or is unreachable; the message is for the user. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** An endpoint, and the API key for it. */
export class Api {
  key = "";
  #askForKey;

  /** @param askForKey resolves to a key entered by the user, or to null. */
  constructor(askForKey) {
    this.#askForKey = askForKey;
  }

  /** The JSON at a path. */
  async json(path) {
    return (await this.#open(path)).json();
  }

  /** The text at a path. */
  async text(path) {
    return (await this.#open(path)).text();
  }

  /**
   * Streams a response.
   *
   * @param begun is called with the response's headers, once.
   * @param take is called with each event.
   * @param signal aborts the stream.
   */
  async stream(path, body, { begun, take, signal }) {
    const answer = await this.#open(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    begun(answer.headers);
    const events = new EventSplitter();
    for await (const text of textsOf(answer.body)) {
      for (const event of events.feed(text)) {
        if (event === null) return;
        if (event.error) throw new ApiError(event.error.message);
        take(event);
      }
    }
    throw new ApiError("the connection was closed before the end of the response");
  }

  async #open(path, options = {}) {
    const used = this.key;
    const headers = { ...options.headers };
    if (used) headers.authorization = `Bearer ${used}`;
    let answer;
    try {
      answer = await fetch(new URL(path, document.baseURI), { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("the endpoint is unreachable");
    }
    if (answer.ok) return answer;
    if (answer.status === 401) {
      // Another request may have obtained the key in the meantime.
      const key = this.key === used ? await this.#askForKey() : this.key;
      if (key) {
        this.key = key;
        return this.#open(path, options);
      }
    }
    throw new ApiError(await messageOf(answer), answer.status);
  }
}

async function* textsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {}); // aborted streams are already cancelled
  }
}

async function messageOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the endpoint responded with ${answer.status} ${answer.statusText}`;
  }
}
