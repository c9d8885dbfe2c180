// Where a request went and why, from the headers of its answer. No DOM in here.

const PREFIX = "x-rayfleet-";

/** What the headers tell; numbers are null where the fleet does not explain its routing. */
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
 * A sentence about a decision.
 *
 * Where the fleet does not explain its routing, what the worker found tells: `cached` prompt
 * tokens, null where it is not known.
 */
export function reasonOf({ hit, achievable, predictedMs, regretMs, terms, cached }) {
  if (hit === null) {
    if (cached === null) return "";
    return cached > 0 ? `hit: ${cached} prompt tokens in its cache` : "load: in no cache";
  }
  const parts = [];
  if (achievable > hit) parts.push(`load: ${hit} tokens expected in its cache, ${achievable} elsewhere`);
  else if (hit > 0) parts.push(`hit: most of the prompt in its cache, ${hit} tokens expected`);
  else parts.push("load: in no cache");
  if (predictedMs !== null) parts.push(`first token expected after ${predictedMs} ms`);
  if (regretMs > 0) parts.push(`${regretMs} ms later than elsewhere, for the sake of others`);
  const weighed = terms.filter(([, value]) => value !== 0);
  if (weighed.length > 0) {
    parts.push(`cost ${weighed.map(([name, value]) => `${name} ${value.toFixed(4)}`).join(", ")}`);
  }
  return parts.join("; ");
}
