// A forward pass of a post-norm encoder (BERT), phase by phase, by a team of threads.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "matmuls.h"
#include "rows.h"

namespace rayfleet {

// These structs are mirrored in library.py, field by field.
struct NormWeight {
  const float *weight, *bias;
};

struct EncoderLayer {
  LinearWeight qkv, output, up, down;
  NormWeight after_attention, after_mlp;
};

struct EncoderWeights {
  int64_t is_bf16;
  int64_t hidden_size, intermediate_size, num_heads, head_dim, num_layers;
  float eps, scale;
  const void *words, *positions, *types;  // embeddings, hidden_size per row
  int64_t first_position;                 // row of `positions` of a text's first token
  NormWeight norm;                        // after the embeddings
  const EncoderLayer* layers;
};

struct EncoderStep {
  int64_t num_texts;
  const int64_t* rows;        // [num_texts, 4]: slot, 0, length, and an unused number
  const int32_t* token_pool;  // [slots, token_stride]
  int64_t token_stride;
  const int64_t* types;  // by token; null if all are 0
  // Tokens whose hidden states are needed, ascending. For other tokens, the last layer only
  // computes keys and values.
  const int64_t* logits_indices;
  int64_t num_logits;  // -1 for all
};

template <typename W>
class Encoder : Matmuls<W> {
 public:
  typedef typename Operand<W>::Element Element;

  Encoder(const EncoderWeights& model, Team& team, double ms_per_thread)
      : Matmuls<W>(team, ms_per_thread),
        model_(model),
        heads_{model.num_heads, model.num_heads, model.head_dim, kPage, 1, model.scale},
        scratch_(team.size()),
        row_(team.size()) {
    for (auto& row : row_) row.reserve(model.hidden_size);
  }

  // Hidden states of logits_indices, [tokens, hidden_size]. Some texts at a time, so that their
  // activations stay in the cache from one phase to the next.
  void forward(const EncoderStep& step, float* hidden) {
    const int64_t most = kTokensAtOnce * team_.size();
    int64_t first_token = 0, next = 0;  // `next` is an index into logits_indices
    for (int64_t text = 0; text < step.num_texts;) {
      EncoderStep part = step;
      part.rows += 4 * text;
      if (part.types) part.types += first_token;
      int64_t count = part.rows[2];
      for (part.num_texts = 1; text + part.num_texts < step.num_texts; ++part.num_texts) {
        const int64_t length = part.rows[4 * part.num_texts + 2];
        if (count + length > most) break;
        count += length;
      }
      text += part.num_texts;
      if (step.num_logits >= 0) {
        logits_indices_.clear();
        for (; next < step.num_logits && step.logits_indices[next] < first_token + count; ++next)
          logits_indices_.push_back(step.logits_indices[next] - first_token);
        part.logits_indices = logits_indices_.data();
        part.num_logits = (int64_t)logits_indices_.size();
      }
      first_token += count;
      run(part, hidden);
      hidden += (step.num_logits >= 0 ? part.num_logits : count) * model_.hidden_size;
    }
  }

 private:
  using Matmuls<W>::columns;
  using Matmuls<W>::expected_ms;
  using Matmuls<W>::multiply;
  using Matmuls<W>::share_tokens;
  using Matmuls<W>::team_;
  using Matmuls<W>::threads_for;

  struct Token {
    int32_t id;
    int64_t position, first_page;  // the latter is its text's
  };

  // Positions per page of keys and values. With one vector, a page of keys is contiguous.
  static constexpr int64_t kPage = kLanes;
  static constexpr int64_t kSpanTokens = 16;  // maximum per work item of attention

  // Maximum tokens per thread that pass through the layers together, unless a text has more.
  static constexpr int64_t kTokensAtOnce = 512;

  void run(const EncoderStep& step, float* hidden) {
    begin(step);
    const int64_t weights = layer_weights() * model_.num_layers;
    team_.run(threads_for(expected_ms(num_tokens_, weights), weights),
              [&](int id) { walk(id, hidden); });
  }

