// Attention that reads the pages of the cache in place. A KV head's part of a page has the layout
// of operand.h: keys [head_dim / per][page_size][per], so that 16 positions are scored at once, and
// values [page_size / per][head_dim][per]; `per` is 1 in fp32, 2 in bf16. HAZARD(invariance): a
// query's sums run over positions in one order, starting at 0, independent of other queries:
// decodes, extends and chunks of any length give bitwise equal results. HAZARD: cells of a page
// that were never written are undefined, and must never be multiplied.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "operand.h"

namespace rayfleet {

constexpr int kMaxQueries = 8;  // queries that share the loads of keys and values

struct Heads {
  int64_t num_heads, num_kv_heads, head_dim, page_size;
  int64_t block_size;  // positions of one block attend to each other; 1 is causal
  float scale;
  int64_t group() const { return num_heads / num_kv_heads; }
  // Number of positions to which a query at `position` attends. HAZARD: later positions of its
  // block must already be in the cache, so rows end with whole blocks.
  int64_t visible(int64_t position) const { return (position / block_size + 1) * block_size; }
};

// One KV head's keys or values in one page.
template <typename W>
static inline W* head_page(W* cache, const Heads& heads, int64_t page, int64_t kv_head) {
  return cache + (page * heads.num_kv_heads + kv_head) * heads.page_size * heads.head_dim;
}

// Writes every kPer-th cell: the cells in between belong to other tokens, possibly of other
// threads.
static inline void store_every(float* to, F32 value) { store(to, value); }

static inline void store_every(uint16_t* to, F32 value) {
  const U16 halves = to_bf16(value);
#if defined(__AVX512BW__)
  _mm512_mask_storeu_epi16(to, 0x55555555, _mm512_cvtepu16_epi32((__m256i)halves));
#else
  uint16_t lanes[kLanes];
  Memory<U16>::store(lanes, halves);
  for (int64_t i = 0; i < kLanes; ++i) to[i * Operand<uint16_t>::kPer] = lanes[i];
#endif
}

// Writes one token's keys and values, [kv heads][head_dim] each, to its cells.
template <typename W>
static void store_kv(const float* k, const float* v, W* k_cache, W* v_cache, const Heads& heads,
                     int64_t page, int64_t offset) {
  constexpr int64_t kPer = Operand<W>::kPer;
  const int64_t dim = heads.head_dim;
  for (int64_t head = 0; head < heads.num_kv_heads; ++head) {
    W* keys = head_page(k_cache, heads, page, head) + offset * kPer;
    W* values = head_page(v_cache, heads, page, head) + offset / kPer * dim * kPer + offset % kPer;
    for (int64_t d = 0; d < dim; d += kLanes) {
      W lanes[kLanes];
      store_any(lanes, load(k + head * dim + d));
      for (int64_t i = 0; i < kLanes; i += kPer)
        std::memcpy(keys + (d + i) * heads.page_size, lanes + i, kPer * sizeof(W));
      store_every(values + d * kPer, load(v + head * dim + d));
    }
  }
}

// Queries of one KV head and their positions.
template <typename W>
struct Queries {
  const typename Operand<W>::Element* q[kMaxQueries];
  float* out[kMaxQueries];
  int64_t visible[kMaxQueries];  // number of positions that each attends to
};

// Scratch memory of a thread for a few queries.
template <typename W>
struct Scratch {
  std::vector<float> weights;
  std::vector<typename Operand<W>::Element> elements;
};

// Scores of COUNT queries for CHUNKS times 16 positions at a time: with few parallel sums, latency
// is the limit. Returns the first remaining position.
template <typename W, int COUNT, int CHUNKS>
static int64_t score(const Queries<W>& queries, const W* k_cache, const Heads& heads,
                     int64_t kv_head, const int32_t* pages, int64_t position, int64_t longest,
                     float* weights, int64_t stride) {
  const int64_t length = Operand<W>::length(heads.head_dim);
  const int64_t step = heads.page_size * Operand<W>::kPer;
  const auto chunk = [&](int64_t position) {
    return head_page(k_cache, heads, pages[position / heads.page_size], kv_head) +
           position % heads.page_size * Operand<W>::kPer;
  };
  for (; position + (CHUNKS - 1) * kLanes < longest; position += CHUNKS * kLanes) {
    const W *keys[CHUNKS], *next[CHUNKS];
    for (int c = 0; c < CHUNKS; ++c) {
      keys[c] = chunk(position + c * kLanes);
      next[c] = chunk(std::min(position + (CHUNKS + c) * kLanes, longest - 1));
    }
    F32 sums[COUNT][CHUNKS] = {};
    for (int64_t d = 0; d < length; ++d)
#pragma GCC unroll 16
      for (int c = 0; c < CHUNKS; ++c) {
        __builtin_prefetch(next[c] + d * step);
        const auto key = load_operand(keys[c] + d * step);
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; ++i)
          sums[i][c] = multiply_add(sums[i][c], queries.q[i][d], key);
      }
    for (int i = 0; i < COUNT; ++i)
      for (int c = 0; c < CHUNKS; ++c) {
        const int64_t first = position + c * kLanes;
        const int64_t seen = std::min<int64_t>(queries.visible[i] - first, kLanes);
        store(weights + i * stride + first,
              select(lane_numbers() < (int32_t)seen, sums[i][c] * splat(heads.scale),
                     splat(-INFINITY)));
      }
  }
  return position;
}

