"""Products with weight matrices: ``x @ weight.T + bias``, the bulk of what a model computes."""

from torch import Tensor
from torch.nn.functional import linear


class Linear:
    """One weight matrix, ``[num_outputs, num_inputs]``, and its bias, ``[num_outputs]``."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """``[num_rows, num_outputs]`` of ``x`` ``[num_rows, num_inputs]``."""
        return linear(x, self.weight, self.bias)
