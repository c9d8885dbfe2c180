"""`rayfleet bench agents` runs closed-loop coding agents against any OpenAI-compatible endpoint."""
