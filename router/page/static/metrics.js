// The state of a fleet, from /metrics. Does not use the DOM.

const SERIES = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const ESCAPES = { "\\\\": "\\", '\\"': '"', "\\n": "\n" };
/** Number of points in a rolling plot. */
export const HISTORY = 120;
/** Seconds without samples until a worker is removed; scrapes may come from different nodes. */
const FORGOTTEN_S = 15;

/** Series by name: lists of {labels, value}. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    if (line.startsWith("#")) continue;
    const match = SERIES.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\[\\"n]/g, (escape) => ESCAPES[escape]);
    }
    const series = { labels, value: Number(match[3].replace("Inf", "Infinity")) };
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push(series);
  }
  return found;
}

/**
 * Current models and workers, from successive scrapes.
 *
 * A scrape contains the processes of one node, and the next one may contain those of another node.
 * Each gateway and worker is compared with its own previous samples; a model is the sum of its
 * gateways.
 */
export class Fleet {
  #workers = new Map();
  #gateways = new Map();
  #histories = new Map();

  /** Processes the text of a scrape, at a time in seconds. */
  take(text, now) {
    const metrics = parseMetrics(text);
    for (const { labels, value } of metrics.get("rayfleet_worker_ready") ?? []) {
      const key = { model_name: labels.model_name, worker_id: labels.worker_id };
      update(this.#workers, key, now, workerOf(metrics, key, value));
    }
    for (const { labels } of metrics.get("rayfleet_num_workers_ready") ?? []) {
      const key = { model_name: labels.model_name, gateway_id: labels.gateway_id };
      update(this.#gateways, key, now, gatewayOf(metrics, key));
    }
    for (const table of [this.#workers, this.#gateways]) {
      for (const [key, item] of table) if (now - item.at > FORGOTTEN_S) table.delete(key);
    }
    for (const item of [...this.workers, ...this.models]) this.#remember(item);
  }

  /** Workers by model and id. */
  get workers() {
    return sorted([...this.#workers.values()].map((item) => this.#summary(item)));
  }

  /** Models by name. */
  get models() {
    const groups = new Map();
    for (const item of this.#gateways.values()) {
      groups.set(item.name, [...(groups.get(item.name) ?? []), item]);
    }
    return sorted([...groups.values()].map((group) => this.#summary(together(group))));
  }

  /** LoRA adapters in the memory of workers, by model and name. */
  get adapters() {
    const rows = new Map();
    for (const { resident } of this.#gateways.values()) {
      for (const { model_name: model, lora_adapter: adapter, memory, worker_id } of resident) {
        const name = `${model} ${adapter}`;
        const row = rows.get(name) ?? { name, model, adapter, device: new Set(), host: new Set() };
        rows.set(name, row);
        row[memory].add(worker_id);
      }
    }
    const ids = (workers) => [...workers].sort();
    return sorted([...rows.values()]).map((row) => {
      return { ...row, device: ids(row.device), host: ids(row.host) };
    });
  }

  #summary(item) {
    const { firsts, firstSeconds, queries, cached, met, missed } = item.latest;
    return {
      ...item,
      tokensPerS: item.grown.tokens / item.seconds,
      waitMs: item.grown.firsts > 0 ? (item.grown.firstSeconds / item.grown.firsts) * 1000 : 0,
      ttftMs: firsts > 0 ? (firstSeconds / firsts) * 1000 : null,
      hitRate: queries > 0 ? Math.min(cached / queries, 1) : null,
      sloMet: met + missed > 0 ? met / (met + missed) : null,
      ...(this.#histories.get(item.name) ?? { rates: [], waits: [] }),
    };
  }

  #remember({ name, tokensPerS, waitMs, rates, waits }) {
    this.#histories.set(name, {
      rates: [...rates, tokensPerS].slice(-HISTORY),
      waits: [...waits, waitMs].slice(-HISTORY),
    });
  }
}

/** Pairs of totals whose ratios are shown, by the name of the denominator. */
const SHARES = { firsts: ["firsts", "firstSeconds"], queries: ["queries", "cached"] };

/**
 * Records a process's samples, and the increase of its totals since the previous ones.
 *
 * `latest` contains the increase in the last interval that had one, so that an idle process shows
 * its last values. Initially, it contains the totals since the process started.
 */
function update(table, key, now, item) {
  const id = JSON.stringify(key);
  const before = table.get(id);
  const grown = {};
  for (const [name, value] of Object.entries(item.totals)) {
    grown[name] = before ? growth(before.totals[name], value) : 0;
  }
  const latest = { ...(before ? before.latest : item.totals) };
  for (const [counted, names] of Object.entries(SHARES)) {
    if (grown[counted] > 0) for (const name of names) latest[name] = grown[name];
  }
  if (grown.met + grown.missed > 0) {
    [latest.met, latest.missed] = [grown.met, grown.missed];
  }
  table.set(id, { ...item, at: now, seconds: before ? now - before.at : 1, grown, latest });
}

/** A model, from the samples of its gateways. */
function together(gateways) {
  const sum = (read) => gateways.reduce((total, item) => total + read(item), 0);
  const [grown, latest] = [{}, {}];
  // Scrape intervals differ between nodes, so rates are per second and can be added.
  for (const name of Object.keys(gateways[0].grown)) {
    grown[name] = sum((item) => item.grown[name] / item.seconds);
    latest[name] = sum((item) => item.latest[name]);
  }
  return {
    name: gateways[0].name,
    seconds: 1,
    grown,
    latest,
    pending: sum((item) => item.pending),
    workersReady: Math.max(...gateways.map((item) => item.workersReady)),
    workersWanted: Math.max(...gateways.map((item) => item.workersWanted)),
  };
}

function workerOf(metrics, key, ready) {
  const sum = (name, more = {}) => total(metrics, name, { ...key, ...more });
  const cache = matching(metrics, "rayfleet_cache_config_info", key)[0]?.labels ?? {};
  const pages = Number(cache.num_gpu_blocks ?? 0);
  const used = sum("rayfleet_kv_cache_usage_perc");
  // The index includes blocks in use; the others are cached for reuse.
  const indexed = Math.max(
    0,
    ...matching(metrics, "rayfleet_prefix_index_blocks", key).map(({ value }) => value),
  );
  return {
    name: `${key.model_name} ${key.worker_id}`,
    model: key.model_name,
    id: key.worker_id,
    ready: ready > 0,
    running: sum("rayfleet_num_requests_running"),
    waiting: sum("rayfleet_num_requests_waiting"),
    used,
    kept: pages > 0 ? Math.min(Math.max(indexed / pages - used, 0), 1 - used) : 0,
    pages,
    host: Number(cache.num_cpu_blocks ?? 0) > 0 ? sum("rayfleet_cpu_cache_usage_perc") : null,
    adapters: sum("rayfleet_lora_adapters", { memory: "device" }),
    adapterSlots: sum("rayfleet_lora_slots"),
    preemptions: sum("rayfleet_num_preemptions_total"),
    routed: sum("rayfleet_routed_requests_total"),
    totals: {
      tokens: sum("rayfleet_worker_generation_tokens_total"),
      queries: sum("rayfleet_prefix_cache_queries_total"),
      cached: sum("rayfleet_prefix_cache_hits_total"),
      firsts: sum("rayfleet_worker_time_to_first_token_seconds_count"),
      firstSeconds: sum("rayfleet_worker_time_to_first_token_seconds_sum"),
      met: 0,
      missed: 0,
    },
  };
}

function gatewayOf(metrics, key) {
  const sum = (series, more = {}) => total(metrics, series, { ...key, ...more });
  return {
    name: key.model_name,
    workersReady: sum("rayfleet_num_workers_ready"),
    workersWanted: sum("rayfleet_num_workers_wanted"),
    pending: sum("rayfleet_gateway_pending_requests"),
    resident: matching(metrics, "rayfleet_lora_resident", key).map(({ labels }) => labels),
    totals: {
      tokens: sum("rayfleet_generation_tokens_total"),
      queries: sum("rayfleet_prompt_tokens_total"),
      cached: sum("rayfleet_prompt_tokens_cached_total"),
      firsts: sum("rayfleet_time_to_first_token_seconds_count"),
      firstSeconds: sum("rayfleet_time_to_first_token_seconds_sum"),
      met: sum("rayfleet_slo_requests_total", { met: "true" }),
      missed: sum("rayfleet_slo_requests_total", { met: "false" }),
    },
  };
}

/** Increase of a counter; after a reset it counts from 0. */
export function growth(before, now) {
  return now >= before ? now - before : now;
}

function matching(metrics, name, labels) {
  const wanted = Object.entries(labels);
  return (metrics.get(name) ?? []).filter((series) =>
    wanted.every(([label, value]) => series.labels[label] === value),
  );
}

function total(metrics, name, labels) {
  return matching(metrics, name, labels).reduce((sum, { value }) => sum + value, 0);
}

function sorted(all) {
  return all.sort((a, b) => (a.name < b.name ? -1 : a.name > b.name ? 1 : 0));
}
