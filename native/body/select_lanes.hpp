// Vectors as selections use them, whatever the instruction set.
#pragma once

#if defined(GRADCOMP_AVX512)
#include "select_avx512.hpp"
#elif defined(GRADCOMP_AVX2)
#include "select_avx2.hpp"
#else
#include "select_baseline.hpp"
#endif

namespace gradcomp::GRADCOMP_BODY {

// Magnitudes are compared as integers: bits of |x|, of which NaN has more than this.
inline constexpr std::int32_t infinity_bits = 0x7F800000;

// Bit i is set where the magnitude of lane i is above the floor, and no NaN.
inline std::uint32_t mask_above(I32 magnitude, I32 floor) {
    return mask_less(floor, magnitude) & mask_less(magnitude, splat(infinity_bits + 1));
}

// The floor below all magnitudes that are at least a threshold; NaN excludes everything.
inline std::int32_t floor_below(float threshold) {
    if (threshold != threshold) return infinity_bits;
    return threshold > 0.0f ? __builtin_bit_cast(std::int32_t, threshold) - 1 : -1;
}

// The bits of those of sixteen lanes that exist when `count` elements are left.
inline std::uint32_t existing_lanes(std::int64_t count) {
    return count >= lanes ? 0xFFFF : (1U << count) - 1;
}

}  // namespace gradcomp::GRADCOMP_BODY
