#!/usr/bin/env python3
"""Writes godwit/text/unicode_table.inc: the character classes of the K3 split pattern, as ranges.

The classes are asked of tiktoken itself: each property runs as the split pattern of a byte-level encoding over every code
point, and what the encoding keeps has the property. So the table has the Unicode version of tiktoken's regular-expression
engine (16.0 in tiktoken 0.14.0), whatever version this Python has.

    python/make_unicode_tables.py [--check]    --check compares with the committed file and writes nothing
"""

import argparse
import pathlib
import sys

import tiktoken

TABLE = pathlib.Path(__file__).resolve().parent.parent / "godwit/text/unicode_table.inc"
NOT_HAN = r"&&[^\p{Han}]]"

# Flag name in unicode.h -> property. Order and names are those of `enum CharClass`.
FLAGS = [
    ("kUpper", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}" + NOT_HAN),
    ("kLower", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}" + NOT_HAN),
    ("kHan", r"\p{Han}"),
    ("kLetter", r"\p{L}"),
    ("kNumber", r"\p{N}"),
    ("kSpace", r"\s"),
    ("kNewline", r"[\r\n]"),
]
LETTERS = dict(zip([name for name, _ in FLAGS], "ULHANSR"))  # one letter a flag in the file


def code_points():
    return [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]  # surrogates are not characters


def members(pattern, text):
    byte_ranks = {bytes([b]): b for b in range(256)}
    encoding = tiktoken.Encoding("probe", pat_str=pattern, mergeable_ranks=byte_ranks, special_tokens={})
    kept = bytes(encoding.encode_to_numpy(text).astype("uint8"))  # ids are the bytes of what matched
    return {ord(c) for c in kept.decode("utf-8")}


def ranges():
    """[(first, last, flags as letters)] for every stretch of code points that has a flag."""
    text = "".join(map(chr, code_points()))
    have = [(LETTERS[name], members(pattern, text)) for name, pattern in FLAGS]
    out = []
    for c in code_points():
        flags = "".join(letter for letter, chars in have if c in chars)
        if not flags:
            continue
        if out and out[-1][1] == c - 1 and out[-1][2] == flags:
            out[-1][1] = c
        else:
            out.append([c, c, flags])
    return out


def render():
    items = [f"{{0x{first:X},0x{last:X},{flags}}}," for first, last, flags in ranges()]
    lines, line = [], ""
    for item in items:
        if line and len(line) + len(item) > 118:
            lines.append(line)
            line = ""
        line += item
    lines.append(line)
    head = (
        f"// Written by python/make_unicode_tables.py from tiktoken {tiktoken.__version__}; included by unicode.cpp.\n"
        "// {first, last, classes}; code points in no range have no class.\n"
    )
    return head + "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    table = render()
    if arguments.check:
        same = TABLE.read_text() == table
        print("unicode_table.inc is", "up to date" if same else "different")
        sys.exit(0 if same else 1)
    TABLE.write_text(table)


if __name__ == "__main__":
    main()
