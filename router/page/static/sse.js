// Server-sent events. Does not use the DOM.

/** Splits a text stream into the JSON data of its events. */
export class EventSplitter {
  #rest = "";

  /** Data of the events completed by `text`, oldest first; null stands for [DONE]. */
  feed(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop();
    const bodies = [];
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice("data:".length).trim();
      bodies.push(data === "[DONE]" ? null : JSON.parse(data));
    }
    return bodies;
  }
}
