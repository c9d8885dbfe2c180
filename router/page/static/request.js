// Builds a request's body from the settings. Does not use the DOM.

const NUMBERS = { temperature: "Temperature", top_p: "Top p" };
const COUNTS = { top_k: "Top k", max_tokens: "Max tokens", seed: "Seed" };

/** An invalid field; the message is for the user. */
export class FieldError extends Error {}

/**
 * The body of /v1/chat/completions.
 *
 * @param fields texts by name, as entered; empty ones use the model's defaults.
 * @param messages messages of the chat, without the system message.
 * @param showDrafts whether the model generates blocks of tokens, whose drafts are then streamed.
 */
export function bodyOf(fields, messages, showDrafts = false) {
  const system = fields.system?.trim();
  const body = {
    model: fields.model,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const [name, title] of Object.entries(NUMBERS)) setNumber(body, fields, name, title, false);
  for (const [name, title] of Object.entries(COUNTS)) setNumber(body, fields, name, title, true);
  const schema = parsed(fields.schema, "JSON schema");
  if (schema !== undefined) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  const tools = parsed(fields.tools, "Tools");
  if (tools !== undefined) {
    if (!Array.isArray(tools)) throw new FieldError("Tools must be a JSON list of functions");
    body.tools = tools.map((tool) => (tool.function ? tool : { type: "function", function: tool }));
  }
  if (showDrafts && schema === undefined) body.diffusion = { stream_drafts: true };
  return body;
}

function setNumber(body, fields, name, title, whole) {
  const text = fields[name]?.trim();
  if (!text) return;
  const value = Number(text);
  if (!Number.isFinite(value) || (whole && !Number.isInteger(value))) {
    throw new FieldError(`${title} must be a ${whole ? "whole " : ""}number, got ${text}`);
  }
  body[name] = value;
}

function parsed(text, title) {
  if (!text?.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldError(`${title} is not valid JSON: ${error.message}`);
  }
}
