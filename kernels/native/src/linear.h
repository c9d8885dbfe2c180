// Matmuls with packed weights. A weight [N, K] is stored in blocks of 32 columns of its transpose:
//   fp32   packed[block][k][32]
//   bf16   packed[block][k / 2][32][2]: neighbors in k side by side, as dot products read them
// HAZARD(invariance): each output is one chain of fused multiply-adds over k, in every tile shape,
// so a row's result never depends on other rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "amx.h"
#include "operand.h"

namespace rayfleet {

constexpr int kBlock = 32;
constexpr int kGroup = 4;  // number of blocks per work item
constexpr int kMostRows = 96;  // maximum number of rows per work item
// With tiles (amx.h), a core computes about 2 TFLOP/s, and a weight of two bytes used for this many
// rows gives 256 operations per byte: 8 GB/s, less than the bandwidth of the L3 cache.
constexpr int kMostTileRows = 256;
// Steps of k per part if there are many rows: a part of kMostRows rows (4 bytes per step) and of a
// block of weights (128) is 256 KiB, which fits in the L2 cache.
constexpr int64_t kDepth = 512;
constexpr int kMaxRows = kRegisterLanes == 16 ? 12 : kRegisterLanes == 8 ? 6 : 3;

// Whether matmuls with such weights use amx.h.
template <typename W>
static inline bool in_tiles() {
  return sizeof(W) == 2 && amx::usable();
}

static inline int64_t blocks_of(int64_t n) { return (n + kBlock - 1) / kBlock; }

// Storage of packed weights per block, in elements.
template <typename W>
static inline int64_t block_elements(int64_t k) {
  return Operand<W>::length(k) * Operand<W>::kPer * kBlock;
}

template <typename W>
void pack(const W* weight, int64_t n, int64_t k, W* packed) {
  for (int64_t block = 0; block < blocks_of(n); ++block)
    for (int64_t j = 0; j < kBlock; ++j) {
      const int64_t row = block * kBlock + j;
      W* to = packed + block * block_elements<W>(k);
      constexpr int64_t kPer = Operand<W>::kPer;
      for (int64_t i = 0; i < Operand<W>::length(k) * kPer; ++i)
        to[(i / kPer * kBlock + j) * kPer + i % kPer] =
            row < n && i < k ? weight[row * k + i] : W(0);
    }
}

// HAZARD: by default, GCC does not inline sinks that are used twice and keeps their vectors and
// constants in memory: prompts took 20 % longer.
#define RAYFLEET_INLINE __attribute__((always_inline)) inline

// A weight and its bias.
template <typename W>
struct Weight {
  const W* packed;
  const float* bias;  // null if there is none
  int64_t n, k;
};

// Sink for plain sums: floats, with a row stride.
struct Floats {
  float* out;
  int64_t stride;

  template <typename W>
  RAYFLEET_INLINE void take(const F32* sums, int64_t row, int64_t block,
                            const Weight<W>& weight) const {
    for (int half = 0; half < 2; ++half) {
      const int64_t column = block * kBlock + half * kLanes;
      const int64_t left = weight.n - column;
      const float* bias = weight.bias;
      float* to = out + row * stride + column;
      if (left >= kLanes) {
        store(to, bias ? sums[half] + load(bias + column) : sums[half]);
        continue;
      }
      for (int64_t lane = 0; lane < left; ++lane)
        to[lane] = sums[half][lane] + (bias ? bias[column + lane] : 0.0f);
    }
  }

  // Address for the sums of a whole block, if they may be written directly.
  template <typename W>
  amx::Sums place(int64_t row, int64_t block, const Weight<W>& weight) const {
    const bool fits = !weight.bias && (block + 1) * kBlock <= weight.n;
    return {fits ? out + row * stride + block * kBlock : nullptr, stride};
  }
};

// The gated activation: silu(gate) * up.
static RAYFLEET_INLINE F32 gated(F32 gate, F32 up) {
  return gate / (splat(1.0f) + exponential(-gate)) * up;
}

// Sink for blocks of 16 columns of a gate and the matching 16 of the up projection: silu(gate) *
// up, as elements for the next matmul, n / 2 per row.
template <typename W>
struct Gated {
  typename Operand<W>::Element* out;

  RAYFLEET_INLINE void take(const F32* sums, int64_t row, int64_t block,
                            const Weight<W>& weight) const {
    F32 gate = sums[0], up = sums[1];
    if (weight.bias) {
      gate = gate + load(weight.bias + block * kBlock);
      up = up + load(weight.bias + block * kBlock + kLanes);
    }
    W* to = (W*)(out + row * row_stride<W>(weight.n / 2)) + block * kLanes;
    store_any(to, gated(gate, up));
  }

  amx::Sums place(int64_t, int64_t, const Weight<W>&) const { return {nullptr, 0}; }
};

// Sink for GELU with the error function, as elements for the next matmul.
template <typename W>
struct Gelu {
  typename Operand<W>::Element* out;

