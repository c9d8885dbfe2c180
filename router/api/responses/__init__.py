"""OpenAI's Responses API: /v1/responses, translated to chat completions, with stored responses."""