  int64_t layer_weights() const {
    return model_.hidden_size * (4 * model_.hidden_size + 2 * model_.intermediate_size);
  }

  void begin(const EncoderStep& step) {
    step_ = step;
    tokens_.clear();
    spans_.clear();
    logits_spans_.clear();
    int64_t num_pages = 0, next = 0;  // `next` is an index into logits_indices
    for (int64_t i = 0; i < step.num_texts; ++i)
      num_pages += (step.rows[4 * i + 2] + kPage - 1) / kPage;
    pages_.resize(num_pages);
    std::iota(pages_.begin(), pages_.end(), 0);
    int64_t page = 0;
    for (int64_t i = 0; i < step.num_texts; ++i) {
      const int64_t length = step.rows[4 * i + 2], first = (int64_t)tokens_.size();
      const int32_t* ids = step.token_pool + step.rows[4 * i] * step.token_stride;
      add_spans(spans_, first, length, length, page);
      const int64_t before = next;
      while (next < step.num_logits && step.logits_indices[next] < first + length) ++next;
      add_spans(logits_spans_, before, next - before, length, page);
      for (int64_t position = 0; position < length; ++position)
        tokens_.push_back({ids[position], position, page});
      page += (length + kPage - 1) / kPage;
    }
    num_tokens_ = (int64_t)tokens_.size();
    num_logits_ = step.num_logits < num_tokens_ ? step.num_logits : -1;
    const int64_t size = model_.hidden_size;
    residual_.reserve(num_tokens_ * size);
    block_.reserve(num_tokens_ * size);
    attended_.reserve(num_tokens_ * size);
    qkv_.reserve(num_tokens_ * 3 * size);
    queries_.reserve(num_tokens_ * model_.num_heads * Operand<W>::length(model_.head_dim));
    keys_.reserve(num_pages * kPage * size);
    values_.reserve(num_pages * kPage * size);
    operand_.reserve(num_tokens_ * row_stride<W>(size));
    inner_.reserve(num_tokens_ * row_stride<W>(model_.intermediate_size));
  }

  void add_spans(std::vector<Span>& spans, int64_t first, int64_t count, int64_t length,
                 int64_t page) {
    for (int64_t done = 0; done < count; done += kSpanTokens)
      spans.push_back({first + done, std::min(kSpanTokens, count - done), &pages_[page], length});
  }

  void walk(int id, float* hidden) {
    int64_t count = num_tokens_;
    const int64_t size = model_.hidden_size;
    const std::vector<Span>* spans = &spans_;
    share_tokens(id, count, [&](int64_t t) { embed(id, t); });
    for (int64_t i = 0; i < model_.num_layers; ++i) {
      const EncoderLayer& layer = model_.layers[i];
      const bool is_last = i + 1 == model_.num_layers;
      if (num_logits_ >= 0 && is_last) {
        const int64_t first = size / kBlock * kBlock;
        multiply(id, columns(layer.qkv, first, 3 * size - first), count, operand_.data(),
                 Floats{qkv_.data() + first, 3 * size});
        share_tokens(id, count, [&](int64_t t) { place_keys(t); });
        count = num_logits_;
        if (!count) return;
        spans = &logits_spans_;
        keep_only_read(id);
        multiply(id, columns(layer.qkv, 0, size), count, operand_.data(),
                 Floats{qkv_.data(), 3 * size});
        share_tokens(id, count, [&](int64_t t) { place_queries(t); });
      } else {
        multiply(id, layer.qkv, count, operand_.data(), Floats{qkv_.data(), 3 * size});
        share_tokens(id, count, [&](int64_t t) {
          place_queries(t);
          place_keys(t);
        });
      }
      team_.share(id, (int64_t)spans->size() * model_.num_heads, [&](int64_t item) {
        attend_item(id, (*spans)[item / model_.num_heads], item % model_.num_heads);
      });
      multiply(id, layer.output, count, operand_.data(), Floats{block_.data(), size});
      share_tokens(id, count, [&](int64_t t) { add_and_normalise(t, layer.after_attention); });
      multiply(id, layer.up, count, operand_.data(), Gelu<W>{inner_.data()});
      multiply(id, layer.down, count, inner_.data(), Floats{block_.data(), size});
      share_tokens(id, count, [&](int64_t t) {
        add_and_normalise(t, layer.after_mlp);
        if (is_last) std::copy_n(residual(t), size, hidden + t * size);
      });
    }
  }

