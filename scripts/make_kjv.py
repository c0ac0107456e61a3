#!/usr/bin/env python3
"""Writes datasets/kjv.txt.zst from the Debian packages bible-kjv and bible-kjv-text.

apt-get install bible-kjv bible-kjv-text zstd
scripts/make_kjv.py
"""

import pathlib
import re
import subprocess

OUT = pathlib.Path(__file__).resolve().parent.parent / "datasets/kjv.txt.zst"
VERSES = 31102
BOOKS = """Genesis|Exodus|Leviticus|Numbers|Deuteronomy|Joshua|Judges|Ruth|1 Samuel|2 Samuel|1 Kings|2 Kings|1 Chronicles
2 Chronicles|Ezra|Nehemiah|Esther|Job|Psalms|Proverbs|Ecclesiastes|Song of Solomon|Isaiah|Jeremiah|Lamentations|Ezekiel
Daniel|Hosea|Joel|Amos|Obadiah|Jonah|Micah|Nahum|Habakkuk|Zephaniah|Haggai|Zechariah|Malachi|Matthew|Mark|Luke|John|Acts
Romans|1 Corinthians|2 Corinthians|Galatians|Ephesians|Philippians|Colossians|1 Thessalonians|2 Thessalonians|1 Timothy
2 Timothy|Titus|Philemon|Hebrews|James|1 Peter|2 Peter|1 John|2 John|3 John|Jude|Revelation""".replace(
    "\n", "|"
).split(
    "|"
)


def main():
    run = subprocess.run(["bible", "-f", "Gen1:1-Rev22:21"], check=True, capture_output=True, text=True)
    books, labels, verses, last_chapter = [], [], 0, None
    for line in run.stdout.splitlines():  # "1Sm2:3 Talk no more so exceeding proudly; ..."
        label, chapter, verse, words = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*\S)\s*", line).groups()
        if not labels or label != labels[-1]:
            labels.append(label)
            books.append([BOOKS[len(books)] + "\n"])
            last_chapter = None
        if chapter != last_chapter:
            books[-1].append("\n")
            last_chapter = chapter
        books[-1].append(f"{chapter}:{verse} {words}\n")
        verses += 1
    assert (verses, len(books)) == (VERSES, len(BOOKS)), (verses, len(books))
    text = "\f\n".join("".join(book) for book in books)
    OUT.parent.mkdir(exist_ok=True)
    subprocess.run(["zstd", "-19", "-q", "-f", "-o", OUT], check=True, input=text.encode())


if __name__ == "__main__":
    main()
