// LoRA: adds B (A x), the output of low-rank adapters, to the output of a linear layer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "simd.h"

namespace rayfleet {

// Weights of a layer's adapters, and tensors of a step; mirrored in library.py.
struct LoraStep {
  const void* a;         // [slots, projections * rank, num_in]
  const void* b;         // [slots, rank, num_out]
  const int64_t* ranks;  // [slots]: number of leading ranks that are not zero
  const int64_t* parts;  // [num_parts, 3]: first output feature, end, projection
  int64_t num_in, num_out, rank, num_projections, num_parts;
  void* out;              // [tokens, num_out]
  const void* x;          // [tokens, num_in]
  const int64_t* tokens;  // rows of `x` and `out`, one adapter after another
  const int64_t* groups;  // [num_groups, 3]: 1-based slot, first of its `tokens`, end
  int64_t num_groups;
  int64_t num_threads;  // maximum number of threads
};

// Some of the tokens of one adapter.
struct LoraChunk {
  int64_t slot, first, end;  // 0-based slot
};

template <typename T>
class LoraProduct {
 public:
  explicit LoraProduct(const LoraStep& step) : s_(step) {
    shrunk_.resize(kTokens * s_.num_projections * s_.rank);
  }

  void run(const LoraChunk& chunk) {
    num_ranks_ = s_.ranks[chunk.slot];
    a_ = (const T*)s_.a + chunk.slot * s_.num_projections * s_.rank * s_.num_in;
    b_ = (const T*)s_.b + chunk.slot * s_.rank * s_.num_out;
    int64_t first = chunk.first;
    for (; first + kTokens <= chunk.end; first += kTokens) add<kTokens>(first);
    for (; first < chunk.end; ++first) add<1>(first);
  }

 private:
  static constexpr int kTokens = 4;
  static constexpr int kRanks = 4;

  // HAZARD(invariance): a token's sums run in the same order with any COUNT.
  template <int COUNT>
  void add(int64_t first) {
    const T* x[COUNT];
    T* out[COUNT];
    for (int t = 0; t < COUNT; ++t) {
      x[t] = (const T*)s_.x + s_.tokens[first + t] * s_.num_in;
      out[t] = (T*)s_.out + s_.tokens[first + t] * s_.num_out;
    }
    for (int64_t of = 0; of < s_.num_projections; ++of) {
      int64_t rank = 0;
      for (; rank + kRanks <= num_ranks_; rank += kRanks) shrink<COUNT, kRanks>(x, of, rank);
      for (; rank < num_ranks_; ++rank) shrink<COUNT, 1>(x, of, rank);
    }
    for (int64_t i = 0; i < s_.num_parts; ++i) {
      const int64_t *part = s_.parts + 3 * i, end = part[1];
      int64_t column = part[0];
      for (; column + 2 * kLanes <= end; column += 2 * kLanes) expand<COUNT, 2>(out, part[2], column);
      for (; column + kLanes <= end; column += kLanes) expand<COUNT, 1>(out, part[2], column);
      for (; column < end; ++column) expand_one<COUNT>(out, part[2], column);
    }
  }

  float* shrunk(int token, int64_t projection) {
    return &shrunk_[(token * s_.num_projections + projection) * s_.rank];
  }

  // Ranks [rank, rank + RANKS) of A x.
  template <int COUNT, int RANKS>
  void shrink(const T* const (&x)[COUNT], int64_t projection, int64_t rank) {
    const T* a = a_ + (projection * s_.rank + rank) * s_.num_in;
    F32 sums[COUNT][RANKS];
    for (auto& row : sums)
      for (F32& sum : row) sum = splat(0.0f);
    int64_t k = 0;
    for (; k + kLanes <= s_.num_in; k += kLanes) {
      F32 weights[RANKS];
      for (int r = 0; r < RANKS; ++r) weights[r] = load_any(a + r * s_.num_in + k);
      for (int t = 0; t < COUNT; ++t) {
        const F32 values = load_any(x[t] + k);
        for (int r = 0; r < RANKS; ++r) sums[t][r] = sums[t][r] + values * weights[r];
      }
    }
    for (int t = 0; t < COUNT; ++t)
      for (int r = 0; r < RANKS; ++r) {
        float total = sum_of_lanes(sums[t][r]);
        for (int64_t rest = k; rest < s_.num_in; ++rest)
          total += number(x[t][rest]) * number(a[r * s_.num_in + rest]);
        shrunk(t, projection)[rank + r] = total;
      }
  }

  // Adds B (A x) to `BLOCKS` blocks of 16 output features.
  template <int COUNT, int BLOCKS>
  void expand(T* const (&out)[COUNT], int64_t projection, int64_t column) {
    F32 sums[COUNT][BLOCKS];
    for (auto& row : sums)
      for (F32& sum : row) sum = splat(0.0f);
    for (int64_t r = 0; r < num_ranks_; ++r) {
      const T* b = b_ + r * s_.num_out + column;
      F32 weights[BLOCKS];
      for (int i = 0; i < BLOCKS; ++i) weights[i] = load_any(b + i * kLanes);
      for (int t = 0; t < COUNT; ++t) {
        const F32 value = splat(shrunk(t, projection)[r]);
        for (int i = 0; i < BLOCKS; ++i) sums[t][i] = sums[t][i] + value * weights[i];
      }
    }
    for (int t = 0; t < COUNT; ++t)
      for (int i = 0; i < BLOCKS; ++i) {
        T* to = out[t] + column + i * kLanes;
        store_any(to, load_any(to) + sums[t][i]);
      }
  }

  template <int COUNT>
  void expand_one(T* const (&out)[COUNT], int64_t projection, int64_t column) {
    for (int t = 0; t < COUNT; ++t) {
      float total = 0.0f;
      for (int64_t r = 0; r < num_ranks_; ++r)
        total += shrunk(t, projection)[r] * number(b_[r * s_.num_out + column]);
      put(out[t] + column, number(out[t][column]) + total);
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

  const LoraStep& s_;
  const T *a_ = nullptr, *b_ = nullptr;  // of the current adapter
  int64_t num_ranks_ = 0;
  std::vector<float> shrunk_;  // [kTokens, projections, rank]
};

// Threads are started for each call: steps with so many tokens take much longer than that.
template <typename T>
void add_lora(const LoraStep& step) {
  constexpr int64_t kChunk = 64, kTokensPerThread = 256;
  std::vector<LoraChunk> chunks;
  int64_t num_tokens = 0;
  for (int64_t i = 0; i < step.num_groups; ++i) {
    const int64_t *group = step.groups + 3 * i, slot = group[0] - 1, end = group[2];
    if (!step.ranks[slot]) continue;
    num_tokens += end - group[1];
    for (int64_t first = group[1]; first < end; first += kChunk)
      chunks.push_back({slot, first, std::min(first + kChunk, end)});
  }
  std::atomic<size_t> next{0};
  const auto work = [&] {
    LoraProduct<T> product(step);
    for (size_t i; (i = next.fetch_add(1)) < chunks.size();) product.run(chunks[i]);
  };
  std::vector<std::thread> others;
  const int64_t num_threads = std::min(step.num_threads, num_tokens / kTokensPerThread);
  for (int64_t i = 1; i < num_threads; ++i) others.emplace_back(work);
  work();
  for (auto& thread : others) thread.join();
}

}  // namespace rayfleet
