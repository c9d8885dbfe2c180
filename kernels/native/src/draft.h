// Drafts of a small model or of a head: tokens of each row one after another, without leaving the
// library.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "decoder.h"
#include "head.h"
#include "sample.h"

namespace rayfleet {

// Mirrored in library.py.
struct Drafting {
  const float *temperature, *top_p, *log_min_p;  // by slot, as are the following three
  const int64_t *top_k, *seeds;
  const int64_t* end_tokens;  // [slots, num_ends], padded with -1: no draft after one is accepted
  int64_t num_ends;
  const float* shares;  // [slots, num_levels]: probability that a guess of each level is correct
  const float* bounds;  // [num_levels], descending to 0: minimum probabilities of the levels
  int64_t num_levels;
  float greedy_below;
  float threshold;      // minimum acceptance probability of a draft
  int32_t* token_pool;  // the step's
  int64_t most;         // columns of the following two
  int64_t *tokens, *levels;    // by row of the step, as are the following
  int64_t *guessed, *drafted;  // number of guesses, and of those worth verifying
};

// Logits of a draft model, for the last token of each row.
template <typename W>
class ModelSource {
 public:
  ModelSource(Decoder<W>& decoder, int64_t hidden_size, int64_t vocab_size)
      : vocab_size(vocab_size), decoder_(decoder), hidden_size_(hidden_size) {}

  // Logits [count, vocab_size] of the first `count` of `rows`; `going` has their numbers.
  void score(const StepRows& step, const std::vector<int64_t>& rows,
             const std::vector<int64_t>& going, float* logits) {
    const int64_t count = (int64_t)going.size();
    last_.resize(count);
    int64_t num_tokens = 0;
    for (int64_t row = 0; row < count; ++row) last_[row] = (num_tokens += rows[4 * row + 2]) - 1;
    hidden_.resize(count * hidden_size_);
    StepRows own = step;
    own.num_rows = count;
    own.rows = rows.data();
    own.logits_indices = last_.data();
    own.num_logits = count;
    decoder_.forward(own, hidden_.data());
    decoder_.logits(hidden_.data(), count, logits);
  }

  const int64_t vocab_size;

 private:
  Decoder<W>& decoder_;
  const int64_t hidden_size_;
  std::vector<int64_t> last_;  // tokens of the rows
  std::vector<float> hidden_;
};

// Logits of a head: first from the latest outputs of the slots, then from outputs for the position
// before each draft.
template <typename W>
class HeadSource {
 public:
  HeadSource(Head<W>& head, int64_t num_rows)
      : vocab_size(head.vocab_size()), head_(head), outputs_(num_rows * head.hidden_size()) {}

  // As in ModelSource; rows have one token each.
  void score(const StepRows& step, const std::vector<int64_t>& rows,
             const std::vector<int64_t>& going, float* logits) {
    const int64_t count = (int64_t)going.size(), size = head_.hidden_size();
    hidden_.resize(count * size);
    for (int64_t place = 0; place < count; ++place)
      std::copy_n(is_first_ ? head_.latest(rows[4 * place]) : &outputs_[going[place] * size], size,
                  &hidden_[place * size]);
    if (!is_first_) {
      before_.assign(rows.begin(), rows.begin() + 4 * count);
      for (int64_t place = 0; place < count; ++place) --before_[4 * place + 1];
      StepRows own = step;
      own.num_rows = count;
      own.rows = before_.data();
      own.num_logits = -1;
      next_.resize(count * size);
      head_.forward(own, hidden_.data(), next_.data());
      hidden_.swap(next_);
    }
    for (int64_t place = 0; place < count; ++place)
      std::copy_n(&hidden_[place * size], size, &outputs_[going[place] * size]);
    is_first_ = false;
    head_.logits(hidden_.data(), count, logits);
  }

  const int64_t vocab_size;

 private:
  Head<W>& head_;
  bool is_first_ = true;
  std::vector<float> outputs_;  // by row of the step
  std::vector<float> hidden_, next_;
  std::vector<int64_t> before_;
};

// A row's drafts end before the first whose acceptance is too unlikely, after one that ends its
// request, or after rows[4 * i + 3] drafts.
template <typename Source>
class Drafter {
 public:
  explicit Drafter(Source& source) : source_(source), vocab_size_(source.vocab_size) {}

  void run(const StepRows& step, const Drafting& how) {
    std::vector<int64_t> going(step.num_rows), rows(step.rows, step.rows + 4 * step.num_rows);
    std::iota(going.begin(), going.end(), 0);
    std::vector<float> reach(step.num_rows, 1.0f);
    std::fill_n(how.guessed, step.num_rows, 0);
    std::fill_n(how.drafted, step.num_rows, 0);
    while (!going.empty()) {
      logits_.resize(going.size() * vocab_size_);
      source_.score(step, rows, going, logits_.data());
      size_t kept = 0;
      for (size_t place = 0; place < going.size(); ++place) {
        const int64_t row = going[place], end = rows[4 * place + 1] + rows[4 * place + 2];
        const int64_t slot = rows[4 * place], most = rows[4 * place + 3];
        if (!guess(row, slot, end, &logits_[place * vocab_size_], how, reach[row])) continue;
        const int64_t token = how.tokens[row * how.most + how.guessed[row] - 1];
        how.token_pool[slot * step.token_stride + end] = (int32_t)token;
        const int64_t* ends = how.end_tokens + slot * how.num_ends;
        if (++how.drafted[row] == most || std::count(ends, ends + how.num_ends, token)) continue;
        going[kept] = row;
        const int64_t next[] = {slot, end, 1, most};
        std::copy_n(next, 4, &rows[4 * kept++]);
      }
      going.resize(kept);
    }
  }

 private:
  // Samples like the target; returns whether the draft is worth verifying.
  bool guess(int64_t row, int64_t slot, int64_t position, const float* logits,
             const Drafting& how, float& reach) {
    const bool greedy = how.temperature[slot] < how.greedy_below;
    const RowSampling sampling{how.temperature[slot], how.top_p[slot], how.log_min_p[slot],
                               how.top_k[slot],       how.seeds[slot], position};
    const int64_t token = greedy ? Sampler::argmax(logits, vocab_size_)
                                 : sampler_.sample(logits, vocab_size_, sampling);
    const float probability = Sampler::probability(logits, vocab_size_, token,
                                                   greedy ? 1.0f : how.temperature[slot]);
    int64_t level = 0;
    while (level + 1 < how.num_levels && probability < how.bounds[level]) ++level;
    const int64_t cell = row * how.most + how.guessed[row]++;
    how.tokens[cell] = token;
    how.levels[cell] = level;
    reach *= how.shares[slot * how.num_levels + level];
    return reach >= how.threshold;
  }

  Source& source_;
  const int64_t vocab_size_;
  Sampler sampler_;
  std::vector<float> logits_;
};

}  // namespace rayfleet
