// One lane per thread of a GPU. The sixteen lanes of a vector are a team of as many threads, half a warp.
// What reduces a vector to a number is called by all threads of a warp together.
#pragma once

namespace gradcomp::GRADCOMP_BODY {

struct F32 {
    float v;
};
struct I32 {
    std::int32_t v;
};

inline F32 splat(float x) {
    return {x};
}
inline I32 splat(std::int32_t x) {
    return {x};
}

inline F32 operator+(F32 a, F32 b) {
    return {a.v + b.v};
}
inline F32 operator-(F32 a, F32 b) {
    return {a.v - b.v};
}
inline F32 operator*(F32 a, F32 b) {
    return {a.v * b.v};
}
inline F32 operator/(F32 a, F32 b) {
    return {a.v / b.v};
}
// One instruction each. A NaN loses, and of two zeros either wins: where it matters, codecs look for the one
// and turn the other into +0.
inline F32 min(F32 a, F32 b) {
    return {__builtin_fminf(a.v, b.v)};
}
inline F32 max(F32 a, F32 b) {
    return {__builtin_fmaxf(a.v, b.v)};
}

// Integers wrap, as those of vectors do.
inline I32 wrapped(std::uint32_t x) {
    return {static_cast<std::int32_t>(x)};
}
inline std::uint32_t unsigned_of(I32 x) {
    return static_cast<std::uint32_t>(x.v);
}
inline I32 operator+(I32 a, I32 b) {
    return wrapped(unsigned_of(a) + unsigned_of(b));
}
inline I32 operator-(I32 a, I32 b) {
    return wrapped(unsigned_of(a) - unsigned_of(b));
}
inline I32 operator&(I32 a, I32 b) {
    return {a.v & b.v};
}
inline I32 operator|(I32 a, I32 b) {
    return {a.v | b.v};
}
inline I32 operator^(I32 a, I32 b) {
    return {a.v ^ b.v};
}
inline I32 max(I32 a, I32 b) {
    return {a.v > b.v ? a.v : b.v};
}
inline I32 shift_left(I32 x, int n) {
    return wrapped(unsigned_of(x) << n);
}
inline I32 shift_right(I32 x, int n) {
    return wrapped(unsigned_of(x) >> n);
}

// All ones where a < b.
inline I32 less(F32 a, F32 b) {
    return {a.v < b.v ? -1 : 0};
}
inline I32 less(I32 a, I32 b) {
    return {a.v < b.v ? -1 : 0};
}

inline I32 as_int(F32 x) {
    return {__builtin_bit_cast(std::int32_t, x.v)};
}
inline F32 as_float(I32 x) {
    return {__builtin_bit_cast(float, x.v)};
}
inline F32 to_float(I32 x) {
    return {static_cast<float>(x.v)};
}
// For 0 <= x < 2**22. At 2**23 the spacing of floats is 1, so the addition rounds.
inline I32 round_to_even(F32 x) {
    return as_int(x + splat(0x1p23f)) - as_int(splat(0x1p23f));
}
inline I32 truncate(F32 x) {
    return {static_cast<std::int32_t>(x.v)};
}

// A table of up to 128 entries.
class LargeTable {
  public:
    explicit LargeTable(const float* entries) : entries_(entries) {}
    F32 operator[](I32 index) const { return {entries_[index.v]}; }

  private:
    const float* entries_;
};

using SmallTable = LargeTable;

// --- what a team of threads does together
// -------------------------------------------------------------------

inline constexpr int team_threads = 16;

// Threads that wait for each other are those of a warp, all of them: the mask is a constant.
inline constexpr std::uint32_t whole_warp = 0xFFFFFFFF;

// This thread's number in its team.
inline int team_rank() {
    return static_cast<int>(threadIdx.x) % team_threads;
}

// Of the threads of a team; `op` does not depend on the order.
template <class T, class Op>
inline T reduce_team(T x, Op op) {
    for (int distance = team_threads / 2; distance > 0; distance /= 2)
        x = op(x, __shfl_xor_sync(whole_warp, x, distance, team_threads));
    return x;
}

// The sum of the lanes of a team by a fixed tree, in the first of its threads.
inline double half_warp_tree(double x) {
    for (int distance = team_threads / 2; distance > 0; distance /= 2)
        x = x + __shfl_down_sync(whole_warp, x, distance, team_threads);
    return x;
}

inline float reduce_min(F32 x) {
    return reduce_team(x.v, [](float a, float b) { return __builtin_fminf(a, b); });
}
inline float reduce_max(F32 x) {
    return reduce_team(x.v, [](float a, float b) { return __builtin_fmaxf(a, b); });
}
inline std::int32_t reduce_max(I32 x) {
    return reduce_team(x.v, [](std::int32_t a, std::int32_t b) { return a > b ? a : b; });
}

// The sum of the lanes of a vector of numbers that are not negative.
inline std::int64_t total(I32 x) {
    return reduce_team(std::int64_t{x.v}, [](std::int64_t a, std::int64_t b) { return a + b; });
}

// Sums in double precision, one per lane.
class LaneSums {
  public:
    void add(F32 x) { sum_ = sum_ + static_cast<double>(x.v); }
    double lane() const { return sum_; }

  private:
    double sum_ = 0.0;
};

// Sums of squares in double precision, one per lane.
class SquareSums {
  public:
    void add(F32 x) {
        const double wide = static_cast<double>(x.v);
        sum_ = sum_ + wide * wide;
    }
    double lane() const { return sum_; }

  private:
    double sum_ = 0.0;
};

// The same of sums in double precision.
template <class Sums>
inline double lane_tree(const Sums& sums) {
    return half_warp_tree(sums.lane());
}

// The sum of some numbers, a power of two of them, as a tree of neighbours.
template <int count>
inline double tree_of(const double (&numbers)[count]) {
    if constexpr (count == 2) {
        return numbers[0] + numbers[1];
    } else {
        static_assert(count % 2 == 0);
        double sums[count / 2];
#pragma unroll
        for (int i = 0; i < count / 2; ++i) sums[i] = numbers[2 * i] + numbers[2 * i + 1];
        return tree_of(sums);
    }
}

// The same of what the first threads of a block's half warps have, in all threads.
template <int count>
inline double tree_of_half_warps(double x) {
    __shared__ double parts[count];
    __syncthreads();  // of what an earlier call left there
    if (threadIdx.x % 16 == 0) parts[threadIdx.x / 16] = x;
    __syncthreads();
    return tree_of(parts);
}

}  // namespace gradcomp::GRADCOMP_BODY

#include "half.hpp"
