"""Load generation against a running OpenAI-compatible server. Talks HTTP only."""
