// Sums of products for both storage types: one product at a time in fp32, pairs of products in
// bf16, as in the processors' dot-product instructions.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace rayfleet {

// One operand of each product is the same for all lanes (Element), the other has 16 lanes
// (Vector), with kPer values side by side in each.
template <typename W>
struct Operand;

template <>
struct Operand<float> {
  typedef float Element;
  typedef F32 Vector;
  static constexpr int64_t kPer = 1;
  static int64_t length(int64_t count) { return count; }
};

template <>
struct Operand<uint16_t> {
  typedef uint32_t Element;
  typedef U32 Vector;
  static constexpr int64_t kPer = 2;
  static int64_t length(int64_t count) { return (count + 1) / 2; }
};

// Row stride of a matmul's operand, in elements: an odd number of cache lines, since rows a power
// of two apart would map to the same few sets of the L1 cache.
template <typename W>
static inline int64_t row_stride(int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(typename Operand<W>::Element);
  return ((Operand<W>::length(count) + kLine - 1) / kLine | 1) * kLine;
}

static inline F32 load_operand(const float* from) { return load(from); }

static inline U32 load_operand(const uint16_t* from) { return load_as<U32>(from); }

static inline F32 multiply_add(F32 sum, float x, F32 y) { return sum + splat(x) * y; }

static inline F32 multiply_add(F32 sum, uint32_t pair, U32 pairs) {
#if defined(__AVX512BF16__)
  return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)pair),
                               (__m512bh)pairs);
#else
  float low, high;
  const uint32_t low_bits = pair << 16, high_bits = pair & 0xffff0000u;
  std::memcpy(&low, &low_bits, sizeof low);
  std::memcpy(&high, &high_bits, sizeof high);
  sum = sum + splat(low) * (F32)(pairs << 16);
  return sum + splat(high) * (F32)(pairs & 0xffff0000u);
#endif
}

// Adds the products of pairs of bf16 values, lane by lane.
static inline F32 add_products(F32 sum, U32 x, U32 y) {
#if defined(__AVX512BF16__)
  return (F32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
#else
  sum = sum + (F32)(x << 16) * (F32)(y << 16);
  return sum + (F32)(x & 0xffff0000u) * (F32)(y & 0xffff0000u);
#endif
}

// The first of two adjacent values, if there is no second.
static inline F32 first_of(F32 one) { return one; }

static inline U32 first_of(U32 pair) { return pair & 0xffffu; }

// A row of floats as elements; bf16 rounds and needs room for a whole number of vectors.
static inline void convert_row(const float* from, int64_t size, float* to) {
  if (from != to) std::memcpy(to, from, size * sizeof(float));
}

static inline void convert_row(const float* from, int64_t size, uint32_t* to) {
  uint16_t* halves = (uint16_t*)to;
  for (int64_t i = 0; i < size; i += kLanes) store_bf16(halves + i, load(from + i));
}

}  // namespace rayfleet
