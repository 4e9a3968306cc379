// What selections need beyond simd_avx2.hpp.
#pragma once

#include "simd.hpp"

namespace gradcomp::GRADCOMP_BODY {

inline I32 lane_numbers() {
    const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return {low, _mm256_add_epi32(low, _mm256_set1_epi32(8))};
}

// Bit i is set where lane i of a < that of b.
inline std::uint32_t mask_less(I32 a, I32 b) {
    const I32 smaller_lanes = less(a, b);
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(smaller_lanes.low))) |
           static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(smaller_lanes.high))) << 8;
}

// Byte j of entry m: the number of the j-th lane whose bit is set in m.
struct LaneOrders {
    std::uint64_t order[256];

    constexpr LaneOrders() : order() {
        for (int mask = 0; mask < 256; ++mask) {
            int count = 0;
            for (int lane = 0; lane < 8; ++lane) {
                if (mask >> lane & 1) order[mask] |= static_cast<std::uint64_t>(lane) << (8 * count++);
            }
        }
    }
};
inline constexpr LaneOrders lane_orders;

inline void compress_half(std::uint32_t* p, __m256i x, std::uint32_t mask) {
    const __m128i order = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(&lane_orders.order[mask]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm256_permutevar8x32_epi32(x, _mm256_cvtepu8_epi32(order)));
}

// Write the lanes of the mask side by side. Up to sixteen places are written: what comes after is
// unspecified.
inline void compress(std::uint32_t* p, I32 x, std::uint32_t mask) {
    if (mask == 0) return;
    compress_half(p, x.low, mask & 0xFF);
    compress_half(p + __builtin_popcount(mask & 0xFF), x.high, mask >> 8);
}

}  // namespace gradcomp::GRADCOMP_BODY
