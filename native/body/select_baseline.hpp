// What selections need beyond simd_baseline.hpp.
#pragma once

#include "simd.hpp"

namespace gradcomp::GRADCOMP_BODY {

inline I32 lane_numbers() {
    const IntQuad first = {0, 1, 2, 3};
    return for_quads<I32>([&](int k) { return first + 4 * k; });
}

// Bit i is set where lane i of a < that of b.
inline std::uint32_t mask_less(I32 a, I32 b) {
    const IntQuad first = {1, 2, 4, 8};
    const I32 lanes_less = less(a, b);
    IntQuad bits = {};
    for (int k = 0; k < 4; ++k) bits |= lanes_less.q[k] & (first << (4 * k));
    return static_cast<std::uint32_t>((bits[0] | bits[1]) | (bits[2] | bits[3]));
}

// Write the lanes of the mask side by side. Other bodies write up to sixteen places.
inline void compress(std::uint32_t* p, I32 x, std::uint32_t mask) {
    for (; mask != 0; mask &= mask - 1) {
        const int lane = __builtin_ctz(mask);
        *p++ = static_cast<std::uint32_t>(x.q[lane / 4][lane % 4]);
    }
}

}  // namespace gradcomp::GRADCOMP_BODY
