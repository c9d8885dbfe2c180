// The fleet view: a tile per model and worker, and the routing of this page's requests.

import { ApiError } from "./api.js";
import { byId, element, notify } from "./dom.js";
import { Fleet, HISTORY } from "./metrics.js";
import { Plot } from "./plot.js";
import { reasonOf } from "./routing.js";

const EVERY_MS = 1000;
const MAX_DOTS = 48;
const MAX_REQUESTS = 50;

/** Polls /metrics while it is shown. */
export class FleetView {
  #api;
  #fleet = new Fleet();
  #tiles = { models: new Map(), workers: new Map() };
  #timer = 0;
  #shown = false;
  /** Key that may not list sessions; null if unknown. */
  #forbidden = null;

  constructor(api) {
    this.#api = api;
    document.addEventListener("visibilitychange", () => this.#schedule(0));
  }

  /** Starts or stops polling. */
  show(shown) {
    this.#shown = shown;
    this.#schedule(0);
  }

  /** Adds a completed request of this page. */
  addRequest(model, reply, explanation) {
    const usage = reply.usage;
    const cached = usage?.prompt_tokens_details?.cached_tokens ?? null;
    const first = Math.round(reply.firstAt - reply.startedAt);
    const cells = [
      explanation.requestId,
      model,
      explanation.worker,
      usage ? `${cached ?? 0} of ${usage.prompt_tokens}` : "–",
      `${first} ms`,
      reasonOf({ ...explanation, cached }),
    ];
    const row = element("tr", {}, ...cells.map((text) => element("td", {}, text)));
    const table = byId("requests");
    table.prepend(row);
    if (table.children.length > MAX_REQUESTS) table.lastElementChild.remove();
  }

  #schedule(delay) {
    clearTimeout(this.#timer);
    if (this.#shown && !document.hidden) {
      this.#timer = setTimeout(() => this.#look(), delay);
    }
  }

  async #look() {
    try {
      const text = await this.#api.text("metrics");
      this.#fleet.take(text, performance.now() / 1000);
      this.#update("models", this.#fleet.models, ModelTile);
      this.#update("workers", this.#fleet.workers, WorkerTile);
      showAdapters(this.#fleet.adapters);
      showSessions(await this.#sessions());
      notify("");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (this.#shown) notify(`Cannot read metrics: ${error.message}`);
    } finally {
      this.#schedule(EVERY_MS);
    }
  }

  /** Agent sessions; none if the key may not list them. */
  async #sessions() {
    const none = { models: [], data: [] };
    if (this.#forbidden === this.#api.key) return none;
    try {
      return await this.#api.json("sessions");
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 403) throw error;
      this.#forbidden = this.#api.key;
      return none;
    }
  }

  #update(kind, all, Tile) {
    const tiles = this.#tiles[kind];
    const names = new Set(all.map(({ name }) => name));
    for (const [name, tile] of tiles) {
      if (names.has(name)) continue;
      tile.root.remove();
      tiles.delete(name);
    }
    all.forEach((item, index) => {
      if (!tiles.has(item.name)) {
        const tile = new Tile(item);
        tiles.set(item.name, tile);
        byId(kind).insertBefore(tile.root, byId(kind).children[index] ?? null);
      }
      tiles.get(item.name).show(item);
    });
  }
}

class ModelTile {
  constructor({ name }) {
    this.facts = element("dl");
    this.rates = new Plot("Tokens/s", (value) => value.toFixed(0), HISTORY);
    this.waits = new Plot("Time to first token, ms", (value) => value.toFixed(0), HISTORY);
    const head = element("h3", {}, name);
    this.root = element("article", { className: "tile" }, head, this.facts);
    this.root.append(this.rates.root, this.waits.root);
  }

