// A response while it is streamed. Does not use the DOM.

/** The response so far, with timestamps. Times are milliseconds of a monotonic clock. */
export class Reply {
  content = "";
  reasoning = "";
  toolCalls = [];
  /** Tokens of a diffusion model's running block, null for undecided ones; null outside a block. */
  draft = null;
  finishReason = null;
  usage = null;
  firstAt = null;
  endedAt = null;

  constructor(startedAt) {
    this.startedAt = startedAt;
  }

  /** Processes one event of the stream. */
  take(event, now) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    const shows = delta.content || delta.reasoning || delta.tool_calls || choice.draft;
    if (shows && this.firstAt === null) this.firstAt = now;
    if (choice.draft) this.draft = choice.draft;
    if (delta.content) {
      this.content += delta.content;
      this.draft = null;
    }
    if (delta.reasoning) this.reasoning += delta.reasoning;
    for (const part of delta.tool_calls ?? []) this.#takeCall(part);
    if (choice.finish_reason) {
      this.finishReason = choice.finish_reason;
      this.draft = null;
    }
  }

  /** Marks the stream as ended or stopped. */
  end(now) {
    this.endedAt = now;
    this.draft = null;
  }

  /** The message to add to the chat; calls of a stopped response are dropped. */
  message() {
    if (this.finishReason === null || this.toolCalls.length === 0) {
      return { role: "assistant", content: this.content };
    }
    return { role: "assistant", content: this.content || null, tool_calls: this.toolCalls };
  }

  /** Token counts and times as one line; unknown ones are omitted. */
  figures() {
    const parts = [];
    const usage = this.usage;
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens;
      parts.push(`${usage.prompt_tokens} prompt tokens${cached ? ` (${cached} cached)` : ""}`);
      parts.push(`${usage.completion_tokens} tokens`);
      const thoughts = usage.completion_tokens_details?.reasoning_tokens;
      if (thoughts) parts.push(`${thoughts} reasoning tokens`);
    }
    if (this.firstAt !== null) {
      parts.push(`first token after ${Math.round(this.firstAt - this.startedAt)} ms`);
      const seconds = ((this.endedAt ?? this.firstAt) - this.firstAt) / 1000;
      // Calls do not arrive token by token, so the speed of their tokens is unknown.
      const isPaced = seconds > 0 && this.toolCalls.length === 0;
      if (usage && usage.completion_tokens > 1 && isPaced) {
        parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
      }
    }
    if (usage?.diffusion) {
      const { rounds, num_forwards: forwards } = usage.diffusion;
      if (rounds !== undefined) parts.push(`${rounds} rounds`);
      if (forwards !== undefined) parts.push(`${forwards} forward passes`);
    }
    if (this.finishReason && this.finishReason !== "stop") parts.push(this.finishReason);
    return parts.join(" · ");
  }

  #takeCall(part) {
    const call = (this.toolCalls[part.index ?? 0] ??= {
      id: "",
      type: "function",
      function: { name: "", arguments: "" },
    });
    if (part.id) call.id = part.id;
    if (part.function?.name) call.function.name += part.function.name;
    if (part.function?.arguments) call.function.arguments += part.function.arguments;
  }
}
