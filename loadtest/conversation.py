"""What a workload is made of: conversations of one turn or more, each due at a time.

Pure data. A single request is a conversation of one turn. Later turns hold only what is new in
them: what a server has answered becomes part of the next turn's prompt when the load is run.
"""

from dataclasses import dataclass

Text = str | tuple[int, ...]
"""A prompt or a part of one: words, or token ids."""


@dataclass(frozen=True)
class Turn:
    """One request: what the user adds to the conversation, and how long the answer is to be."""

    text: Text  # the new part only; the first turn's is its whole prompt
    num_tokens: int  # of the new part, as planned; a server's own count may differ for words
    max_tokens: int  # answer
    think_s: float = 0.0  # from the end of the answer before, at the earliest


@dataclass(frozen=True)
class Conversation:
    """Turns that follow one another; the first is due ``at_s`` after the start of the run."""

    at_s: float
    class_name: str  # whose SLO its requests have
    turns: tuple[Turn, ...]
