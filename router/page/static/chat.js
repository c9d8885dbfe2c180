// The playground: one chat, or two side by side with different settings.

import { ApiError } from "./api.js";
import { byId, element, notify } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { Reply } from "./reply.js";
import { bodyOf, FieldError } from "./request.js";
import { explanationOf } from "./routing.js";

const NEAR_END_PX = 60;

/** The columns and the message input. */
export class ChatView {
  #api;
  #columns = [];
  #models = [];
  #onRequest;

  /**
   * @param api client of the endpoint.
   * @param onRequest is called for each completed request with its reply and routing decision.
   */
  constructor(api, onRequest) {
    this.#api = api;
    this.#onRequest = onRequest;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("message").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    for (const example of byId("examples").children) {
      example.addEventListener("click", () => {
        byId("message").value = example.textContent;
        byId("message").focus();
        this.#send();
      });
    }
    byId("stop").addEventListener("click", () => this.stop());
    byId("new-chat").addEventListener("click", () => {
      this.stop();
      for (const column of this.#columns) column.clear();
      this.#update();
      byId("message").focus();
    });
    byId("two").addEventListener("change", (event) => this.#setCount(event.target.checked ? 2 : 1));
    this.#setCount(1);
  }

  /** Sets the selectable models, as returned by /v1/models. */
  offer(models) {
    this.#models = models;
    for (const column of this.#columns) column.offer(models);
  }

  /** Stops running responses; their text so far is kept. */
  stop() {
    for (const column of this.#columns) column.stop();
  }

  #setCount(count) {
    while (this.#columns.length > count) {
      const column = this.#columns.pop();
      column.stop();
      column.root.remove();
    }
    while (this.#columns.length < count) {
      const column = new Column(this.#columns.length + 1, this.#api, this.#onRequest, () =>
        this.#update(),
      );
      column.offer(this.#models);
      if (this.#columns.length > 0) column.copySettings(this.#columns[0]);
      this.#columns.push(column);
      byId("columns").append(column.root);
    }
    this.#update();
  }

  #send() {
    const text = byId("message").value.trim();
    if (!text || this.#columns.some((column) => column.isBusy)) return;
    notify("");
    try {
      for (const column of this.#columns) column.check();
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      notify(error.message);
      return;
    }
    byId("message").value = "";
    for (const column of this.#columns) column.submit({ role: "user", content: text });
  }

  #update() {
    const busy = this.#columns.some((column) => column.isBusy);
    byId("send").disabled = busy;
    byId("stop").disabled = !busy;
    byId("examples").hidden = busy || this.#columns.some((column) => !column.isEmpty);
  }
}

/** One chat with its settings. */
class Column {
  #api;
  #onRequest;
  #onChange;
  #messages = [];
  #models = [];
  #abort = null;

  constructor(number, api, onRequest, onChange) {
    this.#api = api;
    this.#onRequest = onRequest;
    this.#onChange = onChange;
    this.root = byId("column").content.firstElementChild.cloneNode(true);
    this.root.setAttribute("aria-label", `Chat ${number}`);
    this.log = this.root.querySelector(".messages");
    this.log.setAttribute("aria-label", `Messages of chat ${number}`);
  }

  get isEmpty() {
    return this.log.childElementCount === 0;
  }

  get isBusy() {
    return this.#abort !== null;
  }

  offer(models) {
    this.#models = models;
    const select = this.#field("model");
    const chosen = select.value;
    select.replaceChildren(...models.map(({ id }) => element("option", { value: id }, id)));
    if (models.some(({ id }) => id === chosen)) select.value = chosen;
  }

  copySettings(other) {
    for (const [name, value] of Object.entries(other.#fields())) this.#field(name).value = value;
  }

  /** Throws a FieldError if a setting is invalid. */
  check() {
    bodyOf(this.#fields(), []);
  }

  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.#messages = [];
    this.log.replaceChildren();
  }

  /** Adds messages to the chat and sends it; failed messages are removed from the chat. */
  async submit(...added) {
    const abort = new AbortController();
    this.#abort = abort;
    this.#onChange();
    const messages = [...this.#messages, ...added];
    this.#messages = messages;
    const views = added.map(messageOf);
    const reply = new Reply(performance.now());
    const view = new ReplyView(reply, !this.#fields().schema.trim());
    this.log.append(...views, view.root);
    this.#showEnd();
    let headers = new Headers();
    let failed = false;
    try {
      await this.#api.stream("v1/chat/completions", this.#bodyOf(messages), {
        signal: abort.signal,
        begun: (answered) => (headers = answered),
        take: (event) => {
          reply.take(event, performance.now());
          this.#following(() => view.update());
        },
      });
    } catch (error) {
      if (error.name === "AbortError") view.note("stopped");
      else {
        failed = true;
        this.#failed(error, view, views, messages, added.length);
      }
    } finally {
      reply.end(performance.now());
      this.#following(() => view.update());
      view.root.ariaBusy = "false";
      this.#abort = null;
      this.#onChange();
    }
    if (failed || reply.firstAt === null) return;
    if (this.#messages === messages) this.#messages = [...messages, reply.message()];
    if (reply.message().tool_calls) this.#offerResults(view, reply);
    this.#onRequest(this.#fields().model, reply, explanationOf(headers));
  }

  #failed(error, view, views, messages, count) {
    if (!(error instanceof ApiError) && !(error instanceof FieldError)) throw error;
    view.fail(error.message);
    for (const sent of views) sent.classList.add("unsent");
    if (this.#messages === messages) this.#messages = messages.slice(0, messages.length - count);
  }

  #bodyOf(messages) {
    const fields = this.#fields();
    const model = this.#models.find(({ id }) => id === fields.model);
    return bodyOf(fields, messages, (model?.diffusion_block_size ?? 0) > 1);
  }

  /** Scrolls to the newest message, and closes the settings to make room for it. */
  #showEnd() {
    this.root.querySelector(".settings").open = false;
    this.log.scrollTop = this.log.scrollHeight;
  }

  #offerResults(view, reply) {
    const results = new Map();
    for (const call of reply.toolCalls) {
      view.askForResult(call, (content) => {
        results.set(call.id, { role: "tool", tool_call_id: call.id, content });
        if (results.size === reply.toolCalls.length) this.submit(...results.values());
      });
    }
  }

  /** Applies a change, and keeps the log scrolled to the end if it was there. */
  #following(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    const wasAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    change();
    if (wasAtEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  #field(name) {
    return this.root.querySelector(`[name="${name}"]`);
  }

  #fields() {
    const named = this.root.querySelectorAll(".settings [name]");
    return Object.fromEntries([...named].map((field) => [field.name, field.value]));
  }
}

function messageOf(message) {
  const title = message.role === "tool" ? "Result" : "You";
  return element(
    "div",
    { className: `message ${message.role}` },
    element("span", { className: "role" }, title),
    element("div", { className: "body" }, message.content),
  );
}

/** A response while it is streamed. */
class ReplyView {
  #reply;
  #isMarkdown;

  /**
   * @param reply the reply to show.
   * @param isMarkdown whether its text is Markdown; structured JSON is shown unchanged.
   */
  constructor(reply, isMarkdown) {
    this.#reply = reply;
    this.#isMarkdown = isMarkdown;
    this.thought = element("div", { className: "thought", hidden: true });
    this.body = element("div", { className: "body" }, element("p", {}, "…"));
    this.calls = element("div");
    this.figures = element("div", { className: "figures" });
    this.root = element(
      "div",
      { className: "message assistant" },
      element("span", { className: "role" }, "Model"),
      this.thought,
      this.body,
      this.calls,
      this.figures,
    );
    this.root.ariaBusy = "true"; // screen readers wait until it is complete
  }

  update() {
    const reply = this.#reply;
    this.thought.hidden = !reply.reasoning;
    this.thought.textContent = reply.reasoning;
    if (reply.firstAt !== null || reply.endedAt !== null) {
      this.#showContent();
    }
    this.calls.replaceChildren(...reply.toolCalls.map(callOf));
    this.figures.textContent = [reply.figures(), this.noted].filter(Boolean).join(" · ");
  }

  #showContent() {
    const { content, draft } = this.#reply;
    // A draft is the end of a text that may still change, so it is shown inline.
    if (this.#isMarkdown && draft === null) showMarkdown(this.body, content);
    else this.body.replaceChildren(element("p", {}, content, ...draftOf(draft)));
  }

  note(text) {
    this.noted = text;
  }

  fail(message) {
    this.root.append(element("div", { className: "error" }, message));
  }

  askForResult(call, take) {
    const input = element("input", { ariaLabel: `Result of ${call.function.name}` });
    const form = element("form", {}, input, element("button", { type: "submit" }, "Submit result"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.remove();
      take(input.value);
    });
    this.calls.children[this.#reply.toolCalls.indexOf(call)].append(form);
  }
}

function callOf(call) {
  const { name, arguments: given } = call.function;
  return element("div", { className: "call" }, element("code", {}, `${name}(${given})`));
}

/** The running block of a diffusion model, with a placeholder for each undecided token. */
function draftOf(draft) {
  if (draft === null) return [];
  const places = draft.map((text) =>
    element("span", { className: text === null ? "open" : "decided" }, text ?? "·"),
  );
  return [element("span", { className: "draft" }, ...places)];
}
