// Walking the pieces of a pack; see reference.py for what a piece is.

#pragma once

#include <algorithm>

#include "arrays.h"

namespace packed {

// Calls `write(piece)` for every piece and `pad(begin, end)` for all that lies between.
template <class Write, class Pad>
inline void walk(const Span<Piece>& list, int64_t segments, int64_t size, const Write& write,
          const Pad& pad) {
  int64_t cursor = 0;
  for (int64_t i = 0; i < list.size; ++i) {
    const Piece& piece = list[i];
    if (piece.destination < cursor || piece.count < 0 || piece.count > size - piece.destination ||
        piece.position < 0)
      fail("piece: outside the output, or out of order");
    if (piece.segment < 0 || piece.segment >= segments) fail("piece: no such segment");
    if (piece.destination > cursor) pad(cursor, piece.destination);
    write(piece);
    cursor = piece.destination + piece.count;
  }
  if (cursor < size) pad(cursor, size);
}

// How many of a piece's positions, from its first, have a token `shift` places on.
inline int64_t held(const Piece& piece, int64_t extent, int64_t step, int64_t shift) {
  const int64_t room = extent - piece.position - shift;
  if (room <= 0) return 0;
  return std::min(piece.count, step == 1 ? room : (room + step - 1) / step);
}

// to[i] = first + i * step.
void iota(int64_t* to, int64_t count, int64_t first, int64_t step);

}  // namespace packed
