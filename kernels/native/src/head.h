// A head for multi-token prediction: one layer of the model, whose input at a position is computed
// from the model's hidden state there and the next token.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "decoder.h"
#include "rows.h"

namespace rayfleet {

// Mirrored in library.py.
struct HeadWeights {
  const float *embedding_norm, *hidden_norm;
  LinearWeight projection;  // [hidden_size, 2 * hidden_size]
  int64_t hidden_first;     // whether its input begins with the hidden state
  int64_t zeroes_first;     // whether the embedding is zero at position 0
  const float* outputs;     // [slots, hidden_size]: the latest outputs, from which drafts start
};

template <typename W>
class Head {
 public:
  // `layer` is the model on a single rank, with the head's layer and final norm.
  Head(const ModelWeights& layer, const HeadWeights& head, Team& team, double ms_per_thread)
      : model_(layer), head_(head), decoder_(layer, team, ms_per_thread) {}

  // Outputs after the final norm, of logits_indices, from the hidden states of all tokens.
  void forward(const StepRows& step, const float* hidden, float* outputs) {
    const int64_t size = model_.hidden_size;
    int64_t count = 0;
    for (int64_t i = 0; i < step.num_rows; ++i) count += step.rows[4 * i + 2];
    mixed_.reserve(count * 2 * size);
    inputs_.reserve(count * size);
    int64_t t = 0;
    for (int64_t i = 0; i < step.num_rows; ++i) {
      const int64_t *row = step.rows + 4 * i, end = row[1] + row[2];
      const int32_t* ids = step.token_pool + row[0] * step.token_stride;
      for (int64_t position = row[1]; position < end; ++position, ++t)
        mix(position, ids[position + 1], hidden + t * size, &mixed_[t * 2 * size]);
    }
    decoder_.product(head_.projection, mixed_.data(), count, inputs_.data());
    StepRows own = step;
    own.inputs = inputs_.data();
    decoder_.forward(own, outputs);
  }

  void logits(const float* outputs, int64_t rows, float* out) {
    decoder_.logits(outputs, rows, out);
  }

  int64_t hidden_size() const { return model_.hidden_size; }
  int64_t vocab_size() const { return model_.lm_head.n; }
  const float* latest(int64_t slot) const { return head_.outputs + slot * model_.hidden_size; }

 private:
  void mix(int64_t position, int64_t token, const float* hidden, float* out) {
    const int64_t size = model_.hidden_size;
    const bool is_zero = head_.zeroes_first && position == 0;
    const W* embedding = (const W*)model_.embedding + token * size;
    float* embedded = out + (head_.hidden_first ? size : 0);
    float* normed = out + (head_.hidden_first ? 0 : size);
    for (int64_t i = 0; i < size; i += kLanes)
      store(embedded + i, is_zero ? F32{} : load_any(embedding + i));
    rms_norm_row(embedded, head_.embedding_norm, size, model_.eps, embedded);
    rms_norm_row(hidden, head_.hidden_norm, size, model_.eps, normed);
  }

  const ModelWeights model_;
  const HeadWeights head_;
  Decoder<W> decoder_;
  Buffer<float> mixed_, inputs_;
};

}  // namespace rayfleet
