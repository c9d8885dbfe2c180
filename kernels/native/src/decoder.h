// A forward pass of a dense decoder, phase by phase, by a team of threads.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "matmuls.h"
#include "pace.h"
#include "rows.h"

namespace rayfleet {

// These structs are mirrored in library.py, field by field.
struct LayerWeights {
  // gate_up's rows: 16 of the gate, the 16 matching ones of the up projection, and so on.
  LinearWeight qkv, output, gate_up, down;
  const float *input_norm, *post_attention_norm;
  const float *q_norm, *k_norm;  // null if there are none
  void *k_cache, *v_cache;
};

// Sums `count` floats over the ranks, in place; a nonzero result aborts the step.
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
  Reduce reduce;  // null if there is only one rank
};

struct StepRows {
  int64_t num_rows;
  const int64_t* rows;        // [num_rows, 4]: slot, start, length, whether it samples
  const int32_t* token_pool;  // [slots, token_stride]
  int64_t token_stride;
  const int32_t* page_table;  // [slots, page_stride]
  int64_t page_stride;
  // Tokens of the step whose hidden states are needed, ascending. For other tokens, the last layer
  // only computes keys and values.
  const int64_t* logits_indices;
  int64_t num_logits;  // -1 for all
  const float* inputs;  // [tokens, hidden_size]: inputs of the first layer; null for embeddings
  // Tokens with adapters among all tokens, and among logits_indices.
  LoraTokens adapters, logits_adapters;
};

template <typename W>
class Decoder : Matmuls<W> {
 public:
  typedef typename Operand<W>::Element Element;

  Decoder(const ModelWeights& model, Team& team, double ms_per_thread)
      : Matmuls<W>(team, ms_per_thread),
        model_(model),
        heads_{model.num_heads, model.num_kv_heads, model.head_dim,
               model.page_size, model.block_size,   model.scale},
        scratch_(team.size()) {}

  // Normalized hidden states of logits_indices, [tokens, hidden]. False if a reduction failed.
  bool forward(const StepRows& step, float* hidden) {
    begin(step);
    failed_ = false;
    const int64_t weights = layer_weights() * model_.num_layers;
    const double ms = expected_ms((int64_t)tokens_.size(), weights);
    const bool is_open = !is_large(weights) && team_.size() > 1 && ms >= kLongSteps * ms_per_thread_;
    const bool takes_all = is_open && pace_.takes_all();
    const auto start = std::chrono::steady_clock::now();
    team_.run(takes_all ? team_.size() : threads_for(ms, weights),
              [&](int id) { walk(id, hidden); });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (is_open) pace_.ran(takes_all, ms / took.count());
    return !failed_;
  }

  // Logits of this rank's part of the vocabulary, [rows, lm_head.n].
  void logits(const float* hidden, int64_t rows, float* out) {
    product(model_.lm_head, hidden, rows, out);
  }

  // Multiplies x [rows, weight.k] by a weight: [rows, weight.n].
  void product(const LinearWeight& weight, const float* x, int64_t rows, float* out) {
    operand_.reserve(rows * row_stride<W>(weight.k));
    for (int64_t row = 0; row < rows; ++row)
      convert_row(x + row * weight.k, weight.k, operand(row, weight.k));
    team_.run(threads_for(expected_ms(rows, weight.n * weight.k), weight.n * weight.k),
              [&](int id) { multiply(id, weight, rows, operand_.data(), Floats{out, weight.n}); });
  }

 private:
  using Matmuls<W>::columns;
  using Matmuls<W>::expected_ms;
  using Matmuls<W>::is_large;
  using Matmuls<W>::ms_per_thread_;
  using Matmuls<W>::multiply;
  using Matmuls<W>::share_tokens;
  using Matmuls<W>::team_;
  using Matmuls<W>::threads_for;

  struct Token {
    int32_t id;
    int64_t page, offset;
  };

  // Tokens that have a LoRA adapter.
  struct Adapters {
    const int64_t* tokens = nullptr;
    std::vector<LoraChunk> chunks;
    explicit operator bool() const { return !chunks.empty(); }
  };

