// Operations on 16 floats. HAZARD(invariance): every sum below runs in one fixed order, independent
// of the tile.
#pragma once

#include <cstdint>
#include <cstring>

#include "lanes.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace rayfleet {

// Loads and stores need not be aligned: memcpy of a register compiles to one instruction.
template <typename To>
struct Memory {
  static To load(const void* from) {
    To value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  static void store(void* to, To value) { std::memcpy(to, &value, sizeof value); }
};

template <typename Half>
struct Memory<Pair<Half>> {
  static Pair<Half> load(const void* from) {
    return {Memory<Half>::load(from), Memory<Half>::load((const char*)from + sizeof(Half))};
  }
  static void store(void* to, Pair<Half> value) {
    Memory<Half>::store(to, value.low);
    Memory<Half>::store((char*)to + sizeof(Half), value.high);
  }
};

template <typename To>
static inline To load_as(const void* from) {
  return Memory<To>::load(from);
}

static inline F32 load(const float* from) { return load_as<F32>(from); }

static inline void store(float* to, F32 value) { Memory<F32>::store(to, value); }

static inline F32 select(I32 mask, F32 yes, F32 no) {
  return (F32)(((U32)mask & (U32)yes) | (~(U32)mask & (U32)no));
}

static inline I32 select_int(I32 mask, I32 yes, I32 no) { return (mask & yes) | (~mask & no); }

static inline bool any_of(I32 mask) {
  int64_t words[8], any = 0;
  Memory<I32>::store(words, mask);
  for (const int64_t word : words) any |= word;
  return any != 0;
}

static inline F32 minimum(F32 a, F32 b) { return select(a < b, a, b); }

static inline F32 maximum(F32 a, F32 b) { return select(a > b, a, b); }

static inline I32 lane_numbers() {
  constexpr int32_t kNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load_as<I32>(kNumbers);
}

// 1, 2, 4, ...
static inline I32 lane_bits() {
  constexpr int32_t kBits[kLanes] = {1 << 0, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                     1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  return load_as<I32>(kBits);
}

// Pairs of lanes 8, 4, 2, 1 apart.
template <typename Join>
static inline float join_lanes(F32 v, Join&& join) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] = join(lanes[i], lanes[i + width]);
  return lanes[0];
}

static inline float sum_of_lanes(F32 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);  // the same pairs, without going through memory
#else
  return join_lanes(v, [](float a, float b) { return a + b; });
#endif
}

static inline float max_of_lanes(F32 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  return join_lanes(v, [](float a, float b) { return a > b ? a : b; });
#endif
}

// e^x to about 2 ulp for x <= 88; 0 below -87. Reduction by powers of two, then a polynomial.
static inline F32 exponential(F32 x) {
  const F32 low = splat(-87.0f);
  const F32 clamped = maximum(select(x > splat(88.0f), splat(88.0f), x), low);
  const F32 rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F32 shifted = clamped * splat(1.44269504f) + rounder;
  const F32 n = shifted - rounder;
  const F32 r = clamped - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);
  F32 p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
  const I32 exponent = convert<I32>(n);
  const F32 scale = (F32)((exponent + 127) << 23);
  return select(x < low, splat(0.0f), p * scale);
}

// The error function to about 2 ulp, as a quotient of polynomials in x^2 (the coefficients of XLA).
static inline F32 error_function(F32 x) {
  const F32 limit = splat(4.0f);
  const F32 clamped = maximum(select(x > limit, limit, x), -limit);
  const F32 square = clamped * clamped;
  F32 above = splat(-2.72614225801306e-10f);
  above = above * square + splat(2.77068142495902e-08f);
  above = above * square + splat(-2.10102402082508e-06f);
  above = above * square + splat(-5.69250639462346e-05f);
  above = above * square + splat(-7.34990630326855e-04f);
  above = above * square + splat(-2.95459980854025e-03f);
  above = above * square + splat(-1.60960333262415e-02f);
  F32 below = splat(-1.45660718464996e-05f);
  below = below * square + splat(-2.13374055278905e-04f);
  below = below * square + splat(-1.68282697438203e-03f);
  below = below * square + splat(-7.37332916720468e-03f);
  below = below * square + splat(-1.42647390514189e-02f);
  return clamped * above / below;
}

// bfloat16: the upper half of a float.
static inline F32 load_bf16(const uint16_t* from) {
  return (F32)(convert<U32>(load_as<U16>(from)) << 16);
}

static inline U16 to_bf16(F32 value) {
  const U32 bits = (U32)value;
  const U32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U32 quiet = (bits >> 16) | 0x40u;
  const U32 is_nan = (U32)(value != value);
  return convert<U16>((is_nan & quiet) | (~is_nan & rounded));
}

static inline void store_bf16(uint16_t* to, F32 value) {
  Memory<U16>::store(to, to_bf16(value));
}

// The storage type of weights and caches; arithmetic is in fp32 either way.
template <typename T>
static inline F32 load_any(const T* from) {
  if constexpr (sizeof(T) == 4)
    return load(from);
  else
    return load_bf16(from);
}

template <typename T>
static inline void store_any(T* to, F32 value) {
  if constexpr (sizeof(T) == 4)
    store(to, value);
  else
    store_bf16(to, value);
}

}  // namespace rayfleet
