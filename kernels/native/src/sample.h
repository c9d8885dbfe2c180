// Sampling: argmax of logits over temperature plus Gumbel noise keyed by (seed, position), over the
// tokens kept by min-p, top-k and top-p. The hash and the order of filters are those of
// kernels/sample_tokens; logarithms differ in their last bits. HAZARD(invariance): each row is
// computed separately, in one fixed order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace rayfleet {

// Natural logarithm of positive normal floats, to about 1 ulp.
static inline F32 logarithm(F32 x) {
  const U32 bits = (U32)x;
  // The mantissa in [sqrt(1/2), sqrt(2)) keeps the polynomial short.
  const I32 exponent = (I32)(bits - 0x3f3504f3u) >> 23;
  const F32 m = (F32)(bits - ((U32)exponent << 23)) - splat(1.0f);
  F32 p = splat(7.0376836292e-2f);
  p = p * m - splat(1.1514610310e-1f);
  p = p * m + splat(1.1676998740e-1f);
  p = p * m - splat(1.2420140846e-1f);
  p = p * m + splat(1.4249322787e-1f);
  p = p * m - splat(1.6668057665e-1f);
  p = p * m + splat(2.0000714765e-1f);
  p = p * m - splat(2.4999993993e-1f);
  p = p * m + splat(3.3333331174e-1f);
  const F32 n = convert<F32>(exponent);
  const F32 square = m * m;
  F32 low = square * m * p + n * splat(-2.12194440e-4f);
  low = low - splat(0.5f) * square;
  return m + low + n * splat(0.693359375f);
}

// Two words, the key of a row's noise.
struct NoiseKey {
  uint32_t a, b;

  static uint32_t mix(uint32_t bits, uint32_t key) {
    bits = (bits ^ (bits >> 16)) * 0x7feb352du;
    bits ^= key;
    bits = (bits ^ (bits >> 15)) * 0x846ca68bu;
    return bits ^ (bits >> 16);
  }

  static NoiseKey of(int64_t seed, int64_t position) {
    const uint32_t low = (uint32_t)seed, high = (uint32_t)((uint64_t)seed >> 32);
    const uint32_t a = mix((uint32_t)position * 0x9e3779b1u + low, high);
    return {a, mix(mix(a + 0x846ca68bu, 0) + high, low)};
  }
};

// Noise of 16 columns starting at `column`.
static inline F32 gumbel(NoiseKey key, uint32_t column) {
  U32 bits = ((U32)lane_numbers() + column) * 0x9e3779b1u + key.a;
  bits = (bits ^ (bits >> 16)) * 0x7feb352du;
  bits = bits ^ key.b;
  bits = (bits ^ (bits >> 15)) * 0x846ca68bu;
  bits = bits ^ (bits >> 16);
  const F32 counted = convert<F32>((I32)(bits & 0x7fffffffu));
  const F32 uniform = minimum((counted + splat(0.5f)) * splat(4.656612873077393e-10f),
                              splat(0.99999994f));
  // log1p(-u): the factor corrects the rounding of 1 - u.
  const F32 rest = splat(1.0f) - uniform;
  const F32 lost = splat(1.0f) - rest;
  const F32 exponential =
      select(lost == splat(0.0f), uniform, -logarithm(rest) * (uniform / lost));
  return -logarithm(exponential);
}

struct RowSampling {
  float temperature, top_p, log_min_p;
  int64_t top_k, seed, position;
};

