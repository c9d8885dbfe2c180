// Products of bf16 in the processor's tiles (Intel's AMX): 16 rows times 16 columns, 32 of k at a time.
// The packed weights of linear.h lie as tiles take them, so nothing is kept twice. HAZARD(invariance):
// tiles add up in another order than dot products do, so where they are used, they take every row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "operand.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace rayfleet {
namespace amx {

constexpr int kRows = 16;   // of a tile
constexpr int kPairs = 16;  // of k, that a tile has
constexpr int kLine = 64;   // bytes of its row

#if defined(RAYFLEET_EMULATE_AMX)
// What the instructions do, for machines that lack them: tests run the same code on them.
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
// Linux gives a process the registers when it asks for them.
static inline bool permitted() {
  constexpr long kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#endif

#if defined(RAYFLEET_EMULATE_AMX) || defined(__AMX_BF16__)

// Rows of an operand, `stride` elements apart, and one block of packed weights.
struct Operands {
  const uint32_t* rows;
  int64_t stride;
  const uint16_t* block;  // [length][32][2]
  int64_t length;         // pairs of k
};

// Tiles 0 to 3 sum [row half][column half], 4 and 5 have rows, 6 and 7 columns. The intrinsics take
// their numbers only as they are written.
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
  _tile_loadconfig(&config);
}

// kPairs of k; LOWER: whether the second half has rows.
template <bool LOWER>
static inline void step(const uint32_t* upper, const uint32_t* lower, int64_t row_bytes,
                        const void* block, int64_t pair_bytes) {
  _tile_loadd(6, block, pair_bytes);
  _tile_loadd(7, (const char*)block + kLine, pair_bytes);
  _tile_loadd(4, upper, row_bytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (LOWER) {
    _tile_loadd(5, lower, row_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// `count` rows, up to 32, times one block of 32 columns: sums [count, 32]. Tiles are configured for
// so many rows.
template <bool LOWER>
static void product(const Operands& operands, int count, float* sums) {
  constexpr int64_t kPairBytes = 2 * kLine;
  const int64_t row_bytes = operands.stride * (int64_t)sizeof(uint32_t);
  const uint32_t* lower = operands.rows + kRows * operands.stride;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (LOWER) {
    _tile_zero(2);
    _tile_zero(3);
  }
  int64_t done = 0;
  for (; done + kPairs <= operands.length; done += kPairs)
    step<LOWER>(operands.rows + done, lower + done, row_bytes,
                operands.block + done * kPairBytes / 2, kPairBytes);
  if (const int64_t left = operands.length - done) {
    // The rest goes with zeros: beyond it there may be anything.
    uint32_t rows[2 * kRows][kPairs] = {}, pairs[kPairs][2 * kLanes] = {};
    for (int row = 0; row < count; ++row)
      std::copy_n(operands.rows + row * operands.stride + done, left, rows[row]);
    std::memcpy(pairs, operands.block + done * kPairBytes / 2, left * kPairBytes);
    step<LOWER>(rows[0], rows[kRows], kLine, pairs, kPairBytes);
  }
  _tile_stored(0, sums, kPairBytes);
  _tile_stored(1, sums + kLanes, kPairBytes);
  if constexpr (LOWER) {
    _tile_stored(2, sums + kRows * 2 * kLanes, kPairBytes);
    _tile_stored(3, sums + kRows * 2 * kLanes + kLanes, kPairBytes);
  }
}

// Whether tiles are there and multiply right.
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
  product<true>({rows[0], kLength, block[0][0], kLength}, kCount, sums[0]);
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

// Calls take(row, block, sums of its 32 columns) for a work item: rows [begin, end) of the operand
// times blocks [first, last).
template <typename Take>
static void linear_item(const uint32_t* operand, int64_t stride, const uint16_t* packed,
                        int64_t length, int64_t begin, int64_t end, int64_t first, int64_t last,
                        Take&& take) {
  alignas(64) float sums[2 * kRows * 2 * kLanes];
  int upper = -1, lower = -1;
  for (int64_t block = first; block < last; ++block)
    for (int64_t row = begin; row < end; row += 2 * kRows) {
      const int count = (int)std::min<int64_t>(end - row, 2 * kRows);
      if (upper != std::min(count, kRows) || lower != std::max(count - kRows, 0)) {
        upper = std::min(count, kRows);
        lower = std::max(count - kRows, 0);
        configure(upper, lower);
      }
      const Operands operands{operand + row * stride, stride,
                              packed + block * length * 2 * 2 * kLanes, length};
      lower ? product<true>(operands, count, sums) : product<false>(operands, count, sums);
      for (int r = 0; r < count; ++r) take(row + r, block, sums + r * 2 * kLanes);
    }
  _tile_release();
}

#else

static inline bool usable() { return false; }

#endif

}  // namespace amx
}  // namespace rayfleet
