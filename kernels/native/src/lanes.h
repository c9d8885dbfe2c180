// Sixteen values in as many registers as this CPU needs. HAZARD: compilers also accept vectors
// wider than a register but keep them in memory, which is 10x slower. HAZARD: arrays of parts
// instead of pairs also stay in memory.
#pragma once

#include <cstdint>
#include <type_traits>

namespace rayfleet {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr int kRegisterLanes = 16;
#elif defined(__AVX2__)
constexpr int kRegisterLanes = 8;
#else
constexpr int kRegisterLanes = 4;
#endif

// Two halves, each a register or another pair, with the notation of vector extensions.
template <typename Half>
struct Pair {
  Half low, high;

  template <typename To>
  explicit operator Pair<To>() const {  // the same bits
    return {(To)low, (To)high};
  }

  auto operator[](int64_t lane) const {
    constexpr int64_t kHalf = sizeof(Half) / sizeof(low[0]);
    return lane < kHalf ? low[lane] : high[lane - kHalf];
  }
};

#define RAYFLEET_BY_HALVES(op)                                                    \
  template <typename Half>                                                        \
  static inline auto operator op(Pair<Half> a, Pair<Half> b) {                    \
    return Pair<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high};      \
  }                                                                               \
  template <typename Half, typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>> \
  static inline auto operator op(Pair<Half> a, T b) {                             \
    return Pair<decltype(a.low op b)>{a.low op b, a.high op b};                   \
  }
RAYFLEET_BY_HALVES(+)
RAYFLEET_BY_HALVES(-)
RAYFLEET_BY_HALVES(*)
RAYFLEET_BY_HALVES(/)
RAYFLEET_BY_HALVES(&)
RAYFLEET_BY_HALVES(|)
RAYFLEET_BY_HALVES(^)
RAYFLEET_BY_HALVES(<<)
RAYFLEET_BY_HALVES(>>)
RAYFLEET_BY_HALVES(<)
RAYFLEET_BY_HALVES(>)
RAYFLEET_BY_HALVES(>=)
RAYFLEET_BY_HALVES(==)
RAYFLEET_BY_HALVES(!=)
#undef RAYFLEET_BY_HALVES

template <typename Half>
static inline Pair<Half> operator-(Pair<Half> a) {
  return {-a.low, -a.high};
}

template <typename Half>
static inline Pair<Half> operator~(Pair<Half> a) {
  return {~a.low, ~a.high};
}

template <typename T, int LANES>
struct LanesOf {
  typedef Pair<typename LanesOf<T, LANES / 2>::Type> Type;
};

template <typename T>
struct LanesOf<T, kRegisterLanes> {
  typedef T Type __attribute__((vector_size(sizeof(T) * kRegisterLanes)));
};

typedef LanesOf<float, kLanes>::Type F32;
typedef LanesOf<int32_t, kLanes>::Type I32;
typedef LanesOf<uint32_t, kLanes>::Type U32;
typedef LanesOf<uint16_t, kLanes>::Type U16;

// The same numbers in another type.
template <typename To, typename From>
struct Convert {
  static To of(From from) { return __builtin_convertvector(from, To); }
};

template <typename To, typename From>
struct Convert<Pair<To>, Pair<From>> {
  static Pair<To> of(Pair<From> from) {
    return {Convert<To, From>::of(from.low), Convert<To, From>::of(from.high)};
  }
};

template <typename To, typename From>
static inline To convert(From from) {
  return Convert<To, From>::of(from);
}

// The same value in all lanes. Set element by element: adding the value to zeros would cost an
// addition, since a negative zero must become positive.
template <typename To>
struct Splat {
  static To of(float value) {
    if constexpr (kRegisterLanes == 16)
      return To{value, value, value, value, value, value, value, value,
                value, value, value, value, value, value, value, value};
    else if constexpr (kRegisterLanes == 8)
      return To{value, value, value, value, value, value, value, value};
    else
      return To{value, value, value, value};
  }
};

template <typename Half>
struct Splat<Pair<Half>> {
  static Pair<Half> of(float value) { return {Splat<Half>::of(value), Splat<Half>::of(value)}; }
};

static inline F32 splat(float value) { return Splat<F32>::of(value); }

}  // namespace rayfleet