class Sampler {
 public:
  static int64_t argmax(const float* values, int64_t size) {
    Best best;
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) best.take(load(values + i), i);
    return best.token(values, i, size);
  }

  // Of a token, before any filter.
  static float probability(const float* logits, int64_t size, int64_t token, float temperature) {
    F32 top = splat(-INFINITY), total = {};
    int64_t whole = size / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) top = maximum(load(logits + i), top);
    float largest = max_of_lanes(top);
    for (int64_t i = whole; i < size; ++i) largest = std::max(largest, logits[i]);
    const F32 scale = splat(1.0f / temperature), highest = splat(largest);
    for (int64_t i = 0; i < whole; i += kLanes)
      total = total + exponential((load(logits + i) - highest) * scale);
    float sum = sum_of_lanes(total);
    for (int64_t i = whole; i < size; ++i) sum += std::exp((logits[i] - largest) / temperature);
    return std::exp((logits[token] - largest) / temperature) / sum;
  }

  int64_t sample(const float* logits, int64_t size, const RowSampling& how) {
    const int64_t padded = (size + kLanes - 1) / kLanes * kLanes;
    scaled_.resize(padded);
    weights_.resize(padded);
    const F32 temperature = splat(how.temperature);
    F32 top = splat(-INFINITY);
    for (int64_t i = 0; i < padded; i += kLanes) {
      float lanes[kLanes];
      for (int64_t j = 0; j < kLanes && i + kLanes > size; ++j)
        lanes[j] = i + j < size ? logits[i + j] : -INFINITY;
      const F32 value = (i + kLanes > size ? load(lanes) : load(logits + i)) / temperature;
      store(&scaled_[i], value);
      top = maximum(value, top);
    }
    const float largest = max_of_lanes(top);
    float least = largest + how.log_min_p;  // -inf if there is none
    if (how.top_k > 0 && how.top_k < size) least = std::max(least, kth(how.top_k, largest, least));
    if (how.top_p < 1.0f) least = std::max(least, nucleus(how.top_p, largest, least));
    const NoiseKey key = NoiseKey::of(how.seed, how.position);
    Best best;
    for (int64_t i = 0; i < padded; i += kLanes) {
      const F32 value = load(&scaled_[i]);
      const I32 kept = (value >= splat(least)) & (value > splat(-INFINITY));
      // With a mask or a filter, most vectors contain no token that can be sampled.
      if (any_of(kept))
        best.take(select(kept, value + gumbel(key, (uint32_t)i), splat(-INFINITY)), i);
    }
    return std::min(best.token(nullptr, padded, padded), size - 1);
  }

 private:
  // The first of the largest values.
  struct Best {
    F32 value = splat(-INFINITY);
    I32 place = lane_numbers();

    void take(F32 candidate, int64_t start) {
      const I32 better = candidate > value;
      value = select(better, candidate, value);
      place = select_int(better, lane_numbers() + (int32_t)start, place);
    }

    // The best token, including the remaining values, which start at `done`.
    int64_t token(const float* values, int64_t done, int64_t size) const {
      float largest = -INFINITY;
      int64_t token = 0;
      for (int i = 0; i < kLanes && done; ++i)
        if (value[i] > largest || (value[i] == largest && place[i] < token)) {
          largest = value[i];
          token = place[i];
        }
      for (; done < size; ++done)
        if (values[done] > largest) {
          largest = values[done];
          token = done;
        }
      return token;
    }
  };

  // The k-th largest of the values that are at least `least`; `least` if there are fewer.
  float kth(int64_t k, float largest, float least) {
    for (size_t i = 0; i < scaled_.size(); i += kLanes)
      store(&weights_[i], counted(load(&scaled_[i]), least, splat(1.0f)));
    return search((float)k, largest, least);
  }

  // The smallest value in the smallest set of most likely tokens whose probability reaches the
  // share.
  float nucleus(float share, float largest, float least) {
    F32 total = {};
    for (size_t i = 0; i < scaled_.size(); i += kLanes) {
      const F32 value = load(&scaled_[i]);
      const F32 weight = counted(value, least, exponential(value - splat(largest)));
      store(&weights_[i], weight);
      total = total + weight;
    }
    return search(share * sum_of_lanes(total), largest, least);
  }

  static F32 counted(F32 value, float least, F32 weight) {
    return select((value >= splat(least)) & (value > splat(-INFINITY)), weight, splat(0.0f));
  }

  // Largest value v for which the weights of all values >= v sum to at least `target`, by bisection
  // over the order of floats; `least` if the total is less.
  float search(float target, float largest, float least) {
    int64_t low = order_of(-INFINITY), high = (int64_t)order_of(largest) + 1;
    while (low + 1 < high) {
      const int64_t middle = low + (high - low) / 2;
      const F32 pivot = splat(value_of(middle));
      F32 sums[2] = {};
      for (size_t i = 0; i < scaled_.size(); i += kLanes) {
        F32& sum = sums[i / kLanes % 2];
        sum = sum + select(load(&scaled_[i]) >= pivot, load(&weights_[i]), splat(0.0f));
      }
      (sum_of_lanes(sums[0] + sums[1]) >= target ? low : high) = middle;
    }
    return low == order_of(-INFINITY) ? least : value_of(low);
  }

  // Floats as integers in the same order.
  static int64_t order_of(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits ^ ((bits >> 31) & 0x7fffffff);
  }

  static float value_of(int64_t order) {
    const int32_t bits = (int32_t)order ^ (((int32_t)order >> 31) & 0x7fffffff);
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }

  std::vector<float> scaled_, weights_;
};

}  // namespace rayfleet
