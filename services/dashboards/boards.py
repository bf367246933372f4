"""All boards, in the order in which to look at them (pure)."""

from services.dashboards import pools, roofline, routing, slo, transfer
from services.dashboards.board import Board


def all_boards() -> tuple[Board, ...]:
    """From what users feel to what the machines do."""
    return slo.board(), pools.board(), transfer.board(), routing.board(), roofline.board()
