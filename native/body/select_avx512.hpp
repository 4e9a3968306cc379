// What selections need beyond simd_avx512.hpp.
#pragma once

#include "simd.hpp"

namespace gradcomp::GRADCOMP_BODY {

inline I32 lane_numbers() {
    return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}

// Bit i is set where lane i of a < that of b.
inline std::uint32_t mask_less(I32 a, I32 b) {
    return _mm512_cmplt_epi32_mask(a.v, b.v);
}

// Write the lanes of the mask side by side. All sixteen places are written: what comes after is unspecified.
inline void compress(std::uint32_t* p, I32 x, std::uint32_t mask) {
    // Compressing to memory is slow on some processors.
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), x.v));
}

}  // namespace gradcomp::GRADCOMP_BODY
