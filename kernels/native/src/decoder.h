// A whole pass through a dense decoder, phase by phase, by a team of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "linear.h"
#include "rows.h"
#include "team.h"

namespace rayfleet {

// These structs are mirrored in library.py, field by field.
struct LinearWeight {
  const void* packed;
  const float* bias;  // null for none
  int64_t n, k;
};

struct LayerWeights {
  // gate_up's rows: 16 of the gate, the 16 of the up projection that belong to them, and so on.
  LinearWeight qkv, output, gate_up, down;
  const float *input_norm, *post_attention_norm;
  const float *q_norm, *k_norm;  // null for none
  void *k_cache, *v_cache;
};

// Sums `count` floats over the ranks, in place; anything but 0 ends the step.
typedef int32_t (*Reduce)(float* values, int64_t count);

struct ModelWeights {
  int64_t is_bf16;
  int64_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, rotated_dim;
  int64_t page_size, block_size, num_layers;
  int64_t vocab_start, vocab_end;  // rows of the embedding on this rank
  float eps, scale;
  const float* cos_sin;     // [positions, rotated_dim]
  const void* embedding;    // [vocab_end - vocab_start, hidden_size]
  const float* final_norm;
  LinearWeight lm_head;
  const LayerWeights* layers;
  Reduce reduce;  // null for a single rank
};

struct StepRows {
  int64_t num_rows;
  const int64_t* rows;        // [num_rows, 4]: slot, start, length, whether it samples
  const int32_t* token_pool;  // [slots, token_stride]
  int64_t token_stride;
  const int32_t* page_table;  // [slots, page_stride]
  int64_t page_stride;
};

template <typename W>
class Decoder {
 public:
  typedef typename Operand<W>::Element Element;

  Decoder(const ModelWeights& model, Team& team, double ms_per_thread)
      : model_(model),
        ms_per_thread_(ms_per_thread),
        heads_{model.num_heads, model.num_kv_heads, model.head_dim,
               model.page_size, model.block_size,   model.scale},
        team_(team),
        scratch_(team.size()) {}

  // Normalised hidden states of all tokens, [tokens, hidden]. False if a reduction failed.
  bool forward(const StepRows& step, float* hidden) {
    begin(step);
    failed_ = false;
    team_.run(threads_for((int64_t)tokens_.size(), layer_weights() * model_.num_layers),
              [&](int id) { walk(id, hidden); });
    return !failed_;
  }

  // Scores of this rank's part of the vocabulary, [rows, lm_head.n].
  void logits(const float* hidden, int64_t rows, float* out) {
    operand_.reserve(rows * Operand<W>::length(model_.hidden_size));
    for (int64_t row = 0; row < rows; ++row)
      convert_row(hidden + row * model_.hidden_size, model_.hidden_size,
                  operand_.data() + row * Operand<W>::length(model_.hidden_size));
    team_.run(threads_for(rows, model_.lm_head.n * model_.lm_head.k),
              [&](int) { multiply(model_.lm_head, rows, operand_.data(), Floats{out}); });
  }

 private:
  struct Token {
    int32_t id;
    int64_t position, page, offset;
  };

  // Tokens that one work item of attention takes.
  static constexpr int64_t kSpanTokens = 16;

  // Threads for `rows` rows times so many weights. Short steps leave cores to whoever schedules
  // them and carries their tokens away. A small model leaves one even in its long steps: these
  // have short phases, and a thread that must wait for its core holds up all others in each.
  int threads_for(int64_t rows, int64_t weights) const {
    constexpr double kProductsPerMs = sizeof(W) == 2 ? 200e6 : 100e6;
    constexpr double kBytesPerMs = 30e6;
    const double to_read = weights * (double)sizeof(W) / kBytesPerMs;
    const double ms = std::max(rows * (double)weights / kProductsPerMs, to_read);
    const int most = to_read >= ms_per_thread_ ? team_.size() : std::max(1, team_.size() - 1);
    return (int)std::min((double)most, std::ceil(ms / ms_per_thread_));
  }

