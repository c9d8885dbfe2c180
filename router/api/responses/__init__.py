"""OpenAI's responses: /v1/responses, answered as chats are, and kept for a while."""