  // Minimum work of a long step of a small model, in units of the work that justifies one more
  // thread.
  static constexpr double kLongSteps = 2.0;

  // Number of tokens per work item of attention.
  static constexpr int64_t kSpanTokens = 16;

  int64_t layer_weights() const {
    return model_.hidden_size * (qkv_size() + model_.num_heads * model_.head_dim +
                                 3 * model_.intermediate_size);
  }

  void begin(const StepRows& step) {
    tokens_.clear();
    positions_.clear();
    spans_.clear();
    logits_spans_.clear();
    int64_t next = 0;  // index into logits_indices
    for (int64_t i = 0; i < step.num_rows; ++i) {
      const int64_t slot = step.rows[4 * i], start = step.rows[4 * i + 1];
      const int64_t length = step.rows[4 * i + 2];
      const int32_t* ids = step.token_pool + slot * step.token_stride;
      const int32_t* pages = step.page_table + slot * step.page_stride;
      const int64_t first = (int64_t)tokens_.size();
      add_spans(spans_, first, length, pages);
      for (int64_t position = start; position < start + length; ++position) {
        tokens_.push_back({ids[position], pages[position / model_.page_size],
                           position % model_.page_size});
        positions_.push_back(position);
      }
      const int64_t before = next;
      while (next < step.num_logits && step.logits_indices[next] < first + length) ++next;
      add_spans(logits_spans_, before, next - before, pages);
    }
    const int64_t count = (int64_t)tokens_.size();
    logits_indices_ = step.logits_indices;
    inputs_ = step.inputs;
    adapters_ = {step.adapters.tokens, lora_chunks(step.adapters)};
    logits_adapters_ = {step.logits_adapters.tokens, lora_chunks(step.logits_adapters)};
    num_logits_ = step.num_logits < count ? step.num_logits : -1;
    const int64_t widest = std::max(model_.hidden_size, model_.num_heads * model_.head_dim);
    residual_.reserve(count * model_.hidden_size);
    block_.reserve(count * model_.hidden_size);
    qkv_.reserve(count * qkv_size());
    attended_.reserve(count * model_.num_heads * model_.head_dim);
    queries_.reserve(count * model_.num_heads * Operand<W>::length(model_.head_dim));
    operand_.reserve(count * row_stride<W>(widest));
    inner_.reserve(count * row_stride<W>(model_.intermediate_size));
    if (adapters_) gate_up_.reserve(count * 2 * model_.intermediate_size);
    row_.resize(team_.size());
    for (auto& row : row_) row.reserve(model_.hidden_size);
  }

  static void add_spans(std::vector<Span>& spans, int64_t first, int64_t count,
                        const int32_t* pages) {
    for (int64_t done = 0; done < count; done += kSpanTokens)
      spans.push_back({first + done, std::min(kSpanTokens, count - done), pages});
  }