  int64_t layer_weights() const {
    return model_.hidden_size * (qkv_size() + model_.num_heads * model_.head_dim +
                                 3 * model_.intermediate_size);
  }

  void begin(const StepRows& step) {
    tokens_.clear();
    spans_.clear();
    for (int64_t i = 0; i < step.num_rows; ++i) {
      const int64_t slot = step.rows[4 * i], start = step.rows[4 * i + 1];
      const int64_t length = step.rows[4 * i + 2];
      const int32_t* ids = step.token_pool + slot * step.token_stride;
      const int32_t* pages = step.page_table + slot * step.page_stride;
      for (int64_t done = 0; done < length; done += kSpanTokens)
        spans_.push_back({(int64_t)tokens_.size() + done, std::min(kSpanTokens, length - done),
                          start + done, pages});
      for (int64_t position = start; position < start + length; ++position)
        tokens_.push_back({ids[position], position, pages[position / model_.page_size],
                           position % model_.page_size});
    }
    const int64_t count = (int64_t)tokens_.size();
    const int64_t widest = std::max(model_.hidden_size, model_.num_heads * model_.head_dim);
    residual_.reserve(count * model_.hidden_size);
    block_.reserve(count * model_.hidden_size);
    qkv_.reserve(count * qkv_size());
    attended_.reserve(count * model_.num_heads * model_.head_dim);
    queries_.reserve(count * model_.num_heads * Operand<W>::length(model_.head_dim));
    operand_.reserve(count * Operand<W>::length(widest));
    inner_.reserve(count * Operand<W>::length(model_.intermediate_size));
    row_.resize(team_.size());
    for (auto& row : row_) row.reserve(model_.hidden_size);
  }

  void walk(int id, float* hidden) {
    const int64_t count = (int64_t)tokens_.size(), size = model_.hidden_size;
    embed(count);
    if (!reduce(id, residual_)) return;
    for (int64_t i = 0; i < model_.num_layers; ++i) {
      const LayerWeights& layer = model_.layers[i];
      team_.share(count, [&](int64_t t) {
        if (i) add_row(residual(t), &block_[t * size], size);
        normalise(id, t, layer.input_norm);
      });
      multiply(layer.qkv, count, operand_.data(), Floats{qkv_.data()});
      team_.share(count, [&](int64_t t) { place(layer, t); });
      team_.share((int64_t)spans_.size() * model_.num_kv_heads, [&](int64_t item) {
        const Span& span = spans_[item / model_.num_kv_heads];
        const int64_t kv_head = item % model_.num_kv_heads;
        attend(span, kv_head, queries_.data(), (const W*)layer.k_cache, (const W*)layer.v_cache,
               heads_, attended_.data(), scratch_[id]);
        convert_attended(span, kv_head);
      });
      if (!multiply_and_reduce(id, layer.output, count, operand_.data())) return;
      team_.share(count, [&](int64_t t) {
        add_row(residual(t), &block_[t * size], size);
        normalise(id, t, layer.post_attention_norm);
      });
      multiply(layer.gate_up, count, operand_.data(), Gated<W>{inner_.data()});
      if (!multiply_and_reduce(id, layer.down, count, inner_.data())) return;
    }
    team_.share(count, [&](int64_t t) {
      add_row(residual(t), &block_[t * size], size);
      rms_norm_row(residual(t), model_.final_norm, size, model_.eps, hidden + t * size);
    });
  }

  void embed(int64_t count) {
    const int64_t size = model_.hidden_size;
    team_.share(count, [&](int64_t t) {
      const int64_t row = tokens_[t].id - model_.vocab_start;
      const bool mine = tokens_[t].id >= model_.vocab_start && tokens_[t].id < model_.vocab_end;
      for (int64_t i = 0; i < size; i += kLanes)
        store(residual(t) + i,
              mine ? load_any((const W*)model_.embedding + row * size + i) : F32{});
    });
  }

