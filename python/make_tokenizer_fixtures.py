#!/usr/bin/env python3
"""Writes tests/fixtures/tokenizer/: a small vocabulary of ours and what tiktoken makes of many texts with it.

    python/make_tokenizer_fixtures.py build/tokenizer_bench    (needs tiktoken and the zstd program)

Long and random texts are not stored: a case holds the rule that makes the text, here and in tests/text/tokenizer_fixture.h,
and a 64-bit FNV-1a hash of the ids. The random numbers are godwit/base/rng.h's.
"""

import base64
import json
import pathlib
import subprocess
import sys
import tempfile

import tiktoken

from make_unicode_tables import FLAGS, code_points, members

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "tests/fixtures/tokenizer"
RANKS = 2000
MASK = (1 << 64) - 1

U = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
L = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?" + U + "*" + L + "+" + SUFFIX,
        r"[^\r\n\p{L}\p{N}]?" + U + "+" + L + "*" + SUFFIX,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# Characters of every class the pattern knows, alone and at its borders; chosen often enough to meet each other.
POOL = (
    list("aabesmtrvlld'''  \n\n\r\t.-(_12AESTRVLMD")
    + list("éßſʰªºéÉДдÀǅΣσאבحあアㄅ한ก")
    + list("中文漢字〇〡々〻⺀⼀㐀")
    + ["\U00020000", "\U00016ff0", "\U00016fe2"]  # Han: letters, numbers, radicals, marks
    + ["\u0301", "\u0308", "\u0903", "\u20dd", "\u093f", "\u0345"]  # combining marks, Mn Mc Me
    + list("٣Ⅷ²½𝟘①")
    + ["\u00a0", "\u2003", "\u2028", "\u3000", "\u0085", "\x0b", "\x0c"]
    + [
        "’",
        "😀",
        "\u200d",
        "\ufe0f",
        "\ufffd",
        "\0",
        "\x1c",
        "\x7f",
        "\u0378",
        "\ue000",
        "\U0010ffff",
        "\u200b",
        "€",
        "。",
    ]
)


