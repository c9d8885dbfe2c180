// Attention that reads the pages of the cache in place. Within a page a kv head's keys lie
// transposed, [head_dim][page_size], so that 16 positions are scored at once; its values lie
// [page_size][head_dim].
// HAZARD(invariance): a query's sums run over positions from 0 on in one order, whatever it is
// computed together with: decoding, extending and chunks of any length give the same bits.
// Positions past a query's own are never multiplied, only skipped: they may hold anything.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "simd.h"

namespace rayfleet {

constexpr int kMaxQueries = 8;  // that share the loads of keys and values

struct Heads {
  int64_t num_heads, num_kv_heads, head_dim, page_size;
  float scale;
  int64_t group() const { return num_heads / num_kv_heads; }
  // Elements of one kv head in one page.
  int64_t head_page() const { return page_size * head_dim; }
};

template <typename W>
static inline W* page_of(W* cache, const Heads& heads, int64_t page, int64_t kv_head) {
  return cache + (page * heads.num_kv_heads + kv_head) * heads.head_page();
}

// Puts one token's keys and values, [kv heads][head_dim] each, into its place.
template <typename W>
static void store_kv(const float* k, const float* v, W* k_cache, W* v_cache, const Heads& heads,
                     int64_t page, int64_t offset) {
  const int64_t dim = heads.head_dim;
  for (int64_t head = 0; head < heads.num_kv_heads; ++head) {
    W* keys = page_of(k_cache, heads, page, head) + offset;
    for (int64_t d = 0; d < dim; d += kLanes) {
      W lanes[kLanes];
      store_any(lanes, load(k + head * dim + d));
      for (int i = 0; i < kLanes; ++i) keys[(d + i) * heads.page_size] = lanes[i];
    }
    W* values = page_of(v_cache, heads, page, head) + offset * dim;
    for (int64_t d = 0; d < dim; d += kLanes) store_any(values + d, load(v + head * dim + d));
  }
}

// Queries of one kv head and where they stand.
struct Queries {
  const float* q[kMaxQueries];
  float* out[kMaxQueries];
  int64_t visible[kMaxQueries];  // positions that each sees
};

template <typename W, int COUNT>
static void score(const Queries& queries, const W* k_cache, const Heads& heads, int64_t kv_head,
                  const int32_t* pages, int64_t longest, float* weights, int64_t stride) {
  const int64_t dim = heads.head_dim;
  for (int64_t position = 0; position < longest; position += kLanes) {
    const int64_t page = pages[position / heads.page_size];
    const W* keys = page_of(k_cache, heads, page, kv_head) + position % heads.page_size;
    F32 sums[COUNT] = {};
    for (int64_t d = 0; d < dim; ++d) {
      const F32 key = load_any(keys + d * heads.page_size);
      for (int i = 0; i < COUNT; ++i) sums[i] = sums[i] + splat(queries.q[i][d]) * key;
    }
    for (int i = 0; i < COUNT; ++i) {
      const I32 seen = lane_numbers() < (int32_t)std::min<int64_t>(queries.visible[i] - position, kLanes);
      store(weights + i * stride + position,
            select(seen, sums[i] * splat(heads.scale), splat(-INFINITY)));
    }
  }
}

// Turns a query's scores into weights that sum up to the returned number.
static inline float soften(float* weights, int64_t padded) {
  F32 top = splat(-INFINITY);
  for (int64_t i = 0; i < padded; i += kLanes) top = maximum(load(weights + i), top);
  const F32 largest = splat(max_of_lanes(top));
  F32 total = {};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const F32 weight = exponential(load(weights + i) - largest);
    store(weights + i, weight);
    total = total + weight;
  }
  return sum_of_lanes(total);
}

// COUNT queries times VECTORS vectors of the values' dimension, from `d` on.
template <typename W, int COUNT, int VECTORS>
static void blend(const Queries& queries, const W* v_cache, const Heads& heads, int64_t kv_head,
                  const int32_t* pages, const int64_t longest, const float* weights,
                  int64_t stride, const float* totals, int64_t d) {
  F32 sums[COUNT][VECTORS] = {};
  for (int64_t start = 0; start < longest; start += heads.page_size) {
    const W* values = page_of(v_cache, heads, pages[start / heads.page_size], kv_head) + d;
    const int64_t end = std::min(heads.page_size, longest - start);
    for (int64_t offset = 0; offset < end; ++offset)
      for (int j = 0; j < VECTORS; ++j) {
        const F32 value = load_any(values + offset * heads.head_dim + j * kLanes);
        for (int i = 0; i < COUNT; ++i)
          sums[i][j] = sums[i][j] + splat(weights[i * stride + start + offset]) * value;
      }
  }
  for (int i = 0; i < COUNT; ++i)
    for (int j = 0; j < VECTORS; ++j)
      store(queries.out[i] + d + j * kLanes, sums[i][j] / splat(totals[i]));
}

template <typename W, int COUNT>
static void attend_some(const Queries& queries, const W* k_cache, const W* v_cache,
                        const Heads& heads, int64_t kv_head, const int32_t* pages,
                        std::vector<float>& scratch) {
  int64_t longest = 1;
  for (int i = 0; i < COUNT; ++i) longest = std::max(longest, queries.visible[i]);
  const int64_t stride = (longest + kLanes - 1) / kLanes * kLanes;
  if ((int64_t)scratch.size() < stride * COUNT) scratch.resize(stride * COUNT);
  float* weights = scratch.data();
  score<W, COUNT>(queries, k_cache, heads, kv_head, pages, longest, weights, stride);
  float totals[COUNT];
  for (int i = 0; i < COUNT; ++i) totals[i] = soften(weights + i * stride, stride);
  int64_t d = 0;
  for (; d + 2 * kLanes <= heads.head_dim; d += 2 * kLanes)
    blend<W, COUNT, 2>(queries, v_cache, heads, kv_head, pages, longest, weights, stride, totals, d);
  for (; d < heads.head_dim; d += kLanes)
    blend<W, COUNT, 1>(queries, v_cache, heads, kv_head, pages, longest, weights, stride, totals, d);
}

// Consecutive tokens of one request, as one work item sees them.
struct Span {
  int64_t first_token;  // in the step
  int64_t num_tokens;
  int64_t first_position;
  const int32_t* pages;
};

// All query heads of one kv head for the tokens of a span. A token's q starts at
// q + token * q_stride, its result goes to out + token * num_heads * head_dim.
template <typename W>
static void attend(const Span& span, int64_t kv_head, const float* q, int64_t q_stride,
                   const W* k_cache, const W* v_cache, const Heads& heads, float* out,
                   std::vector<float>& scratch) {
  const int64_t group = heads.group(), dim = heads.head_dim;
  const int64_t total = span.num_tokens * group;
  for (int64_t done = 0; done < total;) {
    Queries queries;
    const int64_t left = total - done;
    const int count = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    for (int i = 0; i < count; ++i) {
      const int64_t token = (done + i) / group, head = kv_head * group + (done + i) % group;
      queries.q[i] = q + (span.first_token + token) * q_stride + head * dim;
      queries.out[i] = out + (span.first_token + token) * heads.num_heads * dim + head * dim;
      queries.visible[i] = span.first_position + token + 1;
    }
    const auto run = [&](auto attend_count) {
      attend_count(queries, k_cache, v_cache, heads, kv_head, span.pages, scratch);
    };
    if (count == 8) run(attend_some<W, 8>);
    else if (count == 4) run(attend_some<W, 4>);
    else if (count == 2) run(attend_some<W, 2>);
    else run(attend_some<W, 1>);
    done += count;
  }
}

}  // namespace rayfleet
