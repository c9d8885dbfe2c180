// Where a request was routed and why, from the response headers. Does not use the DOM.

const PREFIX = "x-rayfleet-";

/** Values of the headers; numbers are null without --explain-routing. */
export function explanationOf(headers) {
  const number = (name) => {
    const text = headers.get(PREFIX + name);
    return text === null ? null : Number(text);
  };
  const terms = [];
  for (const [name, value] of headers) {
    if (name.startsWith(`${PREFIX}cost-`)) {
      terms.push([name.slice(`${PREFIX}cost-`.length), Number(value)]);
    }
  }
  return {
    requestId: headers.get("x-request-id") ?? "",
    worker: headers.get(`${PREFIX}worker`) ?? "",
    hit: number("hit-tokens"),
    achievable: number("achievable-hit-tokens"),
    predictedMs: number("predicted-ttft-ms"),
    regretMs: number("regret-ms"),
    terms,
  };
}

/**
 * Describes a routing decision in one line.
 *
 * Without --explain-routing, the description uses `cached`, the number of prompt tokens in the
 * worker's cache, or null if unknown.
 */
export function reasonOf({ hit, achievable, predictedMs, regretMs, terms, cached }) {
  if (hit === null) {
    if (cached === null) return "";
    return cached > 0 ? `cache hit: ${cached} prompt tokens` : "load: prompt not cached";
  }
  const parts = [];
  if (achievable > hit) parts.push(`load: predicted hit of ${hit} tokens, ${achievable} on another worker`);
  else if (hit > 0) parts.push(`cache hit: longest cached prefix, predicted ${hit} tokens`);
  else parts.push("load: prompt not cached");
  if (predictedMs !== null) parts.push(`predicted time to first token ${predictedMs} ms`);
  if (regretMs > 0) parts.push(`${regretMs} ms slower than on the fastest worker, in favor of other requests`);
  const weighed = terms.filter(([, value]) => value !== 0);
  if (weighed.length > 0) {
    parts.push(`cost ${weighed.map(([name, value]) => `${name} ${value.toFixed(4)}`).join(", ")}`);
  }
  return parts.join("; ");
}
