// Whether all threads are quicker than all but one.
#pragma once

#include <cstdint>

namespace rayfleet {

// That depends on what else the machine does: a thread that must wait for its core holds up all
// others in every phase. So both are tried, and the slower one again now and then: all more often,
// which the machine may let be quicker again, while their getting slower shows by itself.
class Pace {
 public:
  // How the next step is to run.
  bool takes_all() {
    if (speed_[true] == 0.0 || speed_[false] == 0.0) return speed_[true] == 0.0;
    const bool quicker = speed_[true] > speed_[false];
    if (++steps_ < (quicker ? kStepsOfAll : kStepsOfFewer)) return quicker;
    steps_ = 0;
    return !quicker;
  }

  // Takes note of a step: how it ran, and its work by the time it took.
  void ran(bool with_all, double speed) {
    double& known = speed_[with_all];
    known = known == 0.0 ? speed : (known + speed) / 2;
  }

 private:
  static constexpr int64_t kStepsOfAll = 256, kStepsOfFewer = 32;  // between trials of the other

  double speed_[2] = {};
  int64_t steps_ = 0;
};

}  // namespace rayfleet
