// Operations on single rows between matmuls: norms, rotary embedding, activation, conversion.
#pragma once

#include <cmath>
#include <cstdint>

#include "simd.h"

namespace rayfleet {

static inline float inverse_rms(const float* x, int64_t size, float eps) {
  F32 sum = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const F32 value = load(x + i);
    sum = sum + value * value;
  }
  return 1.0f / std::sqrt(sum_of_lanes(sum) / (float)size + eps);
}

static inline void rms_norm_row(const float* x, const float* weight, int64_t size, float eps,
                                float* out) {
  const F32 factor = splat(inverse_rms(x, size, eps));
  for (int64_t i = 0; i < size; i += kLanes) store(out + i, load(x + i) * factor * load(weight + i));
}

static inline void layer_norm_row(const float* x, const float* weight, const float* bias,
                                  int64_t size, float eps, float* out) {
  F32 sum = {};
  for (int64_t i = 0; i < size; i += kLanes) sum = sum + load(x + i);
  const F32 mean = splat(sum_of_lanes(sum) / (float)size);
  F32 squares = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const F32 distance = load(x + i) - mean;
    squares = squares + distance * distance;
  }
  const F32 factor = splat(1.0f / std::sqrt(sum_of_lanes(squares) / (float)size + eps));
  for (int64_t i = 0; i < size; i += kLanes)
    store(out + i, (load(x + i) - mean) * factor * load(weight + i) + load(bias + i));
}

static inline void add_row(float* to, const float* from, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) store(to + i, load(to + i) + load(from + i));
}

// Rotates the first `rotated` dimensions of one head in place, in NeoX layout (two halves). `table`
// has the position's cosines, then its sines.
static inline void rotate_head(float* head, const float* table, int64_t rotated) {
  const int64_t half = rotated / 2;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const F32 cosine = load(table + i), sine = load(table + half + i);
    const F32 first = load(head + i), second = load(head + half + i);
    store(head + i, first * cosine - second * sine);
    store(head + half + i, second * cosine + first * sine);
  }
  for (; i < half; ++i) {
    const float cosine = table[i], sine = table[half + i];
    const float first = head[i], second = head[half + i];
    head[i] = first * cosine - second * sine;
    head[half + i] = second * cosine + first * sine;
  }
}

// Sets the logits of tokens whose bit is 0, in little-endian 32-bit words, to -inf.
static inline void mask_row(float* logits, int64_t size, const char* words) {
  const F32 nothing = splat(-INFINITY);
  for (int64_t i = 0; i < size; i += kLanes) {
    uint16_t bits;
    std::memcpy(&bits, words + i / 8, sizeof bits);
    if (bits == 0xffff) continue;
    const I32 allowed = (lane_bits() & (int32_t)bits) != 0;
    if (i + kLanes <= size) {
      store(logits + i, select(allowed, load(logits + i), nothing));
      continue;
    }
    for (int64_t j = 0; i + j < size; ++j)
      if (!allowed[j]) logits[i + j] = -INFINITY;
  }
}

}  // namespace rayfleet
