// Sixteen lanes in four 128-bit vectors of the compiler's own extension (GCC, Clang), for any CPU.
#pragma once

#include <cstdint>
#include <cstring>

namespace gradcomp::GRADCOMP_BODY {

using FloatQuad = float __attribute__((vector_size(16)));
using IntQuad = std::int32_t __attribute__((vector_size(16)));
using UintQuad = std::uint32_t __attribute__((vector_size(16)));

struct F32 {
    FloatQuad q[4];
};
struct I32 {
    IntQuad q[4];
};

template <class Result, class Function>
inline Result for_quads(Function function) {
    return {function(0), function(1), function(2), function(3)};
}

inline F32 splat(float x) {
    const FloatQuad q = {x, x, x, x};
    return {q, q, q, q};
}
inline I32 splat(std::int32_t x) {
    const IntQuad q = {x, x, x, x};
    return {q, q, q, q};
}

inline F32 load(const float* p) {
    F32 x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void store(float* p, F32 x) {
    std::memcpy(p, &x, sizeof x);
}
// No portable way to pass the cache by.
inline void stream(float* p, F32 x) {
    store(p, x);
}
inline void stream_fence() {}
// The cache line at an address, which need not exist.
inline void prefetch(std::uintptr_t address) {
    __builtin_prefetch(reinterpret_cast<const void*>(address));
}

inline F32 operator+(F32 a, F32 b) {
    return for_quads<F32>([&](int k) { return a.q[k] + b.q[k]; });
}
inline F32 operator-(F32 a, F32 b) {
    return for_quads<F32>([&](int k) { return a.q[k] - b.q[k]; });
}
inline F32 operator*(F32 a, F32 b) {
    return for_quads<F32>([&](int k) { return a.q[k] * b.q[k]; });
}
inline F32 operator/(F32 a, F32 b) {
    return for_quads<F32>([&](int k) { return a.q[k] / b.q[k]; });
}
inline F32 min(F32 a, F32 b) {
    return for_quads<F32>([&](int k) { return a.q[k] < b.q[k] ? a.q[k] : b.q[k]; });
}
inline F32 max(F32 a, F32 b) {
    return for_quads<F32>([&](int k) { return a.q[k] > b.q[k] ? a.q[k] : b.q[k]; });
}

// They wrap around, as the vector instructions do.
inline I32 operator+(I32 a, I32 b) {
    return for_quads<I32>([&](int k) {
        return reinterpret_cast<IntQuad>(reinterpret_cast<UintQuad>(a.q[k]) +
                                         reinterpret_cast<UintQuad>(b.q[k]));
    });
}
inline I32 operator-(I32 a, I32 b) {
    return for_quads<I32>([&](int k) {
        return reinterpret_cast<IntQuad>(reinterpret_cast<UintQuad>(a.q[k]) -
                                         reinterpret_cast<UintQuad>(b.q[k]));
    });
}
inline I32 operator&(I32 a, I32 b) {
    return for_quads<I32>([&](int k) { return a.q[k] & b.q[k]; });
}
inline I32 operator|(I32 a, I32 b) {
    return for_quads<I32>([&](int k) { return a.q[k] | b.q[k]; });
}
inline I32 operator^(I32 a, I32 b) {
    return for_quads<I32>([&](int k) { return a.q[k] ^ b.q[k]; });
}
inline I32 max(I32 a, I32 b) {
    return for_quads<I32>([&](int k) { return a.q[k] > b.q[k] ? a.q[k] : b.q[k]; });
}
inline I32 shift_left(I32 x, int n) {
    return for_quads<I32>(
        [&](int k) { return reinterpret_cast<IntQuad>(reinterpret_cast<UintQuad>(x.q[k]) << n); });
}
inline I32 shift_right(I32 x, int n) {
    return for_quads<I32>(
        [&](int k) { return reinterpret_cast<IntQuad>(reinterpret_cast<UintQuad>(x.q[k]) >> n); });
}

inline float reduce_min(F32 x) {
    float result = x.q[0][0];
    for (int i = 1; i < 16; ++i) result = x.q[i / 4][i % 4] < result ? x.q[i / 4][i % 4] : result;
    return result;
}
inline float reduce_add(F32 x) {
    const FloatQuad four = (x.q[0] + x.q[1]) + (x.q[2] + x.q[3]);
    return (four[0] + four[1]) + (four[2] + four[3]);
}
inline float reduce_max(F32 x) {
    float result = x.q[0][0];
    for (int i = 1; i < 16; ++i) result = x.q[i / 4][i % 4] > result ? x.q[i / 4][i % 4] : result;
    return result;
}
inline std::int32_t reduce_max(I32 x) {
    std::int32_t result = x.q[0][0];
    for (int i = 1; i < 16; ++i) result = x.q[i / 4][i % 4] > result ? x.q[i / 4][i % 4] : result;
    return result;
}

// All ones where a < b.
inline I32 less(F32 a, F32 b) {
    return for_quads<I32>([&](int k) { return a.q[k] < b.q[k]; });
}
inline I32 less(I32 a, I32 b) {
    return for_quads<I32>([&](int k) { return a.q[k] < b.q[k]; });
}

inline I32 as_int(F32 x) {
    return for_quads<I32>([&](int k) { return reinterpret_cast<IntQuad>(x.q[k]); });
}
inline F32 as_float(I32 x) {
    return for_quads<F32>([&](int k) { return reinterpret_cast<FloatQuad>(x.q[k]); });
}
inline F32 to_float(I32 x) {
    return for_quads<F32>([&](int k) { return __builtin_convertvector(x.q[k], FloatQuad); });
}
// For 0 <= x < 2**22. At 2**23 the spacing of floats is 1, so the addition rounds.
inline I32 round_to_even(F32 x) {
    return as_int(x + splat(0x1p23f)) - as_int(splat(0x1p23f));
}
inline I32 truncate(F32 x) {
    return for_quads<I32>([&](int k) { return __builtin_convertvector(x.q[k], IntQuad); });
}

// A table of up to 128 entries.
class LargeTable {
  public:
    explicit LargeTable(const float* entries) : entries_(entries) {}
    F32 operator[](I32 index) const {
        F32 x;
        for (int i = 0; i < 16; ++i) x.q[i / 4][i % 4] = entries_[index.q[i / 4][i % 4]];
        return x;
    }

  private:
    const float* entries_;
};

// No registers that could hold a small one.
using SmallTable = LargeTable;

// Unsigned integers of any width; a store keeps the low bits of each lane.
template <class Unsigned>
inline I32 load_widen(const Unsigned* p) {
    Unsigned values[16];
    std::memcpy(values, p, sizeof values);  // p need not be aligned
    I32 x;
    for (int i = 0; i < 16; ++i) x.q[i / 4][i % 4] = static_cast<std::int32_t>(values[i]);
    return x;
}
template <class Unsigned>
inline void store_narrow(Unsigned* p, I32 x) {
    Unsigned values[16];
    for (int i = 0; i < 16; ++i) values[i] = static_cast<Unsigned>(x.q[i / 4][i % 4]);
    std::memcpy(p, values, sizeof values);
}

}  // namespace gradcomp::GRADCOMP_BODY

#include "half.hpp"

namespace gradcomp::GRADCOMP_BODY {

// Sums in double precision, one per lane.
class LaneSums {
  public:
    void add(F32 x) {
        for (int i = 0; i < 16; ++i) sums_[i] += static_cast<double>(x.q[i / 4][i % 4]);
    }
    void store(double (&lanes)[16]) const { std::memcpy(lanes, sums_, sizeof sums_); }

