// Whether all threads are quicker than all but one.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rayfleet {

// That depends on what else the machine does: a thread that must wait for its core holds up all
// others in every phase. So both are tried, and the slower one again now and then: all more often,
// which the machine may let be quicker again, while their getting slower shows by itself.
class Pace {
 public:
  // How the next step is to run.
  bool takes_all() {
    if (!all_.is_known() || !fewer_.is_known()) return all_.count() <= fewer_.count();
    const bool quicker = all_.median() > fewer_.median();
    if (++steps_ < (quicker ? kStepsOfAll : kStepsOfFewer)) return quicker;
    steps_ = 0;
    return !quicker;
  }

  // Takes note of a step: how it ran, and its work by the time it took.
  void ran(bool with_all, double speed) { (with_all ? all_ : fewer_).add(speed); }

 private:
  static constexpr int64_t kStepsOfAll = 256, kStepsOfFewer = 32;  // between trials of the other

  // The last few of one kind. Their median, since requests come in bursts: a step that runs beside one
  // may take twice as long, and says nothing of the next. Of seven in a row at most three meet one
  // where every third step does.
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
