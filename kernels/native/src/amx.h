// bf16 matmuls in the processor's tiles (Intel AMX): 16 rows times 16 columns, 32 of k at a time.
// The packed weights of linear.h have the layout of tiles, so there is no second copy.
// HAZARD(invariance): tiles sum in another order than dot products, so if they are used, they must
// compute every row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "operand.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace rayfleet {
namespace amx {

constexpr int kRows = 16;   // per tile
constexpr int kPairs = 16;  // of k per tile
constexpr int kLine = 64;   // bytes per row of a tile

// Sums of a pair of tiles times a block: 32 columns of each row.
struct Sums {
  float* data;
  int64_t stride;  // of rows, in floats
};

#if defined(RAYFLEET_EMULATE_AMX)
// Emulation of the instructions, to test the same code on machines without them.
struct Tile {
  int rows = 0;
  uint32_t data[kRows][kPairs] = {};
};
static thread_local Tile tiles[8];

static inline float half_of(uint32_t pair, int which) {
  const uint32_t bits = which ? pair & 0xffff0000u : pair << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static inline void emulated_loadconfig(const void* config) {
  for (int tile = 0; tile < 8; ++tile) {
    tiles[tile] = Tile{};
    tiles[tile].rows = ((const uint8_t*)config)[48 + tile];
  }
}
static inline void emulated_release() {}
static inline void emulated_zero(int tile) { std::memset(tiles[tile].data, 0, sizeof tiles[tile].data); }
static inline void emulated_loadd(int tile, const void* from, int64_t stride) {
  for (int row = 0; row < tiles[tile].rows; ++row)
    std::memcpy(tiles[tile].data[row], (const char*)from + row * stride, kLine);
}
static inline void emulated_stored(int tile, void* to, int64_t stride) {
  for (int row = 0; row < tiles[tile].rows; ++row)
    std::memcpy((char*)to + row * stride, tiles[tile].data[row], kLine);
}
static inline void emulated_dpbf16ps(int sum, int left, int right) {
  for (int row = 0; row < tiles[sum].rows; ++row)
    for (int column = 0; column < kLanes; ++column) {
      float sums[2] = {}, total;
      for (int pair = 0; pair < kPairs; ++pair)
        for (int which = 0; which < 2; ++which)
          sums[which] += half_of(tiles[left].data[row][pair], which) *
                         half_of(tiles[right].data[pair][column], which);
      std::memcpy(&total, &tiles[sum].data[row][column], sizeof total);
      total += sums[0] + sums[1];
      std::memcpy(&tiles[sum].data[row][column], &total, sizeof total);
    }
}
#undef _tile_loadconfig
#define _tile_loadconfig emulated_loadconfig
#undef _tile_release
#define _tile_release emulated_release
#undef _tile_zero
#define _tile_zero emulated_zero
#undef _tile_loadd
#define _tile_loadd emulated_loadd
#undef _tile_stored
#define _tile_stored emulated_stored
#undef _tile_dpbf16ps
#define _tile_dpbf16ps emulated_dpbf16ps
static inline bool permitted() { return true; }
#elif defined(__AMX_BF16__)
// Linux grants the registers if the process requests them.
static inline bool permitted() {
  constexpr long kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#endif

#if defined(RAYFLEET_EMULATE_AMX) || defined(__AMX_BF16__)

// HAZARD: GCC does not know that the intrinsics read memory, and could move or drop earlier writes.
// Call this in between.
static inline void finish_writes() { __asm__ volatile("" ::: "memory"); }

// Rows of an operand, `stride` elements apart, and one block of packed weights.
struct Operands {
  const uint32_t* rows;
  int64_t stride;
  const uint16_t* block;  // [pairs of k][32][2]
};

// Steps of k per part if there are more than four tiles of rows: a part of a block is 16 KiB, which
// stays in the L1 cache for all rows. With fewer rows, reading the weights again from the L2 cache
// is cheaper than spilling sums.
constexpr int64_t kDepth = 128;
constexpr int64_t kPairBytes = 2 * kLine;  // of a block's weights
constexpr int kStepLines = 2 * kPairs;     // of a block's weights in one step
// Tiles wait for their loads, so weights are prefetched: this many bytes ahead if each is used
// once, since a core reads 2 KiB at 20 GB/s within memory's latency of 0.1 us. Otherwise, they are
// prefetched during the previous part, some lines per step. Blocks are contiguous, so the end of
// one prefetches the next; prefetching beyond the last one is harmless.
constexpr int64_t kAhead = 8 << 10;

// Tiles 0 to 3 are sums [row half][column half], 4 and 5 rows, 6 and 7 columns. The intrinsics
// require literal tile numbers.
static inline void configure(int upper, int lower) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  const int rows[8] = {upper, upper, lower, lower, upper, lower, kPairs, kPairs};
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = (uint8_t)rows[tile];
    config.row_bytes[tile] = rows[tile] ? kLine : 0;
  }
  finish_writes();
  _tile_loadconfig(&config);
}

// Prefetches the next LINES: into the L2 cache if used after other rows, or into the L1 cache if
// all lines of a step are fetched for immediate use.
template <int LINES>
static inline void fetch(const char* next) {
#pragma GCC unroll 32
  for (int line = 0; line < LINES; ++line)
    __builtin_prefetch(next + line * kLine, 0, LINES == kStepLines ? 3 : 2);
}

// kPairs of k; LOWER: whether the second half has rows.
template <bool LOWER>
static inline void step(const uint32_t* upper, const uint32_t* lower, int64_t row_bytes,
                        const void* block) {
  _tile_loadd(6, block, kPairBytes);
  _tile_loadd(7, (const char*)block + kLine, kPairBytes);
  _tile_loadd(4, upper, row_bytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (LOWER) {
    _tile_loadd(5, lower, row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

template <bool LOWER>
static inline void load_sums(const Sums& sums) {
  const int64_t row_bytes = sums.stride * (int64_t)sizeof(float);
  _tile_loadd(0, sums.data, row_bytes);
  _tile_loadd(1, sums.data + kLanes, row_bytes);
  if constexpr (LOWER) {
    _tile_loadd(2, sums.data + kRows * sums.stride, row_bytes);
    _tile_loadd(3, sums.data + kRows * sums.stride + kLanes, row_bytes);
  }
}

template <bool LOWER>
static inline void store_sums(const Sums& sums) {
  const int64_t row_bytes = sums.stride * (int64_t)sizeof(float);
  _tile_stored(0, sums.data, row_bytes);
  _tile_stored(1, sums.data + kLanes, row_bytes);
  if constexpr (LOWER) {
    _tile_stored(2, sums.data + kRows * sums.stride, row_bytes);
    _tile_stored(3, sums.data + kRows * sums.stride + kLanes, row_bytes);
  }
}

// Pairs [begin, end) of `count` rows, up to 32, times those of one block of 32 columns, added to
// `from` (zero for the first part), written to `to`. Tiles are configured for that number of rows.
// Each step prefetches LINES lines starting at `next`.
template <bool LOWER, int LINES>
static void product(const Operands& operands, int count, int64_t begin, int64_t end,
                    const Sums& from, const Sums& to, const char* next) {
  const int64_t row_bytes = operands.stride * (int64_t)sizeof(uint32_t);
  const uint32_t* lower = operands.rows + kRows * operands.stride;
  finish_writes();
  if (begin) {
    load_sums<LOWER>(from);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (LOWER) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  int64_t done = begin;
  for (; done + kPairs <= end; done += kPairs, next += LINES * kLine) {
    fetch<LINES>(next);
    step<LOWER>(operands.rows + done, lower + done, row_bytes,
                operands.block + done * kPairBytes / 2);
  }
  if (const int64_t left = end - done) {
    // The rest is padded with zeros: memory beyond it is undefined.
    uint32_t rows[2 * kRows][kPairs] = {}, pairs[kPairs][2 * kLanes] = {};
    for (int row = 0; row < count; ++row)
      std::copy_n(operands.rows + row * operands.stride + done, left, rows[row]);
    std::memcpy(pairs, operands.block + done * kPairBytes / 2, left * kPairBytes);
    finish_writes();
    step<LOWER>(rows[0], rows[kRows], kLine, pairs);
  }
  store_sums<LOWER>(to);
}

// Whether tiles are available and correct.
static bool probe() {
  if (!permitted()) return false;
  constexpr int kCount = 19, kLength = 21;
  static uint32_t rows[kCount][kLength];
  static uint16_t block[kLength][2 * kLanes][2];
  const auto bf16 = [](int number) {  // small integers, whose sums are exact
    const float value = (float)(number % 7 - 3);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits >> 16;
  };
  for (int row = 0; row < kCount; ++row)
    for (int i = 0; i < kLength; ++i) rows[row][i] = bf16(3 * row + i) | bf16(row + 5 * i) << 16;
  for (int i = 0; i < kLength; ++i)
    for (int column = 0; column < 2 * kLanes; ++column)
      for (int which = 0; which < 2; ++which)
        block[i][column][which] = (uint16_t)bf16(2 * column + i + 4 * which);
  float sums[2 * kRows][2 * kLanes];
  configure(kRows, kCount - kRows);
  product<true, 0>({rows[0], kLength, block[0][0]}, kCount, 0, kLength, {}, {sums[0], 2 * kLanes},
                   nullptr);
  _tile_release();
  for (int row = 0; row < kCount; ++row)
    for (int column = 0; column < 2 * kLanes; ++column) {
      int wanted = 0;
      for (int i = 0; i < kLength; ++i)
        wanted += ((3 * row + i) % 7 - 3) * ((2 * column + i) % 7 - 3) +
                  ((row + 5 * i) % 7 - 3) * ((2 * column + i + 4) % 7 - 3);
      if (sums[row][column] != (float)wanted) return false;
    }
  return true;
}

static inline bool usable() {
  static const bool known = probe();
  return known;
}

// Tiles configured for the number of rows of the last matmul.
class Tiles {
 public:
  ~Tiles() { _tile_release(); }

  template <int LINES>
  void multiply(const Operands& operands, int count, int64_t begin, int64_t end, const Sums& from,
                const Sums& to, const char* next) {
    if (count != count_) configure(std::min(count, kRows), std::max(count - kRows, 0));
    count_ = count;
    count > kRows ? product<true, LINES>(operands, count, begin, end, from, to, next)
                  : product<false, LINES>(operands, count, begin, end, from, to, next);
  }

 private:
  int count_ = -1;
};

// Calls `body` with a constant: the lines of weights to prefetch per step, given the number of
// pairs of row tiles of the previous part. A power of two, so that all steps together fetch all
// lines.
template <typename Body>
static inline void with_lines(int64_t pairs, Body&& body) {
  if (pairs == 1) return body(std::integral_constant<int, kStepLines>{});
  if (pairs < 4) return body(std::integral_constant<int, kStepLines / 2>{});
  if (pairs < 8) return body(std::integral_constant<int, kStepLines / 4>{});
  return body(std::integral_constant<int, kStepLines / 8>{});
}

// One work item: rows [begin, end) of the operand times blocks [first, last).
struct Item {
  const uint32_t* operand;
  int64_t stride;  // between its rows
  const uint16_t* packed;
  int64_t length, begin, end, first, last;

  int64_t pairs() const { return (end - begin + 2 * kRows - 1) / (2 * kRows); }
  int64_t depth() const { return pairs() > 2 ? kDepth : length; }

  const uint16_t* weights(int64_t block, int64_t part) const {
    return packed + (block * length + part) * kPairBytes / 2;
  }

  // The part multiplied after this one, in this item or the one with the following blocks.
  const uint16_t* after(int64_t block, int64_t part) const {
    if (block + 1 < last) return weights(block + 1, part);
    return part + depth() < length ? weights(first, part + depth()) : weights(last, 0);
  }
};

// Sums are written to place(row, block); if that is null, into `room`, which has space for all of
// them with rows in whole pairs of tiles, and then passed to take(row, block, its 32 columns).
template <typename Place, typename Take>
static void linear_item(const Item& item, float* room, Place&& place, Take&& take) {
  constexpr int64_t kPair = 2 * kRows;
  Tiles tiles;
  with_lines(item.pairs(), [&](auto lines) {
    const int64_t depth = item.depth();
    for (int64_t part = 0; part < item.length; part += depth)
      for (int64_t block = item.first; block < item.last; ++block) {
        const int64_t part_end = std::min(part + depth, item.length);
        const uint16_t* weights = item.weights(block, 0);
        const char* next = item.pairs() == 1 ? (const char*)weights + kAhead
                                             : (const char*)item.after(block, part);
        for (int64_t row = item.begin; row < item.end; row += kPair) {
          const int count = (int)std::min<int64_t>(item.end - row, kPair);
          const Operands operands{item.operand + row * item.stride, item.stride, weights};
          const int64_t pair =
              (row - item.begin) / kPair * (item.last - item.first) + block - item.first;
          const Sums own{room + pair * kPair * kPair, kPair};
          const Sums placed = part_end == item.length ? place(row, block) : Sums{};
          const Sums& to = placed.data ? placed : own;
          tiles.multiply<lines.value>(operands, count, part, part_end, own, to, next);
          next += (part_end - part) / kPairs * lines.value * kLine;
          if (part_end == item.length && !placed.data)
            for (int r = 0; r < count; ++r) take(row + r, block, own.data + r * kPair);
        }
      }
  });
}

#else

static inline bool usable() { return false; }

#endif

}  // namespace amx
}  // namespace rayfleet