// Turns a query's scores into weights that sum to the returned number.
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

// COUNT queries times VECTORS vectors of the values' dimension, starting at `d`. Even and odd
// elements of the values are summed separately, to hide the latency of sums.
template <typename W, int COUNT, int VECTORS>
static void blend(float* const* out, const W* v_cache, const Heads& heads, int64_t kv_head,
                  const int32_t* pages, int64_t longest,
                  const typename Operand<W>::Element* weights, int64_t stride,
                  const float* totals, int64_t d) {
  constexpr int64_t kPer = Operand<W>::kPer;
  F32 sums[2][COUNT][VECTORS] = {};
  const auto add = [&](int parity, auto value, int64_t index, int j) {
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; ++i)
      sums[parity][i][j] = multiply_add(sums[parity][i][j], weights[i * stride + index], value);
  };
  for (int64_t start = 0; start < longest; start += heads.page_size) {
    const int64_t page = start / heads.page_size;
    const W* values = head_page(v_cache, heads, pages[page], kv_head) + d * kPer;
    const int64_t last_page = (longest - 1) / heads.page_size;
    const W* next =
        head_page(v_cache, heads, pages[std::min(page + 1, last_page)], kv_head) + d * kPer;
    const int64_t whole = std::min(heads.page_size, longest - start) / kPer;
    const auto add_element = [&](int parity, int64_t i) {
#pragma GCC unroll 16
      for (int j = 0; j < VECTORS; ++j) {
        const int64_t at = (i * heads.head_dim + j * kLanes) * kPer;
        __builtin_prefetch(next + at);
        add(parity, load_operand(values + at), start / kPer + i, j);
      }
    };
    int64_t i = 0;
    for (; i + 1 < whole; i += 2) {
      add_element(0, i);
      add_element(1, i + 1);
    }
    if (i < whole) add_element(0, i);
    if (start + heads.page_size > longest && longest % kPer)
      for (int j = 0; j < VECTORS; ++j) {
        const int64_t at = (whole * heads.head_dim + j * kLanes) * kPer;
        // Constants: sums indexed at run time would not stay in registers.
        if (whole % 2)
          add(1, first_of(load_operand(values + at)), start / kPer + whole, j);
        else
          add(0, first_of(load_operand(values + at)), start / kPer + whole, j);
      }
  }
  for (int i = 0; i < COUNT; ++i)
    for (int j = 0; j < VECTORS; ++j)
      store(out[i] + d + j * kLanes, (sums[0][i][j] + sums[1][i][j]) / splat(totals[i]));
}

