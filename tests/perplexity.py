"""How well a model predicts a text: what rounding its weights costs is the difference.

    python -m tests.perplexity [--model NAME] [--tokens N]

prints the perplexity of the default model with float32 and with int8 weights on this project's own
pages: English prose with code in it, which no model was trained on.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from kvtransfer.layout import KVLayout
from kvtransfer.region import Region
from router.tokenizer import Tokenizer
from services.engine.attention import plan_attention
from services.engine.model import Model
from services.engine.model_config import read_config
from services.engine.scheduler import Row
from services.engine.sequence import SamplingParams
from services.engine.weights import read_weights
from services.fetch import DEFAULT_MODEL, fetch

ROOT = Path(__file__).parents[1]
BLOCK_SIZE = 16
CONTEXT = 512  # tokens of the text are predicted from at most this many before them
PAGES = ("docs/handoff.md", "docs/processes.md", "docs/api.md", "README.md")


def text_ids(folder: Path, num_tokens: int) -> list[int]:
    """The first tokens of our pages."""
    text = "\n\n".join((ROOT / page).read_text() for page in PAGES)
    return Tokenizer.load(folder).encode(text)[:num_tokens]


@torch.inference_mode()
def perplexity(model: Model, ids: list[int]) -> float:
    """exp of the mean negative log-likelihood per token, over pieces of ``CONTEXT`` tokens.

    The first token of a piece is given, not predicted.
    """
    config = model.config
    layout = KVLayout(
        "", config.num_layers, config.num_kv_heads, config.head_dim, "", BLOCK_SIZE, "float32"
    )
    region = Region(layout, 1 + CONTEXT // BLOCK_SIZE)
    pieces = [ids[i : i + CONTEXT] for i in range(0, len(ids), CONTEXT)]
    losses = torch.cat([_losses(model, region.kv, piece) for piece in pieces if len(piece) > 1])
    return math.exp(losses.double().mean().item())


def _losses(model: Model, kv: Tensor, ids: list[int]) -> Tensor:
    """Negative log-likelihood of each token but the first."""
    blocks = tuple(range(1, 1 - (-len(ids) // BLOCK_SIZE)))
    params = SamplingParams(max_tokens=1, temperature=0.0)
    row = Row((b"", 0), tuple(ids), 0, blocks, True, params, len(ids))
    tokens = torch.tensor(ids)
    plan = plan_attention([row], BLOCK_SIZE, kv.device)
    hidden = model.forward(tokens, torch.arange(len(ids)), kv, plan)
    return torch.nn.functional.cross_entropy(
        model.logits(hidden[:-1]), tokens[1:], reduction="none"
    )


def load(folder: Path, int8: bool) -> Model:
    """A model for the CPU."""
    device = torch.device("cpu")
    return Model(read_config(folder), read_weights(folder), torch.float32, device, int8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    folder = fetch(args.model)
    ids = text_ids(folder, args.tokens)
    exact, rounded = (perplexity(load(folder, int8), ids) for int8 in (False, True))
    print(
        f"{len(ids)} tokens: perplexity float32 {exact:.4f}, int8 {rounded:.4f}"
        f" ({100 * (rounded / exact - 1):+.2f} %)"
    )


if __name__ == "__main__":
    main()
