// The functions called by library.py, with a plain C interface to be independent of C++ ABIs.
#include "decoder.h"
#include "draft.h"
#include "encoder.h"
#include "head.h"
#include "lora.h"
#include "sample.h"

using namespace rayfleet;

namespace {

struct Handle {
  Handle(const ModelWeights& weights, int num_threads, double ms_per_thread)
      : layers(weights.layers, weights.layers + weights.num_layers), team(num_threads) {
    ModelWeights model = weights;
    model.layers = layers.data();
    if (weights.is_bf16)
      bf16 = std::make_unique<Decoder<uint16_t>>(model, team, ms_per_thread);
    else
      fp32 = std::make_unique<Decoder<float>>(model, team, ms_per_thread);
    hidden_size = model.hidden_size;
    vocab_size = model.lm_head.n;
  }

  std::vector<LayerWeights> layers;
  Team team;
  std::unique_ptr<Decoder<float>> fp32;
  std::unique_ptr<Decoder<uint16_t>> bf16;
  int64_t hidden_size, vocab_size;
};

struct EncoderHandle {
  EncoderHandle(const EncoderWeights& weights, int num_threads, double ms_per_thread)
      : layers(weights.layers, weights.layers + weights.num_layers), team(num_threads) {
    EncoderWeights model = weights;
    model.layers = layers.data();
    if (weights.is_bf16)
      bf16 = std::make_unique<Encoder<uint16_t>>(model, team, ms_per_thread);
    else
      fp32 = std::make_unique<Encoder<float>>(model, team, ms_per_thread);
  }

  std::vector<EncoderLayer> layers;
  Team team;
  std::unique_ptr<Encoder<float>> fp32;
  std::unique_ptr<Encoder<uint16_t>> bf16;
};

// A head, which computes with the threads of its model.
struct HeadHandle {
  HeadHandle(const ModelWeights& weights, const HeadWeights& head, Team& team, double ms_per_thread)
      : layer(weights.layers[0]) {
    ModelWeights model = weights;
    model.layers = &layer;
    if (weights.is_bf16)
      bf16 = std::make_unique<Head<uint16_t>>(model, head, team, ms_per_thread);
    else
      fp32 = std::make_unique<Head<float>>(model, head, team, ms_per_thread);
  }

  LayerWeights layer;
  std::unique_ptr<Head<float>> fp32;
  std::unique_ptr<Head<uint16_t>> bf16;
};

template <typename W>
void draft_with(Head<W>& head, const StepRows& step, const Drafting& how) {
  HeadSource<W> source(head, step.num_rows);
  Drafter<HeadSource<W>>(source).run(step, how);
}

template <typename W>
void draft_with(Decoder<W>& decoder, int64_t hidden_size, int64_t vocab_size, const StepRows& step,
                const Drafting& how) {
  ModelSource<W> source(decoder, hidden_size, vocab_size);
  Drafter<ModelSource<W>>(source).run(step, how);
}

// Parameters of each row of the logits; mirrored in library.py. Null pointers disable filters.
struct SamplingColumns {
  float greedy_below;  // rows with lower temperatures are greedy
  const int64_t *seeds, *positions;
  const float* temperature;
  const int64_t* top_k;
  const float *top_p, *log_min_p;
};

template <typename W>
void multiply(const float* x, int64_t rows, const LinearWeight& from, float* out) {
  const Weight<W> weight{(const W*)from.packed, from.bias, from.n, from.k};
  const int64_t stride = row_stride<W>(weight.k);
  std::vector<typename Operand<W>::Element> operand(rows * stride);
  for (int64_t row = 0; row < rows; ++row)
    convert_row(x + row * weight.k, weight.k, &operand[row * stride]);
  const Items items = items_of<W>(rows, weight.n, 1);
  for (int64_t item = 0; item < items.count(); ++item)
    linear_item<W>(item, items, operand.data(), rows, weight, Floats{out, weight.n});
}

}  // namespace