def mix64(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def random_bits(seed, stream, counter):
    return mix64(mix64(mix64(seed) ^ stream) ^ counter)


def fnv(ids):
    value = 0xCBF29CE484222325
    for byte in b"".join(i.to_bytes(4, "little") for i in ids):
        value = ((value ^ byte) * 0x100000001B3) & MASK
    return f"{value:016x}"


def pool_text(seed, stream, length):
    """`length` characters of POOL; every fourth draw repeats the character before, so that runs occur."""
    out = []
    for i in range(length):
        bits = random_bits(seed, stream, i)
        out.append(out[-1] if out and bits % 4 == 0 else POOL[(bits >> 8) % len(POOL)])
    return "".join(out)


def planes_text(seed, length):
    """`length` scalar values, half of them from the first 0x3000, the others from all planes."""
    out = []
    for i in range(length):
        bits = random_bits(seed, 0, i)
        code = (bits >> 8) % (0x3000 if bits % 2 == 0 else 0x110000 - 0x800)
        out.append(chr(code if code < 0xD800 else code + 0x800))
    return "".join(out)


def random_bytes(seed, length):
    """Bytes; three of four are in ranges that often begin or continue a character."""
    out = bytearray()
    for i in range(length):
        bits = random_bits(seed, 1, i)
        low, size = [(0, 256), (0x80, 64), (0xC0, 56), (0x20, 96)][bits % 4]
        out.append(low + (bits >> 8) % size)
    return bytes(out)


def rule_text(rule):
    if "repeat" in rule:
        return "".join(text * times for text, times in rule["repeat"])
    if "pool" in rule:
        return pool_text(rule["pool"], 0, rule["length"])
    return planes_text(rule["planes"], rule["length"])


def training_text():
    """A third of a megabyte of the King James Version and invented words of many scripts, so that merges cross every class."""
    kjv = subprocess.run(["zstd", "-dc", ROOT / "datasets/kjv.txt.zst"], check=True, capture_output=True).stdout
    alphabets = [
        "aàâçéèêîïôœùûü",
        "αβγδεζηθικλμνξο",
        "абвгдежзийклмнопрст",
        "אבגדהוזחטיכלמנ",
        "ابتثجحخدذرزسش",
        "कखगघचछजझटठ",
        "가나다라마바사아자차",
        "あいうえおかきくけこ",
        "中文漢字人大山水火木金土日月",
        "กขคงจฉชซญด",
        "😀😁😂🎉👍",
        "0123456789",
    ]
    marks = ["", "", "", "\u0301", "\u0308", "\u093f"]
    out = [kjv[:330_000].decode()]
    counter = 0
    for alphabet in alphabets:
        words = []
        for w in range(60):
            word = ""
            for _ in range(1 + random_bits(7, 1, counter) % 4):
                bits = random_bits(7, 0, counter)
                counter += 1
                word += alphabet[bits % len(alphabet)] + marks[(bits >> 32) % len(marks)]
            words.append(word)
        for _ in range(1500):
            bits = random_bits(7, 2, counter)
            counter += 1
            word = words[int(60 * ((bits >> 11) * 2.0**-53) ** 3)]
            out.append(
                (word.upper() if bits % 5 == 0 else word)
                + [" ", " ", " ", "\n", "", ", ", "'s ", "\r\n\n", "  "][bits // 8 % 9]
            )
    for run in ["a", " ", "-", "=", "\t", "A", "中", "あ", "😀", "\n", "\0", "'s"]:
        for _ in range(60):
            counter += 1
            out.append("." + run * (1 + random_bits(7, 3, counter) % 70) + ".")
    return "".join(out)


def piece_ends(texts):
    """Where tiktoken's regular expression ends its pieces (in bytes), seen from outside: with every substring of the texts a
    token, each piece is one token."""
    ranks = {}
    for text in texts:
        for i in range(len(text)):
            for j in range(i + 1, len(text) + 1):
                ranks.setdefault(text[i:j].encode(), len(ranks))
    encoding = tiktoken.Encoding("substrings", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    result = []
    for text in texts:
        ends, end = [], 0
        for token in encoding.encode_ordinary(text):
            end += len(encoding.decode_single_token_bytes(token))
            ends.append(end)
        assert end == len(text.encode())
        result.append(ends)
    return result


def cut(text):
    """K3's two cuts, written down independently of pretokenize.cpp."""
    spaces = members(r"\s", "".join(map(chr, code_points())))
    for start in range(0, len(text), 400_000):
        part, begin, run = text[start : start + 400_000], 0, 0
        for i, c in enumerate(part):
            run = run + 1 if i > 0 and (ord(c) in spaces) == (ord(part[i - 1]) in spaces) else 1
            if run > 25_000:
                yield part[begin:i]
                begin, run = i, 1
        yield part[begin:]


def make_vocabulary(bench):
    with tempfile.TemporaryDirectory() as directory:
        text = pathlib.Path(directory) / "text"
        text.write_text(training_text(), newline="")
        subprocess.run([bench, "train", text, str(RANKS), OUT], check=True, stdout=subprocess.DEVNULL)
    lines = [line.split() for line in (OUT / "tiktoken.model").read_text().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    named = json.loads((OUT / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    specials = {f"<|reserved_token_{i}|>": i for i in range(RANKS, RANKS + 256) if str(i) not in named}
    specials |= {value["content"]: int(key) for key, value in named.items()}
    return tiktoken.Encoding("fixture", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials)


def split_cases():
    texts = [pool_text(1, stream, 1 + stream % 24) for stream in range(200)]
    hand = [
        "",
        "I'll've don't DON'T it'S 'sſ 'ſ x'ſ you're'VE",
        "HTTPServer aB Ab AB ABc",
        "a\u0301b \u0301A \u0301",
        "1234567 12a",
        "  \n  \n\n  x   y    ",
        "a \r\n\r\n b\t\tc \t",
        "...\n\n---  --\r\n!",
        "中文abc漢字、。々〇1〇",
        " 中 a中",
        "\u3000あ\u3000中",
    ]
    texts += hand
    return [{"text": text, "ends": ends} for text, ends in zip(texts, piece_ends(texts))]


def random_split_case():
    streams, all_ends = 20_000, []
    for begin in range(0, streams, 500):
        for ends in piece_ends([pool_text(2, s, 1 + s % 24) for s in range(begin, begin + 500)]):
            all_ends += ends
    return {"seed": 2, "streams": streams, "ends_fnv": fnv(all_ends)}


def encode_cases(encoding):
    rules = [
        {"repeat": [[text, times]]}
        for text, times in [
            ("a", 100_000),
            (" ", 100_000),
            ("\n", 100_000),
            ("中", 100_000),
            ("あ", 100_000),
            ("1", 100_000),
            ("A", 100_000),
            ("\u0301", 100_000),
            ("-", 100_000),
            ("😀", 100_000),
            (" a", 50_000),
            ("aA", 50_000),
            ("ab", 50_000),
            ("'s", 50_000),
            ("\r\n", 50_000),
            ("\u0301A", 50_000),
            ("A\u0301", 50_000),
            ("\0", 100_000),
            ("LORD ", 20_000),
        ]
    ]
    rules += [
        {"repeat": [[" ", 100_000], ["x", 1]]},
        {"repeat": [["A", 100_000], ["b", 1]]},
        {"repeat": [["A", 50_000], ["\u0301", 1], ["A", 50_000], [".", 1]]},
    ]
    rules += [{"pool": 3, "length": 100_000}, {"planes": 4, "length": 100_000}, {"planes": 5, "length": 100_000}]
    out = []
    for rule in rules:
        ids = encoding.encode_ordinary(rule_text(rule))
        out.append(rule | {"count": len(ids), "ids_fnv": fnv(ids)})
    return out


def cut_cases(encoding):
    rules = [
        {"repeat": [["a", 25_000]]},
        {"repeat": [["a", 25_001]]},
        {"repeat": [[" ", 60_000], ["中", 60_000], ["\u3000", 30_000]]},
        {"repeat": [["ab ", 140_000], ["x", 25_000]]},
        {"pool": 6, "length": 450_000},
    ]
    out = []
    for rule in rules:
        ids = [i for part in cut(rule_text(rule)) for i in encoding.encode_ordinary(part)]
        out.append(rule | {"count": len(ids), "ids_fnv": fnv(ids)})
    return out


def bytes_cases(encoding):
    inputs = [
        b"\xff",
        b"abc\xff",
        b"abc \xff def",
        b"\xe4\xb8",
        b"x\xe4\xb8",
        b"\xed\xa0\x80",
        b"\xc0\x80",
        b"\xf4\x90\x80\x80",
        b"\xf0\x9f\x98",
        b"a\n \t\xc3",
        b"a \n\n\xc3b",
        b" \xc3",
        b"in the\xffbeginning",
        b"\xf0\x9f\x98a",
        b"\xe4\xb8\xe4\xb8\xad",
    ]
    inputs += [random_bytes(seed, 1 + seed % 40) for seed in range(100)]
    return [
        {
            "bytes": data.hex(),
            "replace": encoding.encode_ordinary(data.decode("utf-8", "replace")),
            "tiktoken": encoding._encode_bytes(data),
        }
        for data in inputs
    ]


def special_cases(encoding):
    texts = [
        '<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>',
        "<|end_of_msg|",
        "<|<|sep|>|>",
        "[BOS][PAD] [EOS]\n[UNK]",
        f"<|reserved_token_{RANKS + 8}|> <|reserved_token_8|>",
        " <|media_pad|> <|media_pad|>",
        "<osagent_mode>",
        "<|END_OF_MSG|>",
        "",
    ]
    return [
        {"text": t, "ids": encoding.encode(t, allowed_special="all"), "ordinary": encoding.encode_ordinary(t)}
        for t in texts
    ]


def decode_cases(encoding):
    lists = [[random_bits(8, stream, i) % RANKS for i in range(stream)] for stream in range(0, 60, 3)]
    lists.append(list(range(RANKS, RANKS + 256)))
    return [{"ids": ids, "bytes": encoding.decode_bytes(ids).hex()} for ids in lists]


def class_table_hash():
    text = "".join(map(chr, code_points()))
    table = [0] * 0x110000
    for bit, (_, pattern) in enumerate(FLAGS):
        for c in members(pattern, text):
            table[c] |= 1 << bit
    return fnv(table)


def render(key, value):
    """One case a line."""
    if isinstance(value, list) and key != "pool":
        return f'"{key}": [\n' + ",\n".join(map(json.dumps, value)) + "\n]"
    return f'"{key}": {json.dumps(value)}'


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    OUT.mkdir(parents=True, exist_ok=True)
    encoding = make_vocabulary(sys.argv[1])
    short = [pool_text(9, stream, stream) for stream in range(0, 90, 3)] + [
        planes_text(stream, 40) for stream in range(10, 30)
    ]
    cases = {
        "about": f"written by python/make_tokenizer_fixtures.py with tiktoken {tiktoken.__version__}",
        "pool": POOL,
        "class_table_fnv": class_table_hash(),
        "split": split_cases(),
        "split_random": random_split_case(),
        "encode": [{"text": text, "ids": encoding.encode_ordinary(text)} for text in short],
        "encode_long": encode_cases(encoding),
        "cut": cut_cases(encoding),
        "bytes": bytes_cases(encoding),
        "specials": special_cases(encoding),
        "decode": decode_cases(encoding),
    }
    (OUT / "cases.json").write_text("{\n" + ",\n".join(render(key, value) for key, value in cases.items()) + "\n}\n")


if __name__ == "__main__":
    main()