  // Norm, rotation and storage of one token's query and keys.
  void place(const LayerWeights& layer, int64_t t) {
    const Token& token = tokens_[t];
    const int64_t dim = model_.head_dim;
    float* q = &qkv_[t * qkv_size()];
    float* k = q + model_.num_heads * dim;
    const float* table = model_.cos_sin + token.position * model_.rotated_dim;
    const auto turn = [&](float* head, const float* norm) {
      if (norm) rms_norm_row(head, norm, dim, model_.eps, head);
      rotate_head(head, table, model_.rotated_dim);
    };
    for (int64_t head = 0; head < model_.num_heads; ++head) turn(q + head * dim, layer.q_norm);
    for (int64_t head = 0; head < model_.num_kv_heads; ++head) turn(k + head * dim, layer.k_norm);
    for (int64_t head = 0; head < model_.num_heads; ++head)
      convert_row(q + head * dim, dim,
                  &queries_[(t * model_.num_heads + head) * Operand<W>::length(dim)]);
    store_kv(k, k + model_.num_kv_heads * dim, (W*)layer.k_cache, (W*)layer.v_cache, heads_,
             token.page, token.offset);
  }

  // What one work item of attention found, as elements for the product that follows.
  void convert_attended(const Span& span, int64_t kv_head) {
    const int64_t width = model_.num_heads * model_.head_dim;
    const int64_t part = heads_.group() * model_.head_dim, first = kv_head * part;
    for (int64_t t = span.first_token; t < span.first_token + span.num_tokens; ++t)
      convert_row(&attended_[t * width + first], part,
                  operand(t, width) + Operand<W>::length(first));
  }

  void normalise(int id, int64_t t, const float* weight) {
    float* row = row_[id].data();
    rms_norm_row(residual(t), weight, model_.hidden_size, model_.eps, row);
    convert_row(row, model_.hidden_size, operand(t, model_.hidden_size));
  }

  template <typename Sink>
  void multiply(const LinearWeight& weight, int64_t rows, const Element* operand,
                const Sink& sink) {
    team_.share(linear_items(rows, weight.n), [&](int64_t item) {
      linear_item<W>(item, operand, rows, typed(weight), sink);
    });
  }

  // A row-parallel product, summed over the ranks, into block_.
  bool multiply_and_reduce(int id, const LinearWeight& weight, int64_t rows,
                           const Element* operand) {
    multiply(weight, rows, operand, Floats{block_.data()});
    return reduce(id, block_);
  }

  bool reduce(int id, Buffer<float>& values) {
    if (!model_.reduce) return true;
    if (id == 0 && model_.reduce(values.data(), (int64_t)tokens_.size() * model_.hidden_size))
      failed_ = true;
    team_.barrier();
    return !failed_;
  }

  static Weight<W> typed(const LinearWeight& weight) {
    return {(const W*)weight.packed, weight.bias, weight.n, weight.k};
  }

  int64_t qkv_size() const {
    return (model_.num_heads + 2 * model_.num_kv_heads) * model_.head_dim;
  }
  float* residual(int64_t t) { return &residual_[t * model_.hidden_size]; }
  Element* operand(int64_t t, int64_t size) { return &operand_[t * Operand<W>::length(size)]; }

  const ModelWeights model_;
  const double ms_per_thread_;
  const Heads heads_;
  Team& team_;
  std::vector<Token> tokens_;
  std::vector<Span> spans_;
  Buffer<float> residual_, block_, qkv_, attended_;
  Buffer<Element> operand_, queries_, inner_;
  std::vector<Buffer<float>> row_;
  std::vector<Scratch<W>> scratch_;  // per thread
  bool failed_ = false;
};

}  // namespace rayfleet
