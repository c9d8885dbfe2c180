// Memory reused by steps.
#pragma once

#include <cstdint>
#include <memory>

namespace rayfleet {

// Memory that only grows and has undefined content: zeroing it, as a vector does whenever a long
// step follows a short one, would cost as much as some phases of a step.
template <typename T>
class Buffer {
 public:
  void reserve(int64_t count) {
    if (count <= size_) return;
    data_.reset(new T[count]);
    size_ = count;
  }

  T* data() { return data_.get(); }
  T& operator[](int64_t i) { return data_[i]; }

 private:
  std::unique_ptr<T[]> data_;
  int64_t size_ = 0;
};

}  // namespace rayfleet