  show(model) {
    fill(this.facts, [
      ["Workers", `${model.workersReady} of ${model.workersWanted}`],
      ["Pending", model.pending],
      ["Prompt tokens cached", percent(model.hitRate)],
      ["SLO met", percent(model.sloMet)],
    ]);
    this.rates.show(model.rates);
    this.waits.show(model.waits);
  }
}

class WorkerTile {
  constructor({ id, model }) {
    this.pages = bar("used", "kept", "free");
    this.host = bar("host", "free");
    this.host.root.classList.add("small");
    this.dots = element("div", { className: "dots", ariaHidden: "true" });
    this.facts = element("dl");
    this.rates = new Plot("Tokens/s", (value) => value.toFixed(0), HISTORY);
    this.state = element("span", { className: "state" });
    this.root = element(
      "article",
      { className: "tile" },
      element("h3", {}, `${id} `, this.state),
      element("div", { className: "caption" }, model),
      this.pages.root,
      this.host.root,
      this.dots,
      this.facts,
      this.rates.root,
    );
  }

  show(worker) {
    const { used, kept, host, running, waiting, adapters, adapterSlots } = worker;
    this.root.dataset.used = used.toFixed(4);
    this.state.textContent = worker.ready ? "" : "loading";
    this.pages.show([used, kept, Math.max(1 - used - kept, 0)]);
    this.host.root.hidden = host === null;
    this.host.show([host ?? 0, 1 - (host ?? 0)]);
    this.dots.replaceChildren(...dotsOf(running, "running"), ...dotsOf(waiting, "waiting"));
    fill(this.facts, [
      ["Running, waiting", `${running}, ${waiting}`],
      ["KV cache used, cached", `${percent(used)}, ${percent(kept)}`],
      ...(host === null ? [] : [["Host memory", percent(host)]]),
      ...(adapterSlots > 0 ? [["LoRA slots used", `${adapters} of ${adapterSlots}`]] : []),
      ["Prompt tokens cached", percent(worker.hitRate)],
      ["Time to first token", worker.ttftMs === null ? "–" : `${worker.ttftMs.toFixed(0)} ms`],
      ["Requests sent", worker.routed],
      ["Preemptions", worker.preemptions],
    ]);
    this.rates.show(worker.rates);
  }
}

/** Shows which workers have which LoRA adapters, if any has one. */
function showAdapters(adapters) {
  byId("lora").hidden = adapters.length === 0;
  byId("adapters").replaceChildren(
    ...adapters.map(({ adapter, model, device, host }) => {
      const cells = [adapter, model, device.join(", ") || "–", host.join(", ") || "–"];
      return element("tr", {}, ...cells.map((text) => element("td", {}, text)));
    }),
  );
}

/** Shows agent sessions if a model makes them wait. */
function showSessions({ models, data }) {
  byId("agents").hidden = models.length === 0;
  byId("sessions-summary").textContent = models.map(summaryOf).join(" ");
  byId("sessions").replaceChildren(
    ...data.map((session) => {
      const cells = [
        session.session,
        session.model,
        session.state + (session.state === "running" ? "" : ` ${session.state_s.toFixed(0)} s`),
        session.worker || "–",
        session.tokens,
        session.turns,
        `${session.age_s.toFixed(0)} s`,
      ];
      return element("tr", {}, ...cells.map((text) => element("td", {}, String(text))));
    }),
  );
}

function summaryOf({ id, waiting, live, live_tokens: used, cache_tokens: all }) {
  const share = all > 0 ? used / all : null;
  const counts = `${waiting} waiting, ${live} live`;
  return `${id}: ${counts}; contexts of live sessions fill ${percent(share)} of the KV cache.`;
}

function bar(...kinds) {
  const parts = kinds.map((kind) => element("div", { className: kind }));
  return {
    root: element("div", { className: "bar", ariaHidden: "true" }, ...parts),
    show: (shares) => shares.forEach((share, i) => (parts[i].style.flexGrow = share)),
  };
}

function dotsOf(count, kind) {
  const dots = Array.from({ length: Math.min(count, MAX_DOTS) }, () =>
    element("span", { className: `dot ${kind}` }),
  );
  return count > MAX_DOTS ? [...dots, ` +${count - MAX_DOTS} `] : dots;
}

function fill(list, facts) {
  const cells = facts.flatMap(([name, value]) => [
    element("dt", {}, name),
    element("dd", {}, String(value)),
  ]);
  list.replaceChildren(...cells);
}

function percent(share) {
  return share === null ? "–" : `${(share * 100).toFixed(0)} %`;
}