  RAYFLEET_INLINE void take(const F32* sums, int64_t row, int64_t block,
                            const Weight<W>& weight) const {
    W* to = (W*)(out + row * row_stride<W>(weight.n));
    for (int half = 0; half < 2; ++half) {
      const int64_t column = block * kBlock + half * kLanes;
      if (column >= weight.n) return;
      const F32 x = weight.bias ? sums[half] + load(weight.bias + column) : sums[half];
      store_any(to + column, splat(0.5f) * x * (splat(1.0f) + error_function(x * splat(kRootHalf))));
    }
  }

  amx::Sums place(int64_t, int64_t, const Weight<W>&) const { return {nullptr, 0}; }

 private:
  static constexpr float kRootHalf = 0.70710678f;
};

// Operands of a work item, and its sums between two parts of k: the order of a sum over k is the
// same with and without parts.
template <typename W, typename Sink>
struct Product {
  const typename Operand<W>::Element* operand;
  const Weight<W>& weight;
  const Sink& sink;
  int64_t first_row, first_block;
  float* sums;  // [kMostRows, kGroup * kBlock]

  int64_t length() const { return Operand<W>::length(weight.k); }

  const W* weights(int64_t block, int64_t step) const {
    return weight.packed + block * block_elements<W>(weight.k) + step * Operand<W>::kPer * kBlock;
  }

  // The next block, of this work item or another; for the last block, the block itself.
  const W* after(int64_t block) const {
    return weights(block + (block + 1 < blocks_of(weight.n)), 0);
  }

  float* waiting(int64_t row, int64_t block) const {
    return sums + ((row - first_row) * kGroup + block - first_block) * kBlock;
  }
};

// Steps [begin, end) of ROWS rows starting at `row` times BLOCKS blocks of columns starting at
// `block`. With FETCH, prefetches the weights starting at `next`: memory is idle while cached
// weights are used for more rows.
template <typename W, int ROWS, int BLOCKS, bool FETCH, typename Sink>
static void tile(const Product<W, Sink>& product, int64_t row, int64_t block, int64_t begin,
                 int64_t end, const W* next) {
  constexpr int kStep = Operand<W>::kPer * kBlock;  // weights per step of k
  constexpr int kHalf = kStep / 2;
  const int64_t length = product.length();
  const int64_t row_step = row_stride<W>(product.weight.k);
  const auto* x = product.operand + row * row_step + begin;
  const int64_t stride = block_elements<W>(product.weight.k);
  const W* w = product.weights(block, begin);
  // Vectors of columns per set of registers.
  constexpr int kAtOnce = kRegisterLanes == 16 || ROWS <= 3 ? 2 * BLOCKS : 1;
  F32 totals[ROWS][2 * BLOCKS];
  for (int first = 0; first < 2 * BLOCKS; first += kAtOnce) {
    F32 sums[ROWS][kAtOnce] = {};
    if (begin)
      for (int r = 0; r < ROWS; ++r)
        for (int b = 0; b < kAtOnce; ++b)
          sums[r][b] = load(product.waiting(row + r, block) + (first + b) * kLanes);
    for (int64_t i = 0; i < end - begin; ++i) {
      if constexpr (FETCH) {
        __builtin_prefetch(next + i * kStep, 0, 2);
        __builtin_prefetch(next + i * kStep + kHalf, 0, 2);
      }
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int b = 0; b < kAtOnce; ++b) {
          const int column = first + b;
          const W* from = w + (column / 2) * stride + i * kStep + (column % 2) * kHalf;
          sums[r][b] = multiply_add(sums[r][b], x[r * row_step + i], load_operand(from));
        }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int b = 0; b < kAtOnce; ++b) totals[r][first + b] = sums[r][b];
  }
  for (int r = 0; r < ROWS; ++r)
    for (int b = 0; b < BLOCKS; ++b)
      if (end == length)
        product.sink.take(&totals[r][2 * b], row + r, block + b, product.weight);
      else
        for (int half = 0; half < 2; ++half)
          store(product.waiting(row + r, block + b) + half * kLanes, totals[r][2 * b + half]);
}

// All of k for few rows, which are memory-bound: for one or two rows, memory streams best from
// several blocks at once; with more rows, there is time to prefetch.
template <typename W, int ROWS, typename Sink>
static void tile_rows(const Product<W, Sink>& product, int64_t last) {
  constexpr int kWidth = kRegisterLanes < 16 ? (ROWS == 1 ? 2 : 1)
                         : ROWS <= 2         ? 4
                         : ROWS <= 4         ? 2
                                             : 1;
  const int64_t row = product.first_row, length = product.length();
  int64_t block = product.first_block;
  if constexpr (kWidth > 1)
    for (; block + kWidth <= last; block += kWidth)
      tile<W, ROWS, kWidth, false>(product, row, block, 0, length, nullptr);
  for (; block < last; ++block)
    tile<W, ROWS, 1, true>(product, row, block, 0, length, product.after(block));
}

