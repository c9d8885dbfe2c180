// Products with packed weights. A weight [N, K] lies in blocks of 32 columns of its transpose:
//   fp32   packed[block][k][32]
//   bf16   packed[block][k / 2][32][2]: neighbours in k side by side, as dot products take them
// HAZARD(invariance): each output is one chain of fused multiply-adds over k, in every tile shape,
// so a row's result never depends on the other rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "operand.h"

namespace rayfleet {

constexpr int kBlock = 32;
constexpr int kGroup = 4;  // blocks that one work item covers
#if defined(__AVX512F__)
constexpr int kMaxRows = 12;
#else
constexpr int kMaxRows = 3;  // registers hold a quarter or half as much
#endif

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

// A weight with what belongs to it.
template <typename W>
struct Weight {
  const W* packed;
  const float* bias;  // null for none
  int64_t n, k;
};

// Where sums go as they are: floats, so many from one row to the next.
struct Floats {
  float* out;
  int64_t stride;

  template <typename W>
  void take(const F32* sums, int64_t row, int64_t block, const Weight<W>& weight) const {
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
};

// Where each block is 16 columns of a gate and the 16 of the up projection that belong to them:
// silu(gate) * up, as the elements of the next product, [rows, length(n / 2)].
template <typename W>
struct Gated {
  typename Operand<W>::Element* out;

  void take(const F32* sums, int64_t row, int64_t block, const Weight<W>& weight) const {
    F32 gate = sums[0], up = sums[1];
    if (weight.bias) {
      gate = gate + load(weight.bias + block * kBlock);
      up = up + load(weight.bias + block * kBlock + kLanes);
    }
    W* to = (W*)(out + row * Operand<W>::length(weight.n / 2)) + block * kLanes;
    store_any(to, gate / (splat(1.0f) + exponential(-gate)) * up);
  }
};

// ROWS rows from `row` on times BLOCKS blocks of columns, the first of which is `block`. With FETCH
// the block after them is brought near meanwhile: the memory has nothing else to do while weights
// that are in the cache already meet more rows.
template <typename W, int ROWS, int BLOCKS, bool FETCH, typename Sink>
static void tile(const typename Operand<W>::Element* operand, const Weight<W>& weight, int64_t row,
                 int64_t block, const Sink& sink) {
  constexpr int kStep = Operand<W>::kPer * kBlock;  // weights per step of k
  constexpr int kHalf = kStep / 2;
  const int64_t length = Operand<W>::length(weight.k);
  const auto* x = operand + row * length;
  const int64_t stride = block_elements<W>(weight.k);
  const W* w = weight.packed + block * stride;
  const W* next = w + BLOCKS * stride;
  F32 sums[ROWS][2 * BLOCKS] = {};
  for (int64_t i = 0; i < length; ++i) {
    if constexpr (FETCH) {
      __builtin_prefetch(next + i * kStep, 0, 2);
      __builtin_prefetch(next + i * kStep + kHalf, 0, 2);
    }
    for (int r = 0; r < ROWS; ++r)
      for (int b = 0; b < 2 * BLOCKS; ++b)
        sums[r][b] =
            multiply_add(sums[r][b], x[r * length + i],
                         load_operand(w + (b / 2) * stride + i * kStep + (b % 2) * kHalf));
  }
  for (int r = 0; r < ROWS; ++r)
    for (int b = 0; b < BLOCKS; ++b) sink.take(&sums[r][2 * b], row + r, block + b, weight);
}

template <typename W, int ROWS, typename Sink>
static void tile_rows(const typename Operand<W>::Element* operand, const Weight<W>& weight,
                      int64_t row, int64_t first, int64_t last, bool fetch, const Sink& sink) {
  // One or two rows wait for the memory, which streams best from several blocks at once; more of
  // them have time to fetch ahead.
  constexpr int kWidth = kMaxRows < 12 ? 1 : ROWS <= 2 ? 4 : ROWS <= 3 ? 2 : 1;
  int64_t block = first;
  if constexpr (kWidth > 1)
    for (; block + kWidth <= last; block += kWidth)
      tile<W, ROWS, kWidth, false>(operand, weight, row, block, sink);
  for (; block < last; ++block)
    fetch ? tile<W, ROWS, 1, true>(operand, weight, row, block, sink)
          : tile<W, ROWS, 1, false>(operand, weight, row, block, sink);
}

template <typename W, int ROWS, typename Sink>
static void tile_up_to(int64_t count, const typename Operand<W>::Element* operand,
                       const Weight<W>& weight, int64_t row, int64_t first, int64_t last,
                       bool fetch, const Sink& sink) {
  if (count == ROWS) return tile_rows<W, ROWS>(operand, weight, row, first, last, fetch, sink);
  if constexpr (ROWS > 1)
    tile_up_to<W, ROWS - 1>(count, operand, weight, row, first, last, fetch, sink);
}

// Work items of a product: groups of blocks, and of rows where there are many. Few columns make few
// items, of which one thread would often have one more to do than the others: these have fewer rows.
static inline int64_t rows_per_item(int64_t n) { return blocks_of(n) <= 4 * kGroup ? 48 : 96; }

static inline int64_t linear_items(int64_t rows, int64_t n) {
  const int64_t groups = (blocks_of(n) + kGroup - 1) / kGroup;
  return groups * ((rows + rows_per_item(n) - 1) / rows_per_item(n));
}

// rows of the operand times the weight, into the sink; one work item of it.
template <typename W, typename Sink>
static void linear_item(int64_t item, const typename Operand<W>::Element* operand, int64_t rows,
                        const Weight<W>& weight, const Sink& sink) {
  const int64_t groups = (blocks_of(weight.n) + kGroup - 1) / kGroup;
  const int64_t first = item % groups * kGroup;
  const int64_t last = std::min(first + kGroup, blocks_of(weight.n));
  const int64_t begin = item / groups * rows_per_item(weight.n);
  const int64_t end = std::min(rows, begin + rows_per_item(weight.n));
  // Even tiles: 14 rows are 7 and 7 rather than 12 and 2.
  const int64_t tiles = (end - begin + kMaxRows - 1) / kMaxRows;
  // Weights of few columns stay in the first-level cache while the rows pass.
  const int64_t width = tiles > 1 ? 1 : kGroup;
  for (int64_t block = first; block < last; block += width)
    for (int64_t t = 0, row = begin; t < tiles; ++t) {
      const int64_t count = (end - row + tiles - t - 1) / (tiles - t);
      const bool fetch = t + 1 == tiles && block + 1 < blocks_of(weight.n);
      tile_up_to<W, kMaxRows>(count, operand, weight, row, block, std::min(block + width, last),
                              fetch, sink);
      row += count;
    }
}

}  // namespace rayfleet
