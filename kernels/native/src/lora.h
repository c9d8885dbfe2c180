// LoRA: adds B (A x), the output of low-rank adapters, to the output of a linear layer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "operand.h"
#include "simd.h"

namespace rayfleet {

// Adapters of a linear layer; mirrored in library.py, as are the following two.
struct LoraWeights {
  const void* a;         // [slots, projections * rank, num_in]
  const void* b;         // [slots, rank, num_out]
  const int64_t* ranks;  // [slots]: number of leading ranks that are not zero
  const int64_t* parts;  // [num_parts, 3]: first output feature, end, projection
  int64_t num_in, num_out, rank, num_projections, num_parts;
};

// Tokens of a step that have an adapter.
struct LoraTokens {
  const int64_t* tokens;  // one adapter after another
  const int64_t* groups;  // [num_groups, 3]: 1-based slot, first of its `tokens`, end
  int64_t num_groups;
};

// A call for a single layer.
struct LoraStep {
  const LoraWeights* weights;
  LoraTokens tokens;
  void* out;            // [tokens, num_out]
  const void* x;        // [tokens, num_in]
  int64_t num_threads;  // maximum number of threads
};

// Some of the tokens of one adapter.
struct LoraChunk {
  int64_t slot, first, end;  // 0-based slot
};

static inline std::vector<LoraChunk> lora_chunks(const LoraTokens& tokens) {
  constexpr int64_t kChunk = 64;
  std::vector<LoraChunk> chunks;
  for (int64_t i = 0; i < tokens.num_groups; ++i) {
    const int64_t *group = tokens.groups + 3 * i, end = group[2];
    for (int64_t first = group[1]; first < end; first += kChunk)
      chunks.push_back({group[0] - 1, first, std::min(first + kChunk, end)});
  }
  return chunks;
}

// Input and output of a layer; strides are in elements.
template <typename T, typename Out>
struct LoraRows {
  const T* x;
  int64_t x_stride;
  Out* out;
  int64_t out_stride;
  int64_t first, end;  // output features to compute
  bool is_paired;      // whether vectors of both halves of the output features alternate in `out`
};

// Computes in T; adds to outputs in Out.
template <typename T, typename Out>
class LoraProduct {
 public:
  LoraProduct(const LoraWeights& weights, const LoraRows<T, Out>& rows, const int64_t* tokens)
      : w_(weights), rows_(rows), tokens_(tokens), shrunk_(kTokens * weights.rank) {}

  void run(const LoraChunk& chunk) {
    num_ranks_ = w_.ranks[chunk.slot];
    if (!num_ranks_) return;
    a_ = (const T*)w_.a + chunk.slot * w_.num_projections * w_.rank * w_.num_in;
    b_ = (const T*)w_.b + chunk.slot * w_.rank * w_.num_out;
    int64_t first = chunk.first;
    for (; first + kTokens <= chunk.end; first += kTokens) add<kTokens>(first);
    for (; first < chunk.end; ++first) add<1>(first);
  }

 private:
  static constexpr int kTokens = 4;
  static constexpr int kRanks = 4;

  // Output features whose distance in `out` is regular.
  struct Columns {
    int64_t first, end;  // of B
    int64_t origin;      // place of the first one in `out`
    int64_t step;        // distance of vectors in `out`, in vectors

    int64_t place(int64_t column) const {
      const int64_t index = column - first;
      return origin + index / kLanes * kLanes * step + index % kLanes;
    }
  };

  // HAZARD(invariance): a token's sums run in the same order with any COUNT.
  template <int COUNT>
  void add(int64_t first) {
    const T* x[COUNT];
    Out* out[COUNT];
    for (int t = 0; t < COUNT; ++t) {
      x[t] = rows_.x + tokens_[first + t] * rows_.x_stride;
      out[t] = rows_.out + tokens_[first + t] * rows_.out_stride;
    }
    for (int64_t i = 0; i < w_.num_parts; ++i) {
      const int64_t* part = w_.parts + 3 * i;
      const int64_t begin = std::max(part[0], rows_.first), end = std::min(part[1], rows_.end);
      if (begin >= end) continue;
      int64_t rank = 0;
      for (; rank + kRanks <= num_ranks_; rank += kRanks) shrink<COUNT, kRanks>(x, part[2], rank);
      for (; rank < num_ranks_; ++rank) shrink<COUNT, 1>(x, part[2], rank);
      const int64_t middle = w_.num_out / 2;  // no part of paired features begins within a half
      if (!rows_.is_paired) {
        expand_all<COUNT>(out, {begin, end, begin, 1});
      } else {
        if (begin < middle) expand_all<COUNT>(out, {begin, std::min(end, middle), 0, 2});
        if (end > middle) expand_all<COUNT>(out, {std::max(begin, middle), end, kLanes, 2});
      }
    }
  }

  template <int COUNT>
  void expand_all(Out* const (&out)[COUNT], const Columns& columns) {
    constexpr int kBlocks = 4;
    int64_t column = columns.first;
    for (; column + kBlocks * kLanes <= columns.end; column += kBlocks * kLanes)
      expand<COUNT, kBlocks>(out, columns, column);
    for (; column + kLanes <= columns.end; column += kLanes) expand<COUNT, 1>(out, columns, column);
    for (; column < columns.end; ++column) expand_one<COUNT>(out, columns, column);
  }