// Calls `body` with `count` as a constant, from 1 to ROWS.
template <int ROWS, typename Body>
static void with_constant(int64_t count, Body&& body) {
  if (count == ROWS) return body(std::integral_constant<int, ROWS>{});
  if constexpr (ROWS > 1) with_constant<ROWS - 1>(count, body);
}

// A part of k of one block for many rows.
template <typename W, typename Sink>
static void tile_part(const Product<W, Sink>& product, int64_t block, int64_t last, int64_t step,
                      int64_t count) {
  const int64_t end = std::min(step + kDepth, product.length());
  const W* next = block + 1 < last         ? product.weights(block + 1, step)
                  : end < product.length() ? product.weights(product.first_block, end)
                                           : product.after(block);
  const int64_t tiles = (count + kMaxRows - 1) / kMaxRows;
  for (int64_t t = 0, done = 0; t < tiles; ++t) {
    // With wide registers, tiles are even: 14 rows are 7 and 7 rather than 12 and 2. Otherwise,
    // only a full tile has enough parallel sums to hide their latency, and the last tile is full,
    // since it has time to prefetch.
    const int64_t size = kRegisterLanes == 16 ? (count - done + tiles - t - 1) / (tiles - t)
                         : t                  ? kMaxRows
                                              : count - (tiles - 1) * kMaxRows;
    with_constant<kMaxRows>(size, [&](auto constant) {
      const int64_t row = product.first_row + done;
      t + 1 < tiles
          ? tile<W, constant.value, 1, false>(product, row, block, step, end, nullptr)
          : tile<W, constant.value, 1, true>(product, row, block, step, end, next);
    });
    done += size;
  }
}

// Work items of a matmul: groups of blocks, and, with many rows, equal groups of rows, of whole
// pairs of tiles if these are used. With few columns there are few items, and one thread would
// often have one more than others, so items have fewer rows. Items of the same rows are
// consecutive, so that a thread has the same rows here as in phases by row.
struct Items {
  int64_t rows, groups, row_parts, unit;  // unit: indivisible number of rows

  int64_t count() const { return groups * row_parts; }

  int64_t first_row(int64_t part) const {
    return std::min(rows, (rows + unit - 1) / unit * part / row_parts * unit);
  }
};

template <typename W>
static Items items_of(int64_t rows, int64_t n, int threads) {
  constexpr int64_t kPair = 2 * amx::kRows;
  Items items{rows, (blocks_of(n) + kGroup - 1) / kGroup, 1, in_tiles<W>() ? kPair : 1};
  const auto divide = [&](int64_t most) { items.row_parts = (rows + most - 1) / most; };
  if (!in_tiles<W>()) {
    divide(blocks_of(n) <= 4 * kGroup ? kMostRows / 2 : kMostRows);
    return items;
  }
  int64_t most = kMostTileRows;
  divide(most);
  while (items.count() < 2 * threads && most > kPair) divide(most /= 2);
  return items;
}

// One work item of the operand's rows times the weight, into the sink.
template <typename W, typename Sink>
static void linear_item(int64_t item, const Items& items,
                        const typename Operand<W>::Element* operand, int64_t rows,
                        const Weight<W>& weight, const Sink& sink) {
  alignas(64) float sums[std::max(kMostRows, kMostTileRows) * kGroup * kBlock];
  const int64_t first = item % items.groups * kGroup;
  const int64_t last = std::min(first + kGroup, blocks_of(weight.n));
  const int64_t begin = items.first_row(item / items.groups);
  const int64_t count = items.first_row(item / items.groups + 1) - begin;
#if defined(RAYFLEET_EMULATE_AMX) || defined(__AMX_BF16__)
  if constexpr (sizeof(W) == 2)
    if (in_tiles<W>())
      return amx::linear_item(
          {operand, row_stride<W>(weight.k), weight.packed, Operand<W>::length(weight.k), begin,
           begin + count, first, last},
          sums,
          [&](int64_t row, int64_t block) { return sink.place(row, block, weight); },
          [&](int64_t row, int64_t block, const float* sums) {
            const F32 halves[2] = {load(sums), load(sums + kLanes)};
            sink.take(halves, row, block, weight);
          });
#endif
  const Product<W, Sink> product{operand, weight, sink, begin, first, sums};
  if (count <= kMaxRows)
    return with_constant<kMaxRows>(count, [&](auto constant) {
      tile_rows<W, constant.value>(product, last);
    });
  for (int64_t step = 0; step < product.length(); step += kDepth)
    for (int64_t block = first; block < last; ++block)
      tile_part(product, block, last, step, count);
}

}  // namespace rayfleet
