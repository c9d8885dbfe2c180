"""`rayfleet bench agents`: closed loops of coding agents on any OpenAI-compatible endpoint."""