  // Ranks [rank, rank + RANKS) of A x.
  template <int COUNT, int RANKS>
  void shrink(const T* const (&x)[COUNT], int64_t projection, int64_t rank) {
    const T* a = a_ + (projection * w_.rank + rank) * w_.num_in;
    F32 sums[COUNT][RANKS];
    for (auto& row : sums)
      for (F32& sum : row) sum = splat(0.0f);
    int64_t k = 0;
    if constexpr (sizeof(T) == 2)
      for (; k + 2 * kLanes <= w_.num_in; k += 2 * kLanes) {
        U32 weights[RANKS];
        for (int r = 0; r < RANKS; ++r) weights[r] = load_as<U32>(a + r * w_.num_in + k);
        for (int t = 0; t < COUNT; ++t) {
          const U32 values = load_as<U32>(x[t] + k);
          for (int r = 0; r < RANKS; ++r) sums[t][r] = add_products(sums[t][r], values, weights[r]);
        }
      }
    for (; k + kLanes <= w_.num_in; k += kLanes) {
      F32 weights[RANKS];
      for (int r = 0; r < RANKS; ++r) weights[r] = load_any(a + r * w_.num_in + k);
      for (int t = 0; t < COUNT; ++t) {
        const F32 values = load_any(x[t] + k);
        for (int r = 0; r < RANKS; ++r) sums[t][r] = sums[t][r] + values * weights[r];
      }
    }
    for (int t = 0; t < COUNT; ++t)
      for (int r = 0; r < RANKS; ++r) {
        float total = sum_of_lanes(sums[t][r]);
        for (int64_t rest = k; rest < w_.num_in; ++rest)
          total += number(x[t][rest]) * number(a[r * w_.num_in + rest]);
        shrunk_[t * w_.rank + rank + r] = total;
      }
  }

  // Adds B (A x) to `BLOCKS` blocks of 16 output features.
  template <int COUNT, int BLOCKS>
  void expand(Out* const (&out)[COUNT], const Columns& columns, int64_t column) {
    F32 sums[COUNT][BLOCKS];
    for (auto& row : sums)
      for (F32& sum : row) sum = splat(0.0f);
    for (int64_t r = 0; r < num_ranks_; ++r) {
      const T* b = b_ + r * w_.num_out + column;
      F32 weights[BLOCKS];
      for (int i = 0; i < BLOCKS; ++i) weights[i] = load_any(b + i * kLanes);
      for (int t = 0; t < COUNT; ++t) {
        const F32 value = splat(shrunk_[t * w_.rank + r]);
        for (int i = 0; i < BLOCKS; ++i) sums[t][i] = sums[t][i] + value * weights[i];
      }
    }
    for (int t = 0; t < COUNT; ++t)
      for (int i = 0; i < BLOCKS; ++i) {
        Out* to = out[t] + columns.place(column + i * kLanes);
        store_any(to, load_any(to) + sums[t][i]);
      }
  }

  template <int COUNT>
  void expand_one(Out* const (&out)[COUNT], const Columns& columns, int64_t column) {
    for (int t = 0; t < COUNT; ++t) {
      float total = 0.0f;
      for (int64_t r = 0; r < num_ranks_; ++r)
        total += shrunk_[t * w_.rank + r] * number(b_[r * w_.num_out + column]);
      Out* to = out[t] + columns.place(column);
      put(to, number(*to) + total);
    }
  }

  static float number(float value) { return value; }

  static float number(uint16_t value) {
    const uint32_t bits = (uint32_t)value << 16;
    return load_as<float>(&bits);
  }

  static void put(float* to, float value) { *to = value; }

  static void put(uint16_t* to, float value) {
    uint16_t lanes[kLanes];
    store_bf16(lanes, splat(value));
    *to = lanes[0];
  }

  const LoraWeights& w_;
  const LoraRows<T, Out>& rows_;
  const int64_t* tokens_;
  const T *a_ = nullptr, *b_ = nullptr;  // of the current adapter
  int64_t num_ranks_ = 0;
  std::vector<float> shrunk_;  // [kTokens, rank]
};

// Threads are started for each call: steps with so many tokens take much longer than that.
template <typename T>
void add_lora(const LoraStep& step) {
  constexpr int64_t kTokensPerThread = 256;
  const LoraWeights& weights = *step.weights;
  const LoraRows<T, T> rows{(const T*)step.x, weights.num_in,  (T*)step.out, weights.num_out,
                            0,                weights.num_out, false};
  const std::vector<LoraChunk> chunks = lora_chunks(step.tokens);
  int64_t num_tokens = 0;
  for (const LoraChunk& chunk : chunks)
    if (weights.ranks[chunk.slot]) num_tokens += chunk.end - chunk.first;
  std::atomic<size_t> next{0};
  const auto work = [&] {
    LoraProduct<T, T> product(weights, rows, step.tokens.tokens);
    for (size_t i; (i = next.fetch_add(1)) < chunks.size();) product.run(chunks[i]);
  };
  std::vector<std::thread> others;
  const int64_t num_threads = std::min(step.num_threads, num_tokens / kTokensPerThread);
  for (int64_t i = 1; i < num_threads; ++i) others.emplace_back(work);
  work();
  for (auto& thread : others) thread.join();
}

}  // namespace rayfleet