  void walk(int id, float* hidden) {
    int64_t count = (int64_t)tokens_.size();
    const int64_t size = model_.hidden_size;
    const std::vector<Span>* spans = &spans_;
    const Adapters* adapters = &adapters_;
    embed(id, count);
    if (!inputs_ && !reduce(id, residual_, count)) return;
    for (int64_t i = 0; i < model_.num_layers; ++i) {
      const LayerWeights& layer = model_.layers[i];
      share_tokens(id, count, [&](int64_t t) {
        if (i) add_row(residual(t), &block_[t * size], size);
        normalise(id, t, layer.input_norm);
      });
      if (num_logits_ >= 0 && i + 1 == model_.num_layers) {
        store_keys_of_all(id, layer, count);
        count = num_logits_;
        if (!count) return;
        spans = &logits_spans_;
        adapters = &logits_adapters_;
        keep_only_read(id);
        multiply(id, columns(layer.qkv, 0, query_size()), count, operand_.data(), qkv_sink(0));
        add_adapters(id, *adapters, layer.qkv, operand_.data(), qkv_sink(0), 0, query_size());
        share_tokens(id, count, [&](int64_t t) { place_queries(layer, t); });
      } else {
        multiply(id, layer.qkv, count, operand_.data(), qkv_sink(0));
        add_adapters(id, *adapters, layer.qkv, operand_.data(), qkv_sink(0), 0, qkv_size());
        share_tokens(id, count, [&](int64_t t) {
          place_queries(layer, t);
          place_keys(layer, t);
        });
      }
      // Tokens with the most keys are last in each row; start with them, so that the last threads
      // do not wait for one of these.
      const auto attend_item = [&](int64_t item) {
        const Span& span = (*spans)[item / model_.num_kv_heads];
        const int64_t kv_head = item % model_.num_kv_heads;
        attend(span, kv_head, queries_.data(), positions_.data(), (const W*)layer.k_cache,
               (const W*)layer.v_cache, heads_, attended_.data(), scratch_[id]);
        convert_attended(span, kv_head);
      };
      team_.share(id, (int64_t)spans->size() * model_.num_kv_heads, attend_item, 1, true);
      if (!multiply_and_reduce(id, *adapters, layer.output, count, operand_.data())) return;
      share_tokens(id, count, [&](int64_t t) {
        add_row(residual(t), &block_[t * size], size);
        normalise(id, t, layer.post_attention_norm);
      });
      multiply_gated(id, *adapters, layer.gate_up, count);
      if (!multiply_and_reduce(id, *adapters, layer.down, count, inner_.data())) return;
    }
    share_tokens(id, count, [&](int64_t t) {
      add_row(residual(t), &block_[t * size], size);
      rms_norm_row(residual(t), model_.final_norm, size, model_.eps, hidden + t * size);
    });
  }

  void embed(int id, int64_t count) {
    const int64_t size = model_.hidden_size;
    share_tokens(id, count, [&](int64_t t) {
      if (inputs_) {
        std::copy_n(inputs_ + t * size, size, residual(t));
        return;
      }
      const int64_t row = tokens_[t].id - model_.vocab_start;
      const bool mine = tokens_[t].id >= model_.vocab_start && tokens_[t].id < model_.vocab_end;
      for (int64_t i = 0; i < size; i += kLanes)
        store(residual(t) + i,
              mine ? load_any((const W*)model_.embedding + row * size + i) : F32{});
    });
  }

  void store_keys_of_all(int id, const LayerWeights& layer, int64_t count) {
    const int64_t first = query_size() / kBlock * kBlock;
    multiply(id, columns(layer.qkv, first, qkv_size() - first), count, operand_.data(),
             qkv_sink(first));
    add_adapters(id, adapters_, layer.qkv, operand_.data(), qkv_sink(0), query_size(), qkv_size());
    share_tokens(id, count, [&](int64_t t) { place_keys(layer, t); });
  }

  // Moves the tokens needed by the rest of the pass to the front.
  void keep_only_read(int id) {
    const int64_t size = model_.hidden_size;
    team_.share(id, 1, [&](int64_t) {
      for (int64_t i = 0; i < num_logits_; ++i) {
        const int64_t t = logits_indices_[i];
        if (t == i) continue;
        positions_[i] = positions_[t];
        std::copy_n(residual(t), size, residual(i));
        std::copy_n(operand(t, size), Operand<W>::length(size), operand(i, size));
      }
    });
  }

  // Normalizes and rotates one token's queries.
  void place_queries(const LayerWeights& layer, int64_t t) {
    const int64_t dim = model_.head_dim;
    float* q = &qkv_[t * qkv_size()];
    for (int64_t head = 0; head < model_.num_heads; ++head) {
      turn(q + head * dim, layer.q_norm, t);
      convert_row(q + head * dim, dim,
                  &queries_[(t * model_.num_heads + head) * Operand<W>::length(dim)]);
    }
  }

  // Normalizes, rotates and stores one token's keys, and stores its values.
  void place_keys(const LayerWeights& layer, int64_t t) {
    const int64_t dim = model_.head_dim;
    float* k = &qkv_[t * qkv_size() + query_size()];
    for (int64_t head = 0; head < model_.num_kv_heads; ++head) turn(k + head * dim, layer.k_norm, t);
    store_kv(k, k + model_.num_kv_heads * dim, (W*)layer.k_cache, (W*)layer.v_cache, heads_,
             tokens_[t].page, tokens_[t].offset);
  }