  void embed(int id, int64_t t) {
    const int64_t size = model_.hidden_size;
    const W* word = (const W*)model_.words + tokens_[t].id * size;
    const W* place =
        (const W*)model_.positions + (model_.first_position + tokens_[t].position) * size;
    const W* type = (const W*)model_.types + (step_.types ? step_.types[t] : 0) * size;
    float* row = row_[id].data();
    for (int64_t i = 0; i < size; i += kLanes)
      store(row + i, load_any(word + i) + load_any(type + i) + load_any(place + i));
    normalise(row, t, model_.norm);
  }

  // Attention of one head for a span, and its output as elements for the next matmul.
  void attend_item(int id, const Span& span, int64_t head) {
    attend(span, head, queries_.data(), nullptr, keys_.data(), values_.data(), heads_,
           attended_.data(), scratch_[id]);
    const int64_t size = model_.hidden_size, first = head * model_.head_dim;
    for (int64_t t = span.first_token; t < span.first_token + span.num_tokens; ++t)
      convert_row(&attended_[t * size + first], model_.head_dim,
                  operand(t) + Operand<W>::length(first));
  }

  void place_queries(int64_t t) {
    const int64_t dim = model_.head_dim;
    for (int64_t head = 0; head < model_.num_heads; ++head)
      convert_row(&qkv_[t * 3 * model_.hidden_size + head * dim], dim,
                  &queries_[(t * model_.num_heads + head) * Operand<W>::length(dim)]);
  }

  void place_keys(int64_t t) {
    const float* k = &qkv_[(t * 3 + 1) * model_.hidden_size];
    const int64_t position = tokens_[t].position;
    store_kv(k, k + model_.hidden_size, keys_.data(), values_.data(), heads_,
             tokens_[t].first_page + position / kPage, position % kPage);
  }

  // Moves the tokens needed by the rest of the pass to the front.
  void keep_only_read(int id) {
    const int64_t size = model_.hidden_size;
    team_.share(id, 1, [&](int64_t) {
      for (int64_t i = 0; i < num_logits_; ++i) {
        const int64_t t = step_.logits_indices[i];
        if (t == i) continue;
        std::copy_n(residual(t), size, residual(i));
        std::copy_n(operand(t), Operand<W>::length(size), operand(i));
      }
    });
  }

  void add_and_normalise(int64_t t, const NormWeight& norm) {
    float* row = &block_[t * model_.hidden_size];
    add_row(row, residual(t), model_.hidden_size);
    normalise(row, t, norm);
  }

  // The norm of a row, as the residual and as elements for the next matmul.
  void normalise(const float* row, int64_t t, const NormWeight& norm) {
    const int64_t size = model_.hidden_size;
    layer_norm_row(row, norm.weight, norm.bias, size, model_.eps, residual(t));
    convert_row(residual(t), size, operand(t));
  }

  float* residual(int64_t t) { return &residual_[t * model_.hidden_size]; }
  Element* operand(int64_t t) { return &operand_[t * row_stride<W>(model_.hidden_size)]; }

  const EncoderWeights model_;
  const Heads heads_;
  EncoderStep step_{};
  int64_t num_tokens_ = 0, num_logits_ = -1;  // the latter is -1 for all
  std::vector<Token> tokens_;
  std::vector<int64_t> logits_indices_;  // of a part of the step
  std::vector<int32_t> pages_;
  std::vector<Span> spans_, logits_spans_;  // the latter over logits_indices only
  Buffer<float> residual_, block_, qkv_, attended_;
  Buffer<W> keys_, values_;
  Buffer<Element> operand_, queries_, inner_;
  std::vector<Scratch<W>> scratch_;  // per thread, as is `row_`
  std::vector<Buffer<float>> row_;
};

}  // namespace rayfleet
