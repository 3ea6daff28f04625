"""Brute force: the rules of packing, one token at a time, for tests to compare against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Segment:
    """One segment: its tokens and the tokens of its document that follow in the data."""

    row: int
    offset: int
    tokens: list[int]
    after: list[int]
    closed: bool

    def target(self, position: int, depth: int) -> int | None:
        """The token `1 + depth` places on in the same document, or None."""
        known = self.tokens + self.after
        place = position + 1 + depth
        return known[place] if place < len(known) else None


def segments_of_rows(
    rows: list[list[int]],
    eod: int,
    pad: int,
    extra: list[int] | None = None,
    row_lengths: list[int] | None = None,
) -> list[Segment]:
    """Walk every row token by token."""
    found: list[Segment] = []
    for number, row in enumerate(rows):
        limit = len(row) if row_lengths is None else min(row_lengths[number], len(row))
        current: Segment | None = None
        for column, token in enumerate(row):
            if column >= limit:
                current = None
                break
            if pad == eod and row_lengths is None:
                is_pad = token == pad and current is None
            else:
                is_pad = token == pad and pad != eod
            if is_pad:
                current = None
                continue
            if current is None:
                current = Segment(number, column, [], [], False)
                found.append(current)
            current.tokens.append(token)
            if token == eod:
                current.closed = True
                current = None
        if current is not None and extra is not None:
            held = row_lengths is None or row_lengths[number] == len(row) + 1
            if held and (pad == eod or extra[number] != pad):
                current.after.append(extra[number])
    return found


def padded_layout(segments: list[Segment], multiple: int) -> list[tuple[Segment, int] | None]:
    """(segment, position) of every output token, None in padding."""
    out: list[tuple[Segment, int] | None] = []
    for segment in segments:
        out += [(segment, i) for i in range(len(segment.tokens))]
        out += [None] * (-len(segment.tokens) % multiple)
    return out
