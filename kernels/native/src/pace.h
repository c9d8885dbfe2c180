// Measures whether all threads are faster than all but one.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rayfleet {

// Which is faster depends on other load on the machine: a thread that waits for its core delays all
// others in every phase. So both are measured, and the slower one is retried regularly: all threads
// more often, since they may become faster when the load ends, while their slowdown is noticed
// anyway.
class Pace {
 public:
  // Whether the next step uses all threads.
  bool takes_all() {
    if (!all_.is_known() || !fewer_.is_known()) return all_.count() <= fewer_.count();
    const bool quicker = all_.median() > fewer_.median();
    if (++steps_ < (quicker ? kStepsOfAll : kStepsOfFewer)) return quicker;
    steps_ = 0;
    return !quicker;
  }

  // Records a step: whether it used all threads, and its work per time.
  void ran(bool with_all, double speed) { (with_all ? all_ : fewer_).add(speed); }

 private:
  static constexpr int64_t kStepsOfAll = 256, kStepsOfFewer = 32;  // between trials of the other

  // The latest speeds of one kind. Uses the median, since requests arrive in bursts: a step during
  // a burst may take twice as long, which does not predict the next. If every third step is in a
  // burst, at most three of seven consecutive steps are.
  class Speeds {
   public:
    bool is_known() const { return count_ >= kKept / 2; }
    int64_t count() const { return count_; }

    void add(double speed) { kept_[count_++ % kKept] = speed; }

    double median() const {
      double sorted[kKept];
      const int64_t size = std::min(count_, kKept);
      std::copy_n(kept_, size, sorted);
      std::nth_element(sorted, sorted + size / 2, sorted + size);
      return sorted[size / 2];
    }

   private:
    static constexpr int64_t kKept = 7;

    double kept_[kKept] = {};
    int64_t count_ = 0;
  };

  Speeds all_, fewer_;
  int64_t steps_ = 0;
};

}  // namespace rayfleet
