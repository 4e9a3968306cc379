// Sixteen lanes of float32 or int32, whatever the instruction set. Everything in body/ is compiled once per
// instruction set, each time into a namespace of its own, GRADCOMP_BODY.
//
// Inline functions of the standard library are avoided in body/: the linker keeps one copy of each for the
// whole extension, and it could be one that the CPU at hand cannot run.
#pragma once

#if defined(GRADCOMP_CUDA)
#include "simd_cuda.hpp"
#elif defined(GRADCOMP_AVX512)
#include "simd_avx512.hpp"
#elif defined(GRADCOMP_AVX2)
#include "simd_avx2.hpp"
#else
#include "simd_baseline.hpp"
#endif

namespace gradcomp::GRADCOMP_BODY {

inline constexpr std::int64_t lanes = 16;

#ifndef GRADCOMP_CUDA

// Elements that stay in the first-level cache between the passes over them.
inline constexpr std::int64_t block_size = 2048;

// Room for a block and for a vector that begins at its last element: buckets may begin anywhere.
inline constexpr std::int64_t block_capacity = block_size + lanes;

inline constexpr std::int64_t whole_vectors(std::int64_t count) {
    return (count + lanes - 1) / lanes * lanes;
}

inline std::int64_t smaller(std::int64_t a, std::int64_t b) {
    return a < b ? a : b;
}

// From this length on, what is written is not needed in cache: the rest of the segment would push it out.
inline constexpr std::int64_t streaming_length = 1 << 16;

inline bool aligned_for_stream(const float* p) {
    return reinterpret_cast<std::uintptr_t>(p) % 64 == 0;
}

// The sum of sixteen double precision lanes by a fixed tree.
inline double lane_tree(double (&lane)[lanes]) {
    for (int width = lanes / 2; width > 0; width /= 2) {
        for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
    }
    return lane[0];
}

template <class Sums>
inline double lane_tree(const Sums& sums) {
    double lane[lanes];
    sums.store(lane);
    return lane_tree(lane);
}

// The sum of the lanes of a vector of numbers that are not negative.
inline std::int64_t total(I32 x) {
    std::uint32_t lane[16];
    store_narrow(lane, x);
    std::int64_t sum = 0;
    for (const std::uint32_t n : lane) sum += n;
    return sum;
}

#endif

inline I32 magnitude_bits(F32 x) {
    return as_int(x) & splat(0x7FFFFFFF);
}
inline F32 absolute(F32 x) {
    return as_float(magnitude_bits(x));
}

// bfloat16 in the low 16 bits of each lane.
inline F32 from_bfloat16(I32 x) {
    return as_float(shift_left(x, 16));
}
inline I32 to_bfloat16(F32 x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    std::uint16_t half;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(x.v));
    return {x.v == x.v ? std::int32_t{half} : 0x7FC0};
#else
    const I32 bits = as_int(x);
    const I32 odd = shift_right(bits, 16) & splat(1);
    const I32 rounded = shift_right(bits + splat(0x7FFF) + odd, 16);
    // Rounding could carry a NaN's payload into the sign.
    const I32 is_nan = less(splat(0x7F800000), magnitude_bits(x));
    return (rounded & (is_nan ^ splat(-1))) | (is_nan & splat(0x7FC0));
#endif
}

// A number whose magnitude has at least these bits does not round to a finite float32, float16 or bfloat16.
inline constexpr std::int32_t float32_overflow = 0x7F800000;
inline constexpr std::int32_t float16_overflow = 0x477FF000;   // 65520, half way to 2**16
inline constexpr std::int32_t bfloat16_overflow = 0x7F7F8000;  // half way to 2**128

}  // namespace gradcomp::GRADCOMP_BODY