extern "C" {

int32_t rayfleet_has_tiles() { return amx::usable(); }

int64_t rayfleet_packed_elements(int64_t is_bf16, int64_t n, int64_t k) {
  return blocks_of(n) * (is_bf16 ? block_elements<uint16_t>(k) : block_elements<float>(k));
}

void rayfleet_pack(int64_t is_bf16, const void* weight, int64_t n, int64_t k, void* packed) {
  if (is_bf16)
    pack((const uint16_t*)weight, n, k, (uint16_t*)packed);
  else
    pack((const float*)weight, n, k, (float*)packed);
}

void rayfleet_linear(int64_t is_bf16, const float* x, int64_t rows, const LinearWeight* weight,
                     float* out) {
  is_bf16 ? multiply<uint16_t>(x, rows, *weight, out) : multiply<float>(x, rows, *weight, out);
}

void rayfleet_add_lora(int64_t is_bf16, const LoraStep* step) {
  is_bf16 ? add_lora<uint16_t>(*step) : add_lora<float>(*step);
}

// Sets logits to -inf if a row's bit is 0; `masks` has ceil(vocab_size / 32) words per row.
void rayfleet_apply_bitmask(float* logits, int64_t vocab_size, const int64_t* rows, int64_t count,
                            const char* masks) {
  const int64_t num_words = (vocab_size + 31) / 32;
  for (int64_t i = 0; i < count; ++i)
    mask_row(logits + rows[i] * vocab_size, vocab_size, masks + i * num_words * 4);
}

// Tokens of all rows: sampled, or the most likely for greedy rows.
void rayfleet_sample(const float* logits, int64_t rows, int64_t vocab_size, const SamplingColumns* how,
                     int64_t* tokens) {
  Sampler sampler;
  for (int64_t row = 0; row < rows; ++row) {
    const float* own = logits + row * vocab_size;
    if (!how || how->temperature[row] < how->greedy_below) {
      tokens[row] = Sampler::argmax(own, vocab_size);
      continue;
    }
    const RowSampling sampling{how->temperature[row],
                               how->top_p ? how->top_p[row] : 1.0f,
                               how->log_min_p ? how->log_min_p[row] : -INFINITY,
                               how->top_k ? how->top_k[row] : 0,
                               how->seeds[row],
                               how->positions[row]};
    tokens[row] = sampler.sample(own, vocab_size, sampling);
  }
}

void* rayfleet_create(const ModelWeights* weights, int64_t num_threads, double ms_per_thread) {
  return new Handle(*weights, (int)num_threads, ms_per_thread);
}

void rayfleet_destroy(void* handle) { delete (Handle*)handle; }

int32_t rayfleet_forward(void* handle, const StepRows* step, float* hidden) {
  Handle& own = *(Handle*)handle;
  return own.bf16 ? own.bf16->forward(*step, hidden) : own.fp32->forward(*step, hidden);
}

void rayfleet_logits(void* handle, const float* hidden, int64_t rows, float* out) {
  Handle& own = *(Handle*)handle;
  own.bf16 ? own.bf16->logits(hidden, rows, out) : own.fp32->logits(hidden, rows, out);
}

void* rayfleet_create_encoder(const EncoderWeights* weights, int64_t num_threads,
                              double ms_per_thread) {
  return new EncoderHandle(*weights, (int)num_threads, ms_per_thread);
}

void rayfleet_destroy_encoder(void* handle) { delete (EncoderHandle*)handle; }

void rayfleet_encode(void* handle, const EncoderStep* step, float* hidden) {
  EncoderHandle& own = *(EncoderHandle*)handle;
  own.bf16 ? own.bf16->forward(*step, hidden) : own.fp32->forward(*step, hidden);
}

// For a model that is replicated on this rank.
void rayfleet_draft(void* handle, const StepRows* step, const Drafting* how) {
  Handle& own = *(Handle*)handle;
  own.bf16 ? draft_with(*own.bf16, own.hidden_size, own.vocab_size, *step, *how)
           : draft_with(*own.fp32, own.hidden_size, own.vocab_size, *step, *how);
}

// A head of the model `handle`; `weights` are the model's with the head's layer and final norm.
void* rayfleet_create_head(void* handle, const ModelWeights* weights, const HeadWeights* head,
                           double ms_per_thread) {
  return new HeadHandle(*weights, *head, ((Handle*)handle)->team, ms_per_thread);
}

void rayfleet_destroy_head(void* head) { delete (HeadHandle*)head; }

void rayfleet_head_forward(void* head, const StepRows* step, const float* hidden, float* outputs) {
  HeadHandle& own = *(HeadHandle*)head;
  own.bf16 ? own.bf16->forward(*step, hidden, outputs) : own.fp32->forward(*step, hidden, outputs);
}

void rayfleet_head_draft(void* head, const StepRows* step, const Drafting* how) {
  HeadHandle& own = *(HeadHandle*)head;
  own.bf16 ? draft_with(*own.bf16, *step, *how) : draft_with(*own.fp32, *step, *how);
}
}