  void turn(float* head, const float* norm, int64_t t) {
    if (norm) rms_norm_row(head, norm, model_.head_dim, model_.eps, head);
    rotate_head(head, model_.cos_sin + positions_[t] * model_.rotated_dim, model_.rotated_dim);
  }

  // Output of one work item of attention, as elements for the next matmul.
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

  // Gate and up projections and the activation, into inner_.
  void multiply_gated(int id, const Adapters& adapters, const LinearWeight& weight, int64_t rows) {
    if (!adapters || !weight.lora)
      return multiply(id, weight, rows, operand_.data(), Gated<W>{inner_.data()});
    const Floats sink{gate_up_.data(), weight.n};
    multiply(id, weight, rows, operand_.data(), sink);
    add_adapters(id, adapters, weight, operand_.data(), sink, 0, weight.lora->num_out, true);
    share_tokens(id, rows, [&](int64_t t) {
      const float* from = &gate_up_[t * weight.n];
      W* to = (W*)(inner_.data() + t * row_stride<W>(weight.n / 2));
      for (int64_t i = 0; i < weight.n / 2; i += kLanes)
        store_any(to + i, gated(load(from + 2 * i), load(from + 2 * i + kLanes)));
    });
  }

  // Adds the output features [first, end) of the tokens' adapters to those of a matmul.
  void add_adapters(int id, const Adapters& adapters, const LinearWeight& weight,
                    const Element* operand, const Floats& sink, int64_t first, int64_t end,
                    bool is_paired = false) {
    if (!adapters || !weight.lora) return;
    const LoraRows<W, float> rows{
        (const W*)operand, row_stride<W>(weight.k) * Operand<W>::kPer, sink.out, sink.stride,
        first, end, is_paired};
    LoraProduct<W, float> product(*weight.lora, rows, adapters.tokens);
    team_.share(id, (int64_t)adapters.chunks.size(),
                [&](int64_t i) { product.run(adapters.chunks[i]); });
  }

  // A row-parallel matmul, summed over the ranks, into block_.
  bool multiply_and_reduce(int id, const Adapters& adapters, const LinearWeight& weight,
                           int64_t rows, const Element* operand) {
    const Floats sink{block_.data(), weight.n};
    multiply(id, weight, rows, operand, sink);
    add_adapters(id, adapters, weight, operand, sink, 0, weight.n);
    return reduce(id, block_, rows);
  }

  bool reduce(int id, Buffer<float>& values, int64_t rows) {
    if (!model_.reduce) return true;
    if (id == 0 && model_.reduce(values.data(), rows * model_.hidden_size)) failed_ = true;
    team_.barrier();
    return !failed_;
  }

  Floats qkv_sink(int64_t first_column) { return {qkv_.data() + first_column, qkv_size()}; }

  int64_t query_size() const { return model_.num_heads * model_.head_dim; }
  int64_t qkv_size() const {
    return (model_.num_heads + 2 * model_.num_kv_heads) * model_.head_dim;
  }
  float* residual(int64_t t) { return &residual_[t * model_.hidden_size]; }
  Element* operand(int64_t t, int64_t size) { return &operand_[t * row_stride<W>(size)]; }

  const ModelWeights model_;
  const Heads heads_;
  std::vector<Token> tokens_;
  std::vector<int64_t> positions_;  // by token
  std::vector<Span> spans_, logits_spans_;  // the latter over logits_indices only
  const int64_t* logits_indices_ = nullptr;
  const float* inputs_ = nullptr;  // inputs of the first layer; null for embeddings
  int64_t num_logits_ = -1;  // -1 for all
  Adapters adapters_, logits_adapters_;  // the latter over logits_indices only
  Buffer<float> residual_, block_, qkv_, attended_;
  Buffer<float> gate_up_;  // only used with adapters
  Buffer<Element> operand_, queries_, inner_;
  std::vector<Buffer<float>> row_;
  std::vector<Scratch<W>> scratch_;  // per thread
  Pace pace_;
  bool failed_ = false;
};

}  // namespace rayfleet
