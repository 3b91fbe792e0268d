"""Pairs of sequences for translation: dates in many formats, and numbers in words. Both are generated."""

from __future__ import annotations

import calendar
import datetime

import numpy as np

PAD, START, END = 0, 1, 2
_CHARACTERS = "0123456789-,./ abcdefghijklmnopqrstuvwxyz"
SYMBOLS = 3 + len(_CHARACTERS)
_CODES = {character: 3 + i for i, character in enumerate(_CHARACTERS)}
_FIRST, _LAST = datetime.date(1950, 1, 1).toordinal(), datetime.date(2050, 1, 1).toordinal()
_UNITS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
_UNITS += "seventeen eighteen nineteen".split()
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()


def encode(text: str, length: int, end: bool = False) -> list[int]:
    """A text as a list of codes, padded; `end` marks its end."""
    codes = [_CODES[character] for character in text.lower()] + [END] * end
    return codes + [PAD] * (length - len(codes))


def _format_date(day: datetime.date, index: int) -> str:
    month = calendar.month_name[day.month]
    formats = (
        f"{month} {day.day}, {day.year}",
        f"{day.day} {month} {day.year}",
        f"{day.day} {month[:3]} {day.year}",
        f"{day.month}/{day.day}/{day.year}",
        f"{day.day}.{day.month}.{day.year}",
        f"{calendar.day_name[day.weekday()]}, {month} {day.day} {day.year}",
    )
    return formats[index]


def spell_out(number: int) -> str:
    """An English numeral below one million."""
    if number < 20:
        return _UNITS[number]
    if number < 100:
        return _TENS[number // 10] + (f" {_UNITS[number % 10]}" if number % 10 else "")
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    rest = number % size
    return f"{spell_out(number // size)} {name}" + (f" {spell_out(rest)}" if rest else "")


def dates(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Dates as people write them, and the same in ISO 8601."""
    days = [datetime.date.fromordinal(int(n)) for n in rng.integers(_FIRST, _LAST, count)]
    formats = rng.integers(6, size=count)
    sources = [encode(_format_date(day, int(index)), 28) for day, index in zip(days, formats, strict=True)]
    return _pairs(sources, [encode(day.isoformat(), 11, end=True) for day in days])


def numerals(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Numbers below 10,000 in words, and the same in digits."""
    numbers = [int(10 ** rng.uniform(0, 4)) for _ in range(count)]
    return _pairs([encode(spell_out(n), 44) for n in numbers], [encode(str(n), 5, end=True) for n in numbers])


def _pairs(sources: list[list[int]], targets: list[list[int]]) -> dict[str, np.ndarray]:
    target = np.array(targets, np.int32)
    shifted = np.concatenate([np.full((len(target), 1), START, np.int32), target[:, :-1]], 1)
    return {"source": np.array(sources, np.int32), "shifted": shifted, "target": target}


def sequence_accuracy(predicted: np.ndarray, test: dict[str, np.ndarray]) -> float:
    """Percentage of targets that are predicted without any error (up to their end)."""
    same = (np.asarray(predicted) == test["target"]) | (test["target"] == PAD)
    return 100 * float(np.mean(same.all(1)))
