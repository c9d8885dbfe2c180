// What passes of all models share: matmuls and other phases by a team of threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "linear.h"
#include "lora.h"
#include "team.h"

namespace rayfleet {

// Mirrored in library.py.
struct LinearWeight {
  const void* packed;
  const float* bias;  // null if there is none
  int64_t n, k;
  const LoraWeights* lora;  // null if there are no adapters
};

template <typename W>
class Matmuls {
 protected:
  typedef typename Operand<W>::Element Element;

  Matmuls(Team& team, double ms_per_thread) : team_(team), ms_per_thread_(ms_per_thread) {}

  // Work of one thread, for `rows` rows times a number of weights.
  static double expected_ms(int64_t rows, int64_t weights) {
    constexpr double kProductsPerMs = sizeof(W) == 2 ? 200e6 : 100e6;
    return std::max(rows * (double)weights / kProductsPerMs, reading_ms(weights));
  }

  static double reading_ms(int64_t weights) {
    constexpr double kBytesPerMs = 30e6;
    return weights * (double)sizeof(W) / kBytesPerMs;
  }

  bool is_large(int64_t weights) const { return reading_ms(weights) >= ms_per_thread_; }

  // Short steps leave cores to the scheduler and the frontend. A small model leaves one core even
  // in long steps, unless measurements show a gain from using it: its phases are short, and a
  // thread that waits for its core delays all others in each of them.
  int threads_for(double ms, int64_t weights) const {
    const int most = is_large(weights) ? team_.size() : std::max(1, team_.size() - 1);
    return (int)std::min((double)most, std::ceil(ms / ms_per_thread_));
  }

  template <typename Item>
  void share_tokens(int id, int64_t count, Item&& item) {
    constexpr int64_t kAtATime = 8;  // computing an item takes little longer than claiming it
    team_.share(id, count, item, kAtATime);
  }

  template <typename Sink>
  void multiply(int id, const LinearWeight& weight, int64_t rows, const Element* operand,
                const Sink& sink) {
    const Items items = items_of<W>(rows, weight.n, team_.size());
    team_.share(id, items.count(), [&](int64_t item) {
      linear_item<W>(item, items, operand, rows, typed(weight), sink);
    });
  }

  static Weight<W> typed(const LinearWeight& weight) {
    return {(const W*)weight.packed, weight.bias, weight.n, weight.k};
  }

  // `count` columns of a weight, starting at `first`, the first column of a block.
  static LinearWeight columns(const LinearWeight& weight, int64_t first, int64_t count) {
    const W* packed = (const W*)weight.packed + first / kBlock * block_elements<W>(weight.k);
    return {packed, weight.bias ? weight.bias + first : nullptr, count, weight.k, nullptr};
  }

  Team& team_;
  const double ms_per_thread_;
};

}  // namespace rayfleet
