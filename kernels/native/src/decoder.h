// A whole pass through a dense decoder, phase by phase, by a team of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
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
    operand_.resize(rows * Operand<W>::length(model_.hidden_size));
    for (int64_t row = 0; row < rows; ++row)
      convert_row(hidden + row * model_.hidden_size, model_.hidden_size,
                  operand_.data() + row * Operand<W>::length(model_.hidden_size));
    team_.run(threads_for(rows, model_.lm_head.n * model_.lm_head.k),
              [&](int) { multiply(model_.lm_head, rows, out); });
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
    const int64_t widest = std::max({model_.hidden_size, model_.intermediate_size,
                                     model_.num_heads * model_.head_dim});
    residual_.resize(count * model_.hidden_size);
    block_.resize(count * model_.hidden_size);
    qkv_.resize(count * qkv_size());
    attended_.resize(count * model_.num_heads * model_.head_dim);
    queries_.resize(count * model_.num_heads * Operand<W>::length(model_.head_dim));
    gate_up_.resize(count * 2 * model_.intermediate_size);
    operand_.resize(count * Operand<W>::length(widest));
    row_.resize(team_.size());
    for (auto& row : row_) row.resize(widest);
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
      multiply(layer.qkv, count, qkv_.data());
      team_.share(count, [&](int64_t t) { place(layer, t); });
      team_.share((int64_t)spans_.size() * model_.num_kv_heads, [&](int64_t item) {
        const Span& span = spans_[item / model_.num_kv_heads];
        attend(span, item % model_.num_kv_heads, queries_.data(), (const W*)layer.k_cache,
               (const W*)layer.v_cache, heads_, attended_.data(), scratch_[id]);
      });
      const int64_t width = model_.num_heads * model_.head_dim;
      team_.share(count, [&](int64_t t) {
        convert_row(&attended_[t * width], width, operand(t, width));
      });
      if (!multiply_and_reduce(id, layer.output, count)) return;
      team_.share(count, [&](int64_t t) {
        add_row(residual(t), &block_[t * size], size);
        normalise(id, t, layer.post_attention_norm);
      });
      multiply(layer.gate_up, count, gate_up_.data());
      const int64_t inner = model_.intermediate_size;
      team_.share(count, [&](int64_t t) {
        silu_and_mul_row(&gate_up_[t * 2 * inner], inner, row_[id].data());
        convert_row(row_[id].data(), inner, operand(t, inner));
      });
      if (!multiply_and_reduce(id, layer.down, count)) return;
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

  void normalise(int id, int64_t t, const float* weight) {
    float* row = row_[id].data();
    rms_norm_row(residual(t), weight, model_.hidden_size, model_.eps, row);
    convert_row(row, model_.hidden_size, operand(t, model_.hidden_size));
  }

  void multiply(const LinearWeight& weight, int64_t rows, float* out) {
    team_.share(linear_items(rows, weight.n), [&](int64_t item) {
      linear_item<W>(item, operand_.data(), rows, typed(weight), out);
    });
  }

  // A row-parallel product, summed over the ranks, into block_.
  bool multiply_and_reduce(int id, const LinearWeight& weight, int64_t rows) {
    multiply(weight, rows, block_.data());
    return reduce(id, block_);
  }

  bool reduce(int id, std::vector<float>& values) {
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
  std::vector<float> residual_, block_, qkv_, attended_, gate_up_;
  std::vector<Element> operand_, queries_;
  std::vector<std::vector<float>> row_;
  std::vector<Scratch<W>> scratch_;  // per thread
  bool failed_ = false;
};

}  // namespace rayfleet