template <typename W, int COUNT>
static void attend_some(const Queries<W>& queries, const W* k_cache, const W* v_cache,
                        const Heads& heads, int64_t kv_head, const int32_t* pages,
                        Scratch<W>& scratch) {
  int64_t longest = 1;
  for (int i = 0; i < COUNT; ++i) longest = std::max(longest, queries.visible[i]);
  const int64_t stride = (longest + kLanes - 1) / kLanes * kLanes;
  if ((int64_t)scratch.weights.size() < stride * COUNT) {
    scratch.weights.resize(stride * COUNT);
    scratch.elements.resize(stride * COUNT);
  }
  float* weights = scratch.weights.data();
  constexpr int kChunks = COUNT <= 2 ? 4 : 2;
  const int64_t left = score<W, COUNT, kChunks>(queries, k_cache, heads, kv_head, pages, 0,
                                                longest, weights, stride);
  score<W, COUNT, 1>(queries, k_cache, heads, kv_head, pages, left, longest, weights, stride);
  const int64_t length = Operand<W>::length(stride);
  float totals[COUNT];
  for (int i = 0; i < COUNT; ++i) {
    totals[i] = soften(weights + i * stride, stride);
    convert_row(weights + i * stride, stride, &scratch.elements[i * length]);
  }
  // Each loaded value is used for four queries, and each weight for two vectors of values.
  constexpr int kCount = COUNT < 4 ? COUNT : 4;
  for (int first = 0; first < COUNT; first += kCount) {
    const auto* elements = scratch.elements.data() + first * length;
    const auto run = [&](auto blend_vectors, int64_t d) {
      blend_vectors(queries.out + first, v_cache, heads, kv_head, pages, longest, elements, length,
                    totals + first, d);
    };
    int64_t d = 0;
    for (; d + 2 * kLanes <= heads.head_dim; d += 2 * kLanes) run(blend<W, kCount, 2>, d);
    if (d < heads.head_dim) run(blend<W, kCount, 1>, d);
  }
}

// Tokens of one request in a work item.
struct Span {
  int64_t first_token;  // index in the step
  int64_t num_tokens;
  const int32_t* pages;
  int64_t visible = 0;  // number of positions to which all tokens attend; 0 if it depends on theirs
};

// All query heads of one KV head for the tokens of a span. `q` is [tokens][heads][head_dim] as
// elements, `out` the same as floats; `positions` are those of all tokens, unused if the span has
// `visible`.
template <typename W>
static void attend(const Span& span, int64_t kv_head, const typename Operand<W>::Element* q,
                   const int64_t* positions, const W* k_cache, const W* v_cache,
                   const Heads& heads, float* out, Scratch<W>& scratch) {
  const int64_t group = heads.group(), dim = heads.head_dim;
  const int64_t total = span.num_tokens * group;
  for (int64_t done = 0; done < total;) {
    Queries<W> queries;
    const int64_t left = total - done;
    const int count = left >= 8 ? 8 : left >= 4 ? 4 : (int)left;
    for (int i = 0; i < count; ++i) {
      const int64_t token = span.first_token + (done + i) / group;
      const int64_t head = token * heads.num_heads + kv_head * group + (done + i) % group;
      queries.q[i] = q + head * Operand<W>::length(dim);
      queries.out[i] = out + head * dim;
      queries.visible[i] = span.visible ? span.visible : heads.visible(positions[token]);
    }
    const auto run = [&](auto attend_count) {
      attend_count(queries, k_cache, v_cache, heads, kv_head, span.pages, scratch);
    };
    if (count == 8) run(attend_some<W, 8>);
    else if (count == 4) run(attend_some<W, 4>);
    else if (count == 3) run(attend_some<W, 3>);
    else if (count == 2) run(attend_some<W, 2>);
    else run(attend_some<W, 1>);
    done += count;
  }
}

}  // namespace rayfleet
