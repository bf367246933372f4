"""Writes smollm_llamacpp_tokens.json: llama.cpp's ids of varied strings, for the default model.

llama.cpp is the reference for the pre-tokenizer that the GGUF names, and it takes long to build, so
its answers are kept here. To make them again, in an environment of their own::

    python3 -m venv /tmp/llama && /tmp/llama/bin/pip install llama-cpp-python==0.3.36
    /tmp/llama/bin/python -m tests.data.make_smollm_llamacpp_tokens \
        ~/.cache/baton/gguf/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import json
import sys
from pathlib import Path

import llama_cpp

from tests.data.token_strings import (
    CODE,
    ENGLISH,
    LOSSY,
    NUMBERS,
    SCRIPTS,
    SPACES,
    SPECIAL,
    SYMBOLS,
    random_strings,
)


def main() -> None:
    """Tokenize everything with the GGUF named on the command line."""
    model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
    plain = ENGLISH + NUMBERS + SPACES + SCRIPTS + SYMBOLS + CODE + SPECIAL + random_strings(80)
    groups = {
        group: [
            {"text": text, "ids": model.tokenize(text.encode(), add_bos=False, special=True)}
            for text in texts
        ]
        for group, texts in (("round_trip", plain), ("lossy", LOSSY))
    }
    lines = [
        f"  {json.dumps(group)}: [\n    " + ",\n    ".join(map(json.dumps, entries)) + "\n  ]"
        for group, entries in groups.items()
    ]
    path = Path(__file__).with_name("smollm_llamacpp_tokens.json")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{path}: {len(plain)} strings, llama-cpp-python {llama_cpp.__version__}")


if __name__ == "__main__":
    main()