  private:
    double sums_[16] = {};
};

// Sums of squares in double precision, one per lane.
class SquareSums {
  public:
    void add(F32 x) {
        for (int i = 0; i < 16; ++i) {
            const double wide = static_cast<double>(x.q[i / 4][i % 4]);
            sums_[i] += wide * wide;
        }
    }
    void store(double (&lanes)[16]) const { std::memcpy(lanes, sums_, sizeof sums_); }

  private:
    double sums_[16] = {};
};

// a * b + c, rounded once or twice: not for what all bodies must agree on.
inline F32 multiply_add(F32 a, F32 b, F32 c) {
    return a * b + c;
}

// How many F32 the registers hold.
inline constexpr int register_count = 4;

// A 32-bit word in the low half of a 64-bit lane. What lies in the high half never matters.
struct Words {
    static constexpr int lanes = 1;
    // The lane order for which store_quads writes in sequence.
    static constexpr std::uint64_t order[lanes] = {0};
    std::uint64_t v;
};

inline Words splat_words(std::uint32_t x) {
    return {x};
}
inline Words load_words(const std::uint64_t* p) {
    return {*p};
}
inline Words operator+(Words a, Words b) {
    return {a.v + b.v};
}
inline Words operator^(Words a, Words b) {
    return {a.v ^ b.v};
}
// Low and high word of the 64-bit product.
inline Words multiply(Words a, Words b) {
    return {(a.v & 0xFFFFFFFF) * (b.v & 0xFFFFFFFF)};
}
inline Words high_word(Words product) {
    return {product.v >> 32};
}

// Write the four words of each lane side by side, the lanes in sequence.
inline void store_quads(std::uint16_t* p, Words w0, Words w1, Words w2, Words w3) {
    const std::uint32_t words[4] = {static_cast<std::uint32_t>(w0.v), static_cast<std::uint32_t>(w1.v),
                                    static_cast<std::uint32_t>(w2.v), static_cast<std::uint32_t>(w3.v)};
    std::memcpy(p, words, sizeof words);
}

}  // namespace gradcomp::GRADCOMP_BODY
