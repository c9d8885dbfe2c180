// Server-sent events. No DOM in here.

/** Cuts a stream of text into the JSON bodies of its events. */
export class EventSplitter {
  #rest = "";

  /** Bodies that `text` completes, oldest first; null stands for [DONE]. */
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
