"""Writes smollm_llamacpp_tokens.json: llama.cpp's ids of varied strings, for the default model.

llama.cpp is the reference for the pre-tokenizer that the GGUF names, and it takes long to build, so
its answers are kept here. To make them again, in an environment of their own::

    python3 -m venv /tmp/llama && /tmp/llama/bin/pip install llama-cpp-python==0.3.36
    /tmp/llama/bin/python tests/data/make_smollm_llamacpp_tokens.py \
        ~/.cache/baton/gguf/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import json
import random
import sys
from pathlib import Path

import llama_cpp

ENGLISH = [
    "Hello, world!",
    "hello world",
    " hello world",
    "The quick brown fox jumps over the lazy dog.",
    "What is the capital of France?",
    "I'm sure they'll say we've it; he'd know, she's here, you're there, don't.",
    "I'M SURE THEY'LL SAY WE'VE IT",
    "it’s a “curly” quote — and an en–dash…",
    "'s 't 're 've 'm 'll 'd",
    "a'b'c''d",
    "snake_case camelCase PascalCase kebab-case SCREAMING_CASE",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "e.g. i.e. etc. Mr. Dr. U.S.A.",
    "user@example.com https://example.com/a/b?c=d&e=f#g",
    "50% off!!! $9.99 #hashtag @mention *bold* _it_ ~tilde~ `code` ^caret |pipe|",
    "",
    "a",
    "Ω",
]
NUMBERS = [
    "0",
    "7",
    "42",
    "2024",
    "1234567890",
    "3.14159",
    "-273.15",
    "1,000,000",
    "1e-10",
    "0x1F",
    "v1.2.3",
    "abc123def456",
    "123abc",
    "a1b2c3",
    " 1",
    "  1",
    "   1",
    "     12",
    "x  12",
    "x          12",
    "12  34",
    "12   34   56",
    "1 2 3",
    "1\n2\n\n3",
    "\t1\t\t2",
    "2 + 2 = 4",
    "(555) 123-4567",
    "2024-12-31T23:59:59Z",
    "10 000 000",
    "1\u00a0000\u00a0000",
    "½ cup, ¾ cup, x² + y³",
    "Ⅷ Ⅻ ⅷ",
    "①②③ ⑩",
    "٠١٢٣٤٥٦٧٨٩",
    "العدد ١٢٣ هنا",
    "१२३ ४५६",
    "၁၂၃",
    "๑๒๓",
    "１２３４",
    "一二三四五",
    "𝟘𝟙𝟚 𝟬𝟭",
    "𐄇𐄈",
    "🄀🄁",
    "5'10\"",
    "1st 2nd 3rd 4th",
    "٣٫١٤",
]
SPACES = [
    " ",
    "  ",
    "   ",
    "        ",
    " " * 33,
    "\t",
    "\t\t",
    "\n",
    "\n\n",
    "\n\n\n\n",
    "\r\n",
    "\r\n\r\n",
    "a b",
    "a  b",
    "a   b",
    "a    b",
    "a\tb",
    "a\t\tb",
    "a\nb",
    "a\n\nb",
    "a \n b",
    "a\r\nb",
    "  leading",
    "trailing  ",
    "  both  ",
    "\n leading newline",
    "trailing newline \n",
    "a \t \n \t b",
    "!  !",
    " ! ",
    "\u00a0",
    "a\u00a0b",
    "a\u00a0\u00a0b",
    "a\u2003b",
    "a\u2003\u2003b",
    "a\u3000b",
    "a\u2028b\u2029c",
    "a\u200bb",
    "a\u1680b",
    "a\u202fb",
    "a\u180eb",
    "a\u0085b",
    "a\x0bb\x0cc",
    "\ufeffbom",
]
SCRIPTS = [
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "Zażółć gęślą jaźń",
    "Fußgängerübergänge größer",
    "naïve café résumé",
    "nai\u0308ve cafe\u0301 re\u0301sume\u0301",
    "e\u0301\u0302\u0303 o\u0338",
    "Iİıi ﬁ ﬂ ß ẞ",
    "Привет, мир! Как дела?",
    "Γειά σου Κόσμε",
    "שלום עולם",
    "שָׁלוֹם",
    "مرحبا بالعالم",
    "السَّلَامُ عَلَيْكُمْ",
    "नमस्ते दुनिया",
    "ক্ষ বাংলা",
    "வணக்கம்",
    "สวัสดีชาวโลก",
    "ສະບາຍດີ",
    "မင်္ဂလာပါ",
    "ខ្ញុំ",
    "안녕하세요 세계",
    "\u1112\u1161\u11ab\u1100\u1173\u11af",
    "こんにちは世界",
    "カタカナ ﾊﾝｶｸ",
    "漢字かな交じり文。",
    "你好，世界！",
    "你好 世界 123 测试",
    "𠀀𠀁𪚥",
    "አማርኛ",
    "ქართული",
    "Հայերեն",
    "ᏣᎳᎩ",
    "ᐃᓄᒃᑎᑐᑦ",
    "𓀀𓁐",
    "𐍈𐌰",
    "Việt Nam tiếng Việt",
    "\u202eright to left\u202c",
    "a\u00adb soft hyphen",
    "Ǆ ǅ ǆ ᴬ ª º",
]
SYMBOLS = [
    "😀",
    "😀😃😄",
    "hi 😀 there",
    "👩‍👩‍👧‍👦",
    "👩🏽‍💻 👍🏿",
    "🇮🇹🇨🇿🇯🇵",
    "🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "❤️ ❤ ☺️ ☺",
    "1️⃣ 2️⃣ #️⃣",
    "→ ⇒ ≤ ≥ ≠ ∑ ∫ √ ∞ ∂",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋",
    "€ £ ¥ ₹ ₿ ¢",
    "© ® ™ § ¶ † ‡ • …",
    "█▓▒░ ┌─┐│└┘",
    "♠♥♦♣ ♩♪♫",
    "🀄🂡",
    "\ufffd\ufffd",
    "\u0301",
    "!!!???...",
    "===== ----- _____ *****",
    "({[<>]})",
    "\\n \\t \\\\",
    "¿Qué? ¡Sí!",
    "«guillemets» „Gänsefüßchen“",
    "\x01\x02\x03",
    "a\x00b",
    "\x1b[31mred\x1b[0m",
    "\x7f\x08",
]
CODE = [
    "def f(x):\n    return x ** 2\n",
    "for (int i = 0; i < 10; ++i) {\n\tsum += a[i];\n}",
    'print(f"{x!r:>10}")',
    "if x == 1 and y != 2 or not z:\n        pass",
    "SELECT * FROM t WHERE id IN (1, 2, 3) LIMIT 10;",
    '<div class="a b">text &amp; more</div>',
    '{"key": [1, 2.5, null, true], "k2": {"a": "b"}}',
    "#!/bin/sh\nset -eu\necho \"$HOME\" | sed 's/a/b/g'",
    "fn main() -> Result<(), Box<dyn Error>> { Ok(()) }",
    "x = [i for i in range(100) if i % 2 == 0]",
    "    \n        indented\n    ",
    "a\n\n\n    b\n\n        c",
    "import numpy as np  # comment  with  spaces",
    "λ = lambda x: x",
    "C:\\Users\\name\\file.txt",
    "\\frac{a}{b} + \\sqrt{x^2}",
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "- item 1\n- item 2\n  - sub\n\n1. one\n2. two",
    "0b1010 0o17 0xDEADBEEF 1_000_000",
    "git commit -m 'fix: #123'",
]
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "before<|im_end|>after",
    " <|im_end|> ",
    "<|im_end|><|im_end|>",
    "<|im_start|><|endoftext|>x",
    "<|im_start",
    "|im_end|>",
    "<| im_end |>",
    "<|IM_END|>",
    "<<|im_end|>>",
    "<repo_name>a/b<file_sep>c.py",
    "<reponame><filename><gh_stars>100",
    "<issue_start><issue_comment><issue_closed>",
    "<jupyter_start><jupyter_text><jupyter_code><jupyter_output><jupyter_script>",
    "<empty_output> 12  <empty_output>",
    "   <|im_end|>   ",
    "123<|im_end|>456",
]
# The vocabulary lacks some bytes (six control characters, the lead bytes of planes 4 to 11): their
# characters vanish or leave stray bytes, and do not come back.
LOSSY = [
    "a\x04b",
    "t\x04he",
    "x\x16\x1d y",
    "\x13",
    "th\x06e  \x141",
    "\U00050000",
    "a\U00081234b 1",
]

ALPHABET = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ      \n\t0123456789.,;:!?'\"()<>|_-+=*/\\#@"
    "éüřžßñçøλπдфשמعبहिไ한漢字かカ١२３½²①😀👍🏽🇮🇹\u200d\ufe0f\u0301\u00a0\u3000→€“”—"
)


def random_strings(count: int) -> list[str]:
    """The same mixtures every time."""
    rng = random.Random(20240207)
    return ["".join(rng.choices(ALPHABET, k=rng.randint(1, 60))) for _ in range(count)]


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
